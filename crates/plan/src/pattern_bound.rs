//! A lower bound on the objective that holds on the machine's prime axes, communication included.
//!
//! A problem on merged axes is solved exactly, but its bound does not cover finer axes, and the prime axes of a large machine
//! have too many configs for tables. This bound needs no table over configs:
//!
//! - Configs count as equal that differ only in the order of interchangeable axes. Reshards between their layouts are bounded
//!   by the paths between [patterns](shardwright_cost::PatternResharder).
//! - Configs are put into *groups*. A group's cost is the least of its configs, and the cost between two groups is the
//!   least between any two of their layouts. So the network over groups has a lower bound of the network over configs.
//! - The network over groups is solved, and the groups that its solution uses are divided. The bound rises with every
//!   round, and is valid after each. Configs that no solution comes near stay together in large groups.
//!
//! The bound holds for every assignment of the problem's variables on the prime axes, and so for those within any memory limit.
//! Configs on merged axes are configs on prime axes too, except that ops which follow a layer's forward op may then
//! follow it otherwise ([`is_on_prime_axes`]).

use crate::{context::Context, error::PlanError, variable_classes::VariableClasses, variables::Variables};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::{Comm, Layout, PatternResharder, PatternTensor, Placement, TensorShape};
use shardwright_graph::{OpId, TensorId};
use shardwright_machine::{Level, Mesh, Topology};
use shardwright_search::{
    Control, FORBIDDEN, Interval, Network, NetworkBuilder, SharedTable, Solver, VarId, exact::Exact, gap,
};
use shardwright_space::{Assignment, AxisUse, Config, Endpoint, Transfer, configs, count_configs};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most configs of an op that are put into groups. The bound leaves out the communication of a model with a larger op.
const MOST_MEMBERS: usize = 8_000;
/// The most configs of all classes of variables together.
const MOST_MEMBERS_IN_ALL: usize = 150_000;
/// The most groups of a variable: the size of tables is the square of it.
const MOST_GROUPS: usize = 400;
/// The least memory for tables with which the bound is computed. Groups and their reshards take about 150 MiB for eight layers on 64
/// devices.
const LEAST_MEMORY: u64 = 512 << 20;
/// The most rounds.
const MOST_ROUNDS: usize = 60;
/// The rounds end when the bound has risen by less than this share in so many rounds.
const LEAST_RISE: f64 = 1e-3;
const PATIENCE: usize = 6;
/// The last rounds whose choices are candidates.
const CANDIDATE_ROUNDS: usize = 12;
/// Each network over groups is solved to this gap.
const ROUND_GAP: f64 = 1e-3;

/// Whether an assignment on a mesh is one of the context's variables on the prime axes: then [`pattern_bound`] holds for it.
pub fn is_on_prime_axes(context: &Context<'_>, mesh: &Mesh, assignment: &Assignment) -> bool {
    if assignment.has_pins() {
        return false;
    }
    if context.untied {
        return true;
    }
    let fine = |op: OpId| assignment.config(op).on_primes(mesh);
    context.variables.members.iter().all(|split| {
        let derived = split.configs(&context.shapes, context.machine.mesh(), &fine(split.forward()));
        split.ops.iter().zip(derived).all(|(&op, config)| config == fine(op))
    })
}

/// A bound on prime axes, and the configs that led to it.
pub struct PatternBound {
    /// Picoseconds that no assignment of the context's variables on the machine's prime axes costs less than; zero where the model
    /// has too many configs, or the control allows too little memory.
    pub bound: i64,
    /// Per variable: configs of its leading op on the prime axes, one of the group that each of the last rounds chose. Good
    /// assignments are made of them.
    pub candidates: Vec<Vec<Config>>,
}

/// Bounds the objective on the machine's prime axes. Ends when the bound is near enough to `target` by the control's gap, when it
/// is exact for patterns or hardly rises, or when the control stops.
///
/// # Errors
/// Where the costs are of another device, or a tensor has no layout.
pub fn pattern_bound(
    context: &Context<'_>,
    target: i64,
    control: &Control<'_>,
) -> Result<PatternBound, PlanError> {
    let mut found = PatternBound { bound: 0, candidates: Vec::new() };
    if control.memory_bytes < LEAST_MEMORY {
        return Ok(found);
    }
    let Some(mut relaxation) = Relaxation::new(context, control)? else { return Ok(found) };
    let mut bounds: Vec<i64> = Vec::new();
    let mut rounds: Vec<Vec<u32>> = Vec::new();
    while bounds.len() < MOST_ROUNDS && control.stop_by_time().is_none() {
        let Some(network) = relaxation.network(control)? else { break };
        let asked = control.gap;
        let enough = move |_: Option<i64>, found: i64| gap(target, found).is_some_and(|gap| gap <= asked);
        let round = Control {
            gap: ROUND_GAP,
            enough: Some(&enough),
            progress: None,
            iterations: None,
            ..control.clone()
        };
        let outcome = Exact.solve(&network, &round);
        found.bound = found.bound.max(outcome.bound);
        bounds.push(found.bound);
        let Some(choice) = outcome.choice else { break };
        rounds.push(relaxation.cheapest(&choice));
        let stalled = bounds.len().checked_sub(1 + PATIENCE).is_some_and(|before| {
            let rise = found.bound - bounds[before];
            rise as f64 <= LEAST_RISE * found.bound as f64
        });
        if control.is_near(target, found.bound) || stalled || !relaxation.divide(&choice) {
            break;
        }
    }
    let last = &rounds[rounds.len().saturating_sub(CANDIDATE_ROUNDS)..];
    found.candidates = relaxation.configs(context, last);
    Ok(found)
}

/// An endpoint up to its variable's class: class, member, port, whether partial results are reduced.
type EndKind = (u32, u32, u32, bool);

/// A tensor at an endpoint of a class of variables.
struct End {
    class: u32,
    tensor: u32,
    /// Per config of the class: the pattern.
    patterns: Vec<u32>,
    /// Per group of the class: its patterns, ascending.
    sets: Vec<Vec<u32>>,
    /// Whether transfers start here.
    is_source: bool,
    /// Where transfers start, per group: the least seconds from its patterns to each pattern of the tensor.
    times: Vec<Arc<[f64]>>,
}

/// Transfers of one kind: between two endpoints, so many times.
struct TransferKind {
    from: u32,
    to: u32,
    runs: u32,
    /// The least picoseconds between groups of the source (rows) and of the reader (columns).
    table: Vec<i64>,
    columns: usize,
}

/// A class of variables: its configs, in groups.
struct ClassConfigs {
    /// Per config of the leading op: the number of axes of each class with each use, by which groups are formed.
    features: Vec<Vec<Vec<u8>>>,
    /// Per config: picoseconds of computing and halo exchanges.
    costs: Vec<i64>,
    groups: Vec<Group>,
    /// Transfers inside of the variable.
    inside: Vec<u32>,
}

/// Some configs of a class.
struct Group {
    configs: Vec<u32>,
    /// Whether nothing is computed for it yet.
    is_new: bool,
    /// The least cost of a config, with transfers inside of the variable.
    cost: i64,
}

impl Group {
    fn of(configs: Vec<u32>) -> Self {
        Self { configs, is_new: true, cost: 0 }
    }
}

/// The kinds of the transfers between two variables; true: from the lower to the higher one.
type Between = Vec<(u32, bool)>;

/// The problem on prime axes, relaxed to groups of configs.
struct Relaxation {
    classes: Vec<ClassConfigs>,
    /// Per variable: its class.
    of: Vec<u32>,
    ends: Vec<End>,
    tensors: Vec<PatternTensor>,
    kinds: Vec<TransferKind>,
    /// Pairs of variables, with the transfers between them.
    pairs: Vec<((u32, u32), Between)>,
    /// Times from sets of patterns of a tensor, which endpoints share.
    times: FxHashMap<(u32, Vec<u32>), Arc<[f64]>>,
}

impl Relaxation {
    /// The relaxation with large groups; none where there are too many configs.
    fn new(context: &Context<'_>, control: &Control<'_>) -> Result<Option<Self>, PlanError> {
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
        let mut all = 0;
        for &first in &classes.first {
            let own = count_configs(rule(first), mesh, MOST_MEMBERS);
            all += own;
            if own > MOST_MEMBERS || all > MOST_MEMBERS_IN_ALL {
                return Ok(None);
            }
        }
        // All configs of every class, op by op.
        let members: Vec<Vec<Vec<Config>>> = classes
            .first
            .par_iter()
            .map(|&first| {
                let split = &variables.members[first as usize];
                let lead = configs(rule(first), mesh);
                lead.iter().map(|lead| split.configs(&context.shapes, mesh, lead)).collect()
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
                ClassConfigs { features, costs, groups, inside: Vec::new() }
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
            } else if classes.first[classes.of[to_variable as usize] as usize] == to_variable {
                made[classes.of[to_variable as usize] as usize].inside.push(kind);
            }
        }
        // Layouts, then patterns.
        let layouts: Vec<Vec<Layout>> = end_examples
            .par_iter()
            .map(|(end, class, _)| {
                let member = variables.index[end.op.index()].1 as usize;
                let members = &members[*class as usize];
                members.iter().map(|configs| end.layout(&context.shapes, &configs[member], mesh)).collect()
            })
            .collect();
        let mut partial = vec![false; shapes.len()];
        for ((_, _, tensor), layouts) in end_examples.iter().zip(&layouts) {
            let has = |layout: &Layout| !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty();
            partial[*tensor as usize] |= layouts.iter().any(has);
        }
        let resharder = PatternResharder::new(context.machine);
        let tensors: Option<Vec<PatternTensor>> = shapes
            .par_iter()
            .zip(&partial)
            .map(|(shape, &partial)| resharder.tensor(shape, partial))
            .collect();
        let Some(tensors) = tensors else { return Ok(None) };
        let ends: Option<Vec<End>> = end_examples
            .par_iter()
            .zip(&layouts)
            .map(|(&(_, class, tensor), layouts)| {
                let patterns: Option<Vec<u32>> =
                    layouts.iter().map(|layout| tensors[tensor as usize].pattern(layout)).collect();
                let (sets, times, is_source) = (Vec::new(), Vec::new(), false);
                patterns.map(|patterns| End { class, tensor, patterns, sets, is_source, times })
            })
            .collect();
        let Some(mut ends) = ends else { return Ok(None) };
        kinds.iter().for_each(|kind| ends[kind.from as usize].is_source = true);
        let of = classes.of;
        pairs.values_mut().for_each(|transfers| transfers.sort_unstable());
        let pairs = pairs.into_iter().collect();
        Ok(Some(Self { classes: made, of, ends, tensors, kinds, pairs, times: FxHashMap::default() }))
    }

    /// Computes what new groups need: patterns, times, costs and tables. False where the control stops.
    fn update(&mut self, control: &Control<'_>) -> bool {
        let classes = &self.classes;
        self.ends.par_iter_mut().for_each(|end| {
            let groups = &classes[end.class as usize].groups;
            end.sets.resize(groups.len(), Vec::new());
            for (set, group) in end.sets.iter_mut().zip(groups).filter(|(_, group)| group.is_new) {
                *set = group.configs.iter().map(|&config| end.patterns[config as usize]).collect();
                set.sort_unstable();
                set.dedup();
            }
        });
        if !self.update_times(control) {
            return false;
        }
        let (ends, kinds) = (&self.ends, &self.kinds);
        self.classes.par_iter_mut().for_each(|class| {
            let (costs, inside) = (&class.costs, &class.inside);
            for (at, group) in class.groups.iter_mut().enumerate().filter(|(_, group)| group.is_new) {
                let config = |&config: &u32| {
                    inside.iter().fold(costs[config as usize], |cost, &kind| {
                        let TransferKind { from, to, runs, .. } = kinds[kind as usize];
                        let to = ends[to as usize].patterns[config as usize];
                        let time = ends[from as usize].times[at][to as usize];
                        cost.saturating_add(least_picoseconds(time, runs)).min(FORBIDDEN)
                    })
                };
                group.cost = group.configs.iter().map(config).min().unwrap_or(FORBIDDEN);
            }
        });
        let classes = &self.classes;
        self.kinds.par_iter_mut().for_each(|kind| {
            let (from, to) = (&ends[kind.from as usize], &ends[kind.to as usize]);
            let (sources, readers) =
                (&classes[from.class as usize].groups, &classes[to.class as usize].groups);
            let mut table = Vec::with_capacity(sources.len() * readers.len());
            for (row, source) in sources.iter().enumerate() {
                for (column, reader) in readers.iter().enumerate() {
                    table.push(match source.is_new || reader.is_new {
                        false => kind.table[row * kind.columns + column],
                        true => {
                            let times = to.sets[column].iter().map(|&at| from.times[row][at as usize]);
                            least_picoseconds(times.fold(f64::INFINITY, f64::min), kind.runs)
                        }
                    });
                }
            }
            (kind.table, kind.columns) = (table, readers.len());
        });
        for class in &mut self.classes {
            class.groups.iter_mut().for_each(|group| group.is_new = false);
        }
        true
    }

    /// Computes the times from new groups' patterns. False where the control stops.
    fn update_times(&mut self, control: &Control<'_>) -> bool {
        let mut missing: Vec<(u32, Vec<u32>)> = Vec::new();
        for end in self.ends.iter().filter(|end| end.is_source) {
            let groups = &self.classes[end.class as usize].groups;
            for (set, _) in end.sets.iter().zip(groups).filter(|(_, group)| group.is_new) {
                let key = (end.tensor, set.clone());
                if !self.times.contains_key(&key) {
                    missing.push(key);
                }
            }
        }
        missing.sort_unstable();
        missing.dedup();
        let jobs: Vec<&[(u32, Vec<u32>)]> =
            missing.chunk_by(|a, b| a.0 == b.0).flat_map(|own| own.chunks(8)).collect();
        let run = |job: &&[(u32, Vec<u32>)]| {
            if control.stop_by_time().is_some() {
                return None;
            }
            let sources: Vec<&[u32]> = job.iter().map(|(_, set)| &**set).collect();
            Some(self.tensors[job[0].0 as usize].times(&sources))
        };
        let found: Option<Vec<Vec<Arc<[f64]>>>> = jobs.par_iter().map(run).collect();
        let Some(found) = found else { return false };
        self.times.extend(missing.into_iter().zip(found.into_iter().flatten()));
        let (classes, times) = (&self.classes, &self.times);
        self.ends.par_iter_mut().filter(|end| end.is_source).for_each(|end| {
            let groups = &classes[end.class as usize].groups;
            end.times.resize_with(groups.len(), || Arc::from([]));
            for (at, _) in groups.iter().enumerate().filter(|(_, group)| group.is_new) {
                if let Some(known) = times.get(&(end.tensor, end.sets[at].clone())) {
                    end.times[at] = Arc::clone(known);
                }
            }
        });
        true
    }

    /// The network over groups; none where the control stops.
    fn network(&mut self, control: &Control<'_>) -> Result<Option<Network>, PlanError> {
        if !self.update(control) {
            return Ok(None);
        }
        let mut builder = NetworkBuilder::new();
        for &class in &self.of {
            let costs: Vec<i64> =
                self.classes[class as usize].groups.iter().map(|group| group.cost).collect();
            builder.variable(&costs, &[], Interval::default())?;
        }
        let mut shared: FxHashMap<&[(u32, bool)], SharedTable> = FxHashMap::default();
        for ((u, v), transfers) in &self.pairs {
            let table = match shared.get(&**transfers) {
                Some(&known) => known,
                None => {
                    let made = builder.table(&self.sum(*u, *v, transfers))?;
                    shared.insert(transfers, made);
                    made
                }
            };
            builder.join(VarId(*u), VarId(*v), table)?;
        }
        Ok(Some(builder.build()?))
    }

    /// The table of a pair of variables: the sum of the times of all transfers between them.
    fn sum(&self, u: u32, v: u32, transfers: &[(u32, bool)]) -> Vec<i64> {
        let size = |variable: u32| self.classes[self.of[variable as usize] as usize].groups.len();
        let (rows, columns) = (size(u), size(v));
        let mut sum = vec![0i64; rows * columns];
        for &(kind, upwards) in transfers {
            let own = &self.kinds[kind as usize].table;
            for (row, cells) in sum.chunks_mut(columns).enumerate() {
                for (column, cell) in cells.iter_mut().enumerate() {
                    let at = if upwards { row * columns + column } else { column * rows + row };
                    *cell = cell.saturating_add(own[at]).min(FORBIDDEN);
                }
            }
        }
        sum
    }

    /// Per variable: the cheapest config of the group that it chooses.
    fn cheapest(&self, choice: &[u32]) -> Vec<u32> {
        let config = |(&class, &group): (&u32, &u32)| {
            let class = &self.classes[class as usize];
            let members = class.groups[group as usize].configs.iter().copied();
            members.min_by_key(|&config| class.costs[config as usize]).unwrap_or(0)
        };
        self.of.iter().zip(choice).map(config).collect()
    }

    /// Per variable: the configs of its leading op in some rounds, ascending.
    fn configs(&self, context: &Context<'_>, rounds: &[Vec<u32>]) -> Vec<Vec<Config>> {
        let mut per_class: Vec<Option<Vec<Config>>> = vec![None; self.classes.len()];
        let variable = |(v, &class): (usize, &u32)| {
            let listed = per_class[class as usize].get_or_insert_with(|| {
                let lead = context.variables.members[v].forward();
                configs(&context.shapes[lead.index()].rule, context.machine.mesh())
            });
            let mut own: Vec<u32> = rounds.iter().map(|round| round[v]).collect();
            own.sort_unstable();
            own.dedup();
            own.into_iter().map(|config| listed[config as usize].clone()).collect()
        };
        self.of.iter().enumerate().map(variable).collect()
    }

    /// Divides the groups that a solution uses; false where all of them have one config.
    fn divide(&mut self, choice: &[u32]) -> bool {
        let mut used: Vec<Vec<u32>> = vec![Vec::new(); self.classes.len()];
        for (&class, &group) in self.of.iter().zip(choice) {
            used[class as usize].push(group);
        }
        let mut divided = false;
        for (class, mut used) in self.classes.iter_mut().zip(used) {
            used.sort_unstable();
            used.dedup();
            for &group in used.iter().rev() {
                let members = &class.groups[group as usize].configs;
                if members.len() < 2 || class.groups.len() >= MOST_GROUPS {
                    continue;
                }
                // By the uses of the first class of axes in which the configs differ.
                let differ = |at: &usize| {
                    members
                        .iter()
                        .any(|&m| class.features[m as usize][*at] != class.features[members[0] as usize][*at])
                };
                let axes = class.features[members[0] as usize].len();
                let Some(at) = (0..axes).find(differ) else { continue };
                let parts = group_by(members, |config| class.features[config as usize][at].clone());
                divided = true;
                // The first part takes the group's place: all other groups keep their numbers.
                let mut parts = parts.into_iter().map(Group::of);
                if let Some(first) = parts.next() {
                    class.groups[group as usize] = first;
                }
                class.groups.extend(parts);
            }
        }
        divided
    }
}

/// A lower bound of the rounded picoseconds of a time, times the number of runs; forbidden where no path leads.
fn least_picoseconds(seconds: f64, runs: u32) -> i64 {
    if !seconds.is_finite() {
        return FORBIDDEN;
    }
    // Times of equal paths may differ in their last bits, and are rounded to the nearest picosecond.
    let floor = (seconds * 1e12 * (1.0 - 1e-12) - 0.6).floor().max(0.0) as i64;
    floor.saturating_mul(i64::from(runs)).min(FORBIDDEN)
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

/// Configs in groups of equal keys, in order of first appearance.
fn group_by<K: std::hash::Hash + Eq>(all: &[u32], key: impl Fn(u32) -> K) -> Vec<Vec<u32>> {
    let mut numbers: FxHashMap<K, usize> = FxHashMap::default();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for &config in all {
        let next = groups.len();
        let number = *numbers.entry(key(config)).or_insert(next);
        if number == next {
            groups.push(Vec::new());
        }
        groups[number].push(config);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search_problem::{Candidates, SearchProblem};
    use proptest::prelude::*;
    use shardwright_graph::{FactorIndex, Rule};
    use shardwright_machine::builtin;
    use shardwright_zoo::{BuildOptions, build};

    /// All configs of a rule on a mesh, in every order of axes.
    fn every_config(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
        let mut found = vec![Config::replicated(mesh.len())];
        for axis in mesh.all().iter() {
            let more: Vec<Config> = found
                .iter()
                .flat_map(|config| (0..rule.factors.len() as FactorIndex).map(move |f| (config.clone(), f)))
                .map(|(mut config, factor)| {
                    config.set(axis, AxisUse::Split(factor));
                    config
                })
                .filter(|config| config.check(rule, mesh).is_ok())
                .collect();
            found.extend(more);
        }
        found
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// The bound is at most the best of all assignments on the prime axes, in every order of axes, and at most each of
        /// them.
        #[test]
        fn no_assignment_on_prime_axes_costs_less(
            model in prop::sample::select(vec![
                "mlp:batch=8,input=6,hidden=12,layers=2,classes=4",
                "mlp:batch=6,input=512,hidden=2048,layers=1,classes=10",
                "gpt:layers=1,hidden=16,heads=2,seq=6,vocab=10",
                "lenet5",
            ]),
            machine in prop::sample::select(vec!["flat:4", "p100x16:4", "h100x64:16", "flat:6", "v5e-256:8", "p100x16"]),
            batch in prop::sample::select(vec![2u64, 6, 8, 100]),
            untied in any::<bool>(),
            picks in prop::collection::vec(any::<u16>(), 64),
        ) {
            let graph = build(model, &BuildOptions { batch: Some(batch), ..BuildOptions::default() }).unwrap();
            let machine = builtin(machine).unwrap();
            let mesh = machine.mesh().clone();
            let context = Context::new(&graph, &machine, None, mesh.clone(), untied).unwrap();
            let bound = pattern_bound(&context, i64::MAX, &Control::new()).unwrap().bound;
            prop_assert!(bound > 0);
            let rule = |v: usize| &context.shapes[context.variables.members[v].forward().index()].rule;
            let all: Vec<Vec<Config>> =
                (0..context.variables.members.len()).map(|v| every_config(rule(v), &mesh)).collect();
            for pick in 0..picks.len() {
                let mut chosen = vec![Config::replicated(mesh.len()); graph.ops.len()];
                for (v, split) in context.variables.members.iter().enumerate() {
                    let own = usize::from(picks[(pick + v) % picks.len()]) % all[v].len();
                    let configs = split.configs(&context.shapes, &mesh, &all[v][own]);
                    split.ops.iter().zip(configs).for_each(|(&op, config)| chosen[op.index()] = config);
                }
                let assignment = Assignment::of(&graph, chosen);
                prop_assert!(is_on_prime_axes(&context, &mesh, &assignment));
                let cost = context.layer_costs(&assignment, &Control::new()).unwrap().objective();
                prop_assert!(bound <= cost, "{bound} above {cost}");
            }
            if all.iter().all(|own| own.len() <= 64) {
                let candidates = Candidates { mesh, configs: all };
                let problem = SearchProblem::among(&context, candidates, &Control::new()).unwrap();
                let best = Exact.solve(&problem.network, &Control::new().iteration_limit(50));
                prop_assert!(bound <= best.cost.unwrap(), "{bound} above {:?}", best.cost);
            }
        }
    }

    #[test]
    fn the_bound_is_near_the_optimum() {
        for (model, machine) in [("vgg16", "h100x64:16"), ("gpt:layers=2,hidden=256,heads=4", "a100x64:16")] {
            let graph = build(model, &BuildOptions::default()).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = SearchProblem::new(&graph, &machine, None).unwrap();
            assert!(problem.context.search_mesh.prime);
            let best = Exact.solve(&problem.network, &Control::new()).cost.unwrap();
            let bound = pattern_bound(&problem.context, best, &Control::new()).unwrap().bound;
            println!("{model}: {bound} of {best}");
            assert!(bound <= best && bound as f64 >= 0.97 * best as f64, "{model}: {bound} of {best}");
        }
    }
}
