//! Generators of the ops with sliding windows: one to three spatial dimensions, strides, dilations, groups,
//! pads of any sign.

use crate::{
    case::{Case, Rng},
    cases::{case, f64s},
};
use shardwright_graph::{
    DType, Dims, Init, TensorType,
    ops::{
        AvgPool, AvgPoolGrad, Conv, ConvGeometry, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad,
        PoolGeometry, Slide,
    },
};

/// One spatial dimension.
struct Dim {
    slide: Slide,
    input: u64,
    output: u64,
}

fn dim(rng: &mut Rng) -> Dim {
    loop {
        let simple = rng.between(0, 3) == 0;
        let slide = Slide {
            kernel: rng.between(1, 3),
            stride: rng.between(1, 3),
            dilation: if simple { 1 } else { rng.between(1, 2) },
            pad: if simple { (0, 0) } else { (rng.between(0, 5) as i64 - 2, rng.between(0, 5) as i64 - 2) },
        };
        let input = rng.size() + if rng.flip() { 6 } else { 0 };
        if let Ok(output) = slide.outputs(input) {
            return Dim { slide, input, output };
        }
    }
}

/// Whether some output sees nothing but padding: its maximum has no gradient.
fn sees_only_padding(dim: &Dim) -> bool {
    let Slide { kernel, stride, dilation, pad } = dim.slide;
    let inside = |o: u64, k: u64| {
        let at = (o * stride + k * dilation) as i64 - pad.0;
        (0..dim.input as i64).contains(&at)
    };
    (0..dim.output).any(|o| !(0..kernel).any(|k| inside(o, k)))
}

fn list<T: FromIterator<U>, U>(dims: &[Dim], f: impl Fn(&Dim) -> U) -> T {
    dims.iter().map(f).collect()
}

fn shape(a: u64, b: u64, rest: &Dims) -> Vec<u64> {
    [a, b].into_iter().chain(rest.iter().copied()).collect()
}

/// A convolution's geometry with spatial sizes of its kernel and input, and the shapes of x, w and y.
fn convolution(rng: &mut Rng) -> (ConvGeometry, Dims, Dims, [Vec<u64>; 3]) {
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

pub fn conv(rng: &mut Rng) -> Case {
    let (geometry, _, _, [x, w, _]) = convolution(rng);
    case(Conv { geometry }, vec![f64s(x), f64s(w)])
}

pub fn conv_grad_input(rng: &mut Rng) -> Case {
    let (geometry, _, input, [_, w, y]) = convolution(rng);
    case(ConvGradInput { geometry, input }, vec![f64s(y), f64s(w)])
}

pub fn conv_grad_weight(rng: &mut Rng) -> Case {
    let (geometry, kernel, _, [x, _, y]) = convolution(rng);
    case(ConvGradWeight { geometry, kernel }, vec![f64s(x), f64s(y)])
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

pub fn avg_pool(rng: &mut Rng) -> Case {
    let (geometry, _, [x, _]) = pooling(rng, |_| true);
    case(AvgPool { geometry }, vec![f64s(x)])
}

pub fn avg_pool_grad(rng: &mut Rng) -> Case {
    let (geometry, input, [_, y]) = pooling(rng, |_| true);
    case(AvgPoolGrad { geometry, input }, vec![f64s(y)])
}

pub fn max_pool(rng: &mut Rng) -> Case {
    let (geometry, _, [x, _]) = pooling(rng, |dim| !sees_only_padding(dim));
    case(MaxPool { geometry }, vec![f64s(x)])
}

pub fn max_pool_grad(rng: &mut Rng) -> Case {
    let (geometry, input, [_, y]) = pooling(rng, |_| true);
    let positions = geometry.kernel.iter().product();
    let index = (TensorType::new(DType::I32, &y[..]), Init::Below(positions));
    case(MaxPoolGrad { geometry, input }, vec![f64s(y), index])
}
