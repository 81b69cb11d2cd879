//! `compare`: every strategy side by side, on one graph, machine and cost model.

use crate::Verdict;
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use crate::progress::ProgressLine;
use serde::Serialize;
use shardwright_plan::{evaluate, moved, optcnn_bytes, strategy::Space};
use shardwright_sim::{search, simulate_step, strategies};
use std::io::{self, Write};
use std::time::Instant;

/// Runs every strategy on a model and shows them side by side.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Only the table, without notes
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Serialize)]
struct Answer {
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    solver: &'static str,
    step_seconds: Option<f64>,
    speedup_over_data: Option<f64>,
    traffic_bytes: Option<u64>,
    peak_memory_bytes: Option<u64>,
    search_seconds: f64,
    objective: Option<i64>,
    proved_optimal: bool,
    /// Elements that all devices move by SoyBean's measure, where it can count the plan.
    soybean_elements: Option<u64>,
    /// Bytes that all devices are sent by OptCNN's counting: no collectives, weights through a parameter server.
    optcnn_bytes: Option<u64>,
    /// Why there is no result, where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let request = args.planning.open()?;
    let line = ProgressLine::new("pricing every choice");
    let rows: Vec<Row> = args.planning.on_threads(|| -> anyhow::Result<Vec<Row>> {
        let problem = request.problem()?;
        let prime = request.prime()?;
        let mut rows = Vec::new();
        for strategy in strategies() {
            let start = Instant::now();
            line.say(&format!("searching: {}", strategy.name));
            // Each strategy has the whole time limit for itself.
            let mut control = args.planning.control(&request, strategy);
            (control.start, control.deadline) = (start, start.checked_add(args.planning.time));
            let mut row = Row {
                solver: strategy.name,
                step_seconds: None,
                speedup_over_data: None,
                traffic_bytes: None,
                peak_memory_bytes: None,
                search_seconds: 0.0,
                objective: None,
                proved_optimal: false,
                soybean_elements: None,
                optcnn_bytes: None,
                failure: None,
            };
            let problem = if matches!(strategy.space, Space::Tilings(_)) { &prime } else { &problem };
            match search(problem, strategy, &args.planning.demands(), &control) {
                Ok(found) => {
                    row.search_seconds = start.elapsed().as_secs_f64();
                    let costs = evaluate(problem, &found.configs)?;
                    row.step_seconds = Some(simulate_step(problem, &found.configs)?.times.step_seconds);
                    row.traffic_bytes = Some(costs.traffic.total().0);
                    row.peak_memory_bytes = Some(costs.peak_memory.0);
                    row.objective = Some(found.objective);
                    let counted =
                        found.moved.ok_or(()).or_else(|()| moved(problem, &found.configs, &control));
                    row.soybean_elements = counted.ok().map(|moved| moved.total_elements);
                    row.optcnn_bytes = Some(optcnn_bytes(problem, &found.configs));
                    row.proved_optimal = strategy.solver.is_some() && found.objective <= found.bound;
                }
                Err(error) => row.failure = Some(error.to_string()),
            }
            rows.push(row);
        }
        let data = rows.iter().find(|r| r.solver == "data").and_then(|r| r.step_seconds);
        for row in &mut rows {
            row.speedup_over_data = data.zip(row.step_seconds).map(|(data, own)| data / own);
        }
        Ok(rows)
    })??;
    drop(line);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&Answer { rows })?)?;
        return Ok(Verdict::Done);
    }
    writeln!(
        out,
        "{:<12} {:>11} {:>9} {:>11} {:>15} {:>14} {:>11} {:>9}  optimal in its space",
        "solver", "step", "vs data", "sent", "SoyBean's count", "OptCNN's count", "per device", "search"
    )?;
    for row in &rows {
        match (row.step_seconds, row.speedup_over_data) {
            (Some(step), Some(speedup)) => writeln!(
                out,
                "{:<12} {:>11} {:>8.2}x {:>11} {:>15} {:>14} {:>11} {:>8.2}s  {}",
                row.solver,
                show_seconds(step),
                speedup,
                show_bytes(row.traffic_bytes.unwrap_or(0)),
                row.soybean_elements.map_or_else(|| "-".into(), |elements| elements.to_string()),
                row.optcnn_bytes.map_or_else(|| "-".into(), show_bytes),
                show_bytes(row.peak_memory_bytes.unwrap_or(0)),
                row.search_seconds,
                if row.proved_optimal { "proved" } else { "-" }
            )?,
            _ => writeln!(out, "{:<12} {}", row.solver, row.failure.as_deref().unwrap_or("no result"))?,
        }
    }
    if args.quiet {
        return Ok(Verdict::Done);
    }
    writeln!(
        out,
        "note: SoyBean's count is elements moved with every op split on every axis; ops that a plan repeats count as split"
    )?;
    writeln!(
        out,
        "note: OptCNN's count sends all straight to who lacks it, weights through a parameter server; `sent` is what runs"
    )?;
    writeln!(
        out,
        "note: steps are simulated; what is proved is the cost model's sum, where nothing overlaps"
    )?;
    Ok(Verdict::Done)
}
