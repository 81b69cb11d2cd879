//! Another batch than the one that a file was exported with.
//!
//! Exporters bake the batch into the shapes that they write: inputs, targets of `Reshape` and `Expand`, masks.
//! Where a user asks for another batch, those that only fit the old one are scaled.

use super::literal::Literal;

/// The batch of the file, and the one that is asked for instead.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Rebatch {
    pub change: Option<(u64, u64)>,
}

impl Rebatch {
    /// The batch that is asked for, if a size is the file's.
    fn new_size(self, size: u64) -> Option<u64> {
        let (old, new) = self.change?;
        if old == 0 || !size.is_multiple_of(old) { None } else { (size / old).checked_mul(new) }
    }

    /// A reshape's target that fits `elements`: the one given, or the same with the batch in its first
    /// dimension that can hold it replaced.
    pub fn target(self, elements: u64, target: &[i64]) -> Option<Vec<i64>> {
        let (old, new) = self.change?;
        let product = target.iter().try_fold(1u64, |n, &t| n.checked_mul(u64::try_from(t).ok()?))?;
        if product.checked_mul(new) != elements.checked_mul(old) {
            return None;
        }
        self.replace_first(target)
    }

    /// The same sizes with the batch in the first one that can hold it replaced.
    pub fn replace_first(self, target: &[i64]) -> Option<Vec<i64>> {
        let holds = |t: &i64| u64::try_from(*t).ok().filter(|&t| t > 0).and_then(|t| self.new_size(t));
        let (i, size) = target.iter().enumerate().find_map(|(i, t)| Some((i, holds(t)?)))?;
        let mut target = target.to_vec();
        target[i] = i64::try_from(size).ok()?;
        Some(target)
    }

    /// Known contents for the new batch, where the first dimension is the old one and all rows are equal.
    pub fn literal(self, literal: &Literal) -> Option<Literal> {
        let (old, new) = self.change?;
        let (&rows, rest) = literal.shape.split_first()?;
        if rows != old || rows == 0 {
            return None;
        }
        let row = literal.len() / usize::try_from(rows).ok()?;
        let numbers = literal.to_reals();
        if (row..numbers.len()).any(|i| numbers[i].to_bits() != numbers[i % row].to_bits()) {
            return None;
        }
        let new_rows = usize::try_from(new).ok()?;
        if row.checked_mul(new_rows)? > super::stored::MOST_FOLDED {
            return None;
        }
        let shape = std::iter::once(new).chain(rest.iter().copied()).collect();
        Some(literal.pick(shape, (0..new_rows).flat_map(|_| 0..row)))
    }
}
