//! A checked machine: a spec that makes sense, with its mesh worked out. What the rest of the code base uses.

use crate::error::MachineError;
use crate::mesh::{DeviceId, Mesh};
use crate::spec::{Device, Level, Link, MachineSpec, Problem, Topology};
use crate::units::BytesPerSecond;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A machine that has been checked. Serialises as its [`MachineSpec`], and is checked again when read back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "MachineSpec", into = "MachineSpec")]
pub struct Machine {
    spec: MachineSpec,
    mesh: Mesh,
    /// For each unit of the outermost level: 0 = the spec's device, i + 1 = `mixed[i]`. Empty if all are alike.
    kinds: Vec<u32>,
}

/// A short name for a machine's hardware: equal for equal levels, links and devices, whatever they are called.
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
        Machine::new(spec).map_err(|Problem { key, reason }| MachineError::Invalid { key, reason })
    }
}

impl From<Machine> for MachineSpec {
    fn from(machine: Machine) -> MachineSpec {
        machine.spec
    }
}

impl Machine {
    /// Checks a spec and works out its mesh.
    pub fn new(spec: MachineSpec) -> Result<Machine, Problem> {
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

    /// The plain data.
    pub fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// What people call it.
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

    /// The finest mesh: one axis per prime.
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

    /// Whether all devices are alike.
    pub fn is_homogeneous(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What a device is made of.
    pub fn device(&self, device: DeviceId) -> &Device {
        let unit = (device.0 / self.devices_per_unit(0)) as usize;
        match self.kinds.get(unit) {
            None | Some(0) => &self.spec.device,
            Some(&kind) => &self.spec.mixed[kind as usize - 1].device,
        }
    }

    /// The worst device of the machine in every respect: what a split over all of it waits for.
    pub fn slowest(&self) -> Device {
        let per_unit = self.devices_per_unit(0);
        let units = if self.is_homogeneous() { 1 } else { self.spec.levels[0].count };
        self.slowest_of((0..units).map(|unit| DeviceId(unit * per_unit)))
    }

    /// The worst of some devices in every respect: what an even split over them waits for. Of none: the usual one.
    pub fn slowest_of(&self, devices: impl IntoIterator<Item = DeviceId>) -> Device {
        let mut devices = devices.into_iter().map(|device| self.device(device));
        let first = devices.next().unwrap_or(&self.spec.device).clone();
        devices.fold(first, |slowest, device| {
            // Of A, B, A the worst is called A+B: what is already accounted for is left alone.
            let worst = slowest.slower_of(device);
            let same = (Device { name: slowest.name.clone(), ..worst.clone() }) == slowest;
            if same { slowest } else { worst }
        })
    }

    /// A stable 64-bit hash of the hardware: FNV-1a of the canonical file without name and description.
    pub fn fingerprint(&self) -> Fingerprint {
        let nameless =
            MachineSpec { name: String::from("-"), description: String::new(), ..self.spec.clone() };
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in crate::text::to_toml(&nameless).bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Fingerprint(hash)
    }

    /// The machine's file in canonical form: reading it gives this machine back.
    pub fn to_toml(&self) -> String {
        crate::text::to_toml(&self.spec)
    }

    /// The first `devices` devices, whole inner levels first: `p100x16` restricted to 4 is one node, to 8 two
    /// nodes, to 2 half a node. Levels left with one unit vanish.
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
        // The innermost level whose unit still holds fewer devices than asked for is the one to cut.
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
            // Everything left lies in the first unit of the outermost level.
            spec.device = self.device(DeviceId(0)).clone();
            spec.mixed.clear();
        }
        spec.levels.drain(..cut);
        let units = (devices / per_unit) as u32;
        spec.levels[0] = cut_level(&spec.levels[0], units).map_err(error)?;
        for mixed in &mut spec.mixed {
            mixed.units.retain(|&unit| unit < units);
        }
        spec.mixed.retain(|mixed| !mixed.units.is_empty());
        // Measured among all devices, with all of them busy.
        spec.measured.clear();
        spec.name = format!("{}:{devices}", self.spec.name);
        Machine::try_from(spec)
    }
}

impl Machine {
    /// The same devices seen as groups: a machine of one level becomes one of two, with the same links. Strategies that
    /// do one thing inside the innermost level and another outside it can so be had on any grid.
    pub fn grouped(&self, groups: u64, members: u64) -> Result<Machine, MachineError> {
        let error = |reason: String| MachineError::CannotGroup {
            machine: self.spec.name.clone(),
            groups,
            members,
            reason,
        };
        let [level] = &self.spec.levels[..] else {
            return Err(error("only a machine of one level can be seen as groups".into()));
        };
        if !matches!(level.link.topology, Topology::Switch | Topology::Memory) {
            return Err(error(
                "only devices on a switch, or that share a memory, are all alike to each other".into(),
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
fn cut_level(level: &Level, units: u32) -> Result<Level, String> {
    let mut cut = Level { count: units, ..level.clone() };
    // The first `units` positions of a grid, whole inner dimensions first.
    let cut_grid = |dims: &[u32]| -> Result<Vec<u32>, String> {
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
            // The wires to the units left out are lost.
            let wires = f64::from(units.max(2) - 1) / f64::from((level.count - 1).max(1));
            cut.link.bandwidth = BytesPerSecond(level.link.bandwidth.0 * wires);
        }
        Topology::Torus { dims, wrap } => {
            let kept = cut_grid(dims)?;
            // A part of a ring is a line, and dimensions that vanish take their wires with them.
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
                fanout: cut_grid(fanout)?,
                uplinks: uplinks.clone(),
                peer_to_peer: *peer_to_peer,
            };
        }
    }
    Ok(cut)
}
