//! Reads machine files: strict TOML, with file, line and key in every error.
//!
//! A file is flattened into entries (key path, value, location). Files that it `extends` are flattened first and
//! overridden entry by entry; the machine is built from the result. Every entry keeps its location, so that an error found
//! only in the finished machine still names its line. This module does no I/O: callers provide a reader.

use crate::error::{FileLocation, MachineError};
use crate::machine::Machine;
use crate::measurement::{CollectiveKind, CollectiveMeasurement, MeasuredTime};
use crate::spec::{
    Device, DeviceOverride, EngineName, Level, Link, MachineSpec, Precision, SpecError, Tf32Use, Topology,
};
use crate::toml_table::{SourceText, TomlTable, TomlValue};
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use std::collections::BTreeMap;
use toml::de::DeTable;

/// Larger files are refused before parsing.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Longest chain of files that extend one another.
const MAX_EXTENDS: usize = 16;

/// Returns the bytes of a file or the reason for failure. Names come from `extends`, resolved against the folder of the
/// file that contains it.
pub type ReadFile<'a> = dyn FnMut(&str) -> Result<Vec<u8>, String> + 'a;

const TOP_KEYS: &[&str] =
    &["name", "description", "extends", "level", "device", "mixed", "measured", "slowdown"];
const LEVEL_KEYS: &[&str] = &[
    "name",
    "count",
    "bandwidth",
    "efficiency",
    "latency",
    "ports",
    "topology",
    "dims",
    "wrap",
    "fanout",
    "uplinks",
    "peer_to_peer",
];
const DEVICE_KEYS: &[&str] = &[
    "name",
    "memory",
    "reserve",
    "memory_limit",
    "memory_bandwidth",
    "launch_overhead",
    "host_launch",
    "cores",
    "sustained",
    "overlap",
    "tf32",
    "engine",
    "peak",
];
const MIXED_KEYS: &[&str] = &[
    "units",
    "name",
    "memory",
    "reserve",
    "memory_limit",
    "memory_bandwidth",
    "launch_overhead",
    "host_launch",
    "cores",
    "sustained",
    "overlap",
    "tf32",
    "engine",
    "peak",
];
const MEASURED_KEYS: &[&str] = &["level", "collective", "members", "bytes", "times"];

/// The tables of one file, or of several merged.
#[derive(Clone, Debug)]
struct Draft {
    top: TomlTable,
    levels: Vec<TomlTable>,
    device: TomlTable,
    mixed: Vec<TomlTable>,
    measured: Vec<TomlTable>,
    slowdown: TomlTable,
}

/// Reads a machine from the text of a file. `file` names it in messages, and relative `extends` are resolved against its
/// folder. `read` reads the files that it extends.
pub fn parse(file: &str, bytes: &[u8], read: &mut ReadFile<'_>) -> Result<Machine, MachineError> {
    let draft = load(file, bytes, read, &mut vec![file.to_string()])?;
    let spec = draft.spec()?;
    Machine::new(spec).map_err(|problem| draft.locate(file, problem))
}

fn load(
    file: &str,
    bytes: &[u8],
    read: &mut ReadFile<'_>,
    chain: &mut Vec<String>,
) -> Result<Draft, MachineError> {
    let draft = flatten(file, bytes)?;
    let Some(extends) = draft.top.entries.get("extends") else {
        return Ok(draft);
    };
    let location = extends.location.clone();
    let base = draft.top.text("extends")?;
    let target = if crate::builtin::is_file(base) { beside(file, base) } else { base.to_string() };
    if chain.contains(&target) {
        chain.push(target);
        return Err(MachineError::Cycle { location, chain: chain.join(" -> ") });
    }
    if chain.len() >= MAX_EXTENDS {
        return Err(MachineError::TooDeep { location, limit: MAX_EXTENDS });
    }
    chain.push(target.clone());
    let mut base = if crate::builtin::is_file(&target) {
        let bytes =
            read(&target).map_err(|reason| MachineError::Unreadable { file: target.clone(), reason })?;
        load(&target, &bytes, read, chain)?
    } else {
        let machine =
            crate::builtin::builtin(&target).map_err(|error| draft.top.bad("extends", error.to_string()))?;
        flatten(&target, machine.to_toml().as_bytes())?
    };
    base.override_with(draft)?;
    Ok(base)
}

/// Resolves a path in `file` against the folder of `file`.
fn beside(file: &str, path: &str) -> String {
    match file.rfind('/') {
        Some(at) if !path.starts_with('/') => format!("{}/{path}", &file[..at]),
        _ => path.to_string(),
    }
}

fn flatten(file: &str, bytes: &[u8]) -> Result<Draft, MachineError> {
    if bytes.len() > MAX_FILE_BYTES {
        return Err(MachineError::FileTooLarge {
            file: file.to_string(),
            bytes: bytes.len(),
            limit: MAX_FILE_BYTES,
        });
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let offset = error.valid_up_to();
        let line = 1 + bytes[..offset].iter().filter(|&&b| b == b'\n').count();
        MachineError::NotUtf8 { location: FileLocation { file: file.to_string(), line: line as u32 }, offset }
    })?;
    let source = SourceText { file, text };
    let document = DeTable::parse(text).map_err(|error| MachineError::Syntax {
        location: error
            .span()
            .map_or(FileLocation { file: file.to_string(), line: 0 }, |span| source.location(span.start)),
        message: error.message().to_string(),
    })?;
    let document = document.get_ref();
    let top_location = FileLocation { file: file.to_string(), line: 0 };
    let top = source.table(
        "",
        top_location.clone(),
        document,
        TOP_KEYS,
        &["level", "device", "mixed", "measured", "slowdown"],
    )?;
    let mut device =
        TomlTable { path: String::from("device"), location: top_location, entries: BTreeMap::new() };
    if let Some(value) = document.get("device") {
        device = source.subtable("device", value, DEVICE_KEYS)?;
    }
    let levels = source.tables("level", document, LEVEL_KEYS)?;
    let mixed = source.tables("mixed", document, MIXED_KEYS)?;
    let measured = source.tables("measured", document, MEASURED_KEYS)?;
    let kinds = CollectiveKind::ALL.map(CollectiveKind::name);
    let slowdown = match document.get("slowdown") {
        Some(value) => source.subtable("slowdown", value, &kinds)?,
        None => {
            let location = FileLocation { file: file.to_string(), line: 0 };
            TomlTable { path: String::from("slowdown"), location, entries: BTreeMap::new() }
        }
    };
    Ok(Draft { top, levels, device, mixed, measured, slowdown })
}

impl Draft {
    /// Overrides the extended file with another. Levels match by name; `mixed` and `measured` are replaced as a whole.
    fn override_with(&mut self, over: Draft) -> Result<(), MachineError> {
        self.top.location = over.top.location.clone();
        self.top.entries.extend(over.top.entries);
        self.device.entries.extend(over.device.entries);
        for level in over.levels {
            let name = level.text("name")?.to_string();
            let Some(base) = self.levels.iter_mut().find(|base| base.text("name") == Ok(&name)) else {
                let names: Vec<&str> = self.levels.iter().filter_map(|base| base.text("name").ok()).collect();
                let reason = format!(
                    "the machine that this file extends has no level `{name}`, only {}; to change the levels \
                     themselves, write a file that extends nothing",
                    names.join(", ")
                );
                return Err(level.bad("name", reason));
            };
            // A new topology removes the keys of the old one.
            if level.entries.contains_key("topology") {
                for key in ["dims", "wrap", "fanout", "uplinks", "peer_to_peer"] {
                    base.entries.remove(key);
                }
            }
            base.location = level.location;
            base.entries.extend(level.entries);
        }
        if !over.mixed.is_empty() {
            self.mixed = over.mixed;
        }
        if !over.measured.is_empty() {
            self.measured = over.measured;
        }
        self.slowdown.entries.extend(over.slowdown.entries);
        Ok(())
    }

    fn spec(&self) -> Result<MachineSpec, MachineError> {
        let name = self.top.text("name")?.to_string();
        let description = match self.top.entries.contains_key("description") {
            true => self.top.text("description")?.to_string(),
            false => String::new(),
        };
        if self.levels.is_empty() {
            return Err(self.top.missing("level", "write at least one [[level]]"));
        }
        let levels = self.levels.iter().map(level).collect::<Result<_, _>>()?;
        if self.device.entries.is_empty() {
            return Err(self.top.missing("device", "write a [device] table"));
        }
        let mixed = self.mixed.iter().map(|table| {
            // Keys that a mixed device leaves out come from [device].
            let mut whole = table.clone();
            for (key, entry) in &self.device.entries {
                whole.entries.entry(key.clone()).or_insert_with(|| entry.clone());
            }
            Ok(DeviceOverride { units: table.integers("units", "[2, 3]")?, device: device(&whole)? })
        });
        let mixed = mixed.collect::<Result<_, _>>()?;
        let measured = self.measured.iter().map(measured).collect::<Result<_, _>>()?;
        let slowed =
            CollectiveKind::ALL.into_iter().filter(|kind| self.slowdown.entries.contains_key(kind.name()));
        let slowdown = slowed
            .map(|kind| Ok((kind, self.slowdown.number(kind.name())?)))
            .collect::<Result<_, MachineError>>()?;
        Ok(MachineSpec {
            name,
            description,
            levels,
            device: device(&self.device)?,
            mixed,
            measured,
            slowdown,
        })
    }

    /// Finds the line of the key that is invalid in the finished machine. Where it is in a file that `file` extends, the
    /// message names both.
    fn locate(&self, file: &str, SpecError { key, reason }: SpecError) -> MachineError {
        let bad = |location: FileLocation, key: String, reason: String| match location.file == file {
            true => MachineError::BadValue { location, key, reason },
            false => {
                let reason = format!("{reason} (the value is from {location})");
                MachineError::BadValue {
                    location: FileLocation { file: file.to_string(), line: 0 },
                    key,
                    reason,
                }
            }
        };
        let tables = || {
            let single = [&self.top, &self.device, &self.slowdown].into_iter();
            single.chain(&self.levels).chain(&self.mixed).chain(&self.measured)
        };
        for table in tables() {
            for (name, entry) in &table.entries {
                if table.full(name) == key {
                    return bad(entry.location.clone(), key, reason);
                }
            }
        }
        let holder =
            tables().filter(|table| key.starts_with(&table.path)).max_by_key(|table| table.path.len());
        let location = holder.map_or_else(|| self.top.location.clone(), |table| table.location.clone());
        bad(location, key, reason)
    }
}

fn level(table: &TomlTable) -> Result<Level, MachineError> {
    let count = table.int("count", table.get("count", "write count = 8")?)?;
    let efficiency = match table.entries.get("efficiency").map(|entry| &entry.value) {
        None => 1.0,
        Some(TomlValue::Float(share)) => *share,
        Some(TomlValue::Int(share)) => *share as f64,
        Some(other) => return Err(table.wrong("efficiency", "a number", other)),
    };
    let ports = match table.entries.get("ports") {
        None => 1,
        Some(entry) => table.int("ports", &entry.value)?,
    };
    let (topology, needs): (Topology, &[&str]) = match table.text("topology")? {
        "switch" => (Topology::Switch, &[]),
        "memory" => (Topology::Memory, &[]),
        "fully-connected" => (Topology::FullyConnected, &[]),
        "ring" => (Topology::ring(count), &[]),
        "torus" => {
            let dims = table.integers("dims", "[16, 16]")?;
            let flag = |value: &TomlValue| match value {
                TomlValue::Bool(yes) => Ok(*yes),
                other => Err(table.wrong("wrap", "true or false", other)),
            };
            let wrap = match table.entries.get("wrap").map(|entry| &entry.value) {
                None => vec![true; dims.len()],
                Some(TomlValue::List(flags)) => flags.iter().map(flag).collect::<Result<_, _>>()?,
                Some(value) => vec![flag(value)?; dims.len()],
            };
            (Topology::Torus { dims, wrap }, &["dims", "wrap"])
        }
        "pcie-tree" => {
            let rate = |value: &TomlValue| match value {
                TomlValue::Text(text) => {
                    BytesPerSecond::parse(text).map_err(|reason| table.bad("uplinks", reason))
                }
                other => Err(table.wrong("uplinks", "strings such as \"12 GB/s\"", other)),
            };
            let peer_to_peer = match table.get("peer_to_peer", "write peer_to_peer = true or false")? {
                TomlValue::Bool(yes) => *yes,
                other => return Err(table.wrong("peer_to_peer", "true or false", other)),
            };
            let topology = Topology::PcieTree {
                fanout: table.integers("fanout", "[2, 2, 2]")?,
                uplinks: table.list("uplinks", "[\"10 GB/s\", \"12 GB/s\"]", rate)?,
                peer_to_peer,
            };
            (topology, &["fanout", "uplinks", "peer_to_peer"])
        }
        other => {
            let known = "switch, memory, fully-connected, ring, torus, pcie-tree";
            return Err(table.bad("topology", format!("`{}` is not one of {known}", other.escape_debug())));
        }
    };
    for key in ["dims", "wrap", "fanout", "uplinks", "peer_to_peer"] {
        if table.entries.contains_key(key) && !needs.contains(&key) {
            return Err(table.bad(key, format!("is not used by topology = \"{}\"", table.text("topology")?)));
        }
    }
    Ok(Level {
        name: table.text("name")?.to_string(),
        count,
        link: Link {
            bandwidth: table.quantity("bandwidth", "\"25 GB/s\"", BytesPerSecond::parse)?,
            efficiency,
            latency: table.quantity("latency", "\"1.5 us\"", Seconds::parse)?,
            ports,
            topology,
        },
    })
}

fn measured(table: &TomlTable) -> Result<CollectiveMeasurement, MachineError> {
    let name = table.text("collective")?;
    let Some(collective) = CollectiveKind::ALL.into_iter().find(|kind| kind.name() == name) else {
        let known = CollectiveKind::ALL.map(CollectiveKind::name).join(", ");
        return Err(table.bad("collective", format!("`{}` is not one of {known}", name.escape_debug())));
    };
    let bytes = table.quantities("bytes", "[\"64 KiB\", \"1 MiB\"]", Bytes::parse)?;
    let times = table.quantities("times", "[\"50 us\", \"1 ms\"]", Seconds::parse)?;
    if bytes.len() != times.len() {
        return Err(table.bad("times", format!("{} times for {} sizes", times.len(), bytes.len())));
    }
    Ok(CollectiveMeasurement {
        level: table.text("level")?.to_string(),
        collective,
        members: table.int("members", table.get("members", "write members = 8")?)?,
        points: bytes
            .into_iter()
            .zip(times)
            .map(|(bytes, seconds)| MeasuredTime { bytes, seconds })
            .collect(),
    })
}

fn device(table: &TomlTable) -> Result<Device, MachineError> {
    let mut peak = crate::spec::Peaks::default();
    for p in Precision::ALL {
        let key = format!("peak.{}", p.name());
        if table.entries.contains_key(&key) {
            peak.set(p, Some(table.quantity(&key, "\"10 TFLOP/s\"", FlopsPerSecond::parse)?));
        }
    }
    let cores = match table.entries.get("cores") {
        Some(entry) => table.int("cores", &entry.value)?,
        None => 1,
    };
    let flag = |key: &str| match table.entries.get(key).map(|entry| &entry.value) {
        None => Ok(true),
        Some(TomlValue::Bool(yes)) => Ok(*yes),
        Some(other) => Err(table.wrong(key, "true or false", other)),
    };
    let reserve = match table.entries.contains_key("reserve") {
        true => table.quantity("reserve", "\"2 GiB\"", Bytes::parse)?,
        false => Bytes::ZERO,
    };
    let tf32 = match table.entries.contains_key("tf32") {
        false => Tf32Use::default(),
        true => {
            let word = table.text("tf32")?;
            Tf32Use::ALL.into_iter().find(|used| used.name() == word).ok_or_else(|| {
                table.bad("tf32", format!("`{word}` is unknown; write \"off\", \"convolutions\" or \"all\""))
            })?
        }
    };
    let sustained = match table.entries.contains_key("sustained") {
        true => Some(table.quantity("sustained", "\"600 TFLOP/s\"", FlopsPerSecond::parse)?),
        false => None,
    };
    let host_launch = match table.entries.contains_key("host_launch") {
        true => Some(table.quantity("host_launch", "\"20 us\"", Seconds::parse)?),
        false => None,
    };
    let engine = match table.entries.contains_key("engine") {
        false => None,
        true => Some(EngineName::parse(table.text("engine")?).map_err(|reason| table.bad("engine", reason))?),
    };
    Ok(Device {
        name: table.text("name")?.to_string(),
        memory: table.quantity("memory", "\"16 GiB\"", Bytes::parse)?,
        memory_bandwidth: table.quantity("memory_bandwidth", "\"900 GB/s\"", BytesPerSecond::parse)?,
        reserve,
        memory_limit: flag("memory_limit")?,
        launch_overhead: table.quantity("launch_overhead", "\"5 us\"", Seconds::parse)?,
        host_launch,
        cores,
        sustained,
        overlap: flag("overlap")?,
        tf32,
        engine,
        peak,
    })
}
