//! Options of zoo models: `name:key=value,key=value`. Every key has a domain.
//!
//! Parsing returns values inside their domains, or an error that names the key and its domain. The domains bound the
//! size of the graph that a request can build.

use super::{BuildOptions, ZooError};
use shardwright_graph::DType;
use shardwright_suggest::did_you_mean;
use std::fmt;

/// The values that an option takes, and its default.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Domain {
    /// A whole number.
    Count {
        /// The default.
        default: u64,
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
    },
    /// A real number.
    Number {
        /// The default.
        default: f64,
        /// The smallest value.
        min: f64,
        /// The largest value.
        max: f64,
    },
    /// One of these words; the first is the default. The list is never empty.
    Choice(&'static [&'static str]),
}

impl Domain {
    fn default_value(&self) -> OptionValue {
        match *self {
            Domain::Count { default, .. } => OptionValue::Count(default),
            Domain::Number { default, .. } => OptionValue::Number(default),
            Domain::Choice(words) => OptionValue::Word(words[0]),
        }
    }

    fn parse(&self, text: &str) -> Option<OptionValue> {
        match *self {
            Domain::Count { min, max, .. } => {
                text.parse().ok().filter(|n| (min..=max).contains(n)).map(OptionValue::Count)
            }
            Domain::Number { min, max, .. } => {
                text.parse().ok().filter(|x| (min..=max).contains(x)).map(OptionValue::Number)
            }
            Domain::Choice(words) => words.iter().find(|w| **w == text).map(|w| OptionValue::Word(w)),
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
    /// The values that it takes.
    pub domain: Domain,
    /// Its meaning, in a line.
    pub help: &'static str,
}

impl OptionSpec {
    /// The default as a user would write it.
    pub fn default_text(&self) -> String {
        match self.domain.default_value() {
            OptionValue::Count(n) => n.to_string(),
            OptionValue::Number(x) => x.to_string(),
            OptionValue::Word(word) => word.to_string(),
        }
    }
}

/// A size: at least one.
pub(super) const fn count(name: &'static str, default: u64, max: u64, help: &'static str) -> OptionSpec {
    OptionSpec { name, domain: Domain::Count { default, min: 1, max }, help }
}

/// A size with an explicit smallest value.
pub(super) const fn count_from(
    name: &'static str,
    (default, min, max): (u64, u64, u64),
    help: &'static str,
) -> OptionSpec {
    OptionSpec { name, domain: Domain::Count { default, min, max }, help }
}

/// One of these words; the first is the default.
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

const DTYPE_HELP: &str =
    "element type; mixed: bf16 with f32 master weights; fp8: mixed, with linear layers multiplied in 8 bits";

/// Element type of data and weights.
pub(super) const DTYPE: OptionSpec = choice("dtype", &["f32", "bf16", "mixed", "fp8", "f64"], DTYPE_HELP);

/// The same for published models, which are trained in mixed precision.
pub(super) const MIXED: OptionSpec = choice("dtype", &["mixed", "fp8", "bf16", "f32", "f64"], DTYPE_HELP);

/// Number of classes.
pub(super) const fn classes(default: u64) -> OptionSpec {
    count("classes", default, 1 << 24, "number of classes")
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
    OptionSpec { name: "dropout", domain, help: "fraction of activations that training drops" }
}

/// Width of the residual stream or recurrent state.
pub(super) const fn hidden(default: u64) -> OptionSpec {
    count("hidden", default, 1 << 20, "width of the hidden state")
}

/// Number of layers.
pub(super) const fn layers(default: u64) -> OptionSpec {
    count("layers", default, 1000, "number of layers")
}

/// Attention heads.
pub(super) const fn heads(default: u64) -> OptionSpec {
    count("heads", default, 1 << 16, "attention heads; divides hidden")
}

/// Form of attention.
pub(super) const ATTENTION: OptionSpec = choice(
    "attention",
    &["fused", "plain"],
    "fused: one op that stores no scores; plain: scores, softmax and product as ops",
);

/// Vocabulary.
pub(super) const fn vocab(default: u64) -> OptionSpec {
    count("vocab", default, 1 << 28, "vocabulary size")
}

/// Sequence length.
pub(super) const fn seq(default: u64) -> OptionSpec {
    count("seq", default, 1 << 22, "tokens per sample")
}

/// Unrolling of recurrent layers.
pub(super) const UNROLL: OptionSpec = count_from(
    "unroll",
    (0, 0, 4096),
    "if not 0, this many tokens per sample, with one op per recurrent layer and time step",
);

/// The most recurrent ops (layers times time steps) that unrolling may create.
const MAX_CELLS: u64 = 20_000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum OptionValue {
    Count(u64),
    Number(f64),
    Word(&'static str),
}

/// The values of a model's options: given by the user, or defaults.
#[derive(Clone, Debug)]
pub struct OptionValues {
    model: &'static str,
    specs: &'static [OptionSpec],
    values: Vec<OptionValue>,
    given: Vec<bool>,
    /// Whether dropout is active.
    pub(super) training: bool,
}

impl OptionValues {
    /// Parses `key=value,key=value`. An empty text gives all defaults.
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
                return Err(ZooError::NotAPair { model, text: printable(pair) });
            };
            options.set(key.trim(), value.trim())?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, text: &str) -> Result<(), ZooError> {
        let model = self.model;
        let Some(i) = self.specs.iter().position(|s| s.name == key) else {
            let valid = self.specs.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
            let nearest = did_you_mean(key, self.specs.iter().map(|spec| spec.name));
            return Err(ZooError::UnknownOption { model, key: printable(key), valid, nearest });
        };
        let OptionSpec { name: key, domain, .. } = self.specs[i];
        if std::mem::replace(&mut self.given[i], true) {
            return Err(ZooError::GivenTwice { model, key });
        }
        let bad = || {
            let words: &[&str] = if let Domain::Choice(words) = domain { words } else { &[] };
            let expected = format!("{domain}{}", did_you_mean(text, words.iter().copied()));
            ZooError::BadValue { model, key, value: printable(text), expected }
        };
        self.values[i] = domain.parse(text).ok_or_else(bad)?;
        Ok(())
    }

    /// The values with what a request sets, even if the options set it already.
    pub(super) fn with(mut self, options: &BuildOptions) -> Result<Self, ZooError> {
        let number = |size: Option<u64>| size.map(|size| size.to_string());
        let dtype = options.precision.map(|precision| precision.dtype().to_string());
        if options.seq == Some(0) {
            let (model, expected) = (self.model, "a whole number from 1".to_string());
            return Err(ZooError::BadValue { model, key: "seq", value: "0".into(), expected });
        }
        for (name, text) in [("batch", number(options.batch)), ("seq", number(options.seq)), ("dtype", dtype)]
        {
            let Some(text) = text else { continue };
            if let Some(i) = self.specs.iter().position(|s| s.name == name) {
                self.given[i] = false;
            }
            self.set(name, &text)?;
        }
        self.training = options.training;
        Ok(self)
    }

    fn value(&self, name: &str) -> Option<OptionValue> {
        let i = self.specs.iter().position(|s| s.name == name);
        debug_assert!(i.is_some(), "{} has no option {name}", self.model);
        i.map(|i| self.values[i])
    }

    /// Whether the user set this option.
    pub(super) fn is_given(&self, name: &str) -> bool {
        self.specs.iter().zip(&self.given).any(|(s, given)| s.name == name && *given)
    }

    /// A whole number.
    ///
    /// A family that reads an option it does not declare is a bug, which `debug_assert!` reports. Release builds return
    /// zero, for which the graph builder refuses every tensor.
    pub(super) fn count(&self, name: &str) -> u64 {
        match self.value(name) {
            Some(OptionValue::Count(n)) => n,
            other => undeclared(name, other.is_some(), 0),
        }
    }

    /// A real number.
    pub(super) fn number(&self, name: &str) -> f64 {
        match self.value(name) {
            Some(OptionValue::Number(x)) => x,
            other => undeclared(name, other.is_some(), 0.0),
        }
    }

    /// A word.
    pub(super) fn word(&self, name: &str) -> &'static str {
        match self.value(name) {
            Some(OptionValue::Word(word)) => word,
            other => undeclared(name, other.is_some(), ""),
        }
    }

    /// Samples per step.
    pub(super) fn batch(&self) -> u64 {
        self.count("batch")
    }

    /// The element type of data and weights.
    pub(super) fn dtype(&self) -> DType {
        if self.is_mixed() {
            return DType::Bf16;
        }
        let parsed = self.word("dtype").parse();
        debug_assert!(parsed.is_ok(), "DTYPE lists a word that is no element type");
        parsed.unwrap_or(DType::F32)
    }

    /// Whether 16-bit weights have f32 master copies.
    pub(super) fn is_mixed(&self) -> bool {
        self.word("dtype") == "mixed" || self.is_fp8()
    }

    /// Whether linear layers are multiplied in 8-bit floats.
    pub(super) fn is_fp8(&self) -> bool {
        self.word("dtype") == "fp8"
    }

    /// The model's name.
    pub(super) fn model(&self) -> &'static str {
        self.model
    }

    /// The dropout rate; zero outside training.
    pub(super) fn dropout(&self) -> f64 {
        if self.training { self.number("dropout") } else { 0.0 }
    }

    /// Whether attention is one op.
    pub(super) fn fused_attention(&self) -> bool {
        self.word("attention") == "fused"
    }

    /// A channel count of the published model, multiplied by the `width` option.
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

    /// An error about options that contradict each other.
    pub(super) fn conflict(&self, reason: String) -> ZooError {
        ZooError::Conflict { model: self.model, reason }
    }

    /// Tokens per sample, and whether the recurrent layers are unrolled. `layers` is the number of recurrent layers.
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

/// The value of an option that the family reads without declaring it, or as another kind: a bug of the family.
fn undeclared<T>(name: &str, declared: bool, value: T) -> T {
    debug_assert!(!declared, "option {name} is read as another kind");
    value
}

/// User text, shortened for a message.
pub(super) fn printable(text: &str) -> String {
    shardwright_graph::printable(text, 60)
}
