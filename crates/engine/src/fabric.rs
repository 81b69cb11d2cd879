//! What connects the devices: a slot for every message of a step, a bell for every device, one alarm for all.

use crate::bell::{Alarm, Bell};
use crate::buffer::Buffer;
use crate::slot::Slot;
use std::sync::Arc;

/// A message that one device sends to another once in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
}

/// Shared memory between the devices of this process.
pub struct Fabric {
    edges: Vec<Edge>,
    slots: Vec<Slot>,
    bells: Vec<Bell>,
    /// Raised when a device fails.
    pub alarm: Alarm,
    /// Whether there are more devices than cores, so that spinning would take time from those that work.
    crowded: bool,
}

impl Fabric {
    /// For so many devices and these messages.
    pub fn new(devices: usize, edges: Vec<Edge>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            slots: edges.iter().map(|_| Slot::default()).collect(),
            bells: (0..devices).map(|_| Bell::default()).collect(),
            edges,
            alarm: Alarm::default(),
            crowded: devices > cores,
        }
    }

    /// A device's bell.
    pub fn bell(&self, device: u32) -> &Bell {
        &self.bells[device as usize]
    }

    /// Sends a message; false where the last one along this edge was not taken yet.
    pub fn send(&self, edge: u32, buffer: &Arc<Buffer>) -> bool {
        let sent = self.slots[edge as usize].put(buffer);
        if sent {
            self.bell(self.edges[edge as usize].to).ring();
        }
        sent
    }

    /// Takes a message, if it has come.
    pub fn receive(&self, edge: u32) -> Option<Arc<Buffer>> {
        let buffer = self.slots[edge as usize].take()?;
        // The sender may be waiting to send the next step's.
        self.bell(self.edges[edge as usize].from).ring();
        Some(buffer)
    }

    /// Waits until a device's bell has rung more often than `seen`, or a short while.
    pub fn wait(&self, device: u32, seen: u32) {
        self.bell(device).wait(seen, self.crowded);
    }

    /// Stops all devices.
    pub fn fail(&self, reason: impl Into<String>) {
        self.alarm.raise(reason);
        self.bells.iter().for_each(Bell::ring);
    }
}
