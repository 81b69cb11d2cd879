//! Kernels of the norms, forward and backward; their loops are in [`super::norm_rows`].

use super::{
    Context, Kernel, KernelError, Result,
    norm_rows::{NormLoops, Operands, Point, map, sum_to_params, sum_to_stats, with_moving},
    read, write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{NormGradInput, NormGradParams, NormGradStats, Normalize, Variance};
use smallvec::SmallVec;

/// `1 / sqrt(var + eps)`, and substitutes for operands that the attributes leave out.
struct Substitutes<'a, T> {
    rstd: &'a [T],
    zero_stats: &'a [T],
    zeros: &'a [T],
    ones: &'a [T],
    /// Memory for a result that the op does not have.
    unwanted: &'a mut [T],
}

impl<'a, T: Float> Substitutes<'a, T> {
    fn new(context: &'a mut Context, norm: &Normalize, shape: &[u64], var: &[T]) -> Self {
        let stats = var.len();
        let params: usize = norm.params.iter().map(|&d| shape[d] as usize).product();
        let longest = stats.max(params);
        let buffer = context.scratch.take::<T>(2 * stats + 2 * params + longest);
        buffer.fill(T::ZERO);
        let (rstd, rest) = buffer.split_at_mut(stats);
        let (zero_stats, rest) = rest.split_at_mut(stats);
        let (zeros, rest) = rest.split_at_mut(params);
        let (ones, unwanted) = rest.split_at_mut(params);
        ones.fill(T::ONE);
        let eps = T::from_f64(norm.eps.0);
        for (r, &v) in rstd.iter_mut().zip(var) {
            *r = T::ONE / (v + eps).sqrt();
        }
        Self { rstd, zero_stats, zeros, ones, unwanted }
    }

    /// The operands of a norm's loops: the op's inputs, and substitutes for the rest.
    fn operands(&self, dy: &'a [T], x: &'a [T], norm_inputs: &NormInputs<'a, T>) -> Operands<'a, T> {
        Operands {
            dy,
            x,
            mean: norm_inputs.mean.unwrap_or(self.zero_stats),
            rstd: self.rstd,
            gamma: norm_inputs.gamma.unwrap_or(self.ones),
            beta: self.zeros,
            s1: self.rstd,
            s2: self.rstd,
        }
    }
}

impl Kernel for Variance {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let loops = NormLoops::new(inputs[0].shape, &self.axes, &[]);
        let x = read::<T>(&inputs[0])?;
        let y = write::<T>(&mut outputs[0])?;
        let (zeros, unwanted) = context.scratch.take::<T>(2 * y.len()).split_at_mut(y.len());
        zeros.fill(T::ZERO);
        let mean = if self.centered { read::<T>(&inputs[1])? } else { &*zeros };
        let one = &[T::ONE][..];
        let operands = Operands { dy: x, x, mean, rstd: mean, gamma: one, beta: one, s1: mean, s2: mean };
        let f = |p: Point<T>| {
            let difference = p.x - p.mean;
            [difference * difference, T::ZERO]
        };
        with_moving!(loops, sum_to_stats::<_, _>(&loops, operands, [y, unwanted], f));
        let scale = T::from_f64(self.scale.0);
        y.iter_mut().for_each(|y| *y *= scale);
        Ok(())
    }
}

/// The inputs that all norm ops share.
struct NormInputs<'a, T> {
    mean: Option<&'a [T]>,
    var: &'a [T],
    gamma: Option<&'a [T]>,
    /// Number of these inputs, `x` included.
    count: usize,
}

impl<'a, T: Float> NormInputs<'a, T> {
    /// Reads the inputs that follow `x`, which is `inputs[0]`.
    fn read(norm: &Normalize, inputs: &[View<'a>], gamma: bool) -> Result<Self> {
        let mean = if norm.centered { Some(read::<T>(&inputs[1])?) } else { None };
        let at = 1 + usize::from(norm.centered);
        let var = read::<T>(&inputs[at])?;
        let gamma = if gamma && norm.scaled { Some(read::<T>(&inputs[at + 1])?) } else { None };
        Ok(Self { mean, var, gamma, count: at + 1 + usize::from(gamma.is_some()) })
    }
}

impl Kernel for Normalize {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let shape = inputs[0].shape;
        let loops = NormLoops::new(shape, &self.axes, &self.params);
        let norm_inputs = NormInputs::<T>::read(self, inputs, true)?;
        let substitutes = Substitutes::new(context, self, shape, norm_inputs.var);
        let x = read::<T>(&inputs[0])?;
        let mut operands = substitutes.operands(x, x, &norm_inputs);
        if self.shifted {
            operands.beta = read::<T>(&inputs[norm_inputs.count])?;
        }
        let y = write::<T>(&mut outputs[0])?;
        let f = |p: Point<T>| (p.x - p.mean) * p.rstd * p.gamma + p.beta;
        with_moving!(loops, map::<_, _>(&loops, operands, y, f));
        Ok(())
    }
}

impl Kernel for NormGradStats {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let norm = &self.norm;
        let shape = inputs[0].shape;
        let loops = NormLoops::new(shape, &norm.axes, &norm.params);
        let norm_inputs = NormInputs::<T>::read(norm, &inputs[1..], true)?;
        let substitutes = Substitutes::new(context, norm, shape, norm_inputs.var);
        let operands = substitutes.operands(read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, &norm_inputs);
        let results = match outputs {
            [s1, s2] => [write::<T>(s1)?, write::<T>(s2)?],
            [s2] => [&mut substitutes.unwanted[..norm_inputs.var.len()], write::<T>(s2)?],
            _ => return Err(KernelError::BadValue("a norm has one or two sums".into())),
        };
        let f = |p: Point<T>| {
            let g = p.dy * p.gamma;
            [g, g * ((p.x - p.mean) * p.rstd)]
        };
        let [s1, s2] = results;
        with_moving!(loops, sum_to_stats::<_, _>(&loops, operands, [&mut *s1, &mut *s2], f));
        let scale = T::from_f64(1.0 / norm.count as f64);
        s1.iter_mut().chain(s2).for_each(|s| *s *= scale);
        Ok(())
    }
}

impl Kernel for NormGradParams {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let norm = &self.norm;
        let shape = inputs[0].shape;
        let loops = NormLoops::new(shape, &norm.axes, &norm.params);
        let norm_inputs = NormInputs::<T>::read(norm, &inputs[1..], false)?;
        let substitutes = Substitutes::new(context, norm, shape, norm_inputs.var);
        let operands = substitutes.operands(read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, &norm_inputs);
        let results = match outputs {
            [dgamma, dbeta] => [write::<T>(dgamma)?, write::<T>(dbeta)?],
            [dgamma] if norm.scaled => {
                [write::<T>(dgamma)?, &mut substitutes.unwanted[..substitutes.ones.len()]]
            }
            [dbeta] => [&mut substitutes.unwanted[..substitutes.ones.len()], write::<T>(dbeta)?],
            _ => return Err(KernelError::BadValue("a norm has at most two parameters".into())),
        };
        let f = |p: Point<T>| [p.dy * ((p.x - p.mean) * p.rstd), p.dy];
        with_moving!(loops, sum_to_params::<_, _>(&loops, operands, results, f));
        Ok(())
    }
}

impl Kernel for NormGradInput {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let norm = &self.norm;
        let shape = inputs[0].shape;
        let loops = NormLoops::new(shape, &norm.axes, &norm.params);
        let norm_inputs = NormInputs::<T>::read(norm, &inputs[1..], true)?;
        let sums: SmallVec<[&[T]; 2]> =
            inputs[1 + norm_inputs.count..].iter().map(read::<T>).collect::<Result<_, _>>()?;
        let substitutes = Substitutes::new(context, norm, shape, norm_inputs.var);
        let mut operands = substitutes.operands(read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, &norm_inputs);
        (operands.s1, operands.s2) = match *sums {
            [s1, s2] => (s1, s2),
            [s2] => (substitutes.zero_stats, s2),
            _ => return Err(KernelError::BadValue("a norm has one or two sums".into())),
        };
        let dx = write::<T>(&mut outputs[0])?;
        let f = |p: Point<T>| p.rstd * (p.dy * p.gamma - p.s1 - (p.x - p.mean) * p.rstd * p.s2);
        with_moving!(loops, map::<_, _>(&loops, operands, dx, f));
        Ok(())
    }
}
