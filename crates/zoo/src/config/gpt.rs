//! Configs of GPT-2, GPT-NeoX and Phi: layer norms, biases, plain feed-forward blocks.

use super::{
    Architecture, Config,
    fields::{Fields, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_POSITIONS, MOST_VOCAB, bad},
    llama::heads,
    rotary_decoder,
};
use crate::{
    ZooError,
    decoder::{AttentionKind, BlockForm, Decoder, FeedForward, Norm},
    layers::{Attention, HeadNorm},
};

/// Layer norms, biases, no experts, tied logits, no positions: what the families here share.
fn decoder(
    [layers, hidden, vocab]: [u64; 3],
    eps: f64,
    attention: Attention,
    feed_forward: FeedForward,
) -> Decoder {
    Decoder {
        layers,
        hidden,
        vocab,
        norm: Norm { centered: true, eps },
        attention: AttentionKind::Heads(attention),
        windows: None,
        feed_forward,
        experts: None,
        dense_layers: Vec::new(),
        block: BlockForm::Sequential,
        positions: None,
        scaled_embedding: false,
        tied: true,
        logits_bias: false,
        logit_cap: None,
    }
}

pub(super) fn gpt2(fields: Fields<'_>) -> Result<Config, ZooError> {
    let hidden = fields.size("n_embd", MOST_HIDDEN)?;
    let heads = fields.size("n_head", MOST_HEADS)?;
    let positions = fields.size("n_positions", MOST_POSITIONS)?;
    let head_size = fields.share(("n_embd", hidden), ("n_head", heads))?;
    let inner = fields.size_or("n_inner", MOST_INNER, 4 * hidden)?;
    let activation = fields.activation("activation_function", "gelu_new")?;
    let sizes = [fields.size("n_layer", MOST_LAYERS)?, hidden, fields.size("vocab_size", MOST_VOCAB)?];
    let plain = decoder(
        sizes,
        fields.number_or("layer_norm_epsilon", 1e-5)?,
        Attention::new(heads, head_size).causal(),
        FeedForward::plain(inner, activation),
    );
    let tied = fields.flag_or("tie_word_embeddings", true)?;
    let decoder = Decoder { positions: Some(positions), tied, ..plain };
    let architecture = Architecture::Decoder(Box::new(decoder));
    Ok(Config { architecture, most_positions: Some(positions), positions: Some(positions) })
}

/// GPT-NeoX: a part of every head is rotated; attention and feed-forward in parallel.
pub(super) fn gpt_neox(fields: Fields<'_>) -> Result<Config, ZooError> {
    let hidden = fields.size("hidden_size", MOST_HIDDEN)?;
    let count = fields.size("num_attention_heads", MOST_HEADS)?;
    let theta = fields.number_or("rotary_emb_base", 10_000.0)?;
    let mut attention = heads(fields, hidden, None, count, count, theta)?;
    let width = (attention.head_size as f64 * fields.number_or("rotary_pct", 0.25)?.min(1.0)) as u64;
    if width == 0 || !width.is_multiple_of(2) {
        return Err(bad("rotary_pct", format!("{width} numbers of a head cannot be rotated in pairs")));
    }
    attention.rotary = attention.rotary.map(|rotary| crate::layers::Rotary { width, ..rotary });
    let bias = fields.flag_or("attention_bias", true)?;
    (attention.bias, attention.output_bias) = (bias, bias);
    let activation = fields.activation("hidden_act", "gelu")?;
    let inner = fields.size("intermediate_size", MOST_INNER)?;
    let sizes =
        [fields.size("num_hidden_layers", MOST_LAYERS)?, hidden, fields.size("vocab_size", MOST_VOCAB)?];
    let feed_forward = FeedForward::plain(inner, activation);
    let plain = decoder(sizes, fields.number_or("layer_norm_eps", 1e-5)?, attention, feed_forward);
    let parallel = fields.flag_or("use_parallel_residual", true)?;
    let block = if parallel { BlockForm::Parallel } else { BlockForm::Sequential };
    rotary_decoder(fields, Decoder { block, tied: fields.flag_or("tie_word_embeddings", false)?, ..plain })
}

/// Phi: as GPT-NeoX, with one norm per block and a bias of the logits.
pub(super) fn phi(fields: Fields<'_>) -> Result<Config, ZooError> {
    let hidden = fields.size("hidden_size", MOST_HIDDEN)?;
    let count = fields.size("num_attention_heads", MOST_HEADS)?;
    let kv_heads = fields.size_or("num_key_value_heads", MOST_HEADS, count)?;
    let theta = fields.number_or("rope_theta", 10_000.0)?;
    let mut attention = heads(fields, hidden, None, count, kv_heads, theta)?;
    (attention.bias, attention.output_bias) = (true, true);
    let eps = fields.number_or("layer_norm_eps", 1e-5)?;
    attention.head_norm = fields.flag_or("qk_layernorm", false)?.then_some(HeadNorm { centered: true, eps });
    let activation = fields.activation("hidden_act", "gelu_new")?;
    let inner = fields.size("intermediate_size", MOST_INNER)?;
    let sizes =
        [fields.size("num_hidden_layers", MOST_LAYERS)?, hidden, fields.size("vocab_size", MOST_VOCAB)?];
    let feed_forward = FeedForward::plain(inner, activation);
    let plain = decoder(sizes, eps, attention, feed_forward);
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    rotary_decoder(fields, Decoder { block: BlockForm::ParallelOneNorm, tied, logits_bias: true, ..plain })
}
