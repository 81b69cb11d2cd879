//! Dispatch: copies tokens to the slots of their experts. [`super::slot_grid`] has the layout.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity},
    ops::{
        Combine, CombineGradWeights, Op,
        slot_grid::{SlotGrid, SlotSizes},
    },
    region::Region,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// Inputs: tokens `[n, s, c]`, slot ids `[n, s, k]`, and optionally weights `[n, s, k]` by which the copies are multiplied.
/// Output: tokens in slots `[n, e, p, c]`, zero where no slot id names the slot. Tokens that share one are added up.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dispatch {
    /// The slots of all experts.
    pub grid: SlotGrid,
    /// Experts that the result holds.
    pub experts: u64,
    /// Slots of each expert that the result holds.
    pub slots: u64,
}

impl Dispatch {
    /// To all slots of a grid.
    pub fn new(grid: SlotGrid) -> Self {
        Self { grid, experts: grid.experts, slots: grid.capacity }
    }

    fn sizes(&self, inputs: &[TensorType]) -> Result<SlotSizes, OpError> {
        let [n, s, k, c] = SlotGrid::check_slot_ids(&inputs[0], &inputs[1], inputs.get(2))?;
        self.grid.check([self.experts, self.slots])?;
        Ok(SlotSizes { n, s, k, e: self.experts, p: self.slots, c })
    }
}

impl Operator for Dispatch {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, if inputs.len() == 3 { 3 } else { 2 })?;
        let SlotSizes { n, e, p, c, .. } = self.sizes(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, [n, e, p, c])])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = accepted(self.sizes(inputs)) else { return Rule::replicated(inputs, outputs) };
        let (mut rule, maps) = sizes.rule();
        rule.inputs.push(maps.tokens);
        rule.inputs.extend(inputs[1..].iter().map(|_| maps.slot_ids.clone()));
        rule.outputs.push(maps.slots);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let inputs = cx.inputs();
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; inputs.len()]) };
        let back: Vec<TensorId> = [dy].iter().chain(&inputs[1..]).copied().collect();
        let tokens = if cx.wants(0) { Some(cx.emit(Combine { grid: self.grid }, &back)?) } else { None };
        let mut gradients = vec![tokens, None];
        if inputs.len() == 3 {
            let op = CombineGradWeights { grid: self.grid };
            gradients.push(if cx.wants(2) { Some(cx.emit(op, &[dy, inputs[1], inputs[0]])?) } else { None });
        }
        Ok(gradients)
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let weighted = inputs.len() == 3;
        accepted(self.sizes(inputs)).filter(|_| weighted).map_or(0, |sizes| sizes.moved())
    }

    /// Slots are written whole; no more tokens are read than slots are written.
    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let written = outputs[0].bytes();
        let ids = inputs[1..].iter().fold(0u64, |sum, ty| sum.saturating_add(ty.bytes()));
        inputs[0].bytes().min(written).saturating_add(ids).saturating_add(written)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let (experts, slots) = (region.part("e", self.experts), region.part("p", self.slots));
        let [experts, slots] = [experts, slots].map(|part| part.end - part.start);
        Self { grid: self.grid.part(region), experts, slots }.into()
    }
}

pub(super) mod examples {
    use super::*;
    use crate::examples::{Case, CaseInput, Examples, Golden, Rng, f64s};

    /// A random grid or part of one, the experts and slots held, and slot ids of the whole grid.
    pub fn random(rng: &mut Rng) -> (SlotGrid, [u64; 5], CaseInput) {
        let [n, s, k, e, p] = [rng.size(), rng.size(), rng.between(1, 2), rng.size(), rng.size()];
        let [first_expert, first_slot] = [rng.between(0, 2), rng.between(0, 2)];
        let experts = first_expert + e + rng.between(0, 2);
        let capacity = first_slot + p + rng.between(0, 2);
        let grid = SlotGrid { experts, capacity, first_expert, first_slot };
        let slot_ids = rng.ids(&[n, s, k], grid.dropped() + 1);
        (grid, [n, s, k, e, p], slot_ids)
    }

    impl Examples for Dispatch {
        fn golden() -> Golden {
            Golden::new(
                Dispatch::new(SlotGrid::new(8, 3)),
                &["f32[4,10,16]", "i32[4,10,2]"],
                "([n, s, c], [n, s, k])->([n, e, p, c]) {n=4, s=10, k=2, e=8, p=3, c=16} reduction={s, k}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (grid, [n, s, k, experts, slots], slot_ids) = random(rng);
            let mut inputs = vec![f64s([n, s, rng.size()]), slot_ids];
            if rng.flip() {
                inputs.push(f64s([n, s, k]));
            }
            Case::new(Dispatch { grid, experts, slots }, inputs)
        }
    }
}
