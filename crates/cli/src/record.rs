//! What a run has measured, as a cost file: `plan --refine` plans anew from it.

use crate::commands::profile::{sample, today};
use crate::commands::run::Opened;
use shardwright_cost::{CostFile, TableText};
use shardwright_engine::Outcome;
use shardwright_graph::DType;
use shardwright_machine::DeviceId;
use std::collections::BTreeMap;

/// Nanoseconds by sizes.
type Times = BTreeMap<Vec<u64>, Vec<u64>>;

/// The costs that the plan was made with, and in their place, where ops were measured, the middle one of their times over
/// devices and steps: a single device that was slow says nothing about the ops.
pub fn costs(opened: &Opened, outcome: &Outcome) -> anyhow::Result<CostFile> {
    let mut times: BTreeMap<(&'static str, DType), Times> = BTreeMap::new();
    for device in &outcome.devices {
        for event in &device.events {
            let instruction = opened.program.instruction(event.instruction);
            // What a device did for another it cannot tell the sizes of.
            let Some(sample) = sample(&opened.program, instruction, DeviceId(device.device)) else {
                continue;
            };
            let table = times.entry((sample.workload.class, sample.workload.dtype)).or_default();
            let nanoseconds = (event.seconds * 1e9) as u64;
            table.entry(sample.workload.sizes.to_vec()).or_default().push(nanoseconds.max(1));
        }
    }
    let middle = |(mut row, mut times): (Vec<u64>, Vec<u64>)| {
        times.sort_unstable();
        row.push(times[times.len() / 2]);
        row
    };
    let tables = times.into_iter().map(|((class, dtype), rows)| TableText {
        class: class.into(),
        dtype,
        rows: rows.into_iter().map(middle).collect(),
    });
    let header = [
        opened.request.machine.slowest().name,
        today(),
        format!("shardwright {}, a run of {}", env!("CARGO_PKG_VERSION"), opened.plan.model),
        "the middle one of the times over devices and steps; other rows as in the costs that the plan was made with".into(),
    ];
    Ok(CostFile::updating(opened.request.costs(), header, tables.collect())?)
}
