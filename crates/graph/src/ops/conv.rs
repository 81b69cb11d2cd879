//! Convolution with one to three spatial dimensions, stride, padding, dilation and groups.
//!
//! `y[n, o, p] = sum over c, k of x[n, c, p*stride - pad + k*dilation] * w[o, c, k]`, positions outside the
//! input counting as zero; no bias (that is a separate addition). The two derivatives are in `conv_grad`; all
//! three are linear in each operand, so the derivatives of the three are the three again.

use super::{
    conv_grad::{ConvGradInput, ConvGradWeight},
    slide::{Slide, Slides, kernel_names, spatial_names},
};
use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, same_float, scratch_bytes},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Reach, Rule, TensorMap},
    types::{Dims, Shape, TensorType},
    workload::{ConvolutionPass, Filter3x3, Gemm, RooflineKind, Workload, WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::Range;

/// How the kernel moves over the input, per spatial dimension, and how channels are grouped.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvGeometry {
    /// Input positions from one output position to the next.
    pub stride: Dims,
    /// Zeros before and after the input; negative: positions left out.
    pub pad: SmallVec<[(i64, i64); 3]>,
    /// Input positions from one kernel position to the next.
    pub dilation: Dims,
    /// Number of channel groups; an output channel reads the input channels of its group.
    pub groups: u64,
}

impl ConvGeometry {
    /// Stride 1, no padding, no dilation, one group, for this many spatial dimensions.
    pub fn plain(rank: usize) -> Self {
        Self {
            stride: Dims::from_elem(1, rank),
            pad: SmallVec::from_elem((0, 0), rank),
            dilation: Dims::from_elem(1, rank),
            groups: 1,
        }
    }

    /// The spatial dimensions of a convolution with a kernel of these sizes.
    pub fn slides(&self, kernel: &[u64]) -> Result<Slides, OpError> {
        Slide::list(kernel, &self.stride, &self.dilation, &self.pad)
    }

    /// The geometry of one part: inputs and outputs that it covers per spatial dimension, and its groups.
    fn local(
        &self,
        slides: &Slides,
        inputs: &[Range<u64>],
        outputs: &[Range<u64>],
        groups: Range<u64>,
    ) -> Self {
        let pad = (0..slides.len()).map(|i| slides[i].local(&inputs[i], &outputs[i]).pad).collect();
        Self { pad, groups: groups.end - groups.start, ..self.clone() }
    }
}

/// Bytes of a tile: half of a common second-level cache, since the matrix product needs room as well.
const TILE_BYTES: usize = 512 << 10;
/// Preferred number of output positions of a tile.
const TILE_POSITIONS: usize = 288;

/// The part of the unfolded input that a convolution's kernel multiplies at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTile {
    /// Images side by side: more than one only where they are small and fit whole.
    pub images: usize,
    /// Channels.
    pub channels: usize,
    /// Output positions of each image.
    pub positions: usize,
}

impl ConvTile {
    /// A good tile for elements of this size, and these numbers of kernel positions, output positions, images and
    /// channels of a group.
    pub fn new(element_bytes: usize, sizes: [usize; 4]) -> Self {
        let [kernel, outputs, images, channels] = sizes.map(|size| size.max(1));
        let elements = TILE_BYTES / element_bytes;
        let wanted = TILE_POSITIONS.max(elements / (channels * kernel));
        let images = (wanted / outputs).clamp(1, images);
        let wanted = wanted.min(images * outputs);
        let channels = (elements / (wanted * kernel)).clamp(1, channels);
        // One channel of a large kernel may already exceed the tile: then fewer positions.
        let positions = (elements / (channels * kernel)).clamp(1, wanted);
        Self { images: (positions / outputs).max(1), channels, positions: positions.min(outputs) }
    }
}

/// Scratch memory of a convolution's kernels: one tile, and the outputs of its images side by side.
pub(super) fn tile_scratch_bytes(groups: u64, [x, w, y]: [&TensorType; 3]) -> u64 {
    let spatial = |ty: &TensorType| ty.shape[2..].iter().product::<u64>() as usize;
    let (kernel, outputs) = (spatial(w), spatial(y));
    let element_bytes = scratch_bytes(x);
    let tile =
        ConvTile::new(element_bytes as usize, [kernel, outputs, x.shape[0] as usize, w.shape[1] as usize]);
    let elements = (tile.images * tile.positions * tile.channels * kernel) as u64;
    let joined = match tile.images {
        1 => 0,
        images => images as u64 * (w.shape[0] / groups.max(1)) * outputs as u64,
    };
    (elements + joined).saturating_mul(element_bytes)
}

/// The three tensors that a convolution relates, in the roles that its derivatives keep.
#[derive(Clone, Debug)]
pub(crate) struct ConvTypes {
    /// Input `[n, c, spatial...]`.
    pub x: Shape,
    /// Weight `[o, c / groups, kernel...]`.
    pub w: Shape,
    /// Output `[n, o, spatial...]`.
    pub y: Shape,
    pub slides: Slides,
}

impl ConvTypes {
    /// Checks input against weight and finds the output.
    pub fn infer(geometry: &ConvGeometry, x: &[u64], w: &[u64]) -> Result<Self, OpError> {
        let rank = w.len();
        require!(
            x.len() == rank && rank >= 3,
            "input and weight need one to three spatial dimensions each, got {} and {}",
            x.len() as i64 - 2,
            rank as i64 - 2
        );
        let groups = geometry.groups;
        require!(groups > 0, "there must be at least one group");
        require!(w[0].is_multiple_of(groups), "{} output channels do not fall into {groups} groups", w[0]);
        require!(
            x[1].is_multiple_of(groups) && x[1] / groups == w[1],
            "{} input channels in {groups} groups do not match the weight's {}",
            x[1],
            w[1]
        );
        let slides = geometry.slides(&w[2..])?;
        let mut y: Shape = [x[0], w[0]].into();
        for (slide, &size) in slides.iter().zip(&x[2..]) {
            y.0.push(slide.outputs(size)?);
        }
        // The iteration space bounds the flops, which must fit a u64 with room to add up.
        let iterations = y.iter().chain(&w[1..]).try_fold(1u64, |n, &s| n.checked_mul(s));
        require!(iterations.is_some_and(|n| n < 1 << 60), "absurdly many operations");
        Ok(Self { x: Shape::new(x), w: Shape::new(w), y, slides })
    }

    /// One multiply-add per output element, input channel of its group and kernel position; the two
    /// derivatives do the same ones.
    pub fn flops(&self) -> u64 {
        self.y.iter().chain(&self.w[1..]).fold(2u64, |n, &s| n.saturating_mul(s))
    }

    /// Samples, groups, input and output channels per group, then output sizes, kernel sizes, strides.
    pub fn workload(&self, groups: u64) -> WorkloadSizes {
        let head = [self.x[0], groups, self.w[1], self.w[0] / groups];
        let strides = self.slides.iter().map(|s| s.stride);
        let spatial = self.y[2..].iter().chain(&self.w[2..]).copied();
        head.into_iter().chain(spatial).chain(strides).collect()
    }

    /// The rule of the op that makes one of the three tensors from the others.
    pub fn rule(&self, groups: u64, pass: ConvolutionPass) -> Rule {
        let mut rule = Rule::default();
        let rank = self.slides.len();
        let n = rule.factor("n", self.x[0]);
        let group = (groups > 1).then(|| rule.factor("g", groups));
        // Behind the groups, channels do not lead their dimension.
        let mut channel = |name, size| match group {
            None => rule.factor(name, size),
            Some(_) => rule.whole_factor(name, size),
        };
        let o = channel("o", self.w[0] / groups);
        let c = channel("c", self.w[1]);
        // The factor runs over the tensor that is made (for the weight: over the output); the other side is a window.
        let runs_over = if pass == ConvolutionPass::InputGradient { &self.x } else { &self.y };
        let spatial: SmallVec<[FactorIndex; 3]> =
            (0..rank).map(|i| rule.factor(spatial_names(rank)[i], runs_over[i + 2])).collect();
        let kernel: SmallVec<[FactorIndex; 3]> =
            (0..rank).map(|i| rule.whole_factor(kernel_names(rank)[i], self.w[i + 2])).collect();

        let channels = |inner| match group {
            None => DimMap::of(inner),
            Some(group) => DimMap::product(&[group, inner]),
        };
        let plain = |factors: &[FactorIndex]| factors.iter().map(|&f| DimMap::of(f)).collect::<Vec<_>>();
        let windows = |reach| -> Vec<DimMap> {
            self.slides.iter().zip(&spatial).map(|(slide, &f)| slide.map(f, reach)).collect()
        };
        let (x_spatial, y_spatial) = match pass {
            ConvolutionPass::InputGradient => (plain(&spatial), windows(Reach::Backward)),
            ConvolutionPass::WeightGradient | ConvolutionPass::Forward => {
                (windows(Reach::Forward), plain(&spatial))
            }
        };
        let x = TensorMap::new([DimMap::of(n), channels(c)].into_iter().chain(x_spatial));
        let w = TensorMap::new([channels(o), DimMap::of(c)].into_iter().chain(plain(&kernel)));
        let y = TensorMap::new([DimMap::of(n), channels(o)].into_iter().chain(y_spatial));
        let (inputs, output) = match pass {
            ConvolutionPass::InputGradient => ([y, w], x),
            ConvolutionPass::WeightGradient => ([x, y], w),
            ConvolutionPass::Forward => ([x, w], y),
        };
        rule.inputs.extend(inputs);
        rule.outputs.push(output);
        rule
    }

    /// The geometry of one part of the op that makes one of the three tensors.
    pub fn local(&self, geometry: &ConvGeometry, region: &Region<'_>, pass: ConvolutionPass) -> ConvGeometry {
        let (x, y) = match pass {
            ConvolutionPass::InputGradient => (region.output_block(0), region.input_block(0)),
            ConvolutionPass::WeightGradient => (region.input_block(0), region.input_block(1)),
            ConvolutionPass::Forward => (region.input_block(0), region.output_block(0)),
        };
        let groups = region.part("g", geometry.groups);
        geometry.local(&self.slides, &x[2..], &y[2..], groups)
    }
}

/// Convolutions. Sizes: those of [`ConvTypes::workload`].
static CONV: WorkloadClass = WorkloadClass {
    name: "conv",
    fallback: None,
    roofline: |sizes| conv_roofline(ConvolutionPass::Forward, sizes),
    bytes: conv_bytes,
};

/// The sizes of a convolution workload by name.
struct ConvSizes<'a> {
    samples: u64,
    groups: u64,
    /// Input channels per group.
    inputs: u64,
    /// Output channels per group.
    outputs: u64,
    /// Spatial sizes of the output.
    positions: &'a [u64],
    kernel: &'a [u64],
    stride: &'a [u64],
}

impl<'a> ConvSizes<'a> {
    fn of(sizes: &'a [u64]) -> Option<Self> {
        let (&[samples, groups, inputs, outputs], spatial) = sizes.split_first_chunk()?;
        if !spatial.len().is_multiple_of(3) {
            return None;
        }
        let (positions, rest) = spatial.split_at(spatial.len() / 3);
        let (kernel, stride) = rest.split_at(positions.len());
        Some(Self { samples, groups, inputs, outputs, positions, kernel, stride })
    }
}

fn product(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().fold(1u64, |n, size| n.saturating_mul(size))
}

/// The matrix product over unfolded windows that computes one of the three tensors.
pub(super) fn conv_roofline(pass: ConvolutionPass, sizes: &[u64]) -> Option<RooflineKind> {
    let ConvSizes { samples, groups, inputs, outputs, positions, kernel, stride } = ConvSizes::of(sizes)?;
    let rows = samples.saturating_mul(product(positions.iter().copied()));
    let window = inputs.saturating_mul(product(kernel.iter().copied()));
    let (m, n, k) = match pass {
        ConvolutionPass::Forward => (rows, outputs, window),
        ConvolutionPass::InputGradient => (rows, window, outputs),
        ConvolutionPass::WeightGradient => (outputs, window, rows),
    };
    let filter_3x3 = match (groups, positions, kernel, stride) {
        (1, &[height, width], [3, 3], [1, 1]) => Some(Filter3x3 { samples, inputs, outputs, height, width }),
        _ => None,
    };
    Some(RooflineKind::Convolution {
        product: Gemm { steps: 1, batch: groups, m, n, k, align: Gemm::ALIGNED },
        pass,
        filter_3x3,
    })
}

/// Bytes of input, weight and output.
pub(super) fn conv_bytes(workload: &Workload, sizes: &[u64]) -> u64 {
    let Some(ConvSizes { samples, groups, inputs, outputs, positions, kernel, stride }) =
        ConvSizes::of(sizes)
    else {
        return 0; // Refused before: such sizes have no roofline.
    };
    let read = (0..positions.len()).map(|i| positions[i].saturating_sub(1) * stride[i] + kernel[i]);
    let x = product([samples, groups, inputs, product(read)]);
    let y = product([samples, groups, outputs, product(positions.iter().copied())]);
    let w = product([groups, inputs, outputs, product(kernel.iter().copied())]);
    x.saturating_add(y).saturating_add(w).saturating_mul(workload.dtype.bytes())
}

/// Convolves an input `[n, c, spatial...]` with a weight `[o, c / groups, kernel...]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {
    /// How the kernel moves.
    pub geometry: ConvGeometry,
}

impl Conv {
    fn types(&self, inputs: &[TensorType]) -> Result<ConvTypes, OpError> {
        ConvTypes::infer(&self.geometry, &inputs[0].shape, &inputs[1].shape)
    }
}

impl Operator for Conv {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        same_float(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, self.types(inputs)?.y)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(types) = accepted(self.types(inputs)) else { return Rule::replicated(inputs, outputs) };
        types.rule(self.geometry.groups, ConvolutionPass::Forward)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let (x, w) = (cx.input(0), cx.input(1));
        Ok(vec![
            if cx.wants(0) { Some(input_gradient(cx, &self.geometry, dy, w, x)?) } else { None },
            if cx.wants(1) { Some(weight_gradient(cx, &self.geometry, x, dy, w)?) } else { None },
        ])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        accepted(self.types(inputs)).map_or(0, |t| t.flops())
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(self.types(inputs)).map(|types| (&CONV, types.workload(self.geometry.groups)))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&CONV]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        tile_scratch_bytes(self.geometry.groups, [&inputs[0], &inputs[1], &outputs[0]])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let Some(types) = accepted(self.types(region.inputs)) else { return self.clone().into() };
        Conv { geometry: types.local(&self.geometry, region, ConvolutionPass::Forward) }.into()
    }
}

/// Emits the gradient by a tensor shaped like the input `x`.
pub(super) fn input_gradient(
    cx: &mut GradContext<'_>,
    geometry: &ConvGeometry,
    dy: TensorId,
    w: TensorId,
    x: TensorId,
) -> Result<TensorId, OpError> {
    let input = Dims::from_slice(&cx.ty(x).shape[2..]);
    cx.emit(ConvGradInput { geometry: geometry.clone(), input }, &[dy, w])
}

/// Emits the gradient by a tensor shaped like the weight `w`.
pub(super) fn weight_gradient(
    cx: &mut GradContext<'_>,
    geometry: &ConvGeometry,
    x: TensorId,
    dy: TensorId,
    w: TensorId,
) -> Result<TensorId, OpError> {
    let kernel = Dims::from_slice(&cx.ty(w).shape[2..]);
    cx.emit(ConvGradWeight { geometry: geometry.clone(), kernel }, &[x, dy])
}

pub(super) mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        ops::slide::examples::{Dim, dim, list, shape},
    };
    use smallvec::smallvec;

    /// A 3x3 convolution that keeps the image's size.
    pub(in crate::ops) fn same_conv() -> ConvGeometry {
        ConvGeometry { pad: smallvec![(1, 1), (1, 1)], ..ConvGeometry::plain(2) }
    }

    /// A convolution's geometry with spatial sizes of its kernel and input, and the shapes of x, w and y.
    pub(in crate::ops) fn convolution(rng: &mut Rng) -> (ConvGeometry, Dims, Dims, [Vec<u64>; 3]) {
        let dims: Vec<Dim> = (0..rng.between(1, 3)).map(|_| dim(rng)).collect();
        let groups = if rng.flip() { 1 } else { rng.size() };
        let (n, c, o) = (rng.size(), rng.between(1, 2), rng.between(1, 3));
        let geometry = ConvGeometry {
            stride: list(&dims, |d| d.slide.stride),
            pad: list(&dims, |d| d.slide.pad),
            dilation: list(&dims, |d| d.slide.dilation),
            groups,
        };
        let (kernel, input): (Dims, Dims) = (list(&dims, |d| d.slide.kernel), list(&dims, |d| d.input));
        let shapes = [
            shape(n, groups * c, &input),
            shape(groups * o, c, &kernel),
            shape(n, groups * o, &list(&dims, |d| d.output)),
        ];
        (geometry, kernel, input, shapes)
    }

    impl Examples for Conv {
        fn golden() -> Golden {
            Golden::new(
                Conv { geometry: same_conv() },
                &["f32[8,3,12,12]", "f32[6,3,3,3]"],
                "([n, c, h>3*1-1, w>3*1-1], [o, c, kh, kw])->([n, o, h, w]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={c} whole={kh, kw}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, _, _, [x, w, _]) = convolution(rng);
            Case::new(Conv { geometry }, vec![f64s(x), f64s(w)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    fn types(x: &[u64], w: &[u64]) -> [TensorType; 2] {
        [TensorType::new(DType::F32, x), TensorType::new(DType::F32, w)]
    }

    fn geometry(stride: &[u64], pad: &[(i64, i64)], dilation: &[u64], groups: u64) -> ConvGeometry {
        ConvGeometry {
            stride: Dims::from_slice(stride),
            pad: SmallVec::from_slice(pad),
            dilation: Dims::from_slice(dilation),
            groups,
        }
    }

    fn rule(op: impl Into<Op>, inputs: &[TensorType]) -> String {
        let op = op.into();
        let outputs = op.operator().infer(inputs).unwrap();
        let rule = op.rule(inputs, &outputs);
        assert_eq!(rule.check(inputs, &outputs), Ok(()));
        format!("{} {rule}", outputs[0])
    }

    #[test]
    fn rules_of_forward_and_backward_use_the_same_factors() {
        let same = geometry(&[1, 1], &[(1, 1), (1, 1)], &[1, 1], 1);
        let (x, w, y) = ([32, 3, 56, 56], [64, 3, 3, 3], [32, 64, 56, 56]);
        assert_eq!(
            rule(Conv { geometry: same.clone() }, &types(&x, &w)),
            "f32[32,64,56,56] ([n, c, h>3*1-1, w>3*1-1], [o, c, kh, kw])->([n, o, h, w]) \
             {n=32, o=64, c=3, h=56, w=56, kh=3, kw=3} reduction={c} whole={kh, kw}"
        );
        assert_eq!(
            rule(
                ConvGradInput { geometry: same.clone(), input: Dims::from_slice(&[56, 56]) },
                &types(&y, &w)
            ),
            "f32[32,3,56,56] ([n, o, h<3*1-1, w<3*1-1], [o, c, kh, kw])->([n, c, h, w]) \
             {n=32, o=64, c=3, h=56, w=56, kh=3, kw=3} reduction={o} whole={kh, kw}"
        );
        assert_eq!(
            rule(ConvGradWeight { geometry: same, kernel: Dims::from_slice(&[3, 3]) }, &types(&x, &y)),
            "f32[64,3,3,3] ([n, c, h>3*1-1, w>3*1-1], [n, o, h, w])->([o, c, kh, kw]) \
             {n=32, o=64, c=3, h=56, w=56, kh=3, kw=3} reduction={n, h, w} whole={kh, kw}"
        );
    }

    #[test]
    fn rules_of_strided_grouped_and_pointwise_convolutions() {
        assert_eq!(
            rule(Conv { geometry: ConvGeometry::plain(1) }, &types(&[8, 16, 10], &[4, 16, 1])),
            "f32[8,4,10] ([n, c, w], [o, c, kw])->([n, o, w]) {n=8, o=4, c=16, w=10, kw=1} \
             reduction={c} whole={kw}"
        );
        let grouped = geometry(&[2, 1], &[(0, 1), (2, 0)], &[1, 2], 4);
        assert_eq!(
            rule(Conv { geometry: grouped }, &types(&[2, 8, 9, 9], &[12, 2, 3, 2])),
            "f32[2,12,4,9] ([n, gc, h>3*2+0, w>3*1-2], [go, c, kh, kw])->([n, go, h, w]) \
             {n=2, g=4, o=3, c=2, h=4, w=9, kh=3, kw=2} whole={o, c, kh, kw}"
        );
        assert_eq!(
            rule(Conv { geometry: ConvGeometry::plain(3) }, &types(&[1, 2, 4, 5, 6], &[2, 2, 1, 2, 3])),
            "f32[1,2,4,4,4] ([n, c, d, h>2*1+0, w>3*1+0], [o, c, kd, kh, kw])->([n, o, d, h, w]) \
             {n=1, o=2, c=2, d=4, h=4, w=4, kd=1, kh=2, kw=3} reduction={c} whole={kd, kh, kw}"
        );
    }

    #[test]
    fn the_derivatives_have_the_shapes_of_what_they_derive_by() {
        let geometry = geometry(&[2, 3], &[(1, 0), (-1, 2)], &[2, 1], 2);
        let inputs = types(&[2, 4, 11, 12], &[6, 2, 3, 2]);
        let y = Conv { geometry: geometry.clone() }.infer(&inputs).unwrap().remove(0);
        let by_x = ConvGradInput { geometry: geometry.clone(), input: Dims::from_slice(&[11, 12]) };
        assert_eq!(by_x.infer(&[y.clone(), inputs[1].clone()]).unwrap(), [inputs[0].clone()]);
        let by_w = ConvGradWeight { geometry, kernel: Dims::from_slice(&[3, 2]) };
        assert_eq!(by_w.infer(&[inputs[0].clone(), y.clone()]).unwrap(), [inputs[1].clone()]);
        let flops = Conv { geometry: by_w.geometry.clone() }.flops(&inputs, &[]);
        assert_eq!(flops, 2 * y.shape.elements() * 2 * 3 * 2);
        assert_eq!(by_x.flops(&[y.clone(), inputs[1].clone()], &[]), flops);
        let workload = Op::from(by_w.clone()).workload(&[inputs[0].clone(), y.clone()], &inputs[1..]);
        assert_eq!(workload.sizes[..], [2, 2, 2, 3, 4, 4, 3, 2, 2, 3]);
        assert_eq!(workload.roofline.product().map(Gemm::flops), Some(flops));
        assert_eq!(by_w.flops(&[inputs[0].clone(), y], &[]), flops);
    }

    #[test]
    fn hostile_attributes_are_refused() {
        let plain = ConvGeometry::plain(2);
        let fits = types(&[2, 4, 8, 8], &[6, 4, 3, 3]);
        let infer = |geometry: &ConvGeometry, inputs: &[TensorType]| {
            let geometry = geometry.clone();
            let by_x = ConvGradInput { geometry: geometry.clone(), input: Dims::from_slice(&[8, 8]) };
            let by_w = ConvGradWeight { geometry: geometry.clone(), kernel: Dims::from_slice(&[3, 3]) };
            let y = TensorType::new(DType::F32, [2, 6, 6, 6]);
            assert!(by_x.infer(&[y.clone(), inputs[1].clone()]).is_ok() == (geometry == plain));
            assert!(by_w.infer(&[inputs[0].clone(), y]).is_ok() == (geometry == plain));
            Conv { geometry }.infer(inputs)
        };
        assert!(infer(&plain, &fits).is_ok());
        for groups in [0, 4, u64::MAX] {
            assert!(infer(&ConvGeometry { groups, ..plain.clone() }, &fits).is_err());
        }
        for stride in [&[0, 1][..], &[1], &[], &[u64::MAX, 1]] {
            assert!(infer(&ConvGeometry { stride: stride.into(), ..plain.clone() }, &fits).is_err());
        }
        for pad in [(i64::MAX, 0), (i64::MIN, i64::MIN), (-9, 0), (1 << 39, 1 << 39)] {
            let pad = SmallVec::from_slice(&[pad, (1 << 39, 0)]);
            assert!(infer(&ConvGeometry { pad, ..plain.clone() }, &fits).is_err());
        }
        for inputs in [
            types(&[2, 4, 8, 8], &[6, 5, 3, 3]),
            types(&[2, 4, 8, 8], &[6, 4, 3]),
            types(&[2, 4, 8, 8], &[6, 4, 9, 3]),
            types(&[2, 4], &[6, 4]),
            types(&[2, 4, 8, 8, 8, 8], &[6, 4, 1, 1, 1, 1]),
            types(&[1 << 30, 1 << 18, 1, 1], &[1 << 30, 1 << 18, 1, 1]),
        ] {
            assert!(Conv { geometry: plain.clone() }.infer(&inputs).is_err(), "{inputs:?}");
        }
        assert!(Conv { geometry: plain.clone() }.infer(&fits[..1]).is_err());
        let by_x = |input: &[u64]| ConvGradInput { geometry: plain.clone(), input: input.into() };
        for input in [&[8][..], &[], &[9, 8], &[0, 8], &[u64::MAX, 8]] {
            assert!(by_x(input).infer(&types(&[2, 6, 6, 6], &[6, 4, 3, 3])).is_err(), "{input:?}");
        }
        let by_w = |kernel: &[u64]| ConvGradWeight { geometry: plain.clone(), kernel: kernel.into() };
        for kernel in [&[3][..], &[], &[0, 3], &[3, 4], &[u64::MAX, 3]] {
            assert!(by_w(kernel).infer(&types(&[2, 4, 8, 8], &[2, 6, 6, 6])).is_err(), "{kernel:?}");
        }
    }

    #[test]
    fn a_part_of_the_height_gets_its_own_pads_and_a_part_of_the_groups_their_number() {
        let op = Conv { geometry: geometry(&[1, 1], &[(1, 1), (1, 1)], &[1, 1], 4) };
        let inputs = types(&[1, 8, 8, 8], &[8, 2, 3, 3]);
        let outputs = op.infer(&inputs).unwrap();
        let rule = op.rule(&inputs, &outputs);
        let local = |name: &str, index| {
            let region = Region::whole(&rule, &inputs, &outputs).split(rule.find(name).unwrap(), index, 2);
            let Op::Conv(local) = op.localize(&region) else { panic!("another kind") };
            (local.geometry, region.input_shape(0))
        };
        let (lower, shape) = local("h", 1);
        assert_eq!((lower.pad[0], lower.pad[1], shape), ((0, 1), (1, 1), [1, 8, 5, 8].into()));
        let (half, shape) = local("g", 1);
        assert_eq!((half.groups, shape), (2, [1, 4, 8, 8].into()));
    }
}
