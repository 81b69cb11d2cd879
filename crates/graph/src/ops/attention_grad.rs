//! Gradient of fused attention as one op. It computes the scores again, a block at a time, from the log-sum-exp that the
//! forward pass kept.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, scratch_bytes},
    ops::{
        Attention, Op,
        attention::{AttentionSizes, KEY_BLOCK, QUERY_BLOCK, attention_bytes, attention_roofline},
    },
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
    workload::{AttentionPass, WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// Inputs: queries, keys, values, result, log-sum-exp, the gradient of the result, and the bias if there is one. Outputs:
/// gradients of queries, keys and values, and of the bias if `bias_grad`.
///
/// Weights follow from scores and log-sum-exp alone, so keys may be split: the gradient of the queries is then a partial
/// sum.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionGrad {
    /// The forward op.
    pub forward: Attention,
    /// Whether the gradient of the bias is wanted.
    pub bias_grad: bool,
}

/// Backward pass. Sizes: those of the forward pass.
pub(super) static ATTENTION_GRAD: WorkloadClass = WorkloadClass {
    name: "attention_grad",
    fallback: None,
    roofline: |sizes| attention_roofline(AttentionPass::Backward, sizes),
    bytes: |workload, sizes| attention_bytes(workload, sizes, 2),
};

impl AttentionGrad {
    fn sizes(&self, inputs: &[TensorType]) -> Option<AttentionSizes> {
        accepted(self.forward.sizes(inputs))
    }
}

impl Operator for AttentionGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let biased = inputs.len() == 7;
        arity(inputs, if biased { 7 } else { 6 })?;
        require!(biased || !self.bias_grad, "has no bias whose gradient could be computed");
        let sizes = self.forward.sizes(inputs)?;
        let (result, lse) = (sizes.result(&inputs[0]), sizes.lse(inputs[0].dtype));
        for (what, expected, found) in [
            ("the result", &result, &inputs[3]),
            ("the log-sum-exp", &lse, &inputs[4]),
            ("the gradient of the result", &result, &inputs[5]),
        ] {
            require!(found == expected, "{what} must be {expected}, got {found}");
        }
        let mut outputs = inputs[..3].to_vec();
        if let Some(bias) = inputs.get(6) {
            sizes.check_bias(&inputs[0], bias)?;
            outputs.extend(self.bias_grad.then(|| bias.clone()));
        }
        Ok(outputs)
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = self.sizes(inputs) else { return Rule::replicated(inputs, outputs) };
        let (mut rule, loops) = sizes.rule(self.forward.heads_first, true);
        let gradients = [loops.queries(), loops.keys(), loops.values()];
        rule.inputs.extend(gradients.clone());
        rule.inputs.extend([loops.result(), loops.lse(), loops.result()]);
        let bias = inputs.get(6).map(|ty| loops.bias(&rule, ty));
        rule.inputs.extend(bias.clone());
        rule.outputs.extend(gradients);
        rule.outputs.extend(bias.filter(|_| self.bias_grad));
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    /// Five products per visible score where the forward pass has two: the scores again, the gradient of the weights, and
    /// those of queries, keys and values.
    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let depth = |s: &AttentionSizes| s.d.saturating_mul(3).saturating_add(s.e.saturating_mul(2));
        self.sizes(inputs).map_or(0, |s| self.forward.product_flops(&s, depth(&s)))
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        self.sizes(inputs).map(|sizes| (&ATTENTION_GRAD, self.forward.workload_sizes(&sizes)))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&ATTENTION_GRAD]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // A block of weights, a block of their gradients, and a number per query and per key of the block.
        let elements = 2 * QUERY_BLOCK * KEY_BLOCK + QUERY_BLOCK + KEY_BLOCK;
        inputs.first().map_or(0, |ty| elements * scratch_bytes(ty))
    }

    fn is_random(&self) -> bool {
        self.forward.is_random()
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let forward = self.sizes(region.inputs).map(|sizes| self.forward.part(region, &sizes));
        Self { forward: forward.unwrap_or_else(|| self.forward.clone()), bias_grad: self.bias_grad }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s, positive},
        ops::attention::examples::random,
    };

    impl Examples for AttentionGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                AttentionGrad { forward: Attention::new(0.25, 6, 8).causal(), bias_grad: true },
                &[
                    "f32[2,6,4,3,16]",
                    "f32[2,8,4,16]",
                    "f32[2,8,4,24]",
                    "f32[2,6,4,3,24]",
                    "f32[2,4,3,6]",
                    "f32[2,6,4,3,24]",
                    "f32[4,1,6,8]",
                ],
                "([n, q, h, r, d], [n, k, h, d], [n, k, h, e], [n, q, h, r, e], [n, h, r, q], [n, q, h, r, e], [h, _, q, k])->([n, q, h, r, d], [n, k, h, d], [n, k, h, e], [h, _, q, k]) {n=2, q=6, h=4, r=3, k=8, d=16, e=24} reduction={n, q, r, k} whole={d, e}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (forward, mut inputs) = random(rng);
            let types: Vec<TensorType> = inputs.iter().map(|(ty, _)| ty.clone()).collect();
            let bias = (inputs.len() == 4).then(|| inputs.remove(3));
            // The example is what inference accepts; the log-sum-exp is any number of a plausible size.
            let [result, lse] = &forward.infer(&types).unwrap_or_default()[..] else {
                return Case::new(forward, inputs);
            };
            inputs.extend([
                f64s(result.shape.clone()),
                positive(lse.shape.clone()),
                f64s(result.shape.clone()),
            ]);
            let bias_grad = bias.is_some() && rng.flip();
            inputs.extend(bias);
            Case::new(AttentionGrad { forward, bias_grad }, inputs)
        }
    }
}
