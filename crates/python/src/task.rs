//! Planning in the background, while Python stays responsive.

use crate::{DoesNotFit, PlanError, handle::PlanHandle};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use shardwright_plan::{Plan, PlanError as Failure};
use shardwright_request::{Event, OpenedPlan, Request, open_machine};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

/// The interval between two checks for signals.
const PATIENCE: Duration = Duration::from_millis(100);

/// Interrupts within this time of the first are part of it.
const ONE_INTERRUPT: Duration = Duration::from_secs(1);

/// A request, and the state that the planning thread shares.
struct Task {
    request: Request,
    solver: String,
    stop: AtomicBool,
    /// When the first interrupt came.
    first: OnceLock<Instant>,
    /// Seconds of the search, of the best plan's step and of the bound, since the last check.
    news: Mutex<Option<(f64, Option<f64>, f64)>>,
}

impl Task {
    fn run(&self) -> anyhow::Result<OpenedPlan> {
        self.request.open()?.plan(&self.solver, &self.stop, &|event| {
            if let (Event::Improved(entry), Ok(mut news)) = (event, self.news.lock()) {
                let seconds = |picoseconds: i64| picoseconds as f64 / 1e12;
                *news = Some((entry.elapsed.as_secs_f64(), entry.best.map(seconds), seconds(entry.bound)));
            }
        })
    }

    /// Serves the interpreter while the thread works. The first interrupt asks the search for its best, a second
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

    /// The first interrupt stops the search. Further ones within a second count as the first; a later one is an error.
    fn heed(&self, py: Python<'_>, outcome: PyResult<()>) -> PyResult<()> {
        let Err(error) = outcome else { return Ok(()) };
        self.stop.store(true, Ordering::Relaxed);
        let late = self.first.get_or_init(Instant::now).elapsed() > ONE_INTERRUPT;
        if error.is_instance_of::<PyKeyboardInterrupt>(py) && !late { Ok(()) } else { Err(error) }
    }
}

fn wrong(reason: impl std::fmt::Display) -> PyErr {
    PlanError::new_err(shardwright_request::printed(&reason.to_string()))
}

/// Plans. `options` are those of `shardwright plan`; with `text`, the model is that StableHLO program or graph.
#[pyfunction]
#[pyo3(signature = (options, *, text, solver, tell))]
pub(crate) fn plan(
    py: Python<'_>,
    options: Vec<String>,
    text: Option<String>,
    solver: String,
    tell: Option<Py<PyAny>>,
) -> PyResult<PlanHandle> {
    let mut request = Request::parse(&options).map_err(wrong)?;
    request.model.text = text;
    let task = Arc::new(Task {
        request,
        solver,
        stop: AtomicBool::new(false),
        first: OnceLock::new(),
        news: Mutex::new(None),
    });
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
        Ok(mut opened) => {
            if task.stop.load(Ordering::Relaxed) {
                opened
                    .plan
                    .warnings
                    .push("the search was interrupted: this is the best that it had found".into());
            }
            Ok(PlanHandle::new(opened))
        }
        Err(error) => match error.downcast_ref() {
            Some(Failure::DoesNotFit { .. } | Failure::OverLimit { .. }) => {
                Err(DoesNotFit::new_err(error.to_string()))
            }
            _ => Err(wrong(format!("{error:#}"))),
        },
    }
}

/// Opens a plan file's text, with the model and the machine that it was made for.
#[pyfunction]
pub(crate) fn load(py: Python<'_>, json: &str) -> PyResult<PlanHandle> {
    let open = || -> anyhow::Result<OpenedPlan> {
        let plan = Plan::from_json(json.as_bytes()).map_err(|reason| anyhow::anyhow!("{reason}"))?;
        OpenedPlan::of(plan, &Request::of_model("plan.json"))
    };
    py.detach(open).map(PlanHandle::new).map_err(|error| wrong(format!("{error:#}")))
}

/// How many devices a machine has.
#[pyfunction]
pub(crate) fn devices(machine: &str) -> PyResult<u32> {
    open_machine(machine).map(|machine| machine.devices()).map_err(|error| wrong(format!("{error:#}")))
}

/// The names and sizes of a machine's mesh axes, outermost first.
#[pyfunction]
pub(crate) fn axes(machine: &str) -> PyResult<Vec<(String, u32)>> {
    let machine = open_machine(machine).map_err(|error| wrong(format!("{error:#}")))?;
    Ok(machine.mesh().axes().iter().map(|axis| (axis.name.clone(), axis.size)).collect())
}
