//! Stored tensors: weights and constants whose contents are inline, in an external file, or missing.

use super::{
    error::{NodeError, NodeResult, shown},
    literal::{Literal, Numbers, count, round_to},
    proto::Tensor,
};
use bytes::Bytes;
use shardwright_graph::DType;

/// The most elements of a tensor that are folded during the import.
pub(crate) const MOST_FOLDED: usize = 1 << 22;

/// A range of bytes in an external file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalRange {
    /// The file, relative to the model's folder. Checked to stay inside that folder.
    pub location: String,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

/// Reads external files of a model. This crate itself opens no files.
pub trait ExternalData {
    /// The bytes of a range; `None` if there is no such file (the model came without its weights).
    fn read(&self, place: &ExternalRange) -> Result<Option<Bytes>, String>;
}

/// For models without external files: every external range is missing.
pub struct NoExternalData;

impl ExternalData for NoExternalData {
    fn read(&self, _: &ExternalRange) -> Result<Option<Bytes>, String> {
        Ok(None)
    }
}

/// The location of a stored tensor's contents.
#[derive(Clone, PartialEq, Debug)]
enum Contents {
    /// Little-endian, packed.
    Raw(Bytes),
    Known(Literal),
    External(ExternalRange),
    Missing,
}

/// A tensor in the file.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredTensor {
    /// Its name in the file.
    pub name: String,
    /// Element type in the graph.
    pub dtype: DType,
    /// Element type in the file.
    onnx_type: i32,
    /// Sizes.
    pub shape: Vec<u64>,
    contents: Contents,
}

/// The graph's element type for an ONNX element type in an attribute.
pub(crate) fn attribute_type(onnx: i64) -> NodeResult<DType> {
    let number = i32::try_from(onnx);
    element_type(number.map_err(|_| NodeError::invalid(format!("there is no element type {onnx}")))?)
}

/// The graph's element type for an ONNX element type. Small and unsigned integers are widened.
pub(crate) fn element_type(onnx: i32) -> NodeResult<DType> {
    Ok(match onnx {
        1 => DType::F32,
        2..=6 => DType::I32,
        7 | 12 | 13 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::Bf16,
        _ => return Err(NodeError::unsupported(format!("element type {}", type_name(onnx)))),
    })
}

fn type_name(onnx: i32) -> String {
    const NAMES: [&str; 29] = [
        "undefined",
        "float",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "int32",
        "int64",
        "string",
        "bool",
        "float16",
        "double",
        "uint32",
        "uint64",
        "complex64",
        "complex128",
        "bfloat16",
        "float8e4m3fn",
        "float8e4m3fnuz",
        "float8e5m2",
        "float8e5m2fnuz",
        "uint4",
        "int4",
        "float4e2m1",
        "float8e8m0",
        "uint2",
        "int2",
        "float6e2m3",
        "float6e3m2",
    ];
    let name = usize::try_from(onnx).ok().and_then(|i| NAMES.get(i));
    name.map_or_else(|| format!("number {onnx}"), |n| (*n).to_string())
}

/// Bytes per element in the file.
fn width(onnx: i32) -> usize {
    match onnx {
        2 | 3 | 9 => 1,
        4 | 5 | 10 | 16 => 2,
        7 | 11 | 13 => 8,
        _ => 4,
    }
}

/// Sizes from a file; negative ones are refused.
pub(crate) fn sizes(dims: &[i64]) -> NodeResult<Vec<u64>> {
    if dims.len() > shardwright_graph::MAX_RANK {
        return Err(NodeError::invalid(format!("{} dimensions exceed the limit", dims.len())));
    }
    dims.iter()
        .map(|&d| u64::try_from(d).map_err(|_| NodeError::invalid(format!("a dimension has size {d}"))))
        .collect()
}

impl StoredTensor {
    /// Reads the description of a tensor; its contents are not decoded yet.
    pub(crate) fn read(tensor: &Tensor) -> NodeResult<Self> {
        let dtype = element_type(tensor.data_type)?;
        let shape = sizes(&tensor.dims)?;
        let name = tensor.name.clone();
        let elements = count(&shape)
            .ok_or_else(|| NodeError::invalid("the shape has more elements than can be counted"))?;
        let typed = |found: usize, numbers: Numbers| -> NodeResult<Contents> {
            if found != elements {
                return Err(NodeError::invalid(format!(
                    "shape {shape:?} does not have {found} elements, the number in the file"
                )));
            }
            Ok(Contents::Known(Literal { dtype, shape: shape.clone(), numbers, assumed: false }))
        };
        let contents = if tensor.data_location == 1 {
            Contents::External(external_place(tensor)?)
        } else if !tensor.raw_data.is_empty() {
            let expected = elements.checked_mul(width(tensor.data_type));
            if expected != Some(tensor.raw_data.len()) {
                return Err(NodeError::invalid(format!(
                    "{} bytes do not fit shape {shape:?}",
                    tensor.raw_data.len()
                )));
            }
            Contents::Raw(tensor.raw_data.clone())
        } else if elements == 0 {
            typed(0, if dtype.is_float() { Numbers::Reals(vec![]) } else { Numbers::Ints(vec![]) })?
        } else if !tensor.float_data.is_empty() {
            let values: Vec<f64> = tensor.float_data.iter().map(|&x| f64::from(x)).collect();
            typed(values.len(), Numbers::Reals(values))?
        } else if !tensor.double_data.is_empty() {
            typed(tensor.double_data.len(), Numbers::Reals(tensor.double_data.clone()))?
        } else if !tensor.int64_data.is_empty() {
            typed(tensor.int64_data.len(), Numbers::Ints(tensor.int64_data.clone()))?
        } else if !tensor.uint64_data.is_empty() {
            let values: Vec<i64> = tensor.uint64_data.iter().map(|&x| x as i64).collect();
            typed(values.len(), Numbers::Ints(values))?
        } else if !tensor.int32_data.is_empty() {
            let given = &tensor.int32_data;
            typed(given.len(), from_int32(dtype, given))?
        } else {
            Contents::Missing
        };
        if let Contents::Known(literal) = &contents
            && matches!(literal.numbers, Numbers::Reals(_)) != dtype.is_float()
        {
            return Err(NodeError::invalid(format!(
                "the contents do not fit element type {}",
                type_name(tensor.data_type)
            )));
        }
        Ok(Self { name, dtype, onnx_type: tensor.data_type, shape, contents })
    }

    /// A stored tensor with these contents.
    pub(crate) fn known(name: &str, literal: Literal) -> Self {
        let (dtype, shape) = (literal.dtype, literal.shape.clone());
        Self { name: name.into(), dtype, onnx_type: 0, shape, contents: Contents::Known(literal) }
    }

    /// Whether the file lacks the contents.
    pub fn is_missing(&self) -> bool {
        match &self.contents {
            Contents::Missing => true,
            Contents::Known(literal) => literal.assumed,
            _ => false,
        }
    }

    /// Whether the contents are in an external file.
    pub fn is_external(&self) -> bool {
        matches!(self.contents, Contents::External(_))
    }

    /// Whether the contents are an additive attention mask: every element is zero or very negative. The first element rules
    /// out most weights.
    pub(crate) fn is_mask(&self) -> bool {
        let hides = |x: f64| x <= -1e4;
        let masks = |mut values: &mut dyn Iterator<Item = f64>| {
            let mut hidden = false;
            (&mut values).all(|x| {
                hidden |= hides(x);
                x == 0.0 || hides(x)
            }) && hidden
        };
        match &self.contents {
            Contents::Raw(bytes) if self.onnx_type == 1 => {
                let (chunks, _) = bytes.as_chunks::<4>();
                masks(&mut chunks.iter().map(|&b| f64::from(f32::from_le_bytes(b))))
            }
            Contents::Known(Literal { numbers: Numbers::Reals(values), .. }) => {
                masks(&mut values.iter().copied())
            }
            _ => false,
        }
    }

    /// The contents, if they are available.
    pub fn load(&self, external: &dyn ExternalData) -> Result<Option<Literal>, String> {
        let bytes = match &self.contents {
            Contents::Known(literal) => return Ok((!literal.assumed).then(|| literal.clone())),
            Contents::Missing => return Ok(None),
            Contents::Raw(bytes) => bytes.clone(),
            Contents::External(place) => match external.read(place)? {
                None => return Ok(None),
                Some(bytes) => bytes,
            },
        };
        let elements = count(&self.shape).unwrap_or(usize::MAX);
        if elements.checked_mul(width(self.onnx_type)) != Some(bytes.len()) {
            return Err(format!(
                "`{}`: {} bytes do not fit shape {:?}",
                shown(&self.name),
                bytes.len(),
                self.shape
            ));
        }
        let numbers = decode(self.onnx_type, &bytes);
        Ok(Some(Literal { dtype: self.dtype, shape: self.shape.clone(), numbers, assumed: false }))
    }

    /// The contents for folding: `None` if there are too many, assumed ones if the file lacks them.
    pub(crate) fn fold(&self, external: &dyn ExternalData) -> NodeResult<Option<Literal>> {
        let Some(elements) = count(&self.shape).filter(|&n| n <= MOST_FOLDED) else { return Ok(None) };
        if let Contents::Known(literal) = &self.contents {
            return Ok(Some(literal.clone()));
        }
        let found = self.load(external).map_err(NodeError::Invalid)?;
        Ok(Some(found.unwrap_or_else(|| {
            let numbers = match self.dtype {
                DType::Bool => Numbers::Ints(vec![1; elements]),
                d if d.is_float() => Numbers::Reals(vec![0.0; elements]),
                _ => Numbers::Ints(vec![0; elements]),
            };
            Literal { dtype: self.dtype, shape: self.shape.clone(), numbers, assumed: true }
        })))
    }
}

/// Decodes `int32_data`, which holds all types of up to 32 bits, 16-bit floats as bits.
fn from_int32(dtype: DType, given: &[i32]) -> Numbers {
    match dtype {
        DType::F16 => {
            Numbers::Reals(given.iter().map(|&x| half::f16::from_bits(x as u16).to_f64()).collect())
        }
        DType::Bf16 => {
            Numbers::Reals(given.iter().map(|&x| half::bf16::from_bits(x as u16).to_f64()).collect())
        }
        DType::Bool => Numbers::Ints(given.iter().map(|&x| i64::from(x != 0)).collect()),
        _ => Numbers::Ints(given.iter().map(|&x| i64::from(x)).collect()),
    }
}

/// Decodes packed little-endian elements.
fn decode(onnx: i32, bytes: &[u8]) -> Numbers {
    macro_rules! each {
        ($t:ty, $n:literal, $wrap:ident, $to:expr) => {
            Numbers::$wrap(
                bytes.as_chunks::<$n>().0.iter().map(|&b| <$t>::from_le_bytes(b)).map($to).collect(),
            )
        };
    }
    match onnx {
        2 => each!(u8, 1, Ints, i64::from),
        3 => each!(i8, 1, Ints, i64::from),
        4 => each!(u16, 2, Ints, i64::from),
        5 => each!(i16, 2, Ints, i64::from),
        6 => each!(i32, 4, Ints, i64::from),
        7 => each!(i64, 8, Ints, |x| x),
        9 => each!(u8, 1, Ints, |x| i64::from(x != 0)),
        10 => each!(u16, 2, Reals, |x| half::f16::from_bits(x).to_f64()),
        11 => each!(f64, 8, Reals, |x| x),
        12 => each!(u32, 4, Ints, i64::from),
        13 => each!(u64, 8, Ints, |x| x as i64),
        16 => each!(u16, 2, Reals, |x| half::bf16::from_bits(x).to_f64()),
        _ => each!(f32, 4, Reals, |x| round_to(DType::F32, f64::from(x))),
    }
}

/// The range of an external tensor. A path out of the model's folder is refused.
fn external_place(tensor: &Tensor) -> NodeResult<ExternalRange> {
    let entry = |key: &str| tensor.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
    let number = |key: &str| -> NodeResult<Option<u64>> {
        let parse = |text: &str| {
            text.parse().map_err(|_| {
                NodeError::invalid(format!("the external {key} `{}` is not a number", shown(text)))
            })
        };
        entry(key).map(parse).transpose()
    };
    let location = entry("location").ok_or_else(|| NodeError::invalid("external data has no location"))?;
    if !stays_inside(location) {
        return Err(NodeError::invalid(format!(
            "external data in `{}`, which leads out of the model's folder: refused",
            shown(location)
        )));
    }
    let elements: Option<u64> =
        tensor.dims.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
    let length = match number("length")? {
        Some(length) => Some(length),
        None => elements.and_then(|n| n.checked_mul(width(tensor.data_type) as u64)),
    };
    let length =
        length.ok_or_else(|| NodeError::invalid("the length of the external data is out of range"))?;
    Ok(ExternalRange { location: location.into(), offset: number("offset")?.unwrap_or(0), length })
}

/// Whether a path is relative and stays in its folder, on every operating system.
fn stays_inside(location: &str) -> bool {
    let plain = !location.is_empty() && !location.contains(['\0', ':']) && !location.starts_with(['/', '\\']);
    plain && location.split(['/', '\\']).all(|part| part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_out_of_the_folder_are_refused() {
        for bad in
            ["/etc/passwd", "../x", "a/../../x", "..", "C:\\x", "\\\\host\\x", "", "a\0b", "a\\..\\..\\x"]
        {
            assert!(!stays_inside(bad), "{bad:?}");
        }
        for good in ["model.onnx.data", "weights/part..1", "a/b/c", "./x"] {
            assert!(stays_inside(good), "{good:?}");
        }
    }

    #[test]
    fn contents_must_fit_the_declared_shape() {
        let tensor = |dims: &[i64], raw: &'static [u8]| Tensor {
            dims: dims.to_vec(),
            data_type: 1,
            raw_data: Bytes::from_static(raw),
            ..Tensor::default()
        };
        assert!(StoredTensor::read(&tensor(&[2], &[0; 8])).is_ok());
        assert!(StoredTensor::read(&tensor(&[2], &[0; 7])).is_err());
        assert!(StoredTensor::read(&tensor(&[-2], &[0; 8])).is_err());
        assert!(StoredTensor::read(&tensor(&[i64::MAX, i64::MAX], &[0; 8])).is_err());
        // A gigantic shape without contents is a missing weight; nothing is allocated for it.
        let missing = StoredTensor::read(&tensor(&[1 << 40], &[])).unwrap();
        assert!(missing.is_missing());
        assert_eq!(missing.fold(&NoExternalData), Ok(None));
    }
}
