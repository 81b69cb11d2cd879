//! `solvers`: the values of `--solver`.

use crate::Verdict;
use serde::Serialize;
use shardwright_request::hanging;
use shardwright_search::registry::SOLVERS;
use shardwright_strategies::STRATEGIES;
use std::io::{self, Write};

/// Lists the solvers and strategies.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON list on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    about: &'static str,
    /// Whether it searches within a memory limit. The others only check their result.
    respects_memory: bool,
    /// The commands that accept it.
    commands: Vec<&'static str>,
}

/// Solvers of networks first, then the strategies without a solver of the same name.
fn rows() -> Vec<Row> {
    let planned = |name: &str| STRATEGIES.iter().any(|strategy| strategy.name() == name);
    let solvers = SOLVERS.iter().map(|entry| Row {
        name: entry.name,
        about: entry.about,
        respects_memory: entry.respects_memory,
        commands: if planned(entry.name) { vec!["plan", "solve"] } else { vec!["solve"] },
    });
    let others =
        STRATEGIES.iter().filter(|strategy| SOLVERS.iter().all(|entry| entry.name != strategy.name()));
    let strategies = others.map(|strategy| Row {
        name: strategy.name(),
        about: strategy.about(),
        respects_memory: strategy.searches_within_memory(),
        commands: vec!["plan"],
    });
    solvers.chain(strategies).collect()
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let rows = rows();
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &rows)?;
        writeln!(out)?;
    } else {
        for row in rows {
            let start = format!("{:<12} {:<12} ", row.name, row.commands.join(", "));
            writeln!(out, "{}", hanging(&start, row.about))?;
        }
    }
    Ok(Verdict::Done)
}
