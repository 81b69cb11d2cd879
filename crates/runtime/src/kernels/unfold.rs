//! Unfolding of inputs into the matrix that turns a convolution into a matrix product, and folding back.
//!
//! Row `c*positions + k` of the matrix holds what each output position reads through kernel position `k` of
//! channel `c`. The matrix of a whole image is nine times the image for a 3×3 kernel, so it is made a [`Tile`]
//! at a time.

use super::window::Windows;
use crate::tensor::Float;
use std::ops::Range;

/// Bytes of a tile: half of a common second-level cache, since the matrix product needs room as well.
const TILE_BYTES: usize = 512 << 10;
/// Output positions of a tile, if there are as many and channels do not run out.
const TILE_POSITIONS: usize = 288;

/// How much of the matrix is made at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// Images side by side: more than one only where they are small and fit whole.
    pub images: usize,
    /// Channels.
    pub channels: usize,
    /// Output positions of each image.
    pub positions: usize,
}

impl Tile {
    /// A good tile for this many images and channels and elements of type `T`.
    pub fn new<T>(windows: &Windows, images: usize, channels: usize) -> Self {
        let (kernel, outputs) = (windows.positions(), windows.outputs());
        let elements = TILE_BYTES / size_of::<T>();
        let wanted = TILE_POSITIONS.max(elements / (channels * kernel));
        let images = (wanted / outputs).clamp(1, images);
        let wanted = wanted.min(images * outputs);
        let channels = (elements / (wanted * kernel)).clamp(1, channels);
        // One channel of a large kernel may already be too much: then fewer positions.
        let positions = (elements / (channels * kernel)).clamp(1, wanted);
        Self { images: (positions / outputs).max(1), channels, positions: positions.min(outputs) }
    }

    /// Elements of the largest tile.
    pub fn elements(&self, windows: &Windows) -> usize {
        self.images * self.positions * self.channels * windows.positions()
    }
}

/// Consecutive parts of `0..count`, at most `step` each.
pub(crate) fn parts(count: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(step).map(move |start| start..(start + step).min(count))
}

/// Copies what the output positions `part` read of consecutive channels `x` into `matrix`, whose rows are
/// `row` long, starting at column `at`.
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

/// Adds each element of `matrix` to where [`unfold`] would have read it.
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
