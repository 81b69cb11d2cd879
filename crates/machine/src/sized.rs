//! Machines of any size, as people name them: `8xh100`, `h100x8`, `tpu-v5p-256`.
//!
//! A built-in file describes a GPU with its usual node and network. More nodes extend its outermost level; fewer devices than
//! a node has are the first of one node. A TPU slice is a torus of the generation's chips.

use crate::builtin::{builtin, builtin_names};
use crate::error::MachineError;
use crate::machine::Machine;
use crate::spec::Topology;
use crate::units::BytesPerSecond;
use shardwright_suggest::{did_you_mean, nearest};

/// Other names of GPUs.
const ALIASES: &[(&str, &str)] =
    &[("a100-80gb", "a100"), ("h100-80gb", "h100"), ("h100-sxm", "h100"), ("v100-32gb", "v100")];

/// TPU generations: name, TensorCores per chip as the slice's name counts them, most chips of a slice.
const GENERATIONS: &[(&str, u64, u64)] =
    &[("v4", 2, 4096), ("v5p", 2, 4096), ("v5e", 1, 256), ("v6e", 1, 256)];

/// A machine's name as a kind of device and a number of devices, and the built-in file that describes the kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizedName {
    /// The canonical name.
    pub name: String,
    /// The built-in machine of another size.
    pub base: &'static str,
    /// Devices: GPUs or chips.
    devices: u64,
}

/// A whole number; numbers beyond 64 bits exceed every machine.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// `8xh100`, `8 x H100`, `8*h100`, `8h100` and `h100x8` as the number and the kind, in lower case.
fn count_and_kind(name: &str) -> Option<(u64, String)> {
    let name: String = name.to_ascii_lowercase().replace(['*', '×'], "x").split_whitespace().collect();
    let leading = || name.split_once('x').and_then(|(count, kind)| Some((number(count)?, kind)));
    let trailing = || name.rsplit_once('x').and_then(|(kind, count)| Some((number(count)?, kind)));
    let joined = || {
        let (count, kind) = name.split_at(name.find(|c: char| !c.is_ascii_digit())?);
        let known = builtin_names().any(|file| gpu_of(file) == Some(kind));
        Some((number(count).filter(|_| known)?, kind))
    };
    let (count, kind) = leading().or_else(trailing).or_else(joined)?;
    let kind = ALIASES.iter().find(|(alias, _)| *alias == kind).map_or(kind, |(_, kind)| kind);
    Some((count, kind.to_string()))
}

/// The GPU that a built-in file describes: `h100` of `h100x64`.
fn gpu_of(file: &'static str) -> Option<&'static str> {
    file.rsplit_once('x').filter(|(_, count)| number(count).is_some()).map(|(gpu, _)| gpu)
}

/// `v5p-256` and `tpu-v5p-256` as the generation and the number in the slice's name.
fn generation_and_count(name: &str) -> Option<(String, u64)> {
    let name = name.to_ascii_lowercase();
    let (generation, count) = name.strip_prefix("tpu-").unwrap_or(&name).split_once('-')?;
    Some((generation.to_string(), number(count)?))
}

impl SizedName {
    /// Reads a name; `None` where it is no known kind of device with a number.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some((devices, kind)) = count_and_kind(name) {
            let same = format!("{kind}x{devices}");
            let files = || builtin_names().filter(|file| gpu_of(file) == Some(&kind));
            // A file of exactly this size wins: `k80x8` is another machine than a part of `k80x64`.
            let base = files().find(|file| *file == same).or_else(|| files().next())?;
            let name = if base == same { same } else { format!("{devices}x{kind}") };
            return Some(Self { name, base, devices });
        }
        let (kind, count) = generation_and_count(name)?;
        let &(_, per_chip, _) = GENERATIONS.iter().find(|(known, ..)| *known == kind)?;
        let base = builtin_names().find(|file| file.split_once('-').is_some_and(|(g, _)| g == kind))?;
        // An odd number of TensorCores is no slice: the machine refuses zero chips.
        let devices = if count.is_multiple_of(per_chip) { count / per_chip } else { 0 };
        let name = format!("{kind}-{count}");
        Some(Self { name, base, devices })
    }

    /// The machine.
    pub fn machine(&self) -> Result<Machine, MachineError> {
        let base = builtin(self.base)?;
        if base.name() == self.name {
            return Ok(base);
        }
        match &base.levels()[0].link.topology {
            Topology::Torus { dims, .. } => self.slice(&base, dims.len()),
            _ => self.nodes(&base),
        }
    }

    fn refuse(&self, reason: String) -> MachineError {
        MachineError::CannotResize { name: self.name.clone(), reason }
    }

    /// Whole nodes, or a part of one.
    fn nodes(&self, base: &Machine) -> Result<Machine, MachineError> {
        let per_node = u64::from(base.devices_per_unit(0));
        let devices = self.devices;
        let mut spec = if devices <= per_node {
            if devices == 0 {
                return Err(self.refuse("ask for at least one device".into()));
            }
            base.restrict(devices)?.spec().clone()
        } else if devices.is_multiple_of(per_node) {
            let mut spec = base.spec().clone();
            spec.levels[0].count = u32::try_from(devices / per_node).unwrap_or(u32::MAX);
            spec
        } else {
            let below = devices / per_node * per_node;
            return Err(self.refuse(format!(
                "a node has {per_node} devices, so {devices} devices are not a whole number of nodes; try {below} or {}",
                below.saturating_add(per_node)
            )));
        };
        spec.name.clone_from(&self.name);
        let nodes = match devices / per_node {
            0 | 1 => String::from("one node:"),
            nodes => format!("{nodes} nodes x"),
        };
        // The file's description begins with its own size: `8 nodes x 8 H100 SXM, NVSwitch`.
        let after = base.description().split_once(" x ").map_or("", |(_, rest)| rest);
        let kind = after.split_once(' ').map_or("", |(_, kind)| kind);
        spec.description = format!("{nodes} {} {kind}", devices.min(per_node));
        spec.measured.clear();
        Machine::try_from(spec)
    }

    /// A slice of a TPU pod: the torus of powers of two that is nearest to a cube or a square.
    fn slice(&self, base: &Machine, dimensions: usize) -> Result<Machine, MachineError> {
        let generation = self.name.split('-').next().unwrap_or_default();
        let most = GENERATIONS.iter().find(|(name, ..)| *name == generation).map_or(0, |&(.., most)| most);
        if !self.devices.is_power_of_two() || self.devices > most {
            let per_chip = GENERATIONS.iter().find(|(name, ..)| *name == generation).map_or(1, |g| g.1);
            return Err(self.refuse(format!(
                "slices of {generation} have a power of two of chips, at most {most}; the name counts {}",
                if per_chip == 1 { "chips".into() } else { format!("TensorCores, {per_chip} per chip") }
            )));
        }
        let log = self.devices.trailing_zeros() as usize;
        // Later dimensions are the larger ones: 2 x 4, 4 x 4 x 8.
        let all: Vec<u32> = (0..dimensions)
            .map(|at| 1 << (log / dimensions + usize::from(at >= dimensions - log % dimensions)))
            .collect();
        // Two-dimensional pods close only their whole sides of 16; three-dimensional ones close every side of cubes of 4 x 4 x 4.
        let closes = |side: u32| {
            if dimensions == 2 { side == 16 } else { all.iter().all(|side| side % 4 == 0) && side > 1 }
        };
        let mut dims: Vec<u32> = all.iter().copied().filter(|&side| side > 1).collect();
        if dims.is_empty() {
            dims.push(1);
        }
        let wrap: Vec<bool> = dims.iter().map(|&side| closes(side)).collect();
        let mut spec = base.spec().clone();
        spec.name.clone_from(&self.name);
        let sides: Vec<String> = dims.iter().map(u32::to_string).collect();
        spec.description =
            format!("TPU {generation} slice: {} chips, {} torus", self.devices, sides.join(" x "));
        let link = &mut spec.levels[0].link;
        // Links of dimensions that the slice lacks are unused.
        link.bandwidth = BytesPerSecond(link.bandwidth.0 * dims.len() as f64 / dimensions as f64);
        link.topology = Topology::Torus { dims, wrap };
        spec.levels[0].count = self.devices as u32;
        Machine::try_from(spec)
    }
}

/// The end of a message about an unknown name: the nearest name, of built-in machines and of every kind of device with the
/// number that was asked for; a GPU without a number is offered as one node.
pub(crate) fn suggestion(name: &str) -> String {
    let gpus = || builtin_names().filter_map(gpu_of);
    if let Some(gpu) = gpus().find(|gpu| gpu.eq_ignore_ascii_case(name)) {
        return format!("; did you mean `8x{gpu}`?");
    }
    // `fat:4` is `flat:4`, and `dgx-h100` has H100s.
    if let Some((stem, size)) = name.split_once(':')
        && let Some(known) = nearest(stem, ["flat", "cpu"])
    {
        return format!("; did you mean `{known}:{size}`?");
    }
    let words = || name.split(|c: char| !c.is_ascii_alphanumeric());
    if let Some(gpu) = gpus().find(|gpu| words().any(|word| gpu.eq_ignore_ascii_case(word))) {
        return format!("; did you mean `8x{gpu}`?");
    }
    let mut all: Vec<String> = builtin_names().map(String::from).collect();
    if let Some((count, _)) = count_and_kind(name) {
        let leading = name.starts_with(|c: char| c.is_ascii_digit());
        all.extend(
            gpus().map(|gpu| if leading { format!("{count}x{gpu}") } else { format!("{gpu}x{count}") }),
        );
    }
    if let Some((_, count)) = generation_and_count(name) {
        all.extend(GENERATIONS.iter().map(|(generation, ..)| format!("tpu-{generation}-{count}")));
    }
    did_you_mean(name, all.iter().map(String::as_str))
}
