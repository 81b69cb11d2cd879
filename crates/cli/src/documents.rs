//! Tests of documents: links lead somewhere, chapters are in the book, every command line parses, and words are the glossary's.

mod words;

use crate::Cli;
use clap::Parser as _;
use clap::error::ErrorKind;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The top of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn markdown_in(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    files.sort();
    files
}

fn documents() -> Vec<PathBuf> {
    ["", "docs", "examples"].iter().flat_map(|folder| markdown_in(&root().join(folder))).collect()
}

/// What the tests look at in a document.
#[derive(Default)]
struct Document {
    /// The text of the first heading.
    title: String,
    /// What links may name behind `#`.
    anchors: BTreeSet<String>,
    /// Where links and pictures point.
    links: Vec<String>,
    /// Code, one entry per block or piece.
    code: Vec<String>,
}

fn read(path: &Path) -> Document {
    let text = fs::read_to_string(path).unwrap();
    let mut document = Document::default();
    let (mut heading, mut block) = (None::<String>, None::<String>);
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let words = heading.take().unwrap_or_default();
                document.anchors.insert(anchor(&words));
                if document.title.is_empty() {
                    document.title = words;
                }
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push(dest_url.to_string());
            }
            Event::Start(Tag::CodeBlock(_)) => block = Some(String::new()),
            Event::End(TagEnd::CodeBlock) => document.code.extend(block.take()),
            Event::Code(words) => {
                heading.iter_mut().for_each(|heading| heading.push_str(&words));
                document.code.push(words.to_string());
            }
            Event::Text(words) => {
                heading.iter_mut().chain(&mut block).for_each(|text| text.push_str(&words));
            }
            _ => {}
        }
    }
    document
}

/// What a heading is called in links, on GitHub as in the book.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let book = root().join("docs");
    let mut wrong = Vec::new();
    for path in documents() {
        for link in read(&path).links {
            if link.contains("://") {
                continue;
            }
            let (file, place) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            let Ok(target) = target.canonicalize() else {
                wrong.push(format!("{}: there is no {link}", path.display()));
                continue;
            };
            if path.starts_with(&book) && !target.starts_with(&book) {
                wrong.push(format!("{}: {link} is not in the book", path.display()));
            }
            if !place.is_empty() && !read(&target).anchors.contains(place) {
                wrong.push(format!("{}: {link} names no heading", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_book_has_every_chapter_under_its_own_title() {
    let summary = root().join("docs/SUMMARY.md");
    let text = fs::read_to_string(&summary).unwrap();
    for path in markdown_in(&root().join("docs")) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let entry = format!("[{}]({name})", read(&path).title);
        assert!(path == summary || text.contains(&entry), "docs/SUMMARY.md lacks {entry}");
    }
}

/// The command lines of ours in some lines of shell: words, without what is piped, redirected or remarked.
fn command_lines(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for line in code.lines() {
        let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None::<char>);
        let mut commands = Vec::new();
        for c in line.chars().chain([';']) {
            match (c, quote) {
                (c, Some(q)) if c == q => quote = None,
                (c, Some(_)) => word.push(c),
                ('\'' | '"', None) => quote = Some(c),
                ('#' | '>' | '|' | ';' | '&', None) if word.is_empty() || c == ';' => {
                    if !word.is_empty() {
                        words.push(std::mem::take(&mut word));
                    }
                    commands.push(std::mem::take(&mut words));
                    // What follows a redirection or a remark is no command.
                    if "#>".contains(c) {
                        break;
                    }
                }
                (' ', None) if word.is_empty() => {}
                (' ', None) => words.push(std::mem::take(&mut word)),
                (c, None) => word.push(c),
            }
        }
        found.extend(commands.into_iter().filter(|words| words.first().is_some_and(|w| w == "shardwright")));
    }
    found
}

#[test]
fn command_lines_are_found_in_shell() {
    let found = command_lines(
        "shardwright plan m.json --fix 'fc*=c4' && shardwright run x   # two\ncargo run | shardwright solve - > out\n# shardwright no",
    );
    let expected: [&[&str]; 3] = [
        &["shardwright", "plan", "m.json", "--fix", "fc*=c4"],
        &["shardwright", "run", "x"],
        &["shardwright", "solve", "-"],
    ];
    assert_eq!(found, expected);
}

#[test]
fn every_command_line_in_the_documents_is_understood() {
    let (mut count, mut wrong) = (0, Vec::new());
    for path in documents() {
        for line in read(&path).code.iter().flat_map(|code| command_lines(code)) {
            count += 1;
            let Err(error) = Cli::try_parse_from(&line) else { continue };
            let fine = match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
                // The text speaks of a command, or of commands in general.
                ErrorKind::MissingRequiredArgument => line.len() == 2,
                _ => line[1] == "COMMAND",
            };
            if !fine {
                wrong.push(format!("{}: `{}`\n{error}", path.display(), line.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 50, "only {count} command lines were found");
}

#[test]
fn the_picture_of_the_benchmarks_shows_the_ratios_of_its_table() {
    let text = fs::read_to_string(root().join("docs/benchmarks.md")).unwrap();
    let table = text.split("\n## ").next().unwrap();
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|c| c.trim().to_owned()).collect::<Vec<_>>();
    let ratios: Vec<String> = (table.lines().map(cells))
        .filter(|row| row.len() == 6 && row[3].parse::<f64>().is_ok())
        .map(|row| format!(">{}x{}<", row[3], if row[4] == "measured" { "" } else { ", predicted" }))
        .collect();
    let picture = fs::read_to_string(root().join("docs/pictures/headlines.svg")).unwrap();
    let drawn = picture.matches("<rect").count();
    let shown =
        ratios.len() > 5 && ratios.len() == drawn && ratios.iter().all(|ratio| picture.contains(ratio));
    assert!(shown, "docs/pictures/headlines.svg is out of date: run scripts/bench_chart.py");
}
