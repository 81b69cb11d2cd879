//! Models by their own config: Hugging Face's `config.json`, one reader per family.
//!
//! A reader turns fields into a model's description ([`Architecture`]); descriptions build graphs. Files are not trusted: every
//! field has bounds, and an error names field and value.

mod bidirectional;
mod deepseek;
mod fields;
mod gpt;
mod llama;

use crate::{
    Failure, LossResult, ZooError, bert::Bert, decoder::Decoder, options::printable, t5::T5, vit::Vit,
};
use fields::{Fields, MOST_POSITIONS, bad};
use serde_json::{Map, Value};
use shardwright_graph::{DType, GraphBuilder};
use shardwright_suggest::did_you_mean;

/// Larger files are no configs.
const MOST_BYTES: usize = 1 << 20;

/// What a config describes.
#[derive(Clone, Debug)]
pub(crate) enum Architecture {
    Decoder(Box<Decoder>),
    Bert(Bert),
    T5(T5),
    Vit(Vit),
}

/// A model that a config describes.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub architecture: Architecture,
    /// The longest sequence for which the model has learned positions.
    pub most_positions: Option<u64>,
    /// The sequence that the config names, where it does.
    pub positions: Option<u64>,
}

type Reader = fn(Fields<'_>) -> Result<Config, ZooError>;

/// The readers by `model_type`.
const READERS: &[(&str, Reader)] = &[
    ("llama", llama::llama),
    ("mistral", llama::mistral),
    ("mixtral", llama::mixtral),
    ("qwen2", llama::qwen2),
    ("qwen2_moe", llama::qwen2_moe),
    ("qwen3", llama::qwen3),
    ("qwen3_moe", llama::qwen3_moe),
    ("gemma", llama::gemma),
    ("gemma2", llama::gemma2),
    ("gemma3", llama::gemma3),
    ("gemma3_text", llama::gemma3),
    ("phi3", llama::phi3),
    ("phi", gpt::phi),
    ("gpt2", gpt::gpt2),
    ("gpt_neox", gpt::gpt_neox),
    ("deepseek_v2", deepseek::deepseek_v2),
    ("deepseek_v3", deepseek::deepseek_v3),
    ("bert", bidirectional::bert),
    ("t5", bidirectional::t5),
    ("vit", bidirectional::vit),
];

/// The known values of `model_type`.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    READERS.iter().map(|(name, _)| *name)
}

fn object(text: &[u8]) -> Option<Map<String, Value>> {
    if text.len() > MOST_BYTES {
        return None;
    }
    match serde_json::from_slice(text) {
        Ok(Value::Object(map)) => Some(map),
        _ => None,
    }
}

/// Whether a JSON text is a model's config rather than a graph.
pub fn is_config(text: &[u8]) -> bool {
    let marks = ["model_type", "architectures", "transformers_version", "hidden_size", "num_hidden_layers"];
    object(text).is_some_and(|map| marks.iter().any(|mark| map.contains_key(*mark)))
}

/// Reads a config.
pub(crate) fn read(text: &[u8]) -> Result<Config, ZooError> {
    let map = object(text).ok_or_else(|| bad("config", "is not a JSON object of at most 1 MiB"))?;
    let fields = Fields(&map);
    let known = || model_types().collect::<Vec<_>>().join(", ");
    let name = fields.word_or("model_type", "")?;
    if name.is_empty() {
        return Err(bad("model_type", format!("is missing; known are {}", known())));
    }
    let Some((_, reader)) = READERS.iter().find(|(known, _)| *known == name) else {
        let nearest = did_you_mean(name, model_types());
        let name = printable(name);
        return Err(bad("model_type", format!("`{name}` is not known{nearest}; known are {}", known())));
    };
    reader(fields)
}

impl Config {
    /// Adds the forward pass; returns the loss. `tokens` is the length of a sequence, for models of sequences.
    pub fn build(&self, b: &mut GraphBuilder, dtype: DType, samples: u64, tokens: u64) -> LossResult {
        if let Some(most) = self.most_positions.filter(|&most| tokens > most) {
            let reason = format!(
                "the model has {most} learned positions, so a sequence of {tokens} tokens is too long"
            );
            return Err(Failure::Options(bad("max_position_embeddings", reason)));
        }
        Ok(match &self.architecture {
            Architecture::Decoder(decoder) => decoder.build(b, dtype, [samples, tokens])?,
            Architecture::Bert(bert) => bert.build(b, dtype, [samples, tokens])?,
            Architecture::T5(t5) => t5.build(b, dtype, [samples, tokens])?,
            Architecture::Vit(vit) => vit.build(b, dtype, samples)?,
        })
    }

    /// The model with only its first layers; zero: all of them.
    pub fn with_layers(&self, layers: u64) -> Self {
        let mut config = self.clone();
        let all = match &mut config.architecture {
            Architecture::Decoder(decoder) => &mut decoder.layers,
            Architecture::Bert(bert) => &mut bert.layers,
            Architecture::T5(t5) => {
                t5.decoder_layers = if layers == 0 { t5.decoder_layers } else { layers };
                &mut t5.layers
            }
            Architecture::Vit(vit) => &mut vit.layers,
        };
        if layers > 0 {
            *all = layers;
        }
        config
    }

    /// Whether samples are sequences of tokens.
    pub fn is_sequential(&self) -> bool {
        !matches!(self.architecture, Architecture::Vit(_))
    }
}

/// A decoder without learned positions.
fn rotary_decoder(fields: Fields<'_>, decoder: Decoder) -> Result<Config, ZooError> {
    let positions = fields.optional("max_position_embeddings", MOST_POSITIONS)?;
    Ok(Config { architecture: Architecture::Decoder(Box::new(decoder)), most_positions: None, positions })
}
