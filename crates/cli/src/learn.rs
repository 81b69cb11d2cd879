//! `plan --refine TRACE`: costs from a profiler's trace of a run, and which assumption was wrong.

use crate::commands::profile::{sample, today};
use crate::lowered_plan::LoweredPlan;
use anyhow::Context as _;
use shardwright_cost::{CostFile, LearnedOp, LearnedRun, WorkKind};
use shardwright_graph::{RooflineKind, Workload};
use shardwright_lower::{InstructionId, Work};
use shardwright_machine::{CollectiveKind, DeviceId};
use shardwright_request::{show_seconds, weights_fingerprint};
use shardwright_sim::{Classes, Links};
use shardwright_trace::{DeviceWork, Finding, Findings, KernelKind, Prediction, Trace, product_sizes};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Costs that a run taught, and what they were learned from.
pub struct Lesson {
    /// The costs.
    pub costs: CostFile,
    /// What the trace says.
    pub findings: Findings,
}

/// Learns from a trace of a run of a plan.
pub fn learn(trace: &Path, ran: &LoweredPlan) -> anyhow::Result<Lesson> {
    let name = || trace.display().to_string();
    let file = File::open(trace).with_context(|| format!("cannot read {}", name()))?;
    let read = Trace::read(file).with_context(name)?;
    let work = DeviceWork::of(&read).with_context(name)?;
    let findings = Findings::of(&work, &predictions(ran)?).with_context(name)?;
    Ok(Lesson { costs: costs(trace, ran, &findings)?, findings })
}

/// What the plan predicts for one device, instruction by instruction.
fn predictions(ran: &LoweredPlan) -> anyhow::Result<Vec<Prediction>> {
    let schedule = ran.schedule(Classes::of(&ran.program), Links::Fifo)?;
    let device = DeviceId(0);
    let mut all = Vec::new();
    for (at, instruction) in ran.program.instructions.iter().enumerate() {
        let Some(task) = schedule.task(InstructionId(at as u32), 0) else { continue };
        let seconds = schedule.tasks.duration(task as usize) as f64 * 1e-12;
        let (kind, workload) = match &instruction.work {
            Work::Compute { .. } => {
                let Some(sample) = sample(&ran.program, instruction, device) else { continue };
                if sample.op.operator().is_view() {
                    continue;
                }
                (KernelKind::Work(WorkKind::of(&sample.workload.roofline)), Some(sample.workload))
            }
            Work::Reshard(step) => match kind_named(step.action.name()) {
                Some(kind) => (KernelKind::Collective(kind), None),
                // A slice on the device itself.
                None => (KernelKind::Work(WorkKind::MemoryBound), None),
            },
            Work::HaloExchange { .. } => (KernelKind::Collective(CollectiveKind::Permute), None),
        };
        let product = workload.as_ref().and_then(product);
        let workload = workload.map(|work| (work.class.name, work.dtype, work.sizes.to_vec()));
        all.push(Prediction { kind, product, workload, seconds });
    }
    Ok(all)
}

fn kind_named(name: &str) -> Option<CollectiveKind> {
    CollectiveKind::ALL.into_iter().find(|kind| kind.name() == name)
}

fn product(workload: &Workload) -> Option<[u64; 4]> {
    match &workload.roofline {
        RooflineKind::Product(product) if workload.sizes.len() == 4 => {
            Some(product_sizes(product.batch, product.m, product.n, product.k))
        }
        _ => None,
    }
}

/// The plan's costs with the factors that the trace taught. Factors of earlier runs are kept: the predictions had them in.
fn costs(trace: &Path, ran: &LoweredPlan, findings: &Findings) -> anyhow::Result<CostFile> {
    let inputs = &ran.opened.inputs;
    let before = inputs.costs.as_ref().and_then(|costs| costs.run.clone());
    let mut run = LearnedRun {
        model: ran.plan().model.clone(),
        weights: weights_fingerprint(&inputs.graph),
        engine: inputs.machine.slowest().engine,
        release: env!("CARGO_PKG_VERSION").into(),
        computing: before.iter().flat_map(|run| run.computing.clone()).collect(),
        collectives: before.iter().flat_map(|run| run.collectives.clone()).collect(),
        ops: before.iter().flat_map(|run| run.ops.clone()).collect(),
    };
    for finding in &findings.kinds {
        match finding.kind {
            KernelKind::Work(kind) => *run.computing.entry(kind).or_insert(1.0) *= finding.factor(),
            KernelKind::Collective(kind) => *run.collectives.entry(kind).or_insert(1.0) *= finding.factor(),
        }
    }
    let earlier_products = before.as_ref().map_or(1.0, |run| run.kind_factor(WorkKind::Products));
    for op in &findings.ops {
        let same = |other: &&mut LearnedOp| {
            (&other.class, other.dtype, &other.sizes) == (&op.class, op.dtype, &op.sizes)
        };
        match run.ops.iter_mut().find(same) {
            Some(known) => known.factor *= op.factor,
            None => run.ops.push(LearnedOp { factor: op.factor * earlier_products, ..op.clone() }),
        }
    }
    let header = [
        inputs.machine.slowest().name,
        today(),
        format!("shardwright {}, a trace of {}", env!("CARGO_PKG_VERSION"), ran.plan().model),
        format!(
            "{} with the factors of {} ({} steps)",
            inputs.costs.as_ref().map_or("data sheet".into(), |costs| costs.method.clone()),
            trace.display(),
            findings.steps
        ),
    ];
    let mut costs = CostFile::updating(inputs.costs.as_ref(), header, Vec::new())?;
    costs.run = Some(run);
    Ok(costs)
}

/// Says how much was matched, what took longer or shorter than predicted, and which assumption was most wrong.
pub fn report(out: &mut dyn Write, trace: &Path, findings: &Findings) -> io::Result<()> {
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    writeln!(
        out,
        "trace {}: {} step{} of {} device{}; {} of the time matched ({} by shape, the rest by kind)",
        trace.display(),
        findings.steps,
        if findings.steps == 1 { "" } else { "s" },
        findings.devices,
        if findings.devices == 1 { "" } else { "s" },
        percent(findings.matched),
        percent(findings.by_shape)
    )?;
    writeln!(out, "{:<20} {:>12} {:>12} {:>8}", "per step", "measured", "predicted", "factor")?;
    for finding in &findings.kinds {
        let [measured, predicted] = finding.seconds.map(show_seconds);
        let (what, factor) = (finding.kind.name(), finding.factor());
        writeln!(out, "{what:<20} {measured:>12} {predicted:>12} {factor:>7.2}x")?;
    }
    if findings.idle > 0.0 {
        writeln!(out, "{:<20} {:>12}", "device idle", show_seconds(findings.idle))?;
    }
    for (name, seconds) in &findings.unmatched {
        writeln!(out, "not matched: {name}, {}", show_seconds(*seconds))?;
    }
    writeln!(out, "{}", verdict(findings))
}

fn verdict(findings: &Findings) -> String {
    let measured: f64 = findings.kinds.iter().map(|finding| finding.seconds[0]).sum();
    let close = |finding: &Finding| (finding.seconds[0] - finding.seconds[1]).abs() < 0.05 * measured;
    match findings.worst() {
        Some(_) if findings.idle > measured => {
            "most wrong: the device waited for the host for more than half of the step".into()
        }
        Some(worst) if !close(worst) => {
            format!("most wrong: {} took {:.2}x the predicted", worst.kind.name(), worst.factor())
        }
        _ => "no assumption was wrong by more than 5% of the step".into(),
    }
}
