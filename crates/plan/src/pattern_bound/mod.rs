//! A lower bound on the objective that holds on the machine's prime axes, communication included.
//!
//! A problem on merged axes is solved exactly, but its bound does not cover finer axes, and the prime axes of a large machine
//! have too many configs for tables. This bound needs no table over configs:
//!
//! - Configs count as equal that differ only in the order of interchangeable axes. Reshards between their layouts are bounded
//!   by the paths between [patterns](shardwright_cost::PatternResharder).
//! - Configs are put into *groups*. A group's cost is the least of its configs, and the cost between two groups is the
//!   least between any two of their layouts. So the network over groups has a lower bound of the network over configs.
//! - In the first rounds the network over groups is solved exactly, and the groups that its solution uses are divided. That closes small
//!   networks soon. In all further rounds [`messages`] bound the network in a fraction of the time, and the groups of least slack are
//!   divided. Every round's bound is valid. Configs that no good assignment comes near stay together in large groups.
//! - A memory limit has prices ([`held_memory`]). Then the bound holds for the assignments within the limit.
//! - A class of variables with too many configs computes as little as it can, and its transfers cost nothing.
//!
//! The bound holds for every assignment of the problem's variables on the prime axes. Configs on merged axes are configs on prime axes
//! too, except that ops which follow a layer's forward op may then follow it otherwise ([`is_on_prime_axes`]).

mod build;
mod held_memory;
mod messages;
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
/// Memory per cell of the tables between groups, with room for one more round of divisions.
const BYTES_PER_CELL: u64 = 64;
/// The most rounds.
const MOST_ROUNDS: usize = 300;
/// The share of the time for rounds that are solved exactly, and the gap of each.
const EXACT_SHARE: u32 = 3;
const EXACT_GAP: f64 = 1e-3;
/// The most of these rounds.
const EXACT_ROUNDS: usize = 40;
/// Sweeps of messages per round.
const SWEEPS: usize = 8;
/// The rounds end when the bound has risen by less than this share in so many rounds.
const LEAST_RISE: f64 = 1e-3;
const PATIENCE: usize = 10;
/// The last rounds whose choices are candidates.
const CANDIDATE_ROUNDS: usize = 12;
/// Each round of messages divides at least so many groups.
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
    /// Per variable: configs of its leading op on the prime axes, one of the group that each of the last rounds chose. Good
    /// assignments are made of them.
    pub candidates: Vec<Vec<Config>>,
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
    let mut found = PatternBound { bound: 0, candidates: Vec::new() };
    if control.memory_bytes < LEAST_MEMORY {
        return Ok(found);
    }
    let Some(mut relaxation) = Relaxation::new(context, limit, control)? else { return Ok(found) };
    let most = target.saturating_mul(2).clamp(1, FORBIDDEN_COST);
    let exact = control.share(EXACT_SHARE);
    let mut is_exact = true;
    let mut messages: Option<Messages> = None;
    let mut bounds: Vec<i64> = Vec::new();
    let mut rounds: Vec<Vec<u32>> = Vec::new();
    while bounds.len() < MOST_ROUNDS && control.stop_by_time().is_none() {
        if !relaxation.update(control) {
            break;
        }
        let costs = relaxation.costs(most);
        let messages = messages.get_or_insert_with(|| Messages::new(&costs));
        messages.classify(&costs);
        let has_room = relaxation.cells().saturating_mul(BYTES_PER_CELL) < control.memory_bytes;
        if is_exact && bounds.len() < EXACT_ROUNDS && exact.stop_by_time().is_none() {
            let (bound, choice) = solve(&costs, target, &exact)?;
            found.bound = found.bound.max(bound);
            bounds.push(found.bound);
            if control.is_near(target, found.bound) {
                break;
            }
            if let Some(choice) = choice {
                rounds.push(relaxation.cheapest(&choice));
                let used = costs.slack_of(&choice);
                if !has_stalled(&bounds) && has_room && relaxation.divide(&used, 0, usize::MAX, messages) {
                    continue;
                }
            }
        }
        if is_exact {
            // Messages go on, and their rise counts anew.
            is_exact = false;
            bounds.clear();
        }
        (0..SWEEPS).for_each(|_| messages.sweep(&costs));
        let Bounded { bound, slack } = messages.bounded(&costs);
        found.bound = found.bound.max(bound);
        bounds.push(bounds.last().map_or(bound, |before| bound.max(*before)));
        rounds.push(relaxation.cheapest(&messages.decode(&costs)));
        if control.is_near(target, found.bound) || has_stalled(&bounds) {
            break;
        }
        let priced = match (&mut relaxation.memory, rounds.last()) {
            (Some(memory), Some(round)) => memory.move_prices(round, bound, target),
            _ => false,
        };
        let enough = (target as f64 / (1.0 + control.gap)) as i64;
        let divided =
            has_room && relaxation.divide(&slack, enough.saturating_sub(bound), LEAST_DIVIDED, messages);
        if !divided && !priced && !is_rising(&bounds) {
            break;
        }
    }
    let last = &rounds[rounds.len().saturating_sub(CANDIDATE_ROUNDS)..];
    if !last.is_empty() {
        found.candidates = relaxation.configs(context, last);
    }
    Ok(found)
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
