//! Sum, mean and maximum over dimensions.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements},
    ops::{BinaryFn, Cast, Compare, CompareFn, Op, Unary, UnaryFn},
    region::Region,
    require,
    rule::{FactorIndex, Reduction, Rule, TensorMap},
    types::{DType, Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Reduces the dimensions `axes` away. A mean is a scaled sum, so that the parts of a split add up to it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// Sum or maximum.
    pub f: Reduction,
    /// The reduced dimensions, in increasing order.
    pub axes: SmallVec<[usize; 4]>,
    /// Factor of a sum (1 for a maximum).
    pub scale: Real,
}

impl Reduce {
    /// The sum over `axes`.
    pub fn sum(axes: SmallVec<[usize; 4]>) -> Self {
        Self { f: Reduction::Sum, axes, scale: Real(1.0) }
    }

    /// The mean over `axes` of a tensor of this shape.
    pub fn mean(axes: SmallVec<[usize; 4]>, shape: &[u64]) -> Self {
        let count: u64 = axes.iter().filter_map(|&a| shape.get(a)).product();
        Self { f: Reduction::Sum, axes, scale: Real(1.0 / count as f64) }
    }

    /// The maximum over `axes`.
    pub fn max(axes: SmallVec<[usize; 4]>) -> Self {
        Self { f: Reduction::Max, axes, scale: Real(1.0) }
    }
}

/// Refuses axes that do not exist, repeat or are out of order.
pub(crate) fn check_axes(axes: &[usize], ty: &TensorType) -> Result<(), OpError> {
    for (i, &axis) in axes.iter().enumerate() {
        axis_in(axis, ty)?;
        require!(i == 0 || axes[i - 1] < axis, "axes {axes:?} must increase");
    }
    Ok(())
}

/// The dimensions of a tensor of this rank that are not among `axes`.
pub(crate) fn other_axes(rank: usize, axes: &[usize]) -> SmallVec<[usize; 4]> {
    (0..rank).filter(|i| !axes.contains(i)).collect()
}

/// The factors `d0`, `d1`, ... of the dimensions in `axes`.
pub(crate) fn factors_of(axes: &[usize]) -> TensorMap {
    TensorMap::of(&axes.iter().map(|&a| a as FactorIndex).collect::<SmallVec<[FactorIndex; 4]>>())
}

impl Operator for Reduce {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let x = &inputs[0];
        require!(x.dtype != DType::Bool, "cannot reduce truth values");
        require!(x.dtype.is_float() || self.scale == Real(1.0), "cannot scale {}", x.dtype);
        require!(self.f != Reduction::LogSumExp, "reduces to sums and maxima only");
        require!(self.f == Reduction::Sum || self.scale == Real(1.0), "a maximum takes no scale");
        check_axes(&self.axes, x)?;
        Ok(vec![TensorType::new(x.dtype, x.shape.without(&self.axes))])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::over_dims(&inputs[0].shape);
        let rank = inputs[0].rank();
        rule.inputs.push(factors_of(&other_axes(rank, &[])));
        rule.outputs.push(factors_of(&other_axes(rank, &self.axes)).reduced_by(self.f));
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let shape: Shape = cx.input_type(0).shape.clone();
        let kept = other_axes(shape.rank(), &self.axes);
        let spread = |cx: &mut GradContext<'_>, t| cx.broadcast(t, shape.clone(), kept.clone());
        let grad = match self.f {
            Reduction::Sum => {
                let f = UnaryFn::Affine { scale: self.scale, shift: Real(0.0) };
                let scaled = if self.scale == Real(1.0) { dy } else { cx.emit(Unary { f }, &[dy])? };
                spread(cx, scaled)?
            }
            Reduction::Max => {
                // Ties share the gradient equally; counting them is a sum, so every split stays exact.
                let (x, y) = (cx.input(0), cx.output(0));
                let dtype = cx.ty(dy).dtype;
                let largest = spread(cx, y)?;
                let ties = cx.emit(Compare { f: CompareFn::Eq }, &[x, largest])?;
                let ties = cx.emit(Cast { dtype }, &[ties])?;
                let count = cx.emit(Reduce::sum(self.axes.clone()), &[ties])?;
                let share = cx.binary(BinaryFn::Div, dy, count)?;
                let share = spread(cx, share)?;
                cx.binary(BinaryFn::Mul, share, ties)?
            }
            Reduction::LogSumExp => return Err(OpError::new("reduces to sums and maxima only")),
        };
        Ok(vec![Some(grad)])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};
    use smallvec::smallvec;

    impl Examples for Reduce {
        fn golden() -> Golden {
            Golden::new(
                Reduce::max(smallvec![1]),
                &["f32[8,6]"],
                "([d0, d1])->([d0]max) {d0=8, d1=6} reduction={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 4);
            let axes = (0..shape.len()).filter(|_| rng.flip()).collect();
            let op = match rng.between(0, 2) {
                0 => Reduce::sum(axes),
                1 => Reduce::mean(axes, &shape),
                _ => Reduce::max(axes),
            };
            Case::new(op, vec![f64s(&shape[..])])
        }
    }
}
