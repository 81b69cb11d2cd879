//! From a model and its loss to a whole training step: gradients, then one update op per weight.

use crate::{
    autodiff::{differentiate, first_consumer_layers},
    builder::{BuildError, GraphBuilder},
    graph::{Init, Phase, Role},
    ids::TensorId,
    ops::{Adam, Cast, Momentum, Op, Sgd},
    types::{DType, Real},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// How weights are updated from their gradients.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Optimizer {
    /// Plain gradient descent; keeps no state.
    Sgd {
        /// Learning rate.
        lr: Real,
    },
    /// Gradient descent with momentum; keeps one number per weight.
    Momentum {
        /// Learning rate.
        lr: Real,
        /// The share of the last step's velocity that is kept.
        momentum: Real,
    },
    /// Adam; keeps two numbers per weight.
    Adam {
        /// Learning rate.
        lr: Real,
        /// Decay of the mean of gradients.
        beta1: Real,
        /// Decay of the mean of squared gradients.
        beta2: Real,
        /// Added to the denominator.
        eps: Real,
        /// Decay of the weights (AdamW).
        #[serde(default, skip_serializing_if = "Real::is_zero")]
        weight_decay: Real,
    },
}

impl Optimizer {
    /// Plain gradient descent.
    pub fn sgd(lr: f64) -> Self {
        Optimizer::Sgd { lr: Real(lr) }
    }

    /// Gradient descent with momentum.
    pub fn momentum(lr: f64, momentum: f64) -> Self {
        Optimizer::Momentum { lr: Real(lr), momentum: Real(momentum) }
    }

    /// Adam with the decays of its paper: 0.9 and 0.999, and eps 1e-8.
    pub fn adam(lr: f64) -> Self {
        let weight_decay = Real(0.0);
        Optimizer::Adam { lr: Real(lr), beta1: Real(0.9), beta2: Real(0.999), eps: Real(1e-8), weight_decay }
    }

    /// AdamW with the decays of large language models: 0.9 and 0.95, and weight decay 0.1 (GPT-3, arXiv 2005.14165, B).
    pub fn adamw(lr: f64) -> Self {
        let weight_decay = Real(0.1);
        Optimizer::Adam { lr: Real(lr), beta1: Real(0.9), beta2: Real(0.95), eps: Real(1e-8), weight_decay }
    }

    /// Suffixes of the names of the optimizer's state.
    fn state(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { .. } => &[],
            Optimizer::Momentum { .. } => &["v"],
            Optimizer::Adam { .. } => &["m", "v"],
        }
    }

    fn op(&self) -> Op {
        match *self {
            Optimizer::Sgd { lr } => Sgd { lr }.into(),
            Optimizer::Momentum { lr, momentum } => Momentum { lr, momentum }.into(),
            Optimizer::Adam { lr, beta1, beta2, eps, weight_decay } => {
                Adam { lr, beta1, beta2, eps, weight_decay }.into()
            }
        }
    }
}

/// Adds the gradient of `loss` by every parameter that it depends on, and one op that updates each of
/// them, in the layer of the parameter's first consumer. Parameters without a gradient stay as they are.
///
/// Every update follows its gradient and the last reader of the old weight at once, so that gradients do not pile up
/// until the end of the step.
pub fn train(builder: &mut GraphBuilder, loss: TensorId, optimizer: &Optimizer) -> Result<(), BuildError> {
    add_step(builder, loss, optimizer, None)
}

/// The suffix of the names of master copies.
pub const MASTER_SUFFIX: &str = ".master";

/// What gradients of 16-bit weights are added up and stored in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientPrecision {
    /// As the weights.
    #[default]
    Bf16,
    /// In f32: every gradient is widened as soon as it is computed.
    F32,
}

/// As [`train`], in mixed precision: 16-bit weights, and in the optimizer's state a master copy of every weight in f32, beside
/// f32 moments. The master copy is updated, and the next step's weight is rounded from it. With Adam that is 16 bytes per
/// parameter, or 18 with f32 gradients.
pub fn train_mixed(
    builder: &mut GraphBuilder,
    loss: TensorId,
    optimizer: &Optimizer,
    gradients: GradientPrecision,
) -> Result<(), BuildError> {
    add_step(builder, loss, optimizer, Some(gradients))
}

fn add_step(
    builder: &mut GraphBuilder,
    loss: TensorId,
    optimizer: &Optimizer,
    mixed: Option<GradientPrecision>,
) -> Result<(), BuildError> {
    let layers = first_consumer_layers(builder);
    let known = builder.graph().gradients.len();
    differentiate(builder, loss)?;
    let first = builder.graph().ops.len();
    for i in known..builder.graph().gradients.len() {
        let pair = builder.graph().gradients[i];
        let parameter = builder.graph().tensor(pair.parameter);
        let (name, ty, init) = (parameter.name.clone(), parameter.ty.clone(), parameter.init);
        let Some(layer) = layers[pair.parameter.index()] else {
            return Err(BuildError::Internal(format!("`{name}` has a gradient but no op reads it")));
        };
        let narrow = ty.dtype;
        let master = mixed.is_some() && matches!(narrow, DType::Bf16 | DType::F16);
        let mut gradient = pair.gradient;
        if master && mixed == Some(GradientPrecision::F32) {
            let widen = |b: &mut GraphBuilder| {
                b.emit(&format!("{name}.grad_f32"), Cast { dtype: DType::F32 }, &[gradient])
            };
            gradient = builder.in_layer(Phase::Backward, layer, widen)?;
            builder.replace_gradient(i, gradient);
        }
        builder.in_layer(Phase::Update, layer, |b| {
            let mut ty = ty;
            let mut stored = pair.parameter;
            if master {
                ty.dtype = DType::F32;
                let init = init.unwrap_or(Init::Constant(Real(0.0)));
                stored =
                    b.source(&format!("{name}{MASTER_SUFFIX}"), ty.clone(), Role::OptimizerState, init)?;
            }
            let mut old: SmallVec<[TensorId; 3]> = SmallVec::from_slice(&[stored]);
            for suffix in optimizer.state() {
                let zero = Init::Constant(Real(0.0));
                let name = format!("{name}.{suffix}");
                old.push(b.source(&name, ty.clone(), Role::OptimizerState, zero)?);
            }
            let mut inputs: SmallVec<[TensorId; 4]> = old.iter().copied().collect();
            inputs.insert(1, gradient);
            let new = b.add(&format!("{name}.update"), optimizer.op(), &inputs)?;
            if master {
                let rounded = b.emit(&format!("{name}.round"), Cast { dtype: narrow }, &[new[0]])?;
                b.record_carry(pair.parameter, rounded);
            }
            for (&old, new) in old.iter().zip(new) {
                b.record_carry(old, new);
            }
            Ok(())
        })?;
    }
    builder.advance(first);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ops::{Binary, BinaryFn, Contract, Reduce, Unary, UnaryFn},
        types::TensorType,
    };

    /// `loss = sum(relu(x w))` with an extra parameter that nothing reads.
    fn model(optimizer: &Optimizer) -> GraphBuilder {
        let mut b = GraphBuilder::new("tiny");
        let init = Init::Normal(Real(1.0));
        let x = b.source("x", TensorType::new(DType::F32, [2, 3]), Role::Input, init).unwrap();
        let w = b.source("w", TensorType::new(DType::F32, [3, 4]), Role::Parameter, init).unwrap();
        b.source("unused", TensorType::new(DType::F32, [5]), Role::Parameter, init).unwrap();
        let y = b.emit("y", Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        let z = b.emit("z", Unary { f: UnaryFn::Relu }, &[y]).unwrap();
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[z]).unwrap();
        b.output(loss);
        train(&mut b, loss, optimizer).unwrap();
        b
    }

    #[test]
    fn every_weight_with_a_gradient_gets_one_update_in_its_first_consumers_layer() {
        for (optimizer, carried) in [
            (Optimizer::sgd(0.1), vec!["w"]),
            (Optimizer::momentum(0.1, 0.9), vec!["w", "w.v"]),
            (Optimizer::adam(1e-3), vec!["w", "w.m", "w.v"]),
        ] {
            let graph = model(&optimizer).finish();
            let updates: Vec<_> = graph.ops.iter().filter(|n| n.phase == Phase::Update).collect();
            assert_eq!(updates.len(), 1);
            assert_eq!(updates[0].name, "w.update");
            assert_eq!(graph.layers[updates[0].layer.index()].name, "y");
            let names: Vec<_> = graph.carries.iter().map(|c| graph.tensor(c.old).name.as_str()).collect();
            assert_eq!(names, carried);
            for carry in &graph.carries {
                let (old, new) = (graph.tensor(carry.old), graph.tensor(carry.new));
                assert_eq!((old.role, &old.ty), (new.role, &new.ty));
                assert!(old.producer.is_none() && new.producer.is_some());
            }
            let state = graph.sources(Role::OptimizerState).count();
            assert_eq!(state, carried.len() - 1);
        }
    }

    /// `loss = sum(x w)` in bf16 with f32 master weights.
    fn mixed(gradients: GradientPrecision) -> crate::Graph {
        let mut b = GraphBuilder::new("mixed");
        let init = Init::Normal(Real(1.0));
        let source = |b: &mut GraphBuilder, name: &str, shape: [u64; 2], role| {
            b.source(name, TensorType::new(DType::Bf16, shape), role, init).unwrap()
        };
        let x = source(&mut b, "x", [2, 3], Role::Input);
        let w = source(&mut b, "w", [3, 4], Role::Parameter);
        let y = b.emit("y", Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[y]).unwrap();
        b.output(loss);
        train_mixed(&mut b, loss, &Optimizer::adam(1e-3), gradients).unwrap();
        let graph = b.finish();
        assert_eq!(crate::verify::verify(&graph), Ok(()));
        graph
    }

    #[test]
    fn mixed_precision_keeps_sixteen_bytes_per_parameter_and_eighteen_with_f32_gradients() {
        for (gradients, bytes) in [(GradientPrecision::Bf16, 16), (GradientPrecision::F32, 18)] {
            let graph = mixed(gradients);
            let carried: u64 = graph.carries.iter().map(|c| graph.tensor(c.old).ty.bytes()).sum();
            let held: u64 = graph.gradients.iter().map(|g| graph.tensor(g.gradient).ty.bytes()).sum();
            assert_eq!(carried + held, bytes * 12);
            let names: Vec<_> = graph.carries.iter().map(|c| graph.tensor(c.old).name.as_str()).collect();
            assert_eq!(names, ["w", "w.master", "w.m", "w.v"]);
            assert_eq!(
                graph.tensor(graph.carries[1].old).init,
                Some(Init::Normal(Real(1.0))),
                "as the weight"
            );
        }
    }

    #[test]
    fn wide_gradients_are_what_updates_read() {
        let graph = mixed(GradientPrecision::F32);
        let update = graph.ops.iter().find(|node| node.name == "w.update").unwrap();
        let gradient = graph.tensor(update.inputs[1]);
        assert_eq!((gradient.ty.dtype, gradient.role), (DType::F32, Role::Gradient));
        let widened = graph.node(gradient.producer.unwrap());
        assert_eq!((widened.name.as_str(), widened.phase), ("w.grad_f32", Phase::Backward));
    }

    #[test]
    fn updates_follow_the_last_use_of_what_they_replace() {
        let mut b = GraphBuilder::new("two");
        let init = Init::Normal(Real(1.0));
        let mut x = b.source("x", TensorType::new(DType::F32, [2, 3]), Role::Input, init).unwrap();
        for name in ["a", "b"] {
            let w =
                b.source(&format!("{name}.w"), TensorType::new(DType::F32, [3, 3]), Role::Parameter, init);
            x = b.emit(name, Contract::parse("mk,kn->mn").unwrap(), &[x, w.unwrap()]).unwrap();
        }
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[x]).unwrap();
        b.output(loss);
        train(&mut b, loss, &Optimizer::momentum(0.1, 0.9)).unwrap();
        let graph = b.finish();
        assert_eq!(crate::verify::verify(&graph), Ok(()));
        let position = |name: &str| graph.ops.iter().position(|node| node.name == name).unwrap();
        assert!(position("b.w.update") < position("a.grad"), "before the next layer's gradients");
        for carry in &graph.carries {
            let update = graph.tensor(carry.new).producer.unwrap();
            let readers = graph.consumers().of(carry.old).to_vec();
            assert_eq!(readers.last(), Some(&update), "nobody reads what was replaced");
        }
    }

    #[test]
    fn op_by_op_a_gradient_that_is_handed_on_is_a_tensor_of_each_layer() {
        let step = |op_by_op: bool| {
            let empty = crate::Graph { name: "sum".into(), op_by_op, ..crate::Graph::default() };
            let mut b = GraphBuilder::resume(empty);
            let ty = TensorType::new(DType::F32, [4]);
            let mut source =
                |name: &str| b.source(name, ty.clone(), Role::Parameter, Init::Constant(Real(0.0)));
            let (x, y) = (source("x").unwrap(), source("y").unwrap());
            let sum = b.emit("sum", Binary { f: BinaryFn::Add }, &[x, y]).unwrap();
            let loss = b.emit("loss", Reduce::sum([0].into_iter().collect()), &[sum]).unwrap();
            b.output(loss);
            train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
            b.finish()
        };
        let gradients =
            |graph: &crate::Graph| -> Vec<_> { graph.gradients.iter().map(|g| g.gradient).collect() };
        let joined = gradients(&step(false));
        assert_eq!(joined[0], joined[1]);
        let graph = step(true);
        let apart = gradients(&graph);
        assert_ne!(apart[0], apart[1]);
        for gradient in apart {
            let node = graph.node(graph.tensor(gradient).producer.unwrap());
            assert_eq!((node.op.kind(), graph.layers[node.layer.index()].name.as_str()), ("reshape", "sum"));
        }
        assert_eq!(crate::verify::verify(&graph), Ok(()));
    }

    #[test]
    fn a_forward_pass_that_was_read_becomes_the_step_that_it_would_have_been_built_into() {
        let built = model(&Optimizer::momentum(0.1, 0.9)).finish();
        let mut forward = built.clone();
        forward.ops.retain(|n| n.phase == Phase::Forward);
        let made = |t: &crate::ids::TensorId| forward.ops.iter().any(|n| n.outputs.contains(t));
        let kept = built.tensor_ids().take_while(|t| built.tensor(*t).producer.is_none() || made(t)).count();
        forward.tensors.truncate(kept);
        (forward.gradients, forward.carries) = (Vec::new(), Vec::new());
        let read = crate::Graph::from_json(forward.to_json().as_bytes()).unwrap();
        let loss = read.outputs[0];
        let mut b = GraphBuilder::resume(read);
        train(&mut b, loss, &Optimizer::momentum(0.1, 0.9)).unwrap();
        assert_eq!(b.finish(), built);
    }

    #[test]
    fn a_loss_that_is_not_one_number_is_refused() {
        let mut b = GraphBuilder::new("bad");
        let ty = TensorType::new(DType::F32, [2]);
        let w = b.source("w", ty, Role::Parameter, Init::Constant(Real(1.0))).unwrap();
        let y = b.emit("y", Unary { f: UnaryFn::Relu }, &[w]).unwrap();
        assert!(train(&mut b, y, &Optimizer::sgd(0.1)).is_err());
        assert!(train(&mut b, w, &Optimizer::sgd(0.1)).is_err());
    }
}
