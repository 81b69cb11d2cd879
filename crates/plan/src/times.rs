//! What the parts of an op cost: its time on one device, and the exchange of its windows' rows.
//!
//! Only the number of parts of each factor decides an op's time, not which axes make them, and identical ops
//! (deep models are full of them) share their times.

use rustc_hash::FxHashMap;
use shardwright_cost::{Comm, Estimate, OperatorTimes, TimeSource};
use shardwright_graph::{Graph, Op, OpId, Region, TensorType, Workload};
use shardwright_machine::{Mesh, Seconds};
use shardwright_space::{Config, OpShapes, halos};
use smallvec::SmallVec;
use std::sync::RwLock;

/// Integer picoseconds: what the search adds up.
pub fn picoseconds(seconds: Seconds) -> i64 {
    // Saturates: the network refuses totals that do not fit.
    (seconds.0 * 1e12).round() as i64
}

/// Which of a graph's distinct ops an op is.
type Kind = u32;

type Parts = SmallVec<[u64; 6]>;

/// Times of all ops of a graph under any config.
pub struct OpTimes<'a> {
    times: OperatorTimes<'a>,
    graph: &'a Graph,
    shapes: &'a [OpShapes],
    mesh: &'a Mesh,
    kinds: Vec<Kind>,
    known: RwLock<FxHashMap<(Kind, Parts), i64>>,
}

impl<'a> OpTimes<'a> {
    /// Nothing is computed before it is asked for.
    pub fn new(times: OperatorTimes<'a>, graph: &'a Graph, shapes: &'a [OpShapes], mesh: &'a Mesh) -> Self {
        let mut kinds: FxHashMap<(&Op, &OpShapes), Kind> = FxHashMap::default();
        let kinds = graph
            .op_ids()
            .map(|op| {
                let next = kinds.len() as Kind;
                *kinds.entry((&graph.node(op).op, &shapes[op.index()])).or_insert(next)
            })
            .collect();
        Self { times, graph, shapes, mesh, kinds, known: RwLock::default() }
    }

    /// Per op: which of the graph's distinct ops it is.
    pub fn kinds(&self) -> &[u32] {
        &self.kinds
    }

    /// How long one device works on its part of an op.
    pub fn compute(&self, op: OpId, config: &Config) -> i64 {
        let key = (self.kinds[op.index()], config.parts(&self.shapes[op.index()].rule, self.mesh));
        if let Some(&time) = self.known.read().ok().as_ref().and_then(|known| known.get(&key)) {
            return time;
        }
        let time = picoseconds(self.estimate(op, config).1.seconds);
        if let Ok(mut known) = self.known.write() {
            known.insert(key, time);
        }
        time
    }

    /// The work of one part of an op, and its time with where that comes from.
    pub fn estimate(&self, op: OpId, config: &Config) -> (Workload, Estimate) {
        let shapes = &self.shapes[op.index()];
        let mut region = Region::whole(&shapes.rule, &shapes.inputs, &shapes.outputs);
        for (factor, parts) in config.parts(&shapes.rule, self.mesh).into_iter().enumerate() {
            region = region.split(factor as u8, 0, parts);
        }
        let local = self.graph.node(op).op.operator().localize(&region);
        let inputs: SmallVec<[TensorType; 4]> = (0..shapes.inputs.len())
            .map(|i| TensorType { dtype: shapes.inputs[i].dtype, shape: region.input_shape(i) })
            .collect();
        let outputs: SmallVec<[TensorType; 4]> = (0..shapes.outputs.len())
            .map(|o| TensorType { dtype: shapes.outputs[o].dtype, shape: region.output_shape(o) })
            .collect();
        let workload = local.workload(&inputs, &outputs);
        let estimate = if local.operator().is_view() {
            Estimate { seconds: Seconds::ZERO, source: TimeSource::Roofline }
        } else {
            self.times.estimate(&workload)
        };
        (workload, estimate)
    }

    /// How long the parts of an op exchange the rows that their windows reach for.
    pub fn halo(&self, comm: &Comm, op: OpId, config: &Config) -> i64 {
        let shapes = &self.shapes[op.index()];
        (0..shapes.inputs.len())
            .flat_map(|i| halos(shapes, i, config, self.mesh))
            .map(|halo| picoseconds(comm.halo_seconds(halo.axes, halo.down, halo.up)))
            .sum()
    }
}
