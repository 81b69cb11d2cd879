//! Tests of the importer on small models built here; `tests/onnx_files.rs` tests real exports.

use super::{
    proto::{
        Attribute, Dimension, Function, Graph, Model, Node, OperatorSet, Shape, StringEntry, Tensor,
        TensorType, Type, ValueInfo,
    },
    *,
};
mod conv_transpose;
mod hostile;
mod rebatch;

use prost::Message;
use shardwright_graph::{
    Phase, Role,
    ops::{Unary, UnaryFn},
};

mod attention;

fn info(name: &str, elements: i32, dims: &[i64]) -> ValueInfo {
    let dim = dims.iter().map(|&d| Dimension { value: Some(d), param: None }).collect();
    let tensor = TensorType { elem_type: elements, shape: Some(Shape { dim }) };
    ValueInfo { name: name.into(), r#type: Some(Type { tensor: Some(tensor) }) }
}

fn weight(name: &str, dims: &[i64]) -> Tensor {
    Tensor { name: name.into(), dims: dims.to_vec(), data_type: 1, ..Tensor::default() }
}

fn ints(name: &str, values: &[i64]) -> Tensor {
    let dims = vec![values.len() as i64];
    Tensor { name: name.into(), dims, data_type: 7, int64_data: values.to_vec(), ..Tensor::default() }
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> Node {
    Node {
        op_type: op.into(),
        name: format!("node_{}", outputs[0]),
        input: inputs.iter().map(|s| (*s).into()).collect(),
        output: outputs.iter().map(|s| (*s).into()).collect(),
        ..Node::default()
    }
}

fn int(name: &str, i: i64) -> Attribute {
    Attribute { name: name.into(), i, kind: 2, ..Attribute::default() }
}

/// `x [4, 6]` as the input of `nodes`.
fn model(nodes: Vec<Node>, stored: Vec<Tensor>, output: &str) -> Model {
    let graph = Graph {
        name: "test".into(),
        node: nodes,
        initializer: stored,
        input: vec![info("x", 1, &[4, 6])],
        output: vec![ValueInfo { name: output.into(), r#type: None }],
        ..Graph::default()
    };
    let opset_import = vec![OperatorSet { domain: String::new(), version: 20 }];
    Model { ir_version: Some(10), graph: Some(graph), opset_import, ..Model::default() }
}

fn linear() -> Model {
    model(vec![node("MatMul", &["x", "w"], &["y"])], vec![weight("w", &[6, 3])], "y")
}

fn run(model: &Model) -> Result<ImportedModel, OnnxError> {
    import(&model.encode_to_vec().into(), &ImportOptions::default(), &NoExternalData)
}

fn error(model: &Model) -> String {
    run(model).err().map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn a_linear_layer_becomes_a_training_step_that_keeps_its_names() {
    let imported = run(&linear()).unwrap();
    let graph = &imported.graph;
    assert_eq!(shardwright_graph::verify::verify(graph), Ok(()));
    assert_eq!(graph.ops[0].name, "node_y");
    assert_eq!(graph.parameter_count(), 18);
    let parameters: Vec<_> = graph.parameters().map(|t| graph.tensor(t).name.clone()).collect();
    assert_eq!(parameters, ["w"]);
    assert!(graph.ops.iter().any(|n| n.phase == Phase::Update));
    assert!(imported.notes[0].contains("lacks the contents of `w`"), "{:?}", imported.notes);
}

#[test]
fn inference_is_the_model_alone() {
    let options = ImportOptions { training: false, ..ImportOptions::default() };
    let imported = import(&linear().encode_to_vec().into(), &options, &NoExternalData).unwrap();
    assert_eq!(imported.graph.ops.len(), 1);
    assert_eq!(imported.outputs[0].0, "y");
}

#[test]
fn every_loss_trains_and_unknown_ones_are_named() {
    for loss in ["cross-entropy", "mse", "output"] {
        let options = ImportOptions { loss: loss.parse().unwrap(), ..ImportOptions::default() };
        let imported = import(&linear().encode_to_vec().into(), &options, &NoExternalData).unwrap();
        assert_eq!(imported.graph.gradients.len(), 1, "{loss}");
    }
    assert!("hinge".parse::<Loss>().unwrap_err().contains("mse"));
}

#[test]
fn a_fixed_batch_can_be_changed() {
    let mut reshape = node("Reshape", &["y", "shape"], &["z"]);
    reshape.attribute.push(int("allowzero", 1));
    let nodes = vec![node("MatMul", &["x", "w"], &["y"]), reshape];
    let model = model(nodes, vec![weight("w", &[6, 8]), ints("shape", &[4, 2, 4])], "z");
    let options = ImportOptions { batch: Some(32), ..ImportOptions::default() };
    let imported = import(&model.encode_to_vec().into(), &options, &NoExternalData).unwrap();
    let labels = imported.graph.sources(Role::Input).map(|t| imported.graph.tensor(t).ty.to_string());
    assert_eq!(labels.collect::<Vec<_>>(), ["f32[32,6]", "i32[32,2]"]);
}

#[test]
fn open_dimensions_are_all_listed_until_they_are_given() {
    let mut model = linear();
    let graph = model.graph.as_mut().unwrap();
    let tensor = graph.input[0].r#type.as_mut().unwrap().tensor.as_mut().unwrap();
    tensor.shape.as_mut().unwrap().dim[0] = Dimension { value: None, param: Some("samples".into()) };
    let text = error(&model);
    assert!(text.contains("`samples` (dimension 0 of input `x`)") && text.contains("--dim"), "{text}");
    let bytes: Bytes = model.encode_to_vec().into();
    for options in [
        ImportOptions { batch: Some(8), ..ImportOptions::default() },
        ImportOptions { dims: vec![("samples".into(), 8)], ..ImportOptions::default() },
    ] {
        let imported = import(&bytes, &options, &NoExternalData).unwrap();
        assert_eq!(imported.graph.tensor(imported.inputs[0].1).ty.to_string(), "f32[8,6]");
    }
    let options =
        ImportOptions { batch: Some(8), dims: vec![("rows".into(), 1)], ..ImportOptions::default() };
    let text = import(&bytes, &options, &NoExternalData).err().unwrap().to_string();
    assert!(text.contains("`rows`") && text.contains("samples"), "{text}");
}

#[test]
fn all_unsupported_ops_are_listed_at_once_with_their_nodes() {
    let nodes = vec![
        node("Frobnicate", &["x"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("Frobnicate", &["b"], &["c"]),
        node("Defenestrate", &["c"], &["y"]),
    ];
    let text = error(&model(nodes, vec![], "y"));
    assert!(text.contains("Frobnicate x2: node_a, node_c"), "{text}");
    assert!(text.contains("Defenestrate x1: node_y"), "{text}");
    assert!(!text.contains("Relu"), "{text}");
}

#[test]
fn shape_arithmetic_is_folded_away() {
    let mut gather = node("Gather", &["s", "zero"], &["n"]);
    gather.attribute.push(int("axis", 0));
    let mut concat = node("Concat", &["n1", "rest"], &["target"]);
    concat.attribute.push(int("axis", 0));
    let zero = Tensor { name: "zero".into(), data_type: 7, int64_data: vec![0], ..Tensor::default() };
    let nodes = vec![
        node("MatMul", &["x", "w"], &["y"]),
        node("Shape", &["y"], &["s"]),
        gather,
        node("Unsqueeze", &["n", "axes"], &["n1"]),
        concat,
        node("Reshape", &["y", "target"], &["z"]),
    ];
    let stored = vec![weight("w", &[6, 8]), zero, ints("axes", &[0]), ints("rest", &[-1, 4])];
    let imported = run(&model(nodes, stored, "z")).unwrap();
    let kinds: Vec<_> =
        imported.graph.ops.iter().filter(|n| n.phase == Phase::Forward).map(|n| n.op.kind()).collect();
    // The weight has both factors of its columns as dimensions, so no reshape is left.
    assert_eq!(kinds, ["contract", "reduce", "sum_exp", "cross_entropy", "reduce"]);
}

#[test]
fn decomposed_activations_and_guards_are_recognised() {
    let scalar = |name: &str, x: f32| Tensor {
        name: name.into(),
        data_type: 1,
        float_data: vec![x],
        ..Tensor::default()
    };
    let nodes = vec![
        node("Div", &["x", "root2"], &["a"]),
        node("Erf", &["a"], &["b"]),
        node("Add", &["one", "b"], &["c"]),
        node("Mul", &["x", "c"], &["d"]),
        node("Mul", &["d", "half"], &["gelu"]),
        node("Softmax", &["gelu"], &["s"]),
        node("IsNaN", &["s"], &["nan"]),
        node("Where", &["nan", "zero", "s"], &["t"]),
        node("MatMul", &["t", "w"], &["y"]),
    ];
    let stored = vec![
        scalar("root2", std::f32::consts::SQRT_2),
        scalar("one", 1.0),
        scalar("half", 0.5),
        scalar("zero", 0.0),
        weight("w", &[6, 3]),
    ];
    let options = ImportOptions { training: false, ..ImportOptions::default() };
    let bytes = model(nodes, stored, "y").encode_to_vec().into();
    let imported = import(&bytes, &options, &NoExternalData).unwrap();
    let text: Vec<_> = imported.graph.ops.iter().map(|n| format!("{} {}", n.name, n.op.kind())).collect();
    assert_eq!(text, ["node_gelu unary", "node_t softmax", "node_y contract"]);
    assert_eq!(
        imported.graph.ops[0].op,
        Unary { f: UnaryFn::Gelu }.into(),
        "the exact one, not its approximation"
    );
}

#[test]
fn functions_are_inlined_and_those_that_call_themselves_refused() {
    let mut call = node("Twice", &["x"], &["h"]);
    call.domain = "mine".into();
    let function = Function {
        name: "Twice".into(),
        domain: "mine".into(),
        input: vec!["a".into()],
        output: vec!["b".into()],
        node: vec![node("Relu", &["a"], &["t"]), node("Tanh", &["t"], &["b"])],
        ..Function::default()
    };
    let mut model = model(vec![call, node("MatMul", &["h", "w"], &["y"])], vec![weight("w", &[6, 3])], "y");
    model.functions = vec![function.clone()];
    let imported = run(&model).unwrap();
    assert_eq!(imported.graph.ops[0].name, "node_h/node_t");
    assert_eq!(imported.graph.ops[1].name, "node_h/node_b");

    let mut itself = node("Twice", &["a"], &["b"]);
    itself.domain = "mine".into();
    model.functions = vec![Function { node: vec![itself], ..function }];
    assert!(error(&model).contains("calls itself"));
}

#[test]
fn branches_with_a_known_condition_are_taken() {
    let branch = |op: &str| Graph {
        node: vec![node(op, &["x"], &["inner"])],
        output: vec![info("inner", 1, &[4, 6])],
        ..Graph::default()
    };
    let graph = |name: &str, op: &str| Attribute {
        name: name.into(),
        g: Some(Box::new(branch(op))),
        kind: 5,
        ..Attribute::default()
    };
    let mut choice = node("If", &["yes"], &["h"]);
    choice.attribute = vec![graph("then_branch", "Relu"), graph("else_branch", "Frobnicate")];
    let yes = Tensor { name: "yes".into(), data_type: 9, int32_data: vec![1], ..Tensor::default() };
    let nodes = vec![choice.clone(), node("MatMul", &["h", "w"], &["y"])];
    let imported = run(&model(nodes.clone(), vec![yes, weight("w", &[6, 3])], "y")).unwrap();
    assert_eq!(imported.graph.ops[0].name, "node_inner");
    let mut dynamic = model(nodes, vec![weight("w", &[6, 3])], "y");
    if let Some(graph) = dynamic.graph.as_mut() {
        graph.input.push(info("yes", 9, &[]));
    }
    assert!(
        error(&dynamic).contains("If x1: node_h (a condition that depends on the data)"),
        "{}",
        error(&dynamic)
    );
}

#[test]
fn equal_biases_that_an_exporter_merged_are_separate_weights() {
    let nodes = vec![
        node("MatMul", &["x", "w"], &["a"]),
        node("Add", &["a", "b"], &["c"]),
        node("MatMul", &["c", "v"], &["d"]),
        node("Add", &["d", "b"], &["y"]),
    ];
    let stored = vec![weight("w", &[6, 6]), weight("v", &[6, 6]), weight("b", &[6])];
    let graph = run(&model(nodes, stored, "y")).unwrap().graph;
    assert_eq!(graph.parameter_count(), 6 * 6 * 2 + 6 * 2);
}

// Hostile files: an error that states the problem, never a panic.

#[test]
fn every_truncation_of_a_file_is_an_error_or_a_smaller_model() {
    let bytes = Bytes::from(linear().encode_to_vec());
    for end in 0..bytes.len() {
        let _ = import(&bytes.slice(..end), &ImportOptions::default(), &NoExternalData);
    }
}

#[test]
fn every_changed_byte_of_a_file_is_survived() {
    let nodes = vec![node("MatMul", &["x", "w"], &["y"]), node("Reshape", &["y", "shape"], &["z"])];
    let bytes = model(nodes, vec![weight("w", &[6, 8]), ints("shape", &[4, 2, 4])], "z").encode_to_vec();
    for i in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[i] = value;
            let _ = import(&changed.into(), &ImportOptions::default(), &NoExternalData);
        }
    }
}

#[test]
fn cycles_and_values_out_of_order_are_named() {
    let nodes = vec![node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"])];
    let text = error(&model(nodes, vec![], "b"));
    assert!(text.contains("node `node_a` (Add)") && text.contains("cycle"), "{text}");
    let text = error(&model(vec![node("Relu", &["nowhere"], &["y"])], vec![], "y"));
    assert!(text.contains("`nowhere`, which no node computes"), "{text}");
}

#[test]
fn names_that_are_there_twice_are_refused() {
    let twice = vec![node("Relu", &["x"], &["y"]), node("Tanh", &["x"], &["y"])];
    assert!(error(&model(twice, vec![], "y")).contains("value `y` is defined twice"));
    let stored = vec![weight("w", &[6, 3]), weight("w", &[6, 3])];
    let text = error(&model(vec![node("MatMul", &["x", "w"], &["y"])], stored, "y"));
    assert!(text.contains("initializer `w` is defined twice"), "{text}");
}

#[test]
fn absurd_shapes_are_refused_without_allocating_them() {
    for dims in [&[6, -3][..], &[6, i64::MAX], &[i64::MAX, i64::MAX], &[6, 1 << 47]] {
        let text = error(&model(vec![node("MatMul", &["x", "w"], &["y"])], vec![weight("w", dims)], "y"));
        assert!(!text.is_empty(), "{dims:?}");
    }
    let mut fill = node("ConstantOfShape", &["shape"], &["y"]);
    fill.attribute.clear();
    for shape in [&[1 << 40, 1 << 40][..], &[-1], &[i64::MAX]] {
        let text = error(&model(vec![fill.clone()], vec![ints("shape", shape)], "y"));
        assert!(!text.is_empty(), "{shape:?}");
    }
    // Folding is bounded in total: ten thousand ranges of four million elements are refused.
    let limit = Tensor { name: "n".into(), data_type: 7, int64_data: vec![4_000_000], ..Tensor::default() };
    let scalar = |name: &str, x: i64| Tensor {
        name: name.into(),
        data_type: 7,
        int64_data: vec![x],
        ..Tensor::default()
    };
    let mut nodes: Vec<Node> =
        (0..100).map(|i| node("Range", &["zero", "n", "one"], &[&format!("r{i}")])).collect();
    let names: Vec<String> = (0..100).map(|i| format!("r{i}")).collect();
    let mut all = node("Concat", &names.iter().map(String::as_str).collect::<Vec<_>>(), &["y"]);
    all.attribute.push(int("axis", 0));
    nodes.push(all);
    let text = error(&model(nodes, vec![limit, scalar("zero", 0), scalar("one", 1)], "y"));
    assert!(text.contains("constants exceed 512 MiB"), "{text}");
}

#[test]
fn external_data_outside_the_folder_is_refused() {
    for location in ["/etc/passwd", "../secret", "a/../../secret", "..\\secret"] {
        let mut stored = weight("w", &[6, 3]);
        stored.data_location = 1;
        stored.external_data = vec![StringEntry { key: "location".into(), value: location.into() }];
        let text = error(&model(vec![node("MatMul", &["x", "w"], &["y"])], vec![stored], "y"));
        assert!(text.contains("leads out of the model's folder"), "{location}: {text}");
    }
}

#[test]
fn protobuf_bombs_are_refused_before_they_are_decoded() {
    // Two bytes per node: ten million empty nodes in 20 MB would take gigabytes.
    let mut graph = Vec::new();
    for _ in 0..10_000_000 {
        graph.extend([0x0a, 0x00]);
    }
    let mut bytes = vec![0x08, 0x0a, 0x3a];
    prost::encoding::encode_varint(graph.len() as u64, &mut bytes);
    bytes.extend(graph);
    let text = import(&bytes.into(), &ImportOptions::default(), &NoExternalData).err().unwrap().to_string();
    assert!(text.contains("messages"), "{text}");
    // Subgraphs nested two hundred levels deep.
    let mut inner = Graph::default();
    for _ in 0..200 {
        let mut holder = node("If", &["x"], &["y"]);
        let g = Some(Box::new(inner));
        holder.attribute.push(Attribute { name: "then_branch".into(), g, kind: 5, ..Attribute::default() });
        inner = Graph { node: vec![holder], ..Graph::default() };
    }
    let deep = Model { ir_version: Some(10), graph: Some(inner), ..Model::default() };
    assert!(error(&deep).contains("nest"), "{}", error(&deep));
}

#[test]
fn text_that_is_no_model_is_said_to_be_none() {
    for bytes in [&b""[..], b"hello", b"{\"json\": true}", &[0xff; 64]] {
        let bytes = Bytes::copy_from_slice(bytes);
        let error = import(&bytes, &ImportOptions::default(), &NoExternalData).err().unwrap();
        assert!(matches!(error, OnnxError::Unreadable(_)), "{error}");
    }
}

/// A recurrent layer of four units over four samples of six channels.
fn recurrent(op: &str, gates: i64, steps: i64) -> Model {
    let mut layer = node(op, &["x", "w", "r"], &["y"]);
    layer.attribute.push(int("hidden_size", 4));
    let stored = vec![weight("w", &[1, gates * 4, 6]), weight("r", &[1, gates * 4, 4])];
    let mut model = model(vec![layer], stored, "y");
    if let Some(graph) = model.graph.as_mut() {
        graph.input = vec![info("x", 1, &[steps, 4, 6])];
    }
    model
}

#[test]
fn an_lstm_is_the_graphs_own_op_with_its_gates_in_that_ops_order() {
    let imported = run(&recurrent("LSTM", 4, 5)).unwrap();
    let kinds = imported.graph.ops.iter().filter(|n| n.phase == Phase::Forward).map(|n| n.op.kind());
    assert_eq!(kinds.filter(|&kind| kind == "lstm").count(), 1);
    let weight = imported.sources.iter().find(|s| s.stored.name == "w").unwrap();
    assert_eq!(weight.selections[0], AxisSelection::range(0, 0..1));
    assert_eq!(weight.selections[1].ranges, [0..4, 8..12, 12..16, 4..8], "i, f, c, o of i, o, f, c");
    let numbers = Numbers::Ints((0..96).collect());
    let whole =
        Literal { dtype: shardwright_graph::DType::I64, shape: vec![1, 16, 6], numbers, assumed: false };
    let cut = weight.selections.iter().fold(whole, |left, selection| left.select(selection));
    assert_eq!(cut.as_ints().unwrap()[24..26], [48, 49], "the forget gate comes second");
}

#[test]
fn other_recurrent_layers_are_unrolled_unless_they_are_endless() {
    for (op, gates) in [("GRU", 3), ("RNN", 1)] {
        let graph = run(&recurrent(op, gates, 5)).unwrap().graph;
        assert_eq!(shardwright_graph::verify::verify(&graph), Ok(()));
        assert!(graph.ops.iter().any(|n| n.name.starts_with("node_y.4")), "{op}: the last step has a name");
        let text = error(&recurrent(op, gates, 300));
        assert!(text.contains(op) && text.contains("300 steps; at most 256 are unrolled"), "{text}");
        let mut flat = recurrent(op, gates, 5);
        flat.graph.as_mut().unwrap().initializer[1].dims = vec![1, gates * 4];
        assert!(error(&flat).contains(&format!("({op}): weights")), "{}", error(&flat));
    }
}

#[test]
fn what_repeats_for_the_files_batch_follows_another_and_masks_are_no_weights() {
    let row = [0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0, -1e9];
    let mask = Tensor { float_data: row.repeat(4), ..weight("mask", &[4, 6]) };
    let token = Tensor { float_data: [0.5, -2.0].repeat(4), ..weight("token", &[4, 2]) };
    let mut join = node("Concat", &["token", "y"], &["z"]);
    join.attribute.push(int("axis", 1));
    let nodes = vec![
        node("Add", &["x", "mask"], &["m"]),
        node("Softmax", &["m"], &["s"]),
        node("MatMul", &["s", "w"], &["y"]),
        join,
    ];
    let model = model(nodes, vec![mask, token, weight("w", &[6, 3])], "z");
    let options = ImportOptions { batch: Some(32), ..ImportOptions::default() };
    let graph = import(&model.encode_to_vec().into(), &options, &NoExternalData).unwrap().graph;
    assert_eq!(shardwright_graph::verify::verify(&graph), Ok(()));
    let shown = |t| format!("{} {}", graph.tensor(t).name, graph.tensor(t).ty);
    assert_eq!(graph.parameters().map(shown).collect::<Vec<_>>(), ["w f32[6,3]", "token f32[1,2]"]);
    assert_eq!(graph.sources(Role::Constant).map(shown).collect::<Vec<_>>(), ["mask f32[6]"]);
}

#[test]
fn einsums_that_say_nothing_are_refused() {
    let einsum = |equation: &'static str| {
        let mut product = node("Einsum", &["x", "w"], &["y"]);
        let s = equation.as_bytes().into();
        product.attribute.push(Attribute { name: "equation".into(), s, kind: 3, ..Attribute::default() });
        model(vec![product], vec![weight("w", &[6, 3])], "y")
    };
    assert_eq!(error(&einsum("nc,co->no")), "");
    for wrong in
        ["nc,c!->n!", "nc,co->nn", "nc,co->nz", "nc,c->n", "nc->n", "\u{e9}c,co->no", "n\u{0}c,co->no"]
    {
        assert!(error(&einsum(wrong)).contains("Einsum"), "{wrong}");
    }
}
