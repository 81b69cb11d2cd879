//! Reductions: sums, maxima, minima, logic, argmax.

use super::{
    super::{error::Result, syntax::Block},
    Importer, ResolvedOperation,
    elementwise::binary_of,
    value::SymbolicValue,
};
use shardwright_graph::{
    DType, Op, Shape,
    ops::{BinaryFn, Reduce, TopK, UnaryFn},
};
use smallvec::SmallVec;

/// The binary function that a body applies, if it applies exactly one.
pub(super) fn body_function(body: &Block<'_>) -> Option<BinaryFn> {
    let [apply, give] = &body.operations[..] else { return None };
    let [first, second] = &body.arguments[..] else { return None };
    let named = |i: usize, name: &str| apply.operands.get(i).is_some_and(|value| value.name == name);
    let straight =
        named(0, first.name) && named(1, second.name) || named(0, second.name) && named(1, first.name);
    let given =
        give.operands.len() == 1 && apply.results.first().is_some_and(|r| r.0 == give.operands[0].name);
    let f = binary_of(apply.name.strip_prefix("stablehlo.")?)?;
    use BinaryFn::*;
    let commutes = matches!(f, Add | Mul | Max | Min | And | Or);
    (straight && given && commutes && apply.operands.len() == 2).then_some(f)
}

/// Whether a number is the neutral element of a function.
pub(super) fn is_neutral(f: BinaryFn, x: f64, dtype: DType) -> bool {
    let (least, most) = match dtype {
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        DType::I64 => (i64::MIN as f64, i64::MAX as f64),
        DType::Bool => (0.0, 1.0),
        _ => (f64::NEG_INFINITY, f64::INFINITY),
    };
    match f {
        BinaryFn::Add | BinaryFn::Or => x == 0.0,
        BinaryFn::Mul | BinaryFn::And => x == 1.0,
        BinaryFn::Max => x == least,
        BinaryFn::Min => x == most,
        _ => false,
    }
}

impl<'a> Importer<'a> {
    pub fn reduce(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let Some(body) = op.operation.regions.first() else { return Err(op.error("there is no body")) };
        if op.operands.len() == 4 && op.results.len() == 2 {
            return match self.arg_max(op, body)? {
                Some(values) => Ok(values),
                None => self.opaque(op, "reduce", "its body is not supported"),
            };
        }
        if op.operands.len() != 2 {
            return self.opaque(op, "reduce", "it reduces several tensors at once");
        }
        if op.types[1].ty.rank() != 0 {
            return Err(op.error("the initial value must be a single number"));
        }
        let mut axes = op.dims(&op.ints("dimensions")?, op.types[0].ty.rank())?;
        axes.sort_unstable();
        let dtype = op.types[0].ty.dtype;
        let x = op.operand(0)?.clone();
        let Some(f) = body_function(body) else {
            return self.opaque(op, "reduce", "its body is not supported");
        };
        // A reduction of dimensions of size one is a reshape.
        let shape = op.result()?.ty.shape.clone();
        let reduced = if axes.iter().all(|&d| op.types[0].ty.shape[d] == 1) {
            match x.splat() {
                Some(c) => SymbolicValue::constant(dtype, shape, c),
                None => {
                    let slot = x.slot(&mut self.draft)?;
                    SymbolicValue::Tensor(self.draft.reshape(slot, &shape)?)
                }
            }
        } else {
            match (f, dtype) {
                (BinaryFn::Add, DType::Bool) | (BinaryFn::Mul, _) => {
                    return self.opaque(op, "reduce", "reductions by a product are not supported");
                }
                (BinaryFn::Add, _) => self.reduced(&x, Reduce::sum(axes))?,
                (BinaryFn::Max, _) if dtype != DType::Bool => self.reduced(&x, Reduce::max(axes))?,
                (BinaryFn::Min, _) if dtype != DType::Bool => {
                    let negative = self.unary(UnaryFn::Neg, &x)?;
                    let most = self.reduced(&negative, Reduce::max(axes))?;
                    self.unary(UnaryFn::Neg, &most)?
                }
                // Truth values: `or` is the maximum, `and` the minimum.
                (BinaryFn::Or | BinaryFn::Max, DType::Bool) => self.any(&x, axes)?,
                (BinaryFn::And | BinaryFn::Min, DType::Bool) => {
                    let not = self.unary(UnaryFn::Not, &x)?;
                    let any = self.any(&not, axes)?;
                    self.unary(UnaryFn::Not, &any)?
                }
                _ => return self.opaque(op, "reduce", "bitwise reductions are not supported"),
            }
        };
        match op.operands[1].splat() {
            Some(init) if is_neutral(f, init, dtype) => Ok(vec![reduced]),
            Some(init) => {
                let init = SymbolicValue::constant(dtype, op.result()?.ty.shape.clone(), init);
                Ok(vec![self.binary(f, &reduced, &init)?])
            }
            None => {
                let init = self.spread(&op.operands[1], &[], &op.result()?.ty.shape)?;
                Ok(vec![self.binary(f, &reduced, &init)?])
            }
        }
    }

    fn reduced(&mut self, x: &SymbolicValue, reduce: Reduce) -> Result<SymbolicValue> {
        let slot = x.slot(&mut self.draft)?;
        Ok(SymbolicValue::Tensor(self.draft.one(reduce, &[slot])?))
    }

    fn any(&mut self, x: &SymbolicValue, axes: SmallVec<[usize; 4]>) -> Result<SymbolicValue> {
        let numbers = self.cast(x, DType::I32)?;
        let most = self.reduced(&numbers, Reduce::max(axes))?;
        self.cast(&most, DType::Bool)
    }

    /// JAX's argmax and argmin: a reduction of a tensor and its positions, with a body that compares both.
    fn arg_max(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        body: &Block<'a>,
    ) -> Result<Option<Vec<SymbolicValue>>> {
        let words: Vec<&str> =
            body.operations.iter().map(|o| o.name.trim_start_matches("stablehlo.")).collect();
        let expected =
            ["compare", "compare", "or", "compare", "compare", "and", "or", "select", "select", "return"];
        let axes = op.dims(&op.ints("dimensions")?, op.types[0].ty.rank())?;
        let [axis] = axes[..] else { return Ok(None) };
        let float = op.types[0].ty.dtype.is_float();
        if words != expected || !float || !self.counts_along(&op.operands[1], axis) {
            return Ok(None);
        }
        let direction = |i: usize| match body.operations[i].attribute("comparison_direction") {
            Some(super::super::syntax::Attribute::Dialect(_, text)) => {
                text.rsplit_once(' ').map_or(&text[..], |(_, word)| word).to_string()
            }
            _ => String::new(),
        };
        let largest = direction(0) == "GT";
        if !(largest || direction(0) == "LT")
            || [direction(1), direction(3), direction(4)] != ["NE", "EQ", "LT"]
        {
            return Ok(None);
        }
        let x = op.operands[0].clone();
        let x = if largest { x } else { self.unary(UnaryFn::Neg, &x)? };
        let rank = op.types[0].ty.rank();
        let slot = x.slot(&mut self.draft)?;
        let last: SmallVec<[usize; 4]> = (0..rank).filter(|&d| d != axis).chain([axis]).collect();
        let rows = self.draft.transpose(slot, &last)?;
        let made = self.draft.add(Op::from(TopK { k: 1 }), &[rows])?;
        let shape: Shape = op.results[0].ty.shape.clone();
        let best = SymbolicValue::Tensor(self.draft.reshape(made[0], &shape)?);
        let best = if largest { best } else { self.unary(UnaryFn::Neg, &best)? };
        let place = SymbolicValue::Tensor(self.draft.reshape(made[1], &shape)?);
        let place = self.cast(&place, op.results[1].ty.dtype)?;
        Ok(Some(vec![best, place]))
    }

    /// Whether each element of a value is its position along a dimension.
    pub fn counts_along(&self, value: &SymbolicValue, axis: usize) -> bool {
        let (slot, along) = match value {
            SymbolicValue::Spread { slot, dims, .. } if dims[..] == [axis] => (*slot, 0),
            SymbolicValue::Tensor(slot) => (*slot, axis),
            _ => return false,
        };
        let mut slot = slot;
        // The positions may have been reshaped to have dimensions of size one.
        while let Some(op) = self.draft.producer(slot)
            && let Op::Reshape(_) = op.op
        {
            slot = op.inputs[0];
        }
        let rank = self.draft.ty(slot).rank();
        matches!(self.draft.producer(slot), Some(op) if matches!(&op.op, Op::Iota(iota) if iota.start == 0
            && (iota.axis == along || rank == 1)))
    }
}
