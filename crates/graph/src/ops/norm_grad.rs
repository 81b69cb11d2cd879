//! The backward ops of [`Normalize`]: sums that stand for the gradients through mean and variance, the
//! gradients of gamma and beta, and the gradient of the input.
//!
//! With `xhat = (x - mean) / sqrt(var + eps)` and `g = dy * gamma`, the gradient through the statistics too
//! is `dx = (g - mean(g) - xhat * mean(g * xhat)) / sqrt(var + eps)`; without a mean its term drops out.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::{Normalize, Op},
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// `s1 = sum(dy * gamma) / count` (if centered) and `s2 = sum(dy * gamma * xhat) / count` over the norm's
/// axes, from `dy`, `x`, `mean` (if centered), `var`, `gamma` (if scaled).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormGradStats {
    /// The forward op.
    pub norm: Normalize,
}

/// The gradients of gamma (if scaled) and beta (if shifted), from `dy`, `x`, `mean` (if centered), `var`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormGradParams {
    /// The forward op.
    pub norm: Normalize,
}

/// `dx`, from `dy`, `x`, `mean` (if centered), `var`, `gamma` (if scaled), and the results of
/// [`NormGradStats`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormGradInput {
    /// The forward op.
    pub norm: Normalize,
}

/// Checks `dy`, `x`, the statistics, then gamma and the gradients of the statistics.
fn check(norm: &Normalize, inputs: &[TensorType], gamma: bool, sums: usize) -> Result<(), OpError> {
    let gamma = usize::from(gamma && norm.scaled);
    let stats = norm.statistics();
    arity(inputs, 2 + stats + gamma + sums)?;
    let (dy, x) = (&inputs[0], &inputs[1]);
    require!(dy == x, "gradient {dy} and input {x} differ");
    norm.check(x, &inputs[2..2 + stats], &inputs[2 + stats..2 + stats + gamma])?;
    norm.check(x, &inputs[2 + stats + gamma..], &[])
}

/// The maps of the operands that [`check`] checks; results are added by the caller.
fn rule_of(norm: &Normalize, inputs: &[TensorType], gamma: bool, sums: usize) -> Rule {
    let (mut rule, [all, kept, params]) = norm.maps(&inputs[1]);
    rule.inputs.extend([all.clone(), all]);
    rule.inputs.extend((0..norm.statistics()).map(|_| kept.clone()));
    if gamma && norm.scaled {
        rule.inputs.push(params);
    }
    rule.inputs.extend((0..sums).map(|_| kept.clone()));
    rule
}

impl Operator for NormGradStats {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check(&self.norm, inputs, true, 0)?;
        let x = &inputs[1];
        let stat = TensorType::new(x.dtype, x.shape.without(&self.norm.axes));
        Ok(vec![stat; self.norm.statistics()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = rule_of(&self.norm, inputs, true, 0);
        let (_, [_, kept, _]) = self.norm.maps(&inputs[1]);
        rule.outputs.extend(outputs.iter().map(|_| kept.clone()));
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let norm = &self.norm;
        elements(&inputs[1]) * (2 + 2 * u64::from(norm.centered) + u64::from(norm.scaled))
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        self.norm.scratch_bytes(&inputs[1])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

impl Operator for NormGradParams {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check(&self.norm, inputs, false, 0)?;
        require!(self.norm.scaled || self.norm.shifted, "the norm has neither gamma nor beta");
        let x = &inputs[1];
        let param = TensorType::new(x.dtype, self.norm.parameter_shape(x));
        Ok(vec![param; usize::from(self.norm.scaled) + usize::from(self.norm.shifted)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = rule_of(&self.norm, inputs, false, 0);
        let (_, [_, _, params]) = self.norm.maps(&inputs[1]);
        rule.outputs.extend(outputs.iter().map(|_| params.clone()));
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let norm = &self.norm;
        let gamma = if norm.scaled { 3 + u64::from(norm.centered) } else { 0 };
        elements(&inputs[1]) * (gamma + u64::from(norm.shifted))
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        self.norm.scratch_bytes(&inputs[1])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

impl Operator for NormGradInput {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check(&self.norm, inputs, true, self.norm.statistics())?;
        Ok(vec![inputs[1].clone()])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = rule_of(&self.norm, inputs, true, self.norm.statistics());
        let (_, [all, ..]) = self.norm.maps(&inputs[1]);
        rule.outputs.push(all);
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let norm = &self.norm;
        elements(&inputs[1]) * (4 + 2 * u64::from(norm.centered) + u64::from(norm.scaled))
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        self.norm.scratch_bytes(&inputs[1])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        ops::norm::examples::{batch_norm, norm, norm_inputs},
    };

    impl Examples for NormGradInput {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                NormGradInput { norm: batch_norm() },
                &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"],
                "([d0, d1, d2], [d0, d1, d2], [d1], [d1], [d1], [d1], [d1])->([d0, d1, d2]) {d0=8, d1=3, d2=5}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (norm, shape) = norm(rng);
            let mut inputs = norm_inputs(&norm, &shape, true, true);
            let stats = f64s(shape.without(&norm.axes));
            inputs.extend(vec![stats; 1 + usize::from(norm.centered)]);
            Case::new(NormGradInput { norm }, inputs)
        }
    }

    impl Examples for NormGradParams {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                NormGradParams { norm: batch_norm() },
                &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]"],
                "([d0, d1, d2], [d0, d1, d2], [d1], [d1])->([d1], [d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (mut norm, shape) = norm(rng);
            norm.scaled |= !norm.shifted;
            let inputs = norm_inputs(&norm, &shape, true, false);
            Case::new(NormGradParams { norm }, inputs)
        }
    }

    impl Examples for NormGradStats {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                NormGradStats { norm: batch_norm() },
                &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]"],
                "([d0, d1, d2], [d0, d1, d2], [d1], [d1], [d1])->([d1], [d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (norm, shape) = norm(rng);
            let inputs = norm_inputs(&norm, &shape, true, true);
            Case::new(NormGradStats { norm }, inputs)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Real};

    fn rule(op: &dyn Operator, inputs: &[TensorType]) -> String {
        let outputs = op.infer(inputs).unwrap();
        let rule = op.rule(inputs, &outputs);
        assert_eq!(rule.check(inputs, &outputs), Ok(()));
        rule.to_string()
    }

    #[test]
    fn batch_norm_reduces_over_the_batch_and_runs_its_parameters_over_channels() {
        let norm = Normalize::batch(&[8, 3, 5, 5], 1e-5);
        let x = TensorType::new(DType::F32, [8, 3, 5, 5]);
        let c = TensorType::new(DType::F32, [3]);
        let sizes = "{d0=8, d1=3, d2=5, d3=5}";
        assert_eq!(
            rule(&norm, &[x.clone(), c.clone(), c.clone(), c.clone(), c.clone()]),
            format!("([d0, d1, d2, d3], [d1], [d1], [d1], [d1])->([d0, d1, d2, d3]) {sizes}")
        );
        assert_eq!(
            rule(&NormGradParams { norm: norm.clone() }, &[x.clone(), x.clone(), c.clone(), c.clone()]),
            format!(
                "([d0, d1, d2, d3], [d0, d1, d2, d3], [d1], [d1])->([d1], [d1]) {sizes} reduction={{d0, d2, d3}}"
            )
        );
        assert_eq!(
            rule(&norm.variance(), &[x, c]),
            format!("([d0, d1, d2, d3], [d1])->([d1]) {sizes} reduction={{d0, d2, d3}}")
        );
    }

    #[test]
    fn layer_norm_reduces_its_last_dimension_in_the_sums_and_the_others_in_the_parameters() {
        let norm = Normalize::rms(&[4, 6], 1e-6);
        let x = TensorType::new(DType::F64, [4, 6]);
        let (rows, last) = (TensorType::new(DType::F64, [4]), TensorType::new(DType::F64, [6]));
        assert_eq!(
            rule(&NormGradStats { norm: norm.clone() }, &[x.clone(), x.clone(), rows.clone(), last.clone()]),
            "([d0, d1], [d0, d1], [d0], [d1])->([d0]) {d0=4, d1=6} reduction={d1}"
        );
        assert_eq!(
            rule(&NormGradParams { norm: norm.clone() }, &[x.clone(), x.clone(), rows.clone()]),
            "([d0, d1], [d0, d1], [d0])->([d1]) {d0=4, d1=6} reduction={d0}"
        );
        assert_eq!(
            rule(&NormGradInput { norm }, &[x.clone(), x, rows.clone(), last, rows]),
            "([d0, d1], [d0, d1], [d0], [d1], [d0])->([d0, d1]) {d0=4, d1=6}"
        );
    }

    #[test]
    fn absurd_attributes_are_refused() {
        let x = TensorType::new(DType::F32, [4, 6]);
        let (rows, last) = (TensorType::new(DType::F32, [4]), TensorType::new(DType::F32, [6]));
        let good = Normalize::layer(&[4, 6], 1e-5);
        let inputs = [x.clone(), rows.clone(), rows.clone(), last.clone(), last.clone()];
        assert!(good.infer(&inputs).is_ok());
        let bad = |change: &dyn Fn(&mut Normalize)| {
            let mut norm = good.clone();
            change(&mut norm);
            norm.infer(&inputs).is_err()
        };
        assert!(bad(&|n| n.eps = Real(f64::NAN)));
        assert!(bad(&|n| n.eps = Real(-1.0)));
        assert!(bad(&|n| n.count = 5));
        assert!(bad(&|n| n.axes[0] = usize::MAX));
        assert!(bad(&|n| n.params[0] = 2));
        assert!(bad(&|n| n.params = [1, 1].into_iter().collect()));
        assert!(bad(&|n| n.axes = [1, 0].into_iter().collect()));
        assert!(bad(&|n| n.centered = false));
        let mut variance = good.variance();
        variance.scale = Real(f64::INFINITY);
        assert!(variance.infer(&[x.clone(), rows.clone()]).is_err());
        let neither = Normalize { scaled: false, shifted: false, ..good };
        assert!(NormGradParams { norm: neither }.infer(&[x.clone(), x, rows.clone(), rows]).is_err());
    }
}
