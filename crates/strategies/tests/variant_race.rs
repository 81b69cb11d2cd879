//! The race between variants of a step: with any time, its plan is at least as fast as every baseline beside it, and with enough
//! time as the plan of the step as it is.

use proptest::prelude::*;
use shardwright_graph::{DType, Graph, GraphBuilder, Optimizer, RecomputePolicy, micro_batch_counts, train};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::Constraints;
use shardwright_search::{Clock, Control, FrozenClock};
use shardwright_strategies::{StrategyError, Variant, VariantInputs, find, plan_variants};
use shardwright_zoo::layers::{add, cross_entropy, data, ids, linear, relu};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A clock that goes on by a second whenever somebody looks.
#[derive(Default)]
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// A chain of layers of random widths. Where a width stays, the layer may be a residual.
fn step(batch: u64, layers: &[(u64, bool)]) -> Graph {
    let mut b = GraphBuilder::new("random");
    let mut x = data(&mut b, "x", DType::F32, &[batch, 64]).unwrap();
    for (at, &(width, residual)) in layers.iter().enumerate() {
        let before = x;
        let hidden = linear(&mut b, &format!("layer{at}"), x, width, true).unwrap();
        x = relu(&mut b, &format!("relu{at}"), hidden).unwrap();
        if residual && b.shape(before) == b.shape(x) {
            x = add(&mut b, &format!("add{at}"), before, x).unwrap();
        }
    }
    let logits = linear(&mut b, "logits", x, 16, true).unwrap();
    let labels = ids(&mut b, "labels", &[batch], 16).unwrap();
    let loss = cross_entropy(&mut b, "loss", logits, labels).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::adam(1e-3)).unwrap();
    b.finish()
}

fn variants(graph: &Graph) -> Vec<Variant> {
    let counts = micro_batch_counts(graph).unwrap().into_iter().filter_map(NonZeroU32::new);
    let of = |micro_batches| {
        RecomputePolicy::ALL.map(|recompute| Variant { micro_batches, recompute, engine: None })
    };
    counts.flat_map(of).collect()
}

/// The least memory of the recipes of all variants, each on its first mesh, and the most.
fn peaks(base: &Graph, inputs: VariantInputs<'_>) -> (u64, u64) {
    let (mut least, mut most) = (u64::MAX, 0);
    let over = Control::new().time_limit(&FrozenClock, Duration::ZERO);
    for variant in variants(base) {
        let step = variant.graph(base).unwrap();
        let planner = inputs.planner(&step.graph);
        for own in planner.recipes(&Constraints::default(), &over).unwrap() {
            least = least.min(own.costs.peak_memory.0);
            most = most.max(own.costs.peak_memory.0);
        }
    }
    (least, most)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn with_any_time_no_baseline_beside_the_plan_is_faster(
        batch in prop::sample::select(vec![4u64, 6, 8]),
        layers in prop::collection::vec((prop::sample::select(vec![32u64, 64, 512]), any::<bool>()), 1..4),
        machine in prop::sample::select(vec!["flat:2", "p100x16:4"]),
        percent in 0u64..=100,
        readings in prop::sample::select(vec![0u64, 1, 10, 30, 100, 300, 1_000, 3_000]),
    ) {
        let (graph, machine) = (step(batch, &layers), builtin(machine).unwrap());
        let inputs = VariantInputs { machine: &machine, costs: None, untied: true, recompute_ops: false };
        let (least, most) = peaks(&graph, inputs);
        let limit = least + (most - least) * percent / 100;
        let constraints = Constraints { memory: Some(Bytes(limit)), ..Constraints::default() };
        let clock = CountingClock::default();
        let control = Control::new().time_limit(&clock, Duration::from_secs(readings));
        let variants = variants(&graph);
        let found = plan_variants(&graph, &variants, inputs, find("auto").unwrap(), &constraints, &control);
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                let without = matches!(&error.error, StrategyError::Plan(error) if error.is_without_answer());
                prop_assert!(without, "{}", error.error);
                return Err(TestCaseError::fail("a recipe of some variant fits"));
            }
        };
        let plan = &found.answer.plan;
        prop_assert!(plan.peak_memory_bytes <= limit);
        prop_assert!(plan.lower_bound <= plan.objective);
        prop_assert_eq!(plan.micro_batches, found.step.variant.micro_batches.get());
        for (name, baseline) in plan.baselines.iter().filter(|(_, own)| own.fits) {
            let (own, other) = (plan.simulated.step_seconds, baseline.step_seconds);
            prop_assert!(own <= other, "{own} s, and {name} takes {other} s: {:?}", plan.warnings);
        }
    }

    #[test]
    fn with_enough_time_the_step_as_it_is_has_no_faster_plan(
        batch in prop::sample::select(vec![4u64, 6, 8]),
        layers in prop::collection::vec((prop::sample::select(vec![32u64, 64, 512]), any::<bool>()), 1..3),
        percent in 20u64..=100,
    ) {
        let (graph, machine) = (step(batch, &layers), builtin("flat:2").unwrap());
        let inputs = VariantInputs { machine: &machine, costs: None, untied: true, recompute_ops: false };
        let (least, most) = peaks(&graph, inputs);
        let memory = Some(Bytes(least + (most - least) * percent / 100));
        let constraints = Constraints { memory, ..Constraints::default() };
        let plan = |variants: &[Variant]| {
            let control = Control::new().iteration_limit(10);
            let auto = find("auto").unwrap();
            let found = plan_variants(&graph, variants, inputs, auto, &constraints, &control);
            found.ok().map(|found| found.answer.plan.simulated.step_seconds)
        };
        let all = plan(&variants(&graph)).unwrap();
        if let Some(own) = plan(&[Variant::BASE]) {
            prop_assert!(all <= own, "{all} s with all variants, {own} s as it is");
        }
    }
}
