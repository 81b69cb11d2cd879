//! The hot loop of the elimination solvers: the least sum of two rows of costs.
//!
//! Each loop is compiled for the widest vectors of the processor ([`shardwright_simd`]). Costs may be
//! [`INFINITE`], which stands for "forbidden"; [`add`] keeps sums of it from growing. Nothing here knows about networks.

use crate::network::{MAX_TOTAL, is_forbidden};
use shardwright_simd::vectorised_fn;

/// Above every finite total, and small enough that the sum of two does not overflow.
pub(crate) const INFINITE: i64 = MAX_TOTAL + 1;

const _: () = assert!(INFINITE <= i64::MAX / 2);

/// A network's cost in these tables.
pub(crate) const fn cost(cost: i64) -> i64 {
    if is_forbidden(cost) { INFINITE } else { cost }
}

/// The sum of two costs, infinite where either is.
#[inline(always)]
pub(crate) fn add(a: i64, b: i64) -> i64 {
    (a + b).min(INFINITE)
}

/// The first choice with the least `a[c] + b[c]`, and that sum.
pub(crate) fn argmin_sum(a: &[i64], b: &[i64]) -> (usize, i64) {
    let mut best = (0, INFINITE);
    for (choice, (&x, &y)) in a.iter().zip(b).enumerate() {
        if add(x, y) < best.1 {
            best = (choice, add(x, y));
        }
    }
    best
}

const LANES: usize = 8;

#[inline(always)]
fn min_generic(row: &[i64]) -> i64 {
    let mut lanes = [INFINITE; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).min(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = (*lane).min(x);
    }
    lanes.into_iter().fold(INFINITE, i64::min)
}

#[inline(always)]
fn min_sum_generic(a: &[i64], b: &[i64]) -> i64 {
    let mut lanes = [INFINITE; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane].min(x[lane] + y[lane]);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane = (*lane).min(x + y);
    }
    lanes.into_iter().fold(INFINITE, i64::min)
}

/// For every row `k` of `b` (each as long as `a`): the least `a[c] + b[k][c]`, into `out[k]`.
#[inline(always)]
fn min_sums_generic(a: &[i64], b: &[i64], out: &mut [i64]) {
    for (least, row) in out.iter_mut().zip(b.chunks_exact(a.len().max(1))) {
        *least = min_sum_generic(a, row);
    }
}

/// For every row of `rows` (each `width` long): its least value, into `out`.
#[inline(always)]
fn mins_generic(rows: &[i64], width: usize, out: &mut [i64]) {
    for (least, row) in out.iter_mut().zip(rows.chunks_exact(width.max(1))) {
        *least = min_generic(row);
    }
}

vectorised_fn! {
    /// For every row `k` of `b` (each as long as `a`): the least `a[c] + b[k][c]`, into `out[k]`.
    pub(crate) fn min_sums[][](a: &[i64], b: &[i64], out: &mut [i64]) {
        min_sums_generic(a, b, out);
    }
}

vectorised_fn! {
    /// For every row of `rows` (each `width` long): its least value, into `out`.
    pub(crate) fn mins[][](rows: &[i64], width: usize, out: &mut [i64]) {
        mins_generic(rows, width, out);
    }
}

vectorised_fn! {
    /// `row[c] + other[c]` for every `c`, into `row`.
    pub(crate) fn add_row[][](row: &mut [i64], other: &[i64]) {
        for (cell, &more) in row.iter_mut().zip(other) {
            *cell = add(*cell, more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_version_gives_the_plain_answer(
            width in 1usize..40, rows in 1usize..5, seed in any::<u64>(),
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                if state >> 61 == 0 { INFINITE } else { (state >> 40) as i64 }
            };
            let a: Vec<i64> = (0..width).map(|_| next()).collect();
            let b: Vec<i64> = (0..width * rows).map(|_| next()).collect();
            let sums: Vec<i64> = b
                .chunks(width)
                .map(|row| row.iter().zip(&a).map(|(&x, &y)| add(x, y)).min().unwrap())
                .collect();
            let mut out = vec![0; rows];
            min_sums(&a, &b, &mut out);
            prop_assert_eq!(&out, &sums);
            min_sums_generic(&a, &b, &mut out);
            prop_assert_eq!(&out, &sums);
            let least: Vec<i64> = b.chunks(width).map(|row| *row.iter().min().unwrap()).collect();
            mins(&b, width, &mut out);
            prop_assert_eq!(&out, &least);
            prop_assert_eq!(argmin_sum(&a, &b[..width]).1, sums[0]);
        }
    }
}
