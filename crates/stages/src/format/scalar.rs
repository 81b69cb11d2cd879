//! JSON values whose type is checked later, so that messages can name the layer.

use crate::problem::ProblemError;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// A JSON value: a number, a text, or the kind of something else.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Scalar {
    Number(f64),
    Integer(i128),
    Text(String),
    Other(&'static str),
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Scalar, E> {
        Ok(Scalar::Other("a truth value"))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Other("null"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("an object"))
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Number(value) => write!(f, "{value:e}"),
            Scalar::Integer(value) => write!(f, "{value}"),
            Scalar::Text(text) => write!(f, "{text:?}"),
            Scalar::Other(kind) => f.write_str(kind),
        }
    }
}

/// A field of an object, with its name and the object's for messages.
pub(super) struct Field<'a> {
    pub value: Option<&'a Scalar>,
    pub key: &'static str,
    pub owner: &'a dyn Fn() -> String,
}

impl<'a> Field<'a> {
    fn refuse<T>(&self, reason: &str) -> Result<T, ProblemError> {
        Err(ProblemError(format!("`{}` of {} {reason}", self.key, (self.owner)())))
    }

    fn present(&self) -> Result<&'a Scalar, ProblemError> {
        self.value.map_or_else(|| self.refuse("is missing"), Ok)
    }

    /// A number; its range is checked with the problem.
    pub fn number(&self) -> Result<f64, ProblemError> {
        match self.present()? {
            Scalar::Number(value) => Ok(*value),
            Scalar::Integer(value) => Ok(*value as f64),
            other => self.refuse(&format!("must be a number, not {other}")),
        }
    }

    /// A number, or zero where the field is absent.
    pub fn number_or_zero(&self) -> Result<f64, ProblemError> {
        if self.value.is_none() { Ok(0.0) } else { self.number() }
    }

    /// A whole number between `least` and `most`.
    pub fn count(&self, least: u64, most: u64) -> Result<u64, ProblemError> {
        let value = match *self.present()? {
            Scalar::Integer(value) => value,
            Scalar::Number(value) if value.fract() == 0.0 && value.abs() < 1e18 => value as i128,
            ref other => return self.refuse(&format!("must be a whole number, not {other}")),
        };
        match u64::try_from(value) {
            Ok(count) if (least..=most).contains(&count) => Ok(count),
            _ => self.refuse(&format!("is {value}: give {least} to {most}")),
        }
    }

    /// A text, or a whole number as text.
    pub fn text(&self) -> Result<String, ProblemError> {
        match self.present()? {
            Scalar::Text(text) => Ok(text.clone()),
            Scalar::Integer(value) => Ok(value.to_string()),
            other => self.refuse(&format!("must be a name, not {other}")),
        }
    }
}

/// An object as a list of its entries, repeated keys included.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entries<T>(pub Vec<(String, T)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Entries(Vec::new())
    }
}

struct EntriesVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for EntriesVisitor<T> {
    type Value = Entries<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Entries(entries))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}
