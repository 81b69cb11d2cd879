//! A measured run as a Chrome trace for Perfetto: a process per device, with a track for computing and
//! one for communication.

use crate::lowered_plan::LoweredPlan;
use serde_json::{Value, json};
use shardwright_engine::Outcome;
use shardwright_lower::{Instruction, Work};
use shardwright_machine::DeviceId;
use shardwright_sim::pass_name;
use std::io::{self, Write};

const COMPUTE: u32 = 0;
const COMMUNICATE: u32 = 1;

/// Writes the trace, one event per line.
pub fn write(out: &mut dyn Write, lowered: &LoweredPlan, outcome: &Outcome) -> io::Result<()> {
    let mut events: Vec<Value> = Vec::new();
    for device in &outcome.devices {
        let pid = device.device;
        events.push(json!({"ph": "M", "name": "process_name", "pid": pid,
            "args": {"name": format!("device {pid}")}}));
        for (tid, name) in [(COMPUTE, "compute"), (COMMUNICATE, "communicate")] {
            events.push(
                json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}),
            );
        }
        for event in &device.events {
            let instruction = lowered.program.instruction(event.instruction);
            let (tid, mut name, mut args) = describe(lowered, instruction, DeviceId(pid));
            if let Some(own) = lowered.program.stage_pass(event.instruction) {
                args["stage"] = own.stage.into();
                args["pass"] = pass_name(own.pass).into();
                args["micro_batch"] = own.micro_batch.into();
                name = format!("{name} [{}]", own.micro_batch);
            }
            events.push(json!({"ph": "X", "name": name, "pid": pid, "tid": tid, "args": args,
                "ts": event.start * 1e6, "dur": event.seconds * 1e6}));
        }
    }
    writeln!(out, "{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
    for (at, event) in events.iter().enumerate() {
        writeln!(out, "{event}{}", if at + 1 < events.len() { "," } else { "" })?;
    }
    writeln!(out, "]}}")
}

/// Track, name and details of an instruction on a device.
fn describe(lowered: &LoweredPlan, instruction: &Instruction, device: DeviceId) -> (u32, String, Value) {
    let (graph, program) = (&lowered.opened.inputs.graph, &lowered.program);
    let bytes: u64 = (instruction.writes.iter())
        .filter_map(|&v| program.value(v).local_type(&program.mesh, device))
        .map(|ty| ty.bytes())
        .sum();
    let tensor = || {
        let written = instruction.writes.first();
        written.map_or("", |&v| graph.tensor(program.value(v).tensor).name.as_str())
    };
    match &instruction.work {
        Work::Compute { op, .. } => {
            let node = graph.node(*op);
            let config = lowered.opened.assignment.config(*op).show(&graph.rule(*op), &program.mesh);
            let args = json!({"kind": node.op.kind(), "config": config, "bytes": bytes});
            (COMPUTE, node.name.clone(), args)
        }
        Work::Reshard(step) => {
            let axes: Vec<&str> = step.axes.iter().map(|axis| &program.mesh.axis(axis).name[..]).collect();
            let name = format!("{:?} {}", step.action, tensor());
            (COMMUNICATE, name, json!({"axes": axes, "bytes": bytes, "tensor": tensor()}))
        }
        Work::HaloExchange { .. } => {
            (COMMUNICATE, format!("halo {}", tensor()), json!({"bytes": bytes, "tensor": tensor()}))
        }
    }
}
