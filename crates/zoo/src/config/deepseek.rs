//! Configs of DeepSeek-V2 and V3: latent attention, shared experts, first layers without experts.
//!
//! V3's correction of the router's scores, one number per expert that no gradient trains, is a constant.

use super::{
    Config,
    fields::{Fields, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_VOCAB, bad},
    llama::routing,
    rotary_decoder,
};
use crate::{
    ZooError,
    decoder::{AttentionKind, BlockForm, Decoder, Experts, FeedForward, Norm},
    layers::{ExpertGroups, LatentAttention, Router, Scoring},
    options::printable,
};

/// What a version has where its configs say nothing, as in Transformers.
struct Defaults {
    scoring: &'static str,
    method: &'static str,
    groups: u64,
    top_groups: u64,
    normalised: bool,
    scale: f64,
    /// Layers without experts at the start.
    dense: u64,
    shared: u64,
    /// Whether `mlp_bias` counts.
    mlp_bias: bool,
}

/// The rank of queries where a config does not name the field. `null` stands for queries without a latent.
const QUERY_RANK: u64 = 1536;

const V2: Defaults = Defaults {
    scoring: "softmax",
    method: "greedy",
    groups: 1,
    top_groups: 1,
    normalised: false,
    scale: 1.0,
    dense: 0,
    shared: 2,
    mlp_bias: true,
};

const V3: Defaults = Defaults {
    scoring: "sigmoid",
    method: "noaux_tc",
    groups: 8,
    top_groups: 4,
    normalised: true,
    scale: 2.5,
    dense: 3,
    shared: 1,
    mlp_bias: false,
};

pub(super) fn deepseek_v2(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, decoder(fields, &V2)?)
}

pub(super) fn deepseek_v3(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, decoder(fields, &V3)?)
}

fn decoder(fields: Fields<'_>, defaults: &Defaults) -> Result<Decoder, ZooError> {
    let eps = fields.number_or("rms_norm_eps", 1e-6)?;
    let latent = LatentAttention {
        heads: fields.size("num_attention_heads", MOST_HEADS)?,
        query_rank: if fields.has("q_lora_rank") {
            fields.optional("q_lora_rank", MOST_HIDDEN)?
        } else {
            Some(QUERY_RANK)
        },
        kv_rank: fields.size("kv_lora_rank", MOST_HIDDEN)?,
        plain_size: fields.size("qk_nope_head_dim", MOST_HIDDEN)?,
        rotary_size: fields.size("qk_rope_head_dim", MOST_HIDDEN)?,
        value_size: fields.size("v_head_dim", MOST_HIDDEN)?,
        base: fields.number_or("rope_theta", 10_000.0)?,
        eps,
        bias: fields.flag_or("attention_bias", false)?,
    };
    if !latent.rotary_size.is_multiple_of(2) {
        return Err(bad(
            "qk_rope_head_dim",
            format!("{} numbers cannot be rotated in pairs", latent.rotary_size),
        ));
    }
    let activation = fields.activation("hidden_act", "silu")?;
    Ok(Decoder {
        layers: fields.size("num_hidden_layers", MOST_LAYERS)?,
        hidden: fields.size("hidden_size", MOST_HIDDEN)?,
        vocab: fields.size("vocab_size", MOST_VOCAB)?,
        norm: Norm { centered: false, eps },
        attention: AttentionKind::Latent(latent),
        windows: None,
        feed_forward: FeedForward {
            bias: fields.flag_or("mlp_bias", false)? && defaults.mlp_bias,
            ..FeedForward::gated(fields.size("intermediate_size", MOST_INNER)?, activation)
        },
        experts: experts(fields, defaults)?,
        dense_layers: Vec::new(),
        block: BlockForm::Sequential,
        positions: None,
        scaled_embedding: false,
        tied: fields.flag_or("tie_word_embeddings", false)?,
        logits_bias: false,
        logit_cap: None,
    })
}

/// The router: scores, groups that a token's experts are limited to, and the factor of the weights.
fn router(fields: Fields<'_>, experts: u64, defaults: &Defaults) -> Result<Router, ZooError> {
    let scoring = match fields.word_or("scoring_func", defaults.scoring)? {
        "softmax" => Scoring::Softmax,
        "sigmoid" => Scoring::Sigmoid,
        other => return Err(unknown("scoring_func", other, "softmax, sigmoid")),
    };
    // Scores that rank a group. The last method adds corrections to the scores.
    let (group_scores, correction) = match fields.word_or("topk_method", defaults.method)? {
        "greedy" => (None, false),
        "group_limited_greedy" => (Some(1), false),
        "noaux_tc" => (Some(2), true),
        other => return Err(unknown("topk_method", other, "greedy, group_limited_greedy, noaux_tc")),
    };
    let count = fields.size_or("n_group", MOST_HEADS, defaults.groups)?;
    let top = fields.size_or("topk_group", MOST_HEADS, defaults.top_groups)?;
    let size = fields.share(("n_routed_experts", experts), ("n_group", count))?;
    if top > count {
        return Err(bad("topk_group", format!("{top} is more than n_group = {count}")));
    }
    let top_k = fields.size("num_experts_per_tok", MOST_HEADS)?;
    let limited = |scores: u64| ExpertGroups { count, top, scores: scores.min(size) };
    let groups = group_scores.map(limited).filter(|groups| groups.top < groups.count);
    if groups.is_some() && top_k > top * size {
        let reason = format!("{top_k} experts are more than {top} groups of {size} have");
        return Err(bad("num_experts_per_tok", reason));
    }
    Ok(Router {
        scoring,
        normalised: fields.flag_or("norm_topk_prob", defaults.normalised)?,
        groups,
        correction,
        scale: fields.number_or("routed_scaling_factor", defaults.scale)?,
    })
}

fn unknown(field: &str, value: &str, known: &str) -> ZooError {
    bad(field, format!("`{}` is not known; known are {known}", printable(value)))
}

fn experts(fields: Fields<'_>, defaults: &Defaults) -> Result<Option<Experts>, ZooError> {
    let Some(count) = fields.optional("n_routed_experts", MOST_HEADS)? else { return Ok(None) };
    let inner = fields.size("moe_intermediate_size", MOST_INNER)?;
    let shared = fields.count_or("n_shared_experts", MOST_HEADS, defaults.shared)?;
    Ok(Some(Experts {
        shared: (shared > 0).then(|| shared.saturating_mul(inner)),
        first: fields.count_or("first_k_dense_replace", MOST_LAYERS, defaults.dense)?,
        every: fields.size_or("moe_layer_freq", MOST_LAYERS, 1)?,
        ..routing(fields, "n_routed_experts", inner, router(fields, count, defaults)?)?
    }))
}
