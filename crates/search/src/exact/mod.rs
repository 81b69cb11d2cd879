//! Our solver: anytime, exact where it can be, with memory.
//!
//! Reduce the network (`contract`, `reduce`, `rows`) to a core; where nothing is left the optimum is
//! proved. Otherwise rounds of message-passing bounds with multipliers for memory (`dual`, `ascent`) and
//! of large-neighbourhood search on forests (`block`, `island`), until both meet or the caller stops.

pub mod ascent;
pub mod block;
pub mod contract;
pub mod core;
mod cross;
pub mod dual;
pub mod island;
mod kernel;
pub mod model;
pub mod profile;
pub mod reduce;
pub mod rows;
pub mod search;
pub mod state;

use self::core::Core;
use crate::network::Network;
use crate::outcome::{Control, Outcome, Recorder, Solver, StopReason};
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
        let reduced = contract::contract(network).and_then(|mut model| {
            reduce::reduce(&mut model)?;
            Ok(model)
        });
        let Ok(model) = reduced else {
            return recorder.finish(StopReason::Infeasible);
        };
        let reason = match rayon::ThreadPoolBuilder::new().num_threads(control.threads).build() {
            Ok(pool) => pool.install(|| search(network, &model, control, &mut recorder)),
            // Without threads of our own the global ones will do.
            Err(_) => search(network, &model, control, &mut recorder),
        };
        recorder.finish(reason)
    }
}

fn search(
    network: &Network,
    model: &Model,
    control: &Control<'_>,
    recorder: &mut Recorder<'_, '_>,
) -> StopReason {
    let core = Core::new(model);
    let publish = |state: &state::State, recorder: &mut Recorder<'_, '_>, round: u64, source: &str| {
        let choice = lift(model, &core, &state.x);
        // Trust nothing but the network itself.
        if let Ok(e) = network.evaluate(&choice)
            && e.feasible()
            && let Ok(cost) = i64::try_from(e.cost)
        {
            debug_assert_eq!(cost, state.cost);
            recorder.offer(cost, &choice, round, source);
        }
    };
    if core.variables() == 0 {
        publish(&state::State::new(&core, Vec::new()), recorder, 0, "reductions");
        recorder.raise(core.constant, 0, "reductions");
        return StopReason::Optimal;
    }
    search::Search::new(&core, control).run(control, recorder, &publish)
}

/// The network's choices for an assignment of the core.
fn lift(model: &Model, core: &Core, x: &[u32]) -> Vec<u32> {
    let mut labels = vec![0; model.vars.len()];
    for (&id, &value) in core.ids.iter().zip(x) {
        labels[id as usize] = model.vars[id as usize].labels[value as usize];
    }
    model.lift(&mut labels);
    labels
}
