//! A plan as people read it.

use shardwright_plan::{Optimised, Plan, PlanLayer};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// What is shown of a layer, or of layers that repeat.
struct Line<'p> {
    name: String,
    config: &'p str,
    weights: &'p str,
    count: usize,
    compute: f64,
    comm: f64,
}

impl<'p> Line<'p> {
    fn of(layer: &'p PlanLayer) -> Self {
        Self {
            name: layer.name.clone(),
            config: &layer.config,
            weights: layer.weights.as_deref().unwrap_or("-"),
            count: 1,
            compute: layer.compute_seconds,
            comm: layer.comm_seconds,
        }
    }
}

/// One line for layers with the same name up to the numbers of their blocks (`blocks.3.ln1`) that do the same.
fn repeated(layers: &[PlanLayer]) -> Vec<Line<'_>> {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let stem = |name: &str| {
        let parts: Vec<&str> = name.split('.').map(|part| if number(part) { "*" } else { part }).collect();
        parts.join(".")
    };
    let mut lines: Vec<Line<'_>> = Vec::new();
    let mut known: BTreeMap<(String, &str, &str), usize> = BTreeMap::new();
    for layer in layers {
        let line = Line::of(layer);
        let key = (stem(&layer.name), line.config, line.weights);
        match known.get(&key) {
            Some(&at) => {
                lines[at].name = key.0;
                lines[at].count += 1;
                lines[at].compute += line.compute;
                lines[at].comm += line.comm;
            }
            None => {
                known.insert(key, lines.len());
                lines.push(line);
            }
        }
    }
    lines
}

/// How much is told of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Only the verdict.
    Verdict,
    /// Layers that matter, those that repeat once.
    Usual,
    /// Every layer.
    All,
}

/// Tells people what a plan does and what it is worth.
///
/// # Errors
/// Where `out` cannot be written to.
pub fn summarise(out: &mut impl Write, plan: &Plan, detail: Detail) -> io::Result<()> {
    let verbose = detail == Detail::All;
    if detail != Detail::Verdict {
        // Tied weights lie as their layer uses them; untied ones deserve a column.
        let weights = |stored: &str| if plan.space.untied { format!(" {stored:<12}") } else { String::new() };
        let heading = weights("weights");
        writeln!(out, "{:<28} {:<16}{heading} {:>12} {:>12}", "layer", "config", "compute", "communicate")?;
        let mut skipped = 0;
        let lines = if verbose { plan.layers.iter().map(Line::of).collect() } else { repeated(&plan.layers) };
        for line in &lines {
            // Layers that go on as the one before, at next to no cost, are not worth a line.
            let small = line.comm + line.compute < plan.simulated.step_seconds * 0.002;
            if !verbose && small {
                skipped += line.count;
                continue;
            }
            writeln!(
                out,
                "{:<28} {:<16}{} {:>12} {:>12}",
                if line.count > 1 { format!("{} ({}x)", line.name, line.count) } else { line.name.clone() },
                line.config,
                weights(line.weights),
                show_seconds(line.compute),
                show_seconds(line.comm)
            )?;
        }
        if skipped > 0 && skipped < plan.layers.len() {
            writeln!(out, "({skipped} layers of less than 0.2% of the step together; -v shows them)")?;
        }
        writeln!(out)?;
    }
    let times = &plan.simulated;
    writeln!(
        out,
        "{} on {} ({} devices), {}: {} per step, {} of it computing, {} waiting for communication; {} if nothing overlapped",
        plan.model,
        plan.machine,
        plan.devices,
        plan.solver,
        show_seconds(times.step_seconds),
        show_seconds(times.compute_seconds),
        show_seconds(times.exposed_comm_seconds),
        show_seconds(plan.objective as f64 / 1e12)
    )?;
    for (name, baseline) in &plan.baselines {
        writeln!(
            out,
            "  {name:<8} {:>10}, {:.2} times as long; {} sent instead of {}",
            show_seconds(baseline.step_seconds),
            baseline.step_seconds / times.step_seconds.max(f64::MIN_POSITIVE),
            show_bytes(baseline.traffic_bytes),
            show_bytes(plan.traffic_bytes)
        )?;
    }
    if !plan.placements.is_empty() {
        writeln!(out, "whole layers on devices:")?;
    }
    for row in &plan.placements {
        writeln!(
            out,
            "  {:<14} {:>10}; {} between devices; the busiest has {:.2} times its share; {} held at most",
            row.name,
            show_seconds(row.step_seconds),
            show_bytes(row.cut_bytes),
            row.imbalance,
            show_bytes(row.peak_memory_bytes)
        )?;
    }
    if let Some(moved) = &plan.soybean {
        let cuts: Vec<String> = moved.cuts.iter().map(u64::to_string).collect();
        let least = if moved.proved { "each cut proved least" } else { "not every cut proved least" };
        writeln!(
            out,
            "SoyBean's measure: {} elements moved, {} in the cuts one by one, {least}; {:.2} s; {} per device at most",
            moved.total_elements,
            cuts.join(", "),
            plan.search_seconds,
            show_bytes(plan.peak_memory_bytes)
        )?;
        return warn(out, plan);
    }
    let proof = if plan.optimised == Optimised::Simulated && plan.lower_bound > 0 {
        format!(
            "made short in the simulated step; without overlap at most {:.2}% above the optimum",
            plan.gap * 100.0
        )
    } else if plan.optimised == Optimised::Simulated {
        "made short in the simulated step, nothing proved".to_string()
    } else if plan.proved_optimal {
        "proved: without overlap nothing in the space is faster".to_string()
    } else if let (Some(coarse), true) = (&plan.space.coarse, plan.lower_bound > 0) {
        let there = if coarse.gap == 0.0 {
            "proved there".into()
        } else {
            format!("gap {:.2}% there", coarse.gap * 100.0)
        };
        format!(
            "at most {:.2}% above any plan on any axes; {} on {}, {there}",
            plan.gap / (1.0 - plan.gap).max(f64::MIN_POSITIVE) * 100.0,
            show_seconds(coarse.objective as f64 / 1e12),
            coarse.axes,
        )
    } else if plan.lower_bound > 0 {
        format!("at most {:.2}% above the optimum", plan.gap * 100.0)
    } else {
        "nothing proved".to_string()
    };
    writeln!(
        out,
        "{proof}; {} {}, {} configs; {}; {:.2} s{}; {} per device at most",
        plan.space.variables,
        if plan.space.untied { "ops" } else { "layers" },
        plan.space.choices,
        plan.space.description,
        plan.search_seconds,
        plan.planning_memory_bytes
            .map_or(String::new(), |bytes| format!(" and {} to plan", show_bytes(bytes))),
        show_bytes(plan.peak_memory_bytes)
    )?;
    warn(out, plan)
}

fn warn(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    plan.warnings.iter().try_for_each(|warning| writeln!(out, "note: {warning}"))
}

/// `0.0123 s` as people read it.
pub fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// Bytes as people read them.
pub fn show_bytes(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    }
}
