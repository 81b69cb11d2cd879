//! Element-wise operations. Constants become part of the op, and broadcasts are left to it.

use super::{
    super::error::Result,
    ELEMENTS_WALKED, Importer, ResolvedOperation,
    draft::Slot,
    fold,
    value::{Elements, SymbolicValue},
};
use shardwright_graph::{
    DType, Op, Real, Shape,
    ops::{Binary, BinaryFn, Bitcast, Cast, Compare, CompareFn, Select, Unary, UnaryFn},
};

fn unary_of(name: &str) -> Option<UnaryFn> {
    Some(match name {
        "abs" => UnaryFn::Abs,
        "ceil" => UnaryFn::Ceil,
        "cosine" => UnaryFn::Cos,
        "erf" => UnaryFn::Erf,
        "erf_inv" => UnaryFn::ErfInv,
        "exponential" => UnaryFn::Exp,
        "exponential_minus_one" => UnaryFn::Expm1,
        "floor" => UnaryFn::Floor,
        "log" => UnaryFn::Log,
        "log_plus_one" => UnaryFn::Log1p,
        "logistic" => UnaryFn::Sigmoid,
        "negate" => UnaryFn::Neg,
        "not" => UnaryFn::Not,
        "round_nearest_even" => UnaryFn::Round,
        "rsqrt" => UnaryFn::Rsqrt,
        "sign" => UnaryFn::Sign,
        "sine" => UnaryFn::Sin,
        "sqrt" => UnaryFn::Sqrt,
        "square" => UnaryFn::Square,
        "tan" => UnaryFn::Tan,
        "tanh" => UnaryFn::Tanh,
        _ => return None,
    })
}

pub(super) fn binary_of(name: &str) -> Option<BinaryFn> {
    Some(match name {
        "add" => BinaryFn::Add,
        "and" => BinaryFn::And,
        "atan2" => BinaryFn::Atan2,
        "divide" => BinaryFn::Div,
        "maximum" => BinaryFn::Max,
        "minimum" => BinaryFn::Min,
        "multiply" => BinaryFn::Mul,
        "or" => BinaryFn::Or,
        "power" => BinaryFn::Pow,
        "remainder" => BinaryFn::Rem,
        "shift_left" => BinaryFn::ShiftLeft,
        "shift_right_arithmetic" => BinaryFn::ShiftRightSigned,
        "shift_right_logical" => BinaryFn::ShiftRight,
        "subtract" => BinaryFn::Sub,
        "xor" => BinaryFn::Xor,
        _ => return None,
    })
}

impl<'a> Importer<'a> {
    /// The values of an element-wise operation; `None` if the operation is not element-wise.
    pub fn elementwise(
        &mut self,
        name: &str,
        op: &ResolvedOperation<'_, 'a>,
    ) -> Result<Option<Vec<SymbolicValue>>> {
        let value = if let Some(f) = unary_of(name) {
            op.arity(1)?;
            self.unary(f, op.operand(0)?)?
        } else if let Some(f) = binary_of(name) {
            op.arity(2)?;
            let [a, b] = [op.operand(0)?, op.operand(1)?];
            let unsigned = op.types[0].unsigned && op.types[0].ty.dtype.is_int();
            use BinaryFn::*;
            if unsigned && matches!(f, Div | Rem | Max | Min | ShiftRightSigned) {
                self.unsigned_binary(op, f, a, b)?
            } else {
                self.binary(f, a, b)?
            }
        } else {
            match name {
                "constant" => self.constant(op)?,
                "cbrt" => self.unary(UnaryFn::Power(Real(1.0 / 3.0)), op.operand(0)?)?,
                "clamp" => self.clamp(op)?,
                "compare" => self.compare(op)?,
                "convert" => self.convert(op)?,
                "bitcast_convert" => self.bitcast(op)?,
                "erfc" => {
                    let erf = self.unary(UnaryFn::Erf, op.operand(0)?)?;
                    self.unary(UnaryFn::Affine { scale: Real(-1.0), shift: Real(1.0) }, &erf)?
                }
                "is_finite" => {
                    let size = self.unary(UnaryFn::Abs, op.operand(0)?)?;
                    let infinity =
                        SymbolicValue::constant(op.types[0].ty.dtype, Shape::scalar(), f64::INFINITY);
                    self.apply(Compare { f: CompareFn::Lt }.into(), &[size, infinity], op.operand(0)?)?
                }
                "select" => self.select(op)?,
                _ => return Ok(None),
            }
        };
        Ok(Some(vec![value]))
    }

    fn constant(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        match op.operation.attribute("value") {
            Some(super::super::syntax::Attribute::Dense(dense)) => {
                // A loop reads its constants again in every iteration.
                self.walk(dense.at, dense.written_elements() / ELEMENTS_WALKED)?;
                super::value::constant(dense)
            }
            _ => Err(op.error("the constant has no values")),
        }
    }

    pub fn unary(&mut self, f: UnaryFn, x: &SymbolicValue) -> Result<SymbolicValue> {
        let ty = x.ty(&self.draft);
        if let Some(z) = x.splat().and_then(|x| fold::unary(f, ty.dtype, x)) {
            return Ok(SymbolicValue::Constant(ty, Elements::Splat(z)));
        }
        // Functions of whole numbers are composed of the available ones.
        match (f, ty.dtype.is_int()) {
            (UnaryFn::Neg, true) => {
                let zero = SymbolicValue::constant(ty.dtype, ty.shape, 0.0);
                return self.binary(BinaryFn::Sub, &zero, x);
            }
            (UnaryFn::Abs, true) => {
                let negative = self.unary(UnaryFn::Neg, x)?;
                return self.binary(BinaryFn::Max, x, &negative);
            }
            (UnaryFn::Sign, true) => {
                let one = |x: f64| SymbolicValue::constant(ty.dtype, ty.shape.clone(), x);
                let low = self.binary(BinaryFn::Max, x, &one(-1.0))?;
                return self.binary(BinaryFn::Min, &low, &one(1.0));
            }
            _ => {}
        }
        self.apply(Unary { f }.into(), std::slice::from_ref(x), x)
    }

    pub fn binary(&mut self, f: BinaryFn, a: &SymbolicValue, b: &SymbolicValue) -> Result<SymbolicValue> {
        let ty = a.ty(&self.draft);
        let (left, right) = (a.splat(), b.splat());
        if let (Some(x), Some(y)) = (left, right)
            && let Some(z) = fold::binary(f, ty.dtype, x, y)
        {
            return Ok(SymbolicValue::Constant(ty, Elements::Splat(z)));
        }
        use BinaryFn::*;
        match (f, left, right) {
            (Add | Sub | Or | Xor | ShiftLeft | ShiftRight | ShiftRightSigned, _, Some(0.0))
            | (Mul | Div | Pow, _, Some(1.0)) => return Ok(a.clone()),
            (Add | Or | Xor, Some(0.0), _) | (Mul, Some(1.0), _) => return Ok(b.clone()),
            (Max, Some(f64::NEG_INFINITY), _) | (Min, Some(f64::INFINITY), _) => return Ok(b.clone()),
            (Max, _, Some(f64::NEG_INFINITY)) | (Min, _, Some(f64::INFINITY)) => return Ok(a.clone()),
            _ => {}
        }
        if ty.dtype.is_float() {
            let affine = |scale: f64, shift: f64| UnaryFn::Affine { scale: Real(scale), shift: Real(shift) };
            let single = match (f, left, right) {
                (Add, _, Some(c)) => Some((a, affine(1.0, c))),
                (Add, Some(c), _) => Some((b, affine(1.0, c))),
                (Sub, _, Some(c)) => Some((a, affine(1.0, -c))),
                (Sub, Some(0.0), _) => Some((b, UnaryFn::Neg)),
                (Sub, Some(c), _) => Some((b, affine(-1.0, c))),
                (Mul, _, Some(c)) => Some((a, affine(c, 0.0))),
                (Mul, Some(c), _) => Some((b, affine(c, 0.0))),
                (Div, Some(1.0), _) => Some((b, UnaryFn::Reciprocal)),
                (Max, _, Some(0.0)) => Some((a, UnaryFn::Relu)),
                (Max, Some(0.0), _) => Some((b, UnaryFn::Relu)),
                (Pow, _, Some(2.0)) => Some((a, UnaryFn::Square)),
                (Pow, _, Some(c)) => Some((a, UnaryFn::Power(Real(c)))),
                _ => None,
            };
            // Numbers in ops must be finite: a product with zero would turn them into NaN.
            let finite = |f: &UnaryFn| match f {
                UnaryFn::Affine { scale, shift } => scale.0.is_finite() && shift.0.is_finite(),
                UnaryFn::Power(p) => p.0.is_finite(),
                _ => true,
            };
            if let Some((x, f)) = single.filter(|(_, f)| finite(f)) {
                return self.unary(f, x);
            }
        }
        if f == Mul && ty.dtype.is_float() && same(a, b) {
            return self.unary(UnaryFn::Square, a);
        }
        self.apply(Binary { f }.into(), &[a.clone(), b.clone()], a)
    }

    /// Unsigned 32-bit numbers are widened; for 64-bit ones there is no wider type.
    fn unsigned_binary(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        f: BinaryFn,
        a: &SymbolicValue,
        b: &SymbolicValue,
    ) -> Result<SymbolicValue> {
        if op.types[0].ty.dtype == DType::I64 {
            return Err(op.error("not supported for ui64; use ui32 or i64"));
        }
        let [a, b] = [self.widened(a)?, self.widened(b)?];
        let wide = self.binary(f, &a, &b)?;
        self.cast(&wide, DType::I32)
    }

    /// Unsigned 32-bit numbers as `i64`.
    fn widened(&mut self, x: &SymbolicValue) -> Result<SymbolicValue> {
        let wide = self.cast(x, DType::I64)?;
        let mask = SymbolicValue::constant(DType::I64, x.ty(&self.draft).shape, f64::from(u32::MAX));
        self.binary(BinaryFn::And, &wide, &mask)
    }

    pub fn cast(&mut self, x: &SymbolicValue, dtype: DType) -> Result<SymbolicValue> {
        let ty = x.ty(&self.draft);
        if ty.dtype == dtype {
            return Ok(x.clone());
        }
        if let Some(x) = x.splat() {
            return Ok(SymbolicValue::constant(dtype, ty.shape, fold::rounded(x, dtype)));
        }
        self.apply(Cast { dtype }.into(), std::slice::from_ref(x), x)
    }

    fn convert(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        op.arity(1)?;
        let (x, from, to) = (op.operand(0)?, &op.types[0], op.result()?);
        let narrow_unsigned = from.unsigned && from.ty.dtype == DType::I32;
        if narrow_unsigned && (to.ty.dtype.is_float() || to.ty.dtype == DType::I64) {
            let wide = self.widened(x)?;
            return self.cast(&wide, to.ty.dtype);
        }
        if to.unsigned && from.ty.dtype.is_float() {
            let wide = self.cast(x, DType::I64)?;
            return self.cast(&wide, to.ty.dtype);
        }
        self.cast(x, to.ty.dtype)
    }

    fn bitcast(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        op.arity(1)?;
        let to = op.result()?.ty.clone();
        let from = &op.types[0].ty;
        if op.types[0].narrow || op.result()?.narrow {
            let values = self.opaque(op, "bitcast_convert", "it reads the bits of narrow numbers")?;
            return values.into_iter().next().ok_or_else(|| op.error("it has no result"));
        }
        if from.dtype == to.dtype && from.shape == to.shape {
            return Ok(op.operand(0)?.clone());
        }
        if from.shape == to.shape {
            return self.apply(Bitcast { dtype: to.dtype }.into(), &op.operands[..1], &op.operands[0]);
        }
        let values = self.opaque(op, "bitcast_convert", "it changes the number of elements")?;
        values.into_iter().next().ok_or_else(|| op.error("it has no result"))
    }

    fn clamp(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        op.arity(3)?;
        let shape = op.result()?.ty.shape.clone();
        // Bounds are scalars or have the tensor's shape.
        let mut bounds = Vec::new();
        for i in [0, 2] {
            let (bound, ty) = (&op.operands[i], &op.types[i].ty);
            bounds.push(match bound.splat() {
                Some(c) => SymbolicValue::constant(ty.dtype, shape.clone(), c),
                None if ty.rank() == 0 => self.spread(bound, &[], &shape)?,
                None => bound.clone(),
            });
        }
        let bounded = self.binary(BinaryFn::Max, &op.operands[1], &bounds[0])?;
        self.binary(BinaryFn::Min, &bounded, &bounds[1])
    }

    fn compare(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        op.arity(2)?;
        let f = match op.word("comparison_direction")? {
            "EQ" => CompareFn::Eq,
            "NE" => CompareFn::Ne,
            "LT" => CompareFn::Lt,
            "LE" => CompareFn::Le,
            "GT" => CompareFn::Gt,
            "GE" => CompareFn::Ge,
            other => return Err(op.error(format!("there is no comparison {other}"))),
        };
        let [a, b] = [&op.operands[0], &op.operands[1]];
        let dtype = op.types[0].ty.dtype;
        let ordered = !matches!(f, CompareFn::Eq | CompareFn::Ne);
        let (a, b) = if op.types[0].unsigned && dtype == DType::I32 && ordered {
            (self.widened(a)?, self.widened(b)?)
        } else {
            (a.clone(), b.clone())
        };
        if let (Some(x), Some(y)) = (a.splat(), b.splat()) {
            return Ok(SymbolicValue::constant(
                DType::Bool,
                op.result()?.ty.shape.clone(),
                fold::compare(f, x, y),
            ));
        }
        self.apply(Compare { f }.into(), &[a.clone(), b], &a)
    }

    fn select(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<SymbolicValue> {
        op.arity(3)?;
        let [condition, a, b] = [&op.operands[0], &op.operands[1], &op.operands[2]];
        if let Some(c) = condition.splat() {
            return Ok(if c != 0.0 { a.clone() } else { b.clone() });
        }
        let shape = op.result()?.ty.shape.clone();
        let condition = if op.types[0].ty.rank() == 0 && shape.rank() > 0 {
            self.spread(condition, &[], &shape)?
        } else {
            condition.clone()
        };
        self.apply(Select {}.into(), &[condition, a.clone(), b.clone()], a)
    }

    /// An element-wise op of operands that all have the shape of `like`. If all are the same broadcast, or constants, the op
    /// runs before the broadcast.
    fn apply(&mut self, op: Op, operands: &[SymbolicValue], like: &SymbolicValue) -> Result<SymbolicValue> {
        let shape = like.ty(&self.draft).shape;
        let mut slots: Vec<Slot> = Vec::with_capacity(operands.len());
        let spread = |value: &SymbolicValue| match value {
            SymbolicValue::Spread { slot, dims, .. } => {
                Some((dims.clone(), self.draft.ty(*slot).shape.clone()))
            }
            _ => None,
        };
        let spreads = |value: &&SymbolicValue| value.splat().is_none();
        let first = operands.iter().find(spreads).and_then(spread);
        if let Some(common) = first
            && operands.iter().filter(spreads).all(|value| spread(value).as_ref() == Some(&common))
        {
            for value in operands {
                slots.push(match value {
                    SymbolicValue::Spread { slot, .. } => *slot,
                    other => other.aligned(&mut self.draft)?,
                });
            }
            return Ok(SymbolicValue::Spread { slot: self.draft.one(op, &slots)?, dims: common.0, shape });
        }
        for value in operands {
            slots.push(value.aligned(&mut self.draft)?);
        }
        // Broadcasts of different dimensions are combined in the full shape if they do not cover it together.
        let covered = |d: usize| {
            slots.iter().any(|&slot| {
                let other = &self.draft.ty(slot).shape;
                (d + other.rank()).checked_sub(shape.rank()).is_some_and(|i| other[i] == shape[d])
            })
        };
        if !(0..shape.rank()).all(covered) {
            // If all operands are constants, any of them can have the full shape.
            let widest = operands.iter().position(|value| value.splat().is_none()).unwrap_or(0);
            slots[widest] = operands[widest].slot(&mut self.draft)?;
        }
        Ok(SymbolicValue::Tensor(self.draft.one(op, &slots)?))
    }
}

/// Whether two values are the same tensor.
fn same(a: &SymbolicValue, b: &SymbolicValue) -> bool {
    match (a, b) {
        (SymbolicValue::Tensor(a), SymbolicValue::Tensor(b)) => a == b,
        (SymbolicValue::Spread { slot: a, dims: d, .. }, SymbolicValue::Spread { slot: b, dims: e, .. }) => {
            a == b && d == e
        }
        _ => false,
    }
}
