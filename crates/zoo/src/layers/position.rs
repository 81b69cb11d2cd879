//! Positional encodings: additive sinusoids and rotary embedding.
//!
//! Ops compute the tables instead of weights storing them, so a part of a split sequence computes only its own rows.
//! Every attention block computes its own rotary tables: one table shared by all blocks would couple their layouts, to
//! save a few cheap ops.

use super::{LayerResult, add, concat, mul, slice, sub, unary};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, Real, TensorId, TensorType,
    ops::{Cast, Iota, UnaryFn},
};
use smallvec::{SmallVec, smallvec};

/// `angle[s, .., i] = s / base^(i / half)`, with `ones` dimensions of size one in between.
fn angles(
    b: &mut GraphBuilder,
    dtype: DType,
    (positions, half): (u64, u64),
    ones: usize,
    base: f64,
) -> LayerResult {
    let mut shape: SmallVec<[u64; 4]> = smallvec![positions];
    shape.resize(ones + 2, 1);
    let iota = |ty, axis| Iota { ty, axis, start: 0 };
    let position = b.emit("position", iota(TensorType::new(dtype, &shape[..]), 0), &[])?;
    let index = b.emit("frequency.index", iota(TensorType::new(dtype, [half]), 0), &[])?;
    let exponent = UnaryFn::Affine { scale: Real(-base.ln() / half as f64), shift: Real(0.0) };
    let exponent = unary(b, "frequency.exponent", exponent, index)?;
    let frequency = unary(b, "frequency", UnaryFn::Exp, exponent)?;
    mul(b, "angle", position, frequency)
}

/// The element type for positions, which need more bits than bf16 has.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

fn narrow(b: &mut GraphBuilder, name: &str, x: TensorId, dtype: DType) -> LayerResult {
    if b.ty(x).dtype == dtype { Ok(x) } else { b.emit(name, Cast { dtype }, &[x]) }
}

/// The fixed positional encoding of "Attention is all you need", `[positions, width]`: sines, then cosines.
pub fn sinusoids(b: &mut GraphBuilder, dtype: DType, positions: u64, width: u64) -> LayerResult {
    let angle = angles(b, wide(dtype), (positions, width / 2), 0, 10_000.0)?;
    let sin = unary(b, "sin", UnaryFn::Sin, angle)?;
    let cos = unary(b, "cos", UnaryFn::Cos, angle)?;
    let both = concat(b, "sinusoids", &[sin, cos], 1)?;
    narrow(b, "sinusoids.cast", both, dtype)
}

/// Cosine and sine tables for [`rotary`] on a tensor shaped like `x` (`[n, s, heads.., d]`).
pub fn rotary_tables(
    b: &mut GraphBuilder,
    x: TensorId,
    base: f64,
) -> Result<(TensorId, TensorId), BuildError> {
    let ty = b.ty(x).clone();
    let (&[_, positions, ..], Some(&width)) = (&ty.shape[..], ty.shape.last()) else {
        return Err(BuildError::Model(format!("rotary embedding needs [n, s, .., d], got {ty}")));
    };
    let angle = angles(b, wide(ty.dtype), (positions, width / 2), ty.rank().saturating_sub(3), base)?;
    let cos = unary(b, "cos", UnaryFn::Cos, angle)?;
    let sin = unary(b, "sin", UnaryFn::Sin, angle)?;
    Ok((narrow(b, "cos.cast", cos, ty.dtype)?, narrow(b, "sin.cast", sin, ty.dtype)?))
}

/// Rotates the pairs `(i, i + d/2)` of the last dimension by angles that grow with the position.
pub fn rotary(b: &mut GraphBuilder, x: TensorId, (cos, sin): (TensorId, TensorId)) -> LayerResult {
    let axis = b.ty(x).rank().saturating_sub(1);
    let width = b.shape(x)[axis];
    let first = slice(b, "first", x, axis, 0, width / 2)?;
    let second = slice(b, "second", x, axis, width / 2, width)?;
    let (a, c) = (mul(b, "first.cos", first, cos)?, mul(b, "second.sin", second, sin)?);
    let turned_first = sub(b, "turned_first", a, c)?;
    let (a, c) = (mul(b, "second.cos", second, cos)?, mul(b, "first.sin", first, sin)?);
    let turned_second = add(b, "turned_second", a, c)?;
    concat(b, "rotated", &[turned_first, turned_second], axis)
}
