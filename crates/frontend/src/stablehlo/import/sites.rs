//! Where the operations of the text ended up in the graph: what plans for the graph say about the program that it
//! came from.
//!
//! Constants, broadcasts and transpositions that no op carries out have no tensor of their own; where a tensor with
//! the same elements is there, it is named together with what its dimensions are to the value. What an operation turns
//! round before and after its work, as convolutions do, is named as it lies at work: how it lies in between cannot be said
//! of the text, and an engine that is told otherwise gathers everything and does the work whole. An operation that only
//! shows a tensor in another way says who looks: an engine that is told how the tensor lies and how its other view lies
//! at work would move both.

use super::{
    super::{Place, Reader, Site},
    steps::{Slot, Source, Steps},
    value::Value,
};
use rustc_hash::FxHashMap;
use shardwright_graph::{Graph, Op, OpId, TensorId, ops::Transpose};
use smallvec::SmallVec;
use std::ops::Range;

/// What was seen of an operation while it was walked.
pub(super) struct Seen {
    pub name: Option<String>,
    /// The calls and loops around it.
    pub path: u32,
    pub operands: Vec<Value>,
    pub results: Vec<Value>,
    /// The steps that it became.
    pub steps: Range<u32>,
    /// Whether it was walked in several places: then nothing can be said about it as such.
    pub shared: bool,
}

/// Operations by where they begin in the text. Of a loop's iterations the last one counts: the first starts from
/// constants.
#[derive(Default)]
pub(super) struct Sites {
    seen: FxHashMap<usize, Seen>,
}

/// Products that make their result in another order: what was asked for, what is made, and the order.
pub(super) type Absorbed = FxHashMap<Slot, (Slot, SmallVec<[usize; 4]>)>;

impl Sites {
    pub fn see(&mut self, at: usize, mut seen: Seen) {
        if let Some(before) = self.seen.get(&at) {
            seen.shared = before.shared || before.path != seen.path;
        }
        self.seen.insert(at, seen);
    }

    /// The sites in the order of the text, once it is known which slots are tensors.
    pub fn finish(
        self,
        steps: &Steps,
        absorbed: &Absorbed,
        tensors: &[Option<TensorId>],
        graph: &Graph,
    ) -> Vec<Site> {
        let find = Find { steps, absorbed, tensors };
        let mut sites: Vec<Site> = Vec::new();
        let mut seen: Vec<(usize, Seen)> = self.seen.into_iter().filter(|(_, seen)| !seen.shared).collect();
        seen.sort_unstable_by_key(|(at, _)| *at);
        let mut reads: FxHashMap<Slot, SmallVec<[(usize, usize); 2]>> = FxHashMap::default();
        for (site, (_, seen)) in seen.iter().enumerate() {
            for (i, value) in seen.operands.iter().enumerate() {
                if let Value::Tensor(slot) = value {
                    reads.entry(*slot).or_default().push((site, i));
                }
            }
        }
        for (at, seen) in &seen {
            let results: Vec<Option<Place>> = seen.results.iter().map(|value| find.place(value)).collect();
            let made = seen.steps.clone().filter_map(|step| find.made(step));
            let ops: SmallVec<[_; 4]> =
                made.chain(results.iter().flatten().map(|place| place.tensor)).collect();
            // What reads an operand after it was turned round, before what only turns it round.
            let mut readers: SmallVec<[OpId; 4]> =
                ops.iter().filter_map(|t| graph.tensor(*t).producer).collect();
            readers.sort_by_key(|&op| matches!(graph.node(op).op, Op::Transpose(_)));
            let operand = |value: &Value| {
                let place = find.place(value)?;
                let reads = |&op: &OpId| {
                    let mut inputs = graph.node(op).inputs.iter().enumerate();
                    inputs
                        .find_map(|(input, &t)| Some(Reader { place: turned(graph, t, &place)?, op, input }))
                };
                readers.iter().find_map(reads)
            };
            let operands = seen.operands.iter().map(operand).collect();
            let results = results.iter().map(|place| Some(unturned(graph, &ops, place.clone()?))).collect();
            sites.push(Site { at: *at, name: seen.name.clone(), operands, results, lookers: Vec::new() });
        }
        // Views last to first, so that those of views come to know who looks in the end.
        for (at, (_, seen)) in seen.iter().enumerate().rev() {
            let ([value], [Value::Tensor(shown)]) = (&seen.operands[..], &seen.results[..]) else { continue };
            let Some(place) = find.view(value, *shown) else { continue };
            let look = |reader: &Reader| {
                Some(Reader { place: turned(graph, reader.place.tensor, &place)?, ..reader.clone() })
            };
            let lookers = reads.get(shown).into_iter().flatten().map(|&(site, i)| {
                let through = &sites[site].lookers;
                let own = sites[site].operands.get(i).and_then(Option::as_ref);
                let all = if through.is_empty() { own.map(std::slice::from_ref)? } else { &through[..] };
                all.iter().map(look).collect::<Option<Vec<Reader>>>()
            });
            sites[at].lookers = lookers.collect::<Option<Vec<_>>>().unwrap_or_default().concat();
        }
        sites
    }
}

/// A tensor as the place of a value, where it is the value's own place, or that turned round.
fn turned(graph: &Graph, tensor: TensorId, place: &Place) -> Option<Place> {
    if tensor == place.tensor {
        return Some(place.clone());
    }
    let node = graph.node(graph.tensor(tensor).producer?);
    let Op::Transpose(Transpose { perm }) = &node.op else { return None };
    let inner = turned(graph, node.inputs[0], place)?;
    let to = |dim: &Option<usize>| dim.and_then(|dim| perm.iter().position(|&from| from == dim));
    Some(Place { tensor, dims: inner.dims.iter().map(to).collect() })
}

/// What one of these tensors' makers made before it was turned round into a result.
fn unturned(graph: &Graph, made: &[TensorId], mut place: Place) -> Place {
    while let Some(node) = graph.tensor(place.tensor).producer.map(|op| graph.node(op))
        && let Op::Transpose(Transpose { perm }) = &node.op
        && made.contains(&node.inputs[0])
    {
        let dims = place.dims.iter().map(|dim| dim.and_then(|dim| perm.get(dim).copied())).collect();
        place = Place { tensor: node.inputs[0], dims };
    }
    place
}

struct Find<'f> {
    steps: &'f Steps,
    absorbed: &'f Absorbed,
    tensors: &'f [Option<TensorId>],
}

impl Find<'_> {
    fn made(&self, step: u32) -> Option<TensorId> {
        let step = &self.steps.steps[step as usize];
        step.outputs.first().and_then(|slot| self.tensors[slot.0 as usize])
    }

    /// The place of an operand, where a result is nothing but another view of it.
    fn view(&self, operand: &Value, result: Slot) -> Option<Place> {
        let (of, shown) = (self.place(operand)?, self.slot(result)?);
        (self.tensors[result.0 as usize].is_none() && of.tensor == shown.tensor).then_some(of)
    }

    fn place(&self, value: &Value) -> Option<Place> {
        match value {
            Value::Tensor(slot) => self.slot(*slot),
            Value::Spread { slot, dims, shape } => {
                let inner = self.slot(*slot)?;
                let mut spread = vec![None; shape.rank()];
                for (&to, dim) in dims.iter().zip(inner.dims) {
                    // A dimension of size one that is repeated is not the tensor's.
                    *spread.get_mut(to)? = dim.filter(|_| shape.get(to) == self.size(*slot, &dims[..], to));
                }
                Some(Place { tensor: inner.tensor, dims: spread })
            }
            Value::Constant(..) | Value::Stack(_) => None,
        }
    }

    fn size(&self, slot: Slot, dims: &[usize], to: usize) -> Option<&u64> {
        let from = dims.iter().position(|&d| d == to)?;
        self.steps.ty(slot).shape.get(from)
    }

    fn slot(&self, slot: Slot) -> Option<Place> {
        let whole = |tensor, rank| Place { tensor, dims: (0..rank).map(Some).collect() };
        if let Some(tensor) = self.tensors[slot.0 as usize] {
            return Some(whole(tensor, self.steps.ty(slot).rank()));
        }
        if let Some((made, perm)) = self.absorbed.get(&slot) {
            let tensor = self.tensors[made.0 as usize]?;
            let mut dims = vec![None; perm.len()];
            for (to, &from) in perm.iter().enumerate() {
                dims[from] = Some(to);
            }
            return Some(Place { tensor, dims });
        }
        let Source::Step(step) = self.steps.source(slot) else { return None };
        let step = &self.steps.steps[step as usize];
        let [input] = step.inputs[..] else { return None };
        let tensor = self.tensors[input.0 as usize]?;
        match &step.op {
            Op::Transpose(transpose) => {
                Some(Place { tensor, dims: transpose.perm.iter().map(|&p| Some(p)).collect() })
            }
            // Nothing is said about what runs the other way: kernels of convolutions, in their derivatives.
            Op::Reverse(reverse) => {
                let dims =
                    (0..self.steps.ty(input).rank()).map(|d| (!reverse.axes.contains(&d)).then_some(d));
                Some(Place { tensor, dims: dims.collect() })
            }
            _ => None,
        }
    }
}
