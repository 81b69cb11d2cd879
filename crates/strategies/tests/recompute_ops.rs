//! Recomputation op by op: plans keep the limit, and are never slower than those of policies; local search is near the optimum.

use shardwright_graph::{RecomputePolicy, recomputed_ops};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Candidates, Constraints, KeepPricer, KeepSpace, Plan, SearchProblem, keep_network};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_strategies::{Variant, VariantInputs, cheapest_set, find, plan_variants};
use shardwright_zoo::{BuildOptions, build};

const MLP: &str = "mlp:batch=512,input=64,hidden=64,layers=3";
/// Convolutions, poolings and a view.
const LENET: &str = "lenet5:batch=64,image=12,width=0.5";
/// Residuals, attention, and results that several ops read.
const GPT: &str = "gpt:batch=4,layers=1,hidden=32,heads=4,vocab=64,seq=64";

#[test]
fn plans_op_by_op_keep_the_limit_and_are_never_slower_than_policies() {
    for (model, machine, untied) in [(MLP, "flat:1", false), (MLP, "flat:2", true), (LENET, "flat:1", false)]
    {
        let base = build(model, &BuildOptions::default()).unwrap();
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

/// The cheapest sets of local search lie between the network's optimum and a small part above it.
#[test]
fn local_search_is_near_the_network_s_optimum() {
    let machine = builtin("flat:1").unwrap();
    for (model, percents) in [(MLP, &[90, 75][..]), (LENET, &[90, 75]), (GPT, &[90])] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let all = SearchProblem::new(&graph, &machine, None).unwrap();
        let configs = (0..all.choices.len()).map(|v| vec![all.forward_config(v, 0).clone()]).collect();
        let candidates = Candidates { mesh: all.context.mesh().clone(), configs };
        let problem = SearchProblem::among(&all.context, candidates, &Control::new()).unwrap();
        let space = KeepSpace::of(&graph);
        let mut pricer = KeepPricer::new(&problem, &space).unwrap().unwrap();
        let kept = pricer.price(&[], u64::MAX);
        let groups: Vec<_> = space.recomputable().into_iter().map(|op| vec![op]).collect();
        for percent in percents {
            let what = format!("{model} at {percent}%");
            let limit = kept.peak / 100 * percent;
            let built = keep_network(&problem, &space, Some(Bytes(limit)), &Control::new()).unwrap().unwrap();
            let outcome = Exact.solve(&built.network, &Control::new().iteration_limit(20));
            let Some(found) = cheapest_set(&mut pricer, &groups, &[], limit, &Control::new()) else {
                assert!(outcome.cost.is_none(), "{what}: the network has an answer");
                continue;
            };
            assert!(found.price.peak <= limit && found.price.time >= kept.time, "{what}");
            assert!(outcome.bound <= found.price.time, "{what}: a bound above a plan");
            // At most a tenth of the time that recomputing costs at all.
            let (own, least) = (found.price.time - kept.time, outcome.bound - kept.time);
            assert!(
                own <= least + (kept.time / 100).max(least / 10),
                "{what}: {own} ps more, {least} at least"
            );
        }
    }
}
