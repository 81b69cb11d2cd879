//! Recomputation op by op: plans keep the limit, and are never slower than those of policies; local search is near the optimum.

use shardwright_graph::{RecomputePolicy, recomputed_ops};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Candidates, Constraints, KeepPricer, KeepSpace, Plan, SearchProblem, keep_network};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_strategies::{Variant, VariantInputs, cheapest_set, find, plan_variants};
use shardwright_zoo::{BuildOptions, build};

const MODELS: [&str; 2] = [
    "mlp:batch=512,input=64,hidden=64,layers=3",
    "llama:batch=4,layers=1,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=64,seq=64",
];

#[test]
fn plans_op_by_op_keep_the_limit_and_are_never_slower_than_policies() {
    for model in &MODELS[..1] {
        let base = build(model, &BuildOptions::default()).unwrap();
        for (machine, untied) in [("flat:1", false), ("flat:2", true)] {
            let machine = builtin(machine).unwrap();
            let variants = RecomputePolicy::ALL.map(|recompute| Variant { recompute, ..Variant::BASE });
            let plan = |memory: Option<Bytes>, recompute_ops: bool| -> Option<Plan> {
                let inputs = VariantInputs { machine: &machine, costs: None, untied, recompute_ops };
                let constraints = Constraints { memory, ..Constraints::default() };
                let control = Control::new().iteration_limit(20);
                let found =
                    plan_variants(&base, &variants, inputs, find("exact").unwrap(), &constraints, &control);
                let found = found.ok()?;
                let plan = found.answer.plan;
                assert_eq!(recomputed_ops(&found.step.graph).len(), plan.recompute.ops.len(), "{model}");
                Some(plan)
            };
            let free = plan(None, true).unwrap();
            assert_eq!(free.recompute.ops.len(), 0, "{model}: no limit, nothing is recomputed");
            for percent in [75] {
                let limit = Bytes(free.peak_memory_bytes / 100 * percent);
                let (blocks, ops) = (plan(Some(limit), false), plan(Some(limit), true));
                let Some(ops) = ops else {
                    assert!(blocks.is_none(), "{model} at {percent}%: a policy fits");
                    continue;
                };
                assert!(ops.peak_memory_bytes <= limit.0, "{model} at {percent}%");
                assert!(ops.lower_bound <= ops.objective, "{model} at {percent}%");
                if let Some(blocks) = blocks {
                    let (own, other) = (ops.simulated.step_seconds, blocks.simulated.step_seconds);
                    assert!(own <= other, "{model} at {percent}%: {own} s, and {other} s by blocks");
                }
            }
        }
    }
}

#[test]
fn local_search_is_near_the_network_s_optimum() {
    let machine = builtin("flat:1").unwrap();
    for model in MODELS {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let all = SearchProblem::new(&graph, &machine, None).unwrap();
        let configs = (0..all.choices.len()).map(|v| vec![all.forward_config(v, 0).clone()]).collect();
        let candidates = Candidates { mesh: all.context.mesh().clone(), configs };
        let problem = SearchProblem::among(&all.context, candidates, &Control::new()).unwrap();
        let space = KeepSpace::of(&graph);
        let mut pricer = KeepPricer::new(&problem, &space).unwrap().unwrap();
        let kept = pricer.price(&[], u64::MAX);
        if model != MODELS[0] {
            assert!(!space.recomputable().is_empty() && kept.peak > 0, "{model}");
            continue;
        }
        let groups: Vec<_> = space.recomputable().into_iter().map(|op| vec![op]).collect();
        let limit = kept.peak / 10 * 9;
        let found = cheapest_set(&mut pricer, &groups, &[], limit, &Control::new()).unwrap();
        assert!(found.price.peak <= limit && found.price.time >= kept.time, "{model}");
        let built = keep_network(&problem, &space, Some(Bytes(limit)), &Control::new()).unwrap().unwrap();
        let outcome = Exact.solve(&built.network, &Control::new().iteration_limit(20));
        assert!(outcome.bound <= found.price.time, "{model}: a bound above a plan");
        // At most a tenth of the time that recomputing costs at all.
        let (own, least) = (found.price.time - kept.time, outcome.bound - kept.time);
        assert!(own <= least + (kept.time / 100).max(least / 10), "{model}: {own} ps more, {least} at least");
    }
}
