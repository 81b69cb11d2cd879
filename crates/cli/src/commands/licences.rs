//! `licences`: the licences of this program and of all linked libraries.

use crate::Verdict;
use std::io::{self, Write};

/// Prints the licences of this program and of all linked libraries.
#[derive(clap::Args)]
pub struct Args {}

const TEXTS: [&str; 3] = [
    include_str!("../../LICENSE-MIT"),
    include_str!("../../LICENSE-APACHE"),
    include_str!("../../THIRD-PARTY.txt"),
];

/// Runs the command.
pub fn run(_: &Args) -> anyhow::Result<Verdict> {
    let mut out = io::stdout().lock();
    out.write_all(TEXTS.join("\n").as_bytes())?;
    Ok(Verdict::Done)
}
