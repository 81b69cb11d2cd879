//! Ops that make tensors from nothing: a constant everywhere, or each element's own position.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{DType, Real, TensorType},
};
use serde::{Deserialize, Serialize};

/// A tensor whose elements are all the same.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fill {
    /// The element.
    pub value: Real,
    /// The tensor.
    pub ty: TensorType,
}

impl Operator for Fill {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 0)?;
        Ok(vec![self.ty.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Fill { value: self.value, ty: TensorType::new(self.ty.dtype, region.output_shape(0)) }.into()
    }
}

/// Each element is its own position along one dimension, counted from `start`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iota {
    /// The tensor.
    pub ty: TensorType,
    /// The dimension that is counted along.
    pub axis: usize,
    /// The first position (not zero in a part of a split).
    pub start: u64,
}

impl Operator for Iota {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 0)?;
        axis_in(self.axis, &self.ty)?;
        require!(self.ty.dtype != DType::Bool, "positions are not truth values");
        require!(self.start < 1 << 52, "start {} is absurd", self.start);
        Ok(vec![self.ty.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let start = self.start + region.output_block(0)[self.axis].start;
        Iota { ty: TensorType::new(self.ty.dtype, region.output_shape(0)), axis: self.axis, start }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng};

    impl Examples for Fill {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Fill { value: Real(f64::NEG_INFINITY), ty: "f32[8]".parse().unwrap() },
                &[],
                "()->([d0]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
            Case::new(Fill { value: Real(1.5), ty }, vec![])
        }
    }

    impl Examples for Iota {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Iota { ty: "i32[8,6]".parse().unwrap(), axis: 1, start: 0 },
                &[],
                "()->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            let axis = rng.between(0, shape.len() as u64 - 1) as usize;
            let dtype = rng.pick(&[DType::F64, DType::I32, DType::I64]);
            Case::new(Iota { ty: TensorType::new(dtype, &shape[..]), axis, start: rng.between(0, 3) }, vec![])
        }
    }
}
