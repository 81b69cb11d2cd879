//! Kernels of sorting and of the largest elements of rows.

use super::{Context, Kernel, Result, loops::count, movement::with_same_type, write};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::ops::{Sort, TopK};
use std::cmp::Ordering;

/// A total order of elements with NaN last.
trait Rank: Copy {
    fn rank(self, other: Self) -> Ordering;
}

macro_rules! rank {
    ($($t:ty),*) => {
        $(impl Rank for $t {
            fn rank(self, other: Self) -> Ordering {
                // Only NaN differs from itself.
                #[allow(clippy::eq_op)]
                self.partial_cmp(&other).unwrap_or_else(|| (self != self).cmp(&(other != other)))
            }
        })*
    };
}

rank!(f32, f64, half::bf16, half::f16, i32, i64, u8);

/// Positions `0..row` in the order of the elements `x[start + position * stride]`; equal ones keep their order.
fn order<E: Rank>(
    x: &[E],
    start: usize,
    row: usize,
    stride: usize,
    descending: bool,
    positions: &mut Vec<usize>,
) {
    positions.clear();
    positions.extend(0..row);
    let at = |i: usize| x[start + i * stride];
    if descending {
        positions.sort_by(|&a, &b| at(b).rank(at(a)));
    } else {
        positions.sort_by(|&a, &b| at(a).rank(at(b)));
    }
}

/// Runs a function on the elements of a view of any type.
macro_rules! with_elements {
    ($view:expr, |$x:ident| $body:expr) => {
        match $view.data {
            Elements::F32($x) => $body,
            Elements::F64($x) => $body,
            Elements::Bf16($x) => $body,
            Elements::F16($x) => $body,
            Elements::I32($x) => $body,
            Elements::I64($x) => $body,
            Elements::Bool($x) => $body,
        }
    };
}

impl Kernel for Sort {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let shape = inputs[0].shape;
        let (row, inner) = (shape[self.axis] as usize, count(&shape[self.axis + 1..]));
        let mut positions = Vec::with_capacity(row);
        for line in 0..count(shape) / row {
            let start = line / inner * row * inner + line % inner;
            with_elements!(inputs[0], |x| order(x, start, row, inner, self.descending, &mut positions));
            for (x, y) in inputs.iter().zip(outputs.iter_mut()) {
                with_same_type!(x.data, &mut y.data, |x, y| {
                    for (i, &from) in positions.iter().enumerate() {
                        y[start + i * inner] = x[start + from * inner];
                    }
                });
            }
        }
        Ok(())
    }
}

impl Kernel for TopK {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (row, k) = (inputs[0].shape.last().map_or(1, |&n| n as usize), self.k as usize);
        let [values, places] = outputs else { return Ok(()) };
        let places = write::<i32>(places)?;
        let mut positions = Vec::with_capacity(row);
        for (line, places) in places.chunks_exact_mut(k).enumerate() {
            with_elements!(inputs[0], |x| order(x, line * row, row, 1, true, &mut positions));
            with_same_type!(inputs[0].data, &mut values.data, |x, y| {
                for (i, &from) in positions[..k].iter().enumerate() {
                    y[line * k + i] = x[line * row + from];
                }
            });
            places.iter_mut().zip(&positions).for_each(|(place, &from)| *place = from as i32);
        }
        Ok(())
    }
}
