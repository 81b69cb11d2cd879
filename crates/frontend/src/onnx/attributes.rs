//! Attributes of nodes: looked up by name, of the kind that the op expects, with the op's default.

use super::{
    error::{Tried, Trouble},
    proto::{Attribute, Graph, Node, Tensor},
};

/// What an attribute says it is (`AttributeProto.AttributeType`).
mod kind {
    pub const FLOAT: i32 = 1;
    pub const INT: i32 = 2;
    pub const STRING: i32 = 3;
    pub const TENSOR: i32 = 4;
    pub const GRAPH: i32 = 5;
    pub const FLOATS: i32 = 6;
    pub const INTS: i32 = 7;
    pub const STRINGS: i32 = 8;
}

impl Node {
    fn find(&self, name: &str, kind: i32) -> Tried<Option<&Attribute>> {
        let Some(attribute) = self.attribute.iter().find(|a| a.name == name) else { return Ok(None) };
        // Files older than the discriminator leave it at 0.
        if attribute.kind != kind && attribute.kind != 0 {
            return Err(Trouble::wrong(format!(
                "attribute `{name}` is of kind {}, expected {kind}",
                attribute.kind
            )));
        }
        Ok(Some(attribute))
    }

    /// Whether the attribute is given.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.attribute.iter().any(|a| a.name == name)
    }

    /// A whole number.
    pub(crate) fn int(&self, name: &str, default: i64) -> Tried<i64> {
        Ok(self.find(name, kind::INT)?.map_or(default, |a| a.i))
    }

    /// Yes or no.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Tried<bool> {
        Ok(self.int(name, i64::from(default))? != 0)
    }

    /// A number.
    pub(crate) fn float(&self, name: &str, default: f64) -> Tried<f64> {
        Ok(self.find(name, kind::FLOAT)?.map_or(default, |a| decimal(a.f)))
    }

    /// Several whole numbers, if given.
    pub(crate) fn ints(&self, name: &str) -> Tried<Option<&[i64]>> {
        Ok(self.find(name, kind::INTS)?.map(|a| a.ints.as_slice()))
    }

    /// Several numbers, if given.
    pub(crate) fn floats(&self, name: &str) -> Tried<Option<&[f32]>> {
        Ok(self.find(name, kind::FLOATS)?.map(|a| a.floats.as_slice()))
    }

    /// A word.
    pub(crate) fn text(&self, name: &str, default: &'static str) -> Tried<String> {
        Ok(match self.find(name, kind::STRING)? {
            None => default.into(),
            Some(a) => String::from_utf8_lossy(&a.s).into_owned(),
        })
    }

    /// Several words; none if they are left out.
    pub(crate) fn texts(&self, name: &str) -> Tried<Vec<String>> {
        let words = self.find(name, kind::STRINGS)?.map_or(&[][..], |a| a.strings.as_slice());
        Ok(words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// A tensor, if given.
    pub(crate) fn tensor(&self, name: &str) -> Tried<Option<&Tensor>> {
        Ok(self.find(name, kind::TENSOR)?.and_then(|a| a.t.as_ref()))
    }

    /// A subgraph.
    pub(crate) fn graph(&self, name: &str) -> Tried<&Graph> {
        let found = self.find(name, kind::GRAPH)?.and_then(|a| a.g.as_deref());
        found.ok_or_else(|| Trouble::wrong(format!("has no subgraph `{name}`")))
    }

    /// The name of the `i`-th input; none where it is left out.
    pub(crate) fn input_name(&self, i: usize) -> Option<&str> {
        self.input.get(i).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// The name that people know the node by.
    pub(crate) fn label(&self) -> &str {
        match (self.name.as_str(), self.output.iter().find(|o| !o.is_empty())) {
            ("", Some(output)) => output,
            (name, _) => name,
        }
    }

    /// The op type, with its domain unless that is ONNX's own.
    pub(crate) fn kind(&self) -> String {
        if is_standard(&self.domain) {
            self.op_type.clone()
        } else {
            format!("{}.{}", self.domain, self.op_type)
        }
    }
}

/// Whether a domain is ONNX's own.
pub(crate) fn is_standard(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

/// A 32-bit number as the decimal that was meant: 1e-12 and not 9.999999960041972e-13.
fn decimal(x: f32) -> f64 {
    // The shortest decimal that reads back as this f32 is what somebody wrote.
    x.to_string().parse().unwrap_or(f64::from(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_decimals_that_were_written() {
        for x in [1e-12, 1e-5, 0.1, 1.0, -3.5e30] {
            assert_eq!(decimal(x as f32), x);
        }
        assert!(decimal(f32::NAN).is_nan());
        assert_eq!(decimal(f32::INFINITY), f64::INFINITY);
    }
}
