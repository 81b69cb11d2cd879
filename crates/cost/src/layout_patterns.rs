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

use crate::canonical_dims::DivisorClass;
use crate::collective::Comm;
use crate::layout::{Layout, MAX_DIMS, Placement, TensorShape};
use crate::reshard_step::Action;
use crate::step_lists::{SIMD_WIDTH, Step, StepLists};
use rustc_hash::FxHashMap;
use shardwright_machine::{AxisSet, Bytes, Machine};
use smallvec::SmallVec;
use std::sync::{Arc, RwLock};

/// Tensors with more patterns are not bounded: their reshards count as free.
const MAX_PATTERNS: usize = 9_000;
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

/// Bounds reshard times on a machine's prime axes.
#[derive(Debug)]
pub struct PatternResharder {
    comm: Comm,
    classes: Arc<[AxisClass]>,
    /// All sets of axes, by their counts per class.
    sets: FxHashMap<Used, Vec<AxisSet>>,
    graphs: RwLock<FxHashMap<(DivisorClass, bool), GraphSlot>>,
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
        Self { comm: Comm::new(machine, mesh), classes: classes.into(), sets, graphs: RwLock::default() }
    }

    /// The patterns of a tensor, which may be partial; none where there are too many.
    pub fn tensor(&self, shape: &TensorShape, partial: bool) -> Option<PatternTensor> {
        let devices = u64::from(self.comm.mesh().devices());
        let mut divisors = [1; MAX_DIMS];
        for dim in 0..shape.rank() {
            divisors[usize::from(dim)] = gcd(shape.dim(dim), devices) as u32;
        }
        let class = DivisorClass::of(&divisors);
        let mut order: SmallVec<[usize; MAX_DIMS]> = (0..MAX_DIMS).filter(|&dim| divisors[dim] > 1).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(divisors[dim]));
        let mut dims = [None; MAX_DIMS];
        order.iter().enumerate().for_each(|(number, &dim)| dims[dim] = Some(number as u8));
        let known = self.graphs.read().ok().and_then(|map| map.get(&(class, partial)).cloned());
        let graph = match known {
            Some(known) => known,
            None => {
                let made = PatternGraph::new(&self.classes, &class, partial).map(Arc::new);
                let mut map = self.graphs.write().ok()?;
                map.entry((class, partial)).or_insert(made).clone()
            }
        }?;
        let prices = graph.prices.iter().map(|price| self.price(price, shape.bytes())).collect();
        Some(PatternTensor { graph, prices, dims })
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
    fn new(classes: &Arc<[AxisClass]>, divisors: &DivisorClass, partial: bool) -> Option<Self> {
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
                if more.len() > MAX_PATTERNS {
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
            let mut connect = |action: Action, used: Used, parts: u64, to: u32| {
                let price = PriceKey { action, used, parts };
                let next = prices.len() as u32;
                let price = *price_ids.entry(price).or_insert_with_key(|price| {
                    prices.push(price.clone());
                    next
                });
                leads.push((to, Step { from, price }));
            };
            steps.from(node, &mut |action, used, after| {
                if let Some(&to) = index.get(after) {
                    let side = if action == Action::AllGather { after } else { node };
                    connect(action, used, steps.parts(side), to);
                }
            });
            for &to in owners[&steps.grid(node)].iter().filter(|&&to| to != from) {
                let other = &nodes[to as usize];
                let changes = node.chunks(placements).zip(other.chunks(placements));
                let used = changes.map(|(a, b)| u8::from(a != b)).collect();
                connect(Action::Permute, used, steps.parts(node), to);
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
mod tests {
    use super::*;
    use crate::reshard::Resharder;
    use proptest::prelude::*;
    use shardwright_graph::Reduction;
    use shardwright_machine::{AxisId, builtin};

    /// A random layout of a tensor: placements are tried in order until one divides.
    fn layout(mesh: &shardwright_machine::Mesh, dims: &[u64], picks: &[u8], partial: bool) -> Layout {
        let mut layout = Layout::replicated(mesh.len());
        let mut blocks = vec![1u64; dims.len()];
        for (at, axis) in mesh.axes().iter().enumerate() {
            let pick = usize::from(picks[at]) % (dims.len() + 2);
            let placement = match pick.checked_sub(2) {
                Some(dim) if dims[dim].is_multiple_of(blocks[dim] * u64::from(axis.size)) => {
                    blocks[dim] *= u64::from(axis.size);
                    Placement::Shard(dim as u8)
                }
                None if pick == 1 && partial => Placement::Partial(Reduction::Sum),
                _ => Placement::Replicated,
            };
            layout = layout.with(AxisId(at as u32), placement);
        }
        layout
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// No reshard between two layouts is faster than the path between their patterns.
        #[test]
        fn patterns_bound_every_reshard(
            machine in prop::sample::select(vec!["h100x64:32", "flat:16", "p100x16", "v5e-256:16", "k80x8", "a100x64:24"]),
            dims in prop::collection::vec(prop::sample::select(vec![3u64, 8, 24, 96, 1024]), 1..3),
            from in prop::collection::vec(0u8..8, 12),
            to in prop::collection::vec(0u8..8, 12),
            bytes in prop::sample::select(vec![1u32, 4, 8]),
        ) {
            let machine = builtin(machine).unwrap();
            let shape = TensorShape::new(&dims, bytes).unwrap();
            let (from, to) =
                (layout(machine.mesh(), &dims, &from, true), layout(machine.mesh(), &dims, &to, false));
            let resharder = Resharder::new(&machine, machine.mesh());
            let real = resharder.seconds(&resharder.tensor(shape), &from, &to).unwrap();
            let patterns = PatternResharder::new(&machine).tensor(&shape, true).unwrap();
            let (source, target) = (patterns.pattern(&from).unwrap(), patterns.pattern(&to).unwrap());
            let bound = patterns.times(&[&[source]])[0][target as usize];
            prop_assert!(bound <= real.0 * (1.0 + 1e-9), "{bound} above {real:?}: {from:?} to {to:?}");
            // A set is as near as its nearest member.
            let all: Vec<u32> = (0..patterns.patterns() as u32).collect();
            prop_assert_eq!(patterns.times(&[&all])[0][target as usize], 0.0);
        }
    }

    #[test]
    fn the_bound_is_near_the_time_where_nothing_is_ordered() {
        let machine = builtin("h100x64").unwrap();
        let shape = TensorShape::new(&[4096, 4096], 4).unwrap();
        let resharder = Resharder::new(&machine, machine.mesh());
        let patterns = PatternResharder::new(&machine).tensor(&shape, true).unwrap();
        let (mut bounds, mut times) = (0.0, 0.0);
        let uses = [
            Placement::Replicated,
            Placement::Shard(0),
            Placement::Shard(1),
            Placement::Partial(Reduction::Sum),
        ];
        let pure = |node: Placement, gpu: Placement| Layout::new(&[node, node, node, gpu, gpu, gpu]);
        for from in uses.iter().flat_map(|&node| uses.iter().map(move |&gpu| pure(node, gpu))) {
            for to in uses[..3].iter().flat_map(|&node| uses[..3].iter().map(move |&gpu| pure(node, gpu))) {
                let real = resharder.seconds(&resharder.tensor(shape), &from, &to).unwrap().0;
                let source = patterns.pattern(&from).unwrap();
                let bound = patterns.times(&[&[source]])[0][patterns.pattern(&to).unwrap() as usize];
                assert!(bound <= real * (1.0 + 1e-9), "{bound} above {real}: {from:?} to {to:?}");
                bounds += bound;
                times += real;
            }
        }
        assert!(times > 0.0 && bounds >= 0.85 * times, "{bounds} of {times}");
    }
}
