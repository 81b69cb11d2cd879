//! Completion of fused attention whose keys are split: scales a part's result by the part's share of the softmax.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, Rule, TensorMap, dim_name},
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Inputs: the result of a part of the keys, the part's log-sum-exp, and that of all keys. Output: the result times
/// `exp(part - all)`; zero where the part sees no key. The outputs of all parts add up to the result of all keys.
///
/// The result is `[n, q, h, e]` or `[n, q, h, r, e]`, or has its heads before `q`; the log-sum-exp is `[n, h, q]` or
/// `[n, h, r, q]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRescale {
    /// Whether heads come before positions in the result.
    pub heads_first: bool,
}

impl AttentionRescale {
    /// The dimension of the result that a dimension of the log-sum-exp is.
    fn result_dim(&self, row_dim: usize, rows: usize) -> usize {
        match row_dim {
            _ if self.heads_first => row_dim,
            0 => 0,
            _ if row_dim + 1 == rows => 1,
            _ => row_dim + 1,
        }
    }
}

impl Operator for AttentionRescale {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 3)?;
        let [result, part, all] = inputs else { return Ok(Vec::new()) };
        require!(part == all, "log-sum-exps of different types: {part} and {all}");
        require!(result.dtype.is_float(), "needs floating-point elements, got {}", result.dtype);
        let wide = if result.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let rows = part.rank();
        let fits = (3..=4).contains(&rows)
            && result.rank() == rows + 1
            && (0..rows).all(|d| part.shape[d] == result.shape[self.result_dim(d, rows)]);
        require!(fits && part.dtype == wide, "log-sum-exp {part} does not belong to result {result}");
        Ok(vec![result.clone()])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let (result, rows) = (&inputs[0], inputs[1].rank());
        let mut rule = Rule::default();
        let whole = TensorMap::new(
            result.shape.iter().enumerate().map(|(d, &size)| DimMap::of(rule.factor(dim_name(d), size))),
        );
        let of_rows = TensorMap::new((0..rows).map(|d| whole.dims[self.result_dim(d, rows)].clone()));
        rule.inputs.extend([whole.clone(), of_rows.clone(), of_rows]);
        rule.outputs.push(whole);
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("has no gradient: that of attention is one op"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for AttentionRescale {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                AttentionRescale { heads_first: false },
                &["bf16[2,6,4,3,16]", "f32[2,4,3,6]", "f32[2,4,3,6]"],
                "([d0, d1, d2, d3, d4], [d0, d2, d3, d1], [d0, d2, d3, d1])->([d0, d1, d2, d3, d4]) {d0=2, d1=6, d2=4, d3=3, d4=16}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let [n, q, h, e] = [(); 4].map(|()| rng.size());
            let heads = if rng.flip() { vec![h, 2] } else { vec![h] };
            let op = AttentionRescale { heads_first: rng.flip() };
            let result = match op.heads_first {
                true => [&[n], &heads[..], &[q, e]].concat(),
                false => [&[n, q], &heads[..], &[e]].concat(),
            };
            let rows = [&[n], &heads[..], &[q]].concat();
            Case::new(op, vec![f64s(result), f64s(rows.clone()), f64s(rows)])
        }
    }
}
