//! How a space of arrangements sees a tensor: only the dimensions that can be cut, in an order that makes tensors
//! which can be cut alike equal.
//!
//! What a re-layout costs depends on a tensor's bytes and on how its dimensions may be cut, not on what the
//! dimensions are called. Dimensions are therefore renamed: those that no axis can cut are dropped, the others are
//! ordered by how finely they can be cut, and of dimensions alike in that those come first which the first axes shard.
//! `[512, 64, 3, 3]` and `[1024, 512]` are then the same, and so are rows that start from `S0 S1` and from `S1 S0`.

use crate::layout::{Arrangement, Layout, MAX_DIMS, Placement};
use shardwright_machine::AxisId;

/// How finely the dimensions of a tensor can be cut, finest first; ones stand for dimensions that cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Class(pub [u32; MAX_DIMS]);

impl Class {
    pub(crate) fn of(divisors: &[u32; MAX_DIMS]) -> Class {
        let mut sorted = *divisors;
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        Class(sorted)
    }

    /// Dimensions that can be cut.
    pub(crate) fn rank(&self) -> u8 {
        self.0.iter().take_while(|&&divisor| divisor > 1).count() as u8
    }
}

/// The new names of a tensor's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Frame {
    /// By dimension; `NONE` for those that cannot be cut.
    names: [u8; MAX_DIMS],
}

const NONE: u8 = u8::MAX;

impl Frame {
    /// For a tensor with these divisors that lies in this layout at first.
    pub(crate) fn new(divisors: &[u32; MAX_DIMS], from: &Layout) -> Frame {
        let class = Class::of(divisors);
        let mut names = [NONE; MAX_DIMS];
        let mut taken = [false; MAX_DIMS];
        let mut name = |dim: usize| {
            let alike = |&at: &usize| class.0[at] == divisors[dim] && !taken[at];
            if divisors[dim] > 1
                && names[dim] == NONE
                && let Some(at) = (0..MAX_DIMS).find(alike)
            {
                (names[dim], taken[at]) = (at as u8, true);
            }
        };
        for axis in 0..from.len() as u32 {
            if let Placement::Shard(dim) = from.get(AxisId(axis)) {
                name(usize::from(dim) % MAX_DIMS);
            }
        }
        (0..MAX_DIMS).for_each(name);
        Frame { names }
    }

    /// A layout in the new names; `None` if it cuts what cannot be cut.
    pub(crate) fn layout(&self, layout: &Layout) -> Option<Layout> {
        (0..layout.len() as u32).map(AxisId).try_fold(*layout, |renamed, axis| match layout.get(axis) {
            Placement::Shard(dim) => match self.names.get(usize::from(dim)) {
                Some(&name) if name != NONE => Some(renamed.with(axis, Placement::Shard(name))),
                _ => None,
            },
            _ => Some(renamed),
        })
    }

    /// An arrangement in the tensor's own names.
    pub(crate) fn restore(&self, renamed: &Arrangement) -> Arrangement {
        let own = |name: u8| self.names.iter().position(|&n| n == name).unwrap_or(0) as u8;
        renamed.rename(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{Replicated, Shard};

    #[test]
    fn tensors_that_can_be_cut_alike_look_alike() {
        let weight = [16, 16, 1, 1, 1, 1, 1, 1];
        let image = [1, 4, 16, 16, 1, 1, 1, 1];
        assert_eq!(Class::of(&weight).rank(), 2);
        assert_eq!(Class::of(&image).0[..3], [16, 16, 4]);
        // The first axis shards the second of two dimensions alike: it gets the first name.
        let from = Layout::new(&[Shard(1), Shard(0), Replicated]);
        let frame = Frame::new(&weight, &from);
        assert_eq!(frame.layout(&from), Some(Layout::new(&[Shard(0), Shard(1), Replicated])));
        assert_eq!(frame.layout(&Layout::new(&[Shard(2)])), None, "cannot be cut");
        let frame = Frame::new(&image, &Layout::new(&[Shard(3), Shard(1)]));
        assert_eq!(
            frame.layout(&Layout::new(&[Shard(1), Shard(2), Shard(3)])),
            Some(Layout::new(&[Shard(2), Shard(1), Shard(0)]))
        );
    }

    #[test]
    fn names_go_there_and_back() {
        let divisors = [2, 16, 1, 8, 16, 1, 1, 1];
        let layout = Layout::new(&[Shard(4), Shard(0), Shard(4), Shard(3), Replicated]);
        let frame = Frame::new(&divisors, &layout);
        let at = Arrangement::canonical(&frame.layout(&layout).unwrap());
        assert_eq!(frame.restore(&at), Arrangement::canonical(&layout));
    }
}
