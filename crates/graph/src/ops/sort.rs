//! Sorting rows, and the largest elements of rows with their positions.
//!
//! NaN counts as larger than all numbers, so that it comes last in ascending order. Equal elements keep their order.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Sorts tensors of one shape along `axis` by the first of them; the others move along.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sort {
    /// The dimension that is sorted; it cannot be split.
    pub axis: usize,
    /// Whether the order is descending.
    pub descending: bool,
}

/// The `k` largest elements of each row (the last dimension), largest first, and their positions (`i32`).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopK {
    /// Elements taken from each row.
    pub k: u64,
}

/// Comparisons of a sort: each element takes part in about log2(row) of them.
fn comparisons(x: &TensorType, row: u64) -> u64 {
    elements(x).saturating_mul(u64::from(64 - row.leading_zeros()))
}

impl Operator for Sort {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(!inputs.is_empty(), "takes at least one tensor");
        axis_in(self.axis, &inputs[0])?;
        for x in inputs {
            require!(x.shape == inputs[0].shape, "{x} does not have the shape of {}", inputs[0]);
        }
        Ok(inputs.to_vec())
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::elementwise(inputs, outputs);
        rule.factors[self.axis].whole = true;
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("sorting is not differentiated; take the elements by their positions instead"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        comparisons(&inputs[0], inputs[0].shape[self.axis])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

impl Operator for TopK {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let x = &inputs[0];
        let row = x.shape.last().copied().unwrap_or(0);
        require!(row < 1 << 31, "positions in rows of {x} do not fit an i32");
        require!((1..=row).contains(&self.k), "cannot take {} elements from the rows of {x}", self.k);
        let mut shape = x.shape.clone();
        shape.0[x.rank() - 1] = self.k;
        Ok(vec![TensorType::new(x.dtype, shape.clone()), TensorType::new(DType::I32, shape)])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let last = inputs[0].rank() - 1;
        let (mut rule, map) = Rule::over_dims_where(&inputs[0].shape, |d| d != last);
        rule.inputs.push(map.clone());
        rule.outputs.extend([map.clone(), map]);
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("top-k is not differentiated; take the elements by their positions instead"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        comparisons(&inputs[0], self.k)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        graph::Init,
    };

    impl Examples for Sort {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Sort { axis: 1, descending: false },
                &["f32[8,6]", "i32[8,6]"],
                "([d0, d1], [d0, d1])->([d0, d1], [d0, d1]) {d0=8, d1=6} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            let axis = rng.axis(&shape);
            // Few different keys, so that ties are met.
            let keys = (TensorType::new(DType::I64, &shape[..]), Init::Below(4));
            let inputs = if rng.flip() { vec![f64s(&shape[..])] } else { vec![keys, f64s(&shape[..])] };
            Case::new(Sort { axis, descending: rng.flip() }, inputs)
        }
    }

    impl Examples for TopK {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(TopK { k: 2 }, &["f32[8,10]"], "([d0, _])->([d0, _], [d0, _]) {d0=8}")
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            let k = rng.between(1, shape[shape.len() - 1]);
            Case::new(TopK { k }, vec![f64s(&shape[..])])
        }
    }
}
