//! The part of an op that a device computes, and the block of each tensor that the part reads or writes.

use crate::{
    rule::{DimMap, Rule, TensorMap},
    types::{Shape, TensorType},
};
use smallvec::SmallVec;
use std::ops::Range;

/// A block of a tensor: a range per dimension.
pub type Block = SmallVec<[Range<u64>; 4]>;

/// A box in an op's iteration space (a range per factor), with the op's rule and types.
/// [`crate::Operator::localize`] makes the op of one device from it.
#[derive(Clone, Debug)]
pub struct Region<'a> {
    /// The op's rule.
    pub rule: &'a Rule,
    /// Types of the whole inputs.
    pub inputs: &'a [TensorType],
    /// Types of the whole outputs.
    pub outputs: &'a [TensorType],
    /// The part of each factor that is computed.
    pub parts: SmallVec<[Range<u64>; 6]>,
}

impl<'a> Region<'a> {
    /// The region that computes everything.
    pub fn whole(rule: &'a Rule, inputs: &'a [TensorType], outputs: &'a [TensorType]) -> Self {
        let parts = rule.factors.iter().map(|f| 0..f.size).collect();
        Self { rule, inputs, outputs, parts }
    }

    /// Narrows a factor to part `index` of `count` equal parts of its current range.
    ///
    /// The caller has checked that `count` divides it and that the factor may be split.
    pub fn split(mut self, factor: u8, index: u64, count: u64) -> Self {
        let part = &mut self.parts[factor as usize];
        let length = (part.end - part.start) / count;
        let start = part.start + index * length;
        *part = start..start + length;
        self
    }

    /// The block of input `i` that this region reads, halo included.
    pub fn input_block(&self, i: usize) -> Block {
        self.block(&self.rule.inputs[i], &self.inputs[i].shape)
    }

    /// The block of output `o` that this region writes.
    pub fn output_block(&self, o: usize) -> Block {
        self.block(&self.rule.outputs[o], &self.outputs[o].shape)
    }

    /// Shapes of the local inputs.
    pub fn input_shape(&self, i: usize) -> Shape {
        self.input_block(i).iter().map(|r| r.end - r.start).collect()
    }

    /// Shapes of the local outputs.
    pub fn output_shape(&self, o: usize) -> Shape {
        self.output_block(o).iter().map(|r| r.end - r.start).collect()
    }

    /// The computed part of the factor called `name`, or the whole of `0..size` if the rule has none.
    pub fn part(&self, name: &str, size: u64) -> Range<u64> {
        self.rule.find(name).map_or(0..size, |f| self.parts[f as usize].clone())
    }

    fn block(&self, map: &TensorMap, shape: &Shape) -> Block {
        map.dims.iter().zip(shape.iter()).map(|(dim, &size)| self.dim_range(dim, size)).collect()
    }

    fn dim_range(&self, dim: &DimMap, size: u64) -> Range<u64> {
        if let Some(window) = dim.window {
            let (part, factor) = (&self.parts[dim.factors[0] as usize], dim.factors[0] as usize);
            // An unsplit dimension is read whole, with positions that no window covers, so that nothing is copied.
            let uncut = *part == (0..self.rule.factors[factor].size);
            return if uncut { 0..size } else { window.range(part, size) };
        }
        // Only the leading factor can be narrowed (a rule invariant), so the block is contiguous.
        match self.rule.leading(dim) {
            None => 0..size,
            Some(lead) => {
                let major = self.rule.factors[lead as usize].size;
                debug_assert!(major > 0, "no dimension is empty");
                let minor = size / major;
                let part = &self.parts[lead as usize];
                part.start * minor..part.end * minor
            }
        }
    }
}
