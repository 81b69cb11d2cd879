//! A lower bound on the objective that holds on the machine's prime axes, communication included.
//!
//! A problem on merged axes is solved exactly, but its bound does not cover finer axes, and the prime axes of a large machine
//! have too many configs for tables. This bound needs no table over configs:
//!
//! - Configs count as equal that differ only in the order of interchangeable axes. Reshards between their layouts are bounded
//!   by the paths between [patterns](shardwright_cost::PatternResharder).
//! - Configs are put into *groups*. A group's cost is the least of its configs, and the cost between two groups is the
//!   least between any two of their layouts. So the network over groups has a lower bound of the network over configs.
//! - [`messages`] bound the network over groups, and say by how much the bound rises where a group is chosen: its slack. Groups of an assignment that
//!   follows the messages are divided, or else those of least slack ([`refinement`]). Every round's bound is valid. Configs that no good
//!   assignment comes near stay together in large groups.
//! - Where messages do not raise the bound any more, a small network over groups is solved exactly.
//! - A memory limit has prices ([`held_memory`]). Then the bound holds for the assignments within the limit.
//! - Groups that no assignment near enough to the target uses are removed: those whose slack leads beyond. Then the bound holds for the
//!   other assignments, and for all of them up to that cost.
//! - A class of variables with too many configs computes as little as it can, and its transfers cost nothing.
//!
//! The bound holds for every assignment of the problem's variables on the prime axes. Configs on merged axes are configs on prime axes
//! too, except that ops which follow a layer's forward op may then follow it otherwise ([`is_on_prime_axes`]).

mod build;
mod features;
mod held_memory;
mod listing;
mod messages;
mod refinement;
mod relaxation;

use crate::{context::Context, error::PlanError};
use messages::{Bounded, Costs, Messages};
use relaxation::Relaxation;
use shardwright_graph::OpId;
use shardwright_machine::{Bytes, Mesh};
use shardwright_search::{Control, Solver, exact::Exact, gap};
use shardwright_space::{Assignment, Config};

/// The least memory for tables with which the bound is computed. Groups and their reshards take about 150 MiB for eight layers on 64
/// devices.
const LEAST_MEMORY: u64 = 512 << 20;
/// The most rounds.
const MOST_ROUNDS: usize = 300;
/// The gap to which a network over groups is solved.
const EXACT_GAP: f64 = 1e-3;
/// Sweeps of messages per round; up to four times as many until the bound is that of the last round.
const SWEEPS: usize = 4;
/// The largest tables, in bytes, with which a network over groups is solved exactly, and the share of the time for it.
const EXACT_BYTES: u64 = 256 << 20;
const EXACT_SHARE: u32 = 4;
/// The rounds end when the bound has risen by less than this share in so many rounds.
const LEAST_RISE: f64 = 5e-4;
const PATIENCE: usize = 12;
/// The last rounds whose choices are candidates, and the groups of least slack that have one more each.
const CANDIDATE_ROUNDS: usize = 12;
const CANDIDATE_GROUPS: usize = 4;
/// Where the assignment has no group to divide, at least so many of least slack are divided.
const LEAST_DIVIDED: usize = 24;
/// Forbidden pairs cost so much, or twice the target where that is known: finite numbers keep messages exact.
const FORBIDDEN_COST: i64 = 1_000_000_000_000_000;

/// Whether an assignment on a mesh is one of the context's variables on the prime axes: then [`pattern_bound`] holds for it.
pub fn is_on_prime_axes(context: &Context<'_>, mesh: &Mesh, assignment: &Assignment) -> bool {
    if assignment.has_pins() {
        return false;
    }
    if context.untied {
        return true;
    }
    let fine = |op: OpId| assignment.config(op).on_primes(mesh);
    context.variables.members.iter().all(|split| {
        let derived = split.configs(&context.shapes, context.machine.mesh(), &fine(split.forward()));
        split.ops.iter().zip(derived).all(|(&op, config)| config == fine(op))
    })
}

/// A bound on prime axes, and the configs that led to it.
pub struct PatternBound {
    /// Picoseconds that no assignment of the context's variables on the machine's prime axes costs less than, within the memory limit;
    /// zero where the control allows too little memory or time.
    pub bound: i64,
    /// Per variable: configs of its leading op on the prime axes, one of the group that each of the last rounds chose, and one of each of the
    /// groups of least slack. Good assignments are made of them.
    pub candidates: Vec<Vec<Config>>,
}

/// Beyond which sizes the bound counts less.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// The most configs of a class that are listed. A class with more computes as little as it can, and its transfers are free.
    pub most_configs: usize,
    /// The most configs of all classes together: the largest classes are not listed beyond that.
    pub most_configs_in_all: usize,
    /// The most patterns of a tensor: beyond that, dimensions count as one.
    pub most_patterns: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { most_configs: 60_000, most_configs_in_all: 800_000, most_patterns: 9_000 }
    }
}

/// Bounds the objective on the machine's prime axes, for plans within a memory limit if there is one. Ends when the bound is near
/// enough to `target` by the control's gap, when it hardly rises, or when the control stops.
///
/// # Errors
/// Where the costs are of another device, or a tensor has no layout.
pub fn pattern_bound(
    context: &Context<'_>,
    target: i64,
    limit: Option<Bytes>,
    control: &Control<'_>,
) -> Result<PatternBound, PlanError> {
    bound_within(context, target, limit, &Limits::default(), control)
}

/// The same with other sizes beyond which less counts.
pub(crate) fn bound_within(
    context: &Context<'_>,
    target: i64,
    limit: Option<Bytes>,
    limits: &Limits,
    control: &Control<'_>,
) -> Result<PatternBound, PlanError> {
    let mut found = PatternBound { bound: 0, candidates: Vec::new() };
    if control.memory_bytes < LEAST_MEMORY {
        return Ok(found);
    }
    let most = target.saturating_mul(2).clamp(1, FORBIDDEN_COST);
    let Some(mut relaxation) = Relaxation::new(context, limit, most, limits, control)? else {
        return Ok(found);
    };
    let goal = goal(target, control.gap);
    let mut messages: Option<Messages> = None;
    let (mut bounds, mut exact_bounds): (Vec<i64>, Vec<i64>) = (Vec::new(), Vec::new());
    let mut rounds: Vec<Vec<u32>> = Vec::new();
    let mut near: Vec<Vec<u32>> = Vec::new();
    while bounds.len() < MOST_ROUNDS && control.stop_by_time().is_none() {
        if !relaxation.update(control) {
            break;
        }
        let costs = relaxation.costs();
        let messages = messages.get_or_insert_with(|| Messages::new(&costs));
        messages.classify(&costs);
        let Bounded { bound, slack } = messages.raised(&costs, SWEEPS, bounds.last().copied().unwrap_or(0));
        found.bound = found.bound.max(bound.min(goal));
        let choice = messages.decode(&costs);
        rounds.push(relaxation.cheapest(&choice));
        if control.is_near(target, found.bound) {
            break;
        }
        let mut least = relaxation.least_slack(&slack);
        let mut used = relaxation.least_slack(&costs.slack_of(&choice));
        let spare = goal.saturating_sub(bound);
        if goal < i64::MAX && !relaxation.remove(&mut least, spare, &mut used, messages) {
            found.bound = goal;
            break;
        }
        near = relaxation.nearest(&least, CANDIDATE_GROUPS);
        let has_room = relaxation.bytes() < control.memory_bytes;
        bounds.push(bounds.last().map_or(bound, |before| bound.max(*before)));
        let priced = match (&mut relaxation.memory, rounds.last()) {
            (Some(memory), Some(round)) => memory.move_prices(round, bound, target),
            _ => false,
        };
        let is_stuck = has_stalled(&bounds);
        let may_divide = has_room && !is_stuck;
        if may_divide
            && (relaxation.divide(&used, 0, usize::MAX, messages)
                || relaxation.divide(&least, spare, LEAST_DIVIDED, messages))
        {
            continue;
        }
        if !is_stuck && (priced || is_rising(&bounds)) {
            continue;
        }
        // Messages do not raise the bound any more: a small network over groups is solved exactly, and the groups of its solution
        // are divided.
        if relaxation.bytes() > EXACT_BYTES {
            break;
        }
        relaxation.update_tables();
        let costs = relaxation.costs();
        let (bound, choice) = solve(&costs, target, &control.share(EXACT_SHARE))?;
        found.bound = found.bound.max(bound.min(goal));
        exact_bounds.push(found.bound);
        let Some(choice) = choice.filter(|_| !control.is_near(target, found.bound)) else { break };
        rounds.push(relaxation.cheapest(&choice));
        let used = relaxation.least_slack(&costs.slack_of(&choice));
        if has_stalled(&exact_bounds) || !has_room || !relaxation.divide(&used, 0, usize::MAX, messages) {
            break;
        }
    }
    let last = &rounds[rounds.len().saturating_sub(CANDIDATE_ROUNDS)..];
    if !last.is_empty() {
        found.candidates = relaxation.configs(context, last, &near);
    }
    Ok(found)
}

/// The bound that is near enough to a target; the largest number where there is no target.
fn goal(target: i64, gap: f64) -> i64 {
    if target == i64::MAX {
        return i64::MAX;
    }
    // A picosecond more, whatever the rounding.
    ((target as f64 / (1.0 + gap)).ceil() as i64).saturating_add(1).min(target)
}

/// Solves a network over groups: a lower bound, and a choice if one was found. Ends where the bound is near enough to the target.
fn solve(costs: &Costs, target: i64, control: &Control<'_>) -> Result<(i64, Option<Vec<u32>>), PlanError> {
    let asked = control.gap;
    let enough = move |_: Option<i64>, found: i64| gap(target, found).is_some_and(|gap| gap <= asked);
    let round = Control {
        gap: EXACT_GAP,
        enough: Some(&enough),
        progress: None,
        iterations: None,
        ..control.clone()
    };
    let outcome = Exact.solve(&costs.network()?, &round);
    Ok((outcome.bound.saturating_add(costs.constant), outcome.choice))
}

/// Whether the bound has hardly risen for some rounds.
fn has_stalled(bounds: &[i64]) -> bool {
    let before = bounds.len().checked_sub(1 + PATIENCE).map(|at| bounds[at]);
    let last = bounds.last().copied().unwrap_or(0);
    before.is_some_and(|before| (last - before) as f64 <= LEAST_RISE * last as f64)
}

/// Whether the last round has raised the bound: where nothing is left to divide, messages alone may do so.
fn is_rising(bounds: &[i64]) -> bool {
    match bounds {
        [.., before, last] => (last - before) as f64 > 1e-5 * *last as f64,
        _ => true,
    }
}

#[cfg(test)]
mod tests;
