//! `run --processes`: the same program several times, each running some of the devices; and the one that starts them.
//!
//! The parent writes the plan into a folder that only the processes know, starts this program once per process, and
//! reads what each has to tell from its standard output. A process that dies ends the run with an error that names it:
//! the others notice and stop by themselves, and are killed if they do not. Processes whose parent goes away stop too.

use crate::Verdict;
use crate::files::write_atomically;
use anyhow::{Context, bail};
use shardwright_engine::{
    DeviceOutcome, Fabric, Options, Placement, Prepared, Sockets, read_outcomes, run_devices, write_outcomes,
};
use shardwright_graph::Graph;
use shardwright_lower::ParallelGraph;
use shardwright_plan::Plan;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the others may take to stop once one has died.
const GRACE: Duration = Duration::from_secs(5);

/// One of the processes: runs its devices and tells about them on standard output.
pub fn work(
    graph: &Graph,
    program: &ParallelGraph,
    options: Options<'_>,
    processes: u32,
    worker: u32,
    meeting: &Path,
) -> anyhow::Result<Verdict> {
    // Nothing ever comes: the end of the input is the end of the parent.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0; 1]);
        std::process::exit(3);
    });
    let prepared = Prepared::new(program, processes)?;
    let fabric = Fabric::new(prepared.devices.len(), prepared.edges.clone());
    let sockets = Sockets::connect(meeting, prepared.placement, worker)?;
    let devices = prepared.placement.of(worker);
    let outcomes = sockets
        .with_fabric(fabric, |fabric| run_devices(graph, program, &prepared, fabric, devices, options))??;
    write_outcomes(&mut std::io::stdout().lock(), &outcomes).context("standard output")?;
    Ok(Verdict::Done)
}

/// A process that was started, and what it says.
struct Started {
    child: Child,
    result: Option<JoinHandle<std::io::Result<Vec<DeviceOutcome>>>>,
    message: Option<JoinHandle<String>>,
    status: Option<ExitStatus>,
}

/// All of them; those that still run are killed when it is dropped, whatever happened.
struct Crew(Vec<Started>);

impl Drop for Crew {
    fn drop(&mut self) {
        for started in &mut self.0 {
            // One that has ended already cannot be killed, which is fine.
            let _ = started.child.kill();
            let _ = started.child.wait();
        }
    }
}

/// Starts all processes and puts together what they tell.
pub fn start(plan: &Plan, options: Options<'_>, processes: u32) -> anyhow::Result<Vec<DeviceOutcome>> {
    let meeting = tempfile::tempdir().context("a folder for the processes to meet in")?;
    let file = meeting.path().join("plan.json");
    write_atomically(&file, |out| out.write_all(plan.to_json().as_bytes()))?;
    let program = std::env::current_exe().context("cannot find this program again")?;
    let mut crew = Crew(Vec::new());
    for process in 0..processes {
        let mut command = Command::new(&program);
        command.arg("run").arg(&file).args(["--steps", &options.steps.to_string()]);
        command.args(["--seed", &options.seed.to_string(), "--processes", &processes.to_string()]);
        command.args(["--worker", &process.to_string()]).arg("--meeting").arg(meeting.path());
        for (device, factor) in options.slow {
            command.arg("--slow").arg(format!("{device}:{factor}"));
        }
        if !options.finals {
            command.arg("--no-verify");
        }
        if options.trace {
            command.args(["--trace", "-"]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start process {process}"))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        crew.0.push(Started {
            child,
            result: stdout.map(|out| std::thread::spawn(move || read_outcomes(out))),
            message: stderr.map(|mut err| {
                std::thread::spawn(move || {
                    let mut text = String::new();
                    let _ = err.read_to_string(&mut text);
                    text
                })
            }),
            status: None,
        });
    }
    let placement = Placement { devices: plan.devices, processes };
    wait(&mut crew, placement)?;
    let mut outcomes = Vec::new();
    for (process, started) in crew.0.iter_mut().enumerate() {
        let result = started.result.take().and_then(|result| result.join().ok());
        let told = result.with_context(|| format!("process {process} told nothing"))?;
        outcomes.extend(told.with_context(|| format!("what process {process} told"))?);
    }
    Ok(outcomes)
}

/// Waits for all processes; the first that fails is named.
fn wait(crew: &mut Crew, placement: Placement) -> anyhow::Result<()> {
    let mut failed: Option<(u32, ExitStatus, Instant)> = None;
    loop {
        for (process, started) in (0..).zip(&mut crew.0) {
            if started.status.is_none() {
                started.status = started.child.try_wait()?;
                let bad = started.status.filter(|status| !status.success());
                if let Some(status) = bad {
                    // One that was killed explains why others gave up, whoever is seen first.
                    let killed = status.code().is_none();
                    if failed.is_none_or(|(_, before, _)| killed && before.code().is_some()) {
                        failed = Some((process, status, Instant::now()));
                    }
                }
            }
        }
        let running = crew.0.iter().any(|started| started.status.is_none());
        match failed {
            None if !running => return Ok(()),
            Some((process, status, since)) if !running || since.elapsed() > GRACE => {
                let devices = placement.of(process);
                let message = crew.0[process as usize].message.take().and_then(|m| m.join().ok());
                let message = message.unwrap_or_default();
                let message = message.trim().trim_start_matches("error: ");
                match status.code() {
                    Some(_) if !message.is_empty() => bail!("{message}"),
                    _ => bail!(
                        "process {process} (devices {} to {}) died: {status}",
                        devices.start,
                        devices.end - 1
                    ),
                }
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
