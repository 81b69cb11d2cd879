//! Values while the program is walked. Broadcasts, constants and the stacks that loops fill are not tensors until
//! an op needs them as such: most never are.

use super::{
    super::{
        error::{Fault, Result},
        syntax::{Dense, DenseValues, TensorTy, Type},
    },
    steps::{Slot, Steps},
};
use shardwright_graph::{
    DType, Real, Shape, TensorType,
    ops::{Broadcast, Concat, Fill, Literal, Slice},
};
use smallvec::SmallVec;
use std::rc::Rc;

/// A tensor type of the text. Unsigned numbers are kept as the signed ones of the same bits.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Typed {
    pub ty: TensorType,
    pub unsigned: bool,
}

impl Typed {
    pub fn of(ty: &Type<'_>, at: usize) -> Result<Self> {
        match ty {
            Type::Tensor(ty) => Self::of_tensor(ty, at),
            Type::Other(name) => {
                let reason = format!("values of type `{name}` cannot be planned; use tensors only");
                Err(Fault::new(at, reason))
            }
        }
    }

    pub fn of_tensor(ty: &TensorTy<'_>, at: usize) -> Result<Self> {
        let (dtype, unsigned) = match ty.element {
            "f32" => (DType::F32, false),
            "f64" => (DType::F64, false),
            "bf16" => (DType::Bf16, false),
            "f16" => (DType::F16, false),
            "i32" => (DType::I32, false),
            "i64" => (DType::I64, false),
            "i1" => (DType::Bool, false),
            "ui32" => (DType::I32, true),
            "ui64" => (DType::I64, true),
            other => {
                let reason = format!(
                    "element type `{other}` is not supported; convert to f32, bf16, i32 or bool first"
                );
                return Err(Fault::new(at, reason));
            }
        };
        let sizes = ty.sizes.split('x').filter(|n| !n.is_empty());
        let shape: Option<Shape> = sizes.map(|n| n.parse::<u64>().ok()).collect::<Option<_>>();
        let shape = shape
            .ok_or_else(|| Fault::new(at, format!("the sizes of tensor<{}...> are absurd", ty.sizes)))?;
        shape.check().map_err(|reason| Fault::new(at, reason))?;
        Ok(Self { ty: TensorType { dtype, shape }, unsigned })
    }
}

/// The elements of a constant.
#[derive(Clone, Debug)]
pub(super) enum Elements {
    Splat(f64),
    Dense(Rc<[f64]>),
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Tensor(Slot),
    Constant(TensorType, Elements),
    /// Dimension `i` of the slot is dimension `dims[i]` of the shape, along all others it repeats.
    Spread {
        slot: Slot,
        dims: SmallVec<[usize; 4]>,
        shape: Shape,
    },
    Stack(Rc<Stack>),
}

/// A tensor of which slices along dimension 0 have been replaced one by one.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    pub base: Value,
    pub parts: Vec<Option<Slot>>,
}

impl Value {
    pub fn ty(&self, steps: &Steps) -> TensorType {
        match self {
            Value::Tensor(slot) => steps.ty(*slot).clone(),
            Value::Constant(ty, _) => ty.clone(),
            Value::Spread { slot, shape, .. } => TensorType::new(steps.ty(*slot).dtype, shape.clone()),
            Value::Stack(stack) => stack.base.ty(steps),
        }
    }

    /// The number that all elements are, if that is known.
    pub fn splat(&self) -> Option<f64> {
        match self {
            Value::Constant(_, Elements::Splat(x)) => Some(*x),
            Value::Constant(_, Elements::Dense(x)) if x.len() == 1 => Some(x[0]),
            _ => None,
        }
    }

    pub fn constant(dtype: DType, shape: Shape, x: f64) -> Self {
        Value::Constant(TensorType { dtype, shape }, Elements::Splat(x))
    }

    /// The value as a tensor of its own.
    pub fn slot(&self, steps: &mut Steps) -> Result<Slot> {
        match self {
            Value::Tensor(slot) => Ok(*slot),
            Value::Constant(ty, Elements::Splat(x)) if ty.rank() == 0 => steps.number(ty.dtype, *x),
            Value::Constant(ty, Elements::Splat(x)) => {
                steps.one(Fill { value: Real(*x), ty: ty.clone() }, &[])
            }
            Value::Constant(ty, Elements::Dense(x)) => {
                let values = x.iter().map(|&x| Real(x)).collect::<Vec<_>>().into();
                steps.one(Literal { ty: ty.clone(), values }, &[])
            }
            Value::Spread { slot, dims, shape } => {
                steps.one(Broadcast { shape: shape.clone(), dims: dims.clone() }, &[*slot])
            }
            Value::Stack(stack) => stack.slot(steps),
        }
    }

    /// The value as a tensor that broadcasts to its shape as NumPy does.
    pub fn aligned(&self, steps: &mut Steps) -> Result<Slot> {
        match self {
            Value::Constant(ty, Elements::Splat(x)) => steps.number(ty.dtype, *x),
            Value::Spread { slot, dims, shape } => {
                let first = dims.first().copied().unwrap_or(shape.rank());
                let mut aligned = Shape::new(&vec![1; shape.rank() - first]);
                for (&d, &size) in dims.iter().zip(steps.ty(*slot).shape.iter()) {
                    aligned.0[d - first] = size;
                }
                steps.reshape(*slot, &aligned)
            }
            _ => self.slot(steps),
        }
    }
}

impl Stack {
    fn slot(&self, steps: &mut Steps) -> Result<Slot> {
        let ty = self.base.ty(steps);
        let mut pieces = Vec::new();
        let mut i = 0;
        while i < self.parts.len() {
            if let Some(part) = self.parts[i] {
                pieces.push(part);
                i += 1;
                continue;
            }
            let end = self.parts[i..].iter().position(Option::is_some).map_or(self.parts.len(), |n| i + n);
            let mut shape = ty.shape.clone();
            shape.0[0] = (end - i) as u64;
            let piece = match self.base.splat() {
                Some(x) => Value::constant(ty.dtype, shape, x).slot(steps)?,
                None => {
                    let base = self.base.slot(steps)?;
                    steps.one(Slice::along(0, i as u64, end as u64, &ty.shape), &[base])?
                }
            };
            pieces.push(piece);
            i = end;
        }
        if let [piece] = pieces[..] { Ok(piece) } else { steps.one(Concat { axis: 0 }, &pieces) }
    }
}

/// The elements of a constant of the text.
pub(super) fn constant(dense: &Dense<'_>) -> Result<Value> {
    let Typed { ty, .. } = Typed::of_tensor(&dense.ty, dense.at)?;
    let count = ty.shape.elements();
    let wrong = |found: usize| Fault::new(dense.at, format!("{found} elements for {ty}"));
    let elements = match &dense.values {
        DenseValues::Splat(text) => Elements::Splat(number(text, ty.dtype, dense.at)?),
        DenseValues::List(texts) => {
            if texts.len() as u64 != count {
                return Err(wrong(texts.len()));
            }
            let values =
                texts.iter().map(|text| number(text, ty.dtype, dense.at)).collect::<Result<Rc<[f64]>>>()?;
            Elements::Dense(values)
        }
        DenseValues::Bytes(text) => bytes(text, &ty, dense.at)?,
    };
    Ok(Value::Constant(ty, elements))
}

fn number(text: &str, dtype: DType, at: usize) -> Result<f64> {
    let bad = || Fault::new(at, format!("`{text}` is not a number of type {dtype}"));
    if let Some(hex) = text.strip_prefix("0x").filter(|_| dtype.is_float()) {
        let bits = u64::from_str_radix(hex, 16).map_err(|_| bad())?;
        return from_bits(bits, dtype).ok_or_else(bad);
    }
    match (text, dtype) {
        ("true", DType::Bool) => Ok(1.0),
        ("false", DType::Bool) => Ok(0.0),
        (_, DType::I32 | DType::I64) => {
            whole(text.parse::<i128>().map_err(|_| bad())?, dtype).ok_or_else(|| {
                Fault::new(at, format!("{text} is too large: whole numbers beyond 2^53 are not supported"))
            })
        }
        (_, DType::Bool) => Err(bad()),
        _ => text.parse().map_err(|_| bad()),
    }
}

/// A whole number as the signed one of the same bits, if an `f64` can hold it.
fn whole(x: i128, dtype: DType) -> Option<f64> {
    let wrapped = if dtype == DType::I32 { i128::from(x as i32) } else { i128::from(x as i64) };
    let fits =
        if dtype == DType::I32 { (-(1 << 31)..1 << 32).contains(&x) } else { wrapped.abs() <= 1 << 53 };
    fits.then_some(wrapped as f64)
}

fn from_bits(bits: u64, dtype: DType) -> Option<f64> {
    match dtype {
        DType::F64 => Some(f64::from_bits(bits)),
        DType::F32 => u32::try_from(bits).ok().map(|b| f32::from_bits(b).into()),
        DType::Bf16 => u16::try_from(bits).ok().map(|b| half::bf16::from_bits(b).to_f64()),
        DType::F16 => u16::try_from(bits).ok().map(|b| half::f16::from_bits(b).to_f64()),
        DType::Bool => (bits < 256).then_some(f64::from(u8::from(bits != 0))),
        DType::I32 => u32::try_from(bits).ok().map(|b| f64::from(b as i32)),
        DType::I64 => whole(i128::from(bits as i64), dtype),
    }
}

/// Elements written as hexadecimal bytes, lowest first; one element may stand for all.
fn bytes(text: &str, ty: &TensorType, at: usize) -> Result<Elements> {
    let bad = |reason: &str| Fault::new(at, format!("the bytes of this constant {reason}"));
    let digits = text.strip_prefix("0x").ok_or_else(|| bad("do not begin with 0x"))?.as_bytes();
    let width = 2 * ty.dtype.bytes() as usize;
    if !digits.len().is_multiple_of(width) {
        return Err(bad("do not make whole elements"));
    }
    let digit = |byte: u8| (byte as char).to_digit(16).map(u64::from);
    let element = |digits: &[u8]| {
        let bits = digits
            .chunks(2)
            .rev()
            .try_fold(0u64, |bits, pair| Some((bits << 8) | (digit(pair[0])? << 4) | digit(pair[1])?));
        bits.and_then(|bits| from_bits(bits, ty.dtype))
            .ok_or_else(|| bad("are not hexadecimal, or beyond 2^53"))
    };
    let values = digits.chunks(width).map(element).collect::<Result<Rc<[f64]>>>()?;
    match values.len() as u64 {
        1 => Ok(Elements::Splat(values[0])),
        n if n == ty.shape.elements() => Ok(Elements::Dense(values)),
        n => Err(bad(&format!("are {n} elements, but the type is {ty}"))),
    }
}
