//! Tensors that a file stores: weights and constants, inline, in another file, or left out.

use super::{
    error::{Tried, Trouble, shown},
    literal::{Literal, Numbers, count, round_to},
    proto::Tensor,
};
use bytes::Bytes;
use shardwright_graph::DType;

/// The most elements of a stored tensor that are looked at while importing.
pub(crate) const MOST_FOLDED: usize = 1 << 22;

/// A place in another file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalPlace {
    /// The file, relative to the model's folder. Checked: it does not lead out of it.
    pub location: String,
    /// The first byte.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
}

/// Reads what a model keeps in other files. The front end itself opens no files.
pub trait ExternalData {
    /// The bytes at a place; none if there is no such file (the model was passed around without its weights).
    fn read(&self, place: &ExternalPlace) -> Result<Option<Bytes>, String>;
}

/// For models that come alone: nothing that they keep elsewhere is there.
pub struct NoExternalData;

impl ExternalData for NoExternalData {
    fn read(&self, _: &ExternalPlace) -> Result<Option<Bytes>, String> {
        Ok(None)
    }
}

/// Where a stored tensor's contents are.
#[derive(Clone, PartialEq, Debug)]
enum Contents {
    /// Little-endian, packed.
    Raw(Bytes),
    Known(Literal),
    External(ExternalPlace),
    Missing,
}

/// A tensor that a file stores.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored {
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

/// The element type that stands for ONNX's. Small and unsigned integers are widened.
pub(crate) fn element_type(onnx: i32) -> Tried<DType> {
    Ok(match onnx {
        1 => DType::F32,
        2..=6 => DType::I32,
        7 | 12 | 13 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::Bf16,
        _ => return Err(Trouble::unsupported(format!("element type {}", type_name(onnx)))),
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

/// Bytes that an element takes in the file.
fn width(onnx: i32) -> usize {
    match onnx {
        2 | 3 | 9 => 1,
        4 | 5 | 10 | 16 => 2,
        7 | 11 | 13 => 8,
        _ => 4,
    }
}

/// Sizes from a file, refused if negative.
pub(crate) fn sizes(dims: &[i64]) -> Tried<Vec<u64>> {
    if dims.len() > shardwright_graph::MAX_RANK {
        return Err(Trouble::wrong(format!("{} dimensions are too many", dims.len())));
    }
    dims.iter()
        .map(|&d| u64::try_from(d).map_err(|_| Trouble::wrong(format!("a dimension of size {d}"))))
        .collect()
}

impl Stored {
    /// Reads the description of a tensor; its contents stay where they are.
    pub(crate) fn read(tensor: &Tensor) -> Tried<Self> {
        let dtype = element_type(tensor.data_type)?;
        let shape = sizes(&tensor.dims)?;
        let name = tensor.name.clone();
        let elements = count(&shape).ok_or_else(|| Trouble::wrong("more elements than can be counted"))?;
        let typed = |found: usize, numbers: Numbers| -> Tried<Contents> {
            if found != elements {
                return Err(Trouble::wrong(format!("{found} elements are given for the shape {shape:?}")));
            }
            Ok(Contents::Known(Literal { dtype, shape: shape.clone(), numbers, assumed: false }))
        };
        let contents = if tensor.data_location == 1 {
            Contents::External(external_place(tensor)?)
        } else if !tensor.raw_data.is_empty() {
            let expected = elements.checked_mul(width(tensor.data_type));
            if expected != Some(tensor.raw_data.len()) {
                return Err(Trouble::wrong(format!(
                    "{} bytes are given for the shape {shape:?}",
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
            return Err(Trouble::wrong(format!("contents do not fit {}", type_name(tensor.data_type))));
        }
        Ok(Self { name, dtype, onnx_type: tensor.data_type, shape, contents })
    }

    /// A stored tensor with these contents.
    pub(crate) fn known(name: &str, literal: Literal) -> Self {
        let (dtype, shape) = (literal.dtype, literal.shape.clone());
        Self { name: name.into(), dtype, onnx_type: 0, shape, contents: Contents::Known(literal) }
    }

    /// Whether the file comes without the contents.
    pub fn is_missing(&self) -> bool {
        match &self.contents {
            Contents::Missing => true,
            Contents::Known(literal) => literal.assumed,
            _ => false,
        }
    }

    /// Whether the contents lie in another file.
    pub fn is_external(&self) -> bool {
        matches!(self.contents, Contents::External(_))
    }

    /// Whether the contents are those of a mask that is added to scores: nothing, or so much less that nothing
    /// is left. Weights are told by their first element, mostly.
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

    /// The contents, if they are there.
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
                "`{}`: {} bytes for the shape {:?}",
                shown(&self.name),
                bytes.len(),
                self.shape
            ));
        }
        let numbers = decode(self.onnx_type, &bytes);
        Ok(Some(Literal { dtype: self.dtype, shape: self.shape.clone(), numbers, assumed: false }))
    }

    /// The contents for folding: nothing if there are too many; assumed ones if the file lacks them.
    pub(crate) fn fold(&self, external: &dyn ExternalData) -> Tried<Option<Literal>> {
        let Some(elements) = count(&self.shape).filter(|&n| n <= MOST_FOLDED) else { return Ok(None) };
        if let Contents::Known(literal) = &self.contents {
            return Ok(Some(literal.clone()));
        }
        let found = self.load(external).map_err(Trouble::Wrong)?;
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

/// `int32_data` holds everything of up to 32 bits, 16-bit floats by their bits.
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

/// Packed little-endian elements.
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

/// Where an external tensor lies. A path that leads out of the model's folder is refused.
fn external_place(tensor: &Tensor) -> Tried<ExternalPlace> {
    let entry = |key: &str| tensor.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
    let number = |key: &str| -> Tried<Option<u64>> {
        let parse = |text: &str| {
            text.parse().map_err(|_| Trouble::wrong(format!("external {key} `{}`", shown(text))))
        };
        entry(key).map(parse).transpose()
    };
    let location = entry("location").ok_or_else(|| Trouble::wrong("external data without a location"))?;
    if !stays_inside(location) {
        return Err(Trouble::wrong(format!(
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
    let length = length.ok_or_else(|| Trouble::wrong("external data of an absurd length"))?;
    Ok(ExternalPlace { location: location.into(), offset: number("offset")?.unwrap_or(0), length })
}

/// Whether a path is relative and stays in its folder, on every system.
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
        assert!(Stored::read(&tensor(&[2], &[0; 8])).is_ok());
        assert!(Stored::read(&tensor(&[2], &[0; 7])).is_err());
        assert!(Stored::read(&tensor(&[-2], &[0; 8])).is_err());
        assert!(Stored::read(&tensor(&[i64::MAX, i64::MAX], &[0; 8])).is_err());
        // A gigantic shape without contents is a weight that was left out; nothing is allocated for it.
        let missing = Stored::read(&tensor(&[1 << 40], &[])).unwrap();
        assert!(missing.is_missing());
        assert_eq!(missing.fold(&NoExternalData), Ok(None));
    }
}
