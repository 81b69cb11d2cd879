//! Planning in the background, while Python stays responsive.

use crate::{DoesNotFit, PlanError, planned::Planned};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use shardwright_machine::Bytes;
use shardwright_plan::{Plan, PlanError as Failure, Wish};
use shardwright_request::{
    Ask, Event, Request, Search, open_machine, parse_optimizer, parse_role, parse_seconds, parse_size,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// How often signals are looked for.
const PATIENCE: Duration = Duration::from_millis(100);

/// What is asked for, and what the thread that plans has to tell.
struct Task {
    ask: Ask,
    solver: String,
    search: Search,
    stop: AtomicBool,
    /// Seconds of the search, of the best plan's step and of the bound, as last heard.
    news: Mutex<Option<(f64, Option<f64>, f64)>>,
}

impl Task {
    fn run(&self) -> anyhow::Result<(Request, Plan)> {
        let request = self.ask.open()?;
        let plan = request.plan(&self.solver, &self.search, &self.stop, &|event| {
            if let (Event::Improved(entry), Ok(mut news)) = (event, self.news.lock()) {
                let seconds = |picoseconds: i64| picoseconds as f64 / 1e12;
                *news = Some((entry.elapsed.as_secs_f64(), entry.best.map(seconds), seconds(entry.bound)));
            }
        })?;
        Ok((request, plan))
    }

    /// Looks after the interpreter while the thread works. The first interrupt asks the search for its best, a second
    /// one is an exception.
    fn wait<T>(
        &self,
        py: Python<'_>,
        done: mpsc::Receiver<T>,
        tell: Option<&Py<PyAny>>,
    ) -> PyResult<Option<T>>
    where
        T: Send,
    {
        let done = Mutex::new(done);
        loop {
            let received = py.detach(|| match done.lock() {
                Ok(done) => done.recv_timeout(PATIENCE),
                Err(_) => Err(mpsc::RecvTimeoutError::Disconnected),
            });
            match received {
                Ok(outcome) => return Ok(Some(outcome)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            self.heed(py, py.check_signals())?;
            let news = self.news.lock().ok().and_then(|mut news| news.take());
            if let (Some(tell), Some(news)) = (tell, news) {
                self.heed(py, tell.call1(py, news).map(drop))?;
            }
        }
    }

    /// Lets the first interrupt pass, as a wish for an end.
    fn heed(&self, py: Python<'_>, outcome: PyResult<()>) -> PyResult<()> {
        let Err(error) = outcome else { return Ok(()) };
        let again = self.stop.swap(true, Ordering::Relaxed);
        if error.is_instance_of::<PyKeyboardInterrupt>(py) && !again { Ok(()) } else { Err(error) }
    }
}

fn wrong(reason: impl std::fmt::Display) -> PyErr {
    PlanError::new_err(reason.to_string())
}

fn parsed<T>(texts: &[String], parse: impl Fn(&str) -> Result<T, String>) -> PyResult<Vec<T>> {
    texts.iter().map(|text| parse(text).map_err(wrong)).collect()
}

/// Plans. `model` is a name or a file; with `text`, what to call that StableHLO program.
#[pyfunction]
#[pyo3(signature = (model, *, text, machine, memory, solver, batch, optimizer, costs, untied, fix, roles, opaque, dims,
    loss, inference, time, threads, seed, tell))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn plan(
    py: Python<'_>,
    model: String,
    text: Option<String>,
    machine: String,
    memory: Option<String>,
    solver: String,
    batch: Option<u64>,
    optimizer: &str,
    costs: Option<String>,
    untied: bool,
    fix: Vec<String>,
    roles: Vec<String>,
    opaque: Vec<String>,
    dims: Vec<String>,
    loss: &str,
    inference: bool,
    time: f64,
    threads: usize,
    seed: u64,
    tell: Option<Py<PyAny>>,
) -> PyResult<Planned> {
    let ask = Ask {
        text,
        batch,
        roles: parsed(&roles, parse_role)?,
        opaque,
        dims: parsed(&dims, parse_size)?,
        loss: loss.parse().map_err(wrong)?,
        inference,
        optimizer: parse_optimizer(optimizer).map_err(wrong)?,
        costs,
        untied,
        ..Ask::of(&model, &machine)
    };
    let search = Search {
        memory: memory.as_deref().map(Bytes::parse).transpose().map_err(wrong)?,
        fix: parsed(&fix, Wish::parse)?,
        time: parse_seconds(&time.to_string()).map_err(wrong)?,
        threads,
        seed,
        ..Search::default()
    };
    let task = Arc::new(Task { ask, solver, search, stop: AtomicBool::new(false), news: Mutex::new(None) });
    let (send, done) = mpsc::channel();
    let worker = Arc::clone(&task);
    let thread = std::thread::spawn(move || {
        // Whoever waited may have gone.
        let _ = send.send(worker.run());
    });
    let outcome = task.wait(py, done, tell.as_ref())?;
    let Some(outcome) = outcome else {
        let reason = thread.join().err().and_then(|panic| panic.downcast::<String>().ok());
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        return Err(wrong(format!("planning failed inside; please report this with the model{reason}")));
    };
    match outcome {
        Ok((request, mut plan)) => {
            if task.stop.load(Ordering::Relaxed) {
                plan.warnings.push("the search was interrupted: this is the best that it had found".into());
            }
            Ok(Planned::new(plan, request))
        }
        Err(error) => match error.downcast_ref() {
            Some(Failure::DoesNotFit { .. }) => Err(DoesNotFit::new_err(error.to_string())),
            _ => Err(wrong(format!("{error:#}"))),
        },
    }
}

/// How many devices a machine has.
#[pyfunction]
pub(crate) fn devices(machine: &str) -> PyResult<u32> {
    open_machine(machine).map(|machine| machine.devices()).map_err(|error| wrong(format!("{error:#}")))
}
