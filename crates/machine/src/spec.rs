//! What a machine is made of: levels, links, devices. Plain data, as read from a file or embedded in a plan.
//!
//! A [`MachineSpec`] may be nonsense; [`MachineSpec::check`] says what is wrong with it. [`crate::Machine`] is a
//! spec that has been checked, with its mesh axes worked out.

use crate::measured::Measured;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use serde::{Deserialize, Serialize};

/// The most devices a machine may have. Enough for any cluster that exists; keeps bit sets and tables small.
pub const MAX_DEVICES: u64 = 1 << 20;
/// The most levels.
pub const MAX_LEVELS: usize = 8;
/// The most mesh axes: every axis has at least two digits, so 2^20 devices have at most 20.
pub const MAX_AXES: usize = 20;

/// A machine: levels of units joined by links, outermost (slowest) first, and the devices at the leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// What people call it.
    pub name: String,
    /// One line for lists.
    #[serde(default)]
    pub description: String,
    /// Outermost first.
    pub levels: Vec<Level>,
    /// The device that all units have unless `mixed` says otherwise.
    pub device: Device,
    /// Units of the outermost level with another device. A split waits for its slowest part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<Mixed>,
    /// Times of collectives, where they were measured: they count instead of what follows from the links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
}

/// Units of the outermost level that have a device of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mixed {
    /// Indices of the units, counted from 0.
    pub units: Vec<u32>,
    /// What they are made of.
    pub device: Device,
}

/// One level: `count` units joined by one kind of link. A unit is one of the next level's groups, or a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Names the mesh axes: `node` gives `node.0`, `node.1`, ...
    pub name: String,
    /// How many units the level joins.
    pub count: u32,
    /// What joins them.
    pub link: Link,
}

/// What joins the units of a level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// What one port can send, and at the same time receive, over all its wires together: the published rate.
    pub bandwidth: BytesPerSecond,
    /// The share of `bandwidth` that large messages reach.
    pub efficiency: f64,
    /// From one unit to another, including software, for a message of no size.
    #[serde(with = "crate::units::seconds_text")]
    pub latency: Seconds,
    /// Ports per unit. 1: all devices of the unit share one (a node's network card); as many as the unit has
    /// devices: each has its own. The devices of a unit are dealt out evenly to its ports.
    pub ports: u32,
    /// How the wires run.
    pub topology: Topology,
}

impl Link {
    /// What large messages get through one port, each way.
    pub fn effective_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond(self.bandwidth.0 * self.efficiency)
    }
}

/// How the wires of a level run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Topology {
    /// A non-blocking switch: every port can use its full bandwidth towards any others.
    Switch,
    /// Memory that all devices share: moving is copying, and what a device has already is copied too.
    Memory,
    /// A wire between every two units: a pair has 1/(count-1) of a port's bandwidth.
    FullyConnected,
    /// A grid of rings (wrapped) or lines, dimensions outermost first; a port's bandwidth is divided evenly over
    /// the dimensions and over the two ways along each. One wrapped dimension is a ring.
    Torus {
        /// Sizes; their product is the level's count.
        dims: Vec<u32>,
        /// Which dimensions close into a ring.
        wrap: Vec<bool>,
    },
    /// A tree of PCI Express switches: all below a switch share its uplink.
    PcieTree {
        /// Children per node of the tree, from the root: first the host sockets, then root ports or switches,
        /// last the devices of one switch. The product is the level's count.
        fanout: Vec<u32>,
        /// Bandwidth each way of the uplink of the nodes at depth 1, 2, ...; one less than `fanout` has, since a
        /// device's own link is the level's `bandwidth`. `efficiency` applies here too.
        uplinks: Vec<BytesPerSecond>,
        /// Devices write to each other directly. Otherwise everything goes up to the memory of a socket and back
        /// down, over all uplinks on the way.
        peer_to_peer: bool,
    },
}

impl Topology {
    /// A single ring.
    pub fn ring(count: u32) -> Topology {
        Topology::Torus { dims: vec![count], wrap: vec![true] }
    }

    /// The grid that the units of a level with this topology form, outermost dimension first.
    pub fn dims(&self, count: u32) -> Vec<u32> {
        match self {
            Topology::Switch | Topology::Memory | Topology::FullyConnected => vec![count],
            Topology::Torus { dims, .. } => dims.clone(),
            Topology::PcieTree { fanout, .. } => fanout.clone(),
        }
    }
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// What people call it; measured costs are keyed by it.
    pub name: String,
    /// Its own memory.
    pub memory: Bytes,
    /// Between the device and its own memory.
    pub memory_bandwidth: BytesPerSecond,
    /// Time lost per operation started.
    #[serde(with = "crate::units::seconds_text")]
    pub launch_overhead: Seconds,
    /// Processors that work on different tiles of one operation: multiprocessors of a GPU, matrix units of a TPU.
    /// An operation with fewer tiles than this leaves some idle.
    pub cores: u32,
    /// Whether it computes while data moves. A core that moves its data itself does not.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub overlap: bool,
    /// Peak arithmetic rates by number format, dense.
    pub peak: Peaks,
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_yes(overlap: &bool) -> bool {
    *overlap
}

/// Number formats that devices have different rates for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE double.
    F64,
    /// IEEE single, exact products.
    F32,
    /// IEEE single with products rounded to 10 bits of mantissa (tensor cores).
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 8-bit floating point.
    F8,
    /// 8-bit integer.
    I8,
}

impl Precision {
    /// All, widest first.
    pub const ALL: [Precision; 7] = [
        Precision::F64,
        Precision::F32,
        Precision::Tf32,
        Precision::Bf16,
        Precision::F16,
        Precision::F8,
        Precision::I8,
    ];

    /// As written in machine files.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F64 => "f64",
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
            Precision::F8 => "f8",
            Precision::I8 => "i8",
        }
    }
}

/// Peak arithmetic rates by number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Peaks {
    /// See [`Precision::F64`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f64: Option<FlopsPerSecond>,
    /// See [`Precision::F32`]. Every device has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f32: Option<FlopsPerSecond>,
    /// See [`Precision::Tf32`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tf32: Option<FlopsPerSecond>,
    /// See [`Precision::Bf16`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bf16: Option<FlopsPerSecond>,
    /// See [`Precision::F16`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f16: Option<FlopsPerSecond>,
    /// See [`Precision::F8`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f8: Option<FlopsPerSecond>,
    /// See [`Precision::I8`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub i8: Option<FlopsPerSecond>,
}

impl Peaks {
    /// The rate stated for exactly this format.
    pub fn get(&self, precision: Precision) -> Option<FlopsPerSecond> {
        match precision {
            Precision::F64 => self.f64,
            Precision::F32 => self.f32,
            Precision::Tf32 => self.tf32,
            Precision::Bf16 => self.bf16,
            Precision::F16 => self.f16,
            Precision::F8 => self.f8,
            Precision::I8 => self.i8,
        }
    }

    /// States the rate for a format.
    pub fn set(&mut self, precision: Precision, rate: Option<FlopsPerSecond>) {
        *match precision {
            Precision::F64 => &mut self.f64,
            Precision::F32 => &mut self.f32,
            Precision::Tf32 => &mut self.tf32,
            Precision::Bf16 => &mut self.bf16,
            Precision::F16 => &mut self.f16,
            Precision::F8 => &mut self.f8,
            Precision::I8 => &mut self.i8,
        } = rate;
    }

    /// The rate for a format, or that of the next wider one which the device would compute in instead (i8 and f8
    /// as f16, then bf16, then f32; the others as f32). `None` for f64 where not stated:
    /// nothing can stand in for it.
    pub fn get_or_wider(&self, precision: Precision) -> Option<FlopsPerSecond> {
        use Precision::*;
        let stand_ins: &[Precision] = match precision {
            F64 => &[F64],
            F32 => &[F32],
            Tf32 => &[Tf32, F32],
            Bf16 => &[Bf16, F32],
            F16 => &[F16, F32],
            F8 => &[F8, F16, Bf16, F32],
            I8 => &[I8, F16, Bf16, F32],
        };
        stand_ins.iter().find_map(|&p| self.get(p))
    }
}

impl Device {
    /// The worst of two devices in every respect: what an evenly split operation waits for.
    pub fn slower_of(&self, other: &Device) -> Device {
        if self == other {
            return self.clone();
        }
        let mut peak = Peaks::default();
        for p in Precision::ALL {
            // A device without the format computes in a wider one; only if neither states it is it left out.
            let stated = self.peak.get(p).is_some() || other.peak.get(p).is_some();
            peak.set(
                p,
                match (stated, self.peak.get_or_wider(p), other.peak.get_or_wider(p)) {
                    (true, Some(a), Some(b)) => Some(if a <= b { a } else { b }),
                    _ => None,
                },
            );
        }
        let min = |a: BytesPerSecond, b: BytesPerSecond| if a <= b { a } else { b };
        Device {
            name: format!("{}+{}", self.name, other.name),
            memory: self.memory.min(other.memory),
            memory_bandwidth: min(self.memory_bandwidth, other.memory_bandwidth),
            launch_overhead: self.launch_overhead.max(other.launch_overhead),
            cores: self.cores.max(other.cores),
            overlap: self.overlap && other.overlap,
            peak,
        }
    }
}

/// One thing wrong with a spec: the key's path as in a machine file, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Such as `level[1].count`.
    pub key: String,
    /// What is wrong and what is allowed.
    pub reason: String,
}

pub(crate) fn problem(key: impl Into<String>, reason: impl Into<String>) -> Result<(), Problem> {
    Err(Problem { key: key.into(), reason: reason.into() })
}

fn check_name(key: String, name: &str) -> Result<(), Problem> {
    let fine = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+' | ' ' | ':' | '/'));
    if fine {
        return Ok(());
    }
    problem(
        key,
        format!("`{}` is not a name: 1 to 64 letters, digits or any of `-_+:/ `", name.escape_debug()),
    )
}

fn check_rate(key: String, rate: f64, unit: &str) -> Result<(), Problem> {
    if rate > 0.0 && rate <= 1e21 {
        return Ok(());
    }
    problem(key, format!("{rate} {unit} is not possible: must be above zero and at most 1e21"))
}

pub(crate) fn check_seconds(key: String, seconds: Seconds) -> Result<(), Problem> {
    if seconds.0 >= 0.0 && seconds.0 <= 1e3 {
        return Ok(());
    }
    problem(key, format!("{} s is not possible: must be from 0 to 1000 seconds", seconds.0))
}

impl MachineSpec {
    /// Devices in all. Only meaningful for a spec that passes [`MachineSpec::check`].
    pub fn device_count(&self) -> u64 {
        self.levels.iter().fold(1u64, |n, level| n.saturating_mul(u64::from(level.count)))
    }

    /// Says what is wrong, if anything is: the specification of what a machine is.
    ///
    /// - 1 to 8 levels with distinct names, each count at least 1, at most 2^20 devices in all;
    /// - bandwidths above zero, efficiencies in (0, 1], latencies from 0 to 1000 s;
    /// - ports divide the devices of a unit; grid dimensions and tree fan-outs multiply to the count;
    /// - every device states f32, all stated rates above zero, memory at least one byte;
    /// - `mixed` names existing units of the outermost level, each at most once;
    /// - `measured` has every collective of a level and a group size once, with growing sizes and times.
    pub fn check(&self) -> Result<(), Problem> {
        check_name("name".into(), &self.name)?;
        if self.levels.is_empty() {
            return problem("level", "a machine needs at least one level");
        }
        if self.levels.len() > MAX_LEVELS {
            return problem("level", format!("{} levels; at most {MAX_LEVELS}", self.levels.len()));
        }
        // Counts first: everything after may multiply them.
        for (i, level) in self.levels.iter().enumerate() {
            if level.count == 0 {
                return problem(format!("level[{i}].count"), "must be at least 1");
            }
            let so_far: u64 = self.levels[..=i].iter().map(|l| u64::from(l.count)).product();
            if so_far > MAX_DEVICES {
                return problem(
                    format!("level[{i}].count"),
                    format!("makes {so_far} devices; at most {MAX_DEVICES} are supported"),
                );
            }
        }
        let mut inner = self.device_count();
        for (i, level) in self.levels.iter().enumerate() {
            inner /= u64::from(level.count);
            level.check(i, inner)?;
            if let Some(j) = self.levels[..i].iter().position(|other| other.name == level.name) {
                return problem(
                    format!("level[{i}].name"),
                    format!("`{}` is also the name of level[{j}]; axes are named after levels", level.name),
                );
            }
        }
        self.device.check("device")?;
        let mut seen = vec![false; self.levels[0].count as usize];
        for (i, mixed) in self.mixed.iter().enumerate() {
            mixed.device.check(&format!("mixed[{i}]"))?;
            if mixed.units.is_empty() {
                return problem(format!("mixed[{i}].units"), "names no unit");
            }
            for &unit in &mixed.units {
                match seen.get_mut(unit as usize) {
                    None => {
                        return problem(
                            format!("mixed[{i}].units"),
                            format!(
                                "there is no {} {unit}: units are 0 to {}",
                                self.levels[0].name,
                                seen.len() - 1
                            ),
                        );
                    }
                    Some(true) => {
                        return problem(format!("mixed[{i}].units"), format!("unit {unit} is named twice"));
                    }
                    Some(slot) => *slot = true,
                }
            }
        }
        self.measured.iter().enumerate().try_for_each(|(i, measured)| measured.check(i, self))
    }
}

impl Level {
    fn check(&self, i: usize, devices_per_unit: u64) -> Result<(), Problem> {
        let key = |field: &str| format!("level[{i}].{field}");
        check_name(key("name"), &self.name)?;
        if self.name.contains(['.', ' ', ':', '/']) {
            return problem(
                key("name"),
                format!("`{}`: axis names are made from it; letters, digits, - and _ only", self.name),
            );
        }
        let link = &self.link;
        check_rate(key("bandwidth"), link.bandwidth.0, "B/s")?;
        check_seconds(key("latency"), link.latency)?;
        if !(link.efficiency > 0.0 && link.efficiency <= 1.0) {
            return problem(key("efficiency"), format!("{} must be above 0 and at most 1", link.efficiency));
        }
        if link.ports == 0 || !devices_per_unit.is_multiple_of(u64::from(link.ports)) {
            return problem(
                key("ports"),
                format!(
                    "{} ports cannot be shared evenly by the {devices_per_unit} devices of a unit",
                    link.ports
                ),
            );
        }
        let multiplies = |field: &str, dims: &[u32]| {
            let product = dims.iter().try_fold(1u32, |n, &d| n.checked_mul(d));
            if dims.len() <= MAX_LEVELS && product == Some(self.count) {
                return Ok(());
            }
            problem(
                key(field),
                format!("{dims:?} must be at most {MAX_LEVELS} numbers with product {}", self.count),
            )
        };
        match &link.topology {
            Topology::Switch | Topology::Memory | Topology::FullyConnected => Ok(()),
            Topology::Torus { dims, wrap } => {
                multiplies("dims", dims)?;
                if wrap.len() == dims.len() {
                    return Ok(());
                }
                problem(key("wrap"), format!("{} values for {} dimensions", wrap.len(), dims.len()))
            }
            Topology::PcieTree { fanout, uplinks, .. } => {
                multiplies("fanout", fanout)?;
                if uplinks.len() + 1 != fanout.len() {
                    return problem(
                        key("uplinks"),
                        format!(
                            "{} values; one less than fanout has, here {}",
                            uplinks.len(),
                            fanout.len().max(1) - 1
                        ),
                    );
                }
                uplinks.iter().try_for_each(|rate| check_rate(key("uplinks"), rate.0, "B/s"))
            }
        }
    }
}

impl Device {
    fn check(&self, at: &str) -> Result<(), Problem> {
        check_name(format!("{at}.name"), &self.name)?;
        if self.memory.0 == 0 || self.memory.0 > 1 << 62 {
            return problem(format!("{at}.memory"), "must be from 1 byte to 2^62");
        }
        check_rate(format!("{at}.memory_bandwidth"), self.memory_bandwidth.0, "B/s")?;
        check_seconds(format!("{at}.launch_overhead"), self.launch_overhead)?;
        if self.cores == 0 || self.cores > 1 << 20 {
            return problem(format!("{at}.cores"), "must be from 1 to 2^20");
        }
        if self.peak.f32.is_none() {
            return problem(format!("{at}.peak.f32"), "is missing; every device states its f32 rate");
        }
        for p in Precision::ALL {
            if let Some(rate) = self.peak.get(p) {
                check_rate(format!("{at}.peak.{}", p.name()), rate.0, "FLOP/s")?;
            }
        }
        Ok(())
    }
}
