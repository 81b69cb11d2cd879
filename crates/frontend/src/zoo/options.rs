//! Options of zoo models: `name:key=value,key=value`, each key with a domain that bounds what is built.
//!
//! Whatever is written, parsing ends with values inside their domains or an error that names the key and
//! what it takes. Domains are what keeps absurd requests from building absurd graphs.

use super::ZooError;
use shardwright_graph::DType;
use std::fmt;

/// What an option takes, and what it is if not given.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Domain {
    /// A whole number.
    Count {
        /// If not given.
        default: u64,
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A real number.
    Number {
        /// If not given.
        default: f64,
        /// Smallest.
        min: f64,
        /// Largest.
        max: f64,
    },
    /// One of a few words; the first if not given.
    Choice(&'static [&'static str]),
}

impl Domain {
    fn default_value(&self) -> Value {
        match *self {
            Domain::Count { default, .. } => Value::Count(default),
            Domain::Number { default, .. } => Value::Number(default),
            Domain::Choice(words) => Value::Word(words.first().copied().unwrap_or_default()),
        }
    }

    fn parse(&self, text: &str) -> Option<Value> {
        match *self {
            Domain::Count { min, max, .. } => {
                text.parse().ok().filter(|n| (min..=max).contains(n)).map(Value::Count)
            }
            Domain::Number { min, max, .. } => {
                text.parse().ok().filter(|x| (min..=max).contains(x)).map(Value::Number)
            }
            Domain::Choice(words) => words.iter().find(|w| **w == text).map(|w| Value::Word(w)),
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Count { min, max, .. } => write!(f, "a whole number from {min} to {max}"),
            Domain::Number { min, max, .. } => write!(f, "a number from {min} to {max}"),
            Domain::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

/// An option of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OptionSpec {
    /// The key.
    pub name: &'static str,
    /// What it takes.
    pub domain: Domain,
    /// What it means.
    pub help: &'static str,
}

impl OptionSpec {
    /// The value if none is given, as it would be written.
    pub fn default_text(&self) -> String {
        match self.domain.default_value() {
            Value::Count(n) => n.to_string(),
            Value::Number(x) => x.to_string(),
            Value::Word(word) => word.to_string(),
        }
    }
}

/// A size: at least one.
pub(super) const fn count(name: &'static str, default: u64, max: u64, help: &'static str) -> OptionSpec {
    OptionSpec { name, domain: Domain::Count { default, min: 1, max }, help }
}

/// A size with a smallest value of its own.
pub(super) const fn count_from(
    name: &'static str,
    (default, min, max): (u64, u64, u64),
    help: &'static str,
) -> OptionSpec {
    OptionSpec { name, domain: Domain::Count { default, min, max }, help }
}

/// One of a few words, the first being the default.
pub(super) const fn choice(
    name: &'static str,
    words: &'static [&'static str],
    help: &'static str,
) -> OptionSpec {
    OptionSpec { name, domain: Domain::Choice(words), help }
}

/// Samples per step.
pub(super) const fn batch(default: u64) -> OptionSpec {
    count("batch", default, 1 << 24, "samples per step, over all devices")
}

/// Element type of data and weights.
pub(super) const DTYPE: OptionSpec =
    choice("dtype", &["f32", "bf16", "f64"], "element type of data and weights");

/// Number of classes.
pub(super) const fn classes(default: u64) -> OptionSpec {
    count("classes", default, 1 << 24, "classes told apart")
}

/// Height and width of images.
pub(super) const fn image(default: u64, min: u64) -> OptionSpec {
    count_from("image", (default, min, 1 << 14), "height and width of the images")
}

/// Multiplier of channel counts.
pub(super) const WIDTH: OptionSpec = OptionSpec {
    name: "width",
    domain: Domain::Number { default: 1.0, min: 0.001, max: 64.0 },
    help: "multiplies the channels of every layer",
};

/// Dropout rate.
pub(super) const fn dropout(default: f64) -> OptionSpec {
    let domain = Domain::Number { default, min: 0.0, max: 0.99 };
    OptionSpec { name: "dropout", domain, help: "share of activations that training drops" }
}

/// Width of the residual stream or recurrent state.
pub(super) const fn hidden(default: u64) -> OptionSpec {
    count("hidden", default, 1 << 20, "width of the hidden state")
}

/// Number of layers.
pub(super) const fn layers(default: u64) -> OptionSpec {
    count("layers", default, 1000, "layers")
}

/// Attention heads.
pub(super) const fn heads(default: u64) -> OptionSpec {
    count("heads", default, 1 << 16, "attention heads; divides hidden")
}

/// Vocabulary.
pub(super) const fn vocab(default: u64) -> OptionSpec {
    count("vocab", default, 1 << 28, "words or tokens in the vocabulary")
}

/// Sequence length.
pub(super) const fn seq(default: u64) -> OptionSpec {
    count("seq", default, 1 << 22, "tokens per sample")
}

/// Recurrent models: unrolling.
pub(super) const UNROLL: OptionSpec = count_from(
    "unroll",
    (0, 0, 4096),
    "if not 0, this many tokens per sample, with one op per recurrent layer and time step",
);

/// The most recurrent ops (layers times steps) that unrolling may make.
const MAX_CELLS: u64 = 20_000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Value {
    Count(u64),
    Number(f64),
    Word(&'static str),
}

/// The values of a model's options, as given or by default.
#[derive(Clone, Debug)]
pub struct Options {
    model: &'static str,
    specs: &'static [OptionSpec],
    values: Vec<Value>,
    given: Vec<bool>,
    /// Whether dropout happens.
    pub(super) training: bool,
}

impl Options {
    /// Reads `key=value,key=value` (empty: all defaults).
    pub(super) fn parse(
        model: &'static str,
        specs: &'static [OptionSpec],
        text: &str,
    ) -> Result<Self, ZooError> {
        let values = specs.iter().map(|s| s.domain.default_value()).collect();
        let mut options = Self { model, specs, values, given: vec![false; specs.len()], training: true };
        if text.is_empty() {
            return Ok(options);
        }
        for pair in text.split(',') {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(ZooError::NotAPair { model, text: shown(pair) });
            };
            options.set(key.trim(), value.trim())?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, text: &str) -> Result<(), ZooError> {
        let model = self.model;
        let Some(i) = self.specs.iter().position(|s| s.name == key) else {
            let valid = self.specs.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
            return Err(ZooError::UnknownOption { model, key: shown(key), valid });
        };
        let OptionSpec { name: key, domain, .. } = self.specs[i];
        if std::mem::replace(&mut self.given[i], true) {
            return Err(ZooError::GivenTwice { model, key });
        }
        let bad = || ZooError::BadValue { model, key, value: shown(text), expected: domain.to_string() };
        self.values[i] = domain.parse(text).ok_or_else(bad)?;
        Ok(())
    }

    /// Replaces the batch size, whether it was given or not.
    pub(super) fn set_batch(&mut self, batch: u64) -> Result<(), ZooError> {
        if let Some(i) = self.specs.iter().position(|s| s.name == "batch") {
            self.given[i] = false;
        }
        self.set("batch", &batch.to_string())
    }

    fn value(&self, name: &str) -> Option<Value> {
        let i = self.specs.iter().position(|s| s.name == name);
        debug_assert!(i.is_some(), "{} has no option {name}", self.model);
        i.map(|i| self.values[i])
    }

    /// Whether an option was written out.
    pub(super) fn is_given(&self, name: &str) -> bool {
        self.specs.iter().zip(&self.given).any(|(s, given)| s.name == name && *given)
    }

    /// A whole number. Zero for a name that the model does not declare, which no tensor survives.
    pub(super) fn count(&self, name: &str) -> u64 {
        match self.value(name) {
            Some(Value::Count(n)) => n,
            _ => 0,
        }
    }

    /// A real number.
    pub(super) fn number(&self, name: &str) -> f64 {
        match self.value(name) {
            Some(Value::Number(x)) => x,
            _ => 0.0,
        }
    }

    /// A word.
    pub(super) fn word(&self, name: &str) -> &'static str {
        match self.value(name) {
            Some(Value::Word(word)) => word,
            _ => "",
        }
    }

    /// Samples per step.
    pub(super) fn batch(&self) -> u64 {
        self.count("batch")
    }

    /// The element type.
    pub(super) fn dtype(&self) -> DType {
        self.word("dtype").parse().unwrap_or(DType::F32)
    }

    /// The dropout rate; nothing is dropped outside training.
    pub(super) fn dropout(&self) -> f64 {
        if self.training { self.number("dropout") } else { 0.0 }
    }

    /// A channel count of the published model, times the width.
    pub(super) fn channels(&self, published: u64) -> u64 {
        ((published as f64 * self.number("width")).round() as u64).max(1)
    }

    /// `whole / part`, or an error that names both options.
    pub(super) fn share(&self, whole: &'static str, part: &'static str) -> Result<u64, ZooError> {
        let (a, b) = (self.count(whole), self.count(part));
        if b != 0 && a.is_multiple_of(b) {
            return Ok(a / b);
        }
        let reason = format!("{whole}={a} is not a multiple of {part}={b}");
        Err(ZooError::Conflict { model: self.model, reason })
    }

    /// An error about how options go together.
    pub(super) fn conflict(&self, reason: String) -> ZooError {
        ZooError::Conflict { model: self.model, reason }
    }

    /// Tokens per sample of a recurrent model with `layers` recurrent layers, and whether it is unrolled.
    pub(super) fn steps(&self, layers: u64) -> Result<(u64, bool), ZooError> {
        let (seq, unroll) = (self.count("seq"), self.count("unroll"));
        if unroll == 0 {
            return Ok((seq, false));
        }
        if self.is_given("seq") && seq != unroll {
            return Err(self.conflict(format!("seq={seq} and unroll={unroll} differ; leave seq out")));
        }
        if layers.saturating_mul(unroll) > MAX_CELLS {
            return Err(self.conflict(format!(
                "{layers} recurrent layers unrolled {unroll} times make more than {MAX_CELLS} ops; \
                 lower layers or unroll"
            )));
        }
        Ok((unroll, true))
    }
}

/// What was typed, short enough for a message.
pub(super) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    if text.chars().count() <= LONGEST {
        return text.to_string();
    }
    text.chars().take(LONGEST).chain("...".chars()).collect()
}
