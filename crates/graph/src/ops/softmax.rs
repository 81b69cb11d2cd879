//! Softmax and its logarithm along one dimension, and their derivatives.
//!
//! The dimension itself must stay whole; a classifier's last layer, where it is worth splitting, uses
//! [`crate::ops::CrossEntropy`] instead.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements, same_float, scratch_bytes},
    ops::{Op, reduce::factors_of},
    region::Region,
    require,
    rule::{Rule, dim_name},
    types::TensorType,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// `y = exp(x) / sum(exp(x))`, the sum running along `axis`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// The dimension whose elements add up to one.
    pub axis: usize,
}

/// `y = x - ln(sum(exp(x)))`, the sum running along `axis`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogSoftmax {
    /// The dimension whose elements' exponentials add up to one.
    pub axis: usize,
}

/// `dx = y * (dy - sum(y * dy))`, from the softmax's value `y`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftmaxGrad {
    /// The forward op's dimension.
    pub axis: usize,
}

/// `dx = dy - exp(y) * sum(dy)`, from the log-softmax's value `y`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogSoftmaxGrad {
    /// The forward op's dimension.
    pub axis: usize,
}

fn infer_forward(axis: usize, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
    arity(inputs, 1)?;
    same_float(inputs)?;
    axis_in(axis, &inputs[0])?;
    Ok(vec![inputs[0].clone()])
}

fn infer_backward(axis: usize, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
    arity(inputs, 2)?;
    require!(inputs[0] == inputs[1], "value {} and gradient {} differ", inputs[0], inputs[1]);
    infer_forward(axis, &inputs[..1])
}

/// Scratch memory of the kernels: two inner rows, where the softmax's dimension is not the last.
fn inner_rows(axis: usize, x: &TensorType) -> u64 {
    match x.shape.get(axis + 1..).map_or(1, |inner| inner.iter().product()) {
        1 => 0,
        inner => 2 * inner * scratch_bytes(x),
    }
}

/// Every tensor runs over all dimensions; `axis` stays whole.
fn rule_along(axis: usize, inputs: &[TensorType]) -> Rule {
    let mut rule = Rule::default();
    for (i, &size) in inputs[0].shape.iter().enumerate() {
        if i == axis {
            rule.whole_factor(dim_name(i), size)
        } else {
            rule.factor(dim_name(i), size)
        };
    }
    let all: SmallVec<[usize; 4]> = (0..inputs[0].rank()).collect();
    rule.inputs = inputs.iter().map(|_| factors_of(&all)).collect();
    rule.outputs.push(factors_of(&all));
    rule
}

macro_rules! forward {
    ($forward:ident, $backward:ident) => {
        impl Operator for $forward {
            fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
                infer_forward(self.axis, inputs)
            }

            fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
                rule_along(self.axis, inputs)
            }

            fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
                let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
                let y = cx.output(0);
                Ok(vec![Some(cx.emit($backward { axis: self.axis }, &[y, dy])?)])
            }

            /// Maximum, difference, exponential (ten), sum, quotient or difference.
            fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
                elements(&outputs[0]) * 14
            }

            fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
                inner_rows(self.axis, &inputs[0])
            }

            fn localize(&self, _: &Region<'_>) -> Op {
                self.clone().into()
            }
        }
    };
}

forward!(Softmax, SoftmaxGrad);
forward!(LogSoftmax, LogSoftmaxGrad);

macro_rules! backward {
    ($backward:ident, $flops:literal) => {
        impl Operator for $backward {
            fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
                infer_backward(self.axis, inputs)
            }

            fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
                rule_along(self.axis, inputs)
            }

            fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
                Err(OpError::new("second derivatives are not supported"))
            }

            fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
                elements(&outputs[0]) * $flops
            }

            fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
                inner_rows(self.axis, &inputs[0])
            }

            fn localize(&self, _: &Region<'_>) -> Op {
                self.clone().into()
            }
        }
    };
}

backward!(SoftmaxGrad, 4);
backward!(LogSoftmaxGrad, 13);

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng};

    impl Examples for LogSoftmax {
        fn golden() -> Golden {
            Golden::new(
                LogSoftmax { axis: 1 },
                &["f32[8,10]"],
                "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, inputs) = rng.repeat(1, 1);
            Case::new(LogSoftmax { axis: rng.axis(&shape) }, inputs)
        }
    }

    impl Examples for LogSoftmaxGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                LogSoftmaxGrad { axis: 1 },
                &["f32[8,10]"; 2],
                "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, inputs) = rng.repeat(1, 2);
            Case::new(LogSoftmaxGrad { axis: rng.axis(&shape) }, inputs)
        }
    }

    impl Examples for Softmax {
        fn golden() -> Golden {
            Golden::new(
                Softmax { axis: 1 },
                &["f32[8,10]"],
                "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, inputs) = rng.repeat(1, 1);
            Case::new(Softmax { axis: rng.axis(&shape) }, inputs)
        }
    }

    impl Examples for SoftmaxGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                SoftmaxGrad { axis: 1 },
                &["f32[8,10]"; 2],
                "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, inputs) = rng.repeat(1, 2);
            Case::new(SoftmaxGrad { axis: rng.axis(&shape) }, inputs)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn only_the_own_dimension_stays_whole() {
        let x = [TensorType::new(DType::F32, [2, 3, 4])];
        let rule = Softmax { axis: 1 }.rule(&x, &x);
        assert_eq!(rule.check(&x, &x), Ok(()));
        assert_eq!(rule.to_string(), "([d0, d1, d2])->([d0, d1, d2]) {d0=2, d1=3, d2=4} whole={d1}");
    }

    #[test]
    fn absurd_attributes_are_refused() {
        let x = TensorType::new(DType::F32, [2, 3]);
        for axis in [2, usize::MAX] {
            assert!(Softmax { axis }.infer(std::slice::from_ref(&x)).is_err());
            assert!(LogSoftmaxGrad { axis }.infer(&[x.clone(), x.clone()]).is_err());
        }
        assert!(Softmax { axis: 0 }.infer(&[TensorType::new(DType::I32, [2])]).is_err());
        assert!(SoftmaxGrad { axis: 0 }.infer(&[x.clone(), TensorType::new(DType::F32, [3, 2])]).is_err());
        assert!(LogSoftmax { axis: 0 }.infer(&[]).is_err());
    }
}
