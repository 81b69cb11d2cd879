//! Unfolding of inputs into the matrix that turns a convolution into a matrix product, and folding back.
//!
//! Row `c*positions + k` of the matrix holds the inputs that the output positions read through kernel position `k` of
//! channel `c`. For a 3×3 kernel the matrix is nine times as large as the image, so it is computed a [`ConvTile`]
//! at a time.

use super::window::Windows;
use crate::tensor::Float;
use shardwright_graph::ops::ConvTile;
use std::ops::Range;

/// A good tile for this many images and channels and elements of type `T`.
pub(crate) fn tile<T>(windows: &Windows, images: usize, channels: usize) -> ConvTile {
    ConvTile::new(size_of::<T>(), [windows.positions(), windows.outputs(), images, channels])
}

/// Elements of the largest tile.
pub(crate) fn tile_elements(tile: &ConvTile, windows: &Windows) -> usize {
    tile.images * tile.positions * tile.channels * windows.positions()
}

/// Consecutive parts of `0..count`, at most `step` each.
pub(crate) fn parts(count: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(step).map(move |start| start..(start + step).min(count))
}

/// Copies the inputs that the output positions `part` read of consecutive channels `x` into `matrix`, from column `at` on. Rows
/// of the matrix have `row` elements.
pub(crate) fn unfold<T: Float>(
    windows: &Windows,
    x: &[T],
    part: Range<usize>,
    (matrix, row, at): (&mut [T], usize, usize),
) {
    let stride = windows.axes[2].stride;
    let blocks = matrix.chunks_exact_mut(windows.positions() * row);
    for (x, block) in x.chunks_exact(windows.inputs()).zip(blocks) {
        windows.for_pieces(part.clone(), |piece| {
            let to = &mut block[piece.position * row + at + piece.at..][..piece.length];
            let (before, to) = to.split_at_mut(piece.skip);
            let (to, after) = to.split_at_mut(piece.met);
            before.fill(T::ZERO);
            after.fill(T::ZERO);
            match stride {
                1 => to.copy_from_slice(&x[piece.input..][..piece.met]),
                _ => windows.for_met(&piece, x, |i, x| to[i] = x),
            }
        });
    }
}

/// Adds each element of `matrix` to the input element that [`unfold`] reads for it.
pub(crate) fn fold<T: Float>(
    windows: &Windows,
    (matrix, row, at): (&[T], usize, usize),
    part: Range<usize>,
    x: &mut [T],
) {
    let stride = windows.axes[2].stride;
    let blocks = matrix.chunks_exact(windows.positions() * row);
    for (x, block) in x.chunks_exact_mut(windows.inputs()).zip(blocks) {
        windows.for_pieces(part.clone(), |piece| {
            let from = &block[piece.position * row + at + piece.at + piece.skip..][..piece.met];
            if stride == 1 {
                x[piece.input..][..piece.met].iter_mut().zip(from).for_each(|(x, &y)| *x += y);
            } else {
                x[piece.input..].iter_mut().step_by(stride).zip(from).for_each(|(x, &y)| *x += y);
            }
        });
    }
}
