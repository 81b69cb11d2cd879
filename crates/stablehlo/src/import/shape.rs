//! Operations that move elements: broadcasts, reshapes, slices at fixed or computed positions, pads.

use super::{
    super::error::Result,
    Importer, ResolvedOperation,
    value::{Elements, Stack, SymbolicValue},
};
use shardwright_graph::{
    Dims, Operator, Real, Shape,
    ops::{Concat, DynamicSlice, DynamicUpdate, Iota, Pad, Reverse, Slice},
};
use smallvec::SmallVec;
use std::rc::Rc;

/// The most slices of a stack that are tracked one by one.
const MOST_PARTS: u64 = 4096;
/// The most elements of a constant that are sliced during the import.
const MOST_FOLDED: usize = 4096;

impl<'a> Importer<'a> {
    pub fn broadcast_in_dim(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let to = op.result()?.ty.shape.clone();
        let x = op.operand(0)?;
        let dims = op.dims(&op.ints("broadcast_dimensions")?, to.rank())?;
        let from = &op.types[0].ty.shape;
        let fits =
            dims.len() == from.rank() && dims.iter().zip(from.iter()).all(|(&d, &n)| n == to[d] || n == 1);
        if !fits {
            return Err(op.error(format!("{from} does not broadcast to {to} by dimensions {dims:?}")));
        }
        if let Some(c) = x.splat() {
            return Ok(vec![SymbolicValue::constant(op.types[0].ty.dtype, to, c)]);
        }
        Ok(vec![self.spread(x, &dims, &to)?])
    }

    /// A broadcast value: its dimension `i` becomes dimension `dims[i]` of the shape.
    pub fn spread(&mut self, x: &SymbolicValue, dims: &[usize], shape: &Shape) -> Result<SymbolicValue> {
        let (mut slot, mut dims) = match x {
            SymbolicValue::Spread { slot, dims: inner, .. } => {
                (*slot, inner.iter().map(|&d| dims[d]).collect())
            }
            _ => (x.slot(&mut self.draft)?, SmallVec::<[usize; 4]>::from_slice(dims)),
        };
        if !dims.is_sorted() {
            let mut order: SmallVec<[usize; 4]> = (0..dims.len()).collect();
            order.sort_by_key(|&i| dims[i]);
            slot = self.draft.transpose(slot, &order)?;
            dims.sort_unstable();
        }
        if self.draft.ty(slot).shape.elements() == shape.elements() {
            return Ok(SymbolicValue::Tensor(self.draft.reshape(slot, shape)?));
        }
        Ok(SymbolicValue::Spread { slot, dims, shape: shape.clone() })
    }

    pub fn reshape(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let to = op.result()?.ty.clone();
        if to.shape.elements() != op.types[0].ty.shape.elements() {
            return Err(op.error(format!("{} and {to} have different numbers of elements", op.types[0].ty)));
        }
        if let SymbolicValue::Constant(_, elements) = op.operand(0)? {
            return Ok(vec![SymbolicValue::Constant(to, elements.clone())]);
        }
        let x = op.slot(0, &mut self.draft)?;
        Ok(vec![SymbolicValue::Tensor(self.draft.reshape(x, &to.shape)?)])
    }

    pub fn transpose(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let perm = op.dims(&op.ints("permutation")?, op.types[0].ty.rank())?;
        if perm.len() != op.types[0].ty.rank() {
            return Err(
                op.error(format!("{perm:?} is not a permutation of the dimensions of {}", op.types[0].ty))
            );
        }
        if let Some(c) = op.operand(0)?.splat() {
            return Ok(vec![SymbolicValue::constant(op.types[0].ty.dtype, op.result()?.ty.shape.clone(), c)]);
        }
        match op.operand(0)? {
            SymbolicValue::Spread { slot, dims, shape } => {
                // A transposed broadcast is a broadcast to other dimensions. `op.dims` refuses repetitions, so a list
                // of full length is a permutation and has an inverse.
                let mut inverse: SmallVec<[usize; 4]> = SmallVec::from_elem(0, perm.len());
                for (to, &from) in perm.iter().enumerate() {
                    inverse[from] = to;
                }
                let dims: SmallVec<[usize; 4]> = dims.iter().map(|&d| inverse[d]).collect();
                let shape: Shape = perm.iter().map(|&p| shape[p]).collect();
                Ok(vec![self.spread(&SymbolicValue::Tensor(*slot), &dims, &shape)?])
            }
            x => {
                let slot = x.slot(&mut self.draft)?;
                Ok(vec![SymbolicValue::Tensor(self.draft.transpose(slot, &perm)?)])
            }
        }
    }

    pub fn slice(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let unsigned = |name: &str| -> Result<Dims> {
            let numbers = op.ints(name)?;
            let list: Option<Dims> = numbers.iter().map(|&n| u64::try_from(n).ok()).collect();
            list.ok_or_else(|| op.error(format!("`{name}` has negative numbers")))
        };
        let slice = Slice {
            start: unsigned("start_indices")?,
            limit: unsigned("limit_indices")?,
            stride: unsigned("strides")?,
        };
        let rank = op.types[0].ty.rank();
        if [slice.start.len(), slice.limit.len(), slice.stride.len()] != [rank; 3] {
            return Err(op.error(format!("the indices do not cover every dimension of {}", op.types[0].ty)));
        }
        Ok(vec![self.sliced(op, op.operand(0)?, slice)?])
    }

    fn sliced(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        x: &SymbolicValue,
        slice: Slice,
    ) -> Result<SymbolicValue> {
        let ty = x.ty(&self.draft);
        if slice == Slice::all(&ty.shape) {
            return Ok(x.clone());
        }
        let to = op.result()?.ty.clone();
        // The elements of a constant are taken by the declared shape, so that one must be the slice's.
        let made = slice.infer(std::slice::from_ref(&ty)).map_err(|e| op.error(e.to_string()))?;
        if made != [to.clone()] {
            return Err(op.error(format!("the slice of {ty} is {}, not {to}", made[0])));
        }
        match x {
            SymbolicValue::Constant(_, Elements::Splat(c)) => {
                Ok(SymbolicValue::Constant(to, Elements::Splat(*c)))
            }
            SymbolicValue::Constant(_, Elements::Dense(values)) if values.len() <= MOST_FOLDED => {
                let taken = taken(values, &ty.shape, &slice, &to.shape);
                let taken = taken.ok_or_else(|| op.error(format!("the slice does not fit {ty}")))?;
                Ok(SymbolicValue::Constant(to, Elements::Dense(taken)))
            }
            SymbolicValue::Stack(stack)
                if slice.limit.first() == slice.start.first().map(|n| n + 1).as_ref() =>
            {
                let whole = Slice::all(&ty.shape);
                let part = stack.parts.get(slice.start[0] as usize).copied().flatten();
                match part
                    .filter(|_| slice.start[1..] == whole.start[1..] && slice.limit[1..] == whole.limit[1..])
                {
                    Some(part) if slice.stride.iter().all(|&n| n == 1) => {
                        self.draft.read_stack(stack);
                        Ok(SymbolicValue::Tensor(part))
                    }
                    _ => self.sliced_tensor(x, slice),
                }
            }
            _ => self.sliced_tensor(x, slice),
        }
    }

    fn sliced_tensor(&mut self, x: &SymbolicValue, slice: Slice) -> Result<SymbolicValue> {
        let x = x.slot(&mut self.draft)?;
        Ok(SymbolicValue::Tensor(self.draft.one(slice, &[x])?))
    }

    pub fn concatenate(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let axis = op.int("dimension")?;
        let axis = op.dims(&[axis], op.result()?.ty.rank())?[0];
        let slots = op.slots(&mut self.draft)?;
        if let [only] = slots[..] {
            return Ok(vec![SymbolicValue::Tensor(only)]);
        }
        Ok(vec![SymbolicValue::Tensor(self.draft.one(Concat { axis }, &slots)?)])
    }

    pub fn pad(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(2)?;
        let rank = op.types[0].ty.rank();
        let [low, high] =
            [op.ints_or("edge_padding_low", 0, rank)?, op.ints_or("edge_padding_high", 0, rank)?];
        let interior = op.ints_or("interior_padding", 0, rank)?;
        let Some(value) = op.operands[1].splat() else {
            return self.opaque(op, "pad", "its padding value is computed");
        };
        let x = op.operand(0)?;
        if low.iter().chain(&high).chain(&interior).all(|&n| n == 0) {
            return Ok(vec![x.clone()]);
        }
        let absurd = low.iter().chain(&high).chain(&interior).any(|n| n.unsigned_abs() > 1 << 40);
        if absurd || interior.iter().any(|&n| n < 0) {
            return Err(op.error("the interior padding is negative or out of range"));
        }
        let out = |pads: &[i64]| pads.iter().map(|&n| n.max(0) as u64).collect::<Dims>();
        let pad = Pad { low: out(&low), high: out(&high), interior: out(&interior), value: Real(value) };
        let mut slot = x.slot(&mut self.draft)?;
        let padded = pad.low.iter().chain(&pad.high).chain(&pad.interior).any(|&n| n > 0);
        if padded {
            slot = self.draft.one(pad, &[slot])?;
        }
        // Negative pads remove elements.
        let shape = self.draft.ty(slot).shape.clone();
        let mut slice = Slice::all(&shape);
        for d in 0..rank {
            slice.start[d] = (-low[d]).max(0) as u64;
            slice.limit[d] = shape[d].saturating_sub((-high[d]).max(0) as u64);
        }
        if slice != Slice::all(&shape) {
            slot = self.draft.one(slice, &[slot])?;
        }
        Ok(vec![SymbolicValue::Tensor(slot)])
    }

    pub fn reverse(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let mut axes = op.dims(&op.ints("dimensions")?, op.types[0].ty.rank())?;
        axes.sort_unstable();
        axes.retain(|d| op.types[0].ty.shape[*d] > 1);
        if axes.is_empty() || op.operands[0].splat().is_some() {
            return Ok(op.operands.to_vec());
        }
        let x = op.slot(0, &mut self.draft)?;
        Ok(vec![SymbolicValue::Tensor(self.draft.one(Reverse { axes }, &[x])?)])
    }

    pub fn iota(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let ty = op.result()?.ty.clone();
        let axis = op.dims(&[op.int("iota_dimension")?], ty.rank())?[0];
        if ty.shape[axis] == 1 {
            return Ok(vec![SymbolicValue::constant(ty.dtype, ty.shape, 0.0)]);
        }
        // Positions along one dimension, repeated along the others.
        let line = shardwright_graph::TensorType::new(ty.dtype, [ty.shape[axis]]);
        let slot = self.draft.one(Iota { ty: line, axis: 0, start: 0 }, &[])?;
        Ok(vec![self.spread(&SymbolicValue::Tensor(slot), &[axis], &ty.shape)?])
    }

    pub fn dynamic_slice(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let shape =
            op.types.first().map(|t| t.ty.shape.clone()).ok_or_else(|| op.error("the operand is missing"))?;
        op.arity(1 + shape.rank())?;
        let sizes = op.result()?.ty.shape.clone();
        if sizes.rank() != shape.rank() || (0..shape.rank()).any(|d| sizes[d] > shape[d]) {
            return Err(op.error(format!("{sizes} is not a part of {shape}")));
        }
        if sizes == shape {
            return Ok(vec![op.operands[0].clone()]);
        }
        if let Some(starts) = Self::known(&op.operands[1..]) {
            let start: Dims =
                (0..shape.rank()).map(|d| starts[d].clamp(0, (shape[d] - sizes[d]) as i64) as u64).collect();
            let limit = start.iter().zip(sizes.iter()).map(|(a, b)| a + b).collect();
            let slice = Slice { start, limit, stride: Dims::from_elem(1, shape.rank()) };
            return Ok(vec![self.sliced(op, &op.operands[0], slice)?]);
        }
        let slots = op.slots(&mut self.draft)?;
        Ok(vec![SymbolicValue::Tensor(self.draft.one(DynamicSlice { sizes: sizes.0 }, &slots)?)])
    }

    pub fn dynamic_update_slice(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        if op.operands.len() < 2 {
            return Err(op.error("expected a tensor, a slice and its position"));
        }
        let (shape, part) = (&op.types[0].ty.shape, &op.types[1].ty.shape);
        op.arity(2 + shape.rank())?;
        if part == shape {
            return Ok(vec![op.operands[1].clone()]);
        }
        let line = shape.rank() == part.rank() && shape.rank() > 0 && part[0] == 1 && part[1..] == shape[1..];
        if let Some(starts) = Self::known(&op.operands[2..])
            && line
            && shape[0] <= MOST_PARTS
        {
            let at = starts[0].clamp(0, shape[0] as i64 - 1) as usize;
            let mut stack = match &op.operands[0] {
                SymbolicValue::Stack(stack) => (**stack).clone(),
                base => Stack { base: base.clone(), parts: vec![None; shape[0] as usize] },
            };
            stack.parts[at] = Some(op.slot(1, &mut self.draft)?);
            return Ok(vec![SymbolicValue::Stack(Rc::new(stack))]);
        }
        let slots = op.slots(&mut self.draft)?;
        Ok(vec![SymbolicValue::Tensor(self.draft.one(DynamicUpdate {}, &slots)?)])
    }
}

/// The elements of a slice; `None` if it does not fit.
fn taken(values: &[f64], shape: &Shape, slice: &Slice, to: &Shape) -> Option<Rc<[f64]>> {
    (0..to.elements())
        .map(|mut flat| {
            let (mut at, mut stride) = (0u64, 1u64);
            for d in (0..shape.rank()).rev() {
                let size = to.get(d).copied().filter(|&n| n > 0)?;
                let position = slice.start[d].checked_add((flat % size).checked_mul(slice.stride[d])?)?;
                at = at.checked_add(position.checked_mul(stride)?)?;
                flat /= size;
                stride *= shape[d];
            }
            values.get(usize::try_from(at).ok()?).copied()
        })
        .collect()
}
