//! Floating-point costs as exact integers: one power of two for the whole network.
//!
//! This serves callers whose costs are seconds rather than counts.

use super::{FORBIDDEN, MAX_TOTAL};

/// Why floating-point costs could not be scaled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ScaleError {
    #[error("cost {index} is {value}; costs must be numbers from zero up, or infinity for forbidden")]
    NotACost { index: usize, value: f64 },
}

/// Multiplies costs by a power of two so that they become integers.
///
/// If all costs are multiples of one power of two within about 60 bits of their total, the integers and all sums are
/// exact. Otherwise each cost is rounded to the nearest integer, by at most half a unit of `2^-exponent`, and
/// [`FloatScale::exact`] is false.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatScale {
    exponent: i32,
    exact: bool,
}

impl FloatScale {
    /// The scale for a network: `costs` are all values, `total` is an upper bound on the cost of any assignment (say, the
    /// sum of the largest finite value of each variable and edge).
    ///
    /// # Errors
    /// Where a cost is negative or not a number.
    pub fn fit(costs: impl IntoIterator<Item = f64>, total: f64) -> Result<Self, ScaleError> {
        let mut needed = i32::MIN;
        let mut largest = 0f64;
        for (index, value) in costs.into_iter().enumerate() {
            if value.is_nan() || value < 0.0 {
                return Err(ScaleError::NotACost { index, value });
            }
            if value > 0.0 && value.is_finite() {
                needed = needed.max(-lowest_bit(value));
                largest = largest.max(value);
            }
        }
        if needed == i32::MIN {
            return Ok(FloatScale { exponent: 0, exact: true });
        }
        let total = if total.is_finite() { total.max(largest) } else { largest * 1e6 };
        // A single cost and the total must both stay below their limits, with room for rounding.
        let room = |ceiling: i64, value: f64| ((ceiling as f64) / value).log2().floor() as i32 - 1;
        let most = room(MAX_TOTAL, total).min(room(FORBIDDEN, largest));
        Ok(FloatScale { exponent: needed.min(most), exact: needed <= most })
    }

    /// The power of two that costs are multiplied by.
    pub const fn exponent(self) -> i32 {
        self.exponent
    }

    /// Whether no cost is rounded.
    pub const fn exact(self) -> bool {
        self.exact
    }

    /// The integer of a cost. Infinity and costs above the fitted range become forbidden.
    pub fn to_integer(self, cost: f64) -> i64 {
        let scaled = scale_by(cost, self.exponent).round();
        if scaled >= FORBIDDEN as f64 { FORBIDDEN } else { scaled as i64 }
    }

    /// The cost of an integer or of a sum of integers.
    pub fn to_float(self, cost: i128) -> f64 {
        scale_by(cost as f64, -self.exponent)
    }
}

/// The exponent of the lowest set bit of a positive finite number.
fn lowest_bit(value: f64) -> i32 {
    let bits = value.to_bits();
    let (exponent, fraction) = (((bits >> 52) & 0x7ff) as i32, bits & ((1 << 52) - 1));
    let (mantissa, exponent) =
        if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) };
    exponent + mantissa.trailing_zeros() as i32
}

/// `value * 2^exponent`, in steps without intermediate overflow.
fn scale_by(value: f64, exponent: i32) -> f64 {
    let mut value = value;
    let mut left = exponent;
    while left != 0 {
        let step = left.clamp(-1000, 1000);
        value *= 2f64.powi(step);
        left -= step;
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_fractions_scale_exactly() {
        let s = FloatScale::fit([0.5, 3.25, 1024.0, 0.0, f64::INFINITY], 2000.0).unwrap();
        assert!(s.exact());
        assert_eq!((s.exponent(), s.to_integer(3.25), s.to_integer(f64::INFINITY)), (2, 13, FORBIDDEN));
        assert_eq!(s.to_float(13), 3.25);
    }

    #[test]
    fn decimal_fractions_keep_at_least_fifty_bits_of_the_total() {
        let s = FloatScale::fit([0.1, 1e-30, 7.3], 100.0).unwrap();
        assert!(!s.exact());
        assert!((s.to_float(i128::from(s.to_integer(7.3))) - 7.3).abs() < 1e-14);
        assert_eq!(s.to_integer(1e-30), 0);
    }

    #[test]
    fn tiny_and_huge_costs_do_not_overflow() {
        for v in [f64::MIN_POSITIVE / 4.0, 1e-300, 1e300, f64::MAX / 4.0] {
            let s = FloatScale::fit([v], v).unwrap();
            assert!(s.exact(), "{v}");
            assert_eq!(s.to_float(i128::from(s.to_integer(v))), v);
        }
    }

    #[test]
    fn negative_and_missing_numbers_are_refused() {
        assert!(FloatScale::fit([1.0, -1.0], 1.0).is_err());
        assert!(FloatScale::fit([f64::NAN], 1.0).is_err());
    }
}
