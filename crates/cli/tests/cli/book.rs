//! The sessions of the book and of the README are run: every `console` block, in the order of its chapter, in one folder. What it shows is what the
//! program prints.
//!
//! A line that begins with `$ ` is a command; the lines after it are its output. In the output `...` stands for any number of
//! lines, and `…` for any text within a line. Words are exact. Numbers are within a tenth: predictions move a little whenever costs
//! become more exact, and the book must not be far from them.

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

/// Whether a line is as shown, word by word; how many blanks are between words does not matter, since columns align them.
fn line_matches(shown: &str, line: &str) -> bool {
    let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<String>>();
    words_match(&words(shown), &words(line))
}

fn words_match(shown: &[String], line: &[String]) -> bool {
    match (shown.split_first(), line.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "…" => {
            (0..=line.len()).any(|skipped| words_match(rest, &line[skipped..]))
        }
        (Some((a, rest)), Some((b, others))) => word_matches(a, b) && words_match(rest, others),
        _ => false,
    }
}

fn word_matches(shown: &str, word: &str) -> bool {
    if let Some((before, after)) = shown.split_once('…') {
        return word.len() >= before.len() + after.len() && word.starts_with(before) && word.ends_with(after);
    }
    let near = |a: f64, b: f64| (a - b).abs() <= 0.1 * a.abs().max(b.abs());
    let (shown, word) = (pieces(shown), pieces(word));
    shown.len() == word.len()
        && shown.iter().zip(&word).all(|pair| match pair {
            ((a, Some(x)), (b, Some(y))) => a == b || near(*x, *y),
            ((a, None), (b, None)) => a == b,
            _ => false,
        })
}

/// A word as numbers and what is between them: `11,450`, `1.10x`, `n16`.
fn pieces(word: &str) -> Vec<(&str, Option<f64>)> {
    let mut found = Vec::new();
    let mut rest = word;
    while !rest.is_empty() {
        let digits = rest.starts_with(|c: char| c.is_ascii_digit());
        let other = |c: char| match digits {
            true => !(c.is_ascii_digit() || c == ',' || c == '.'),
            false => c.is_ascii_digit(),
        };
        let piece = &rest[..rest.find(other).unwrap_or(rest.len())];
        let piece = if digits { piece.trim_end_matches([',', '.']) } else { piece };
        found.push((piece, digits.then(|| piece.replace(',', "").parse().unwrap_or(f64::NAN))));
        rest = &rest[piece.len()..];
    }
    found
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
    assert!(line_matches("step  11,561 tokens/s, 1.11x", "step   11,450 tokens/s, 1.10x"));
    assert!(line_matches("on flat:4: fsdp: … step", "on flat:4: fsdp: data over 4 GPUs, a step"));
    assert!(!line_matches("step 11,561 tokens/s", "step 8,000 tokens/s"));
    assert!(!line_matches("over 8 nodes", "over 8 GPUs") && !line_matches("n16", "n8"));
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
    chapters.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md"));
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
