//! Lifetimes of tensors in the graph's order.
//!
//! Time is the position in the graph's schedule. Weights, optimizer state, constants and data live for the whole step;
//! the result of an op lives from the op to its last reader. In micro-batches, a result that the body reads lives to the
//! body's end, and a sum over micro-batches from the body's start. An updated weight replaces the old one in place, as
//! optimizers do. A view (say, a reshape) lives in the memory of its source tensor.

use shardwright_graph::{Graph, OpId, TensorId};
use std::ops::Range;

/// The interval in which each tensor's memory is held.
#[derive(Clone, Debug)]
pub struct Lifetimes {
    /// Per tensor: positions in the schedule; empty for tensors that live in another tensor's memory.
    intervals: Vec<Range<u32>>,
    /// Per tensor: the first position after its last use, direct or through a view.
    ends: Vec<u32>,
    steps: u32,
}

impl Lifetimes {
    /// The lifetimes of a graph's tensors in its own order.
    pub fn of(graph: &Graph) -> Self {
        let steps = graph.ops.len() as u32;
        let mut intervals: Vec<Range<u32>> =
            graph.tensors.iter().map(|t| t.producer.map_or(0..steps, |p| p.0..p.0 + 1)).collect();
        for (i, node) in graph.ops.iter().enumerate() {
            for t in &node.inputs {
                let interval = &mut intervals[t.index()];
                interval.end = interval.end.max(i as u32 + 1);
            }
        }
        for t in &graph.outputs {
            intervals[t.index()].end = steps;
        }
        // The body of a step in micro-batches runs again and again: it finds tensors from before it, and adds to sums.
        let body = graph.body();
        let (first, end) = (body.start as u32, body.end as u32);
        for (t, interval) in graph.tensors.iter().zip(&mut intervals) {
            let Some(producer) = t.producer.filter(|_| !body.is_empty()) else { continue };
            if producer.0 < first && interval.end > first {
                interval.end = interval.end.max(end);
            }
            if graph.node(producer).op.operator().accumulates() {
                interval.start = first;
            }
        }
        // A view extends the lifetime of its source. The last view comes first, so that chains of views add up.
        for node in graph.ops.iter().rev().filter(|n| n.op.operator().is_view()) {
            let (from, to) = (node.inputs[0].index(), node.outputs[0].index());
            intervals[from].end = intervals[from].end.max(intervals[to].end);
        }
        let ends = intervals.iter().map(|interval| interval.end).collect();
        for node in graph.ops.iter().filter(|n| n.op.operator().is_view()) {
            intervals[node.outputs[0].index()] = 0..0;
        }
        for carry in &graph.carries {
            intervals[carry.new.index()] = 0..0;
        }
        Self { intervals, ends, steps }
    }

    /// The interval in which a tensor's own memory is held; empty if it lives in another tensor's.
    pub fn interval(&self, tensor: TensorId) -> Range<u32> {
        self.intervals[tensor.index()].clone()
    }

    /// The interval in which an op's copy of an operand is held: while the op runs or, for a view, until the view's last
    /// use.
    pub fn reading(&self, graph: &Graph, op: OpId) -> Range<u32> {
        let node = graph.node(op);
        let end = if node.op.operator().is_view() { self.ends[node.outputs[0].index()] } else { op.0 + 1 };
        op.0..end
    }

    /// Number of positions in the schedule.
    pub fn steps(&self) -> u32 {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{
        DType, GraphBuilder, Init, Optimizer, Real, Role, TensorType,
        ops::{Contract, Reduce, Reshape, Unary, UnaryFn},
        train,
    };

    /// x[4,8] · w[8,8], square, reshape, sum; 4-byte floats.
    fn graph(optimizer: &Optimizer) -> Graph {
        let mut b = GraphBuilder::new("m");
        let x =
            b.source("x", TensorType::new(DType::F32, [4, 8]), Role::Input, Init::Normal(Real(1.0))).unwrap();
        let w = b
            .source("w", TensorType::new(DType::F32, [8, 8]), Role::Parameter, Init::Normal(Real(1.0)))
            .unwrap();
        let y = b.emit("y", Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        let z = b.emit("z", Unary { f: UnaryFn::Square }, &[y]).unwrap();
        let flat = b.emit("flat", Reshape { shape: [32].into() }, &[z]).unwrap();
        let loss = b.emit("loss", Reduce::sum(smallvec::smallvec![0]), &[flat]).unwrap();
        b.output(loss);
        train(&mut b, loss, optimizer).unwrap();
        b.finish()
    }

    fn tensor(graph: &Graph, name: &str) -> TensorId {
        graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap()
    }

    #[test]
    fn activations_live_until_their_gradient_and_views_in_their_source() {
        let g = graph(&Optimizer::sgd(0.1));
        let lives = Lifetimes::of(&g);
        let y = lives.interval(tensor(&g, "y"));
        let square_grad = g.ops.iter().position(|n| n.op.kind() == "unary_grad").unwrap() as u32;
        assert_eq!((y.start, y.end), (0, square_grad + 1));
        assert!(lives.interval(tensor(&g, "flat")).is_empty(), "a reshape is a view");
        let z = lives.interval(tensor(&g, "z"));
        let loss = g.tensor(tensor(&g, "loss")).producer.unwrap().0;
        assert_eq!(z.end, loss + 1, "what the view's reader needs");
        assert!(lives.interval(g.carries[0].new).is_empty(), "updates happen in place");
    }
}
