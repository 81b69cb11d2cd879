//! Examples of op kinds, for tests: one with its sharding rule as a golden line, and any number of random cases. Each op
//! kind has its examples in its own file, so that the generic tests of all crates cover it.

use crate::{
    graph::Init,
    ops::Op,
    types::{DType, Real, Shape, TensorType},
};

/// The examples of an op kind.
pub trait Examples {
    /// Whether the gradient is compared with finite differences. Not for kinds that have none, and not for those whose
    /// gradient accounts for that of another op.
    const DIFFERENTIABLE: bool = true;
    /// Float outputs into which no gradient flows: the op's own gradient reads them.
    const AUXILIARY_OUTPUTS: &[usize] = &[];
    /// Whether there is a kernel.
    const RUNS: bool = true;

    /// An example with the line that its rule prints as.
    fn golden() -> Golden;

    /// A random case.
    fn case(rng: &mut Rng) -> Case;
}

/// The examples of an op kind as a value.
#[derive(Clone, Copy)]
pub struct OpExamples {
    /// The kind's name.
    pub kind: &'static str,
    /// [`Examples::DIFFERENTIABLE`].
    pub differentiable: bool,
    /// [`Examples::AUXILIARY_OUTPUTS`].
    pub auxiliary_outputs: &'static [usize],
    /// [`Examples::RUNS`].
    pub runs: bool,
    /// [`Examples::golden`].
    pub golden: fn() -> Golden,
    /// [`Examples::case`].
    pub case: fn(&mut Rng) -> Case,
}

impl OpExamples {
    /// The examples of the kind `E`, which has this name.
    pub(crate) const fn of<E: Examples>(kind: &'static str) -> Self {
        Self {
            kind,
            differentiable: E::DIFFERENTIABLE,
            auxiliary_outputs: E::AUXILIARY_OUTPUTS,
            runs: E::RUNS,
            golden: E::golden,
            case: E::case,
        }
    }
}

/// An op on inputs of some types, and its rule as text.
pub struct Golden {
    /// The op.
    pub op: Op,
    /// Types of its inputs, as text.
    pub inputs: &'static [&'static str],
    /// The line that its rule prints as.
    pub rule: &'static str,
}

impl Golden {
    /// An op on inputs of these types, with the line that its rule prints as.
    pub fn new(op: impl Into<Op>, inputs: &'static [&'static str], rule: &'static str) -> Self {
        Self { op: op.into(), inputs, rule }
    }
}

/// An op with its inputs' types and the distributions of their values.
#[derive(Debug)]
pub struct Case {
    /// The op.
    pub op: Op,
    /// Type and initial value of each input.
    pub inputs: Vec<CaseInput>,
}

/// Type and initial value of an input.
pub type CaseInput = (TensorType, Init);

impl Case {
    /// An op on these inputs.
    pub fn new(op: impl Into<Op>, inputs: Vec<CaseInput>) -> Self {
        Self { op: op.into(), inputs }
    }

    /// The inputs' types.
    pub fn input_types(&self) -> Vec<TensorType> {
        self.inputs.iter().map(|(ty, _)| ty.clone()).collect()
    }

    /// The outputs' types.
    ///
    /// # Panics
    /// If the op refuses the inputs.
    pub fn output_types(&self) -> Vec<TensorType> {
        let types = self.op.operator().infer(&self.input_types());
        types.unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

/// A small deterministic generator (SplitMix64): every run has the same cases.
pub struct Rng(u64);

/// The output function of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Rng {
    /// A generator for this seed.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(0x5eed)))
    }

    /// Any number.
    #[expect(clippy::should_implement_trait, reason = "the numbers have no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// A size that can be split in two most of the time.
    pub fn size(&mut self) -> u64 {
        if self.between(0, 4) == 0 { self.between(1, 5) } else { 2 * self.between(1, 3) }
    }

    /// True or false.
    pub fn flip(&mut self) -> bool {
        self.next().is_multiple_of(2)
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.between(0, from.len() as u64 - 1) as usize]
    }

    /// A shape of `low..=high` dimensions.
    pub fn shape(&mut self, low: u64, high: u64) -> Vec<u64> {
        (0..self.between(low, high)).map(|_| self.size()).collect()
    }

    /// A dimension of a shape.
    pub fn axis(&mut self, shape: &[u64]) -> usize {
        self.between(0, shape.len() as u64 - 1) as usize
    }

    /// Ids below a number, of either integer type.
    pub fn ids(&mut self, shape: &[u64], below: u64) -> CaseInput {
        (TensorType::new(self.pick(&[DType::I32, DType::I64]), shape), Init::Below(below))
    }

    /// A shape that broadcasts to `shape`: some dimensions one, some leading ones missing.
    pub fn broadcastable(&mut self, shape: &[u64]) -> Vec<u64> {
        let skip = self.between(0, shape.len() as u64) as usize;
        shape[skip..].iter().map(|&n| if self.between(0, 2) == 0 { 1 } else { n }).collect()
    }

    /// A shape of `low..=3` dimensions, and `count` inputs of it.
    pub fn repeat(&mut self, low: u64, count: usize) -> (Vec<u64>, Vec<CaseInput>) {
        let shape = self.shape(low, 3);
        let inputs = vec![f64s(&shape[..]); count];
        (shape, inputs)
    }
}

/// Normally distributed values.
pub const NORMAL: Init = Init::Normal(Real(1.0));

/// Normally distributed 64-bit floats.
pub fn f64s(shape: impl Into<Shape>) -> CaseInput {
    (TensorType::new(DType::F64, shape), NORMAL)
}

/// 64-bit floats away from zero.
pub fn positive(shape: impl Into<Shape>) -> CaseInput {
    (TensorType::new(DType::F64, shape), Init::Constant(Real(1.3)))
}

/// Truth values.
pub fn bools(shape: impl Into<Shape>) -> CaseInput {
    (TensorType::new(DType::Bool, shape), Init::Below(2))
}
