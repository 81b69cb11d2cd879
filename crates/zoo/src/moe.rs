//! A Llama whose feed-forward blocks are mixtures of experts, as in Mixtral (arXiv 2401.04088), with GShard's fixed capacity.
//! With one expert per token the weight is that of the softmax over all experts, as in Switch: a softmax over one is constant.
//!
//! The default is small. Mixtral 8x7B (46,702,792,704 parameters) is
//! `layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,theta=1000000`.

use super::{
    Family, LossResult, OptionValues,
    llama::{decoder, kv_heads, theta},
    options::{
        ATTENTION, DTYPE, Domain, OptionSpec, batch, choice, count, heads, hidden, layers, seq, vocab,
    },
};
use crate::{
    decoder::Experts,
    layers::{Moe, Router, Scoring},
};
use shardwright_graph::{GraphBuilder, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "moe",
    summary: "mixture of experts: Mixtral's architecture in a small size, 12 layers of 768",
    tiny: "batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=11,seq=4,experts=4",
    transformer: true,
    options: &[
        batch(8),
        layers(12),
        hidden(768),
        heads(12),
        kv_heads(4),
        count("ffn", 2048, 1 << 22, "width inside each expert"),
        count("experts", 8, 1 << 16, "experts in each layer"),
        count("top_k", 2, 1 << 16, "experts that each token goes to"),
        OptionSpec {
            name: "capacity",
            domain: Domain::Number { default: 1.25, min: 0.01, max: 1e6 },
            help: "expert capacity, relative to an even split of the tokens",
        },
        vocab(32_000),
        seq(1024),
        choice("tied", &["no", "yes"], "whether the logits use the embedding table"),
        theta(10_000.0),
        ATTENTION,
        DTYPE,
    ],
    build,
};

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (experts, top_k) = (o.count("experts"), o.count("top_k"));
    if top_k > experts {
        return Err(o.conflict(format!("top_k={top_k} is more than experts={experts}")).into());
    }
    let scoring = if top_k > 1 { Scoring::SoftmaxOfChosen } else { Scoring::Softmax };
    let routed = Moe {
        experts,
        top_k,
        inner: o.count("ffn"),
        activation: UnaryFn::Silu,
        capacity_factor: o.number("capacity"),
        router: Router::new(scoring),
    };
    let experts = Experts { routed, shared: None, shared_gate: false, first: 0, every: 1 };
    Ok(decoder(o, Some(experts))?.build(b, o.dtype(), [o.batch(), o.count("seq")])?)
}
