//! Slots of experts: every token gets the next free slot of each of its experts.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::{Op, slot_grid::SlotGrid},
    region::Region,
    require,
    rule::{Rule, TensorMap},
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Slot ids `[n, s, k]` (`i32`) from the experts of each token: `expert * capacity + slot`.
///
/// Slots are given in the order of tokens, and of experts within a token. A token beyond an expert's capacity is dropped: its
/// slot id is the number of all slots. Only the tokens of one sample `n` compete.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slots {
    /// Number of experts.
    pub experts: u64,
    /// Slots of each expert per sample.
    pub capacity: u64,
}

/// Most experts: the kernel counts the slots of each.
const MOST_EXPERTS: u64 = 1 << 20;

impl Operator for Slots {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let ids = &inputs[0];
        require!(ids.dtype.is_int(), "ids of experts must be i32 or i64, not {}", ids.dtype);
        require!(ids.rank() == 3, "needs experts of tokens [n, s, k], got {ids}");
        require!(self.experts <= MOST_EXPERTS, "{} experts are more than {MOST_EXPERTS}", self.experts);
        SlotGrid::new(self.experts, self.capacity).check([self.experts, self.capacity])?;
        Ok(vec![TensorType::new(DType::I32, ids.shape.clone())])
    }

    /// A token's slot depends on all tokens before it: only samples can be split.
    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::default();
        let shape = &inputs[0].shape;
        let [n, s, k] =
            [rule.factor("n", shape[0]), rule.whole_factor("s", shape[1]), rule.whole_factor("k", shape[2])];
        rule.inputs.push(TensorMap::of(&[n, s, k]));
        rule.outputs.push(TensorMap::of(&[n, s, k]));
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn workspace_bytes(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        self.experts.saturating_mul(8)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng};

    impl Examples for Slots {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Slots { experts: 8, capacity: 3 },
                &["i32[4,10,2]"],
                "([n, s, k])->([n, s, k]) {n=4, s=10, k=2} whole={s, k}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (experts, capacity) = (rng.between(1, 5), rng.between(1, 4));
            let shape = [rng.size(), rng.size(), rng.between(1, 3)];
            Case::new(Slots { experts, capacity }, vec![rng.ids(&shape, experts)])
        }
    }
}
