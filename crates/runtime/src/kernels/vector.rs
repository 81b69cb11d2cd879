//! What the kernels that work on contiguous rows share: wide vectors where the machine has them, and sums.

use crate::tensor::Float;

/// Runs `f`, compiled for the widest vectors that the machine has.
///
/// The binary is built for any machine of its architecture; loops that are inlined into `f` (hence the
/// `inline(always)` all over this file) are compiled once more for each set of instructions listed here.
/// Results do not depend on the choice: nothing is reassociated and no multiply-add is fused.
#[inline(always)]
pub(crate) fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "avx2")]
        fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // The answers are cached by the standard library; asking costs a load.
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the machine has the instructions that the function is compiled for.
            return unsafe { with_avx512(f) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { with_avx2(f) };
        }
    }
    f()
}

/// Independent partial results: enough to fill the vector registers of any machine.
pub(crate) const LANES: usize = 16;

/// Adds up lanes pairwise, which loses less than adding them one after the other.
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

/// The sum of `f(x)` over a row.
#[inline(always)]
pub(crate) fn sum<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    rest.iter().fold(join(lanes), |sum, &x| sum + f(x))
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

/// Sums of `K` terms over a row, `term(i)` giving those of the `i`-th chunk of [`LANES`] positions and
/// `rest(j)` those of position `j` behind the last whole chunk.
#[inline(always)]
pub(crate) fn sums<T: Float, const K: usize>(
    row: usize,
    term: impl Fn(usize) -> [[T; LANES]; K],
    rest: impl Fn(usize) -> [T; K],
) -> [T; K] {
    let mut lanes = [[T::ZERO; LANES]; K];
    for i in 0..row / LANES {
        let terms = term(i);
        for (lanes, terms) in lanes.iter_mut().zip(terms) {
            for (lane, term) in lanes.iter_mut().zip(terms) {
                *lane += term;
            }
        }
    }
    let mut sums = lanes.map(join);
    for j in row / LANES * LANES..row {
        for (sum, term) in sums.iter_mut().zip(rest(j)) {
            *sum += term;
        }
    }
    sums
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
