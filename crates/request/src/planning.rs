//! From inputs to a plan: the limits of the search, and its listener.

use crate::{
    clock::WallClock,
    inputs::Inputs,
    no_fit::explain,
    opened_plan::OpenedPlan,
    ram::{half_of_free, most_held},
    request::{MicroBatchChoice, PipelineChoice, RecomputeChoice, RecomputeUnit, Request},
    summary::headline,
};
use anyhow::Context as _;
use shardwright_cost::Engine;
use shardwright_graph::{Phase, RecomputePolicy, micro_batch_counts, printable};
use shardwright_machine::{Bytes, EngineName};
use shardwright_plan::{Constraints, PlanError};
use shardwright_search::{Control, LogEntry, Progress};
use shardwright_strategies::{
    BalancedPipeline, PlanAnswer, Strategy, StrategyError, Variant, VariantAnswer, VariantError,
    VariantInputs, find, plan_variants,
};
use std::borrow::Cow;
use std::num::NonZeroU32;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// About the time that the description of a plan takes per op of the step.
const DESCRIBED_PER_OP: Duration = Duration::from_micros(50);

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
        // The stages of a pipeline are programs of their own, where the engine takes passes from the plan.
        let staged = self.request.pipeline != PipelineChoice::Off && !self.keeps_passes();
        let spmd = self.request.spmd || (self.spmd && !staged);
        Constraints { memory, configs: self.request.fix.clone(), balance, spmd }
    }

    /// The limits of a strategy's search, which stops when `cancel` turns true.
    pub fn control<'c>(&self, strategy: &dyn Strategy, cancel: &'c AtomicBool) -> Control<'c> {
        let Request { time, gap, proposals, ram, seed, threads, .. } = self.request;
        // The plan is described after the search.
        let described = (DESCRIBED_PER_OP * self.graph.ops.len() as u32).min(time / 10);
        Control {
            clock: WallClock::global(),
            start: self.start,
            deadline: self.start.checked_add(time - described),
            cancel: Some(cancel),
            iterations: proposals.filter(|_| strategy.takes_proposals()),
            seed,
            threads,
            gap,
            memory_bytes: ram.map_or_else(half_of_free, |ram| ram.0),
            ..Control::new()
        }
    }

    /// The variants of the step that may be planned: every number of micro-batches with every policy that is asked for.
    ///
    /// # Errors
    /// Where micro-batches or a policy are asked for that the step or its engine does not take.
    pub fn variants(&self) -> anyhow::Result<Vec<Variant>> {
        self.check_recompute_policy()?;
        let (counts, policies) = (self.micro_batch_counts()?, self.policies()?);
        // A program of an engine has the ops already that the engine recomputes.
        let engine = self.machine.slowest().engine.filter(|_| !self.spmd);
        let of = |micro_batches| {
            policies.iter().map(move |&recompute| Variant { micro_batches, recompute, engine })
        };
        let variants: Vec<Variant> = counts.into_iter().flat_map(of).collect();
        // Policies recompute the same ops in any number of micro-batches.
        if let (&[_], Some(variant)) = (&policies[..], variants.first()) {
            let graph = variant.graph(&self.graph)?.graph;
            let (policy, model) = (variant.recompute, &self.graph.name);
            anyhow::ensure!(
                policy == RecomputePolicy::Off || graph.ops.iter().any(|node| node.recomputes.is_some()),
                "--recompute {}: no backward op of {model} reads a result that the policy recomputes; use --recompute off or auto",
                policy.name()
            );
        }
        Ok(variants)
    }

    /// Whether the step has its passes already: a whole program of an engine. Forward passes that an engine runs op by op
    /// (PyTorch's modules) get theirs from the plan.
    pub(crate) fn keeps_passes(&self) -> bool {
        self.spmd && !self.graph.op_by_op
    }

    /// Refuses `--recompute-policy ops` where ops cannot be chosen one by one.
    fn check_recompute_policy(&self) -> anyhow::Result<()> {
        let Request { recompute_policy, recompute, pipeline, .. } = self.request;
        if recompute_policy == RecomputeUnit::Blocks {
            return Ok(());
        }
        if let RecomputeChoice::Policy(policy) = recompute {
            let name = policy.name();
            anyhow::bail!(
                "--recompute-policy ops chooses the ops itself, and --recompute {name} names them; leave one of them out"
            );
        }
        anyhow::ensure!(
            !self.spmd,
            "--recompute-policy ops: a program of an engine keeps its own recomputation; leave the option out"
        );
        anyhow::ensure!(
            pipeline == PipelineChoice::Off,
            "--recompute-policy ops plans steps without a pipeline; leave out --pipeline, or use --recompute-policy blocks"
        );
        let engine = self.machine.slowest().engine;
        let recomputes = engine.and_then(Engine::of).is_some_and(|engine| !engine.recomputes.is_empty());
        anyhow::ensure!(
            !recomputes,
            "--recompute-policy ops: the engine {} chooses what it recomputes; leave out --engine, or use --recompute-policy blocks",
            engine.map_or("", EngineName::name)
        );
        anyhow::ensure!(
            self.graph.ops.iter().any(|node| node.phase == Phase::Backward),
            "--recompute-policy ops: {} has no backward pass, so no op can be recomputed; leave the option out",
            self.graph.name
        );
        Ok(())
    }

    /// The numbers of micro-batches that are asked for.
    fn micro_batch_counts(&self) -> anyhow::Result<Vec<NonZeroU32>> {
        let choice = self.request.micro_batches;
        if choice == MicroBatchChoice::default() {
            return Ok(vec![NonZeroU32::MIN]);
        }
        anyhow::ensure!(
            !self.keeps_passes(),
            "--micro-batches: a program of an engine keeps its own micro-batches; leave the option out. For a function of JAX, \
             shardwright.jax.parallelize(..., micro_batches=N, batch_argnums=(...)) divides the step before it is compiled"
        );
        match choice {
            MicroBatchChoice::Count(micro_batches) => {
                // A number that does not divide the batch is bad input, whatever is recomputed.
                Variant { micro_batches, ..Variant::BASE }.graph(&self.graph)?;
                Ok(vec![micro_batches])
            }
            MicroBatchChoice::Auto => {
                let counts = micro_batch_counts(&self.graph).context("--micro-batches auto")?;
                let counts = counts.into_iter().filter_map(NonZeroU32::new);
                let counts: Vec<NonZeroU32> = counts.filter(|count| self.can_schedule(*count)).collect();
                anyhow::ensure!(
                    !counts.is_empty(),
                    "--micro-batches auto: no divisor of the batch suits --pipeline and --schedule {}",
                    self.request.schedule.name()
                );
                Ok(counts)
            }
        }
    }

    /// Whether the pipeline that is asked for, if there is one, has a schedule for so many micro-batches.
    fn can_schedule(&self, micro_batches: NonZeroU32) -> bool {
        match self.request.pipeline {
            PipelineChoice::Off | PipelineChoice::Auto => true,
            PipelineChoice::Groups(groups) => {
                self.request.schedule.check(groups.get(), micro_batches.get()).is_ok()
            }
        }
    }

    /// The policies of recomputation that are asked for.
    fn policies(&self) -> anyhow::Result<Vec<RecomputePolicy>> {
        match self.request.recompute {
            // Programs of engines are run by their engines, which recompute as the program says.
            RecomputeChoice::Auto if self.keeps_passes() => Ok(vec![RecomputePolicy::Off]),
            RecomputeChoice::Auto => Ok(RecomputePolicy::ALL.to_vec()),
            RecomputeChoice::Policy(policy) => {
                anyhow::ensure!(
                    !self.keeps_passes() || policy == RecomputePolicy::Off,
                    "--recompute {}: a program of an engine keeps its own recomputation; use --recompute off",
                    policy.name()
                );
                Ok(vec![policy])
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
        if let Some(request) = self.request.as_plan.clone() {
            return self.plan_uniform(Some(&request), false, cancel, listen);
        }
        if self.request.uniform {
            return self.plan_uniform(None, false, cancel, listen);
        }
        if self.request.pipeline == PipelineChoice::Auto {
            return self.plan_pipeline(strategy, cancel, listen);
        }
        let inside = find(strategy)?;
        let staged;
        let strategy: &dyn Strategy = match self.request.pipeline {
            PipelineChoice::Off | PipelineChoice::Auto => inside,
            PipelineChoice::Groups(groups) => {
                let schedule = self.request.schedule;
                staged = BalancedPipeline { inside, groups: groups.get(), schedule };
                &staged
            }
        };
        let listener = |progress: &Progress<'_>| listen(Event::Improved(&progress.entry));
        let control = self.control(strategy, cancel).listen(&listener);
        let variants = self.variants()?;
        let VariantAnswer { step, answer } = self.request.on_threads(|| {
            listen(Event::Searching);
            let (constraints, costs) = (self.constraints(), self.costs.as_ref());
            let recompute_ops = self.request.recompute_policy == RecomputeUnit::Ops;
            let untied = self.request.untied;
            let inputs = VariantInputs { machine: &self.machine, costs, untied, recompute_ops };
            let planned = plan_variants(&self.graph, &variants, inputs, strategy, &constraints, &control);
            planned.map_err(|VariantError { step, error }| match (error, step) {
                // As itself below the message: it decides the exit status.
                (
                    StrategyError::Plan(
                        error @ (PlanError::DoesNotFit { limit, .. } | PlanError::NotFound { limit, .. }),
                    ),
                    Some(step),
                ) => {
                    let planner = inputs.planner(&step.graph);
                    let (error, message) =
                        explain(&self, &planner, step.variant, &control, error, Bytes(limit));
                    anyhow::Error::from(error).context(message)
                }
                (StrategyError::Plan(error), _) => anyhow::Error::from(error),
                (other, _) => other.into(),
            })
        })??;
        let PlanAnswer { mut plan, assignment, mesh } = answer;
        if let Some(first) = step.statistics.first() {
            plan.warnings.push(format!(
                "statistics over the batch are those of one micro-batch ({} of them, `{}` first), so results differ from one pass",
                step.statistics.len(),
                printable(first, 60)
            ));
        }
        let chosen = match step.graph {
            Cow::Owned(graph) => Some(graph),
            Cow::Borrowed(_) => None,
        };
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
