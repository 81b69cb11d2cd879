//! From a request to a plan: the limits of the search, and who is told how it goes.

use crate::{
    ask::Request,
    ram::{half_of_free, most_held},
};
use shardwright_machine::Bytes;
use shardwright_plan::{Demands, Plan, Wish, strategy::Strategy};
use shardwright_search::{Control, LogEntry, Progress};
use shardwright_sim::{MCMC, PLACE, SimError, find, plan};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What the plan has to keep, and what the search may take.
#[derive(Clone, Debug)]
pub struct Search {
    /// The most that one device may hold at once.
    pub memory: Option<Bytes>,
    /// Configs that are given.
    pub fix: Vec<Wish>,
    /// Stop with the best found after this long.
    pub time: Duration,
    /// For `mcmc` and `place`: end every chain after so many proposals.
    pub proposals: Option<u64>,
    /// For `place`: by how much a device may have more than its share of the work.
    pub balance: Option<f64>,
    /// The most of this computer's memory that tables may take; none: half of what is free.
    pub ram: Option<Bytes>,
    /// Every device has to run every op, whatever the model; see [`Request::spmd`].
    pub spmd: bool,
    /// How many threads; zero: all cores.
    pub threads: usize,
    /// Seed of all randomness.
    pub seed: u64,
}

impl Default for Search {
    fn default() -> Self {
        Self {
            memory: None,
            fix: Vec::new(),
            time: Duration::from_secs(60),
            proposals: None,
            balance: None,
            ram: None,
            spmd: false,
            threads: 0,
            seed: 0,
        }
    }
}

/// What there is to tell while a plan is made.
#[derive(Clone, Copy, Debug)]
pub enum Event<'e> {
    /// All choices are priced; now they are searched.
    Searching,
    /// A better plan or a better bound.
    Improved(&'e LogEntry),
}

impl Search {
    /// What the plan of a request has to keep.
    pub fn demands(&self, request: &Request) -> Demands {
        let spmd = self.spmd || request.spmd;
        Demands { memory: self.memory, wishes: self.fix.clone(), balance: self.balance, spmd }
    }

    /// Limits of a strategy's search; it stops when `cancel` turns true.
    pub fn control<'c>(&self, request: &Request, strategy: &Strategy, cancel: &'c AtomicBool) -> Control<'c> {
        Control {
            deadline: request.start.checked_add(self.time),
            cancel: Some(cancel),
            iterations: self.proposals.filter(|_| [MCMC.name, PLACE.name].contains(&strategy.name)),
            seed: self.seed,
            threads: self.threads,
            memory_bytes: self.ram.map_or_else(half_of_free, |ram| ram.0),
            start: request.start,
            ..Control::new()
        }
    }

    /// Runs `work` on as many threads as were asked for.
    ///
    /// # Errors
    /// Where threads cannot be started.
    pub fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build()?;
        Ok(pool.install(work))
    }
}

impl Request {
    /// Plans with a strategy of this name.
    ///
    /// # Errors
    /// Where no plan can be made; `PlanError::DoesNotFit` where none fits the memory.
    pub fn plan(
        &self,
        solver: &str,
        search: &Search,
        cancel: &AtomicBool,
        tell: &(dyn Fn(Event<'_>) + Sync),
    ) -> anyhow::Result<Plan> {
        let strategy = find(solver)?;
        let listener = |progress: &Progress<'_>| tell(Event::Improved(&progress.entry));
        let control = search.control(self, strategy, cancel).listen(&listener);
        search.on_threads(|| {
            let problem = self.problem_of(strategy, &control)?;
            tell(Event::Searching);
            let mut plan =
                plan(&problem, strategy, &search.demands(self), &control).map_err(|error| match error {
                    // As itself: it decides the exit status.
                    SimError::Plan(error) => error.into(),
                    other => anyhow::Error::from(other),
                })?;
            plan.planning_memory_bytes = most_held();
            plan.search_seconds = self.start.elapsed().as_secs_f64();
            plan.request = Some(self.asked.clone());
            plan.warnings.extend(self.notes.iter().cloned());
            Ok(plan)
        })?
    }
}
