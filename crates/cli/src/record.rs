//! The op times of a run as a cost file, for `plan --refine`.

use crate::commands::profile::{sample, today};
use crate::lowered_plan::LoweredPlan;
use shardwright_cost::{CostFile, Mode, TableText};
use shardwright_engine::Outcome;
use shardwright_graph::DType;
use shardwright_machine::DeviceId;
use std::collections::BTreeMap;

/// Nanoseconds by sizes.
type Times = BTreeMap<Vec<u64>, Vec<u64>>;

/// The plan's costs, updated with measured ones: for each measured op the median time over devices and steps. A single slow
/// device does not change the median.
pub fn costs(lowered: &LoweredPlan, outcome: &Outcome) -> anyhow::Result<CostFile> {
    let mut times: BTreeMap<(&'static str, DType), Times> = BTreeMap::new();
    for device in &outcome.devices {
        for event in &device.events {
            let instruction = lowered.program.instruction(event.instruction);
            // A stolen task has the sizes of its owner's block, which this device need not hold: it is left out then.
            let Some(sample) = sample(&lowered.program, instruction, DeviceId(device.device)) else {
                continue;
            };
            let table = times.entry((sample.workload.class.name, sample.workload.dtype)).or_default();
            let nanoseconds = (event.seconds * 1e9) as u64;
            table.entry(sample.workload.sizes.to_vec()).or_default().push(nanoseconds.max(1));
        }
    }
    let median = |(mut row, mut times): (Vec<u64>, Vec<u64>)| {
        times.sort_unstable();
        row.push(times[times.len() / 2]);
        row
    };
    let tables = times.into_iter().map(|((class, dtype), rows)| TableText {
        class: class.into(),
        dtype,
        mode: Mode::Usual,
        rows: rows.into_iter().map(median).collect(),
    });
    let header = [
        lowered.opened.inputs.machine.slowest().name,
        today(),
        format!("shardwright {}, a run of {}", env!("CARGO_PKG_VERSION"), lowered.plan().model),
        "median times over devices and steps; other rows as in the plan's costs".into(),
    ];
    Ok(CostFile::updating(lowered.opened.inputs.costs.as_ref(), header, tables.collect())?)
}
