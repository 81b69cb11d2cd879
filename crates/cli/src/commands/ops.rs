//! `ops`: the op kinds of graphs.

use crate::Verdict;
use serde::Serialize;
use shardwright_graph::Op;
use shardwright_request::hanging;
use std::io::{self, Write};

/// Lists the op kinds of graphs.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON list on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    kind: &'static str,
    about: &'static str,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let rows: Vec<Row> =
        Op::KINDS.iter().zip(Op::ABOUT).map(|(kind, about)| Row { kind, about: about.trim() }).collect();
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &rows)?;
        writeln!(out)?;
    } else {
        for row in rows {
            writeln!(out, "{}", hanging(&format!("{:<20} ", row.kind), row.about))?;
        }
    }
    Ok(Verdict::Done)
}
