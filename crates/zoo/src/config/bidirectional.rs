//! Configs of models that are no decoders: BERT, T5, ViT.

use super::{
    Architecture, Config,
    fields::{Fields, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_POSITIONS, MOST_VOCAB, bad},
};
use crate::{ZooError, bert::Bert, t5::T5, vit::Vit};
use shardwright_graph::ops::UnaryFn;

pub(super) fn bert(fields: Fields<'_>) -> Result<Config, ZooError> {
    let hidden = fields.size("hidden_size", MOST_HIDDEN)?;
    let heads = fields.size("num_attention_heads", MOST_HEADS)?;
    fields.share(("hidden_size", hidden), ("num_attention_heads", heads))?;
    let positions = fields.size("max_position_embeddings", MOST_POSITIONS)?;
    let bert = Bert {
        layers: fields.size("num_hidden_layers", MOST_LAYERS)?,
        hidden,
        heads,
        inner: fields.size("intermediate_size", MOST_INNER)?,
        activation: fields.activation("hidden_act", "gelu")?,
        vocab: fields.size("vocab_size", MOST_VOCAB)?,
        types: fields.size_or("type_vocab_size", MOST_VOCAB, 2)?,
        positions,
        dropout: 0.0,
        fused: true,
        // Transformers' model for masked words alone has no pooler.
        next_sentence: !fields.names_architecture("BertForMaskedLM"),
    };
    let architecture = Architecture::Bert(bert);
    Ok(Config { architecture, most_positions: Some(positions), positions: Some(positions) })
}

pub(super) fn t5(fields: Fields<'_>) -> Result<Config, ZooError> {
    let form = fields.word_or("feed_forward_proj", "relu")?;
    let (gated, activation) = match form {
        "relu" => (false, UnaryFn::Relu),
        "gated-gelu" => (true, UnaryFn::GeluTanh),
        "gated-silu" => (true, UnaryFn::Silu),
        "gelu" => (false, UnaryFn::Gelu),
        other => {
            let other = crate::options::printable(other);
            return Err(bad(
                "feed_forward_proj",
                format!("`{other}` is not one of relu, gelu, gated-gelu, gated-silu"),
            ));
        }
    };
    let layers = fields.size("num_layers", MOST_LAYERS)?;
    let buckets = fields.size_or("relative_attention_num_buckets", MOST_POSITIONS, 32)?;
    if buckets < 4 || buckets % 2 != 0 {
        return Err(bad("relative_attention_num_buckets", format!("{buckets} is not an even number from 4")));
    }
    let t5 = T5 {
        layers,
        decoder_layers: fields.size_or("num_decoder_layers", MOST_LAYERS, layers)?,
        hidden: fields.size("d_model", MOST_HIDDEN)?,
        heads: fields.size("num_heads", MOST_HEADS)?,
        head_size: fields.size("d_kv", MOST_HIDDEN)?,
        inner: fields.size("d_ff", MOST_INNER)?,
        activation,
        gated,
        vocab: fields.size("vocab_size", MOST_VOCAB)?,
        buckets,
        farthest: fields.size_or("relative_attention_max_distance", MOST_POSITIONS, 128)?,
        tied: fields.flag_or("tie_word_embeddings", true)?,
        eps: fields.number_or("layer_norm_epsilon", 1e-6)?,
    };
    let positions = fields.optional("n_positions", MOST_POSITIONS)?;
    Ok(Config { architecture: Architecture::T5(t5), most_positions: None, positions })
}

pub(super) fn vit(fields: Fields<'_>) -> Result<Config, ZooError> {
    let hidden = fields.size("hidden_size", MOST_HIDDEN)?;
    let heads = fields.size("num_attention_heads", MOST_HEADS)?;
    fields.share(("hidden_size", hidden), ("num_attention_heads", heads))?;
    let image = fields.size_or("image_size", 1 << 14, 224)?;
    let patch = fields.size_or("patch_size", 1 << 14, 16)?;
    fields.share(("image_size", image), ("patch_size", patch))?;
    // Transformers has two labels where a config names none.
    let labels = fields.inside("id2label")?.map(|labels| labels.0.len() as u64).filter(|&labels| labels > 0);
    let vit = Vit {
        layers: fields.size("num_hidden_layers", MOST_LAYERS)?,
        hidden,
        heads,
        inner: fields.size("intermediate_size", MOST_INNER)?,
        activation: fields.activation("hidden_act", "gelu")?,
        image,
        patch,
        channels: fields.size_or("num_channels", MOST_HIDDEN, 3)?,
        classes: fields.size_or("num_labels", 1 << 24, labels.unwrap_or(2))?,
        eps: fields.number_or("layer_norm_eps", 1e-12)?,
        bias: fields.flag_or("qkv_bias", true)?,
    };
    Ok(Config { architecture: Architecture::Vit(vit), most_positions: None, positions: None })
}
