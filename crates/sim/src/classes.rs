//! Device classes of a program: devices that do the same work at the same times. One device per class is simulated.
//!
//! On an axis without pins, all digits are equal. On an axis with pins, every pinned digit is separate, and the others
//! are equal. A class is one such kind of digit per axis.

use shardwright_cost::Placement;
use shardwright_lower::ParallelGraph;
use shardwright_machine::{AxisId, AxisSet, DeviceId, Mesh};
use std::ops::Range;

/// The device classes of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classes {
    /// Per axis: one digit of every kind. A digit's kind is its position here, or the last position.
    kinds: Vec<Vec<u32>>,
    /// Per axis: distance between the classes of neighbouring kinds.
    strides: Vec<u32>,
    /// Per class: one of its devices.
    devices: Vec<DeviceId>,
}

impl Classes {
    /// The classes of a program.
    pub fn of(program: &ParallelGraph) -> Self {
        let mut pinned: Vec<Vec<u32>> = vec![Vec::new(); program.mesh.len()];
        for value in &program.values {
            let layout = value.at.layout();
            for axis in layout.absent().iter() {
                if let Placement::Absent(digit) = layout.get(axis) {
                    pinned[axis.index()].push(u32::from(digit));
                }
            }
        }
        let kinds = program.mesh.axes().iter().zip(pinned).map(|(axis, mut digits)| {
            digits.sort_unstable();
            digits.dedup();
            let other = (0..axis.size).find(|digit| !digits.contains(digit));
            digits.extend(other);
            digits
        });
        Self::new(&program.mesh, kinds.collect())
    }

    /// One class per device.
    pub fn each(mesh: &Mesh) -> Self {
        Self::new(mesh, mesh.axes().iter().map(|axis| (0..axis.size).collect()).collect())
    }

    fn new(mesh: &Mesh, kinds: Vec<Vec<u32>>) -> Self {
        let mut strides = vec![1; kinds.len()];
        let mut devices = vec![DeviceId(0)];
        for (at, digits) in kinds.iter().enumerate() {
            let stride = mesh.stride(AxisId(at as u32));
            devices = devices
                .iter()
                .flat_map(|device| digits.iter().map(move |digit| DeviceId(device.0 + digit * stride)))
                .collect();
        }
        for at in (1..kinds.len()).rev() {
            strides[at - 1] = strides[at] * kinds[at].len() as u32;
        }
        Self { kinds, strides, devices }
    }

    /// Number of classes.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether there is no class: never.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// All classes.
    pub fn ids(&self) -> Range<u32> {
        0..self.len() as u32
    }

    /// A representative device of a class.
    pub fn device(&self, class: u32) -> DeviceId {
        self.devices[class as usize]
    }

    /// The class of a device.
    pub fn class(&self, mesh: &Mesh, device: DeviceId) -> u32 {
        let kinds = self.kinds.iter().zip(&self.strides).enumerate();
        let kind = |digits: &[u32], digit: u32| {
            digits.iter().position(|&own| own == digit).unwrap_or(digits.len() - 1) as u32
        };
        kinds.map(|(at, (digits, stride))| kind(digits, mesh.digit(device, AxisId(at as u32))) * stride).sum()
    }

    /// Number of devices of a class.
    pub fn size(&self, mesh: &Mesh, class: u32) -> u32 {
        let of_axis = |(at, digits): (usize, &Vec<u32>)| {
            let last = digits.len() as u32 - 1;
            let own = class / self.strides[at] % digits.len() as u32;
            if own == last { mesh.axes()[at].size - last } else { 1 }
        };
        self.kinds.iter().enumerate().map(of_axis).product()
    }

    /// The class that represents a class's group along some axes: equal for all classes of the group.
    pub fn group(&self, class: u32, axes: AxisSet) -> u32 {
        let own = |axis: AxisId| {
            let (stride, count) = (self.strides[axis.index()], self.kinds[axis.index()].len() as u32);
            class / stride % count * stride
        };
        class - axes.iter().map(own).sum::<u32>()
    }
}
