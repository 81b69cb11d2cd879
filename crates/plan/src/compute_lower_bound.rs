//! A lower bound that holds on all axes: the computing time that no split of any op can avoid.
//!
//! On hundreds of devices the search works on merged axes and then refines. Its bound does not cover the finer axes;
//! this bound does. Each op takes at least its minimum time over all splits on the machine's prime axes. Communication
//! counts as zero. Plans on coarser axes, tied or not, are plans of that space too.
//!
//! The same holds for the step that runs, where communication overlaps with computing: a device computes its ops in
//! sequence, so no step is shorter than its computing.

use crate::{context::Context, error::PlanError, op_times::OpTimes};
use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use shardwright_graph::{FactorIndex, Op, OpId, Rule};
use shardwright_machine::Mesh;
use shardwright_space::OpShapes;
use smallvec::SmallVec;
use std::sync::OnceLock;

/// The most divisions of an op's factors that are enumerated. An op with more adds nothing to the bound.
const MAX_DIVISIONS: usize = 1 << 14;

/// Ops that have together at most one part in so many of the time may be left out of a bound.
const NEGLIGIBLE: i128 = 1000;
/// On so few axes, all divisions of all ops are priced in no time.
const FEW_AXES: usize = 6;

/// The bounds of a graph on a machine, each computed once for all contexts that share them.
#[derive(Debug, Default)]
pub(crate) struct LowerBounds {
    compute: OnceLock<i64>,
    step: OnceLock<i64>,
}

/// Picoseconds that every plan of this graph on this machine spends computing.
///
/// # Errors
/// Where the costs are of another device.
pub fn compute_lower_bound(context: &Context<'_>) -> Result<i64, PlanError> {
    if let Some(known) = context.facts.bounds.compute.get() {
        return Ok(*known);
    }
    let times = context.times_on_slowest(context.machine.mesh())?;
    let bound = || {
        let price = |op, parts: &[u64]| i128::from(times.compute_division(op, parts));
        let total = sum_of_least(context, |_| 1, price);
        i64::try_from(total).unwrap_or(i64::MAX)
    };
    Ok(*context.facts.bounds.compute.get_or_init(bound))
}

/// Picoseconds that no step of this graph on this machine is shorter than, whatever overlaps.
///
/// Without pins (`spmd`), every device runs every op, and the computing of one device is the bound. With pins, devices run
/// different ops. An op then occupies its time on each of its devices, and the busiest device has at least the average.
///
/// # Errors
/// Where the costs are of another device.
pub fn step_lower_bound(context: &Context<'_>, spmd: bool) -> Result<i64, PlanError> {
    if spmd {
        return compute_lower_bound(context);
    }
    if let Some(known) = context.facts.bounds.step.get() {
        return Ok(*known);
    }
    let bound = repeated_step_lower_bound(context, |_| 1)?;
    Ok(*context.facts.bounds.step.get_or_init(|| bound))
}

/// The same with pins, of a longer step in which every op of this one stands for so many equal ops.
///
/// # Errors
/// Where the costs are of another device.
pub fn repeated_step_lower_bound(
    context: &Context<'_>,
    repeats: impl Fn(OpId) -> u64,
) -> Result<i64, PlanError> {
    let mesh = context.machine.mesh();
    let times: Vec<OpTimes<'_>> =
        context.times_of_each_device()?.into_iter().map(|times| context.op_times(times, mesh)).collect();
    let occupied = |op: OpId, parts: &[u64]| {
        let least = times.iter().map(|times| times.compute_division(op, parts)).min().unwrap_or(0);
        parts.iter().fold(i128::from(least), |time, &parts| time.saturating_mul(i128::from(parts)))
    };
    let total = sum_of_least(context, repeats, occupied) / i128::from(context.machine.devices().max(1));
    Ok(i64::try_from(total).unwrap_or(i64::MAX))
}

/// The least computing of an op under any division, in picoseconds.
pub(crate) fn least_time(context: &Context<'_>, times: &OpTimes<'_>, op: OpId) -> i64 {
    let divisions = divisions(&context.shapes[op.index()].rule, context.machine.mesh());
    divisions.iter().map(|parts| times.compute_division(op, parts)).min().unwrap_or(0)
}

/// The sum over all ops, each counted so many times, of the least price of any division into parts per factor.
fn sum_of_least(
    context: &Context<'_>,
    repeats: impl Fn(OpId) -> u64,
    price: impl Fn(OpId, &[u64]) -> i128 + Sync,
) -> i128 {
    let (graph, mesh) = (&context.graph, context.machine.mesh());
    let mut counts: FxHashMap<(&Op, &OpShapes), (OpId, i128)> = FxHashMap::default();
    for op in graph.op_ids() {
        let key = (&graph.node(op).op, &context.shapes[op.index()]);
        counts.entry(key).or_insert((op, 0)).1 += i128::from(graph.runs(op)) * i128::from(repeats(op));
    }
    let mut kinds: Vec<(OpId, i128)> = counts.into_values().collect();
    kinds.sort_unstable();
    let kinds = largest(context, kinds, &price);
    let least = kinds.par_iter().map(|&(op, count)| {
        let divisions = divisions(&context.shapes[op.index()].rule, mesh);
        let least = divisions.iter().map(|parts| price(op, parts)).min();
        least.unwrap_or(0).saturating_mul(count)
    });
    least.reduce(|| 0, i128::saturating_add)
}

/// The kinds of ops without those that hardly matter: all of them together have at most [`NEGLIGIBLE`] of the sum, if every
/// op takes its share of the time on one device. A bound may leave terms out.
fn largest(
    context: &Context<'_>,
    kinds: Vec<(OpId, i128)>,
    price: &(impl Fn(OpId, &[u64]) -> i128 + Sync),
) -> Vec<(OpId, i128)> {
    let mesh = context.machine.mesh();
    if mesh.len() <= FEW_AXES {
        return kinds;
    }
    let mut priced: Vec<(i128, (OpId, i128))> = kinds
        .into_iter()
        .map(|(op, count)| {
            let whole: Parts = SmallVec::from_elem(1, context.shapes[op.index()].rule.factors.len());
            (price(op, &whole).saturating_mul(count), (op, count))
        })
        .collect();
    let total = priced.iter().fold(0i128, |sum, own| sum.saturating_add(own.0));
    priced.sort_unstable();
    let mut left_out = 0i128;
    let first = priced.iter().position(|own| {
        left_out = left_out.saturating_add(own.0);
        left_out > total / NEGLIGIBLE
    });
    priced.drain(..first.unwrap_or(0));
    priced.into_iter().map(|(_, kind)| kind).collect()
}

/// Parts per factor.
type Parts = SmallVec<[u64; 6]>;

/// All divisions of a rule's factors into parts on a mesh; none if there are too many.
fn divisions(rule: &Rule, mesh: &Mesh) -> FxHashSet<Parts> {
    let mut sizes: Vec<u32> = mesh.axes().iter().map(|axis| axis.size).collect();
    sizes.sort_unstable();
    let mut all: FxHashSet<Parts> = FxHashSet::from_iter([SmallVec::from_elem(1, rule.factors.len())]);
    for equal in sizes.chunk_by(|a, b| a == b) {
        // After the n-th of equal axes: the divisions that use n of them.
        let mut newest = all.clone();
        for &size in equal {
            let finer = |parts: &Parts| {
                let factors = 0..rule.factors.len();
                let own = factors.filter(|&f| rule.divides(f as FactorIndex, parts[f], size));
                own.map(|f| {
                    let mut finer = parts.clone();
                    finer[f] *= u64::from(size);
                    finer
                })
                .collect::<SmallVec<[Parts; 6]>>()
            };
            newest = newest.iter().flat_map(finer).collect();
            all.extend(newest.iter().cloned());
            if all.len() > MAX_DIVISIONS {
                return FxHashSet::default();
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;
    use shardwright_zoo::{BuildOptions, build};

    #[test]
    fn every_division_is_listed_once() {
        let graph = build("mlp:batch=4,input=8,hidden=8,layers=1", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:8").unwrap();
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
        let contract = graph.op_ids().find(|&op| graph.node(op).op.kind() == "contract").unwrap();
        let rule = &context.shapes[contract.index()].rule;
        let found = divisions(rule, machine.mesh());
        // The expected tuples: powers of two whose product divides eight, each dividing its factor.
        let sizes: Vec<u64> = rule.factors.iter().map(|f| f.size).collect();
        let mut tuples = vec![vec![]];
        for &size in &sizes {
            let powers = [1, 2, 4, 8].into_iter().filter(|&p| size.is_multiple_of(p));
            tuples =
                powers.flat_map(|p| tuples.iter().map(move |t: &Vec<u64>| [&t[..], &[p]].concat())).collect();
        }
        tuples.retain(|t| t.iter().product::<u64>() <= 8);
        tuples.sort();
        let mut parts: Vec<Vec<u64>> = found.iter().map(|parts| parts.to_vec()).collect();
        parts.sort();
        assert_eq!(parts, tuples);
    }
}
