//! A bound that holds whatever the axes: the computing that no split of any op can avoid.
//!
//! On hundreds of devices the search works on glued axes and then refines; its bound says nothing about the finer axes.
//! This one does: each op takes at least the least time of its parts over all ways to split it on the machine's prime
//! axes, and communication takes at least nothing. Plans on coarser axes, tied or not, are plans of that space too.

use crate::{error::PlanError, problem::Problem, times::OpTimes};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::OperatorTimes;
use shardwright_graph::{FactorIndex, Op, OpId, Rule};
use shardwright_machine::Mesh;
use shardwright_space::{AxisUse, Config, OpShapes};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// The most ways to divide an op's factors that are looked at; an op with more adds nothing to the bound.
const MOST_WAYS: usize = 1 << 14;

/// Picoseconds that every plan of this graph on this machine spends computing.
///
/// # Errors
/// Where the costs are of another device.
pub fn floor(problem: &Problem<'_>) -> Result<i64, PlanError> {
    let (graph, mesh) = (problem.graph, problem.machine.mesh());
    let device = problem.machine.slowest();
    let times = OpTimes::new(OperatorTimes::new(&device, problem.costs())?, graph, &problem.shapes, mesh);
    let mut alike: FxHashMap<(&Op, &OpShapes), (OpId, i64)> = FxHashMap::default();
    for op in graph.op_ids() {
        let key = (&graph.node(op).op, &problem.shapes[op.index()]);
        alike.entry(key).or_insert((op, 0)).1 += 1;
    }
    let mut kinds: Vec<(OpId, i64)> = alike.into_values().collect();
    kinds.sort_unstable();
    let least = kinds.par_iter().map(|&(op, count)| {
        let ways = ways(&problem.shapes[op.index()].rule, mesh);
        let least = ways.values().map(|config| times.compute(op, config)).min();
        least.unwrap_or(0).saturating_mul(count)
    });
    Ok(least.reduce(|| 0, i64::saturating_add))
}

/// A config for every way to divide the factors of a rule into parts; none if there are too many.
fn ways(rule: &Rule, mesh: &Mesh) -> BTreeMap<SmallVec<[u64; 6]>, Config> {
    let whole = Config::replicated(mesh.len());
    let mut ways = BTreeMap::from([(whole.parts(rule, mesh), whole)]);
    for axis in mesh.all().iter() {
        let mut more = ways.clone();
        for config in ways.values() {
            for factor in 0..rule.factors.len() as FactorIndex {
                let mut config = config.clone();
                config.set(axis, AxisUse::Split(factor));
                if config.check(rule, mesh).is_ok() {
                    more.entry(config.parts(rule, mesh)).or_insert(config);
                }
            }
        }
        if more.len() > MOST_WAYS {
            return BTreeMap::new();
        }
        ways = more;
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Demands, evaluate, search, strategy};
    use shardwright_frontend::zoo::{BuildOptions, build};
    use shardwright_machine::builtin;
    use shardwright_search::Control;

    #[test]
    fn no_plan_computes_less_and_one_without_communication_computes_just_that() {
        for (model, machine) in [
            ("mlp:batch=64,hidden=256,layers=2", "flat:8"),
            ("lenet5:batch=32", "a100x64:16"),
            ("gpt:layers=1,hidden=64,heads=4,batch=8,seq=16,vocab=128", "flat:8"),
        ] {
            let graph = build(model, &BuildOptions::default()).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = Problem::new(&graph, &machine, None).unwrap();
            let floor = floor(&problem).unwrap();
            assert!(floor > 0, "{model}");
            for strategy in strategy::STRATEGIES {
                let found = search(&problem, strategy, &Demands::default(), &Control::new()).unwrap();
                let costs = evaluate(&problem, &found.configs).unwrap();
                assert!(floor <= costs.compute(), "{model} {}: {floor}", strategy.name);
            }
        }
        // One device leaves no choice: all of it is computing.
        let graph = build("lenet5", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:1").unwrap();
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let exact = strategy::find("exact").unwrap();
        let found = search(&problem, exact, &Demands::default(), &Control::new()).unwrap();
        assert_eq!(floor(&problem).unwrap(), found.objective);
    }

    #[test]
    fn all_ways_to_divide_are_there_once() {
        let graph = build("mlp:batch=4,input=8,hidden=8,layers=1", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:8").unwrap();
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let contract = graph.op_ids().find(|&op| graph.node(op).op.kind() == "contract").unwrap();
        let rule = &problem.shapes[contract.index()].rule;
        let found = ways(rule, machine.mesh());
        // Independently: all tuples of powers of two, of which the product divides eight and each its factor.
        let sizes: Vec<u64> = rule.factors.iter().map(|f| f.size).collect();
        let mut tuples = vec![vec![]];
        for &size in &sizes {
            let powers = [1, 2, 4, 8].into_iter().filter(|&p| size.is_multiple_of(p));
            tuples =
                powers.flat_map(|p| tuples.iter().map(move |t: &Vec<u64>| [&t[..], &[p]].concat())).collect();
        }
        tuples.retain(|t| t.iter().product::<u64>() <= 8);
        tuples.sort();
        let parts: Vec<Vec<u64>> = found.keys().map(|parts| parts.to_vec()).collect();
        assert_eq!(parts, tuples);
    }
}
