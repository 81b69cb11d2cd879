//! Arithmetic on numbers that are known during the import: loop counters, indices, scales.
//!
//! Results equal those of a machine with the element type: floats are computed in `f64` and rounded once, whole numbers
//! wrap.

use shardwright_graph::{
    DType,
    ops::{BinaryFn, CompareFn, UnaryFn},
};

/// The nearest number of the element type.
pub(super) fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::Bf16 => half::bf16::from_f64(x).to_f64(),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::Bool => f64::from(u8::from(x != 0.0)),
        DType::I32 => f64::from(x as i64 as i32),
        DType::I64 => x.trunc(),
    }
}

/// A whole number as `f64`; `None` if that is not exact.
fn exact(x: i64) -> Option<f64> {
    (x.unsigned_abs() <= 1 << 53).then_some(x as f64)
}

pub(super) fn binary(f: BinaryFn, dtype: DType, a: f64, b: f64) -> Option<f64> {
    use BinaryFn::*;
    if dtype.is_float() {
        let z = match f {
            Add => a + b,
            Sub => a - b,
            Mul => a * b,
            Div => a / b,
            Max => a.max(b),
            Min => a.min(b),
            Pow => a.powf(b),
            Rem => a % b,
            _ => return None,
        };
        return Some(rounded(z, dtype));
    }
    let (a, b) = (a as i64, b as i64);
    if dtype == DType::Bool {
        return match f {
            And => exact(a & b),
            Or => exact(a | b),
            Xor => exact(a ^ b),
            _ => None,
        };
    }
    let bits = if dtype == DType::I32 { 32 } else { 64 };
    let z = match f {
        Add => a.wrapping_add(b),
        Sub => a.wrapping_sub(b),
        Mul => a.wrapping_mul(b),
        Div if b != 0 => a.wrapping_div(b),
        Rem if b != 0 => a.wrapping_rem(b),
        Max => a.max(b),
        Min => a.min(b),
        And => a & b,
        Or => a | b,
        Xor => a ^ b,
        ShiftLeft if (0..bits).contains(&b) => a << b,
        ShiftRight if (0..bits).contains(&b) && bits == 32 => i64::from(a as u32 >> b),
        ShiftRightSigned if (0..bits).contains(&b) => a >> b,
        _ => return None,
    };
    exact(if bits == 32 { i64::from(z as i32) } else { z })
}

pub(super) fn compare(f: CompareFn, a: f64, b: f64) -> f64 {
    let holds = match f {
        CompareFn::Eq => a == b,
        CompareFn::Ne => a != b,
        CompareFn::Lt => a < b,
        CompareFn::Le => a <= b,
        CompareFn::Gt => a > b,
        CompareFn::Ge => a >= b,
    };
    f64::from(u8::from(holds))
}

pub(super) fn unary(f: UnaryFn, dtype: DType, x: f64) -> Option<f64> {
    use UnaryFn::*;
    if f == Not {
        return match dtype {
            DType::Bool => Some(1.0 - x),
            _ => exact(!(x as i64)),
        };
    }
    let z = match f {
        Abs => x.abs(),
        Affine { scale, shift } => scale.0 * x + shift.0,
        Ceil => x.ceil(),
        Cos => x.cos(),
        Exp => x.exp(),
        Expm1 => x.exp_m1(),
        Floor => x.floor(),
        Log => x.ln(),
        Log1p => x.ln_1p(),
        Neg => -x,
        Reciprocal => 1.0 / x,
        Round => x.round_ties_even(),
        Rsqrt => 1.0 / x.sqrt(),
        Sin => x.sin(),
        Sqrt => x.sqrt(),
        Square => x * x,
        Tanh => x.tanh(),
        _ => return None,
    };
    dtype.is_float().then(|| rounded(z, dtype))
}
