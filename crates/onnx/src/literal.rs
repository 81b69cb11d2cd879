//! Tensors whose contents are known during the import: shapes, axes, masks, scalars.

use super::{
    error::{NodeError, NodeResult},
    pending::AxisSelection,
};
use shardwright_graph::DType;

/// The elements, widened. Every supported ONNX element type fits one of the two.
#[derive(Clone, PartialEq, Debug)]
pub enum Numbers {
    /// Whole numbers, and truth values as 0 and 1.
    Ints(Vec<i64>),
    /// Floating-point numbers.
    Reals(Vec<f64>),
}

/// A tensor with known contents. Unlike tensors of the graph it may be empty.
#[derive(Clone, PartialEq, Debug)]
pub struct Literal {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<u64>,
    /// Contents, last dimension fastest.
    pub numbers: Numbers,
    /// Whether the file lacks these contents, or those that they were computed from. Missing whole numbers are assumed to
    /// be 0, missing truth values true.
    pub assumed: bool,
}

/// The number of elements of a shape; `None` if `usize` cannot count them.
pub(crate) fn count(shape: &[u64]) -> Option<usize> {
    shape.iter().try_fold(1u64, |n, &s| n.checked_mul(s)).and_then(|n| usize::try_from(n).ok())
}

/// The number of elements of a part of a literal's shape.
///
/// The whole shape's count fits `usize`, so a part's count overflows only beside a dimension of size zero. The literal is
/// empty then, and so is the part.
pub(crate) fn part_count(shape: &[u64]) -> usize {
    count(shape).unwrap_or(0)
}

impl Literal {
    /// Whole numbers of this type and shape.
    pub(crate) fn ints(dtype: DType, shape: Vec<u64>, values: Vec<i64>) -> Self {
        Self { dtype, shape, numbers: Numbers::Ints(values), assumed: false }
    }

    /// Floating-point numbers of this type and shape.
    pub(crate) fn reals(dtype: DType, shape: Vec<u64>, values: Vec<f64>) -> Self {
        Self { dtype, shape, numbers: Numbers::Reals(values), assumed: false }
    }

    /// A list of whole numbers: a shape, axes.
    pub(crate) fn list(values: Vec<i64>) -> Self {
        Self::ints(DType::I64, vec![values.len() as u64], values)
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        match &self.numbers {
            Numbers::Ints(v) => v.len(),
            Numbers::Reals(v) => v.len(),
        }
    }

    /// The elements as whole numbers.
    pub(crate) fn as_ints(&self) -> NodeResult<&[i64]> {
        match &self.numbers {
            Numbers::Ints(v) => Ok(v),
            Numbers::Reals(_) => {
                Err(NodeError::invalid(format!("expected whole numbers, got {}", self.dtype)))
            }
        }
    }

    /// The elements as floating-point numbers.
    pub(crate) fn as_reals(&self) -> NodeResult<&[f64]> {
        match &self.numbers {
            Numbers::Reals(v) => Ok(v),
            Numbers::Ints(_) => {
                Err(NodeError::invalid(format!("expected floating-point numbers, got {}", self.dtype)))
            }
        }
    }

    /// The elements as real numbers.
    pub(crate) fn to_reals(&self) -> Vec<f64> {
        match &self.numbers {
            Numbers::Ints(v) => v.iter().map(|&x| x as f64).collect(),
            Numbers::Reals(v) => v.clone(),
        }
    }

    /// The only element as a real number; `None` if there is not exactly one.
    pub(crate) fn scalar(&self) -> Option<f64> {
        match &self.numbers {
            Numbers::Ints(v) if v.len() == 1 => Some(v[0] as f64),
            Numbers::Reals(v) if v.len() == 1 => Some(v[0]),
            _ => None,
        }
    }

    /// The number that all elements equal; `None` if they differ.
    pub(crate) fn uniform(&self) -> Option<f64> {
        match &self.numbers {
            Numbers::Ints(v) => v.iter().all(|x| *x == v[0]).then(|| v.first().map(|&x| x as f64))?,
            Numbers::Reals(v) => {
                v.iter().all(|x| x.to_bits() == v[0].to_bits()).then(|| v.first().copied())?
            }
        }
    }

    /// The same elements in another shape.
    pub(crate) fn reshaped(&self, shape: Vec<u64>) -> Self {
        Self { shape, ..self.clone() }
    }

    /// The elements at these positions, in this shape.
    pub(crate) fn pick(&self, shape: Vec<u64>, positions: impl Iterator<Item = usize>) -> Self {
        // An empty shape takes no positions, even if the iterator has empty rows to walk.
        let positions = positions.take(part_count(&shape));
        let numbers = match &self.numbers {
            Numbers::Ints(v) => Numbers::Ints(positions.map(|i| v[i]).collect()),
            Numbers::Reals(v) => Numbers::Reals(positions.map(|i| v[i]).collect()),
        };
        Self { dtype: self.dtype, shape, numbers, assumed: self.assumed }
    }

    /// The elements at the selected positions of one dimension.
    pub(crate) fn select(&self, selection: &AxisSelection) -> Self {
        let inner = part_count(&self.shape[selection.axis + 1..]) as u64;
        let outer = part_count(&self.shape[..selection.axis]) as u64;
        let row = self.shape[selection.axis];
        let mut shape = self.shape.clone();
        shape[selection.axis] = selection.ranges.iter().map(|r| r.end - r.start).sum();
        let blocks = (0..outer).flat_map(|o| {
            let place = move |i: u64| (o * row + i) * inner;
            selection.ranges.iter().flat_map(move |r| place(r.start)..place(r.end))
        });
        self.pick(shape, blocks.map(|i| i as usize))
    }

    /// The elements converted to another type, with the semantics of ONNX's Cast.
    pub(crate) fn cast(&self, dtype: DType) -> Self {
        let numbers = match (&self.numbers, dtype) {
            (Numbers::Ints(v), DType::Bool) => Numbers::Ints(v.iter().map(|&x| i64::from(x != 0)).collect()),
            (Numbers::Reals(v), DType::Bool) => {
                Numbers::Ints(v.iter().map(|&x| i64::from(x != 0.0)).collect())
            }
            (Numbers::Ints(v), DType::I32) => Numbers::Ints(v.iter().map(|&x| i64::from(x as i32)).collect()),
            (Numbers::Ints(v), DType::I64) => Numbers::Ints(v.clone()),
            (Numbers::Reals(v), DType::I32 | DType::I64) => {
                Numbers::Ints(v.iter().map(|&x| x as i64).collect())
            }
            (_, float) => Numbers::Reals(self.to_reals().into_iter().map(|x| round_to(float, x)).collect()),
        };
        Self { dtype, numbers, shape: self.shape.clone(), assumed: self.assumed }
    }
}

/// The nearest number that the type represents.
pub(crate) fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::Bf16 => half::bf16::from_f64(x).to_f64(),
        _ => x,
    }
}
