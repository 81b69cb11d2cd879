//! Kernels of the element-wise ops: unary, binary, compare, select, cast, fill, iota.

use super::{Context, Kernel, KernelError, Result, loops::count, movement::with_same_type, read, write};
use crate::{
    math,
    tensor::{Element, Elements, ElementsMut, Float, View, ViewMut},
};
use half::{bf16, f16};
use shardwright_graph::{
    DType,
    ops::{Binary, BinaryFn, Cast, Compare, CompareFn, Fill, Iota, Select, Unary, UnaryFn, UnaryGrad},
};
use shardwright_simd::vectorised;
use smallvec::SmallVec;

#[inline(always)]
pub(crate) fn sigmoid<T: Float>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

/// Normal distribution function and density at x.
#[inline(always)]
fn normal<T: Float>(x: T) -> (T, T) {
    let half = T::from_f64(0.5);
    let cdf = half * (T::ONE + (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf());
    let pdf = (-half * x * x).exp() * T::from_f64(0.398_942_280_401_432_7);
    (cdf, pdf)
}

/// The inner tanh of the approximate GELU, and the derivative of its argument.
#[inline(always)]
fn gelu_tanh<T: Float>(x: T) -> (T, T) {
    let (c, k) = (T::from_f64(0.797_884_560_802_865_4), T::from_f64(0.044715));
    let inner = c * (x + k * x * x * x);
    (inner.tanh(), c * (T::ONE + T::from_f64(3.0) * k * x * x))
}

/// A rarely used function, computed in `f64` for every type.
#[inline(always)]
fn in_f64<T: Float>(x: T, f: impl Fn(f64) -> f64) -> T {
    T::from_f64(f(x.to_f64()))
}

/// `y = f(x)` for every element. A macro, since only code written in the loop is sure to be inlined:
/// see [`vectorised!`].
macro_rules! map {
    ($from:expr, $to:expr, |$x:ident| $f:expr) => {{
        let (from, to) = ($from, $to);
        vectorised!({
            for (to, &$x) in to.iter_mut().zip(from) {
                *to = $f;
            }
        });
    }};
}

/// `z = f(x, y)` for every element.
macro_rules! map2 {
    ($first:expr, $second:expr, $to:expr, |$x:ident, $y:ident| $f:expr) => {{
        let (first, second, to) = ($first, $second, $to);
        vectorised!({
            for ((to, &$x), &$y) in to.iter_mut().zip(first).zip(second) {
                *to = $f;
            }
        });
    }};
}

impl Kernel for Unary {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        if self.f == UnaryFn::Not {
            match inputs[0].data.dtype() {
                DType::I32 => map!(read::<i32>(&inputs[0])?, write::<i32>(&mut outputs[0])?, |x| !x),
                DType::I64 => map!(read::<i64>(&inputs[0])?, write::<i64>(&mut outputs[0])?, |x| !x),
                _ => map!(read::<u8>(&inputs[0])?, write::<u8>(&mut outputs[0])?, |x| 1 - x.min(1)),
            }
            return Ok(());
        }
        let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        let half = T::from_f64(0.5);
        match self.f {
            UnaryFn::Abs => map!(x, y, |x| x.abs()),
            UnaryFn::Affine { scale, shift } => {
                let (a, b) = (T::from_f64(scale.0), T::from_f64(shift.0));
                map!(x, y, |x| a * x + b);
            }
            UnaryFn::Ceil => map!(x, y, |x| in_f64(x, f64::ceil)),
            UnaryFn::Cos => map!(x, y, |x| x.cos()),
            UnaryFn::Erf => map!(x, y, |x| x.erf()),
            UnaryFn::ErfInv => map!(x, y, |x| in_f64(x, math::erf_inv)),
            UnaryFn::Exp => map!(x, y, |x| x.exp()),
            UnaryFn::Expm1 => map!(x, y, |x| in_f64(x, f64::exp_m1)),
            UnaryFn::Floor => map!(x, y, |x| in_f64(x, f64::floor)),
            UnaryFn::Gelu => map!(x, y, |x| x * normal(x).0),
            UnaryFn::GeluTanh => map!(x, y, |x| half * x * (T::ONE + gelu_tanh(x).0)),
            UnaryFn::LeakyRelu(slope) => {
                let slope = T::from_f64(slope.0);
                map!(x, y, |x| if x > T::ZERO { x } else { slope * x });
            }
            UnaryFn::Log => map!(x, y, |x| x.ln()),
            UnaryFn::Log1p => map!(x, y, |x| in_f64(x, f64::ln_1p)),
            UnaryFn::Neg => map!(x, y, |x| -x),
            UnaryFn::Not => {}
            UnaryFn::Power(p) => {
                let p = T::from_f64(p.0);
                map!(x, y, |x| x.powf(p));
            }
            UnaryFn::Reciprocal => map!(x, y, |x| T::ONE / x),
            UnaryFn::Relu => map!(x, y, |x| if x > T::ZERO { x } else { T::ZERO }),
            UnaryFn::Round => map!(x, y, |x| in_f64(x, f64::round_ties_even)),
            UnaryFn::Rsqrt => map!(x, y, |x| T::ONE / x.sqrt()),
            UnaryFn::Sigmoid => map!(x, y, |x| sigmoid(x)),
            UnaryFn::Sign => map!(x, y, |x| if x > T::ZERO {
                T::ONE
            } else if x < T::ZERO {
                -T::ONE
            } else {
                x
            }),
            UnaryFn::Silu => map!(x, y, |x| x * sigmoid(x)),
            UnaryFn::Sin => map!(x, y, |x| x.sin()),
            UnaryFn::Sqrt => map!(x, y, |x| x.sqrt()),
            UnaryFn::Square => map!(x, y, |x| x * x),
            UnaryFn::Tan => map!(x, y, |x| in_f64(x, f64::tan)),
            UnaryFn::Tanh => map!(x, y, |x| x.tanh()),
        }
        Ok(())
    }
}

impl Kernel for UnaryGrad {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (s, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        let half = T::from_f64(0.5);
        match self.f {
            UnaryFn::Abs => map2!(s, dy, dx, |x, g| if x < T::ZERO { -g } else { g }),
            UnaryFn::Affine { scale, .. } => {
                let a = T::from_f64(scale.0);
                map!(dy, dx, |g| a * g);
            }
            UnaryFn::Ceil | UnaryFn::Floor | UnaryFn::Not | UnaryFn::Round | UnaryFn::Sign => {
                dx.fill(T::ZERO)
            }
            UnaryFn::Cos => map2!(s, dy, dx, |x, g| -g * x.sin()),
            UnaryFn::Erf => {
                let c = T::from_f64(std::f64::consts::FRAC_2_SQRT_PI);
                map2!(s, dy, dx, |x, g| g * c * (-(x * x)).exp());
            }
            UnaryFn::ErfInv => {
                let c = T::from_f64(1.0 / std::f64::consts::FRAC_2_SQRT_PI);
                map2!(s, dy, dx, |y, g| g * c * (y * y).exp());
            }
            UnaryFn::Exp => map2!(s, dy, dx, |y, g| g * y),
            UnaryFn::Expm1 => map2!(s, dy, dx, |y, g| g * (y + T::ONE)),
            UnaryFn::Gelu => map2!(s, dy, dx, |x, g| {
                let (cdf, pdf) = normal(x);
                g * (cdf + x * pdf)
            }),
            UnaryFn::GeluTanh => map2!(s, dy, dx, |x, g| {
                let (t, slope) = gelu_tanh(x);
                g * half * (T::ONE + t + x * (T::ONE - t * t) * slope)
            }),
            UnaryFn::LeakyRelu(slope) => {
                let slope = T::from_f64(slope.0);
                map2!(s, dy, dx, |x, g| if x > T::ZERO { g } else { slope * g });
            }
            UnaryFn::Log => map2!(s, dy, dx, |x, g| g / x),
            UnaryFn::Log1p => map2!(s, dy, dx, |x, g| g / (T::ONE + x)),
            UnaryFn::Neg => map!(dy, dx, |g| -g),
            UnaryFn::Power(p) => {
                let (p, q) = (T::from_f64(p.0), T::from_f64(p.0 - 1.0));
                map2!(s, dy, dx, |x, g| g * p * x.powf(q));
            }
            UnaryFn::Reciprocal => map2!(s, dy, dx, |y, g| -g * y * y),
            UnaryFn::Relu => map2!(s, dy, dx, |y, g| if y > T::ZERO { g } else { T::ZERO }),
            UnaryFn::Rsqrt => map2!(s, dy, dx, |y, g| -half * g * y * y * y),
            UnaryFn::Sigmoid => map2!(s, dy, dx, |y, g| g * y * (T::ONE - y)),
            UnaryFn::Silu => map2!(s, dy, dx, |x, g| {
                let y = sigmoid(x);
                g * y * (T::ONE + x * (T::ONE - y))
            }),
            UnaryFn::Sin => map2!(s, dy, dx, |x, g| g * x.cos()),
            UnaryFn::Sqrt => map2!(s, dy, dx, |y, g| half * g / y),
            UnaryFn::Square => map2!(s, dy, dx, |x, g| g * (x + x)),
            UnaryFn::Tan => map2!(s, dy, dx, |y, g| g * (T::ONE + y * y)),
            UnaryFn::Tanh => map2!(s, dy, dx, |y, g| g * (T::ONE - y * y)),
        }
        Ok(())
    }
}

/// Visits the result of a broadcast row by row: `visit(offset in the result, offsets of the operands, steps)`. A row
/// is the last dimension, along which operand `i` moves by `steps[i]` (0 or 1).
pub(crate) fn for_rows<const N: usize>(
    shape: &[u64],
    operands: [&[u64]; N],
    mut visit: impl FnMut(usize, [usize; N], [usize; N]),
) {
    let rank = shape.len();
    let row = shape.last().map_or(1, |&n| n as usize);
    let strides: [SmallVec<[usize; 6]>; N] = operands.map(|o| {
        let mut strides: SmallVec<[usize; 6]> = smallvec::smallvec![0; rank];
        let mut stride = 1;
        for d in (0..o.len()).rev() {
            let at = d + rank - o.len();
            strides[at] = if o[d] == shape[at] && o[d] != 1 { stride } else { 0 };
            stride *= o[d] as usize;
        }
        strides
    });
    let steps = std::array::from_fn(|i| strides[i].last().copied().unwrap_or(0));
    let total = count(shape);
    let mut index: SmallVec<[u64; 6]> = smallvec::smallvec![0; rank.saturating_sub(1)];
    let mut offsets = [0usize; N];
    let mut at = 0;
    while at < total {
        visit(at, offsets, steps);
        at += row;
        for d in (0..index.len()).rev() {
            index[d] += 1;
            for i in 0..N {
                offsets[i] += strides[i][d];
            }
            if index[d] < shape[d] {
                break;
            }
            for i in 0..N {
                offsets[i] -= strides[i][d] * shape[d] as usize;
            }
            index[d] = 0;
        }
    }
}

fn broadcast2<T: Element, V: Element>(
    inputs: &[View<'_>],
    output: &mut ViewMut<'_>,
    f: impl Fn(T, T) -> V,
) -> Result {
    let (x, y) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
    let shape = output.shape;
    let z = write::<V>(output)?;
    if inputs[0].shape == shape && inputs[1].shape == shape {
        map2!(x, y, z, |x, y| f(x, y));
        return Ok(());
    }
    let row = shape.last().map_or(1, |&n| n as usize);
    for_rows(shape, [inputs[0].shape, inputs[1].shape], |at, [i, j], [di, dj]| {
        let z = &mut z[at..at + row];
        match (di, dj) {
            (0, 0) => z.fill(f(x[i], y[j])),
            (0, _) => {
                let x = x[i];
                map!(&y[j..j + row], z, |y| f(x, y));
            }
            (_, 0) => {
                let y = y[j];
                map!(&x[i..i + row], z, |x| f(x, y));
            }
            _ => map2!(&x[i..i + row], &y[j..j + row], z, |x, y| f(x, y)),
        }
    });
    Ok(())
}

impl Kernel for Binary {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fn numbers<E: Element + PartialOrd>(
            f: BinaryFn,
            inputs: &[View<'_>],
            z: &mut ViewMut<'_>,
            [add, sub, mul, div]: [fn(E, E) -> E; 4],
        ) -> Result {
            match f {
                BinaryFn::Add => broadcast2(inputs, z, add),
                BinaryFn::Sub => broadcast2(inputs, z, sub),
                BinaryFn::Mul => broadcast2(inputs, z, mul),
                BinaryFn::Div => broadcast2(inputs, z, div),
                BinaryFn::Max => broadcast2(inputs, z, |a: E, b: E| if a >= b { a } else { b }),
                BinaryFn::Min => broadcast2(inputs, z, |a: E, b: E| if a <= b { a } else { b }),
                other => Err(KernelError::BadValue(format!("{other:?} of such elements"))),
            }
        }
        let z = &mut outputs[0];
        // Whole numbers wrap as on every accelerator; division by zero gives zero.
        macro_rules! whole {
            ($t:ty, $bits:ty) => {
                match self.f {
                    BinaryFn::And => broadcast2(inputs, z, |a: $t, b: $t| a & b),
                    BinaryFn::Or => broadcast2(inputs, z, |a: $t, b: $t| a | b),
                    BinaryFn::Xor => broadcast2(inputs, z, |a: $t, b: $t| a ^ b),
                    BinaryFn::Rem => {
                        broadcast2(inputs, z, |a: $t, b: $t| if b == 0 { 0 } else { a.wrapping_rem(b) })
                    }
                    BinaryFn::ShiftLeft => broadcast2(inputs, z, |a: $t, b: $t| {
                        u32::try_from(b).ok().and_then(|b| a.checked_shl(b)).unwrap_or(0)
                    }),
                    BinaryFn::ShiftRight => broadcast2(inputs, z, |a: $t, b: $t| {
                        u32::try_from(b).ok().and_then(|b| (a as $bits).checked_shr(b)).unwrap_or(0) as $t
                    }),
                    BinaryFn::ShiftRightSigned => broadcast2(inputs, z, |a: $t, b: $t| {
                        let all = if a < 0 { -1 } else { 0 };
                        u32::try_from(b).ok().and_then(|b| a.checked_shr(b)).unwrap_or(all)
                    }),
                    f => numbers::<$t>(
                        f,
                        inputs,
                        z,
                        [<$t>::wrapping_add, <$t>::wrapping_sub, <$t>::wrapping_mul, |a, b| {
                            if b == 0 { 0 } else { a.wrapping_div(b) }
                        }],
                    ),
                }
            };
        }
        match inputs[0].data.dtype() {
            DType::Bool => match self.f {
                BinaryFn::And => broadcast2(inputs, z, |a: u8, b: u8| a & b),
                BinaryFn::Xor => broadcast2(inputs, z, |a: u8, b: u8| a ^ b),
                _ => broadcast2(inputs, z, |a: u8, b: u8| a | b),
            },
            DType::I32 => whole!(i32, u32),
            DType::I64 => whole!(i64, u64),
            _ => match self.f {
                BinaryFn::Add => broadcast2(inputs, z, |a: T, b: T| a + b),
                BinaryFn::Sub => broadcast2(inputs, z, |a: T, b: T| a - b),
                BinaryFn::Mul => broadcast2(inputs, z, |a: T, b: T| a * b),
                BinaryFn::Pow => broadcast2(inputs, z, |a: T, b: T| a.powf(b)),
                BinaryFn::Atan2 => {
                    broadcast2(inputs, z, |a: T, b: T| T::from_f64(a.to_f64().atan2(b.to_f64())))
                }
                BinaryFn::Rem => broadcast2(inputs, z, |a: T, b: T| T::from_f64(a.to_f64() % b.to_f64())),
                f => numbers::<T>(f, inputs, z, [|a, b| a + b, |a, b| a - b, |a, b| a * b, |a, b| a / b]),
            },
        }
    }
}

impl Kernel for Compare {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fn compare<E: Element + PartialOrd>(
            f: CompareFn,
            inputs: &[View<'_>],
            z: &mut ViewMut<'_>,
        ) -> Result {
            match f {
                CompareFn::Eq => broadcast2(inputs, z, |a: E, b: E| u8::from(a == b)),
                CompareFn::Ne => broadcast2(inputs, z, |a: E, b: E| u8::from(a != b)),
                CompareFn::Lt => broadcast2(inputs, z, |a: E, b: E| u8::from(a < b)),
                CompareFn::Le => broadcast2(inputs, z, |a: E, b: E| u8::from(a <= b)),
                CompareFn::Gt => broadcast2(inputs, z, |a: E, b: E| u8::from(a > b)),
                CompareFn::Ge => broadcast2(inputs, z, |a: E, b: E| u8::from(a >= b)),
            }
        }
        let z = &mut outputs[0];
        match inputs[0].data.dtype() {
            DType::Bool => compare::<u8>(self.f, inputs, z),
            DType::I32 => compare::<i32>(self.f, inputs, z),
            DType::I64 => compare::<i64>(self.f, inputs, z),
            _ => compare::<T>(self.f, inputs, z),
        }
    }
}

impl Kernel for Select {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fn select<E: Element>(inputs: &[View<'_>], x: &[E], shape: &[u64], z: &mut [E]) -> Result {
            let (condition, y) = (read::<u8>(&inputs[0])?, read::<E>(&inputs[2])?);
            let row = shape.last().map_or(1, |&n| n as usize);
            for_rows(
                shape,
                [inputs[0].shape, inputs[1].shape, inputs[2].shape],
                |at, [c, i, j], [dc, di, dj]| {
                    for (k, z) in z[at..at + row].iter_mut().enumerate() {
                        *z = if condition[c + k * dc] != 0 { x[i + k * di] } else { y[j + k * dj] };
                    }
                },
            );
            Ok(())
        }
        let ViewMut { shape, data } = &mut outputs[0];
        with_same_type!(inputs[1].data, data, |x, z| select(inputs, x, shape, z)?);
        Ok(())
    }
}

impl Kernel for Cast {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        // 16-bit floats go through `f32`, as around every other kernel.
        macro_rules! to {
            ($from:expr, |$x:ident| $wide:expr) => {
                match &mut outputs[0].data {
                    ElementsMut::F32(y) => map!($from, y, |$x| $wide as f32),
                    ElementsMut::F64(y) => map!($from, y, |$x| $wide as f64),
                    ElementsMut::Bf16(y) => map!($from, y, |$x| bf16::from_f32($wide as f32)),
                    ElementsMut::F16(y) => map!($from, y, |$x| f16::from_f32($wide as f32)),
                    ElementsMut::I32(y) => map!($from, y, |$x| $wide as i32),
                    ElementsMut::I64(y) => map!($from, y, |$x| $wide as i64),
                    ElementsMut::Bool(y) => map!($from, y, |$x| u8::from($wide as f64 != 0.0)),
                }
            };
        }
        match inputs[0].data {
            Elements::F32(x) => to!(x, |x| x),
            Elements::F64(x) => to!(x, |x| x),
            Elements::Bf16(x) => to!(x, |x| x.to_f32()),
            Elements::F16(x) => to!(x, |x| x.to_f32()),
            Elements::I32(x) => to!(x, |x| x),
            Elements::I64(x) => to!(x, |x| x),
            Elements::Bool(x) => to!(x, |x| x),
        }
        Ok(())
    }
}

/// Sets every element to the nearest value of the tensor's type.
pub(crate) fn fill(y: &mut ElementsMut<'_>, value: f64) {
    match y {
        ElementsMut::F32(y) => y.fill(value as f32),
        ElementsMut::F64(y) => y.fill(value),
        ElementsMut::Bf16(y) => y.fill(bf16::from_f64(value)),
        ElementsMut::F16(y) => y.fill(f16::from_f64(value)),
        ElementsMut::I32(y) => y.fill(value as i32),
        ElementsMut::I64(y) => y.fill(value as i64),
        ElementsMut::Bool(y) => y.fill(u8::from(value != 0.0)),
    }
}

impl Kernel for Fill {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fill(&mut outputs[0].data, self.value.0);
        Ok(())
    }
}

impl Kernel for Iota {
    fn run<T: Float>(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let shape = outputs[0].shape;
        let size = shape[self.axis] as usize;
        let inner = count(&shape[self.axis + 1..]);
        let position = |i: usize| self.start as i64 + (i / inner % size) as i64;
        macro_rules! number {
            ($y:expr, $t:ty) => {
                $y.iter_mut().enumerate().for_each(|(i, y)| *y = position(i) as $t)
            };
        }
        match &mut outputs[0].data {
            ElementsMut::F32(y) => number!(y, f32),
            ElementsMut::F64(y) => number!(y, f64),
            ElementsMut::I32(y) => number!(y, i32),
            ElementsMut::I64(y) => number!(y, i64),
            ElementsMut::Bool(_) | ElementsMut::Bf16(_) | ElementsMut::F16(_) => {}
        }
        Ok(())
    }
}
