//! A checked machine: a valid spec with its mesh. The other crates use this type.

use crate::error::MachineError;
use crate::mesh::{DeviceId, Mesh};
use crate::spec::{Device, Level, Link, MachineSpec, SpecError, Topology};
use crate::units::{Bytes, BytesPerSecond};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A valid machine. It serialises as its [`MachineSpec`], which deserialising checks again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "MachineSpec", into = "MachineSpec")]
pub struct Machine {
    spec: MachineSpec,
    mesh: Mesh,
    /// For each unit of the outermost level: 0 = the spec's device, i + 1 = `mixed[i]`. Empty if all are equal.
    kinds: Vec<u32>,
}

/// A hash of a machine's hardware: levels, links and devices, without names and description of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(pub u64);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl TryFrom<MachineSpec> for Machine {
    type Error = MachineError;
    fn try_from(spec: MachineSpec) -> Result<Machine, MachineError> {
        Machine::new(spec).map_err(|SpecError { key, reason }| MachineError::Invalid { key, reason })
    }
}

impl From<Machine> for MachineSpec {
    fn from(machine: Machine) -> MachineSpec {
        machine.spec
    }
}

impl Machine {
    /// Checks a spec and builds its mesh.
    pub fn new(spec: MachineSpec) -> Result<Machine, SpecError> {
        spec.check()?;
        let mesh = Mesh::prime(&spec.levels);
        let mut kinds = Vec::new();
        if !spec.mixed.is_empty() {
            kinds = vec![0; spec.levels[0].count as usize];
            for (at, mixed) in spec.mixed.iter().enumerate() {
                for &unit in &mixed.units {
                    kinds[unit as usize] = at as u32 + 1;
                }
            }
        }
        Ok(Machine { spec, mesh, kinds })
    }

    /// The spec.
    pub fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// One line for lists.
    pub fn description(&self) -> &str {
        &self.spec.description
    }

    /// The levels, outermost first.
    pub fn levels(&self) -> &[Level] {
        &self.spec.levels
    }

    /// The finest mesh: one axis per prime factor.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Number of devices.
    pub fn devices(&self) -> u32 {
        self.mesh.devices()
    }

    /// Devices in one unit of a level.
    pub fn devices_per_unit(&self, level: usize) -> u32 {
        self.spec.levels[level + 1..].iter().map(|l| l.count).product()
    }

    /// Whether all devices are equal.
    pub fn is_homogeneous(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The properties of a device.
    pub fn device(&self, device: DeviceId) -> &Device {
        let unit = (device.0 / self.devices_per_unit(0)) as usize;
        match self.kinds.get(unit) {
            None | Some(0) => &self.spec.device,
            Some(&kind) => &self.spec.mixed[kind as usize - 1].device,
        }
    }

    /// A device with the worst of every property over the machine: an even split over all devices waits for it.
    pub fn slowest(&self) -> Device {
        let per_unit = self.devices_per_unit(0);
        let units = if self.is_homogeneous() { 1 } else { self.spec.levels[0].count };
        self.slowest_of((0..units).map(|unit| DeviceId(unit * per_unit)))
    }

    /// A device with the worst of every property over some devices. For an empty list, the spec's device.
    pub fn slowest_of(&self, devices: impl IntoIterator<Item = DeviceId>) -> Device {
        let mut devices = devices.into_iter().map(|device| self.device(device));
        let first = devices.next().unwrap_or(&self.spec.device).clone();
        devices.fold(first, |slowest, device| {
            // Keep the name if nothing gets worse, so that A, B, A gives A+B.
            let worst = slowest.slower_of(device);
            let same = (Device { name: slowest.name.clone(), ..worst.clone() }) == slowest;
            if same { slowest } else { worst }
        })
    }

    /// The most bytes that a plan may hold on every device; none where the memory limits no plan.
    pub fn memory_limit(&self) -> Option<Bytes> {
        self.slowest().usable_memory()
    }

    /// A stable 64-bit hash of the hardware: FNV-1a of the canonical file without name, description and limits of the
    /// memory, which change no time.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut nameless =
            MachineSpec { name: String::from("-"), description: String::new(), ..self.spec.clone() };
        let overrides = nameless.mixed.iter_mut().map(|mixed| &mut mixed.device);
        for device in overrides.chain([&mut nameless.device]) {
            (device.reserve, device.memory_limit) = (Bytes::ZERO, true);
        }
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in crate::text::to_toml(&nameless).bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Fingerprint(hash)
    }

    /// The machine as canonical TOML. Parsing it gives this machine again.
    pub fn to_toml(&self) -> String {
        crate::text::to_toml(&self.spec)
    }

    /// The first `devices` devices, whole inner levels first: `p100x16` restricted to 4 is one node, to 8 two nodes, to
    /// 2 half a node. Levels with one remaining unit are removed.
    pub fn restrict(&self, devices: u64) -> Result<Machine, MachineError> {
        let error = |reason: String| MachineError::CannotRestrict {
            machine: self.spec.name.clone(),
            devices,
            reason,
        };
        let all = u64::from(self.devices());
        if devices == 0 || devices > all {
            return Err(error(format!("the machine has {all} devices; ask for 1 to {all}")));
        }
        if devices == all {
            return Ok(self.clone());
        }
        let mut spec = self.spec.clone();
        // The outermost level whose units have fewer devices than requested is shortened; for one device, the innermost.
        let cut = (0..spec.levels.len())
            .find(|&at| u64::from(self.devices_per_unit(at)) < devices)
            .unwrap_or(spec.levels.len() - 1);
        let per_unit = u64::from(self.devices_per_unit(cut));
        if !devices.is_multiple_of(per_unit) {
            let level = &spec.levels[cut].name;
            return Err(error(format!(
                "a {level} has {per_unit} devices, so {devices} devices are not a whole number of {level}s; \
                 try {} or {}",
                devices / per_unit * per_unit,
                (devices / per_unit + 1) * per_unit
            )));
        }
        if cut > 0 {
            // All remaining devices are in the first unit of the outermost level.
            spec.device = self.device(DeviceId(0)).clone();
            spec.mixed.clear();
        }
        spec.levels.drain(..cut);
        let units = (devices / per_unit) as u32;
        spec.levels[0] = shorten_level(&spec.levels[0], units).map_err(error)?;
        for mixed in &mut spec.mixed {
            mixed.units.retain(|&unit| unit < units);
        }
        spec.mixed.retain(|mixed| !mixed.units.is_empty());
        // The measurements were made with all devices active.
        spec.measured.clear();
        spec.name = format!("{}:{devices}", self.spec.name);
        Machine::try_from(spec)
    }
}

impl Machine {
    /// The same devices in groups: a machine of one level becomes one of two, with the same links. This gives strategies
    /// that treat the innermost level differently any grid.
    pub fn grouped(&self, groups: u64, members: u64) -> Result<Machine, MachineError> {
        let error = |reason: String| MachineError::CannotGroup {
            machine: self.spec.name.clone(),
            groups,
            members,
            reason,
        };
        let [level] = &self.spec.levels[..] else {
            return Err(error("only a machine of one level can be grouped".into()));
        };
        if !matches!(level.link.topology, Topology::Switch | Topology::Memory) {
            return Err(error(
                "only devices on a switch or with shared memory have equal links to each other".into(),
            ));
        }
        if groups < 1 || members < 1 || groups.checked_mul(members) != Some(u64::from(level.count)) {
            return Err(error(format!("there are {} devices", level.count)));
        }
        let mut spec = self.spec.clone();
        let name = if level.name == "group" { "outer" } else { "group" };
        let ports = members as u32;
        spec.levels.insert(
            0,
            Level { name: name.into(), count: groups as u32, link: Link { ports, ..level.link.clone() } },
        );
        spec.levels[1].count = members as u32;
        spec.mixed.clear();
        spec.measured.clear();
        if !self.spec.mixed.is_empty() {
            spec.device = self.slowest();
        }
        spec.name = format!("{}:{groups}x{members}", self.spec.name);
        Machine::try_from(spec)
    }
}

/// The first `units` units of a level.
fn shorten_level(level: &Level, units: u32) -> Result<Level, String> {
    let mut cut = Level { count: units, ..level.clone() };
    // The first `units` positions of a grid, whole inner dimensions first.
    let shorten_grid = |dims: &[u32]| -> Result<Vec<u32>, String> {
        let mut left = units;
        let mut kept = dims.to_vec();
        for at in (0..dims.len()).rev() {
            if left > dims[at] && !left.is_multiple_of(dims[at]) {
                return Err(format!(
                    "{units} of a grid of {dims:?} are not a block: whole rows of {} first",
                    dims[at]
                ));
            }
            kept[at] = left.min(dims[at]);
            left = left.div_ceil(dims[at]);
        }
        Ok(kept)
    };
    match &level.link.topology {
        Topology::Switch | Topology::Memory => {}
        Topology::FullyConnected => {
            // The wires to the removed units are lost.
            let wires = f64::from(units.max(2) - 1) / f64::from((level.count - 1).max(1));
            cut.link.bandwidth = BytesPerSecond(level.link.bandwidth.0 * wires);
        }
        Topology::Torus { dims, wrap } => {
            let kept = shorten_grid(dims)?;
            // A part of a ring is a line, and removed dimensions take their wires with them.
            let (mut new_dims, mut new_wrap) = (Vec::new(), Vec::new());
            for at in 0..dims.len() {
                if kept[at] > 1 || (units == 1 && at + 1 == dims.len()) {
                    new_dims.push(kept[at]);
                    new_wrap.push(wrap[at] && kept[at] == dims[at]);
                }
            }
            cut.link.bandwidth =
                BytesPerSecond(level.link.bandwidth.0 * new_dims.len() as f64 / dims.len() as f64);
            cut.link.topology = Topology::Torus { dims: new_dims, wrap: new_wrap };
        }
        Topology::PcieTree { fanout, uplinks, peer_to_peer } => {
            cut.link.topology = Topology::PcieTree {
                fanout: shorten_grid(fanout)?,
                uplinks: uplinks.clone(),
                peer_to_peer: *peer_to_peer,
            };
        }
    }
    Ok(cut)
}
