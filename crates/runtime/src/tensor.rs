//! Tensors in memory: owned [`HostTensor`]s, and the borrowed views that kernels work on.
//!
//! Elements are contiguous, last dimension fastest. Kernels compute in `f32` or `f64`. 16-bit floats are a
//! storage format: they are widened before each kernel and narrowed after it.

use crate::math;
use half::{bf16, f16};
use shardwright_graph::{Block, DType, Dims, Shape, TensorType, block};

macro_rules! storage {
    ($($kind:ident: $t:ty),*) => {
        /// The elements of an owned tensor.
        #[derive(Clone, PartialEq, Debug)]
        #[allow(missing_docs)]
        pub enum Data { $($kind(Vec<$t>)),* }

        /// Borrowed elements.
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs)]
        pub enum Elements<'a> { $($kind(&'a [$t])),* }

        /// Borrowed elements, for writing.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub enum ElementsMut<'a> { $($kind(&'a mut [$t])),* }

        impl Data {
            /// Zeros of this type.
            pub fn zeros(dtype: DType, count: usize) -> Self {
                match dtype { $(DType::$kind => Data::$kind(vec![Default::default(); count])),* }
            }

            /// The elements' type.
            pub fn dtype(&self) -> DType {
                match self { $(Data::$kind(_) => DType::$kind),* }
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Data::$kind(v) => v.len()),* }
            }

            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            fn elements(&self) -> Elements<'_> {
                match self { $(Data::$kind(v) => Elements::$kind(v)),* }
            }

            fn elements_mut(&mut self) -> ElementsMut<'_> {
                match self { $(Data::$kind(v) => ElementsMut::$kind(v)),* }
            }
        }

        impl Elements<'_> {
            /// The elements' type.
            pub fn dtype(&self) -> DType {
                match self { $(Elements::$kind(_) => DType::$kind),* }
            }
        }

        impl ElementsMut<'_> {
            /// The same elements, borrowed for a shorter time.
            pub fn reborrow(&mut self) -> ElementsMut<'_> {
                match self { $(ElementsMut::$kind(v) => ElementsMut::$kind(v)),* }
            }

            /// The elements' type.
            pub fn dtype(&self) -> DType {
                match self { $(ElementsMut::$kind(_) => DType::$kind),* }
            }
        }

        $(impl Element for $t {
            const DTYPE: DType = DType::$kind;
            fn of<'a>(elements: Elements<'a>) -> Option<&'a [Self]> {
                match elements { Elements::$kind(v) => Some(v), _ => None }
            }
            fn of_mut<'a>(elements: &'a mut ElementsMut<'_>) -> Option<&'a mut [Self]> {
                match elements { ElementsMut::$kind(v) => Some(v), _ => None }
            }
            fn owned(values: Vec<Self>) -> Data {
                Data::$kind(values)
            }
        })*
    };
}

/// A Rust type of tensor elements.
pub trait Element: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// The element type in the graph.
    const DTYPE: DType;
    /// The elements as a slice of this type; none where they have another type.
    fn of<'a>(elements: Elements<'a>) -> Option<&'a [Self]>;
    /// The elements as a slice of this type; none where they have another type.
    fn of_mut<'a>(elements: &'a mut ElementsMut<'_>) -> Option<&'a mut [Self]>;
    /// Owned data of this type.
    fn owned(values: Vec<Self>) -> Data;
}

// Truth values are bytes 0 and 1, so a buffer of them can be sent and compared like any other.
storage!(F32: f32, F64: f64, Bf16: bf16, F16: f16, I32: i32, I64: i64, Bool: u8);

/// A float that kernels compute in.
pub trait Float:
    Element
    + bytemuck::Pod
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::MulAssign
    + PartialOrd
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;
    /// The nearest number of this type.
    fn from_f64(x: f64) -> Self;
    /// The number as `f64`.
    fn to_f64(self) -> f64;
    /// e to the x.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Gauss error function.
    fn erf(self) -> Self;
    /// Sine.
    fn sin(self) -> Self;
    /// Cosine.
    fn cos(self) -> Self;
    /// To the power of `p`.
    fn powf(self, p: Self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// The larger of the two; the other one where one is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of the two; the other one where one is NaN.
    fn min(self, other: Self) -> Self;
    /// `self * a + b`, in one instruction where the target has it.
    fn mul_add(self, a: Self, b: Self) -> Self;
}

macro_rules! float {
    ($t:ident, exp: $exp:path, tanh: $tanh:path, erf: $erf:path) => {
        impl Float for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $t::ln(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(self)
            }
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn sin(self) -> Self {
                $t::sin(self)
            }
            #[inline(always)]
            fn cos(self) -> Self {
                $t::cos(self)
            }
            #[inline(always)]
            fn powf(self, p: Self) -> Self {
                $t::powf(self, p)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                $t::abs(self)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                $t::max(self, other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                $t::min(self, other)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                $t::mul_add(self, a, b)
            }
        }
    };
}

float!(f32, exp: math::exp, tanh: math::tanh, erf: math::erf);
float!(f64, exp: f64::exp, tanh: f64::tanh, erf: math::erf_f64);

/// A borrowed tensor.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Sizes.
    pub shape: &'a [u64],
    /// Elements, last dimension fastest.
    pub data: Elements<'a>,
}

/// A borrowed tensor, for writing. Its former content is unspecified: kernels write every element.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// Sizes.
    pub shape: &'a [u64],
    /// Elements, last dimension fastest.
    pub data: ElementsMut<'a>,
}

impl Data {
    /// Each number rounded to the nearest element of this type; as truth values, whether it is not zero.
    pub fn of_reals(dtype: DType, values: Vec<f64>) -> Self {
        match dtype {
            DType::F32 => Self::F32(values.iter().map(|&x| x as f32).collect()),
            DType::F64 => Self::F64(values),
            DType::Bf16 => Self::Bf16(values.iter().map(|&x| bf16::from_f64(x)).collect()),
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f64(x)).collect()),
            DType::I32 => Self::I32(values.iter().map(|&x| x as i32).collect()),
            DType::I64 => Self::I64(values.iter().map(|&x| x as i64).collect()),
            DType::Bool => Self::Bool(values.iter().map(|&x| u8::from(x != 0.0)).collect()),
        }
    }
}

/// An owned tensor in this computer's memory: shape and elements.
#[derive(Clone, PartialEq, Debug)]
pub struct HostTensor {
    shape: Shape,
    data: Data,
}

impl HostTensor {
    /// Zeros of this type.
    pub fn zeros(ty: &TensorType) -> Self {
        let data = Data::zeros(ty.dtype, ty.shape.elements() as usize);
        Self { shape: ty.shape.clone(), data }
    }

    /// A tensor of this shape and data.
    ///
    /// # Panics
    /// If the number of elements is not the shape's.
    pub fn new(shape: Shape, data: Data) -> Self {
        assert_eq!(shape.elements() as usize, data.len(), "elements for {shape}");
        Self { shape, data }
    }

    /// A tensor of this shape and elements.
    ///
    /// # Panics
    /// If the number of elements is not the shape's.
    pub fn from_vec<T: Element>(shape: impl Into<Shape>, values: Vec<T>) -> Self {
        Self::new(shape.into(), T::owned(values))
    }

    /// Element type and shape.
    pub fn ty(&self) -> TensorType {
        TensorType { dtype: self.data.dtype(), shape: self.shape.clone() }
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The data.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The elements as type `T`; none where they have another type.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        T::of(self.data.elements())
    }

    /// The elements converted to `f64`: for checks and printing, not for speed.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        match &self.data {
            Data::F32(v) => v.iter().map(|&x| x.into()).collect(),
            Data::F64(v) => v.clone(),
            Data::Bf16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Data::F16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Data::I32(v) => v.iter().map(|&x| x.into()).collect(),
            Data::I64(v) => v.iter().map(|&x| x as f64).collect(),
            Data::Bool(v) => v.iter().map(|&x| x.into()).collect(),
        }
    }

    /// A copy of one of its blocks.
    pub fn block(&self, block: &Block) -> Self {
        let mut part = Self::zeros(&TensorType { dtype: self.data.dtype(), shape: block::extents(block) });
        let origin = smallvec::smallvec![0; block.len()];
        copy_block(&self.shape, &self.data, block, &mut part, &origin);
        part
    }

    /// Overwrites the block that starts at `origin` with `part`.
    pub fn set_block(&mut self, origin: &Dims, part: &HostTensor) {
        copy_block(&part.shape, &part.data, &block::whole(&part.shape), self, origin);
    }

    /// A view of it.
    pub fn view(&self) -> View<'_> {
        View { shape: &self.shape, data: self.data.elements() }
    }

    /// A view of it, for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { shape: &self.shape, data: self.data.elements_mut() }
    }
}

/// Copies `block` of a tensor into `to` at `origin`, row by row.
fn copy_block(shape: &[u64], from: &Data, block: &Block, to: &mut HostTensor, origin: &Dims) {
    fn rows<E: Copy>(
        shape: &[u64],
        from: &[E],
        block: &Block,
        to_shape: &[u64],
        to: &mut [E],
        origin: &Dims,
    ) {
        let row = block.last().map_or(1, |r| (r.end - r.start) as usize);
        let count = block::elements(block) as usize;
        let outer = block.len().saturating_sub(1);
        let mut index = Dims::from_elem(0, outer);
        let flat = |shape: &[u64], at: &dyn Fn(usize) -> u64| {
            shape.iter().enumerate().fold(0, |flat, (d, n)| flat * n + at(d)) as usize
        };
        for _ in 0..count / row.max(1) {
            let step = |d: usize| index.get(d).copied().unwrap_or(0);
            let source = flat(shape, &|d| block[d].start + step(d));
            let target = flat(to_shape, &|d| origin[d] + step(d));
            to[target..target + row].copy_from_slice(&from[source..source + row]);
            for d in (0..outer).rev() {
                index[d] += 1;
                if index[d] < block[d].end - block[d].start {
                    break;
                }
                index[d] = 0;
            }
        }
    }
    macro_rules! each {
        ($($kind:ident),*) => {
            match (from, &mut to.data) {
                $((Data::$kind(x), Data::$kind(y)) => rows(shape, x, block, &to.shape, y, origin),)*
                _ => panic!("blocks of {} and {}", from.dtype(), to.data.dtype()),
            }
        };
    }
    each!(F32, F64, Bf16, F16, I32, I64, Bool);
}
