//! The part of a graph that works on rows of scores.
//!
//! A region starts at products of the scores' shape and follows their readers. Each of its ops computes a number per score,
//! or per row of scores, from numbers of the same row: masks, softmax in any form, and its derivative. Products end a region.
//! [`Rows::evaluate`] computes one row of random scores. Two forms of a function agree on such rows, or they differ.

use super::constants::Constants;
use crate::{
    graph::{Consumers, Graph, Node, Phase},
    ids::{OpId, TensorId},
    ops::{Binary, BinaryFn, Compare, CompareFn, Op, Reduce, Unary, UnaryFn},
    rule::Reduction,
    types::DType,
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::BTreeSet;

/// The most ops of a region.
const MOST_OPS: usize = 96;

/// Scores of a random row.
pub(super) const WIDTH: usize = 5;

/// One number per score of a row; a number per row is repeated.
pub(super) type RowValues = [f64; WIDTH];

/// The values of a region's tensors for one row.
pub(super) type RegionValues = FxHashMap<TensorId, RowValues>;

/// Per dimension of a tensor: the letter that the product of queries and keys has for it; `None`: a dimension of size one.
pub(super) type DimLetters = SmallVec<[Option<u8>; 5]>;

/// A region of a graph.
pub(super) struct Rows<'a> {
    graph: &'a Graph,
    /// The letters of the scores and their sizes.
    sizes: Vec<(u8, u64)>,
    /// The region's tensors.
    pub letters: FxHashMap<TensorId, DimLetters>,
    /// The region's ops, in order.
    pub ops: Vec<OpId>,
    /// Tensors that the region reads, with the letters of the scores that they are combined with.
    pub outside: FxHashMap<TensorId, DimLetters>,
    /// Products that read the region, and the index of the input.
    pub products: Vec<(OpId, usize)>,
    /// The letter that sums and maxima run along: the keys.
    pub key: Option<u8>,
}

impl<'a> Rows<'a> {
    /// The region of these products' results; `None` if an op reads it that is not of this kind. The first product is that
    /// of queries and keys.
    pub fn grow(graph: &'a Graph, consumers: &Consumers, seeds: &[(TensorId, DimLetters)]) -> Option<Self> {
        let (first, letters) = seeds.first()?;
        let shape = &graph.tensor(*first).ty.shape;
        let sizes = letters.iter().zip(shape.iter()).filter_map(|(l, &size)| Some(((*l)?, size))).collect();
        let mut rows = Self {
            graph,
            sizes,
            letters: seeds.iter().cloned().collect(),
            ops: Vec::new(),
            outside: FxHashMap::default(),
            products: Vec::new(),
            key: None,
        };
        // In topological order, so that an op comes after those of its inputs that belong to the region.
        let mut open: BTreeSet<OpId> =
            seeds.iter().flat_map(|(t, _)| consumers.of(*t).iter().copied()).collect();
        while let Some(id) = open.pop_first() {
            let node = graph.node(id);
            if node.phase != Phase::Forward {
                return None;
            }
            if matches!(&node.op, Op::Contract(_)) && node.inputs.len() == 2 {
                let read: SmallVec<[usize; 2]> =
                    (0..2).filter(|&i| rows.letters.contains_key(&node.inputs[i])).collect();
                let &[at] = &read[..] else { return None };
                rows.products.push((id, at));
                continue;
            }
            let made = rows.follow(node)?;
            if rows.ops.len() == MOST_OPS {
                return None;
            }
            rows.ops.push(id);
            rows.letters.insert(node.outputs[0], made);
            open.extend(consumers.of(node.outputs[0]).iter().copied());
        }
        Some(rows)
    }

    /// The letters of a tensor of scores, where those that are lost have size one and stand in the order of the scores.
    pub fn all_letters(&self, letters: &[Option<u8>]) -> Option<SmallVec<[u8; 5]>> {
        let lost = |(letter, size): &&(u8, u64)| *size == 1 && !letters.contains(&Some(*letter));
        let mut lost = self.sizes.iter().filter(lost).map(|(letter, _)| *letter);
        let all = letters.iter().map(|letter| letter.or_else(|| lost.next()));
        let all = all.collect::<Option<SmallVec<[u8; 5]>>>()?;
        (all.len() == self.sizes.len()).then_some(all)
    }

    /// The letters of an op's result.
    fn follow(&mut self, node: &Node) -> Option<DimLetters> {
        let &[out] = &node.outputs[..] else { return None };
        let single = |rows: &Self| rows.letters.get(node.inputs.first()?).cloned();
        match &node.op {
            Op::Unary(_) | Op::Cast(_) | Op::Dropout(_) => single(self),
            Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::SoftmaxGrad(_) => self.aligned(node, out),
            Op::Softmax(softmax) => {
                let letters = single(self)?;
                self.runs_along(letters[softmax.axis]?)?;
                Some(letters)
            }
            Op::Reduce(reduce) => {
                let letters = single(self)?;
                for &axis in &reduce.axes {
                    if self.graph.tensor(node.inputs[0]).ty.shape[axis] != 1 {
                        self.runs_along(letters[axis]?)?;
                    }
                }
                let kept = letters.iter().enumerate().filter(|(i, _)| !reduce.axes.contains(i));
                Some(kept.map(|(_, letter)| *letter).collect())
            }
            Op::Transpose(transpose) => {
                let letters = single(self)?;
                Some(transpose.perm.iter().map(|&from| letters[from]).collect())
            }
            Op::Broadcast(broadcast) => {
                let letters = single(self)?;
                let shape = &self.graph.tensor(node.inputs[0]).ty.shape;
                let mut spread: DimLetters = smallvec::smallvec![None; broadcast.shape.rank()];
                for (i, &to) in broadcast.dims.iter().enumerate() {
                    spread[to] = letters[i].filter(|_| shape[i] == broadcast.shape[to]);
                }
                self.completed(spread, &broadcast.shape)
            }
            Op::Reshape(reshape) => {
                reshaped(&single(self)?, &self.graph.tensor(node.inputs[0]).ty.shape, &reshape.shape)
            }
            _ => None,
        }
    }

    fn runs_along(&mut self, letter: u8) -> Option<()> {
        (*self.key.get_or_insert(letter) == letter).then_some(())
    }

    /// The letters of the result of an op that combines its operands element by element.
    fn aligned(&mut self, node: &Node, out: TensorId) -> Option<DimLetters> {
        let shape = &self.graph.tensor(out).ty.shape;
        let mut letters: DimLetters = smallvec::smallvec![None; shape.rank()];
        for t in &node.inputs {
            let Some(known) = self.letters.get(t) else { continue };
            let (skip, sizes) = (shape.rank() - known.len(), &self.graph.tensor(*t).ty.shape);
            for (i, letter) in known.iter().enumerate().filter(|(i, _)| sizes[*i] == shape[skip + i]) {
                match (letters[skip + i], letter) {
                    (None, _) => letters[skip + i] = *letter,
                    (Some(a), Some(b)) if a != *b && shape[skip + i] != 1 => return None,
                    _ => {}
                }
            }
        }
        let letters = self.completed(letters, shape)?;
        for t in node.inputs.iter().filter(|t| !self.letters.contains_key(t)) {
            let sizes = &self.graph.tensor(*t).ty.shape;
            let skip = shape.rank() - sizes.rank();
            let dims = sizes.iter().enumerate().map(|(i, &size)| letters[skip + i].filter(|_| size != 1));
            let dims: DimLetters = dims.collect();
            if self.outside.insert(*t, dims.clone()).is_some_and(|before| before != dims) {
                return None;
            }
        }
        Some(letters)
    }

    /// Gives the one dimension whose letter is unknown the one letter that is missing.
    fn completed(&self, mut letters: DimLetters, shape: &[u64]) -> Option<DimLetters> {
        let unknown: SmallVec<[usize; 2]> =
            (0..shape.len()).filter(|&i| shape[i] != 1 && letters[i].is_none()).collect();
        if let &[at] = &unknown[..] {
            let missing = self.sizes.iter().filter(|(l, size)| *size != 1 && !letters.contains(&Some(*l)));
            let missing: SmallVec<[(u8, u64); 2]> = missing.copied().collect();
            let &[(letter, size)] = &missing[..] else { return None };
            letters[at] = (size == shape[at]).then_some(letter);
            letters[at]?;
        }
        let once = |i: usize| letters[i].is_none() || !letters[..i].contains(&letters[i]);
        (unknown.len() < 2 && (0..letters.len()).all(once)).then_some(letters)
    }

    /// The values of the region's tensors for one row, from those of its products and of tensors from outside. Ops without
    /// a value here, and their readers, are left out.
    pub fn evaluate(
        &self,
        constants: &Constants<'_>,
        mut given: RegionValues,
        random: &mut RowRandom,
    ) -> RegionValues {
        let mut outside: Vec<_> = self.outside.iter().collect();
        outside.sort_unstable_by_key(|(t, _)| **t);
        for (&t, letters) in outside {
            if given.contains_key(&t) {
                continue;
            }
            let logical = self.graph.tensor(t).ty.dtype == DType::Bool;
            let row = random.row(|x| if logical { f64::from(x > 0.0) } else { x });
            let value = match constants.number(t) {
                Some(number) => [number; WIDTH],
                None if self.key.is_some_and(|key| letters.contains(&Some(key))) => row,
                None => [row[0]; WIDTH],
            };
            given.insert(t, value);
        }
        for &id in &self.ops {
            let node = self.graph.node(id);
            let inputs = node.inputs.iter().map(|t| given.get(t).copied()).collect::<Option<Vec<_>>>();
            if let Some(value) = inputs.and_then(|inputs| self.value(node, &inputs)) {
                given.insert(node.outputs[0], value);
            }
        }
        given
    }

    fn value(&self, node: &Node, inputs: &[RowValues]) -> Option<RowValues> {
        let x = inputs.first()?;
        let dtype = self.graph.tensor(node.outputs[0]).ty.dtype;
        Some(match &node.op {
            Op::Unary(Unary { f }) => {
                let function = unary(*f)?;
                x.map(function)
            }
            Op::Binary(Binary { f }) => {
                let function = binary(*f, dtype)?;
                std::array::from_fn(|i| function(x[i], inputs[1][i]))
            }
            Op::Compare(Compare { f }) => std::array::from_fn(|i| {
                let (a, b) = (x[i], inputs[1][i]);
                f64::from(match f {
                    CompareFn::Eq => a == b,
                    CompareFn::Ne => a != b,
                    CompareFn::Lt => a < b,
                    CompareFn::Le => a <= b,
                    CompareFn::Gt => a > b,
                    CompareFn::Ge => a >= b,
                })
            }),
            Op::Select(_) => std::array::from_fn(|i| if x[i] != 0.0 { inputs[1][i] } else { inputs[2][i] }),
            Op::Cast(_) if dtype.is_float() => *x,
            Op::Transpose(_) | Op::Reshape(_) | Op::Broadcast(_) => *x,
            Op::Softmax(_) => softmax(x),
            Op::SoftmaxGrad(_) => softmax_gradient(x, &inputs[1]),
            Op::Reduce(Reduce { f, axes, scale }) => {
                let letters = self.letters.get(&node.inputs[0])?;
                let along = axes.iter().any(|&axis| letters[axis].is_some() && letters[axis] == self.key);
                match f {
                    Reduction::Sum if along => [x.iter().sum::<f64>() * scale.0; WIDTH],
                    Reduction::Sum => x.map(|x| x * scale.0),
                    Reduction::Max if along => [x.iter().copied().fold(f64::NEG_INFINITY, f64::max); WIDTH],
                    Reduction::Max => *x,
                    Reduction::LogSumExp => return None,
                }
            }
            _ => return None,
        })
    }
}

/// The softmax of a row.
pub(super) fn softmax(x: &RowValues) -> RowValues {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials = x.map(|x| (x - most).exp());
    let sum: f64 = exponentials.iter().sum();
    exponentials.map(|e| e / sum)
}

/// The gradient of the scores of a row, from the weights and their gradient.
pub(super) fn softmax_gradient(weights: &RowValues, gradient: &RowValues) -> RowValues {
    let sum: f64 = weights.iter().zip(gradient).map(|(w, g)| w * g).sum();
    std::array::from_fn(|i| weights[i] * (gradient[i] - sum))
}

fn unary(f: UnaryFn) -> Option<impl Fn(f64) -> f64> {
    let known = matches!(
        f,
        UnaryFn::Abs
            | UnaryFn::Affine { .. }
            | UnaryFn::Exp
            | UnaryFn::Log
            | UnaryFn::Neg
            | UnaryFn::Not
            | UnaryFn::Power(_)
            | UnaryFn::Reciprocal
            | UnaryFn::Sqrt
            | UnaryFn::Square
    );
    known.then_some(move |x: f64| match f {
        UnaryFn::Abs => x.abs(),
        UnaryFn::Affine { scale, shift } => x * scale.0 + shift.0,
        UnaryFn::Exp => x.exp(),
        UnaryFn::Log => x.ln(),
        UnaryFn::Neg => -x,
        UnaryFn::Not => f64::from(x == 0.0),
        UnaryFn::Power(exponent) => x.powf(exponent.0),
        UnaryFn::Reciprocal => x.recip(),
        UnaryFn::Sqrt => x.sqrt(),
        _ => x * x,
    })
}

fn binary(f: BinaryFn, dtype: DType) -> Option<fn(f64, f64) -> f64> {
    let logical = dtype == DType::Bool;
    Some(match f {
        BinaryFn::Add if !logical => |a, b| a + b,
        BinaryFn::Sub => |a, b| a - b,
        BinaryFn::Mul if !logical => |a, b| a * b,
        BinaryFn::Div => |a, b| a / b,
        BinaryFn::Max => f64::max,
        BinaryFn::Min => f64::min,
        BinaryFn::Pow => f64::powf,
        BinaryFn::And if logical => |a, b| a * b,
        BinaryFn::Or if logical => f64::max,
        _ => return None,
    })
}

/// The letters after a reshape that adds or drops dimensions of size one.
pub(super) fn reshaped(letters: &[Option<u8>], from: &[u64], to: &[u64]) -> Option<DimLetters> {
    let mut given = from.iter().zip(letters).peekable();
    let mut made = DimLetters::new();
    for &size in to {
        while size != 1 && given.next_if(|(known, _)| **known == 1).is_some() {}
        match given.next_if(|(known, _)| **known == size) {
            Some((_, letter)) => made.push(*letter),
            None if size == 1 => made.push(None),
            None => return None,
        }
    }
    given.all(|(size, _)| *size == 1).then_some(made)
}

/// Random rows, the same in every run.
pub(super) struct RowRandom(u64);

impl RowRandom {
    pub fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// A function of numbers between -1 and 1.
    pub fn row(&mut self, f: impl Fn(f64) -> f64) -> RowValues {
        std::array::from_fn(|_| {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            f((self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
        })
    }
}
