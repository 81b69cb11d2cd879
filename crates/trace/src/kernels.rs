//! The work of devices in a trace: what ran, for how long, and of which kind.
//!
//! PyTorch on GPUs: kernels, with the op that launched them and its shapes. PyTorch on processors: ops, less the ops inside of them. JAX:
//! instructions of the program that took most of the time, averaged over devices.

use crate::events::{Event, Profiler, Trace, TraceError, Track};
use shardwright_cost::WorkKind;
use shardwright_machine::CollectiveKind;
use std::collections::{BTreeMap, BTreeSet};

/// Kinds of work that a trace tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelKind {
    /// Computing.
    Work(WorkKind),
    /// Communication.
    Collective(CollectiveKind),
}

impl KernelKind {
    /// The kind in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Work(kind) => kind.name(),
            Self::Collective(kind) => kind.name(),
        }
    }
}

/// The sizes of a product by its operands' shapes: batch, the two outer sizes in ascending order, and the depth.
pub type ProductSizes = [u64; 4];

/// A product's sizes, independent of which operand is first.
pub fn product_sizes(batch: u64, m: u64, n: u64, k: u64) -> ProductSizes {
    [batch, m.min(n), m.max(n), k]
}

/// Something that a device did.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The op or kernel.
    pub name: String,
    /// Its kind.
    pub kind: KernelKind,
    /// Its time.
    pub seconds: f64,
    /// The product that it is, where the trace has shapes.
    pub product: Option<ProductSizes>,
}

/// What one device did in some steps.
#[derive(Clone, Debug)]
pub struct DeviceWork {
    /// Steps, where the trace marks them.
    pub steps: Option<u32>,
    /// Devices that the times are averaged over.
    pub devices: u32,
    /// All work of all devices, in order of time.
    pub kernels: Vec<Kernel>,
    /// Seconds from the first kernel to the end of the last.
    pub span: f64,
}

impl DeviceWork {
    /// Finds it in a trace.
    ///
    /// # Errors
    /// Where the trace has no work of any device.
    pub fn of(trace: &Trace) -> Result<Self, TraceError> {
        match trace.profiler {
            Profiler::Torch => torch(trace),
            Profiler::Jax => xla(trace),
        }
    }
}

fn work(steps: Option<u32>, devices: usize, mut found: Vec<(&Event, Kernel)>) -> DeviceWork {
    found.sort_by(|a, b| a.0.start.total_cmp(&b.0.start).then(a.0.at.cmp(&b.0.at)));
    let begin = found.first().map_or(0.0, |(event, _)| event.start);
    let end = found.iter().map(|(event, _)| event.start + event.duration).fold(begin, f64::max);
    let kernels = found.into_iter().map(|(_, kernel)| kernel).collect();
    DeviceWork { steps, devices: devices.max(1) as u32, kernels, span: (end - begin) * 1e-6 }
}

/// Steps by the marks of PyTorch's profiler.
fn torch_steps(trace: &Trace) -> Option<u32> {
    let marks = trace.events.iter().filter(|e| e.name.starts_with("ProfilerStep#"));
    let names: BTreeSet<&str> = marks.map(|event| &event.name[..]).collect();
    u32::try_from(names.len()).ok().filter(|&steps| steps > 0)
}

fn torch(trace: &Trace) -> Result<DeviceWork, TraceError> {
    let is_kernel =
        |event: &&Event| matches!(&event.category[..], "kernel" | "gpu_memcpy" | "gpu_memset" | "Kernel");
    let ops: BTreeMap<u64, &Event> = (trace.events.iter())
        .filter(|event| event.category == "cpu_op")
        .filter_map(|event| Some((event.args.external?, event)))
        .collect();
    let kernels: Vec<&Event> = trace.events.iter().filter(is_kernel).collect();
    let found: Vec<(&Event, Kernel)> = if kernels.is_empty() {
        self_times(trace.events.iter().filter(|event| event.category == "cpu_op"))
            .into_iter()
            .filter(|(_, seconds)| *seconds > 0.0)
            .map(|(op, seconds)| {
                let product = products(&op.name, &op.args.dims);
                (op, Kernel { name: op.name.clone(), kind: op_kind(&op.name), seconds, product })
            })
            .collect()
    } else {
        let described = |event: &'_ Event| {
            let op = event.args.external.and_then(|id| ops.get(&id));
            let by_name = kernel_kind(&event.name, event.args.collective.as_deref());
            // A kernel says best what it is; an op says it where the kernel does not.
            let kind = match by_name {
                KernelKind::Work(WorkKind::MemoryBound) => op.map_or(by_name, |op| op_kind(&op.name)),
                known => known,
            };
            let product = op.and_then(|op| products(&op.name, &op.args.dims));
            let product = product.filter(|_| kind == KernelKind::Work(WorkKind::Products));
            let name = op.map_or(&event.name, |op| &op.name).clone();
            Kernel { name, kind, seconds: event.duration * 1e-6, product }
        };
        kernels.into_iter().map(|event| (event, described(event))).collect()
    };
    if found.is_empty() {
        return Err(TraceError::Empty(
            "profile with `ProfilerActivity.CUDA` (or CPU), and let a step run inside",
        ));
    }
    Ok(work(torch_steps(trace), 1, found))
}

/// Ops with the time that no op inside of them takes, in seconds.
fn self_times<'e>(ops: impl Iterator<Item = &'e Event>) -> Vec<(&'e Event, f64)> {
    let mut by_thread: BTreeMap<(&Track, &Track), Vec<&Event>> = BTreeMap::new();
    for op in ops {
        by_thread.entry((&op.process, &op.thread)).or_default().push(op);
    }
    let mut all = Vec::new();
    for mut list in by_thread.into_values() {
        list.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.duration.total_cmp(&a.duration)));
        // Ops that have begun and not ended: index into `all`, end.
        let mut open: Vec<(usize, f64)> = Vec::new();
        for op in list {
            while open.last().is_some_and(|&(_, end)| end <= op.start) {
                open.pop();
            }
            if let Some(&(parent, _)) = open.last() {
                let (_, seconds): &mut (&Event, f64) = &mut all[parent];
                *seconds -= op.duration * 1e-6;
            }
            open.push((all.len(), op.start + op.duration));
            all.push((op, op.duration * 1e-6));
        }
    }
    all
}

fn xla(trace: &Trace) -> Result<DeviceWork, TraceError> {
    let gpus: BTreeSet<&Track> = (trace.events.iter())
        .filter(|e| e.names_track && e.name == "process_name")
        .filter(|e| e.args.name.as_deref().is_some_and(|name| name.starts_with("/device:")))
        .map(|event| &event.process)
        .collect();
    let runs = |event: &&Event| {
        let on_device = gpus.is_empty() || gpus.contains(&event.process);
        !event.names_track && event.args.hlo_op.is_some() && on_device
    };
    let mut modules: BTreeMap<&str, f64> = BTreeMap::new();
    for event in trace.events.iter().filter(runs) {
        *modules.entry(event.args.hlo_module.as_deref().unwrap_or("")).or_default() += event.duration;
    }
    let Some((&module, _)) = modules.iter().max_by(|a, b| a.1.total_cmp(b.1)) else {
        return Err(TraceError::Empty("let a jitted step run inside of `jax.profiler.trace`"));
    };
    let mine = |event: &&Event| runs(event) && event.args.hlo_module.as_deref().unwrap_or("") == module;
    let mine: Vec<&Event> = trace.events.iter().filter(mine).collect();
    let device = |event: &Event| (event.process.clone(), event.args.device_ordinal.clone());
    let devices: BTreeSet<_> = mine.iter().map(|event| device(event)).collect();
    let runs: BTreeSet<&str> = mine.iter().filter_map(|event| event.args.run_id.as_deref()).collect();
    let steps = u32::try_from(runs.len()).ok().filter(|&steps| steps > 0);
    let described = |event: &Event| {
        let instruction = event.args.hlo_op.as_deref().unwrap_or("");
        let kind = match kernel_kind(&event.name, None) {
            KernelKind::Work(WorkKind::MemoryBound) => instruction_kind(instruction),
            known => known,
        };
        let name = instruction.to_string();
        Kernel { name, kind, seconds: event.duration * 1e-6, product: None }
    };
    Ok(work(steps, devices.len(), mine.into_iter().map(|event| (event, described(event))).collect()))
}

fn has(name: &str, words: &[&str]) -> bool {
    words.iter().any(|word| name.contains(word))
}

/// The collective that a name speaks of.
fn collective(name: &str) -> Option<CollectiveKind> {
    let plain: String = name.to_ascii_lowercase().chars().filter(char::is_ascii_alphabetic).collect();
    let kinds = [
        ("reducescatter", CollectiveKind::ReduceScatter),
        ("allreduce", CollectiveKind::AllReduce),
        ("allgather", CollectiveKind::AllGather),
        ("alltoall", CollectiveKind::AllToAll),
        ("collectivepermute", CollectiveKind::Permute),
        ("sendrecv", CollectiveKind::Permute),
        ("sendreceive", CollectiveKind::Permute),
    ];
    kinds.into_iter().find(|(word, _)| plain.contains(word)).map(|(_, kind)| kind)
}

/// The kind of a GPU's kernel by its name.
fn kernel_kind(name: &str, stated: Option<&str>) -> KernelKind {
    if let Some(kind) = stated.and_then(collective) {
        return KernelKind::Collective(kind);
    }
    if has(
        name,
        &["nccl", "gloo", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"],
    ) && let Some(kind) = collective(name)
    {
        return KernelKind::Collective(kind);
    }
    // Inductor names a kernel after all ops that it fuses.
    if has(name, &["triton_", "elementwise", "reduce_kernel", "Memcpy", "Memset", "multi_tensor"]) {
        return KernelKind::Work(WorkKind::MemoryBound);
    }
    KernelKind::Work(if has(name, &["flash", "fmha", "attention", "sdpa"]) {
        WorkKind::Attention
    } else if has(
        name,
        &["fprop", "dgrad", "wgrad", "conv2d", "convolve", "implicit_gemm", "conv_depthwise", "winograd"],
    ) {
        WorkKind::Convolutions
    } else if has(name, &["gemm", "nvjet", "cutlass", "cublas", "splitK", "RNN", "lstm", "persist_"]) {
        WorkKind::Products
    } else {
        WorkKind::MemoryBound
    })
}

/// The kind of a PyTorch op by its name.
fn op_kind(name: &str) -> KernelKind {
    if has(name, &["c10d::", "gloo:", "nccl:", "record_param_comms", "c10d_functional::"])
        && let Some(kind) = collective(name)
    {
        return KernelKind::Collective(kind);
    }
    KernelKind::Work(if has(name, &["attention"]) {
        WorkKind::Attention
    } else if has(name, &["convolution", "conv2d", "conv_depthwise", "conv1d", "conv3d"]) {
        WorkKind::Convolutions
    } else if products_of(name).is_some() || has(name, &["lstm", "rnn", "_scaled_mm"]) {
        WorkKind::Products
    } else {
        WorkKind::MemoryBound
    })
}

/// The kind of an XLA instruction by its name.
fn instruction_kind(name: &str) -> KernelKind {
    if let Some(kind) = collective(name) {
        return KernelKind::Collective(kind);
    }
    KernelKind::Work(if has(name, &["fmha", "attention"]) {
        WorkKind::Attention
    } else if has(name, &["conv-", "cudnn-conv", "convolution"]) || name.starts_with("conv.") {
        WorkKind::Convolutions
    } else if has(name, &["dot", "gemm", "matmul", "ynn_fusion"]) {
        WorkKind::Products
    } else {
        WorkKind::MemoryBound
    })
}

/// Where the two factors of an op that is a product stand among its operands.
fn products_of(name: &str) -> Option<usize> {
    match name {
        "aten::mm" | "aten::bmm" | "aten::mv" | "aten::_scaled_mm" => Some(0),
        "aten::addmm" | "aten::baddbmm" | "aten::addmv" => Some(1),
        _ => None,
    }
}

/// The sizes of a product by its operands' shapes.
fn products(name: &str, dims: &[Vec<u64>]) -> Option<ProductSizes> {
    let first = products_of(name)?;
    match (&dims.get(first)?[..], &dims.get(first + 1)?[..]) {
        (&[m, k], &[same, n]) if k == same => Some(product_sizes(1, m, n, k)),
        (&[b, m, k], &[same_b, same, n]) if k == same && b == same_b => Some(product_sizes(b, m, n, k)),
        (&[m, k], &[same]) if k == same => Some(product_sizes(1, m, 1, k)),
        _ => None,
    }
}
