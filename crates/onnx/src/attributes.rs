//! Attributes of nodes: looked up by name, checked for the kind that the op expects, with the op's default.

use super::{
    error::{NodeError, NodeResult},
    proto::{Attribute, Graph, Node, Tensor},
};

/// The kind of an attribute (`AttributeProto.AttributeType`).
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
    fn find(&self, name: &str, kind: i32) -> NodeResult<Option<&Attribute>> {
        let Some(attribute) = self.attribute.iter().find(|a| a.name == name) else { return Ok(None) };
        // Files older than the discriminator leave it at 0.
        if attribute.kind != kind && attribute.kind != 0 {
            return Err(NodeError::invalid(format!(
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
    pub(crate) fn int(&self, name: &str, default: i64) -> NodeResult<i64> {
        Ok(self.find(name, kind::INT)?.map_or(default, |a| a.i))
    }

    /// A whole number that is not negative: a size, or a number of things.
    pub(crate) fn size(&self, name: &str, default: u64) -> NodeResult<u64> {
        let Some(attribute) = self.find(name, kind::INT)? else { return Ok(default) };
        u64::try_from(attribute.i)
            .map_err(|_| NodeError::invalid(format!("attribute `{name}` is negative: {}", attribute.i)))
    }

    /// A truth value. Implementations differ in what they make of numbers other than 0 and 1, so those are refused.
    pub(crate) fn flag(&self, name: &str, default: bool) -> NodeResult<bool> {
        match self.int(name, i64::from(default))? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(NodeError::invalid(format!("attribute `{name}` must be 0 or 1, got {other}"))),
        }
    }

    /// A real number.
    pub(crate) fn float(&self, name: &str, default: f64) -> NodeResult<f64> {
        Ok(self.find(name, kind::FLOAT)?.map_or(default, |a| decimal(a.f)))
    }

    /// A list of whole numbers, if given.
    pub(crate) fn ints(&self, name: &str) -> NodeResult<Option<&[i64]>> {
        Ok(self.find(name, kind::INTS)?.map(|a| a.ints.as_slice()))
    }

    /// A list of real numbers, if given.
    pub(crate) fn floats(&self, name: &str) -> NodeResult<Option<&[f32]>> {
        Ok(self.find(name, kind::FLOATS)?.map(|a| a.floats.as_slice()))
    }

    /// A string.
    pub(crate) fn text(&self, name: &str, default: &'static str) -> NodeResult<String> {
        Ok(match self.find(name, kind::STRING)? {
            None => default.into(),
            Some(a) => String::from_utf8_lossy(&a.s).into_owned(),
        })
    }

    /// A list of strings; empty if it is left out.
    pub(crate) fn texts(&self, name: &str) -> NodeResult<Vec<String>> {
        let words = self.find(name, kind::STRINGS)?.map_or(&[][..], |a| a.strings.as_slice());
        Ok(words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// A tensor, if given.
    pub(crate) fn tensor(&self, name: &str) -> NodeResult<Option<&Tensor>> {
        Ok(self.find(name, kind::TENSOR)?.and_then(|a| a.t.as_ref()))
    }

    /// A subgraph.
    pub(crate) fn graph(&self, name: &str) -> NodeResult<&Graph> {
        let found = self.find(name, kind::GRAPH)?.and_then(|a| a.g.as_deref());
        found.ok_or_else(|| NodeError::invalid(format!("the subgraph attribute `{name}` is missing")))
    }

    /// The name of the `i`-th input; `None` if it is left out.
    pub(crate) fn input_name(&self, i: usize) -> Option<&str> {
        self.input.get(i).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// The node's name, or its first output's if it has none.
    pub(crate) fn label(&self) -> &str {
        match (self.name.as_str(), self.output.iter().find(|o| !o.is_empty())) {
            ("", Some(output)) => output,
            (name, _) => name,
        }
    }

    /// The op type, prefixed by its domain unless that is ONNX's own.
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

/// A 32-bit number as the decimal that was meant: 1e-12 rather than 9.999999960041972e-13.
fn decimal(x: f32) -> f64 {
    // The shortest decimal that parses to this f32 is the one that was written.
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
