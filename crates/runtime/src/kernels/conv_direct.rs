//! Convolutions of groups with very few channels (depthwise ones above all) without matrix products: each
//! weight times a row of the input, added to a row of the output.

use super::{conv::Sizes, unfold::parts, vector::dot};
use crate::tensor::Float;
use shardwright_simd::vectorised_fn;

/// Outputs per strip: they stay in the first-level cache while all weights pass.
const CHUNK: usize = 2048;

/// Visits all connected pairs of an input and an output channel, with the positions of the two channels and
/// of the weight between them.
#[inline(always)]
fn for_pairs(sizes: &Sizes, mut visit: impl FnMut([usize; 3])) {
    for image in 0..sizes.images {
        for group in 0..sizes.groups {
            for o in 0..sizes.o {
                let y = sizes.output(image, group).start + o * sizes.outputs;
                for c in 0..sizes.c {
                    let x = sizes.input(image, group, &(c..c + 1)).start;
                    let w = ((group * sizes.o + o) * sizes.c + c) * sizes.positions;
                    visit([x, w, y]);
                }
            }
        }
    }
}

vectorised_fn! {
    /// `y = conv(x, w)`.
    pub(super) fn forward[T: Float][T](sizes: &Sizes, x: &[T], w: &[T], y: &mut [T]) {
        y.fill(T::ZERO);
        let stride = sizes.windows.axes[2].stride;
        for_pairs(sizes, |[at_x, at_w, at_y]| {
            let (x, w) = (&x[at_x..][..sizes.inputs], &w[at_w..][..sizes.positions]);
            let y = &mut y[at_y..][..sizes.outputs];
            for part in parts(sizes.outputs, CHUNK) {
                let y = &mut y[part.clone()];
                sizes.windows.for_pieces(part, |piece| {
                    let weight = w[piece.position];
                    let y = &mut y[piece.at + piece.skip..][..piece.met];
                    if stride == 1 {
                        y.iter_mut().zip(&x[piece.input..]).for_each(|(y, &x)| *y += weight * x);
                    } else {
                        let x = x[piece.input..].iter().step_by(stride);
                        y.iter_mut().zip(x).for_each(|(y, &x)| *y += weight * x);
                    }
                });
            }
        });
    }
}

vectorised_fn! {
    /// `dx` from `dy` and `w`.
    pub(super) fn grad_input[T: Float][T](sizes: &Sizes, dy: &[T], w: &[T], dx: &mut [T]) {
        dx.fill(T::ZERO);
        let stride = sizes.windows.axes[2].stride;
        for_pairs(sizes, |[at_x, at_w, at_y]| {
            let (dy, w) = (&dy[at_y..][..sizes.outputs], &w[at_w..][..sizes.positions]);
            let dx = &mut dx[at_x..][..sizes.inputs];
            for part in parts(sizes.outputs, CHUNK) {
                let dy = &dy[part.clone()];
                sizes.windows.for_pieces(part, |piece| {
                    let weight = w[piece.position];
                    let dy = &dy[piece.at + piece.skip..][..piece.met];
                    if stride == 1 {
                        dx[piece.input..].iter_mut().zip(dy).for_each(|(x, &y)| *x += weight * y);
                    } else {
                        let dx = dx[piece.input..].iter_mut().step_by(stride);
                        dx.zip(dy).for_each(|(x, &y)| *x += weight * y);
                    }
                });
            }
        });
    }
}

vectorised_fn! {
    /// `dw` from `x` and `dy`.
    pub(super) fn grad_weight[T: Float][T](sizes: &Sizes, x: &[T], dy: &[T], dw: &mut [T]) {
        dw.fill(T::ZERO);
        let stride = sizes.windows.axes[2].stride;
        for_pairs(sizes, |[at_x, at_w, at_y]| {
            let (x, dy) = (&x[at_x..][..sizes.inputs], &dy[at_y..][..sizes.outputs]);
            let dw = &mut dw[at_w..][..sizes.positions];
            for part in parts(sizes.outputs, CHUNK) {
                let dy = &dy[part.clone()];
                sizes.windows.for_pieces(part, |piece| {
                    let dy = &dy[piece.at + piece.skip..][..piece.met];
                    dw[piece.position] += if stride == 1 {
                        dot(&x[piece.input..][..piece.met], dy)
                    } else {
                        let x = x[piece.input..].iter().step_by(stride);
                        x.zip(dy).fold(T::ZERO, |sum, (&x, &y)| sum + x * y)
                    };
                });
            }
        });
    }
}
