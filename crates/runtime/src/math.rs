//! Transcendental functions of `f32` that compilers turn into vector code, and erf of `f64`.
//!
//! A library call per element costs five to twenty times as much. These functions have no branches, no tables
//! and no fused multiply-add, so loops over them vectorise on any processor and give the same bits on all
//! of them. `f64` is for checks and goes through the standard library.

/// e to the x, within 2 units in the last place; subnormal results lose no more than rounding.
///
/// Range reduction and polynomial as in Moshier's Cephes library, `expf`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these the result is infinite or zero. Comparisons written so that NaN passes through.
    let x = if x > 89.0 { 89.0 } else { x };
    // Arguments whose result vanishes are replaced by 0: subnormal intermediate results take a hundred times as long.
    let vanishes = x < -104.0;
    let x = if vanishes { 0.0 } else { x };
    // Adding 1.5 * 2^23 rounds to the nearest whole number, which then sits in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let power = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    // x - n*ln(2), with ln(2) in two parts of which the first has few enough bits for an exact product.
    let r = (x - n * (355.0 / 512.0)) - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // 2^n in two factors, so that neither leaves the range of exponents before the product does.
    let half = power >> 1;
    let two_to = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let y = y * two_to(half) * two_to(power.wrapping_sub(half));
    if vanishes { 0.0 } else { y }
}

/// Hyperbolic tangent, within 4 units in the last place.
///
/// Near zero Cephes' polynomial (`tanhf`), elsewhere by [`exp`].
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_5e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let small = p * z * x + x;
    let large = (1.0 - 2.0 / (exp(a + a) + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

/// The Gauss error function, within 4e-7 of it.
///
/// `x P(x²) / Q(x²)`, fitted to least relative error (2e-8) up to where the nearest `f32` is one.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    const END: f32 = 3.919_206;
    let x = if x > END { END } else { x };
    let x = if x < -END { -END } else { x };
    let z = x * x;
    let p = 2.051_065_8e-6;
    let p = p * z + 2.848_600_3e-4;
    let p = p * z + 3.762_998_9e-3;
    let p = p * z + 5.274_075e-2;
    let p = p * z + 1.903_406_1e-1;
    let p = p * z + std::f32::consts::FRAC_2_SQRT_PI;
    let q = 3.810_067e-5;
    let q = q * z + 1.161_968_5e-3;
    let q = q * z + 1.496_393_9e-2;
    let q = q * z + 1.140_825_6e-1;
    let q = q * z + 5.020_177_4e-1;
    let q = q * z + 1.0;
    let y = x * p / q;
    let y = if y > 1.0 { 1.0 } else { y };
    if y < -1.0 { -1.0 } else { y }
}

/// erf to the last bit or two of f64: series near zero, continued fraction in the tail.
pub(crate) fn erf_f64(x: f64) -> f64 {
    let a = x.abs();
    if a < 2.5 {
        // erf(x) = 2/sqrt(pi) * exp(-x^2) * sum 2^n x^(2n+1) / (2n+1)!!
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-17 * sum.abs() && n < 200.0 {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    } else if a > 6.0 {
        x.signum()
    } else {
        // erfc(a) = exp(-a^2)/sqrt(pi) / (a + (1/2)/(a + (2/2)/(a + (3/2)/...)))
        let mut fraction = a;
        for k in (1..=60).rev() {
            fraction = a + f64::from(k) * 0.5 / fraction;
        }
        let erfc = (-a * a).exp() * (0.5 * std::f64::consts::FRAC_2_SQRT_PI) / fraction;
        x.signum() * (1.0 - erfc)
    }
}

/// The inverse of [`erf_f64`]: Winitzki's approximation, refined by Newton's method.
pub(crate) fn erf_inv(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 1.0 {
        return f64::NAN;
    }
    if x.abs() == 1.0 {
        return x * f64::INFINITY;
    }
    let log = (1.0 - x * x).ln();
    let a = 0.147;
    let half = 2.0 / (std::f64::consts::PI * a) + log / 2.0;
    let mut y = ((half * half - log / a).sqrt() - half).max(0.0).sqrt().copysign(x);
    for _ in 0..4 {
        y -= (erf_f64(y) - x) / (std::f64::consts::FRAC_2_SQRT_PI * (-y * y).exp());
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Floats of both signs over all exponents, `per_exponent` of each.
    fn floats(per_exponent: u32) -> impl Iterator<Item = f32> {
        let step = (1 << 23) / per_exponent;
        (0..=u32::MAX / step).map(move |i| f32::from_bits(i.wrapping_mul(step).wrapping_add(i % 977)))
    }

    /// The distance in units of the last place of the true value (of the smallest normal below that).
    fn ulps(actual: f32, expected: f64) -> f64 {
        let nearest = (expected.abs() as f32).max(f32::MIN_POSITIVE);
        let unit = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
        (f64::from(actual) - expected).abs() / unit
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut checked = 0;
        for x in floats(2000).filter(|x| !x.is_nan()) {
            let expected = f64::from(x).exp();
            if expected > f64::from(f32::MAX) {
                assert_eq!(exp(x), f32::INFINITY, "exp({x})");
            } else {
                assert!(ulps(exp(x), expected) <= 2.0, "exp({x}) = {}, expected {expected}", exp(x));
            }
            checked += 1;
        }
        assert!(checked > 900_000);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_four_units_in_the_last_place() {
        for x in floats(2000).filter(|x| !x.is_nan()) {
            let expected = f64::from(x).tanh();
            assert!(ulps(tanh(x), expected) <= 4.0, "tanh({x}) = {}, expected {expected}", tanh(x));
            assert_eq!(tanh(-x), -tanh(x));
        }
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn erf_is_within_four_ten_millionths() {
        for x in floats(500).filter(|x| !x.is_nan()) {
            let expected = erf_f64(f64::from(x));
            let error = (f64::from(erf(x)) - expected).abs();
            assert!(error <= 4e-7 * expected.abs().max(1e-30), "erf({x}) = {}, expected {expected}", erf(x));
        }
        assert!(erf(f32::NAN).is_nan());
    }

    #[test]
    fn erf_of_f64_matches_known_values() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (1.5, 0.966_105_146_5),
            (2.0, 0.995_322_265_0),
        ] {
            assert!((erf_f64(x) - y).abs() < 1e-10 && (erf_f64(-x) + y).abs() < 1e-10, "erf({x})");
        }
        let (below, above) = (erf_f64(2.5 - 1e-12), erf_f64(2.5));
        assert!((below - above).abs() < 1e-13, "the two ways meet");
    }

    #[test]
    fn erf_inv_undoes_erf() {
        for i in -300..=300 {
            let y = f64::from(i) / 100.0;
            assert!((erf_inv(erf_f64(y)) - y).abs() < 1e-9, "{y}");
        }
        assert_eq!(erf_inv(1.0), f64::INFINITY);
        assert_eq!(erf_inv(-1.0), f64::NEG_INFINITY);
        assert!(erf_inv(1.5).is_nan() && erf_inv(f64::NAN).is_nan());
    }
}
