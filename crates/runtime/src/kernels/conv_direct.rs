//! Convolutions of groups with very few channels (depthwise ones above all) without matrix products: each
//! weight times a row of the input, added to a row of the output.

use super::{conv::Sizes, unfold::parts};
use crate::tensor::Float;

/// Outputs that are worked on at a time: they stay in the first-level cache while all weights pass.
const CHUNK: usize = 2048;

/// A function compiled for several instruction sets, the best of which is chosen at each call.
macro_rules! vectorised {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) = $generic:ident) => {
        $(#[$doc])*
        pub(super) fn $name<T: Float>($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
                fn wide<T: Float>($($arg: $type),*) { $generic($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn medium<T: Float>($($arg: $type),*) { $generic($($arg),*) }
                let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
                if avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
                    // SAFETY: the processor has the features that the function is compiled for.
                    return unsafe { wide($($arg),*) };
                }
                if avx2 {
                    // SAFETY: the processor has the features that the function is compiled for.
                    return unsafe { medium($($arg),*) };
                }
            }
            $generic($($arg),*)
        }
    };
}

vectorised! {
    /// `y = conv(x, w)`.
    forward(sizes: &Sizes, x: &[T], w: &[T], y: &mut [T]) = forward_generic
}

vectorised! {
    /// `dx` from `dy` and `w`.
    grad_input(sizes: &Sizes, dy: &[T], w: &[T], dx: &mut [T]) = grad_input_generic
}

vectorised! {
    /// `dw` from `x` and `dy`.
    grad_weight(sizes: &Sizes, x: &[T], dy: &[T], dw: &mut [T]) = grad_weight_generic
}

/// Visits all pairs of an input channel and an output channel that see each other: where the two channels and
/// the weight between them lie.
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

#[inline(always)]
fn forward_generic<T: Float>(sizes: &Sizes, x: &[T], w: &[T], y: &mut [T]) {
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

#[inline(always)]
fn grad_input_generic<T: Float>(sizes: &Sizes, dy: &[T], w: &[T], dx: &mut [T]) {
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

#[inline(always)]
fn grad_weight_generic<T: Float>(sizes: &Sizes, x: &[T], dy: &[T], dw: &mut [T]) {
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

/// The inner product by sixteen independent sums, which the compiler keeps in registers.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    const LANES: usize = 16;
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [T::ZERO; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(T::ZERO, |sum, (&a, &b)| sum + a * b);
    lanes.iter().fold(rest, |sum, &lane| sum + lane)
}
