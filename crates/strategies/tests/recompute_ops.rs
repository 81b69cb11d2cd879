//! Recomputation op by op: plans keep the limit, and are never slower than those of policies; local search is near the optimum.

use shardwright_graph::{OpId, RecomputePolicy, recomputed_ops};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Candidates, Constraints, KeepPricer, KeepSpace, Plan, SearchProblem, keep_network};
use shardwright_search::{Control, FrozenClock, Solver, exact::Exact};
use shardwright_strategies::{Variant, VariantInputs, cheapest_set, find, plan_variants};
use shardwright_zoo::{BuildOptions, build};
use std::time::Duration;

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

/// Chen et al. 2016: every n-th result is kept ("√n" for one n), or the ends of segments of equal bytes ("greedy").
#[test]
fn without_any_time_no_published_heuristic_is_cheaper() {
    let machine = builtin("flat:1").unwrap();
    let mut compared = 0;
    for model in [MLP, LENET, GPT, "vgg16:batch=4"] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let all = SearchProblem::new(&graph, &machine, None).unwrap();
        let configs = (0..all.choices.len()).map(|v| vec![all.forward_config(v, 0).clone()]).collect();
        let candidates = Candidates { mesh: all.context.mesh().clone(), configs };
        let problem = SearchProblem::among(&all.context, candidates, &Control::new()).unwrap();
        let space = KeepSpace::of(&graph);
        let mut pricer = KeepPricer::new(&problem, &space).unwrap().unwrap();
        let ops = space.recomputable();
        let bytes =
            |op: OpId| -> u64 { graph.node(op).outputs.iter().map(|&t| graph.tensor(t).ty.bytes()).sum() };
        let every = |n: usize| -> Vec<OpId> {
            let own = ops.iter().enumerate().filter(|(at, _)| at % n != 0);
            own.map(|(_, &op)| op).collect()
        };
        let greedy = |parts: u64| -> Vec<OpId> {
            let most = ops.iter().map(|&op| bytes(op)).sum::<u64>() / parts;
            let mut segment = 0;
            let mut recomputed = Vec::new();
            for &op in &ops {
                segment += bytes(op);
                if segment > most {
                    segment = 0;
                } else {
                    recomputed.push(op);
                }
            }
            recomputed
        };
        let sets: Vec<Vec<OpId>> = (2..ops.len()).map(every).chain((1..=32).map(greedy)).collect();
        let kept = pricer.price(&[], u64::MAX);
        let groups: Vec<_> = ops.iter().map(|&op| vec![op]).collect();
        let over = Control::new().time_limit(&FrozenClock, Duration::ZERO);
        for percent in [95, 85, 75, 65] {
            let limit = kept.peak / 100 * percent;
            let prices = sets.iter().map(|set| pricer.price(set, limit)).filter(|price| price.excess == 0);
            let Some(least) = prices.map(|price| price.time).min() else { continue };
            let found = cheapest_set(&mut pricer, &groups, &[], limit, &over).unwrap();
            assert!(found.price.peak <= limit, "{model} at {percent}%");
            assert!(
                found.price.time <= least,
                "{model} at {percent}%: {} ps, {least} by a heuristic",
                found.price.time
            );
            compared += 1;
        }
    }
    assert!(compared > 4, "{compared}");
}
