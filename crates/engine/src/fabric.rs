//! The connections between devices: a slot for every message of a step, a notifier for every device, one stop signal for all.
//!
//! Devices of one process pass references to buffers. [`RemoteProcesses`] packs and sends messages to other processes. Messages
//! from other processes go into the same slots, so a receiver need not distinguish them.

use crate::buffer::Buffer;
use crate::notifier::{Notifier, StopSignal};
use crate::remote::RemoteProcesses;
use crate::slot::Slot;
use crate::walk::Walk;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A message that one device sends to another once in every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// Bytes that the receiver needs of it.
    pub bytes: u64,
}

/// Assigns devices to processes, in contiguous ranges whose lengths differ by at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMap {
    /// Number of devices.
    pub devices: u32,
    /// Number of processes, from one to the number of devices.
    pub processes: u32,
}

impl ProcessMap {
    /// The devices of a process.
    pub fn devices_of(&self, process: u32) -> Range<u32> {
        let start =
            |process: u32| (u64::from(self.devices) * u64::from(process) / u64::from(self.processes)) as u32;
        start(process)..start(process + 1)
    }

    /// The process of a device.
    pub fn process(&self, device: u32) -> u32 {
        let process = (0..self.processes).find(|&process| self.devices_of(process).contains(&device));
        debug_assert!(process.is_some(), "device {device} of {}", self.devices);
        // Only an unknown device is in no process; its messages then stay in the first one.
        process.unwrap_or(0)
    }

    /// Whether two devices share a process.
    pub fn together(&self, a: u32, b: u32) -> bool {
        self.processes == 1 || self.process(a) == self.process(b)
    }
}

/// How a message to another process is packed.
#[derive(Clone, Debug)]
pub struct Packing {
    /// From the sender's buffer to the message.
    pub walk: Walk,
    /// Bytes per element.
    pub size: usize,
}

/// Connects the devices of this process with each other and with those of other processes.
pub struct Fabric {
    edges: Vec<Edge>,
    slots: Vec<Slot>,
    /// Per message: whether the receiver is done with the sender's buffer.
    released: Vec<AtomicBool>,
    notifiers: Vec<Notifier>,
    /// Raised when a device fails.
    pub stop: StopSignal,
    /// Whether there are more devices than cores, so that spinning would take time from working devices.
    crowded: bool,
    /// The other processes; none where all devices are in this one.
    remote: Option<RemoteProcesses>,
}

impl Fabric {
    /// The fabric of `devices` devices with these messages, all in this process.
    pub fn new(devices: usize, edges: Vec<Edge>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            slots: edges.iter().map(|_| Slot::default()).collect(),
            released: edges.iter().map(|_| AtomicBool::new(true)).collect(),
            notifiers: (0..devices).map(|_| Notifier::default()).collect(),
            edges,
            stop: StopSignal::default(),
            crowded: devices > cores,
            remote: None,
        }
    }

    /// The same, connected with other processes.
    pub fn with_remote(mut self, remote: RemoteProcesses) -> Self {
        self.remote = Some(remote);
        self
    }

    /// The messages.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// A device's notifier.
    pub fn notifier(&self, device: u32) -> &Notifier {
        &self.notifiers[device as usize]
    }

    /// Sends a message; false where the last one along this edge has not been received yet.
    pub fn send(&self, edge: u32, buffer: &Arc<Buffer>, packing: Option<&Packing>) -> bool {
        match (packing, &self.remote) {
            (Some(packing), Some(remote)) => remote.send(edge, self.edges[edge as usize], buffer, packing),
            _ => {
                let released = &self.released[edge as usize];
                // No buffer is sent before the last one along the edge is released.
                released.swap(false, Ordering::AcqRel) && self.deliver(edge, buffer)
            }
        }
    }

    /// Puts a message into its slot; false where the last one has not been received yet.
    pub fn deliver(&self, edge: u32, buffer: &Arc<Buffer>) -> bool {
        let sent = self.slots[edge as usize].put(buffer);
        if sent {
            self.notifier(self.edges[edge as usize].to).notify();
        }
        sent
    }

    /// Receives a message; none where it has not arrived.
    pub fn receive(&self, edge: u32) -> Option<Arc<Buffer>> {
        let buffer = self.slots[edge as usize].take()?;
        let from = self.edges[edge as usize].from;
        match &self.remote {
            Some(remote) if !remote.is_here(from) => remote.acknowledge(edge, from),
            // The sender may be waiting to send the next step's message.
            _ => self.notifier(from).notify(),
        }
        Some(buffer)
    }

    /// Tells the sender of a message that its receiver no longer reads the buffer.
    pub fn release(&self, edge: u32) {
        self.released[edge as usize].store(true, Ordering::Release);
        let from = self.edges[edge as usize].from;
        if self.remote.as_ref().is_none_or(|remote| remote.is_here(from)) {
            self.notifier(from).notify();
        }
    }

    /// Whether the receiver of the last message along an edge no longer reads its buffer. A message to another process
    /// is a copy.
    pub fn is_released(&self, edge: u32) -> bool {
        self.released[edge as usize].load(Ordering::Acquire)
    }

    /// Records that another process has received the last message along an edge.
    pub fn acknowledged(&self, edge: u32) {
        if let Some(remote) = &self.remote {
            remote.acknowledged(edge);
        }
        self.notifier(self.edges[edge as usize].from).notify();
    }

    /// Waits until a device has been notified since its count was `seen`, for a short while at most.
    pub fn wait(&self, device: u32, seen: u32) {
        self.notifier(device).wait(seen, self.crowded);
    }

    /// Stops all devices, including those of other processes.
    pub fn fail(&self, reason: impl Into<String>) {
        self.stop.raise(reason);
        if let (Some(remote), Some(reason)) = (&self.remote, self.stop.reason()) {
            remote.broadcast_failure(&reason);
        }
        self.notifiers.iter().for_each(Notifier::notify);
    }

    /// Waits until the devices of all other processes are done too. Those of this process are.
    pub fn finish(&self) {
        if let Some(remote) = &self.remote {
            remote.finish(&self.stop);
        }
    }
}
