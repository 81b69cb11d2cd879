//! Sharding rules: the only statement of an op about parallelism.
//!
//! A rule names the op's loops ("factors") and maps each dimension of each operand and result to the factors that it
//! runs over. Everything else about splitting an op is derived from it: local shapes
//! ([`crate::Region`]), partial sums, halos, traffic, search space, placements on other engines.
//!
//! Invariants, checked by [`Rule::check`]:
//! - A dimension's size is the product of its factors' sizes, unless it is *opaque* (no factors: every
//!   part of a split needs or makes it whole) or a *window* (then it runs over one factor, and reaches
//!   past its own share).
//! - A dimension's factors are listed major first. A factor that may be split is the leading (non-trivial)
//!   one wherever it appears, so that a split tensor is always a block, never a comb.
//! - A factor appears at most once in a tensor.
//! - An output that does not run over a factor is, when the factor is split, a partial result that is
//!   reduced by the output's [`Reduction`]. The op itself reduces by [`Reduction::LogSumExp`].

use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::{fmt, ops::Range};

/// Which factor of a rule, by position.
pub type FactorIndex = u8;

/// A loop of an op.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Factor {
    /// Unique within the rule, and the same in the forward and backward ops of one layer.
    pub name: &'static str,
    /// Number of iterations.
    pub size: u64,
    /// Whether it must stay whole (a softmax needs its own axis whole).
    pub whole: bool,
}

impl Factor {
    /// Whether the factor can be split into this many equal parts.
    pub fn divides_into(&self, parts: u64) -> bool {
        !self.whole && self.size > 1 && self.size.is_multiple_of(parts)
    }
}

/// How elements or partial results are reduced to one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Sum.
    #[default]
    Sum,
    /// Maximum.
    Max,
    /// Logarithm of the sum of exponentials. Never left to readers: the op reduces such a result itself and completes its
    /// first result with it ([`crate::Operator::completion`]).
    LogSumExp,
}

impl Reduction {
    /// All reductions.
    pub const ALL: [Self; 3] = [Self::Sum, Self::Max, Self::LogSumExp];
}

/// How a dimension that is read through a sliding window follows its factor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// The direction of the window.
    pub reach: Reach,
    /// Steps of the windowed dimension per output position.
    pub stride: u64,
    /// Positions before the start that the first window covers (negative: positions skipped).
    pub pad: i64,
    /// Positions that a window covers: `(kernel - 1) * dilation + 1`.
    pub extent: u64,
}

/// The direction of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reach {
    /// Factor position `o` reads positions `o*stride - pad .. o*stride - pad + extent`.
    Forward,
    /// Factor position `i` is covered by the windows `o` with `o*stride - pad <= i < o*stride - pad + extent`.
    Backward,
}

impl Window {
    /// The positions that the factor range `part` touches in a dimension of `size`, without clipping.
    fn unclipped(&self, part: &Range<u64>) -> (i64, i64) {
        let (first, last) = (part.start as i64, part.end as i64 - 1);
        let (stride, extent) = (self.stride as i64, self.extent as i64);
        match self.reach {
            Reach::Forward => (first * stride - self.pad, last * stride - self.pad + extent),
            Reach::Backward => {
                ((first + self.pad - extent).div_euclid(stride) + 1, (last + self.pad).div_euclid(stride) + 1)
            }
        }
    }

    /// The positions that the factor range `part` touches in a dimension of `size`.
    ///
    /// Never empty: a part whose windows lie entirely in the padding still gets one position.
    pub fn range(&self, part: &Range<u64>, size: u64) -> Range<u64> {
        let (start, end) = self.unclipped(part);
        let start = start.clamp(0, size as i64 - 1);
        let end = end.clamp(start + 1, size as i64);
        start as u64..end as u64
    }
}

/// The factors that a dimension runs over.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct DimMap {
    /// Factors, major first; none: the dimension is opaque.
    pub factors: SmallVec<[FactorIndex; 2]>,
    /// Set where the dimension is read through a window.
    pub window: Option<Window>,
}

impl DimMap {
    /// A dimension that runs over exactly one factor.
    pub fn of(factor: FactorIndex) -> Self {
        Self { factors: SmallVec::from_slice(&[factor]), window: None }
    }

    /// A dimension made of several factors, major first.
    pub fn product(factors: &[FactorIndex]) -> Self {
        Self { factors: SmallVec::from_slice(factors), window: None }
    }

    /// A dimension that is read through a window while its factor runs.
    pub fn window(factor: FactorIndex, window: Window) -> Self {
        Self { factors: SmallVec::from_slice(&[factor]), window: Some(window) }
    }

    /// A dimension that every part needs or makes whole.
    pub fn opaque() -> Self {
        Self::default()
    }
}

/// The factors that each dimension of one operand or result runs over.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TensorMap {
    /// One entry per dimension.
    pub dims: SmallVec<[DimMap; 4]>,
    /// For results: how partial results are reduced.
    pub reduction: Reduction,
    /// For operands: an axis that splits this factor leaves the operand a partial sum.
    pub partial: Option<FactorIndex>,
}

impl TensorMap {
    /// A map whose partial results are added up.
    pub fn new(dims: impl IntoIterator<Item = DimMap>) -> Self {
        Self { dims: dims.into_iter().collect(), reduction: Reduction::Sum, partial: None }
    }

    /// A map whose dimensions each run over one factor.
    pub fn of(factors: &[FactorIndex]) -> Self {
        Self::new(factors.iter().map(|&f| DimMap::of(f)))
    }

    /// The same map with another reduction of partial results.
    pub fn reduced_by(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Whether any dimension runs over `factor`.
    pub fn has(&self, factor: FactorIndex) -> bool {
        self.dims.iter().any(|d| d.factors.contains(&factor))
    }

    /// The dimension whose leading factor is `factor`: a split of the factor splits it.
    pub fn dim_led_by(&self, factor: FactorIndex, rule: &Rule) -> Option<usize> {
        self.dims.iter().position(|d| rule.leading(d) == Some(factor))
    }
}

/// An op's factors and how its operands and results run over them.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rule {
    /// The loops.
    pub factors: SmallVec<[Factor; 6]>,
    /// One map per input.
    pub inputs: SmallVec<[TensorMap; 3]>,
    /// One map per output.
    pub outputs: SmallVec<[TensorMap; 2]>,
}

/// Factor names of ops that treat all dimensions equally.
const DIM_NAMES: [&str; 64] = [
    "d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7", "d8", "d9", "d10", "d11", "d12", "d13", "d14", "d15",
    "d16", "d17", "d18", "d19", "d20", "d21", "d22", "d23", "d24", "d25", "d26", "d27", "d28", "d29", "d30",
    "d31", "d32", "d33", "d34", "d35", "d36", "d37", "d38", "d39", "d40", "d41", "d42", "d43", "d44", "d45",
    "d46", "d47", "d48", "d49", "d50", "d51", "d52", "d53", "d54", "d55", "d56", "d57", "d58", "d59", "d60",
    "d61", "d62", "d63",
];

/// The factor name of dimension `i` in ops that treat all dimensions equally.
pub fn dim_name(i: usize) -> &'static str {
    DIM_NAMES[i]
}

impl Rule {
    /// Adds a factor that may be split.
    pub fn factor(&mut self, name: &'static str, size: u64) -> FactorIndex {
        self.push(Factor { name, size, whole: false })
    }

    /// Adds a factor that must stay whole.
    pub fn whole_factor(&mut self, name: &'static str, size: u64) -> FactorIndex {
        self.push(Factor { name, size, whole: true })
    }

    fn push(&mut self, factor: Factor) -> FactorIndex {
        self.factors.push(factor);
        (self.factors.len() - 1) as FactorIndex
    }

    /// The rule without factors: every device computes everything.
    pub fn replicated(inputs: &[TensorType], outputs: &[TensorType]) -> Self {
        let opaque = |ty: &TensorType| TensorMap::new((0..ty.rank()).map(|_| DimMap::opaque()));
        Self {
            inputs: inputs.iter().map(opaque).collect(),
            outputs: outputs.iter().map(opaque).collect(),
            ..Self::default()
        }
    }

    /// One factor `d0`, `d1`, ... per dimension of a shape.
    pub fn over_dims(shape: &[u64]) -> Self {
        let mut rule = Self::default();
        for (i, &size) in shape.iter().enumerate() {
            rule.factor(dim_name(i), size);
        }
        rule
    }

    /// One factor per dimension that `splits` accepts, named by its position, and the map of a tensor of this
    /// shape over them; the other dimensions are opaque.
    pub fn over_dims_where(shape: &[u64], splits: impl Fn(usize) -> bool) -> (Self, TensorMap) {
        let mut rule = Self::default();
        let map = TensorMap::new(shape.iter().enumerate().map(|(d, &size)| {
            if splits(d) { DimMap::of(rule.factor(dim_name(d), size)) } else { DimMap::opaque() }
        }));
        (rule, map)
    }

    /// The rule of an op that leaves some dimensions as they are (equal sizes) and changes the others in a
    /// way that cannot be split.
    pub fn over_equal_dims(input: &TensorType, output: &TensorType) -> Self {
        let (mut rule, map) = Self::over_dims_where(&input.shape, |d| input.shape[d] == output.shape[d]);
        rule.inputs.push(map.clone());
        rule.outputs.push(map);
        rule
    }

    /// The rule of an op that works element by element on operands that broadcast against the first output.
    ///
    /// Operands are aligned at their last dimension, as NumPy does; a dimension of size one that meets a
    /// larger one is opaque.
    pub fn elementwise(inputs: &[TensorType], outputs: &[TensorType]) -> Self {
        let shape = &outputs[0].shape;
        let mut rule = Self::over_dims(shape);
        let map = |t: &TensorType| {
            let skip = shape.rank() - t.rank();
            TensorMap::new(t.shape.iter().enumerate().map(|(i, &size)| {
                if size == shape[i + skip] { DimMap::of((i + skip) as FactorIndex) } else { DimMap::opaque() }
            }))
        };
        rule.inputs = inputs.iter().map(map).collect();
        rule.outputs = outputs.iter().map(map).collect();
        rule
    }

    /// Marks factors as whole if a part of their split would read beyond its block of an input of these types.
    pub fn keep_windows_in_blocks(&mut self, inputs: &[TensorType]) {
        for (map, ty) in self.inputs.iter().zip(inputs) {
            for (dim, &size) in map.dims.iter().zip(ty.shape.iter()) {
                let (Some(window), Some(&factor)) = (dim.window, dim.factors.first()) else { continue };
                let factor = &mut self.factors[usize::from(factor)];
                let (stepped, other) = match window.reach {
                    Reach::Forward => (size, factor.size),
                    Reach::Backward => (factor.size, size),
                };
                // Adjacent windows that fill the dimension do not reach beyond their blocks.
                let tiled = window.extent <= window.stride
                    && window.pad == 0
                    && other.checked_mul(window.stride) == Some(stepped);
                factor.whole |= !tiled;
            }
        }
    }

    /// Which factor has this name.
    pub fn find(&self, name: &str) -> Option<FactorIndex> {
        self.factors.iter().position(|f| f.name == name).map(|i| i as FactorIndex)
    }

    /// The first factor of a dimension that has more than one iteration: block splits cut it.
    pub fn leading(&self, dim: &DimMap) -> Option<FactorIndex> {
        let nontrivial = dim.factors.iter().find(|&&f| self.factors[f as usize].size > 1);
        nontrivial.or(dim.factors.first()).copied()
    }

    /// Whether a factor is summed (or maximised) away: some output does not run over it.
    pub fn is_reduction(&self, factor: FactorIndex) -> bool {
        self.outputs.iter().any(|o| !o.has(factor))
    }

    /// Whether every element of the results depends on elements of some operand at the same place, or in the same row: results and
    /// that operand run over the same factors, dimension by dimension.
    pub fn is_elementwise(&self) -> bool {
        let plain =
            |map: &TensorMap| map.dims.iter().all(|dim| dim.window.is_none() && !dim.factors.is_empty());
        let Some((first, others)) = self.outputs.split_first() else { return false };
        plain(first)
            && others.iter().all(|map| map.dims == first.dims)
            && self.inputs.iter().any(|map| map.dims == first.dims)
            && !(0..self.factors.len()).any(|factor| self.is_reduction(factor as FactorIndex))
    }

    /// Whether a factor that is already in `parts` equal parts can be split by `size` more.
    pub fn divides(&self, factor: FactorIndex, parts: u64, size: u32) -> bool {
        self.factors[factor as usize].divides_into(parts.saturating_mul(u64::from(size)))
    }

    /// The product of all factor sizes: the op's iteration space.
    pub fn iterations(&self) -> u64 {
        self.factors.iter().fold(1u64, |n, f| n.saturating_mul(f.size))
    }

    /// Verifies the invariants in the module's documentation.
    pub fn check(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Result<(), String> {
        if self.inputs.len() != inputs.len() || self.outputs.len() != outputs.len() {
            return Err("rule and op differ in the number of operands or results".into());
        }
        for (i, a) in self.factors.iter().enumerate() {
            if self.factors[..i].iter().any(|b| a.name == b.name) {
                return Err(format!("two factors are called {}", a.name));
            }
        }
        let results = self.outputs.iter().zip(outputs).map(|p| (p, true));
        for ((map, ty), is_output) in self.inputs.iter().zip(inputs).map(|p| (p, false)).chain(results) {
            self.check_tensor(map, ty, is_output)?;
            if let Some(f) = map.partial {
                let known = usize::from(f) < self.factors.len();
                if !known || is_output || map.has(f) || self.outputs.iter().any(|o| o.has(f)) {
                    return Err(format!("{ty}: partial sums need a factor of their own"));
                }
            }
        }
        Ok(())
    }

    fn check_tensor(&self, map: &TensorMap, ty: &TensorType, is_output: bool) -> Result<(), String> {
        if map.dims.len() != ty.rank() {
            return Err(format!("map of rank {} for {ty}", map.dims.len()));
        }
        let mut seen = [false; 256];
        for (d, dim) in map.dims.iter().enumerate() {
            let mut size = 1u64;
            for &f in &dim.factors {
                let factor = self.factors.get(f as usize).ok_or("no such factor")?;
                if std::mem::replace(&mut seen[f as usize], true) {
                    return Err(format!("factor {} appears twice in {ty}", factor.name));
                }
                if !factor.whole && factor.size > 1 && self.leading(dim) != Some(f) {
                    return Err(format!(
                        "factor {} may be split but does not lead dimension {d}",
                        factor.name
                    ));
                }
                size = size.saturating_mul(factor.size);
            }
            if dim.window.is_some() {
                if is_output || dim.factors.len() != 1 {
                    return Err(format!(
                        "dimension {d} of {ty}: a window is for inputs and takes one factor"
                    ));
                }
            } else if !dim.factors.is_empty() && size != ty.shape[d] {
                return Err(format!("dimension {d} of {ty} has factors of product {size}"));
            }
        }
        Ok(())
    }

    fn fmt_map(&self, map: &TensorMap, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in map.dims.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            if dim.factors.is_empty() {
                f.write_str("_")?;
            }
            for &factor in &dim.factors {
                f.write_str(self.factors[factor as usize].name)?;
            }
            if let Some(w) = dim.window {
                let sign = if w.reach == Reach::Forward { '>' } else { '<' };
                write!(f, "{sign}{}*{}{:+}", w.extent, w.stride, -w.pad)?;
            }
        }
        f.write_str("]")
    }
}

/// Shardy's notation: `([m, k], [k, n])->([m, n]) {m=8, k=16, n=8} reduction={k}`; a window is written
/// `h>3*1-1` (reads 3 positions, stride 1, from position -1; `<` looks backwards), `_` is opaque. `[d0]+t` is an operand that
/// is a partial sum along axes that split `t`.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (maps, arrow) in [(&self.inputs[..], ")->("), (&self.outputs[..], ")")] {
            if arrow == ")->(" {
                f.write_str("(")?;
            }
            for (i, map) in maps.iter().enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                self.fmt_map(map, f)?;
                f.write_str(match map.reduction {
                    Reduction::Sum => "",
                    Reduction::Max => "max",
                    Reduction::LogSumExp => "logsumexp",
                })?;
                if let Some(factor) = map.partial {
                    write!(f, "+{}", self.factors[factor as usize].name)?;
                }
            }
            f.write_str(arrow)?;
        }
        f.write_str(" {")?;
        for (i, factor) in self.factors.iter().enumerate() {
            write!(f, "{}{}={}", if i > 0 { ", " } else { "" }, factor.name, factor.size)?;
        }
        f.write_str("}")?;
        let reduced = |i: usize| self.is_reduction(i as FactorIndex) && !self.factors[i].whole;
        self.fmt_set(f, "reduction", reduced)?;
        self.fmt_set(f, "whole", |i| self.factors[i].whole)
    }
}

impl Rule {
    fn fmt_set(
        &self,
        f: &mut fmt::Formatter<'_>,
        title: &str,
        member: impl Fn(usize) -> bool,
    ) -> fmt::Result {
        let names: Vec<_> =
            (0..self.factors.len()).filter(|&i| member(i)).map(|i| self.factors[i].name).collect();
        if names.is_empty() { Ok(()) } else { write!(f, " {title}={{{}}}", names.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_windows_are_exactly_the_forward_windows_that_cover_a_position() {
        for (stride, pad, extent, size) in
            [(1, 1, 3, 8), (2, 0, 3, 9), (2, 3, 7, 16), (3, 0, 1, 10), (2, -1, 2, 9)]
        {
            let outputs = ((size as i64 + 2 * pad - extent as i64) / stride as i64 + 1) as u64;
            let forward = Window { reach: Reach::Forward, stride, pad, extent };
            let backward = Window { reach: Reach::Backward, ..forward };
            for i in 0..size {
                let covering: Vec<u64> = (0..outputs)
                    .filter(|&o| {
                        let (a, b) = forward.unclipped(&(o..o + 1));
                        a <= i as i64 && (i as i64) < b
                    })
                    .collect();
                if let (Some(&a), Some(&b)) = (covering.first(), covering.last()) {
                    assert_eq!(backward.range(&(i..i + 1), outputs), a..b + 1);
                }
            }
        }
    }
}
