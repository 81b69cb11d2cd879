//! An op with known types and unknown meaning: a call into a library, a random number generator.
//!
//! It is planned replicated, which is right for every function of its inputs. It has no kernel, and its only known cost
//! is the bytes that it reads and writes.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// A call with the types of its results.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opaque {
    /// The name of the called function in the imported program.
    pub call: String,
    /// Types of the results.
    pub makes: Vec<TensorType>,
}

impl Operator for Opaque {
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(!self.makes.is_empty() && self.makes.len() <= 64, "makes {} tensors", self.makes.len());
        for ty in &self.makes {
            ty.shape.check().map_err(OpError::new)?;
        }
        Ok(self.makes.clone())
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::replicated(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new(format!("`{}` is opaque: it has no known gradient", self.call)))
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, NORMAL, Rng},
        types::DType,
    };

    impl Examples for Opaque {
        const DIFFERENTIABLE: bool = false;
        const RUNS: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Opaque { call: "library".into(), makes: vec!["f32[8,6]".parse().unwrap()] },
                &["f32[8,6]"],
                "([_, _])->([_, _]) {}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
            Case::new(Opaque { call: "library".into(), makes: vec![ty.clone()] }, vec![(ty, NORMAL)])
        }
    }
}
