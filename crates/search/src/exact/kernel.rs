//! The inner loops: min-plus products of small dense tables with vectors.
//!
//! Each loop is compiled for the widest vectors of the processor ([`shardwright_simd`]). All versions
//! give the same numbers, since a minimum of sums does not depend on the order of its terms.

use super::model::{INF, add};
use rayon::prelude::*;
use shardwright_simd::vectorised_fn;

vectorised_fn! {
    /// `out[j] = min(out[j], left[i] + table[i][j])` over all rows `i`; `table` has `out.len()` columns.
    pub fn min_plus[][](out: &mut [f64], left: &[f64], table: &[f64]) {
        debug_assert_eq!(table.len(), left.len() * out.len());
        min_plus_body(out, left, table);
    }
}

/// Works on groups of columns whose results stay in registers over all rows. If the width is no multiple, the last group
/// overlaps the one before: a repeated minimum changes nothing.
#[inline(always)]
fn min_plus_body(out: &mut [f64], left: &[f64], table: &[f64]) {
    let width = out.len();
    let mut at = 0;
    while at + 16 <= width {
        columns::<16>(out, left, table, at);
        at += 16;
    }
    while at + 8 <= width {
        columns::<8>(out, left, table, at);
        at += 8;
    }
    if at == width {
        return;
    }
    if width >= 8 && width - at > 4 {
        columns::<8>(out, left, table, width - 8);
    } else if width >= 4 {
        if width - at > 4 {
            columns::<4>(out, left, table, at);
        }
        columns::<4>(out, left, table, width - 4);
    } else {
        for j in 0..width {
            columns::<1>(out, left, table, j);
        }
    }
}

#[inline(always)]
fn columns<const N: usize>(out: &mut [f64], left: &[f64], table: &[f64], at: usize) {
    let mut best = [f64::INFINITY; N];
    best.copy_from_slice(&out[at..at + N]);
    for (&l, row) in left.iter().zip(table.chunks_exact(out.len())) {
        let mut cells = [0.0; N];
        cells.copy_from_slice(&row[at..at + N]);
        for k in 0..N {
            let c = l + cells[k];
            // Not `f64::min`: its rule for NaN costs a second instruction, and no cost is NaN.
            best[k] = if c < best[k] { c } else { best[k] };
        }
    }
    out[at..at + N].copy_from_slice(&best);
}

/// `out[x][y]`, the least `unary[i] + a[i][x] + b[i][y]` over `i`, exactly, in integers.
///
/// If every finite sum is below 2^53, it is computed in floating point, which is exact there and has faster minima. Long
/// tables are divided among the threads.
pub fn min_sum(unary: &[i64], a: &[i64], b: &[i64]) -> Vec<i64> {
    let (wa, wb) = (a.len() / unary.len(), b.len() / unary.len());
    let mut out = vec![INF; wa * wb];
    let largest = |costs: &[i64]| costs.iter().copied().filter(|&c| c < INF).max().unwrap_or(0);
    let total = i128::from(largest(unary)) + i128::from(largest(a)) + i128::from(largest(b));
    let float = total < EXACT;
    let fb: Vec<f64> = if float { b.iter().map(|&c| c as f64).collect() } else { Vec::new() };
    let row = |x: usize, out: &mut [i64]| {
        let left = unary.iter().enumerate().map(|(i, &u)| add(u, a[i * wa + x]));
        if float {
            let left: Vec<f64> = left.map(|c| c as f64).collect();
            let mut best = vec![f64::INFINITY; wb];
            min_plus(&mut best, &left, &fb);
            for (o, &c) in out.iter_mut().zip(&best) {
                *o = if c < EXACT as f64 { c as i64 } else { INF };
            }
        } else {
            for (l, cells) in left.zip(b.chunks_exact(wb)) {
                for (o, &c) in out.iter_mut().zip(cells) {
                    *o = (*o).min(add(l, c));
                }
            }
        }
    };
    if unary.len().saturating_mul(out.len()) > 1 << 21 {
        out.par_chunks_mut(wb).enumerate().for_each(|(x, out)| row(x, out));
    } else {
        out.chunks_mut(wb).enumerate().for_each(|(x, out)| row(x, out));
    }
    out
}

/// Integers below this are exact in floating point.
const EXACT: i128 = 1 << 53;

/// The position and value of the least element; of equal ones the first.
pub fn argmin(values: &[f64]) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (i, &v) in values.iter().enumerate() {
        if v < best.1 {
            best = (i, v);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn min_sum_is_exact_for_small_and_for_huge_costs() {
        for huge in [0i64, 1 << 55] {
            let unary = [3 + huge, 1, 5];
            let a = [1, 9, INF, 4, 0, 7];
            let b = [2, 8, INF, INF, 0, 6, 1, INF, 3];
            let out = min_sum(&unary, &a, &b);
            for x in 0..2 {
                for y in 0..3 {
                    let least = (0..3).map(|i| add(add(unary[i], a[i * 2 + x]), b[i * 3 + y])).min();
                    assert_eq!(Some(out[x * 3 + y]), least);
                }
            }
        }
    }

    #[test]
    fn min_plus_is_the_least_sum_of_each_column_for_every_width() {
        for width in 1..40usize {
            for rows in 1..5usize {
                let left: Vec<f64> = (0..rows).map(|i| ((i * 7) % 5) as f64).collect();
                let table: Vec<f64> = (0..rows * width).map(|k| ((k * 31 + 11) % 17) as f64).collect();
                let mut out = vec![9.0; width];
                min_plus(&mut out, &left, &table);
                let mut plain = vec![9.0; width];
                min_plus_body(&mut plain, &left, &table);
                for j in 0..width {
                    let least = (0..rows).map(|i| left[i] + table[i * width + j]).fold(9.0, f64::min);
                    assert_eq!((out[j], plain[j]), (least, least));
                }
            }
        }
    }
}
