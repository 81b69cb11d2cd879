//! An op of which only the types are known: a call into a library, a random number generator.
//!
//! It is planned replicated, which is right for whatever it computes as long as it is a function of its
//! inputs. It has no kernel and no known cost besides the bytes that it reads and writes.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, Rule, TensorMap},
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// What is called, and what it makes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opaque {
    /// What is called, in the words of where it comes from.
    pub call: String,
    /// Types of the results.
    pub makes: Vec<TensorType>,
}

fn whole(ty: &TensorType) -> TensorMap {
    TensorMap::new((0..ty.rank()).map(|_| DimMap::opaque()))
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
        Rule {
            inputs: inputs.iter().map(whole).collect(),
            outputs: outputs.iter().map(whole).collect(),
            ..Rule::default()
        }
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
