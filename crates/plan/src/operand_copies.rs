//! Copies that an engine makes beside an op's kernel: of gathered weights out of the collective's buffer, of gradients into one, and of
//! keys and values for every query head. Also copies that it does not make again: weights that were rounded to 8-bit floats once.
//!
//! Weights are gathered once per pass, so an op that runs again in the backward pass copies none. In steps of several
//! micro-batches they are gathered once per step: these copies are left out.

use shardwright_cost::Engine;
use shardwright_graph::{Graph, OpId, Phase, Role, RooflineKind, TensorId, TensorType};
use shardwright_space::OpShapes;
use smallvec::SmallVec;

/// How many times its bytes each operand and each result of an op moves in copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct OperandCopies {
    inputs: SmallVec<[u32; 4]>,
    outputs: SmallVec<[u32; 2]>,
    /// Per operand: in how many micro-batches of all it is rounded already, if it is a weight.
    rounded: SmallVec<[u32; 4]>,
    /// Number of micro-batches.
    micro_batches: u32,
}

/// Per tensor: whether it is the gradient of a weight, as an update reads it, or before it is widened for that.
pub(crate) fn weight_gradients(graph: &Graph) -> Vec<bool> {
    let mut found = vec![false; graph.tensors.len()];
    for op in graph.op_ids().rev() {
        let node = graph.node(op);
        let widens = matches!((&node.inputs[..], &node.outputs[..]), ([_], [to]) if found[to.index()])
            && node.op.workload(&graph.input_types(op), &graph.output_types(op)).class.name == "cast";
        if node.phase == Phase::Update || widens {
            let gradients = node.inputs.iter().filter(|t| graph.tensor(**t).role == Role::Gradient);
            gradients.for_each(|t| found[t.index()] = true);
        }
    }
    found
}

/// In how many micro-batches an operand is a weight that an earlier one has rounded.
fn rounded_before(graph: &Graph, engine: &Engine, tensor: TensorId) -> u32 {
    let is_weight = graph.tensor(graph.held_weight(tensor)).role == Role::Parameter;
    if engine.rounds_weights_once && is_weight { graph.micro_batches.get() - 1 } else { 0 }
}

/// Keys and values among the operands of attention and of its gradient.
const KEYS_AND_VALUES: std::ops::Range<usize> = 1..3;

impl OperandCopies {
    /// The copies of an op that is a kernel of its own; none if there are none. `gradients` are those of weights, where several
    /// devices gather weights.
    pub fn of(
        graph: &Graph,
        shapes: &[OpShapes],
        engine: &Engine,
        op: OpId,
        gradients: Option<&[bool]>,
    ) -> Option<Self> {
        let (node, own) = (graph.node(op), &shapes[op.index()]);
        let once = graph.micro_batches.get() == 1 && node.recomputes.is_none();
        let gathered = gradients.filter(|_| engine.copies_weights && once);
        // A copy reads and writes; a gradient is summed in f32.
        let is_weight = |t: &TensorId| gathered.is_some() && graph.tensor(*t).role == Role::Parameter;
        let gradient = |t: &TensorId| match gathered {
            Some(gradients) if gradients[t.index()] && graph.tensor(*t).ty.dtype.bytes() == 2 => 3,
            Some(gradients) if gradients[t.index()] => 2,
            _ => 0,
        };
        let mut copies = Self {
            inputs: node.inputs.iter().map(|t| u32::from(is_weight(t)) * 2).collect(),
            outputs: node.outputs.iter().map(gradient).collect(),
            rounded: node.inputs.iter().map(|t| rounded_before(graph, engine, *t)).collect(),
            micro_batches: graph.micro_batches.get(),
        };
        let workload = node.op.workload(&own.inputs, &own.outputs);
        if let (true, RooflineKind::Attention { .. }) = (engine.repeats_key_heads, &workload.roofline) {
            let repeat = workload.sizes.get(1).map_or(1, |&repeat| u32::try_from(repeat).unwrap_or(u32::MAX));
            // Backwards, the gradients of all copies are summed as well.
            let forwards = node.phase == Phase::Forward || node.recomputes.is_some();
            let passes = if forwards { 1 } else { 2 };
            for moved in copies.inputs.iter_mut().take(KEYS_AND_VALUES.end).skip(KEYS_AND_VALUES.start) {
                *moved = if repeat > 1 { repeat.saturating_add(1).saturating_mul(passes) } else { 0 };
            }
        }
        let eight_bit = node.op.operator().is_eight_bit();
        copies.rounded.iter_mut().filter(|_| !eight_bit).for_each(|before| *before = 0);
        let all = copies.inputs.iter().chain(&copies.outputs).chain(&copies.rounded);
        all.into_iter().any(|&times| times > 0).then_some(copies)
    }

    /// Elements of a part's operands that need not be rounded, on average over the micro-batches.
    pub fn rounded_elements(&self, inputs: &[TensorType]) -> u64 {
        let all = inputs.iter().zip(&self.rounded);
        let elements =
            all.fold(0u128, |sum, (ty, &before)| sum + u128::from(ty.shape.elements()) * u128::from(before));
        u64::try_from(elements / u128::from(self.micro_batches.max(1))).unwrap_or(u64::MAX)
    }

    /// The bytes that copies of a part of the op move.
    pub fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let moved = |types: &[TensorType], times: &[u32]| {
            types.iter().zip(times).fold(0u64, |sum, (ty, &times)| {
                sum.saturating_add(ty.bytes().saturating_mul(u64::from(times)))
            })
        };
        moved(inputs, &self.inputs).saturating_add(moved(outputs, &self.outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{RecomputePolicy, microbatch, remat};
    use shardwright_machine::EngineName;
    use shardwright_zoo::{BuildOptions, build};
    use std::num::NonZeroU32;

    /// A block with two query heads per key head.
    const MODEL: &str =
        "llama:layers=1,hidden=64,heads=4,kv_heads=2,ffn=128,vocab=96,seq=32,batch=2,dtype=mixed";

    fn step() -> Graph {
        build(MODEL, &BuildOptions::default()).unwrap()
    }

    /// The bytes that copies of an op move; zero without any.
    fn moved(graph: &Graph, engine: &Engine, name: &str, many: bool) -> u64 {
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let op = graph.op_ids().find(|&op| graph.node(op).name == name).unwrap();
        let own = &shapes[op.index()];
        let gradients = many.then(|| weight_gradients(graph));
        let copies = OperandCopies::of(graph, &shapes, engine, op, gradients.as_deref());
        copies.map_or(0, |copies| copies.bytes(&own.inputs, &own.outputs))
    }

    fn torchtitan() -> Engine {
        Engine::of(EngineName::Torchtitan).unwrap().clone()
    }

    #[test]
    fn weights_are_rounded_in_the_first_micro_batch_only() {
        let step = build(&MODEL.replace("mixed", "fp8"), &BuildOptions::default()).unwrap();
        let graph = microbatch(&step, NonZeroU32::new(2).unwrap()).unwrap().graph;
        let once =
            Engine { rounds_weights_once: true, ..Engine::of(EngineName::TorchCompile).unwrap().clone() };
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
        let elements = |engine: &Engine, name: &str| {
            let op = graph.op_ids().find(|&op| graph.node(op).name == name).unwrap();
            let copies = OperandCopies::of(&graph, &shapes, engine, op, None);
            copies.map_or(0, |copies| copies.rounded_elements(&shapes[op.index()].inputs))
        };
        assert_eq!(elements(&once, "blocks.0.mlp.up"), 64 * 128 / 2, "in the second of two micro-batches");
        let usual = Engine { rounds_weights_once: false, ..once.clone() };
        assert_eq!(elements(&usual, "blocks.0.mlp.up"), 0);
        assert_eq!(elements(&once, "logits"), 0, "it stays in 16 bits");
    }

    #[test]
    fn gathered_weights_are_copied_out_and_gradients_in() {
        let (graph, engine) = (step(), torchtitan());
        let weight = 64 * 128 * 2;
        assert_eq!(moved(&graph, &engine, "blocks.0.mlp.up", true), 2 * weight);
        assert_eq!(moved(&graph, &engine, "blocks.0.mlp.up", false), 0, "one device gathers nothing");
        let kept = Engine { copies_weights: false, ..engine.clone() };
        assert_eq!(moved(&graph, &kept, "blocks.0.mlp.up", true), 0);
        // 16-bit gradients of weights are read once and written in f32; those of data are not copied.
        let of_weight = weight_gradients(&graph);
        let made_by = |weight: bool| {
            let makes = |op: &OpId| {
                let t = graph.node(*op).outputs[0];
                let own = graph.tensor(t).role == Role::Gradient && of_weight[t.index()] == weight;
                own && graph.node(*op).name.starts_with("blocks.0.mlp.up")
            };
            graph.node(graph.op_ids().find(makes).unwrap()).name.clone()
        };
        assert_eq!(moved(&graph, &engine, &made_by(true), true), 3 * weight);
        assert_eq!(moved(&graph, &engine, &made_by(false), true), 2 * weight, "the weight alone");
        // An op that runs again in the backward pass reads the weights that are gathered for its gradient.
        let again = remat(&graph, &RecomputePolicy::Full.ops(&graph)).unwrap();
        assert_eq!(moved(&again, &engine, "blocks.0.mlp.up.recompute", true), 0);
    }

    #[test]
    fn keys_and_values_are_copied_per_query_head() {
        let (graph, engine) = (step(), torchtitan());
        // Keys and values of 2 samples, 32 tokens, 2 heads of 16 numbers; each is read once and written twice.
        let stored = 2 * (2 * 32 * 2 * 16 * 2);
        assert_eq!(moved(&graph, &engine, "blocks.0.attn.context", false), 3 * stored);
        let grouped = Engine { repeats_key_heads: false, ..engine.clone() };
        assert_eq!(moved(&graph, &grouped, "blocks.0.attn.context", false), 0);
        let single = build(&MODEL.replace("kv_heads=2", "kv_heads=4"), &BuildOptions::default()).unwrap();
        assert_eq!(moved(&single, &engine, "blocks.0.attn.context", false), 0, "a head per query head");
    }
}
