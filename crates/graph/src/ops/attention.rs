//! Fused attention: `softmax(scale * q·k + bias)·v` without stored scores, and the log-sum-exp of each row of scores.
//!
//! Dimensions are `[n, q, h, d]` for queries, `[n, k, h, d]` for keys and `[n, k, h, e]` for values, or `[n, h, q, d]` with
//! [`Attention::heads_first`]. Queries may have `r` times as many heads as keys. Their head dimension is then `h·r`, or two
//! dimensions `h` and `r`: a split of `h` splits keys too, one of `r` repeats them. A split of `q` needs all keys and
//! values: context parallelism with gathered keys. A split of `k` needs all queries: context parallelism with partial
//! results. Each part has the softmax of its own keys. The parts' log-sum-exps are reduced, each part scales its result by
//! its share ([`AttentionRescale`]), and the results are then an ordinary partial sum. The gradient is given the log-sum-exp,
//! so that there a split of `k` is an ordinary partial sum too.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, same_float, scratch_bytes},
    ops::{AttentionGrad, AttentionRescale, Dropout, Op},
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Reduction, Rule, TensorMap},
    types::{DType, Real, Shape, TensorType},
    workload::{AttentionPass, Gemm, RooflineKind, Workload, WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// Inputs: queries, keys, values, and optionally a bias that broadcasts to the scores. Outputs: the attended values in
/// the queries' order of dimensions, and the log-sum-exp `[n, h, q]` (or `[n, h, r, q]`; minus infinity for a query that
/// sees no key, whose result is zero). No gradient flows into the log-sum-exp.
///
/// The scores are `[n, h, q, k]` (or `[n, h, r, q, k]`). With `p = i + diagonal` for query `i`, key `j` is visible if
/// `p - before <= j <= p + after`. So `after: 0` is causal, with the first query at the first key; `diagonal = k - q`
/// puts the last query at the last key. `before: w - 1` is a sliding window of `w` keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Factor of the scores.
    pub scale: Real,
    /// Whether heads come before positions: `[n, h, q, d]`.
    pub heads_first: bool,
    /// Keys before a query's own position that it sees; `None`: all.
    #[serde(deserialize_with = "Option::deserialize")]
    pub before: Option<u64>,
    /// Keys after a query's own position that it sees; `None`: all.
    #[serde(deserialize_with = "Option::deserialize")]
    pub after: Option<u64>,
    /// Position of the first query among the keys.
    pub diagonal: i64,
    /// The queries' place in the whole op.
    pub queries: Span,
    /// The keys' place in the whole op.
    pub keys: Span,
    /// Dropout of the attention weights, over the shape of the scores.
    #[serde(deserialize_with = "Option::deserialize")]
    pub dropout: Option<Dropout>,
    /// Whether no part may have a share of the keys: for engines whose kernels return no log-sum-exp.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_keys: bool,
}

/// Queries and keys of the block of scores that the runtime's kernels hold.
pub const QUERY_BLOCK: u64 = 64;
/// See [`QUERY_BLOCK`].
pub const KEY_BLOCK: u64 = 128;

/// A range of positions inside a whole sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The first position.
    pub start: u64,
    /// Positions of the whole sequence.
    pub whole: u64,
}

impl Span {
    fn check(&self, what: &str, size: u64) -> Result<(), OpError> {
        let inside = self.start.checked_add(size).is_some_and(|end| end <= self.whole);
        require!(
            inside && self.whole < 1 << 48,
            "{size} {what} from {} on are not among {}",
            self.start,
            self.whole
        );
        Ok(())
    }
}

impl Attention {
    /// Attention of whole sequences, where every query sees every key.
    pub fn new(scale: f64, queries: u64, keys: u64) -> Self {
        Self {
            scale: Real(scale),
            heads_first: false,
            before: None,
            after: None,
            diagonal: 0,
            queries: Span { start: 0, whole: queries },
            keys: Span { start: 0, whole: keys },
            dropout: None,
            whole_keys: false,
        }
    }

    /// The same with a causal mask.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { after: Some(0), ..self }
    }

    /// The same with heads before positions.
    #[must_use]
    pub fn heads_first(self) -> Self {
        Self { heads_first: true, ..self }
    }

    /// The keys among `0..keys` that local query `i` sees.
    pub fn visible(&self, i: u64, keys: u64) -> std::ops::Range<u64> {
        let at = i128::from(self.queries.start) + i128::from(i) + i128::from(self.diagonal)
            - i128::from(self.keys.start);
        let clamp = |x: i128| x.clamp(0, i128::from(keys)) as u64;
        let start = self.before.map_or(0, |before| clamp(at - i128::from(before)));
        let end = self.after.map_or(keys, |after| clamp(at + i128::from(after) + 1));
        start..end.max(start)
    }

    /// Checks attributes and operands; returns the sizes.
    pub(super) fn sizes(&self, inputs: &[TensorType]) -> Result<AttentionSizes, OpError> {
        let [q, k, v] = &inputs[..3] else {
            return Err(OpError::new("takes queries, keys and values"));
        };
        same_float(&inputs[..3])?;
        let shaped = (4..=5).contains(&q.rank()) && k.rank() == 4 && v.rank() == 4;
        require!(shaped, "needs queries of 4 or 5 dimensions, keys and values of 4, got {q}, {k}, {v}");
        let two = q.rank() == 5;
        let [at, heads, key_at, key_head] =
            if self.heads_first { [q.rank() - 2, 1, 2, 1] } else { [1, 2, 1, 2] };
        let (h, key_count) = (k.shape[key_head], k.shape[key_at]);
        let query_heads =
            if two { q.shape[heads].checked_mul(q.shape[heads + 1]) } else { Some(q.shape[heads]) };
        let grouped = query_heads.filter(|n| n.is_multiple_of(h) && (!two || q.shape[heads] == h));
        let Some(query_heads) = grouped else {
            return Err(OpError::new(format!(
                "the heads of queries {q} are no multiple of those of keys {k}"
            )));
        };
        require!(k.shape[..3] == v.shape[..3], "keys {k} and values {v} differ before the last dimension");
        let (n, d, e) = (q.shape[0], k.shape[3], v.shape[3]);
        require!(n == k.shape[0], "queries {q} and keys {k} differ in the first dimension");
        require!(q.shape[q.rank() - 1] == d, "queries {q} and keys {k} differ in the last dimension");
        let sizes = AttentionSizes {
            n,
            q: q.shape[at],
            k: key_count,
            h,
            r: query_heads / h,
            d,
            e,
            two_head_dims: two,
        };
        let work =
            [query_heads, sizes.q, sizes.k, d.max(e)].iter().try_fold(n, |work, &s| work.checked_mul(s));
        require!(work.is_some_and(|n| n < 1 << 56), "absurdly many operations");
        self.queries.check("queries", sizes.q)?;
        self.keys.check("keys", sizes.k)?;
        require!(self.scale.0.is_finite(), "scale {} is no number", self.scale.0);
        require!(self.diagonal.unsigned_abs() < 1 << 48, "diagonal {} is absurd", self.diagonal);
        for limit in [self.before, self.after].into_iter().flatten() {
            require!(limit < 1 << 48, "a window of {limit} keys is absurd");
        }
        if let Some(dropout) = &self.dropout {
            dropout.infer(&[TensorType::new(q.dtype, sizes.scores())])?;
        }
        Ok(sizes)
    }

    /// The visible pairs of query and key of the part of a split that has the most, per head.
    ///
    /// Parts of a causal split differ; every step waits for the part with the most work. The number of visible pairs of a
    /// part depends on its offset from the diagonal, is symmetric around the offset that centres the band in the part, and
    /// falls to both sides.
    fn most_visible(&self, sizes: &AttentionSizes) -> u64 {
        let full = sizes.q.saturating_mul(sizes.k);
        if self.before.is_none() && self.after.is_none() {
            return full;
        }
        let (q, k) = (i128::from(sizes.q), i128::from(sizes.k));
        // Offsets of all parts of this size.
        let least = i128::from(self.diagonal) - (i128::from(self.keys.whole) - k);
        let most = i128::from(self.diagonal) + i128::from(self.queries.whole) - q;
        let centred = match (self.before, self.after) {
            (None, _) => most,
            (Some(_), None) => least,
            (Some(before), Some(after)) => (k - q + i128::from(before) - i128::from(after)) / 2,
        };
        let offset = centred.clamp(least, most);
        // Keys below a bound that rises by one per query, clipped to the keys: an arithmetic series between two flat ends.
        let below = |first: i128| {
            let (zero, ramp_end) = ((-first).clamp(0, q), (k - first).clamp(0, q));
            let ramp = ramp_end - zero;
            ramp * (first + zero) + ramp * (ramp - 1).max(0) / 2 + (q - ramp_end) * k
        };
        let end = self.after.map_or(q * k, |after| below(offset + i128::from(after) + 1));
        let start = self.before.map_or(0, |before| below(offset - i128::from(before)));
        (end - start).clamp(0, i128::from(full)) as u64
    }

    /// Flops of one product of every visible score with a vector of this size, for all heads.
    pub(super) fn product_flops(&self, sizes: &AttentionSizes, depth: u64) -> u64 {
        let rows = sizes.n.saturating_mul(sizes.h).saturating_mul(sizes.r);
        rows.saturating_mul(self.most_visible(sizes)).saturating_mul(depth).saturating_mul(2)
    }

    /// Batch times key heads, query heads per key head, queries, visible keys per query (rounded up), head sizes of keys
    /// and of values.
    pub(super) fn workload_sizes(&self, sizes: &AttentionSizes) -> WorkloadSizes {
        let visible = self.most_visible(sizes).div_ceil(sizes.q.max(1)).max(1);
        WorkloadSizes::from_slice(&[
            sizes.n.saturating_mul(sizes.h),
            sizes.r,
            sizes.q,
            visible,
            sizes.d,
            sizes.e,
        ])
    }

    /// The op on a part of the whole.
    pub(super) fn part(&self, region: &Region<'_>, sizes: &AttentionSizes) -> Self {
        let part = |name, size| region.part(name, size);
        let (n, q, k) = (part("n", sizes.n), part("q", sizes.q), part("k", sizes.k));
        let (h, r) = (part("h", sizes.h), part("r", sizes.r));
        let mut local = self.clone();
        local.queries.start += q.start;
        local.keys.start += k.start;
        if let Some(dropout) = &mut local.dropout {
            let heads = if sizes.two_head_dims { vec![h.start, r.start] } else { vec![h.start * sizes.r] };
            let starts = std::iter::once(n.start).chain(heads).chain([q.start, k.start]);
            dropout.origin.iter_mut().zip(starts).for_each(|(origin, start)| *origin += start);
        }
        local
    }
}

/// Sizes of an attention op.
pub(super) struct AttentionSizes {
    n: u64,
    q: u64,
    k: u64,
    /// Key heads.
    h: u64,
    /// Query heads per key head.
    r: u64,
    pub(super) d: u64,
    pub(super) e: u64,
    /// Whether queries have `h` and `r` as two dimensions.
    two_head_dims: bool,
}

impl AttentionSizes {
    /// The shape of the log-sum-exp.
    pub(super) fn rows(&self) -> Shape {
        let mut shape = self.scores();
        shape.0.pop();
        shape
    }

    /// The shape of the scores.
    fn scores(&self) -> Shape {
        match self.two_head_dims {
            true => [self.n, self.h, self.r, self.q, self.k].into(),
            false => [self.n, self.h * self.r, self.q, self.k].into(),
        }
    }

    /// The type of the log-sum-exp: never narrower than `f32`, since exponents of its differences are weights.
    pub(super) fn lse(&self, dtype: DType) -> TensorType {
        TensorType::new(if dtype == DType::F64 { DType::F64 } else { DType::F32 }, self.rows())
    }

    /// Refuses a bias that does not broadcast to the scores.
    pub(super) fn check_bias(&self, queries: &TensorType, bias: &TensorType) -> Result<(), OpError> {
        let scores = self.scores();
        require!(bias.dtype == queries.dtype, "bias {bias} and queries {queries} differ in element type");
        let fits = bias.rank() <= scores.rank()
            && bias.shape.iter().rev().zip(scores.iter().rev()).all(|(&b, &s)| b == s || b == 1);
        require!(fits, "bias {bias} does not broadcast to scores {scores}");
        Ok(())
    }

    /// The type of the result for queries of this type.
    pub(super) fn result(&self, queries: &TensorType) -> TensorType {
        let mut ty = queries.clone();
        if let Some(last) = ty.shape.0.last_mut() {
            *last = self.e;
        }
        ty
    }

    /// A rule with the factors of the op.
    pub(super) fn rule(&self, heads_first: bool, split_keys: bool) -> (Rule, Loops) {
        let mut rule = Rule::default();
        let n = rule.factor("n", self.n);
        let q = rule.factor("q", self.q);
        let h = rule.factor("h", self.h);
        let r = if self.two_head_dims { rule.factor("r", self.r) } else { rule.whole_factor("r", self.r) };
        let k = if split_keys { rule.factor("k", self.k) } else { rule.whole_factor("k", self.k) };
        let (d, e) = (rule.whole_factor("d", self.d), rule.whole_factor("e", self.e));
        (rule, Loops { n, q, h, r, k, d, e, two_head_dims: self.two_head_dims, heads_first })
    }
}

/// The factors of both ops.
pub(super) struct Loops {
    n: FactorIndex,
    q: FactorIndex,
    h: FactorIndex,
    r: FactorIndex,
    k: FactorIndex,
    d: FactorIndex,
    e: FactorIndex,
    two_head_dims: bool,
    heads_first: bool,
}

impl Loops {
    fn query_heads(&self) -> Vec<DimMap> {
        match self.two_head_dims {
            true => vec![DimMap::of(self.h), DimMap::of(self.r)],
            false => vec![DimMap::product(&[self.h, self.r])],
        }
    }

    fn tensor(&self, position: FactorIndex, heads: Vec<DimMap>, last: FactorIndex) -> TensorMap {
        let mut dims = vec![DimMap::of(self.n)];
        if self.heads_first {
            dims.extend(heads);
            dims.push(DimMap::of(position));
        } else {
            dims.push(DimMap::of(position));
            dims.extend(heads);
        }
        dims.push(DimMap::of(last));
        TensorMap::new(dims)
    }

    pub(super) fn queries(&self) -> TensorMap {
        self.tensor(self.q, self.query_heads(), self.d)
    }

    pub(super) fn result(&self) -> TensorMap {
        self.tensor(self.q, self.query_heads(), self.e)
    }

    pub(super) fn keys(&self) -> TensorMap {
        self.tensor(self.k, vec![DimMap::of(self.h)], self.d)
    }

    pub(super) fn values(&self) -> TensorMap {
        self.tensor(self.k, vec![DimMap::of(self.h)], self.e)
    }

    pub(super) fn lse(&self) -> TensorMap {
        let heads = self.query_heads().into_iter();
        TensorMap::new(std::iter::once(DimMap::of(self.n)).chain(heads).chain([DimMap::of(self.q)]))
    }

    /// A bias of this type, aligned with the scores at the last dimension. A dimension of size one that meets a larger one
    /// is opaque.
    pub(super) fn bias(&self, rule: &Rule, ty: &TensorType) -> TensorMap {
        let mut scores = self.lse().dims;
        scores.push(DimMap::of(self.k));
        let skip = scores.len() - ty.rank();
        let aligned = scores.into_iter().skip(skip).zip(ty.shape.iter());
        TensorMap::new(aligned.map(|(dim, &size)| {
            let whole: u64 = dim.factors.iter().map(|&f| rule.factors[usize::from(f)].size).product();
            if size == whole { dim } else { DimMap::opaque() }
        }))
    }
}

/// Forward pass. Sizes: those of [`Attention::workload_sizes`].
pub(super) static ATTENTION: WorkloadClass = WorkloadClass {
    name: "attention",
    fallback: None,
    roofline: |sizes| attention_roofline(AttentionPass::Forward, sizes),
    bytes: |workload, sizes| attention_bytes(workload, sizes, 1),
};

/// The matrix product with as many flops: depth `d + e` for scores and result forwards, `3d + 2e` backwards.
pub(super) fn attention_roofline(pass: AttentionPass, sizes: &[u64]) -> Option<RooflineKind> {
    let &[groups, repeat, m, n, d, e] = sizes else { return None };
    let (d_products, e_products) = match pass {
        AttentionPass::Forward => (1, 1),
        AttentionPass::Backward => (3, 2),
    };
    let k = d.saturating_mul(d_products).saturating_add(e.saturating_mul(e_products));
    // Only head sizes are contiguous.
    let align = Gemm::alignment([d, e, Gemm::ALIGNED]);
    let product = Gemm { steps: 1, batch: groups.saturating_mul(repeat), m, n, k, align };
    Some(RooflineKind::Attention { product, pass })
}

/// Queries, keys, values and results, `passes` times, and their log-sum-exp.
pub(super) fn attention_bytes(workload: &Workload, sizes: &[u64], passes: u64) -> u64 {
    let &[groups, repeat, q, k, d, e] = sizes else { return workload.bytes };
    let vectors = repeat.saturating_mul(q).saturating_add(k).saturating_mul(d.saturating_add(e));
    let moved = vectors.saturating_mul(workload.dtype.bytes()).saturating_mul(passes);
    groups.saturating_mul(moved.saturating_add(repeat.saturating_mul(q).saturating_mul(4)))
}

impl Operator for Attention {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!((3..=4).contains(&inputs.len()), "takes 3 or 4 inputs, got {}", inputs.len());
        let sizes = self.sizes(inputs)?;
        if let Some(bias) = inputs.get(3) {
            sizes.check_bias(&inputs[0], bias)?;
        }
        Ok(vec![sizes.result(&inputs[0]), sizes.lse(inputs[0].dtype)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = accepted(self.sizes(inputs)) else { return Rule::replicated(inputs, outputs) };
        let (mut rule, loops) = sizes.rule(self.heads_first, !self.whole_keys);
        rule.inputs.extend([loops.queries(), loops.keys(), loops.values()]);
        let bias = inputs.get(3).map(|ty| loops.bias(&rule, ty));
        rule.inputs.extend(bias);
        rule.outputs.extend([loops.result(), loops.lse().reduced_by(Reduction::LogSumExp)]);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        require!(cx.grad(1).is_none(), "no gradient flows into the log-sum-exp of attention");
        let count = cx.inputs().len();
        let biased = count == 4;
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; count]) };
        let op = AttentionGrad { forward: self.clone(), bias_grad: biased && cx.wants(3) };
        let mut inputs = vec![cx.input(0), cx.input(1), cx.input(2), cx.output(0), cx.output(1), dy];
        if biased {
            inputs.push(cx.input(3));
        }
        let mut grads: Vec<Option<TensorId>> = cx.add(op, &inputs)?.into_iter().map(Some).collect();
        grads.resize(count, None);
        Ok(grads)
    }

    /// Scores and result: two products per visible score. A causal mask halves them.
    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        accepted(self.sizes(inputs)).map_or(0, |s| self.product_flops(&s, s.d.saturating_add(s.e)))
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(self.sizes(inputs)).map(|sizes| (&ATTENTION, self.workload_sizes(&sizes)))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&ATTENTION]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // A block of scores, and per query of the block: the sums of the result, the maximum and the total.
        let Some(sizes) = accepted(self.sizes(inputs)) else { return 0 };
        let elements = sizes.e.saturating_add(KEY_BLOCK + 2).saturating_mul(QUERY_BLOCK) + KEY_BLOCK;
        elements.saturating_mul(scratch_bytes(&inputs[0]))
    }

    fn is_random(&self) -> bool {
        self.dropout.is_some()
    }

    fn completion(&self) -> Option<Op> {
        Some(AttentionRescale { heads_first: self.heads_first }.into())
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        accepted(self.sizes(region.inputs)).map_or(self.clone(), |sizes| self.part(region, &sizes)).into()
    }
}

pub(super) mod examples {
    use super::*;
    use crate::examples::{Case, CaseInput, Examples, Golden, NORMAL, Rng, f64s};

    /// Queries, keys, values and perhaps a bias, with every variant of heads, masks and parts.
    pub(in crate::ops) fn random(rng: &mut Rng) -> (Attention, Vec<CaseInput>) {
        let [n, q, k, h, d, e] = [(); 6].map(|()| rng.size());
        let (r, two) = rng.pick(&[(1, false), (1, true), (2, false), (2, true), (3, true)]);
        let mut op = Attention::new(rng.pick(&[1.0, 0.5]), q, k);
        op.heads_first = rng.flip();
        op.after = rng.pick(&[None, Some(0), Some(0), Some(2)]);
        op.before = rng.pick(&[None, None, Some(1), Some(3)]);
        op.diagonal = rng.pick(&[0, 0, k as i64 - q as i64, 2, -1]);
        if rng.flip() {
            // Already a part of something larger.
            for span in [&mut op.queries, &mut op.keys] {
                span.start = rng.between(0, 2);
                span.whole += span.start + rng.between(0, 2);
            }
        }
        let heads = if two { vec![h, r] } else { vec![h * r] };
        let scores: Vec<u64> = [&[n], &heads[..], &[q, k]].concat();
        if rng.flip() {
            op.dropout = Some(Dropout::new(0.3, rng.next(), &Shape::new(&scores)));
        }
        let shaped = |at: u64, heads: &[u64], last: u64| match op.heads_first {
            true => [&[n], heads, &[at, last]].concat(),
            false => [&[n, at], heads, &[last]].concat(),
        };
        let mut inputs = vec![f64s(shaped(q, &heads, d)), f64s(shaped(k, &[h], d)), f64s(shaped(k, &[h], e))];
        if rng.flip() {
            inputs.push((TensorType::new(DType::F64, rng.broadcastable(&scores)), NORMAL));
        }
        (op, inputs)
    }

    impl Examples for Attention {
        const AUXILIARY_OUTPUTS: &[usize] = &[1];

        fn golden() -> Golden {
            Golden::new(
                Attention::new(0.25, 6, 8).causal(),
                &["bf16[2,6,12,16]", "bf16[2,8,4,16]", "bf16[2,8,4,24]", "bf16[6,8]"],
                "([n, q, hr, d], [n, k, h, d], [n, k, h, e], [q, k])->([n, q, hr, e], [n, hr, q]logsumexp) {n=2, q=6, h=4, r=3, k=8, d=16, e=24} reduction={k} whole={r, d, e}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (op, inputs) = random(rng);
            Case::new(op, inputs)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::Rng;

    fn types(op: &Attention, shapes: [&[u64]; 3]) -> Result<Vec<TensorType>, OpError> {
        op.infer(&shapes.map(|shape| TensorType::new(DType::Bf16, shape)))
    }

    #[test]
    fn results_have_the_queries_heads_and_the_values_size() {
        let op = Attention::new(1.0, 6, 8);
        let found = types(&op, [&[2, 6, 12, 16], &[2, 8, 4, 16], &[2, 8, 4, 24]]).unwrap();
        assert_eq!(format!("{found:?}"), "[bf16[2,6,12,24], f32[2,12,6]]");
        let found = types(&op, [&[2, 6, 4, 3, 16], &[2, 8, 4, 16], &[2, 8, 4, 24]]).unwrap();
        assert_eq!(format!("{found:?}"), "[bf16[2,6,4,3,24], f32[2,4,3,6]]");
        let found = types(&op.heads_first(), [&[2, 12, 6, 16], &[2, 4, 8, 16], &[2, 4, 8, 24]]).unwrap();
        assert_eq!(format!("{found:?}"), "[bf16[2,12,6,24], f32[2,12,6]]");
    }

    #[test]
    fn absurd_attributes_and_operands_are_refused() {
        let fit: [&[u64]; 3] = [&[2, 6, 12, 16], &[2, 8, 4, 16], &[2, 8, 4, 24]];
        let op = Attention::new(1.0, 6, 8);
        assert!(types(&op, fit).is_ok());
        for shapes in [
            [&[2, 6, 10, 16][..], fit[1], fit[2]],
            [&[3, 6, 12, 16], fit[1], fit[2]],
            [&[2, 6, 12, 15], fit[1], fit[2]],
            [&[2, 6, 3, 4, 16], fit[1], fit[2]],
            [&[6, 12, 16], fit[1], fit[2]],
            [fit[0], fit[1], &[2, 7, 4, 24]],
            [&[2, 7, 12, 16], fit[1], fit[2]],
            [&[1 << 20, 6, 1 << 20, 1 << 20], &[1 << 20, 8, 1, 1 << 20], &[1 << 20, 8, 1, 1 << 20]],
        ] {
            assert!(types(&op, shapes).is_err(), "{shapes:?}");
        }
        let absurd = [
            Attention { scale: Real(f64::NAN), ..op.clone() },
            Attention { diagonal: i64::MIN, ..op.clone() },
            Attention { before: Some(u64::MAX), ..op.clone() },
            Attention { queries: Span { start: u64::MAX, whole: u64::MAX }, ..op.clone() },
            Attention { keys: Span { start: 1, whole: 8 }, ..op.clone() },
            Attention { dropout: Some(Dropout::new(0.5, 1, &[2, 12, 6, 7].into())), ..op.clone() },
        ];
        for op in absurd {
            assert!(types(&op, fit).is_err(), "{op:?}");
        }
    }

    #[test]
    fn the_busiest_part_of_every_split_counts() {
        let mut rng = Rng::new(5);
        for _ in 0..2000 {
            let (parts_q, parts_k) = (rng.between(1, 4), rng.between(1, 4));
            let (q, k) = (rng.between(1, 6), rng.between(1, 6));
            let mut op = Attention::new(1.0, q * parts_q, k * parts_k);
            op.before = rng.pick(&[None, Some(0), Some(2), Some(9)]);
            op.after = rng.pick(&[None, Some(0), Some(0), Some(3)]);
            op.diagonal = rng.pick(&[0, -3, 4, (k * parts_k) as i64 - (q * parts_q) as i64]);
            let sizes = AttentionSizes { n: 1, q, k, h: 1, r: 1, d: 1, e: 1, two_head_dims: false };
            let count = |at_q: u64, at_k: u64| {
                let mut part = op.clone();
                (part.queries.start, part.keys.start) = (at_q * q, at_k * k);
                (0..q).map(|i| part.visible(i, k)).map(|r| r.end - r.start).sum::<u64>()
            };
            let most =
                (0..parts_q).flat_map(|a| (0..parts_k).map(move |b| (a, b))).map(|(a, b)| count(a, b)).max();
            let bound = op.most_visible(&sizes);
            assert!(bound >= most.unwrap(), "{op:?}: {bound} for {most:?}");
            let one_sided = op.before.is_none() || op.after.is_none();
            if (parts_q, parts_k) == (1, 1) || one_sided {
                assert_eq!(Some(bound), most, "{op:?} {q}x{k}");
            }
        }
    }

    #[test]
    fn causal_masks_halve_the_flops_and_windows_reduce_them() {
        let inputs = [(); 3].map(|()| TensorType::new(DType::Bf16, [1, 4096, 8, 128]));
        let flops = |op: &Attention| op.flops(&inputs, &[]) as f64;
        let full = Attention::new(1.0, 4096, 4096);
        assert_eq!(flops(&full), 4.0 * 8.0 * 4096.0 * 4096.0 * 128.0);
        let causal = full.clone().causal();
        assert!((flops(&causal) / flops(&full) - 0.5).abs() < 1e-3);
        let window = Attention { before: Some(255), ..causal };
        assert!((flops(&window) / flops(&full) - 256.0 / 4096.0).abs() < 3e-3);
    }
}
