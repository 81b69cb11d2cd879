//! Element-wise functions of two tensors, with NumPy's broadcasting.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::{Compare, CompareFn, Op, Select, Unary, UnaryFn},
    region::Region,
    require,
    rule::Rule,
    types::{DType, Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// A function of two numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BinaryFn {
    /// Sum.
    Add,
    /// And: of truth values, or bit by bit of whole numbers.
    And,
    /// The angle of the point whose coordinates are (second, first).
    Atan2,
    /// Quotient.
    Div,
    /// Larger of the two.
    Max,
    /// Smaller of the two.
    Min,
    /// Product.
    Mul,
    /// Or: of truth values, or bit by bit of whole numbers.
    Or,
    /// The first to the power of the second.
    Pow,
    /// Remainder of the division; has the first's sign.
    Rem,
    /// Left shift; zero if the second is the number of bits or more.
    ShiftLeft,
    /// Logical right shift.
    ShiftRight,
    /// Arithmetic right shift.
    ShiftRightSigned,
    /// Difference.
    Sub,
    /// Exclusive or: of truth values, or bit by bit of whole numbers.
    Xor,
}

/// `z = f(x, y)`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binary {
    /// Which function.
    pub f: BinaryFn,
}

/// The shape that two shapes broadcast to: aligned at the last dimension, sizes equal or one.
pub(crate) fn broadcast_shape(a: &Shape, b: &Shape) -> Result<Shape, OpError> {
    let rank = a.rank().max(b.rank());
    let size = |s: &Shape, i: usize| if i + s.rank() < rank { 1 } else { s[i + s.rank() - rank] };
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Err(OpError::new(format!("{a} and {b} do not broadcast"))),
        })
        .collect()
}

impl Operator for Binary {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let (a, b) = (&inputs[0], &inputs[1]);
        require!(a.dtype == b.dtype, "element types differ: {} and {}", a.dtype, b.dtype);
        use BinaryFn::*;
        let takes = match self.f {
            And | Or | Xor => !a.dtype.is_float(),
            ShiftLeft | ShiftRight | ShiftRightSigned => a.dtype.is_int(),
            Atan2 | Pow => a.dtype.is_float(),
            Add | Div | Max | Min | Mul | Rem | Sub => a.dtype != DType::Bool,
        };
        require!(takes, "{:?} does not take {}", self.f, a.dtype);
        Ok(vec![TensorType::new(a.dtype, broadcast_shape(&a.shape, &b.shape)?)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dz) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let (x, y) = (cx.input(0), cx.input(1));
        let mut grads = vec![None, None];
        for (i, grad) in grads.iter_mut().enumerate() {
            if !cx.wants(i) {
                continue;
            }
            let full = match (self.f, i) {
                (BinaryFn::Add, _) | (BinaryFn::Sub, 0) => dz,
                (BinaryFn::Sub, _) => {
                    // Sum first: negating the smaller tensor is cheaper.
                    let shape = cx.input_type(1).shape.clone();
                    let summed = cx.unbroadcast(dz, &shape)?;
                    cx.emit(Unary { f: UnaryFn::Neg }, &[summed])?
                }
                (BinaryFn::Mul, 0) => cx.binary(BinaryFn::Mul, dz, y)?,
                (BinaryFn::Mul, _) => cx.binary(BinaryFn::Mul, dz, x)?,
                (BinaryFn::Div, 0) => cx.binary(BinaryFn::Div, dz, y)?,
                (BinaryFn::Div, _) => {
                    let z = cx.output(0);
                    let product = cx.binary(BinaryFn::Mul, dz, z)?;
                    let quotient = cx.binary(BinaryFn::Div, product, y)?;
                    cx.emit(Unary { f: UnaryFn::Neg }, &[quotient])?
                }
                (BinaryFn::Max | BinaryFn::Min, _) => {
                    // Ties go to the first operand, so that the two gradients add up to dz.
                    let f = if self.f == BinaryFn::Max { CompareFn::Ge } else { CompareFn::Le };
                    let first = cx.emit(Compare { f }, &[x, y])?;
                    let dtype = cx.ty(dz).dtype;
                    let zero = cx.zeros(TensorType::new(dtype, Shape::scalar()))?;
                    let branches = if i == 0 { [first, dz, zero] } else { [first, zero, dz] };
                    cx.emit(Select {}, &branches)?
                }
                (BinaryFn::Atan2, _) => {
                    let [xx, yy] = [cx.binary(BinaryFn::Mul, x, x)?, cx.binary(BinaryFn::Mul, y, y)?];
                    let square = cx.binary(BinaryFn::Add, xx, yy)?;
                    let over = cx.binary(BinaryFn::Div, dz, square)?;
                    let product = cx.binary(BinaryFn::Mul, over, if i == 0 { y } else { x })?;
                    if i == 0 { product } else { cx.emit(Unary { f: UnaryFn::Neg }, &[product])? }
                }
                (BinaryFn::Pow, 0) => {
                    // y x^(y-1), which is right where x is zero too.
                    let less = UnaryFn::Affine { scale: Real(1.0), shift: Real(-1.0) };
                    let less = cx.emit(Unary { f: less }, &[y])?;
                    let power = cx.binary(BinaryFn::Pow, x, less)?;
                    let slope = cx.binary(BinaryFn::Mul, y, power)?;
                    cx.binary(BinaryFn::Mul, dz, slope)?
                }
                (BinaryFn::Pow, _) => {
                    let z = cx.output(0);
                    let log = cx.emit(Unary { f: UnaryFn::Log }, &[x])?;
                    let slope = cx.binary(BinaryFn::Mul, z, log)?;
                    cx.binary(BinaryFn::Mul, dz, slope)?
                }
                (BinaryFn::Rem, 0) => dz,
                (BinaryFn::Rem, _) => return Err(OpError::new("a remainder has no gradient by its divisor")),
                (
                    BinaryFn::And
                    | BinaryFn::Or
                    | BinaryFn::ShiftLeft
                    | BinaryFn::ShiftRight
                    | BinaryFn::ShiftRightSigned
                    | BinaryFn::Xor,
                    _,
                ) => return Ok(vec![None; 2]),
            };
            let shape = cx.input_type(i).shape.clone();
            *grad = Some(cx.unbroadcast(full, &shape)?);
        }
        Ok(grads)
    }

    /// Transcendental functions count ten, as in [`Unary`].
    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        let each = if matches!(self.f, BinaryFn::Atan2 | BinaryFn::Pow) { 10 } else { 1 };
        elements(&outputs[0]) * each
    }

    fn is_sum(&self) -> bool {
        self.f == BinaryFn::Add
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, bools, f64s},
        graph::Init,
    };

    impl Examples for Binary {
        fn golden() -> Golden {
            Golden::new(
                Binary { f: BinaryFn::Add },
                &["f32[8,6]", "f32[6]"],
                "([d0, d1], [d1])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 4);
            let other = rng.broadcastable(&shape);
            use BinaryFn::*;
            let f = rng.pick(&[
                Add,
                And,
                Atan2,
                Div,
                Max,
                Min,
                Mul,
                Or,
                Pow,
                Rem,
                ShiftLeft,
                ShiftRight,
                ShiftRightSigned,
                Sub,
                Xor,
            ]);
            let bits = rng.flip();
            let tensor = |s: Vec<u64>| match f {
                And | Or | Xor if bits => bools(s),
                And | Or | Rem | ShiftLeft | ShiftRight | ShiftRightSigned | Xor => {
                    (TensorType::new(DType::I64, s), Init::Below(70))
                }
                _ => f64s(s),
            };
            let mut inputs = vec![tensor(shape), tensor(other)];
            if rng.flip() {
                inputs.swap(0, 1);
            }
            // Away from zero.
            if matches!(f, Div | Pow) {
                inputs[1].1 = Init::Constant(Real(1.7));
            }
            if matches!(f, Atan2 | Pow) {
                inputs[0].1 = Init::Constant(Real(1.3));
            }
            Case::new(Binary { f }, inputs)
        }
    }
}
