//! `machines`: the built-in machines; `machines NAME`: one machine's file.

use crate::Verdict;
use anyhow::Context;
use serde_json::json;
use shardwright_machine as machine;
use shardwright_request::{hanging, open_machine as open};
use std::fmt::Write as _;
use std::io::Write as _;

/// Lists the built-in machines, or prints the file of one machine.
#[derive(clap::Args)]
pub struct Args {
    /// The machine: a built-in name, `flat:N`, `cpu:N`, or a .toml file; `NAME:K` for its first K devices
    name: Option<String>,
    /// One JSON value on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let text = match (&args.name, args.json) {
        (Some(name), false) => file(name)?,
        (Some(name), true) => format!("{:#}\n", describe(&open(name)?)?),
        (None, true) => {
            let all: Vec<_> = listed().map(|m| describe(&m?)).collect::<Result<_, anyhow::Error>>()?;
            format!("{:#}\n", serde_json::Value::Array(all))
        }
        (None, false) => table()?,
    };
    // A closed pipe (`| head`) is no error.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(Verdict::Done),
    }
}

/// The machines to list: all of fixed size, and one of each sized kind as an example.
fn listed() -> impl Iterator<Item = anyhow::Result<machine::Machine>> {
    machine::builtin_names().chain(["flat:8", "cpu:2"]).map(|name| Ok(machine::builtin(name)?))
}

fn levels(m: &machine::Machine) -> String {
    m.levels().iter().map(|l| format!("{} {}", l.count, l.name)).collect::<Vec<_>>().join(" x ")
}

fn table() -> anyhow::Result<String> {
    let mut out = String::new();
    for m in listed() {
        let m = m?;
        let start = format!("{:<12} {:>4} devices  {:<18} ", m.name(), m.devices(), levels(&m));
        writeln!(out, "{}", hanging(&start, m.description()))?;
    }
    let note = "flat:N and cpu:N take any N, and 8xh100 any number of GPUs; NAME:K is the first K devices of NAME; \
                a .toml file works wherever a name does.";
    writeln!(out, "\n{}", hanging("", note))?;
    Ok(out)
}

/// The file of a machine: built-in ones with their comments, others in canonical form.
fn file(name: &str) -> anyhow::Result<String> {
    let m = open(name)?;
    Ok(machine::builtin_file(name).unwrap_or_else(|| m.to_toml()))
}

fn describe(m: &machine::Machine) -> anyhow::Result<serde_json::Value> {
    let axes: Vec<_> =
        m.mesh().axes().iter().map(|axis| json!({"name": axis.name, "size": axis.size})).collect();
    Ok(json!({
        "name": m.name(),
        "description": m.description(),
        "devices": m.devices(),
        "axes": axes,
        "fingerprint": m.fingerprint().to_string(),
        "spec": serde_json::to_value(m.spec())?,
    }))
}
