//! `run --processes`: worker processes that each run some of the devices, and the parent that starts them.
//!
//! The parent writes the plan into a folder that only the processes know, starts this program once per process, and
//! reads each process's outcomes from its standard output. A process that dies ends the run with an error that names it.
//! The others notice and stop; after a grace period the parent kills them. Processes whose parent dies stop too.

use crate::Verdict;
use crate::files::write_atomically;
use anyhow::{Context, bail};
use shardwright_engine::{
    DeviceOutcome, Fabric, Options, ProcessMap, Sockets, TaskGraph, read_outcomes, run_devices,
    write_outcomes,
};
use shardwright_graph::Graph;
use shardwright_lower::ParallelGraph;
use shardwright_plan::Plan;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How long the other processes may take to stop once one has died.
const GRACE: Duration = Duration::from_secs(5);

/// One of the worker processes: runs its devices and writes their outcomes to standard output.
pub fn work(
    graph: &Graph,
    program: &ParallelGraph,
    options: Options<'_>,
    processes: u32,
    worker: u32,
    meeting: &Path,
) -> anyhow::Result<Verdict> {
    // The parent never writes: the end of the input means that the parent has died.
    let parent_ends = || {
        let _ = std::io::stdin().read(&mut [0; 1]);
        std::process::exit(3);
    };
    Builder::new().spawn(parent_ends).context("cannot start a thread")?;
    let task_graph = TaskGraph::new(program, processes)?;
    let fabric = Fabric::new(task_graph.devices.len(), task_graph.edges.clone());
    let sockets = Sockets::connect(meeting, task_graph.process_map, worker)?;
    let devices = task_graph.process_map.devices_of(worker);
    let outcomes = sockets
        .with_fabric(fabric, |fabric| run_devices(graph, program, &task_graph, fabric, devices, options))??;
    write_outcomes(&mut std::io::stdout().lock(), &outcomes).context("standard output")?;
    Ok(Verdict::Done)
}

/// A worker process, and the threads that read its output.
struct WorkerProcess {
    child: Child,
    result: Option<JoinHandle<std::io::Result<Vec<DeviceOutcome>>>>,
    message: Option<JoinHandle<String>>,
    status: Option<ExitStatus>,
}

/// All worker processes. Those that still run are killed on drop.
struct WorkerProcesses(Vec<WorkerProcess>);

impl Drop for WorkerProcesses {
    fn drop(&mut self) {
        for worker in &mut self.0 {
            // Killing fails where the process has ended already, which is fine.
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }
}

/// Starts all processes and collects the outcomes of their devices.
pub fn start(plan: &Plan, options: Options<'_>, processes: u32) -> anyhow::Result<Vec<DeviceOutcome>> {
    let meeting = tempfile::tempdir().context("a folder for the processes to meet in")?;
    let file = meeting.path().join("plan.json");
    let json = plan.to_json()?;
    write_atomically(&file, |out| out.write_all(json.as_bytes()))?;
    let program = match crate::PROGRAM.get() {
        Some(program) => program.clone(),
        None => vec![std::env::current_exe().context("cannot find this program again")?.into_os_string()],
    };
    let [first, rest @ ..] = &program[..] else {
        bail!("the words that start this program again are missing")
    };
    let mut workers = WorkerProcesses(Vec::new());
    for process in 0..processes {
        let mut command = Command::new(first);
        command.args(rest).arg("run").arg(&file).args(["--steps", &options.steps.to_string()]);
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
        workers.0.push(WorkerProcess { child, result: None, message: None, status: None });
        let worker = &mut workers.0[process as usize];
        let thread = || Builder::new().name(format!("output of process {process}"));
        let starts = || format!("cannot start a thread for the output of process {process}");
        if let Some(out) = stdout {
            worker.result = Some(thread().spawn(move || read_outcomes(out)).with_context(starts)?);
        }
        if let Some(mut err) = stderr {
            let read = move || {
                let mut text = String::new();
                let _ = err.read_to_string(&mut text);
                text
            };
            worker.message = Some(thread().spawn(read).with_context(starts)?);
        }
    }
    let process_map = ProcessMap { devices: plan.devices, processes };
    wait(&mut workers, process_map)?;
    let mut outcomes = Vec::new();
    for (process, worker) in workers.0.iter_mut().enumerate() {
        let result = worker.result.take().and_then(|result| result.join().ok());
        let result = result.with_context(|| format!("process {process} has written no outcomes"))?;
        outcomes.extend(result.with_context(|| format!("the outcomes of process {process}"))?);
    }
    Ok(outcomes)
}

/// Waits for all processes. An error names the first one that failed.
fn wait(workers: &mut WorkerProcesses, process_map: ProcessMap) -> anyhow::Result<()> {
    let mut failed: Option<(u32, ExitStatus, Instant)> = None;
    loop {
        for (process, worker) in (0..).zip(&mut workers.0) {
            if worker.status.is_none() {
                worker.status = worker.child.try_wait()?;
                let bad = worker.status.filter(|status| !status.success());
                if let Some(status) = bad {
                    // A killed process is the cause of the others' failures, even if theirs is noticed first.
                    let killed = status.code().is_none();
                    if failed.is_none_or(|(_, before, _)| killed && before.code().is_some()) {
                        failed = Some((process, status, Instant::now()));
                    }
                }
            }
        }
        let running = workers.0.iter().any(|worker| worker.status.is_none());
        match failed {
            None if !running => return Ok(()),
            Some((process, status, since)) if !running || since.elapsed() > GRACE => {
                let devices = process_map.devices_of(process);
                let message = workers.0[process as usize].message.take().and_then(|m| m.join().ok());
                // Without its standard error the exit status has to do.
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
