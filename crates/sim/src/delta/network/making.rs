//! Making the tasks of a step: those of ops, of the windows that they reach for, and of the re-layouts of a group.
//!
//! Making them anew after a change takes the places of those that were there before, so that what stays the same is not
//! touched.

use super::{Before, List, Network, Task, Value};
use crate::delta::{
    NONE,
    lanes::{LANE_BITS, MOST_LANES, lanes},
    parts::Part,
    structure::{COMPUTE, End, Need, WINDOWS},
    ways::{Branch, Hop},
};
use shardwright_cost::{Layout, LayoutError, Placement};

/// Where new tasks of a group go.
struct Chain {
    list: List,
    used: usize,
    nth: u64,
    rank: u64,
}

impl Network<'_> {
    /// Gives an op the lanes and the time of a part, and its windows.
    pub(super) fn set_op(&mut self, op: usize, part: Part) {
        let count = self.lanes().count();
        for lane in 0..count {
            let task = (op * count + lane) as u32;
            if part.lanes >> lane & 1 == 1 {
                let streams = u64::from(part.duration > 0) << (lane * self.lanes().streams);
                let rank = ((((op as u64) << 32) | COMPUTE) << LANE_BITS) | lane as u64;
                self.set_task(task, part.duration, streams, rank);
            } else {
                self.set_task(task, 0, 0, 0);
            }
        }
        for i in 0..self.structure.operands(op).len() {
            self.set_windows(op, i);
        }
    }

    /// The task at a position of a list, added if it is not there yet.
    fn task_at(&mut self, list: List, position: usize) -> u32 {
        if let Some(&task) = self.list(list).get(position) {
            return task;
        }
        let place = self.free.pop().unwrap_or_else(|| {
            let place = self.tasks.len() as u32;
            self.tasks.push(Task::default());
            self.is_touched.push(false);
            self.edges.add_task();
            let count = self.ways.lanes.count();
            let first = self.fetched.len() + (place as usize - self.chosen.len() * count) * count;
            self.slots.push((first as u32, count as u32));
            (0..count).for_each(|_| {
                self.edges.add_slot(place);
            });
            place
        });
        self.log.push(Before::Taken { place });
        self.list(list).push(place);
        self.log.push(Before::Longer(list));
        place
    }

    /// Leaves so many tasks of a list.
    fn shorten(&mut self, list: List, len: usize) {
        while self.list(list).len() > len {
            let Some(place) = self.list(list).pop() else { return };
            self.log.push(Before::Shorter(list, place));
            let slot = self.slot(place);
            (0..self.lanes().count() as u32).for_each(|lane| self.wait(slot + lane, NONE));
            self.set_task(place, 0, 0, 0);
            self.free.push(place);
            self.log.push(Before::GivenBack);
        }
    }

    /// Makes the tasks of a hop, as a list's next ones, and moves on to what is there after it.
    fn hop(&mut self, hop: Hop, chain: &mut Chain, value: &mut Value) {
        let count = self.lanes().count();
        if hop.duration > 0 {
            let before = *value;
            for group in 0..self.ways.groups(hop).len() {
                let all = self.ways.groups(hop)[group];
                let members = all & hop.members;
                if members == 0 {
                    continue;
                }
                let mut left = members;
                while left != 0 {
                    // One for all, or for each that moves data itself.
                    let gang = if self.ways.each_for_itself() { left & left.wrapping_neg() } else { left };
                    left &= !gang;
                    let task = self.task_at(chain.list, chain.used);
                    chain.used += 1;
                    let first = if gang == members { all } else { gang };
                    let rank = ((chain.rank + chain.nth) << LANE_BITS) | u64::from(first.trailing_zeros());
                    let width = self.lanes().streams;
                    let streams = lanes(gang).fold(0, |bits, lane| bits | hop.ports << (lane * width));
                    self.set_task(task, hop.duration, streams, rank);
                    let slot = self.slot(task);
                    for (lane, &before) in before.iter().enumerate().take(count) {
                        let member = members >> lane & 1 == 1;
                        self.wait(slot + lane as u32, if member { before } else { NONE });
                    }
                    lanes(gang).for_each(|lane| value[lane] = task);
                }
            }
            chain.nth += 1;
        }
        // Who has nothing to do with it does not have the tensor.
        lanes(self.lanes().all() & !hop.members).for_each(|lane| value[lane] = NONE);
    }

    /// Makes an op fetch what the windows of an operand reach for, and wait for that.
    fn set_windows(&mut self, op: usize, i: usize) {
        let (part, count) = (self.chosen_parts[op], self.lanes().count());
        let operand = self.structure.operands(op).start + i;
        let rank = ((op as u64) << 32) | ((i as u64 + 1) << 16);
        let mut chain = Chain { list: List::Windows(operand as u32), used: 0, nth: 0, rank: rank + WINDOWS };
        let mut value = [NONE; MOST_LANES];
        (0..count).for_each(|lane| value[lane] = self.fetched[self.operand_slot(op, i, lane)]);
        for at in 0..self.parts.windows(&part).len() {
            let (of, hop) = self.parts.windows(&part)[at];
            if of == i as u32 {
                self.hop(hop, &mut chain, &mut value);
            }
        }
        self.shorten(chain.list, chain.used);
        for (lane, &value) in value.iter().enumerate().take(count) {
            let here = part.lanes >> lane & 1 == 1;
            self.wait(self.operand_slot(op, i, lane) as u32, if here { value } else { NONE });
        }
    }

    fn layout(&self, end: End) -> u32 {
        self.parts.layout(&self.chosen_parts[end.op as usize], end.slot)
    }

    /// The layout that a need asks for: an end's, or the home's with partial sums added up, which is how a weight that
    /// nobody reads is stored.
    fn needed(&mut self, need: &Need, shape: u32, home: u32) -> u32 {
        if let Some(end) = need.end {
            return self.layout(end);
        }
        let layout: Layout = *self.ways.layout_of(shape, home);
        let partial = layout.axes_where(|p| matches!(p, Placement::Partial(_)));
        let whole = partial.iter().fold(layout, |layout, axis| layout.with(axis, Placement::Replicated));
        self.ways.layout(shape, whole)
    }

    /// Makes all re-layouts anew.
    pub fn rebuild_all(&mut self) -> Result<(), LayoutError> {
        (0..self.structure.groups.len()).try_for_each(|group| self.rebuild(group))
    }

    /// Makes the re-layouts of a group anew.
    pub(super) fn rebuild(&mut self, at: usize) -> Result<(), LayoutError> {
        let group = &self.structure.groups[at];
        let (shape, maker, needs) = (group.shape, group.maker, group.needs.clone());
        let home = self.layout(group.home);
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.clear();
        for need in needs.clone() {
            let layout = self.needed(&self.structure.needs[need as usize].clone(), shape, home);
            if layout != home && !wanted.contains(&layout) {
                wanted.push(layout);
            }
        }
        let mut branches = std::mem::take(&mut self.branches);
        let outcome = self.ways.spread(shape, home, &wanted, &mut branches);
        let mut values = std::mem::take(&mut self.values);
        values.clear();
        values.resize(branches.len(), None);
        let mut made = [NONE; MOST_LANES];
        if maker != NONE {
            let count = self.lanes().count();
            let there = self.chosen_parts[maker as usize].lanes;
            lanes(there).for_each(|lane| made[lane] = maker * count as u32 + lane as u32);
        }
        let mut chain = Chain { list: List::Group(at as u32), used: 0, nth: 0, rank: 0 };
        for need in needs {
            let need = self.structure.needs[need as usize];
            let layout = self.needed(&need, shape, home);
            if need.rank != chain.rank {
                (chain.rank, chain.nth) = (need.rank, 0);
            }
            let value = match branches.iter().position(|branch| branch.to == layout) {
                None => made,
                Some(branch) => self.grow(&mut chain, &branches, &mut values, &made, branch),
            };
            if let (true, Some(end)) = (need.operand != NONE, need.end) {
                self.deliver(end, &value);
            }
        }
        self.shorten(chain.list, chain.used);
        (self.wanted, self.branches, self.values) = (wanted, branches, values);
        outcome
    }

    /// The tasks after which a branch is there, made if nobody has asked for it before.
    fn grow(
        &mut self,
        chain: &mut Chain,
        branches: &[Branch],
        values: &mut [Option<Value>],
        made: &Value,
        at: usize,
    ) -> Value {
        if let Some(value) = values[at] {
            return value;
        }
        let branch = &branches[at];
        let mut value = match branch.from {
            NONE => *made,
            from => self.grow(chain, branches, values, made, from as usize),
        };
        for hop in self.ways.hops(branch) {
            self.hop(self.ways.hop(hop), chain, &mut value);
        }
        values[at] = Some(value);
        value
    }

    /// An operand's tensor is there after some tasks.
    fn deliver(&mut self, End { op, slot: i }: End, value: &Value) {
        let mut changed = false;
        for (lane, &task) in value.iter().enumerate().take(self.lanes().count()) {
            let slot = self.operand_slot(op as usize, i as usize, lane);
            let old = std::mem::replace(&mut self.fetched[slot], task);
            if old != task {
                changed = true;
                self.log.push(Before::Fetched { slot: slot as u32, task: old });
            }
        }
        if changed {
            self.set_windows(op as usize, i as usize);
        }
    }
}
