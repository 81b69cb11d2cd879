//! Operator time from a device's data sheet: the roofline, with what keeps real kernels below it.
//!
//! time = max(launch, arithmetic, memory), where
//! - launch is the time between two kernels that follow each other at once; filling and draining a kernel takes
//!   a multiple of it, which comes on top of the other two;
//! - memory is bytes over bandwidth, at the share of it that streaming kernels reach;
//! - arithmetic, for matrix products and convolutions, is that of the best tiling: the result is cut into
//!   tiles (and the depth into slices), each core works off its share of whole tiles, and smaller tiles run
//!   at a smaller share of peak. Small or thin matrices are slower because they fill tiles or cores badly.
//!   For other ops it is flops over the vector rate.
//!
//! A 3x3 convolution of stride 1 in single precision may also be computed by Winograd's minimal filtering
//! F(4x4, 3x3) (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4),
//! which libraries pick where it is faster: inputs, weights and results are transformed to tiles of 6x6, in which the
//! convolution is 36 matrix products with a quarter of the multiplications, for several times the memory traffic.

use shardwright_graph::{DType, Gemm, Workload};
use shardwright_machine::{Device, Precision, Seconds};

/// Tiles of a result, and the share of peak at which a core works on one. Fitted to an H200's measured
/// products and convolutions (docs/costs.md).
const TILES: [(u64, u64, f64); 5] =
    [(256, 128, 0.80), (128, 128, 0.74), (128, 64, 0.62), (64, 64, 0.48), (32, 32, 0.24)];
/// Slices of the depth that different cores may work on.
const DEPTH_SLICES: [u64; 5] = [1, 2, 4, 8, 16];
/// Depth is padded to a multiple of this.
const DEPTH_STEP: u64 = 16;
/// Time to fill and drain a streaming kernel, beyond the work itself, as a multiple of the launch overhead.
const STREAM_START: f64 = 0.4;
/// The same for a matrix product, whose tiles and pipelines take longer to fill.
const GEMM_START: f64 = 1.0;
/// The same for a convolution, which often comes with kernels that rearrange its operands.
const CONV_START: f64 = 2.4;
/// What a convolution reaches of the rate of the matrix product that it amounts to, on ordinary arithmetic units
/// and on matrix units, which its operands have to be rearranged for.
const CONV_SHARE: f64 = 0.7;
const CONV_SHARE_MATRIX_UNITS: f64 = 0.28;
/// Results per side of a Winograd tile, and points per side after the transformation.
const WINOGRAD_TILE: u64 = 4;
const WINOGRAD_POINTS: u64 = 6;
/// What Winograd's products reach of the rate of ordinary ones: forwards, for the gradient by the input, and for
/// the gradient by the weight. Fitted like the others.
const WINOGRAD_SHARES: [f64; 3] = [0.45, 0.3, 0.6];
/// Time to fill and drain its kernels: three transformations and the products.
const WINOGRAD_START: f64 = 4.0;
/// The share of memory bandwidth that a convolution reaches.
const CONV_MEMORY_SHARE: f64 = 0.4;
/// The share of peak that arithmetic outside matrix products reaches: no matrix units, few fused operations.
const VECTOR_SHARE: f64 = 0.25;
/// The share of memory bandwidth that streaming kernels reach.
const MEMORY_SHARE: f64 = 0.90;

/// The number format that a device computes in for an element type.
fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F64 => Precision::F64,
        DType::Bf16 => Precision::Bf16,
        DType::F16 => Precision::F16,
        DType::F32 | DType::I32 | DType::I64 | DType::Bool => Precision::F32,
    }
}

/// Flops per second at which a device computes in an element type. A device that does not state a rate for
/// doubles is taken to need 32 times as long as for singles, as consumer cards do.
fn peak(device: &Device, dtype: DType) -> f64 {
    let stated = device.peak.get_or_wider(precision(dtype)).map(|rate| rate.0);
    stated.or(device.peak.f32.map(|rate| rate.0 / 32.0)).unwrap_or(f64::INFINITY)
}

/// How long an op takes on a device, by its data sheet.
pub fn roofline(device: &Device, workload: &Workload) -> Seconds {
    let peak = peak(device, workload.dtype);
    let vector = device.peak.f32.map_or(peak, |rate| rate.0.min(peak));
    let memory = |share: f64| workload.bytes as f64 / (share * device.memory_bandwidth.0);
    let (busy, start) = match &workload.gemm {
        // Vector units compute 16-bit floats at the rate of singles.
        None => ((workload.flops as f64 / (VECTOR_SHARE * vector)).max(memory(MEMORY_SHARE)), STREAM_START),
        Some(gemm) => {
            let product = gemm_seconds(gemm, peak, u64::from(device.cores));
            if workload.class.starts_with("conv") {
                let share = if peak > 2.0 * vector { CONV_SHARE_MATRIX_UNITS } else { CONV_SHARE };
                let plain = ((product / share).max(memory(CONV_MEMORY_SHARE)), CONV_START);
                let total = |(busy, start): (f64, f64)| busy + start * device.launch_overhead.0;
                match winograd(workload, peak, device) {
                    Some(busy) if total((busy, WINOGRAD_START)) < total(plain) => (busy, WINOGRAD_START),
                    _ => plain,
                }
            } else {
                (product.max(memory(MEMORY_SHARE)), GEMM_START)
            }
        }
    };
    let launch = device.launch_overhead.0;
    Seconds((busy + start * launch).max(launch))
}

/// How long a convolution takes by Winograd's algorithm, without filling and draining; `None` where it does not
/// apply. For the gradient by the weight the roles of results and weights are exchanged, which leaves as many points.
fn winograd(workload: &Workload, peak: f64, device: &Device) -> Option<f64> {
    // Samples, groups, channels in and out, height, width, kernel, strides.
    let &[n, 1, c, o, h, w, 3, 3, 1, 1] = &workload.sizes[..] else { return None };
    if workload.dtype != DType::F32 {
        return None;
    }
    let tiles = n * h.div_ceil(WINOGRAD_TILE) * w.div_ceil(WINOGRAD_TILE);
    let batch = WINOGRAD_POINTS * WINOGRAD_POINTS;
    let products = |m, n, k| Gemm { batch, m, n, k, steps: 1 };
    let (products, share) = match workload.class {
        "conv" => (products(tiles, o, c), WINOGRAD_SHARES[0]),
        "conv_grad_input" => (products(tiles, c, o), WINOGRAD_SHARES[1]),
        _ => (products(o, c, tiles), WINOGRAD_SHARES[2]),
    };
    let arithmetic = gemm_seconds(&products, peak, u64::from(device.cores)) / share;
    let (tiles, c, o) = (tiles as f64, c as f64, o as f64);
    let points = (tiles * c + tiles * o + c * o) * (batch * workload.dtype.bytes()) as f64;
    let stream = |bytes: f64| bytes / (MEMORY_SHARE * device.memory_bandwidth.0);
    // The transformations read what is given and write points or the reverse, and the products move the points.
    Some(stream(workload.bytes as f64 + points) + arithmetic.max(stream(points)))
}

/// The best tiling's time for a matrix product.
fn gemm_seconds(gemm: &Gemm, peak: f64, cores: u64) -> f64 {
    let per_core = peak / cores as f64;
    let mut best = f64::INFINITY;
    for (rows, columns, share) in TILES {
        // Either way round: the longer side of a tile along the longer side of the result.
        for (rows, columns) in [(rows, columns), (columns, rows)] {
            let tiles = gemm.batch as f64 * gemm.m.div_ceil(rows) as f64 * gemm.n.div_ceil(columns) as f64;
            for slices in DEPTH_SLICES {
                let depth = gemm.k.div_ceil(slices).next_multiple_of(DEPTH_STEP);
                let rounds = (tiles * slices as f64 / cores as f64).ceil();
                let tile_flops = 2.0 * (rows * columns) as f64 * depth as f64;
                best = best.min(rounds * tile_flops / (share * per_core));
            }
        }
    }
    best * gemm.steps as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::WorkloadSizes;
    use shardwright_machine::builtin;

    fn gemm(dtype: DType, sizes: [u64; 4]) -> Workload {
        let none =
            Workload { class: "gemm", dtype, sizes: WorkloadSizes::new(), flops: 0, bytes: 0, gemm: None };
        none.resized(&sizes)
    }

    #[test]
    fn large_products_run_near_peak_and_thin_ones_do_not() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let rate = |sizes| {
            let work = gemm(DType::Bf16, sizes);
            work.flops as f64 / roofline(device, &work).0 / 989.5e12
        };
        assert!((0.7..0.85).contains(&rate([1, 8192, 8192, 8192])));
        assert!(rate([1, 8192, 8192, 64]) < 0.3, "bound by memory");
        assert!(rate([1, 128, 128, 128]) < 0.01, "one tile for 132 cores");
        assert!(rate([132, 256, 128, 256]) > 10.0 * rate([1, 256, 128, 256]), "batches fill cores");
    }

    /// OptCNN's cluster ran VGG-16 at 184 images a second per P100 (its Fig. 7): 1.6 times the flops of the data
    /// sheet, which plain convolution cannot reach.
    #[test]
    fn large_3x3_convolutions_beat_the_data_sheet_and_others_do_not() {
        let machine = builtin("p100x16").unwrap();
        let device = &machine.spec().device;
        let rate = |sizes: [u64; 10]| {
            let none = Workload {
                class: "conv",
                dtype: DType::F32,
                sizes: WorkloadSizes::new(),
                flops: 0,
                bytes: 0,
                gemm: None,
            };
            let work = none.resized(&sizes);
            work.flops as f64 / roofline(device, &work).0 / 10.6e12
        };
        assert!((1.0..2.0).contains(&rate([32, 1, 256, 256, 56, 56, 3, 3, 1, 1])));
        assert!(rate([32, 1, 256, 256, 56, 56, 3, 3, 2, 2]) < 0.8, "stride");
        assert!(rate([32, 1, 256, 256, 56, 56, 1, 1, 1, 1]) < 0.8, "kernel");
        assert!(rate([32, 2, 128, 128, 56, 56, 3, 3, 1, 1]) < 0.8, "groups");
        assert!(rate([1, 1, 64, 64, 7, 7, 3, 3, 1, 1]) < 0.2, "too small");
    }

    #[test]
    fn more_of_any_size_never_takes_less_time() {
        let machine = builtin("p100x16").unwrap();
        let device = &machine.spec().device;
        for base in [[1, 64, 64, 64], [3, 100, 1000, 17], [1, 4096, 32, 512]] {
            for i in 0..4 {
                let mut more = base;
                more[i] *= 2;
                let seconds = |sizes| roofline(device, &gemm(DType::F32, sizes));
                assert!(seconds(more) >= seconds(base), "{base:?} to {more:?}");
            }
        }
    }

    #[test]
    fn nothing_is_faster_than_its_launch() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let tiny = Workload {
            class: "binary",
            dtype: DType::F32,
            sizes: WorkloadSizes::from_slice(&[12]),
            flops: 1,
            bytes: 12,
            gemm: None,
        };
        assert_eq!(roofline(device, &tiny), device.launch_overhead);
    }
}
