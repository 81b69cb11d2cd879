//! Mixture of experts: tokens go to their experts' slots by index, and come back weighted by the gate.
//!
//! An expert has a fixed number of slots per sequence, and only the tokens of one sequence compete for them, as in GShard
//! (arXiv 2006.16668). So a split of the batch never changes which tokens are dropped, and stays exact. Slots are assigned in
//! order of position. A token without a slot passes through on the residual alone. There is no balancing loss.

use super::{LayerResult, add, dense, mul, reshape, scale, unary};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, Init, Real, Role, TensorId, TensorType,
    ops::{
        Binary, BinaryFn, Cast, Combine, Dispatch, Reduce, Route, SlotGrid, Slots, Softmax, TakeAlong,
        UnaryFn,
    },
};
use smallvec::smallvec;

/// The sizes and the router of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// Number of experts.
    pub experts: u64,
    /// Number of experts per token.
    pub top_k: u64,
    /// Width inside an expert.
    pub inner: u64,
    /// Activation of the gated feed-forward block that an expert is.
    pub activation: UnaryFn,
    /// Slots of an expert, relative to an even split of the tokens. No token is dropped from `experts / top_k` on.
    pub capacity_factor: f64,
    /// How experts are chosen and weighted.
    pub router: Router,
}

/// How tokens choose experts, and how their results are weighted.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// The scores that experts are chosen and weighted by.
    pub scoring: Scoring,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// Groups of neighbouring experts, if a token's experts must be in a few of them.
    pub groups: Option<ExpertGroups>,
    /// Whether a constant per expert is added to the scores for the choice alone. Trainers move it against imbalance.
    pub correction: bool,
    /// Factor of all weights.
    pub scale: f64,
}

/// The scores of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over the logits of the chosen experts (Mixtral, arXiv 2401.04088).
    SoftmaxOfChosen,
    /// Softmax over the logits of all experts (Switch, Qwen, DeepSeek-V2).
    Softmax,
    /// Sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437).
    Sigmoid,
}

/// Groups of experts that a token is limited to.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: u64,
    /// Groups that a token's experts may be in.
    pub top: u64,
    /// Largest scores of a group that are added up to rank it.
    pub scores: u64,
}

impl Router {
    /// A router with these scores and nothing else.
    pub fn new(scoring: Scoring) -> Self {
        Self { scoring, normalised: false, groups: None, correction: false, scale: 1.0 }
    }
}

impl Moe {
    /// Slots of each expert per sequence of `tokens`.
    pub fn capacity(&self, tokens: u64) -> u64 {
        let even = self.top_k as f64 * tokens as f64 / self.experts.max(1) as f64;
        // Float to integer casts saturate. More slots than tokens are never used.
        ((even * self.capacity_factor).ceil() as u64).clamp(1, tokens.max(1))
    }
}

/// Routes each token of `x` (`[n, s, c]`) to its `top_k` experts (gated feed-forward blocks) and sums their results,
/// weighted by the gate.
pub fn moe(b: &mut GraphBuilder, x: TensorId, cfg: &Moe) -> LayerResult {
    let &[_, tokens, channels] = b.shape(x) else {
        return Err(BuildError::Model(format!("experts need tokens [n, s, c], got {}", b.ty(x))));
    };
    if cfg.top_k == 0 || cfg.top_k > cfg.experts {
        return Err(BuildError::Model(format!("top_k={} of {} experts", cfg.top_k, cfg.experts)));
    }
    let (experts, capacity) = (cfg.experts, cfg.capacity(tokens));
    let (chosen, weight) = route(b, x, cfg)?;
    let grid = SlotGrid::new(experts, capacity);
    let slots = b.emit("slots", Slots { experts, capacity }, &[chosen])?;
    let work = b.emit("dispatch", Dispatch::new(grid), &[x, slots])?;
    let gate = dense(b, "experts.gate", "nepc,eco->nepo", work, &[cfg.inner], false)?;
    let name = if cfg.activation == UnaryFn::Silu { "experts.silu" } else { "experts.activation" };
    let gate = unary(b, name, cfg.activation, gate)?;
    let up = dense(b, "experts.up", "nepc,eco->nepo", work, &[cfg.inner], false)?;
    let gated = mul(b, "experts.gated", gate, up)?;
    let done = dense(b, "experts.down", "nepc,eco->nepo", gated, &[channels], false)?;
    b.emit("combine", Combine { grid }, &[done, slots, weight])
}

/// The experts that each token chose and their weights, `[n, s, k]` each.
fn route(b: &mut GraphBuilder, x: TensorId, cfg: &Moe) -> Result<(TensorId, TensorId), BuildError> {
    let (dtype, router, experts) = (b.ty(x).dtype, cfg.router, cfg.experts);
    let mut scores = dense(b, "gate", "nsc,ce->nse", x, &[experts], false)?;
    if dtype != DType::F32 && dtype != DType::F64 {
        // Sixteen-bit floats tie too often.
        scores = b.emit("gate.widen", Cast { dtype: DType::F32 }, &[scores])?;
    }
    scores = match router.scoring {
        Scoring::SoftmaxOfChosen => scores,
        Scoring::Softmax => b.emit("gate.softmax", Softmax { axis: 2 }, &[scores])?,
        Scoring::Sigmoid => unary(b, "gate.sigmoid", UnaryFn::Sigmoid, scores)?,
    };
    let mut ranked = scores;
    if router.correction {
        let ty = TensorType::new(b.ty(scores).dtype, [experts]);
        let shift = b.source("gate.correction", ty, Role::Constant, Init::Constant(Real(0.0)))?;
        ranked = add(b, "gate.corrected", scores, shift)?;
    }
    let top = Route::top(cfg.top_k);
    let by_group = |ExpertGroups { count, top: top_groups, scores: group_scores }| Route {
        groups: count,
        top_groups,
        group_scores,
        ..top
    };
    let choice = router.groups.map_or_else(|| top.clone(), by_group);
    let chosen = b.emit("route", choice, &[ranked])?;
    let mut weight =
        b.emit("gate.chosen", TakeAlong { axis: 2, base: 0, extent: experts }, &[scores, chosen])?;
    if router.scoring == Scoring::SoftmaxOfChosen {
        weight = b.emit("gate.softmax", Softmax { axis: 2 }, &[weight])?;
    }
    if router.normalised {
        weight = normalised(b, weight)?;
    }
    if router.scale != 1.0 {
        weight = scale(b, "gate.scaled", weight, router.scale)?;
    }
    if b.ty(weight).dtype != dtype {
        weight = b.emit("gate.narrow", Cast { dtype }, &[weight])?;
    }
    Ok((chosen, weight))
}

/// Divides the weights of the chosen experts by their sum.
fn normalised(b: &mut GraphBuilder, weight: TensorId) -> LayerResult {
    let &[samples, tokens, _] = b.shape(weight) else {
        return Err(BuildError::Model("gate weights without experts".into()));
    };
    let sum = b.emit("gate.sum", Reduce::sum(smallvec![2]), &[weight])?;
    let sum = reshape(b, "gate.total", sum, &[samples, tokens, 1])?;
    b.emit("gate.normalised", Binary { f: BinaryFn::Div }, &[weight, sum])
}
