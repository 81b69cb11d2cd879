//! The cheapest path of steps from one layout of a tensor to another.
//!
//! A reshard is a sequence of [`ReshardStep`]s. Its time is the sum of the steps' times: each step depends on the one
//! before it, so they do not overlap. Three methods share the work:
//! - On a mesh with few arrangements (say, four binary axes and a four-dimensional tensor), `arrangement_graph` is exact.
//!   It computes shortest paths over all arrangements and steps, one row of targets at a time.
//! - On meshes of more than four axes, neighbouring axes of a level are merged if they have the same placement before
//!   and the same placement after. In most cases the merged mesh is small enough for the exact method.
//! - The goal-directed search of `directed_search` covers the rest and absent axes. Its path is valid and seldom far
//!   from the best one, but it is not proved optimal.
//!
//! The time is zero exactly when no byte moves. Then every axis either keeps its placement, or goes from replicated to
//! absent, or goes from replicated to sharded inside (minor to) all axes that keep sharding the same dimension. No
//! reshard makes a tensor partial: partial sums come from operators, and no operator reads them.
//!
//! Results are cached by bytes and by layouts in canonical dimensions (`canonical_dims`), so that tensors of equal
//! divisibility share an entry.

use crate::arrangement_graph::ArrangementGraph;
use crate::cache::Cache;
use crate::candidate_steps::ReshardGoal;
use crate::canonical_dims::{CanonicalDims, DivisorClass};
use crate::collective::{Comm, Traffic};
use crate::directed_search;
use crate::layout::{Arrangement, Layout, LayoutError, MAX_DIMS, Placement, Reduction, TensorShape};
use crate::merged_axes::MergedAxes;
use crate::reshard_step::{Action, ReshardStep, local_bytes};
use crate::time_rows::TimeRow;
use rustc_hash::FxHashMap;
use shardwright_machine::{AxisSet, Bytes, Machine, Mesh, Seconds};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

/// A row takes about ten kilobytes and a pair about two hundred bytes: at most about 100 MB together.
const MAX_ROWS: usize = 1 << 13;
const MAX_PAIRS: usize = 1 << 17;
const MAX_PATHS: usize = 1 << 12;
/// Resharders of merged meshes, a few megabytes each. Two levels of eight have 16, a 16 x 16 torus has 128.
const MAX_MERGED: usize = 128;

/// The steps from one layout to another, with their time and traffic.
#[derive(Clone, Debug, PartialEq)]
pub struct ReshardPath {
    /// In order; empty if the layouts are equal. Their times are whole picoseconds, which add up to the rounded `seconds`.
    pub steps: Vec<ReshardStep>,
    /// The time of all steps.
    pub seconds: Seconds,
    /// Bytes over each axis, all devices together.
    pub traffic: Traffic,
}

/// Rounds the times of a path's steps to whole picoseconds, the unit of objective and simulator, so that they add up to the
/// rounded time of the path. Rounding the running sum keeps that; rounding every step by itself would not.
fn round_steps(steps: &mut [ReshardStep]) {
    let (mut exact, mut rounded) = (0.0, 0.0);
    for step in steps {
        exact += step.seconds.0;
        let end = (exact * 1e12).round();
        step.seconds = Seconds((end - rounded) / 1e12);
        rounded = end;
    }
}

/// A tensor's shape with its divisors, computed once for all queries.
#[derive(Clone, Copy, Debug)]
pub struct ReshardTensor {
    shape: TensorShape,
    /// The greatest common divisor of each dimension and the number of devices: which splits are possible.
    divisors: [u32; MAX_DIMS],
}

impl ReshardTensor {
    /// The shape it was made from.
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }
}

/// The key of a row of times: a tensor in its source layout.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SourceKey {
    bytes: u64,
    divisors: [u32; MAX_DIMS],
    from: Layout,
}

/// A graph that the first query builds; `None` inside if it would have too many arrangements.
type GraphSlot = Arc<OnceLock<Option<ArrangementGraph>>>;

/// Finds and caches reshard paths on one mesh. Shared by threads.
#[derive(Debug)]
pub struct Resharder {
    comm: Comm,
    graphs: RwLock<FxHashMap<DivisorClass, GraphSlot>>,
    /// With canonical dimensions.
    rows: Cache<SourceKey, Arc<TimeRow>>,
    pairs: Cache<(SourceKey, Layout), Seconds>,
    paths: Cache<(SourceKey, Layout), Arc<ReshardPath>>,
    /// Resharders on meshes with merged axes: bit i of the key merges axes i and i + 1.
    merged: RwLock<FxHashMap<u32, Arc<Resharder>>>,
    /// Searches that gave up and took the fallback path.
    fallbacks: AtomicU64,
}

/// The reshard times from one layout of a tensor to others: a row of a cost table.
pub struct ReshardTimes<'a> {
    resharder: &'a Resharder,
    tensor: ReshardTensor,
    from: Layout,
    dims: CanonicalDims,
    row: Option<(GraphSlot, Arc<TimeRow>)>,
}

impl std::fmt::Debug for SourceKey {
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

impl Resharder {
    /// A resharder for the axes of a mesh of the machine.
    pub fn new(machine: &Machine, mesh: &Mesh) -> Resharder {
        Resharder {
            comm: Comm::new(machine, mesh),
            graphs: RwLock::default(),
            rows: Cache::new(MAX_ROWS),
            pairs: Cache::new(MAX_PAIRS),
            paths: Cache::new(MAX_PATHS),
            merged: RwLock::default(),
            fallbacks: AtomicU64::new(0),
        }
    }

    /// The cost model of collectives that prices steps.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Prepares a tensor for queries.
    pub fn tensor(&self, shape: TensorShape) -> ReshardTensor {
        let devices = u64::from(self.comm.mesh().devices());
        let mut divisors = [1; MAX_DIMS];
        for dim in 0..shape.rank() {
            // A dimension of size 0 can be split by any axis.
            divisors[usize::from(dim)] = gcd(shape.dim(dim), devices) as u32;
        }
        ReshardTensor { shape, divisors }
    }

    /// The graph of all arrangements that reshards from this layout pass through, if it is small enough.
    fn graph(&self, tensor: &ReshardTensor, from: &Layout) -> Option<GraphSlot> {
        let reduced = |kind: &Reduction| !from.axes_where(|p| p == Placement::Partial(*kind)).is_empty();
        let kinds = Reduction::ALL.iter().filter(|kind| reduced(kind)).count();
        if !from.absent().is_empty() || kinds > 1 {
            return None;
        }
        let partial = kinds > 0;
        let key = DivisorClass::of(&tensor.divisors);
        let known = self.graphs.read().ok().and_then(|map| map.get(&key).cloned());
        let slot = match known {
            Some(slot) => slot,
            None => self.graphs.write().ok()?.entry(key).or_default().clone(),
        };
        let graph = slot.get_or_init(|| ArrangementGraph::new(self.comm.mesh(), &key)).as_ref();
        let covers = graph.is_some_and(|graph| graph.partial || !partial);
        covers.then_some(slot)
    }

    /// Computes the rows of many source layouts at once, which is faster than one by one on demand.
    pub fn prepare(&self, tensor: &ReshardTensor, from: &[Layout]) {
        let mut starts: Vec<SourceKey> = Vec::new();
        let mut slot = None;
        for layout in from.iter().filter(|from| tensor.shape.check(self.comm.mesh(), from).is_ok()) {
            let renamed = CanonicalDims::new(&tensor.divisors, layout).layout(layout);
            if let Some(start) = renamed.map(|renamed| tensor.canonical_key(renamed))
                && let Some(own) = self.graph(tensor, layout)
                && self.rows.get(&start).is_none()
            {
                slot = Some(own);
                starts.push(start);
            }
        }
        starts.sort_unstable_by_key(|start| start.from);
        starts.dedup();
        let layouts: Vec<Layout> = starts.iter().map(|start| start.from).collect();
        if let Some(graph) = slot.as_ref().and_then(|slot| slot.get()?.as_ref()) {
            let rows = graph.rows(&self.comm, tensor.shape.bytes(), &layouts);
            starts.into_iter().zip(rows).for_each(|(start, row)| self.rows.insert(start, Arc::new(row)));
        }
    }

    /// The table of times from each layout in `from` (rows) to each in `to` (columns). Faster than cell by cell.
    pub fn table(
        &self,
        tensor: &ReshardTensor,
        from: &[Layout],
        to: &[Layout],
    ) -> Result<Vec<Seconds>, LayoutError> {
        self.prepare(tensor, from);
        let mut cells = Vec::with_capacity(from.len() * to.len());
        // Codes of the columns, by the canonical dimensions of the row.
        let mut codes: FxHashMap<CanonicalDims, Vec<Option<u32>>> = FxHashMap::default();
        for from in from {
            let times = self.times(tensor, from)?;
            let Some((slot, row)) = &times.row else {
                for to in to {
                    cells.push(times.to(to)?);
                }
                continue;
            };
            let graph = slot.get().and_then(Option::as_ref);
            let codes = codes.entry(times.dims).or_insert_with(|| {
                let code = |to: &Layout| graph?.code(&times.dims.layout(to)?).map(|code| code as u32);
                to.iter().map(|to| code(to).filter(|_| times.row_covers(to))).collect()
            });
            for (to, code) in to.iter().zip(codes) {
                let known = code.and_then(|code| row.get(code as usize));
                cells.push(known.map_or_else(|| times.to(to), Ok)?);
            }
        }
        Ok(cells)
    }

    /// The times from one layout to others. Faster than [`Resharder::seconds`] for more than one query: it checks
    /// `from` once.
    pub fn times(&self, tensor: &ReshardTensor, from: &Layout) -> Result<ReshardTimes<'_>, LayoutError> {
        tensor.shape.check(self.comm.mesh(), from)?;
        let dims = CanonicalDims::new(&tensor.divisors, from);
        let slot = self.graph(tensor, from);
        let row = match (&slot, dims.layout(from)) {
            (Some(slot), Some(renamed)) => {
                let row = self.rows.get_or(tensor.canonical_key(renamed), || {
                    let graph = slot.get().and_then(Option::as_ref);
                    let rows = graph.map(|graph| graph.rows(&self.comm, tensor.shape.bytes(), &[renamed]));
                    let row = rows.and_then(|mut rows| rows.pop());
                    debug_assert!(row.is_some(), "`graph` returns built graphs only");
                    // An empty row sends every query to the directed search, which is valid for any layout.
                    Ok(Arc::new(row.unwrap_or_else(TimeRow::empty)))
                })?;
                Some((slot.clone(), row))
            }
            _ => None,
        };
        Ok(ReshardTimes { resharder: self, tensor: *tensor, from: *from, dims, row })
    }

    /// The time of the cheapest path. [`Resharder::find`] returns the path itself.
    pub fn seconds(
        &self,
        tensor: &ReshardTensor,
        from: &Layout,
        to: &Layout,
    ) -> Result<Seconds, LayoutError> {
        self.times(tensor, from)?.to(to)
    }

    /// The cheapest path, with its steps and the bytes that they send.
    pub fn find(
        &self,
        tensor: &ReshardTensor,
        from: &Layout,
        to: &Layout,
    ) -> Result<ReshardPath, LayoutError> {
        let path = || self.compute_path(tensor, from, to).map(Arc::new);
        self.paths.get_or((tensor.key(from), *to), path).map(|path| (*path).clone())
    }

    fn compute_path(
        &self,
        tensor: &ReshardTensor,
        from: &Layout,
        to: &Layout,
    ) -> Result<ReshardPath, LayoutError> {
        self.check(tensor, from, to)?;
        let start = Arrangement::canonical(from);
        let slot = self.graph(tensor, from);
        let dims = CanonicalDims::new(&tensor.divisors, from);
        let exact = || {
            let graph = slot.as_ref()?.get()?.as_ref()?;
            let (from, to) = (dims.layout(from)?, dims.layout(to)?);
            let mut path = graph.path(&self.comm, tensor.shape.bytes(), &from, &to)?;
            path.iter_mut().for_each(|(_, _, after)| *after = dims.restore(after));
            Some(path)
        };
        let merge = MergedAxes::new(self.comm.mesh(), from, to);
        let timed = |steps: Vec<ReshardStep>| {
            let seconds = steps.iter().map(|step| step.seconds).sum();
            (steps, seconds)
        };
        let steps = match exact() {
            Some(path) => timed(self.price(tensor, start, &path, from)),
            None if slot.is_some() || !merge.is_worthwhile() => timed(self.directed(tensor, from, to)),
            None => {
                let coarse = self.merged(&merge);
                let path = coarse.find(tensor, &merge.layout(from), &merge.layout(to))?;
                let finer = |step: &ReshardStep| ReshardStep {
                    axes: merge.axes(step.axes),
                    after: merge.refine(&step.after),
                    ..*step
                };
                (path.steps.iter().map(finer).collect(), path.seconds)
            }
        };
        let (mut steps, seconds): (Vec<ReshardStep>, Seconds) = steps;
        round_steps(&mut steps);
        let mut traffic = Traffic::default();
        let mut before = start;
        for step in &steps {
            traffic.merge(&step.traffic(&self.comm, &before));
            before = step.after;
        }
        Ok(ReshardPath { steps, seconds, traffic })
    }

    /// Adds message sizes and times to the steps of a path.
    fn price(
        &self,
        tensor: &ReshardTensor,
        start: Arrangement,
        path: &[(Action, AxisSet, Arrangement)],
        from: &Layout,
    ) -> Vec<ReshardStep> {
        // The graph has one kind of reduction for all: restore the tensor's own kind.
        let kinds = from.axes_where(|p| matches!(p, Placement::Partial(_)));
        let own = |mut after: Arrangement| {
            for axis in kinds.iter() {
                if matches!(after.layout().get(axis), Placement::Partial(_)) {
                    after.set(axis, from.get(axis));
                }
            }
            after
        };
        let mut steps: Vec<ReshardStep> = Vec::new();
        let mut before = start;
        for &(action, axes, after) in path {
            let after = own(after);
            // The graph slices one axis at a time: join consecutive slices, which are free, into one step.
            match steps.last_mut() {
                Some(last) if action == Action::Slice && last.action == Action::Slice => {
                    (last.axes, last.after) = (last.axes.union(axes), after);
                }
                _ => {
                    let side = if action == Action::AllGather { &after } else { &before };
                    let message = Bytes(local_bytes(self.comm.mesh(), tensor.shape.bytes(), side));
                    let cost = |kind| self.comm.seconds(kind, axes, message);
                    let seconds = action.collective().map_or(Seconds::ZERO, cost);
                    steps.push(ReshardStep { action, axes, message, seconds, after });
                }
            }
            before = after;
        }
        steps
    }

    fn check(&self, tensor: &ReshardTensor, from: &Layout, to: &Layout) -> Result<(), LayoutError> {
        let mesh = self.comm.mesh();
        tensor.shape.check(mesh, from)?;
        tensor.shape.check(mesh, to)?;
        let becomes_partial =
            |axis| matches!(to.get(axis), Placement::Partial(_)) && to.get(axis) != from.get(axis);
        match mesh.all().iter().find(|&axis| becomes_partial(axis)) {
            Some(axis) => Err(LayoutError::CannotBecomePartial { axis: mesh.axis(axis).name.clone() }),
            None => Ok(()),
        }
    }

    /// The goal-directed search. The caller has checked the layouts.
    pub(crate) fn directed(&self, tensor: &ReshardTensor, from: &Layout, to: &Layout) -> Vec<ReshardStep> {
        let goal = ReshardGoal { comm: &self.comm, shape: &tensor.shape, target: Arrangement::canonical(to) };
        let (steps, searched) = directed_search::search(&goal, Arrangement::canonical(from));
        self.fallbacks.fetch_add(u64::from(!searched), Ordering::Relaxed);
        steps
    }

    /// Number of reshards whose search was cut off, so that they are priced by the fallback path: gather the tensor
    /// whole, then slice it.
    pub fn fallback_count(&self) -> u64 {
        let merged = self.merged.read().ok();
        let inside = merged.iter().flat_map(|map| map.values()).map(|coarse| coarse.fallback_count());
        self.fallbacks.load(Ordering::Relaxed) + inside.sum::<u64>()
    }

    /// The resharder of the mesh with merged axes.
    fn merged(&self, merge: &MergedAxes) -> Arc<Resharder> {
        if let Some(known) = self.merged.read().ok().as_ref().and_then(|map| map.get(&merge.merged_bits())) {
            return known.clone();
        }
        let coarse = Arc::new(Resharder::new(self.comm.machine(), &merge.mesh()));
        if let Ok(mut map) = self.merged.write() {
            if map.len() >= MAX_MERGED {
                map.clear();
            }
            return map.entry(merge.merged_bits()).or_insert(coarse).clone();
        }
        coarse
    }
}

impl ReshardTensor {
    fn key(&self, from: &Layout) -> SourceKey {
        SourceKey { bytes: self.shape.bytes(), divisors: self.divisors, from: *from }
    }

    /// The key of a layout in canonical dimensions.
    fn canonical_key(&self, from: Layout) -> SourceKey {
        SourceKey { bytes: self.shape.bytes(), divisors: DivisorClass::of(&self.divisors).0, from }
    }
}

impl ReshardTimes<'_> {
    /// Whether every partial axis of the target has the same reduction in the source. The graph does not distinguish
    /// sums from maxima.
    fn keeps_reductions(&self, to: &Layout) -> bool {
        let partial = to.axes_where(|p| matches!(p, Placement::Partial(_)));
        partial.iter().all(|axis| to.get(axis) == self.from.get(axis))
    }

    /// Whether the row alone has the time of a layout: the layout is of this mesh and has no partial axes.
    fn row_covers(&self, to: &Layout) -> bool {
        to.len() == self.from.len() && to.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
    }

    /// The time to another layout.
    pub fn to(&self, to: &Layout) -> Result<Seconds, LayoutError> {
        if *to == self.from {
            return Ok(Seconds::ZERO);
        }
        if to.len() == self.from.len()
            && let Some((slot, row)) = &self.row
            && let Some(Some(graph)) = slot.get()
            && let Some(code) = self.dims.layout(to).and_then(|renamed| graph.code(&renamed))
            && let Some(seconds) = row.get(code)
            && self.keeps_reductions(to)
        {
            return Ok(seconds);
        }
        let key = (self.tensor.key(&self.from), *to);
        self.resharder.pairs.get_or(key, || {
            self.resharder.check(&self.tensor, &self.from, to)?;
            let merge = MergedAxes::new(self.resharder.comm.mesh(), &self.from, to);
            if merge.is_worthwhile() && self.row.is_none() {
                let coarse = self.resharder.merged(&merge);
                return coarse.seconds(&self.tensor, &merge.layout(&self.from), &merge.layout(to));
            }
            let steps = self.resharder.directed(&self.tensor, &self.from, to);
            Ok(steps.iter().map(|step| step.seconds).sum())
        })
    }
}
