//! Configs of DeepSeek-V2 and V3: latent attention, shared experts, first layers without experts.
//!
//! V3's correction of the router's scores, one number per expert that no gradient trains, is left out.

use super::{
    Config,
    fields::{Fields, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_VOCAB, bad},
    llama::routing,
    rotary_decoder,
};
use crate::{
    ZooError,
    decoder::{AttentionKind, BlockForm, Decoder, Experts, FeedForward, Norm},
    layers::LatentAttention,
};

pub(super) fn deepseek_v2(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, decoder(fields)?)
}

pub(super) fn deepseek_v3(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, decoder(fields)?)
}

fn decoder(fields: Fields<'_>) -> Result<Decoder, ZooError> {
    let eps = fields.number_or("rms_norm_eps", 1e-6)?;
    let latent = LatentAttention {
        heads: fields.size("num_attention_heads", MOST_HEADS)?,
        query_rank: fields.optional("q_lora_rank", MOST_HIDDEN)?,
        kv_rank: fields.size("kv_lora_rank", MOST_HIDDEN)?,
        plain_size: fields.size("qk_nope_head_dim", MOST_HIDDEN)?,
        rotary_size: fields.size("qk_rope_head_dim", MOST_HIDDEN)?,
        value_size: fields.size("v_head_dim", MOST_HIDDEN)?,
        base: fields.number_or("rope_theta", 10_000.0)?,
        eps,
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
            inner: fields.size("intermediate_size", MOST_INNER)?,
            activation,
            gated: true,
        },
        experts: experts(fields)?,
        block: BlockForm::Sequential,
        positions: None,
        scaled_embedding: false,
        tied: fields.flag_or("tie_word_embeddings", false)?,
        logits_bias: false,
        logit_cap: None,
    })
}

fn experts(fields: Fields<'_>) -> Result<Option<Experts>, ZooError> {
    if fields.optional("n_routed_experts", MOST_HEADS)?.is_none() {
        return Ok(None);
    }
    let inner = fields.size("moe_intermediate_size", MOST_INNER)?;
    let shared = fields.count_or("n_shared_experts", MOST_HEADS, 0)?;
    Ok(Some(Experts {
        shared: (shared > 0).then(|| shared.saturating_mul(inner)),
        first: fields.count_or("first_k_dense_replace", MOST_LAYERS, 0)?,
        every: fields.size_or("moe_layer_freq", MOST_LAYERS, 1)?,
        ..routing(fields, "n_routed_experts", inner)?
    }))
}
