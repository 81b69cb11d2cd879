//! Products: `dot_general` becomes an einsum.

use super::{super::error::Result, Importer, ResolvedOperation, value::SymbolicValue};
use shardwright_graph::{Op, ops::Contract};
use smallvec::SmallVec;

const NUMBERS: &str = "dot_dimension_numbers";
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

impl<'a> Importer<'a> {
    pub fn dot_general(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(2)?;
        let ranks = [op.types[0].ty.rank(), op.types[1].ty.rank()];
        let dims = |key: &str, side: usize| op.dims(&op.field(NUMBERS, key)?, ranks[side]);
        let batch = [dims("lhs_batching_dimensions", 0)?, dims("rhs_batching_dimensions", 1)?];
        let summed = [dims("lhs_contracting_dimensions", 0)?, dims("rhs_contracting_dimensions", 1)?];
        if batch[0].len() != batch[1].len() || summed[0].len() != summed[1].len() {
            return Err(
                op.error("the two operands have different numbers of batching or contracting dimensions")
            );
        }
        let mut next = LETTERS.iter().copied();
        let mut letter = || next.next().ok_or_else(|| op.error("the operands have too many dimensions"));
        let mut letters: [SmallVec<[u8; 8]>; 2] =
            [SmallVec::from_elem(0, ranks[0]), SmallVec::from_elem(0, ranks[1])];
        let mut result: SmallVec<[u8; 8]> = SmallVec::new();
        for (pairs, kept) in [(&batch, true), (&summed, false)] {
            for (&l, &r) in pairs[0].iter().zip(&pairs[1]) {
                if letters[0][l] != 0 || letters[1][r] != 0 {
                    return Err(op.error("a dimension is both batching and contracting"));
                }
                let c = letter()?;
                (letters[0][l], letters[1][r]) = (c, c);
                if kept {
                    result.push(c);
                }
            }
        }
        for side in &mut letters {
            for c in side.iter_mut().filter(|c| **c == 0) {
                *c = letter()?;
                result.push(*c);
            }
        }
        let mut slots = [op.slot(0, &mut self.draft)?, op.slot(1, &mut self.draft)?];
        // An einsum reads its operands in any order of dimensions, so transposes of operands are skipped.
        for (slot, letters) in slots.iter_mut().zip(&mut letters) {
            if let Some(op) = self.draft.producer(*slot)
                && let Op::Transpose(transpose) = &op.op
            {
                let mut before = letters.clone();
                for (&c, &p) in letters.iter().zip(&transpose.perm) {
                    before[p] = c;
                }
                (*letters, *slot) = (before, op.inputs[0]);
            }
        }
        // Gradients of products with a wider result have operands of two types: the narrow one is widened.
        let [a, b] = slots.map(|slot| self.draft.ty(slot).dtype);
        if a != b && a.is_float() && b.is_float() {
            let (narrow, wide) = if a.bytes() < b.bytes() { (0, b) } else { (1, a) };
            slots[narrow] = self.cast(&SymbolicValue::Tensor(slots[narrow]), wide)?.slot(&mut self.draft)?;
        }
        let [l, r] = letters;
        let made = self
            .draft
            .one(Contract { operands: [l, r].into_iter().collect(), result, eight_bit: false }, &slots)?;
        // Sums are accumulated in a wide type; a result wider than the operands is rounded once.
        Ok(vec![self.cast(&SymbolicValue::Tensor(made), op.result()?.ty.dtype)?])
    }
}
