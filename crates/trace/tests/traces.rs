//! Traces as profilers write them, damaged ones, and ones of other models.

use shardwright_cost::WorkKind;
use shardwright_graph::DType;
use shardwright_machine::CollectiveKind;
use shardwright_trace::{
    DeviceWork, Findings, KernelKind, MatchError, Prediction, Profiler, Trace, TraceError, is_trace,
    product_sizes,
};
use std::io::Write;

const TORCH: &[u8] = include_bytes!("traces/torch-cpu.json.gz");
const GPU: &[u8] = include_bytes!("traces/torch-gpu.json.gz");
const JAX: &[u8] = include_bytes!("traces/jax-cpu.json.gz");
const PRODUCTS: KernelKind = KernelKind::Work(WorkKind::Products);
const MEMORY: KernelKind = KernelKind::Work(WorkKind::MemoryBound);

fn work(bytes: &[u8]) -> DeviceWork {
    DeviceWork::of(&Trace::read(bytes).unwrap()).unwrap()
}

fn prediction(kind: KernelKind, sizes: Option<[u64; 4]>, microseconds: f64) -> Prediction {
    let product = sizes.map(|[b, m, n, k]| product_sizes(b, m, n, k));
    let workload = sizes.map(|sizes| ("gemm", DType::F32, sizes.to_vec()));
    Prediction { kind, product, workload, seconds: microseconds * 1e-6 }
}

/// The products of the fixtures' step: 32 samples, 64 inputs, 128 hidden, 10 results.
fn step() -> Vec<Prediction> {
    let sizes = [[1, 32, 128, 64], [1, 32, 10, 128], [1, 32, 128, 10], [1, 128, 10, 32], [1, 64, 128, 32]];
    let mut all: Vec<Prediction> =
        sizes.into_iter().map(|sizes| prediction(PRODUCTS, Some(sizes), 10.0)).collect();
    all.push(prediction(MEMORY, None, 20.0));
    all
}

/// A trace of kernels on a GPU: name, begin and duration in microseconds.
fn gpu(kernels: &[(&str, f64, f64)]) -> String {
    let event = |(name, start, duration): &(&str, f64, f64)| {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"{name}","ts":{start},"dur":{duration},"pid":0,"tid":7,"args":{{}}}}"#
        )
    };
    let events: Vec<String> = kernels.iter().map(event).collect();
    format!(r#"{{"schemaVersion":1,"traceEvents":[{}]}}"#, events.join(","))
}

#[test]
fn pytorch_marks_steps_and_records_shapes() {
    assert!(is_trace(TORCH));
    assert_eq!(Trace::read(TORCH).unwrap().profiler, Profiler::Torch);
    let work = work(TORCH);
    // Without a schedule nothing marks the steps: the number of products tells.
    assert_eq!((work.steps, work.devices), (None, 1));
    let products: Vec<_> = work.kernels.iter().filter_map(|kernel| kernel.product).collect();
    assert_eq!(products.len(), 10, "five products in each of two steps");
    assert!(products.contains(&product_sizes(1, 32, 128, 64)));
    let found = Findings::of(&work, &step()).unwrap();
    assert_eq!((found.steps, found.ops.len()), (2, 5));
    assert!(found.matched > 0.99 && found.by_shape > 0.02, "{found:?}");
    let products = found.kinds.iter().find(|found| found.kind == PRODUCTS).unwrap();
    assert_eq!(products.counts, [5.0, 5.0]);
    assert!((products.factor() - products.seconds[0] / 50e-6).abs() < 1e-9);
}

#[test]
fn kernels_of_a_gpu_belong_to_the_ops_that_launched_them() {
    // Two steps of GPT with two layers of 512 on an H200, batch 8 of 512 tokens, 8192 words, in bf16.
    let work = work(GPU);
    let products = work.kernels.iter().filter(|kernel| kernel.product.is_some()).count();
    assert!((76..=82).contains(&products), "{products} of 78, some in two kernels");
    assert!(work.kernels.iter().any(|kernel| kernel.product == Some(product_sizes(1, 4096, 8192, 512))));
    let attention = KernelKind::Work(WorkKind::Attention);
    assert!(work.kernels.iter().filter(|kernel| kernel.kind == attention).count() >= 8);
    assert!(work.kernels.iter().all(|kernel| !matches!(kernel.kind, KernelKind::Collective(_))));
}

#[test]
fn jax_marks_runs_of_its_program() {
    assert_eq!(Trace::read(JAX).unwrap().profiler, Profiler::Jax);
    let work = work(JAX);
    assert_eq!((work.steps, work.devices), (Some(2), 1));
    let found = Findings::of(&work, &step()).unwrap();
    assert_eq!(found.by_shape, 0.0, "XLA's traces have no shapes");
    assert!(found.kinds.iter().any(|found| found.kind == PRODUCTS && found.counts[0] >= 4.0), "{found:?}");
}

#[test]
fn the_wrong_assumption_is_named() {
    let kernels = [
        ("nvjet_sm90_tst_128x128", 0.0, 100.0),
        ("triton_poi_fused_add_gelu_3", 100.0, 40.0),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 150.0, 210.0),
        ("Memcpy DtoD (Device -> Device)", 400.0, 1.0),
    ];
    let work = work(gpu(&kernels).as_bytes());
    assert_eq!(work.kernels.len(), 4);
    assert!((work.span - 401e-6).abs() < 1e-12);
    let reduce = KernelKind::Collective(CollectiveKind::AllReduce);
    let plan = [(PRODUCTS, 100.0), (MEMORY, 41.0), (reduce, 100.0)];
    let plan: Vec<Prediction> = plan.iter().map(|&(kind, time)| prediction(kind, None, time)).collect();
    let found = Findings::of(&work, &plan).unwrap();
    let worst = found.worst().unwrap();
    assert_eq!(worst.kind, reduce);
    assert!((worst.factor() - 2.1).abs() < 1e-9);
    assert!((found.idle - 50e-6).abs() < 1e-12, "{found:?}");
    assert_eq!(found.matched, 1.0);
}

#[test]
fn kernels_are_told_apart_by_their_names() {
    let kinds = [
        ("cutlass_80_tensorop_s1688gemm_128x128", PRODUCTS),
        (
            "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc",
            KernelKind::Work(WorkKind::Convolutions),
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16",
            KernelKind::Work(WorkKind::Attention),
        ),
        ("triton_red_fused_convolution_backward_native_batch_norm_backward_25", MEMORY),
        ("void at::native::vectorized_elementwise_kernel<4>", MEMORY),
        (
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
            KernelKind::Collective(CollectiveKind::ReduceScatter),
        ),
        ("ncclDevKernel_AllGather_RING_LL", KernelKind::Collective(CollectiveKind::AllGather)),
        ("ncclDevKernel_SendRecv", KernelKind::Collective(CollectiveKind::Permute)),
    ];
    for (name, kind) in kinds {
        assert_eq!(work(gpu(&[(name, 0.0, 1.0)]).as_bytes()).kernels[0].kind, kind, "{name}");
    }
}

#[test]
fn traces_of_other_models_are_refused() {
    let refused = |trace: &[u8], plan: &[Prediction]| match Findings::of(&work(trace), plan) {
        Err(error @ MatchError::AnotherModel { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    // Other shapes.
    let wide: Vec<Prediction> = step()
        .into_iter()
        .map(|op| Prediction { product: op.product.map(|[b, m, n, k]| [b, 3 * m, 3 * n, k]), ..op })
        .collect();
    let error = refused(TORCH, &wide);
    assert!(error.contains("shapes that the plan does not have") && error.contains("--ran"), "{error}");
    // Work that the plan does not have at all.
    let convolutions = gpu(&[("sm90_xmma_fprop_implicit_gemm", 0.0, 90.0), ("nvjet_x", 90.0, 10.0)]);
    let error = refused(convolutions.as_bytes(), &step());
    assert!(error.contains("90% of its time") && error.contains("sm90_xmma_fprop"), "{error}");
    // A deeper model.
    let deeper: Vec<Prediction> = (0..40).map(|_| prediction(PRODUCTS, None, 10.0)).collect();
    let error = refused(JAX, &deeper);
    assert!(error.contains("matrix products per step, the plan 40"), "{error}");
}

#[test]
fn factors_that_nobody_believes_are_refused() {
    let trace = gpu(&[("nvjet_x", 0.0, 1e6)]);
    let error = Findings::of(&work(trace.as_bytes()), &[prediction(PRODUCTS, None, 1.0)]).unwrap_err();
    assert!(matches!(error, MatchError::Unbelievable { .. }), "{error}");
}

#[test]
fn damaged_traces_name_the_place_and_the_remedy() {
    let error = |bytes: &[u8]| Trace::read(bytes).unwrap_err();
    let good = gpu(&[("nvjet_x", 0.0, 1.0), ("nvjet_y", 1.0, 1.0)]);
    let cut = error(&good.as_bytes()[..good.len() - 30]).to_string();
    assert!(
        cut.contains("cut off after 1 events") && cut.contains("line 1") && cut.contains("finish"),
        "{cut}"
    );
    let cut = error(&TORCH[..TORCH.len() / 2]).to_string();
    assert!(cut.contains("cut off"), "{cut}");
    let impossible = |kernel| error(gpu(&[("a", 0.0, 1.0), kernel]).as_bytes()).to_string();
    let negative = impossible(("nvjet_x", 1.0, -5.0));
    assert!(
        negative.contains("event 1 (`nvjet_x`): a duration of -5 us") && negative.contains("profile again")
    );
    assert!(impossible(("nvjet_x", 1.0, 1e12)).contains("more than an hour"));
    let version = error(good.replace("\"schemaVersion\":1", "\"schemaVersion\":7").as_bytes());
    assert!(matches!(version, TraceError::Version(7)), "{version}");
    let no_time = good.replace("\"dur\":1,", "").replace("\"dur\":1.0,", "");
    assert!(error(no_time.as_bytes()).to_string().contains("no begin or no duration"));
    assert!(error(br#"{"schemaVersion":1}"#).to_string().contains("no list `traceEvents`"));
    assert!(error(br#"{"traceEvents": {"a": 1}}"#).to_string().contains("a list of events"));
    assert!(error(b"[1, 2]").to_string().contains("not a profiler's trace"));
    // Depth is bounded.
    let deep =
        format!(r#"{{"traceEvents":[{{"ph":"X","args":{}1{}}}]}}"#, "[".repeat(5000), "]".repeat(5000));
    error(deep.as_bytes());
    let empty = DeviceWork::of(&Trace::read(gpu(&[]).as_bytes()).unwrap()).unwrap_err().to_string();
    assert!(empty.contains("ProfilerActivity"), "{empty}");
}

#[test]
fn any_damage_is_an_error_or_a_trace() {
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(TORCH), &mut plain).unwrap();
    let start = plain[..6000.min(plain.len())].to_vec();
    for at in (0..start.len()).step_by(7) {
        for byte in [b'"', b'{', b']', b'9', 0xff] {
            let mut broken = start.clone();
            broken[at] = byte;
            if let Ok(trace) = Trace::read(&broken[..]) {
                let _ = DeviceWork::of(&trace);
            }
        }
    }
    // The same under compression.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&start).unwrap();
    let mut packed = packed.finish().unwrap();
    for at in (10..packed.len()).step_by(5) {
        packed[at] ^= 0x40;
        let _ = Trace::read(&packed[..]);
        packed[at] ^= 0x40;
    }
}
