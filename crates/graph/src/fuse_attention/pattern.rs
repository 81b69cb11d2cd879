//! Finds attention around a product of queries and keys.
//!
//! The products that read the region of a product's result tell what it is: `weights·v` alone is a forward pass. With
//! `weights·dO`, `dS·k` and `dS·q` beside it, and `dO·v` that the region reads, it is a forward and a backward pass. That
//! the weights are the softmax of the scores, and `dS` its derivative, is checked on random rows: frameworks write both in
//! many forms.

use super::{
    constants::Constants,
    masks::{Chain, ChainMask, Mask, apply},
    rows::{DimLetters, RegionValues, RowRandom, RowValues, Rows, WIDTH, softmax, softmax_gradient},
};
use crate::{
    graph::{Consumers, Phase},
    ids::{OpId, TensorId},
    ops::{Attention, Contract, Dropout, Op},
};
use rustc_hash::FxHashSet;

/// Random rows on which two forms must agree.
const TRIALS: usize = 8;

/// The role of a dimension: batch, key head, query head inside a group, query, key, size of keys, size of values.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Dim {
    N,
    H,
    R,
    Q,
    K,
    D,
    E,
}

/// A tensor and the roles of its dimensions.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub tensor: TensorId,
    pub dims: Vec<Dim>,
}

/// A match: everything that the fused ops need.
pub(super) struct Pattern {
    pub op: Attention,
    /// Whether queries have two dimensions of heads.
    pub grouped: bool,
    pub queries: Operand,
    pub keys: Operand,
    pub values: Operand,
    pub masks: Vec<Mask>,
    /// The product of queries and keys.
    pub scores: OpId,
    /// The product by values, whose result the fused op computes.
    pub context: OpId,
    /// The roles of the result's dimensions.
    pub result: Vec<Dim>,
    pub backward: Option<Backward>,
    /// The ops that go, products included.
    pub removed: FxHashSet<OpId>,
}

/// The gradient's part of a match.
pub(super) struct Backward {
    /// The gradient of the result.
    pub result_gradient: Operand,
    /// The product that computes the gradient of the weights.
    pub weights_gradient: OpId,
    /// Products that compute the gradients of queries, keys and values, and the roles of their dimensions.
    pub products: [(OpId, Vec<Dim>); 3],
}

impl Pattern {
    /// The dimensions of an operand of the fused op, in its order.
    pub fn wanted(&self, position: Dim, last: Dim) -> Vec<Dim> {
        let heads: &[Dim] = if self.grouped && position == Dim::Q { &[Dim::H, Dim::R] } else { &[Dim::H] };
        match self.op.heads_first {
            true => [&[Dim::N], heads, &[position, last]].concat(),
            false => [&[Dim::N, position], heads, &[last]].concat(),
        }
    }

    /// The dimensions of scores.
    pub fn scores_dims(&self) -> &'static [Dim] {
        if self.grouped {
            &[Dim::N, Dim::H, Dim::R, Dim::Q, Dim::K]
        } else {
            &[Dim::N, Dim::H, Dim::Q, Dim::K]
        }
    }
}

/// Finds patterns in a graph.
pub(super) struct Matcher<'a> {
    pub constants: Constants<'a>,
    pub consumers: Consumers,
    /// Tensors that others refer to.
    pub kept: FxHashSet<TensorId>,
}

/// The roles of the scores' letters.
pub(super) type Roles = Vec<(u8, Dim)>;

pub(super) fn role(roles: &Roles, letter: u8) -> Option<Dim> {
    roles.iter().find(|(known, _)| *known == letter).map(|(_, dim)| *dim)
}

/// Whether two tensors have the same dimensions in some order.
fn same_set(a: &[Dim], b: &[Dim]) -> bool {
    let sorted = |dims: &[Dim]| {
        let mut dims = dims.to_vec();
        dims.sort_unstable();
        dims
    };
    sorted(a) == sorted(b)
}

impl<'a> Matcher<'a> {
    fn contract(&self, op: OpId) -> Option<&'a Contract> {
        match &self.constants.graph.node(op).op {
            Op::Contract(contract) if contract.operands.len() == 2 => Some(contract),
            _ => None,
        }
    }

    /// The attention whose scores this op computes.
    pub fn at(&self, scores: OpId) -> Option<Pattern> {
        let graph = self.constants.graph;
        let (node, product) = (graph.node(scores), self.contract(scores)?);
        if node.phase != Phase::Forward {
            return None;
        }
        let [left, right] = [0, 1].map(|i| &product.operands[i][..]);
        let summed: Vec<u8> = left.iter().copied().filter(|l| !product.result.contains(l)).collect();
        let &[depth] = &summed[..] else { return None };
        if !right.contains(&depth) || right.iter().any(|l| *l != depth && !product.result.contains(l)) {
            return None;
        }
        let seed = (node.outputs[0], product.result.iter().map(|&l| Some(l)).collect::<DimLetters>());
        let rows = self.region(std::slice::from_ref(&seed))?;
        let key = rows.key?;
        let key_at = [left, right].iter().position(|letters| letters.contains(&key))?;
        let [query_letters, key_letters] = [1 - key_at, key_at].map(|i| &product.operands[i][..]);
        let own = |a: &[u8], b: &[u8]| a.iter().copied().filter(|l| !b.contains(l)).collect::<Vec<u8>>();
        if own(key_letters, query_letters) != [key] {
            return None;
        }
        let shared: Vec<u8> =
            query_letters.iter().copied().filter(|l| *l != depth && key_letters.contains(l)).collect();
        let chain = self.chain(&rows, node.outputs[0])?;
        let assigned = assignments(&shared, &own(query_letters, key_letters), query_letters, key, depth);
        // The assignment under which every mask is a bound, else the first.
        let masked = |roles: &Roles| chain.masks.iter().all(|mask| self.bounds(mask, roles).is_some());
        let roles = assigned.iter().find(|roles| masked(roles)).or(assigned.first())?;
        let operand = |letters: &[u8], tensor: TensorId| {
            let dims = letters.iter().map(|&l| role(roles, l)).collect::<Option<Vec<Dim>>>()?;
            Some(Operand { tensor, dims })
        };
        let queries = operand(query_letters, node.inputs[1 - key_at])?;
        let keys = operand(key_letters, node.inputs[key_at])?;
        let grouped = roles.iter().any(|(_, dim)| *dim == Dim::R);
        let all: Vec<Dim> = roles.iter().map(|(_, dim)| *dim).filter(|dim| *dim != Dim::D).collect();
        let without = |gone: &[Dim], last: Dim| {
            all.iter().copied().filter(|dim| !gone.contains(dim)).chain([last]).collect::<Vec<Dim>>()
        };
        // The product by values, and the other products that read weights.
        let is_weights = |values: &RegionValues, t: TensorId| {
            Some(agree(values.get(&t)?, &softmax(values.get(&chain.end)?)))
        };
        let readers: Vec<Reader> = rows.products.iter().map(|&(op, at)| self.reader(op, at)).collect();
        let weights = self.always(&rows, &chain, &[seed.0], &readers, &is_weights);
        let mut context = None;
        let mut values_gradient = None;
        for reader in readers.iter().zip(&weights).filter(|(_, is)| **is).map(|(reader, _)| reader) {
            let (other, result) = self.dims(&rows, roles, reader, Dim::E)?;
            let place = if result.contains(&Dim::K) { &mut values_gradient } else { &mut context };
            if place.replace((reader, other, result)).is_some() {
                return None;
            }
        }
        let (context, values, result) = context?;
        if !same_set(&values.dims, &without(&[Dim::Q, Dim::R], Dim::E))
            || !same_set(&result, &without(&[Dim::K], Dim::E))
        {
            return None;
        }
        let types = [&queries, &keys, &values].map(|operand| graph.tensor(operand.tensor).ty.dtype);
        let made = graph.tensor(graph.node(context.op).outputs[0]).ty.dtype;
        if types.iter().any(|dtype| *dtype != made) {
            return None;
        }
        let size = |dim: Dim| {
            let (at, from) = if dim == Dim::Q { (&queries, Dim::Q) } else { (&keys, dim) };
            let i = at.dims.iter().position(|d| *d == from)?;
            graph.tensor(at.tensor).ty.shape.get(i).copied()
        };
        let mut op = Attention::new(chain.scale, size(Dim::Q)?, size(Dim::K)?);
        let heads: &[Dim] = if grouped { &[Dim::H, Dim::R] } else { &[Dim::H] };
        op.heads_first = queries.dims == [&[Dim::N], heads, &[Dim::Q, Dim::D]].concat();
        op.dropout.clone_from(&context.dropout);
        let (bounds, masks) = self.masks(&chain, roles, (size(Dim::Q)?, size(Dim::K)?))?;
        apply(bounds, &mut op);
        let mut pattern = Pattern {
            op,
            grouped,
            queries,
            keys,
            values,
            masks,
            scores,
            context: context.op,
            result,
            backward: None,
            removed: rows.ops.iter().copied().chain([scores, context.op]).collect(),
        };
        if let Some(dropout) = &context.dropout {
            // The mask of a dropout follows the order of its own tensor.
            let letters = rows.all_letters(&rows.letters[&context.weights])?;
            let dims: Option<Vec<Dim>> = letters.iter().map(|&l| role(roles, l)).collect();
            if dims? != pattern.scores_dims() || dropout.origin.len() != letters.len() {
                return None;
            }
        }
        if readers.len() == 1 {
            return Some(pattern);
        }
        let (values_gradient, gradient, made) = values_gradient?;
        let flows = same_set(&gradient.dims, &without(&[Dim::K], Dim::E))
            && same_set(&made, &without(&[Dim::Q, Dim::R], Dim::E));
        if readers.len() != 4 || !flows || pattern.op.dropout.is_some() {
            return None;
        }
        let found = (values_gradient.op, made, gradient);
        self.backward(&mut pattern, &rows, roles, &chain, seed, found, &without)?;
        Some(pattern)
    }

    /// Completes a match by the products of the backward pass.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        pattern: &mut Pattern,
        rows: &Rows<'_>,
        roles: &Roles,
        chain: &Chain,
        seed: (TensorId, DimLetters),
        (values_product, values_dims, gradient): (OpId, Vec<Dim>, Operand),
        without: &dyn Fn(&[Dim], Dim) -> Vec<Dim>,
    ) -> Option<()> {
        let graph = self.constants.graph;
        let mut sources = rows.outside.iter().filter_map(|(&t, letters)| {
            let (op, letters) = self.weights_gradient(t, letters.clone(), pattern.values.tensor)?;
            Some((op, letters))
        });
        let (product, letters) = sources.next()?;
        if sources.any(|(other, _)| other != product) {
            return None;
        }
        // The gradient of the weights: dO and v, summed over the size of values.
        let (node, contract) = (graph.node(product), self.contract(product)?);
        let value_at = (0..2).find(|&i| self.root(node.inputs[i]) == self.root(pattern.values.tensor))?;
        let value_letters = &contract.operands[value_at];
        let from_values =
            |letter: u8| value_letters.iter().position(|l| *l == letter).map(|i| pattern.values.dims[i]);
        let mut from_scores: Vec<(u8, Dim)> = Vec::new();
        let shape = &graph.tensor(node.outputs[0]).ty.shape;
        for ((&letter, known), size) in contract.result.iter().zip(rows.all_letters(&letters)?).zip(&**shape)
        {
            let known = role(roles, known)?;
            let dim = from_values(letter).unwrap_or(known);
            if dim != known && *size != 1 {
                return None;
            }
            from_scores.push((letter, dim));
        }
        let gradient_dims = contract.operands[1 - value_at].iter().map(|&letter| {
            role(&from_scores, letter).or_else(|| from_values(letter).filter(|dim| *dim == Dim::E))
        });
        let gradient_dims = gradient_dims.collect::<Option<Vec<Dim>>>()?;
        let same = self.root(node.inputs[1 - value_at]) == self.root(gradient.tensor)
            && self.same_dims(&gradient, &gradient_dims)
            && value_letters.len() == pattern.values.dims.len();
        if !same {
            return None;
        }
        let second = (node.outputs[0], letters);
        let seeds = [seed.0, second.0];
        let rows = self.region(&[seed, second])?;
        let readers: Vec<Reader> = rows.products.iter().map(|&(op, at)| self.reader(op, at)).collect();
        if readers.len() != 4 {
            return None;
        }
        let is_gradient = |values: &RegionValues, t: TensorId| {
            let weights = softmax(values.get(&chain.end)?);
            let scores = softmax_gradient(&weights, values.get(&seeds[1])?).map(|x| x * chain.scale);
            Some(agree(values.get(&t)?, &scores))
        };
        let gradients = self.always(&rows, chain, &seeds, &readers, &is_gradient);
        let (mut to_queries, mut to_keys) = (None, None);
        for reader in readers.iter().zip(&gradients).filter(|(_, is)| **is).map(|(reader, _)| reader) {
            let (other, made) = self.dims(&rows, roles, reader, Dim::D)?;
            let (place, from) = match made.contains(&Dim::K) {
                true => (&mut to_keys, &pattern.queries),
                false => (&mut to_queries, &pattern.keys),
            };
            let expected = if made.contains(&Dim::K) { vec![Dim::Q, Dim::R] } else { vec![Dim::K] };
            let fits = self.root(other.tensor) == self.root(from.tensor)
                && self.same_dims(from, &other.dims)
                && same_set(&made, &without(&expected, Dim::D));
            if !fits || place.replace((reader.op, made)).is_some() {
                return None;
            }
        }
        let (to_queries, to_keys) = (to_queries?, to_keys?);
        let result_gradient =
            Operand { tensor: self.typed(gradient.tensor, pattern.queries.tensor)?, dims: gradient.dims };
        pattern.removed.extend(rows.ops.iter().copied());
        pattern.removed.extend([product, values_product, to_queries.0, to_keys.0]);
        pattern.backward = Some(Backward {
            result_gradient,
            weights_gradient: product,
            products: [to_queries, to_keys, (values_product, values_dims)],
        });
        Some(())
    }

    /// A region that only its own ops and products read.
    fn region(&self, seeds: &[(TensorId, DimLetters)]) -> Option<Rows<'a>> {
        let rows = Rows::grow(self.constants.graph, &self.consumers, seeds)?;
        rows.letters.keys().all(|t| !self.kept.contains(t)).then_some(rows)
    }

    /// Whether dimensions have the same roles in two uses of a tensor; those of size one have any.
    fn same_dims(&self, operand: &Operand, dims: &[Dim]) -> bool {
        let shape = &self.constants.graph.tensor(operand.tensor).ty.shape;
        let same = |((a, b), size): ((&Dim, &Dim), &u64)| a == b || *size == 1;
        operand.dims.len() == dims.len() && operand.dims.iter().zip(dims).zip(&**shape).all(same)
    }

    /// The tensor before changes of its element type.
    fn root(&self, mut t: TensorId) -> TensorId {
        let graph = self.constants.graph;
        while let Some(node) = graph.tensor(t).producer.map(|op| graph.node(op))
            && let Op::Cast(_) = node.op
        {
            t = node.inputs[0];
        }
        t
    }

    /// The tensor, or one before a change of its element type, that has the type of another.
    fn typed(&self, mut t: TensorId, like: TensorId) -> Option<TensorId> {
        let graph = self.constants.graph;
        loop {
            if graph.tensor(t).ty.dtype == graph.tensor(like).ty.dtype {
                return Some(t);
            }
            let node = graph.node(graph.tensor(t).producer?);
            let Op::Cast(_) = node.op else { return None };
            t = node.inputs[0];
        }
    }

    /// The product by values that a tensor comes from, and the letters of its result.
    fn weights_gradient(
        &self,
        mut t: TensorId,
        mut letters: DimLetters,
        values: TensorId,
    ) -> Option<(OpId, DimLetters)> {
        let graph = self.constants.graph;
        loop {
            let op = graph.tensor(t).producer?;
            let node = graph.node(op);
            match &node.op {
                Op::Contract(_) => {
                    let reads = node.inputs.iter().any(|&i| self.root(i) == self.root(values));
                    return (reads && node.inputs.len() == 2).then_some((op, letters));
                }
                Op::Cast(_) | Op::Transpose(_) | Op::Reshape(_) | Op::Unary(_) => {
                    letters = self.constants.before(node, 0, &letters)?;
                    t = node.inputs[0];
                }
                _ => return None,
            }
        }
    }

    /// A product that reads a region; a dropout of the weights is its own part of the match.
    fn reader(&self, op: OpId, at: usize) -> Reader {
        let graph = self.constants.graph;
        let weights = graph.node(op).inputs[at];
        let maker = graph.tensor(weights).producer.map(|op| graph.node(op));
        match maker.map(|node| (&node.op, node.inputs[0])) {
            Some((Op::Dropout(dropout), before)) => {
                Reader { op, at, weights, before, dropout: Some(dropout.clone()) }
            }
            _ => Reader { op, at, weights, before: weights, dropout: None },
        }
    }

    /// For each reader: whether a property of the values of its operand holds on all random rows.
    fn always(
        &self,
        rows: &Rows<'_>,
        chain: &Chain,
        seeds: &[TensorId],
        readers: &[Reader],
        holds: &dyn Fn(&RegionValues, TensorId) -> Option<bool>,
    ) -> Vec<bool> {
        let mut random = RowRandom::new();
        let mut always = vec![true; readers.len()];
        for _ in 0..TRIALS {
            let mut given: RegionValues = RegionValues::default();
            for &seed in seeds {
                given.insert(seed, random.row(|x| 2.0 * x));
            }
            for mask in &chain.masks {
                if let ChainMask::Hide { cond, letters, hides, .. } = mask {
                    // Every row shows a key: frameworks differ in the others.
                    let mut row = random.row(|x| f64::from(x > 0.0));
                    row[0] = f64::from(!*hides);
                    let wide = rows.key.is_some_and(|key| letters.contains(&Some(key)));
                    given.insert(*cond, if wide { row } else { [row[0]; WIDTH] });
                }
            }
            let values = rows.evaluate(&self.constants, given, &mut random);
            for (always, reader) in always.iter_mut().zip(readers) {
                *always &= holds(&values, reader.before).unwrap_or(false);
            }
        }
        always
    }

    /// The other operand of a product that reads a region, and the roles of the result's dimensions. `last` is the role of
    /// the letter that the region has not.
    fn dims(
        &self,
        rows: &Rows<'_>,
        roles: &Roles,
        reader: &Reader,
        last: Dim,
    ) -> Option<(Operand, Vec<Dim>)> {
        let (contract, node) = (self.contract(reader.op)?, self.constants.graph.node(reader.op));
        let known = rows.all_letters(&rows.letters[&reader.weights])?;
        let own = &contract.operands[reader.at];
        let mut dims: Vec<(u8, Dim)> = Vec::new();
        for (&letter, known) in own.iter().zip(known) {
            dims.push((letter, role(roles, known)?));
        }
        let other = &contract.operands[1 - reader.at];
        let mut extra = other.iter().copied().filter(|l| !own.contains(l));
        dims.push((extra.next()?, last));
        if extra.next().is_some() {
            return None;
        }
        let named = |letters: &[u8]| letters.iter().map(|&l| role(&dims, l)).collect::<Option<Vec<Dim>>>();
        let operand = Operand { tensor: node.inputs[1 - reader.at], dims: named(other)? };
        Some((operand, named(&contract.result)?))
    }
}

/// A product that reads a region.
struct Reader {
    op: OpId,
    at: usize,
    /// What it reads.
    weights: TensorId,
    /// The same before a dropout.
    before: TensorId,
    dropout: Option<Dropout>,
}

fn agree(a: &RowValues, b: &RowValues) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * (1e-3 + b.abs()))
}

/// The roles that letters may have: shared letters are batch and heads, and the queries' own letters positions and heads of a
/// group.
fn assignments(shared: &[u8], own: &[u8], queries: &[u8], key: u8, depth: u8) -> Vec<Roles> {
    let names: &[Dim] = match shared.len() {
        1 => &[Dim::N],
        2 => &[Dim::N, Dim::H],
        _ => return Vec::new(),
    };
    let base: Roles =
        shared.iter().copied().zip(names.iter().copied()).chain([(key, Dim::K), (depth, Dim::D)]).collect();
    let with = |more: &[(u8, Dim)]| base.iter().copied().chain(more.iter().copied()).collect::<Roles>();
    match *own {
        [q] => vec![with(&[(q, Dim::Q)])],
        [a, b] => {
            // Heads of a group follow their key head.
            let after_heads = queries.windows(2).any(|pair| Some(&pair[0]) == shared.last() && pair[1] == a);
            let (q, r) = if after_heads && shared.len() == 2 { (b, a) } else { (a, b) };
            vec![with(&[(q, Dim::Q), (r, Dim::R)]), with(&[(r, Dim::Q), (q, Dim::R)])]
        }
        _ => Vec::new(),
    }
}
