//! Lists the configs of all variables, with their costs, patterns and sizes.

use super::{
    held_memory::HeldMemory,
    relaxation::{Between, ClassConfigs, End, EndKind, Group, Relaxation, TransferKind, group_by},
};
use crate::{
    compute_lower_bound::least_time, context::Context, error::PlanError, variable_classes::VariableClasses,
    variables::Variables,
};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::{Comm, Layout, PatternResharder, PatternTensor, Placement, TensorShape};
use shardwright_graph::{OpId, TensorId};
use shardwright_machine::{Bytes, Level, Mesh, Topology};
use shardwright_search::Control;
use shardwright_space::{AxisUse, Config, Endpoint, Transfer, configs, count_configs};
use std::collections::BTreeMap;

/// The most configs of a class that are listed. A class with more computes as little as it can, and its transfers are free.
const MOST_MEMBERS: usize = 8_000;
/// The most configs of all classes together: the largest classes are not listed beyond that.
const MOST_MEMBERS_IN_ALL: usize = 150_000;

impl Relaxation {
    /// The relaxation with large groups, with prices for memory where there is a limit; none where the control stops.
    pub fn new(
        context: &Context<'_>,
        limit: Option<Bytes>,
        control: &Control<'_>,
    ) -> Result<Option<Self>, PlanError> {
        let mesh = context.machine.mesh();
        let times = context.times_on_slowest(mesh)?;
        let variables: &Variables = &context.variables;
        let ends_of = |transfer: &Transfer| {
            let variable = |end: &Endpoint| variables.index[end.op.index()].0;
            (variable(&transfer.from), variable(&transfer.to))
        };
        let mut inside: Vec<Vec<&Transfer>> = vec![Vec::new(); variables.members.len()];
        for transfer in &context.transfers.pairs {
            let (from, to) = ends_of(transfer);
            if from == to {
                inside[to as usize].push(transfer);
            }
        }
        let classes = VariableClasses::new(context.graph, variables, times.kinds(), &inside, |_| ());
        let rule = |first: u32| &context.shapes[variables.members[first as usize].forward().index()].rule;
        let counts: Vec<usize> =
            classes.first.iter().map(|&first| count_configs(rule(first), mesh, MOST_MEMBERS)).collect();
        let is_listed = listed(&counts);
        // All configs of every class, op by op.
        let members: Vec<Option<Vec<Vec<Config>>>> = classes
            .first
            .par_iter()
            .zip(&is_listed)
            .map(|(&first, &is_listed)| {
                if !is_listed || control.stop_by_time().is_some() {
                    return None;
                }
                let split = &variables.members[first as usize];
                let lead = configs(rule(first), mesh);
                Some(lead.iter().map(|lead| split.configs(&context.shapes, mesh, lead)).collect())
            })
            .collect();
        if control.stop_by_time().is_some() {
            return Ok(None);
        }
        let comm = Comm::new(context.machine, mesh);
        let symmetric = !has_torus(context);
        let mut made: Vec<ClassConfigs> = classes
            .first
            .par_iter()
            .zip(&members)
            .map(|(&first, members)| {
                let split = &variables.members[first as usize];
                let Some(members) = members else {
                    // Whatever its config, a class that is not listed computes at least this.
                    let least = |&op: &OpId| {
                        i64::from(context.graph.runs(op)).saturating_mul(least_time(context, &times, op))
                    };
                    return ClassConfigs::free(split.ops.iter().map(least).sum());
                };
                let forward = variables.index[split.forward().index()].1 as usize;
                let cost = |configs: &Vec<Config>| -> i64 {
                    let own = split.ops.iter().zip(configs).map(|(&op, config)| {
                        // On a torus, halo exchanges depend on the order of axes. Reductions of results that ops complete
                        // count as free.
                        let halo = if symmetric { times.halo(&comm, op, config) } else { 0 };
                        i64::from(context.graph.runs(op)).saturating_mul(times.compute(op, config) + halo)
                    });
                    own.sum()
                };
                let features: Vec<Vec<Vec<u8>>> =
                    members.iter().map(|configs| features(&configs[forward], mesh)).collect();
                let groups = group_by(&(0..members.len() as u32).collect::<Vec<_>>(), |config| {
                    features[config as usize].iter().map(|own| main_use(own)).collect::<Vec<_>>()
                });
                let groups = groups.into_iter().map(Group::of).collect();
                let costs = members.iter().map(cost).collect();
                ClassConfigs { features, costs, groups, inside: Vec::new(), is_free: false }
            })
            .collect();
        // Kinds of endpoints and transfers.
        let mut end_ids: FxHashMap<(EndKind, u32), u32> = FxHashMap::default();
        let mut end_examples: Vec<(Endpoint, u32, u32)> = Vec::new();
        let mut tensor_ids: FxHashMap<TensorShape, u32> = FxHashMap::default();
        let mut kind_ids: FxHashMap<(u32, u32, u32), u32> = FxHashMap::default();
        let mut kinds: Vec<TransferKind> = Vec::new();
        let mut pairs: BTreeMap<(u32, u32), Between> = BTreeMap::new();
        let mut shapes: Vec<TensorShape> = Vec::new();
        for transfer in &context.transfers.pairs {
            let (from_variable, to_variable) = ends_of(transfer);
            let shape = shape_of(context, transfer.tensor)?;
            let tensor = *tensor_ids.entry(shape).or_insert_with(|| {
                shapes.push(shape);
                shapes.len() as u32 - 1
            });
            let mut end = |end: &Endpoint| {
                let (variable, member) = variables.index[end.op.index()];
                let class = classes.of[variable as usize];
                *end_ids.entry(((class, member, end.port, end.reduced), tensor)).or_insert_with(|| {
                    // The endpoint of the class's first variable stands for all.
                    let op = variables.members[classes.first[class as usize] as usize].ops[member as usize];
                    end_examples.push((Endpoint { op, ..*end }, class, tensor));
                    end_examples.len() as u32 - 1
                })
            };
            let (from, to) = (end(&transfer.from), end(&transfer.to));
            let runs = context.graph.runs(transfer.to.op);
            let kind = *kind_ids.entry((from, to, runs)).or_insert_with(|| {
                kinds.push(TransferKind { from, to, runs, table: Vec::new(), columns: 0 });
                kinds.len() as u32 - 1
            });
            if from_variable != to_variable {
                let pair = (from_variable.min(to_variable), from_variable.max(to_variable));
                pairs.entry(pair).or_default().push((kind, from_variable < to_variable));
            } else if classes.first[classes.of[to_variable as usize] as usize] == to_variable
                && !made[classes.of[to_variable as usize] as usize].is_free
            {
                made[classes.of[to_variable as usize] as usize].inside.push(kind);
            }
        }
        // Layouts, then patterns.
        let layouts: Vec<Vec<Layout>> = end_examples
            .par_iter()
            .map(|(end, class, _)| {
                let member = variables.index[end.op.index()].1 as usize;
                let members = members[*class as usize].iter().flatten();
                members.map(|configs| end.layout(&context.shapes, &configs[member], mesh)).collect()
            })
            .collect();
        let mut partial = vec![false; shapes.len()];
        for ((_, _, tensor), layouts) in end_examples.iter().zip(&layouts) {
            let has = |layout: &Layout| !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty();
            partial[*tensor as usize] |= layouts.iter().any(has);
        }
        let resharder = PatternResharder::new(context.machine);
        // Reshards of a tensor with too many patterns count as free.
        let tensors: Vec<Option<PatternTensor>> = shapes
            .par_iter()
            .zip(&partial)
            .map(|(shape, &partial)| resharder.tensor(shape, partial))
            .collect();
        let ends: Option<Vec<End>> = end_examples
            .par_iter()
            .zip(&layouts)
            .map(|(&(_, class, tensor), layouts)| {
                let pattern = |layout: &Layout| match &tensors[tensor as usize] {
                    Some(tensor) => tensor.pattern(layout),
                    None => Some(0),
                };
                let mut patterns: Option<Vec<u32>> = layouts.iter().map(pattern).collect();
                if made[class as usize].is_free {
                    patterns = Some(vec![0]);
                }
                let (sets, times, is_source) = (Vec::new(), Vec::new(), false);
                patterns.map(|patterns| End { class, tensor, patterns, sets, is_source, times })
            })
            .collect();
        let Some(mut ends) = ends else { return Ok(None) };
        kinds.iter().for_each(|kind| ends[kind.from as usize].is_source = true);
        let memory = limit.map(|limit| HeldMemory::new(context, &classes, &members, limit));
        let of = classes.of;
        pairs.values_mut().for_each(|transfers| transfers.sort_unstable());
        let pairs = pairs.into_iter().collect();
        Ok(Some(Self { classes: made, of, ends, tensors, kinds, pairs, times: FxHashMap::default(), memory }))
    }
}

/// Which classes with so many configs are listed: the smallest ones, as many as fit.
fn listed(counts: &[usize]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&class| counts[class]);
    let mut listed = vec![false; counts.len()];
    let mut all = 0;
    for class in order {
        all += counts[class];
        listed[class] = counts[class] <= MOST_MEMBERS && all <= MOST_MEMBERS_IN_ALL;
    }
    listed
}

/// Whether a level is a torus, where axes of a class are not interchangeable in all prices.
fn has_torus(context: &Context<'_>) -> bool {
    let torus = |level: &Level| matches!(level.link.topology, Topology::Torus { .. });
    context.machine.levels().iter().any(torus)
}

fn shape_of(context: &Context<'_>, tensor: TensorId) -> Result<TensorShape, PlanError> {
    let known = context.graph.tensor(tensor);
    TensorShape::new(&known.ty.shape, known.ty.dtype.bytes() as u32)
        .map_err(|source| PlanError::Tensor { tensor: known.name.clone(), source })
}

/// Per class of interchangeable axes: how many of them split each factor, and how many replicate, in order of first use.
fn features(config: &Config, mesh: &Mesh) -> Vec<Vec<u8>> {
    let mut keys = Vec::new();
    let mut all: Vec<Vec<u8>> = Vec::new();
    for (axis, used) in mesh.axes().iter().zip(config.uses()) {
        let key = (axis.level, axis.size, axis.dim);
        let class = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
            keys.push(key);
            all.push(Vec::new());
            keys.len() - 1
        });
        let at = match used {
            AxisUse::Split(factor) => usize::from(*factor) + 1,
            _ => 0,
        };
        if all[class].len() <= at {
            all[class].resize(at + 1, 0);
        }
        all[class][at] += 1;
    }
    all
}

/// The use of more than half of a class's axes, if there is one.
fn main_use(counts: &[u8]) -> Option<usize> {
    let axes: u8 = counts.iter().sum();
    counts.iter().position(|&count| 2 * count > axes)
}
