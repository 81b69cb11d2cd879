//! Variants of a step: bounds hold for all plans, and no variant has a shorter step than the answer.

use shardwright_graph::{Graph, RecomputePolicy, micro_batch_counts};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Constraints, memory_lower_bound, step_lower_bound};
use shardwright_search::Control;
use shardwright_strategies::{Strategy, Variant, VariantInputs, find, plan_variants};
use shardwright_zoo::{BuildOptions, build};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

fn graph(model: &str) -> Graph {
    build(model, &BuildOptions::default()).unwrap()
}

/// Every number of micro-batches with every policy.
fn all_variants(graph: &Graph) -> Vec<Variant> {
    let counts = micro_batch_counts(graph).unwrap().into_iter().filter_map(NonZeroU32::new);
    let of = |micro_batches| {
        RecomputePolicy::ALL.map(|recompute| Variant { micro_batches, recompute, engine: None })
    };
    counts.flat_map(of).collect()
}

const MODELS: [&str; 2] =
    ["gpt:batch=4,layers=2,hidden=32,heads=4,vocab=64,seq=32", "mlp:batch=8,input=64,hidden=64,layers=3"];

#[test]
fn no_recipe_of_a_variant_beats_its_bounds() {
    let mut recipes = 0;
    for model in MODELS {
        let base = graph(model);
        for machine in ["flat:2", "p100x16:8"] {
            let machine = builtin(machine).unwrap();
            for variant in all_variants(&base).into_iter().step_by(2) {
                let step = variant.graph(&base).unwrap();
                let planner =
                    VariantInputs { machine: &machine, costs: None, untied: true, recompute_ops: false }
                        .planner(&step.graph);
                let context = planner.prime().unwrap();
                let (memory, computing) =
                    (memory_lower_bound(&context), step_lower_bound(&context, true).unwrap());
                assert!(memory > Bytes(0) && computing > 0);
                for own in planner.recipes(&Constraints::default(), &Control::new()).unwrap() {
                    let (name, at) = (own.recipe, format!("{model} {}", variant.options()));
                    assert!(memory <= own.costs.peak_memory, "{at} {name:?}");
                    assert!(computing.unsigned_abs() <= own.step.unwrap().makespan, "{at} {name:?}");
                    recipes += 1;
                }
            }
        }
    }
    assert!(recipes > 100, "{recipes}");
}

/// On one axis a recipe is one assignment, so that all its variants are easily listed.
#[test]
fn a_baseline_is_the_recipe_in_the_variant_that_suits_it_best() {
    let machine = builtin("flat:2").unwrap();
    let inputs = VariantInputs { machine: &machine, costs: None, untied: true, recompute_ops: false };
    let mut in_other_variants = 0;
    for model in MODELS {
        let base = graph(model);
        let variants = all_variants(&base);
        let whole = inputs.planner(&base);
        let free = whole.recipes(&Constraints::default(), &Control::new()).unwrap();
        let most = free.iter().map(|own| own.costs.peak_memory.0).max().unwrap();
        for percent in [100, 70] {
            let constraints =
                Constraints { memory: Some(Bytes(most / 100 * percent)), ..Constraints::default() };
            let mut best: BTreeMap<&str, f64> = BTreeMap::new();
            for variant in &variants {
                let step = variant.graph(&base).unwrap();
                let planner = inputs.planner(&step.graph);
                for own in planner.recipes(&constraints, &Control::new()).unwrap() {
                    let seconds = own.step.unwrap().times.step_seconds;
                    if own.keeps(&constraints) {
                        let known = best.entry(own.recipe.name()).or_insert(seconds);
                        *known = known.min(seconds);
                    }
                }
            }
            let control = Control::new().iteration_limit(2);
            let found =
                plan_variants(&base, &variants, inputs, find("fsdp").unwrap(), &constraints, &control);
            let Ok(found) = found else { panic!("{model} at {percent}%: no plan") };
            let plan = found.answer.plan;
            assert!(!best.is_empty());
            for (name, seconds) in best {
                let own = &plan.baselines[name];
                assert!(own.fits, "{model} at {percent}%: {name}");
                assert_eq!(own.step_seconds, seconds, "{model} at {percent}%: {name}");
                in_other_variants += usize::from(
                    (own.micro_batches, &own.recompute) != (plan.micro_batches, &plan.recompute.policy),
                );
            }
        }
    }
    assert!(in_other_variants > 0);
}

#[test]
fn recomputed_products_are_no_work_of_the_model() {
    let base = graph(MODELS[0]);
    for variant in all_variants(&base) {
        let step = variant.graph(&base).unwrap();
        assert_eq!(step.graph.model_flops(), base.model_flops(), "{}", variant.options());
    }
}
