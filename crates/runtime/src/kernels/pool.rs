//! Kernels of pooling and its derivatives: rows of outputs at a time, so that the inner loops run along rows.

use super::{Context, Kernel, KernelError, Result, read, window::Windows, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad, PoolGeometry};

fn windows(geometry: &PoolGeometry, x: &[u64], y: &[u64]) -> Result<Windows> {
    let slides = geometry.slides().map_err(|e| KernelError::BadValue(e.to_string()))?;
    Ok(Windows::new(&slides, &x[2..], &y[2..]))
}

impl Kernel for MaxPool {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, inputs[0].shape, outputs[0].shape)?;
        let stride = windows.axes[2].stride;
        let x = read::<T>(&inputs[0])?;
        let [y, index] = outputs else { return Err(KernelError::BadValue("needs two outputs".into())) };
        let (y, index) = (write::<T>(y)?, write::<i32>(index)?);
        let planes = y.chunks_exact_mut(windows.outputs()).zip(index.chunks_exact_mut(windows.outputs()));
        for (x, (y, index)) in x.chunks_exact(windows.inputs()).zip(planes) {
            y.fill(T::NEG_INFINITY);
            // A window of nothing but padding or minus infinity keeps its first position inside, if any.
            index.fill(-1);
            windows.for_pieces(0..windows.outputs(), |piece| {
                let part = piece.at + piece.skip..piece.at + piece.skip + piece.met;
                let row = y[part.clone()].iter_mut().zip(&mut index[part]);
                let position = piece.position as i32;
                for ((y, index), &x) in row.zip(x[piece.input.min(x.len())..].iter().step_by(stride)) {
                    let larger = (x > *y) | (x.partial_cmp(&x).is_none()) | (*index < 0);
                    *y = if larger { x } else { *y };
                    *index = if larger { position } else { *index };
                }
            });
            index.iter_mut().for_each(|i| *i = (*i).max(0));
        }
        Ok(())
    }
}

impl Kernel for MaxPoolGrad {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let windows = windows(&self.geometry, outputs[0].shape, inputs[0].shape)?;
        let [depth, height, width] = windows.axes;
        let (dy, index) = (read::<T>(&inputs[0])?, read::<i32>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        dx.fill(T::ZERO);
        let positions = windows.positions();
        let planes = dy.chunks_exact(windows.outputs()).zip(index.chunks_exact(windows.outputs()));
        for (dx, (dy, index)) in dx.chunks_exact_mut(windows.inputs()).zip(planes) {
            let rows = dy.chunks_exact(width.output).zip(index.chunks_exact(width.output));
            for (row, (dy, index)) in rows.enumerate() {
                let (d, h) = (row / height.output, row % height.output);
                for (w, (&dy, &index)) in dy.iter().zip(index).enumerate() {
                    let position =
                        usize::try_from(index).ok().filter(|&i| i < positions).ok_or_else(|| {
                            KernelError::BadValue(format!("position {index} in a window of {positions}"))
                        })?;
                    let (rest, kw) = (position / width.kernel, position % width.kernel);
                    let (kd, kh) = (rest / height.kernel, rest % height.kernel);
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
        let stride = windows.axes[2].stride;
        let scale = T::from_f64(1.0 / windows.positions() as f64);
        let x = read::<T>(&inputs[0])?;
        let y = write::<T>(&mut outputs[0])?;
        for (x, y) in x.chunks_exact(windows.inputs()).zip(y.chunks_exact_mut(windows.outputs())) {
            y.fill(T::ZERO);
            windows.for_pieces(0..windows.outputs(), |piece| {
                let y = &mut y[piece.at + piece.skip..][..piece.met];
                y.iter_mut().zip(x[piece.input..].iter().step_by(stride)).for_each(|(y, &x)| *y += x);
            });
            y.iter_mut().for_each(|y| *y *= scale);
        }
        Ok(())
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
