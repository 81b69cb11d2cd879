//! The inner loops: min-plus products of small dense tables with vectors.
//!
//! Compiled twice, for any processor and for those with 256-bit vectors, and chosen at run time; both
//! give the same numbers, since a minimum of sums does not depend on the order of its terms.

/// `out[j] = min(out[j], left[i] + table[i][j])` over all rows `i`; `table` has `out.len()` columns.
pub fn min_plus(out: &mut [f64], left: &[f64], table: &[f64]) {
    debug_assert_eq!(table.len(), left.len() * out.len());
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has just been asked whether it has these instructions.
        unsafe { min_plus_avx2(out, left, table) };
        return;
    }
    min_plus_body(out, left, table);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn min_plus_avx2(out: &mut [f64], left: &[f64], table: &[f64]) {
    min_plus_body(out, left, table);
}

#[inline(always)]
fn min_plus_body(out: &mut [f64], left: &[f64], table: &[f64]) {
    for (&l, row) in left.iter().zip(table.chunks_exact(out.len())) {
        for (o, &t) in out.iter_mut().zip(row) {
            let c = l + t;
            // Not `f64::min`: its rule for NaN costs a second instruction, and there are none here.
            *o = if c < *o { c } else { *o };
        }
    }
}

/// The position and value of the least element; the first one where several are equal.
pub fn argmin(values: &[f64]) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (i, &v) in values.iter().enumerate() {
        if v < best.1 {
            best = (i, v);
        }
    }
    best
}
