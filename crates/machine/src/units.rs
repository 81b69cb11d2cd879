//! Quantities with their units in the type, and the text forms used in machine files ("25 GB/s", "1.5 us").
//!
//! There are only the four quantities of machines and costs. This is not a units library: there is no dimensional
//! algebra beyond the few operators that cost models use.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub f64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A transfer rate in bytes per second. Serialises as text with its unit, which is exact in any format.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BytesPerSecond(pub f64);

/// An arithmetic rate in floating-point operations per second (a multiply-add counts as two). Serialises as text.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FlopsPerSecond(pub f64);

impl Seconds {
    /// Zero seconds.
    pub const ZERO: Seconds = Seconds(0.0);

    /// The longer of two durations.
    pub fn max(self, other: Seconds) -> Seconds {
        Seconds(self.0.max(other.0))
    }

    /// The shorter of two durations.
    pub fn min(self, other: Seconds) -> Seconds {
        Seconds(self.0.min(other.0))
    }
}

impl Add for Seconds {
    type Output = Seconds;
    fn add(self, other: Seconds) -> Seconds {
        Seconds(self.0 + other.0)
    }
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.0 += other.0;
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;
    fn mul(self, factor: f64) -> Seconds {
        Seconds(self.0 * factor)
    }
}

impl Sum for Seconds {
    fn sum<I: Iterator<Item = Seconds>>(parts: I) -> Seconds {
        parts.fold(Seconds::ZERO, Add::add)
    }
}

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Bytes = Bytes(0);
}

/// Saturates: for every comparison, a total beyond 64 bits counts as infinite.
impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(parts: I) -> Bytes {
        parts.fold(Bytes::ZERO, Add::add)
    }
}

/// One unit: its symbol and its size in the base unit, `times * 10^exponent`. Powers of ten are separate, so that
/// "1.9 us" is read as the double nearest to 0.0000019, which 1.9 * 1e-6 is not.
struct Unit {
    symbol: &'static str,
    times: f64,
    exponent: i32,
}

const fn unit(symbol: &'static str, times: f64, exponent: i32) -> Unit {
    Unit { symbol, times, exponent }
}

/// The units of one quantity, in the order tried by writing. The base unit is the first of size one.
type Units = &'static [Unit];

const KIB: f64 = 1024.0;

const BYTE_UNITS: Units = &[
    unit("PiB", KIB * KIB * KIB * KIB * KIB, 0),
    unit("PB", 1.0, 15),
    unit("TiB", KIB * KIB * KIB * KIB, 0),
    unit("TB", 1.0, 12),
    unit("GiB", KIB * KIB * KIB, 0),
    unit("GB", 1.0, 9),
    unit("MiB", KIB * KIB, 0),
    unit("MB", 1.0, 6),
    unit("KiB", KIB, 0),
    unit("kB", 1.0, 3),
    unit("B", 1.0, 0),
];

const RATE_UNITS: Units = &[
    unit("TB/s", 1.0, 12),
    unit("GB/s", 1.0, 9),
    unit("MB/s", 1.0, 6),
    unit("kB/s", 1.0, 3),
    unit("B/s", 1.0, 0),
    // Network rates are usually stated in bits: these are read but never written.
    unit("Tb/s", 0.125, 12),
    unit("Gb/s", 0.125, 9),
    unit("Mb/s", 0.125, 6),
    unit("GiB/s", KIB * KIB * KIB, 0),
    unit("MiB/s", KIB * KIB, 0),
];

const TIME_UNITS: Units = &[
    unit("s", 1.0, 0),
    unit("ms", 1.0, -3),
    unit("us", 1.0, -6),
    unit("\u{b5}s", 1.0, -6),
    unit("\u{3bc}s", 1.0, -6),
    unit("ns", 1.0, -9),
];

const FLOP_UNITS: Units = &[
    unit("EFLOP/s", 1.0, 18),
    unit("PFLOP/s", 1.0, 15),
    unit("TFLOP/s", 1.0, 12),
    unit("GFLOP/s", 1.0, 9),
    unit("MFLOP/s", 1.0, 6),
    unit("FLOP/s", 1.0, 0),
];

/// A number times a power of ten, rounded once.
fn scaled(number: &str, exponent: i32) -> Option<f64> {
    let (mantissa, own) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let exponent = own.parse::<i32>().ok()?.checked_add(exponent)?;
    format!("{mantissa}e{exponent}").parse().ok()
}

/// The unit of bytes that `16G`, `16gb` or `16Gi` mean: either case, with or without the B. Other quantities are spelled
/// exactly, since bits and bytes differ only by case.
fn loose(symbol: &str, units: Units) -> Option<&'static Unit> {
    let bytes = std::ptr::eq(units, BYTE_UNITS) && !symbol.is_empty();
    let matches = |unit: &&Unit| {
        let prefix = unit.symbol.trim_end_matches('B');
        symbol.eq_ignore_ascii_case(unit.symbol)
            || (!prefix.is_empty() && symbol.eq_ignore_ascii_case(prefix))
    };
    units.iter().find(|unit| bytes && matches(unit))
}

/// Splits "25 GB/s" into its number and its unit, and converts to the base unit.
fn parse_quantity(text: &str, units: Units, example: &str) -> Result<f64, String> {
    let text = text.trim();
    let end = text
        .char_indices()
        .find(|&(at, c)| {
            let exponent = (c == 'e' || c == 'E')
                && text[at + 1..].starts_with(|n: char| n.is_ascii_digit() || n == '-' || n == '+');
            !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+') || exponent)
        })
        .map_or(text.len(), |(at, _)| at);
    let (number, symbol) = (text[..end].trim(), text[end..].trim());
    if number.parse::<f64>().is_err() {
        return Err(format!("`{text}` does not start with a number (write it like {example})"));
    }
    let Some(unit) = units.iter().find(|unit| unit.symbol == symbol).or_else(|| loose(symbol, units)) else {
        let known: Vec<&str> = units.iter().map(|unit| unit.symbol).collect();
        let found = if symbol.is_empty() { "no unit".to_string() } else { format!("unit `{symbol}`") };
        return Err(format!("`{text}` has {found}; use one of {}", known.join(", ")));
    };
    match scaled(number, unit.exponent).map(|value| value * unit.times) {
        Some(value) if value.is_finite() => Ok(value),
        _ => Err(format!("`{text}` is not a finite number")),
    }
}

/// Writes a value in the largest unit that is exact: reading it gives the same bits.
fn write_quantity(value: f64, units: Units, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for unit in units.iter().filter(|unit| unit.times == 1.0) {
        let Some(number) = scaled(&format!("{value:e}"), -unit.exponent) else { continue };
        let text = format!("{number} {}", unit.symbol);
        // Short text only: a third of a GB/s is better in B/s than with sixteen decimals.
        if number.abs() >= 1.0 && text.len() < 16 && parse_quantity(&text, units, "") == Ok(value) {
            return f.write_str(&text);
        }
    }
    let base =
        units.iter().find(|unit| unit.times == 1.0 && unit.exponent == 0).map_or("", |unit| unit.symbol);
    write!(f, "{value} {base}")
}

impl Seconds {
    /// Reads "1.5 us", "3 ms", "2 s".
    pub fn parse(text: &str) -> Result<Seconds, String> {
        parse_quantity(text, TIME_UNITS, "\"1.5 us\"").map(Seconds)
    }
}

impl Bytes {
    /// Reads "16 GiB", "512 MB", "80 B"; fractions of a byte are rounded to the nearest.
    pub fn parse(text: &str) -> Result<Bytes, String> {
        let value = parse_quantity(text, BYTE_UNITS, "\"16 GiB\"")?;
        if value < 0.0 {
            return Err(format!("`{}` is negative", text.trim()));
        }
        if value >= 9e18 {
            return Err(format!("`{}` is more than 2^63 bytes", text.trim()));
        }
        Ok(Bytes(value.round() as u64))
    }
}

impl BytesPerSecond {
    /// Reads "25 GB/s" (bytes) or "100 Gb/s" (bits).
    pub fn parse(text: &str) -> Result<BytesPerSecond, String> {
        parse_quantity(text, RATE_UNITS, "\"25 GB/s\"").map(BytesPerSecond)
    }
}

impl FlopsPerSecond {
    /// Reads "10.6 TFLOP/s".
    pub fn parse(text: &str) -> Result<FlopsPerSecond, String> {
        parse_quantity(text, FLOP_UNITS, "\"10.6 TFLOP/s\"").map(FlopsPerSecond)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_quantity(self.0, TIME_UNITS, f)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whole multiples only, so that the text is exact.
        for &Unit { symbol, times, exponent } in BYTE_UNITS {
            let scale = times as u64 * 10u64.pow(exponent.unsigned_abs());
            if self.0 >= scale && self.0.is_multiple_of(scale) && self.0 / scale < 100_000 {
                return write!(f, "{} {symbol}", self.0 / scale);
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_quantity(self.0, RATE_UNITS, f)
    }
}

impl fmt::Display for FlopsPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_quantity(self.0, FLOP_UNITS, f)
    }
}

macro_rules! text_form {
    ($name:ident) => {
        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;
            fn try_from(text: String) -> Result<$name, String> {
                $name::parse(&text)
            }
        }
    };
}

text_form!(BytesPerSecond);
text_form!(FlopsPerSecond);

/// Bytes as people read them, in decimal units.
pub fn show_bytes(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e18 => format!("{:.2} EB", b / 1e18),
        b if b >= 1e15 => format!("{:.2} PB", b / 1e15),
        b if b >= 1e12 => format!("{:.2} TB", b / 1e12),
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.1} kB", b / 1e3),
        b => format!("{b} B"),
    }
}

/// Serialises [`Seconds`] as text with its unit, for constants that must be exact in any format.
pub(crate) mod seconds_text {
    use super::Seconds;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &Seconds, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Seconds, D::Error> {
        Seconds::parse(&String::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}

/// The same for [`Seconds`] that may be missing.
pub(crate) mod optional_seconds_text {
    use super::{Seconds, seconds_text};
    use serde::{Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &Option<Seconds>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(seconds) => seconds_text::serialize(seconds, to),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Seconds>, D::Error> {
        seconds_text::deserialize(from).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_with_their_units() {
        assert_eq!(BytesPerSecond::parse("25 GB/s"), Ok(BytesPerSecond(25e9)));
        assert_eq!(BytesPerSecond::parse("100 Gb/s"), Ok(BytesPerSecond(12.5e9)));
        assert_eq!(BytesPerSecond::parse("1.5e3MB/s"), Ok(BytesPerSecond(1.5e9)));
        assert_eq!(Seconds::parse("1.5 us"), Ok(Seconds(1.5e-6)));
        assert_eq!(Seconds::parse("1.5 \u{b5}s"), Ok(Seconds(1.5e-6)));
        assert_eq!(Bytes::parse("16 GiB"), Ok(Bytes(16 << 30)));
        for text in ["16G", "16gb", "16 GB", "16g", "16000 MB", "1.6e1 Gb"] {
            assert_eq!(Bytes::parse(text), Ok(Bytes(16_000_000_000)), "{text}");
        }
        for text in ["16Gi", "16gib", "16 GiB", "16384MiB"] {
            assert_eq!(Bytes::parse(text), Ok(Bytes(16 << 30)), "{text}");
        }
        assert_eq!(FlopsPerSecond::parse("10.6 TFLOP/s"), Ok(FlopsPerSecond(10.6e12)));
    }

    #[test]
    fn a_wrong_unit_is_named_with_the_right_ones() {
        let message = BytesPerSecond::parse("25 GBps").unwrap_err();
        assert!(message.contains("unit `GBps`") && message.contains("GB/s"), "{message}");
        assert!(Bytes::parse("16").unwrap_err().contains("no unit"));
        assert!(Seconds::parse("fast").unwrap_err().contains("start with a number"));
        assert!(Bytes::parse("-1 GiB").unwrap_err().contains("negative"));
        assert!(Bytes::parse("1e30 PB").is_err());
        assert!(Seconds::parse("").is_err());
    }

    #[test]
    fn writing_loses_nothing() {
        for value in [25e9, 12.5e9, 1.0, 1e9 / 3.0, 732e9, 0.1, 20.6e9 * 18.0, 3.35e12, 0.0] {
            let text = BytesPerSecond(value).to_string();
            assert_eq!(BytesPerSecond::parse(&text), Ok(BytesPerSecond(value)), "{text}");
        }
        for value in [1.9e-6, 5e-6, 1e-3, 0.0, 1.0 / 3.0] {
            let text = Seconds(value).to_string();
            assert_eq!(Seconds::parse(&text), Ok(Seconds(value)), "{text}");
        }
        for value in [16 << 30, 80_000_000_000, 1, 0, 12_884_901_887] {
            let text = Bytes(value).to_string();
            assert_eq!(Bytes::parse(&text), Ok(Bytes(value)), "{text}");
        }
        assert_eq!(BytesPerSecond(12.5e9).to_string(), "12.5 GB/s");
        assert_eq!(Seconds(1.9e-6).to_string(), "1.9 us");
        assert_eq!(Bytes(16 << 30).to_string(), "16 GiB");
    }
}
