//! The blocks of a model: runs of forward ops that trainers recompute as one.
//!
//! A *cut* is a place in the forward pass that one activation alone crosses: the residual stream of a transformer, the
//! result of a residual block. Activations that many ops far apart read (an encoder's result, a mask) cross everything and do
//! not count; neither do values that depend on weights alone. Ops between two cuts form a segment; segments are equal if
//! their products are. The shortest period of equal segments that covers most ops is the model's block, so a transformer
//! block is its attention and its feed-forward part together. Segments between two runs of blocks (a block that changes the resolution) form a block of their own.
//! What comes before the first block and after the last (embedding, logits, loss) belongs to none.
//!
//! A repeated block has at least two products. A model without any has about as many blocks as the root of its number of ops,
//! with boundaries at cuts: the classic choice of Chen et al. (2016).

use crate::{
    graph::{Graph, Phase, Role},
    ids::OpId,
};
use smallvec::SmallVec;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// The longest period of segments that is looked for.
const MOST_PERIOD: usize = 64;
/// A tensor that crosses everything has at least so many readers, over at least one part in [`WIDE_PART`] of the pass.
const WIDE_READERS: usize = 3;
const WIDE_PART: usize = 8;

/// The forward pass of a graph, and which of its values depend on data.
pub(crate) struct ForwardPass<'g> {
    pub graph: &'g Graph,
    /// The forward ops, in the graph's order.
    pub ops: Vec<OpId>,
    /// Per op of the graph: its position in `ops`.
    position: Vec<Option<u32>>,
    /// Per tensor: whether it depends on an input of the graph.
    data: Vec<bool>,
    /// Per tensor: positions of its first and last forward reader.
    readers: Vec<Option<(u32, u32)>>,
}

impl<'g> ForwardPass<'g> {
    pub fn of(graph: &'g Graph) -> Self {
        let ops: Vec<OpId> = graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward).collect();
        let mut data: Vec<bool> = graph.tensors.iter().map(|t| t.role == Role::Input).collect();
        let mut position = vec![None; graph.ops.len()];
        let mut readers: Vec<Option<(u32, u32)>> = vec![None; graph.tensors.len()];
        for (at, &op) in ops.iter().enumerate() {
            position[op.index()] = Some(at as u32);
            let node = graph.node(op);
            let depends = node.inputs.iter().any(|t| data[t.index()]);
            for t in &node.outputs {
                data[t.index()] = depends;
            }
            for t in &node.inputs {
                let range = readers[t.index()].get_or_insert((at as u32, at as u32));
                range.1 = at as u32;
            }
        }
        Self { graph, ops, position, data, readers }
    }

    /// Whether an op at a position multiplies matrices: a product, a convolution, fused attention.
    pub fn is_product(&self, at: usize) -> bool {
        let op = self.ops[at];
        let graph = self.graph;
        let workload = graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op));
        workload.roofline.product().is_some()
    }

    /// How many operands of an op depend on data.
    pub fn data_operands(&self, at: usize) -> usize {
        self.graph.node(self.ops[at]).inputs.iter().filter(|t| self.data[t.index()]).count()
    }

    /// The position of the forward op that produces a tensor.
    pub fn producer(&self, tensor: crate::ids::TensorId) -> Option<usize> {
        let op = self.graph.tensor(tensor).producer?;
        self.position[op.index()].map(|at| at as usize)
    }

    /// Per position: how many activations are read after it and were made before it or at it.
    fn crossing(&self) -> Vec<u32> {
        let mut counts = vec![0u32; self.graph.tensors.len()];
        for t in self.ops.iter().flat_map(|&op| &self.graph.node(op).inputs) {
            counts[t.index()] += 1;
        }
        let mut changes = vec![0i64; self.ops.len() + 1];
        for (at, &op) in self.ops.iter().enumerate() {
            for t in self.graph.node(op).outputs.iter().filter(|t| self.data[t.index()]) {
                let Some((first, last)) = self.readers[t.index()] else { continue };
                let wide = counts[t.index()] as usize >= WIDE_READERS
                    && (last - first) as usize * WIDE_PART >= self.ops.len();
                if !wide {
                    changes[at] += 1;
                    changes[last as usize] -= 1;
                }
            }
        }
        let sum = changes.iter().scan(0i64, |sum, change| {
            *sum += change;
            Some(*sum as u32)
        });
        sum.take(self.ops.len()).collect()
    }

    /// Runs of positions between cuts.
    fn segments(&self, crossing: &[u32]) -> Vec<Range<usize>> {
        let mut segments = Vec::new();
        let mut start = 0;
        for (at, &live) in crossing.iter().enumerate() {
            if live <= 1 || at + 1 == self.ops.len() {
                segments.push(start..at + 1);
                start = at + 1;
            }
        }
        segments
    }

    /// The number of products of a segment, and a number that is equal for segments of the same products on the same types.
    /// Other ops may differ, as masks of local and global attention do; they count where there are no products.
    fn signature(&self, segment: &Range<usize>) -> Segment {
        let products: Vec<usize> = segment.clone().filter(|&at| self.is_product(at)).collect();
        let mut hasher = DefaultHasher::new();
        let mut hash = |at: usize| {
            let (node, op) = (self.graph.node(self.ops[at]), self.ops[at]);
            (node.op.kind(), self.graph.input_types(op), self.graph.output_types(op)).hash(&mut hasher);
        };
        match products.is_empty() {
            true => segment.clone().for_each(&mut hash),
            false => products.iter().copied().for_each(&mut hash),
        }
        hash(segment.end - 1);
        Segment { products: products.len(), signature: hasher.finish(), ops: segment.clone() }
    }
}

/// Ops between two cuts.
struct Segment {
    ops: Range<usize>,
    products: usize,
    signature: u64,
}

/// Segments that repeat: `count` blocks of `period` segments each, from segment `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    period: usize,
    count: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.start + self.period * self.count
    }
}

/// The run that covers most ops, within some segments: of the shortest period, and the first of equals. Its blocks have
/// at least two products each.
fn longest_run(within: Range<usize>, segments: &[Segment]) -> Option<Run> {
    let mut best: Option<(usize, Run)> = None;
    for period in 1..=(within.len() / 2).min(MOST_PERIOD) {
        let mut start = within.start;
        while start + 2 * period <= within.end {
            let same = |at: &usize| segments[*at].signature == segments[*at + period].signature;
            let equal = (start..within.end - period).take_while(same).count();
            let count = equal / period + 1;
            if count < 2 {
                start += equal + 1;
                continue;
            }
            // Blocks end where the repetition ends: a norm before the first block may look like the one at its end.
            let run = Run { start: start + equal % period, period, count };
            let ops = segments[run.end() - 1].ops.end - segments[run.start].ops.start;
            let inside: usize = segments[run.start..run.start + period].iter().map(|s| s.products).sum();
            if inside >= 2 && best.as_ref().is_none_or(|(most, _)| ops > *most) {
                best = Some((ops, run));
            }
            start += equal + 1;
        }
    }
    best.map(|(_, run)| run)
}

/// All disjoint runs within some segments, in order.
fn all_runs(segments: &[Segment]) -> Vec<Run> {
    let mut open: Vec<Range<usize>> = std::iter::once(0..segments.len()).collect();
    let mut runs = Vec::new();
    while let Some(within) = open.pop() {
        if let Some(run) = longest_run(within.clone(), segments) {
            open.extend([within.start..run.start, run.end()..within.end]);
            runs.push(run);
        }
    }
    runs.sort_by_key(|run| run.start);
    runs
}

/// The blocks of the forward pass, as ranges of positions, in order.
pub(crate) fn blocks(pass: &ForwardPass<'_>) -> Vec<Range<usize>> {
    if pass.ops.is_empty() {
        return Vec::new();
    }
    let crossing = pass.crossing();
    let segments: Vec<Segment> =
        pass.segments(&crossing).iter().map(|segment| pass.signature(segment)).collect();
    let runs = all_runs(&segments);
    let positions = |parts: Range<usize>| segments[parts.start].ops.start..segments[parts.end - 1].ops.end;
    let mut blocks: Vec<Range<usize>> = Vec::new();
    let alone = |parts: Range<usize>| {
        let large = segments[parts].iter().filter(|segment| segment.products >= 2);
        large.map(|segment| segment.ops.clone()).collect::<Vec<_>>()
    };
    if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
        blocks.extend(alone(0..first.start));
        for (at, run) in runs.iter().enumerate() {
            // A period of several layers (every second one a mixture of experts) begins like each of its layers.
            let head = segments[run.start].signature;
            let mut start = run.start;
            for next in run.start + 1..=run.end() {
                let products: usize = segments[start..next].iter().map(|segment| segment.products).sum();
                if next == run.end() || (segments[next].signature == head && products >= 2) {
                    blocks.push(positions(start..next));
                    start = next;
                }
            }
            if let Some(next) = runs.get(at + 1).filter(|next| next.start > run.end()) {
                blocks.push(positions(run.end()..next.start));
            }
        }
        blocks.extend(alone(last.end()..segments.len()));
    }
    let covered: usize = blocks.iter().map(Range::len).sum();
    if 2 * covered >= pass.ops.len() { blocks } else { root_blocks(&crossing) }
}

/// The forward ops in groups: those at the same position of equal blocks. Ops outside of blocks are alone.
pub fn block_positions(graph: &Graph) -> Vec<Vec<OpId>> {
    let pass = ForwardPass::of(graph);
    let describe = |at: usize| {
        let op = pass.ops[at];
        (graph.node(op).op.kind(), graph.input_types(op), graph.output_types(op))
    };
    let mut groups: Vec<Vec<OpId>> = Vec::new();
    let mut alone = vec![true; pass.ops.len()];
    let mut known: Vec<(Range<usize>, usize)> = Vec::new();
    for block in blocks(&pass) {
        let equal = |other: &Range<usize>| {
            other.len() == block.len()
                && other.clone().zip(block.clone()).all(|(a, b)| describe(a) == describe(b))
        };
        alone[block.clone()].fill(false);
        let first = match known.iter().find(|(other, _)| equal(other)) {
            Some((_, first)) => *first,
            None => {
                known.push((block.clone(), groups.len()));
                groups.resize(groups.len() + block.len(), Vec::new());
                groups.len() - block.len()
            }
        };
        for (group, at) in groups[first..].iter_mut().zip(block) {
            group.push(pass.ops[at]);
        }
    }
    groups.extend(pass.ops.iter().zip(alone).filter(|(_, alone)| *alone).map(|(&op, _)| vec![op]));
    groups
}

/// About as many blocks as the root of the number of ops, each ending at the nearest place that fewest activations cross.
fn root_blocks(crossing: &[u32]) -> Vec<Range<usize>> {
    let ops = crossing.len();
    let count = ((ops as f64).sqrt().ceil() as usize).max(1);
    let length = ops.div_ceil(count).max(1);
    let mut blocks = Vec::new();
    let mut start = 0;
    while start < ops {
        let wanted = (start + length).min(ops);
        let near = (start + length.div_ceil(2)).min(ops)..=(wanted + length / 2).min(ops);
        let end = if wanted == ops {
            ops
        } else {
            near.min_by_key(|&end| (crossing[end - 1], end.abs_diff(wanted))).unwrap_or(wanted)
        };
        blocks.push(start..end);
        start = end;
    }
    blocks
}

/// The ops of a block whose results stay inside it: no later forward op outside reads them, and they are no results of the
/// step. A kept view keeps the op whose memory it shows.
pub(crate) fn inner_ops(pass: &ForwardPass<'_>, block: &Range<usize>) -> Vec<usize> {
    let graph = pass.graph;
    let mut kept: SmallVec<[usize; 16]> = SmallVec::new();
    for at in block.clone().rev() {
        let node = graph.node(pass.ops[at]);
        let outside = |t: &crate::ids::TensorId| {
            pass.readers[t.index()].is_some_and(|(_, last)| last as usize >= block.end)
        };
        if node.outputs.iter().any(outside) {
            kept.push(at);
        }
        if kept.contains(&at) && node.op.operator().is_view() {
            kept.extend(pass.producer(node.inputs[0]).filter(|made| block.contains(made)));
        }
    }
    block.clone().filter(|at| !kept.contains(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_period_that_covers_most_is_the_block() {
        // A head, three blocks of two segments, and one that repeats by chance.
        let segments = |signatures: &[u64], products: usize| {
            let segment =
                |(at, &signature): (usize, &u64)| Segment { ops: 3 * at..3 * at + 3, products, signature };
            signatures.iter().enumerate().map(segment).collect::<Vec<Segment>>()
        };
        let runs = all_runs(&segments(&[9, 1, 2, 1, 2, 1, 2, 7, 7], 2));
        assert_eq!(runs[0], Run { start: 1, period: 2, count: 3 });
        assert_eq!(runs[1], Run { start: 7, period: 1, count: 2 });
        // A norm before the first block looks like the one at the end of each block.
        let runs = all_runs(&segments(&[5, 2, 1, 2, 1, 2, 8], 2));
        assert_eq!(runs, [Run { start: 2, period: 2, count: 2 }]);
        assert!(all_runs(&segments(&[1, 2, 3], 2)).is_empty());
        assert!(all_runs(&segments(&[1, 1, 1], 0)).is_empty(), "no products");
    }

    #[test]
    fn chains_have_about_root_many_blocks_that_end_at_cuts() {
        let mut crossing = vec![2; 25];
        crossing[5] = 1;
        let blocks = root_blocks(&crossing);
        assert_eq!(blocks[0], 0..6);
        assert_eq!(blocks.last().unwrap().end, 25);
        assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!((4..=6).contains(&blocks.len()), "{blocks:?}");
        assert_eq!(root_blocks(&[1]).len(), 1);
    }
}
