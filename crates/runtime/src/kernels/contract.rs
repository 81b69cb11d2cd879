//! Kernel of contractions: matrix products over the letters that fuse into one stride, loops over the rest.
//!
//! Letters fall into groups: batch (both operands and result), rows (first operand and result), columns
//! (second operand and result), summed (both operands). In each of the last three groups the longest run
//! of letters that is contiguous in both tensors becomes one matrix dimension. Nothing is copied.

use super::{
    Context, Kernel, Result,
    gemm::{Matrix, gemm_few_rows},
    loops::{Loop, count, for_each_index},
    read, write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::Contract;
use smallvec::SmallVec;

/// Letters as loops, with strides in first operand, second operand and result (0 where absent).
type Loops = super::loops::Loops<3>;

impl Kernel for Contract {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let result_shape = outputs[0].shape;
        let c = write::<T>(&mut outputs[0])?;
        let a = read::<T>(&inputs[0])?;
        let one = [T::ONE];
        // A single operand is multiplied with a 1×1 matrix: the general case sums and transposes it too.
        let b = match inputs.get(1) {
            Some(b) => read::<T>(b)?,
            None => &one,
        };
        let strides = |letters: &[u8], shape: &[u64], letter: u8| -> usize {
            match letters.iter().position(|&l| l == letter) {
                Some(i) => count(&shape[i + 1..]),
                None => 0,
            }
        };
        let [mut batch, mut rows, mut columns, mut summed] = <[Loops; 4]>::default();
        for letter in self.all_letters() {
            let mut size = 1;
            for (letters, view) in self.operands.iter().zip(inputs) {
                if let Some(i) = letters.iter().position(|&l| l == letter) {
                    size = view.shape[i] as usize;
                }
            }
            let in_b = |f: &dyn Fn(&[u8], &[u64]) -> usize| match (self.operands.get(1), inputs.get(1)) {
                (Some(letters), Some(view)) => f(letters, view.shape),
                _ => 0,
            };
            let item = Loop {
                size,
                strides: [
                    strides(&self.operands[0], inputs[0].shape, letter),
                    in_b(&|letters, shape| strides(letters, shape, letter)),
                    strides(&self.result, result_shape, letter),
                ],
            };
            let has = |letters: Option<&SmallVec<[u8; 8]>>| letters.is_some_and(|l| l.contains(&letter));
            match (has(self.operands.first()), has(self.operands.get(1)), has(Some(&self.result))) {
                (true, false, true) => rows.push(item),
                (false, true, true) => columns.push(item),
                (_, _, true) => batch.push(item),
                // A letter that only one operand has is summed too: the other does not move.
                (_, _, false) => summed.push(item),
            }
        }
        let m = fuse(&mut rows, &mut batch, [0, 2]);
        let n = fuse(&mut columns, &mut batch, [1, 2]);
        let k = fuse(&mut summed, &mut batch, [0, 1]);
        let [a_rows, a_summed] = [m.strides[0], k.strides[0]];
        let mut accumulated = Accumulation::new(&batch);
        for_each_index(&batch, |[i, j, at]| {
            let add = accumulated.next();
            gemm_few_rows(
                [m.size, n.size, k.size],
                (a, Matrix { offset: i, row: a_rows, column: a_summed }),
                (b, Matrix { offset: j, row: k.strides[1], column: n.strides[1] }),
                (c, Matrix { offset: at, row: m.strides[2], column: n.strides[2] }),
                add,
                &mut context.scratch,
            );
        });
        Ok(())
    }
}

/// Merges the largest run of `group`'s letters that is contiguous in both of `tensors` into one loop, and
/// moves the other letters to `outer`.
fn fuse(group: &mut Loops, outer: &mut Loops, tensors: [usize; 2]) -> Loop<3> {
    // Major letters first, as the first tensor has them.
    group.sort_by_key(|l| std::cmp::Reverse(l.strides[tensors[0]]));
    let mut best = Loop { size: 1, strides: [0; 3] };
    let mut best_range = 0..0;
    for start in 0..group.len() {
        let mut size = 1;
        for end in start..group.len() {
            if end > start {
                let (major, minor) = (group[end - 1], group[end]);
                if tensors.iter().any(|&t| major.strides[t] != minor.strides[t] * minor.size) {
                    break;
                }
            }
            size *= group[end].size;
            if size > best.size {
                best = Loop { size, strides: group[end].strides };
                best_range = start..end + 1;
            }
        }
    }
    // Outer letters keep their order: those that do not move the result go innermost, see `Accumulation`.
    outer.extend(group.iter().enumerate().filter(|(i, _)| !best_range.contains(i)).map(|(_, l)| *l));
    best
}

/// Tells whether each matrix product overwrites its part of the result or adds to it. Outer loops over summed letters
/// are innermost, so the products of one part follow each other.
struct Accumulation {
    run: usize,
    at: usize,
}

impl Accumulation {
    fn new(outer: &Loops) -> Self {
        let run = outer.iter().filter(|l| l.strides[2] == 0).map(|l| l.size).product();
        Self { run, at: 0 }
    }

    fn next(&mut self) -> bool {
        let add = self.at != 0;
        self.at = (self.at + 1) % self.run;
        add
    }
}
