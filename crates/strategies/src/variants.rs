//! Variants of a step: the same model with other micro-batches and other ops recomputed. Each variant is an ordinary graph
//! with a search of its own; the shortest simulated step wins.
//!
//! The first variant is the step as it is. The others are searched where it does not fit the memory limit, or where the
//! limit binds: its plan takes more than [`BINDING`] of the limit. A variant whose computing alone takes longer than the
//! best step is ruled out without a search. The reported lower bound is the least over all variants that were
//! searched, so it holds for all of them.

use crate::{
    Planner, Strategy,
    describe::{PlanAnswer, plan},
    error::StrategyError,
};
use shardwright_cost::CostFile;
use shardwright_graph::{Graph, RecomputePolicy, RematError, recomputed_ops, remat};
use shardwright_machine::Machine;
use shardwright_plan::{Constraints, Plan, PlanError, step_lower_bound};
use shardwright_search::{Control, gap};
use std::borrow::Cow;
use std::num::NonZeroU32;

/// The share of the memory limit above which a plan counts as limited by it, in percent.
const BINDING: u64 = 75;

/// The choices that make a step's graph out of the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Equal passes over parts of the batch before one update.
    pub micro_batches: NonZeroU32,
    /// The forward ops that are recomputed.
    pub recompute: RecomputePolicy,
}

impl Variant {
    /// The step as it is.
    pub const BASE: Self = Self { micro_batches: NonZeroU32::MIN, recompute: RecomputePolicy::Off };

    /// The variant's graph; the model's own where nothing changes.
    ///
    /// # Errors
    /// Where the ops cannot be recomputed.
    pub fn graph(self, base: &Graph) -> Result<Cow<'_, Graph>, RematError> {
        let ops = self.recompute.ops(base);
        if ops.is_empty() {
            return Ok(Cow::Borrowed(base));
        }
        remat(base, &ops).map(Cow::Owned)
    }
}

/// A variant with its graph.
pub struct VariantGraph<'g> {
    /// The choices.
    pub variant: Variant,
    /// The step.
    pub graph: Cow<'g, Graph>,
}

/// The graphs of all variants that differ from each other, in the order given.
///
/// # Errors
/// Where the ops of a variant cannot be recomputed.
pub fn variant_graphs<'g>(
    base: &'g Graph,
    variants: &[Variant],
) -> Result<Vec<VariantGraph<'g>>, RematError> {
    let mut graphs: Vec<VariantGraph<'g>> = Vec::new();
    for &variant in variants {
        let graph = variant.graph(base)?;
        let same = |known: &VariantGraph<'_>| {
            known.variant.micro_batches == variant.micro_batches
                && recomputed_ops(&known.graph) == recomputed_ops(&graph)
        };
        if !graphs.iter().any(same) {
            graphs.push(VariantGraph { variant, graph });
        }
    }
    Ok(graphs)
}

/// The best variant's plan.
pub struct VariantAnswer {
    /// The position of the variant.
    pub variant: usize,
    /// Its plan.
    pub answer: PlanAnswer,
}

/// Why no variant has a plan: the error of the variant that keeps least, or of one for which that is not proved.
pub struct VariantError {
    /// The position of the variant.
    pub variant: usize,
    /// Its error.
    pub error: StrategyError,
}

/// The parts of a planner that all variants share.
#[derive(Clone, Copy)]
pub struct VariantInputs<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// Measured operator costs.
    pub costs: Option<&'a CostFile>,
    /// Whether every op chooses for itself.
    pub untied: bool,
}

impl<'a> VariantInputs<'a> {
    /// The planner of a variant.
    pub fn planner(&self, graph: &'a Graph) -> Planner<'a> {
        Planner::new(graph, self.machine, self.costs, self.untied)
    }
}

/// Plans the variants and returns the one with the shortest simulated step.
///
/// # Errors
/// Where no variant has a plan, or one cannot be priced.
pub fn plan_variants<'a>(
    graphs: &'a [VariantGraph<'_>],
    inputs: VariantInputs<'a>,
    strategy: &dyn Strategy,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<VariantAnswer, VariantError> {
    let mut race =
        Race { best: None, failure: None, bounds: Vec::new(), overlaps: Vec::new(), notes: Vec::new() };
    for (at, own) in graphs.iter().enumerate() {
        let fail = |error: StrategyError| VariantError { variant: at, error };
        if race.is_decided(constraints) || (race.best.is_some() && control.is_over()) {
            break;
        }
        let planner = inputs.planner(&own.graph);
        let left = (graphs.len() - at) as u32;
        let mut own_control = control.clone();
        if left > 1 && !fits_by_recipe(&planner, constraints, control).map_err(fail)? {
            own_control = control.share(left);
        }
        let computing = match at {
            0 => None,
            _ => Some(computing_bound(&planner, constraints).map_err(fail)?),
        };
        if race.rules_out(own.variant, computing) {
            continue;
        }
        match plan(&planner, strategy, constraints, &own_control) {
            Ok(answer) => race.add(at, own.variant, answer),
            Err(StrategyError::Plan(error)) if error.is_without_answer() => {
                // What was not found may exist: only its computing bounds it.
                let bound =
                    computing.map_or_else(|| computing_bound(&planner, constraints), Ok).map_err(fail)?;
                race.failed(at, error, bound);
            }
            Err(error) => return Err(fail(error)),
        }
    }
    race.finish(graphs)
}

/// Whether some recipe keeps the constraints: then a search has an answer from the beginning.
fn fits_by_recipe(
    planner: &Planner<'_>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<bool, StrategyError> {
    Ok(constraints.memory.is_none() || planner.recipes(control)?.iter().any(|own| own.keeps(constraints)))
}

/// Picoseconds of computing that no step of a planner's graph avoids, with overlap or without.
fn computing_bound(planner: &Planner<'_>, constraints: &Constraints) -> Result<i64, StrategyError> {
    Ok(step_lower_bound(&*planner.prime()?, constraints.spmd)?)
}

/// The answers so far.
struct Race {
    best: Option<(usize, PlanAnswer)>,
    failure: Option<(usize, PlanError)>,
    /// Lower bounds of the variants that were searched.
    bounds: Vec<i64>,
    /// Their bounds on the step with overlap, in seconds.
    overlaps: Vec<f64>,
    notes: Vec<String>,
}

impl Race {
    /// Whether the best plan is not limited by memory, so that no recomputation makes it faster.
    fn is_decided(&self, constraints: &Constraints) -> bool {
        self.best.as_ref().is_some_and(|(_, answer)| {
            let held = answer.plan.peak_memory_bytes;
            constraints.memory.is_none_or(|limit| held.saturating_mul(100) <= limit.0.saturating_mul(BINDING))
        })
    }

    /// Whether a variant's computing alone takes longer than the best step.
    fn rules_out(&mut self, variant: Variant, computing: Option<i64>) -> bool {
        let (Some(bound), Some((_, best))) = (computing, &self.best) else { return false };
        let seconds = bound as f64 / 1e12;
        let longer = seconds >= best.plan.simulated.step_seconds;
        if longer {
            self.notes.push(format!(
                "--recompute {} was not searched: its computing alone takes {seconds:.4} s, no less than this step",
                variant.recompute.name()
            ));
        }
        longer
    }

    fn add(&mut self, at: usize, variant: Variant, mut answer: PlanAnswer) {
        answer.plan.recompute.policy = variant.recompute.name().into();
        self.bounds.push(answer.plan.lower_bound);
        self.overlaps.extend(answer.plan.overlap.map(|bound| bound.lower_bound_seconds));
        let step = |plan: &Plan| plan.simulated.step_seconds;
        if self.best.as_ref().is_none_or(|(_, best)| step(&answer.plan) < step(&best.plan)) {
            self.best = Some((at, answer));
        }
    }

    fn failed(&mut self, at: usize, error: PlanError, bound: i64) {
        let is_proof = |error: &PlanError| matches!(error, PlanError::DoesNotFit { .. });
        let proved = is_proof(&error);
        // The proof that nothing fits is of the searched space; the bound with overlap is of all plans.
        self.overlaps.push(bound as f64 / 1e12);
        if !proved {
            self.bounds.push(bound);
        }
        // Where one variant may have a plan, the refusal must not sound like a proof.
        if !proved || self.failure.as_ref().is_none_or(|(_, known)| is_proof(known)) {
            self.failure = Some((at, error));
        }
    }

    fn finish(self, graphs: &[VariantGraph<'_>]) -> Result<VariantAnswer, VariantError> {
        let Some((variant, mut answer)) = self.best else {
            let (variant, error) = self.failure.unwrap_or_else(|| {
                let reason = "there are no variants of the step to plan".into();
                (0, PlanError::NoPlan { solver: "variants".into(), reason })
            });
            return Err(VariantError { variant, error: error.into() });
        };
        let plan = &mut answer.plan;
        let least = self.bounds.iter().copied().min().unwrap_or(plan.lower_bound);
        if least < plan.lower_bound {
            plan.lower_bound = least;
            plan.gap = gap(plan.objective, least);
            plan.proved_optimal = plan.proved_optimal && plan.objective <= least;
        }
        let shortest = self.overlaps.iter().copied().fold(f64::INFINITY, f64::min);
        if let Some(own) = plan.overlap.as_mut().filter(|own| shortest < own.lower_bound_seconds) {
            own.lower_bound_seconds = shortest;
            own.gap = (shortest > 0.0).then(|| plan.simulated.step_seconds / shortest - 1.0);
        }
        if let Some((at, _)) = self.failure.filter(|(at, _)| *at < variant) {
            plan.warnings.push(format!(
                "no plan with --recompute {} was found that keeps the memory limit, so ops are recomputed",
                graphs[at].variant.recompute.name()
            ));
        }
        plan.warnings.extend(self.notes);
        Ok(VariantAnswer { variant, answer })
    }
}
