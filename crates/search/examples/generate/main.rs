//! Writes a large cost network of the contest's kind, to try solvers at scale.
//!
//! ```text
//! cargo run --release -p shardwright-search --example generate -- --layers 530 > large.json
//! ```
//!
//! Options: `--layers N` (about 120 nodes each), `--mesh AxB`, `--followers N`, `--memory PERCENT` of the
//! least peak (0: no limit).

mod step;

use shardwright_search::format::write_iopddl;
use std::error::Error;
use std::io::{self, BufWriter};

fn main() -> Result<(), Box<dyn Error>> {
    let mut settings = step::Settings { layers: 12, mesh: [4, 8], followers: 2, memory_percent: Some(110) };
    let mut args = std::env::args().skip(1);
    while let Some(option) = args.next() {
        let value = args.next().ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--layers" => settings.layers = value.parse()?,
            "--followers" => settings.followers = value.parse()?,
            "--memory" => settings.memory_percent = Some(value.parse()?).filter(|&percent| percent > 0),
            "--mesh" => {
                let (a, b) = value.split_once('x').ok_or("--mesh takes AxB, as in 4x8")?;
                settings.mesh = [a.parse()?, b.parse()?];
            }
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    let network = step::network(&settings)?;
    eprintln!(
        "{} nodes, {} edges, {} different tables",
        network.variables(),
        network.edges().len(),
        network.tables()
    );
    write_iopddl(
        &network,
        &format!("transformer-{}-layers", settings.layers),
        BufWriter::new(io::stdout().lock()),
    )?;
    Ok(())
}
