//! The work of a step in a user's units: samples, tokens, and the flops of the model.

use crate::{
    graph::{Graph, Role},
    types::TensorType,
    workload::{RooflineKind, Workload},
};

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

    /// The model's work: all matrix products and convolutions of the step, forwards and backwards, with the number of times that
    /// each runs. Element-wise ops do not count, and neither does what a plan recomputes.
    pub fn model_work(&self) -> impl Iterator<Item = (Workload, u32)> + '_ {
        let work = |id| self.node(id).op.workload(&self.input_types(id), &self.output_types(id));
        let own = self.op_ids().filter(|&id| self.node(id).recomputes.is_none());
        let all = own.map(move |id| (work(id), self.runs(id)));
        all.filter(|(work, _)| work.roofline != RooflineKind::Stream)
    }

    /// Flops of the model's work.
    pub fn model_flops(&self) -> u64 {
        let flops = self.model_work().map(|(work, runs)| work.flops.saturating_mul(u64::from(runs)));
        flops.fold(0, u64::saturating_add)
    }
}
