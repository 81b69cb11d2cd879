//! `plan`: plans a model on a machine; and the bare command's demonstration.

use crate::commands::report as report_page;
use crate::files::{check_outputs, is_standard, write_atomically};
use crate::interrupt;
use crate::learn::{learn, report};
use crate::lowered_plan::LoweredPlan;
use crate::progress::ProgressLine;
use crate::{Verdict, complain};
use anyhow::Context as _;
use shardwright_plan::PlanError;
use shardwright_request::{Detail, Event, OpenedPlan, Request, hanging, summarise};
use shardwright_search::LogEntry;
use shardwright_strategies::{SoyBeanError, StrategyError, find};
use std::fs::File;
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Finds the fastest way to split a model's training step over a machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    request: Request,
    /// Strategy: auto, exact, optcnn, pase, mcmc, place, soybean, soybean-time, data, model, owt, megatron, zero1, zero2, fsdp, hsdp, ep, megatron-sp
    #[arg(long, default_value = "auto")]
    solver: String,
    /// Learn from a run: a trace of PyTorch's profiler or of JAX's (.json, .json.gz), whose costs are written beside it and
    /// planned with; or the op times that `run --record` wrote, instead of --costs
    #[arg(long, value_name = "RUN")]
    refine: Option<String>,
    /// The plan that ran when --refine's trace was taken. On one device it is known
    #[arg(long, value_name = "PLAN", requires = "refine")]
    ran: Option<String>,
    /// Write the plan to this file; `-` is standard output, and nothing else is printed there
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Write a report to this file: one self-contained HTML page; `-` is standard output, and nothing else is printed there
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Print only the verdict: step, baselines, search, proof and notes
    #[arg(short, long)]
    quiet: bool,
    /// Print every layer
    #[arg(short, long)]
    verbose: bool,
}

impl Args {
    /// Whether the plan or its report goes to standard output.
    fn fills_standard_output(&self) -> bool {
        self.output.iter().chain(&self.report).any(|path| is_standard(path))
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let mut request = args.request.clone();
    check_outputs(args.output.iter().chain(&args.report))?;
    if let Some(run) = &args.refine {
        request.costs = Some(refined(args, &request, run)?);
    }
    let made = match make(&request, &args.solver) {
        Err(error) => return without_plan(error),
        Ok(made) => made,
    };
    let plan = &made.opened.plan;
    if let Some(path) = &args.output {
        let json = plan.to_json()?;
        write_atomically(path, |out| writeln!(out, "{json}"))?;
    }
    if let Some(path) = &args.report {
        report_page::write(path, &made.opened, &made.log)?;
    }
    if args.fills_standard_output() {
        return Ok(Verdict::Done);
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", plan.to_json()?)?;
    } else {
        let detail = match (args.quiet, args.verbose) {
            (true, _) => Detail::Verdict,
            (_, true) => Detail::All,
            _ => Detail::Usual,
        };
        summarise(&mut out, plan, detail)?;
        if let Some(path) = &args.output {
            writeln!(out, "plan written to {}", path.display())?;
        }
        if let Some(path) = &args.report {
            writeln!(out, "report written to {}", path.display())?;
        }
    }
    Ok(Verdict::Done)
}

/// The cost file of a run: the given one, or the one that its trace teaches.
fn refined(args: &Args, request: &Request, run: &str) -> anyhow::Result<String> {
    let path = Path::new(run);
    let mut start = Vec::new();
    let file = File::open(path).with_context(|| format!("cannot read {run}"))?;
    file.take(4096).read_to_end(&mut start).with_context(|| format!("cannot read {run}"))?;
    if !shardwright_trace::is_trace(&start) {
        anyhow::ensure!(args.ran.is_none(), "--ran is for traces; {run} is a cost file");
        anyhow::ensure!(request.costs.is_none(), "{run} is a cost file: leave --costs out");
        return Ok(run.to_string());
    }
    let opened = match &args.ran {
        Some(plan) => OpenedPlan::open(plan)?,
        None => {
            let devices = request.open()?.machine.spec().device_count();
            anyhow::ensure!(
                devices == 1,
                "{run}: a trace of {devices} devices; name the plan that ran: --ran plan.json"
            );
            make(request, "data")?.opened
        }
    };
    let ran = LoweredPlan::new(opened)?;
    let lesson = learn(path, &ran)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.trim_end_matches(".gz").trim_end_matches(".json");
    let costs = path.with_file_name(format!("{stem}.costs.json"));
    write_atomically(&costs, |out| write!(out, "{}", lesson.costs.to_json()))?;
    // Standard output may be a plan.
    let mut out: Box<dyn Write> = match args.json || args.fills_standard_output() {
        true => Box::new(io::stderr()),
        false => Box::new(io::stdout()),
    };
    report(&mut out, path, &lesson.findings)?;
    writeln!(out, "costs written to {}\n", costs.display())?;
    Ok(costs.display().to_string())
}

/// The file of the demonstration's report; the repository ignores it.
const DEMONSTRATION: &str = "shardwright-demo.html";

/// The bare command's demonstration: a recommendation model whose tables are split by one rule and its products by another.
pub fn demonstrate() -> anyhow::Result<Verdict> {
    let mut out = io::stdout().lock();
    writeln!(out, "DLRM, a recommendation model, on a node of eight A100s, 2048 samples per GPU:\n")?;
    let mut request = Request::new("dlrm", "8xa100");
    request.model.batch = Some(16384);
    let made = make(&request, "auto")?;
    summarise(&mut out, &made.opened.plan, Detail::Usual)?;
    let path = Path::new(DEMONSTRATION);
    match report_page::write(path, &made.opened, &made.log) {
        Ok(()) => writeln!(out, "\nThe report is in {}: open it in a browser.", path.display())?,
        // The summary is useful without the report, so a read-only folder is no error.
        Err(error) => writeln!(out, "\nThere is no report: {error:#}.")?,
    }
    let next = "`shardwright plan MODEL --machine NAME --report plan.html`, `shardwright compare MODEL`; `shardwright models` \
                and `shardwright machines` list what is built in.";
    writeln!(out, "{}", hanging("Next: ", next))?;
    Ok(Verdict::Done)
}

/// The verdict on a valid request without a plan, after its message; other errors are passed on.
pub fn without_plan(error: anyhow::Error) -> anyhow::Result<Verdict> {
    let strategy = error.downcast_ref::<StrategyError>();
    let planning = error.downcast_ref::<PlanError>().or(match strategy {
        Some(StrategyError::Plan(inner)) => Some(inner),
        _ => None,
    });
    let verdict = match (planning, strategy) {
        (Some(PlanError::NotFound { .. }), _) => Verdict::NotFound,
        (Some(reason), _) if reason.is_without_answer() => Verdict::CannotBeMet,
        (_, Some(StrategyError::SoyBean(SoyBeanError::Time { .. } | SoyBeanError::Refused { .. }))) => {
            Verdict::CannotBeMet
        }
        _ => return Err(error),
    };
    // A message about the memory repeats the error that it explains.
    let message = error.to_string();
    let repeats = error.chain().skip(1).all(|cause| message.contains(&cause.to_string()));
    if repeats {
        complain(&format_args!("error: {message}"));
    } else {
        complain(&format_args!("error: {error:#}"));
    }
    Ok(verdict)
}

/// A plan with the log of its search.
pub struct PlanWithLog {
    /// The plan with its inputs.
    pub opened: OpenedPlan,
    /// The search's improvements.
    pub log: Vec<LogEntry>,
}

/// Answers a request.
pub fn make(request: &Request, solver: &str) -> anyhow::Result<PlanWithLog> {
    // An unknown name is refused before anything is read.
    find(solver)?;
    // Ctrl-C while the model is read stops the search at its beginning, with a recipe as its answer.
    let stop = interrupt::flag();
    let inputs = request.open()?;
    let line = ProgressLine::new("pricing every choice");
    let log = Mutex::new(Vec::new());
    let opened = inputs.plan(solver, stop, &|event| match event {
        Event::Searching => line.say("searching"),
        Event::Improved(entry) => {
            line.improved(entry);
            log.lock().unwrap_or_else(PoisonError::into_inner).push(entry.clone());
        }
    })?;
    let log = log.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(PlanWithLog { opened, log })
}
