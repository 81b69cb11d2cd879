//! The cheapest way from one layout of a tensor to another.
//!
//! A re-layout is a sequence of [`Step`]s. Its cost is the sum of their seconds: steps depend on each other, so they
//! do not overlap. Two searches share the work:
//! - On a mesh with few arrangements (four binary axes and a four-dimensional tensor, say), `space` answers
//!   exactly: shortest paths over all arrangements and all steps, a whole row of targets at a time.
//! - On meshes of more than four axes, neighbouring axes of a level that have the same placement before and the same after are
//!   treated as one, which leaves few axes in most cases, and those are answered as above.
//! - What is left, and where axes are absent, goes to the goal-directed search of `directed`, whose answer
//!   is a way that works and is seldom far from the best one, but comes without proof.
//!
//! The cost is zero exactly when no byte has to move, that is when every axis either keeps its placement, or goes
//! from replicated to absent, or goes from replicated to sharded inside (minor to) all axes that keep sharding the
//! same dimension. A tensor cannot be made partial: partial sums come from operators, and no operator asks for them.
//!
//! Results are kept by bytes and layouts as `frame` sees them: tensors that can be cut alike share an entry.

use crate::collective::{Comm, Traffic};
use crate::directed;
use crate::frame::{Class, Frame};
use crate::glue::Glue;
use crate::layout::{Arrangement, Layout, LayoutError, MAX_DIMS, Placement, Reduction, TensorShape};
use crate::moves::Goal;
use crate::rows::Row;
use crate::space::Space;
use crate::step::{Action, Step, local_bytes};
use rustc_hash::{FxHashMap, FxHasher};
use shardwright_machine::{AxisSet, Bytes, Machine, Mesh, Seconds};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

/// Locks that a cache is spread over.
const SHARDS: usize = 16;
/// A row is some ten kilobytes, a pair some two hundred bytes: about 100 MB together at most.
const MAX_ROWS: usize = 1 << 13;
const MAX_PAIRS: usize = 1 << 17;
const MAX_WAYS: usize = 1 << 12;
/// Coarser meshes kept, a few megabytes each. Two levels of eight have 16, a 16 x 16 torus 128.
const MAX_GLUED: usize = 128;

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
    from: Layout,
}

/// A space, or that there is none; made by the first who needs it.
type Slot = Arc<OnceLock<Option<Space>>>;

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

    fn part(&self, key: &K) -> &RwLock<FxHashMap<K, V>> {
        let mut hasher = FxHasher::default();
        key.hash(&mut hasher);
        &self.parts[(hasher.finish() >> 56) as usize % SHARDS]
    }

    fn get(&self, key: &K) -> Option<V> {
        self.part(key).read().ok()?.get(key).cloned()
    }

    fn insert(&self, key: K, value: V) {
        if let Ok(mut map) = self.part(&key).write() {
            if map.len() >= self.limit {
                map.clear();
            }
            map.insert(key, value);
        }
    }

    fn get_or(&self, key: K, make: impl FnOnce() -> Result<V, LayoutError>) -> Result<V, LayoutError> {
        if let Some(value) = self.get(&key) {
            return Ok(value);
        }
        let value = make()?;
        self.insert(key, value.clone());
        Ok(value)
    }
}

/// Finds and remembers re-layouts on one mesh. May be asked from many threads at once.
#[derive(Debug)]
pub struct Relayouts {
    comm: Comm,
    /// By what can be cut; `None` inside where there would be too many arrangements.
    spaces: RwLock<FxHashMap<Class, Slot>>,
    /// In the names of frames.
    rows: Cache<Start, Arc<Row>>,
    pairs: Cache<(Start, Layout), Seconds>,
    ways: Cache<(Start, Layout), Arc<Relayout>>,
    /// The same machine with some neighbouring axes glued: bit i glues axis i to axis i + 1.
    glued: RwLock<FxHashMap<u32, Arc<Relayouts>>>,
    /// Searches that gave up.
    plain: AtomicU64,
}

/// The times from one layout of a tensor to others: a row of a cost table.
pub struct Times<'a> {
    relayouts: &'a Relayouts,
    tensor: Tensor,
    from: Layout,
    frame: Frame,
    row: Option<(Slot, Arc<Row>)>,
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
            spaces: RwLock::default(),
            rows: Cache::new(MAX_ROWS),
            pairs: Cache::new(MAX_PAIRS),
            ways: Cache::new(MAX_WAYS),
            glued: RwLock::default(),
            plain: AtomicU64::new(0),
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
    fn space(&self, tensor: &Tensor, from: &Layout) -> Option<Slot> {
        let kinds = |kind| from.axes_where(|p| p == Placement::Partial(kind));
        let (sums, maxima) = (kinds(Reduction::Sum), kinds(Reduction::Max));
        if !from.absent().is_empty() || (!sums.is_empty() && !maxima.is_empty()) {
            return None;
        }
        let partial = !sums.union(maxima).is_empty();
        let key = Class::of(&tensor.divisors);
        let known = self.spaces.read().ok().and_then(|map| map.get(&key).cloned());
        let slot = match known {
            Some(slot) => slot,
            None => self.spaces.write().ok()?.entry(key).or_default().clone(),
        };
        let space = slot.get_or_init(|| Space::new(self.comm.mesh(), &key)).as_ref();
        let there = space.is_some_and(|space| space.partial || !partial);
        there.then_some(slot)
    }

    /// Works out the times from many layouts at once, which is faster than one by one as they are asked for.
    pub fn prepare(&self, tensor: &Tensor, from: &[Layout]) {
        let mut starts: Vec<Start> = Vec::new();
        let mut slot = None;
        for layout in from.iter().filter(|from| tensor.shape.check(self.comm.mesh(), from).is_ok()) {
            let renamed = Frame::new(&tensor.divisors, layout).layout(layout);
            if let Some(start) = renamed.map(|renamed| tensor.renamed(renamed))
                && let Some(own) = self.space(tensor, layout)
                && self.rows.get(&start).is_none()
            {
                slot = Some(own);
                starts.push(start);
            }
        }
        starts.sort_unstable_by_key(|start| start.from);
        starts.dedup();
        let layouts: Vec<Layout> = starts.iter().map(|start| start.from).collect();
        if let Some(space) = slot.as_ref().and_then(|slot| slot.get()?.as_ref()) {
            let rows = space.rows(&self.comm, tensor.shape.bytes(), &layouts);
            starts.into_iter().zip(rows).for_each(|(start, row)| self.rows.insert(start, Arc::new(row)));
        }
    }

    /// The times from each layout (rows) to each other one (columns): a table, faster than cell by cell.
    pub fn table(
        &self,
        tensor: &Tensor,
        from: &[Layout],
        to: &[Layout],
    ) -> Result<Vec<Seconds>, LayoutError> {
        self.prepare(tensor, from);
        let mut cells = Vec::with_capacity(from.len() * to.len());
        // Codes of the columns in the names of each frame.
        let mut codes: FxHashMap<Frame, Vec<Option<u32>>> = FxHashMap::default();
        for from in from {
            let times = self.times(tensor, from)?;
            let Some((slot, row)) = &times.row else {
                for to in to {
                    cells.push(times.to(to)?);
                }
                continue;
            };
            let space = slot.get().and_then(Option::as_ref);
            let codes = codes.entry(times.frame).or_insert_with(|| {
                let code = |to: &Layout| space?.code(&times.frame.layout(to)?).map(|code| code as u32);
                to.iter().map(|to| code(to).filter(|_| times.is_plain(to))).collect()
            });
            for (to, code) in to.iter().zip(codes) {
                let known = code.and_then(|code| row.get(code as usize));
                cells.push(known.map_or_else(|| times.to(to), Ok)?);
            }
        }
        Ok(cells)
    }

    /// The times from one layout to others. Worth it for more than one question; checks `from` once.
    pub fn times(&self, tensor: &Tensor, from: &Layout) -> Result<Times<'_>, LayoutError> {
        tensor.shape.check(self.comm.mesh(), from)?;
        let frame = Frame::new(&tensor.divisors, from);
        let slot = self.space(tensor, from);
        let row = match (&slot, frame.layout(from)) {
            (Some(slot), Some(renamed)) => {
                let row = self.rows.get_or(tensor.renamed(renamed), || {
                    let space = slot.get().and_then(Option::as_ref);
                    let rows = space.map(|space| space.rows(&self.comm, tensor.shape.bytes(), &[renamed]));
                    Ok(Arc::new(rows.and_then(|mut rows| rows.pop()).unwrap_or_else(Row::empty)))
                })?;
                Some((slot.clone(), row))
            }
            _ => None,
        };
        Ok(Times { relayouts: self, tensor: *tensor, from: *from, frame, row })
    }

    /// The time of the cheapest way. The way itself: [`Relayouts::find`].
    pub fn seconds(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<Seconds, LayoutError> {
        self.times(tensor, from)?.to(to)
    }

    /// The cheapest way, with its steps and the bytes that they send.
    pub fn find(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<Relayout, LayoutError> {
        let way = || self.work_out(tensor, from, to).map(Arc::new);
        self.ways.get_or((tensor.start(from), *to), way).map(|way| (*way).clone())
    }

    fn work_out(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Result<Relayout, LayoutError> {
        self.check(tensor, from, to)?;
        let start = Arrangement::canonical(from);
        let slot = self.space(tensor, from);
        let frame = Frame::new(&tensor.divisors, from);
        let exact = || {
            let space = slot.as_ref()?.get()?.as_ref()?;
            let (from, to) = (frame.layout(from)?, frame.layout(to)?);
            let mut path = space.path(&self.comm, tensor.shape.bytes(), &from, &to)?;
            path.iter_mut().for_each(|(_, _, after)| *after = frame.restore(after));
            Some(path)
        };
        let glue = Glue::new(self.comm.mesh(), from, to);
        let steps = match exact() {
            Some(path) => self.price(tensor, start, &path, from),
            None if slot.is_some() || !glue.helps() => self.directed(tensor, from, to),
            None => {
                let coarse = self.glued(&glue);
                let way = coarse.find(tensor, &glue.layout(from), &glue.layout(to))?;
                let finer = |step: &Step| Step {
                    axes: glue.axes(step.axes),
                    after: glue.refine(&step.after),
                    ..*step
                };
                way.steps.iter().map(finer).collect()
            }
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
    pub(crate) fn directed(&self, tensor: &Tensor, from: &Layout, to: &Layout) -> Vec<Step> {
        let goal = Goal { comm: &self.comm, shape: &tensor.shape, target: Arrangement::canonical(to) };
        let (steps, searched) = directed::search(&goal, Arrangement::canonical(from));
        self.plain.fetch_add(u64::from(!searched), Ordering::Relaxed);
        steps
    }

    /// How many re-layouts have had too many ways to search, and are priced as the plain one: whole, then cut.
    pub fn settled_for_plain(&self) -> u64 {
        let glued = self.glued.read().ok();
        let inside = glued.iter().flat_map(|map| map.values()).map(|coarse| coarse.settled_for_plain());
        self.plain.load(Ordering::Relaxed) + inside.sum::<u64>()
    }

    /// The same machine at a coarser grain.
    fn glued(&self, glue: &Glue) -> Arc<Relayouts> {
        if let Some(known) = self.glued.read().ok().as_ref().and_then(|map| map.get(&glue.joints())) {
            return known.clone();
        }
        let coarse = Arc::new(Relayouts::new(self.comm.machine(), &glue.mesh()));
        if let Ok(mut map) = self.glued.write() {
            if map.len() >= MAX_GLUED {
                map.clear();
            }
            return map.entry(glue.joints()).or_insert(coarse).clone();
        }
        coarse
    }
}

impl Tensor {
    fn start(&self, from: &Layout) -> Start {
        Start { bytes: self.shape.bytes(), divisors: self.divisors, from: *from }
    }

    /// A start with the names of a frame.
    fn renamed(&self, from: Layout) -> Start {
        Start { bytes: self.shape.bytes(), divisors: Class::of(&self.divisors).0, from }
    }
}

impl Times<'_> {
    /// Whether what is partial in the target already is, in the same way: the space does not tell sums from maxima.
    fn partial_stay(&self, to: &Layout) -> bool {
        let partial = to.axes_where(|p| matches!(p, Placement::Partial(_)));
        partial.iter().all(|axis| to.get(axis) == self.from.get(axis))
    }

    /// Whether a row alone answers for a layout: it is one of this mesh and has no partial sums.
    fn is_plain(&self, to: &Layout) -> bool {
        to.len() == self.from.len() && to.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
    }

    /// The time to another layout.
    pub fn to(&self, to: &Layout) -> Result<Seconds, LayoutError> {
        if *to == self.from {
            return Ok(Seconds::ZERO);
        }
        if to.len() == self.from.len()
            && let Some((slot, row)) = &self.row
            && let Some(Some(space)) = slot.get()
            && let Some(code) = self.frame.layout(to).and_then(|renamed| space.code(&renamed))
            && let Some(seconds) = row.get(code)
            && self.partial_stay(to)
        {
            return Ok(seconds);
        }
        let key = (self.tensor.start(&self.from), *to);
        self.relayouts.pairs.get_or(key, || {
            self.relayouts.check(&self.tensor, &self.from, to)?;
            let glue = Glue::new(self.relayouts.comm.mesh(), &self.from, to);
            if glue.helps() && self.row.is_none() {
                let coarse = self.relayouts.glued(&glue);
                return coarse.seconds(&self.tensor, &glue.layout(&self.from), &glue.layout(to));
            }
            let steps = self.relayouts.directed(&self.tensor, &self.from, to);
            Ok(steps.iter().map(|step| step.seconds).sum())
        })
    }
}
