//! Policies of recomputation: which forward ops trainers recompute, block by block ([`crate::repeated_blocks`]).
//!
//! - `off`: every result that the backward pass reads is kept.
//! - `elementwise`: what computes every element from elements at the same place: activations, norms, casts, additions, dropout. The
//!   results of all products, of attention, of statistics and of exchanges between samples are kept (`dots_saveable` of JAX,
//!   `minimal_with_context` of MaxText, `--recompute-modules layernorm moe_act` of Megatron).
//! - `full`: of every block only its input is kept; all ops inside a block are recomputed when its backward pass begins
//!   (Megatron's `--recompute-granularity full`, torchtitan's `full`).
//! - `selective`: what is large and cheap to compute again. A block whose attention is a product, a softmax and a product keeps
//!   everything except the attention core, from the scores to the weights (Korthikanti et al. 2022, Megatron's
//!   `selective`). Other blocks keep the results of products and recompute everything else: element-wise ops,
//!   norms, activations, softmax, casts. Of the products with weights in a block with fused attention, every second one
//!   is recomputed too (torchtitan's `selective_ac_option = "op"`); the result of fused attention is kept.
//!
//! An op whose result is read outside of its block is kept under every policy.

use crate::{
    graph::Graph,
    ids::OpId,
    repeated_blocks::{ForwardPass, blocks, inner_ops},
    workload::RooflineKind,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Which forward ops are recomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputePolicy {
    /// None.
    #[default]
    Off,
    /// What computes element by element.
    Elementwise,
    /// The attention core, or everything that is cheap to compute.
    Selective,
    /// Everything inside of blocks.
    Full,
}

impl RecomputePolicy {
    /// All policies, from the one that keeps everything to the one that keeps least.
    pub const ALL: [Self; 4] = [Self::Off, Self::Elementwise, Self::Selective, Self::Full];

    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Elementwise => "elementwise",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }

    /// Whether this policy recomputes no op that another one keeps, in any model.
    pub fn keeps_no_less_than(self, other: Self) -> bool {
        self == other || self == Self::Off || other == Self::Full
    }

    /// The forward ops that this policy recomputes, ascending. Those that no backward op needs are among them.
    pub fn ops(self, graph: &Graph) -> Vec<OpId> {
        if self == Self::Off {
            return Vec::new();
        }
        let pass = ForwardPass::of(graph);
        let mut ops = Vec::new();
        for block in blocks(&pass) {
            let inner = inner_ops(&pass, &block);
            let chosen = match self {
                Self::Off => Vec::new(),
                Self::Elementwise => elementwise(&pass, inner),
                Self::Full => inner,
                Self::Selective => selected(&pass, &block, inner),
            };
            ops.extend(chosen.into_iter().map(|at| pass.ops[at]));
        }
        ops
    }
}

/// What `selective` recomputes of a block; `inner` are the ops that may be recomputed.
fn selected(pass: &ForwardPass<'_>, block: &Range<usize>, inner: Vec<usize>) -> Vec<usize> {
    let kinds: Vec<Work> = block.clone().map(|at| Work::of(pass, at)).collect();
    let kind = |at: usize| kinds[at - block.start];
    let core = attention_core(pass, block, &kind);
    if !core.is_empty() {
        return inner.into_iter().filter(|at| core.contains(at)).collect();
    }
    let fused = kinds.contains(&Work::FusedAttention);
    let mut weighted = 0;
    let mut again = BTreeSet::new();
    for at in block.clone() {
        weighted += u32::from(kind(at) == Work::WeightProduct);
        let second = fused && kind(at) == Work::WeightProduct && weighted.is_multiple_of(2);
        if kind(at) == Work::Stream || second {
            again.insert(at);
        }
    }
    let chosen: Vec<usize> = inner.into_iter().filter(|at| again.contains(at)).collect();
    without_views_of_kept(pass, chosen)
}

/// What `elementwise` recomputes of a block; `inner` are the ops that may be recomputed.
fn elementwise(pass: &ForwardPass<'_>, inner: Vec<usize>) -> Vec<usize> {
    let is_elementwise = |at: usize| {
        let op = pass.ops[at];
        let is_view = pass.graph.node(op).op.operator().is_view();
        is_view || (Work::of(pass, at) == Work::Stream && pass.graph.rule(op).is_elementwise())
    };
    let chosen = inner.into_iter().filter(|&at| is_elementwise(at)).collect();
    without_views_of_kept(pass, chosen)
}

/// Ops in ascending order, less views of what is kept: a view has the memory of what it shows.
fn without_views_of_kept(pass: &ForwardPass<'_>, mut chosen: Vec<usize>) -> Vec<usize> {
    let mut recomputed: BTreeSet<usize> = chosen.iter().copied().collect();
    for &at in &chosen {
        let node = pass.graph.node(pass.ops[at]);
        if node.op.operator().is_view()
            && !pass.producer(node.inputs[0]).is_some_and(|made| recomputed.contains(&made))
        {
            recomputed.remove(&at);
        }
    }
    chosen.retain(|at| recomputed.contains(at));
    chosen
}

/// The kind of an op's work, as `selective` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Bound by memory: cheap to compute again.
    Stream,
    /// A product of data and weights, or a convolution.
    WeightProduct,
    /// A product of two results.
    DataProduct,
    /// Fused attention.
    FusedAttention,
}

impl Work {
    fn of(pass: &ForwardPass<'_>, at: usize) -> Self {
        let (graph, op) = (pass.graph, pass.ops[at]);
        let workload = graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op));
        match workload.roofline {
            RooflineKind::Stream => Self::Stream,
            RooflineKind::Attention { .. } => Self::FusedAttention,
            _ if pass.data_operands(at) > 1 => Self::DataProduct,
            _ => Self::WeightProduct,
        }
    }
}

/// The ops from a product of two results up to the next one, with only cheap ops between them: from the scores of attention
/// to its weights. The last product is not among them.
fn attention_core(
    pass: &ForwardPass<'_>,
    block: &Range<usize>,
    kind: &dyn Fn(usize) -> Work,
) -> BTreeSet<usize> {
    let producers = |at: usize| {
        let inputs = pass.graph.node(pass.ops[at]).inputs.iter();
        inputs.filter_map(|&t| pass.producer(t)).filter(|made| block.contains(made)).collect::<Vec<_>>()
    };
    // What follows a product of two results through cheap ops.
    let mut after = BTreeSet::new();
    for at in block.clone() {
        let follows = || {
            let from = |made: &usize| kind(*made) == Work::DataProduct || after.contains(made);
            kind(at) == Work::Stream && producers(at).iter().any(from)
        };
        if follows() {
            after.insert(at);
        }
    }
    // What leads to another one.
    let mut core = BTreeSet::new();
    for at in block.clone().rev() {
        let leads = core.contains(&at);
        if leads || kind(at) == Work::DataProduct {
            let before = producers(at);
            let inside = |made: &usize| after.contains(made) || (leads && kind(*made) == Work::DataProduct);
            core.extend(before.into_iter().filter(inside));
        }
    }
    core
}
