//! The cheapest way from one layout of a tensor to another.
//!
//! A re-layout is a sequence of [`Step`]s. Its cost is the sum of their seconds: steps depend on each other, so they
//! do not overlap. Two searches share the work:
//! - On a mesh with few arrangements (four binary axes and a four-dimensional tensor, say), [`crate::space`] answers
//!   exactly: shortest paths over all arrangements and all steps, a whole row of targets at a time.
//! - Elsewhere, and where axes are absent, a goal-directed search considers the steps that [`crate::moves`]
//!   proposes, and is exact over those. It never undercuts the exact answer, and seldom misses it.
//!
//! The cost is zero exactly when no byte has to move, that is when every axis either keeps its placement, or goes
//! from replicated to absent, or goes from replicated to sharded inside (minor to) all axes that keep sharding the
//! same dimension. A tensor cannot be made partial: partial sums come from operators, and no operator asks for them.
//!
//! Results are kept by (bytes, divisibility of the dimensions, from) and (.., to): tensors that only differ in shapes
//! which divide alike share an entry.

use crate::collective::{Comm, Traffic};
use crate::layout::{Arrangement, Layout, LayoutError, MAX_DIMS, Placement, Reduction, TensorShape};
use crate::moves::{Goal, Move};
use crate::space::{Row, Space};
use crate::step::{Action, Step, local_bytes};
use rustc_hash::{FxHashMap, FxHasher};
use shardwright_machine::{AxisSet, Bytes, Machine, Mesh, Seconds};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock, RwLock};

/// Arrangements looked at before the search settles for the best plain way. Far beyond what any machine described
/// so far needs; a bound for hostile ones.
const MAX_VISITED: usize = 50_000;
/// Locks that a cache is spread over.
const SHARDS: usize = 16;
/// A row is some ten kilobytes, a pair some two hundred bytes: about 100 MB together at most.
const MAX_ROWS: usize = 1 << 13;
const MAX_PAIRS: usize = 1 << 17;

/// How to get from one layout to another.
#[derive(Clone, Debug, PartialEq)]
pub struct Relayout {
    /// In order; empty if the layouts agree.
    pub steps: Vec<Step>,
    /// The steps' times added up.
    pub seconds: Seconds,
    /// Bytes over each axis, all devices together.
    pub traffic: Traffic,
}

/// A tensor made ready for questions: its shape and what of it matters.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    shape: TensorShape,
    /// The greatest common divisor of each dimension and the number of devices: which cuts are possible.
    divisors: [u32; MAX_DIMS],
}

impl Tensor {
    /// The shape it was made from.
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }
}

/// A tensor in a layout: what a row of times starts from.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Start {
    bytes: u64,
    divisors: [u32; MAX_DIMS],
    rank: u8,
    from: Layout,
}

/// A cache in parts, so that threads seldom wait for each other.
#[derive(Debug)]
struct Cache<K, V> {
    parts: Vec<RwLock<FxHashMap<K, V>>>,
    /// A part with so many entries starts anew.
    limit: usize,
}

impl<K: Hash + Eq, V: Clone> Cache<K, V> {
    fn new(limit: usize) -> Cache<K, V> {
        Cache { parts: (0..SHARDS).map(|_| RwLock::default()).collect(), limit: limit / SHARDS }
    }

    fn get_or(&self, key: K, make: impl FnOnce() -> Result<V, LayoutError>) -> Result<V, LayoutError> {
        let mut hasher = FxHasher::default();
        key.hash(&mut hasher);
        let part = &self.parts[(hasher.finish() >> 56) as usize % SHARDS];
        if let Some(value) = part.read().ok().as_ref().and_then(|map| map.get(&key)) {
            return Ok(value.clone());
        }
        let value = make()?;
        if let Ok(mut map) = part.write() {
            if map.len() >= self.limit {
                map.clear();
            }
            map.insert(key, value.clone());
        }
        Ok(value)
    }
}

/// Finds and remembers re-layouts on one mesh. May be asked from many threads at once.
#[derive(Debug)]
pub struct Relayouts {
    comm: Comm,
    /// By rank, without and with partial sums; `None` inside where there would be too many arrangements.
    spaces: Vec<[OnceLock<Option<Space>>; 2]>,
    rows: Cache<Start, Arc<Row>>,
    pairs: Cache<(Start, Layout), Seconds>,
}

/// The times from one layout of a tensor to others: a row of a cost table.
pub struct Times<'a> {
    relayouts: &'a Relayouts,
    tensor: Tensor,
    from: Layout,
    row: Option<(&'a Space, Arc<Row>)>,
}

impl std::fmt::Debug for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} B from {:?}", self.bytes, self.from)
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl Relayouts {
    /// For the axes of a mesh of the machine.
    pub fn new(machine: &Machine, mesh: &Mesh) -> Relayouts {
        Relayouts {
            comm: Comm::new(machine, mesh),
            spaces: (0..=MAX_DIMS).map(|_| Default::default()).collect(),
            rows: Cache::new(MAX_ROWS),
            pairs: Cache::new(MAX_PAIRS),
        }
    }

    /// The collectives' costs that steps are priced with.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Makes a tensor ready.
    pub fn tensor(&self, shape: TensorShape) -> Tensor {
        let devices = u64::from(self.comm.mesh().devices());
        let mut divisors = [1; MAX_DIMS];
        for dim in 0..shape.rank() {
            // A dimension of size 0 can be cut in any way.
            divisors[usize::from(dim)] = gcd(shape.dim(dim), devices) as u32;
        }
        Tensor { shape, divisors }
    }

    /// All arrangements that re-layouts from this layout go through, if they are few enough.
    fn space(&self, shape: &TensorShape, from: &Layout) -> Option<&Space> {
        let kinds = |kind| from.axes_where(|p| p == Placement::Partial(kind));
        let (sums, maxima) = (kinds(Reduction::Sum), kinds(Reduction::Max));
        if !from.absent().is_empty() || (!sums.is_empty() && !maxima.is_empty()) {
            return None;
        }
        let partial = !sums.union(maxima).is_empty();
        let slot = &self.spaces[usize::from(shape.rank())][usize::from(partial)];
        slot.get_or_init(|| Space::new(self.comm.mesh(), shape.rank(), partial)).as_ref()
    }

    /// The times from one layout to others. Worth it for more than one question; checks `from` once.
    pub fn times(&self, tensor: &Tensor, from: &Layout) -> Result<Times<'_>, LayoutError> {
        tensor.shape.check(self.comm.mesh(), from)?;
        let row = match self.space(&tensor.shape, from) {
            None => None,
            Some(space) => {
                let row = self.rows.get_or(tensor.start(from), || {
                    let row = space.row(&self.comm, &tensor.shape, from);
                    Ok(Arc::new(row.unwrap_or_else(Row::empty)))
                })?;
                Some((space, row))
            }
        };
        Ok(Times { relayouts: self, tensor: *tensor, from: *from, row })
    }

    /// The time of the cheapest way. The way itself: [`Relayouts::find`].
    pub fn seconds(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<Seconds, LayoutError> {
        self.times(tensor, from)?.to(to)
    }

    /// The cheapest way, with its steps and the bytes that they send.
    pub fn find(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<Relayout, LayoutError> {
        self.check(tensor, from, to)?;
        let start = Arrangement::canonical(from);
        let exact = self.space(&tensor.shape, from).and_then(|s| s.path(&self.comm, &tensor.shape, from, to));
        let steps = match exact {
            Some(path) => self.price(tensor, start, &path, from),
            None => self.search(tensor, from, to),
        };
        let mut traffic = Traffic::default();
        let mut before = start;
        for step in &steps {
            traffic.merge(&step.traffic(&self.comm, &before));
            before = step.after;
        }
        let seconds = steps.iter().map(|step| step.seconds).sum();
        Ok(Relayout { steps, seconds, traffic })
    }

    /// Puts sizes and times to the steps of a path.
    fn price(
        &self,
        tensor: &Tensor,
        start: Arrangement,
        path: &[(Action, AxisSet, Arrangement)],
        from: &Layout,
    ) -> Vec<Step> {
        // The space knows one kind of reduction; give the tensor's own back.
        let kinds = from.axes_where(|p| matches!(p, Placement::Partial(_)));
        let own = |mut after: Arrangement| {
            for axis in kinds.iter() {
                if matches!(after.layout().get(axis), Placement::Partial(_)) {
                    after.set(axis, from.get(axis));
                }
            }
            after
        };
        let mut steps: Vec<Step> = Vec::new();
        let mut before = start;
        for &(action, axes, after) in path {
            let after = own(after);
            // The space slices one axis at a time; for free steps in a row one will do.
            match steps.last_mut() {
                Some(last) if action == Action::Slice && last.action == Action::Slice => {
                    (last.axes, last.after) = (last.axes.union(axes), after);
                }
                _ => {
                    let side = if action == Action::AllGather { &after } else { &before };
                    let message = Bytes(local_bytes(self.comm.mesh(), tensor.shape.bytes(), side));
                    let cost = |kind| self.comm.seconds(kind, axes, message);
                    let seconds = action.collective().map_or(Seconds::ZERO, cost);
                    steps.push(Step { action, axes, message, seconds, after });
                }
            }
            before = after;
        }
        steps
    }

    fn check(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<(), LayoutError> {
        let mesh = self.comm.mesh();
        tensor.shape.check(mesh, from)?;
        tensor.shape.check(mesh, to)?;
        let asked = |axis| matches!(to.get(axis), Placement::Partial(_)) && to.get(axis) != from.get(axis);
        match mesh.all().iter().find(|&axis| asked(axis)) {
            Some(axis) => Err(LayoutError::CannotBecomePartial { axis: mesh.axis(axis).name.clone() }),
            None => Ok(()),
        }
    }

    /// The goal-directed search. The layouts have been checked.
    pub(crate) fn search(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Vec<Step> {
        let goal = Goal { comm: &self.comm, shape: &tensor.shape, target: Arrangement::canonical(to) };
        Search::run(&goal, Arrangement::canonical(from))
    }
}

impl Tensor {
    fn start(&self, from: &Layout) -> Start {
        Start { bytes: self.shape.bytes(), divisors: self.divisors, rank: self.shape.rank(), from: *from }
    }
}

impl Times<'_> {
    /// Whether what is partial in the target already is, in the same way: the space does not tell sums from maxima.
    fn partial_stay(&self, to: &Layout) -> bool {
        let partial = to.axes_where(|p| matches!(p, Placement::Partial(_)));
        partial.iter().all(|axis| to.get(axis) == self.from.get(axis))
    }

    /// The time to another layout.
    pub fn to(&self, to: &Layout) -> Result<Seconds, LayoutError> {
        if *to == self.from {
            return Ok(Seconds::ZERO);
        }
        if to.len() == self.from.len()
            && let Some((space, row)) = &self.row
            && let Some(seconds) = space.lookup(row, to)
            && self.partial_stay(to)
        {
            return Ok(seconds);
        }
        let key = (self.tensor.start(&self.from), *to);
        self.relayouts.pairs.get_or(key, || {
            self.relayouts.check(&self.tensor, &self.from, to)?;
            Ok(self.relayouts.search(&self.tensor, &self.from, to).iter().map(|step| step.seconds).sum())
        })
    }
}

/// One arrangement reached.
struct Node {
    at: Arrangement,
    seconds: f64,
    /// Steps that send something: of equally fast ways the one with fewer is taken.
    sends: u32,
    done: bool,
    /// Where from, and how.
    from: Option<(u32, Step)>,
}

struct Search<'a> {
    goal: &'a Goal<'a>,
    nodes: Vec<Node>,
    index: FxHashMap<Arrangement, u32>,
    queue: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// No way that is slower than this plain one is of interest.
    limit: f64,
}

/// Orders non-negative times as integers.
fn order(seconds: f64) -> u64 {
    seconds.to_bits()
}

impl Search<'_> {
    fn run(goal: &Goal<'_>, start: Arrangement) -> Vec<Step> {
        if start == goal.target {
            return Vec::new();
        }
        let plain = plain_way(goal, start);
        let limit = plain.iter().map(|step| step.seconds.0).sum::<f64>();
        let mut search =
            Search { goal, nodes: Vec::new(), index: FxHashMap::default(), queue: BinaryHeap::new(), limit };
        search.reach(start, 0.0, 0, None);
        while let Some(Reverse((_, _, id))) = search.queue.pop() {
            let node = &mut search.nodes[id as usize];
            if std::mem::replace(&mut node.done, true) {
                continue;
            }
            if node.at == goal.target {
                return search.path(id);
            }
            if search.nodes.len() > MAX_VISITED {
                break;
            }
            search.expand(id);
        }
        plain
    }

    fn expand(&mut self, id: u32) {
        let Node { at, seconds, sends, .. } = self.nodes[id as usize];
        let goal = self.goal;
        let absent = at.layout().absent();
        goal.moves(&at, sends == 0, &mut |Move { action, axes, message, after }| {
            let took = match action.collective() {
                None => 0.0,
                Some(kind) => goal.comm.choose(kind, axes, absent, Bytes(message)).1.0,
            };
            let sends = sends + u32::from(action.collective().is_some());
            if seconds + took <= self.limit {
                let step = Step { action, axes, message: Bytes(message), seconds: Seconds(took), after };
                self.reach(after, seconds + took, sends, Some((id, step)));
            }
        });
    }

    fn reach(&mut self, at: Arrangement, seconds: f64, sends: u32, from: Option<(u32, Step)>) {
        let next = self.nodes.len() as u32;
        let id = *self.index.entry(at).or_insert(next);
        if id == next {
            self.nodes.push(Node { at, seconds, sends, done: false, from });
        } else {
            let node = &mut self.nodes[id as usize];
            if node.done || (seconds, sends) >= (node.seconds, node.sends) {
                return;
            }
            (node.seconds, node.sends, node.from) = (seconds, sends, from);
        }
        self.queue.push(Reverse((order(seconds), sends, id)));
    }

    fn path(&self, mut id: u32) -> Vec<Step> {
        let mut steps = Vec::new();
        while let Some((from, step)) = &self.nodes[id as usize].from {
            steps.push(*step);
            id = *from;
        }
        steps.reverse();
        steps
    }
}

/// A way that always works: make the tensor whole everywhere, then let every device keep its part.
fn plain_way(goal: &Goal<'_>, start: Arrangement) -> Vec<Step> {
    let mesh = goal.comm.mesh();
    let target = goal.target.layout();
    let mut steps: Vec<Step> = Vec::new();
    let mut at = start;
    let mut push = |at: &mut Arrangement, action: Action, axes, after: Arrangement| {
        let side = if matches!(action, Action::AllGather) { &after } else { &*at };
        let message = Bytes(local_bytes(mesh, goal.shape.bytes(), side));
        let seconds = match action.collective() {
            None => Seconds::ZERO,
            Some(kind) => goal.comm.choose(kind, axes, at.layout().absent(), message).1,
        };
        steps.push(Step { action, axes, message, seconds, after });
        *at = after;
    };
    let replicate = |at: &Arrangement, axes: AxisSet| {
        let mut after = *at;
        axes.iter().for_each(|axis| after.set(axis, Placement::Replicated));
        after
    };
    for kind in [Reduction::Sum, Reduction::Max] {
        let axes = at.layout().axes_where(|p| p == Placement::Partial(kind)).iter();
        let axes: AxisSet = axes.filter(|&axis| target.get(axis) != Placement::Partial(kind)).collect();
        if !axes.is_empty() {
            let after = replicate(&at, axes);
            push(&mut at, Action::AllReduce, axes, after);
        }
    }
    let axes = at.layout().absent();
    if !axes.is_empty() {
        let after = replicate(&at, axes);
        push(&mut at, Action::Broadcast, axes, after);
    }
    for dim in 0..goal.shape.rank() {
        let axes = at.layout().shards(dim);
        if !axes.is_empty() {
            let after = replicate(&at, axes);
            push(&mut at, Action::AllGather, axes, after);
        }
    }
    for dim in 0..goal.shape.rank() {
        let axes = target.shards(dim);
        if !axes.is_empty() {
            let mut after = at;
            after.append(dim, axes.iter());
            push(&mut at, Action::Slice, axes, after);
        }
    }
    let axes = target.absent();
    if !axes.is_empty() {
        let mut after = at;
        axes.iter().for_each(|axis| after.set(axis, target.get(axis)));
        push(&mut at, Action::Drop, axes, after);
    }
    steps
}
