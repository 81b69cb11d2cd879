//! Tiny models, trained by the serial interpreter.

use shardwright_graph::{Graph, Optimizer, Role, TensorId};
use shardwright_runtime::{Data, HostTensor, Serial};
use shardwright_zoo::{BuildOptions, FAMILIES, build};

fn tiny(name: &str) -> String {
    let family = FAMILIES.iter().find(|f| f.name == name).expect("a model");
    format!("{name}:{}", family.tiny)
}

fn graph(spec: &str, optimizer: Optimizer) -> Graph {
    let options = BuildOptions { optimizer, ..BuildOptions::default() };
    build(spec, &options).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

/// The losses of the first `steps` training steps, on the same data.
fn losses(graph: &Graph, steps: usize) -> Vec<f64> {
    let mut run = Serial::new(graph, 1, &[]);
    (0..steps)
        .map(|_| {
            run.step().unwrap_or_else(|e| panic!("{}: {e}", graph.name));
            run.loss().expect("a loss")
        })
        .collect()
}

fn find(graph: &Graph, name: &str) -> TensorId {
    graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap_or_else(|| panic!("no tensor {name}"))
}

#[test]
fn the_loss_of_every_tiny_model_falls_as_it_trains() {
    for family in FAMILIES {
        let losses = losses(&graph(&tiny(family.name), Optimizer::sgd(0.02)), 6);
        assert!(losses.iter().all(|x| x.is_finite()), "{}: {losses:?}", family.name);
        assert!(losses[5] < losses[0], "{}: {losses:?}", family.name);
    }
}

#[test]
fn adam_and_momentum_train_too() {
    for optimizer in [Optimizer::adam(1e-3), Optimizer::momentum(0.02, 0.9)] {
        for model in ["lenet5", "gpt", "nmt"] {
            let losses = losses(&graph(&tiny(model), optimizer), 6);
            assert!(losses[5] < losses[0], "{model}, {optimizer:?}: {losses:?}");
        }
    }
}

#[test]
fn an_untrained_classifier_knows_nothing() {
    for (model, classes) in [("mlp", 5.0f64), ("lenet5", 4.0), ("gpt", 11.0), ("llama", 11.0)] {
        let first = losses(&graph(&tiny(model), Optimizer::sgd(0.1)), 1)[0];
        assert!((first - classes.ln()).abs() < 0.5, "{model}: {first} against ln {classes}");
    }
}

/// The derivative along a random direction in weight space, by the graph's gradients and by finite differences. One
/// number checks every backward op of a model.
#[test]
fn gradients_of_every_tiny_model_are_the_slopes_of_its_loss() {
    let extra = ["dlrm:batch=3,tables=2,rows=7,dim=4,dense=5,bottom=6,top=6,interaction=dot".to_string()];
    let unrolled = ["rnnlm", "rnntc", "nmt"].map(|m| format!("{m}:batch=3,unroll=3,hidden=4,vocab=7"));
    let dropped = ["alexnet:batch=2,image=63,width=0.0625,classes=5".to_string()];
    let families = FAMILIES.iter().map(|f| tiny(f.name));
    for spec in families.chain(extra).chain(unrolled).chain(dropped) {
        let graph = graph(&format!("{spec},dtype=f64"), Optimizer::sgd(0.0));
        let gradients: Vec<TensorId> = graph.gradients.iter().map(|g| g.gradient).collect();
        let mut run = Serial::new(&graph, 3, &gradients);
        run.evaluate().unwrap_or_else(|e| panic!("{spec}: {e}"));

        let mut slope = 0.0;
        let mut directions = Vec::new();
        for (seed, pair) in (1u64..).zip(&graph.gradients) {
            let gradient = run.value(pair.gradient).expect("kept").to_f64_vec();
            let weight = run.value(pair.parameter).expect("a weight").to_f64_vec();
            let random = |i: usize| {
                (shardwright_runtime::mix(seed << 32 | i as u64) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
            };
            let direction: Vec<f64> = (0..weight.len()).map(random).collect();
            slope += gradient.iter().zip(&direction).map(|(g, d)| g * d).sum::<f64>();
            directions.push((pair.parameter, weight, direction));
        }
        let length = directions.iter().flat_map(|d| &d.2).map(|d| d * d).sum::<f64>().sqrt();
        let mut loss_at = |distance: f64| {
            for (tensor, weight, direction) in &directions {
                let moved = weight.iter().zip(direction).map(|(w, d)| w + distance * d).collect();
                let shape = graph.tensor(*tensor).ty.shape.clone();
                run.set(*tensor, HostTensor::new(shape, Data::F64(moved))).unwrap();
            }
            run.evaluate().unwrap();
            run.loss().unwrap()
        };
        // The step is 1e-6 long, however many weights change: deep models with batch norm curve sharply.
        let h = 1e-6 / length;
        let measured = (loss_at(h) - loss_at(-h)) / (2.0 * h);
        let error = (measured - slope).abs() / slope.abs().max(1e-3);
        assert!(error < 1e-5, "{spec}: gradient says {slope}, moving the weights says {measured}");
    }
}

/// Unrolled and whole sequences compute the same function of the same weights.
#[test]
fn unrolled_models_compute_what_whole_ones_compute() {
    for model in ["rnnlm", "rnntc", "nmt"] {
        let sizes = "batch=3,hidden=6,vocab=11,dtype=f64";
        let whole = losses(&graph(&format!("{model}:{sizes},seq=5"), Optimizer::sgd(0.1)), 4);
        let unrolled = losses(&graph(&format!("{model}:{sizes},unroll=5"), Optimizer::sgd(0.1)), 4);
        for (a, b) in whole.iter().zip(&unrolled) {
            assert!((a - b).abs() < 1e-12, "{model}: {whole:?} and {unrolled:?}");
        }
    }
}

/// One op computes what scores, softmax and product compute.
#[test]
fn fused_attention_trains_as_plain_attention() {
    for model in ["gpt", "llama", "moe", "bert", "transformer"] {
        let train = |form: &str| {
            losses(&graph(&format!("{},dtype=f64,attention={form}", tiny(model)), Optimizer::sgd(0.1)), 4)
        };
        let (fused, plain) = (train("fused"), train("plain"));
        for (a, b) in fused.iter().zip(&plain) {
            assert!((a - b).abs() < 1e-12, "{model}: {fused:?} and {plain:?}");
        }
    }
}

/// Changing the last token leaves the logits of all earlier positions unchanged.
#[test]
fn causal_models_do_not_look_ahead() {
    for (model, tokens) in
        [("gpt", "tokens"), ("llama", "tokens"), ("moe", "tokens"), ("transformer", "target")]
    {
        let graph = graph(&tiny(model), Optimizer::sgd(0.1));
        assert!(graph.ops.iter().any(|node| node.op.kind() == "attention"), "{model}");
        let (tokens, logits) = (find(&graph, tokens), find(&graph, "logits"));
        let mut run = Serial::new(&graph, 5, &[logits]);
        run.evaluate().unwrap();
        let before = run.value(logits).unwrap().to_f64_vec();
        let ids = run.value(tokens).unwrap().to_f64_vec();
        let shape = graph.tensor(tokens).ty.shape.clone();
        let length = shape[1] as usize;
        let changed = ids
            .iter()
            .enumerate()
            .map(|(i, &id)| if i % length == length - 1 { (id as i32 + 1) % 11 } else { id as i32 });
        run.set(tokens, HostTensor::new(shape, Data::I32(changed.collect()))).unwrap();
        run.evaluate().unwrap();
        let after = run.value(logits).unwrap().to_f64_vec();
        let vocab = before.len() / ids.len();
        for (position, (a, b)) in before.chunks(vocab).zip(after.chunks(vocab)).enumerate() {
            let last = position % length == length - 1;
            assert_eq!(a != b, last, "{model}: position {position}");
        }
    }
}

/// Every input affects the loss. A model that ignores its data would pass many other tests.
#[test]
fn the_loss_depends_on_every_input() {
    for family in FAMILIES {
        let graph = graph(&format!("{},dtype=f64", tiny(family.name)), Optimizer::sgd(0.1));
        for input in graph.sources(Role::Input) {
            let mut run = Serial::new(&graph, 1, &[]);
            run.evaluate().unwrap();
            let (before, value) = (run.loss(), run.value(input).unwrap().to_f64_vec());
            let ty = graph.tensor(input).ty.clone();
            let moved = if ty.dtype.is_float() {
                Data::F64(value.iter().map(|x| x + 0.5).collect())
            } else {
                // Labels and tokens of every model have at least the values 0 and 1.
                Data::I32(value.iter().map(|&x| i32::from(x == 0.0)).collect())
            };
            run.set(input, HostTensor::new(ty.shape, moved)).unwrap();
            run.evaluate().unwrap();
            assert_ne!(before, run.loss(), "{}: {}", family.name, graph.tensor(input).name);
        }
    }
}
