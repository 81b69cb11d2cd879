//! The book's sessions are run: every `console` block, in the order of its chapter, in one folder. What it shows is what the
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

/// A part of a line.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Text(String),
    /// `…`
    Anything,
}

/// A line as numbers and text; blanks before and after numbers do not count, since columns align them.
fn tokens(line: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let is_part = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
        let (token, length) = if first == '…' {
            (Some(Token::Anything), first.len_utf8())
        } else if first.is_ascii_digit() {
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            let digits = rest[..end].trim_end_matches([',', '.']);
            (digits.replace(',', "").parse().ok().map(Token::Number), digits.len())
        } else {
            let end = rest.find(|c: char| c.is_ascii_digit() || c == '…').unwrap_or(rest.len());
            let words = rest[..end].split_whitespace().collect::<Vec<_>>().join(" ");
            ((!words.is_empty()).then_some(Token::Text(words)), end)
        };
        found.extend(token);
        rest = &rest[length..];
    }
    found
}

/// Whether a line is as shown.
fn line_matches(shown: &str, line: &str) -> bool {
    tokens_match(&tokens(shown), &tokens(line))
}

fn tokens_match(shown: &[Token], line: &[Token]) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 0.1 * a.abs().max(b.abs());
    match (shown.split_first(), line.split_first()) {
        (None, None) => true,
        (Some((Token::Anything, rest)), _) => {
            (0..=line.len()).any(|skipped| begins_within(rest, &line[skipped..]))
        }
        (Some((Token::Number(a), rest)), Some((Token::Number(b), others))) => {
            near(*a, *b) && tokens_match(rest, others)
        }
        (Some((Token::Text(a), rest)), Some((Token::Text(b), others))) => {
            // `…` may swallow the end of a text.
            let open = rest.first() == Some(&Token::Anything) && b.starts_with(a.as_str());
            (a == b || open) && tokens_match(rest, others)
        }
        _ => false,
    }
}

/// The same after `…`, which may have swallowed the beginning of a text.
fn begins_within(shown: &[Token], line: &[Token]) -> bool {
    match (shown.split_first(), line.split_first()) {
        (Some((Token::Text(a), rest)), Some((Token::Text(b), others))) => {
            b.ends_with(a.as_str()) && tokens_match(rest, others)
        }
        _ => tokens_match(shown, line),
    }
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
