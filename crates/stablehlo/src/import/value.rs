//! Symbolic values of the walk. Broadcasts, constants and the stacks that loops fill become tensors only if an op needs
//! them as tensors; most never do.

use super::{
    super::{
        error::{Result, TextError},
        syntax::{Dense, DenseValues, TensorTy, Type},
    },
    draft::{DraftGraph, Slot},
};
use shardwright_graph::{
    DType, Real, Shape, TensorType,
    ops::{Broadcast, Concat, Fill, Literal, Slice},
};
use smallvec::SmallVec;
use std::rc::Rc;

/// A tensor type of the text. Unsigned numbers are stored as the signed ones with the same bits.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct HloType {
    pub ty: TensorType,
    pub unsigned: bool,
    /// Whether the element type is narrower than the one that it is planned as.
    pub narrow: bool,
}

impl HloType {
    pub fn of(ty: &Type<'_>, at: usize) -> Result<Self> {
        match ty {
            Type::Tensor(ty) => Self::of_tensor(ty, at),
            Type::Other(name) => {
                let reason = format!("values of type `{name}` cannot be planned; use tensors only");
                Err(TextError::new(at, reason))
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
            // Narrow numbers are planned as the next type that holds all their values.
            "i2" | "i4" | "i8" | "i16" => (DType::I32, false),
            "ui2" | "ui4" | "ui8" | "ui16" => (DType::I32, true),
            narrow if narrow.starts_with("f8") || narrow.starts_with("f4") => (DType::Bf16, false),
            other => {
                let reason = format!(
                    "element type `{other}` is not supported; convert to f32, bf16, i32 or bool first"
                );
                return Err(TextError::new(at, reason));
            }
        };
        let sizes = ty.sizes.split('x').filter(|n| !n.is_empty());
        let shape: Option<Shape> = sizes.map(|n| n.parse::<u64>().ok()).collect::<Option<_>>();
        let shape = shape.ok_or_else(|| {
            TextError::new(at, format!("the sizes of tensor<{}...> are out of range", ty.sizes))
        })?;
        shape.check().map_err(|reason| TextError::new(at, reason))?;
        let narrow = narrow_bits(ty.element).is_some();
        Ok(Self { ty: TensorType { dtype, shape }, unsigned, narrow })
    }
}

/// The bits of an element type that is planned as a wider one.
pub(super) fn narrow_bits(element: &str) -> Option<u32> {
    match element {
        "i2" | "ui2" => Some(2),
        "i4" | "ui4" => Some(4),
        "i8" | "ui8" => Some(8),
        "i16" | "ui16" => Some(16),
        float if float.starts_with("f8") => Some(8),
        float if float.starts_with("f4") => Some(4),
        _ => None,
    }
}

/// The elements of a constant.
#[derive(Clone, Debug)]
pub(super) enum Elements {
    Splat(f64),
    Dense(Rc<[f64]>),
}

#[derive(Clone, Debug)]
pub(super) enum SymbolicValue {
    Tensor(Slot),
    Constant(TensorType, Elements),
    /// A broadcast: dimension `i` of the slot is dimension `dims[i]` of the shape; it repeats along all others.
    Spread {
        slot: Slot,
        dims: SmallVec<[usize; 4]>,
        shape: Shape,
    },
    Stack(Rc<Stack>),
}

/// A tensor of which slices along dimension 0 are replaced one by one.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    pub base: SymbolicValue,
    pub parts: Vec<Option<Slot>>,
}

impl SymbolicValue {
    /// In the place of a value without elements.
    pub fn empty() -> Self {
        Self::Constant(TensorType::new(DType::F32, Shape::scalar()), Elements::Splat(0.0))
    }

    pub fn ty(&self, draft: &DraftGraph) -> TensorType {
        match self {
            SymbolicValue::Tensor(slot) => draft.ty(*slot).clone(),
            SymbolicValue::Constant(ty, _) => ty.clone(),
            SymbolicValue::Spread { slot, shape, .. } => {
                TensorType::new(draft.ty(*slot).dtype, shape.clone())
            }
            SymbolicValue::Stack(stack) => stack.base.ty(draft),
        }
    }

    /// The number that all elements equal, if known.
    pub fn splat(&self) -> Option<f64> {
        match self {
            SymbolicValue::Constant(_, Elements::Splat(x)) => Some(*x),
            SymbolicValue::Constant(_, Elements::Dense(x)) if x.len() == 1 => Some(x[0]),
            _ => None,
        }
    }

    pub fn constant(dtype: DType, shape: Shape, x: f64) -> Self {
        SymbolicValue::Constant(TensorType { dtype, shape }, Elements::Splat(x))
    }

    /// The value as a tensor.
    pub fn slot(&self, draft: &mut DraftGraph) -> Result<Slot> {
        match self {
            SymbolicValue::Tensor(slot) => Ok(*slot),
            SymbolicValue::Constant(ty, Elements::Splat(x)) if ty.rank() == 0 => draft.number(ty.dtype, *x),
            SymbolicValue::Constant(ty, Elements::Splat(x)) => {
                draft.one(Fill { value: Real(*x), ty: ty.clone() }, &[])
            }
            SymbolicValue::Constant(ty, Elements::Dense(x)) => {
                let values = x.iter().map(|&x| Real(x)).collect::<Vec<_>>().into();
                draft.one(Literal { ty: ty.clone(), values }, &[])
            }
            SymbolicValue::Spread { slot, dims, shape } => {
                draft.one(Broadcast { shape: shape.clone(), dims: dims.clone() }, &[*slot])
            }
            SymbolicValue::Stack(stack) => stack.slot(draft),
        }
    }

    /// The value as a tensor that broadcasts to its shape by NumPy's rules.
    pub fn aligned(&self, draft: &mut DraftGraph) -> Result<Slot> {
        match self {
            SymbolicValue::Constant(ty, Elements::Splat(x)) => draft.number(ty.dtype, *x),
            SymbolicValue::Spread { slot, dims, shape } => {
                let first = dims.first().copied().unwrap_or(shape.rank());
                let mut aligned = Shape::new(&vec![1; shape.rank() - first]);
                for (&d, &size) in dims.iter().zip(draft.ty(*slot).shape.iter()) {
                    aligned.0[d - first] = size;
                }
                draft.reshape(*slot, &aligned)
            }
            _ => self.slot(draft),
        }
    }
}

impl Stack {
    fn slot(&self, draft: &mut DraftGraph) -> Result<Slot> {
        let ty = self.base.ty(draft);
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
                Some(x) => SymbolicValue::constant(ty.dtype, shape, x).slot(draft)?,
                None => {
                    let base = self.base.slot(draft)?;
                    draft.one(Slice::along(0, i as u64, end as u64, &ty.shape), &[base])?
                }
            };
            pieces.push(piece);
            i = end;
        }
        if let [piece] = pieces[..] { Ok(piece) } else { draft.one(Concat { axis: 0 }, &pieces) }
    }
}

/// A constant of the text.
pub(super) fn constant(dense: &Dense<'_>) -> Result<SymbolicValue> {
    let HloType { ty, .. } = HloType::of_tensor(&dense.ty, dense.at)?;
    let count = ty.shape.elements();
    let wrong = |found: usize| TextError::new(dense.at, format!("{found} elements do not fit {ty}"));
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
        DenseValues::Bytes(_) if narrow_bits(dense.ty.element).is_some() => {
            let element = dense.ty.element;
            let reason = format!("a constant of type {element} is written as bytes; pass it as an argument");
            return Err(TextError::new(dense.at, reason));
        }
        DenseValues::Bytes(text) => bytes(text, &ty, dense.at)?,
    };
    Ok(SymbolicValue::Constant(ty, elements))
}

fn number(text: &str, dtype: DType, at: usize) -> Result<f64> {
    let bad = || TextError::new(at, format!("`{text}` is not a number of type {dtype}"));
    if let Some(hex) = text.strip_prefix("0x").filter(|_| dtype.is_float()) {
        let bits = u64::from_str_radix(hex, 16).map_err(|_| bad())?;
        return from_bits(bits, dtype).ok_or_else(bad);
    }
    match (text, dtype) {
        ("true", DType::Bool) => Ok(1.0),
        ("false", DType::Bool) => Ok(0.0),
        (_, DType::I32 | DType::I64) => {
            whole(text.parse::<i128>().map_err(|_| bad())?, dtype).ok_or_else(|| {
                TextError::new(
                    at,
                    format!("{text} is too large: whole numbers beyond 2^53 are not supported"),
                )
            })
        }
        (_, DType::Bool) => Err(bad()),
        _ => text.parse().map_err(|_| bad()),
    }
}

/// A whole number as the signed one with the same bits; `None` if `f64` does not represent it.
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

/// Decodes elements written as hexadecimal bytes, lowest first. A single element stands for all.
fn bytes(text: &str, ty: &TensorType, at: usize) -> Result<Elements> {
    let bad = |reason: &str| TextError::new(at, format!("the bytes of this constant {reason}"));
    let digits = text.strip_prefix("0x").ok_or_else(|| bad("do not begin with 0x"))?.as_bytes();
    let width = 2 * ty.dtype.bytes() as usize;
    if !digits.len().is_multiple_of(width) {
        return Err(bad("end within an element"));
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
