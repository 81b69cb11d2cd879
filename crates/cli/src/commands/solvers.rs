//! `solvers`: what can be chosen with `--solver`.

use crate::Verdict;
use serde::Serialize;
use shardwright_search::registry::SOLVERS;
use std::io::{self, Write};

/// Lists the built-in solvers.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON list on standard output.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    about: &'static str,
    respects_memory: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let rows: Vec<Row> = SOLVERS
        .iter()
        .map(|entry| Row { name: entry.name, about: entry.about, respects_memory: entry.respects_memory })
        .collect();
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &rows)?;
        writeln!(out)?;
    } else {
        for row in rows {
            writeln!(out, "{:<8} {}", row.name, row.about)?;
        }
    }
    Ok(Verdict::Done)
}
