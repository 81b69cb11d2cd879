//! The work of a call to a kernel of attention. Its sizes are known, its scale and its mask are not: all keys count as visible.

use crate::{
    ops::{attention::ATTENTION, attention_grad::ATTENTION_GRAD},
    region::Region,
    workload::{WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// What a call computes. Its sizes are those of the workload of [`crate::ops::Attention`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionKernel {
    /// Whether it computes all gradients. A kernel of some gradients is a forward pass with as many products.
    pub backward: bool,
    /// Heads of all samples, queries per key head, queries, keys, size of a key, size of a value.
    pub sizes: [u64; 6],
}

impl AttentionKernel {
    /// Class and sizes of the workload.
    pub(super) fn workload(&self) -> (&'static WorkloadClass, WorkloadSizes) {
        (if self.backward { &ATTENTION_GRAD } else { &ATTENTION }, WorkloadSizes::from_slice(&self.sizes))
    }

    /// Flops of the products.
    pub(super) fn flops(&self) -> u64 {
        let [groups, repeat, queries, keys, key, value] = self.sizes;
        let (key_products, value_products) = if self.backward { (3, 2) } else { (1, 1) };
        let depth = key.saturating_mul(key_products).saturating_add(value.saturating_mul(value_products));
        [groups, repeat, queries, keys, depth].into_iter().fold(2, u64::saturating_mul)
    }

    /// The work of a part: samples and heads are all that a call splits.
    pub(super) fn part(&self, region: &Region<'_>) -> Self {
        let mut part = *self;
        for (factor, range) in region.rule.factors.iter().zip(&region.parts) {
            let (whole, own) = (u128::from(factor.size.max(1)), u128::from(range.end - range.start));
            part.sizes[0] = (u128::from(part.sizes[0]) * own).div_ceil(whole) as u64;
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Graph,
        builder::GraphBuilder,
        examples::NORMAL,
        graph::Role,
        ops::{Attention, Opaque},
    };

    fn call(kernel: AttentionKernel) -> Graph {
        let mut b = GraphBuilder::new("g");
        let ty = "bf16[4,8,64,16]".parse().unwrap();
        let x = b.source("x", ty, Role::Input, NORMAL).unwrap();
        let shared = vec![vec![Some(0), Some(1), None, None]; 2];
        let makes = vec!["bf16[4,8,64,16]".parse().unwrap()];
        let op = Opaque { shared, attention: Some(kernel), ..Opaque::new("kernel", makes) };
        b.emit("y", op, &[x]).unwrap();
        b.finish()
    }

    #[test]
    fn a_part_has_its_share_of_the_work() {
        let kernel = AttentionKernel { backward: false, sizes: [32, 1, 64, 64, 16, 16] };
        let graph = call(kernel);
        let op = graph.op_ids().last().unwrap();
        let rule = graph.rule(op);
        let ty = graph.tensor(graph.node(op).outputs[0]).ty.clone();
        let (inputs, outputs) = ([ty.clone()], [ty]);
        let half = Region::whole(&rule, &inputs, &outputs).split(0, 0, 2).split(1, 1, 4);
        assert_eq!(kernel.part(&half).sizes[0], 4);
        assert_eq!(kernel.part(&half).flops() * 8, kernel.flops());
    }

    #[test]
    fn the_work_is_that_of_attention_without_a_mask() {
        let mut b = GraphBuilder::new("g");
        let [q, k, v] = ["q", "k", "v"]
            .map(|name| b.source(name, "bf16[4,64,8,16]".parse().unwrap(), Role::Input, NORMAL).unwrap());
        b.emit("y", Attention::new(1.0, 64, 64), &[q, k, v]).unwrap();
        let attention = b.finish();
        let kernel = call(AttentionKernel { backward: false, sizes: [32, 1, 64, 64, 16, 16] });
        let work = |graph: &Graph| {
            let op = graph.op_ids().last().unwrap();
            let types =
                |ids: &[crate::TensorId]| ids.iter().map(|&t| graph.tensor(t).ty.clone()).collect::<Vec<_>>();
            let (node, operator) = (graph.node(op), graph.node(op).op.operator());
            let (inputs, outputs) = (types(&node.inputs), types(&node.outputs));
            let (class, sizes) = operator.workload(&inputs, &outputs).unwrap();
            (class.name, sizes, operator.flops(&inputs, &outputs))
        };
        assert_eq!(work(&kernel), work(&attention));
    }
}
