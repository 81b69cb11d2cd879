//! Block geometry: sizes, intersections and positions of [`Block`]s of one tensor.
//!
//! A block has a range per dimension of the whole tensor. Two blocks in one call always belong to the same tensor. The block of a
//! scalar has no ranges and one element.

use crate::{
    region::Block,
    types::{Dims, Shape},
};

/// The block that covers a whole tensor of this shape.
pub fn whole(shape: &[u64]) -> Block {
    shape.iter().map(|&size| 0..size).collect()
}

/// Size of a block in each dimension.
pub fn extents(block: &Block) -> Shape {
    block.iter().map(|range| range.end - range.start).collect()
}

/// Number of elements in a block.
pub fn elements(block: &Block) -> u64 {
    block.iter().map(|range| range.end - range.start).product()
}

/// Index of a block's first element in the whole tensor.
pub fn start(block: &Block) -> Dims {
    block.iter().map(|range| range.start).collect()
}

/// The common part of two blocks; none where they have no element in common.
pub fn intersection(a: &Block, b: &Block) -> Option<Block> {
    let common: Block = a.iter().zip(b).map(|(a, b)| a.start.max(b.start)..a.end.min(b.end)).collect();
    common.iter().all(|range| range.start < range.end).then_some(common)
}

/// Whether `inner` lies inside `outer`.
pub fn contains(outer: &Block, inner: &Block) -> bool {
    outer.iter().zip(inner).all(|(outer, inner)| outer.start <= inner.start && inner.end <= outer.end)
}

/// The same elements as `block`, in positions relative to the first element of `outer`, which contains it.
pub fn relative_to(block: &Block, outer: &Block) -> Block {
    debug_assert!(contains(outer, block), "{block:?} is not inside {outer:?}");
    block.iter().zip(outer).map(|(block, outer)| block.start - outer.start..block.end - outer.start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    #[test]
    fn blocks_meet_in_a_block_or_not_at_all() {
        let (a, b): (Block, Block) = (smallvec![0..4, 2..6], smallvec![2..8, 0..3]);
        let common = intersection(&a, &b).unwrap();
        assert_eq!(common[..], [2..4, 2..3]);
        assert!(contains(&a, &common) && contains(&b, &common) && !contains(&a, &b));
        assert_eq!(intersection(&a, &smallvec![4..8, 2..6]), None, "they only touch");
        assert_eq!(intersection(&Block::new(), &Block::new()), Some(Block::new()), "scalars");
    }

    #[test]
    fn positions_are_relative_to_the_outer_block() {
        let (outer, inner): (Block, Block) = (smallvec![2..8, 10..20], smallvec![3..5, 10..11]);
        assert_eq!(relative_to(&inner, &outer)[..], [1..3, 0..1]);
        assert_eq!(start(&inner)[..], [3, 10]);
        assert_eq!((extents(&outer), elements(&outer)), (Shape::new(&[6, 10]), 60));
        assert_eq!(elements(&whole(&[3, 4])), 12);
        assert_eq!(elements(&whole(&[])), 1);
    }
}
