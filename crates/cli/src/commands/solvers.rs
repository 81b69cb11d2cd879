//! `solvers`: what can be chosen with `--solver`.

use crate::Verdict;
use serde::Serialize;
use shardwright_search::registry::SOLVERS;
use shardwright_sim::{MCMC, PLACE, strategies};
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
    /// Whether its search keeps a memory limit; others only report whether their result does.
    respects_memory: bool,
    /// The commands that know it.
    commands: Vec<&'static str>,
}

/// Solvers of networks first, then the strategies of planning that have no solver of their name.
fn rows() -> Vec<Row> {
    let planned = |name: &str| strategies().any(|strategy| strategy.name == name);
    let solvers = SOLVERS.iter().map(|entry| Row {
        name: entry.name,
        about: entry.about,
        respects_memory: entry.respects_memory,
        commands: if planned(entry.name) { vec!["plan", "solve"] } else { vec!["solve"] },
    });
    let others = strategies().filter(|strategy| SOLVERS.iter().all(|entry| entry.name != strategy.name));
    let respects_memory =
        |solver| SOLVERS.iter().any(|entry| Some(entry.name) == solver && entry.respects_memory);
    let strategies = others.map(|strategy| Row {
        name: strategy.name,
        about: strategy.about,
        respects_memory: respects_memory(strategy.solver) || [MCMC.name, PLACE.name].contains(&strategy.name),
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
            writeln!(out, "{:<12} {:<12} {}", row.name, row.commands.join(", "), row.about)?;
        }
    }
    Ok(Verdict::Done)
}
