//! Kernels of fused attention and its gradient: online softmax over blocks of queries and keys (Dao et al., "FlashAttention",
//! arXiv 2205.14135, algorithms 1 and 4). Beside operands and results they hold one block of scores, or two backwards, never
//! a head's scores.

use super::{
    Context, Kernel, Result,
    dropout::mask,
    gemm::{Matrix, gemm},
    read,
    vector::{dot, exp_less, largest, sum},
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Attention, AttentionGrad, AttentionRescale, Dropout, KEY_BLOCK, QUERY_BLOCK};
use shardwright_simd::vectorised_fn;
use std::ops::Range;

/// Queries and keys of a block of scores.
const QUERIES: usize = QUERY_BLOCK as usize;
const KEYS: usize = KEY_BLOCK as usize;

/// Sizes of one call.
struct Sizes {
    n: usize,
    q: usize,
    k: usize,
    /// Key heads.
    h: usize,
    /// Query heads per key head.
    r: usize,
    d: usize,
    e: usize,
    heads_first: bool,
}

impl Sizes {
    fn new(op: &Attention, inputs: &[View<'_>]) -> Self {
        let size = |i: usize, d: usize| inputs[i].shape[d] as usize;
        let rank = inputs[0].shape.len();
        let (head, at) = if op.heads_first { (1, rank - 2) } else { (2, 1) };
        let (key_head, key_at) = if op.heads_first { (1, 2) } else { (2, 1) };
        let heads: usize = (head..head + rank - 3).map(|d| size(0, d)).product();
        let h = size(1, key_head);
        Self {
            n: size(0, 0),
            q: size(0, at),
            k: size(1, key_at),
            h,
            r: heads / h,
            d: size(1, 3),
            e: size(2, 3),
            heads_first: op.heads_first,
        }
    }

    /// One head's matrix of a tensor: a row per position, from position `at` on.
    fn matrix(&self, [positions, heads, width]: [usize; 3], n: usize, head: usize, at: usize) -> Matrix {
        let (by_position, by_head) =
            if self.heads_first { (width, positions * width) } else { (heads * width, width) };
        let offset = n * positions * heads * width + head * by_head + at * by_position;
        Matrix { offset, row: by_position, column: 1 }
    }

    /// Queries, or their gradient.
    fn query(&self, n: usize, head: usize, at: usize) -> Matrix {
        self.matrix([self.q, self.h * self.r, self.d], n, head, at)
    }

    /// The result, or its gradient.
    fn result(&self, n: usize, head: usize, at: usize) -> Matrix {
        self.matrix([self.q, self.h * self.r, self.e], n, head, at)
    }

    /// Keys of a query head, or their gradient.
    fn key(&self, n: usize, head: usize, at: usize) -> Matrix {
        self.matrix([self.k, self.h, self.d], n, head / self.r, at)
    }

    /// Values of a query head, or their gradient.
    fn value(&self, n: usize, head: usize, at: usize) -> Matrix {
        self.matrix([self.k, self.h, self.e], n, head / self.r, at)
    }

    /// The first element of a head's row of log-sum-exps.
    fn row(&self, n: usize, head: usize) -> usize {
        (n * self.h * self.r + head) * self.q
    }
}

/// The place of a block of scores.
#[derive(Clone, Copy)]
struct Place {
    n: usize,
    head: usize,
    query: usize,
    key: usize,
}

/// A tensor that broadcasts to the scores: its strides by batch, head, query and key.
struct BiasStrides {
    strides: [usize; 4],
    /// Query heads per key head, and the stride of heads inside a group, where heads are two dimensions.
    group: Option<(usize, usize)>,
}

impl BiasStrides {
    fn new(shape: &[u64], sizes: &Sizes, score_rank: usize) -> Self {
        let mut strides = [0; 5];
        let mut stride = 1;
        for (back, &size) in shape.iter().rev().enumerate() {
            strides[4 - back] = if size == 1 { 0 } else { stride };
            stride *= size as usize;
        }
        let [a, b, c, q, k] = strides;
        if score_rank == 5 {
            Self { strides: [a, b, q, k], group: Some((sizes.r, c)) }
        } else {
            Self { strides: [b, c, q, k], group: None }
        }
    }

    /// The element of a block's first score in its `row`, and the distance to the next key's.
    fn at(&self, place: Place, row: usize) -> (usize, usize) {
        let [n, h, q, k] = self.strides;
        let head = match self.group {
            Some((r, inner)) => place.head / r * h + place.head % r * inner,
            None => place.head * h,
        };
        (place.n * n + head + (place.query + row) * q + place.key * k, k)
    }
}

/// The scores of one call: where they come from, and where they are visible.
struct Scores<'a, T> {
    op: &'a Attention,
    sizes: Sizes,
    query: &'a [T],
    key: &'a [T],
    bias: Option<(&'a [T], BiasStrides)>,
}

impl<'a, T: Float> Scores<'a, T> {
    fn new(op: &'a Attention, inputs: &[View<'a>], bias: Option<&View<'a>>) -> Result<Self> {
        let sizes = Sizes::new(op, inputs);
        let score_rank = inputs[0].shape.len();
        let bias = bias.map(|view| Ok((read::<T>(view)?, BiasStrides::new(view.shape, &sizes, score_rank))));
        Ok(Self { op, query: read(&inputs[0])?, key: read(&inputs[1])?, bias: bias.transpose()?, sizes })
    }

    /// The keys that local query `i` sees.
    fn visible(&self, i: usize) -> Range<usize> {
        let range = self.op.visible(i as u64, self.sizes.k as u64);
        range.start as usize..range.end as usize
    }

    /// The keys that any of these queries sees. Both ends rise with the query.
    fn visible_to(&self, queries: &Range<usize>) -> Range<usize> {
        self.visible(queries.start).start..self.visible(queries.end - 1).end
    }

    /// Computes a block of scores into `s`, row after row; minus infinity where a key is not visible.
    fn compute(&self, place: Place, [rows, columns]: [usize; 2], s: &mut [T]) {
        let sizes = &self.sizes;
        let query = (self.query, sizes.query(place.n, place.head, place.query));
        let key = (self.key, sizes.key(place.n, place.head, place.key).transposed());
        gemm([rows, columns, sizes.d], query, key, (s, Matrix::rows(0, columns)), false);
        let scale = T::from_f64(self.op.scale.0);
        for (row, s) in s.chunks_exact_mut(columns).enumerate() {
            let visible = self.visible(place.query + row);
            let clip = |at: usize| at.clamp(place.key, place.key + columns) - place.key;
            let (start, end) = (clip(visible.start), clip(visible.end));
            scale_row(&mut s[start..end], scale);
            if let Some((bias, strides)) = &self.bias {
                let (first, stride) = strides.at(place, row);
                for (column, s) in s[start..end].iter_mut().enumerate() {
                    *s += bias[first + (start + column) * stride];
                }
            }
            s[..start].fill(T::NEG_INFINITY);
            s[end..].fill(T::NEG_INFINITY);
        }
    }

    /// Multiplies a block of weights by the factors of dropout: zero, or one over the share that is kept.
    fn drop(&self, place: Place, columns: usize, step: u64, weights: &mut [T], factors: &mut [T]) {
        let Some(dropout) = &self.op.dropout else { return };
        for (row, weights) in weights.chunks_exact_mut(columns).enumerate() {
            let at = position(dropout, &self.sizes, Place { query: place.query + row, ..place });
            let factors = &mut factors[..columns];
            factors.copy_from_slice(weights);
            mask(dropout, step, at, factors, weights);
        }
    }
}

/// The position of a score in the whole tensor of scores.
fn position(dropout: &Dropout, sizes: &Sizes, place: Place) -> u64 {
    let local = [place.n, place.head / sizes.r, place.head % sizes.r, place.query, place.key];
    let four = [place.n, place.head, place.query, place.key];
    let local = if dropout.whole.rank() == 5 { &local[..] } else { &four[..] };
    let dims = local.iter().zip(&dropout.origin).zip(dropout.whole.iter());
    dims.fold(0, |at, ((&local, &origin), &whole)| at * whole + origin + local as u64)
}

vectorised_fn! {
    fn scale_row[T: Float][T](s: &mut [T], scale: T) {
        s.iter_mut().for_each(|s| *s *= scale);
    }
}

vectorised_fn! {
    /// One row of a block of scores becomes weights relative to the largest score so far. Maximum, sum of weights and
    /// weighted values follow it.
    fn add_row[T: Float][T](s: &mut [T], max: &mut T, total: &mut T, result: &mut [T]) {
        let new = largest(s);
        let new = if new > *max { new } else { *max };
        if new == T::NEG_INFINITY {
            s.fill(T::ZERO);
            return;
        }
        let rescale = (*max - new).exp();
        for s in s.iter_mut() {
            *s = (*s - new).exp();
        }
        *total = *total * rescale + sum(s);
        *max = new;
        result.iter_mut().for_each(|x| *x *= rescale);
    }
}

vectorised_fn! {
    fn weights_row[T: Float][T](s: &[T], lse: T, weights: &mut [T]) {
        if lse == T::NEG_INFINITY {
            weights.fill(T::ZERO);
        } else {
            exp_less(s, lse, weights);
        }
    }
}

vectorised_fn! {
    /// Gradients of a row of scores, from their weights and the gradients of the weights.
    fn score_gradients_row[T: Float][T](weights: &[T], delta: T, gradients: &mut [T]) {
        for (g, &w) in gradients.iter_mut().zip(weights) {
            *g = w * (*g - delta);
        }
    }
}

vectorised_fn! {
    fn dot_row[T: Float][T](x: &[T], y: &[T], result: &mut T) {
        *result = dot(x, y);
    }
}

/// Ranges of at most `step` positions that make up a range.
fn blocks(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(step).map(move |start| start..end.min(start + step))
}

impl Kernel for Attention {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let scores = Scores::<T>::new(self, inputs, inputs.get(3))?;
        let (sizes, value) = (&scores.sizes, read::<T>(&inputs[2])?);
        let [result, lse] = outputs else { return Ok(()) };
        let (result, lse) = (write::<T>(result)?, write::<T>(lse)?);
        let draw = context.draw();
        let scratch = context.scratch.take::<T>(QUERIES * (KEYS + sizes.e + 2) + KEYS);
        let (block, rest) = scratch.split_at_mut(QUERIES * KEYS);
        let (sums, rest) = rest.split_at_mut(QUERIES * sizes.e);
        let (maxima, rest) = rest.split_at_mut(QUERIES);
        let (totals, factors) = rest.split_at_mut(QUERIES);
        for (n, head) in (0..sizes.n).flat_map(|n| (0..sizes.h * sizes.r).map(move |head| (n, head))) {
            for queries in blocks(0..sizes.q, QUERIES) {
                let rows = queries.len();
                let sums = &mut sums[..rows * sizes.e];
                sums.fill(T::ZERO);
                maxima.fill(T::NEG_INFINITY);
                totals.fill(T::ZERO);
                for keys in blocks(scores.visible_to(&queries), KEYS) {
                    let columns = keys.len();
                    let place = Place { n, head, query: queries.start, key: keys.start };
                    let block = &mut block[..rows * columns];
                    scores.compute(place, [rows, columns], block);
                    for (row, s) in block.chunks_exact_mut(columns).enumerate() {
                        let sums = &mut sums[row * sizes.e..][..sizes.e];
                        add_row(s, &mut maxima[row], &mut totals[row], sums);
                    }
                    scores.drop(place, columns, draw, block, factors);
                    let value = (value, sizes.value(n, head, keys.start));
                    let weights = (&*block, Matrix::rows(0, columns));
                    gemm([rows, sizes.e, columns], weights, value, (sums, Matrix::rows(0, sizes.e)), true);
                }
                let place = sizes.result(n, head, queries.start);
                let logs = &mut lse[sizes.row(n, head) + queries.start..][..rows];
                for (row, log) in logs.iter_mut().enumerate() {
                    let (max, total) = (maxima[row], totals[row]);
                    // A query that sees no key gets zero.
                    let share = if total == T::ZERO { T::ZERO } else { T::ONE / total };
                    *log = if total == T::ZERO { T::NEG_INFINITY } else { max + total.ln() };
                    let result = &mut result[place.offset + row * place.row..][..sizes.e];
                    let sums = &sums[row * sizes.e..][..sizes.e];
                    result.iter_mut().zip(sums).for_each(|(y, &sum)| *y = sum * share);
                }
            }
        }
        Ok(())
    }
}

impl Kernel for AttentionGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let scores = Scores::<T>::new(&self.forward, inputs, inputs.get(6))?;
        let sizes = &scores.sizes;
        let [value, result, lse, dy] = [2, 3, 4, 5].map(|i| read::<T>(&inputs[i]));
        let (value, result, lse, dy) = (value?, result?, lse?, dy?);
        let (gradients, bias) = outputs.split_at_mut(3);
        let [dq, dk, dv] = gradients else { return Ok(()) };
        let (dq, dk, dv) = (write::<T>(dq)?, write::<T>(dk)?, write::<T>(dv)?);
        let mut dbias = bias.first_mut().map(write::<T>).transpose()?;
        for gradient in [&mut *dq, &mut *dk, &mut *dv].into_iter().chain(dbias.as_deref_mut()) {
            gradient.fill(T::ZERO);
        }
        let draw = context.draw();
        let scratch = context.scratch.take::<T>(2 * QUERIES * KEYS + QUERIES + KEYS);
        let (weights, rest) = scratch.split_at_mut(QUERIES * KEYS);
        let (block, rest) = rest.split_at_mut(QUERIES * KEYS);
        let (deltas, factors) = rest.split_at_mut(QUERIES);
        let scale = T::from_f64(self.forward.scale.0);
        for (n, head) in (0..sizes.n).flat_map(|n| (0..sizes.h * sizes.r).map(move |head| (n, head))) {
            for queries in blocks(0..sizes.q, QUERIES) {
                let rows = queries.len();
                let (place, lse) = (sizes.result(n, head, queries.start), &lse[sizes.row(n, head)..]);
                for (row, delta) in deltas[..rows].iter_mut().enumerate() {
                    let at = place.offset + row * place.row;
                    dot_row(&result[at..][..sizes.e], &dy[at..][..sizes.e], delta);
                }
                let (dy, query) = ((dy, place), sizes.query(n, head, queries.start));
                for keys in blocks(scores.visible_to(&queries), KEYS) {
                    let columns = keys.len();
                    let shape = [rows, columns];
                    let place = Place { n, head, query: queries.start, key: keys.start };
                    let (weights, block) = (&mut weights[..rows * columns], &mut block[..rows * columns]);
                    let at = Matrix::rows(0, columns);
                    let [key, value_at] = [sizes.key(n, head, keys.start), sizes.value(n, head, keys.start)];
                    scores.compute(place, shape, block);
                    for (row, s) in block.chunks_exact(columns).enumerate() {
                        weights_row(s, lse[queries.start + row], &mut weights[row * columns..][..columns]);
                    }
                    // Values: the weights after dropout.
                    block.copy_from_slice(weights);
                    scores.drop(place, columns, draw, block, factors);
                    gemm([columns, sizes.e, rows], (block, at.transposed()), dy, (dv, value_at), true);
                    // Weights, then scores.
                    let values = (value, value_at.transposed());
                    gemm([rows, columns, sizes.e], dy, values, (block, at), false);
                    scores.drop(place, columns, draw, block, factors);
                    let of_rows = block.chunks_exact_mut(columns).zip(weights.chunks_exact(columns));
                    for (row, (gradients, weights)) in of_rows.enumerate() {
                        score_gradients_row(weights, deltas[row], gradients);
                        if let (Some(dbias), Some((_, strides))) = (dbias.as_deref_mut(), &scores.bias) {
                            let (first, stride) = strides.at(place, row);
                            let each = gradients.iter().enumerate();
                            each.for_each(|(column, &g)| dbias[first + column * stride] += g);
                        }
                        scale_row(gradients, scale);
                    }
                    let block = &*block;
                    gemm([rows, sizes.d, columns], (block, at), (scores.key, key), (dq, query), true);
                    let queries = (scores.query, query);
                    gemm([columns, sizes.d, rows], (block, at.transposed()), queries, (dk, key), true);
                }
            }
        }
        Ok(())
    }
}

/// The logarithm of the sum of two exponentials; minus infinity is the logarithm of nothing.
pub fn log_add_exp<T: Float>(a: T, b: T) -> T {
    let most = a.max(b);
    if most == T::NEG_INFINITY { most } else { most + ((a - most).exp() + (b - most).exp()).ln() }
}

impl Kernel for AttentionRescale {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (x, part, all) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, read::<T>(&inputs[2])?);
        let shape = inputs[0].shape;
        let size = |d: usize| shape[d] as usize;
        let (rank, width) = (shape.len(), size(shape.len() - 1));
        let (positions, first_head) = if self.heads_first { (size(rank - 2), 1) } else { (size(1), 2) };
        let heads: usize = (first_head..first_head + rank - 3).map(size).product();
        let y = write::<T>(&mut outputs[0])?;
        for (row, (y, x)) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
            // Rows of the log-sum-exp are in the order of heads first.
            let at = match self.heads_first {
                true => row,
                false => {
                    let (n, position, head) =
                        (row / (positions * heads), row / heads % positions, row % heads);
                    (n * heads + head) * positions + position
                }
            };
            let share = if part[at] == T::NEG_INFINITY { T::ZERO } else { (part[at] - all[at]).exp() };
            y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * share);
        }
        Ok(())
    }
}
