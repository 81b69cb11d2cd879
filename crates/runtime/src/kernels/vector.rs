//! Loops over contiguous rows that several kernels share: sums, dot products, maxima. [`shardwright_simd`] compiles their callers for
//! wide vectors.

use crate::tensor::Float;

/// Number of independent partial results: enough to fill the vector registers of any processor.
pub(crate) const LANES: usize = 16;

/// Adds up lanes pairwise, which rounds less than a running sum.
#[inline(always)]
fn join<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            lanes[k] += lanes[k + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of a row.
#[inline(always)]
pub(crate) fn sum<T: Float>(x: &[T]) -> T {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    rest.iter().fold(join(lanes), |sum, &x| sum + x)
}

/// Elements per strip where results are needed only for their sum. A strip is stored before it is summed: that keeps the loop which computes it
/// simple enough to be vectorised.
pub(crate) const STRIP: usize = 128;

/// `y = exp(x - m)` for a row.
#[inline(always)]
pub(crate) fn exp_less<T: Float>(x: &[T], m: T, y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = (x - m).exp();
    }
}

/// The sum of `exp(x - m)` over a row.
#[inline(always)]
pub(crate) fn sum_exp<T: Float>(x: &[T], m: T) -> T {
    let mut strip = [T::ZERO; STRIP];
    let mut total = T::ZERO;
    for x in x.chunks(STRIP) {
        let strip = &mut strip[..x.len()];
        exp_less(x, m, strip);
        total += sum(strip);
    }
    total
}

/// The sum of `x * y` over two rows of the same length.
#[inline(always)]
pub(crate) fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [T::ZERO; LANES];
    for (xs, ys) in xs.iter().zip(ys) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(xs).zip(ys) {
            *lane += x * y;
        }
    }
    x_rest.iter().zip(y_rest).fold(join(lanes), |sum, (&x, &y)| sum + x * y)
}

/// The largest element of a row; minus infinity if there is none.
#[inline(always)]
pub(crate) fn largest<T: Float>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    rest.iter().chain(&lanes).fold(T::NEG_INFINITY, |a, &b| larger(a, b))
}
