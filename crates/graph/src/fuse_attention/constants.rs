//! What is known of tensors before a graph runs: numbers, stored elements, and positions along dimensions.

use super::rows::{DimLetters, reshaped};
use crate::{
    graph::{Graph, Node},
    ids::TensorId,
    ops::{Binary, BinaryFn, Compare, CompareFn, Op, Unary, UnaryFn},
};

/// The most ops that make a mask.
const MOST_STEPS: usize = 32;

/// The constants of a graph.
pub(super) struct Constants<'a> {
    pub graph: &'a Graph,
    /// The elements of a tensor that no op makes.
    pub contents: &'a dyn Fn(TensorId) -> Option<Vec<f64>>,
}

/// `query * i + key * j + shift`, for query `i` and key `j`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    query: i64,
    key: i64,
    shift: i64,
}

/// The keys that a query sees: all that are in these bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Key `j` is visible to query `i` only if `j <= i + upper`.
    pub upper: Option<i64>,
    /// Key `j` is visible to query `i` only if `j >= i - lower`.
    pub lower: Option<i64>,
}

impl Bounds {
    /// Keys that both admit.
    pub fn and(self, other: Self) -> Self {
        let least = |a: Option<i64>, b: Option<i64>| a.into_iter().chain(b).min();
        Self { upper: least(self.upper, other.upper), lower: least(self.lower, other.lower) }
    }

    /// Whether every query sees a key, and its own position is in the bounds.
    pub fn every_query_sees(self, queries: u64, keys: u64) -> bool {
        let last_seen = self
            .lower
            .is_none_or(|lower| lower >= 0 && i128::from(queries) - 1 - i128::from(lower) < i128::from(keys));
        self.upper.is_none_or(|upper| upper >= 0) && last_seen
    }

    /// Keys with `position >= 0`.
    fn at_least_zero(position: Position) -> Option<Self> {
        match (position.query, position.key) {
            (1, -1) => Some(Self { upper: Some(position.shift), lower: None }),
            (-1, 1) => Some(Self { upper: None, lower: Some(position.shift) }),
            (0, 0) if position.shift >= 0 => Some(Self::default()),
            _ => None,
        }
    }

    /// The keys that these bounds hide, if that is a bound too.
    fn negated(self) -> Option<Self> {
        match self {
            // j > i + u, that is j >= i - (-u - 1).
            Self { upper: Some(u), lower: None } => Some(Self { upper: None, lower: Some(-u - 1) }),
            Self { upper: None, lower: Some(l) } => Some(Self { upper: Some(-l - 1), lower: None }),
            _ => None,
        }
    }
}

/// The letters of queries and keys.
#[derive(Clone, Copy)]
pub(super) struct MaskLetters {
    pub query: u8,
    pub key: u8,
}

impl<'a> Constants<'a> {
    fn maker(&self, t: TensorId) -> Option<&'a Node> {
        self.graph.tensor(t).producer.map(|op| self.graph.node(op))
    }

    /// The number that every element of a tensor is.
    pub fn number(&self, t: TensorId) -> Option<f64> {
        let Some(node) = self.maker(t) else {
            let one = self.graph.tensor(t).ty.shape.elements() == 1;
            return if one { (self.contents)(t)?.first().copied() } else { None };
        };
        match &node.op {
            Op::Fill(fill) => Some(fill.value.0),
            Op::Literal(literal) if literal.values.0.len() == 1 => Some(literal.values.0[0].0),
            Op::Broadcast(_) | Op::Reshape(_) => self.number(node.inputs[0]),
            _ => None,
        }
    }

    /// The stored tensor that a tensor repeats: its elements, sizes and letters.
    fn elements(&self, t: TensorId, letters: &DimLetters) -> Option<(Vec<f64>, &'a [u64], DimLetters)> {
        let shape = &self.graph.tensor(t).ty.shape[..];
        let Some(node) = self.maker(t) else { return Some(((self.contents)(t)?, shape, letters.clone())) };
        match &node.op {
            Op::Literal(literal) => {
                Some((literal.values.0.iter().map(|x| x.0).collect(), shape, letters.clone()))
            }
            Op::Reshape(_) | Op::Broadcast(_) => {
                self.elements(node.inputs[0], &self.before(node, 0, letters)?)
            }
            _ => None,
        }
    }

    /// The letters of an op's input, from those of its result.
    pub fn before(&self, node: &Node, input: usize, letters: &DimLetters) -> Option<DimLetters> {
        let shape = &self.graph.tensor(node.inputs[input]).ty.shape;
        let made = &self.graph.tensor(node.outputs[0]).ty.shape;
        match &node.op {
            Op::Reshape(_) => reshaped(letters, made, shape),
            Op::Transpose(transpose) => {
                let mut turned: DimLetters = smallvec::smallvec![None; shape.rank()];
                transpose.perm.iter().zip(letters).for_each(|(&from, letter)| turned[from] = *letter);
                Some(turned)
            }
            Op::Broadcast(broadcast) => {
                let dims = broadcast.dims.iter().zip(shape.iter());
                Some(dims.map(|(&to, &size)| letters[to].filter(|_| size != 1)).collect())
            }
            Op::Unary(_) | Op::Cast(_) => Some(letters.clone()),
            Op::Binary(_) | Op::Compare(_) | Op::Select(_) => {
                let skip = made.rank() - shape.rank();
                let dims = shape.iter().enumerate();
                Some(dims.map(|(i, &size)| letters[skip + i].filter(|_| size != 1)).collect())
            }
            _ => None,
        }
    }

    /// The bounds that a mask states, which shows (or `hides`) a key where it is true.
    pub fn bounds(
        &self,
        mask: TensorId,
        letters: &DimLetters,
        names: MaskLetters,
        hides: bool,
    ) -> Option<Bounds> {
        let found = self.predicate(mask, letters, names, MOST_STEPS);
        let found = found.and_then(|bounds| if hides { bounds.negated() } else { Some(bounds) });
        found.or_else(|| self.stored(mask, letters, names, &|x| (x != 0.0) != hides))
    }

    /// The bounds that a stored mask states.
    pub fn stored(
        &self,
        mask: TensorId,
        letters: &DimLetters,
        names: MaskLetters,
        visible: &dyn Fn(f64) -> bool,
    ) -> Option<Bounds> {
        let (elements, shape, letters) = self.elements(mask, letters)?;
        let order: Vec<u8> = letters.iter().copied().flatten().collect();
        if order != [names.query, names.key] {
            return None;
        }
        let keys = shape.iter().rev().copied().find(|&size| size != 1)? as i64;
        let first = elements.iter().take(keys as usize).take_while(|&&x| visible(x)).count() as i64 - 1;
        let causal = elements.iter().enumerate().all(|(at, &x)| {
            let (i, j) = (at as i64 / keys, at as i64 % keys);
            visible(x) == (j <= i + first)
        });
        (causal && first >= 0).then_some(Bounds { upper: Some(first), lower: None })
    }

    /// Calls a function with every element of a stored tensor.
    pub fn each(&self, t: TensorId, visit: &mut dyn FnMut(f64)) {
        let letters = smallvec::smallvec![None; self.graph.tensor(t).ty.rank()];
        if let Some((elements, ..)) = self.elements(t, &letters) {
            elements.into_iter().for_each(visit);
        }
    }

    /// The bounds of the keys for which a computed truth value is true.
    fn predicate(
        &self,
        t: TensorId,
        letters: &DimLetters,
        names: MaskLetters,
        steps: usize,
    ) -> Option<Bounds> {
        if self.number(t) == Some(1.0) {
            return Some(Bounds::default());
        }
        let (node, steps) = (self.maker(t)?, steps.checked_sub(1)?);
        let inner = |i: usize| self.predicate(node.inputs[i], &self.before(node, i, letters)?, names, steps);
        match &node.op {
            Op::Binary(Binary { f: BinaryFn::And }) => Some(inner(0)?.and(inner(1)?)),
            Op::Select(_) if self.number(node.inputs[2]) == Some(0.0) => Some(inner(0)?.and(inner(1)?)),
            Op::Unary(Unary { f: UnaryFn::Not }) => inner(0)?.negated(),
            Op::Reshape(_) | Op::Broadcast(_) | Op::Transpose(_) => inner(0),
            Op::Compare(Compare { f }) => {
                let side =
                    |i: usize| self.position(node.inputs[i], &self.before(node, i, letters)?, names, steps);
                let (a, b) = (side(0)?, side(1)?);
                let (a, b, shift) = match f {
                    CompareFn::Ge => (a, b, 0),
                    CompareFn::Gt => (a, b, -1),
                    CompareFn::Le => (b, a, 0),
                    CompareFn::Lt => (b, a, -1),
                    CompareFn::Eq | CompareFn::Ne => return None,
                };
                let difference = plus(a, b, -1)?;
                Bounds::at_least_zero(Position { shift: difference.shift.checked_add(shift)?, ..difference })
            }
            _ => None,
        }
    }

    /// Whole numbers that follow from the positions of query and key.
    fn position(
        &self,
        t: TensorId,
        letters: &DimLetters,
        names: MaskLetters,
        steps: usize,
    ) -> Option<Position> {
        if !self.graph.tensor(t).ty.dtype.is_int() {
            return None;
        }
        let whole = |x: f64| (x.fract() == 0.0 && x.abs() < 1e12).then_some(x as i64);
        if let Some(number) = self.number(t) {
            return Some(Position { query: 0, key: 0, shift: whole(number)? });
        }
        let (node, steps) = (self.maker(t)?, steps.checked_sub(1)?);
        let inner = |i: usize| self.position(node.inputs[i], &self.before(node, i, letters)?, names, steps);
        match &node.op {
            Op::Iota(iota) => {
                let along = letters[iota.axis];
                let [query, key] = [names.query, names.key].map(|l| i64::from(along == Some(l)));
                // Positions of a batch or a head are no positions of a mask.
                let shift = i64::try_from(iota.start).ok()?;
                (along.is_none() || query + key == 1).then_some(Position { query, key, shift })
            }
            Op::Literal(literal) => {
                // Positions that were computed before: equal steps along one dimension.
                let mut along = letters.iter().copied().flatten();
                let (letter, values) = (along.next()?, &literal.values.0);
                let first = whole(values.first()?.0)?;
                let step = whole(values.get(1)?.0)?.checked_sub(first)?;
                let even = values.windows(2).all(|pair| pair[1].0 - pair[0].0 == step as f64);
                let [query, key] = [names.query, names.key].map(|l| if letter == l { step } else { 0 });
                let known = along.next().is_none() && [names.query, names.key].contains(&letter);
                (even && known).then_some(Position { query, key, shift: first })
            }
            Op::Binary(Binary { f: BinaryFn::Add }) => plus(inner(0)?, inner(1)?, 1),
            Op::Binary(Binary { f: BinaryFn::Sub }) => plus(inner(0)?, inner(1)?, -1),
            Op::Unary(Unary { f: UnaryFn::Affine { scale, shift } }) => {
                let zero = Position { query: 0, key: 0, shift: whole(shift.0)? };
                plus(zero, inner(0)?, whole(scale.0)?)
            }
            Op::Unary(Unary { f: UnaryFn::Neg }) => {
                plus(Position { query: 0, key: 0, shift: 0 }, inner(0)?, -1)
            }
            Op::Reshape(_) | Op::Broadcast(_) | Op::Transpose(_) | Op::Cast(_) => inner(0),
            _ => None,
        }
    }
}

/// `a + factor * b`.
fn plus(a: Position, b: Position, factor: i64) -> Option<Position> {
    let sum = |a: i64, b: i64| a.checked_add(b.checked_mul(factor)?);
    Some(Position { query: sum(a.query, b.query)?, key: sum(a.key, b.key)?, shift: sum(a.shift, b.shift)? })
}
