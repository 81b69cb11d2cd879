//! Attention as one op: the op of opset 23, and products and softmax as exporters write them.

use super::*;
use shardwright_graph::{DType, Op, ops};
use shardwright_runtime::{HostTensor, Serial};

const S: i64 = 6;

fn ints_attribute(name: &str, ints: &[i64]) -> Attribute {
    Attribute { name: name.into(), ints: ints.to_vec(), kind: 7, ..Attribute::default() }
}

fn with(mut node: Node, attributes: impl IntoIterator<Item = Attribute>) -> Node {
    node.attribute.extend(attributes);
    node
}

fn number(name: &str, value: f32) -> Tensor {
    Tensor { name: name.into(), data_type: 1, float_data: vec![value], ..Tensor::default() }
}

/// `x [2, S, 8]` projected to queries, keys and values of the given widths, and `nodes` behind them.
fn projected(widths: [i64; 3], nodes: Vec<Node>, stored: Vec<Tensor>) -> Model {
    let mut all: Vec<Node> = ["q", "k", "v"]
        .map(|name| node("MatMul", &["x", &format!("w{name}")], &[name]))
        .into_iter()
        .chain(nodes)
        .collect();
    all.push(node("MatMul", &["context", "wo"], &["y"]));
    let mut weights: Vec<Tensor> =
        ["wq", "wk", "wv"].iter().zip(widths).map(|(name, width)| weight(name, &[8, width])).collect();
    weights.push(weight("wo", &[widths[0], 3]));
    let mut model = model(all, weights.into_iter().chain(stored).collect(), "y");
    let graph = model.graph.as_mut().unwrap();
    graph.input = vec![info("x", 1, &[2, S, 8]), info("mask", 1, &[2, 1, 1, S])];
    model.opset_import[0].version = 23;
    model
}

fn imported(model: &Model, fuse_attention: bool) -> ImportedModel {
    let options = ImportOptions { fuse_attention, ..ImportOptions::default() };
    import(&model.encode_to_vec().into(), &options, &NoExternalData).unwrap()
}

/// The losses of two steps, with the file's constants.
fn losses(imported: &ImportedModel) -> Vec<f64> {
    let mut run = Serial::new(&imported.graph, 3, &[]);
    for source in imported.sources.iter().filter(|s| !s.stored.is_missing()) {
        let ty = imported.graph.tensor(source.tensor).ty.clone();
        let literal = source.stored.fold(&NoExternalData).unwrap().unwrap();
        let value = match ty.dtype {
            DType::Bool => {
                HostTensor::from_vec(ty.shape, literal.as_ints().unwrap().iter().map(|&x| x as u8).collect())
            }
            _ => HostTensor::from_vec(
                ty.shape,
                literal.to_reals().iter().map(|&x| x as f32).collect::<Vec<f32>>(),
            ),
        };
        run.set(source.tensor, value).unwrap();
    }
    (0..2)
        .map(|_| {
            run.step().unwrap();
            run.loss().unwrap()
        })
        .collect()
}

/// Asserts that the model has one attention op, and trains as without it.
fn check(model: &Model) -> ops::Attention {
    let (fused, plain) = (imported(model, true), imported(model, false));
    assert!(plain.graph.ops.iter().all(|node| node.op.kind() != "attention"));
    let kinds: Vec<_> = fused.graph.ops.iter().map(|node| node.op.kind()).collect();
    assert!(!kinds.contains(&"softmax"), "{kinds:?}");
    for (a, b) in losses(&fused).iter().zip(losses(&plain)) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
    let found = fused.graph.ops.iter().find_map(|node| match &node.op {
        Op::Attention(op) => Some(op.clone()),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("{kinds:?}"))
}

#[test]
fn the_attention_op_is_one_op() {
    let attention = |inputs: &[&str], attributes: &[(&str, i64)]| {
        let heads = [int("q_num_heads", 4), int("kv_num_heads", 2)];
        let attributes = heads.into_iter().chain(attributes.iter().map(|&(name, i)| int(name, i)));
        projected([16, 8, 8], vec![with(node("Attention", inputs, &["context"]), attributes)], vec![])
    };
    let causal = check(&attention(&["q", "k", "v"], &[("is_causal", 1)]));
    assert_eq!((causal.after, causal.before, causal.scale.0), (Some(0), None, 0.5));
    assert!(!causal.heads_first, "operands are stored as [n, s, h, d]");
    check(&attention(&["q", "k", "v", "mask"], &[]));
}

#[test]
fn attention_that_returns_scores_or_caps_them_stays_plain() {
    let softcap = Attribute { name: "softcap".into(), f: 3.0, kind: 1, ..Attribute::default() };
    let attributes = [int("q_num_heads", 2), int("kv_num_heads", 2), softcap];
    let capped = with(node("Attention", &["q", "k", "v"], &["context"]), attributes);
    let capped = imported(&projected([8, 8, 8], vec![capped], vec![]), true);
    assert!(capped.graph.ops.iter().any(|node| node.op.kind() == "softmax"));
}

/// Products and softmax; `between` are the nodes from `scores` to `masked`.
fn decomposed(between: Vec<Node>, stored: Vec<Tensor>) -> Model {
    let split = |name: &str| node("Reshape", &[name, "heads"], &[&format!("{name}h")]);
    let turned = |from: &str, to: &str, perm: &[i64]| {
        with(node("Transpose", &[from], &[to]), [ints_attribute("perm", perm)])
    };
    let mut nodes = vec![split("q"), split("k"), split("v")];
    nodes.extend([turned("qh", "qt", &[0, 2, 1, 3]), turned("kh", "kt", &[0, 2, 3, 1])]);
    nodes.extend([turned("vh", "vt", &[0, 2, 1, 3]), node("MatMul", &["qt", "kt"], &["scores"])]);
    nodes.extend(between);
    nodes.push(with(node("Softmax", &["masked"], &["weights"]), [int("axis", -1)]));
    nodes.push(node("MatMul", &["weights", "vt"], &["mixed"]));
    nodes.extend([turned("mixed", "back", &[0, 2, 1, 3]), node("Reshape", &["back", "width"], &["context"])]);
    let mut all = vec![ints("heads", &[0, 0, 2, 4]), ints("width", &[0, 0, 8])];
    all.extend(stored);
    projected([8, 8, 8], nodes, all)
}

#[test]
fn products_and_softmax_are_recognised_and_reported() {
    let scaled = decomposed(vec![node("Div", &["scores", "root"], &["masked"])], vec![number("root", 2.0)]);
    assert_eq!(check(&scaled).scale.0, 0.5);
    let notes = imported(&scaled, true).notes.join("\n");
    assert!(notes.contains("`node_mixed`") && notes.contains("--plain-attention"), "{notes}");
    assert!(!imported(&scaled, false).notes.join("\n").contains("attention"));
    let given = decomposed(
        vec![node("Mul", &["scores", "root"], &["scaled"]), node("Add", &["scaled", "mask"], &["masked"])],
        vec![number("root", 0.5)],
    );
    assert_eq!((check(&given).scale.0, check(&given).after), (0.5, None));
}

#[test]
fn stored_causal_masks_are_recognised() {
    let hidden = |i: i64| if i % S > i / S { f32::MIN } else { 0.0 };
    let float_data: Vec<f32> = (0..S * S).map(hidden).collect();
    let mask = Tensor { float_data, ..weight("causal", &[1, 1, S, S]) };
    let added = decomposed(vec![node("Add", &["scores", "causal"], &["masked"])], vec![mask]);
    let op = check(&added);
    assert_eq!((op.after, op.diagonal), (Some(0), 0));
    let visible = (0..S * S).map(|i| i32::from(i % S <= i / S)).collect();
    let dims = vec![1, 1, S, S];
    let visible =
        Tensor { name: "visible".into(), dims, data_type: 9, int32_data: visible, ..Tensor::default() };
    let chosen = node("Where", &["visible", "scores", "least"], &["masked"]);
    let chosen = decomposed(vec![chosen], vec![visible, number("least", f32::MIN)]);
    assert_eq!(check(&chosen).after, Some(0));
}
