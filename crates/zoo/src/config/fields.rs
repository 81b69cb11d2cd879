//! The fields of a config file, read with bounds. Every error names the field and its value.

use crate::{ZooError, options::printable};
use serde_json::{Map, Value};
use shardwright_graph::ops::UnaryFn;

/// Largest sizes that are read. They bound the graph that a file can ask for.
pub(super) const MOST_LAYERS: u64 = 1000;
pub(super) const MOST_HIDDEN: u64 = 1 << 20;
pub(super) const MOST_HEADS: u64 = 1 << 16;
pub(super) const MOST_INNER: u64 = 1 << 22;
pub(super) const MOST_VOCAB: u64 = 1 << 28;
pub(super) const MOST_POSITIONS: u64 = 1 << 26;

/// The fields of a config.
#[derive(Clone, Copy)]
pub(super) struct Fields<'f>(pub &'f Map<String, Value>);

/// An error about one field.
pub(super) fn bad(field: &str, reason: impl Into<String>) -> ZooError {
    ZooError::Config { field: field.into(), reason: reason.into() }
}

fn shown(value: &Value) -> String {
    printable(&value.to_string())
}

impl<'f> Fields<'f> {
    /// A field that is there and not null.
    fn given(&self, field: &str) -> Option<&'f Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    /// Whether a field is there, `null` or not.
    pub fn has(&self, field: &str) -> bool {
        self.0.contains_key(field)
    }

    /// A size from 1 to `most`, if the field is there.
    pub fn optional(&self, field: &str, most: u64) -> Result<Option<u64>, ZooError> {
        let Some(value) = self.given(field) else { return Ok(None) };
        let size = value.as_u64().filter(|size| (1..=most).contains(size));
        let wrong = || bad(field, format!("{} is not a whole number from 1 to {most}", shown(value)));
        size.map(Some).ok_or_else(wrong)
    }

    /// A size from 1 to `most`.
    pub fn size(&self, field: &str, most: u64) -> Result<u64, ZooError> {
        self.optional(field, most)?.ok_or_else(|| bad(field, "is missing"))
    }

    /// A size from 1 to `most`, or what the family has where the field is missing.
    pub fn size_or(&self, field: &str, most: u64, default: u64) -> Result<u64, ZooError> {
        Ok(self.optional(field, most)?.unwrap_or(default))
    }

    /// A whole number from 0.
    pub fn count_or(&self, field: &str, most: u64, default: u64) -> Result<u64, ZooError> {
        let Some(value) = self.given(field) else { return Ok(default) };
        let count = value.as_u64().filter(|&count| count <= most);
        count.ok_or_else(|| bad(field, format!("{} is not a whole number from 0 to {most}", shown(value))))
    }

    /// A positive number.
    pub fn number_or(&self, field: &str, default: f64) -> Result<f64, ZooError> {
        Ok(self.number(field)?.unwrap_or(default))
    }

    /// A positive number, if the field is there.
    pub fn number(&self, field: &str) -> Result<Option<f64>, ZooError> {
        let Some(value) = self.given(field) else { return Ok(None) };
        let number = value.as_f64().filter(|number| *number > 0.0 && *number <= 1e15);
        let wrong = || bad(field, format!("{} is not a positive number up to 1e15", shown(value)));
        number.map(Some).ok_or_else(wrong)
    }

    /// True or false.
    pub fn flag_or(&self, field: &str, default: bool) -> Result<bool, ZooError> {
        let Some(value) = self.given(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| bad(field, format!("{} is neither true nor false", shown(value))))
    }

    /// A word.
    pub fn word_or(&self, field: &str, default: &'f str) -> Result<&'f str, ZooError> {
        let Some(value) = self.given(field) else { return Ok(default) };
        value.as_str().ok_or_else(|| bad(field, format!("{} is not a word", shown(value))))
    }

    /// Fields inside a field, where it is there.
    pub fn inside(&self, field: &str) -> Result<Option<Fields<'f>>, ZooError> {
        let Some(value) = self.given(field) else { return Ok(None) };
        let wrong = || bad(field, format!("{} is not an object", shown(value)));
        value.as_object().map(|map| Some(Fields(map))).ok_or_else(wrong)
    }

    /// Entries of a list, where it is there.
    pub fn list_len(&self, field: &str) -> usize {
        self.given(field).and_then(Value::as_array).map_or(0, Vec::len)
    }

    /// Elements of a list that equal a word, from the first: whether each does.
    pub fn words(&self, field: &str, word: &str) -> Option<Vec<bool>> {
        let list = self.given(field)?.as_array()?;
        Some(list.iter().map(|value| value.as_str() == Some(word)).collect())
    }

    /// A list of positions below `end`; empty where it is not there.
    pub fn positions(&self, field: &str, end: u64) -> Result<Vec<u64>, ZooError> {
        let Some(value) = self.given(field) else { return Ok(Vec::new()) };
        let wrong = || bad(field, format!("{} is not a list of layers below {end}", shown(value)));
        let list = value.as_array().filter(|list| list.len() as u64 <= end).ok_or_else(wrong)?;
        let each = list.iter().map(|entry| entry.as_u64().filter(|&at| at < end));
        each.collect::<Option<Vec<u64>>>().ok_or_else(wrong)
    }

    /// Whether `architectures` lists a class of Transformers.
    pub fn names_architecture(&self, class: &str) -> bool {
        self.words("architectures", class).is_some_and(|each| each.contains(&true))
    }

    /// An activation function by its name in Transformers.
    pub fn activation(&self, field: &str, default: &'f str) -> Result<UnaryFn, ZooError> {
        Ok(match self.word_or(field, default)? {
            "silu" | "swish" => UnaryFn::Silu,
            "gelu" => UnaryFn::Gelu,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => UnaryFn::GeluTanh,
            "relu" => UnaryFn::Relu,
            "tanh" => UnaryFn::Tanh,
            other => {
                let other = printable(other);
                return Err(bad(
                    field,
                    format!("`{other}` is no known activation: silu, gelu, gelu_new, relu, tanh"),
                ));
            }
        })
    }

    /// `whole / part` of two fields, whose sizes are given.
    pub fn share(&self, (whole, a): (&str, u64), (part, b): (&str, u64)) -> Result<u64, ZooError> {
        if b != 0 && a.is_multiple_of(b) {
            return Ok(a / b);
        }
        Err(bad(part, format!("{b} does not divide {whole} = {a}")))
    }
}
