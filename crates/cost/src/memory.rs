//! Memory over time: which tensors are alive when, and what the peak is made of, on one device.
//!
//! Time is the position in the graph's schedule. Weights, optimizer state, constants and data live all step
//! long; what an op makes lives from it to its last reader. An updated weight takes its predecessor's place
//! (optimizers work in place), and a view (a reshape) lives in the tensor that it looks at. How many bytes of
//! each tensor a device holds depends on the plan and is asked of the caller.

use shardwright_graph::{Graph, OpId, Role, TensorId};
use shardwright_machine::Bytes;
use std::ops::Range;

/// When each tensor's memory is held, and whose memory it is.
#[derive(Clone, Debug)]
pub struct Lifetimes {
    /// Per tensor: positions in the schedule, or empty for tensors that live in another's memory.
    intervals: Vec<Range<u32>>,
    /// Per tensor: the first position at which nobody needs it any more, neither itself nor through a view.
    ends: Vec<u32>,
    steps: u32,
}

/// What memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights.
    pub parameters: Bytes,
    /// Gradients.
    pub gradients: Bytes,
    /// What the optimizer keeps.
    pub optimizer_state: Bytes,
    /// Results of forward ops, kept for their readers or for the backward pass.
    pub activations: Bytes,
    /// Data, labels, constants.
    pub inputs: Bytes,
    /// What the running op needs for itself.
    pub workspace: Bytes,
}

impl MemoryUse {
    /// All of it.
    pub fn total(&self) -> Bytes {
        let parts = [
            self.parameters,
            self.gradients,
            self.optimizer_state,
            self.activations,
            self.inputs,
            self.workspace,
        ];
        Bytes(parts.iter().fold(0u64, |sum, b| sum.saturating_add(b.0)))
    }

    fn of_role(&mut self, role: Role) -> &mut Bytes {
        match role {
            Role::Parameter => &mut self.parameters,
            Role::Gradient => &mut self.gradients,
            Role::OptimizerState => &mut self.optimizer_state,
            Role::Activation => &mut self.activations,
            Role::Input | Role::Constant => &mut self.inputs,
        }
    }
}

/// The fullest moment of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The op that runs then.
    pub at: OpId,
    /// What the memory holds.
    pub held: MemoryUse,
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
        // Views lend their lifetime to what they look at, last view first so that chains add up.
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

    /// When a tensor's own memory is held; empty if it lives in another tensor's.
    pub fn interval(&self, tensor: TensorId) -> Range<u32> {
        self.intervals[tensor.index()].clone()
    }

    /// How long a copy that an op reads is held: while the op runs, or, where the op only looks at it in another
    /// way, as long as anybody needs that view.
    pub fn reading(&self, graph: &Graph, op: OpId) -> Range<u32> {
        let node = graph.node(op);
        let end = if node.op.operator().is_view() { self.ends[node.outputs[0].index()] } else { op.0 + 1 };
        op.0..end
    }

    /// How many positions the schedule has.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Bytes held while each op runs. `bytes` says how much of a tensor the device holds.
    pub fn profile(
        &self,
        graph: &Graph,
        bytes: impl Fn(TensorId) -> Bytes,
        workspace: impl Fn(OpId) -> Bytes,
    ) -> Vec<MemoryUse> {
        let mut change: Vec<MemoryUse> = vec![MemoryUse::default(); self.steps as usize];
        let mut ends: Vec<Vec<TensorId>> = vec![Vec::new(); self.steps as usize + 1];
        let mut starts = ends.clone();
        for t in graph.tensor_ids() {
            let interval = self.interval(t);
            if !interval.is_empty() {
                starts[interval.start as usize].push(t);
                ends[interval.end as usize].push(t);
            }
        }
        let mut now = MemoryUse::default();
        for (i, held) in change.iter_mut().enumerate() {
            for &t in &ends[i] {
                let part = now.of_role(graph.tensor(t).role);
                part.0 = part.0.saturating_sub(bytes(t).0);
            }
            for &t in &starts[i] {
                let part = now.of_role(graph.tensor(t).role);
                part.0 = part.0.saturating_add(bytes(t).0);
            }
            *held = MemoryUse { workspace: workspace(OpId::new(i)), ..now };
        }
        change
    }

    /// The fullest moment; none for a graph without ops.
    pub fn peak(
        &self,
        graph: &Graph,
        bytes: impl Fn(TensorId) -> Bytes,
        workspace: impl Fn(OpId) -> Bytes,
    ) -> Option<Peak> {
        let profile = self.profile(graph, bytes, workspace);
        // The first of equals, so that the answer does not depend on the iteration.
        let (i, held) =
            profile.into_iter().enumerate().max_by_key(|(i, m)| (m.total(), std::cmp::Reverse(*i)))?;
        Some(Peak { at: OpId::new(i), held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{
        DType, GraphBuilder, Init, Optimizer, Real, TensorType,
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

    fn whole(graph: &Graph) -> impl Fn(TensorId) -> Bytes + '_ {
        |t| Bytes(graph.tensor(t).ty.bytes())
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

    #[test]
    fn the_peak_is_what_is_counted_by_hand() {
        let none = |_| Bytes(0);
        let g = graph(&Optimizer::sgd(0.1));
        let profile = Lifetimes::of(&g).profile(&g, whole(&g), none);
        assert!(profile.iter().all(|m| m.parameters == Bytes(256) && m.inputs == Bytes(128)));
        let peak = Lifetimes::of(&g).peak(&g, whole(&g), none).unwrap();
        // While the square's gradient is computed: y, the incoming and the outgoing gradient, and the loss.
        assert_eq!(peak.held.activations, Bytes(128 + 4));
        assert_eq!(peak.held.gradients, Bytes(128 + 128));
        assert_eq!(peak.held.total(), Bytes(256 + 128 + 132 + 256));
        let adam = graph(&Optimizer::adam(0.1));
        let peak = Lifetimes::of(&adam).peak(&adam, whole(&adam), none).unwrap();
        assert_eq!(peak.held.optimizer_state, Bytes(512));
    }

    #[test]
    fn workspace_counts_at_its_op_only() {
        let g = graph(&Optimizer::sgd(0.1));
        let profile = Lifetimes::of(&g).profile(&g, whole(&g), |op| Bytes(if op.0 == 1 { 77 } else { 0 }));
        let with: Vec<u64> = profile.iter().map(|m| m.workspace.0).take(3).collect();
        assert_eq!(with, [0, 77, 0]);
    }
}
