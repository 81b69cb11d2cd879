//! The slots of experts: how tokens are laid out for a mixture of experts.
//!
//! Tokens are `[n, s, c]`, and only the tokens of one sample `n` compete for slots. An expert has `p` slots per sample, so that
//! the tokens in slots are `[n, e, p, c]`. A token goes to `k` experts. Where it goes is `k` numbers, its slot ids:
//! `expert * p + slot`. The number of all slots, `e * p`, stands for no slot: the token was dropped. [`crate::ops::Slots`] makes
//! slot ids.
//!
//! A split of `n` needs no communication and does not change which tokens are dropped. From tokens split by `n` to experts split
//! by `e` the reshard is an all-to-all. A split of `s` or `k` makes the tokens in slots a partial sum; a split of `e` or `p` makes
//! the tokens that come back one.

use crate::{
    operator::{OpError, same_float},
    region::Region,
    require,
    rule::{Rule, TensorMap},
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// The slots of all experts, and the first of those that a part of a split holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotGrid {
    /// Experts of the whole op.
    pub experts: u64,
    /// Slots of each expert in the whole op.
    pub capacity: u64,
    /// The first expert that is held (not zero in a part of a split).
    pub first_expert: u64,
    /// The first slot of each expert that is held (not zero in a part of a split).
    pub first_slot: u64,
}

/// Sizes of an op between tokens and slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotSizes {
    /// Samples.
    pub n: u64,
    /// Tokens of a sample.
    pub s: u64,
    /// Experts that a token goes to.
    pub k: u64,
    /// Experts held.
    pub e: u64,
    /// Slots held of each expert.
    pub p: u64,
    /// Channels.
    pub c: u64,
}

/// Maps of the tensors that ops between tokens and slots read and write.
pub(super) struct SlotMaps {
    /// `[n, s, c]`.
    pub tokens: TensorMap,
    /// `[n, s, k]`.
    pub slot_ids: TensorMap,
    /// `[n, e, p, c]`.
    pub slots: TensorMap,
}

impl SlotGrid {
    /// The whole grid of `experts` with `capacity` slots each.
    pub fn new(experts: u64, capacity: u64) -> Self {
        Self { experts, capacity, first_expert: 0, first_slot: 0 }
    }

    /// The slot id of a dropped token: the number of all slots.
    pub fn dropped(&self) -> u64 {
        self.experts.saturating_mul(self.capacity)
    }

    /// The place of a slot among those of the experts and slots held, if it is one of them.
    #[inline]
    pub fn place(&self, slot_id: u64, [experts, slots]: [u64; 2]) -> Option<u64> {
        // Places before the first one wrap to larger numbers than are held.
        let expert = (slot_id / self.capacity).wrapping_sub(self.first_expert);
        let slot = (slot_id % self.capacity).wrapping_sub(self.first_slot);
        (expert < experts && slot < slots).then(|| expert * slots + slot)
    }

    /// Refuses grids whose slots have no 32-bit numbers, and parts that are not inside the grid.
    pub(super) fn check(&self, [experts, slots]: [u64; 2]) -> Result<(), OpError> {
        let total = self.experts.checked_mul(self.capacity);
        require!(
            total.is_some_and(|total| (1..1 << 31).contains(&total)),
            "{} experts with {} slots are none or too many",
            self.experts,
            self.capacity
        );
        let inside = |first: u64, held: u64, all: u64| {
            held > 0 && first.checked_add(held).is_some_and(|end| end <= all)
        };
        require!(
            inside(self.first_expert, experts, self.experts) && inside(self.first_slot, slots, self.capacity),
            "{experts} experts from {} with {slots} slots from {} are not among {} experts with {} slots",
            self.first_expert,
            self.first_slot,
            self.experts,
            self.capacity
        );
        Ok(())
    }

    /// Checks tokens `[n, s, c]` and slot ids `[n, s, k]`, with weights of the same shape if there are any.
    pub(super) fn check_slot_ids(
        tokens: &TensorType,
        slot_ids: &TensorType,
        weights: Option<&TensorType>,
    ) -> Result<[u64; 4], OpError> {
        require!(slot_ids.dtype.is_int(), "slot ids must be i32 or i64, not {}", slot_ids.dtype);
        let (&[n, s, c], &[samples, positions, k]) = (&tokens.shape[..], &slot_ids.shape[..]) else {
            return Err(OpError::new(format!(
                "needs tokens [n, s, c] and slot ids [n, s, k], got {tokens} and {slot_ids}"
            )));
        };
        require!([n, s] == [samples, positions], "{tokens} and {slot_ids} differ in samples or tokens");
        if let Some(weights) = weights {
            same_float(&[tokens.clone(), weights.clone()])?;
            require!(
                weights.shape == slot_ids.shape,
                "weights {weights} do not have the shape of {slot_ids}"
            );
        }
        same_float(std::slice::from_ref(tokens))?;
        Ok([n, s, k, c])
    }

    /// Checks tokens in slots `[n, e, p, c]`; returns the experts and slots held.
    pub(super) fn check_slots(&self, slots: &TensorType) -> Result<[u64; 4], OpError> {
        same_float(std::slice::from_ref(slots))?;
        let &[n, e, p, c] = &slots.shape[..] else {
            return Err(OpError::new(format!("needs tokens in slots [n, e, p, c], got {slots}")));
        };
        self.check([e, p])?;
        Ok([n, e, p, c])
    }

    /// Sizes from all tensors of an op that reads tokens in slots.
    pub(super) fn sizes(
        &self,
        slots: &TensorType,
        slot_ids: &TensorType,
        weights: Option<&TensorType>,
    ) -> Result<SlotSizes, OpError> {
        let [n, e, p, c] = self.check_slots(slots)?;
        require!(slot_ids.rank() == 3, "needs slot ids [n, s, k], got {slot_ids}");
        let tokens = TensorType::new(slots.dtype, [slot_ids.shape[0], slot_ids.shape[1], c]);
        let [samples, s, k, _] = Self::check_slot_ids(&tokens, slot_ids, weights)?;
        require!(samples == n, "{slots} and {slot_ids} differ in samples");
        Ok(SlotSizes { n, s, k, e, p, c })
    }

    /// The grid of a part of a split.
    pub(super) fn part(&self, region: &Region<'_>) -> Self {
        Self {
            first_expert: self.first_expert + region.part("e", self.experts).start,
            first_slot: self.first_slot + region.part("p", self.capacity).start,
            ..*self
        }
    }
}

impl SlotSizes {
    /// The rule's factors, and the maps of tokens, slot ids and slots.
    pub fn rule(&self) -> (Rule, SlotMaps) {
        let mut rule = Rule::default();
        let [n, s, k] =
            [("n", self.n), ("s", self.s), ("k", self.k)].map(|(name, size)| rule.factor(name, size));
        let [e, p, c] =
            [("e", self.e), ("p", self.p), ("c", self.c)].map(|(name, size)| rule.factor(name, size));
        let maps = SlotMaps {
            tokens: TensorMap::of(&[n, s, c]),
            slot_ids: TensorMap::of(&[n, s, k]),
            slots: TensorMap::of(&[n, e, p, c]),
        };
        (rule, maps)
    }

    /// Elements of all rows that move: one row per slot id.
    pub fn moved(&self) -> u64 {
        [self.s, self.k, self.c].iter().fold(self.n, |product, &size| product.saturating_mul(size))
    }

    /// Bytes of the rows that slot ids name in a tensor: no more than it has.
    pub fn moved_bytes(&self, ty: &TensorType) -> u64 {
        ty.bytes().min(self.moved().saturating_mul(ty.dtype.bytes()))
    }
}
