//! One device's part in an exchange, and its progress in the current step.
//!
//! Nothing here waits: a device visits all its exchanges in turn and advances each as far as it can. Blocks that are only
//! copied are copied as they arrive. Partial results are combined once all of them have arrived, in the order of
//! the group.

use crate::buffer::{Buffer, Pool};
use crate::exchange::Exchange;
use crate::fabric::{Edge, Fabric, Packing, ProcessMap};
use crate::walk::Walk;
use shardwright_cost::Reduction;
use shardwright_graph::{DType, block::elements};
use smallvec::SmallVec;
use std::sync::Arc;

/// Where a part of the result comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartSource {
    /// The device's own block.
    Own,
    /// A message, by its position among the received ones.
    Message(usize),
}

#[derive(Clone, Debug)]
struct Part {
    from: SmallVec<[PartSource; 1]>,
    walk: Walk,
}

/// One device's part in an exchange.
#[derive(Clone, Debug)]
pub struct ExchangeRole {
    dtype: DType,
    combine: Option<Reduction>,
    /// Edges to send along, and the packing of messages to other processes.
    sends: Vec<(u32, Option<Packing>)>,
    /// Edges to receive from.
    receives: Vec<u32>,
    parts: Vec<Part>,
    /// Bytes of the result; none where the device gets none.
    result: Option<usize>,
    /// Whether the result is the block that the device holds already.
    unchanged: bool,
}

impl ExchangeRole {
    /// Whether the result is the block that the device holds already: no memory is needed.
    pub fn is_unchanged(&self) -> bool {
        self.unchanged
    }

    /// The roles of these devices, the members of an exchange. Adds the messages between them to `edges`.
    /// Between processes only the needed block is sent. Within one, the receiver reads the sender's whole buffer.
    pub fn of(
        exchange: &Exchange,
        devices: &[u32],
        process_map: &ProcessMap,
        edges: &mut Vec<Edge>,
    ) -> Vec<ExchangeRole> {
        let apart = |from: usize, to: usize| !process_map.together(devices[from], devices[to]);
        let count = exchange.members.len();
        let mut sends = vec![Vec::new(); count];
        let mut receives: Vec<Vec<(usize, u32)>> = vec![Vec::new(); count];
        for to in 0..count {
            for from in
                exchange.sources[to].iter().flat_map(|source| &source.from).filter(|&&from| from != to)
            {
                let edge = edges.len() as u32;
                let packing = exchange.packing(*from, to);
                let bytes =
                    packing.as_ref().map_or(0, |walk| walk.elements() as u64 * exchange.dtype.bytes());
                edges.push(Edge { from: devices[*from], to: devices[to], bytes });
                let size = exchange.dtype.bytes() as usize;
                let packing = packing.filter(|_| apart(*from, to)).map(|walk| Packing { walk, size });
                sends[*from].push((edge, packing));
                receives[to].push((*from, edge));
            }
        }
        let role = |to: usize| {
            let source = |from: &usize| match receives[to].iter().position(|(member, _)| member == from) {
                Some(at) => PartSource::Message(at),
                None => PartSource::Own,
            };
            let parts = exchange.assemblies(to, |from| apart(from, to)).into_iter();
            let member = &exchange.members[to];
            ExchangeRole {
                dtype: exchange.dtype,
                combine: exchange.combine,
                sends: sends[to].clone(),
                receives: receives[to].iter().map(|&(_, edge)| edge).collect(),
                parts: parts
                    .map(|p| Part { from: p.from.iter().map(source).collect(), walk: p.walk })
                    .collect(),
                result: member
                    .wants
                    .as_ref()
                    .map(|wants| (elements(wants) * exchange.dtype.bytes()) as usize),
                unchanged: receives[to].is_empty() && member.wants == member.holds,
            }
        };
        (0..count).map(role).collect()
    }
}

/// The state of a message to be received.
#[derive(Clone, Default)]
enum Message {
    /// It has not arrived.
    #[default]
    Pending,
    /// It has arrived.
    Ready(Arc<Buffer>),
    /// All parts that need it are assembled.
    Consumed,
}

/// The progress of one device in an exchange of this step.
#[derive(Default)]
pub struct Progress {
    /// Number of messages sent.
    sent: usize,
    /// Number of parts of the result that are done.
    assembled: usize,
    messages: SmallVec<[Message; 8]>,
    done: SmallVec<[bool; 8]>,
    result: Option<Arc<Buffer>>,
}

impl Progress {
    /// Resets it for the next step.
    pub fn restart(&mut self, role: &ExchangeRole) {
        (self.sent, self.assembled) = (0, 0);
        self.messages.clear();
        self.messages.resize(role.receives.len(), Message::Pending);
        self.done.clear();
        self.done.resize(role.parts.len(), false);
    }

    /// Sends `own` to the members that need it, as far as they have received the last step's message.
    pub fn announce(&mut self, role: &ExchangeRole, fabric: &Fabric, own: Option<&Arc<Buffer>>) {
        let Some(own) = own else { return };
        while let Some((edge, packing)) = role.sends.get(self.sent) {
            if !fabric.send(*edge, own, packing.as_ref()) {
                return;
            }
            self.sent += 1;
        }
    }

    /// Runs an exchange from beginning to end, waiting for the other members. Returns the result; none where the device gets none
    /// or another device failed.
    pub fn complete(
        &mut self,
        role: &ExchangeRole,
        fabric: &Fabric,
        device: u32,
        own: Option<&Arc<Buffer>>,
        pool: &mut Pool,
    ) -> Option<Arc<Buffer>> {
        self.restart(role);
        loop {
            let seen = fabric.notifier(device).notifications();
            if self.advance(role, fabric, own, pool) {
                return self.take_result();
            }
            if fabric.stop.is_raised() {
                return None;
            }
            fabric.wait(device, seen);
        }
    }

    /// Number of parts of the result that are done.
    pub fn assembled(&self) -> usize {
        self.assembled
    }

    /// Advances the exchange as far as possible, given the device's own block; true once it is complete.
    pub fn advance(
        &mut self,
        role: &ExchangeRole,
        fabric: &Fabric,
        own: Option<&Arc<Buffer>>,
        pool: &mut Pool,
    ) -> bool {
        self.announce(role, fabric, own);
        if self.assembled < role.parts.len() {
            for (message, &edge) in self.messages.iter_mut().zip(&role.receives) {
                if let Message::Pending = message
                    && let Some(buffer) = fabric.receive(edge)
                {
                    *message = Message::Ready(buffer);
                }
            }
            self.assemble(role, fabric, own, pool);
        }
        // The device's own block is held until its last receiver has read it.
        let released = || role.sends.iter().all(|(edge, _)| fabric.is_released(*edge));
        self.sent == role.sends.len() && self.assembled == role.parts.len() && released()
    }

    /// The result of a complete exchange.
    pub fn take_result(&mut self) -> Option<Arc<Buffer>> {
        self.result.take()
    }

    fn assemble(&mut self, role: &ExchangeRole, fabric: &Fabric, own: Option<&Arc<Buffer>>, pool: &mut Pool) {
        let Some(bytes) = role.result else { return };
        if role.unchanged {
            self.result = own.cloned();
            self.assembled = role.parts.len();
            return;
        }
        let size = role.dtype.bytes() as usize;
        for (done, part) in self.done.iter_mut().zip(&role.parts).filter(|(done, _)| !**done) {
            let source = |from: &PartSource| match from {
                PartSource::Own => own.map(|own| own.bytes()),
                PartSource::Message(at) => match &self.messages[*at] {
                    Message::Ready(buffer) => Some(buffer.bytes()),
                    Message::Pending | Message::Consumed => None,
                },
            };
            let sources: SmallVec<[&[u8]; 16]> = part.from.iter().map_while(source).collect();
            if sources.len() < part.from.len() {
                continue;
            }
            let result = self.result.get_or_insert_with(|| pool.take(bytes));
            // The result has no other holder before it is handed out.
            let Some(result) = Arc::get_mut(result) else { continue };
            match role.combine {
                Some(how) => part.walk.combine(role.dtype, how, result.bytes_mut(), &sources),
                None => part.walk.copy(result.bytes_mut(), sources[0], size),
            }
            drop(sources);
            *done = true;
            self.assembled += 1;
            for from in &part.from {
                if let PartSource::Message(at) = from {
                    self.messages[*at] = Message::Consumed;
                    fabric.release(role.receives[*at]);
                }
            }
        }
    }
}
