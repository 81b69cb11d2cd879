//! Tests of words: retired ones are gone from documents, help texts and doc comments, and the glossary defines every term.

use super::{markdown_in, root};
use crate::Cli;
use clap::CommandFactory as _;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use shardwright_strategies::STRATEGIES;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Retired words and their replacements. Case and the characters between words do not matter. A capitalised entry is the name of a
/// type: it counts only in code between backticks, and its case matters.
const RETIRED: [(&str, &str); 30] = [
    ("relayout", "reshard"),
    ("relayouts", "reshards"),
    ("re layout", "reshard"),
    ("re layouts", "reshards"),
    ("glue", "merge"),
    ("glued", "merged"),
    ("gluing", "merging"),
    ("grain", "search mesh"),
    ("grains", "search meshes"),
    ("leanest", "min memory"),
    ("wish", "constraint"),
    ("wishes", "constraints"),
    ("wished", "constrained"),
    ("another home", "migration"),
    ("new home", "migration"),
    ("way home", "to its stored layout"),
    ("homes", "stored layouts"),
    ("told apart", "device classes, op classes"),
    ("nobody s", "none, no op, no reader"),
    ("who looks", "the reader"),
    ("what it comes to", "the result"),
    ("comes to lie", "is stored"),
    ("window fetch", "halo exchange"),
    ("window fetches", "halo exchanges"),
    ("Ask", "Request"),
    ("Bell", "Notifier"),
    ("Demands", "Constraints"),
    ("Desk", "device queue"),
    ("Homes", "stored layouts"),
    ("Maker", "Pricer; of a tensor: producer"),
];

/// Bold words of the book that are no terms: emphasis, and names that their own paragraph explains.
const EMPHASIS: [&str; 13] = [
    "alone",
    "between steps",
    "bisection",
    "chunks",
    "even",
    "faults",
    "heft",
    "linear",
    "round-robin",
    "single",
    "undone",
    "uneven",
    "weights and optimizer state",
];

/// Terms that help texts use.
const HELP_TERMS: [&str; 28] = [
    "all-reduce",
    "batch",
    "chain",
    "config",
    "cost network",
    "delta simulation",
    "layer",
    "layout",
    "machine",
    "memory limit",
    "migration",
    "objective",
    "op",
    "overlap",
    "pin",
    "plan",
    "proposal",
    "recipe",
    "reoptimised",
    "solver",
    "speed trace",
    "strategy",
    "timeline",
    "training step",
    "transfer",
    "variable",
    "work stealing",
    "workload",
];

/// A word of a text.
struct Word {
    line: usize,
    text: String,
    in_code: bool,
}

/// The words of numbered lines, letters and digits only.
fn words<'t>(lines: impl Iterator<Item = (usize, &'t str)>) -> Vec<Word> {
    let (mut found, mut in_code) = (Vec::new(), false);
    for (line, text) in lines {
        let mut word = String::new();
        for c in text.chars().chain([' ']) {
            if c.is_alphanumeric() {
                word.push(c);
                continue;
            }
            if !word.is_empty() {
                found.push(Word { line, text: std::mem::take(&mut word), in_code });
            }
            in_code ^= c == '`';
        }
    }
    found
}

/// The retired words in some lines: line, word and replacement.
fn retired<'t>(lines: impl Iterator<Item = (usize, &'t str)>) -> Vec<(usize, &'static str, &'static str)> {
    let text = words(lines);
    let mut found = Vec::new();
    for (term, instead) in RETIRED {
        let parts: Vec<&str> = term.split(' ').collect();
        let is_type = term.starts_with(char::is_uppercase);
        let equal = |(word, part): (&Word, &&str)| match is_type {
            true => word.in_code && word.text == *part,
            false => word.text.eq_ignore_ascii_case(part),
        };
        for at in text.windows(parts.len()).filter(|at| at.iter().zip(&parts).all(equal)) {
            found.push((at[0].line, term, instead));
        }
    }
    found
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines())
}

/// The doc comments of a source.
fn doc_comments(text: &str) -> impl Iterator<Item = (usize, &str)> {
    numbered(text).filter_map(|(line, text)| {
        let text = text.trim_start();
        Some((line, text.strip_prefix("///").or_else(|| text.strip_prefix("//!"))?))
    })
}

/// The sources below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
        .into_iter()
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false if path.extension().is_some_and(|extension| extension == "rs") => vec![path],
            false => Vec::new(),
        })
        .collect()
}

/// The help of a command and of those below it, with their names.
fn help(command: &mut clap::Command) -> Vec<(String, String)> {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_string();
    let text = command.render_long_help().to_string();
    command.get_subcommands_mut().flat_map(help).chain([(name, text)]).collect()
}

fn all_help() -> Vec<(String, String)> {
    let mut program = Cli::command();
    program.build();
    help(&mut program)
}

/// The terms of the glossary, as its lines have them.
fn glossary() -> Vec<Vec<String>> {
    let text = fs::read_to_string(root().join("docs/glossary.md")).unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix("- "))
        .map(|line| {
            let (terms, definition) = line.split_once(": ").expect(line);
            assert!(definition.ends_with('.'), "a definition is a sentence: {line}");
            terms.split(", ").map(|term| term.trim_matches('*').to_string()).collect()
        })
        .collect()
}

fn defined() -> BTreeSet<String> {
    glossary().into_iter().flatten().map(|term| term.to_lowercase()).collect()
}

#[test]
fn retired_words_are_recognised() {
    let found = |text: &str| retired(numbered(text)).iter().map(|(_, term, _)| *term).collect::<Vec<_>>();
    assert_eq!(found("a Re-layout, or\nglued `axes`"), ["re layout", "glued"]);
    assert_eq!(found("it is told\napart by nobody's `Desk`"), ["told apart", "nobody s", "Desk"]);
    assert_eq!(found("Ask for a layout in the home folder; fine-grained; `ask`"), [""; 0]);
    let comments = "//! A wish.\nlet wish = 1; // wish\n/// As `Bell` rings.\n";
    let lines: Vec<usize> = retired(doc_comments(comments)).iter().map(|found| found.0).collect();
    assert_eq!(lines, [1, 3]);
}

#[test]
fn retired_words_are_gone() {
    let root = root();
    let mut wrong = Vec::new();
    let mut note = |name: &str, found: Vec<(usize, &str, &str)>| {
        wrong.extend(
            found.iter().map(|(line, term, instead)| format!("{name}:{line}: `{term}`, say {instead}")),
        );
    };
    let read = |path: &Path| (path.display().to_string(), fs::read_to_string(path).unwrap());
    let named = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root.join(name));
    for path in markdown_in(&root.join("docs")).into_iter().chain(named) {
        let (name, text) = read(&path);
        note(&name, retired(numbered(&text)));
    }
    for (name, text) in all_help() {
        note(&format!("{name} --help"), retired(numbered(&text)));
    }
    for crate_ in fs::read_dir(root.join("crates")).unwrap() {
        for path in sources(&crate_.unwrap().path().join("src")) {
            let (name, text) = read(&path);
            note(&name, retired(doc_comments(&text)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_glossary_is_sorted_and_defines_every_term_once() {
    let entries = glossary();
    let first: Vec<String> = entries.iter().map(|terms| terms[0].to_lowercase()).collect();
    assert!(first.is_sorted(), "out of order: {:?}", first.windows(2).find(|pair| pair[0] > pair[1]));
    assert_eq!(defined().len(), entries.iter().flatten().count(), "a term is defined twice");
    assert!(entries.len() > 80, "only {} entries were found", entries.len());
}

/// The bold words of a document that may be terms: a capital starts a heading, not a term, unless it is an abbreviation.
fn bold_terms(text: &str) -> Vec<String> {
    let (mut found, mut bold) = (Vec::new(), None::<String>);
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Strong) => bold = Some(String::new()),
            Event::End(TagEnd::Strong) => found.extend(bold.take()),
            Event::Text(text) => bold.iter_mut().for_each(|bold| bold.push_str(&text)),
            // Code is no term.
            Event::Code(_) => bold = None,
            _ => {}
        }
    }
    found.retain(|term| term.starts_with(char::is_lowercase) || term.chars().all(char::is_uppercase));
    found
}

#[test]
fn every_term_in_bold_is_in_the_glossary() {
    let known = defined();
    let mut missing = Vec::new();
    for path in markdown_in(&root().join("docs")) {
        for term in bold_terms(&fs::read_to_string(&path).unwrap()) {
            let lower = term.to_lowercase();
            let one = lower.strip_suffix('s').unwrap_or(&lower);
            if !known.contains(&lower) && !known.contains(one) && !EMPHASIS.contains(&&lower[..]) {
                missing.push(format!("{}: **{term}**", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "not in docs/glossary.md:\n{}", missing.join("\n"));
}

#[test]
fn the_glossary_has_the_terms_of_the_help_texts() {
    let known = defined();
    let text: String = all_help().into_iter().map(|(_, text)| text.to_lowercase()).collect();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for term in HELP_TERMS {
        assert!(text.contains(term), "no help text uses {term}");
        assert!(known.contains(term), "docs/glossary.md lacks {term}");
    }
}

#[test]
fn the_help_of_plan_names_every_strategy() {
    let all = all_help();
    let (_, text) = all.iter().find(|(name, _)| name.ends_with(" plan")).unwrap();
    for strategy in STRATEGIES {
        assert!(text.contains(strategy.name()), "{} in {text}", strategy.name());
    }
}
