//! A line of a graph's text form while it is read: marks, names, ids, types and initial values.

use super::{ROLES, TextError, plain_length, role_name};
use crate::{
    graph::{Init, Role, Tensor},
    ids::TensorId,
    types::Real,
};
use serde_json::value::RawValue;

/// A line being read.
pub(super) struct Line<'a> {
    pub(super) number: usize,
    pub(super) text: &'a str,
    pub(super) at: usize,
}

pub(super) type ReadResult<T> = Result<T, TextError>;

impl<'a> Line<'a> {
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn fail<T>(&self, reason: impl Into<String>) -> ReadResult<T> {
        let column = self.text[..self.at].chars().count() + 1;
        Err(TextError::Syntax { line: self.number, column, reason: reason.into() })
    }

    pub(super) fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start_matches([' ', '\t']).len();
    }

    /// Takes `mark` if it comes next.
    pub(super) fn eat(&mut self, mark: &str) -> bool {
        self.skip_spaces();
        let found = self.rest().starts_with(mark);
        self.at += if found { mark.len() } else { 0 };
        found
    }

    pub(super) fn expect(&mut self, mark: &str) -> ReadResult<()> {
        if self.eat(mark) { Ok(()) } else { self.fail(format!("expected `{mark}`")) }
    }

    /// Takes `length` bytes.
    pub(super) fn take(&mut self, length: usize) -> &'a str {
        let word = &self.rest()[..length];
        self.at += length;
        word
    }

    /// A plain word, perhaps empty.
    pub(super) fn word(&mut self) -> &'a str {
        self.skip_spaces();
        self.take(plain_length(self.rest()))
    }

    /// A JSON value, as text.
    pub(super) fn json(&mut self) -> ReadResult<&'a RawValue> {
        self.skip_spaces();
        let mut values = serde_json::Deserializer::from_str(self.rest()).into_iter::<&RawValue>();
        match values.next() {
            Some(Ok(value)) => {
                self.at += values.byte_offset();
                Ok(value)
            }
            Some(Err(error)) => self.fail(format!("bad JSON here: {error}")),
            None => self.fail("expected JSON"),
        }
    }

    pub(super) fn name(&mut self) -> ReadResult<String> {
        self.skip_spaces();
        if !self.rest().starts_with('"') {
            let word = self.word();
            return if word.is_empty() { self.fail("expected a name") } else { Ok(word.into()) };
        }
        let start = self.at;
        let text = self.json()?.get();
        serde_json::from_str(text).or_else(|e| {
            self.at = start;
            self.fail(format!("bad name: {e}"))
        })
    }

    pub(super) fn tensor_id(&mut self) -> ReadResult<TensorId> {
        self.expect("%")?;
        let start = self.at;
        let digits = self.rest().len() - self.rest().trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let id = self.take(digits).parse::<u32>();
        id.map(TensorId).or_else(|_| {
            self.at = start;
            self.fail("expected the number of a tensor")
        })
    }

    pub(super) fn number<N: std::str::FromStr>(&mut self) -> ReadResult<N> {
        self.skip_spaces();
        let start = self.at;
        let digits = self.rest().len() - self.rest().trim_start_matches(|c: char| c.is_ascii_digit()).len();
        self.take(digits).parse().or_else(|_| {
            self.at = start;
            self.fail("expected a number")
        })
    }

    /// `%3 w1: f32[784,300]`; the caller fills in the rest.
    pub(super) fn tensor(&mut self) -> ReadResult<(TensorId, Tensor)> {
        let id = self.tensor_id()?;
        let name = self.name()?;
        self.expect(":")?;
        self.skip_spaces();
        let length = self.rest().find(']').map_or(self.rest().len(), |end| end + 1);
        let ty = self.rest()[..length].parse().or_else(|e: String| self.fail(e))?;
        self.at += length;
        Ok((id, Tensor { name, ty, role: Role::Activation, producer: None, init: None }))
    }

    pub(super) fn role(&mut self) -> ReadResult<Option<Role>> {
        self.skip_spaces();
        let start = self.at;
        let word = self.word();
        if word.is_empty() {
            return Ok(None);
        }
        match ROLES.into_iter().find(|role| role_name(*role) == word) {
            Some(role) => Ok(Some(role)),
            None => {
                self.at = start;
                self.fail(format!("`{word}` is not the role of a tensor"))
            }
        }
    }

    pub(super) fn init(&mut self) -> ReadResult<Option<Init>> {
        self.skip_spaces();
        let start = self.at;
        let word = self.word();
        if word.is_empty() {
            return Ok(None);
        }
        self.expect("(")?;
        let length = self.rest().find(')').unwrap_or(self.rest().len());
        let number = self.take(length).trim();
        let real = || number.parse().ok().map(Real);
        let init = match word {
            "constant" => real().map(Init::Constant),
            "normal" => real().map(Init::Normal),
            "uniform" => real().map(Init::Uniform),
            "below" => number.parse().ok().map(Init::Below),
            _ => None,
        };
        if init.is_none() {
            self.at = start;
            return self.fail("expected an initial value: constant(x), normal(x), uniform(x) or below(n)");
        }
        self.expect(")")?;
        Ok(init)
    }

    pub(super) fn end(&mut self) -> ReadResult<()> {
        self.skip_spaces();
        if self.rest().is_empty() { Ok(()) } else { self.fail("expected the end of the line") }
    }
}
