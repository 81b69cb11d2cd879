//! From inputs to a plan: the limits of the search, and its listener.

use crate::{
    clock::WallClock,
    inputs::Inputs,
    no_fit::explain,
    opened_plan::OpenedPlan,
    ram::{half_of_free, most_held},
    request::{RecomputeChoice, Request},
    summary::headline,
};
use shardwright_graph::RecomputePolicy;
use shardwright_machine::Bytes;
use shardwright_plan::{Constraints, PlanError};
use shardwright_search::{Control, LogEntry, Progress};
use shardwright_strategies::{
    PlanAnswer, Strategy, StrategyError, Variant, VariantAnswer, VariantError, VariantInputs, find,
    plan_variants, variant_graphs,
};
use std::borrow::Cow;
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

    /// The variants of the step that may be planned, the step as it is first.
    ///
    /// # Errors
    /// Where a policy is asked for that the step or its engine does not take.
    pub fn variants(&self) -> anyhow::Result<Vec<Variant>> {
        let of = |recompute| Variant { recompute, ..Variant::BASE };
        match self.request.recompute {
            RecomputeChoice::Policy(RecomputePolicy::Off) => Ok(vec![Variant::BASE]),
            // Programs of engines are run by their engines, which do not recompute by plan yet.
            RecomputeChoice::Auto if self.spmd => Ok(vec![Variant::BASE]),
            RecomputeChoice::Auto => Ok(RecomputePolicy::ALL.map(of).to_vec()),
            RecomputeChoice::Policy(policy) => {
                let name = policy.name();
                anyhow::ensure!(
                    !self.spmd,
                    "--recompute {name}: a program of an engine keeps its own recomputation; use --recompute off"
                );
                let variant = of(policy).graph(&self.graph)?;
                anyhow::ensure!(
                    variant.ops.len() > self.graph.ops.len(),
                    "--recompute {name}: no backward op of {} reads a result that the policy recomputes; use --recompute off",
                    self.graph.name
                );
                Ok(vec![of(policy)])
            }
        }
    }

    /// Plans with a strategy of this name.
    ///
    /// # Errors
    /// Where no plan can be made; `PlanError::DoesNotFit` where none fits the memory.
    pub fn plan(
        mut self,
        strategy: &str,
        cancel: &AtomicBool,
        listen: &(dyn Fn(Event<'_>) + Sync),
    ) -> anyhow::Result<OpenedPlan> {
        let strategy = find(strategy)?;
        let listener = |progress: &Progress<'_>| listen(Event::Improved(&progress.entry));
        let control = self.control(strategy, cancel).listen(&listener);
        let mut graphs = variant_graphs(&self.graph, &self.variants()?)?;
        let VariantAnswer { variant, answer } = self.request.on_threads(|| {
            listen(Event::Searching);
            let (constraints, costs) = (self.constraints(), self.costs.as_ref());
            let inputs = VariantInputs { machine: &self.machine, costs, untied: self.request.untied };
            let planned = plan_variants(&graphs, inputs, strategy, &constraints, &control);
            planned.map_err(|VariantError { variant, error }| match error {
                // As itself below the message: it decides the exit status.
                StrategyError::Plan(
                    error @ (PlanError::DoesNotFit { limit, .. } | PlanError::NotFound { limit, .. }),
                ) => {
                    let own = &graphs[variant];
                    let planner = inputs.planner(&own.graph);
                    let policy = own.variant.recompute;
                    let message = explain(&self, &planner, policy, &control, &error, Bytes(limit));
                    anyhow::Error::from(error).context(message)
                }
                StrategyError::Plan(error) => anyhow::Error::from(error),
                other => other.into(),
            })
        })??;
        let PlanAnswer { mut plan, assignment, mesh } = answer;
        let chosen = match graphs.swap_remove(variant).graph {
            Cow::Owned(graph) => Some(graph),
            Cow::Borrowed(_) => None,
        };
        drop(graphs);
        self.graph = chosen.unwrap_or(self.graph);
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
