//! Kernels of the ops that take elements from, or add them to, positions named along a dimension.

use super::{
    Context, Kernel, Result,
    gather::{ELSEWHERE, local_rows},
    loops::count,
    movement::with_same_type,
    read, write,
};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::ops::{PutAlong, TakeAlong};

/// Calls `visit(index among the ids, index in the tensor)` for every id that lies in this part of the tensor.
/// The tensor has `rows` positions along the axis, the ids `width`.
fn for_each(local: &[u64], rows: usize, width: usize, inner: usize, mut visit: impl FnMut(usize, usize)) {
    for (at, &row) in local.iter().enumerate() {
        if row != ELSEWHERE {
            let outer = at / (width * inner);
            visit(at, (outer * rows + row as usize) * inner + at % inner);
        }
    }
}

impl Kernel for TakeAlong {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let (x, ids) = (&inputs[0], &inputs[1]);
        let (rows, width) = (x.shape[self.axis], ids.shape[self.axis] as usize);
        let inner = count(&x.shape[self.axis + 1..]);
        let local = local_rows(ids, [self.base, rows, self.extent], &mut context.scratch)?;
        with_same_type!(x.data, &mut outputs[0].data, |x, y| {
            y.fill(Default::default());
            for_each(local, rows as usize, width, inner, |at, from| y[at] = x[from]);
        });
        Ok(())
    }
}

impl Kernel for PutAlong {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let ids = &inputs[0];
        let inner = count(&ids.shape[self.axis + 1..]);
        let local = local_rows(ids, [self.base, self.rows, self.extent], &mut context.scratch)?;
        let from = read::<T>(&inputs[1])?;
        let y = write::<T>(&mut outputs[0])?;
        y.fill(T::ZERO);
        for_each(local, self.rows as usize, ids.shape[self.axis] as usize, inner, |at, to| y[to] += from[at]);
        Ok(())
    }
}
