//! Lower bounds of reshard times on meshes with many axes.
//!
//! Axes of one size in one dimension of one level are interchangeable. The *pattern* of a layout counts, for every class of
//! interchangeable axes, those that replicate the tensor, those that leave partial results, and those that shard each
//! dimension. It forgets which axis of a class does what, and the order of a dimension's axes. Six axes have millions of
//! arrangements and a few thousand patterns.
//!
//! Every step of a reshard leads from a pattern to a pattern. Its price here is the least over all sets of axes that have
//! the step's count in every class. So each path of steps is a path over patterns that costs no more, and the shortest
//! path over patterns is a lower bound for every reshard between layouts of these patterns. Times between *sets* of patterns
//! are those of the nearest two.
//!
//! A tensor of many dimensions has too many patterns on hundreds of devices. Then its dimensions that divide least count as one,
//! of the product of their sizes. Every step is still a step, or leads from a pattern to itself, so the bound holds.
//!
//! A collective over several axes is left out of a tensor's steps where two collectives over some of these axes each are
//! together as fast. That leaves out most steps, and no path gets longer.

use crate::canonical_dims::DivisorClass;
use crate::collective::Comm;
use crate::layout::{Layout, MAX_DIMS, Placement, TensorShape};
use crate::reshard_step::Action;
use crate::step_lists::{SIMD_WIDTH, Step, StepLists};
use rustc_hash::{FxHashMap, FxHashSet};
use shardwright_machine::{AxisSet, Bytes, Machine};
use smallvec::SmallVec;
use std::sync::{Arc, RwLock};

/// The most patterns of a tensor: beyond that, dimensions count as one.
const MAX_PATTERNS: usize = 9_000;
/// Two collectives are as fast as one up to this share. Times are sums of fewer steps than lose 1e-12 by it.
const EQUAL: f64 = 1e-13;
/// Collectives that may be replaced by two over fewer axes.
const DIVISIBLE: [Action; 4] =
    [Action::AllReduce, Action::ReduceScatter, Action::AllGather, Action::AllToAll];
/// Position of the replicated axes among a class's counts.
const REPLICATED: usize = 0;
/// Position of the partial axes.
const PARTIAL: usize = 1;
/// Position of the axes that shard the first dimension.
const SHARDS: usize = 2;

/// The number of axes with each placement, class by class.
type Counts = SmallVec<[u8; 24]>;
/// The number of axes of each class that a step uses.
type Used = SmallVec<[u8; 4]>;

/// A graph, or `None` if it would have too many patterns.
type GraphSlot = Option<Arc<PatternGraph>>;
/// What a graph depends on: divisors, whether there are partial results, and which collectives are left out.
type GraphKey = (DivisorClass, bool, Vec<bool>);

/// Bounds reshard times on a machine's prime axes.
#[derive(Debug)]
pub struct PatternResharder {
    comm: Comm,
    classes: Arc<[AxisClass]>,
    /// All sets of axes, by their counts per class.
    sets: FxHashMap<Used, Vec<AxisSet>>,
    /// All collectives over several axes that may be left out.
    divisible: Vec<PriceKey>,
    max_patterns: usize,
    graphs: RwLock<FxHashMap<GraphKey, GraphSlot>>,
}

/// A class of interchangeable axes.
#[derive(Clone, Copy, Debug)]
struct AxisClass {
    size: u64,
    axes: AxisSet,
}

/// The patterns of a tensor, and the prices of steps between them.
#[derive(Clone, Debug)]
pub struct PatternTensor {
    graph: Arc<PatternGraph>,
    prices: Arc<[f64]>,
    /// By dimension: its number among the graph's; `None` for one that cannot be split.
    dims: [Option<u8>; MAX_DIMS],
}

impl PatternResharder {
    /// Bounds on the prime axes of a machine.
    pub fn new(machine: &Machine) -> Self {
        let mesh = machine.mesh();
        let mut keys = Vec::new();
        let mut classes: Vec<AxisClass> = Vec::new();
        for (at, axis) in mesh.all().iter().zip(mesh.axes()) {
            let key = (axis.level, axis.size, axis.dim);
            match keys.iter().position(|known| *known == key) {
                Some(class) => classes[class].axes = classes[class].axes.with(at),
                None => {
                    keys.push(key);
                    classes.push(AxisClass { size: u64::from(axis.size), axes: AxisSet::of(at) });
                }
            }
        }
        let mut sets: FxHashMap<Used, Vec<AxisSet>> = FxHashMap::default();
        for bits in 1..1u32 << mesh.len() {
            let set = AxisSet(bits);
            let used = classes.iter().map(|class| set.intersect(class.axes).len() as u8).collect();
            sets.entry(used).or_default().push(set);
        }
        let divisible = divisible(&classes, sets.keys().cloned().collect());
        let (comm, classes) = (Comm::new(machine, mesh), classes.into());
        Self { comm, classes, sets, divisible, max_patterns: MAX_PATTERNS, graphs: RwLock::default() }
    }

    /// The same with another number of patterns beyond which dimensions count as one.
    #[must_use]
    pub fn with_patterns(self, max_patterns: usize) -> Self {
        Self { max_patterns, graphs: RwLock::default(), ..self }
    }

    /// The patterns of a tensor, which may be partial; none where there are too many.
    pub fn tensor(&self, shape: &TensorShape, partial: bool) -> Option<PatternTensor> {
        let devices = u64::from(self.comm.mesh().devices());
        // Dimensions that count as one, with their divisor: those that divide most first.
        let mut groups: Vec<(u64, Vec<u8>)> = (0..shape.rank())
            .map(|dim| (gcd(shape.dim(dim), devices), vec![dim]))
            .filter(|(divisor, _)| *divisor > 1)
            .collect();
        let left_out = self.left_out(shape.bytes());
        loop {
            groups.sort_by_key(|(divisor, _)| std::cmp::Reverse(*divisor));
            let mut divisors = [1; MAX_DIMS];
            let mut dims = [None; MAX_DIMS];
            for (number, (divisor, own)) in groups.iter().enumerate() {
                divisors[number] = *divisor as u32;
                own.iter().for_each(|&dim| dims[usize::from(dim)] = Some(number as u8));
            }
            let key = (DivisorClass::of(&divisors), partial, left_out.clone());
            if let Some(graph) = self.graph(key) {
                let prices = graph.prices.iter().map(|price| self.price(price, shape.bytes())).collect();
                return Some(PatternTensor { graph, prices, dims });
            }
            let (last, own) = groups.pop()?;
            let before = groups.last_mut()?;
            before.0 = gcd(before.0.saturating_mul(last), devices);
            before.1.extend(own);
        }
    }

    /// The graph of a class of tensors.
    fn graph(&self, key: GraphKey) -> GraphSlot {
        let known = self.graphs.read().ok().and_then(|map| map.get(&key).cloned());
        known.unwrap_or_else(|| {
            let left_out = self.divisible.iter().zip(&key.2).filter(|(_, out)| **out);
            let left_out = left_out.map(|(price, _)| price.clone()).collect();
            let made = PatternGraph::new(&self.classes, &key.0, key.1, &left_out, self.max_patterns);
            let mut map = self.graphs.write().ok()?;
            map.entry(key).or_insert(made.map(Arc::new)).clone()
        })
    }

    /// Which of the divisible collectives are no faster than two over some of their axes each, for a tensor of so many bytes.
    fn left_out(&self, bytes: u64) -> Vec<bool> {
        let mut known: FxHashMap<PriceKey, f64> = FxHashMap::default();
        let mut price = |action: Action, used: Used, parts: u64| {
            let key = PriceKey { action, used, parts };
            *known.entry(key).or_insert_with_key(|key| self.price(key, bytes))
        };
        let size = |used: &Used| size_of(&self.classes, used);
        let is_left_out = |PriceKey { action, used, parts }: &PriceKey| {
            let whole = price(*action, used.clone(), *parts) * (1.0 + EQUAL);
            let mut parts_of = divisions(used).into_iter();
            parts_of.any(|first| {
                let second: Used = used.iter().zip(&first).map(|(all, first)| all - first).collect();
                let (one, two) = match action {
                    // The larger side: after gathering, and before scattering.
                    Action::AllGather => (parts * size(&second), *parts),
                    Action::ReduceScatter => (*parts, parts * size(&first)),
                    _ => (*parts, *parts),
                };
                price(*action, first, one) + price(*action, second, two) <= whole
            })
        };
        self.divisible.iter().map(is_left_out).collect()
    }

    /// The least seconds of a step over any of its sets of axes.
    fn price(&self, price: &PriceKey, bytes: u64) -> f64 {
        let Some(kind) = price.action.collective() else { return 0.0 };
        let seconds = |set: &AxisSet| self.comm.seconds(kind, *set, Bytes(bytes / price.parts)).0;
        let least = |sets: &[AxisSet]| sets.iter().map(seconds).fold(f64::INFINITY, f64::min);
        if price.action != Action::Permute {
            return self.sets.get(&price.used).map_or(0.0, |sets| least(sets));
        }
        // A permutation may use more axes than those whose placements change.
        let covers = |used: &Used| used.iter().zip(&price.used).all(|(all, least)| all >= least);
        let sets = self.sets.iter().filter(|(used, _)| covers(used));
        sets.map(|(_, sets)| least(sets)).fold(f64::INFINITY, f64::min)
    }
}

impl PatternTensor {
    /// The pattern of a layout on the prime axes.
    pub fn pattern(&self, layout: &Layout) -> Option<u32> {
        let graph = &*self.graph;
        let mut counts: Counts = SmallVec::from_elem(0, graph.classes.len() * graph.placements);
        for (class, own) in graph.classes.iter().enumerate() {
            for axis in own.axes.iter() {
                let placement = match layout.get(axis) {
                    Placement::Replicated => REPLICATED,
                    Placement::Partial(_) => PARTIAL,
                    Placement::Shard(dim) => SHARDS + usize::from(self.dims[usize::from(dim) % MAX_DIMS]?),
                    Placement::Absent(_) => return None,
                };
                counts[class * graph.placements + placement] += 1;
            }
        }
        graph.index.get(&counts).copied()
    }

    /// Number of patterns.
    pub fn patterns(&self) -> usize {
        self.graph.nodes.len()
    }

    /// For each set of patterns: the least seconds from any of them to every pattern; infinite where no path leads.
    pub fn times(&self, sources: &[&[u32]]) -> Vec<Arc<[f64]>> {
        let mut all = Vec::with_capacity(sources.len());
        let all_nodes: Vec<usize> = (0..self.patterns()).collect();
        let mut seconds = vec![[f64::INFINITY; SIMD_WIDTH]; self.patterns()];
        for batch in sources.chunks(SIMD_WIDTH) {
            seconds.fill([f64::INFINITY; SIMD_WIDTH]);
            for (lane, set) in batch.iter().enumerate() {
                set.iter().for_each(|&node| seconds[node as usize][lane] = 0.0);
            }
            self.graph.steps.settle(&self.prices, &all_nodes, &mut seconds);
            all.extend((0..batch.len()).map(|lane| seconds.iter().map(|node| node[lane]).collect()));
        }
        all
    }
}

/// What the price of a step depends on, besides the tensor's bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct PriceKey {
    action: Action,
    used: Used,
    /// Message = tensor bytes / parts.
    parts: u64,
}

/// All patterns of the tensors of one divisor class, and the steps between them.
struct PatternGraph {
    classes: Arc<[AxisClass]>,
    /// Placements per class.
    placements: usize,
    nodes: Vec<Counts>,
    index: FxHashMap<Counts, u32>,
    steps: StepLists,
    prices: Vec<PriceKey>,
}

impl std::fmt::Debug for PatternGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PatternGraph({} patterns, {} steps)", self.nodes.len(), self.steps.len())
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The number of devices on so many axes of every class.
fn size_of(classes: &[AxisClass], used: &Used) -> u64 {
    classes.iter().zip(used).map(|(class, &count)| class.size.pow(u32::from(count))).product()
}

/// All ways to use some of these axes, but neither all nor none.
fn divisions(used: &Used) -> Vec<Used> {
    let mut all: Vec<Used> = vec![SmallVec::new()];
    for &most in used {
        let longer = |own: &Used| {
            let own = own.clone();
            (0..=most).map(move |count| {
                let mut longer = own.clone();
                longer.push(count);
                longer
            })
        };
        all = all.iter().flat_map(longer).collect();
    }
    all.retain(|own| own != used && own.iter().any(|&count| count > 0));
    all
}

/// The prices of all collectives over several axes that might be left out. `used`: all counts of axes.
fn divisible(classes: &[AxisClass], mut used: Vec<Used>) -> Vec<PriceKey> {
    used.sort_unstable();
    let mut parts: Vec<u64> = used.iter().map(|used| size_of(classes, used)).chain([1]).collect();
    parts.sort_unstable();
    parts.dedup();
    used.retain(|used| used.iter().sum::<u8>() > 1);
    let keys = used.iter().flat_map(|used| {
        let parts = parts.iter().flat_map(|&parts| DIVISIBLE.map(|action| (action, parts)));
        parts.map(move |(action, parts)| PriceKey { action, used: used.clone(), parts })
    });
    keys.collect()
}

/// All ways to give each of `axes` axes one of `placements` placements, as counts.
fn compositions(axes: u8, placements: usize) -> Vec<Counts> {
    if placements == 1 {
        return vec![SmallVec::from_elem(axes, 1)];
    }
    let mut all = Vec::new();
    for first in (0..=axes).rev() {
        for rest in compositions(axes - first, placements - 1) {
            let mut counts: Counts = SmallVec::from_elem(first, 1);
            counts.extend(rest);
            all.push(counts);
        }
    }
    all
}

impl PatternGraph {
    /// Builds the graph; `None` if it would be too large.
    fn new(
        classes: &Arc<[AxisClass]>,
        divisors: &DivisorClass,
        partial: bool,
        left_out: &FxHashSet<PriceKey>,
        max_patterns: usize,
    ) -> Option<Self> {
        let placements = SHARDS + usize::from(divisors.rank());
        let mut nodes: Vec<Counts> = vec![SmallVec::new()];
        for class in classes.iter() {
            let own: Vec<Counts> = compositions(class.axes.len() as u8, placements)
                .into_iter()
                .filter(|counts| partial || counts[PARTIAL] == 0)
                .collect();
            let mut more = Vec::new();
            for base in &nodes {
                for own in &own {
                    let mut next = base.clone();
                    next.extend_from_slice(own);
                    if divides(classes, placements, divisors, &next) {
                        more.push(next);
                    }
                }
                if more.len() > max_patterns {
                    return None;
                }
            }
            nodes = more;
        }
        let total = |node: &Counts, from: usize, to: usize| -> u32 {
            node.chunks(placements).flat_map(|own| &own[from..to]).map(|&count| u32::from(count)).sum()
        };
        // Most partial axes first, then fewest shards: the direction of free steps.
        nodes.sort_by_key(|node| {
            (std::cmp::Reverse(total(node, PARTIAL, SHARDS)), total(node, SHARDS, placements))
        });
        let index: FxHashMap<Counts, u32> =
            nodes.iter().zip(0..).map(|(node, at)| (node.clone(), at)).collect();
        let steps = Steps { classes, placements };
        let mut prices: Vec<PriceKey> = Vec::new();
        let mut price_ids: FxHashMap<PriceKey, u32> = FxHashMap::default();
        let mut leads: Vec<(u32, Step)> = Vec::new();
        let owners = steps.owners(&nodes);
        for (from, node) in nodes.iter().zip(0..).map(|(node, at)| (at, node)) {
            let mut connect = |price: PriceKey, to: u32| {
                let next = prices.len() as u32;
                let price = *price_ids.entry(price).or_insert_with_key(|price| {
                    prices.push(price.clone());
                    next
                });
                leads.push((to, Step { from, price }));
            };
            let own = steps.parts(node);
            steps.from(node, &mut |action, used, after| {
                let gathered = if action == Action::AllGather { size_of(classes, &used) } else { 1 };
                let price = PriceKey { action, used, parts: own / gathered };
                if !left_out.contains(&price)
                    && let Some(&to) = index.get(after)
                {
                    connect(price, to);
                }
            });
            for &to in owners[&steps.grid(node)].iter().filter(|&&to| to != from) {
                let other = &nodes[to as usize];
                let changes = node.chunks(placements).zip(other.chunks(placements));
                let used = changes.map(|(a, b)| u8::from(a != b)).collect();
                connect(PriceKey { action: Action::Permute, used, parts: own }, to);
            }
        }
        let steps = StepLists::new(nodes.len(), &leads);
        let classes = Arc::clone(classes);
        Some(Self { classes, placements, nodes, index, steps, prices })
    }
}

/// Whether every dimension divides into the parts of a pattern, of which later classes may be missing.
fn divides(classes: &[AxisClass], placements: usize, divisors: &DivisorClass, counts: &Counts) -> bool {
    (SHARDS..placements).all(|at| {
        let own = counts.chunks(placements).zip(classes);
        let parts: u64 = own.map(|(own, class)| class.size.pow(u32::from(own[at]))).product();
        u64::from(divisors.0[at - SHARDS]).is_multiple_of(parts)
    })
}

/// The steps between patterns.
struct Steps<'c> {
    classes: &'c [AxisClass],
    placements: usize,
}

/// Takes an action, the axes that it uses, and the pattern after it.
type Connect<'c> = dyn FnMut(Action, Used, &Counts) + 'c;

impl Steps<'_> {
    /// Number of blocks of a tensor.
    fn parts(&self, node: &Counts) -> u64 {
        let own = node.chunks(self.placements).zip(self.classes);
        own.map(|(own, class)| {
            let shards: u32 = own[SHARDS..].iter().map(|&count| u32::from(count)).sum();
            class.size.pow(shards)
        })
        .product()
    }

    /// The parts of every dimension, and the partial axes of every class. Permutations keep them.
    fn grid(&self, node: &Counts) -> Vec<u64> {
        let dim = |at: usize| {
            let own = node.chunks(self.placements).zip(self.classes);
            own.map(|(own, class)| class.size.pow(u32::from(own[at]))).product()
        };
        let partial = node.chunks(self.placements).map(|own| u64::from(own[PARTIAL]));
        (SHARDS..self.placements).map(dim).chain(partial).collect()
    }

    /// Patterns that differ only in the owners of blocks.
    fn owners(&self, nodes: &[Counts]) -> FxHashMap<Vec<u64>, Vec<u32>> {
        let mut owners: FxHashMap<Vec<u64>, Vec<u32>> = FxHashMap::default();
        for (node, at) in nodes.iter().zip(0..) {
            owners.entry(self.grid(node)).or_default().push(at);
        }
        owners
    }

    /// All steps from a pattern except permutations.
    fn from(&self, node: &Counts, connect: &mut Connect<'_>) {
        let dims = SHARDS..self.placements;
        let nothing: Used = SmallVec::from_elem(0, self.classes.len());
        for class in 0..self.classes.len() {
            let base = class * self.placements;
            if node[base + REPLICATED] > 0 {
                for dim in dims.clone() {
                    let mut after = node.clone();
                    after[base + REPLICATED] -= 1;
                    after[base + dim] += 1;
                    let mut used = nothing.clone();
                    used[class] = 1;
                    connect(Action::Slice, used, &after);
                }
            }
        }
        let all = || dims.clone();
        let mut every = |action: Action, options: &[(usize, usize)]| {
            let mut emit = |used: &Used, after: &Counts| connect(action, used.clone(), after);
            self.moves(0, options, &mut nothing.clone(), &mut node.clone(), &mut emit);
        };
        every(Action::AllReduce, &[(PARTIAL, REPLICATED)]);
        every(Action::ReduceScatter, &all().map(|dim| (PARTIAL, dim)).collect::<Vec<_>>());
        // The minor ends of several dimensions may be gathered at once.
        every(Action::AllGather, &all().map(|dim| (dim, REPLICATED)).collect::<Vec<_>>());
        for from in all() {
            for to in all().filter(|&to| to != from) {
                every(Action::AllToAll, &[(from, to)]);
            }
        }
    }

    /// All ways to move axes from one placement to another, by pairs of placements in `options`. `at` counts classes and
    /// options.
    fn moves(
        &self,
        at: usize,
        options: &[(usize, usize)],
        used: &mut Used,
        after: &mut Counts,
        emit: &mut dyn FnMut(&Used, &Counts),
    ) {
        if at == self.classes.len() * options.len() {
            if used.iter().any(|&count| count > 0) {
                emit(used, after);
            }
            return;
        }
        let (class, (from, to)) = (at / options.len(), options[at % options.len()]);
        let base = class * self.placements;
        let mut moved = 0;
        loop {
            self.moves(at + 1, options, used, after, emit);
            if after[base + from] == 0 {
                break;
            }
            after[base + from] -= 1;
            after[base + to] += 1;
            used[class] += 1;
            moved += 1;
        }
        after[base + from] += moved;
        after[base + to] -= moved;
        used[class] -= moved;
    }
}

#[cfg(test)]
mod tests;
