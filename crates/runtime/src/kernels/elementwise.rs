//! Kernels of the element-wise ops: unary, binary, compare, select, cast, fill, iota.

use super::{Context, Kernel, KernelError, loops::count, read, vector::vectorised, write};
use crate::tensor::{Element, Elements, ElementsMut, Float, View, ViewMut};
use half::{bf16, f16};
use shardwright_graph::{
    DType,
    ops::{Binary, BinaryFn, Cast, Compare, CompareFn, Fill, Iota, Select, Unary, UnaryFn, UnaryGrad},
};
use smallvec::SmallVec;

type Result = std::result::Result<(), KernelError>;

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

#[inline(always)]
fn map<T: Element, U: Element>(x: &[T], y: &mut [U], f: impl Fn(T) -> U) {
    vectorised(|| {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = f(x);
        }
    });
}

impl Kernel for Unary {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        if self.f == UnaryFn::Not {
            map(read::<u8>(&inputs[0])?, write::<u8>(&mut outputs[0])?, |x| 1 - x.min(1));
            return Ok(());
        }
        let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        let half = T::from_f64(0.5);
        match self.f {
            UnaryFn::Abs => map(x, y, |x| x.abs()),
            UnaryFn::Affine { scale, shift } => {
                let (a, b) = (T::from_f64(scale.0), T::from_f64(shift.0));
                map(x, y, |x| a * x + b);
            }
            UnaryFn::Cos => map(x, y, |x| x.cos()),
            UnaryFn::Erf => map(x, y, |x| x.erf()),
            UnaryFn::Exp => map(x, y, |x| x.exp()),
            UnaryFn::Gelu => map(x, y, |x| x * normal(x).0),
            UnaryFn::GeluTanh => map(x, y, |x| half * x * (T::ONE + gelu_tanh(x).0)),
            UnaryFn::LeakyRelu(slope) => {
                let slope = T::from_f64(slope.0);
                map(x, y, |x| if x > T::ZERO { x } else { slope * x });
            }
            UnaryFn::Log => map(x, y, |x| x.ln()),
            UnaryFn::Neg => map(x, y, |x| -x),
            UnaryFn::Not => {}
            UnaryFn::Power(p) => {
                let p = T::from_f64(p.0);
                map(x, y, |x| x.powf(p));
            }
            UnaryFn::Reciprocal => map(x, y, |x| T::ONE / x),
            UnaryFn::Relu => map(x, y, |x| if x > T::ZERO { x } else { T::ZERO }),
            UnaryFn::Rsqrt => map(x, y, |x| T::ONE / x.sqrt()),
            UnaryFn::Sigmoid => map(x, y, sigmoid),
            UnaryFn::Silu => map(x, y, |x| x * sigmoid(x)),
            UnaryFn::Sin => map(x, y, |x| x.sin()),
            UnaryFn::Sqrt => map(x, y, |x| x.sqrt()),
            UnaryFn::Square => map(x, y, |x| x * x),
            UnaryFn::Tanh => map(x, y, |x| x.tanh()),
        }
        Ok(())
    }
}

#[inline(always)]
fn map2<T: Element, U: Element, V: Element>(x: &[T], y: &[U], z: &mut [V], f: impl Fn(T, U) -> V) {
    vectorised(|| {
        for ((z, &x), &y) in z.iter_mut().zip(x).zip(y) {
            *z = f(x, y);
        }
    });
}

impl Kernel for UnaryGrad {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (s, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        let half = T::from_f64(0.5);
        match self.f {
            UnaryFn::Abs => map2(s, dy, dx, |x, g| if x < T::ZERO { -g } else { g }),
            UnaryFn::Affine { scale, .. } => {
                let a = T::from_f64(scale.0);
                map(dy, dx, |g| a * g);
            }
            UnaryFn::Cos => map2(s, dy, dx, |x, g| -g * x.sin()),
            UnaryFn::Erf => {
                let c = T::from_f64(std::f64::consts::FRAC_2_SQRT_PI);
                map2(s, dy, dx, |x, g| g * c * (-(x * x)).exp());
            }
            UnaryFn::Exp => map2(s, dy, dx, |y, g| g * y),
            UnaryFn::Gelu => map2(s, dy, dx, |x, g| {
                let (cdf, pdf) = normal(x);
                g * (cdf + x * pdf)
            }),
            UnaryFn::GeluTanh => map2(s, dy, dx, |x, g| {
                let (t, slope) = gelu_tanh(x);
                g * half * (T::ONE + t + x * (T::ONE - t * t) * slope)
            }),
            UnaryFn::LeakyRelu(slope) => {
                let slope = T::from_f64(slope.0);
                map2(s, dy, dx, |x, g| if x > T::ZERO { g } else { slope * g });
            }
            UnaryFn::Log => map2(s, dy, dx, |x, g| g / x),
            UnaryFn::Neg => map(dy, dx, |g| -g),
            UnaryFn::Not => map(dy, dx, |_| T::ZERO),
            UnaryFn::Power(p) => {
                let (p, q) = (T::from_f64(p.0), T::from_f64(p.0 - 1.0));
                map2(s, dy, dx, |x, g| g * p * x.powf(q));
            }
            UnaryFn::Reciprocal => map2(s, dy, dx, |y, g| -g * y * y),
            UnaryFn::Relu => map2(s, dy, dx, |y, g| if y > T::ZERO { g } else { T::ZERO }),
            UnaryFn::Rsqrt => map2(s, dy, dx, |y, g| -half * g * y * y * y),
            UnaryFn::Sigmoid => map2(s, dy, dx, |y, g| g * y * (T::ONE - y)),
            UnaryFn::Silu => map2(s, dy, dx, |x, g| {
                let y = sigmoid(x);
                g * y * (T::ONE + x * (T::ONE - y))
            }),
            UnaryFn::Sin => map2(s, dy, dx, |x, g| g * x.cos()),
            UnaryFn::Sqrt => map2(s, dy, dx, |y, g| half * g / y),
            UnaryFn::Square => map2(s, dy, dx, |x, g| g * (x + x)),
            UnaryFn::Tanh => map2(s, dy, dx, |y, g| g * (T::ONE - y * y)),
        }
        Ok(())
    }
}

/// Walks the result of a broadcast row by row: `visit(offset in the result, offsets of the operands)`, a row
/// being the last dimension, along which operand `i` moves by `steps[i]` (0 or 1).
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
        map2(x, y, z, f);
        return Ok(());
    }
    let row = shape.last().map_or(1, |&n| n as usize);
    for_rows(shape, [inputs[0].shape, inputs[1].shape], |at, [i, j], [di, dj]| {
        let z = &mut z[at..at + row];
        match (di, dj) {
            (0, 0) => z.fill(f(x[i], y[j])),
            (0, _) => map(&y[j..j + row], z, |y| f(x[i], y)),
            (_, 0) => map(&x[i..i + row], z, |x| f(x, y[j])),
            _ => map2(&x[i..i + row], &y[j..j + row], z, &f),
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
                BinaryFn::And | BinaryFn::Or => Err(KernelError::BadValue("logic on numbers".into())),
            }
        }
        let z = &mut outputs[0];
        // Whole numbers wrap as they do on every accelerator; division by zero gives zero, not a crash.
        match inputs[0].data.dtype() {
            DType::Bool => match self.f {
                BinaryFn::And => broadcast2(inputs, z, |a: u8, b: u8| a & b),
                _ => broadcast2(inputs, z, |a: u8, b: u8| a | b),
            },
            DType::I32 => numbers::<i32>(
                self.f,
                inputs,
                z,
                [i32::wrapping_add, i32::wrapping_sub, i32::wrapping_mul, |a, b| {
                    if b == 0 { 0 } else { a.wrapping_div(b) }
                }],
            ),
            DType::I64 => numbers::<i64>(
                self.f,
                inputs,
                z,
                [i64::wrapping_add, i64::wrapping_sub, i64::wrapping_mul, |a, b| {
                    if b == 0 { 0 } else { a.wrapping_div(b) }
                }],
            ),
            _ => match self.f {
                BinaryFn::Add => broadcast2(inputs, z, |a: T, b: T| a + b),
                BinaryFn::Sub => broadcast2(inputs, z, |a: T, b: T| a - b),
                BinaryFn::Mul => broadcast2(inputs, z, |a: T, b: T| a * b),
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
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fn select<E: Element>(inputs: &[View<'_>], z: &mut ViewMut<'_>) -> Result {
            let condition = read::<u8>(&inputs[0])?;
            let (x, y) = (read::<E>(&inputs[1])?, read::<E>(&inputs[2])?);
            let shape = z.shape;
            let z = write::<E>(z)?;
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
        let z = &mut outputs[0];
        match inputs[1].data.dtype() {
            DType::Bool => select::<u8>(inputs, z),
            DType::I32 => select::<i32>(inputs, z),
            DType::I64 => select::<i64>(inputs, z),
            _ => select::<T>(inputs, z),
        }
    }
}

impl Kernel for Cast {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        macro_rules! to {
            ($x:expr) => {
                match &mut outputs[0].data {
                    ElementsMut::F32(y) => map($x, y, |x| x as f32),
                    ElementsMut::F64(y) => map($x, y, |x| x as f64),
                    ElementsMut::I32(y) => map($x, y, |x| x as i32),
                    ElementsMut::I64(y) => map($x, y, |x| x as i64),
                    ElementsMut::Bool(y) => map($x, y, |x| u8::from(x as f64 != 0.0)),
                    // 16-bit floats are widened before any kernel runs.
                    ElementsMut::Bf16(_) | ElementsMut::F16(_) => {}
                }
            };
        }
        match inputs[0].data {
            Elements::F32(x) => to!(x),
            Elements::F64(x) => to!(x),
            Elements::I32(x) => to!(x),
            Elements::I64(x) => to!(x),
            Elements::Bool(x) => to!(x),
            Elements::Bf16(_) | Elements::F16(_) => {}
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
