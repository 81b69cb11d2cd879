//! Kernels of pooling and its derivatives. They process a row of outputs at a time, so the inner loops run along rows.

use super::{Context, Kernel, KernelError, Result, read, window::Windows, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad, PoolGeometry};
use shardwright_simd::vectorised_fn;

fn windows(geometry: &PoolGeometry, x: &[u64], y: &[u64]) -> Result<Windows> {
    let slides = geometry.slides().map_err(|e| KernelError::BadValue(e.to_string()))?;
    Ok(Windows::new(&slides, &x[2..], &y[2..]))
}

impl Kernel for MaxPool {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, inputs[0].shape, outputs[0].shape)?;
        let x = read::<T>(&inputs[0])?;
        let [y, index] = outputs else { return Err(KernelError::BadValue("needs two outputs".into())) };
        largest(&windows, x, write::<T>(y)?, write::<i32>(index)?);
        Ok(())
    }
}

vectorised_fn! {
    /// The largest element of each window, and its position in the window.
    fn largest[T: Float][T](windows: &Windows, x: &[T], y: &mut [T], index: &mut [i32]) {
        let planes = y.chunks_exact_mut(windows.outputs()).zip(index.chunks_exact_mut(windows.outputs()));
        for (x, (y, index)) in x.chunks_exact(windows.inputs()).zip(planes) {
            y.fill(T::NEG_INFINITY);
            // A window of padding or minus infinity only keeps its first position inside, if any.
            index.fill(-1);
            windows.for_pieces(0..windows.outputs(), |piece| {
                let part = piece.at + piece.skip..piece.at + piece.skip + piece.met;
                let (y, index) = (&mut y[part.clone()], &mut index[part]);
                let position = piece.position as i32;
                windows.for_met(&piece, x, |i, x| {
                    let larger = (x > y[i]) | (x.partial_cmp(&x).is_none()) | (index[i] < 0);
                    y[i] = if larger { x } else { y[i] };
                    index[i] = if larger { position } else { index[i] };
                });
            });
            index.iter_mut().for_each(|i| *i = (*i).max(0));
        }
    }
}

impl Kernel for MaxPoolGrad {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, outputs[0].shape, inputs[0].shape)?;
        let [depth, height, width] = windows.axes;
        let (dy, index) = (read::<T>(&inputs[0])?, read::<i32>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        dx.fill(T::ZERO);
        // The coordinates of each position in its window.
        let digits: Vec<[usize; 3]> = (0..windows.positions())
            .map(|i| [i / width.kernel / height.kernel, i / width.kernel % height.kernel, i % width.kernel])
            .collect();
        let planes = dy.chunks_exact(windows.outputs()).zip(index.chunks_exact(windows.outputs()));
        for (dx, (dy, index)) in dx.chunks_exact_mut(windows.inputs()).zip(planes) {
            let rows = dy.chunks_exact(width.output).zip(index.chunks_exact(width.output));
            for (row, (dy, index)) in rows.enumerate() {
                let (d, h) = (row / height.output, row % height.output);
                for (w, (&dy, &index)) in dy.iter().zip(index).enumerate() {
                    let position = usize::try_from(index).ok().and_then(|i| digits.get(i));
                    let &[kd, kh, kw] = position.ok_or_else(|| {
                        KernelError::BadValue(format!("position {index} in a window of {}", digits.len()))
                    })?;
                    let meets = (depth.meet(d, kd), height.meet(h, kh), width.meet(w, kw));
                    if let (Some(d), Some(h), Some(w)) = meets {
                        dx[(d * height.input + h) * width.input + w] += dy;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Kernel for AvgPool {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, inputs[0].shape, outputs[0].shape)?;
        average(&windows, read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        Ok(())
    }
}

vectorised_fn! {
    /// The average of each window; padding counts as zero.
    fn average[T: Float][T](windows: &Windows, x: &[T], y: &mut [T]) {
        let scale = T::from_f64(1.0 / windows.positions() as f64);
        for (x, y) in x.chunks_exact(windows.inputs()).zip(y.chunks_exact_mut(windows.outputs())) {
            y.fill(T::ZERO);
            windows.for_pieces(0..windows.outputs(), |piece| {
                let y = &mut y[piece.at + piece.skip..][..piece.met];
                windows.for_met(&piece, x, |i, x| y[i] += x);
            });
            y.iter_mut().for_each(|y| *y *= scale);
        }
    }
}

impl Kernel for AvgPoolGrad {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, outputs[0].shape, inputs[0].shape)?;
        let stride = windows.axes[2].stride;
        let scale = T::from_f64(1.0 / windows.positions() as f64);
        let dy = read::<T>(&inputs[0])?;
        let dx = write::<T>(&mut outputs[0])?;
        for (dy, dx) in dy.chunks_exact(windows.outputs()).zip(dx.chunks_exact_mut(windows.inputs())) {
            dx.fill(T::ZERO);
            windows.for_pieces(0..windows.outputs(), |piece| {
                let dy = &dy[piece.at + piece.skip..][..piece.met];
                dx[piece.input..].iter_mut().step_by(stride).zip(dy).for_each(|(x, &y)| *x += y);
            });
            dx.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(())
    }
}
