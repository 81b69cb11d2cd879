//! The work of a step in a user's units: samples, tokens, and the flops of the model.

use crate::{
    graph::{Graph, Role},
    types::{DType, TensorType},
    workload::RooflineKind,
};
use std::collections::BTreeMap;

/// The size of a step in a user's units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSize {
    /// Samples per step; none where the inputs have no common first dimension.
    pub samples: Option<u64>,
    /// Tokens per step; none where samples are not sequences of tokens.
    pub tokens: Option<u64>,
}

impl Graph {
    /// Samples and tokens of a step.
    ///
    /// The first dimension that all inputs share is the batch. Tokens are counted where all inputs are whole numbers and
    /// the largest is `[samples, positions]`: ids of a table, and as many labels. Images and features are real numbers.
    pub fn step_size(&self) -> StepSize {
        let types: Vec<TensorType> = self.sources(Role::Input).map(|t| self.whole_tensor(t).ty).collect();
        let inputs = || types.iter().filter(|ty| ty.rank() > 0);
        let first = inputs().next().map(|ty| ty.shape[0]);
        let samples = first.filter(|&size| inputs().all(|ty| ty.shape[0] == size));
        let ids = inputs().all(|ty| !ty.dtype.is_float());
        let tokens = samples.filter(|_| ids).and_then(|_| {
            let sequences = inputs().filter(|ty| ty.rank() == 2 && ty.shape[1] > 1);
            sequences.map(|ty| ty.shape.elements()).max()
        });
        StepSize { samples, tokens }
    }

    /// Flops of the model by element type: all matrix products and convolutions of the step, forwards and backwards, once.
    /// Element-wise ops do not count, and neither does what a plan recomputes.
    pub fn model_flops(&self) -> BTreeMap<DType, u64> {
        let mut flops = BTreeMap::new();
        for id in self.op_ids() {
            let work = self.node(id).op.workload(&self.input_types(id), &self.output_types(id));
            if work.roofline != RooflineKind::Stream {
                let sum: &mut u64 = flops.entry(work.dtype).or_default();
                *sum = sum.saturating_add(work.flops.saturating_mul(u64::from(self.runs(id))));
            }
        }
        flops
    }
}
