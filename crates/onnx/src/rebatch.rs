//! Changes the batch that a file was exported with.
//!
//! Exporters write the batch into shapes: of inputs, of targets of `Reshape` and `Expand`, of masks. If the user requests
//! another batch, the shapes that fit only the old batch are scaled.

use super::literal::{Literal, Numbers};

/// The batch of the file and the requested one, if they differ.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Rebatch {
    pub change: Option<(u64, u64)>,
}

impl Rebatch {
    /// The requested batch, if a size is the file's batch.
    fn new_size(self, size: u64) -> Option<u64> {
        let (old, new) = self.change?;
        if old == 0 || !size.is_multiple_of(old) { None } else { (size / old).checked_mul(new) }
    }

    /// A reshape target that fits `elements`: the given one, or the same with the batch replaced in the first dimension that
    /// is a multiple of it.
    pub fn target(self, elements: u64, target: &[i64]) -> Option<Vec<i64>> {
        let (old, new) = self.change?;
        let product = target.iter().try_fold(1u64, |n, &t| n.checked_mul(u64::try_from(t).ok()?))?;
        if product.checked_mul(new) != elements.checked_mul(old) {
            return None;
        }
        self.replace_first(target)
    }

    /// A target whose open dimension would absorb the new batch: it begins with the old batch where the reshaped tensor
    /// begins with the new one.
    pub fn open_target(self, from: &[u64], target: &[i64]) -> Option<Vec<i64>> {
        let (old, new) = self.change?;
        let begins =
            from.first() == Some(&new) && target.first().is_some_and(|&t| u64::try_from(t) == Ok(old));
        if !begins || !target.contains(&-1) {
            return None;
        }
        let mut target = target.to_vec();
        target[0] = i64::try_from(new).ok()?;
        Some(target)
    }

    /// An expansion target whose first size is the old batch, replaced by the new one if no other size equals it.
    pub fn expanded(self, from: &[u64], target: &[i64]) -> Option<Vec<i64>> {
        let (old, new) = self.change?;
        let first = target.first().is_some_and(|&t| u64::try_from(t) == Ok(old));
        let spread = from.len() < target.len() || from.first() == Some(&1);
        if old == 1 || !first || !spread {
            return None;
        }
        let mut target = target.to_vec();
        target[0] = i64::try_from(new).ok()?;
        Some(target)
    }

    /// The same sizes with the batch replaced in the first one that is a multiple of it.
    pub fn replace_first(self, target: &[i64]) -> Option<Vec<i64>> {
        let holds = |t: &i64| u64::try_from(*t).ok().filter(|&t| t > 0).and_then(|t| self.new_size(t));
        let (i, size) = target.iter().enumerate().find_map(|(i, t)| Some((i, holds(t)?)))?;
        let mut target = target.to_vec();
        target[i] = i64::try_from(size).ok()?;
        Some(target)
    }

    /// Whether `size` is the file's batch where `other` is the new one.
    pub fn is_behind(self, size: u64, other: u64) -> bool {
        self.change == Some((size, other))
    }

    /// Whether the first dimension of a shape is the file's batch. A batch of one is not told from other ones.
    pub fn fits(self, shape: &[u64]) -> bool {
        self.change.is_some_and(|(old, _)| old > 1 && shape.first() == Some(&old))
    }

    /// Whether the first dimension of known contents is the old batch and all rows are equal.
    pub fn repeats(self, literal: &Literal) -> bool {
        if !self.fits(&literal.shape) {
            return false;
        }
        let row = literal.len() / literal.shape[0] as usize;
        match &literal.numbers {
            Numbers::Ints(v) => (row..v.len()).all(|i| v[i] == v[i % row]),
            Numbers::Reals(v) => (row..v.len()).all(|i| v[i].to_bits() == v[i % row].to_bits()),
        }
    }

    /// Known contents for the new batch, if their rows are equal.
    pub fn literal(self, literal: &Literal) -> Option<Literal> {
        let (_, new) = self.change.filter(|_| self.repeats(literal))?;
        let (&rows, rest) = literal.shape.split_first()?;
        let row = literal.len() / usize::try_from(rows).ok()?;
        let new_rows = usize::try_from(new).ok()?;
        if row.checked_mul(new_rows)? > super::storage::MOST_FOLDED {
            return None;
        }
        let shape = std::iter::once(new).chain(rest.iter().copied()).collect();
        Some(literal.pick(shape, (0..new_rows).flat_map(|_| 0..row)))
    }
}
