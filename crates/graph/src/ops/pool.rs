//! Maximum and average pooling over sliding windows, and their derivatives.
//!
//! Padding counts as minus infinity for the maximum and as zero for the average, which always divides by the
//! whole window; a larger high pad expresses the ceil mode of other systems. Global pooling is
//! [`crate::ops::Reduce`].

use super::slide::{Slide, Slides, spatial_names};
use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, same_float},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Reach, Rule, TensorMap},
    types::{DType, Dims, Shape, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::Range;

/// How the window moves over the input, per spatial dimension.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolGeometry {
    /// Positions per window.
    pub kernel: Dims,
    /// Input positions from one output position to the next.
    pub stride: Dims,
    /// Positions before and after the input; negative: positions left out.
    pub pad: SmallVec<[(i64, i64); 3]>,
    /// Input positions from one window position to the next.
    pub dilation: Dims,
}

impl PoolGeometry {
    /// Windows of these sizes and strides, neither padded nor dilated.
    pub fn plain(kernel: &[u64], stride: &[u64]) -> Self {
        Self {
            kernel: Dims::from_slice(kernel),
            stride: Dims::from_slice(stride),
            pad: SmallVec::from_elem((0, 0), kernel.len()),
            dilation: Dims::from_elem(1, kernel.len()),
        }
    }

    /// The spatial dimensions.
    pub fn slides(&self) -> Result<Slides, OpError> {
        Slide::list(&self.kernel, &self.stride, &self.dilation, &self.pad)
    }

    /// Checks an input `[n, c, spatial...]` and gives the output's shape.
    fn output(&self, x: &[u64]) -> Result<Shape, OpError> {
        let slides = self.slides()?;
        require!(
            x.len() == slides.len() + 2,
            "{} spatial dimensions do not fit an input of rank {}",
            slides.len(),
            x.len()
        );
        // A position inside the window must fit the index tensor's i32.
        let window = slides.iter().try_fold(1u64, |n, s| n.checked_mul(s.kernel));
        require!(window.is_some_and(|n| n < 1 << 31), "the window has over 2^31 positions");
        let mut y = Shape::new(&x[..2]);
        for (slide, &size) in slides.iter().zip(&x[2..]) {
            y.0.push(slide.outputs(size)?);
        }
        Ok(y)
    }

    /// The input's shape, given its spatial sizes and the output's shape.
    fn input(&self, dy: &Shape, input: &[u64]) -> Result<Shape, OpError> {
        require!(dy.rank() >= 3, "{dy} has no spatial dimensions");
        let x: Shape = dy[..2].iter().chain(input).copied().collect();
        x.check().map_err(OpError::new)?;
        let y = self.output(&x)?;
        require!(y == *dy, "the pooled output is {y}, its gradient {dy}");
        Ok(x)
    }

    /// Window positions of all outputs: the additions or comparisons that pooling takes.
    fn work(&self, y: &TensorType) -> u64 {
        self.kernel.iter().fold(y.shape.elements(), |n, &k| n.saturating_mul(k))
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType], reach: Reach) -> Rule {
        let Some(slides) = accepted(self.slides()) else { return Rule::replicated(inputs, outputs) };
        let (shape, rank) = (&outputs[0].shape, slides.len());
        let mut rule = Rule::default();
        let channels = [rule.factor("n", shape[0]), rule.factor("c", shape[1])];
        let spatial: SmallVec<[FactorIndex; 3]> =
            (0..rank).map(|i| rule.factor(spatial_names(rank)[i], shape[i + 2])).collect();
        let map = |windowed: bool| {
            let dims = slides.iter().zip(&spatial).map(|(slide, &f)| match windowed {
                true => slide.map(f, reach),
                false => DimMap::of(f),
            });
            TensorMap::new(channels.map(DimMap::of).into_iter().chain(dims))
        };
        rule.inputs.extend(inputs.iter().map(|_| map(true)));
        rule.outputs.extend(outputs.iter().map(|_| map(false)));
        rule
    }

    /// The geometry of one part, given the inputs and outputs that it covers.
    fn local(&self, inputs: &[Range<u64>], outputs: &[Range<u64>]) -> Self {
        let Some(slides) = accepted(self.slides()) else { return self.clone() };
        let pad = (0..slides.len()).map(|i| slides[i].local(&inputs[i + 2], &outputs[i + 2]).pad).collect();
        Self { pad, ..self.clone() }
    }

    fn local_forward(&self, region: &Region<'_>) -> Self {
        self.local(&region.input_block(0), &region.output_block(0))
    }

    fn local_backward(&self, region: &Region<'_>) -> (Self, Dims) {
        let local = self.local(&region.output_block(0), &region.input_block(0));
        (local, Dims::from_slice(&region.output_shape(0)[2..]))
    }
}

/// Largest element of each window, and where in the window it was (`i32`, last dimension fastest, the first of
/// equals): `x -> (y, index)`. Gradient flows through `y` only.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxPool {
    /// How the window moves.
    pub geometry: PoolGeometry,
}

impl Operator for MaxPool {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        let y = self.geometry.output(&inputs[0].shape)?;
        Ok(vec![TensorType::new(inputs[0].dtype, y.clone()), TensorType::new(DType::I32, y)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.geometry.rule(inputs, outputs, Reach::Forward)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let input = Dims::from_slice(&cx.input_type(0).shape[2..]);
        let index = cx.output(1);
        let grad = cx.emit(MaxPoolGrad { geometry: self.geometry.clone(), input }, &[dy, index])?;
        Ok(vec![Some(grad)])
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        self.geometry.work(&outputs[0])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        MaxPool { geometry: self.geometry.local_forward(region) }.into()
    }
}

/// Derivative of maximum pooling: each input position collects from the windows whose maximum it was:
/// `(dy, index) -> dx`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxPoolGrad {
    /// The pooling's geometry.
    pub geometry: PoolGeometry,
    /// Spatial sizes of the pooling's input.
    pub input: Dims,
}

impl Operator for MaxPoolGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let (dy, index) = (&inputs[0], &inputs[1]);
        same_float(&inputs[..1])?;
        require!(index.dtype == DType::I32, "positions must be i32, got {index}");
        require!(index.shape == dy.shape, "gradient {dy} and positions {index} differ in shape");
        Ok(vec![TensorType::new(dy.dtype, self.geometry.input(&dy.shape, &self.input)?)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.geometry.rule(inputs, outputs, Reach::Backward)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        inputs[0].shape.elements()
    }

    /// XLA searches the maxima again. Its kernel holds the image once more and the maximum of each window, with one
    /// `i32` per dimension that says where the element lies.
    fn xla_scratch_bytes(&self, inputs: &[TensorType], outputs: &[TensorType], held: u64) -> u64 {
        let (dy, dx) = (&inputs[0], &outputs[0]);
        let windows = u128::from(held) * u128::from(dy.shape.elements());
        let windows = (windows / u128::from(dx.shape.elements().max(1))) as u64;
        let each = dx.dtype.bytes() + DType::I32.bytes() * dx.rank() as u64;
        held.saturating_add(windows).saturating_mul(each)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let (geometry, input) = self.geometry.local_backward(region);
        MaxPoolGrad { geometry, input }.into()
    }
}

/// Mean of each window, padding counting as zeros: `x -> y`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AvgPool {
    /// How the window moves.
    pub geometry: PoolGeometry,
}

impl Operator for AvgPool {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, self.geometry.output(&inputs[0].shape)?)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.geometry.rule(inputs, outputs, Reach::Forward)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let input = Dims::from_slice(&cx.input_type(0).shape[2..]);
        Ok(vec![Some(cx.emit(AvgPoolGrad { geometry: self.geometry.clone(), input }, &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        self.geometry.work(&outputs[0])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        AvgPool { geometry: self.geometry.local_forward(region) }.into()
    }
}

/// Derivative of average pooling: `dy -> dx`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AvgPoolGrad {
    /// The pooling's geometry.
    pub geometry: PoolGeometry,
    /// Spatial sizes of the pooling's input.
    pub input: Dims,
}

impl Operator for AvgPoolGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        let dy = &inputs[0];
        Ok(vec![TensorType::new(dy.dtype, self.geometry.input(&dy.shape, &self.input)?)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.geometry.rule(inputs, outputs, Reach::Backward)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(gx) = cx.grad(0) else { return Ok(vec![None]) };
        Ok(vec![Some(cx.emit(AvgPool { geometry: self.geometry.clone() }, &[gx])?)])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        self.geometry.work(&inputs[0])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let (geometry, input) = self.geometry.local_backward(region);
        AvgPoolGrad { geometry, input }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        graph::Init,
        ops::slide::examples::{Dim, dim, list, shape},
    };
    use smallvec::smallvec;

    /// Whether some output sees nothing but padding: its maximum has no gradient.
    fn sees_only_padding(dim: &Dim) -> bool {
        let Slide { kernel, stride, dilation, pad } = dim.slide;
        let inside = |o: u64, k: u64| {
            let at = (o * stride + k * dilation) as i64 - pad.0;
            (0..dim.input as i64).contains(&at)
        };
        (0..dim.output).any(|o| !(0..kernel).any(|k| inside(o, k)))
    }

    /// A pooling's geometry with the spatial sizes of its input, and the shapes of x and y.
    fn pooling(rng: &mut Rng, accept: impl Fn(&Dim) -> bool) -> (PoolGeometry, Dims, [Vec<u64>; 2]) {
        let mut accepted = || loop {
            let dim = dim(rng);
            if accept(&dim) {
                return dim;
            }
        };
        let mut dims = vec![accepted(), accepted(), accepted()];
        dims.truncate(rng.between(1, 3) as usize);
        let (n, c) = (rng.size(), rng.size());
        let geometry = PoolGeometry {
            kernel: list(&dims, |d| d.slide.kernel),
            stride: list(&dims, |d| d.slide.stride),
            pad: list(&dims, |d| d.slide.pad),
            dilation: list(&dims, |d| d.slide.dilation),
        };
        let input: Dims = list(&dims, |d| d.input);
        let shapes = [shape(n, c, &input), shape(n, c, &list(&dims, |d| d.output))];
        (geometry, input, shapes)
    }

    impl Examples for AvgPool {
        fn golden() -> Golden {
            Golden::new(
                AvgPool { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]) },
                &["f32[8,3,12,12]"],
                "([n, c, h>2*2+0, w>2*2+0])->([n, c, h, w]) {n=8, c=3, h=6, w=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, _, [x, _]) = pooling(rng, |_| true);
            Case::new(AvgPool { geometry }, vec![f64s(x)])
        }
    }

    impl Examples for AvgPoolGrad {
        fn golden() -> Golden {
            Golden::new(
                AvgPoolGrad { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]), input: smallvec![12, 12] },
                &["f32[8,3,6,6]"],
                "([n, c, h<2*2+0, w<2*2+0])->([n, c, h, w]) {n=8, c=3, h=12, w=12}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, input, [_, y]) = pooling(rng, |_| true);
            Case::new(AvgPoolGrad { geometry, input }, vec![f64s(y)])
        }
    }

    impl Examples for MaxPool {
        fn golden() -> Golden {
            Golden::new(
                MaxPool { geometry: PoolGeometry::plain(&[3, 3], &[2, 2]) },
                &["f32[8,3,13,13]"],
                "([n, c, h>3*2+0, w>3*2+0])->([n, c, h, w], [n, c, h, w]) {n=8, c=3, h=6, w=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, _, [x, _]) = pooling(rng, |dim| !sees_only_padding(dim));
            Case::new(MaxPool { geometry }, vec![f64s(x)])
        }
    }

    impl Examples for MaxPoolGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                MaxPoolGrad { geometry: PoolGeometry::plain(&[3, 3], &[2, 2]), input: smallvec![13, 13] },
                &["f32[8,3,6,6]", "i32[8,3,6,6]"],
                "([n, c, h<3*2+0, w<3*2+0], [n, c, h<3*2+0, w<3*2+0])->([n, c, h, w]) {n=8, c=3, h=13, w=13}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, input, [_, y]) = pooling(rng, |_| true);
            let positions = geometry.kernel.iter().product();
            let index = (TensorType::new(DType::I32, &y[..]), Init::Below(positions));
            Case::new(MaxPoolGrad { geometry, input }, vec![f64s(y), index])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(op: impl Into<Op>, inputs: &[TensorType]) -> String {
        let op = op.into();
        let outputs = op.operator().infer(inputs).unwrap();
        let rule = op.rule(inputs, &outputs);
        assert_eq!(rule.check(inputs, &outputs), Ok(()));
        rule.to_string()
    }

    fn float(shape: &[u64]) -> TensorType {
        TensorType::new(DType::F32, shape)
    }

    #[test]
    fn rules_of_pooling_look_forwards_and_of_its_derivatives_backwards() {
        let geometry = PoolGeometry {
            pad: SmallVec::from_slice(&[(1, 1), (0, 1)]),
            ..PoolGeometry::plain(&[3, 2], &[2, 2])
        };
        let x = float(&[4, 8, 16, 9]);
        let dy = float(&[4, 8, 8, 5]);
        let index = TensorType::new(DType::I32, [4, 8, 8, 5]);
        let input = Dims::from_slice(&[16, 9]);
        assert_eq!(
            rule(MaxPool { geometry: geometry.clone() }, std::slice::from_ref(&x)),
            "([n, c, h>3*2-1, w>2*2+0])->([n, c, h, w], [n, c, h, w]) {n=4, c=8, h=8, w=5}"
        );
        assert_eq!(
            rule(MaxPoolGrad { geometry: geometry.clone(), input: input.clone() }, &[dy.clone(), index]),
            "([n, c, h<3*2-1, w<2*2+0], [n, c, h<3*2-1, w<2*2+0])->([n, c, h, w]) {n=4, c=8, h=16, w=9}"
        );
        assert_eq!(
            rule(AvgPool { geometry: geometry.clone() }, &[x]),
            "([n, c, h>3*2-1, w>2*2+0])->([n, c, h, w]) {n=4, c=8, h=8, w=5}"
        );
        assert_eq!(
            rule(AvgPoolGrad { geometry, input }, &[dy]),
            "([n, c, h<3*2-1, w<2*2+0])->([n, c, h, w]) {n=4, c=8, h=16, w=9}"
        );
    }

    #[test]
    fn only_windows_side_by_side_stay_in_their_blocks() {
        let whole = |geometry: PoolGeometry, x: TensorType| {
            let op = AvgPool { geometry: geometry.clone() };
            let x = [x];
            let y = op.infer(&x).unwrap();
            let back = AvgPoolGrad { geometry, input: Dims::from_slice(&x[0].shape[2..]) };
            let mut rules = [op.rule(&x, &y), back.rule(&y, &x)];
            rules[0].keep_windows_in_blocks(&x);
            rules[1].keep_windows_in_blocks(&y);
            rules.map(|rule| {
                ["n", "c", "h", "w"].map(|f| rule.factors[usize::from(rule.find(f).unwrap())].whole)
            })
        };
        let x = float(&[4, 8, 16, 16]);
        assert_eq!(whole(PoolGeometry::plain(&[2, 4], &[2, 4]), x.clone()), [[false; 4]; 2]);
        assert_eq!(
            whole(PoolGeometry::plain(&[3, 2], &[2, 2]), x),
            [[false, false, true, false]; 2],
            "windows overlap"
        );
        let odd = float(&[4, 8, 17, 16]);
        let rest = whole(PoolGeometry::plain(&[2, 2], &[2, 2]), odd);
        assert_eq!(rest, [[false, false, true, false]; 2], "a row is left over");
        let pad = SmallVec::from_slice(&[(1, 1), (0, 0)]);
        let padded = PoolGeometry { pad, ..PoolGeometry::plain(&[2, 2], &[2, 2]) };
        assert_eq!(whole(padded, float(&[4, 8, 14, 16])), [[false, false, true, false]; 2], "padded");
    }

    #[test]
    fn hostile_attributes_are_refused() {
        let x = [float(&[2, 3, 8, 8])];
        let plain = PoolGeometry::plain(&[2, 2], &[2, 2]);
        let pool = |geometry: PoolGeometry| {
            let max = MaxPool { geometry: geometry.clone() }.infer(&x);
            let avg = AvgPool { geometry }.infer(&x);
            assert_eq!(max.is_ok(), avg.is_ok());
            avg
        };
        assert!(pool(plain.clone()).is_ok());
        for bad in [
            PoolGeometry::plain(&[2, 2], &[0, 2]),
            PoolGeometry::plain(&[0, 2], &[2, 2]),
            PoolGeometry::plain(&[9, 2], &[2, 2]),
            PoolGeometry::plain(&[2], &[2]),
            PoolGeometry::plain(&[], &[]),
            PoolGeometry::plain(&[2, 2], &[2]),
            PoolGeometry::plain(&[u64::MAX, 2], &[2, 2]),
            PoolGeometry { dilation: Dims::from_slice(&[8, 1]), ..plain.clone() },
            PoolGeometry { dilation: Dims::from_slice(&[u64::MAX, 0]), ..plain.clone() },
            PoolGeometry { pad: SmallVec::from_slice(&[(-4, -4), (0, 0)]), ..plain.clone() },
            PoolGeometry { pad: SmallVec::from_slice(&[(i64::MAX, i64::MAX), (0, 0)]), ..plain.clone() },
        ] {
            assert!(pool(bad.clone()).is_err(), "{bad:?}");
        }
        let wide = PoolGeometry {
            pad: SmallVec::from_slice(&[(1 << 17, 0), (1 << 17, 0)]),
            ..PoolGeometry::plain(&[1 << 16, 1 << 16], &[1, 1])
        };
        assert!(pool(wide).is_err(), "a position in the window must fit an i32");
        let grad = |input: &[u64], dy: &[u64]| {
            let index = TensorType::new(DType::I32, dy);
            let op = MaxPoolGrad { geometry: plain.clone(), input: input.into() };
            let avg = AvgPoolGrad { geometry: plain.clone(), input: input.into() };
            assert_eq!(op.infer(&[float(dy), index]).is_ok(), avg.infer(&[float(dy)]).is_ok());
            avg.infer(&[float(dy)])
        };
        assert!(grad(&[9, 8], &[2, 3, 4, 4]).is_ok());
        for input in [&[8][..], &[], &[10, 8], &[0, 8], &[u64::MAX, u64::MAX]] {
            assert!(grad(input, &[2, 3, 4, 4]).is_err(), "{input:?}");
        }
        assert!(grad(&[8, 8], &[2, 3]).is_err());
    }
}
