//! Layer, batch and RMS norm: a variance, and the normalisation by it. The backward ops are in
//! [`crate::ops::NormGradStats`] and its neighbours.
//!
//! A norm is three ops: `mean = Reduce::mean(x)`, `var = Variance(x, mean)`, `y = Normalize(x, mean, var,
//! gamma, beta)`. The first two are reductions over the norm's axes and the third works element by element,
//! so that every dimension can be split: a batch norm whose batch is split all-reduces its statistics and
//! still trains on those of the whole batch.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements, same_float, scratch_bytes},
    ops::{
        BinaryFn, NormGradInput, NormGradParams, NormGradStats, Op, Reduce, Unary, UnaryFn,
        reduce::{check_axes, factors_of, other_axes},
    },
    region::Region,
    require,
    rule::Rule,
    types::{Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// `var = scale * sum((x - mean)^2)` over `axes`, from `x` and, if centered, `mean` (else it counts as 0).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variance {
    /// Which dimensions are summed away, in increasing order.
    pub axes: SmallVec<[usize; 4]>,
    /// Whether a mean is given and subtracted.
    pub centered: bool,
    /// One over the number of elements summed, over all parts of a split.
    pub scale: Real,
}

impl Variance {
    /// The variance over `axes` of a tensor of this shape.
    pub fn over(axes: SmallVec<[usize; 4]>, centered: bool, shape: &[u64]) -> Self {
        let count = count_over(&axes, shape);
        Self { axes, centered, scale: Real(1.0 / count as f64) }
    }
}

/// The number of elements that share one statistic.
fn count_over(axes: &[usize], shape: &[u64]) -> u64 {
    axes.iter().filter_map(|&a| shape.get(a)).fold(1u64, |n, &s| n.saturating_mul(s))
}

/// Refuses statistics that do not have the type of `x` without the reduced dimensions.
fn check_stats(what: &str, axes: &[usize], x: &TensorType, stats: &[TensorType]) -> Result<(), OpError> {
    check_axes(axes, x)?;
    let expected = TensorType::new(x.dtype, x.shape.without(axes));
    for t in stats {
        require!(*t == expected, "{what} must be {expected}, got {t}");
    }
    Ok(())
}

impl Operator for Variance {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1 + usize::from(self.centered))?;
        same_float(inputs)?;
        require!(self.scale.0.is_finite(), "scale {} is not a number", self.scale.0);
        check_stats("the mean", &self.axes, &inputs[0], &inputs[1..])?;
        Ok(vec![TensorType::new(inputs[0].dtype, inputs[0].shape.without(&self.axes))])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::over_dims(&inputs[0].shape);
        let rank = inputs[0].rank();
        rule.inputs.push(factors_of(&other_axes(rank, &[])));
        let kept = factors_of(&other_axes(rank, &self.axes));
        if self.centered {
            rule.inputs.push(kept.clone());
        }
        rule.outputs.push(kept);
        rule
    }

    /// Not used by [`Normalize`], whose own gradient accounts for the variance; here for other users.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let inputs = cx.inputs();
        let mut grads = vec![None; inputs.len()];
        let Some(dvar) = cx.grad(0) else { return Ok(grads) };
        let shape = cx.input_type(0).shape.clone();
        let kept = other_axes(shape.rank(), &self.axes);
        let mut difference = inputs[0];
        if let Some(&mean) = inputs.get(1) {
            let mean = cx.broadcast(mean, shape.clone(), kept.clone())?;
            difference = cx.binary(BinaryFn::Sub, difference, mean)?;
        }
        let f = UnaryFn::Affine { scale: Real(2.0 * self.scale.0), shift: Real(0.0) };
        let scaled = cx.emit(Unary { f }, &[dvar])?;
        let spread = cx.broadcast(scaled, shape, kept)?;
        let dx = cx.binary(BinaryFn::Mul, difference, spread)?;
        grads[0] = Some(dx);
        if self.centered && cx.wants(1) {
            let sum = cx.emit(Reduce::sum(self.axes.clone()), &[dx])?;
            grads[1] = Some(cx.emit(Unary { f: UnaryFn::Neg }, &[sum])?);
        }
        Ok(grads)
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0]) * (2 + u64::from(self.centered))
    }

    fn workspace_bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        // Zero means, and a second sum.
        outputs[0].shape.elements().saturating_mul(2 * scratch_bytes(&inputs[0]))
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

/// `y = (x - mean) / sqrt(var + eps) * gamma + beta`, from `x`, `mean` (if centered), `var`, `gamma` (if
/// scaled) and `beta` (if shifted).
///
/// The gradient treats `mean` and `var` as the statistics of `x` over `axes`, which they must therefore be;
/// no gradient flows through them.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normalize {
    /// The dimensions that the statistics reduce, in increasing order.
    pub axes: SmallVec<[usize; 4]>,
    /// The dimensions that gamma and beta run over, in increasing order.
    pub params: SmallVec<[usize; 4]>,
    /// Whether a mean is given and subtracted.
    pub centered: bool,
    /// Whether gamma is given.
    pub scaled: bool,
    /// Whether beta is given.
    pub shifted: bool,
    /// Added to the variance.
    pub eps: Real,
    /// How many elements share one statistic, over all parts of a split.
    pub count: u64,
}

/// The operands of [`Normalize`] and its backward ops, by name; `None` for those that the attributes leave out.
pub(crate) struct Operands<T> {
    pub x: T,
    pub mean: Option<T>,
    pub var: T,
    pub gamma: Option<T>,
}

impl Normalize {
    /// Scratch memory of the kernels: deviations, and substitutes for operands and results that the norm does not have.
    pub(super) fn scratch_bytes(&self, x: &TensorType) -> u64 {
        let stats = x.shape.without(&self.axes).elements();
        let params = self.parameter_shape(x).elements();
        let elements = 2 * stats + 2 * params + stats.max(params);
        elements.saturating_mul(scratch_bytes(x))
    }

    /// Layer norm over the last dimension of a tensor of this shape.
    pub fn layer(shape: &[u64], eps: f64) -> Self {
        let last: SmallVec<[usize; 4]> = shape.len().checked_sub(1).into_iter().collect();
        let count = count_over(&last, shape);
        let params = last.clone();
        Self { axes: last, params, centered: true, scaled: true, shifted: true, eps: Real(eps), count }
    }

    /// RMS norm over the last dimension of a tensor of this shape.
    pub fn rms(shape: &[u64], eps: f64) -> Self {
        Self { centered: false, shifted: false, ..Self::layer(shape, eps) }
    }

    /// Batch norm of a tensor `[n, c, ...]` of this shape.
    pub fn batch(shape: &[u64], eps: f64) -> Self {
        let axes = other_axes(shape.len(), &[1]);
        let count = count_over(&axes, shape);
        let params = SmallVec::from_slice(&[1]);
        Self { axes, params, centered: true, scaled: true, shifted: true, eps: Real(eps), count }
    }

    /// The mean that this norm needs, where it is centered.
    pub fn mean(&self) -> Reduce {
        Reduce { scale: Real(1.0 / self.count as f64), ..Reduce::sum(self.axes.clone()) }
    }

    /// The variance that this norm needs.
    pub fn variance(&self) -> Variance {
        let scale = Real(1.0 / self.count as f64);
        Variance { axes: self.axes.clone(), centered: self.centered, scale }
    }

    /// The shape of gamma and beta.
    pub(crate) fn parameter_shape(&self, x: &TensorType) -> Shape {
        self.params.iter().map(|&d| x.shape[d]).collect()
    }

    /// Checks the attributes, and `x` with its statistics.
    pub(crate) fn check(
        &self,
        x: &TensorType,
        stats: &[TensorType],
        params: &[TensorType],
    ) -> Result<(), OpError> {
        require!(x.dtype.is_float(), "needs floating-point elements, got {}", x.dtype);
        require!(self.eps.0.is_finite() && self.eps.0 >= 0.0, "eps {} is not a small number", self.eps.0);
        check_stats("mean, variance and their gradients", &self.axes, x, stats)?;
        let held = count_over(&self.axes, &x.shape);
        require!(
            self.count >= held,
            "{held} elements share one statistic, more than the count {}",
            self.count
        );
        check_axes(&self.params, x)?;
        let expected = TensorType::new(x.dtype, self.parameter_shape(x));
        for t in params {
            require!(*t == expected, "gamma and beta must be {expected}, got {t}");
        }
        Ok(())
    }

    /// The number of statistics: mean (if centered) and variance.
    pub(crate) fn statistics(&self) -> usize {
        1 + usize::from(self.centered)
    }

    /// The factors of `x`, its statistics and the parameters.
    pub(crate) fn maps(&self, x: &TensorType) -> (Rule, [crate::rule::TensorMap; 3]) {
        let rank = x.rank();
        let maps = [
            factors_of(&other_axes(rank, &[])),
            factors_of(&other_axes(rank, &self.axes)),
            factors_of(&self.params),
        ];
        (Rule::over_dims(&x.shape), maps)
    }

    /// The forward op's operands, by name, for its backward ops.
    fn operands(&self, cx: &GradContext<'_>) -> Operands<TensorId> {
        let inputs = cx.inputs();
        let var = 1 + usize::from(self.centered);
        Operands {
            x: inputs[0],
            mean: self.centered.then(|| inputs[1]),
            var: inputs[var],
            gamma: self.scaled.then(|| inputs[var + 1]),
        }
    }
}

impl Operator for Normalize {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let stats = self.statistics();
        arity(inputs, 1 + stats + usize::from(self.scaled) + usize::from(self.shifted))?;
        self.check(&inputs[0], &inputs[1..1 + stats], &inputs[1 + stats..])?;
        Ok(vec![inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let (mut rule, [all, kept, params]) = self.maps(&inputs[0]);
        rule.inputs.push(all.clone());
        for _ in 0..self.statistics() {
            rule.inputs.push(kept.clone());
        }
        for _ in 0..usize::from(self.scaled) + usize::from(self.shifted) {
            rule.inputs.push(params.clone());
        }
        rule.outputs.push(all);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let inputs = cx.inputs();
        let mut grads = vec![None; inputs.len()];
        let Some(dy) = cx.grad(0) else { return Ok(grads) };
        let Operands { x, mean, var, gamma } = self.operands(cx);
        let saved: SmallVec<[TensorId; 8]> = [dy, x].into_iter().chain(mean).chain([var]).collect();
        if cx.wants(0) {
            let mut operands: SmallVec<[TensorId; 8]> = saved.iter().copied().chain(gamma).collect();
            let stats = cx.add(NormGradStats { norm: self.clone() }, &operands)?;
            operands.extend(stats);
            grads[0] = Some(cx.emit(NormGradInput { norm: self.clone() }, &operands)?);
        }
        let first = 1 + self.statistics();
        if (first..inputs.len()).any(|i| cx.wants(i)) {
            let params = cx.add(NormGradParams { norm: self.clone() }, &saved)?;
            for (grad, param) in grads[first..].iter_mut().zip(params) {
                *grad = Some(param);
            }
        }
        Ok(grads)
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
            * (1 + u64::from(self.centered) + u64::from(self.scaled) + u64::from(self.shifted))
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        self.scratch_bytes(&inputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

pub(super) mod examples {
    use super::*;
    use crate::examples::{Case, CaseInput, Examples, Golden, Rng, f64s, positive};
    use smallvec::smallvec;

    /// A batch norm of three channels over eight samples of five positions.
    pub(in crate::ops) fn batch_norm() -> Normalize {
        let axes = smallvec![0, 2];
        let params = smallvec![1];
        Normalize { axes, params, centered: true, scaled: true, shifted: true, eps: Real(1e-5), count: 40 }
    }

    /// Any norm: layer, batch and RMS norms, and others that no network has.
    pub(in crate::ops) fn norm(rng: &mut Rng) -> (Normalize, Shape) {
        let shape = rng.shape(2, 4);
        let eps = 1e-3;
        let norm = match rng.between(0, 4) {
            0 => Normalize::layer(&shape, eps),
            1 => Normalize::batch(&shape, eps),
            2 => Normalize::rms(&shape, eps),
            _ => {
                let axes: Vec<usize> = (0..shape.len()).filter(|_| rng.flip()).collect();
                Normalize {
                    params: (0..shape.len()).filter(|_| rng.flip()).collect(),
                    centered: rng.flip(),
                    scaled: rng.flip(),
                    shifted: rng.flip(),
                    eps: Real(eps),
                    count: Reduce::mean(axes.clone().into(), &shape).scale.0.recip().round() as u64,
                    axes: axes.into(),
                }
            }
        };
        (norm, Shape::new(&shape))
    }

    /// `dy` (if `gradient`), `x`, mean, variance, and (if `gamma`) the scale, as far as the norm has them.
    pub(in crate::ops) fn norm_inputs(
        norm: &Normalize,
        shape: &Shape,
        gradient: bool,
        gamma: bool,
    ) -> Vec<CaseInput> {
        let stats = shape.without(&norm.axes);
        let mut inputs = vec![f64s(shape.clone()); 1 + usize::from(gradient)];
        if norm.centered {
            inputs.push(f64s(stats.clone()));
        }
        inputs.push(positive(stats));
        if gamma && norm.scaled {
            inputs.push(f64s(parameter_shape(norm, shape)));
        }
        inputs
    }

    pub(in crate::ops) fn parameter_shape(norm: &Normalize, shape: &Shape) -> Shape {
        norm.params.iter().map(|&d| shape[d]).collect()
    }

    impl Examples for Normalize {
        /// Its gradient accounts for that of its statistics: tested in whole layers.
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                batch_norm(),
                &["f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"],
                "([d0, d1, d2], [d1], [d1], [d1], [d1])->([d0, d1, d2]) {d0=8, d1=3, d2=5}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (norm, shape) = norm(rng);
            let mut inputs = norm_inputs(&norm, &shape, false, true);
            if norm.shifted {
                inputs.push(f64s(parameter_shape(&norm, &shape)));
            }
            Case::new(norm, inputs)
        }
    }

    impl Examples for Variance {
        fn golden() -> Golden {
            Golden::new(
                Variance::over(smallvec![0, 2], true, &[8, 3, 5]),
                &["f32[8,3,5]", "f32[3]"],
                "([d0, d1, d2], [d1])->([d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            let axes = (0..shape.len()).filter(|_| rng.flip()).collect();
            let op = Variance::over(axes, rng.flip(), &shape);
            let mut inputs = vec![f64s(&shape[..])];
            if op.centered {
                inputs.push(f64s(Shape::new(&shape).without(&op.axes)));
            }
            Case::new(op, inputs)
        }
    }
}
