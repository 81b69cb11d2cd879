//! An op with known types and unknown meaning: a call into a library, a random number generator.
//!
//! It is planned replicated, which is right for every function of its inputs, unless its caller states which dimensions
//! its operands and results share. It has no kernel, and its only known cost is the bytes that it reads and writes, and the work of attention.
//! Its gradient is another such op, which reads the operands and the gradients of the results.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator},
    ops::{AttentionKernel, Op},
    region::Region,
    require,
    rule::{DimMap, Rule, TensorMap, dim_name},
    types::TensorType,
    workload::{WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// The most shared dimensions of a call.
const MOST_SHARED: usize = 26;

/// A call with the types of its results.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opaque {
    /// The name of the called function in the imported program.
    pub call: String,
    /// Types of the results.
    pub makes: Vec<TensorType>,
    /// Per operand, then per result: for each dimension the index of the shared dimension that it is, if any. The call works on
    /// each block of a shared dimension separately, and every result has all of them. Empty if nothing is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<Vec<Option<u8>>>,
    /// Whether a result may lack a shared dimension: it is then a sum over the blocks. Gradients of weights are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sums: bool,
    /// The work of a kernel of attention; other calls are bound by memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionKernel>,
}

impl Opaque {
    /// A call of which only the types are known.
    pub fn new(call: impl Into<String>, makes: Vec<TensorType>) -> Self {
        Self { call: call.into(), makes, shared: Vec::new(), sums: false, attention: None }
    }

    /// The size of each shared dimension.
    fn shared_sizes(&self, inputs: &[TensorType]) -> Result<Vec<u64>, OpError> {
        let types: Vec<&TensorType> = inputs.iter().chain(&self.makes).collect();
        require!(
            self.shared.len() == types.len(),
            "the rule of `{}` has {} tensors, but the call has {}",
            self.call,
            self.shared.len(),
            types.len()
        );
        let count = self.shared.iter().flatten().flatten().map(|&d| usize::from(d) + 1).max().unwrap_or(0);
        require!(count <= MOST_SHARED, "the rule of `{}` has more than {MOST_SHARED} dimensions", self.call);
        let mut sizes = vec![None; count];
        for (dims, ty) in self.shared.iter().zip(&types) {
            require!(
                dims.len() == ty.rank(),
                "the rule of `{}` has {} dimensions for {ty}",
                self.call,
                dims.len()
            );
            let mut seen = [false; MOST_SHARED];
            for (dim, &size) in dims.iter().zip(ty.shape.iter()) {
                let Some(dim) = dim.map(usize::from) else { continue };
                require!(!seen[dim], "the rule of `{}` names a dimension of {ty} twice", self.call);
                seen[dim] = true;
                let known = *sizes[dim].get_or_insert(size);
                require!(
                    known == size,
                    "a dimension in the rule of `{}` has sizes {known} and {size}",
                    self.call
                );
            }
        }
        for dims in self.shared[inputs.len()..].iter().filter(|_| !self.sums) {
            let has = |d: usize| dims.contains(&Some(d as u8));
            require!((0..count).all(has), "a result of `{}` lacks a dimension of its rule", self.call);
        }
        Ok(sizes.into_iter().map(|size| size.unwrap_or(1)).collect())
    }
}

impl Operator for Opaque {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let sizes = self.attention.map_or([1; 6], |kernel| kernel.sizes);
        require!(sizes.iter().all(|&size| size > 0), "a size of the attention of `{}` is 0", self.call);
        require!(!self.makes.is_empty() && self.makes.len() <= 64, "makes {} tensors", self.makes.len());
        for ty in &self.makes {
            ty.shape.check().map_err(OpError::new)?;
        }
        if !self.shared.is_empty() {
            self.shared_sizes(inputs)?;
        }
        Ok(self.makes.clone())
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        if self.shared.is_empty() {
            return Rule::replicated(inputs, outputs);
        }
        let mut rule = Rule::default();
        for (i, size) in self.shared_sizes(inputs).unwrap_or_default().into_iter().enumerate() {
            rule.factor(dim_name(i), size);
        }
        let dim = |dim: &Option<u8>| dim.map_or_else(DimMap::opaque, DimMap::of);
        let mut maps = self.shared.iter().map(|dims| TensorMap::new(dims.iter().map(dim)));
        rule.inputs = maps.by_ref().take(inputs.len()).collect();
        rule.outputs = maps.collect();
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let mut inputs = cx.inputs();
        let count = inputs.len();
        let given: Vec<usize> = (0..self.makes.len()).filter(|&o| cx.grad(o).is_some()).collect();
        inputs.extend(given.iter().filter_map(|&o| cx.grad(o)));
        let wanted: Vec<usize> = (0..count).filter(|&i| cx.wants(i)).collect();
        let makes = wanted.iter().map(|&i| cx.input_type(i).clone()).collect();
        let mut shared = Vec::new();
        if !self.shared.is_empty() {
            let dims = (0..count).chain(given.iter().map(|&o| count + o)).chain(wanted.iter().copied());
            shared = dims.map(|t| self.shared[t].clone()).collect();
        }
        let made = cx.add(
            Opaque { shared, sums: true, ..Opaque::new(format!("{}.grad", self.call), makes) },
            &inputs,
        )?;
        let mut grads = vec![None; count];
        for (&i, &grad) in wanted.iter().zip(&made) {
            grads[i] = Some(grad);
        }
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        self.attention.map_or(0, |kernel| kernel.flops())
    }

    fn workload(
        &self,
        _: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        self.attention.map(|kernel| kernel.workload())
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let local = |(o, ty): (usize, &TensorType)| TensorType::new(ty.dtype, region.output_shape(o));
        let makes = self.makes.iter().enumerate().map(local).collect();
        let attention = self.attention.map(|kernel| kernel.part(region));
        Opaque { makes, attention, ..self.clone() }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, NORMAL, Rng},
        types::DType,
    };

    impl Examples for Opaque {
        const DIFFERENTIABLE: bool = false;
        const RUNS: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Opaque {
                    shared: vec![vec![Some(0), None], vec![Some(0), None]],
                    ..Opaque::new("library", vec!["f32[8,6]".parse().unwrap()])
                },
                &["f32[8,4]"],
                "([d0, _])->([d0, _]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
            let shared = vec![(0..ty.rank() as u8).map(Some).collect(); 2];
            Case::new(Opaque { shared, ..Opaque::new("library", vec![ty.clone()]) }, vec![(ty, NORMAL)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{autodiff::differentiate, builder::GraphBuilder, examples::NORMAL, graph::Role, ops::Reduce};

    #[test]
    fn the_gradient_of_a_weight_is_a_sum_over_blocks() {
        let mut b = GraphBuilder::new("g");
        let x = b.source("x", "f32[8,4]".parse().unwrap(), Role::Input, NORMAL).unwrap();
        let w = b.source("w", "f32[4,6]".parse().unwrap(), Role::Parameter, NORMAL).unwrap();
        let op = Opaque {
            shared: vec![vec![Some(0), None], vec![None, None], vec![Some(0), None]],
            ..Opaque::new("f", vec!["f32[8,6]".parse().unwrap()])
        };
        let y = b.emit("y", op, &[x, w]).unwrap();
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[y]).unwrap();
        differentiate(&mut b, loss).unwrap();
        let graph = b.graph();
        let node = graph.ops.iter().find(|node| node.name == "y.grad").unwrap();
        let types = |ids: &[TensorId]| ids.iter().map(|&t| graph.tensor(t).ty.clone()).collect::<Vec<_>>();
        let rule = node.op.operator().rule(&types(&node.inputs), &types(&node.outputs));
        assert_eq!(rule.to_string(), "([d0, _], [_, _], [d0, _])->([_, _]) {d0=8} reduction={d0}");
    }
}
