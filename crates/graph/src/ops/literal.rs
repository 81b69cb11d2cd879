//! Literal: a tensor with listed elements, such as the tables and masks of an imported program.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{Real, TensorType},
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The elements, last dimension fastest. Whole numbers beyond 2^53 cannot be written.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Literal {
    /// The tensor.
    pub ty: TensorType,
    /// Its elements.
    pub values: LiteralValues,
}

/// Elements that copies of an op share.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<Real>", into = "Vec<Real>")]
pub struct LiteralValues(pub Arc<[Real]>);

impl From<Vec<Real>> for LiteralValues {
    fn from(values: Vec<Real>) -> Self {
        Self(values.into())
    }
}

impl From<LiteralValues> for Vec<Real> {
    fn from(values: LiteralValues) -> Self {
        values.0.to_vec()
    }
}

impl Operator for Literal {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 0)?;
        self.ty.shape.check().map_err(OpError::new)?;
        let given = self.values.0.len() as u64;
        require!(given == self.ty.shape.elements(), "{given} elements for {}", self.ty);
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
        let block = region.output_block(0);
        let shape = region.output_shape(0);
        if shape == self.ty.shape {
            return self.clone().into();
        }
        let values = (0..shape.elements())
            .map(|flat| {
                let (mut rest, mut at, mut stride) = (flat, 0, 1);
                for d in (0..shape.rank()).rev() {
                    at += (block[d].start + rest % shape[d]) * stride;
                    rest /= shape[d];
                    stride *= self.ty.shape[d];
                }
                self.values.0[at as usize]
            })
            .collect::<Vec<Real>>();
        Literal { ty: TensorType::new(self.ty.dtype, shape), values: values.into() }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng},
        types::DType,
    };

    impl Examples for Literal {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Literal { ty: "f32[2]".parse().unwrap(), values: vec![Real(1.0), Real(2.5)].into() },
                &[],
                "()->([d0]) {d0=2}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let ty = TensorType::new(rng.pick(&[DType::F64, DType::I32]), &rng.shape(0, 3)[..]);
            let values = (0..ty.shape.elements()).map(|i| Real(i as f64)).collect::<Vec<_>>().into();
            Case::new(Literal { ty, values }, vec![])
        }
    }
}
