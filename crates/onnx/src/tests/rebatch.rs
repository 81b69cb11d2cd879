//! Models exported at one batch, with the batch in constants, planned at another.

use super::*;

fn at_batch(model: &Model, batch: u64) -> Result<ImportedModel, OnnxError> {
    let options = ImportOptions { batch: Some(batch), training: false, ..ImportOptions::default() };
    import(&model.encode_to_vec().into(), &options, &NoExternalData)
}

fn with_axis(mut node: Node, axis: i64) -> Node {
    node.attribute.push(int("axis", axis));
    node
}

/// As an image transformer of four patches is exported at batch 16: a class token and position embeddings, whose expansion
/// to the batch was folded, heads that are merged with the batch, and sizes as constants.
fn transformer(token: Tensor, positions: Tensor) -> Model {
    let nodes = vec![
        with_axis(node("Concat", &["token", "x"], &["all"]), 1),
        node("Add", &["all", "positions"], &["embedded"]),
        node("MatMul", &["embedded", "w"], &["queries"]),
        node("Reshape", &["queries", "heads"], &["split"]),
        node("Relu", &["split"], &["active"]),
        node("Reshape", &["active", "joined"], &["merged"]),
        with_axis(node("Gather", &["merged", "first"], &["class"]), 1),
        node("MatMul", &["class", "head"], &["y"]),
    ];
    let first = Tensor { dims: vec![], ..ints("first", &[0]) };
    let stored = vec![
        token,
        positions,
        weight("w", &[6, 6]),
        weight("head", &[6, 3]),
        ints("heads", &[80, 2, 3]),
        ints("joined", &[16, 5, 6]),
        first,
    ];
    let mut model = model(nodes, stored, "y");
    model.graph.as_mut().unwrap().input = vec![info("x", 1, &[16, 4, 6])];
    model
}

fn repeated(name: &str, dims: [i64; 3]) -> Tensor {
    let row: Vec<f32> = (0..dims[1] * dims[2]).map(|i| 0.1 * i as f32).collect();
    Tensor { float_data: row.repeat(dims[0] as usize), ..weight(name, &dims) }
}

#[test]
fn an_image_transformer_follows_every_batch() {
    let with = transformer(repeated("token", [16, 1, 6]), repeated("positions", [16, 5, 6]));
    // The weights of the file may be missing.
    let without = transformer(weight("token", &[16, 1, 6]), weight("positions", &[16, 5, 6]));
    for (model, batch) in
        [&with, &without].into_iter().flat_map(|m| [1, 2, 8, 16, 17, 32, 160].map(|b| (m, b)))
    {
        let imported = at_batch(model, batch).unwrap_or_else(|e| panic!("batch {batch}: {e}"));
        assert_eq!(shardwright_graph::verify::verify(&imported.graph), Ok(()));
        let (_, output) = imported.outputs.iter().find(|(name, _)| name == "y").unwrap();
        assert_eq!(imported.graph.tensor(*output).ty.shape[..], [batch, 3], "batch {batch}");
        let rows: Vec<_> = imported.graph.parameters().map(|t| imported.graph.tensor(t)).collect();
        let token = rows.iter().find(|t| t.name == "token").unwrap();
        assert_eq!(token.ty.shape.elements(), if batch == 16 { 96 } else { 6 }, "batch {batch}");
    }
    assert!(at_batch(&without, 8).unwrap().notes.iter().any(|n| n.contains("`token` [16, 1, 6]")));
}

#[test]
fn a_constant_that_differs_by_sample_is_named_with_a_remedy() {
    let numbers: Vec<f32> = (0..96).map(|i| i as f32).collect();
    let token = Tensor { float_data: numbers, ..weight("token", &[16, 1, 6]) };
    let model = transformer(token, repeated("positions", [16, 5, 6]));
    assert!(at_batch(&model, 16).is_ok());
    for batch in [8, 32] {
        let text = at_batch(&model, batch).err().unwrap().to_string();
        for expected in ["(Concat)", "constant `token` of shape [16, 1, 6]", "dynamic batch", "--batch 16"] {
            assert!(text.contains(expected), "batch {batch}: {text}");
        }
    }
    // A target shape that no replacement fits.
    let mut model = transformer(repeated("token", [16, 1, 6]), repeated("positions", [16, 5, 6]));
    model.graph.as_mut().unwrap().initializer[4] = ints("heads", &[5, 32, 3]);
    assert_eq!(at_batch(&model, 8).err().map(|e| e.to_string()), None, "the second size holds the batch");
    model.graph.as_mut().unwrap().initializer[4] = ints("heads", &[32, 7, 3]);
    let text = at_batch(&model, 8).err().unwrap().to_string();
    assert!(text.contains("constant `heads` [32, 7, 3]"), "{text}");
}

#[test]
fn tiles_slices_and_position_ids_follow_the_batch() {
    let nodes = vec![
        node("Tile", &["token", "repeats"], &["tokens"]),
        with_axis(node("Gather", &["table", "ids"], &["positions"]), 0),
        node("Add", &["x", "positions"], &["embedded"]),
        node("Slice", &["embedded", "starts", "ends"], &["part"]),
        with_axis(node("Concat", &["tokens", "part"], &["all"]), 1),
        node("MatMul", &["all", "w"], &["y"]),
    ];
    let ids = Tensor { dims: vec![16, 4], int64_data: [0, 1, 2, 3].repeat(16), ..ints("ids", &[]) };
    let stored = vec![
        weight("token", &[1, 1, 6]),
        ints("repeats", &[16, 1, 1]),
        weight("table", &[4, 6]),
        ids,
        ints("starts", &[0]),
        ints("ends", &[16]),
        weight("w", &[6, 3]),
    ];
    let mut model = model(nodes, stored, "y");
    model.graph.as_mut().unwrap().input = vec![info("x", 1, &[16, 4, 6])];
    for batch in [1, 4, 16, 32] {
        let imported = at_batch(&model, batch).unwrap_or_else(|e| panic!("batch {batch}: {e}"));
        let (_, output) = imported.outputs.iter().find(|(name, _)| name == "y").unwrap();
        assert_eq!(imported.graph.tensor(*output).ty.shape[..], [batch, 5, 3], "batch {batch}");
    }
}
