//! The message where no plan fits the memory: what fills it, what needs least, and what would help.

use crate::{
    clock::WallClock,
    inputs::Inputs,
    request::{MicroBatchChoice, RecomputeChoice},
};
use shardwright_graph::RecomputePolicy;
use shardwright_machine::{Bytes, show_bytes};
use shardwright_plan::{MemoryShares, PlanError, memory_shares};
use shardwright_search::Control;
use shardwright_strategies::{Planner, PricedRecipe, Strategy, Variant};
use std::time::Duration;

/// The time after the deadline in which baselines are priced for the message.
const EXPLAINED: Duration = Duration::from_secs(5);

/// The whole message for a refusal: the search's own words, then the baseline that needs least, its parts, and remedies.
pub(crate) fn explain(
    inputs: &Inputs,
    planner: &Planner<'_>,
    variant: Variant,
    control: &Control<'_>,
    error: &PlanError,
    limit: Bytes,
) -> String {
    let constraints = inputs.constraints();
    let mut recipes = planner.recipes(&constraints, control).unwrap_or_default();
    if recipes.is_empty() {
        // The time is up, but a refusal without reasons is of no use.
        let more = Control::new().time_limit(WallClock::global(), EXPLAINED);
        recipes = planner.recipes(&constraints, &more).unwrap_or_default();
    }
    match recipes.iter().min_by_key(|own| own.costs.peak_memory) {
        Some(least) => {
            let with = match variant {
                Variant::BASE => String::new(),
                variant => format!(" with {}", variant.options()),
            };
            format!("{error}{with}. {}", LeastBaseline::new(least).describe(inputs, limit))
        }
        // Without baselines the search's own words are all there is.
        None => error.to_string(),
    }
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

    fn describe(&self, inputs: &Inputs, limit: Bytes) -> String {
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
        format!("{text}. {}", self.remedies(inputs, limit))
    }

    /// What would make a plan fit, the likeliest first.
    fn remedies(&self, inputs: &Inputs, limit: Bytes) -> String {
        let mut all = Vec::new();
        let untied = inputs.request.untied;
        if self.peak <= limit && !untied {
            return format!("It fits: plan with --untied, or with --untied --solver {}", self.name);
        }
        if inputs.request.recompute == RecomputeChoice::Policy(RecomputePolicy::Off) && !inputs.keeps_passes()
        {
            all.push("--recompute full (results of blocks are computed again)".to_string());
        }
        if !untied {
            all.push("--untied (weights, gradients and optimizer state in shards)".to_string());
        }
        let divided = inputs.request.micro_batches != MicroBatchChoice::default();
        if !divided
            && !inputs.keeps_passes()
            && inputs.graph.step_size().samples.is_some_and(|samples| samples > 1)
        {
            all.push("--micro-batches auto (the batch in parts, gradients added up)".to_string());
        }
        let state = self
            .shares
            .as_ref()
            .map_or(0, |shares| shares.weights.0 + shares.gradients.0 + shares.optimizer_state.0);
        let devices = u64::from(inputs.machine.devices());
        let times = self.peak.0.div_ceil(limit.0.max(1));
        if state > self.peak.0 / 2 {
            all.push(format!("about {} devices instead of {devices}", devices.saturating_mul(times.max(2))));
        } else {
            let size = inputs.graph.step_size();
            let smaller = size.samples.map(|samples| (samples / times.max(2)).max(1));
            all.extend(
                smaller.map(|batch| format!("a batch of about {batch} (--batch), or shorter samples")),
            );
            all.push("more devices".into());
        }
        format!("What would help: {}", all.join("; "))
    }
}
