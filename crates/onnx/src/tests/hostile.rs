//! Small files that ask for much: memory, time, recursion, a terminal's attention. Each is refused, or takes little.

use super::*;

fn many(name: &str, ints: &[i64]) -> Attribute {
    Attribute { name: name.into(), ints: ints.to_vec(), kind: 7, ..Attribute::default() }
}

fn with_input(mut model: Model, dims: &[i64]) -> Model {
    model.graph.as_mut().unwrap().input = vec![info("x", 1, dims)];
    model
}

#[test]
fn average_pooling_allocates_nothing_by_its_declared_output() {
    let pool = |size: i64, kernel: i64, pads: [i64; 2]| {
        let mut pool = node("AveragePool", &["x"], &["y"]);
        pool.attribute = vec![many("kernel_shape", &[kernel]), many("pads", &pads)];
        with_input(model(vec![pool], vec![], "y"), &[1, 1, size])
    };
    // A trillion windows, and a billion positions in each of a billion windows.
    for (size, kernel, pads) in [(1 << 40, 2, [1, 0]), (1 << 31, 1 << 30, [1, 1]), (4, 2, [1 << 30, 0])] {
        let text = error(&pool(size, kernel, pads));
        assert!(text.contains("more than four million windows"), "{size} {kernel}: {text}");
    }
    // Without padding no window is at an edge, so nothing needs to be stored.
    assert_eq!(error(&pool(1 << 30, 2, [0, 0])), "");
    // Windows of a billion positions at a few places are counted in no time.
    assert_eq!(error(&pool(1 << 30, 1 << 30, [3, 3])), "");
    let imported = run(&pool(5, 3, [1, 1])).unwrap();
    let edges = imported.sources.iter().find(|s| s.stored.name == "node_y.edges").unwrap();
    assert_eq!(edges.load(&NoExternalData).unwrap().unwrap().to_reals(), [1.5, 1.0, 1.0, 1.0, 1.5]);
}

#[test]
fn statistics_of_a_batch_norm_must_fit_its_channels() {
    for wrong in 1..5 {
        let stored = (1..5)
            .map(|i| weight(["", "scale", "shift", "mean", "var"][i], &[if i == wrong { 7 } else { 6 }]));
        let norm = node("BatchNormalization", &["x", "scale", "shift", "mean", "var"], &["y"]);
        let model = model(vec![norm], stored.collect(), "y");
        for training in [true, false] {
            let options = ImportOptions { training, ..ImportOptions::default() };
            let refused = import(&model.encode_to_vec().into(), &options, &NoExternalData);
            let text = refused.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(
                text.contains("has shape [7], expected one number for each of 6 channels"),
                "{wrong}: {text}"
            );
        }
    }
}

#[test]
fn weights_enter_the_graph_only_with_as_many_elements_as_they_have() {
    // One scale for all channels would be broadcast by some frameworks; it is no weight of six elements.
    let norm = node("LayerNormalization", &["x", "scale", "shift"], &["y"]);
    let stored = vec![weight("scale", &[6]), weight("shift", &[5])];
    assert!(!error(&model(vec![norm], stored, "y")).is_empty());
}

#[test]
fn constants_made_by_ops_count_towards_the_budget() {
    // All results are read, since nodes without readers are dropped.
    let summed = |mut nodes: Vec<Node>| {
        let names: Vec<String> = nodes.iter().map(|n| n.output[0].clone()).filter(|n| n != "r").collect();
        nodes.push(node("Sum", &names.iter().map(String::as_str).collect::<Vec<_>>(), &["y"]));
        nodes
    };
    // Each matrix is 32 MiB; a few hundred of them in a file of 30 kB would take gigabytes.
    let nodes = (0..300).map(|i| node("EyeLike", &["x"], &[&format!("y{i}")])).collect();
    let text = error(&with_input(model(summed(nodes), vec![], "y"), &[2048, 2048]));
    assert!(text.contains("constants exceed 512 MiB"), "{text}");
    // Small results of large constants take time, which is bounded too.
    let mut nodes = vec![node("Range", &["zero", "n", "one"], &["r"])];
    nodes.extend((0..1000).map(|i| node("ReduceMax", &["r"], &[&format!("y{i}")])));
    let scalar = |name: &str, x: i64| Tensor { dims: vec![], ..ints(name, &[x]) };
    let stored = vec![scalar("zero", 0), scalar("n", 4_000_000), scalar("one", 1)];
    let text = error(&model(summed(nodes), stored, "y"));
    assert!(text.contains("takes too long"), "{text}");
}

#[test]
fn empty_constants_with_huge_dimensions_take_no_time() {
    let fill = |name: &str| node("ConstantOfShape", &["shape"], &[name]);
    let mut join = node("Concat", &["a", "b"], &["c"]);
    join.attribute.push(int("axis", 2));
    let mut pick = node("Gather", &["c", "ids"], &["d"]);
    pick.attribute.push(int("axis", 1));
    let mut slice = node("Slice", &["d", "starts", "ends"], &["e"]);
    slice.attribute.clear();
    let nodes = vec![fill("a"), fill("b"), join, pick, slice, node("MatMul", &["x", "w"], &["y"])];
    let stored = vec![
        ints("shape", &[1 << 40, 1 << 40, 0]),
        ints("ids", &[0, 1 << 39]),
        ints("starts", &[1 << 39]),
        ints("ends", &[1 << 40]),
        weight("w", &[6, 3]),
    ];
    assert_eq!(error(&model(nodes, stored, "y")), "");
}

#[test]
fn long_rows_are_concatenated_in_linear_time() {
    let zeros = Tensor { float_data: vec![1.0; 20_000], ..weight("zeros", &[20_000, 1]) };
    let nodes: Vec<Node> = (0..2)
        .map(|i| node("Identity", &["constant"], &[["a", "b"][i]]))
        .chain([{
            let mut join = node("Concat", &["a", "b"], &["c"]);
            join.attribute.push(int("axis", 1));
            join
        }])
        .collect();
    let mut constant = node("Constant", &[], &["constant"]);
    constant.attribute.push(Attribute {
        name: "value".into(),
        t: Some(zeros),
        kind: 4,
        ..Attribute::default()
    });
    let nodes = [vec![constant], nodes, vec![node("MatMul", &["x", "w"], &["y"])]].concat();
    assert_eq!(error(&model(nodes, vec![weight("w", &[6, 3])], "y")), "");
}

/// `f0` calls `f1` `calls` times, which calls `f2`, and so on; the last one has these nodes.
fn chain(length: usize, calls: usize, last: Vec<Node>) -> Model {
    let call = |i: usize| {
        let mut call = node(&format!("f{i}"), &["a"], &["b"]);
        call.domain = "mine".into();
        call
    };
    let function = |i: usize| Function {
        name: format!("f{i}"),
        domain: "mine".into(),
        input: vec!["a".into()],
        output: vec!["b".into()],
        node: if i + 1 == length { last.clone() } else { vec![call(i + 1); calls] },
        ..Function::default()
    };
    let first = Node { input: vec!["x".into()], output: vec!["h".into()], ..call(0) };
    let nodes = vec![first, node("MatMul", &["h", "w"], &["y"])];
    let mut model = model(nodes, vec![weight("w", &[6, 3])], "y");
    model.functions = (0..length).map(function).collect();
    model
}

#[test]
fn functions_may_call_each_other_as_deeply_as_there_are_functions() {
    for length in [60, 2000] {
        let graph = run(&chain(length, 1, vec![node("Relu", &["a"], &["b"])])).unwrap().graph;
        assert_eq!(graph.ops[0].op, Unary { f: UnaryFn::Relu }.into());
    }
    // Two functions that call each other.
    let mut back = node("f0", &["a"], &["b"]);
    back.domain = "mine".into();
    assert!(error(&chain(2, 1, vec![back])).contains("function `f0` calls itself"));
}

#[test]
fn functions_that_double_at_every_level_are_refused() {
    for last in [vec![node("Relu", &["a"], &["b"])], vec![]] {
        let text = error(&chain(60, 2, last));
        assert!(text.contains("expand to over a million nodes"), "{text}");
    }
    // Few nodes, but names that grow with every level.
    let mut long = chain(2000, 1, vec![node("Relu", &["a"], &["b"])]);
    for function in &mut long.functions {
        function.node.iter_mut().for_each(|n| n.name = "n".repeat(10_000));
    }
    let text = error(&long);
    assert!(text.contains("constants exceed"), "{text}");
}

#[test]
fn loops_in_loops_are_refused_when_they_unroll_too_far() {
    let named = |name: &str| ValueInfo { name: name.into(), r#type: None };
    let turns = Tensor { dims: vec![], ..ints("turns", &[256]) };
    let yes = Tensor { data_type: 9, int32_data: vec![1], ..weight("yes", &[]) };
    let mut body = Graph { output: vec![named("yes"), named("v0")], ..Graph::default() };
    for depth in 0..5 {
        body.input = ["i", "c", "v"].map(|name| named(&format!("{name}{depth}"))).into();
        let (state, made) = (format!("v{}", depth + 1), format!("l{depth}"));
        let mut outer = node("Loop", &["turns", "yes", if depth == 4 { "x" } else { &state }], &[&made]);
        let body_attribute =
            Attribute { name: "body".into(), g: Some(Box::new(body)), kind: 5, ..Attribute::default() };
        outer.attribute = vec![body_attribute];
        body = Graph { node: vec![outer], output: vec![named("yes"), named(&made)], ..Graph::default() };
    }
    let mut nodes = body.node;
    nodes.push(node("MatMul", &["l4", "w"], &["y"]));
    let text = error(&model(nodes, vec![turns, yes, weight("w", &[6, 3])], "y"));
    assert!(text.contains("over a million nodes"), "{text}");
}

#[test]
fn text_of_a_file_is_escaped_and_cut_in_messages() {
    let hostile = format!("\u{1b}[2J\u{202e}{}", "x".repeat(100_000));
    let calm = |text: &str| {
        assert!(!text.is_empty() && text.len() < 3000, "{} bytes", text.len());
        assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
    };
    // A name of a node, of an input, of an op, and the text of an attribute.
    let mut named = node("MatMul", &["x", "nowhere"], &["y"]);
    named.name = hostile.clone();
    calm(&error(&model(vec![named], vec![], "y")));
    calm(&error(&model(vec![node("MatMul", &["x", &hostile], &["y"])], vec![], "y")));
    calm(&error(&model(vec![node(&hostile, &["x"], &["y"])], vec![], "y")));
    let mut pad = node("Pad", &["x", "pads"], &["y"]);
    pad.attribute.push(Attribute { name: "mode".into(), s: hostile.into(), kind: 3, ..Attribute::default() });
    calm(&error(&model(vec![pad], vec![ints("pads", &[1, 1, 1, 1])], "y")));
}
