//! Products in 8-bit floats: which of a model's products round their operands, as Transformer Engine and torchao do it.
//!
//! Linear layers do: products of data and a weight, forwards and backwards, whose sizes matrix units take. Attention, look-ups,
//! norms and the loss do not. Tensors keep their type: operands are rounded, with a scale, when they are multiplied.

use crate::{
    builder::GraphBuilder,
    graph::{Phase, Role},
};

impl GraphBuilder {
    /// Rounds the operands of all linear layers so far to 8-bit floats, except those that `keep` names. Gradients that are
    /// added later follow. Returns the number of products.
    pub fn round_linear_layers(&mut self, keep: impl Fn(&str) -> bool) -> usize {
        let mut rounded = 0;
        for id in self.graph().op_ids() {
            let node = self.graph().node(id);
            let weights = node.inputs.iter().filter(|&&t| self.graph().tensor(t).role == Role::Parameter);
            if node.phase != Phase::Forward || weights.count() != 1 || keep(&node.name) {
                continue;
            }
            if let Some(op) = node.op.operator().in_eight_bits(&self.graph().input_types(id)) {
                self.replace_op(id, op);
                rounded += 1;
            }
        }
        rounded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        graph::Init,
        ops::{Contract, Reduce},
        train::{Optimizer, train},
        types::{DType, Real, TensorType},
    };

    #[test]
    fn linear_layers_and_their_gradients_are_rounded_and_other_products_are_not() {
        let mut b = GraphBuilder::new("model");
        let init = Init::Normal(Real(1.0));
        let mut source =
            |name: &str, role| b.source(name, TensorType::new(DType::Bf16, [32, 32]), role, init).unwrap();
        let (x, w, head) =
            (source("x", Role::Input), source("w", Role::Parameter), source("head.w", Role::Parameter));
        let product = |b: &mut GraphBuilder, name: &str, x, y| {
            b.emit(name, Contract::parse("mk,kn->mn").unwrap(), &[x, y]).unwrap()
        };
        let y = product(&mut b, "linear", x, w);
        let scores = product(&mut b, "scores", y, x);
        let logits = product(&mut b, "logits", scores, head);
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[logits]).unwrap();
        b.output(loss);
        assert_eq!(b.round_linear_layers(|name| name == "logits"), 1);
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        let graph = b.finish();
        let narrow = graph.ops.iter().filter(|node| node.op.operator().is_eight_bit());
        let names: Vec<_> = narrow.map(|node| graph.layers[node.layer.index()].name.as_str()).collect();
        assert!(names.len() >= 2 && names.iter().all(|name| *name == "linear"), "{names:?}");
    }
}
