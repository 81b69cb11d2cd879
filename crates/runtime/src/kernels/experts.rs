//! Kernels of mixtures of experts: routes, slots, and tokens that go to slots and come back by index.

use super::{Context, Kernel, KernelError, Result, gather::with_ids, loops::count, read, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Combine, CombineGradWeights, Dispatch, Route, SlotGrid, Slots};
use std::cmp::Ordering;

/// Larger numbers first, NaN last.
fn descending<T: Float>(a: T, b: T) -> Ordering {
    let is_nan = |x: T| x.partial_cmp(&x).is_none();
    b.partial_cmp(&a).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b)))
}

/// Orders positions by the numbers there, largest first; equal ones by position, so that the order is total.
fn order_by<T: Float>(x: &[T], positions: &mut [u64]) {
    positions.sort_unstable_by(|&i, &j| descending(x[i as usize], x[j as usize]).then(i.cmp(&j)));
}

/// Numbers places from zero.
fn number(places: &mut [u64]) {
    places.iter_mut().enumerate().for_each(|(i, place)| *place = i as u64);
}

impl Kernel for Route {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let row = inputs[0].shape.last().map_or(1, |&n| n as usize);
        let [k, groups, top, best] =
            [self.k, self.groups, self.top_groups, self.group_scores].map(|n| n as usize);
        let (x, ids) = (read::<T>(&inputs[0])?, write::<i32>(&mut outputs[0])?);
        let (order, ranks) = context.scratch.take::<u64>(row + groups).split_at_mut(row);
        let mut scores = vec![T::ZERO; groups];
        let size = row / groups;
        for (x, ids) in x.chunks_exact(row).zip(ids.chunks_exact_mut(k)) {
            number(ranks);
            if top < groups {
                for (score, x) in scores.iter_mut().zip(x.chunks_exact(size)) {
                    let places = &mut order[..size];
                    number(places);
                    order_by(x, places);
                    *score = places[..best].iter().fold(T::ZERO, |sum, &i| sum + x[i as usize]);
                }
                order_by(&scores, ranks);
            }
            let open = &mut order[..top * size];
            for (places, &group) in open.chunks_exact_mut(size).zip(&*ranks) {
                number(places);
                places.iter_mut().for_each(|place| *place += group * size as u64);
            }
            order_by(x, open);
            ids.iter_mut().zip(&*open).for_each(|(id, &position)| *id = position as i32);
        }
        Ok(())
    }
}

impl Kernel for Slots {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let group = count(&inputs[0].shape[1..]);
        let used = context.scratch.take::<u64>(self.experts as usize);
        let dropped = SlotGrid::new(self.experts, self.capacity).dropped();
        let places = write::<i32>(&mut outputs[0])?;
        with_ids!(inputs[0], |ids| {
            for (at, (place, expert)) in places.iter_mut().zip(ids).enumerate() {
                if at % group == 0 {
                    used.fill(0);
                }
                // A negative id becomes larger than any number of experts.
                let Some(used) = used.get_mut(expert as usize) else {
                    let reason = format!("expert {expert} at place {at} is outside 0..{}", self.experts);
                    return Err(KernelError::BadValue(reason));
                };
                let free = *used < self.capacity;
                *place = if free { expert as u64 * self.capacity + *used } else { dropped } as i32;
                *used += 1;
            }
        });
        Ok(())
    }
}

/// Calls `visit(id, row)` for every slot id that names a slot held here. Ids are counted in `[n, s, k]`, rows in `[n, e, p]`.
fn for_each_slot(
    grid: &SlotGrid,
    slot_ids: &View<'_>,
    held: [u64; 2],
    mut visit: impl FnMut(usize, usize),
) -> Result {
    let group = count(&slot_ids.shape[1..]);
    let rows = (held[0] * held[1]) as usize;
    with_ids!(slot_ids, |ids| {
        for (at, id) in ids.enumerate() {
            // A negative id becomes larger than any number of slots.
            if id as u64 > grid.dropped() {
                let reason = format!("slot id {id} at place {at} is outside 0..={}", grid.dropped());
                return Err(KernelError::BadValue(reason));
            }
            if let Some(place) = grid.place(id as u64, held) {
                visit(at, at / group * rows + place as usize);
            }
        }
    });
    Ok(())
}

/// `to += weight * from`.
fn add_row<T: Float>(to: &mut [T], from: &[T], weight: T) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += weight * from);
}

/// The weights of slot ids, if the op has any.
fn weights<'a, T: Float>(inputs: &[View<'a>]) -> Result<Option<&'a [T]>> {
    inputs.get(2).map(read::<T>).transpose()
}

impl Kernel for Dispatch {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let [width, k] = [&inputs[0], &inputs[1]].map(|view| view.shape[2] as usize);
        let (x, weights) = (read::<T>(&inputs[0])?, weights::<T>(inputs)?);
        let y = write::<T>(&mut outputs[0])?;
        y.fill(T::ZERO);
        for_each_slot(&self.grid, &inputs[1], [self.experts, self.slots], |at, row| {
            let weight = weights.map_or(T::ONE, |weights| weights[at]);
            add_row(&mut y[row * width..][..width], &x[at / k * width..][..width], weight);
        })
    }
}

impl Kernel for Combine {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (shape, k) = (inputs[0].shape, inputs[1].shape[2] as usize);
        let width = shape[3] as usize;
        let (y, weights) = (read::<T>(&inputs[0])?, weights::<T>(inputs)?);
        let x = write::<T>(&mut outputs[0])?;
        x.fill(T::ZERO);
        for_each_slot(&self.grid, &inputs[1], [shape[1], shape[2]], |at, row| {
            let weight = weights.map_or(T::ONE, |weights| weights[at]);
            add_row(&mut x[at / k * width..][..width], &y[row * width..][..width], weight);
        })
    }
}

impl Kernel for CombineGradWeights {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (shape, k) = (inputs[0].shape, inputs[1].shape[2] as usize);
        let width = shape[3] as usize;
        let (y, x) = (read::<T>(&inputs[0])?, read::<T>(&inputs[2])?);
        let products = write::<T>(&mut outputs[0])?;
        products.fill(T::ZERO);
        for_each_slot(&self.grid, &inputs[1], [shape[1], shape[2]], |at, row| {
            let (y, x) = (&y[row * width..][..width], &x[at / k * width..][..width]);
            products[at] = y.iter().zip(x).fold(T::ZERO, |sum, (&y, &x)| sum + y * x);
        })
    }
}
