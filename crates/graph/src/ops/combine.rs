//! Combine: adds up, for each token, what its experts made of it. [`super::slot_grid`] has the layout.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity},
    ops::{
        Dispatch, Op,
        slot_grid::{SlotGrid, SlotSizes},
    },
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// Inputs: tokens in slots `[n, e, p, c]`, slot ids `[n, s, k]`, and optionally weights `[n, s, k]`. Output: tokens `[n, s, c]`,
/// each the weighted sum of the slots that its slot ids name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Combine {
    /// The slots of all experts.
    pub grid: SlotGrid,
}

/// The gradient of [`Combine`] by its weights: for each slot id, the product of the slot that it names and the token's
/// gradient. Inputs: tokens in slots `[n, e, p, c]`, slot ids `[n, s, k]`, tokens `[n, s, c]`. Output: `[n, s, k]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CombineGradWeights {
    /// The slots of all experts.
    pub grid: SlotGrid,
}

/// Multiply-adds of each slot id and channel.
fn flops(sizes: Option<SlotSizes>) -> u64 {
    sizes.map_or(0, |sizes| sizes.moved().saturating_mul(2))
}

impl Operator for Combine {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, if inputs.len() == 3 { 3 } else { 2 })?;
        let SlotSizes { n, s, c, .. } = self.grid.sizes(&inputs[0], &inputs[1], inputs.get(2))?;
        Ok(vec![TensorType::new(inputs[0].dtype, [n, s, c])])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let sizes = self.grid.sizes(&inputs[0], &inputs[1], inputs.get(2));
        let Some(sizes) = accepted(sizes) else { return Rule::replicated(inputs, outputs) };
        let (mut rule, maps) = sizes.rule();
        rule.inputs.push(maps.slots);
        rule.inputs.extend(inputs[1..].iter().map(|_| maps.slot_ids.clone()));
        rule.outputs.push(maps.tokens);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let inputs = cx.inputs();
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; inputs.len()]) };
        let &[_, experts, slots, _] = &cx.input_type(0).shape[..] else {
            return Err(OpError::new("tokens in slots lost their dimensions"));
        };
        let back: Vec<TensorId> = [dy].iter().chain(&inputs[1..]).copied().collect();
        let op = Dispatch { grid: self.grid, experts, slots };
        let in_slots = if cx.wants(0) { Some(cx.emit(op, &back)?) } else { None };
        let mut gradients = vec![in_slots, None];
        if inputs.len() == 3 {
            let op = CombineGradWeights { grid: self.grid };
            gradients.push(if cx.wants(2) { Some(cx.emit(op, &[inputs[0], inputs[1], dy])?) } else { None });
        }
        Ok(gradients)
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        flops(accepted(self.grid.sizes(&inputs[0], &inputs[1], inputs.get(2))))
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let sizes = accepted(self.grid.sizes(&inputs[0], &inputs[1], inputs.get(2)));
        let read = sizes.map_or(0, |sizes| sizes.moved_bytes(&inputs[0]));
        inputs[1..].iter().chain(outputs).fold(read, |sum, ty| sum.saturating_add(ty.bytes()))
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Self { grid: self.grid.part(region) }.into()
    }
}

impl Operator for CombineGradWeights {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 3)?;
        let SlotSizes { n, s, c, .. } = self.grid.sizes(&inputs[0], &inputs[1], None)?;
        let tokens = TensorType::new(inputs[0].dtype, [n, s, c]);
        require!(inputs[2] == tokens, "needs tokens {tokens}, got {}", inputs[2]);
        Ok(vec![TensorType::new(inputs[0].dtype, inputs[1].shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let sizes = self.grid.sizes(&inputs[0], &inputs[1], None);
        let Some(sizes) = accepted(sizes) else { return Rule::replicated(inputs, outputs) };
        let (mut rule, maps) = sizes.rule();
        rule.inputs.extend([maps.slots, maps.slot_ids.clone(), maps.tokens]);
        rule.outputs.push(maps.slot_ids);
        rule
    }

    /// Linear in the slots and in the tokens, as [`Combine`] is in the slots and in the weights.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 3]) };
        let [slots, slot_ids, tokens] = [cx.input(0), cx.input(1), cx.input(2)];
        let &[_, experts, held, _] = &cx.input_type(0).shape[..] else {
            return Err(OpError::new("tokens in slots lost their dimensions"));
        };
        let op = Dispatch { grid: self.grid, experts, slots: held };
        let by_slots = Some(cx.emit(op, &[tokens, slot_ids, dy])?);
        let by_tokens = Some(cx.emit(Combine { grid: self.grid }, &[slots, slot_ids, dy])?);
        Ok(vec![by_slots, None, by_tokens])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        flops(accepted(self.grid.sizes(&inputs[0], &inputs[1], None)))
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let sizes = accepted(self.grid.sizes(&inputs[0], &inputs[1], None));
        let read = sizes.map_or(0, |sizes| sizes.moved_bytes(&inputs[0]));
        inputs[1..].iter().chain(outputs).fold(read, |sum, ty| sum.saturating_add(ty.bytes()))
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Self { grid: self.grid.part(region) }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        ops::dispatch::examples::random,
    };

    impl Examples for Combine {
        fn golden() -> Golden {
            Golden::new(
                Combine { grid: SlotGrid::new(8, 3) },
                &["f32[4,8,3,16]", "i32[4,10,2]", "f32[4,10,2]"],
                "([n, e, p, c], [n, s, k], [n, s, k])->([n, s, c]) {n=4, s=10, k=2, e=8, p=3, c=16} reduction={k, e, p}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (grid, [n, s, k, e, p], slot_ids) = random(rng);
            let mut inputs = vec![f64s([n, e, p, rng.size()]), slot_ids];
            if rng.flip() {
                inputs.push(f64s([n, s, k]));
            }
            Case::new(Combine { grid }, inputs)
        }
    }

    impl Examples for CombineGradWeights {
        fn golden() -> Golden {
            Golden::new(
                CombineGradWeights { grid: SlotGrid::new(8, 3) },
                &["f32[4,8,3,16]", "i32[4,10,2]", "f32[4,10,16]"],
                "([n, e, p, c], [n, s, k], [n, s, c])->([n, s, k]) {n=4, s=10, k=2, e=8, p=3, c=16} reduction={e, p, c}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (grid, [n, s, _, e, p], slot_ids) = random(rng);
            let c = rng.size();
            Case::new(CombineGradWeights { grid }, vec![f64s([n, e, p, c]), slot_ids, f64s([n, s, c])])
        }
    }
}
