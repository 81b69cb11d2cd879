//! The correspondence between operations of the text and tensors of the graph, so that a plan for the graph can be
//! written as shardings of the program.
//!
//! Constants, broadcasts and transposes that no op executes have no tensor. If a tensor with the same elements exists, the
//! value is recorded as a view of it, with the correspondence of dimensions. An operation that transposes around its work,
//! as convolutions do, is recorded in its working order: the text has no values for the order in between, and an engine
//! with a conflicting sharding gathers the operand and works on the whole. A pure view (reshape, transpose) records its
//! readers: an engine with shardings of both the tensor and the view would reshard both.

use super::{
    super::{OperandUse, Site, TensorView},
    draft::{DraftGraph, Slot, Source},
    value::SymbolicValue,
};
use rustc_hash::FxHashMap;
use shardwright_graph::{
    Graph, Op, OpId, TensorId,
    ops::{Reshape, Transpose},
};
use smallvec::SmallVec;
use std::ops::Range;

/// The record of an operation during the walk.
pub(super) struct SiteRecord {
    pub name: Option<String>,
    /// The path of calls and loops around it.
    pub path: u32,
    pub operands: Vec<SymbolicValue>,
    pub results: Vec<SymbolicValue>,
    /// The range of its ops in the draft.
    pub ops: Range<u32>,
    /// Whether it was walked on several paths; it then has no unique counterpart.
    pub shared: bool,
}

/// Records of operations, by position in the text. Of a loop's iterations the last two are kept: the first starts from
/// constants, and the last may compute what nothing reads.
#[derive(Default)]
pub(super) struct SiteRecorder {
    records: FxHashMap<usize, SmallVec<[SiteRecord; 2]>>,
}

/// Products with a merged transpose: from the slot before the transpose to the slot that the product computes now, and
/// the permutation between them.
pub(super) type AbsorbedTransposes = FxHashMap<Slot, (Slot, SmallVec<[usize; 4]>)>;

/// The fused op that does the work of the op that made a slot. The slot has no tensor.
pub(super) type ReplacedSlots = FxHashMap<Slot, OpId>;

impl SiteRecorder {
    pub fn record(&mut self, at: usize, mut record: SiteRecord) {
        let kept = self.records.entry(at).or_default();
        if let Some(before) = kept.last() {
            record.shared = before.shared || before.path != record.path;
        }
        if kept.len() == 2 {
            kept.remove(0);
        }
        kept.push(record);
    }

    /// The sites in text order, given the tensors of all slots.
    pub fn finish(
        self,
        draft: &DraftGraph,
        absorbed: &AbsorbedTransposes,
        tensors: &[Option<TensorId>],
        replaced: &ReplacedSlots,
        graph: &Graph,
    ) -> Vec<Site> {
        let resolver = SiteResolver { draft, absorbed, tensors };
        let mut sites: Vec<Site> = Vec::new();
        let is_read = |record: &SiteRecord| record.results.iter().any(|value| resolver.view(value).is_some());
        let chosen = |mut kept: SmallVec<[SiteRecord; 2]>| {
            let last = kept.pop()?;
            let before = kept.pop().filter(|before| !is_read(&last) && is_read(before));
            (!last.shared).then(|| before.unwrap_or(last))
        };
        let mut records: Vec<(usize, SiteRecord)> =
            self.records.into_iter().filter_map(|(at, kept)| Some((at, chosen(kept)?))).collect();
        records.sort_unstable_by_key(|(at, _)| *at);
        let consumers = graph.consumers();
        let mut reads: FxHashMap<Slot, SmallVec<[(usize, usize); 2]>> = FxHashMap::default();
        for (site, (_, record)) in records.iter().enumerate() {
            for (i, value) in record.operands.iter().enumerate() {
                if let SymbolicValue::Tensor(slot) = value {
                    reads.entry(*slot).or_default().push((site, i));
                }
            }
        }
        for (at, record) in &records {
            let results: Vec<Option<TensorView>> =
                record.results.iter().map(|value| resolver.view(value)).collect();
            let made = record.ops.clone().filter_map(|op| resolver.made(op));
            let ops: SmallVec<[_; 4]> =
                made.chain(results.iter().flatten().map(|view| view.tensor)).collect();
            // Ops that compute come before those that show an operand in another form, so that an operand's use is where the work is.
            let mut readers: SmallVec<[OpId; 4]> =
                ops.iter().filter_map(|t| graph.tensor(*t).producer).collect();
            // Operands of a product inside attention are those of the fused op.
            let slots = record.ops.clone().filter_map(|op| draft.ops[op as usize].outputs.first());
            readers.extend(slots.filter_map(|slot| replaced.get(slot).copied()));
            readers.sort_by_key(|&op| shows_operand(&graph.node(op).op));
            let operand = |(at, value): (usize, &SymbolicValue)| {
                let view = resolver.view(value)?;
                let reads = |&op: &OpId| {
                    let inputs = graph.node(op).inputs.iter().enumerate();
                    // The tensor itself comes before its forms. Two operands may be views of one tensor: then it is the input
                    // in the operand's place.
                    let mut inputs: SmallVec<[_; 4]> = inputs.collect();
                    inputs.sort_by_key(|&(input, &t)| (t != view.tensor, input != at));
                    inputs.into_iter().find_map(|(input, &t)| {
                        let mut through = Vec::new();
                        let view = transposed_view(graph, t, &view, &mut through)
                            .or_else(|| before_transpose(graph, t, &view))?;
                        Some((OperandUse { view, op, input }, through))
                    })
                };
                readers.iter().find_map(reads)
            };
            let (operands, operand_views) =
                record.operands.iter().enumerate().map(operand).map(split_pair).unzip();
            let result = |view: &Option<TensorView>| {
                let (view, after) = before_transposes(graph, &ops, view.clone()?);
                let read_once = after.iter().all(|used| consumers.of(used.view.tensor).len() == 1);
                Some((view, if read_once { after } else { Vec::new() }))
            };
            let (results, result_views) = results.iter().map(result).map(split_pair).unzip();
            sites.push(Site {
                at: *at,
                name: record.name.clone(),
                operands,
                operand_views,
                results,
                result_views,
                view_readers: Vec::new(),
            });
        }
        // From the last view to the first, so that a view of a view knows its final readers.
        for (at, (_, record)) in records.iter().enumerate().rev() {
            let ([value], [SymbolicValue::Tensor(shown)]) = (&record.operands[..], &record.results[..])
            else {
                continue;
            };
            let Some(view) = resolver.aliased_operand(value, *shown) else { continue };
            let look = |reader: &OperandUse| {
                Some(OperandUse {
                    view: transposed_view(graph, reader.view.tensor, &view, &mut Vec::new())?,
                    ..reader.clone()
                })
            };
            let view_readers = reads.get(shown).into_iter().flatten().map(|&(site, i)| {
                let through = &sites[site].view_readers;
                let own = sites[site].operands.get(i).and_then(Option::as_ref);
                let all = if through.is_empty() { own.map(std::slice::from_ref)? } else { &through[..] };
                all.iter().map(look).collect::<Option<Vec<OperandUse>>>()
            });
            // A reader that is not known leaves the list empty.
            sites[at].view_readers = view_readers.collect::<Option<Vec<_>>>().unwrap_or_default().concat();
        }
        sites
    }
}

fn split_pair<T, U: Default>(pair: Option<(T, U)>) -> (Option<T>, U) {
    pair.map_or((None, U::default()), |(first, second)| (Some(first), second))
}

/// Whether an op shows its operand in another form, dimension by dimension.
fn shows_operand(op: &Op) -> bool {
    matches!(op, Op::Transpose(_) | Op::Reshape(_) | Op::Unary(_) | Op::Cast(_) | Op::Pad(_) | Op::Slice(_))
}

/// The tensor as a view of a value: the value's own view, or another form of it. Dimensions that are merged, divided, padded or sliced
/// are left open. `through` gets the ops in between.
fn transposed_view(
    graph: &Graph,
    tensor: TensorId,
    view: &TensorView,
    through: &mut Vec<OperandUse>,
) -> Option<TensorView> {
    if tensor == view.tensor {
        return Some(view.clone());
    }
    let op = graph.tensor(tensor).producer?;
    let node = graph.node(op);
    if !shows_operand(&node.op) {
        return None;
    }
    let inner = transposed_view(graph, node.inputs[0], view, through)?;
    through.push(OperandUse { view: inner.clone(), op, input: 0 });
    let from = &graph.tensor(node.inputs[0]).ty.shape;
    let dims = inner.dims.iter().map(|dim| match &node.op {
        Op::Transpose(Transpose { perm }) => dim.and_then(|dim| perm.iter().position(|&from| from == dim)),
        Op::Reshape(Reshape { shape }) => dim.and_then(|dim| kept_dim(from, shape, dim)),
        _ => dim.filter(|&dim| from.get(dim) == graph.tensor(tensor).ty.shape.get(dim)),
    });
    Some(TensorView { tensor, dims: dims.collect() })
}

/// The tensor as a view of a value that is its transpose. Products read what a transpose of their operand reads.
fn before_transpose(graph: &Graph, tensor: TensorId, view: &TensorView) -> Option<TensorView> {
    let node = graph.node(graph.tensor(view.tensor).producer?);
    let Op::Transpose(Transpose { perm }) = &node.op else { return None };
    (node.inputs[0] == tensor)
        .then(|| TensorView { tensor, dims: view.dims.iter().map(|dim| dim.map(|dim| perm[dim])).collect() })
}

/// The dimension that a reshape keeps: of equal size, with equally many elements before it.
fn kept_dim(from: &[u64], to: &[u64], dim: usize) -> Option<usize> {
    let size = *from.get(dim)?;
    let before: u64 = from[..dim].iter().product();
    (0..to.len()).find(|&at| size > 1 && to[at] == size && to[..at].iter().product::<u64>() == before)
}

/// The view of a result before trailing transposes, down to a tensor that one of the operation's ops produces, and those transposes.
fn before_transposes(
    graph: &Graph,
    made: &[TensorId],
    mut view: TensorView,
) -> (TensorView, Vec<OperandUse>) {
    let mut after = Vec::new();
    while let Some(op) = graph.tensor(view.tensor).producer
        && let Op::Transpose(Transpose { perm }) = &graph.node(op).op
        && let inner = graph.node(op).inputs[0]
        && made.contains(&inner)
    {
        let dims = view.dims.iter().map(|dim| dim.and_then(|dim| perm.get(dim).copied())).collect();
        view = TensorView { tensor: inner, dims };
        after.push(OperandUse { view: view.clone(), op, input: 0 });
    }
    after.reverse();
    (view, after)
}

struct SiteResolver<'f> {
    draft: &'f DraftGraph,
    absorbed: &'f AbsorbedTransposes,
    tensors: &'f [Option<TensorId>],
}

impl SiteResolver<'_> {
    fn made(&self, op: u32) -> Option<TensorId> {
        let op = &self.draft.ops[op as usize];
        op.outputs.first().and_then(|slot| self.tensors[slot.0 as usize])
    }

    /// The view of an operand, if the result is only another view of the same tensor.
    fn aliased_operand(&self, operand: &SymbolicValue, result: Slot) -> Option<TensorView> {
        let (of, shown) = (self.view(operand)?, self.slot(result)?);
        (self.tensors[result.0 as usize].is_none() && of.tensor == shown.tensor).then_some(of)
    }

    fn view(&self, value: &SymbolicValue) -> Option<TensorView> {
        match value {
            SymbolicValue::Tensor(slot) => self.slot(*slot),
            SymbolicValue::Spread { slot, dims, shape } => {
                let inner = self.slot(*slot)?;
                let mut spread = vec![None; shape.rank()];
                for (&to, dim) in dims.iter().zip(inner.dims) {
                    // A repeated dimension of size one is not the tensor's dimension.
                    *spread.get_mut(to)? = dim.filter(|_| shape.get(to) == self.size(*slot, &dims[..], to));
                }
                Some(TensorView { tensor: inner.tensor, dims: spread })
            }
            SymbolicValue::Constant(..) | SymbolicValue::Stack(_) => None,
        }
    }

    fn size(&self, slot: Slot, dims: &[usize], to: usize) -> Option<&u64> {
        let from = dims.iter().position(|&d| d == to)?;
        self.draft.ty(slot).shape.get(from)
    }

    fn slot(&self, slot: Slot) -> Option<TensorView> {
        let whole = |tensor, rank| TensorView { tensor, dims: (0..rank).map(Some).collect() };
        if let Some(tensor) = self.tensors[slot.0 as usize] {
            return Some(whole(tensor, self.draft.ty(slot).rank()));
        }
        if let Some((made, perm)) = self.absorbed.get(&slot) {
            let tensor = self.tensors[made.0 as usize]?;
            let mut dims = vec![None; perm.len()];
            for (to, &from) in perm.iter().enumerate() {
                dims[from] = Some(to);
            }
            return Some(TensorView { tensor, dims });
        }
        let Source::Op(op) = self.draft.source(slot) else { return None };
        let op = &self.draft.ops[op as usize];
        let [input] = op.inputs[..] else { return None };
        let tensor = self.tensors[input.0 as usize]?;
        match &op.op {
            Op::Transpose(transpose) => {
                Some(TensorView { tensor, dims: transpose.perm.iter().map(|&p| Some(p)).collect() })
            }
            // Reversed dimensions have no sharding: they occur in the kernels of convolution derivatives.
            Op::Reverse(reverse) => {
                let dims =
                    (0..self.draft.ty(input).rank()).map(|d| (!reverse.axes.contains(&d)).then_some(d));
                Some(TensorView { tensor, dims: dims.collect() })
            }
            // A reshape whose reader reads its operand: two reshapes are one.
            Op::Reshape(reshape) => {
                let from = &self.draft.ty(input).shape;
                let dims = (0..reshape.shape.len()).map(|dim| kept_dim(&reshape.shape, from, dim));
                Some(TensorView { tensor, dims: dims.collect() })
            }
            _ => None,
        }
    }
}
