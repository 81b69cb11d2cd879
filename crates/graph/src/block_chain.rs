//! The forward pass as a chain of segments, and the step with fewer repeated blocks.
//!
//! Segments are what comes before the first block (the embedding), the blocks, and what comes after the last (the head). Blocks
//! with equal ops, or equal groups of neighbouring blocks, form a run. Of a run longer than [`KEPT`] groups only the first two
//! and the last are kept: all others cost as much as the second. So the price of a long model is that of a short one.
//!
//! Ops of left-out groups vanish with their layers. An op that read one of their results reads the result of the same op of the
//! kept neighbour: the head reads the last kept block, and the backward pass of the second kept block reads that of the last.

use crate::{
    graph::{Graph, Node, Phase},
    ids::{LayerId, OpId, TensorId},
    repeated_blocks::{ForwardPass, blocks},
    verify::verify,
};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Groups of blocks that are kept of a run.
const KEPT: usize = 3;
/// The most neighbouring blocks that repeat as one group.
const MOST_PERIOD: usize = 8;

/// Why a step has no chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// No blocks.
    #[error("{model} has no repeated blocks: its forward pass is no chain of them")]
    NoBlocks {
        /// The model.
        model: String,
    },
    /// Blocks that cannot be left out.
    #[error(
        "the blocks of {model} are not exchangeable: op `{op}` reads `{tensor}`, which another block makes"
    )]
    NotExchangeable {
        /// The model.
        model: String,
        /// The op.
        op: String,
        /// The tensor.
        tensor: String,
    },
}

/// A segment of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSegment {
    /// The segment of the short step that costs the same.
    pub like: u32,
    /// Blocks in it; none before the first block and after the last.
    pub blocks: u32,
}

/// A step as a chain of segments.
#[derive(Clone, Debug)]
pub struct BlockChain {
    /// The step with fewer blocks.
    pub short: Graph,
    /// Per layer of the short step: its segment there.
    pub short_segments: Vec<u32>,
    /// The segments of the whole step, in forward order.
    pub segments: Vec<ChainSegment>,
    /// Per layer of the whole step: its segment.
    pub layer_segments: Vec<u32>,
}

impl BlockChain {
    /// The chain of a training step without micro-batches and recomputation.
    ///
    /// # Errors
    /// Where the forward pass is no chain of repeated blocks.
    pub fn of(graph: &Graph) -> Result<Self, ChainError> {
        let pass = ForwardPass::of(graph);
        let ranges = spans(&blocks(&pass), pass.ops.len());
        if ranges.len() < 4 {
            return Err(ChainError::NoBlocks { model: graph.name.clone() });
        }
        let mut segment_of = vec![0u32; graph.ops.len()];
        for (segment, range) in ranges.iter().enumerate() {
            range.clone().for_each(|at| segment_of[pass.ops[at].index()] = segment as u32);
        }
        let layer_segments: Vec<u32> =
            graph.layers.iter().map(|layer| segment_of[layer.forward.index()]).collect();
        let keys: Vec<Vec<&Node>> =
            ranges.iter().map(|range| range.clone().map(|at| graph.node(pass.ops[at])).collect()).collect();
        let same = |a: usize, b: usize| equal(graph, &keys[a], &keys[b]);
        let runs = runs(1..ranges.len() - 1, &same);
        Self::shorten(graph, layer_segments, ranges.len(), &runs)
    }

    /// Blocks of the whole step.
    pub fn blocks(&self) -> u32 {
        self.segments.iter().map(|segment| segment.blocks).sum()
    }

    fn shorten(
        graph: &Graph,
        layer_segments: Vec<u32>,
        count: usize,
        runs: &[Run],
    ) -> Result<Self, ChainError> {
        let mut kept = vec![true; count];
        // The segment whose costs stand for a segment's.
        let mut like: Vec<usize> = (0..count).collect();
        let mut shift = vec![0usize; count];
        for run in runs.iter().filter(|run| run.count > KEPT) {
            let removed = (run.start + 2 * run.period)..(run.start + (run.count - 1) * run.period);
            for at in removed.clone() {
                (kept[at], shift[at]) = (false, removed.len());
                like[at] = run.start + run.period + (at - run.start) % run.period;
            }
        }
        let mut number = vec![0u32; count];
        let mut next = 0;
        for at in 0..count {
            number[at] = next;
            next += u32::from(kept[at]);
        }
        let short =
            Shortening { graph, layer_segments: &layer_segments, kept: &kept, shift: &shift }.graph()?;
        let layers = layer_segments.iter().filter(|segment| kept[**segment as usize]);
        let short_segments = layers.map(|segment| number[*segment as usize]).collect();
        let segment =
            |at: usize| ChainSegment { like: number[like[at]], blocks: u32::from(at > 0 && at + 1 < count) };
        Ok(Self { short, short_segments, segments: (0..count).map(segment).collect(), layer_segments })
    }
}

/// The blocks with what comes before, between and after them: every position is in one span.
fn spans(blocks: &[Range<usize>], positions: usize) -> Vec<Range<usize>> {
    let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else { return Vec::new() };
    let mut spans: Vec<Range<usize>> = std::iter::once(0..first.start).collect();
    for (at, block) in blocks.iter().enumerate() {
        let end = blocks.get(at + 1).map_or(block.end, |next| next.start);
        spans.push(block.start..end);
    }
    spans.push(last.end..positions);
    spans
}

/// Whether two segments have the same ops on the same types.
fn equal(graph: &Graph, a: &[&Node], b: &[&Node]) -> bool {
    let types = |ids: &[TensorId]| ids.iter().map(|t| graph.tensor(*t).ty.clone()).collect::<Vec<_>>();
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| {
            a.op == b.op && types(&a.inputs) == types(&b.inputs) && types(&a.outputs) == types(&b.outputs)
        })
}

/// Neighbouring segments that repeat: `count` groups of `period` segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    period: usize,
    count: usize,
}

/// Runs of repeated groups, the longest first come where they overlap.
fn runs(within: Range<usize>, same: &dyn Fn(usize, usize) -> bool) -> Vec<Run> {
    let mut found = Vec::new();
    let mut start = within.start;
    while start < within.end {
        let run = |period: usize| {
            let equal = (start..within.end.saturating_sub(period)).take_while(|&at| same(at, at + period));
            Run { start, period, count: equal.count() / period + 1 }
        };
        let best = (1..=MOST_PERIOD).map(run).max_by_key(|run| match run.count {
            1 => (0, 0),
            count => (count * run.period, MOST_PERIOD - run.period),
        });
        let Some(run) = best.filter(|run| run.count > 1) else {
            start += 1;
            continue;
        };
        start += run.count * run.period;
        found.push(run);
    }
    found
}

/// The position of an op within its segment: the layer's position, the phase, the kind, and a number among equals.
type Place = (u32, Phase, &'static str, u32);

struct Shortening<'g> {
    graph: &'g Graph,
    layer_segments: &'g [u32],
    kept: &'g [bool],
    /// Per segment: how many segments of its run are left out; zero for kept segments.
    shift: &'g [usize],
}

impl Shortening<'_> {
    fn segment(&self, op: OpId) -> usize {
        self.layer_segments[self.graph.node(op).layer.index()] as usize
    }

    /// Every op's place within its segment, and the op of each place.
    fn places(&self) -> (Vec<Place>, FxHashMap<(usize, Place), OpId>) {
        let mut seen = vec![0u32; self.kept.len()];
        let position: Vec<u32> = self
            .layer_segments
            .iter()
            .map(|&segment| {
                seen[segment as usize] += 1;
                seen[segment as usize]
            })
            .collect();
        let mut numbers: FxHashMap<(LayerId, Phase, &str), u32> = FxHashMap::default();
        let mut places = Vec::with_capacity(self.graph.ops.len());
        let mut ops = FxHashMap::default();
        for op in self.graph.op_ids() {
            let node = self.graph.node(op);
            let number = numbers.entry((node.layer, node.phase, node.op.kind())).or_default();
            let place = (position[node.layer.index()], node.phase, node.op.kind(), *number);
            *number += 1;
            ops.insert((self.segment(op), place), op);
            places.push(place);
        }
        (places, ops)
    }

    fn graph(&self) -> Result<Graph, ChainError> {
        let graph = self.graph;
        let (places, ops) = self.places();
        let kept_op = |op: OpId| self.kept[self.segment(op)];
        // The tensor that a kept op reads in place of one that a left-out op makes.
        let replaced = |reader: OpId, tensor: TensorId| -> Result<TensorId, ChainError> {
            let Some(producer) = graph.tensor(tensor).producer.filter(|&op| !kept_op(op)) else {
                return Ok(tensor);
            };
            let (from, at) = (self.segment(producer), self.segment(reader));
            let other = if at > from { from - self.shift[from] } else { from + self.shift[from] };
            let found = ops.get(&(other, places[producer.index()])).filter(|&&op| kept_op(op));
            let output = graph.node(producer).outputs.iter().position(|&t| t == tensor);
            let twin = found.zip(output).and_then(|(&op, output)| graph.node(op).outputs.get(output));
            twin.copied().ok_or_else(|| ChainError::NotExchangeable {
                model: graph.name.clone(),
                op: graph.node(reader).name.clone(),
                tensor: graph.tensor(tensor).name.clone(),
            })
        };
        let mut layers = vec![LayerId(0); graph.layers.len()];
        let mut short = Graph { name: graph.name.clone(), op_by_op: graph.op_by_op, ..Graph::default() };
        for (at, layer) in graph.layers.iter().enumerate() {
            layers[at] = LayerId::new(short.layers.len());
            if kept_op(layer.forward) {
                short.layers.push(layer.clone());
            }
        }
        let mut nodes = Vec::new();
        let mut used = vec![false; graph.tensors.len()];
        for op in graph.op_ids().filter(|&op| kept_op(op)) {
            let mut node = graph.node(op).clone();
            for t in &mut node.inputs {
                *t = replaced(op, *t)?;
            }
            node.inputs.iter().chain(&node.outputs).for_each(|t| used[t.index()] = true);
            nodes.push((op, node));
        }
        // Blocks of the backward pass come in another order than they are made in.
        let order = in_order(graph, &nodes);
        let mut tensors = vec![TensorId(0); graph.tensors.len()];
        for t in graph.tensor_ids().filter(|t| used[t.index()]) {
            tensors[t.index()] = TensorId::new(short.tensors.len());
            short.tensors.push(graph.tensor(t).clone());
        }
        let mut moved = vec![OpId(0); graph.ops.len()];
        for at in order {
            let (old, node) = &nodes[at];
            let mut node = node.clone();
            let id = OpId::new(short.ops.len());
            moved[old.index()] = id;
            node.layer = layers[node.layer.index()];
            node.inputs.iter_mut().for_each(|t| *t = tensors[t.index()]);
            node.outputs.iter_mut().for_each(|t| *t = tensors[t.index()]);
            node.outputs.iter().for_each(|t| short.tensors[t.index()].producer = Some(id));
            short.ops.push(node);
        }
        short.layers.iter_mut().for_each(|layer| layer.forward = moved[layer.forward.index()]);
        let present = |t: TensorId| used[t.index()];
        let now = |t: TensorId| tensors[t.index()];
        short.outputs = graph.outputs.iter().copied().filter(|&t| present(t)).map(now).collect();
        short.gradients = graph.gradients.clone();
        short.gradients.retain(|pair| present(pair.parameter) && present(pair.gradient));
        for pair in &mut short.gradients {
            (pair.parameter, pair.gradient) = (now(pair.parameter), now(pair.gradient));
        }
        short.carries = graph.carries.clone();
        short.carries.retain(|carry| present(carry.old) && present(carry.new));
        for carry in &mut short.carries {
            (carry.old, carry.new) = (now(carry.old), now(carry.new));
        }
        debug_assert_eq!(verify(&short), Ok(()));
        match verify(&short) {
            Ok(()) => Ok(short),
            Err(_) => Err(ChainError::NoBlocks { model: graph.name.clone() }),
        }
    }
}

/// The nodes in an order in which each comes after the producers of its operands; the given order where that holds.
fn in_order(graph: &Graph, nodes: &[(OpId, Node)]) -> Vec<usize> {
    let mut made_by: FxHashMap<TensorId, usize> = FxHashMap::default();
    for (at, (_, node)) in nodes.iter().enumerate() {
        node.outputs.iter().for_each(|&t| {
            made_by.insert(t, at);
        });
    }
    debug_assert!(nodes.len() <= graph.ops.len());
    let mut missing: Vec<usize> = Vec::with_capacity(nodes.len());
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (at, (_, node)) in nodes.iter().enumerate() {
        let producers: Vec<usize> = node.inputs.iter().filter_map(|t| made_by.get(t).copied()).collect();
        producers.iter().for_each(|&from| readers[from].push(at));
        missing.push(producers.len());
    }
    let mut ready: std::collections::BTreeSet<usize> =
        (0..nodes.len()).filter(|&at| missing[at] == 0).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(at) = ready.pop_first() {
        order.push(at);
        for &next in &readers[at] {
            missing[next] -= 1;
            if missing[next] == 0 {
                ready.insert(next);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_the_shortest_period_that_covers_most() {
        let kinds = [0, 1, 2, 1, 2, 1, 2, 3, 3, 4];
        let found = runs(0..kinds.len(), &|a, b| kinds[a] == kinds[b]);
        assert_eq!(found, [Run { start: 1, period: 2, count: 3 }, Run { start: 7, period: 1, count: 2 }]);
        let found = runs(1..7, &|_, _| true);
        assert_eq!(found, [Run { start: 1, period: 1, count: 6 }]);
    }
}
