//! Reduced costs of a pair of variables: its costs minus the messages to its ends. Their minima are the terms of a bound,
//! as exact numbers with [`FRACTION`] binary digits after the point.

use super::model::INF;

/// Binary digits after the point of messages and multipliers.
pub const FRACTION: u32 = 24;

/// The least reduced costs of a pair, by row and by column.
#[derive(Debug, Default)]
pub struct PairReducedCosts {
    /// By row.
    pub rows: Vec<i128>,
    /// By column.
    pub columns: Vec<i128>,
    narrow: Vec<i64>,
    least: Vec<i64>,
}

impl PairReducedCosts {
    /// Computes the minima by row and column and returns the overall minimum, `i128::MAX` if all costs are forbidden.
    /// `largest` is the largest absolute value of the table's finite costs.
    pub fn least(&mut self, table: &[i64], largest: i64, rows: &[i128], columns: &[i128]) -> i128 {
        const MOST: i128 = 1 << 60;
        let small = |m: &i128| m.abs() < MOST;
        self.rows.clear();
        if (i128::from(largest) << FRACTION) < MOST && rows.iter().all(small) && columns.iter().all(small) {
            // All sums fit 64 bits, which is several times faster.
            self.narrow.clear();
            self.narrow.extend(columns.iter().map(|&m| m as i64));
            self.least.clear();
            self.least.resize(columns.len(), i64::MAX);
            for (cells, &own) in table.chunks_exact(columns.len()).zip(rows) {
                let own = own as i64;
                let mut least = i64::MAX;
                for ((&c, &m), below) in cells.iter().zip(&self.narrow).zip(&mut self.least) {
                    let left = if c < INF { (c << FRACTION) - m - own } else { i64::MAX };
                    least = least.min(left);
                    *below = (*below).min(left);
                }
                self.rows.push(widen(least));
            }
            self.columns.clear();
            self.columns.extend(self.least.iter().map(|&least| widen(least)));
        } else {
            self.columns.clear();
            self.columns.resize(columns.len(), i128::MAX);
            for (cells, &own) in table.chunks_exact(columns.len()).zip(rows) {
                let mut least = i128::MAX;
                for ((&c, &m), below) in cells.iter().zip(columns).zip(&mut self.columns) {
                    if c < INF {
                        let left = (i128::from(c) << FRACTION) - m - own;
                        least = least.min(left);
                        *below = (*below).min(left);
                    }
                }
                self.rows.push(least);
            }
        }
        self.rows.iter().copied().min().unwrap_or(i128::MAX)
    }
}

/// Widens a number; the maximum, which means "forbidden", stays the maximum.
fn widen(least: i64) -> i128 {
    if least == i64::MAX { i128::MAX } else { i128::from(least) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_numbers_give_the_same_result() {
        // Costs times 2^24 fit 64 bits in the first case and not in the second.
        for unit in [1i64, 1 << 40] {
            let table = [3 * unit, INF, 5 * unit, unit, 4 * unit, INF];
            let fixed = |x: i64| i128::from(x * unit) << FRACTION;
            let (rows, columns) = ([fixed(1), fixed(0)], [fixed(2), fixed(3), fixed(-1)]);
            let mut reduced = PairReducedCosts::default();
            let least = reduced.least(&table, 5 * unit, &rows, &columns);
            assert_eq!(reduced.rows, [fixed(0), fixed(-1)]);
            assert_eq!(reduced.columns, [fixed(-1), fixed(1), fixed(5)]);
            assert_eq!(least, fixed(-1));
        }
    }
}
