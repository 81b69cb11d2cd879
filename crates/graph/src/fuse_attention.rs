//! Recognises attention that a forward graph computes by products, masks and softmax, and replaces it by the fused op.
//!
//! The pattern is `context = softmax(scale * (q·k) + bias)·v`, where each step is an op that only the next one reads. Einsum
//! letters tell dimensions apart, so operands may have their dimensions in any order; a transposition is added where the
//! fused op needs another. Masks are sums with a bias or selections of a very negative number. Scores may be scaled before
//! the masks, and queries or keys by their own ops. Weights may be dropped out.
//!
//! The pass runs before differentiation: a backward pass reads the stored weights.

use crate::{
    builder::{BuildError, GraphBuilder},
    graph::{Graph, Init, Node, Phase},
    ids::{OpId, TensorId},
    ops::{Attention, Binary, BinaryFn, Dropout, Fill, Op, Select, Transpose, Unary, UnaryFn},
    types::{Real, TensorType},
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

/// Numbers up to this hide a key: its weight is zero in every precision.
const HIDDEN: f64 = -1e4;

/// The most masks and factors between product and softmax.
const MOST_STEPS: usize = 16;

/// A graph whose attention is fused.
pub struct AttentionFusion {
    /// The graph.
    pub graph: Graph,
    /// The new tensor of each tensor of the given graph; `None`: an intermediate result of attention.
    pub tensors: Vec<Option<TensorId>>,
    /// Names of the fused ops.
    pub fused: Vec<String>,
}

/// A mask between product and softmax.
enum Mask {
    /// Numbers that are added.
    Bias(TensorId),
    /// The number `hidden` where the truth value `cond` equals `hides`.
    Hide { cond: TensorId, hidden: TensorId, hides: bool },
}

/// A match: everything that the fused op needs.
struct Pattern {
    op: Attention,
    /// Queries, keys, values, and the order of their dimensions in the fused op.
    operands: [(TensorId, SmallVec<[usize; 5]>); 3],
    masks: Vec<Mask>,
    /// The order of the fused result's dimensions in the old result.
    result: SmallVec<[usize; 5]>,
    /// The ops that go.
    removed: Vec<OpId>,
}

/// Fuses the attention of a forward graph. `kept` are tensors that the caller refers to, beside the graph's outputs.
/// `contents` returns the elements of a stored constant, so that a stored causal mask is recognised.
///
/// # Errors
/// Never for a graph that passes the [verifier](crate::verify).
pub fn fuse_attention(
    graph: Graph,
    kept: &[TensorId],
    contents: &dyn Fn(TensorId) -> Option<Vec<f64>>,
) -> Result<AttentionFusion, BuildError> {
    let matcher = Matcher::new(&graph, kept, contents);
    let mut patterns: FxHashMap<OpId, Pattern> = FxHashMap::default();
    for op in graph.op_ids() {
        // A product that ends one attention is not the scores of another.
        let apart = |pattern: &Pattern| pattern.removed.iter().all(|op| !patterns.contains_key(op));
        if let Some(pattern) = matcher.at(op).filter(apart) {
            patterns.insert(op, pattern);
        }
    }
    drop(matcher);
    if patterns.is_empty() {
        let tensors = graph.tensor_ids().map(Some).collect();
        return Ok(AttentionFusion { graph, tensors, fused: Vec::new() });
    }
    rewrite(&graph, &patterns)
}

/// Builds the graph again, with fused ops in the place of products by values.
fn rewrite(graph: &Graph, patterns: &FxHashMap<OpId, Pattern>) -> Result<AttentionFusion, BuildError> {
    let removed: FxHashSet<OpId> = patterns.values().flat_map(|p| p.removed.iter().copied()).collect();
    let mut b = GraphBuilder::new(graph.name.clone());
    let mut tensors: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
    let mut sources = graph.tensor_ids().filter(|&t| graph.tensor(t).producer.is_none()).peekable();
    let mut fused = Vec::new();
    let mut declare = |b: &mut GraphBuilder, tensors: &mut [Option<TensorId>], before: Option<TensorId>| {
        while let Some(t) = sources.next_if(|t| before.is_none_or(|first| *t < first)) {
            let tensor = graph.tensor(t);
            let init = tensor.init.unwrap_or(Init::Constant(Real(0.0)));
            tensors[t.index()] = Some(b.source(&tensor.name, tensor.ty.clone(), tensor.role, init)?);
        }
        Ok::<(), BuildError>(())
    };
    for id in graph.op_ids() {
        let node = graph.node(id);
        declare(&mut b, &mut tensors, node.outputs.iter().min().copied())?;
        if removed.contains(&id) {
            continue;
        }
        if let Some(pattern) = patterns.get(&id) {
            tensors[node.outputs[0].index()] = Some(emit(&mut b, node, pattern, &tensors)?);
            fused.push(node.name.clone());
            continue;
        }
        let inputs = node.inputs.iter().map(|&t| renamed(&tensors, t)).collect::<Result<Vec<_>, _>>()?;
        let outputs = b.add(&node.name, node.op.clone(), &inputs)?;
        for (old, new) in node.outputs.iter().zip(outputs) {
            tensors[old.index()] = Some(new);
        }
    }
    declare(&mut b, &mut tensors, None)?;
    for &t in &graph.outputs {
        b.output(renamed(&tensors, t)?);
    }
    let mut new = b.finish();
    new.op_by_op = graph.op_by_op;
    Ok(AttentionFusion { graph: new, tensors, fused })
}

fn renamed(tensors: &[Option<TensorId>], t: TensorId) -> Result<TensorId, BuildError> {
    tensors[t.index()]
        .ok_or_else(|| BuildError::Internal("an intermediate result of attention is read".into()))
}

/// Adds the fused op and what brings its operands into order. Returns the result.
fn emit(
    b: &mut GraphBuilder,
    node: &Node,
    pattern: &Pattern,
    tensors: &[Option<TensorId>],
) -> Result<TensorId, BuildError> {
    let name = |what: &str| format!("{}.{what}", node.name);
    let mut inputs = Vec::with_capacity(4);
    for ((t, order), what) in pattern.operands.iter().zip(["query", "key", "value"]) {
        inputs.push(turned(b, &name(what), renamed(tensors, *t)?, order)?);
    }
    let dtype = b.ty(inputs[0]).dtype;
    let mut bias: Option<TensorId> = None;
    for mask in &pattern.masks {
        let numbers = match mask {
            Mask::Bias(t) => renamed(tensors, *t)?,
            Mask::Hide { cond, hidden, hides } => {
                let shown = Fill { value: Real(0.0), ty: TensorType::new(dtype, []) };
                let shown = b.emit(&name("shown"), shown, &[])?;
                let (cond, hidden) = (renamed(tensors, *cond)?, renamed(tensors, *hidden)?);
                let cases = if *hides { [cond, hidden, shown] } else { [cond, shown, hidden] };
                b.emit(&name("mask"), Select {}, &cases)?
            }
        };
        bias = Some(match bias {
            None => numbers,
            Some(before) => b.emit(&name("bias"), Binary { f: BinaryFn::Add }, &[before, numbers])?,
        });
    }
    inputs.extend(bias);
    let ordered = pattern.result.iter().enumerate().all(|(i, &d)| i == d);
    let y = b.add(&if ordered { node.name.clone() } else { name("fused") }, pattern.op.clone(), &inputs)?[0];
    turned(b, &node.name, y, &pattern.result)
}

/// The tensor with its dimensions in another order; the tensor itself where they are in order.
fn turned(b: &mut GraphBuilder, name: &str, t: TensorId, order: &[usize]) -> Result<TensorId, BuildError> {
    if order.iter().enumerate().all(|(i, &d)| i == d) {
        return Ok(t);
    }
    b.emit(name, Transpose { perm: order.iter().copied().collect() }, &[t])
}

/// The role of a dimension: batch, key head, query head inside a group, query, key, size of keys, size of values.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dim {
    N,
    H,
    R,
    Q,
    K,
    D,
    E,
}

/// The position of each wanted dimension among the given ones.
fn order(given: &[Dim], wanted: &[Dim]) -> Option<SmallVec<[usize; 5]>> {
    if given.len() != wanted.len() {
        return None;
    }
    wanted.iter().map(|dim| given.iter().position(|other| other == dim)).collect()
}

struct Matcher<'a> {
    graph: &'a Graph,
    /// Tensors that exactly one op reads, and nobody else.
    private: Vec<bool>,
    contents: &'a dyn Fn(TensorId) -> Option<Vec<f64>>,
}

/// Scores on their way from the product to the softmax.
struct Scores<'a> {
    product: &'a Node,
    scale: f64,
    masks: Vec<Mask>,
    removed: Vec<OpId>,
}

impl<'a> Matcher<'a> {
    fn new(graph: &'a Graph, kept: &[TensorId], contents: &'a dyn Fn(TensorId) -> Option<Vec<f64>>) -> Self {
        let consumers = graph.consumers();
        let mut private: Vec<bool> = graph.tensor_ids().map(|t| consumers.of(t).len() == 1).collect();
        graph.outputs.iter().chain(kept).for_each(|t| private[t.index()] = false);
        Self { graph, private, contents }
    }

    /// The op that makes a tensor which only one other op reads.
    fn maker(&self, t: TensorId) -> Option<(OpId, &'a Node)> {
        let op = self.graph.tensor(t).producer.filter(|_| self.private[t.index()])?;
        Some((op, self.graph.node(op)))
    }

    /// The attention that ends in this op.
    fn at(&self, op: OpId) -> Option<Pattern> {
        let node = self.graph.node(op);
        let Op::Contract(context) = &node.op else { return None };
        if node.phase != Phase::Forward || node.inputs.len() != 2 || node.inputs[0] == node.inputs[1] {
            return None;
        }
        [(0, 1), (1, 0)].into_iter().find_map(|(weights, value)| {
            let mut removed = Vec::new();
            let mut dropout = None;
            let (mut id, mut maker) = self.maker(node.inputs[weights])?;
            if let Op::Dropout(found) = &maker.op {
                dropout = Some(found.clone());
                removed.push(id);
                (id, maker) = self.maker(maker.inputs[0])?;
            }
            let Op::Softmax(softmax) = &maker.op else { return None };
            removed.push(id);
            let shape = &self.graph.tensor(maker.inputs[0]).ty.shape;
            if softmax.axis + 1 != shape.rank() {
                return None;
            }
            let scores = self.scores(maker.inputs[0], shape, MOST_STEPS)?;
            removed.extend(&scores.removed);
            let letters = [&context.operands[weights][..], &context.operands[value][..], &context.result[..]];
            self.pattern(scores, dropout, (node.inputs[value], letters), removed)
        })
    }

    /// The scores that a softmax reads, followed back to their product over at most so many `steps`.
    fn scores(&self, t: TensorId, shape: &[u64], steps: usize) -> Option<Scores<'a>> {
        let (id, node) = self.maker(t)?;
        if self.graph.tensor(t).ty.shape[..] != *shape || steps == 0 {
            return None;
        }
        let through = |inner: TensorId, mask: Option<Mask>| {
            let mut scores = self.scores(inner, shape, steps - 1)?;
            scores.masks.extend(mask);
            scores.removed.push(id);
            Some(scores)
        };
        match &node.op {
            Op::Contract(_) if node.inputs.len() == 2 => {
                Some(Scores { product: node, scale: 1.0, masks: Vec::new(), removed: vec![id] })
            }
            Op::Unary(Unary { f: UnaryFn::Affine { scale, shift } }) if shift.0 == 0.0 => {
                // A factor behind a mask would scale the mask too.
                let mut scores = through(node.inputs[0], None).filter(|s| s.masks.is_empty())?;
                scores.scale *= scale.0;
                Some(scores)
            }
            Op::Binary(Binary { f: BinaryFn::Add }) => [(0, 1), (1, 0)]
                .into_iter()
                .find_map(|(x, bias)| through(node.inputs[x], Some(Mask::Bias(node.inputs[bias])))),
            Op::Select(_) => [(1, 2), (2, 1)].into_iter().find_map(|(x, hidden)| {
                let (cond, hidden) = (node.inputs[0], node.inputs[hidden]);
                self.number(hidden).filter(|&number| number <= HIDDEN)?;
                through(node.inputs[x], Some(Mask::Hide { cond, hidden, hides: x == 2 }))
            }),
            _ => None,
        }
    }

    /// The number that a tensor of one element holds.
    fn number(&self, t: TensorId) -> Option<f64> {
        let tensor = self.graph.tensor(t);
        if tensor.ty.shape.elements() != 1 {
            return None;
        }
        match tensor.producer.map(|op| &self.graph.node(op).op) {
            Some(Op::Fill(fill)) => Some(fill.value.0),
            Some(_) => None,
            None => (self.contents)(t)?.first().copied(),
        }
    }

    /// Names the dimensions of all operands by the letters of both products.
    fn pattern(
        &self,
        scores: Scores<'a>,
        dropout: Option<Dropout>,
        (value, [weights, values, result]): (TensorId, [&[u8]; 3]),
        removed: Vec<OpId>,
    ) -> Option<Pattern> {
        let Op::Contract(product) = &scores.product.op else { return None };
        let key_letter = *product.result.last()?;
        let key_at = product.operands.iter().position(|letters| letters.contains(&key_letter))?;
        let query_at = 1 - key_at;
        // Both operands have the same letters that are summed over.
        let summed = |at: usize| {
            let letters = product.operands[at].iter().filter(|l| !product.result.contains(l));
            letters.copied().collect::<FxHashSet<u8>>()
        };
        if product.operands[query_at].contains(&key_letter) || summed(0) != summed(1) {
            return None;
        }
        // Scores are n, h, perhaps r, q, k.
        let names: &[Dim] = match product.result.len() {
            4 => &[Dim::N, Dim::H, Dim::Q, Dim::K],
            5 => &[Dim::N, Dim::H, Dim::R, Dim::Q, Dim::K],
            _ => return None,
        };
        let name = |letters: &[u8], letter: u8, other: Dim| {
            letters.iter().position(|l| *l == letter).map_or(other, |at| names[at])
        };
        let named = |operand: &[u8], letters: &[u8], other: Dim| -> Vec<Dim> {
            operand.iter().map(|&letter| name(letters, letter, other)).collect()
        };
        let query = named(&product.operands[query_at], &product.result, Dim::D);
        let key = named(&product.operands[key_at], &product.result, Dim::D);
        let (value_dims, result) = (named(values, weights, Dim::E), named(result, weights, Dim::E));
        let grouped = names.len() == 5;
        let heads: &[Dim] = if grouped { &[Dim::H, Dim::R] } else { &[Dim::H] };
        let wanted = |heads_first: bool, at: Dim, heads: &[Dim], last: Dim| match heads_first {
            true => [&[Dim::N], heads, &[at, last]].concat(),
            false => [&[Dim::N, at], heads, &[last]].concat(),
        };
        let heads_first = query == wanted(true, Dim::Q, heads, Dim::D);
        let target = wanted(heads_first, Dim::Q, heads, Dim::E);
        let operands = [
            (scores.product.inputs[query_at], order(&query, &wanted(heads_first, Dim::Q, heads, Dim::D))?),
            (scores.product.inputs[key_at], order(&key, &wanted(heads_first, Dim::K, &[Dim::H], Dim::D))?),
            (value, order(&value_dims, &wanted(heads_first, Dim::K, &[Dim::H], Dim::E))?),
        ];
        let ty = &self.graph.tensor(scores.product.outputs[0]).ty;
        let &[.., queries, keys] = &ty.shape[..] else { return None };
        let mut op = Attention::new(scores.scale, queries, keys);
        (op.heads_first, op.dropout) = (heads_first, dropout);
        let mut masks = scores.masks;
        masks.retain(|mask| match self.causal_diagonal(mask, queries, keys) {
            // One causal mask is an attribute; a second one stays a mask.
            Some(diagonal) if op.after.is_none() => {
                (op.after, op.diagonal) = (Some(0), diagonal);
                false
            }
            _ => true,
        });
        Some(Pattern { op, operands, masks, result: order(&target, &result)?, removed })
    }

    /// The position of the first query among the keys, if a mask is stored and hides exactly the keys behind each query.
    fn causal_diagonal(&self, mask: &Mask, queries: u64, keys: u64) -> Option<i64> {
        let (t, hides) = match mask {
            Mask::Bias(t) => (*t, None),
            Mask::Hide { cond, hides, .. } => (*cond, Some(*hides)),
        };
        let shape = &self.graph.tensor(t).ty.shape;
        let &[ref batch @ .., rows, columns] = &shape[..] else { return None };
        if [rows, columns] != [queries, keys] || batch.iter().any(|&size| size != 1) {
            return None;
        }
        let contents = (self.contents)(t)?;
        let visible = |x: f64| match hides {
            None => x == 0.0,
            Some(hides) => (x != 0.0) != hides,
        };
        // A bias that is neither zero nor hides is more than a mask.
        let pure = hides.is_some() || contents.iter().all(|&x| x == 0.0 || x <= HIDDEN);
        let diagonal = contents.iter().take(keys as usize).take_while(|&&x| visible(x)).count() as i64 - 1;
        let causal = contents.iter().enumerate().all(|(at, &x)| {
            let (i, j) = ((at as u64 / keys) as i64, (at as u64 % keys) as i64);
            visible(x) == (j <= i + diagonal)
        });
        (pure && causal && diagonal >= 0).then_some(diagonal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        graph::Role,
        ops::{Contract, Reduce, Softmax},
        types::DType,
        verify::verify,
    };

    fn source(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], role: Role) -> TensorId {
        let init = if dtype == DType::Bool { Init::Below(2) } else { Init::Normal(Real(1.0)) };
        b.source(name, TensorType::new(dtype, shape), role, init).unwrap()
    }

    fn einsum(b: &mut GraphBuilder, name: &str, spec: &str, inputs: &[TensorId]) -> TensorId {
        b.emit(name, Contract::parse(spec).unwrap(), inputs).unwrap()
    }

    /// Products by these einsums on operands of these shapes, with steps between product and softmax.
    fn attention(
        specs: [&str; 2],
        shapes: [&[u64]; 3],
        steps: impl Fn(&mut GraphBuilder, TensorId) -> TensorId,
    ) -> AttentionFusion {
        let mut b = GraphBuilder::new("plain");
        let mut operand = |name, shape| source(&mut b, name, DType::F32, shape, Role::Input);
        let [q, k, v] = [operand("q", shapes[0]), operand("k", shapes[1]), operand("v", shapes[2])];
        let scores = einsum(&mut b, "scores", specs[0], &[q, k]);
        let scores = steps(&mut b, scores);
        let axis = b.shape(scores).len() - 1;
        let weights = b.emit("weights", Softmax { axis }, &[scores]).unwrap();
        let y = einsum(&mut b, "context", specs[1], &[weights, v]);
        let loss = b.emit("loss", Reduce::sum((0..b.shape(y).len()).collect()), &[y]).unwrap();
        b.output(loss);
        let causal =
            |t: TensorId| (t.index() == 4).then(|| (0..48).map(|i| f64::from(i % 8 <= i / 8 + 2)).collect());
        let fusion = fuse_attention(b.finish(), &[], &causal).unwrap();
        assert_eq!(verify(&fusion.graph), Ok(()));
        fusion
    }

    fn kinds(graph: &Graph) -> Vec<&'static str> {
        graph.ops.iter().map(|node| node.op.kind()).collect()
    }

    fn fused(graph: &Graph) -> &Attention {
        let find = |node: &Node| matches!(node.op, Op::Attention(_));
        let Op::Attention(op) = &graph.ops.iter().find(|node| find(node)).expect("an attention").op else {
            panic!("no attention")
        };
        op
    }

    const POSITIONS_FIRST: [&[u64]; 3] = [&[2, 6, 4, 16], &[2, 8, 4, 16], &[2, 8, 4, 10]];

    fn affine(b: &mut GraphBuilder, x: TensorId) -> TensorId {
        let f = UnaryFn::Affine { scale: Real(0.25), shift: Real(0.0) };
        b.emit("scale", Unary { f }, &[x]).unwrap()
    }

    #[test]
    fn every_order_of_dimensions_is_recognised() {
        let check = |specs, shapes, expected: &[&str]| {
            let found = attention(specs, shapes, affine);
            assert_eq!(kinds(&found.graph), expected, "{specs:?}");
            assert_eq!(found.fused, ["context"]);
            assert_eq!(fused(&found.graph).scale, Real(0.25));
        };
        check(["nqhd,nkhd->nhqk", "nhqk,nkhe->nqhe"], POSITIONS_FIRST, &["attention", "reduce"]);
        check(
            ["bhqd,bhkd->bhqk", "bhqk,bhkv->bhqv"],
            [&[2, 4, 6, 16], &[2, 4, 8, 16], &[2, 4, 8, 10]],
            &["attention", "reduce"],
        );
        // Keys are stored transposed, and the result too.
        check(
            ["abqd,abdk->abqk", "abqk,abke->aqbe"],
            [&[2, 4, 6, 16], &[2, 4, 16, 8], &[2, 4, 8, 10]],
            &["transpose", "attention", "transpose", "reduce"],
        );
        // Keys first, grouped queries.
        check(
            ["nkgd,nqgrd->ngrqk", "ngrqk,nkge->nqgre"],
            [&[2, 8, 4, 16], &[2, 6, 4, 3, 16], &[2, 8, 4, 10]],
            &["attention", "reduce"],
        );
    }

    #[test]
    fn masks_become_a_bias_and_a_stored_causal_mask_an_attribute() {
        let specs = ["nqhd,nkhd->nhqk", "nhqk,nkhe->nqhe"];
        let hide = |b: &mut GraphBuilder, x: TensorId, name: &str, number: f64| {
            let cond = source(b, name, DType::Bool, &[6, 8], Role::Constant);
            let ty = TensorType::new(DType::F32, []);
            let hidden = b.emit("hidden", Fill { value: Real(number), ty }, &[]).unwrap();
            b.emit("masked", Select {}, &[cond, x, hidden]).unwrap()
        };
        // Tensor 4 is the first mask: its contents are causal.
        let causal = attention(specs, POSITIONS_FIRST, |b, x| hide(b, x, "visible", f64::NEG_INFINITY));
        assert_eq!(kinds(&causal.graph), ["fill", "attention", "reduce"]);
        assert_eq!((fused(&causal.graph).after, fused(&causal.graph).diagonal), (Some(0), 2));
        let both = attention(specs, POSITIONS_FIRST, |b, x| {
            let scaled = affine(b, x);
            let bias = source(b, "bias", DType::F32, &[2, 1, 1, 8], Role::Input);
            let sum = b.emit("biased", Binary { f: BinaryFn::Add }, &[scaled, bias]).unwrap();
            hide(b, sum, "seen", -1e9)
        });
        assert_eq!(kinds(&both.graph), ["fill", "fill", "select", "binary", "attention", "reduce"]);
        assert_eq!(fused(&both.graph).after, None);
        // A small number hides nothing, and a factor behind a mask scales it.
        let weak = attention(specs, POSITIONS_FIRST, |b, x| hide(b, x, "weak", -1.0));
        assert!(weak.fused.is_empty() && kinds(&weak.graph).contains(&"softmax"));
        let late = attention(specs, POSITIONS_FIRST, |b, x| {
            let masked = hide(b, x, "late", f64::NEG_INFINITY);
            affine(b, masked)
        });
        assert!(late.fused.is_empty());
    }

    #[test]
    fn scores_that_are_read_elsewhere_stay() {
        let mut b = GraphBuilder::new("plain");
        let [q, k, v] =
            ["q", "k", "v"].map(|name| source(&mut b, name, DType::F32, &[2, 6, 4, 16], Role::Input));
        let scores = einsum(&mut b, "scores", "nqhd,nkhd->nhqk", &[q, k]);
        let weights = b.emit("weights", Softmax { axis: 3 }, &[scores]).unwrap();
        let y = einsum(&mut b, "context", "nhqk,nkhd->nqhd", &[weights, v]);
        b.output(y);
        let graph = b.finish();
        assert_eq!(fuse_attention(graph.clone(), &[weights], &|_| None).unwrap().graph, graph);
        let fusion = fuse_attention(graph, &[], &|_| None).unwrap();
        assert_eq!(kinds(&fusion.graph), ["attention"]);
        assert_eq!((fusion.tensors[weights.index()], fusion.tensors[q.index()]), (None, Some(q)));
    }
}
