//! Operator time from a device's data sheet: the roofline, and the losses that keep real kernels below it.
//!
//! time = max(launch, start + max(arithmetic, memory)), where
//! - launch is the time between two consecutive kernels;
//! - start is the time to fill and drain a kernel, a multiple of the launch time;
//! - memory is bytes over the share of bandwidth that streaming kernels reach;
//! - arithmetic of matrix products and convolutions is the time of the best tiling. The result is cut into tiles and
//!   the depth into slices; each core computes its share of whole tiles; smaller tiles reach a smaller share of peak.
//!   Small or thin matrices are slower because they fill tiles or cores badly;
//! - arithmetic of other ops is flops over the rate of the vector units.
//!
//! Libraries may compute a 3x3 convolution of stride 1 in single precision by Winograd's minimal filtering
//! F(4x4, 3x3) (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4).
//! Inputs, weights and results are transformed to tiles of 6x6 points, on which the convolution is 36 matrix products.
//! They need a quarter of the multiplications, for several times the memory traffic.
//!
//! Convolutions of f32 tensors run in TF32 on devices that have it, and products too if the device says so ([`Tf32Use`]). A
//! product in 8-bit floats pays for rounding its operands, two passes over memory before the product, and reaches a smaller share of
//! its peak.
//!
//! The model of an op follows from its workload's [`RooflineKind`]; no op kind is named here.

use crate::engine::Engine;
use shardwright_graph::{AttentionPass, ConvolutionPass, DType, Filter3x3, Gemm, RooflineKind, Workload};
use shardwright_machine::{Device, Precision, Seconds, Tf32Use};

/// Tiles of a result, and the share of peak that a core reaches on one. Fitted to an H200's measured products and
/// convolutions (docs/costs.md).
const TILES: [(u64, u64, f64); 5] =
    [(256, 128, 0.80), (128, 128, 0.74), (128, 64, 0.62), (64, 64, 0.48), (32, 32, 0.24)];
/// Slices of the depth that different cores may compute.
const DEPTH_SLICES: [u64; 5] = [1, 2, 4, 8, 16];
/// Depth is padded to a multiple of this.
const DEPTH_STEP: u64 = 16;
/// Time to fill and drain a streaming kernel, beyond the work itself, as a multiple of the launch overhead.
const STREAM_START: f64 = 0.4;
/// The same for a matrix product, whose tiles and pipelines take longer to fill.
const GEMM_START: f64 = 1.0;
/// The same for a convolution, which often comes with kernels that rearrange its operands.
const CONV_START: f64 = 2.4;
/// The rate of a convolution over the rate of its matrix product, on vector units.
const CONV_SHARE: f64 = 0.7;
/// The same on matrix units, for which operands are rearranged.
const CONV_SHARE_MATRIX_UNITS: f64 = 0.28;
/// The same where channels are innermost in memory, so that nothing is rearranged (VGG-16 in bf16 on an H200).
const CONV_SHARE_CHANNELS_LAST: f64 = 0.7;
/// The share of peak that products in 8-bit floats reach, over that of other products. The H200's 150 rows without their rounding:
/// 1.30 PFLOP/s in the median of the 40 largest, 0.66 of peak. With `sustained` rates it is no limit of its own (pytorch/ao,
/// torchao/testing/training/roofline_utils.py, has 0.6 of peak for 16 and 8 bits).
const EIGHT_BIT_SHARE: f64 = 0.82;
/// Queries and keys of a block of fused attention.
const ATTENTION_TILE: u64 = 128;
/// Keys whose time a block of queries takes to start and end. ViT-L (1024 heads of 197 tokens) on an H200: 66 us, 213 us backwards.
const ATTENTION_START: u64 = 256;
/// Results per side of a Winograd tile.
const WINOGRAD_TILE: u64 = 4;
/// Points per side of a Winograd tile after the transformation.
const WINOGRAD_POINTS: u64 = 6;
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
fn peak_rate(device: &Device, dtype: DType) -> f64 {
    let stated = device.peak.get_or_wider(precision(dtype)).map(|rate| rate.0);
    stated.or(device.peak.f32.map(|rate| rate.0 / 32.0)).unwrap_or(f64::INFINITY)
}

/// Flops per second of the data sheet in the number format that a workload is multiplied in.
pub fn arithmetic_rate(device: &Device, workload: &Workload) -> f64 {
    let tf32 = device.peak.tf32.filter(|_| workload.dtype == DType::F32);
    let narrower = match &workload.roofline {
        RooflineKind::Stream => None,
        RooflineKind::EightBitProduct(product) => device.peak.f8.filter(|_| product.align == Gemm::ALIGNED),
        RooflineKind::Convolution { .. } => tf32.filter(|_| device.tf32 >= Tf32Use::Convolutions),
        RooflineKind::Product(_) | RooflineKind::Attention { .. } => {
            tf32.filter(|_| device.tf32 == Tf32Use::All)
        }
    };
    narrower.map_or_else(|| peak_rate(device, workload.dtype), |rate| rate.0)
}

/// The time of traffic at a share of a device's memory bandwidth.
pub(crate) fn stream_seconds(device: &Device, bytes: f64, share: f64) -> Seconds {
    Seconds(bytes / (share * device.memory_bandwidth.0))
}

/// The time of an op on a device, by its data sheet.
pub fn roofline(device: &Device, workload: &Workload) -> Seconds {
    let arranged = device.engine.and_then(Engine::of).is_some_and(|engine| engine.channels_last);
    roofline_in(device, workload, arranged)
}

/// The same with convolutions in a memory format: channels innermost, or contiguous.
pub(crate) fn roofline_in(device: &Device, workload: &Workload, channels_last: bool) -> Seconds {
    let peak = arithmetic_rate(device, workload);
    let vector = device.peak.f32.map_or(peak, |rate| rate.0.min(peak));
    let memory = |share: f64| workload.bytes as f64 / (share * device.memory_bandwidth.0);
    // Only matrix units load vectors of 16-bit floats.
    let loads_vectors = workload.dtype.bytes() == 2 && peak > 2.0 * vector;
    let at_most = |product: &Gemm, most: f64| {
        let share = if loads_vectors { unaligned_share(product.align) } else { 1.0 };
        gemm_seconds(product, peak * sustained_share(device).min(most), u64::from(device.cores)) / share
    };
    let product_seconds = |product: &Gemm| at_most(product, f64::INFINITY);
    let (busy, start) = match &workload.roofline {
        // Vector units compute 16-bit floats at the rate of singles.
        RooflineKind::Stream => {
            ((workload.flops as f64 / (VECTOR_SHARE * vector)).max(memory(MEMORY_SHARE)), STREAM_START)
        }
        RooflineKind::Product(product) => (product_seconds(product).max(memory(MEMORY_SHARE)), GEMM_START),
        RooflineKind::EightBitProduct(product)
            if device.peak.f8.is_some() && product.align == Gemm::ALIGNED =>
        {
            let (operands, result) = eight_bit_bytes(product, workload.dtype);
            let rounding = rounding_seconds(device, operands, workload.dtype).0;
            let moving = stream_seconds(device, operands + result, MEMORY_SHARE).0;
            let multiplying = at_most(product, EIGHT_BIT_SHARE).max(moving);
            (rounding + multiplying, 2.0 * STREAM_START + GEMM_START)
        }
        // A part whose sizes 8-bit units do not take stays in the stored type, where half of the alignment is enough.
        RooflineKind::EightBitProduct(product) => {
            let product = Gemm { align: (2 * product.align).min(Gemm::ALIGNED), ..*product };
            (product_seconds(&product).max(memory(MEMORY_SHARE)), GEMM_START)
        }
        RooflineKind::Attention { product, pass } => {
            let product = &whole_tiles(product);
            let filled = product.n as f64 / (product.n + ATTENTION_START) as f64;
            let of_engine = device.engine.and_then(Engine::of).and_then(|engine| engine.attention_shares);
            let arithmetic = match of_engine {
                // Slower kernels stay below the power limit.
                Some(shares) => {
                    let usual = gemm_seconds(product, peak, u64::from(device.cores));
                    let own = shares[usize::from(*pass == AttentionPass::Backward)] / TILES[0].2;
                    (usual / own).max(product_seconds(product) / attention_share(*pass))
                }
                None => product_seconds(product) / attention_share(*pass),
            } / filled;
            (arithmetic.max(memory(MEMORY_SHARE)), GEMM_START)
        }
        RooflineKind::Convolution { product, pass, filter_3x3 } => {
            let share = match (peak > 2.0 * vector, channels_last) {
                (true, true) => CONV_SHARE_CHANNELS_LAST,
                (true, false) => CONV_SHARE_MATRIX_UNITS,
                (false, _) => CONV_SHARE,
            };
            let plain = ((product_seconds(product) / share).max(memory(CONV_MEMORY_SHARE)), CONV_START);
            let total = |(busy, start): (f64, f64)| busy + start * device.launch_overhead.0;
            let filter = filter_3x3.filter(|_| workload.dtype == DType::F32);
            let single = peak_rate(device, workload.dtype);
            match filter.map(|filter| winograd(workload, *pass, filter, single, device)) {
                Some(busy) if total((busy, WINOGRAD_START)) < total(plain) => (busy, WINOGRAD_START),
                _ => plain,
            }
        }
    };
    let launch = device.launch_overhead.0;
    Seconds((busy + start * launch).max(launch))
}

/// The time of rounding so many elements of a type to 8-bit floats: it reads them and writes one byte each, which the product reads.
pub(crate) fn rounding_seconds(device: &Device, elements: f64, dtype: DType) -> Seconds {
    stream_seconds(device, elements * (1 + dtype.bytes()) as f64, MEMORY_SHARE)
}

/// Elements of a product's operands, and bytes of its result.
fn eight_bit_bytes(product: &Gemm, dtype: DType) -> (f64, f64) {
    let Gemm { batch, m, n, k, .. } = *product;
    let [batch, m, n, k] = [batch, m, n, k].map(|size| size as f64);
    (batch * (m * k + k * n), batch * m * n * dtype.bytes() as f64)
}

/// The rate of large products over that of a device which reaches the usual share of its peak: below 1 under a power limit.
fn sustained_share(device: &Device) -> f64 {
    match (device.sustained, device.peak.bf16) {
        (Some(rate), Some(peak)) => rate.0 / (TILES[0].2 * peak.0),
        _ => 1.0,
    }
}

/// The product of whole tiles: fused attention computes blocks of [`ATTENTION_TILE`] queries by as many keys, and masks the rest. ViT
/// has 197 tokens, and takes the time of 256.
fn whole_tiles(product: &Gemm) -> Gemm {
    let round = |size: u64| if size > 1 { size.next_multiple_of(ATTENTION_TILE) } else { size };
    Gemm { m: round(product.m), n: round(product.n), ..*product }
}

/// The rate of fused attention over that of a product of as many flops: exponentials wait for products and products for
/// exponentials. FlashAttention-3 on an H100 (Shah et al., arXiv 2407.08608, figures 5 and 6): 0.6 of peak forwards, 0.5
/// backwards, where a product reaches 0.8.
fn attention_share(pass: AttentionPass) -> f64 {
    match pass {
        AttentionPass::Forward => 0.75,
        AttentionPass::Backward => 0.62,
    }
}

/// The rate of a product of 16-bit floats whose contiguous sizes have an alignment, over that of an aligned one. Measured on an
/// H200 in bf16 (8192 x 8192 x 4096, each of the sizes one, two and four larger): 780 TFLOP/s aligned, 255 to 280 with a size that is only
/// even or a multiple of four, 89 to 149 with an odd one. Rows that are not contiguous cost nothing, and f32 is indifferent.
fn unaligned_share(align: u64) -> f64 {
    match align {
        8.. => 1.0,
        2..8 => 0.34,
        _ => 0.17,
    }
}

/// The rate of Winograd's products over that of ordinary ones. Fitted like the tiles.
fn winograd_share(pass: ConvolutionPass) -> f64 {
    match pass {
        ConvolutionPass::Forward => 0.45,
        ConvolutionPass::InputGradient => 0.3,
        ConvolutionPass::WeightGradient => 0.6,
    }
}

/// The time of a convolution by Winograd's algorithm, without filling and draining. The gradient by the weight exchanges
/// the roles of results and weights, which leaves the number of points as it is.
fn winograd(
    workload: &Workload,
    pass: ConvolutionPass,
    filter: Filter3x3,
    peak: f64,
    device: &Device,
) -> f64 {
    let Filter3x3 { samples, inputs: c, outputs: o, height, width } = filter;
    let tiles = samples * height.div_ceil(WINOGRAD_TILE) * width.div_ceil(WINOGRAD_TILE);
    let batch = WINOGRAD_POINTS * WINOGRAD_POINTS;
    let (m, n, k) = match pass {
        ConvolutionPass::Forward => (tiles, o, c),
        ConvolutionPass::InputGradient => (tiles, c, o),
        ConvolutionPass::WeightGradient => (o, c, tiles),
    };
    let (products, share) = (Gemm { batch, m, n, k, steps: 1, align: Gemm::ALIGNED }, winograd_share(pass));
    let arithmetic = gemm_seconds(&products, peak, u64::from(device.cores)) / share;
    let (tiles, c, o) = (tiles as f64, c as f64, o as f64);
    let points = (tiles * c + tiles * o + c * o) * (batch * workload.dtype.bytes()) as f64;
    let stream = |bytes: f64| bytes / (MEMORY_SHARE * device.memory_bandwidth.0);
    // The transformations move operands, result and points; the products move the points once more.
    stream(workload.bytes as f64 + points) + arithmetic.max(stream(points))
}

/// The time of a matrix product under its best tiling.
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
    use shardwright_graph::{WorkloadClass, WorkloadSizes};
    use shardwright_machine::builtin;

    fn workload(class: &str, dtype: DType, sizes: &[u64]) -> Workload {
        let class = WorkloadClass::find(class).unwrap();
        let (none, roofline) = (WorkloadSizes::new(), RooflineKind::Stream);
        Workload { class, dtype, sizes: none, flops: 0, bytes: 0, roofline }.resized(sizes)
    }

    fn gemm(dtype: DType, sizes: [u64; 4]) -> Workload {
        workload("gemm", dtype, &sizes)
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
            let work = workload("conv", DType::F32, &sizes);
            work.flops as f64 / roofline(device, &work).0 / 10.6e12
        };
        assert!((1.0..2.0).contains(&rate([32, 1, 256, 256, 56, 56, 3, 3, 1, 1])));
        assert!(rate([32, 1, 256, 256, 56, 56, 3, 3, 2, 2]) < 0.8, "stride");
        assert!(rate([32, 1, 256, 256, 56, 56, 1, 1, 1, 1]) < 0.8, "kernel");
        assert!(rate([32, 2, 128, 128, 56, 56, 3, 3, 1, 1]) < 0.8, "groups");
        assert!(rate([1, 1, 64, 64, 7, 7, 3, 3, 1, 1]) < 0.2, "too small");
    }

    /// FlashAttention-3's figures 5 and 6: about 600 and 500 TFLOP/s for heads of 128 on an H100, whose peak is the H200's.
    #[test]
    fn fused_attention_runs_at_its_published_share_of_peak() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let rate = |class: &str, sizes: [u64; 6]| {
            let work = workload(class, DType::Bf16, &sizes);
            work.flops as f64 / roofline(device, &work).0 / 989.5e12
        };
        let causal = [8, 4, 8192, 4097, 128, 128];
        assert!((0.5..0.65).contains(&rate("attention", causal)));
        assert!((0.4..0.55).contains(&rate("attention_grad", causal)));
        assert!(rate("attention", [8, 4, 1, 8192, 128, 128]) < 0.05, "one query per head is bound by memory");
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
    fn unaligned_sizes_run_at_a_fraction_of_the_rate() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let rate = |class: &str, dtype, sizes: [u64; 4]| {
            let work = workload(class, dtype, &sizes);
            work.flops as f64 / roofline(device, &work).0
        };
        // GPT-2's logits: measured 89 and 722 TFLOP/s.
        let ratio = |odd, even| {
            rate("gemm_nt", DType::Bf16, [1, 8192, odd, 768])
                / rate("gemm_nt", DType::Bf16, [1, 8192, even, 768])
        };
        assert!((0.12..0.25).contains(&ratio(50257, 50304)), "{}", ratio(50257, 50304));
        assert!((0.28..0.45).contains(&ratio(50258, 50304)), "{}", ratio(50258, 50304));
        let rows = rate("gemm", DType::Bf16, [1, 8191, 8192, 4096])
            / rate("gemm", DType::Bf16, [1, 8192, 8192, 4096]);
        assert!(rows > 0.95, "rows are not contiguous: {rows}");
        let single = rate("gemm_nt", DType::F32, [1, 8192, 50257, 768])
            / rate("gemm_nt", DType::F32, [1, 8192, 50304, 768]);
        assert!(single > 0.95, "f32 does not mind: {single}");
    }

    #[test]
    fn f32_convolutions_run_in_tf32_and_products_only_if_the_device_says_so() {
        let machine = builtin("a100x64").unwrap();
        let with = |tf32| Device { tf32, ..machine.spec().device.clone() };
        let conv = workload("conv", DType::F32, &[64, 1, 256, 1024, 14, 14, 1, 1, 1, 1]);
        let product = gemm(DType::F32, [1, 4096, 4096, 4096]);
        let seconds = |tf32, work: &Workload| roofline(&with(tf32), work).0;
        assert!(seconds(Tf32Use::Convolutions, &conv) < 0.7 * seconds(Tf32Use::Off, &conv));
        assert_eq!(seconds(Tf32Use::Convolutions, &product), seconds(Tf32Use::Off, &product));
        assert!(seconds(Tf32Use::All, &product) < 0.2 * seconds(Tf32Use::Off, &product));
        assert_eq!(arithmetic_rate(&with(Tf32Use::All), &product), 156e12);
        let half = Workload { dtype: DType::Bf16, ..product };
        assert_eq!(seconds(Tf32Use::All, &half), seconds(Tf32Use::Off, &half), "only f32");
        let old = builtin("p100x16").unwrap();
        assert_eq!(arithmetic_rate(&old.spec().device, &conv), 10.6e12, "a device without TF32");
    }

    #[test]
    fn products_in_8_bits_pay_for_rounding_their_operands() {
        let machine = builtin("h100x64").unwrap();
        let device = &machine.spec().device;
        let speedup = |sizes| {
            let wide = roofline(device, &gemm(DType::Bf16, sizes)).0;
            wide / roofline(device, &workload("gemm_f8", DType::Bf16, &sizes)).0
        };
        assert!((1.3..1.9).contains(&speedup([1, 8192, 14336, 4096])), "{}", speedup([1, 8192, 14336, 4096]));
        assert!(speedup([1, 256, 256, 256]) < 1.0, "small products only pay");
        assert_eq!(speedup([1, 8192, 4096, 4104]), 1.0, "sizes that 8-bit units do not take stay in 16 bits");
        let old = builtin("a100x64").unwrap();
        let work = workload("gemm_f8", DType::Bf16, &[1, 4096, 4096, 4096]);
        assert_eq!(arithmetic_rate(&old.spec().device, &work), 312e12, "a device without 8 bits");
    }

    #[test]
    fn nothing_is_faster_than_its_launch() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let tiny = Workload { flops: 1, ..workload("binary", DType::F32, &[12]) };
        assert_eq!(roofline(device, &tiny), device.launch_overhead);
    }
}
