//! Writes a machine as TOML: the canonical text, which fingerprints are computed from.

use crate::spec::{Device, MachineSpec, Precision, Tf32Use, Topology};
use std::fmt::Write;

/// A TOML basic string. [`MachineSpec::check`] restricts names; descriptions may contain any character.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The canonical file of a machine. Writing to a string cannot fail, hence the ignored results.
pub(crate) fn to_toml(spec: &MachineSpec) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "name = {}", quoted(&spec.name));
    if !spec.description.is_empty() {
        let _ = writeln!(out, "description = {}", quoted(&spec.description));
    }
    for level in &spec.levels {
        let link = &level.link;
        let _ = writeln!(out, "\n[[level]]");
        let _ = writeln!(out, "name = {}", quoted(&level.name));
        let _ = writeln!(out, "count = {}", level.count);
        let _ = writeln!(out, "bandwidth = \"{}\"", link.bandwidth);
        if link.efficiency != 1.0 {
            let _ = writeln!(out, "efficiency = {:?}", link.efficiency);
        }
        let _ = writeln!(out, "latency = \"{}\"", link.latency);
        if link.ports != 1 {
            let _ = writeln!(out, "ports = {}", link.ports);
        }
        match &link.topology {
            Topology::Switch => out.push_str("topology = \"switch\"\n"),
            Topology::Memory => out.push_str("topology = \"memory\"\n"),
            Topology::FullyConnected => out.push_str("topology = \"fully-connected\"\n"),
            Topology::Torus { dims, wrap } if dims.len() == 1 && wrap[0] => {
                out.push_str("topology = \"ring\"\n");
            }
            Topology::Torus { dims, wrap } => {
                out.push_str("topology = \"torus\"\n");
                let _ = writeln!(out, "dims = {dims:?}");
                let _ = writeln!(out, "wrap = {wrap:?}");
            }
            Topology::PcieTree { fanout, uplinks, peer_to_peer } => {
                out.push_str("topology = \"pcie-tree\"\n");
                let _ = writeln!(out, "fanout = {fanout:?}");
                let uplinks: Vec<String> = uplinks.iter().map(|rate| format!("\"{rate}\"")).collect();
                let _ = writeln!(out, "uplinks = [{}]", uplinks.join(", "));
                let _ = writeln!(out, "peer_to_peer = {peer_to_peer}");
            }
        }
    }
    out.push_str("\n[device]\n");
    write_device(&mut out, &spec.device);
    for mixed in &spec.mixed {
        let _ = writeln!(out, "\n[[mixed]]\nunits = {:?}", mixed.units);
        write_device(&mut out, &mixed.device);
    }
    for measured in &spec.measured {
        let _ = writeln!(out, "\n[[measured]]\nlevel = {}", quoted(&measured.level));
        let _ = writeln!(out, "collective = {}", quoted(measured.collective.name()));
        let _ = writeln!(out, "members = {}", measured.members);
        let bytes: Vec<String> = measured.points.iter().map(|p| format!("\"{}\"", p.bytes)).collect();
        let times: Vec<String> = measured.points.iter().map(|p| format!("\"{}\"", p.seconds)).collect();
        let _ = writeln!(out, "bytes = [{}]\ntimes = [{}]", bytes.join(", "), times.join(", "));
    }
    if !spec.slowdown.is_empty() {
        out.push_str("\n[slowdown]\n");
    }
    for (kind, factor) in &spec.slowdown {
        let _ = writeln!(out, "{} = {factor:?}", kind.name());
    }
    out
}

fn write_device(out: &mut String, device: &Device) {
    let _ = writeln!(out, "name = {}", quoted(&device.name));
    let _ = writeln!(out, "memory = \"{}\"", device.memory);
    if device.reserve.0 != 0 {
        let _ = writeln!(out, "reserve = \"{}\"", device.reserve);
    }
    if !device.memory_limit {
        let _ = writeln!(out, "memory_limit = false");
    }
    let _ = writeln!(out, "memory_bandwidth = \"{}\"", device.memory_bandwidth);
    let _ = writeln!(out, "launch_overhead = \"{}\"", device.launch_overhead);
    let _ = writeln!(out, "cores = {}", device.cores);
    if let Some(seconds) = device.host_launch {
        let _ = writeln!(out, "host_launch = \"{seconds}\"");
    }
    if let Some(rate) = device.sustained {
        let _ = writeln!(out, "sustained = \"{rate}\"");
    }
    if !device.overlap {
        let _ = writeln!(out, "overlap = false");
    }
    if device.tf32 != Tf32Use::default() {
        let _ = writeln!(out, "tf32 = {}", quoted(device.tf32.name()));
    }
    if let Some(engine) = device.engine {
        let _ = writeln!(out, "engine = {}", quoted(engine.name()));
    }
    for p in Precision::ALL {
        if let Some(rate) = device.peak.get(p) {
            let _ = writeln!(out, "peak.{} = \"{rate}\"", p.name());
        }
    }
}
