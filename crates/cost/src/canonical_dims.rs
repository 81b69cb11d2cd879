//! Canonical numbering of a tensor's dimensions, so that tensors of equal divisibility share cached results.
//!
//! The cost of a reshard depends on a tensor's bytes and on how finely its dimensions can be split, not on their order.
//! Dimensions are therefore renumbered. Dimensions that no axis can split are dropped; the others are sorted by how
//! finely they can be split. Ties are broken by the first mesh axis that shards the dimension. `[512, 64, 3, 3]` and
//! `[1024, 512]` then become equal, and so do rows that start from `S0 S1` and from `S1 S0`.

use crate::layout::{Arrangement, Layout, MAX_DIMS, Placement};
use shardwright_machine::AxisId;

/// The divisors of a tensor's dimensions in descending order. A divisor of one marks a dimension that cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DivisorClass(pub [u32; MAX_DIMS]);

impl DivisorClass {
    pub(crate) fn of(divisors: &[u32; MAX_DIMS]) -> DivisorClass {
        let mut sorted = *divisors;
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        DivisorClass(sorted)
    }

    /// Number of dimensions that can be split.
    pub(crate) fn rank(&self) -> u8 {
        self.0.iter().take_while(|&&divisor| divisor > 1).count() as u8
    }
}

/// The canonical numbers of a tensor's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CanonicalDims {
    /// By dimension; `NONE` for those that cannot be split.
    numbers: [u8; MAX_DIMS],
}

const NONE: u8 = u8::MAX;

impl CanonicalDims {
    /// The numbering for a tensor with these divisors that starts in layout `from`.
    pub(crate) fn new(divisors: &[u32; MAX_DIMS], from: &Layout) -> CanonicalDims {
        let class = DivisorClass::of(divisors);
        let mut numbers = [NONE; MAX_DIMS];
        let mut taken = [false; MAX_DIMS];
        let mut assign = |dim: usize| {
            let free = |&at: &usize| class.0[at] == divisors[dim] && !taken[at];
            if divisors[dim] > 1
                && numbers[dim] == NONE
                && let Some(at) = (0..MAX_DIMS).find(free)
            {
                (numbers[dim], taken[at]) = (at as u8, true);
            }
        };
        for axis in 0..from.len() as u32 {
            if let Placement::Shard(dim) = from.get(AxisId(axis)) {
                assign(usize::from(dim) % MAX_DIMS);
            }
        }
        (0..MAX_DIMS).for_each(assign);
        CanonicalDims { numbers }
    }

    /// A layout in canonical numbers; `None` if it shards a dimension that cannot be split.
    pub(crate) fn layout(&self, layout: &Layout) -> Option<Layout> {
        (0..layout.len() as u32).map(AxisId).try_fold(*layout, |renamed, axis| match layout.get(axis) {
            Placement::Shard(dim) => match self.numbers.get(usize::from(dim)) {
                Some(&number) if number != NONE => Some(renamed.with(axis, Placement::Shard(number))),
                _ => None,
            },
            _ => Some(renamed),
        })
    }

    /// An arrangement in the tensor's own dimensions.
    pub(crate) fn restore(&self, renamed: &Arrangement) -> Arrangement {
        let own = |number: u8| {
            let dim = self.numbers.iter().position(|&n| n == number);
            debug_assert!(dim.is_some(), "arrangements of the class shard only its dimensions");
            // No tensor has this dimension, so that the mistake cannot pass for dimension 0.
            dim.unwrap_or(MAX_DIMS) as u8
        };
        renamed.renumber(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{Replicated, Shard};

    #[test]
    fn tensors_of_equal_divisibility_become_equal() {
        let weight = [16, 16, 1, 1, 1, 1, 1, 1];
        let image = [1, 4, 16, 16, 1, 1, 1, 1];
        assert_eq!(DivisorClass::of(&weight).rank(), 2);
        assert_eq!(DivisorClass::of(&image).0[..3], [16, 16, 4]);
        // The first axis shards the second of two equal dimensions, which therefore becomes the first.
        let from = Layout::new(&[Shard(1), Shard(0), Replicated]);
        let dims = CanonicalDims::new(&weight, &from);
        assert_eq!(dims.layout(&from), Some(Layout::new(&[Shard(0), Shard(1), Replicated])));
        assert_eq!(dims.layout(&Layout::new(&[Shard(2)])), None, "cannot be split");
        let dims = CanonicalDims::new(&image, &Layout::new(&[Shard(3), Shard(1)]));
        assert_eq!(
            dims.layout(&Layout::new(&[Shard(1), Shard(2), Shard(3)])),
            Some(Layout::new(&[Shard(2), Shard(1), Shard(0)]))
        );
    }

    #[test]
    fn canonical_numbers_can_be_undone() {
        let divisors = [2, 16, 1, 8, 16, 1, 1, 1];
        let layout = Layout::new(&[Shard(4), Shard(0), Shard(4), Shard(3), Replicated]);
        let dims = CanonicalDims::new(&divisors, &layout);
        let at = Arrangement::canonical(&dims.layout(&layout).unwrap());
        assert_eq!(dims.restore(&at), Arrangement::canonical(&layout));
    }
}
