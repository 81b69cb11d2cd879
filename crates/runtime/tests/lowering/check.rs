//! The checks of every lowered program, and the machines of the tests.

use crate::case::Rng;
use shardwright_cost::{Action, Placement, Resharder};
use shardwright_graph::{DType, Graph, Role, Rule, TensorId};
use shardwright_lower::{ParallelGraph, Work, lower};
use shardwright_machine::{Machine, Mesh, parse};
use shardwright_plan::{Context, predicted_traffic};
use shardwright_runtime::{HostTensor, Reference, Serial};
use shardwright_space::{Assignment, AxisUse, Config};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Devices per level, outermost first: one to three axes each.
pub const MACHINES: [&[u32]; 7] = [&[2], &[3], &[2, 2], &[4], &[2, 3], &[2, 4], &[8]];

/// Larger ones, up to six axes, where reshards are found by other searches: for fuzzing.
pub const LARGE: [&[u32]; 5] = [&[12], &[4, 4], &[16], &[4, 8], &[8, 8]];

/// A machine with these units per level. Its devices are so slow that even tiny models are worth splitting.
pub fn machine(counts: &[u32]) -> Machine {
    let mut text = String::from("name = \"test\"\n");
    for (at, count) in counts.iter().enumerate() {
        let (name, rate, latency) = if at == 0 { ("node", 10, 50) } else { ("gpu", 100, 10) };
        text += &format!(
            "[[level]]\nname = \"{name}\"\ncount = {count}\nbandwidth = \"{rate} GB/s\"\nlatency = \"{latency} ns\"\n\
             topology = \"switch\"\n"
        );
    }
    text += "[device]\nname = \"x\"\nmemory = \"1 GiB\"\nmemory_bandwidth = \"1 GB/s\"\n\
             launch_overhead = \"0 s\"\npeak.f32 = \"1 GFLOP/s\"\npeak.f64 = \"1 GFLOP/s\"\n";
    parse("test.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap()
}

/// A machine, and its reshards, which all cases share: working out a mesh's arrangements takes longer than any case.
pub struct Lab {
    machine: Machine,
    resharder: Mutex<Resharder>,
}

impl Lab {
    /// The lab of a machine.
    pub fn of(counts: &'static [u32]) -> &'static Lab {
        static ALL: Mutex<BTreeMap<&[u32], &Lab>> = Mutex::new(BTreeMap::new());
        let make = || {
            let machine = machine(counts);
            let resharder = Mutex::new(Resharder::new(&machine, machine.mesh()));
            &*Box::leak(Box::new(Lab { machine, resharder }))
        };
        ALL.lock().unwrap().entry(counts).or_insert_with(make)
    }

    /// The machine's axes.
    pub fn mesh(&self) -> &Mesh {
        self.machine.mesh()
    }

    /// Calls a function with the context of a graph, which borrows the shared reshards.
    fn with_context<T>(&self, graph: &Graph, f: impl FnOnce(&Context<'_>) -> T) -> Result<T, String> {
        let context = Context::new(graph, &self.machine, None, self.mesh().clone(), true);
        let mut context = context.map_err(|e| e.to_string())?;
        let mut shared = self.resharder.lock().unwrap();
        std::mem::swap(&mut *shared, &mut context.resharder);
        let result = f(&context);
        std::mem::swap(&mut *shared, &mut context.resharder);
        Ok(result)
    }

    /// The lowered program as text, for a failure message.
    pub fn listing(&self, graph: &Graph, configs: &[Config]) -> String {
        let program = lower(graph, &self.resharder.lock().unwrap(), &Assignment::of(graph, configs.to_vec()));
        program.map(|program| program.listing(graph).to_string()).unwrap_or_default()
    }
}

/// A random config that the rule allows.
pub fn random_config(rng: &mut Rng, rule: &Rule, mesh: &Mesh, pins: bool) -> Config {
    let mut config = Config::replicated(mesh.len());
    for axis in mesh.all().iter() {
        let mut choices = vec![AxisUse::Replicate];
        for f in 0..rule.factors.len() {
            let mut with = config.clone();
            with.set(axis, AxisUse::Split(f as u8));
            if with.check(rule, mesh).is_ok() {
                choices.extend([AxisUse::Split(f as u8); 2]);
            }
        }
        if pins && rng.between(0, 5) == 0 {
            choices = vec![AxisUse::Pin(rng.between(0, u64::from(mesh.axis(axis).size) - 1) as u16)];
        }
        config.set(axis, rng.pick(&choices));
    }
    config
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 2e-5,
        DType::Bf16 | DType::F16 => 2e-2,
        DType::I32 | DType::I64 | DType::Bool => 0.0,
    }
}

/// The largest difference relative to the larger of one and the largest number, or why there is none.
fn difference(expected: &HostTensor, actual: &HostTensor) -> Result<f64, String> {
    if expected.ty() != actual.ty() {
        return Err(format!("has type {}, not {}", actual.ty(), expected.ty()));
    }
    let (expected, actual) = (expected.to_f64_vec(), actual.to_f64_vec());
    let scale = expected.iter().fold(1.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    let mut worst = 0.0f64;
    for (e, a) in expected.iter().zip(&actual) {
        if !(e == a || (e.is_nan() && a.is_nan())) {
            let error = (e - a).abs() / scale;
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    Ok(worst)
}

/// Checks that replicas of kept values are equal to the bit: their devices have run the same ops.
fn replicas_agree(program: &ParallelGraph, run: &Reference<'_>) -> Result<(), String> {
    for output in &program.outputs {
        let mut first: BTreeMap<String, &HostTensor> = BTreeMap::new();
        let value = program.value(output.value);
        if value.partial().is_some() {
            continue;
        }
        for device in program.devices() {
            let (Some(block), Some(held)) =
                (value.block(&program.mesh, device), run.block(output.value, device))
            else {
                continue;
            };
            let replica = *first.entry(format!("{block:?}")).or_insert(held);
            let same = |a: &HostTensor, b: &HostTensor| {
                let (a, b) = (a.to_f64_vec(), b.to_f64_vec());
                a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits())
            };
            if !same(replica, held) {
                return Err(format!("replicas of {:?} differ", output.value));
            }
        }
    }
    Ok(())
}

/// Compares the bytes that the executor moved with the cost model's bytes of each instruction.
fn moved_as_predicted(
    program: &ParallelGraph,
    run: &Reference<'_>,
    resharder: &Resharder,
) -> Result<(), String> {
    for (at, (instruction, &moved)) in program.instructions.iter().zip(run.moved()).enumerate() {
        let predicted = program.traffic_of(resharder.comm(), instruction).total().0;
        let Work::Reshard(step) = &instruction.work else {
            if predicted != moved {
                return Err(format!("instruction {at} moved {moved} bytes, not {predicted}"));
            }
            continue;
        };
        let members = u64::from(program.mesh.group_size(step.axes));
        let moved = match step.action {
            // Reduce-scatter and all-gather, instead of the whole tensor from every member.
            Action::AllReduce => moved * 2 / members,
            _ => moved,
        };
        // Staged algorithms send some bytes more than once.
        let staged = step.axes.len() > 1
            && matches!(step.action, Action::Scatter | Action::Gather | Action::AllToAll | Action::Reduce);
        if moved != predicted && !(staged && moved < predicted) {
            let action = step.action;
            return Err(format!("instruction {at}, {action:?}, moved {moved} bytes, not {predicted}"));
        }
    }
    Ok(())
}

/// Counts of instructions by kind, so that tests know which kinds they have covered.
pub type Seen = BTreeMap<String, usize>;

fn seen(program: &ParallelGraph) -> Seen {
    let mut seen = Seen::new();
    for instruction in &program.instructions {
        let kind = match &instruction.work {
            Work::Compute { .. } => "Compute".to_string(),
            Work::HaloExchange { axes, .. } => {
                let stored = program.value(instruction.reads[0]).at.layout();
                let split = axes.iter().any(|axis| matches!(stored.get(axis), Placement::Shard(_)));
                if split { "Exchange".to_string() } else { "Cut".to_string() }
            }
            Work::Reshard(_) if instruction.reads.len() > 1 => "Bucket".to_string(),
            Work::Reshard(step) => format!("{:?}", step.action),
        };
        *seen.entry(kind).or_default() += 1;
    }
    seen
}

/// All kinds of instructions.
pub const KINDS: [&str; 16] = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Bucket",
    "Compute",
    "Cut",
    "Drop",
    "Exchange",
    "Gather",
    "Permute",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "Send",
    "Slice",
];

/// Lowers and runs a graph for some steps; compares all outputs, losses and carried tensors with the serial run,
/// and the bytes with the prediction.
pub fn check(graph: &Graph, lab: &Lab, configs: &[Config], steps: usize) -> Result<Seen, String> {
    let assignment = Assignment::of(graph, configs.to_vec());
    lab.with_context(graph, |context| check_in(context, &assignment, steps))?
}

fn check_in(context: &Context<'_>, assignment: &Assignment, steps: usize) -> Result<Seen, String> {
    let (graph, resharder) = (context.graph, &context.resharder);
    let program = lower(graph, resharder, assignment).map_err(|e| e.to_string())?;
    program.verify()?;
    let predicted = predicted_traffic(context, assignment).map_err(|e| e.to_string())?;
    let sent = program.traffic(resharder.comm());
    if sent != predicted {
        return Err(format!("sends {sent:?}, predicted {predicted:?}"));
    }
    // Written out for all micro-batches, it sends and holds the same.
    let peak = program.peak_memory();
    let program = program.unrolled();
    program.verify()?;
    let (sent, held) = (program.traffic(resharder.comm()), program.peak_memory());
    if sent != predicted || held != peak {
        return Err(format!(
            "unrolled it sends {sent:?} and holds {held} bytes, not {predicted:?} and {peak}"
        ));
    }
    let mut serial = Serial::new(graph, 7, &[]);
    let mut parallel = Reference::new(graph, &program, 7);
    for step in 0..steps {
        serial.step().map_err(|e| format!("serial: {e}"))?;
        parallel.step().map_err(|e| format!("parallel: {e}"))?;
        for &tensor in &graph.outputs {
            let actual = parallel.output(tensor).ok_or("an output is missing")?;
            let expected = serial.value(tensor).ok_or("an output is missing")?;
            close(graph, tensor, step, expected, &actual)?;
        }
    }
    for carry in &program.carries {
        let tensor = program.value(carry.old).tensor;
        let actual = parallel.whole(carry.old).ok_or("a weight is missing")?;
        close(graph, tensor, steps, serial.value(tensor).ok_or("a weight is missing")?, &actual)?;
    }
    replicas_agree(&program, &parallel)?;
    moved_as_predicted(&program, &parallel, resharder)?;
    Ok(seen(&program))
}

fn close(
    graph: &Graph,
    tensor: TensorId,
    step: usize,
    expected: &HostTensor,
    actual: &HostTensor,
) -> Result<(), String> {
    let t = graph.tensor(tensor);
    let error = difference(expected, actual).map_err(|e| format!("`{}` {e}", t.name))?;
    // Errors of many steps and ops add up.
    let slack = if t.role == Role::Activation { 1.0 } else { 10.0 };
    if error > slack * tolerance(t.ty.dtype) {
        return Err(format!("step {step}: `{}` is off by {error:e}", t.name));
    }
    Ok(())
}

/// Shows configs for a failure message.
pub fn show(graph: &Graph, configs: &[Config], mesh: &Mesh) -> String {
    let line = |(op, config): (shardwright_graph::OpId, &Config)| {
        let node = graph.node(op);
        format!("{} {}: {}", node.op.kind(), node.name, config.show(&graph.rule(op), mesh))
    };
    graph.op_ids().zip(configs).map(line).collect::<Vec<_>>().join("\n")
}
