//! What one device does in an exchange, and how far it has come.
//!
//! Nothing here waits: a device looks at all its exchanges in turn and does whatever can be done. Blocks that are only
//! copied are copied as they arrive; partial results are combined when all of them have arrived, in the order of
//! the group.

use crate::buffer::{Buffer, Pool};
use crate::exchange::{Exchange, extents};
use crate::fabric::{Edge, Fabric, Packing, Placement};
use crate::walk::{Combine, Walk};
use shardwright_graph::DType;
use smallvec::SmallVec;
use std::sync::Arc;

/// Where a part comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// What the device holds itself.
    Own,
    /// A message, by its place among those received.
    Message(usize),
}

#[derive(Clone, Debug)]
struct Part {
    from: SmallVec<[Source; 1]>,
    walk: Walk,
}

/// One device's part in an exchange.
#[derive(Clone, Debug)]
pub struct Role {
    dtype: DType,
    combine: Option<Combine>,
    /// Edges to send along, and how what is sent is packed where it leaves the process.
    sends: Vec<(u32, Option<Packing>)>,
    /// Edges to receive from.
    receives: Vec<u32>,
    parts: Vec<Part>,
    /// Bytes of the result, where there is one.
    result: Option<usize>,
    /// Whether the result is what the device holds already.
    unchanged: bool,
}

impl Role {
    /// The roles of an exchange's members, who are these devices; adds the messages that they send to `edges`.
    /// Between processes, just what is needed is sent; within one, the receiver sees all that the sender has.
    pub fn of(
        exchange: &Exchange,
        devices: &[u32],
        placement: &Placement,
        edges: &mut Vec<Edge>,
    ) -> Vec<Role> {
        let apart = |from: usize, to: usize| !placement.together(devices[from], devices[to]);
        let count = exchange.members.len();
        let mut sends = vec![Vec::new(); count];
        let mut receives: Vec<Vec<(usize, u32)>> = vec![Vec::new(); count];
        for to in 0..count {
            for from in exchange.takes[to].iter().flat_map(|take| &take.from).filter(|&&from| from != to) {
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
                Some(at) => Source::Message(at),
                None => Source::Own,
            };
            let parts = exchange.assemblies(to, |from| apart(from, to)).into_iter();
            let member = &exchange.members[to];
            Role {
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
                    .map(|wants| (extents(wants).elements() * exchange.dtype.bytes()) as usize),
                unchanged: receives[to].is_empty() && member.wants == member.holds,
            }
        };
        (0..count).map(role).collect()
    }
}

/// A message to be received.
#[derive(Clone, Default)]
enum Message {
    #[default]
    Awaited,
    Here(Arc<Buffer>),
    Used,
}

/// How far a device has come in an exchange of this step.
#[derive(Default)]
pub struct Progress {
    /// How many of the sends are done.
    sent: usize,
    /// How many parts of the result are done.
    assembled: usize,
    messages: SmallVec<[Message; 8]>,
    done: SmallVec<[bool; 8]>,
    result: Option<Arc<Buffer>>,
}

impl Progress {
    /// Makes it ready for the next step.
    pub fn restart(&mut self, role: &Role) {
        (self.sent, self.assembled) = (0, 0);
        self.messages.clear();
        self.messages.resize(role.receives.len(), Message::Awaited);
        self.done.clear();
        self.done.resize(role.parts.len(), false);
    }

    /// Gives `own` to those who wait for it and have taken the last step's.
    pub fn announce(&mut self, role: &Role, fabric: &Fabric, own: Option<&Arc<Buffer>>) {
        let Some(own) = own else { return };
        while let Some((edge, packing)) = role.sends.get(self.sent) {
            if !fabric.send(*edge, own, packing.as_ref()) {
                return;
            }
            self.sent += 1;
        }
    }

    /// Takes part in an exchange from its beginning to its end, waiting for the others; gives the result, if there is one.
    /// None as well where somebody failed.
    pub fn complete(
        &mut self,
        role: &Role,
        fabric: &Fabric,
        device: u32,
        own: Option<&Arc<Buffer>>,
        pool: &mut Pool,
    ) -> Option<Arc<Buffer>> {
        self.restart(role);
        loop {
            let seen = fabric.bell(device).rings();
            if self.advance(role, fabric, own, pool) {
                return self.take_result();
            }
            if fabric.alarm.is_raised() {
                return None;
            }
            fabric.wait(device, seen);
        }
    }

    /// How many parts of the result are done.
    pub fn assembled(&self) -> usize {
        self.assembled
    }

    /// Does what can be done, now that `own` is there; true once all is done.
    pub fn advance(
        &mut self,
        role: &Role,
        fabric: &Fabric,
        own: Option<&Arc<Buffer>>,
        pool: &mut Pool,
    ) -> bool {
        self.announce(role, fabric, own);
        if self.assembled < role.parts.len() {
            for (message, &edge) in self.messages.iter_mut().zip(&role.receives) {
                if let Message::Awaited = message
                    && let Some(buffer) = fabric.receive(edge)
                {
                    *message = Message::Here(buffer);
                }
            }
            self.assemble(role, own, pool);
        }
        self.sent == role.sends.len() && self.assembled == role.parts.len()
    }

    /// The result, once all is done.
    pub fn take_result(&mut self) -> Option<Arc<Buffer>> {
        self.result.take()
    }

    fn assemble(&mut self, role: &Role, own: Option<&Arc<Buffer>>, pool: &mut Pool) {
        let Some(bytes) = role.result else { return };
        if role.unchanged {
            self.result = own.cloned();
            self.assembled = role.parts.len();
            return;
        }
        let size = role.dtype.bytes() as usize;
        for (done, part) in self.done.iter_mut().zip(&role.parts).filter(|(done, _)| !**done) {
            let source = |from: &Source| match from {
                Source::Own => own.map(|own| own.bytes()),
                Source::Message(at) => match &self.messages[*at] {
                    Message::Here(buffer) => Some(buffer.bytes()),
                    Message::Awaited | Message::Used => None,
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
                if let Source::Message(at) = from {
                    self.messages[*at] = Message::Used;
                }
            }
        }
    }
}
