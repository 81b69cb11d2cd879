//! The order of every schedule, device by device. No times: [`super::simulate`] adds them.

use super::{Action, Pass, Slot};

/// An order under construction. Chunks run their micro-batches in ascending order, so only counts are needed.
struct OrderBuilder {
    slots: Vec<Slot>,
    /// Per chunk: the next forward, input-gradient and weight-gradient pass.
    next: Vec<[u32; 3]>,
    micro_batches: u32,
}

impl OrderBuilder {
    fn new(chunks: u32, micro_batches: u32) -> Self {
        OrderBuilder { slots: Vec::new(), next: vec![[0; 3]; chunks as usize], micro_batches }
    }

    /// The chunk's next action of a pass. Whole backward passes count as gradients of inputs and weights.
    fn take(&mut self, pass: Pass, chunk: u32) -> Option<Action> {
        let next = &mut self.next[chunk as usize];
        let counters: &[usize] = match pass {
            Pass::Forward => &[0],
            Pass::Backward => &[1, 2],
            Pass::BackwardInput => &[1],
            Pass::BackwardWeight => &[2],
        };
        let micro_batch = next[counters[0]];
        counters.iter().for_each(|&counter| next[counter] += 1);
        (micro_batch < self.micro_batches).then_some(Action { pass, chunk, micro_batch })
    }

    /// Appends the chunk's next action of a pass; nothing where its micro-batches are done.
    fn push(&mut self, pass: Pass, chunk: u32) {
        let action = self.take(pass, chunk);
        self.slots.extend(action.map(Slot::Single));
    }
}

pub(super) fn gpipe(micro_batches: u32) -> Vec<Slot> {
    let mut order = OrderBuilder::new(1, micro_batches);
    for pass in [Pass::Forward, Pass::Backward] {
        for _ in 0..micro_batches {
            order.push(pass, 0);
        }
    }
    order.slots
}

pub(super) fn one_forward_one_backward(devices: u32, device: u32, micro_batches: u32) -> Vec<Slot> {
    let mut order = OrderBuilder::new(1, micro_batches);
    for _ in 0..micro_batches.min(devices - 1 - device) {
        order.push(Pass::Forward, 0);
    }
    for _ in 0..micro_batches {
        order.push(Pass::Forward, 0);
        order.push(Pass::Backward, 0);
    }
    order.slots
}

/// Megatron's interleaved order: `devices` micro-batches of one chunk, then of the next.
pub(super) fn interleaved(devices: u32, device: u32, micro_batches: u32, chunks: u32) -> Vec<Slot> {
    let total = micro_batches * chunks;
    let action = |pass: Pass, index: u32| {
        let (group, within) = (index / (devices * chunks), index % (devices * chunks));
        let chunk = if pass == Pass::Forward { within / devices } else { chunks - 1 - within / devices };
        Slot::Single(Action { pass, chunk, micro_batch: group * devices + within % devices })
    };
    // All chunks of the first group but the last, and twice the devices that follow: forward and backward way.
    let warm_up = total.min((devices - 1 - device) * 2 + (chunks - 1) * devices);
    let mut slots: Vec<Slot> = (0..warm_up).map(|index| action(Pass::Forward, index)).collect();
    for index in 0..total {
        if warm_up + index < total {
            slots.push(action(Pass::Forward, warm_up + index));
        }
        slots.push(action(Pass::Backward, index));
    }
    slots
}

/// 1F1B whose weight gradients lag behind the input gradients by as many micro-batches as devices come before: every device
/// then holds as many micro-batches as there are devices.
pub(super) fn zb_h1(devices: u32, device: u32, micro_batches: u32) -> Vec<Slot> {
    let mut order = OrderBuilder::new(1, micro_batches);
    for _ in 0..micro_batches.min(devices - 1 - device) {
        order.push(Pass::Forward, 0);
    }
    for index in 0..micro_batches {
        order.push(Pass::Forward, 0);
        order.push(Pass::BackwardInput, 0);
        if index >= device {
            order.push(Pass::BackwardWeight, 0);
        }
    }
    for _ in 0..micro_batches.min(device) {
        order.push(Pass::BackwardWeight, 0);
    }
    order.slots
}

/// ZB-V: chunk 0 runs down the devices, chunk 1 back up.
pub(super) fn zb_v(devices: u32, device: u32, micro_batches: u32) -> Vec<Slot> {
    let mut order = OrderBuilder::new(2, micro_batches);
    // Fewer micro-batches than this leave holes in the same order.
    let planned = micro_batches.max(2 * devices - 1);
    let both = |order: &mut OrderBuilder, chunk: u32| {
        order.push(Pass::BackwardInput, chunk);
        order.push(Pass::BackwardWeight, chunk);
    };
    for _ in 0..2 * (devices - device) - 1 {
        order.push(Pass::Forward, 0);
    }
    for _ in 0..device {
        order.push(Pass::Forward, 1);
        order.push(Pass::Forward, 0);
    }
    for _ in 0..devices - device {
        order.push(Pass::Forward, 1);
        both(&mut order, 1);
    }
    while order.next[1][0] < order.next[0][0] || order.next[0][0] < planned {
        if order.next[0][0] < planned {
            order.push(Pass::Forward, 0);
        }
        both(&mut order, 0);
        order.push(Pass::Forward, 1);
        both(&mut order, 1);
    }
    for _ in 0..device {
        order.push(Pass::BackwardInput, 0);
        order.push(Pass::BackwardInput, 1);
    }
    for _ in 0..devices - device {
        order.push(Pass::BackwardInput, 0);
        order.push(Pass::BackwardWeight, 0);
    }
    for chunk in [1, 0] {
        while order.next[chunk as usize][2] < planned {
            order.push(Pass::BackwardWeight, chunk);
        }
    }
    order.slots
}

/// DualPipe-V: ZB-V's placement; in the steady state a forward pass of one chunk overlaps a backward pass of the other.
pub(super) fn dualpipe_v(devices: u32, device: u32, micro_batches: u32) -> Vec<Slot> {
    let mut order = OrderBuilder::new(2, micro_batches);
    // Weight gradients that were put off, in order: chunks.
    let mut put_off: std::collections::VecDeque<u32> = std::collections::VecDeque::new();
    let later = devices - 1 - device;
    let overlapped = |order: &mut OrderBuilder, forward: u32, backward: u32| {
        let pair = (order.take(Pass::Forward, forward), order.take(Pass::Backward, backward));
        match pair {
            (Some(forward), Some(backward)) => order.slots.push(Slot::Overlapped(forward, backward)),
            (one, other) => order.slots.extend(one.or(other).map(Slot::Single)),
        }
    };
    for _ in 0..2 * later {
        order.push(Pass::Forward, 0);
    }
    for _ in 0..=device {
        order.push(Pass::Forward, 0);
        order.push(Pass::Forward, 1);
    }
    for _ in 0..later {
        order.push(Pass::BackwardInput, 1);
        order.push(Pass::BackwardWeight, 1);
        order.push(Pass::Forward, 1);
    }
    for index in 0..micro_batches - 2 * devices + device + 1 {
        if index == 0 && later == 0 {
            // The last device's own chunks follow each other: this backward pass waits for the forward pass beside it.
            order.push(Pass::Forward, 0);
            order.push(Pass::Backward, 1);
        } else {
            overlapped(&mut order, 0, 1);
        }
        overlapped(&mut order, 1, 0);
    }
    for _ in 0..later {
        order.push(Pass::Backward, 1);
        overlapped(&mut order, 1, 0);
    }
    // The second half of the remaining backward passes puts weight gradients off.
    let mut splits = false;
    for index in 0..=device {
        for chunk in [1, 0] {
            splits |= index == device.div_ceil(2) && device % 2 == chunk;
            if splits {
                order.push(Pass::BackwardInput, chunk);
                put_off.push_back(chunk);
            } else {
                order.push(Pass::Backward, chunk);
            }
        }
    }
    for _ in 0..later {
        if let Some(chunk) = put_off.pop_front() {
            order.push(Pass::BackwardWeight, chunk);
        }
        order.push(Pass::BackwardInput, 0);
        put_off.push_back(0);
    }
    while let Some(chunk) = put_off.pop_front() {
        order.push(Pass::BackwardWeight, chunk);
    }
    order.slots
}
