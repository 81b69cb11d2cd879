//! The `shardwright` command: a thin shell over the library crates.
//!
//! One file per subcommand in `commands/`; this file only says which exist and turns their result into an
//! exit status. The program is `main.rs`; the Python package calls [`run_as`]. The statuses: 0 done, 1 the request cannot be met, 2 bad usage or bad input, 3 no plan within the memory limit was found, and
//! none was proved impossible.

mod commands;
#[cfg(test)]
mod documents;
mod files;
mod interrupt;
mod learn;
mod lowered_plan;
mod processes;
mod progress;
mod record;
mod trace;
mod weights;

use clap::{Parser, Subcommand};
use shardwright_request::{WIDTH, wrapped};
use std::ffi::OsString;
use std::io::{IsTerminal as _, Write};
use std::sync::OnceLock;

/// Finds the fastest way to split a training step over devices, proves it, shows why, and runs it.
#[derive(Parser)]
#[command(
    version,
    about,
    max_term_width = WIDTH,
    after_help = "Exit status: 0 done; 1 the request cannot be met; 2 bad usage or bad input; 3 no plan that fits the memory was \
                  found, and none was proved impossible."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Solve(commands::solve::Args),
    Stages(commands::stages::Args),
    Convert(commands::convert::Args),
    Solvers(commands::solvers::Args),
    Machines(commands::machines::Args),
    Machine(commands::machine::Args),
    Models(commands::models::Args),
    Ops(commands::ops::Args),
    Plan(commands::plan::Args),
    Compare(commands::compare::Args),
    Network(commands::network::Args),
    Run(commands::run::Args),
    Simulate(commands::simulate::Args),
    Explain(commands::explain::Args),
    Diff(commands::diff::Args),
    Report(commands::report::Args),
    Profile(commands::profile::Args),
    Export(commands::export::Args),
    Completions(commands::completions::Args),
    Man(commands::man::Args),
    Licences(commands::licences::Args),
}

/// The result of a command that ran to its end.
pub(crate) enum Verdict {
    /// The request was met.
    Done,
    /// The input is valid, but the request has no answer: no plan fits the memory, for example.
    CannotBeMet,
    /// The search ended before it found an answer, or proved that there is none.
    NotFound,
}

/// The words that start this program again, where its own file does not.
static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Runs the command line, the program's name first, and returns the exit status.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and versions are errors to clap. A closed output is no reason to fail.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    status(execute(cli))
}

/// Runs the command line as another program's part: `program` starts it again, as in `python -m shardwright`.
pub fn run_as(program: Vec<OsString>, args: Vec<OsString>) -> u8 {
    let _ = PROGRAM.set(program);
    run([OsString::from("shardwright")].into_iter().chain(args))
}

fn execute(cli: Cli) -> anyhow::Result<Verdict> {
    match cli.command {
        None => commands::plan::demonstrate(),
        Some(Command::Solve(args)) => commands::solve::run(&args),
        Some(Command::Stages(args)) => commands::stages::run(&args),
        Some(Command::Convert(args)) => commands::convert::run(&args),
        Some(Command::Solvers(args)) => commands::solvers::run(&args),
        Some(Command::Machines(args)) => commands::machines::run(&args),
        Some(Command::Machine(args)) => commands::machine::run(&args),
        Some(Command::Models(args)) => commands::models::run(&args),
        Some(Command::Ops(args)) => commands::ops::run(&args),
        Some(Command::Plan(args)) => commands::plan::run(&args),
        Some(Command::Compare(args)) => commands::compare::run(&args),
        Some(Command::Network(args)) => commands::network::run(&args),
        Some(Command::Run(args)) => commands::run::run(&args),
        Some(Command::Simulate(args)) => commands::simulate::run(&args),
        Some(Command::Explain(args)) => commands::explain::run(&args),
        Some(Command::Diff(args)) => commands::diff::run(&args),
        Some(Command::Report(args)) => commands::report::run(&args),
        Some(Command::Profile(args)) => commands::profile::run(&args),
        Some(Command::Export(args)) => commands::export::run(&args),
        Some(Command::Completions(args)) => commands::completions::run(&args),
        Some(Command::Man(args)) => commands::man::run(&args),
        Some(Command::Licences(args)) => commands::licences::run(&args),
    }
}

/// The exit status of a command's result.
fn status(verdict: anyhow::Result<Verdict>) -> u8 {
    match verdict {
        Ok(Verdict::Done) => 0,
        Ok(Verdict::CannotBeMet) => 1,
        Ok(Verdict::NotFound) => 3,
        // The reader of the output has closed it (`| head`): that is no error.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            complain(&format_args!("error: {error:#}"));
            2
        }
    }
}

/// Prints a message on standard error, escaped and cut; on a terminal, in lines that break at words. A closed standard error (`2>&1 | head`) is ignored: the exit status
/// remains.
pub(crate) fn complain(text: &dyn std::fmt::Display) {
    let mut message = shardwright_request::printed(&text.to_string());
    if std::io::stderr().is_terminal() {
        let lines = message.lines().map(|line| wrapped(line, WIDTH).join("\n"));
        message = lines.collect::<Vec<_>>().join("\n");
    }
    let _ = writeln!(std::io::stderr(), "{message}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}
