//! Element-wise functions of one tensor, and their derivatives.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{Real, TensorType},
};
use serde::{Deserialize, Serialize};

/// A function of one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnaryFn {
    /// |x|.
    Abs,
    /// `scale * x + shift`.
    Affine {
        /// Factor.
        scale: Real,
        /// Summand.
        shift: Real,
    },
    /// The least whole number that is not smaller.
    Ceil,
    /// Cosine.
    Cos,
    /// Gauss error function.
    Erf,
    /// The inverse of [`UnaryFn::Erf`].
    ErfInv,
    /// e to the x.
    Exp,
    /// e to the x, less one, exact near zero.
    Expm1,
    /// The largest whole number that is not larger.
    Floor,
    /// x times the normal distribution function (exact, by erf).
    Gelu,
    /// The usual tanh approximation of [`UnaryFn::Gelu`].
    GeluTanh,
    /// x if positive, else this slope times x.
    LeakyRelu(Real),
    /// Natural logarithm.
    Log,
    /// Logarithm of 1 + x, exact near zero.
    Log1p,
    /// -x.
    Neg,
    /// Not: of truth values, or of every bit of whole numbers.
    Not,
    /// x to this power.
    Power(Real),
    /// 1/x.
    Reciprocal,
    /// max(x, 0).
    Relu,
    /// The nearest whole number, the even one of two.
    Round,
    /// 1/sqrt(x).
    Rsqrt,
    /// 1/(1+e^-x).
    Sigmoid,
    /// -1, 0 or 1.
    Sign,
    /// x times sigmoid(x).
    Silu,
    /// Sine.
    Sin,
    /// Square root.
    Sqrt,
    /// x squared.
    Square,
    /// Tangent.
    Tan,
    /// Hyperbolic tangent.
    Tanh,
}

impl UnaryFn {
    /// Whether the derivative is computed from the function's value (`true`) or its argument (`false`).
    ///
    /// Where the value suffices the argument need not be kept for the backward pass.
    pub fn gradient_from_output(self) -> bool {
        use UnaryFn::*;
        matches!(self, ErfInv | Exp | Expm1 | Reciprocal | Relu | Rsqrt | Sigmoid | Sqrt | Tan | Tanh)
    }

    /// Rough flops per element: transcendental functions count ten.
    fn flops(self) -> u64 {
        use UnaryFn::*;
        match self {
            Abs | Ceil | Floor | LeakyRelu(_) | Neg | Not | Relu | Round | Sign | Square => 1,
            Affine { .. } => 2,
            Reciprocal | Sqrt | Rsqrt => 4,
            Cos | Erf | ErfInv | Exp | Expm1 | Gelu | GeluTanh | Log | Log1p | Power(_) | Sigmoid | Silu
            | Sin | Tan | Tanh => 10,
        }
    }
}

/// `y = f(x)`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unary {
    /// Which function.
    pub f: UnaryFn,
}

impl Operator for Unary {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let dtype = inputs[0].dtype;
        if self.f == UnaryFn::Not {
            require!(!dtype.is_float(), "`not` needs truth values or whole numbers, got {dtype}");
        } else {
            require!(dtype.is_float(), "needs floating-point elements, got {dtype}");
        }
        Ok(vec![inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        if let UnaryFn::Affine { scale, .. } = self.f {
            let f = UnaryFn::Affine { scale, shift: Real(0.0) };
            return Ok(vec![Some(cx.emit(Unary { f }, &[dy])?)]);
        }
        if self.f == UnaryFn::Neg {
            return Ok(vec![Some(cx.emit(Unary { f: UnaryFn::Neg }, &[dy])?)]);
        }
        let saved = if self.f.gradient_from_output() { cx.output(0) } else { cx.input(0) };
        Ok(vec![Some(cx.emit(UnaryGrad { f: self.f }, &[saved, dy])?)])
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0]) * self.f.flops()
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

/// `dx = f'(saved) * dy`, where `saved` is the function's value or argument
/// ([`UnaryFn::gradient_from_output`]).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnaryGrad {
    /// The forward function.
    pub f: UnaryFn,
}

impl Operator for UnaryGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        require!(inputs[0] == inputs[1], "saved value {} and gradient {} differ", inputs[0], inputs[1]);
        require!(inputs[0].dtype.is_float(), "needs floating-point elements, got {}", inputs[0].dtype);
        require!(self.f != UnaryFn::Not, "`not` has no derivative");
        Ok(vec![inputs[1].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0]) * (self.f.flops() + 1)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, NORMAL, Rng},
        graph::Init,
        types::DType,
    };

    fn unary_fn(rng: &mut Rng) -> UnaryFn {
        use UnaryFn::*;
        rng.pick(&[
            Abs,
            Affine { scale: Real(-1.5), shift: Real(0.5) },
            Ceil,
            Cos,
            Erf,
            ErfInv,
            Exp,
            Expm1,
            Floor,
            Gelu,
            GeluTanh,
            LeakyRelu(Real(0.1)),
            Log,
            Log1p,
            Neg,
            Power(Real(2.5)),
            Reciprocal,
            Relu,
            Round,
            Rsqrt,
            Sigmoid,
            Sign,
            Silu,
            Sin,
            Sqrt,
            Square,
            Tan,
            Tanh,
        ])
    }

    /// Values inside the function's domain: positive and away from zero where it needs that.
    fn domain(f: UnaryFn) -> Init {
        use UnaryFn::*;
        match f {
            Log | Log1p | Power(_) | Reciprocal | Rsqrt | Sqrt => Init::Constant(Real(1.3)),
            ErfInv | Tan => Init::Constant(Real(0.4)),
            _ => NORMAL,
        }
    }

    impl Examples for Unary {
        fn golden() -> Golden {
            Golden::new(
                Unary { f: UnaryFn::Affine { scale: Real(0.1), shift: Real(1.0) } },
                &["f32[8]"],
                "([d0])->([d0]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let f = unary_fn(rng);
            let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
            Case::new(Unary { f }, vec![(ty, domain(f))])
        }
    }

    impl Examples for UnaryGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                UnaryGrad { f: UnaryFn::LeakyRelu(Real(0.3)) },
                &["f32[8]", "f32[8]"],
                "([d0], [d0])->([d0]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let f = unary_fn(rng);
            let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
            Case::new(UnaryGrad { f }, vec![(ty.clone(), domain(f)), (ty, NORMAL)])
        }
    }
}
