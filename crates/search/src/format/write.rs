//! Writes a network in the contest's JSON, the form that [`super::read_iopddl`] reads.
//!
//! The file has the network as built: parallel edges are one edge, forbidden costs are [`crate::FORBIDDEN`], and edges
//! run from the lower to the higher variable.

use crate::network::{Network, VarId};
use std::io::{self, Write};

/// Writes `network` under `name`.
///
/// # Errors
/// Where `out` fails.
pub fn write_iopddl(network: &Network, name: &str, out: impl Write) -> io::Result<()> {
    let mut text = JsonText::new(out);
    let vars = || (0..network.variables()).map(|v| VarId(v as u32));
    text.put("{\"problem\":{\"name\":")?;
    text.quoted(name)?;
    text.put(",\"nodes\":{\"intervals\":[")?;
    text.separated(vars(), |text, v| {
        let interval = network.interval(v);
        text.naturals([interval.lo, interval.hi])
    })?;
    text.put("],\n\"costs\":[")?;
    text.separated(vars(), |text, v| text.integers(network.unary(v)))?;
    text.put("],\n\"usages\":[")?;
    text.separated(vars(), |text, v| text.integers(network.usage(v)))?;
    text.put("]},\n\"edges\":{\"nodes\":[")?;
    text.separated(network.edges().iter(), |text, edge| {
        text.naturals([u64::from(edge.u.0), u64::from(edge.v.0)])
    })?;
    text.put("],\n\"costs\":[")?;
    text.separated(network.edges().iter(), |text, edge| text.integers(network.table(edge.table)))?;
    text.put("]}")?;
    if let Some(limit) = network.usage_limit() {
        text.put(",\n\"usage_limit\":")?;
        text.natural(limit.unsigned_abs())?;
    }
    text.put("}}\n")?;
    text.finish()
}

/// Buffered JSON text. Integers, nearly all of the output, bypass the formatting machinery.
pub(super) struct JsonText<W: Write> {
    out: W,
    buffer: Vec<u8>,
}

const FLUSH_AT: usize = 1 << 16;

impl<W: Write> JsonText<W> {
    pub fn new(out: W) -> Self {
        JsonText { out, buffer: Vec::with_capacity(FLUSH_AT + 64) }
    }

    pub fn put(&mut self, text: &str) -> io::Result<()> {
        self.buffer.extend_from_slice(text.as_bytes());
        self.flush_if_full()
    }

    fn flush_if_full(&mut self) -> io::Result<()> {
        if self.buffer.len() >= FLUSH_AT {
            self.out.write_all(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }

    pub fn natural(&mut self, mut value: u64) -> io::Result<()> {
        let mut digits = [0; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                break;
            }
        }
        self.buffer.extend_from_slice(&digits[first..]);
        self.flush_if_full()
    }

    /// A bracketed list of non-negative numbers.
    pub fn naturals(&mut self, values: impl IntoIterator<Item = u64>) -> io::Result<()> {
        self.put("[")?;
        self.separated(values, Self::natural)?;
        self.put("]")
    }

    /// A bracketed list of costs or usages, which are never negative in a network.
    pub fn integers(&mut self, values: &[i64]) -> io::Result<()> {
        self.naturals(values.iter().map(|value| value.unsigned_abs()))
    }

    /// Items with commas between them.
    pub fn separated<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> io::Result<()>,
    ) -> io::Result<()> {
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.buffer.push(b',');
            }
            write(self, item)?;
        }
        Ok(())
    }

    fn quoted(&mut self, text: &str) -> io::Result<()> {
        self.put("\"")?;
        for character in text.chars() {
            match character {
                '"' => self.put("\\\"")?,
                '\\' => self.put("\\\\")?,
                '\0'..' ' => self.put(&format!("\\u{:04x}", character as u32))?,
                _ => self.put(character.encode_utf8(&mut [0; 4]))?,
            }
        }
        self.put("\"")
    }

    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&self.buffer)?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::read_iopddl;
    use crate::network::{Interval, NetworkBuilder};

    #[test]
    fn names_survive_a_round_trip() {
        let mut builder = NetworkBuilder::new();
        builder.variable(&[1, 2], &[3, 4], Interval { lo: 5, hi: u64::MAX / 2 }).unwrap();
        let network = builder.build().unwrap();
        for name in ["", "plain", "quotes \" and \\ and \n and é and \u{1f600}"] {
            let mut text = Vec::new();
            write_iopddl(&network, name, &mut text).unwrap();
            let read = read_iopddl(&text[..]).unwrap();
            assert_eq!(read.name, name);
            assert_eq!(read.network.interval(VarId(0)), network.interval(VarId(0)));
        }
    }
}
