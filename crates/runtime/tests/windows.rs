//! Convolution and pooling against direct loops over every (output, kernel position, input) triple, in f64.

use proptest::prelude::*;
use shardwright_graph::{
    Dims, Op,
    ops::{
        AvgPool, AvgPoolGrad, Conv, ConvGeometry, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad,
        PoolGeometry,
    },
};
use shardwright_runtime::{Context, HostTensor, kernels::evaluate};

/// One spatial dimension: input size, kernel, stride, dilation, pads.
type Dim = (u64, u64, u64, u64, (i64, i64));

/// Windows of some spatial dimensions, by definition.
#[derive(Clone, Debug)]
struct Case {
    dims: Vec<Dim>,
}

impl Case {
    fn sizes(&self, f: impl Fn(&Dim) -> u64) -> Vec<u64> {
        self.dims.iter().map(f).collect()
    }

    fn outputs(&self) -> Option<Vec<u64>> {
        let count = |&(size, kernel, stride, dilation, pad): &Dim| {
            let windows = |o: i64| o * stride as i64 + ((kernel - 1) * dilation) as i64 + 1;
            let padded = size as i64 + pad.0 + pad.1;
            (0..).take_while(|&o| windows(o) <= padded).count() as u64
        };
        let sizes = self.sizes(count);
        (!sizes.contains(&0)).then_some(sizes)
    }

    /// Every (output, kernel position, input) that meet, as flat indices, kernel positions in order.
    fn meetings(&self) -> Vec<(usize, usize, usize)> {
        let outputs = self.outputs().expect("checked");
        let mut all = vec![(0usize, 0usize, 0usize)];
        for (&(size, kernel, stride, dilation, pad), output) in self.dims.iter().zip(outputs) {
            let mut next = Vec::new();
            for (o, k, i) in all {
                for oo in 0..output {
                    for kk in 0..kernel {
                        let ii = (oo * stride + kk * dilation) as i64 - pad.0;
                        if ii >= 0 && ii < size as i64 {
                            next.push((
                                o * output as usize + oo as usize,
                                k * kernel as usize + kk as usize,
                                i * size as usize + ii as usize,
                            ));
                        }
                    }
                }
            }
            all = next;
        }
        all.sort_unstable();
        all
    }

    fn conv_geometry(&self, groups: u64) -> ConvGeometry {
        ConvGeometry {
            stride: self.sizes(|d| d.2).into(),
            pad: self.dims.iter().map(|d| d.4).collect(),
            dilation: self.sizes(|d| d.3).into(),
            groups,
        }
    }

    fn pool_geometry(&self) -> PoolGeometry {
        PoolGeometry {
            kernel: self.sizes(|d| d.1).into(),
            stride: self.sizes(|d| d.2).into(),
            pad: self.dims.iter().map(|d| d.4).collect(),
            dilation: self.sizes(|d| d.3).into(),
        }
    }
}

fn dims() -> impl Strategy<Value = Case> {
    let dim = (1u64..9, 1u64..4, 1u64..4, 1u64..3, (-2i64..4, -2i64..4));
    let dims = prop::collection::vec(dim, 1..=3);
    dims.prop_map(|dims| Case { dims }).prop_filter("no window fits", |case| case.outputs().is_some())
}

/// Numbers with a long period and few equal neighbours.
fn numbers(shape: &[u64], seed: usize) -> HostTensor {
    let count: u64 = shape.iter().product();
    let values = (0..count as usize).map(|i| ((i * 7919 + seed * 104_729) % 1013) as f64 / 506.0 - 1.0);
    HostTensor::from_vec(shape, values.collect())
}

fn shape(a: u64, b: u64, rest: &[u64]) -> Vec<u64> {
    [a, b].into_iter().chain(rest.iter().copied()).collect()
}

fn floats(value: &HostTensor) -> &[f64] {
    value.as_slice().expect("f64")
}

fn run(op: impl Into<Op>, inputs: &[&HostTensor]) -> Vec<HostTensor> {
    evaluate(&op.into(), inputs, &mut Context::default()).expect("runs")
}

fn close(a: &HostTensor, b: &[f64]) {
    assert_eq!(floats(a).len(), b.len());
    for (i, (a, b)) in floats(a).iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-10 * b.abs().max(1.0), "element {i}: {a} instead of {b}");
    }
}

fn check_conv(case: &Case, n: u64, groups: u64, c: u64, o: u64) {
    let outputs = case.outputs().expect("checked");
    let (input, kernel) = (case.sizes(|d| d.0), case.sizes(|d| d.1));
    let x = numbers(&shape(n, groups * c, &input), 1);
    let w = numbers(&shape(groups * o, c, &kernel), 2);
    let dy = numbers(&shape(n, groups * o, &outputs), 3);
    let mut expected = [&dy, &x, &w].map(|t| vec![0.0; floats(t).len()]);
    let [y, dx, dw] = &mut expected;
    let [ins, ks, outs] = [&input, &kernel, &outputs].map(|s| s.iter().product::<u64>() as usize);
    let (c, o) = (c as usize, o as usize);
    let meetings = case.meetings();
    for plane in 0..n as usize * groups as usize {
        let group = plane % groups as usize;
        for (oo, cc) in (0..o).flat_map(|oo| (0..c).map(move |cc| (oo, cc))) {
            for &(p, k, i) in &meetings {
                let at_y = (plane * o + oo) * outs + p;
                let at_x = (plane * c + cc) * ins + i;
                let at_w = ((group * o + oo) * c + cc) * ks + k;
                y[at_y] += floats(&x)[at_x] * floats(&w)[at_w];
                dx[at_x] += floats(&dy)[at_y] * floats(&w)[at_w];
                dw[at_w] += floats(&dy)[at_y] * floats(&x)[at_x];
            }
        }
    }
    let geometry = case.conv_geometry(groups);
    close(&run(Conv { geometry: geometry.clone() }, &[&x, &w])[0], y);
    let by_input = ConvGradInput { geometry: geometry.clone(), input: input.into() };
    close(&run(by_input, &[&dy, &w])[0], dx);
    close(&run(ConvGradWeight { geometry, kernel: kernel.into() }, &[&x, &dy])[0], dw);
}

fn check_pool(case: &Case, n: u64, c: u64) {
    let geometry = case.pool_geometry();
    let input: Dims = case.sizes(|d| d.0).into();
    let outputs = case.outputs().expect("checked");
    let x = numbers(&shape(n, c, &input), 4);
    let dy = numbers(&shape(n, c, &outputs), 5);
    let [ins, outs] = [&input[..], &outputs].map(|s| s.iter().product::<u64>() as usize);
    let window = geometry.kernel.iter().product::<u64>() as f64;
    let (mut max, mut mean) = (vec![f64::NEG_INFINITY; floats(&dy).len()], vec![0.0; floats(&dy).len()]);
    let mut winner: Vec<Option<(usize, usize)>> = vec![None; max.len()];
    let (mut max_dx, mut mean_dx) = (vec![0.0; floats(&x).len()], vec![0.0; floats(&x).len()]);
    for plane in 0..(n * c) as usize {
        for (p, k, i) in case.meetings() {
            let (at_y, at_x) = (plane * outs + p, plane * ins + i);
            if floats(&x)[at_x] > max[at_y] {
                max[at_y] = floats(&x)[at_x];
                winner[at_y] = Some((k, at_x));
            }
            mean[at_y] += floats(&x)[at_x] / window;
            mean_dx[at_x] += floats(&dy)[at_y] / window;
        }
    }
    for (winner, dy) in winner.iter().zip(floats(&dy)) {
        if let Some((_, at)) = winner {
            max_dx[*at] += dy;
        }
    }
    let results = run(MaxPool { geometry: geometry.clone() }, &[&x]);
    let positions: Vec<i32> = winner.iter().map(|w| w.map_or(0, |(k, _)| k as i32)).collect();
    assert_eq!(floats(&results[0]), &max[..]);
    assert_eq!(results[1].as_slice::<i32>().expect("i32"), &positions[..]);
    let grad = MaxPoolGrad { geometry: geometry.clone(), input: input.clone() };
    close(&run(grad, &[&dy, &results[1]])[0], &max_dx);
    close(&run(AvgPool { geometry: geometry.clone() }, &[&x])[0], &mean);
    close(&run(AvgPoolGrad { geometry, input }, &[&dy])[0], &mean_dx);
}

proptest! {
    #[test]
    fn convolution_and_its_derivatives_equal_direct_loops(
        case in dims(), n in 1u64..3, groups in 1u64..4, c in 1u64..4, o in 1u64..4,
    ) {
        check_conv(&case, n, groups, c, o);
    }

    #[test]
    fn pooling_and_its_derivatives_equal_direct_loops(case in dims(), n in 1u64..3, c in 1u64..3) {
        check_pool(&case, n, c);
    }
}

#[test]
fn convolutions_of_many_tiles_equal_direct_loops() {
    let same = |size, kernel| (size, kernel, 1, 1, ((kernel / 2) as i64, (kernel / 2) as i64));
    let case = |dims: &[Dim]| Case { dims: dims.to_vec() };
    check_conv(&case(&[same(30, 3), same(33, 3)]), 2, 1, 40, 5);
    check_conv(&case(&[same(30, 1), same(33, 1)]), 2, 2, 40, 5);
    check_conv(&case(&[(41, 5, 2, 1, (2, 1)), (37, 3, 2, 2, (0, 3))]), 3, 2, 33, 7);
    check_conv(&case(&[(70_000, 9, 1, 3, (12, 12))]), 1, 1, 2, 3);
    check_conv(&case(&[(12, 12, 1, 1, (0, 0)), (12, 12, 1, 1, (0, 0))]), 5, 1, 30, 20);
    check_conv(&case(&[same(3, 3), same(3, 3)]), 40, 1, 20, 6);
    check_conv(&case(&[same(20, 3), same(20, 3)]), 2, 16, 1, 2);
}

#[test]
fn the_first_of_equal_elements_is_the_maximum_and_not_a_number_wins() {
    let pool = MaxPool { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]) };
    let nan = f32::NAN;
    let x: Vec<f32> = vec![1.0, 1.0, 0.0, 2.0, 1.0, 1.0, 2.0, 0.0];
    let y = run(pool.clone(), &[&HostTensor::from_vec([1, 1, 2, 4], x)]);
    assert_eq!(y[0].as_slice::<f32>().expect("f32"), [1.0, 2.0]);
    assert_eq!(y[1].as_slice::<i32>().expect("i32"), [0, 1]);
    let low = f32::NEG_INFINITY;
    let x: Vec<f32> = vec![1.0, nan, low, low, 3.0, 1.0, low, low];
    let y = run(pool, &[&HostTensor::from_vec([1, 1, 2, 4], x)]);
    let maxima = y[0].as_slice::<f32>().expect("f32");
    assert!(maxima[0].is_nan() && maxima[1] == low);
    assert_eq!(y[1].as_slice::<i32>().expect("i32"), [1, 0]);
}

#[test]
fn a_position_outside_the_window_is_an_error() {
    let grad =
        MaxPoolGrad { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]), input: Dims::from_slice(&[2, 2]) };
    for index in [-1, 4, i32::MAX] {
        let inputs = [
            HostTensor::from_vec([1, 1, 1, 1], vec![1.0f32]),
            HostTensor::from_vec([1, 1, 1, 1], vec![index]),
        ];
        let result = evaluate(&grad.clone().into(), &[&inputs[0], &inputs[1]], &mut Context::default());
        assert!(result.is_err(), "{index}");
    }
}
