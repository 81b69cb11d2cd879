//! Configs of Llama and its relatives: RMS norm, rotary embedding, gated feed-forward blocks, grouped queries.

use super::{
    Config,
    fields::{Fields, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_POSITIONS, MOST_VOCAB, bad},
    rotary_decoder,
};
use crate::{
    ZooError,
    decoder::{AttentionKind, BlockForm, Decoder, Experts, FeedForward, Norm, Windows},
    layers::{Attention, HeadNorm, Moe, Rotary, Router, Scoring},
};

/// What a family has where its configs say nothing.
struct Defaults {
    heads: Option<u64>,
    kv_heads: Option<u64>,
    head_size: Option<u64>,
    vocab: Option<u64>,
    activation: &'static str,
    eps: f64,
    theta: f64,
    tied: bool,
    /// Whether `attention_bias` counts. Other families ignore the field, as Transformers does.
    attention_bias: bool,
    /// Whether `mlp_bias` counts.
    mlp_bias: bool,
}

const LLAMA: Defaults = Defaults {
    heads: None,
    kv_heads: None,
    head_size: None,
    vocab: None,
    activation: "silu",
    eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    attention_bias: true,
    mlp_bias: true,
};

/// Mistral, Mixtral, Qwen 2 and Phi 3: biases are not for the config to choose.
const UNBIASED: Defaults = Defaults { attention_bias: false, mlp_bias: false, ..LLAMA };

const GEMMA: Defaults =
    Defaults { head_size: Some(256), activation: "gelu_pytorch_tanh", tied: true, mlp_bias: false, ..LLAMA };

/// A field, or the family's default.
fn or(fields: Fields<'_>, field: &str, most: u64, default: Option<u64>) -> Result<u64, ZooError> {
    match default {
        Some(default) => fields.size_or(field, most, default),
        None => fields.size(field, most),
    }
}

/// The heads of an attention block: how many, their size, and the rotary embedding.
pub(super) fn heads(
    fields: Fields<'_>,
    hidden: u64,
    default_size: Option<u64>,
    heads: u64,
    kv_heads: u64,
    theta: f64,
) -> Result<Attention, ZooError> {
    fields.share(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    let head_size = match fields.optional("head_dim", MOST_HIDDEN)?.or(default_size) {
        Some(size) => size,
        None => fields.share(("hidden_size", hidden), ("num_attention_heads", heads))?,
    };
    let fraction = fields.number_or("partial_rotary_factor", 1.0)?.min(1.0);
    let width = (head_size as f64 * fraction) as u64;
    if !width.is_multiple_of(2) || width == 0 {
        return Err(bad("head_dim", format!("{width} numbers of a head cannot be rotated in pairs")));
    }
    let attention = Attention::new(heads, head_size).unbiased().causal().grouped(kv_heads);
    Ok(Attention { rotary: Some(Rotary { base: theta, width }), ..attention })
}

fn decoder(fields: Fields<'_>, defaults: &Defaults) -> Result<Decoder, ZooError> {
    let hidden = fields.size("hidden_size", MOST_HIDDEN)?;
    let query_heads = or(fields, "num_attention_heads", MOST_HEADS, defaults.heads)?;
    let kv_heads =
        fields.size_or("num_key_value_heads", MOST_HEADS, defaults.kv_heads.unwrap_or(query_heads))?;
    let mut theta = fields.number_or("rope_theta", defaults.theta)?;
    if let Some(rope) = fields.inside("rope_parameters")? {
        theta = rope.number_or("rope_theta", theta)?;
    }
    let mut attention = heads(fields, hidden, defaults.head_size, query_heads, kv_heads, theta)?;
    let bias = fields.flag_or("attention_bias", false)? && defaults.attention_bias;
    (attention.bias, attention.output_bias) = (bias, bias);
    let activation = fields.activation("hidden_act", defaults.activation)?;
    let layers = fields.size("num_hidden_layers", MOST_LAYERS)?;
    let types = fields.list_len("layer_types") as u64;
    if types != 0 && types != layers {
        return Err(bad("layer_types", format!("has {types} entries, but num_hidden_layers = {layers}")));
    }
    Ok(Decoder {
        layers,
        hidden,
        vocab: or(fields, "vocab_size", MOST_VOCAB, defaults.vocab)?,
        norm: Norm { centered: false, eps: fields.number_or("rms_norm_eps", defaults.eps)? },
        attention: AttentionKind::Heads(attention),
        windows: None,
        feed_forward: FeedForward {
            bias: fields.flag_or("mlp_bias", false)? && defaults.mlp_bias,
            ..FeedForward::gated(fields.size("intermediate_size", MOST_INNER)?, activation)
        },
        experts: None,
        dense_layers: Vec::new(),
        block: BlockForm::Sequential,
        positions: None,
        scaled_embedding: false,
        tied: fields.flag_or("tie_word_embeddings", defaults.tied)?,
        logits_bias: false,
        logit_cap: None,
    })
}

/// The same window in every layer, if the config has one.
fn windows(fields: Fields<'_>) -> Result<Option<Windows>, ZooError> {
    let size = fields.optional("sliding_window", MOST_POSITIONS)?;
    Ok(size.map(|size| Windows { size, first: 0, global_every: None, base: None }))
}

/// Changes the attention of a decoder with heads.
fn with_heads(mut decoder: Decoder, change: impl FnOnce(&mut Attention)) -> Decoder {
    if let AttentionKind::Heads(heads) = &mut decoder.attention {
        change(heads);
    }
    decoder
}

/// Slots of an expert, relative to an even split of the tokens. Trainers without dropped tokens compute as many slots as
/// tokens ask for: with balanced experts, an even split.
const CAPACITY: f64 = 1.0;

/// Experts of a mixture: how many there are, how many each token goes to, and how they are chosen.
pub(super) fn routing(
    fields: Fields<'_>,
    count: &str,
    inner: u64,
    router: Router,
) -> Result<Experts, ZooError> {
    let experts = fields.size(count, MOST_HEADS)?;
    let top_k = fields.size("num_experts_per_tok", MOST_HEADS)?;
    if top_k > experts {
        return Err(bad("num_experts_per_tok", format!("{top_k} is more than {count} = {experts}")));
    }
    let every = fields.size_or("decoder_sparse_step", MOST_LAYERS, 1)?;
    let activation = fields.activation("hidden_act", LLAMA.activation)?;
    let routed = Moe { experts, top_k, inner, activation, capacity_factor: CAPACITY, router };
    Ok(Experts { routed, shared: None, shared_gate: false, first: 0, every })
}

/// Qwen's router: softmax over all experts, normalised over the chosen ones where the config says so.
fn qwen_router(fields: Fields<'_>) -> Result<Router, ZooError> {
    let normalised = fields.flag_or("norm_topk_prob", false)?;
    Ok(Router { normalised, ..Router::new(Scoring::Softmax) })
}

pub(super) fn llama(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, decoder(fields, &LLAMA)?)
}

pub(super) fn mistral(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, Decoder { windows: windows(fields)?, ..decoder(fields, &UNBIASED)? })
}

pub(super) fn mixtral(fields: Fields<'_>) -> Result<Config, ZooError> {
    let plain = decoder(fields, &Defaults { eps: 1e-5, theta: 1e6, ..UNBIASED })?;
    let router = Router::new(Scoring::SoftmaxOfChosen);
    let experts = Some(routing(fields, "num_local_experts", plain.feed_forward.inner, router)?);
    rotary_decoder(fields, Decoder { windows: windows(fields)?, experts, ..plain })
}

/// Qwen 2: biases of queries, keys and values only; windows from some layer on.
fn qwen2_decoder(fields: Fields<'_>, bias: bool) -> Result<Decoder, ZooError> {
    let plain = with_heads(decoder(fields, &UNBIASED)?, |heads| heads.bias = bias);
    let windows = if fields.flag_or("use_sliding_window", false)? { windows(fields)? } else { None };
    let first = fields.count_or("max_window_layers", MOST_LAYERS, 28)?;
    Ok(Decoder { windows: windows.map(|windows| Windows { first, ..windows }), ..plain })
}

pub(super) fn qwen2(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, qwen2_decoder(fields, true)?)
}

pub(super) fn qwen2_moe(fields: Fields<'_>) -> Result<Config, ZooError> {
    let inner = fields.size("moe_intermediate_size", MOST_INNER)?;
    let mut experts = routing(fields, "num_experts", inner, qwen_router(fields)?)?;
    experts.shared = Some(fields.size_or("shared_expert_intermediate_size", MOST_INNER, 5632)?);
    experts.shared_gate = true;
    let plain = qwen2_decoder(fields, fields.flag_or("qkv_bias", true)?)?;
    rotary_decoder(fields, with_experts(fields, experts, plain)?)
}

/// Qwen 3: norms of query and key heads, no biases.
fn qwen3_decoder(fields: Fields<'_>, head_size: Option<u64>) -> Result<Decoder, ZooError> {
    let plain = decoder(fields, &Defaults { head_size, mlp_bias: false, ..LLAMA })?;
    let norm = HeadNorm { centered: false, eps: plain.norm.eps };
    Ok(with_heads(plain, |heads| heads.head_norm = Some(norm)))
}

pub(super) fn qwen3(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, qwen3_decoder(fields, Some(128))?)
}

pub(super) fn qwen3_moe(fields: Fields<'_>) -> Result<Config, ZooError> {
    let inner = fields.size("moe_intermediate_size", MOST_INNER)?;
    let experts = routing(fields, "num_experts", inner, qwen_router(fields)?)?;
    rotary_decoder(fields, with_experts(fields, experts, qwen3_decoder(fields, None)?)?)
}

/// A decoder with experts, except in the layers that the config lists.
fn with_experts(fields: Fields<'_>, experts: Experts, plain: Decoder) -> Result<Decoder, ZooError> {
    let dense_layers = fields.positions("mlp_only_layers", plain.layers)?;
    Ok(Decoder { experts: Some(experts), dense_layers, ..plain })
}

pub(super) fn gemma(fields: Fields<'_>) -> Result<Config, ZooError> {
    rotary_decoder(fields, Decoder { scaled_embedding: true, ..decoder(fields, &GEMMA)? })
}

/// Norms after every block too, and the scale of scores from the config.
fn sandwich(fields: Fields<'_>, plain: Decoder, windows: Option<Windows>) -> Result<Decoder, ZooError> {
    let scale = fields.number_or("query_pre_attn_scalar", 256.0)?.sqrt().recip();
    let plain = with_heads(plain, |heads| heads.scores.scale = Some(scale));
    Ok(Decoder { block: BlockForm::Sandwich, scaled_embedding: true, windows, ..plain })
}

pub(super) fn gemma2(fields: Fields<'_>) -> Result<Config, ZooError> {
    let size = fields.size_or("sliding_window", MOST_POSITIONS, 4096)?;
    let windows = Windows { size, first: 0, global_every: Some(2), base: None };
    let plain = sandwich(fields, decoder(fields, &GEMMA)?, Some(windows))?;
    let cap = fields.number("attn_logit_softcapping")?;
    let plain = with_heads(plain, |heads| heads.scores.cap = cap);
    rotary_decoder(fields, Decoder { logit_cap: fields.number("final_logit_softcapping")?, ..plain })
}

/// Gemma 3: norms of query and key heads; five layers with a window for one without. The text part of larger models.
pub(super) fn gemma3(fields: Fields<'_>) -> Result<Config, ZooError> {
    let fields = fields.inside("text_config")?.unwrap_or(fields);
    let defaults = Defaults { heads: Some(8), kv_heads: Some(4), vocab: Some(262_208), theta: 1e6, ..GEMMA };
    let plain = decoder(fields, &defaults)?;
    let pattern =
        fields.words("layer_types", "full_attention").and_then(|full| full.iter().position(|full| *full));
    let every = match pattern {
        Some(first) => first as u64 + 1,
        None => fields.size_or("sliding_window_pattern", MOST_LAYERS, 6)?,
    };
    let size = fields.size_or("sliding_window", MOST_POSITIONS, 1024)?;
    let base = Some(fields.number_or("rope_local_base_freq", 10_000.0)?);
    let windows = Windows { size, first: 0, global_every: Some(every), base };
    let norm = HeadNorm { centered: false, eps: plain.norm.eps };
    let plain = sandwich(fields, plain, Some(windows))?;
    rotary_decoder(fields, with_heads(plain, |heads| heads.head_norm = Some(norm)))
}

pub(super) fn phi3(fields: Fields<'_>) -> Result<Config, ZooError> {
    let plain = decoder(fields, &Defaults { eps: 1e-5, ..UNBIASED })?;
    rotary_decoder(fields, Decoder { windows: windows(fields)?, ..plain })
}
