//! From a graph and one config per op to the program.
//!
//! Ops keep the graph's order. Before an op come the re-layouts that its operands need, exactly the steps that the cost
//! model chose ([`Relayouts::spread`]), each layout of a tensor made once for all its readers (of a weight: once per pass); then what its windows reach
//! for. Gradients on their way to an update, and updated weights on their way home, start as soon as they are
//! there, so that they can travel while other ops compute; everything else moves when it is first needed.
//!
//! Partial results stay partial until somebody reads them, and sums of partial results are partial ones.

use crate::{
    blocks::reduces,
    bucket::{BUCKET, bucket},
    local::SplitOp,
    program::{Carry, Instruction, Output, ParallelGraph, Relayout, Source, Value, ValueId, Work},
};
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, Branch, Layout, LayoutError, Relayouts, TensorShape};
use shardwright_graph::{Graph, OpId, Phase, TensorId};
use shardwright_machine::{Bytes, DeviceId, Mesh, Seconds};
use shardwright_space::{Config, OpShapes, Places, halos, place, window_cuts};
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// Why a graph cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// Another number of configs than ops.
    #[error("{configs} configs for a graph of {ops} ops: give one config per op, in the graph's order")]
    Count {
        /// Configs given.
        configs: usize,
        /// Ops of the graph.
        ops: usize,
    },
    /// A config that the op cannot have.
    #[error("op `{op}`: {reason}; plan again for this graph and machine")]
    Config {
        /// The op.
        op: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that cannot be laid out or moved.
    #[error("tensor `{tensor}`: {source}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },
}

/// Ways from one layout to several, for tensors of one shape.
type Ways = FxHashMap<(TensorShape, Layout, Vec<Layout>), Rc<[Branch]>>;

/// A tensor in another layout than its home.
#[derive(Clone)]
struct Copy {
    /// The pass that it is for, if it lives for one only.
    pass: Option<Phase>,
    layout: Layout,
    value: ValueId,
}

struct Lowering<'a> {
    graph: &'a Graph,
    relayouts: &'a Relayouts,
    shapes: Vec<OpShapes>,
    places: Places,
    /// Per tensor: as it is made, stored or (data) first read, once it is there.
    homes: Vec<Option<ValueId>>,
    /// Per tensor: the copies in other layouts that exist so far.
    copies: Vec<SmallVec<[Copy; 1]>>,
    known_ways: Ways,
    program: ParallelGraph,
}

/// Lowers a graph for the mesh of `relayouts`; `configs` has one entry per op, in the graph's order.
///
/// The graph is a verified one ([`shardwright_graph::verify`]); configs may be anything.
pub fn lower(graph: &Graph, relayouts: &Relayouts, configs: &[Config]) -> Result<ParallelGraph, LowerError> {
    lower_joining(graph, relayouts, configs, BUCKET)
}

/// The same, with all-reduces of less than `limit` bytes joined: none for zero.
pub fn lower_joining(
    graph: &Graph,
    relayouts: &Relayouts,
    configs: &[Config],
    limit: Bytes,
) -> Result<ParallelGraph, LowerError> {
    let mesh = relayouts.comm().mesh();
    if configs.len() != graph.ops.len() {
        return Err(LowerError::Count { configs: configs.len(), ops: graph.ops.len() });
    }
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    for ((node, shapes), config) in graph.ops.iter().zip(&shapes).zip(configs) {
        let fail = |reason| LowerError::Config { op: node.name.clone(), reason };
        config.check(&shapes.rule, mesh).map_err(fail)?;
    }
    let places = place(graph, &shapes, configs, mesh);
    let mut lowering = Lowering {
        graph,
        relayouts,
        shapes,
        places,
        homes: vec![None; graph.tensors.len()],
        copies: vec![SmallVec::new(); graph.tensors.len()],
        known_ways: Ways::default(),
        program: ParallelGraph {
            mesh: mesh.clone(),
            values: Vec::new(),
            instructions: Vec::new(),
            ops: Vec::new(),
            sources: Vec::new(),
            outputs: Vec::new(),
            carries: Vec::new(),
        },
    };
    let eager = lowering.eager();
    for op in graph.op_ids() {
        lowering.op(op)?;
        for &t in &graph.node(op).outputs {
            for layout in &eager[t.index()] {
                lowering.get(t, layout, Phase::Update)?;
            }
        }
    }
    lowering.finish(limit)
}

impl<'a> Lowering<'a> {
    fn mesh(&self) -> &'a Mesh {
        self.relayouts.comm().mesh()
    }

    /// Per tensor: the layouts to be made as soon as it is there.
    fn eager(&self) -> Vec<SmallVec<[Layout; 1]>> {
        let mut eager = vec![SmallVec::new(); self.graph.tensors.len()];
        for op in self.graph.op_ids().filter(|&op| self.graph.node(op).phase == Phase::Update) {
            let shapes = &self.shapes[op.index()];
            for (i, t) in self.graph.node(op).inputs.iter().enumerate() {
                eager[t.index()].push(self.places.input(op, i, shapes, self.mesh()));
            }
        }
        for carry in &self.graph.carries {
            eager[carry.new.index()].extend(self.places.tensors[carry.old.index()].home);
        }
        eager
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
        self.program.sources.push(Source { tensor, value });
        value
    }

    /// The value of a tensor in its home layout.
    fn home(&mut self, tensor: TensorId) -> ValueId {
        if let Some(value) = self.homes[tensor.index()] {
            return value;
        }
        // What an op makes is there before anybody asks.
        let value = self.source(tensor, &self.home_layout(tensor));
        self.homes[tensor.index()] = Some(value);
        value
    }

    fn home_layout(&self, tensor: TensorId) -> Layout {
        let replicated = || Layout::replicated(self.mesh().len());
        self.places.tensors[tensor.index()].home.unwrap_or_else(replicated)
    }

    /// The value of a tensor in a layout that a pass needs, made now if it does not exist yet.
    fn get(&mut self, tensor: TensorId, layout: &Layout, phase: Phase) -> Result<ValueId, LowerError> {
        let home = self.home_layout(tensor);
        if *layout == home {
            return Ok(self.home(tensor));
        }
        let delivered = self.places.tensors[tensor.index()].delivered;
        let shared = delivered || self.graph.tensor(tensor).producer.is_some();
        let pass = (!shared).then_some(phase);
        let mut copies = self.copies[tensor.index()].iter();
        if let Some(copy) = copies.find(|copy| copy.pass == pass && copy.layout == *layout) {
            return Ok(copy.value);
        }
        let ways = if delivered { Rc::from([]) } else { self.ways(tensor, pass)? };
        let value = match ways.iter().find(|branch| branch.to == *layout) {
            None => self.source(tensor, layout),
            Some(branch) => {
                let from = branch.from.map_or(home, |at| ways[at].to);
                let from = self.get(tensor, &from, phase)?;
                self.carry_out(from, branch)
            }
        };
        self.copies[tensor.index()].push(Copy { pass, layout: *layout, value });
        Ok(value)
    }

    /// The steps of a branch, from a value that it starts from.
    fn carry_out(&mut self, mut value: ValueId, branch: &Branch) -> ValueId {
        for step in &branch.way.steps {
            let before = &self.program.values[value.index()];
            let reduction = before.partial().map(|(kind, _)| kind).filter(|_| reduces(step.action));
            let after = self.value(before.tensor, step.after);
            let after = self.add(after);
            let (action, axes, message, seconds) = (step.action, step.axes, step.message, step.seconds);
            let work = Work::Relayout(Relayout { action, axes, message, seconds, reduction });
            self.emit(work, smallvec![value], smallvec![after]);
            value = after;
        }
        value
    }

    /// How the layouts that a pass needs a tensor in are made from its home.
    fn ways(&mut self, tensor: TensorId, pass: Option<Phase>) -> Result<Rc<[Branch]>, LowerError> {
        let t = self.graph.tensor(tensor);
        let fail = |source| LowerError::Tensor { tensor: t.name.clone(), source };
        let shape = TensorShape::new(&t.ty.shape, t.ty.dtype.bytes() as u32).map_err(fail)?;
        let fetches = &self.places.tensors[tensor.index()].fetches;
        let layouts = fetches.iter().find(|fetch| fetch.pass == pass).map(|fetch| fetch.layouts.clone());
        let key = (shape, self.home_layout(tensor), layouts.unwrap_or_default());
        if let Some(known) = self.known_ways.get(&key) {
            return Ok(known.clone());
        }
        let ready = self.relayouts.tensor(shape);
        let ways: Rc<[Branch]> = self.relayouts.spread(&ready, &key.1, &key.2).map_err(fail)?.into();
        self.known_ways.insert(key, ways.clone());
        Ok(ways)
    }

    fn emit(&mut self, work: Work, reads: SmallVec<[ValueId; 4]>, writes: SmallVec<[ValueId; 2]>) {
        self.program.instructions.push(Instruction { work, reads, writes });
    }

    fn op(&mut self, op: OpId) -> Result<(), LowerError> {
        let (graph, mesh) = (self.graph, self.mesh());
        let node = graph.node(op);
        let mut reads = SmallVec::new();
        for (i, &t) in node.inputs.iter().enumerate() {
            let layout = self.places.input(op, i, &self.shapes[op.index()], mesh);
            let value = self.get(t, &layout, node.phase)?;
            reads.push(self.windows(op, i, value));
        }
        let mut writes = SmallVec::new();
        for (o, &t) in node.outputs.iter().enumerate() {
            let layout = self.places.output(op, o, &self.shapes[op.index()], mesh);
            let value = self.value(t, Arrangement::canonical(&layout));
            let value = self.add(value);
            self.homes[t.index()] = Some(value);
            writes.push(value);
        }
        self.emit(Work::Compute { op }, reads, writes);
        Ok(())
    }

    /// Fetches what the windows of an op's operand reach for.
    fn windows(&mut self, op: OpId, i: usize, mut value: ValueId) -> ValueId {
        let (shapes, config) = (&self.shapes[op.index()], &self.places.configs[op.index()]);
        let stored = &self.program.values[value.index()];
        for (after, work) in window_fetches(self.relayouts, shapes, i, config, stored) {
            let after = self.add(after);
            self.emit(work, smallvec![value], smallvec![after]);
            value = after;
        }
        value
    }

    fn finish(mut self, limit: Bytes) -> Result<ParallelGraph, LowerError> {
        let graph = self.graph;
        for &tensor in &graph.outputs {
            let value = self.home(tensor);
            self.program.outputs.push(Output { tensor, value });
        }
        for carry in &graph.carries {
            let new = self.get(carry.new, &self.home_layout(carry.old), Phase::Update)?;
            let old = self.home(carry.old);
            self.program.carries.push(Carry { old, new });
        }
        let is_update = |op| graph.node(op).phase == Phase::Update;
        let ops = graph.ops.iter().zip(self.shapes).zip(self.places.configs);
        self.program.ops =
            ops.map(|((node, shapes), config)| SplitOp { op: node.op.clone(), shapes, config }).collect();
        let mut program = bucket(self.program, self.relayouts.comm(), limit, &is_update);
        program.note_lifetimes();
        Ok(program)
    }
}

/// What the windows of an op's `i`-th operand reach for, fetched one dimension after the other from the operand as it is
/// stored: what each fetch makes, and the fetch.
pub fn window_fetches(
    relayouts: &Relayouts,
    shapes: &OpShapes,
    i: usize,
    config: &Config,
    stored: &Value,
) -> SmallVec<[(Value, Work); 2]> {
    let mesh = relayouts.comm().mesh();
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
            halo.map_or(Seconds::ZERO, |halo| relayouts.comm().halo_seconds(halo.axes, halo.down, halo.up));
        found.push((after, Work::Window { dim, axes, seconds }));
    }
    found
}
