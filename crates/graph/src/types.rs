//! Element types, shapes and tensor types, with the limits that every tensor must keep.

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, Visitor},
};
use smallvec::SmallVec;
use std::{fmt, hash::Hash, ops::Deref, str::FromStr};

/// The most dimensions that a tensor may have.
pub const MAX_RANK: usize = 16;
/// The most elements that a tensor may have; keeps every byte count and flop count of one op within `u64`.
pub const MAX_ELEMENTS: u64 = 1 << 48;

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// Brain float: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// Truth value, one byte.
    Bool,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::I64, DType::Bool];

    /// Bytes that one element takes.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::Bool => 1,
        }
    }

    /// Whether gradients can flow through tensors of this type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::Bf16 | DType::F16)
    }

    /// Whether elements are whole numbers.
    pub fn is_int(self) -> bool {
        matches!(self, DType::I32 | DType::I64)
    }

    /// The name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| format!("unknown element type `{s}`"))
    }
}

/// A list of per-dimension numbers that rarely needs the heap.
pub type Dims = SmallVec<[u64; 4]>;

/// The sizes of a tensor's dimensions, outermost first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Dims);

impl Shape {
    /// A shape of these sizes.
    pub fn new(sizes: &[u64]) -> Self {
        Self(Dims::from_slice(sizes))
    }

    /// The shape of a single number.
    pub fn scalar() -> Self {
        Self::default()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The number of elements. Only meaningful for shapes that passed [`Shape::check`].
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// Refuses shapes that no tensor may have: too many dimensions, an empty one, too many elements.
    pub fn check(&self) -> Result<(), String> {
        if self.rank() > MAX_RANK {
            return Err(format!("{} dimensions; at most {MAX_RANK} are supported", self.rank()));
        }
        let mut elements = 1u64;
        for (i, &size) in self.0.iter().enumerate() {
            if size == 0 {
                return Err(format!("dimension {i} of {self} is empty"));
            }
            elements = elements
                .checked_mul(size)
                .filter(|&n| n <= MAX_ELEMENTS)
                .ok_or_else(|| format!("{self} has more than 2^48 elements"))?;
        }
        Ok(())
    }

    /// The shape without the dimensions in `axes`.
    pub fn without(&self, axes: &[usize]) -> Self {
        Self(self.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, &s)| s).collect())
    }
}

impl Deref for Shape {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl FromIterator<u64> for Shape {
    fn from_iter<I: IntoIterator<Item = u64>>(iter: I) -> Self {
        Self(iter.into_iter().collect())
    }
}

impl From<&[u64]> for Shape {
    fn from(sizes: &[u64]) -> Self {
        Self::new(sizes)
    }
}

impl From<Vec<u64>> for Shape {
    fn from(sizes: Vec<u64>) -> Self {
        Self(sizes.into())
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(sizes: [u64; N]) -> Self {
        Self::new(&sizes)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, size) in self.iter().enumerate() {
            write!(f, "{}{size}", if i > 0 { "," } else { "" })?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Element type and shape: the input of shape inference and sharding rules.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The sizes of the dimensions.
    pub shape: Shape,
}

impl TensorType {
    /// A type from its two parts.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.rank()
    }

    /// Bytes that the tensor takes.
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.bytes()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TensorType {
    type Err = String;
    /// Reads `f32[64,100]`.
    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || format!("`{s}` is not a tensor type such as `f32[64,100]`");
        let (dtype, rest) = s.split_once('[').ok_or_else(bad)?;
        let sizes = rest.strip_suffix(']').ok_or_else(bad)?;
        let shape: Shape = if sizes.is_empty() {
            Shape::scalar()
        } else {
            sizes.split(',').map(|n| n.parse::<u64>().map_err(|_| bad())).collect::<Result<_, _>>()?
        };
        Ok(Self { dtype: dtype.parse()?, shape })
    }
}

/// Stored as it is printed: `"f32[64,100]"`.
impl Serialize for TensorType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TensorType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = TensorType;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tensor type such as \"f32[64,100]\"")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<TensorType, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// A real-valued attribute of an op. Compared and hashed by its bits, so that ops can be map keys; all NaNs are equal.
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64);

/// JSON has no infinities; masks need them.
impl Serialize for Real {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(f64),
            Word(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(x) => Ok(Self(x)),
            Form::Word(word) => word.parse().map(Self).map_err(Error::custom),
        }
    }
}

impl Real {
    fn bits(self) -> u64 {
        if self.0.is_nan() { f64::NAN.to_bits() } else { self.0.to_bits() }
    }
}

impl Default for Real {
    fn default() -> Self {
        Self(0.0)
    }
}

impl Real {
    /// Whether it is zero.
    pub fn is_zero(&self) -> bool {
        self.0 == 0.0
    }
}

impl PartialEq for Real {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Real {}

impl Hash for Real {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_print_and_parse_alike() {
        for text in ["f32[64,100]", "i64[]", "bool[1]", "bf16[2,3,4,5]"] {
            assert_eq!(text.parse::<TensorType>().unwrap().to_string(), text);
        }
        for text in ["f32", "f32[", "f33[1]", "f32[a]", "f32[-1]", "f32[1,]"] {
            assert!(text.parse::<TensorType>().is_err(), "{text}");
        }
    }

    #[test]
    fn absurd_shapes_are_refused() {
        assert!(Shape::from([1 << 30, 1 << 30]).check().is_err());
        assert!(Shape::from([u64::MAX, u64::MAX, u64::MAX]).check().is_err());
        assert!(Shape::from([3, 0]).check().is_err());
        assert!(Shape::new(&[1; MAX_RANK + 1]).check().is_err());
        assert!(Shape::from([1 << 24, 1 << 24]).check().is_ok());
    }
}
