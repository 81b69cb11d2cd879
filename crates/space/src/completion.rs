//! Ops that complete their results themselves.
//!
//! A result that is reduced by [`Reduction::LogSumExp`] is not left to readers: other results of the op depend on it. After its
//! parts, the op reduces that result along the axes that split it, and completes its first result by a local op
//! ([`shardwright_graph::Operator::completion`]). Fused attention does so where axes split the keys.

use crate::{
    config::Config,
    layout::{OpShapes, output_layout, part_layout},
};
use shardwright_cost::{Layout, LayoutError, Reduction, ReshardPath, Resharder, TensorShape};
use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::Mesh;

/// The result that an op reduces itself under a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which result.
    pub output: usize,
    /// Its layout after the parts, with partial results.
    pub from: Layout,
    /// Its layout after the reduction.
    pub to: Layout,
}

/// The result that an op with so many parts per factor reduces itself; none where its parts are complete.
pub fn completes(rule: &Rule, parts: &[u64]) -> Option<usize> {
    let output = rule.outputs.iter().position(|map| map.reduction == Reduction::LogSumExp)?;
    let split = |(f, &parts): (usize, &u64)| parts > 1 && !rule.outputs[output].has(f as FactorIndex);
    parts.iter().enumerate().any(split).then_some(output)
}

/// The result that an op reduces itself; none where its parts are complete.
pub fn completion(shapes: &OpShapes, config: &Config, mesh: &Mesh) -> Option<Completion> {
    let output = shapes.rule.outputs.iter().position(|map| map.reduction == Reduction::LogSumExp)?;
    let from = part_layout(shapes, output, config, mesh);
    let to = output_layout(shapes, output, config, mesh);
    (from != to).then_some(Completion { output, from, to })
}

impl Completion {
    /// The steps of the reduction.
    ///
    /// # Errors
    /// Where the result cannot be laid out.
    pub fn path(&self, shapes: &OpShapes, resharder: &Resharder) -> Result<ReshardPath, LayoutError> {
        let ty = &shapes.outputs[self.output];
        let shape = TensorShape::new(&ty.shape, ty.dtype.bytes() as u32)?;
        resharder.find(&resharder.tensor(shape), &self.from, &self.to)
    }
}
