//! Kernels of the ops that look up ids: gather, scatter-add, one-hot.

use super::{Context, Kernel, KernelError, Result, Scratch, loops::count, movement::with_same_type, write};
use crate::tensor::{Element, Elements, ElementsMut, Float, View, ViewMut};
use half::{bf16, f16};
use shardwright_graph::ops::{Gather, OneHot, ScatterAdd};

/// Marks an id that belongs to another part of a split table.
pub(crate) const ELSEWHERE: u64 = u64::MAX;

/// Runs a function on an iterator of ids as `i64`, for both types of ids.
macro_rules! with_ids {
    ($view:expr, |$ids:ident| $body:expr) => {
        match $view.data {
            $crate::tensor::Elements::I32(ids) => {
                let $ids = ids.iter().map(|&id| i64::from(id));
                $body
            }
            $crate::tensor::Elements::I64(ids) => {
                let $ids = ids.iter().copied();
                $body
            }
            other => {
                let found = other.dtype();
                let reason = format!("ids and labels must be i32 or i64, not {found}");
                return Err($crate::kernels::KernelError::BadValue(reason));
            }
        }
    };
}

pub(crate) use with_ids;

/// The local row of each id in a table that holds `rows` rows from `base` on, out of `extent`; [`ELSEWHERE`] for ids of
/// other parts.
pub(crate) fn local_rows<'a>(
    ids: &View<'_>,
    [base, rows, extent]: [u64; 3],
    scratch: &'a mut Scratch,
) -> Result<&'a [u64]> {
    let local = scratch.take::<u64>(count(ids.shape));
    with_ids!(ids, |ids| {
        for (place, (local, id)) in local.iter_mut().zip(ids).enumerate() {
            // A negative id becomes larger than any extent.
            if id as u64 >= extent {
                let reason = format!("id {id} at place {place} is outside 0..{extent}");
                return Err(KernelError::BadValue(reason));
            }
            let row = (id as u64).wrapping_sub(base);
            *local = if row < rows { row } else { ELSEWHERE };
        }
    });
    Ok(local)
}

/// Copies the rows of length `inner` that `local` lists, from each table of `rows` rows.
fn gather<E: Element>(table: &[E], y: &mut [E], local: &[u64], rows: usize, inner: usize) {
    let tables = table.chunks_exact(rows * inner);
    for (table, y) in tables.zip(y.chunks_exact_mut(local.len() * inner)) {
        for (y, &row) in y.chunks_exact_mut(inner).zip(local) {
            if row == ELSEWHERE {
                y.fill(E::default());
            } else {
                y.copy_from_slice(&table[row as usize * inner..][..inner]);
            }
        }
    }
}

impl Kernel for Gather {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let (table, ids) = (&inputs[0], &inputs[1]);
        let rows = table.shape[self.axis];
        let inner = count(&table.shape[self.axis + 1..]);
        let local = local_rows(ids, [self.base, rows, self.extent], &mut context.scratch)?;
        with_same_type!(table.data, &mut outputs[0].data, |x, y| gather(x, y, local, rows as usize, inner));
        Ok(())
    }
}

impl Kernel for ScatterAdd {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let (ids, dy) = (&inputs[0], &inputs[1]);
        let rows = self.rows as usize;
        let inner = count(&dy.shape[self.axis + ids.shape.len()..]);
        let local = local_rows(ids, [self.base, self.rows, self.extent], &mut context.scratch)?;
        let dy = super::read::<T>(dy)?;
        let table = write::<T>(&mut outputs[0])?;
        table.fill(T::ZERO);
        let gradients = dy.chunks_exact(local.len() * inner);
        for (table, dy) in table.chunks_exact_mut(rows * inner).zip(gradients) {
            for (dy, &row) in dy.chunks_exact(inner).zip(local) {
                if row != ELSEWHERE {
                    let sum = &mut table[row as usize * inner..][..inner];
                    sum.iter_mut().zip(dy).for_each(|(sum, &dy)| *sum += dy);
                }
            }
        }
        Ok(())
    }
}

impl Kernel for OneHot {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        fn mark<E: Element>(ids: impl Iterator<Item = i64>, y: &mut [E], op: &OneHot, one: E) {
            y.fill(E::default());
            for (row, id) in y.chunks_exact_mut(op.depth as usize).zip(ids) {
                // A negative id becomes larger than any depth.
                let position = (id as u64).wrapping_sub(op.base);
                if position < op.depth {
                    row[position as usize] = one;
                }
            }
        }
        with_ids!(inputs[0], |ids| match &mut outputs[0].data {
            ElementsMut::F32(y) => mark(ids, y, self, 1.0),
            ElementsMut::F64(y) => mark(ids, y, self, 1.0),
            ElementsMut::Bf16(y) => mark(ids, y, self, bf16::ONE),
            ElementsMut::F16(y) => mark(ids, y, self, f16::ONE),
            ElementsMut::I32(y) => mark(ids, y, self, 1),
            ElementsMut::I64(y) => mark(ids, y, self, 1),
            ElementsMut::Bool(y) => mark(ids, y, self, 1),
        });
        Ok(())
    }
}
