//! Kernels of the weight updates.

use super::{Context, Kernel, KernelError, Result, read, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Adam, Momentum, Sgd};
use shardwright_simd::vectorised;

fn missing() -> KernelError {
    KernelError::BadValue("an update has too few outputs".into())
}

impl Kernel for Sgd {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (w, g) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let lr = T::from_f64(self.lr.0);
        let new = write::<T>(&mut outputs[0])?;
        vectorised!({
            for ((new, &w), &g) in new.iter_mut().zip(w).zip(g) {
                *new = w - lr * g;
            }
        });
        Ok(())
    }
}

impl Kernel for Momentum {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (w, g, v) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?, read::<T>(&inputs[2])?);
        let [new_w, new_v] = outputs else { return Err(missing()) };
        let (new_w, new_v) = (write::<T>(new_w)?, write::<T>(new_v)?);
        let (lr, momentum) = (T::from_f64(self.lr.0), T::from_f64(self.momentum.0));
        vectorised!({
            for ((((new_w, new_v), &w), &g), &v) in new_w.iter_mut().zip(new_v).zip(w).zip(g).zip(v) {
                *new_v = momentum * v + g;
                *new_w = w - lr * *new_v;
            }
        });
        Ok(())
    }
}

impl Kernel for Adam {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let (w, g) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let (m, v) = (read::<T>(&inputs[2])?, read::<T>(&inputs[3])?);
        let [new_w, new_m, new_v] = outputs else { return Err(missing()) };
        let (new_w, new_m, new_v) = (write::<T>(new_w)?, write::<T>(new_m)?, write::<T>(new_v)?);
        let [beta1, beta2] = [self.beta1.0, self.beta2.0];
        // The bias corrections in f64, folded into two factors: the work per element is cheap and well conditioned.
        let t = (context.step as f64) + 1.0;
        let rate = T::from_f64(self.lr.0 / (1.0 - beta1.powf(t)));
        let kept = T::from_f64(1.0 - self.lr.0 * self.weight_decay.0);
        let correction = T::from_f64(1.0 / (1.0 - beta2.powf(t)));
        let [a1, b1, a2, b2, eps] = [beta1, 1.0 - beta1, beta2, 1.0 - beta2, self.eps.0].map(T::from_f64);
        let new = new_w.iter_mut().zip(new_m).zip(new_v);
        vectorised!({
            for ((((((new_w, new_m), new_v), &w), &g), &m), &v) in new.zip(w).zip(g).zip(m).zip(v) {
                *new_m = a1 * m + b1 * g;
                *new_v = a2 * v + b2 * (g * g);
                *new_w = kept * w - rate * *new_m / ((*new_v * correction).sqrt() + eps);
            }
        });
        Ok(())
    }
}
