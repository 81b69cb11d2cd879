//! `solve`: solves a cost network.

use crate::files::{check_outputs, is_standard, read_network, write_atomically};
use crate::{Verdict, complain, interrupt};
use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use shardwright_machine::Bytes;
use shardwright_request::{WallClock, half_of_free};
use shardwright_search::registry::{self, SOLVERS};
use shardwright_search::{Clock as _, Control, LogEntry, Network, Outcome, Progress, StopReason, gap};
use shardwright_suggest::unknown;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Solves a cost network. Prints improvements as `# ...` lines, and the choice of every node last.
#[derive(clap::Args)]
pub struct Args {
    /// The network: the contest's JSON, plain or gzip; `-` is standard input
    network: PathBuf,
    /// Stop after this many seconds with the best assignment so far
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    time: Duration,
    /// Number of threads; all cores by default. The result of an iteration does not depend on it
    #[arg(long, default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Solver: see `shardwright solvers`
    #[arg(long, default_value = SOLVERS[0].name)]
    solver: String,
    /// Stop after this many iterations of the solver. Unlike --time, this is repeatable to the bit
    #[arg(long)]
    iterations: Option<u64>,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Memory limit of the solver's tables: `4GiB`; half of the free memory by default
    #[arg(long, value_parser = Bytes::parse)]
    ram: Option<Bytes>,
    /// Also write the choices (with `--json`, the object) to this file; `-` is standard output, and nothing else is printed there
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Print no improvements and no progress
    #[arg(short, long)]
    quiet: bool,
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is not a duration"))
}

impl Args {
    /// Whether lines about the search go to standard output.
    fn prints_improvements(&self) -> bool {
        !self.quiet && !self.json && !self.output.as_deref().is_some_and(is_standard)
    }
}

/// The JSON answer: the contract of the command.
#[derive(Serialize)]
struct Answer<'a> {
    cost: Option<i128>,
    lower_bound: i64,
    gap: Option<f64>,
    proved_optimal: bool,
    feasible: bool,
    peak_usage: Option<i64>,
    usage_limit: Option<i64>,
    seconds: f64,
    choices: Option<&'a [u32]>,
    overflow: Option<i64>,
    proved_infeasible: bool,
    solver: &'a str,
    stop_reason: String,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let entry = registry::find(&args.solver).with_context(|| {
        let known: Vec<_> = SOLVERS.iter().map(|entry| entry.name).collect();
        unknown("solver", &args.solver, &known)
    })?;
    check_outputs(&args.output)?;
    let clock = WallClock::global();
    let start = clock.now();
    let network = read_network(&args.network)?.network;
    let reporter = Reporter::new(args);
    let listener = |progress: &Progress<'_>| reporter.tell(progress);
    let control = Control {
        clock,
        start,
        // The time limit counts from the start of the program: reading the file is part of it.
        deadline: start.checked_add(args.time),
        cancel: Some(reporter.cancel),
        iterations: args.iterations,
        seed: args.seed,
        threads: args.threads.into(),
        memory_bytes: args.ram.map_or_else(half_of_free, |ram| ram.0),
        progress: Some(&listener),
        gap: 0.0,
        enough: None,
    };
    let outcome = entry.solver().solve(&network, &control);
    let elapsed = control.elapsed();
    reporter.finish()?;
    report(args, &network, &outcome, elapsed)
}

/// Prints the result and decides the exit status.
fn report(args: &Args, network: &Network, outcome: &Outcome, elapsed: Duration) -> anyhow::Result<Verdict> {
    let overfull = outcome.least_overflow.as_ref().map(|(_, choice)| choice);
    let choices = outcome.choice.as_ref().or(overfull).map(Vec::as_slice);
    let evaluation = choices.map(|choices| network.evaluate(choices)).transpose()?;
    let feasible = evaluation.as_ref().is_some_and(|evaluation| evaluation.feasible());
    let answer = Answer {
        cost: evaluation.as_ref().map(|evaluation| evaluation.cost),
        lower_bound: outcome.bound,
        gap: outcome.gap(),
        proved_optimal: outcome.proved_optimal(),
        feasible,
        peak_usage: evaluation.as_ref().map(|evaluation| evaluation.peak_usage),
        usage_limit: network.usage_limit(),
        seconds: elapsed.as_secs_f64(),
        choices,
        overflow: evaluation.as_ref().map(|evaluation| evaluation.overflow),
        proved_infeasible: outcome.stop_reason == StopReason::Infeasible,
        solver: &args.solver,
        stop_reason: stop_text(&outcome.stop_reason),
    };
    let text = if args.json {
        serde_json::to_string(&answer)?
    } else {
        choices.map_or_else(String::new, |choices| serde_json::to_string(choices).unwrap_or_default())
    };
    if let Some(path) = args.output.as_deref().filter(|path| !text.is_empty() && !is_standard(path)) {
        write_atomically(path, |out| writeln!(out, "{text}"))?;
    }
    let mut out = io::stdout().lock();
    if args.prints_improvements() {
        let gap = outcome.cost.map_or("no feasible assignment".to_string(), |_| percent(outcome.gap()));
        let bound = outcome.bound;
        writeln!(
            out,
            "# {}: {}; bound {bound}; {gap}; {:.2} s",
            args.solver, answer.stop_reason, answer.seconds
        )?;
    }
    if !text.is_empty() {
        writeln!(out, "{text}")?;
    }
    if feasible {
        return Ok(Verdict::Done);
    }
    complain(&why_not(network, outcome, &answer));
    Ok(Verdict::CannotBeMet)
}

/// Why there is no feasible assignment to show.
fn why_not(network: &Network, outcome: &Outcome, answer: &Answer<'_>) -> String {
    let limit = network.usage_limit().map_or(String::new(), |limit| format!(" {limit}"));
    let least = match (&outcome.least_overflow, answer.peak_usage) {
        (Some((overflow, _)), Some(peak)) => {
            format!("; the least overflow found is {overflow} (peak {peak}, limit{limit})")
        }
        _ => String::new(),
    };
    match &outcome.stop_reason {
        StopReason::Infeasible => format!("infeasible: no assignment keeps the limit (proved){least}"),
        StopReason::Refused(why) => format!("refused: {why}"),
        _ => format!("no feasible assignment found ({}){least}", answer.stop_reason),
    }
}

fn stop_text(reason: &StopReason) -> String {
    match reason {
        StopReason::Optimal => "optimal".to_string(),
        StopReason::Infeasible => "infeasible".to_string(),
        StopReason::Deadline => "time limit".to_string(),
        StopReason::Cancelled => "interrupted".to_string(),
        StopReason::IterationLimit => "iteration limit".to_string(),
        StopReason::Enough => "good enough".to_string(),
        StopReason::Exhausted => "search exhausted".to_string(),
        StopReason::Refused(why) => format!("refused: {why}"),
    }
}

fn percent(gap: Option<f64>) -> String {
    gap.map_or("no gap: nothing is proved yet".to_string(), |gap| format!("gap {:.4}%", gap * 100.0))
}

/// Prints improvements: as lines on standard output, and as a progress line on a terminal.
struct Reporter {
    lines: bool,
    bar: ProgressBar,
    cancel: &'static AtomicBool,
    /// The first failure to write a line; the search is stopped then.
    failure: Mutex<Option<io::Error>>,
}

impl Reporter {
    fn new(args: &Args) -> Self {
        let visible = io::stderr().is_terminal() && !args.quiet;
        let target =
            if visible { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}");
        let bar = ProgressBar::with_draw_target(None, target);
        let bar = if let Ok(style) = style { bar.with_style(style) } else { bar };
        if visible {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        let lines = args.prints_improvements();
        Reporter { lines, bar, cancel: interrupt::flag(), failure: Mutex::new(None) }
    }

    fn tell(&self, progress: &Progress<'_>) {
        let text = describe(&progress.entry);
        self.bar.set_message(text.clone());
        if !self.lines {
            return;
        }
        let seconds = progress.entry.elapsed.as_secs_f64();
        // The progress line is hidden while another line is printed.
        let printed = self
            .bar
            .suspend(|| writeln!(io::stdout().lock(), "# {seconds:.2} s: {text} ({})", progress.source));
        if let Err(error) = printed {
            // The reader has closed the output (`| head`), so the search stops.
            self.cancel.store(true, Ordering::Relaxed);
            if let Ok(mut failure) = self.failure.lock() {
                failure.get_or_insert(error);
            }
        }
    }

    fn finish(self) -> anyhow::Result<()> {
        self.bar.finish_and_clear();
        match self.failure.into_inner() {
            Ok(Some(error)) => Err(error.into()),
            _ => Ok(()),
        }
    }
}

fn describe(entry: &LogEntry) -> String {
    match entry.best {
        None => format!("no assignment yet, bound {}", entry.bound),
        Some(best) => {
            format!("best {best}, bound {}, {}", entry.bound, percent(gap(best, entry.bound)))
        }
    }
}
