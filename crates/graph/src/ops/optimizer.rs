//! The ops that turn a weight and its gradient into the next step's weight: SGD, momentum, Adam.
//!
//! All work element by element, so that weights and optimizer state can be split in any way.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, UPDATE_CHUNK, arity, elements},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{Real, TensorType},
};
use serde::{Deserialize, Serialize};

/// `w' = w - lr * g`, from `w` and `g`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Learning rate.
    pub lr: Real,
}

/// `v' = momentum * v + g`, `w' = w - lr * v'`, from `w`, `g` and `v`; gives `w'` and `v'`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Momentum {
    /// Learning rate.
    pub lr: Real,
    /// The share of the last step's velocity that is kept.
    pub momentum: Real,
}

/// Adam with bias correction (Kingma and Ba, 2015, algorithm 1), from `w`, `g`, `m` and `v`; gives `w'`,
/// `m'` and `v'`: `m' = beta1 * m + (1 - beta1) * g`, `v' = beta2 * v + (1 - beta2) * g^2`,
/// `w' = (1 - lr * weight_decay) * w - lr * (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)` in the `t`-th step. With
/// a weight decay this is AdamW (Loshchilov and Hutter, arXiv 1711.05101).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Learning rate.
    pub lr: Real,
    /// Decay of the mean of gradients.
    pub beta1: Real,
    /// Decay of the mean of squared gradients.
    pub beta2: Real,
    /// Added to the denominator.
    pub eps: Real,
    /// The share of the weight that is taken away, times the learning rate.
    #[serde(default, skip_serializing_if = "Real::is_zero")]
    pub weight_decay: Real,
}

/// Checks that weight and `state` further tensors have one float type, and the gradient that or a narrower one; gives the
/// new ones' types.
fn infer_update(inputs: &[TensorType], state: usize) -> Result<Vec<TensorType>, OpError> {
    arity(inputs, 2 + state)?;
    let w = &inputs[0];
    require!(w.dtype.is_float(), "only floating-point weights are trained, got {w}");
    let gradient = &inputs[1];
    require!(
        gradient.shape == w.shape && gradient.dtype.is_float() && gradient.dtype.bytes() <= w.dtype.bytes(),
        "weight {w} with a gradient of type {gradient}"
    );
    for t in &inputs[2..] {
        require!(t == w, "weight {w} with a state of type {t}");
    }
    Ok(vec![w.clone(); 1 + state])
}

fn finite(name: &str, x: Real) -> Result<(), OpError> {
    require!(x.0.is_finite(), "{name} {} is not a number", x.0);
    Ok(())
}

fn decay(name: &str, x: Real) -> Result<(), OpError> {
    require!((0.0..1.0).contains(&x.0), "{name} {} is not at least 0 and less than 1", x.0);
    Ok(())
}

macro_rules! update {
    ($op:ident, $state:literal, $flops:literal, |$this:ident| $check:expr) => {
        impl Operator for $op {
            fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
                let $this = self;
                $check?;
                infer_update(inputs, $state)
            }

            fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
                Rule::elementwise(inputs, outputs)
            }

            fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
                Err(OpError::new("an update has no gradient; differentiate before adding updates"))
            }

            fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
                elements(&inputs[0]) * $flops
            }

            fn updates_in_place(&self) -> bool {
                true
            }

            fn workspace_bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
                // A chunk of every operand and result, each in whole cache lines.
                let chunk = |ty: &TensorType| {
                    let elements = elements(ty).min(UPDATE_CHUNK);
                    (elements * ty.dtype.bytes()).div_ceil(64) * 64
                };
                inputs.iter().chain(outputs).map(chunk).sum()
            }

            fn localize(&self, _: &Region<'_>) -> Op {
                self.clone().into()
            }
        }
    };
}

update!(Sgd, 0, 2, |op| finite("learning rate", op.lr));
update!(Momentum, 1, 4, |op| finite("learning rate", op.lr).and_then(|()| decay("momentum", op.momentum)));
update!(Adam, 2, 16, |op| op.check());

impl Adam {
    fn check(&self) -> Result<(), OpError> {
        finite("learning rate", self.lr)?;
        decay("beta1", self.beta1)?;
        decay("beta2", self.beta2)?;
        require!(self.eps.0.is_finite() && self.eps.0 >= 0.0, "eps {} is not a small number", self.eps.0);
        finite("weight decay", self.weight_decay)?;
        Ok(())
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, positive};

    impl Examples for Adam {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Adam {
                    lr: Real(1e-3),
                    beta1: Real(0.9),
                    beta2: Real(0.999),
                    eps: Real(1e-8),
                    weight_decay: Real(0.0),
                },
                &["f32[8,6]"; 4],
                "([d0, d1], [d0, d1], [d0, d1], [d0, d1])->([d0, d1], [d0, d1], [d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, mut inputs) = rng.repeat(0, 3);
            inputs.push(positive(&shape[..]));
            Case::new(
                Adam {
                    lr: Real(0.1),
                    beta1: Real(0.9),
                    beta2: Real(0.99),
                    eps: Real(1e-3),
                    weight_decay: Real(0.0),
                },
                inputs,
            )
        }
    }

    impl Examples for Momentum {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Momentum { lr: Real(0.1), momentum: Real(0.9) },
                &["f32[8,6]"; 3],
                "([d0, d1], [d0, d1], [d0, d1])->([d0, d1], [d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (_, inputs) = rng.repeat(0, 3);
            Case::new(Momentum { lr: Real(0.1), momentum: Real(0.9) }, inputs)
        }
    }

    impl Examples for Sgd {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Sgd { lr: Real(0.1) },
                &["f32[8,6]"; 2],
                "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (_, inputs) = rng.repeat(0, 2);
            Case::new(Sgd { lr: Real(0.1) }, inputs)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn absurd_attributes_are_refused() {
        let w = TensorType::new(DType::F32, [3]);
        let inputs = vec![w; 4];
        let adam = |lr, beta1, beta2, eps| Adam {
            lr: Real(lr),
            beta1: Real(beta1),
            beta2: Real(beta2),
            eps: Real(eps),
            weight_decay: Real(0.0),
        };
        assert_eq!(adam(1e-3, 0.9, 0.999, 1e-8).infer(&inputs).map(|o| o.len()), Ok(3));
        for bad in [
            adam(f64::NAN, 0.9, 0.999, 1e-8),
            adam(1e-3, 1.0, 0.999, 1e-8),
            adam(1e-3, 0.9, f64::NAN, 1e-8),
            adam(1e-3, 0.9, 0.999, -1.0),
            adam(1e-3, 0.9, 0.999, f64::INFINITY),
        ] {
            assert!(bad.infer(&inputs).is_err(), "{bad:?}");
        }
        assert!(Sgd { lr: Real(f64::INFINITY) }.infer(&inputs[..2]).is_err());
        assert!(Momentum { lr: Real(0.1), momentum: Real(-0.5) }.infer(&inputs[..3]).is_err());
        let mixed = [TensorType::new(DType::F32, [3]), TensorType::new(DType::F64, [3])];
        assert!(Sgd { lr: Real(0.1) }.infer(&mixed).is_err());
        assert!(Sgd { lr: Real(0.1) }.infer(&inputs).is_err());
    }
}
