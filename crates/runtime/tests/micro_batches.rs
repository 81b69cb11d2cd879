//! Steps in micro-batches against steps over the whole batch, in f64: equal loss, weights and optimizer state. Where
//! statistics are those of a micro-batch, the mean over independent steps on the slices is the reference.

use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, MicroBatchError, Optimizer, Real, Role, TensorId, TensorType,
    micro_batch_counts, microbatch,
    ops::{Binary, BinaryFn, Contract, Dropout, Reduce, Softmax, Unary, UnaryFn},
    train,
    verify::verify,
};
use shardwright_runtime::{HostTensor, Serial};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

const SEED: u64 = 5;

fn count(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

fn model(spec: &str, optimizer: Optimizer) -> Graph {
    let options = BuildOptions { optimizer, ..BuildOptions::default() };
    build(&format!("{spec},dtype=f64"), &options).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

fn close(a: &[f64], b: &[f64], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = a.iter().fold(1e-3, |scale: f64, x| scale.max(x.abs()));
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-9 * scale, "{what}: element {i} is {b}, not {a}");
    }
}

/// The tensor of this name.
fn named(graph: &Graph, name: &str) -> TensorId {
    graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap()
}

/// Runs some steps of both graphs and compares losses and all that is carried over.
fn same_steps(whole: &Graph, divided: &Graph, what: &str) {
    let (mut a, mut b) = (Serial::new(whole, SEED, &[]), Serial::new(divided, SEED, &[]));
    for step in 0..2 {
        a.step().unwrap();
        b.step().unwrap();
        let what = format!("{what}, step {step}");
        close(&[a.loss().unwrap()], &[b.loss().unwrap()], &format!("{what}: loss"));
        for (old, new) in whole.carries.iter().zip(&divided.carries) {
            let name = &whole.tensor(old.old).name;
            assert_eq!(*name, divided.tensor(new.old).name);
            let value = |run: &Serial<'_>, t| run.value(t).unwrap().to_f64_vec();
            close(&value(&a, old.old), &value(&b, new.old), &format!("{what}: {name}"));
        }
    }
}

#[test]
fn models_train_in_micro_batches_as_with_the_whole_batch() {
    for spec in [
        "mlp:batch=12,input=6,hidden=8,layers=2,classes=4",
        "gpt:batch=4,layers=2,hidden=8,heads=2,vocab=12,seq=4",
        "bert:batch=4,layers=1,hidden=8,heads=2,ffn=12,vocab=12,seq=4,dropout=0",
        "lenet5:batch=6,image=12,width=0.5,classes=4",
        "vgg16:batch=2,image=32,width=0.0625,classes=5,dropout=0",
        "llama:batch=4,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4",
        "nmt:batch=4,seq=4,hidden=6,vocab=12",
        "rnnlm:batch=4,unroll=2,hidden=4,vocab=12",
        "dlrm:batch=4,tables=2,rows=8,dim=4,dense=6,bottom=6,top=6,lookups=2",
    ] {
        let graph = model(spec, Optimizer::adam(0.01));
        for m in micro_batch_counts(&graph).unwrap() {
            let divided = microbatch(&graph, count(m)).unwrap_or_else(|e| panic!("{spec}, {m}: {e}"));
            assert_eq!(verify(&divided.graph), Ok(()), "{spec}, {m}");
            assert_eq!(divided.statistics, Vec::<String>::new(), "{spec}, {m}");
            assert_eq!(divided.graph.step_size(), graph.step_size());
            assert_eq!(divided.graph.model_flops(), graph.model_flops(), "{spec}, {m}");
            same_steps(&graph, &divided.graph, &format!("{spec} in {m} micro-batches"));
        }
    }
}

#[test]
fn gradients_of_a_tied_embedding_are_added_once_per_step() {
    let graph = model("gpt:batch=4,layers=1,hidden=8,heads=2,vocab=12,seq=4", Optimizer::sgd(0.1));
    let divided = microbatch(&graph, count(4)).unwrap().graph;
    let sums: Vec<_> = divided.ops.iter().filter(|node| node.name.ends_with(".grad_sum")).collect();
    let table = sums.iter().find(|node| divided.tensor(node.outputs[0]).ty.shape[..] == [12, 8]).unwrap();
    assert!(!table.repeated, "it runs once per step");
    for &t in &table.inputs {
        let sum = divided.node(divided.tensor(t).producer.unwrap());
        assert!(sum.op.operator().accumulates(), "{}", sum.name);
        let rule = divided.rule(divided.tensor(t).producer.unwrap());
        assert!(rule.inputs[0].partial.is_some(), "partial sums may wait for the end of the step");
    }
    // Embedding and logits have a view of the table each.
    let views = divided.ops.iter().filter(|node| !node.repeated && node.op.operator().is_view());
    let of_table = views.filter(|node| divided.tensor(node.outputs[0]).ty.shape[..] == [12, 8]);
    assert_eq!(of_table.count(), 2);
    // A recurrent cell's weights have many readers, and keep one sum and one view.
    let graph = model("rnnlm:batch=4,unroll=4,hidden=4,vocab=12", Optimizer::sgd(0.1));
    let divided = microbatch(&graph, count(2)).unwrap().graph;
    assert!(divided.ops.iter().filter(|node| node.name.ends_with(".grad_sum")).any(|node| node.repeated));
}

#[test]
fn statistics_of_a_batch_norm_are_those_of_a_micro_batch() {
    let spec = |batch| format!("resnet101:batch={batch},image=64,width=0.0625,classes=5,depth=50");
    let (whole, part) = (model(&spec(4), Optimizer::sgd(0.1)), model(&spec(2), Optimizer::sgd(0.1)));
    let divided = microbatch(&whole, count(2)).unwrap();
    assert!(!divided.statistics.is_empty());
    let mut run = Serial::new(&divided.graph, SEED, &[]);
    // Each slice alone; a step of gradient descent is linear in the gradient, so that the mean of new weights is the
    // weight by the mean gradient.
    let mut losses = 0.0;
    let mut means: Vec<Vec<f64>> = Vec::new();
    for slice in 0..2 {
        let mut alone = Serial::new(&part, SEED, &[]);
        for t in part.sources(Role::Input) {
            let all = run.value(named(&divided.graph, &part.tensor(t).name)).unwrap();
            let mut block = shardwright_graph::block::whole(&part.tensor(t).ty.shape);
            block[0] = slice * 2..slice * 2 + 2;
            let value: HostTensor = all.block(&block);
            alone.set(t, value).unwrap();
        }
        alone.step().unwrap();
        losses += alone.loss().unwrap() / 2.0;
        for (i, carry) in part.carries.iter().enumerate() {
            let new = alone.value(carry.old).unwrap().to_f64_vec();
            if slice == 0 {
                means.push(vec![0.0; new.len()]);
            }
            means[i].iter_mut().zip(new).for_each(|(mean, new)| *mean += new / 2.0);
        }
    }
    run.step().unwrap();
    close(&[losses], &[run.loss().unwrap()], "loss");
    for (mean, carry) in means.iter().zip(&divided.graph.carries) {
        let name = &divided.graph.tensor(carry.old).name;
        close(mean, &run.value(carry.old).unwrap().to_f64_vec(), name);
    }
}

#[test]
fn masks_of_dropout_differ_between_micro_batches() {
    let mut b = GraphBuilder::new("dropout");
    let ty = |shape: &[u64]| TensorType::new(DType::F64, shape);
    let x = b.source("x", ty(&[8, 64]), Role::Input, Init::Constant(Real(1.0))).unwrap();
    let w = b.source("w", ty(&[64]), Role::Parameter, Init::Constant(Real(1.0))).unwrap();
    let y = b.emit("y", Binary { f: BinaryFn::Mul }, &[x, w]).unwrap();
    let shape = b.ty(y).shape.clone();
    let z = b.emit("z", Dropout::new(0.5, 3, &shape), &[y]).unwrap();
    let loss = b.emit("loss", Reduce::sum((0..2).collect()), &[z]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(1.0)).unwrap();
    let divided = microbatch(&b.finish(), count(8)).unwrap().graph;
    let mut run = Serial::new(&divided, SEED, &[]);
    run.step().unwrap();
    // The gradient of a weight is twice the number of samples that keep it: with one mask for all, 0 or 16.
    let new = run.value(divided.carries[0].old).unwrap().to_f64_vec();
    let between = new.iter().filter(|&&w| w < 1.0 && w > -15.0).count();
    assert!(between > 48, "{new:?}");
}

#[test]
fn steps_that_cannot_be_divided_say_why() {
    let graph = model("mlp:batch=6,input=6,hidden=8,layers=1,classes=4", Optimizer::sgd(0.1));
    let error = microbatch(&graph, count(4)).unwrap_err();
    assert_eq!(error, MicroBatchError::Count { count: 4, batch: 6, allowed: vec![1, 2, 3, 6] });
    assert_eq!(error.to_string(), "4 micro-batches do not divide a batch of 6; choose one of 1, 2, 3, 6");
    let ty = |shape: &[u64]| TensorType::new(DType::F64, shape);
    // A softmax over the batch needs all samples; a product of samples relates them to each other.
    for (name, expected) in
        [("softmax", "needs all samples at once"), ("pairs", "relates samples to each other")]
    {
        let mut b = GraphBuilder::new(name);
        let x = b.source("x", ty(&[4, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
        let y = match name {
            "softmax" => b.emit(name, Softmax { axis: 0 }, &[x]).unwrap(),
            _ => b.emit(name, Contract::parse("ik,jk->ij").unwrap(), &[x, x]).unwrap(),
        };
        let loss = b.emit("loss", Reduce::sum((0..2).collect()), &[y]).unwrap();
        b.output(loss);
        let error = microbatch(&b.finish(), count(2)).unwrap_err().to_string();
        assert!(error.contains(&format!("op `{name}`")) && error.contains(expected), "{error}");
    }
    let mut b = GraphBuilder::new("sources");
    let w = b.source("w", ty(&[4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
    let loss = b.emit("loss", Reduce::sum((0..1).collect()), &[w]).unwrap();
    b.output(loss);
    let error = microbatch(&b.finish(), count(2)).unwrap_err().to_string();
    assert!(error.contains("`sources` has no batch"), "{error}");
}

/// One op of a random model: what it does, and to which of the tensors so far.
type RandomOp = (u8, usize, usize);

/// A random model with shared weights, residual sums, a weight penalty and a mean loss.
fn random_model(batch: u64, ops: &[RandomOp], penalty: bool) -> Graph {
    let mut b = GraphBuilder::new("random");
    let ty = |shape: &[u64]| TensorType::new(DType::F64, shape);
    let x = b.source("x", ty(&[batch, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
    let weights: Vec<TensorId> = (0..3)
        .map(|i| b.source(&format!("w{i}"), ty(&[4, 4]), Role::Parameter, Init::Normal(Real(0.5))).unwrap())
        .collect();
    let mut tensors = vec![x];
    for &(kind, at, other) in ops {
        let (x, y) = (tensors[at % tensors.len()], tensors[other % tensors.len()]);
        let w = weights[other % weights.len()];
        tensors.push(match kind % 6 {
            0 | 1 => b.emit("fc", Contract::parse("nk,ko->no").unwrap(), &[x, w]).unwrap(),
            2 => b.emit("add", Binary { f: BinaryFn::Add }, &[x, y]).unwrap(),
            3 => b.emit("mul", Binary { f: BinaryFn::Mul }, &[x, y]).unwrap(),
            4 => b.emit("tanh", Unary { f: UnaryFn::Tanh }, &[x]).unwrap(),
            _ => b.emit("softmax", Softmax { axis: 1 }, &[x]).unwrap(),
        });
    }
    let last = tensors[tensors.len() - 1];
    let last = b.emit("last", Contract::parse("nk,ko->no").unwrap(), &[last, weights[0]]).unwrap();
    let shape = b.shape(last).to_vec();
    let mut loss = b.emit("loss", Reduce::mean((0..2).collect(), &shape), &[last]).unwrap();
    if penalty {
        let square = b.emit("square", Unary { f: UnaryFn::Square }, &[weights[1]]).unwrap();
        let sum = b.emit("penalty", Reduce::sum((0..2).collect()), &[square]).unwrap();
        loss = b.emit("total", Binary { f: BinaryFn::Add }, &[loss, sum]).unwrap();
    }
    b.output(loss);
    train(&mut b, loss, &Optimizer::momentum(0.01, 0.9)).unwrap();
    b.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_models_train_in_micro_batches_as_with_the_whole_batch(
        ops in prop::collection::vec((any::<u8>(), 0usize..8, 0usize..8), 1..9),
        m in prop::sample::select(vec![2u32, 3, 4, 6, 12]),
        penalty in any::<bool>(),
    ) {
        let graph = random_model(12, &ops, penalty);
        let divided = microbatch(&graph, count(m)).unwrap();
        prop_assert_eq!(verify(&divided.graph), Ok(()));
        let json = divided.graph.to_json();
        prop_assert_eq!(&Graph::from_json(json.as_bytes()).unwrap(), &divided.graph);
        let text = divided.graph.to_string();
        prop_assert_eq!(&text.parse::<Graph>().unwrap(), &divided.graph);
        same_steps(&graph, &divided.graph, &format!("{ops:?} in {m}"));
    }
}
