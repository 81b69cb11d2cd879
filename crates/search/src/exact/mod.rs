//! The anytime exact solver, with memory limits.
//!
//! 1. `contract` removes forbidden values by arc consistency, merges variables that determine one another
//!    (compilers' networks are mostly equalities: 35,000 variables may reduce to 300) and reduces time to the
//!    binding rows. `reduce` and `rows` continue to a fixpoint: dominated values, separable and functional
//!    pairs, elimination of variables with at most two neighbours and no usage, rows that cannot overflow or
//!    are implied by others. `memo` caches results for repeated tables, such as a deep model's blocks. Without
//!    memory these reductions alone solve series-parallel networks, and `eliminate` solves networks of small
//!    treewidth.
//! 2. `dual` and `ascent` raise a lower bound by sequential reweighted message passing, with a Lagrange
//!    multiplier for each row of time. The reported bound is recomputed in exact integers.
//! 3. `block` and `island` search for assignments: dynamic programming sets forests of variables to their best
//!    values, with local multipliers where a row would overflow. `crossover` combines assignments. The start
//!    assignments are decoded from the messages, which makes them good.
//! 4. `subproblem` removes values whose bound exceeds the incumbent and runs the reductions again.
//! 5. `branch` closes the remaining gap by branch and bound if the subproblem is small.
//! 6. `overflow` finds the smallest overflow of an infeasible limit.
//!
//! `search` runs steps 2 to 5 in rounds of fixed work, so that a seed gives the same result on any number of
//! threads. Time only decides after which round to stop.

mod ascent;
mod block;
mod branch;
mod contract;
mod core;
mod crossover;
mod dual;
mod eliminate;
mod island;
mod kernel;
mod memo;
mod model;
mod overflow;
mod profile;
mod reduce;
mod reduced_costs;
mod rows;
mod search;
mod state;
mod subproblem;

use crate::control::Control;
use crate::network::Network;
use crate::outcome::{Outcome, Recorder, Solver, StopReason};
use contract::Infeasible;
use memo::TableMemo;
use model::Model;

/// The anytime exact solver. Without a limit it runs until its incumbent is proved optimal, which may never
/// happen on a large network: give it a deadline or an iteration limit there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact;

impl Solver for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome {
        let mut recorder = Recorder::new(control);
        let reason = solve(network, control, &mut recorder);
        if recorder.choice().is_none() && network.usage_limit().is_some() {
            overflow::least_overflow(network, control, &mut recorder);
        }
        recorder.finish(reason)
    }
}

/// Bytes per table cell that reducing a network takes: copies, and the tables that eliminations create.
const REDUCING: u64 = 24;
/// Bytes per remaining table cell that searching takes: exact and floating-point numbers in both orientations, and
/// their copies during construction.
const SEARCHING: u64 = 64;

/// Networks with more table cells are not touched once the time is up.
const UNTIMED_CELLS: u64 = 1 << 16;

/// A refusal if `bytes` exceed the allowed memory.
fn too_large(bytes: u64, control: &Control<'_>) -> Option<StopReason> {
    let (needed, allowed) = (bytes.div_ceil(1 << 20), control.memory_bytes >> 20);
    (bytes > control.memory_bytes).then(|| {
        StopReason::Refused(format!(
            "the tables of exact take about {needed} MiB and {allowed} MiB of memory are allowed; allow more (--ram), or make \
             the network smaller"
        ))
    })
}

/// Reduces and searches; results go to the recorder.
fn solve(network: &Network, control: &Control<'_>, recorder: &mut Recorder<'_, '_>) -> StopReason {
    let cells: u64 = (0..network.tables()).map(|table| network.table(table as u32).len() as u64).sum();
    if let Some(refusal) = too_large(cells * REDUCING, control) {
        return refusal;
    }
    let timed = Control { iterations: None, ..control.clone() };
    // A small network is reduced in any case: that may solve it.
    if let Some(reason) = timed.stop(0).filter(|_| cells > UNTIMED_CELLS) {
        return reason;
    }
    let mut memo = TableMemo::within(control.memory_bytes);
    let mut model = match contract::contract(network, &mut memo) {
        Ok(model) => model,
        Err(Infeasible) => return StopReason::Infeasible,
    };
    match reduce::reduce(&mut model, memo, &|| timed.stop(0).is_some()) {
        Ok(true) => {}
        Ok(false) => return timed.stop(0).unwrap_or(StopReason::Exhausted),
        Err(Infeasible) => return StopReason::Infeasible,
    }
    if model.live().is_empty() {
        return search(network, model, control, recorder);
    }
    if let Some(refusal) = too_large(model.distinct_cells() * SEARCHING, control) {
        return refusal;
    }
    match rayon::ThreadPoolBuilder::new().num_threads(control.threads).build() {
        Ok(pool) => pool.install(|| search(network, model, control, recorder)),
        // Without a pool of its own the search uses the current one.
        Err(_) => search(network, model, control, recorder),
    }
}

fn search(
    network: &Network,
    model: Model,
    control: &Control<'_>,
    recorder: &mut Recorder<'_, '_>,
) -> StopReason {
    // Every assignment is evaluated again by the network itself.
    let publish = |choice: &[u32], recorder: &mut Recorder<'_, '_>, round: u64, source: &str| {
        if let Ok(e) = network.evaluate(choice)
            && e.feasible()
            && let Ok(cost) = i64::try_from(e.cost)
        {
            recorder.offer(cost, choice, round, source);
        }
    };
    let overfull = |choice: &[u32], recorder: &mut Recorder<'_, '_>| {
        if let Ok(e) = network.evaluate(choice)
            && e.forbidden == 0
        {
            recorder.offer_overflow(e.overflow, choice);
        }
    };
    search::Search::new(model, control.seed).run(control, recorder, &publish, &overfull)
}
