//! What the program tells about itself: completions, manual pages, op kinds, licences.

use crate::{json, refused, shardwright};
use shardwright_graph::Op;

fn printed(args: &[&str]) -> String {
    let output = shardwright(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn completions_of_every_shell_know_commands_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = printed(&["completions", shell]);
        for word in ["simulate", "machine", "untied"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    refused(&["completions", "csh"], "csh");
}

/// Bash itself, with the script that it is given.
#[test]
fn bash_completes_a_command_line() {
    let script = printed(&["completions", "bash"]);
    let ask = "COMP_WORDS=(shardwright simu) COMP_CWORD=1; _shardwright shardwright simu shardwright; echo \"${COMPREPLY[@]}\"";
    let Ok(output) = std::process::Command::new("bash").args(["-c", &format!("{script}\n{ask}")]).output()
    else {
        return; // No bash here.
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "simulate");
}

#[test]
fn manual_pages_are_printed_and_written() {
    let page = printed(&["man", "machine", "probe"]);
    assert!(page.contains(".TH shardwright-machine-probe 1") && page.contains("workers"), "{page}");
    assert!(printed(&["man"]).contains("shardwright\\-plan(1)"));
    refused(&["man", "plans"], "no command `plans`");
    refused(&["man", "plan", "-o", "x"], "cannot be used with");

    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert!(shardwright(&["man", "-o", pages.to_str().unwrap()]).status.success());
    for name in ["shardwright.1", "shardwright-plan.1", "shardwright-machine-probe.1"] {
        let text = std::fs::read_to_string(pages.join(name)).unwrap();
        assert!(text.contains(".SH SYNOPSIS"), "{name}");
    }
}

#[test]
fn ops_are_listed_with_what_they_are() {
    assert!(printed(&["ops"]).contains("contract             Einsum"));
    let rows = json(&["ops", "--json"]);
    assert_eq!(rows.as_array().unwrap().len(), Op::KINDS.len());
    assert!(rows.as_array().unwrap().iter().all(|row| !row["about"].as_str().unwrap().is_empty()));
}

#[test]
fn the_program_carries_the_licences_of_what_is_linked_into_it() {
    let text = printed(&["licences"]);
    for part in ["Apache License", "Permission is hereby granted", "clap_mangen", "gemm-f32"] {
        assert!(text.contains(part), "{part}");
    }
}
