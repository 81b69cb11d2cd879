//! The timeline as a Chrome trace, which Perfetto and `chrome://tracing` open.
//!
//! One process per device class, with a track for its compute units, one for its port to each level's links, and one for the
//! passes of each micro-batch. A counter shows its memory. Times are microseconds, as the format requires, with picosecond resolution.

use crate::{
    bands::bands,
    memory::Memory,
    passes::pass_name,
    schedule::{Schedule, Stream},
    timeline::Timeline,
};
use serde_json::{Value, json};
use shardwright_cost::Comm;
use shardwright_graph::{Graph, OpId};
use shardwright_lower::{Instruction, ParallelGraph, Work};
use std::io::{self, Write};

/// The contents of a trace.
pub struct Trace<'a> {
    /// The lowered graph.
    pub graph: &'a Graph,
    /// The program.
    pub program: &'a ParallelGraph,
    /// Prices and bytes of collectives.
    pub comm: &'a Comm,
    /// Its tasks.
    pub schedule: &'a Schedule,
    /// The start and end of its tasks.
    pub timeline: &'a Timeline,
    /// The config of an op, for people.
    pub config: &'a dyn Fn(OpId) -> String,
}

/// The compute track's number within a process; ports follow.
const COMPUTE: u32 = 0;

fn microseconds(picoseconds: u64) -> f64 {
    picoseconds as f64 / 1e6
}

impl Trace<'_> {
    /// Writes the trace: one event per line.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
        let mut first = true;
        let mut event = |out: &mut dyn Write, event: Value| {
            let comma = if std::mem::take(&mut first) { "" } else { ",\n" };
            write!(out, "{comma}{event}")
        };
        let classes = &self.schedule.classes;
        for class in classes.ids() {
            let (device, alike) = (classes.device(class).0, classes.size(&self.program.mesh, class));
            let name = match alike {
                1 => format!("device {device}"),
                _ => format!("device {device} and {} alike", alike - 1),
            };
            let name = match &self.program.pipeline {
                None => name,
                Some(own) => {
                    let group = own.group_of(&self.program.mesh, classes.device(class));
                    format!("group {group}: {name}")
                }
            };
            event(out, named("process_name", class, COMPUTE, &name))?;
            event(out, named("thread_name", class, COMPUTE, "compute"))?;
            for (at, level) in self.comm.machine().levels().iter().enumerate() {
                event(out, named("thread_name", class, at as u32 + 1, &format!("{} links", level.name)))?;
            }
            let passes = self.comm.machine().levels().len() as u32 + 1;
            event(out, named("thread_name", class, passes, "passes"))?;
            for band in bands(self.graph, self.program, self.schedule, self.timeline, class) {
                let name = match band.micro_batch.filter(|_| self.program.micro_batches.get() > 1) {
                    Some(micro_batch) => format!("{} {}", band.pass.name(), micro_batch + 1),
                    None => band.pass.name().to_string(),
                };
                let (ts, dur) = (microseconds(band.start), microseconds(band.end - band.start));
                let args = json!({"pass": band.pass.name(), "micro_batch": band.micro_batch});
                event(
                    out,
                    json!({"name": name, "ph": "X", "pid": class, "tid": passes, "ts": ts, "dur": dur, "args": args}),
                )?;
            }
            let memory = Memory::of(self.program, self.schedule, self.timeline, class);
            for (time, bytes) in memory.levels {
                let args = json!({"bytes": bytes.0});
                let ts = microseconds(time);
                event(out, json!({"name": "memory", "ph": "C", "pid": class, "ts": ts, "args": args}))?;
            }
        }
        for task in self.schedule.tasks.ids() {
            let instruction = self.program.instruction(self.schedule.instructions[task]);
            let (mut name, mut args) = self.describe(instruction);
            if let Some(own) = self.program.stage_pass(self.schedule.instructions[task]) {
                args["stage"] = own.stage.into();
                args["pass"] = pass_name(own.pass).into();
                args["micro_batch"] = own.micro_batch.into();
                name = format!("{name} [{}]", own.micro_batch);
            }
            let (start, end) = (self.timeline.start[task], self.timeline.end[task]);
            for &stream in self.schedule.tasks.streams(task) {
                let (class, stream) = self.schedule.stream(stream);
                let track = match stream {
                    Stream::Compute => COMPUTE,
                    Stream::Port(level) => level + 1,
                };
                event(
                    out,
                    json!({
                        "name": name, "ph": "X", "pid": class, "tid": track,
                        "ts": microseconds(start), "dur": microseconds(end - start), "args": args,
                    }),
                )?;
            }
        }
        writeln!(out, "\n]}}")
    }

    fn describe(&self, instruction: &Instruction) -> (String, Value) {
        let tensor = |value| self.graph.tensor(self.program.value(value).tensor).name.clone();
        let mesh = &self.program.mesh;
        let names = |axes: shardwright_machine::AxisSet| -> Vec<&str> {
            axes.iter().map(|axis| mesh.axis(axis).name.as_str()).collect()
        };
        let bytes = || self.program.traffic_of(self.comm, instruction).total().0;
        match &instruction.work {
            Work::Compute { op, .. } => {
                let node = self.graph.node(*op);
                let args = json!({
                    "kind": node.op.kind(), "config": (self.config)(*op),
                    "layer": self.graph.layers[node.layer.index()].name,
                });
                (node.name.clone(), args)
            }
            Work::Reshard(step) => {
                let tensors: Vec<String> = instruction.writes.iter().map(|&value| tensor(value)).collect();
                let args = json!({
                    "axes": names(step.axes), "tensors": tensors, "message_bytes": step.message.0,
                    "bytes_sent": bytes(),
                });
                (format!("{} {}", step.action.name(), tensors[0]), args)
            }
            Work::HaloExchange { axes, dim, .. } => {
                let name = tensor(instruction.writes[0]);
                let args = json!({"axes": names(*axes), "dimension": dim, "bytes_sent": bytes()});
                (format!("window {name}"), args)
            }
        }
    }
}

fn named(what: &str, process: u32, track: u32, name: &str) -> Value {
    json!({"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}})
}
