//! Lowers a graph and an assignment to a program.
//!
//! Ops keep the graph's order. Before an op come the reshards of its operands, with the steps that the cost model
//! chose, then its halo exchanges. [`Sharing`] decides which readers share a reshard. Gradients on their way to an
//! update, and updated weights on their way to their stored layout, start as soon as they are produced. They move while
//! other ops compute. Every other tensor moves when it is first needed.
//!
//! Partial results stay partial until an op reads them. An op that reduces a result itself is followed by that reduction and
//! by its completion.

use crate::{
    blocks::reduces,
    bucket::{BUCKET, bucket},
    local::SplitOp,
    pipeline::ProgramPipeline,
    program::{Carry, Instruction, Output, ParallelGraph, Reshard, Source, Value, ValueId, Work},
};
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, Layout, LayoutError, ReshardPath, ReshardTree, Resharder, TensorShape};
use shardwright_graph::{Graph, OpId, Phase, TensorId};
use shardwright_machine::{Bytes, DeviceId, Mesh, Seconds};
use shardwright_space::{
    Assignment, AssignmentError, Config, Endpoint, OpShapes, Pass, Pipeline, Sharing, TensorLayouts,
    Transfers, UPDATE, assign_layouts, completion, halos, pass_of, window_cuts,
};
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// Why a graph cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// The assignment does not match this graph on this mesh.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// A tensor that cannot be laid out or resharded.
    #[error("tensor `{tensor}`: {source}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },
    /// A broken invariant of lowering itself.
    #[error("internal error while lowering tensor `{tensor}`: {reason}; please report it")]
    Internal {
        /// The tensor.
        tensor: String,
        /// The invariant.
        reason: &'static str,
    },
}

/// Options of lowering that the assignment leaves open.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions {
    /// Which readers of a tensor share a reshard.
    pub sharing: Sharing,
    /// All-reduces of fewer bytes are joined.
    pub join_below: Bytes,
}

impl Default for LowerOptions {
    fn default() -> Self {
        Self { sharing: Sharing::AcrossLayers, join_below: BUCKET }
    }
}

/// Reshard trees from one layout to several, for tensors of one shape.
type ReshardTrees = FxHashMap<(TensorShape, Layout, Vec<Layout>), Rc<ReshardTree>>;

/// The layouts to reshard a tensor to as soon as it is produced, each with the pass that needs it.
type EagerFetches = SmallVec<[(Layout, Option<Pass>); 1]>;

/// A copy of a tensor in another layout than the stored one.
#[derive(Clone)]
struct TensorCopy {
    /// The pass that it is for, if it lives for one pass only.
    pass: Option<Pass>,
    layout: Layout,
    value: ValueId,
}

struct Lowering<'a> {
    graph: &'a Graph,
    resharder: &'a Resharder,
    shapes: Vec<OpShapes>,
    transfers: Transfers,
    layouts: TensorLayouts,
    sharing: Sharing,
    /// Per tensor: its value in the stored layout, once it exists.
    stored: Vec<Option<ValueId>>,
    /// Per tensor: its copies in other layouts so far, shared across layers.
    copies: Vec<SmallVec<[TensorCopy; 1]>>,
    /// Values that operands have fetched, shared within layers.
    fetched: FxHashMap<(TensorId, Endpoint), ValueId>,
    /// The endpoint that an operand takes its tensor from, under sharing within layers.
    origins: FxHashMap<(TensorId, Endpoint), Endpoint>,
    trees: ReshardTrees,
    program: ParallelGraph,
}

/// Lowers a graph for the mesh of `resharder`.
///
/// The graph must be verified ([`shardwright_graph::verify`]); the assignment is checked.
///
/// # Errors
/// Where the assignment does not match the graph, or a tensor cannot be laid out.
pub fn lower(
    graph: &Graph,
    resharder: &Resharder,
    assignment: &Assignment,
) -> Result<ParallelGraph, LowerError> {
    lower_with(graph, resharder, assignment, LowerOptions::default())
}

/// Lowers with other options.
///
/// # Errors
/// As [`lower`].
pub fn lower_with(
    graph: &Graph,
    resharder: &Resharder,
    assignment: &Assignment,
    LowerOptions { sharing, join_below }: LowerOptions,
) -> Result<ParallelGraph, LowerError> {
    let mesh = resharder.comm().mesh();
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    assignment.check(graph, &shapes, mesh)?;
    let transfers = Transfers::of(graph);
    let layouts = assign_layouts(graph, &shapes, &transfers, assignment, mesh, sharing);
    let origins = match sharing {
        Sharing::AcrossLayers => FxHashMap::default(),
        Sharing::WithinLayers => transfers.pairs.iter().map(|t| ((t.tensor, t.to), t.from)).collect(),
    };
    let mut lowering = Lowering {
        graph,
        resharder,
        shapes,
        transfers,
        layouts,
        sharing,
        stored: vec![None; graph.tensors.len()],
        copies: vec![SmallVec::new(); graph.tensors.len()],
        fetched: FxHashMap::default(),
        origins,
        trees: ReshardTrees::default(),
        program: ParallelGraph {
            mesh: mesh.clone(),
            values: Vec::new(),
            instructions: Vec::new(),
            ops: Vec::new(),
            sources: Vec::new(),
            outputs: Vec::new(),
            carries: Vec::new(),
            micro_batches: graph.micro_batches,
            body: 0..0,
            copies: 1,
            pipeline: None,
        },
    };
    let eager = lowering.eager();
    let body = graph.body();
    for op in graph.op_ids() {
        let at = lowering.program.instructions.len();
        if op.index() == body.start {
            lowering.program.body = at..at;
        }
        lowering.op(op)?;
        for &t in &graph.node(op).outputs {
            for (layout, pass) in &eager[t.index()] {
                lowering.get(t, layout, *pass)?;
            }
        }
        if body.contains(&op.index()) {
            lowering.program.body.end = lowering.program.instructions.len();
        }
    }
    lowering.finish(join_below, assignment.pipeline.as_ref())
}

impl<'a> Lowering<'a> {
    fn mesh(&self) -> &'a Mesh {
        self.resharder.comm().mesh()
    }

    /// Per tensor: the layouts to reshard to as soon as it is produced.
    fn eager(&self) -> Vec<EagerFetches> {
        let mut eager = vec![SmallVec::new(); self.graph.tensors.len()];
        if self.sharing == Sharing::WithinLayers {
            return eager;
        }
        // Sums over micro-batches are complete after the last one.
        let graph = self.graph;
        let complete = |t: TensorId| graph.tensor(t).producer.is_none_or(|op| !graph.node(op).repeated);
        for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Update) {
            let shapes = &self.shapes[op.index()];
            for (i, &t) in graph.node(op).inputs.iter().enumerate().filter(|(_, t)| complete(**t)) {
                let layout = self.layouts.input(op, i, shapes, self.mesh());
                eager[t.index()].push((layout, pass_of(graph, t, op)));
            }
        }
        for carry in graph.carries.iter().filter(|carry| complete(carry.new)) {
            let stored = self.layouts.tensors[carry.old.index()].stored;
            eager[carry.new.index()].extend(stored.map(|layout| (layout, self.returning(carry.new))));
        }
        eager
    }

    /// The pass in which a new weight returns to the old one's layout.
    fn returning(&self, new: TensorId) -> Option<Pass> {
        let producer = self.graph.tensor(new).producer;
        producer.map_or(Some(UPDATE), |producer| pass_of(self.graph, new, producer))
    }

    fn value(&mut self, tensor: TensorId, at: Arrangement) -> Value {
        let ty = self.graph.tensor(tensor).ty.clone();
        Value { tensor, ty, at, cuts: SmallVec::new(), made_by: None, last_read: None, kept: false }
    }

    fn add(&mut self, value: Value) -> ValueId {
        self.program.values.push(value);
        ValueId(self.program.values.len() as u32 - 1)
    }

    fn source(&mut self, tensor: TensorId, layout: &Layout) -> ValueId {
        let value = self.value(tensor, Arrangement::canonical(layout));
        let value = self.add(value);
        let sliced = self.graph.sliced_dim(tensor).map(|dim| dim as u8);
        let slices = 0..sliced.map_or(1, |_| self.graph.micro_batches.get());
        self.program.sources.push(Source { tensor, value, sliced, slices });
        value
    }

    /// The value of a tensor in its stored layout.
    fn stored(&mut self, tensor: TensorId) -> ValueId {
        if let Some(value) = self.stored[tensor.index()] {
            return value;
        }
        // Only sources get here: the value of an op's result exists before its readers.
        let value = self.source(tensor, &self.stored_layout(tensor));
        self.stored[tensor.index()] = Some(value);
        value
    }

    fn stored_layout(&self, tensor: TensorId) -> Layout {
        let replicated = || Layout::replicated(self.mesh().len());
        self.layouts.tensors[tensor.index()].stored.unwrap_or_else(replicated)
    }

    /// The value that an operand reads, or that a weight is updated to. Created if it does not exist yet.
    fn fetch(
        &mut self,
        tensor: TensorId,
        to: Endpoint,
        layout: &Layout,
        pass: Option<Pass>,
    ) -> Result<ValueId, LowerError> {
        let delivered = self.layouts.tensors[tensor.index()].delivered;
        if self.sharing == Sharing::AcrossLayers || delivered {
            return self.get(tensor, layout, pass);
        }
        // The endpoint without an origin is the tensor's source itself.
        let value = match self.origins.get(&(tensor, to)).copied() {
            None => self.stored(tensor),
            Some(from) if Some(from) == self.transfers.sources[tensor.index()] => {
                let stored = self.stored(tensor);
                self.reshard(stored, layout)?
            }
            Some(from) => self.reshard(self.fetched[&(tensor, from)], layout)?,
        };
        self.fetched.insert((tensor, to), value);
        Ok(value)
    }

    /// A value in another layout, by the fastest path.
    fn reshard(&mut self, value: ValueId, to: &Layout) -> Result<ValueId, LowerError> {
        let Value { tensor, at, .. } = self.program.values[value.index()];
        let from = *at.layout();
        if from == *to {
            return Ok(value);
        }
        let shape = self.shape(tensor)?;
        let path = self.resharder.find(&self.resharder.tensor(shape), &from, to);
        let path = path.map_err(|source| self.error(tensor, source))?;
        Ok(self.emit_path(value, &path))
    }

    /// The value of a tensor in a layout that a pass needs. Created if it does not exist yet.
    fn get(&mut self, tensor: TensorId, layout: &Layout, pass: Option<Pass>) -> Result<ValueId, LowerError> {
        let stored = self.stored_layout(tensor);
        if *layout == stored {
            return Ok(self.stored(tensor));
        }
        let delivered = self.layouts.tensors[tensor.index()].delivered;
        let pass = pass.filter(|_| !delivered);
        let mut copies = self.copies[tensor.index()].iter();
        if let Some(copy) = copies.find(|copy| copy.pass == pass && copy.layout == *layout) {
            return Ok(copy.value);
        }
        let tree = if delivered { Rc::default() } else { self.tree(tensor, pass)? };
        let branches = tree.branches();
        let value = match branches.iter().find(|branch| branch.to == *layout) {
            None => self.source(tensor, layout),
            Some(branch) => {
                let from = branch.from.map_or(stored, |at| branches[at].to);
                let from = self.get(tensor, &from, pass)?;
                self.emit_path(from, &branch.path)
            }
        };
        self.copies[tensor.index()].push(TensorCopy { pass, layout: *layout, value });
        Ok(value)
    }

    /// Emits the steps of a reshard path that starts from a value.
    fn emit_path(&mut self, mut value: ValueId, path: &ReshardPath) -> ValueId {
        for step in &path.steps {
            let before = &self.program.values[value.index()];
            let reduction = before.partial().map(|(kind, _)| kind).filter(|_| reduces(step.action));
            let after = self.value(before.tensor, step.after);
            let after = self.add(after);
            let (action, axes, message, seconds) = (step.action, step.axes, step.message, step.seconds);
            let work = Work::Reshard(Reshard { action, axes, message, seconds, reduction });
            self.emit(work, smallvec![value], smallvec![after]);
            value = after;
        }
        value
    }

    fn error(&self, tensor: TensorId, source: LayoutError) -> LowerError {
        LowerError::Tensor { tensor: self.graph.tensor(tensor).name.clone(), source }
    }

    fn shape(&self, tensor: TensorId) -> Result<TensorShape, LowerError> {
        let ty = &self.graph.tensor(tensor).ty;
        TensorShape::new(&ty.shape, ty.dtype.bytes() as u32).map_err(|source| self.error(tensor, source))
    }

    /// The reshard tree from a tensor's stored layout to the layouts that a pass needs.
    fn tree(&mut self, tensor: TensorId, pass: Option<Pass>) -> Result<Rc<ReshardTree>, LowerError> {
        let shape = self.shape(tensor)?;
        let fetches = &self.layouts.tensors[tensor.index()].fetches;
        let Some(fetch) = fetches.iter().find(|fetch| fetch.pass == pass) else {
            let reason = "a reader belongs to no fetch group";
            debug_assert!(false, "{reason}");
            return Err(LowerError::Internal { tensor: self.graph.tensor(tensor).name.clone(), reason });
        };
        let key = (shape, self.stored_layout(tensor), fetch.layouts.clone());
        if let Some(known) = self.trees.get(&key) {
            return Ok(known.clone());
        }
        let ready = self.resharder.tensor(shape);
        let tree = self.resharder.reshard_many(&ready, &key.1, &key.2);
        let tree = Rc::new(tree.map_err(|source| self.error(tensor, source))?);
        self.trees.insert(key, tree.clone());
        Ok(tree)
    }

    fn emit(&mut self, work: Work, reads: SmallVec<[ValueId; 4]>, writes: SmallVec<[ValueId; 2]>) {
        self.program.instructions.push(Instruction { work, reads, writes });
    }

    fn op(&mut self, op: OpId) -> Result<(), LowerError> {
        let (graph, mesh) = (self.graph, self.mesh());
        let node = graph.node(op);
        let mut reads = SmallVec::new();
        for (i, &t) in node.inputs.iter().enumerate() {
            let layout = self.layouts.input(op, i, &self.shapes[op.index()], mesh);
            let value = self.fetch(t, Endpoint::operand(op, i), &layout, pass_of(graph, t, op))?;
            reads.push(self.exchange_halos(op, i, value));
        }
        let mut writes = SmallVec::new();
        for (o, &t) in node.outputs.iter().enumerate() {
            let layout = self.layouts.output(op, o, &self.shapes[op.index()], mesh);
            let value = self.value(t, Arrangement::canonical(&layout));
            let value = self.add(value);
            self.stored[t.index()] = Some(value);
            writes.push(value);
        }
        self.complete(op, reads, writes)
    }

    /// Emits an op, the reduction of a result that it reduces itself, and its completion.
    fn complete(
        &mut self,
        op: OpId,
        reads: SmallVec<[ValueId; 4]>,
        writes: SmallVec<[ValueId; 2]>,
    ) -> Result<(), LowerError> {
        let (shapes, config) = (&self.shapes[op.index()], &self.layouts.configs[op.index()]);
        let Some(completion) = completion(shapes, config, self.mesh()) else {
            self.emit(Work::Compute { op, completes: false }, reads, writes);
            return Ok(());
        };
        let own = self.program.values[writes[completion.output].index()].tensor;
        let path = completion.path(shapes, self.resharder).map_err(|source| self.error(own, source))?;
        let (completed, part) = (writes[0], writes[completion.output]);
        self.program.values[part.index()].at = Arrangement::canonical(&completion.from);
        let first = self.add(self.program.values[completed.index()].clone());
        let mut parts = writes;
        parts[0] = first;
        self.emit(Work::Compute { op, completes: false }, reads, parts);
        let reduced = self.emit_path(part, &path);
        self.stored[own.index()] = Some(reduced);
        let reads = smallvec![first, part, reduced];
        self.emit(Work::Compute { op, completes: true }, reads, smallvec![completed]);
        Ok(())
    }

    /// Emits the halo exchanges of an op's operand.
    fn exchange_halos(&mut self, op: OpId, i: usize, mut value: ValueId) -> ValueId {
        let (shapes, config) = (&self.shapes[op.index()], &self.layouts.configs[op.index()]);
        let stored = &self.program.values[value.index()];
        for (after, work) in halo_exchanges(self.resharder, shapes, i, config, stored) {
            let after = self.add(after);
            self.emit(work, smallvec![value], smallvec![after]);
            value = after;
        }
        value
    }

    fn finish(mut self, join_below: Bytes, pipeline: Option<&Pipeline>) -> Result<ParallelGraph, LowerError> {
        let graph = self.graph;
        for &tensor in &graph.outputs {
            let value = self.stored(tensor);
            self.program.outputs.push(Output { tensor, value });
        }
        for carry in &graph.carries {
            let layout = self.stored_layout(carry.old);
            let new = match self.transfers.sources[carry.old.index()] {
                Some(source) => self.fetch(carry.new, source, &layout, self.returning(carry.new))?,
                None => self.get(carry.new, &layout, self.returning(carry.new))?,
            };
            let old = self.stored(carry.old);
            self.program.carries.push(Carry { old, new });
        }
        let is_update = |op| graph.node(op).phase == Phase::Update;
        let ops = graph.ops.iter().zip(self.shapes).zip(self.layouts.configs);
        self.program.ops =
            ops.map(|((node, shapes), config)| SplitOp { op: node.op.clone(), shapes, config }).collect();
        let mut program = bucket(self.program, self.resharder.comm(), join_below, pipeline, &is_update);
        program.pipeline = pipeline.map(|pipeline| ProgramPipeline::new(graph, pipeline, &program));
        program.record_lifetimes();
        Ok(program)
    }
}

/// The halo exchanges of an op's `i`-th operand, one windowed dimension after the other: the value that each produces,
/// and its work. `stored` is the operand in its stored layout.
pub fn halo_exchanges(
    resharder: &Resharder,
    shapes: &OpShapes,
    i: usize,
    config: &Config,
    stored: &Value,
) -> SmallVec<[(Value, Work); 2]> {
    let mesh = resharder.comm().mesh();
    let exchanges = halos(shapes, i, config, mesh);
    let mut found: SmallVec<[(Value, Work); 2]> = SmallVec::new();
    for cut in window_cuts(shapes, i, config, mesh) {
        let before = found.last().map_or(stored, |(value, _)| value);
        let axes_stored = before.at.layout().shards(cut.dim);
        let mut after = before.clone();
        let (dim, axes) = (cut.dim, cut.axes);
        after.cuts.push(cut);
        let same = |device| before.block(mesh, device) == after.block(mesh, device);
        if (0..mesh.devices()).map(DeviceId).all(same) {
            continue;
        }
        let halo = exchanges.iter().find(|halo| halo.axes == axes_stored);
        let seconds =
            halo.map_or(Seconds::ZERO, |halo| resharder.comm().halo_seconds(halo.axes, halo.down, halo.up));
        found.push((after, Work::HaloExchange { dim, axes, seconds }));
    }
    found
}
