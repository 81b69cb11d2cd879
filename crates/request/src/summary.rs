//! The text summary of a plan.

use crate::columns::{WIDTH, hanging, shortened, wrapped};
use shardwright_machine::show_bytes;
use shardwright_plan::{BaselineCost, Optimised, Plan, PlanLayer, PlanPipeline, PlanStage};
use shardwright_strategies::EXPERT;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

/// A row of the table: a layer, or several equal ones.
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

/// What blocks are called whose number is part of their name.
const NAMED_BLOCKS: [&str; 5] = ["block", "cell", "layer", "stage", "unit"];

/// A layer's name without the number of its block: `blocks.*.ln1`, `layer3.block*.conv1`. The report folds the same names
/// (`report/src/fold.ts`).
pub fn stem(name: &str) -> String {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut parts: Vec<String> = name.split('.').map(String::from).collect();
    if parts.iter().any(|part| number(part)) {
        parts.iter_mut().filter(|part| number(part)).for_each(|part| "*".clone_into(part));
        return parts.join(".");
    }
    // The innermost of such modules is the one that is repeated.
    let modules = parts.len().saturating_sub(1);
    let block = parts[..modules].iter_mut().rev().find_map(|part| {
        let word = part.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let is_block = word.len() < part.len() && NAMED_BLOCKS.contains(&word.trim_end_matches('_'));
        is_block.then_some(word.len()).map(|length| (part, length))
    });
    if let Some((part, length)) = block {
        part.truncate(length);
        part.push('*');
    }
    parts.join(".")
}

/// One row for all layers with equal configs whose names differ only in the number of the block (`blocks.3.ln1`).
fn repeated(layers: &[PlanLayer]) -> Vec<Line<'_>> {
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

/// How much of a plan is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Step, baselines, search and proof.
    Verdict,
    /// Also the layers that matter, repeated ones in one row.
    Usual,
    /// Also every layer.
    All,
}

/// Prints a plan for people: a table of layers, then one labelled fact per line.
///
/// # Errors
/// Where `out` cannot be written to.
pub fn summarise(out: &mut impl Write, plan: &Plan, detail: Detail) -> io::Result<()> {
    if detail != Detail::Verdict {
        print_layers(out, plan, detail == Detail::All)?;
    }
    print_step(out, plan, detail)?;
    print_search(out, plan, detail)?;
    print_baselines(out, plan)?;
    print_placements(out, plan)?;
    let search = plan.search_notes.iter().filter(|_| detail == Detail::All);
    plan.warnings.iter().chain(search).try_for_each(|warning| writeln!(out, "{}", hanging("note: ", warning)))
}

fn print_layers(out: &mut impl Write, plan: &Plan, all: bool) -> io::Result<()> {
    // A tied weight is stored as its layer uses it. An untied one deserves a column.
    let weights = |stored: &str| if plan.space.untied { format!(" {stored:<12}") } else { String::new() };
    let heading = weights("weights");
    // 80 columns in all.
    let (name_width, config_width) = if plan.space.untied { (26, 14) } else { (28, 25) };
    writeln!(
        out,
        "{:<name_width$} {:<config_width$}{heading} {:>11} {:>12}",
        "layer", "config", "compute", "communicate"
    )?;
    let mut skipped = 0;
    let lines = if all { plan.layers.iter().map(Line::of).collect() } else { repeated(&plan.layers) };
    for line in &lines {
        let small = line.comm + line.compute < plan.simulated.step_seconds * 0.002;
        if !all && small {
            skipped += line.count;
            continue;
        }
        let times = if line.count > 1 { format!(" ({}x)", line.count) } else { String::new() };
        let name = shortened(&line.name, name_width.saturating_sub(times.len())) + &times;
        writeln!(
            out,
            "{name:<name_width$} {:<config_width$}{} {:>11} {:>12}",
            shortened(line.config, config_width),
            weights(&shortened(line.weights, 12)),
            show_seconds(line.compute),
            show_seconds(line.comm)
        )?;
    }
    if skipped > 0 && skipped < plan.layers.len() {
        writeln!(out, "({skipped} layers below 0.2% of the step are hidden; -v shows them)")?;
    }
    writeln!(out)
}

/// Prints one labelled fact; long ones go on in the next line.
fn fact(out: &mut impl Write, label: &str, text: &str) -> io::Result<()> {
    writeln!(out, "{}", hanging(&format!("  {label:<22} "), text))
}

/// The share of the step from which waiting is worth a line: the others add up but for rounding.
const WAITING: f64 = 0.005;

/// The step's times, memory and traffic.
fn print_step(out: &mut impl Write, plan: &Plan, detail: Detail) -> io::Result<()> {
    let times = &plan.simulated;
    wrapped(&headline(plan), WIDTH).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    fact(out, "step", &show_seconds(times.step_seconds))?;
    fact(out, "computing", &show_seconds(times.compute_seconds))?;
    fact(out, "exposed communication", &show_seconds(times.exposed_comm_seconds))?;
    // Devices of a pipeline also wait for each other, and eager engines for their host.
    let waiting = times.step_seconds - times.compute_seconds - times.exposed_comm_seconds;
    if waiting > times.step_seconds * WAITING {
        let whom = match (&plan.pipeline, plan.devices) {
            (Some(_), _) => "other stages or devices",
            (None, 1) => "the host, which launches kernels",
            (None, _) => "other devices or the host",
        };
        fact(out, "waiting", &format!("{} for {whom}", show_seconds(waiting)))?;
    }
    if detail == Detail::All {
        fact(out, "without overlap", &show_seconds(plan.objective as f64 / 1e12))?;
    }
    print_throughput(out, plan)?;
    let verdict = if plan.fits { "" } else { ": does not fit" };
    fact(out, "memory", &format!("{} per device at most{verdict}", held(plan)))?;
    if plan.micro_batches > 1 {
        fact(out, "micro-batches", &format!("{} per step", plan.micro_batches))?;
    }
    if !plan.recompute.ops.is_empty() {
        let count = plan.recompute.ops.len();
        fact(out, "recomputed", &format!("{count} ops ({})", plan.recompute.policy))?;
    }
    print_degrees(out, plan)?;
    fact(out, "traffic", &format!("{} per step over all devices", show_bytes(plan.traffic_bytes)))?;
    plan.pipeline.as_ref().map_or(Ok(()), |pipeline| print_pipeline(out, plan, pipeline))
}

/// The degrees of a uniform plan.
fn print_degrees(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let Some(own) = &plan.uniform else { return Ok(()) };
    let further = [("cp", own.cp), ("ep", own.ep)].into_iter().filter(|(_, degree)| *degree > 1);
    let further: String = further.map(|(key, degree)| format!(" {key}={degree}")).collect();
    let sp = if own.sp { ", sequence parallel" } else { "" };
    let text = format!(
        "tp={} pp={} dp={}{further} zero={}, micro-batch {}{sp}, recompute {}",
        own.tp, own.pp, own.dp, own.zero, own.mbs, own.recompute
    );
    fact(out, "degrees", &text)
}

/// The stages of a pipeline.
fn print_pipeline(out: &mut impl Write, plan: &Plan, pipeline: &PlanPipeline) -> io::Result<()> {
    let (stages, schedule, count) = (pipeline.stages.len(), &pipeline.schedule, plan.micro_batches);
    let text = format!(
        "{stages} stages, {schedule}, {count} micro-batches; devices run no pass for {:.1}% of the step",
        100.0 * pipeline.bubble
    );
    fact(out, "pipeline", &text)?;
    if pipeline.chunks > 1 {
        return print_groups(out, pipeline);
    }
    for (at, stage) in pipeline.stages.iter().enumerate() {
        // Copies of weights for all micro-batches are no layers of the model.
        let layers: Vec<&String> = stage.layers.iter().filter(|name| !name.ends_with(".held")).collect();
        let ends = match &layers[..] {
            [] => "no layers".to_string(),
            [one] => one.to_string(),
            [first, .., last] => format!("{first} … {last}"),
        };
        let layers = layers.len();
        let text = format!(
            "group {} ({} devices): {layers} layers, {ends}; {} of work, {}",
            stage.group,
            stage.devices,
            show_seconds(stage.seconds),
            show_bytes(stage.peak_memory_bytes)
        );
        fact(out, &format!("  stage {at}"), &text)?;
    }
    Ok(())
}

/// The groups of devices of a pipeline with several stages each.
fn print_groups(out: &mut impl Write, pipeline: &PlanPipeline) -> io::Result<()> {
    let groups: BTreeSet<u32> = pipeline.stages.iter().map(|stage| stage.group).collect();
    for group in groups {
        let own: Vec<(usize, &PlanStage)> =
            pipeline.stages.iter().enumerate().filter(|(_, stage)| stage.group == group).collect();
        let numbers: Vec<String> = own.iter().map(|(at, _)| at.to_string()).collect();
        let all = own.iter().flat_map(|(_, stage)| &stage.layers);
        let layers = all.filter(|name| !name.ends_with(".held")).count();
        let seconds: f64 = own.iter().map(|(_, stage)| stage.seconds).sum();
        let bytes = own.iter().map(|(_, stage)| stage.peak_memory_bytes).max().unwrap_or(0);
        let text = format!(
            "{} devices, stages {}: {layers} layers; {} of work, {}",
            own[0].1.devices,
            numbers.join(", "),
            show_seconds(seconds),
            show_bytes(bytes)
        );
        fact(out, &format!("  group {group}"), &text)?;
    }
    Ok(())
}

/// Memory in use, and the limit where there is one.
fn held(plan: &Plan) -> String {
    let of = plan.memory_limit_bytes.map_or_else(String::new, |limit| format!(" of {}", show_bytes(limit)));
    format!("{}{of}", show_bytes(plan.peak_memory_bytes))
}

/// Rates in the user's units, and their cost where a price is given.
fn print_throughput(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let rates = &plan.throughput;
    if let (Some(all), Some(each)) = (rates.tokens_per_second, rates.tokens_per_second_per_device) {
        let text = format!("{} tokens/s, {} per device", grouped(all), grouped(each));
        fact(out, "throughput", &text)?;
    } else if let Some(all) = rates.samples_per_second {
        let each = all / f64::from(plan.devices.max(1));
        fact(out, "throughput", &format!("{} samples/s, {} per device", grouped(all), grouped(each)))?;
    }
    if let Some(mfu) = rates.mfu {
        fact(out, "MFU", &format!("{:.1}% of the peak of matrix products", mfu * 100.0))?;
    }
    if let Some(cost) = rates.cost_per_million_tokens {
        fact(out, "cost", &format!("{cost:.4} per million tokens"))?;
    }
    if let Some(cost) = rates.cost_per_million_samples {
        fact(out, "cost", &format!("{cost:.4} per million samples"))?;
    }
    Ok(())
}

/// A number as people read it: `12,345`, or with decimals below 100 where it has any.
pub fn grouped(rate: f64) -> String {
    if rate < 100.0 && rate.fract() != 0.0 {
        return format!("{rate:.2}");
    }
    let digits = format!("{rate:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The plan's answer in one sentence.
pub fn headline(plan: &Plan) -> String {
    // One device has no axes to speak of, and all baselines are the same step.
    let alone = plan.parallelism.words.is_empty();
    let recipe = plan.parallelism.recipe.as_ref().map_or(String::new(), |name| format!("{name}: "));
    let mut facts = Vec::new();
    let rates = &plan.throughput;
    match (rates.tokens_per_second_per_device, rates.samples_per_second) {
        (Some(each), _) => facts.push(format!("{} tokens/s per device", grouped(each))),
        (None, Some(all)) => facts.push(format!("{} samples/s", grouped(all))),
        (None, None) => facts.push(format!("{} per step", show_seconds(plan.simulated.step_seconds))),
    }
    let others = plan
        .baselines
        .iter()
        .filter(|(name, baseline)| baseline.fits && plan.parallelism.recipe.as_ref() != Some(*name))
        // The best uniform plan is no comparison for itself.
        .filter(|(name, own)| *name != EXPERT || own.step_seconds != plan.simulated.step_seconds)
        .filter(|_| !alone);
    // Of equal ones a recipe says more.
    let order = |(name, own): &(&String, &BaselineCost)| (own.step_seconds, *name == EXPERT);
    if let Some((name, best)) =
        others.min_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(Ordering::Equal))
    {
        let ratio = best.step_seconds / plan.simulated.step_seconds.max(f64::MIN_POSITIVE);
        let ratio = if (ratio - 1.0).abs() < 0.005 {
            "as fast as".to_string()
        } else {
            format!("{ratio:.2}x the speed of")
        };
        let own = (plan.micro_batches, &plan.recompute.policy);
        let variant = best.variant().filter(|_| (best.micro_batches, &best.recompute) != own);
        let variant = variant.map_or(String::new(), |words| format!(" with {words}"));
        let name = if name == EXPERT { "the best uniform plan" } else { name.as_str() };
        facts.push(format!("{ratio} {name}{variant}"));
    }
    facts.push(held(plan) + if plan.fits { "" } else { " (does not fit the device)" });
    if let Some(gap) = plan.overlap.and_then(|bound| bound.gap) {
        facts.push(within(gap));
    }
    let (model, machine, words) = (&plan.model, &plan.machine, &plan.parallelism.words);
    let how = if alone { String::new() } else { format!("{recipe}{words}: ") };
    format!("{model} on {machine}: {how}{}", facts.join(", "))
}

/// A share in percent, rounded up to a tenth.
fn percent_up(share: f64) -> f64 {
    (share * 1000.0).ceil() / 10.0
}

/// How near a step is proved to be to the best one. Rounded up: a proof claims nothing that it does not show.
fn within(gap: f64) -> String {
    if gap <= 0.0 {
        "proved optimal".into()
    } else if gap <= 1.0 {
        format!("proved within {:.1}% of the best step", percent_up(gap))
    } else {
        format!("at most {:.1} times the best step", ((gap + 1.0) * 10.0).ceil() / 10.0)
    }
}

/// The search: its space, its proof and its cost.
fn print_search(out: &mut impl Write, plan: &Plan, detail: Detail) -> io::Result<()> {
    if let Some(moved) = &plan.soybean {
        let cuts: Vec<String> = moved.cuts.iter().map(u64::to_string).collect();
        fact(out, "elements moved", &moved.total_elements.to_string())?;
        fact(out, "elements by cut", &cuts.join(", "))?;
        let proof =
            if moved.proved { "every cut moves the fewest elements" } else { "not every cut is proved" };
        fact(out, "proof", proof)?;
    } else {
        if detail == Detail::All {
            let variables = if plan.space.untied { "ops" } else { "layers" };
            fact(out, "search", &plan.space.description)?;
            let (count, choices) = (plan.space.variables, plan.space.choices);
            fact(out, "search space", &format!("{count} {variables}, {choices} configs"))?;
        }
        if let Some(gap) = plan.overlap.and_then(|bound| bound.gap) {
            let bound = show_seconds(plan.simulated.step_seconds / (1.0 + gap));
            let above = percent_up(gap);
            fact(out, "proof", &format!("no plan's step is below {bound}: this one is {above:.1}% above"))?;
        }
        if detail == Detail::All || plan.overlap.is_none() || plan.proved_optimal {
            fact(out, "proof of the sum", &proof(plan))?;
        }
        if let (Some(coarse), false) =
            (&plan.space.coarse, plan.optimised == Optimised::Simulated || detail != Detail::All)
        {
            let objective = show_seconds(coarse.objective as f64 / 1e12);
            let gap = match coarse.gap {
                Some(0.0) => ", proved optimal there".to_string(),
                Some(gap) => format!(", gap {:.2}%", gap * 100.0),
                None => String::new(),
            };
            fact(out, "before refinement", &format!("{objective} on {}{gap}", coarse.axes))?;
        }
    }
    let held = plan.planning_memory_bytes.filter(|_| detail == Detail::All);
    let memory = held.map_or(String::new(), |bytes| format!(", {} of memory", show_bytes(bytes)));
    fact(out, "planning", &format!("{:.2} s{memory}", plan.search_seconds))
}

/// What is proved of a plan.
fn proof(plan: &Plan) -> String {
    let simulated = plan.optimised == Optimised::Simulated;
    match plan.gap.map(|gap| gap * 100.0) {
        None => "nothing proved".into(),
        Some(gap) if simulated => {
            format!("step shortened by simulation; without overlap, gap {gap:.2}% to the lower bound")
        }
        Some(_) if plan.proved_optimal => "without overlap, no plan in the search space is faster".into(),
        Some(gap) if plan.space.coarse.is_some() => {
            format!("without overlap, at most {gap:.2}% above any plan on any axes")
        }
        Some(gap) => format!("without overlap, gap {gap:.2}% to the lower bound"),
    }
}

fn print_baselines(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    if plan.baselines.is_empty() {
        return Ok(());
    }
    writeln!(out, "{:<13} {:>12} {:>12} {:>12} {:>12}", "baseline", "step", "relative", "traffic", "memory")?;
    for (name, baseline) in &plan.baselines {
        let relative = baseline.step_seconds / plan.simulated.step_seconds.max(f64::MIN_POSITIVE);
        let refusal = (!baseline.fits).then(|| "does not fit".to_string());
        let notes: Vec<String> = baseline.variant().into_iter().chain(refusal).collect();
        let notes = notes.join(", ");
        let row = format!(
            "  {name:<11} {:>12} {:>12} {:>12} {:>12}",
            show_seconds(baseline.step_seconds),
            format!("{relative:.2}x"),
            show_bytes(baseline.traffic_bytes),
            show_bytes(baseline.peak_memory_bytes),
        );
        // A long note stands below its row.
        match row.chars().count() + 2 + notes.chars().count() <= WIDTH {
            _ if notes.is_empty() => writeln!(out, "{row}")?,
            true => writeln!(out, "{row}  {notes}")?,
            false => writeln!(out, "{row}\n{}", hanging("                with ", &notes))?,
        }
    }
    Ok(())
}

/// The plain placements that `place` is compared with.
fn print_placements(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    if plan.placements.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "{:<16} {:>12} {:>15} {:>12} {:>12}",
        "placement", "step", "between devices", "imbalance", "peak memory"
    )?;
    for row in &plan.placements {
        writeln!(
            out,
            "  {:<14} {:>12} {:>15} {:>12} {:>12}",
            row.name,
            show_seconds(row.step_seconds),
            show_bytes(row.cut_bytes),
            format!("{:.2}x", row.imbalance),
            show_bytes(row.peak_memory_bytes)
        )?;
    }
    Ok(())
}

/// `0.0123 s` as people read it.
pub fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_are_rounded_up_and_large_gaps_are_factors() {
        assert_eq!(within(0.0), "proved optimal");
        assert_eq!(within(0.0004), "proved within 0.1% of the best step");
        assert_eq!(within(0.1604), "proved within 16.1% of the best step");
        assert_eq!(within(1.4568), "at most 2.5 times the best step");
    }

    #[test]
    fn layers_of_equal_blocks_share_a_name() {
        for (name, shared) in [
            ("blocks.3.mlp.up", "blocks.*.mlp.up"),
            ("blocks.3.experts.5.up", "blocks.*.experts.*.up"),
            ("layer3.block6.conv1", "layer3.block*.conv1"),
            ("block4.layer12.norm2.mean", "block4.layer*.norm2.mean"),
            ("conv1.grad", "conv1.grad"),
            ("layer1", "layer1"),
            ("unblock3.x", "unblock3.x"),
            ("", ""),
        ] {
            assert_eq!(stem(name), shared);
        }
    }

    #[test]
    fn numbers_are_grouped_and_small_rates_have_decimals() {
        let shown = [0.0, 3.0, 3.25, 99.5, 100.4, 8_030_261_248.0].map(grouped);
        assert_eq!(shown, ["0", "3", "3.25", "99.50", "100", "8,030,261,248"]);
    }
}
