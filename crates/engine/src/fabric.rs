//! What connects the devices: a slot for every message of a step, a bell for every device, one alarm for all.
//!
//! Devices of one process pass references to buffers. What goes to another process is packed and sent by its
//! [`Remote`]; what comes from one is put into the same slots, so that devices need not know.

use crate::bell::{Alarm, Bell};
use crate::buffer::Buffer;
use crate::remote::Remote;
use crate::slot::Slot;
use crate::walk::Walk;
use std::ops::Range;
use std::sync::Arc;

/// A message that one device sends to another once in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// What the receiver needs of it.
    pub bytes: u64,
}

/// Which devices share a process: equal runs of them, as far as that goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// How many devices there are.
    pub devices: u32,
    /// How many processes: from one to the number of devices.
    pub processes: u32,
}

impl Placement {
    /// The devices of a process.
    pub fn of(&self, process: u32) -> Range<u32> {
        let start =
            |process: u32| (u64::from(self.devices) * u64::from(process) / u64::from(self.processes)) as u32;
        start(process)..start(process + 1)
    }

    /// The process of a device.
    pub fn process(&self, device: u32) -> u32 {
        (0..self.processes).find(|&process| self.of(process).contains(&device)).unwrap_or(0)
    }

    /// Whether two devices share a process.
    pub fn together(&self, a: u32, b: u32) -> bool {
        self.processes == 1 || self.process(a) == self.process(b)
    }
}

/// How a message is packed that leaves the process.
#[derive(Clone, Debug)]
pub struct Packing {
    /// From the sender's buffer to what is sent.
    pub walk: Walk,
    /// Bytes per element.
    pub size: usize,
}

/// What connects the devices of this process with each other, and with those of others.
pub struct Fabric {
    edges: Vec<Edge>,
    slots: Vec<Slot>,
    bells: Vec<Bell>,
    /// Raised when a device fails.
    pub alarm: Alarm,
    /// Whether there are more devices than cores, so that spinning would take time from those that work.
    crowded: bool,
    /// The other processes.
    remote: Option<Remote>,
}

impl Fabric {
    /// For so many devices and these messages, all in this process.
    pub fn new(devices: usize, edges: Vec<Edge>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            slots: edges.iter().map(|_| Slot::default()).collect(),
            bells: (0..devices).map(|_| Bell::default()).collect(),
            edges,
            alarm: Alarm::default(),
            crowded: devices > cores,
            remote: None,
        }
    }

    /// The same with other processes, to which `remote` leads.
    pub fn with_remote(mut self, remote: Remote) -> Self {
        self.remote = Some(remote);
        self
    }

    /// The messages.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// A device's bell.
    pub fn bell(&self, device: u32) -> &Bell {
        &self.bells[device as usize]
    }

    /// Sends a message; false where the last one along this edge was not taken yet.
    pub fn send(&self, edge: u32, buffer: &Arc<Buffer>, packing: Option<&Packing>) -> bool {
        match (packing, &self.remote) {
            (Some(packing), Some(remote)) => remote.send(edge, self.edges[edge as usize], buffer, packing),
            _ => self.deliver(edge, buffer),
        }
    }

    /// Puts a message where its receiver finds it; false where the last one was not taken yet.
    pub fn deliver(&self, edge: u32, buffer: &Arc<Buffer>) -> bool {
        let sent = self.slots[edge as usize].put(buffer);
        if sent {
            self.bell(self.edges[edge as usize].to).ring();
        }
        sent
    }

    /// Takes a message, if it has come.
    pub fn receive(&self, edge: u32) -> Option<Arc<Buffer>> {
        let buffer = self.slots[edge as usize].take()?;
        let from = self.edges[edge as usize].from;
        match &self.remote {
            Some(remote) if !remote.is_here(from) => remote.acknowledge(edge, from),
            // The sender may be waiting to send the next step's.
            _ => self.bell(from).ring(),
        }
        Some(buffer)
    }

    /// Another process has taken the last message along an edge.
    pub fn acknowledged(&self, edge: u32) {
        if let Some(remote) = &self.remote {
            remote.acknowledged(edge);
        }
        self.bell(self.edges[edge as usize].from).ring();
    }

    /// Waits until a device's bell has rung more often than `seen`, or a short while.
    pub fn wait(&self, device: u32, seen: u32) {
        self.bell(device).wait(seen, self.crowded);
    }

    /// Stops all devices, those of other processes too.
    pub fn fail(&self, reason: impl Into<String>) {
        self.alarm.raise(reason);
        if let (Some(remote), Some(reason)) = (&self.remote, self.alarm.reason()) {
            remote.tell(&reason);
        }
        self.bells.iter().for_each(Bell::ring);
    }

    /// All devices of this process have done their work: waits until those of the others have.
    pub fn part(&self) {
        if let Some(remote) = &self.remote {
            remote.part(&self.alarm);
        }
    }
}
