//! Our solver: anytime, exact where it can be, with memory.
//!
//! Reduce the network (`contract`, `reduce`, `rows`) to a core; where nothing is left the optimum is
//! proved. Otherwise rounds of message-passing bounds with multipliers for memory (`dual`, `ascent`) and
//! of large-neighbourhood search on forests (`block`, `island`), until both meet or the caller stops.

pub mod ascent;
pub mod block;
mod branch;
pub mod contract;
pub mod core;
mod cross;
pub mod dual;
pub mod island;
mod kernel;
pub mod model;
mod overflow;
pub mod profile;
pub mod reduce;
pub mod rows;
pub mod search;
pub mod stage;
pub mod state;

use crate::network::Network;
use crate::outcome::{Control, Outcome, Recorder, Solver, StopReason};
use contract::Infeasible;
use model::Model;

/// The anytime exact solver.
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

/// Reduces and searches; what is found goes to the recorder.
fn solve(network: &Network, control: &Control<'_>, recorder: &mut Recorder<'_, '_>) -> StopReason {
    let mut model = match contract::contract(network) {
        Ok(model) => model,
        Err(Infeasible) => return StopReason::Infeasible,
    };
    if reduce::reduce(&mut model) == Err(Infeasible) {
        return StopReason::Infeasible;
    }
    if model.live().is_empty() {
        return search(network, model, control, recorder);
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
