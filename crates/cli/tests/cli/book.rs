//! The book's sessions are run: every `console` block, in the order of its chapter, in one folder. What it shows is what the
//! program prints.
//!
//! A line that begins with `$ ` is a command; the lines after it are its output. In the output `...` stands for any number of
//! lines, and `…` for any text within a line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command and what it is shown to print.
#[derive(Debug, PartialEq, Eq)]
struct Session {
    command: String,
    shown: Vec<String>,
}

/// The sessions of a chapter.
fn sessions(text: &str) -> Vec<Session> {
    let mut found: Vec<Session> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match (inside, line) {
            (false, "```console") => inside = true,
            (true, "```") => inside = false,
            (true, line) => match line.strip_prefix("$ ") {
                Some(command) => found.push(Session { command: command.into(), shown: Vec::new() }),
                None => found.last_mut().expect("output after a command").shown.push(line.into()),
            },
            _ => {}
        }
    }
    found
}

/// Whether a line is as shown.
fn line_matches(shown: &str, line: &str) -> bool {
    let mut parts = shown.split('…');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Whether lines are as shown, from some line on.
fn matches(shown: &[String], lines: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first.trim() == "..." => {
            (0..=lines.len()).any(|skipped| matches(rest, &lines[skipped..]))
        }
        Some((first, rest)) => {
            lines.first().is_some_and(|line| line_matches(first, line.trim_end()))
                && matches(rest, &lines[1..])
        }
    }
}

#[test]
fn shown_output_may_leave_out_lines_and_words() {
    let shown = ["a … c", "...", "d"].map(String::from);
    assert!(matches(&shown, &["a b c", "x", "y", "d"]) && matches(&shown, &["a  c", "d"]));
    assert!(!matches(&shown, &["a b c", "x"]) && !matches(&shown, &["a b", "d"]));
    let text = "```console\n$ one\nout\n$ two\n```\n\n    $ not this\n";
    let command = |command: &str, shown: &[&str]| Session {
        command: command.into(),
        shown: shown.iter().map(|line| (*line).to_owned()).collect(),
    };
    assert_eq!(sessions(text), [command("one", &["out"]), command("two", &[])]);
}

#[test]
fn every_session_of_the_book_prints_what_it_shows() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut chapters: Vec<PathBuf> = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path()).collect();
    chapters.retain(|path| path.extension().is_some_and(|own| own == "md"));
    chapters.sort();
    let program = Path::new(env!("CARGO_BIN_EXE_shardwright"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut run = 0;
    for chapter in chapters {
        let folder = tempfile::tempdir().unwrap();
        for session in sessions(&fs::read_to_string(&chapter).unwrap()) {
            let output = Command::new("bash")
                .args(["-c", &session.command])
                .current_dir(folder.path())
                .env("PATH", &path)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = text.lines().collect();
            let shown = session.shown.join("\n");
            assert!(
                output.status.success() && (session.shown.is_empty() || matches(&session.shown, &lines)),
                "{}: `{}` prints\n{text}\nand is shown to print\n{shown}",
                chapter.display(),
                session.command
            );
            run += 1;
        }
    }
    assert!(run > 10, "only {run} commands were run");
}
