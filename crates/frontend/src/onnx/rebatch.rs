//! Another batch than the one that a file was exported with.
//!
//! Exporters bake the batch into the shapes that they write: inputs, targets of `Reshape` and `Expand`, masks.
//! Where a user asks for another batch, those that only fit the old one are scaled.

use super::literal::{Literal, Numbers};

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

    /// A target whose open dimension would swallow the new batch: it begins with the old batch, as what is
    /// reshaped begins with the new one.
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

    /// Sizes to expand to: the first is the batch if it is what the file has, and nothing else has that size.
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

    /// The same sizes with the batch in the first one that can hold it replaced.
    pub fn replace_first(self, target: &[i64]) -> Option<Vec<i64>> {
        let holds = |t: &i64| u64::try_from(*t).ok().filter(|&t| t > 0).and_then(|t| self.new_size(t));
        let (i, size) = target.iter().enumerate().find_map(|(i, t)| Some((i, holds(t)?)))?;
        let mut target = target.to_vec();
        target[i] = i64::try_from(size).ok()?;
        Some(target)
    }

    /// Whether one tensor has the file's batch where another has the new one.
    pub fn is_behind(self, size: u64, other: u64) -> bool {
        self.change == Some((size, other))
    }

    /// Whether the first dimension of known contents is the old batch, and all rows are equal.
    pub fn repeats(self, literal: &Literal) -> bool {
        let Some(((old, _), &rows)) = self.change.zip(literal.shape.first()) else { return false };
        if rows != old || rows < 2 {
            return false;
        }
        let row = literal.len() / rows as usize;
        match &literal.numbers {
            Numbers::Ints(v) => (row..v.len()).all(|i| v[i] == v[i % row]),
            Numbers::Reals(v) => (row..v.len()).all(|i| v[i].to_bits() == v[i % row].to_bits()),
        }
    }

    /// Known contents for the new batch, where they repeat for the old one.
    pub fn literal(self, literal: &Literal) -> Option<Literal> {
        let (_, new) = self.change.filter(|_| self.repeats(literal))?;
        let (&rows, rest) = literal.shape.split_first()?;
        let row = literal.len() / usize::try_from(rows).ok()?;
        let new_rows = usize::try_from(new).ok()?;
        if row.checked_mul(new_rows)? > super::stored::MOST_FOLDED {
            return None;
        }
        let shape = std::iter::once(new).chain(rest.iter().copied()).collect();
        Some(literal.pick(shape, (0..new_rows).flat_map(|_| 0..row)))
    }
}
