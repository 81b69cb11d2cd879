//! Element-wise functions of two tensors, with NumPy's broadcasting.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::{Compare, CompareFn, Op, Select, Unary, UnaryFn},
    region::Region,
    require,
    rule::Rule,
    types::{DType, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// A function of two numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BinaryFn {
    /// Sum.
    Add,
    /// Logical and (of truth values).
    And,
    /// Quotient.
    Div,
    /// Larger of the two.
    Max,
    /// Smaller of the two.
    Min,
    /// Product.
    Mul,
    /// Logical or (of truth values).
    Or,
    /// Difference.
    Sub,
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
        let logical = matches!(self.f, BinaryFn::And | BinaryFn::Or);
        require!(logical == (a.dtype == DType::Bool), "{:?} does not take {}", self.f, a.dtype);
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
                (BinaryFn::And | BinaryFn::Or, _) => return Ok(vec![None; 2]),
            };
            let shape = cx.input_type(i).shape.clone();
            *grad = Some(cx.unbroadcast(full, &shape)?);
        }
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0])
    }

    fn is_sum(&self) -> bool {
        self.f == BinaryFn::Add
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}
