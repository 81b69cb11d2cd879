//! Kernels of the LSTM: one matrix product per time step for all gates, one fused loop for gates and states.

use super::{
    Context, Kernel, KernelError, Result,
    elementwise::sigmoid,
    gemm::{Matrix, gemm, gemm_few_rows},
    read, write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Lstm, LstmGrad};

/// Steps, batch, hidden units read and computed.
#[derive(Clone, Copy)]
struct Sizes {
    t: usize,
    b: usize,
    k: usize,
    h: usize,
}

impl Sizes {
    fn of(gates: &View<'_>, u: &View<'_>) -> Self {
        let size = |n: u64| n as usize;
        Self {
            t: size(gates.shape[0]),
            b: size(gates.shape[1]),
            k: size(u.shape[0]),
            h: size(gates.shape[3]),
        }
    }
}

/// The four gates of one row: i, f, g, o.
fn gates_of<T>(row: &[T], h: usize) -> [&[T]; 4] {
    [&row[..h], &row[h..2 * h], &row[2 * h..3 * h], &row[3 * h..4 * h]]
}

fn gates_of_mut<T>(row: &mut [T], h: usize) -> [&mut [T]; 4] {
    let (low, high) = row.split_at_mut(2 * h);
    let ((i, f), (g, o)) = (low.split_at_mut(h), high.split_at_mut(h));
    [i, f, g, o]
}

impl Kernel for Lstm {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let Sizes { t, b, k, h } = Sizes::of(&inputs[0], &inputs[1]);
        let [gx, u] = [read::<T>(&inputs[0])?, read::<T>(&inputs[1])?];
        let [h0, c0] = [read::<T>(&inputs[2])?, read::<T>(&inputs[3])?];
        let [y, c, gates] = outputs else { return Err(wrong_count()) };
        let (y, c, gates) = (write::<T>(y)?, write::<T>(c)?, write::<T>(gates)?);
        gates.copy_from_slice(gx);
        let (step, wide) = (b * h, 4 * b * h);
        for (s, gates) in gates.chunks_exact_mut(wide).enumerate().take(t) {
            let (y_before, y) = y.split_at_mut(s * step);
            let (c_before, c) = c.split_at_mut(s * step);
            let hidden = if s == 0 { h0 } else { &y_before[(s - 1) * step..] };
            let cell = if s == 0 { c0 } else { &c_before[(s - 1) * step..] };
            gemm_few_rows(
                [b, 4 * h, k],
                (hidden, Matrix::rows(0, k)),
                (u, Matrix::rows(0, 4 * h)),
                (&mut *gates, Matrix::rows(0, 4 * h)),
                true,
                &mut context.scratch,
            );
            for r in 0..b {
                let row = r * h..(r + 1) * h;
                forward_row(
                    &mut gates[4 * h * r..4 * h * (r + 1)],
                    &cell[row.clone()],
                    &mut c[row.clone()],
                    &mut y[row],
                );
            }
        }
        Ok(())
    }
}

/// Activates the gates of one row and computes its new cell and hidden state.
fn forward_row<T: Float>(gates: &mut [T], before: &[T], c: &mut [T], y: &mut [T]) {
    let h = y.len();
    let [i, f, g, o] = gates_of_mut(gates, h);
    for j in 0..h {
        i[j] = sigmoid(i[j]);
        f[j] = sigmoid(f[j]);
        g[j] = g[j].tanh();
        o[j] = sigmoid(o[j]);
        c[j] = f[j] * before[j] + i[j] * g[j];
        y[j] = o[j] * c[j].tanh();
    }
}

impl Kernel for LstmGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let Sizes { t, b, k, h } = Sizes::of(&inputs[5], &inputs[0]);
        let [u, h0, c0] = [read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, read::<T>(&inputs[2])?];
        let [y, c, gates] = [read::<T>(&inputs[3])?, read::<T>(&inputs[4])?, read::<T>(&inputs[5])?];
        let dy = if self.dy { Some(read::<T>(&inputs[6])?) } else { None };
        let dc = if self.dc { Some(read::<T>(&inputs[6 + usize::from(self.dy)])?) } else { None };
        let [dgx, du, dh, dcell] = outputs else { return Err(wrong_count()) };
        // `dh` and `dcell` hold the gradients of the states between steps, in the end those of the initial states.
        let (dgx, du) = (write::<T>(dgx)?, write::<T>(du)?);
        let (dh, dcell) = (write::<T>(dh)?, write::<T>(dcell)?);
        let (step, wide) = (b * h, 4 * b * h);
        for s in (0..t).rev() {
            let last = s + 1 == t;
            if last {
                dcell.fill(T::ZERO);
            }
            for r in 0..b {
                let row = r * h..(r + 1) * h;
                let at = s * step + r * h;
                let before = if s == 0 { &c0[row.clone()] } else { &c[at - step..][..h] };
                // This hidden state's gradient is read before the product below overwrites it.
                let later = if last { None } else { Some(&dh[row.clone()]) };
                let wide_row = s * wide + 4 * h * r;
                let states = Row {
                    gates: gates_of(&gates[wide_row..][..4 * h], h),
                    before,
                    c: &c[at..][..h],
                    dy: [dy.map(|dy| &dy[at..][..h]), later],
                    dc: dc.map(|dc| &dc[at..][..h]),
                };
                states.backward(&mut dgx[wide_row..][..4 * h], &mut dcell[row]);
            }
            gemm_few_rows(
                [b, k, 4 * h],
                (dgx, Matrix::rows(s * wide, 4 * h)),
                (u, Matrix::rows(0, 4 * h).transposed()),
                (&mut *dh, Matrix::rows(0, k)),
                false,
                &mut context.scratch,
            );
        }
        // The weights' gradient over all steps at once: the hidden states before each step, times its gates'.
        let gates_from = |s: usize| Matrix::rows(s * wide, 4 * h);
        let states = Matrix::rows(0, k).transposed();
        gemm([k, 4 * h, b], (h0, states), (dgx, gates_from(0)), (&mut *du, Matrix::rows(0, 4 * h)), false);
        if t > 1 {
            let rows = (t - 1) * b;
            gemm([k, 4 * h, rows], (y, states), (dgx, gates_from(1)), (du, Matrix::rows(0, 4 * h)), true);
        }
        Ok(())
    }
}

/// The operands of one step's gradient, for one element of the batch.
struct Row<'a, T> {
    gates: [&'a [T]; 4],
    /// Cell state before the step.
    before: &'a [T],
    /// Cell state after it.
    c: &'a [T],
    /// Gradients of the hidden state: from outside, from the next step.
    dy: [Option<&'a [T]>; 2],
    /// Gradient of the cell state from outside.
    dc: Option<&'a [T]>,
}

impl<T: Float> Row<'_, T> {
    /// Writes the gradient of the gates before activation; turns `dcell` from the gradient of the cell state
    /// after the step into that before it.
    fn backward(&self, dgates: &mut [T], dcell: &mut [T]) {
        let h = dcell.len();
        let [i, f, g, o] = self.gates;
        let [di, df, dg, d_o] = gates_of_mut(dgates, h);
        let at = |x: Option<&[T]>, j: usize| x.map_or(T::ZERO, |x| x[j]);
        for j in 0..h {
            let tanh = self.c[j].tanh();
            let dy = at(self.dy[0], j) + at(self.dy[1], j);
            let dc = dcell[j] + at(self.dc, j) + dy * o[j] * (T::ONE - tanh * tanh);
            di[j] = dc * g[j] * i[j] * (T::ONE - i[j]);
            df[j] = dc * self.before[j] * f[j] * (T::ONE - f[j]);
            dg[j] = dc * i[j] * (T::ONE - g[j] * g[j]);
            d_o[j] = dy * tanh * o[j] * (T::ONE - o[j]);
            dcell[j] = dc * f[j];
        }
    }
}

fn wrong_count() -> KernelError {
    KernelError::BadValue("the kernel has another number of results".into())
}
