//! Layers, compared with plain loops.

use shardwright_graph::{BuildError, DType, Graph, GraphBuilder, TensorId};
use shardwright_runtime::Serial;
use shardwright_zoo::layers;

/// Builds a graph around one layer and runs it.
fn compute(build: impl FnOnce(&mut GraphBuilder) -> Result<TensorId, BuildError>) -> (Graph, Vec<f64>) {
    let mut b = GraphBuilder::new("block");
    let y = build(&mut b).unwrap();
    b.output(y);
    let graph = b.finish();
    let mut run = Serial::new(&graph, 9, &[]);
    run.evaluate().unwrap();
    let values = run.value(y).unwrap().to_f64_vec();
    (graph, values)
}

/// The interpreter's initial value of a source tensor.
fn source(graph: &Graph, name: &str) -> Vec<f64> {
    let id = graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap();
    Serial::new(graph, 9, &[]).value(id).unwrap().to_f64_vec()
}

fn assert_close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= 1e-12 * (1.0 + y.abs()), "element {i}: {x} and {y}");
    }
}

#[test]
fn rotary_embedding_turns_pairs_by_position() {
    let (samples, positions, heads, width) = (2, 5, 3, 4);
    let (graph, turned) = compute(|b| {
        let shape = [samples, positions, heads, width].map(|n| n as u64);
        let x = layers::data(b, "x", DType::F64, &shape)?;
        let tables = layers::rotary_tables(b, x, 100.0)?;
        layers::rotary(b, x, tables)
    });
    let x = source(&graph, "x");
    let mut expected = vec![0.0; x.len()];
    for row in 0..samples * positions * heads {
        let position = row / heads % positions;
        for i in 0..width / 2 {
            let angle = position as f64 * 100f64.powf(-2.0 * i as f64 / width as f64);
            let (sin, cos) = angle.sin_cos();
            let (first, second) = (row * width + i, row * width + i + width / 2);
            expected[first] = x[first] * cos - x[second] * sin;
            expected[second] = x[second] * cos + x[first] * sin;
        }
    }
    assert_close(&turned, &expected);
}

#[test]
fn grouped_queries_attend_to_the_keys_of_their_group() {
    let (tokens, width, heads, groups, size) = (3usize, 4usize, 4usize, 2usize, 2usize);
    let cfg = layers::Attention::new(heads as u64, size as u64).unbiased().causal().grouped(groups as u64);
    let (graph, y) = compute(|b| {
        let x = layers::data(b, "x", DType::F64, &[1, tokens as u64, width as u64])?;
        layers::attention(b, x, x, &cfg)
    });
    let [x, wq, wk, wv, wo] =
        ["x", "q.weight", "k.weight", "v.weight", "out.weight"].map(|n| source(&graph, n));
    // Row `t` of `x` times the columns of `w` for head `h`.
    let project = |w: &[f64], count: usize, t: usize, h: usize, d: usize| -> f64 {
        (0..width).map(|c| x[t * width + c] * w[(c * count + h) * size + d]).sum()
    };
    let mut expected = vec![0.0; tokens * width];
    for q in 0..tokens {
        for h in 0..heads {
            let group = h / (heads / groups);
            let score = |k: usize| -> f64 {
                let dot = |d| project(&wq, heads, q, h, d) * project(&wk, groups, k, group, d);
                (0..size).map(dot).sum::<f64>() / (size as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=q).map(|k| score(k).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..size {
                let seen = |k: usize| weights[k] / total * project(&wv, groups, k, group, d);
                let context: f64 = (0..=q).map(seen).sum();
                for o in 0..width {
                    expected[q * width + o] += context * wo[(h * size + d) * width + o];
                }
            }
        }
    }
    assert_close(&y, &expected);
}

#[test]
fn binary_cross_entropy_is_its_textbook_formula() {
    let (graph, loss) = compute(|b| {
        let x = layers::data(b, "x", DType::F64, &[7, 1])?;
        let labels = layers::ids(b, "labels", &[7, 1], 2)?;
        layers::bce_with_logits(b, "loss", x, labels)
    });
    let (x, y) = (source(&graph, "x"), source(&graph, "labels"));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let each = |(x, y): (&f64, &f64)| -(y * sigmoid(*x).ln() + (1.0 - y) * (1.0 - sigmoid(*x)).ln());
    let expected = x.iter().zip(&y).map(each).sum::<f64>() / 7.0;
    assert_close(&loss, &[expected]);
}

#[test]
fn mse_is_the_mean_square_of_the_difference() {
    let (graph, loss) = compute(|b| {
        let x = layers::data(b, "x", DType::F64, &[2, 3])?;
        let target = layers::data(b, "target", DType::F64, &[2, 3])?;
        layers::mse(b, "loss", x, target)
    });
    let (x, y) = (source(&graph, "x"), source(&graph, "target"));
    let expected = x.iter().zip(&y).map(|(a, b)| (a - b) * (a - b)).sum::<f64>() / 6.0;
    assert_close(&loss, &[expected]);
}

#[test]
fn sinusoids_are_those_of_the_paper() {
    let (_, table) = compute(|b| layers::sinusoids(b, DType::F64, 5, 6));
    for (position, row) in table.chunks(6).enumerate() {
        for i in 0..3 {
            let angle = position as f64 / 10_000f64.powf(2.0 * i as f64 / 6.0);
            assert_close(&[row[i], row[i + 3]], &[angle.sin(), angle.cos()]);
        }
    }
}
