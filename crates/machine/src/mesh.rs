//! Mesh axes, along which work is split, and the arithmetic between device ids and axis digits.
//!
//! Each level's count is factored into primes, and each prime is one axis, outermost first. A device id is the
//! mixed-radix number of its axis digits, so an axis crosses the links of its own level. Neighbouring axes of a level may
//! be merged; a [`Mesh`] is one choice of merged axes. A mesh has no bandwidths: the `cost` crate prices its levels.

use crate::spec::{Level, MAX_AXES};
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// As an index into a dense vector.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A device: the mixed-radix number of its axis digits.
    DeviceId
);
id!(
    /// A level of the machine, outermost = 0.
    LevelId
);
id!(
    /// An axis of one particular [`Mesh`], outermost = 0.
    AxisId
);

/// A set of axes of one mesh.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AxisSet(pub u32);

impl AxisSet {
    /// No axis.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// The axes 0..n.
    pub fn first(n: usize) -> AxisSet {
        AxisSet(if n >= 32 { u32::MAX } else { (1 << n) - 1 })
    }

    /// The set of one axis.
    pub fn of(axis: AxisId) -> AxisSet {
        AxisSet(1 << axis.0)
    }

    /// The set with one more axis.
    #[must_use]
    pub fn with(self, axis: AxisId) -> AxisSet {
        AxisSet(self.0 | 1 << axis.0)
    }

    /// Whether the axis is in the set.
    pub fn contains(self, axis: AxisId) -> bool {
        axis.0 < 32 && self.0 >> axis.0 & 1 == 1
    }

    /// Number of axes.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The axes in either set.
    #[must_use]
    pub fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }

    /// The axes in both sets.
    #[must_use]
    pub fn intersect(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & other.0)
    }

    /// The axes in this set and not in the other.
    #[must_use]
    pub fn minus(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & !other.0)
    }

    /// The axes, outermost first.
    pub fn iter(self) -> AxisIter {
        AxisIter(self.0)
    }
}

/// The axes of a set, outermost first.
#[derive(Clone, Debug)]
pub struct AxisIter(u32);

impl Iterator for AxisIter {
    type Item = AxisId;

    fn next(&mut self) -> Option<AxisId> {
        let axis = (self.0 != 0).then(|| self.0.trailing_zeros())?;
        self.0 &= self.0 - 1;
        Some(AxisId(axis))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.0.count_ones() as usize;
        (left, Some(left))
    }
}

impl DoubleEndedIterator for AxisIter {
    fn next_back(&mut self) -> Option<AxisId> {
        let axis = (self.0 != 0).then(|| self.0.ilog2())?;
        self.0 ^= 1 << axis;
        Some(AxisId(axis))
    }
}

impl ExactSizeIterator for AxisIter {}

impl FromIterator<AxisId> for AxisSet {
    fn from_iter<I: IntoIterator<Item = AxisId>>(axes: I) -> AxisSet {
        axes.into_iter().fold(AxisSet::EMPTY, AxisSet::with)
    }
}

impl fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(|axis| axis.0)).finish()
    }
}

/// One axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// `node.0`; merged `node.0-1`, or `node` for a whole level.
    pub name: String,
    /// Number of digits.
    pub size: u32,
    /// The level whose links the axis's traffic crosses.
    pub level: LevelId,
    /// The dimension of the level's grid (torus dimension, depth of the PCIe tree) of its outermost prime.
    pub dim: u32,
    /// Its prime axes; in the prime mesh, itself.
    pub primes: AxisSet,
}

/// The prime axes of a machine, or merged ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<Axis>,
    /// Distance in device ids between neighbouring digits of each axis.
    strides: Vec<u32>,
    devices: u32,
}

/// Why axes could not be merged, or digits are not a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// Axes to merge that are not neighbours of one level.
    #[error("axes {first} and {second} cannot be merged: only neighbours of one level can")]
    NotNeighbours {
        /// The outer one.
        first: String,
        /// The inner one.
        second: String,
    },
    /// Groups to merge that do not name every axis once, in order.
    #[error("merge groups must name all {axes} axes once, in order; they name {named}")]
    NotAPartition {
        /// Axes of the mesh.
        axes: usize,
        /// Axes named.
        named: usize,
    },
    /// Wrong number of digits.
    #[error("{given} digits for {axes} axes")]
    DigitCount {
        /// Digits given.
        given: usize,
        /// Axes of the mesh.
        axes: usize,
    },
    /// A digit that the axis does not have.
    #[error("axis {axis} has digits 0 to {last}, not {digit}")]
    DigitRange {
        /// The axis.
        axis: String,
        /// Its last digit.
        last: u32,
        /// The digit given.
        digit: u32,
    },
    /// No such device.
    #[error("device {device} does not exist: the mesh has {devices} devices")]
    NoSuchDevice {
        /// The device id.
        device: u32,
        /// Devices of the mesh.
        devices: u32,
    },
}

/// Prime factors, smallest first.
pub fn prime_factors(mut n: u32) -> Vec<u32> {
    let mut factors = Vec::new();
    let mut p = 2;
    while p * p <= n {
        while n.is_multiple_of(p) {
            factors.push(p);
            n /= p;
        }
        p += 1;
    }
    if n > 1 {
        factors.push(n);
    }
    factors
}

impl Mesh {
    /// The finest mesh of checked levels: one axis per prime factor of each dimension of each level's grid.
    pub(crate) fn prime(levels: &[Level]) -> Mesh {
        let mut axes: Vec<Axis> = Vec::new();
        for (at, level) in levels.iter().enumerate() {
            let mut nth = 0;
            for (dim, size) in level.link.topology.dims(level.count).into_iter().enumerate() {
                for prime in prime_factors(size) {
                    let id = AxisId(axes.len() as u32);
                    axes.push(Axis {
                        name: format!("{}.{nth}", level.name),
                        size: prime,
                        level: LevelId(at as u32),
                        dim: dim as u32,
                        primes: AxisSet::of(id),
                    });
                    nth += 1;
                }
            }
        }
        debug_assert!(axes.len() <= MAX_AXES);
        Mesh::from_axes(axes)
    }

    fn from_axes(axes: Vec<Axis>) -> Mesh {
        let mut strides = vec![1; axes.len()];
        let mut devices = 1;
        for (at, axis) in axes.iter().enumerate().rev() {
            strides[at] = devices;
            devices *= axis.size;
        }
        Mesh { axes, strides, devices }
    }

    /// A mesh with merged axes: each group of neighbouring axes of one level becomes one axis. The groups, in order, must
    /// name every axis of this mesh once.
    pub fn merge_axes(&self, groups: &[AxisSet]) -> Result<Mesh, MeshError> {
        let order: Vec<AxisId> = groups.iter().flat_map(|group| group.iter()).collect();
        if !order.iter().map(|axis| axis.index()).eq(0..self.axes.len())
            || groups.iter().any(|g| g.is_empty())
        {
            return Err(MeshError::NotAPartition { axes: self.axes.len(), named: order.len() });
        }
        let mut merged = Vec::with_capacity(groups.len());
        for group in groups {
            let members: Vec<&Axis> = group.iter().map(|axis| self.axis(axis)).collect();
            let (first, last) = (members[0], members[members.len() - 1]);
            if first.level != last.level {
                return Err(MeshError::NotNeighbours {
                    first: first.name.clone(),
                    second: last.name.clone(),
                });
            }
            let in_level = |axis: &&Axis| axis.level == first.level;
            let whole = self.axes.iter().filter(in_level).count() == members.len();
            // Level names contain no dot.
            let (stem, _) = first.name.split_once('.').unwrap_or((&first.name, ""));
            let primes = members.iter().fold(AxisSet::EMPTY, |set, axis| set.union(axis.primes));
            let name = match (whole, members.len()) {
                (true, _) => stem.to_string(),
                (false, 1) => first.name.clone(),
                (false, _) => {
                    // Prime axes are numbered within their level.
                    let level = self
                        .axes
                        .iter()
                        .filter(in_level)
                        .fold(AxisSet::EMPTY, |set, axis| set.union(axis.primes));
                    let (start, end) = (primes.0.trailing_zeros(), primes.0.ilog2());
                    let origin = level.0.trailing_zeros();
                    format!("{stem}.{}-{}", start - origin, end - origin)
                }
            };
            merged.push(Axis {
                name,
                size: members.iter().map(|axis| axis.size).product(),
                level: first.level,
                dim: first.dim,
                primes,
            });
        }
        Ok(Mesh::from_axes(merged))
    }

    /// The coarsest mesh: one axis per level (levels of one unit have none).
    pub fn per_level(&self) -> Mesh {
        let mut groups: Vec<AxisSet> = Vec::new();
        for (at, axis) in self.axes.iter().enumerate() {
            let id = AxisId(at as u32);
            match groups.last_mut() {
                Some(group) if at > 0 && self.axes[at - 1].level == axis.level => *group = group.with(id),
                _ => groups.push(AxisSet::of(id)),
            }
        }
        let merged = self.merge_axes(&groups);
        debug_assert!(merged.is_ok(), "groups are neighbours of one level and cover all axes: {merged:?}");
        // The prime mesh describes the same machine, with more axes.
        merged.unwrap_or_else(|_| self.clone())
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// One axis.
    pub fn axis(&self, axis: AxisId) -> &Axis {
        &self.axes[axis.index()]
    }

    /// Finds an axis by its name.
    pub fn axis_named(&self, name: &str) -> Option<AxisId> {
        self.axes.iter().position(|axis| axis.name == name).map(|at| AxisId(at as u32))
    }

    /// Number of axes.
    pub fn len(&self) -> usize {
        self.axes.len()
    }

    /// Whether there are no axes: a machine of one device.
    pub fn is_empty(&self) -> bool {
        self.axes.is_empty()
    }

    /// Number of devices.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// All axes.
    pub fn all(&self) -> AxisSet {
        AxisSet::first(self.axes.len())
    }

    /// Distance in device ids between neighbouring digits of the axis.
    pub fn stride(&self, axis: AxisId) -> u32 {
        self.strides[axis.index()]
    }

    /// Number of devices in one group along the axes.
    pub fn group_size(&self, axes: AxisSet) -> u32 {
        axes.iter().map(|axis| self.axis(axis).size).product()
    }

    /// The prime axes of a set of this mesh's axes.
    pub fn primes(&self, axes: AxisSet) -> AxisSet {
        axes.iter().fold(AxisSet::EMPTY, |set, axis| set.union(self.axis(axis).primes))
    }

    /// The levels whose links a collective over the axes crosses, as a bit set, outermost = bit 0.
    pub fn levels_crossed(&self, axes: AxisSet) -> u32 {
        axes.iter().fold(0, |bits, axis| bits | 1 << self.axis(axis).level.0)
    }

    /// A device's digit on an axis.
    pub fn digit(&self, device: DeviceId, axis: AxisId) -> u32 {
        device.0 / self.stride(axis) % self.axis(axis).size
    }

    /// A device's digits, outermost first.
    pub fn digits_of(&self, device: DeviceId) -> Result<Vec<u32>, MeshError> {
        if device.0 >= self.devices {
            return Err(MeshError::NoSuchDevice { device: device.0, devices: self.devices });
        }
        Ok(self.all().iter().map(|axis| self.digit(device, axis)).collect())
    }

    /// The device with these digits, outermost first.
    pub fn device_of(&self, digits: &[u32]) -> Result<DeviceId, MeshError> {
        if digits.len() != self.axes.len() {
            return Err(MeshError::DigitCount { given: digits.len(), axes: self.axes.len() });
        }
        let mut device = 0;
        for (axis, &digit) in self.axes.iter().zip(digits) {
            if digit >= axis.size {
                return Err(MeshError::DigitRange { axis: axis.name.clone(), last: axis.size - 1, digit });
            }
            device = device * axis.size + digit;
        }
        Ok(DeviceId(device))
    }

    /// The groups of devices that differ only on the given axes, sorted by first device; members ascend.
    pub fn groups(&self, axes: AxisSet) -> Vec<Vec<DeviceId>> {
        let mut offsets = vec![0];
        for axis in axes.iter() {
            let (size, stride) = (self.axis(axis).size, self.stride(axis));
            offsets = offsets.iter().flat_map(|&o| (0..size).map(move |digit| o + digit * stride)).collect();
        }
        (0..self.devices)
            .filter(|&device| axes.iter().all(|axis| self.digit(DeviceId(device), axis) == 0))
            .map(|first| offsets.iter().map(|offset| DeviceId(first + offset)).collect())
            .collect()
    }
}
