//! Errors of the roofline and of interpolation against measurements: a Markdown table, one row per workload class.
//!
//! usage: cargo run --release -p shardwright-cost --example roofline_errors [COSTS.json MACHINE]
//! (default: the H200's own measurements against `h200x64`)
//!
//! For interpolation every eighth row is left out and estimated from the others.

use shardwright_cost::{CostFile, CostTable, Mode, OperatorTimes, TableText, TimeSource, roofline};
use shardwright_graph::{RooflineKind, Workload, WorkloadClass, WorkloadSizes};
use shardwright_machine::{Device, Tf32Use};

const HELD_OUT: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let costs = match arguments.next() {
        Some(path) => CostFile::from_json(&std::fs::read(path)?)?,
        None => CostFile::builtin("h200").ok_or("no built-in costs")??,
    };
    let machine = shardwright_machine::builtin(&arguments.next().unwrap_or("h200x64".into()))?;
    println!("{}: {}; {} ({})\n", costs.device, costs.source, costs.method, costs.date);
    println!(
        "| class | type | rows | roofline / measured | roofline error | interpolated error | within reach |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|");
    for table in costs.tables() {
        // A table's own arithmetic: TF32 where it was on.
        let tf32 = match table.mode {
            Mode::Usual | Mode::ChannelsLast => Tf32Use::Off,
            Mode::Tf32 | Mode::Tf32ChannelsLast => Tf32Use::All,
        };
        print_row(table, &Device { tf32, ..machine.slowest() })?;
    }
    Ok(())
}

fn print_row(table: &CostTable, device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let class = WorkloadClass::find(&table.class).ok_or(format!("no op has the class `{}`", table.class))?;
    let sizes = WorkloadSizes::from_slice(&[1]);
    let base =
        Workload { class, dtype: table.dtype, sizes, flops: 1, bytes: 8, roofline: RooflineKind::Stream };
    let model: Vec<f64> = (0..table.len())
        .map(|i| {
            (roofline(device, &base.resized(table.row(i))).0 / table.seconds[i].max(device.launch_overhead.0))
                .ln()
        })
        .collect();
    let kept = (0..table.len()).filter(|i| i % HELD_OUT != 0);
    let rows = kept.map(|i| row_text(table, i)).collect();
    let mode = if device.tf32 == Tf32Use::All { Mode::Tf32 } else { Mode::Usual };
    let text = TableText { class: table.class.clone(), dtype: table.dtype, mode, rows };
    let about = [device.name.clone(), String::new(), String::new(), String::new()];
    let rest = CostFile::new(about, vec![text])?;
    let times = OperatorTimes::new(device, Some(&rest))?;
    let held: Vec<_> = (0..table.len()).step_by(HELD_OUT).collect();
    let guesses: Vec<f64> = held
        .iter()
        .map(|&i| {
            (times.estimate(&base.resized(table.row(i))), table.seconds[i].max(device.launch_overhead.0))
        })
        .filter(|(estimate, _)| estimate.source == TimeSource::Interpolated)
        .map(|(estimate, measured)| (estimate.seconds.0 / measured).ln())
        .collect();
    let mode = serde_json::to_string(&table.mode)?;
    println!(
        "| {} | {} {}| {} | {:.2} | {} | {} | {:.0}% |",
        table.class,
        table.dtype,
        if table.mode.is_usual() {
            String::new()
        } else {
            format!("{} ", mode.trim_matches('"').replace('_', " "))
        },
        table.len(),
        median(&model).exp(),
        percent(&model),
        percent(&guesses),
        100.0 * guesses.len() as f64 / held.len() as f64
    );
    Ok(())
}

fn row_text(table: &CostTable, i: usize) -> Vec<u64> {
    let nanoseconds = (table.seconds[i] * 1e9).round() as u64;
    table.row(i).iter().copied().chain([nanoseconds]).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median factor between estimate and measurement, as a percentage.
fn percent(logs: &[f64]) -> String {
    let sizes: Vec<f64> = logs.iter().map(|x| x.abs()).collect();
    if sizes.is_empty() { "-".into() } else { format!("{:.0}%", 100.0 * (median(&sizes).exp() - 1.0)) }
}
