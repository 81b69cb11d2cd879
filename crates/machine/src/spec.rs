//! The description of a machine: levels, links, devices. Plain data, as read from a file or embedded in a plan.
//!
//! A [`MachineSpec`] may be invalid; [`MachineSpec::check`] finds errors. [`crate::Machine`] is a valid spec with its mesh
//! axes.

use crate::measurement::{CollectiveKind, CollectiveMeasurement};
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The most devices of a machine. More than any existing cluster has; keeps bit sets and tables small.
pub const MAX_DEVICES: u64 = 1 << 20;
/// The most levels.
pub const MAX_LEVELS: usize = 8;
/// The most mesh axes: every axis has at least two digits, so 2^20 devices have at most 20.
pub const MAX_AXES: usize = 20;

/// A machine: levels of units joined by links, outermost (slowest) first, and the devices at the leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// The machine's name.
    pub name: String,
    /// One line for lists.
    #[serde(default)]
    pub description: String,
    /// Outermost first.
    pub levels: Vec<Level>,
    /// The device of all units that `mixed` does not list.
    pub device: Device,
    /// Units of the outermost level with another device. A split waits for its slowest part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<DeviceOverride>,
    /// Measured times of collectives, which replace the model of the links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<CollectiveMeasurement>,
    /// How many times as long as modelled or measured alone collectives take inside of steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub slowdown: BTreeMap<CollectiveKind, f64>,
}

/// Units of the outermost level with another device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceOverride {
    /// Indices of the units, counted from 0.
    pub units: Vec<u32>,
    /// Their device.
    pub device: Device,
}

/// One level: `count` units joined by one kind of link. A unit is one of the next level's groups, or a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Names the mesh axes: `node` gives `node.0`, `node.1`, ...
    pub name: String,
    /// Number of units.
    pub count: u32,
    /// The link between them.
    pub link: Link,
}

/// The link between the units of a level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Published rate of one port in each direction, over all of its wires.
    pub bandwidth: BytesPerSecond,
    /// The share of `bandwidth` that large messages reach.
    pub efficiency: f64,
    /// Time of an empty message from one unit to another, including software.
    #[serde(with = "crate::units::seconds_text")]
    pub latency: Seconds,
    /// Ports per unit, shared evenly by its devices. With one port all devices share it (a node's network card); with one
    /// per device each has its own.
    pub ports: u32,
    /// The wiring.
    pub topology: Topology,
}

impl Link {
    /// Bandwidth of one port for large messages, in each direction.
    pub fn effective_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond(self.bandwidth.0 * self.efficiency)
    }
}

/// The wiring of a level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Topology {
    /// A non-blocking switch: every port can use its full bandwidth towards any others.
    Switch,
    /// Memory that all devices share. Communication is copying, and a device's own part is copied too.
    Memory,
    /// A wire between every two units. A pair has 1/(count-1) of a port's bandwidth.
    FullyConnected,
    /// A grid of rings (wrapped) or lines, dimensions outermost first. A port's bandwidth is divided evenly over the
    /// dimensions and their two directions. One wrapped dimension is a ring.
    Torus {
        /// Sizes; their product is the level's count.
        dims: Vec<u32>,
        /// Whether each dimension closes into a ring.
        wrap: Vec<bool>,
    },
    /// A tree of PCI Express switches. All devices below a switch share its uplink.
    PcieTree {
        /// Children per node of the tree, from the root: first the host sockets, then root ports or switches,
        /// last the devices of one switch. The product is the level's count.
        fanout: Vec<u32>,
        /// Bandwidth in each direction of the uplinks at depth 1, 2, ... There is one fewer than in `fanout`, since a
        /// device's own link is the level's `bandwidth`. `efficiency` applies here too.
        uplinks: Vec<BytesPerSecond>,
        /// Whether devices write to each other directly. Otherwise data go up to the memory of a socket and back down,
        /// over all uplinks between.
        peer_to_peer: bool,
    },
}

impl Topology {
    /// A single ring.
    pub fn ring(count: u32) -> Topology {
        Topology::Torus { dims: vec![count], wrap: vec![true] }
    }

    /// The grid of the units of a level, outermost dimension first.
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
    /// The device's name; cost files refer to it.
    pub name: String,
    /// Size of its memory.
    pub memory: Bytes,
    /// The part of the memory that no plan can use: driver context, loaded kernels, buffers of the communication library,
    /// fragments of the allocator.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reserve: Bytes,
    /// Whether the memory limits plans. An idealised device states a size without a limit.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub memory_limit: bool,
    /// Bandwidth between the device and its memory.
    pub memory_bandwidth: BytesPerSecond,
    /// Overhead per operation launch.
    #[serde(with = "crate::units::seconds_text")]
    pub launch_overhead: Seconds,
    /// The time that PyTorch's host takes per kernel of a training step, op by op. None: as on the computer that the engines' tables
    /// were measured on.
    #[serde(default, with = "crate::units::optional_seconds_text", skip_serializing_if = "Option::is_none")]
    pub host_launch: Option<Seconds>,
    /// Processors that work on different tiles of one operation: multiprocessors of a GPU, matrix units of a TPU. An
    /// operation with fewer tiles leaves some idle.
    pub cores: u32,
    /// The rate that large bf16 products were measured to sustain, on a device whose power limit keeps it below the usual share
    /// of its peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained: Option<FlopsPerSecond>,
    /// Whether the device computes during communication. A core that copies its data itself does not.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub overlap: bool,
    /// What f32 tensors are multiplied in TF32 for, on a device that states its rate.
    #[serde(default, skip_serializing_if = "is_usual_tf32")]
    pub tf32: Tf32Use,
    /// The engine that runs steps on the device; none: ops are priced one by one, by the device alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineName>,
    /// Peak arithmetic rates by number format, dense.
    pub peak: Peaks,
}

/// The engines whose behaviour is known (`crates/cost/engines`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineName {
    /// PyTorch, op by op.
    TorchEager,
    /// PyTorch with `torch.compile`.
    TorchCompile,
    /// torchtitan: PyTorch with `torch.compile` for every block, and the loss op by op.
    Torchtitan,
    /// torchtitan op by op.
    TorchtitanEager,
    /// Megatron-LM of 2021 and 2022, and trainers built on it.
    Megatron,
    /// Megatron-LM of 2024, with Transformer Engine: collectives of tensor parallelism run beside their products.
    MegatronCore,
    /// Megatron-Bridge's recipes: the same with more fused kernels.
    MegatronBridge,
    /// JAX and everything else that XLA compiles.
    Xla,
    /// The engine of `shardwright run`.
    Embedded,
}

impl EngineName {
    /// All engines.
    pub const ALL: [EngineName; 9] = [
        Self::TorchEager,
        Self::TorchCompile,
        Self::Torchtitan,
        Self::TorchtitanEager,
        Self::Megatron,
        Self::MegatronCore,
        Self::MegatronBridge,
        Self::Xla,
        Self::Embedded,
    ];

    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::TorchEager => "torch-eager",
            Self::TorchCompile => "torch-compile",
            Self::Torchtitan => "torchtitan",
            Self::TorchtitanEager => "torchtitan-eager",
            Self::Megatron => "megatron",
            Self::MegatronCore => "megatron-core",
            Self::MegatronBridge => "megatron-bridge",
            Self::Xla => "xla",
            Self::Embedded => "embedded",
        }
    }

    /// The engine of this name.
    ///
    /// # Errors
    /// Where there is none.
    pub fn parse(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name);
        Self::ALL.into_iter().find(|engine| engine.name() == text).ok_or_else(|| {
            format!("there is no engine `{}`; choose {}", text.escape_debug(), names.join(", "))
        })
    }
}

/// What runs in TF32 on a device that has it, where tensors are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tf32Use {
    /// Nothing: all arithmetic is IEEE single.
    Off,
    /// Convolutions, the default of PyTorch with cuDNN (`torch.backends.cudnn.allow_tf32`).
    #[default]
    Convolutions,
    /// Convolutions and matrix products.
    All,
}

impl Tf32Use {
    /// All values.
    pub const ALL: [Tf32Use; 3] = [Tf32Use::Off, Tf32Use::Convolutions, Tf32Use::All];

    /// The name in machine files.
    pub fn name(self) -> &'static str {
        match self {
            Tf32Use::Off => "off",
            Tf32Use::Convolutions => "convolutions",
            Tf32Use::All => "all",
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_usual_tf32(used: &Tf32Use) -> bool {
    *used == Tf32Use::default()
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_yes(flag: &bool) -> bool {
    *flag
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

/// Number formats with their own arithmetic rates.
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
    /// All formats, widest first.
    pub const ALL: [Precision; 7] = [
        Precision::F64,
        Precision::F32,
        Precision::Tf32,
        Precision::Bf16,
        Precision::F16,
        Precision::F8,
        Precision::I8,
    ];

    /// The name in machine files.
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
    /// See [`Precision::F32`]. Every device states it.
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

    /// Sets the rate of a format.
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

    /// The rate of a format, or of the next wider one that the device computes in instead: for i8 and f8 f16, then bf16,
    /// then f32; for the others f32. `None` for f64 if it is not stated, since no format can replace it.
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
    /// The most bytes that a plan may hold on the device; none where its memory limits no plan.
    pub fn usable_memory(&self) -> Option<Bytes> {
        self.memory_limit.then(|| Bytes(self.memory.0.saturating_sub(self.reserve.0)))
    }

    /// A device with the worse of every property of two devices: an evenly split operation waits for it.
    pub fn slower_of(&self, other: &Device) -> Device {
        if self == other {
            return self.clone();
        }
        let mut peak = Peaks::default();
        for p in Precision::ALL {
            // A device without the format computes in a wider one. A format that neither states is left out.
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
            reserve: self.reserve.max(other.reserve),
            memory_limit: self.memory_limit || other.memory_limit,
            memory_bandwidth: min(self.memory_bandwidth, other.memory_bandwidth),
            launch_overhead: self.launch_overhead.max(other.launch_overhead),
            host_launch: [self.host_launch, other.host_launch].into_iter().flatten().reduce(Seconds::max),
            cores: self.cores.max(other.cores),
            sustained: [self.sustained, other.sustained]
                .into_iter()
                .flatten()
                .reduce(|a, b| if a <= b { a } else { b }),
            overlap: self.overlap && other.overlap,
            tf32: self.tf32.min(other.tf32),
            engine: self.engine.or(other.engine),
            peak,
        }
    }
}

/// An error in a spec: the key's path as in a machine file, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: {reason}")]
pub struct SpecError {
    /// Such as `level[1].count`.
    pub key: String,
    /// What is wrong and what is allowed.
    pub reason: String,
}

pub(crate) fn spec_error(key: impl Into<String>, reason: impl Into<String>) -> Result<(), SpecError> {
    Err(SpecError { key: key.into(), reason: reason.into() })
}

fn check_name(key: String, name: &str) -> Result<(), SpecError> {
    let fine = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+' | ' ' | ':' | '/'));
    if fine {
        return Ok(());
    }
    spec_error(
        key,
        format!("`{}` is not a name: 1 to 64 letters, digits or any of `-_+:/ `", name.escape_debug()),
    )
}

fn check_rate(key: String, rate: f64, unit: &str) -> Result<(), SpecError> {
    if rate > 0.0 && rate <= 1e21 {
        return Ok(());
    }
    spec_error(key, format!("{rate} {unit} is not possible: must be above zero and at most 1e21"))
}

pub(crate) fn check_seconds(key: String, seconds: Seconds) -> Result<(), SpecError> {
    if seconds.0 >= 0.0 && seconds.0 <= 1e3 {
        return Ok(());
    }
    spec_error(key, format!("{} s is not possible: must be from 0 to 1000 seconds", seconds.0))
}

impl MachineSpec {
    /// Number of devices, for a spec that passes [`MachineSpec::check`].
    pub fn device_count(&self) -> u64 {
        self.levels.iter().fold(1u64, |n, level| n.saturating_mul(u64::from(level.count)))
    }

    /// Checks the rules for machines:
    ///
    /// - 1 to 8 levels with distinct names, each count at least 1, at most 2^20 devices in total;
    /// - bandwidths above zero, efficiencies in (0, 1], latencies from 0 to 1000 s;
    /// - ports divide the devices of a unit; grid dimensions and tree fan-outs multiply to the count;
    /// - every device states f32, all stated rates above zero, memory at least one byte;
    /// - `mixed` names existing units of the outermost level, each at most once;
    /// - `measured` has every collective of a level and a group size at most once, with growing sizes and times;
    /// - every `slowdown` is a number from 0.01 to 100.
    pub fn check(&self) -> Result<(), SpecError> {
        check_name("name".into(), &self.name)?;
        if self.levels.is_empty() {
            return spec_error("level", "a machine needs at least one level");
        }
        if self.levels.len() > MAX_LEVELS {
            return spec_error("level", format!("{} levels; at most {MAX_LEVELS}", self.levels.len()));
        }
        // Counts first: later checks multiply them.
        for (i, level) in self.levels.iter().enumerate() {
            if level.count == 0 {
                return spec_error(format!("level[{i}].count"), "must be at least 1");
            }
            let so_far: u64 = self.levels[..=i].iter().map(|l| u64::from(l.count)).product();
            if so_far > MAX_DEVICES {
                return spec_error(
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
                return spec_error(
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
                return spec_error(format!("mixed[{i}].units"), "names no unit");
            }
            for &unit in &mixed.units {
                match seen.get_mut(unit as usize) {
                    None => {
                        return spec_error(
                            format!("mixed[{i}].units"),
                            format!(
                                "there is no {} {unit}: units are 0 to {}",
                                self.levels[0].name,
                                seen.len() - 1
                            ),
                        );
                    }
                    Some(true) => {
                        return spec_error(
                            format!("mixed[{i}].units"),
                            format!("unit {unit} is named twice"),
                        );
                    }
                    Some(slot) => *slot = true,
                }
            }
        }
        self.measured.iter().enumerate().try_for_each(|(i, measured)| measured.check(i, self))?;
        match self.slowdown.iter().find(|(_, factor)| !(0.01..=100.0).contains(*factor)) {
            None => Ok(()),
            Some((kind, factor)) => {
                spec_error(format!("slowdown.{}", kind.name()), format!("{factor} is not from 0.01 to 100"))
            }
        }
    }
}

impl Level {
    fn check(&self, i: usize, devices_per_unit: u64) -> Result<(), SpecError> {
        let key = |field: &str| format!("level[{i}].{field}");
        check_name(key("name"), &self.name)?;
        if self.name.contains(['.', ' ', ':', '/']) {
            return spec_error(
                key("name"),
                format!("`{}`: axis names are made from it; letters, digits, - and _ only", self.name),
            );
        }
        let link = &self.link;
        check_rate(key("bandwidth"), link.bandwidth.0, "B/s")?;
        check_seconds(key("latency"), link.latency)?;
        if !(link.efficiency > 0.0 && link.efficiency <= 1.0) {
            return spec_error(
                key("efficiency"),
                format!("{} must be above 0 and at most 1", link.efficiency),
            );
        }
        if link.ports == 0 || !devices_per_unit.is_multiple_of(u64::from(link.ports)) {
            return spec_error(
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
            spec_error(
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
                spec_error(key("wrap"), format!("{} values for {} dimensions", wrap.len(), dims.len()))
            }
            Topology::PcieTree { fanout, uplinks, .. } => {
                multiplies("fanout", fanout)?;
                if uplinks.len() + 1 != fanout.len() {
                    return spec_error(
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
    fn check(&self, at: &str) -> Result<(), SpecError> {
        check_name(format!("{at}.name"), &self.name)?;
        if self.memory.0 == 0 || self.memory.0 > 1 << 62 {
            return spec_error(format!("{at}.memory"), "must be from 1 byte to 2^62");
        }
        if self.reserve >= self.memory {
            return spec_error(
                format!("{at}.reserve"),
                format!("{} of {} leaves no memory for a plan", self.reserve, self.memory),
            );
        }
        check_rate(format!("{at}.memory_bandwidth"), self.memory_bandwidth.0, "B/s")?;
        check_seconds(format!("{at}.launch_overhead"), self.launch_overhead)?;
        if let Some(seconds) = self.host_launch {
            check_seconds(format!("{at}.host_launch"), seconds)?;
        }
        if self.cores == 0 || self.cores > 1 << 20 {
            return spec_error(format!("{at}.cores"), "must be from 1 to 2^20");
        }
        if let Some(rate) = self.sustained {
            check_rate(format!("{at}.sustained"), rate.0, "FLOP/s")?;
            if self.peak.bf16.is_none_or(|peak| rate > peak) {
                return spec_error(format!("{at}.sustained"), "must be at most peak.bf16");
            }
        }
        if self.peak.f32.is_none() {
            return spec_error(format!("{at}.peak.f32"), "is missing; every device states its f32 rate");
        }
        for p in Precision::ALL {
            if let Some(rate) = self.peak.get(p) {
                check_rate(format!("{at}.peak.{}", p.name()), rate.0, "FLOP/s")?;
            }
        }
        Ok(())
    }
}
