//! Our solver: anytime, exact where it can be, with memory.
//!
//! 1. `contract` drops forbidden values by arc consistency, merges variables that determine one another
//!    (compilers' networks are mostly equalities: 35,000 variables may be 300 in truth) and reduces time to
//!    the rows that matter. `reduce` and `rows` go on to a fixpoint: dominated values, separable and
//!    functional pairs, elimination of variables with at most two neighbours and no usage, rows that cannot
//!    overflow or are implied by others. `memo` sees to it that what repeats (a deep model's blocks) is worked
//!    out once. Without memory this alone solves series-parallel networks, and
//!    `eliminate` what has a tree decomposition with small tables.
//! 2. `dual` and `ascent` raise a lower bound by sequential reweighted message passing, with a Lagrange
//!    multiplier for each row of time. Whatever they do, the bound is recomputed in exact integers.
//! 3. `block` and `island` search: forests of variables are set to their best values by dynamic
//!    programming, with multipliers of their own where a row would overflow; `cross` combines assignments.
//!    Their starts are decoded from the messages, which is what makes them good.
//! 4. `stage` narrows: values whose bound exceeds the incumbent go, and the reductions run again.
//! 5. `branch` closes what gap is left, where what is left is small.
//! 6. `overflow` says how little an impossible limit must be exceeded.
//!
//! `search` runs 2 to 5 in rounds of fixed work, so that a seed gives the same result on any number of
//! threads; time only decides after which round to stop.

mod ascent;
mod block;
mod branch;
mod contract;
mod core;
mod cross;
mod dual;
mod eliminate;
mod island;
mod kernel;
mod memo;
mod model;
mod overflow;
mod profile;
mod reduce;
mod remains;
mod rows;
mod search;
mod stage;
mod state;

use crate::network::Network;
use crate::outcome::{Control, Outcome, Recorder, Solver, StopReason};
use contract::Infeasible;
use memo::Memo;
use model::Model;

/// The anytime exact solver. Without a limit it runs until its incumbent is proved optimal, which it may
/// never be on a large network; give it a deadline or an iteration limit there.
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

/// Bytes that reducing a network takes for each cell of its tables: its own copies, and what eliminations leave.
const REDUCING: u64 = 24;
/// Bytes that searching takes for each cell of what is left: exact and floating-point numbers, both ways round, and the
/// copies of these while they are made.
const SEARCHING: u64 = 64;

/// The refusal of what takes more memory than is allowed.
fn too_large(bytes: u64, control: &Control<'_>) -> Option<StopReason> {
    let (needed, allowed) = (bytes.div_ceil(1 << 20), control.memory_bytes >> 20);
    (bytes > control.memory_bytes).then(|| {
        StopReason::Refused(format!(
            "the tables of exact take about {needed} MiB and {allowed} MiB of memory are allowed; allow more (--ram), or make \
             the network smaller"
        ))
    })
}

/// Reduces and searches; what is found goes to the recorder.
fn solve(network: &Network, control: &Control<'_>, recorder: &mut Recorder<'_, '_>) -> StopReason {
    let cells: u64 = (0..network.tables()).map(|table| network.table(table as u32).len() as u64).sum();
    if let Some(refusal) = too_large(cells * REDUCING, control) {
        return refusal;
    }
    let mut memo = Memo::within(control.memory_bytes);
    let mut model = match contract::contract(network, &mut memo) {
        Ok(model) => model,
        Err(Infeasible) => return StopReason::Infeasible,
    };
    if reduce::reduce(&mut model, memo) == Err(Infeasible) {
        return StopReason::Infeasible;
    }
    if model.live().is_empty() {
        return search(network, model, control, recorder);
    }
    if let Some(refusal) = too_large(model.distinct_cells() * SEARCHING, control) {
        return refusal;
    }
    match rayon::ThreadPoolBuilder::new().num_threads(control.threads).build() {
        Ok(pool) => pool.install(|| search(network, model, control, recorder)),
        // Without threads of its own the search uses those that are there.
        Err(_) => search(network, model, control, recorder),
    }
}

fn search(
    network: &Network,
    model: Model,
    control: &Control<'_>,
    recorder: &mut Recorder<'_, '_>,
) -> StopReason {
    // Trust nothing but the network itself.
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
