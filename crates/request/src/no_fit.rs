//! The message where no plan fits the memory: what fills it, what needs least, and what would help.

use crate::{
    clock::WallClock,
    inputs::Inputs,
    request::{MicroBatchChoice, RecomputeChoice},
};
use shardwright_graph::{Graph, RecomputePolicy};
use shardwright_machine::{Bytes, show_bytes};
use shardwright_plan::{MemoryShares, PlanError, memory_lower_bound, memory_shares};
use shardwright_search::Control;
use shardwright_strategies::{Planner, PricedRecipe, Strategy, Variant};
use std::time::Duration;

/// The time after the deadline in which baselines are priced for the message.
const EXPLAINED: Duration = Duration::from_secs(5);

/// The error with the least memory that is known, and the whole message for it: the search's own words, then the baseline that
/// needs least, its parts, and remedies.
pub(crate) fn explain(
    inputs: &Inputs,
    planner: &Planner<'_>,
    variant: Variant,
    control: &Control<'_>,
    error: PlanError,
    limit: Bytes,
) -> (PlanError, String) {
    let constraints = inputs.constraints();
    let mut recipes = planner.recipes(&constraints, control).unwrap_or_default();
    if recipes.is_empty() {
        // The time is up, but a refusal without reasons is of no use.
        let more = Control::new().time_limit(WallClock::global(), EXPLAINED);
        recipes = planner.recipes(&constraints, &more).unwrap_or_default();
    }
    let with = match variant {
        Variant::BASE => String::new(),
        variant => format!(". This is the step with {}", variant.options()),
    };
    // What no layout changes.
    let context = planner.prime().ok();
    let state = context.as_ref().map_or(0, |context| state_bytes(context.graph));
    let state = state.div_ceil(u64::from(inputs.machine.devices()).max(1));
    let stored = match state > limit.0 {
        true => {
            format!(
                ". Weights and optimizer state alone take {} per device, each of them stored once",
                show_bytes(state)
            )
        }
        false => String::new(),
    };
    let every = context.is_some_and(|context| memory_lower_bound(&context) > limit);
    match recipes.iter().min_by_key(|own| own.costs.peak_memory) {
        Some(least) => {
            let error = error.with_known(Some(least.costs.peak_memory.0));
            let least = LeastBaseline::new(least);
            let remedies = Remedies { inputs, limit, least: &least, every, state };
            let reasons = format!("{}. {}", least.describe(), remedies.describe());
            let message = format!("{error}{with}{stored}. {reasons}");
            (error, message)
        }
        // Without baselines the search's own words are all there is.
        None => {
            let message = format!("{error}{with}{stored}");
            (error, message)
        }
    }
}

/// Bytes of all weights and optimizer state, each of them once.
fn state_bytes(graph: &Graph) -> u64 {
    let carried = graph.carries.iter().map(|carry| graph.tensor(carry.old).ty.bytes());
    carried.fold(0, u64::saturating_add)
}

/// The baseline with the smallest peak, over all that the model has, `fsdp` included.
struct LeastBaseline {
    name: &'static str,
    peak: Bytes,
    shares: Option<MemoryShares>,
}

impl LeastBaseline {
    fn new(priced: &PricedRecipe<'_>) -> Self {
        Self {
            name: priced.recipe.name(),
            peak: priced.costs.peak_memory,
            shares: memory_shares(&priced.context, &priced.assignment),
        }
    }

    fn describe(&self) -> String {
        let mut text = format!("Of the baselines `{}` needs least, {}", self.name, show_bytes(self.peak.0));
        if let Some(shares) = &self.shares {
            let parts = [
                ("weights", shares.weights),
                ("gradients", shares.gradients),
                ("optimizer state", shares.optimizer_state),
                ("activations", shares.activations),
                ("other", shares.other),
            ];
            let shown = parts.map(|(name, bytes)| format!("{name} {}", show_bytes(bytes.0)));
            text += &format!(" ({})", shown.join(", "));
            let largest = shares.largest.iter().take(3);
            let largest: Vec<String> =
                largest.map(|(op, bytes)| format!("{op} {}", show_bytes(*bytes))).collect();
            if !largest.is_empty() {
                text += &format!("; largest activations: {}", largest.join(", "));
            }
        }
        text
    }
}

/// What would make a plan fit.
struct Remedies<'a> {
    inputs: &'a Inputs,
    limit: Bytes,
    least: &'a LeastBaseline,
    /// Whether every plan of the step exceeds the limit, whatever it shards.
    every: bool,
    /// Bytes of weights and optimizer state per device, each of them stored once.
    state: u64,
}

impl Remedies<'_> {
    /// The remedies, the likeliest first.
    fn describe(&self) -> String {
        let Self { inputs, limit, least, .. } = *self;
        let mut all = Vec::new();
        let untied = inputs.request.untied;
        if least.peak <= limit && !untied {
            return format!("It fits: plan with --untied, or with --untied --solver {}", least.name);
        }
        // Neither recomputation nor micro-batches make state smaller.
        let activations = self.state <= limit.0 && !inputs.keeps_passes();
        if activations && inputs.request.recompute == RecomputeChoice::Policy(RecomputePolicy::Off) {
            all.push("--recompute full (results of blocks are computed again)".to_string());
        }
        if !untied && !self.every {
            all.push("--untied (weights, gradients and optimizer state in shards)".to_string());
        }
        let divided = inputs.request.micro_batches != MicroBatchChoice::default();
        let size = inputs.graph.step_size();
        if activations && !divided && size.samples.is_some_and(|samples| samples > 1) {
            all.push("--micro-batches auto (the batch in parts, gradients added up)".to_string());
        }
        let shares = least.shares.as_ref();
        let stored = shares.map_or(0, |own| own.weights.0 + own.gradients.0 + own.optimizer_state.0);
        let devices = u64::from(inputs.machine.devices());
        let times = least.peak.0.div_ceil(limit.0.max(1));
        if stored > least.peak.0 / 2 {
            all.push(format!("about {} devices instead of {devices}", devices.saturating_mul(times.max(2))));
        } else {
            let smaller = size.samples.map(|samples| (samples / times.max(2)).max(1));
            all.extend(
                smaller.map(|batch| format!("a batch of about {batch} (--batch), or shorter samples")),
            );
            all.push("more devices".into());
        }
        format!("What would help: {}", all.join("; "))
    }
}
