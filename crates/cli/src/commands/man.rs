//! `man`: the manual pages, from the same texts as `--help`.

use crate::files::write_atomically;
use crate::{Cli, Verdict};
use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;
use std::io::{self, Write};
use std::path::PathBuf;

/// Prints a manual page, or writes all of them.
#[derive(clap::Args)]
pub struct Args {
    /// The command, such as `plan` or `machine probe`; without one, the program itself
    command: Vec<String>,
    /// Write the pages of the program and of all commands into this folder
    #[arg(short, long, conflicts_with = "command")]
    output: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let mut program = Cli::command().disable_help_subcommand(true);
    // Lets every command know what it is called in full: `shardwright machine probe`.
    program.build();
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        return write_pages(&program, folder).map(|()| Verdict::Done);
    }
    let mut command = &program;
    for name in &args.command {
        command = command.find_subcommand(name).with_context(|| {
            format!("{} has no command `{name}`; see `{} --help`", path_of(command), path_of(command))
        })?;
    }
    io::stdout().lock().write_all(&page(command)?)?;
    Ok(Verdict::Done)
}

/// Writes the page of a command, and those of the commands below it.
fn write_pages(command: &clap::Command, folder: &std::path::Path) -> anyhow::Result<()> {
    let text = page(command)?;
    let name = format!("{}.1", path_of(command).replace(' ', "-"));
    write_atomically(&folder.join(name), |out| out.write_all(&text))?;
    command.get_subcommands().try_for_each(|below| write_pages(below, folder))
}

/// A command's manual page, as `man` reads it.
fn page(command: &clap::Command) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let title = path_of(command).replace(' ', "-");
    Man::new(command.clone()).title(title).render(&mut text)?;
    Ok(text)
}

/// A command with all that stands before it, such as `shardwright machine probe`.
fn path_of(command: &clap::Command) -> &str {
    command.get_bin_name().unwrap_or(command.get_name())
}
