//! From inputs to a plan: the limits of the search, and its listener.

use crate::{
    clock::WallClock,
    inputs::Inputs,
    no_fit::explain,
    opened_plan::OpenedPlan,
    ram::{half_of_free, most_held},
    request::Request,
    summary::headline,
};
use shardwright_machine::Bytes;
use shardwright_plan::{Constraints, PlanError};
use shardwright_search::{Control, LogEntry, Progress};
use shardwright_strategies::{PlanAnswer, Strategy, StrategyError, find, plan};
use std::sync::atomic::AtomicBool;

/// News of a search.
#[derive(Clone, Copy, Debug)]
pub enum Event<'e> {
    /// The search has begun.
    Searching,
    /// A better plan or a better bound.
    Improved(&'e LogEntry),
}

impl Request {
    /// Runs `work` on as many threads as the request allows.
    ///
    /// # Errors
    /// Where threads cannot be started.
    pub fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build()?;
        Ok(pool.install(work))
    }
}

impl Inputs {
    /// The constraints of a plan.
    pub fn constraints(&self) -> Constraints {
        let memory = self.request.memory.on(&self.machine);
        let balance = self.request.balance;
        let spmd = self.request.spmd || self.spmd;
        Constraints { memory, configs: self.request.fix.clone(), balance, spmd }
    }

    /// The limits of a strategy's search, which stops when `cancel` turns true.
    pub fn control<'c>(&self, strategy: &dyn Strategy, cancel: &'c AtomicBool) -> Control<'c> {
        let Request { time, proposals, ram, seed, threads, .. } = self.request;
        Control {
            clock: WallClock::global(),
            start: self.start,
            deadline: self.start.checked_add(time),
            cancel: Some(cancel),
            iterations: proposals.filter(|_| strategy.takes_proposals()),
            seed,
            threads,
            memory_bytes: ram.map_or_else(half_of_free, |ram| ram.0),
            ..Control::new()
        }
    }

    /// Plans with a strategy of this name.
    ///
    /// # Errors
    /// Where no plan can be made; `PlanError::DoesNotFit` where none fits the memory.
    pub fn plan(
        self,
        strategy: &str,
        cancel: &AtomicBool,
        listen: &(dyn Fn(Event<'_>) + Sync),
    ) -> anyhow::Result<OpenedPlan> {
        let strategy = find(strategy)?;
        let listener = |progress: &Progress<'_>| listen(Event::Improved(&progress.entry));
        let control = self.control(strategy, cancel).listen(&listener);
        let PlanAnswer { mut plan, assignment, mesh } = self.request.on_threads(|| {
            listen(Event::Searching);
            let (planner, constraints) = (self.planner(), self.constraints());
            plan(&planner, strategy, &constraints, &control).map_err(|error| match error {
                // As itself below the message: it decides the exit status.
                StrategyError::Plan(
                    error @ (PlanError::DoesNotFit { limit, .. } | PlanError::NotFound { limit, .. }),
                ) => {
                    let message = explain(&self, &planner, &control, &error, Bytes(limit));
                    anyhow::Error::from(error).context(message)
                }
                StrategyError::Plan(error) => anyhow::Error::from(error),
                other => other.into(),
            })
        })??;
        plan.planning_memory_bytes = most_held();
        plan.search_seconds = control.elapsed().as_secs_f64();
        if let Some(price) = self.request.price {
            plan.throughput = plan.throughput.priced(price, plan.devices);
        }
        plan.summary = headline(&plan);
        plan.request = Some(serde_json::to_value(&self.request)?);
        plan.warnings.extend(self.notes.iter().cloned());
        Ok(OpenedPlan { inputs: self, plan, mesh, assignment })
    }
}
