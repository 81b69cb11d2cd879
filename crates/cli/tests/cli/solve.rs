//! `solve`, `solvers` and `convert` as users see them: output, files and exit status.

use assert_cmd::cargo::cargo_bin_cmd;
use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};

/// Two nodes alive together; the cheapest pair uses 16, the next 10.
fn network(limit: i64) -> String {
    format!(
        r#"{{"problem":{{"name":"two","nodes":{{"intervals":[[0,1],[0,1]],"costs":[[1,5],[1,7]],"usages":[[8,2],[8,3]]}},
        "edges":{{"nodes":[[0,1]],"costs":[[0,0,0,1000000000000000000]]}},"usage_limit":{limit}}}}}"#
    )
}

fn solve(text: &str, args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("network.json");
    fs::write(&path, text).unwrap();
    cargo_bin_cmd!("shardwright").arg("solve").arg(&path).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn improvements_come_first_and_the_choices_last() {
    let output = solve(&network(10), &["--solver", "brute", "--time", "10"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.last(), Some(&"[1,0]"));
    assert!(lines.len() > 1 && lines[..lines.len() - 1].iter().all(|line| line.starts_with("# ")), "{text}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn quiet_prints_the_choices_only() {
    assert_eq!(stdout(&solve(&network(10), &["--solver", "brute", "-q"])), "[1,0]\n");
}

#[test]
fn json_is_one_object_with_exact_integers() {
    let output = solve(&network(10), &["--solver", "brute", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for (key, expected) in [
        ("cost", "6"),
        ("lower_bound", "6"),
        ("gap", "0.0"),
        ("proved_optimal", "true"),
        ("feasible", "true"),
        ("peak_usage", "10"),
        ("usage_limit", "10"),
        ("choices", "[1,0]"),
    ] {
        assert_eq!(value[key].to_string(), expected, "{key}");
    }
    assert!(value["seconds"].as_f64().is_some());
}

#[test]
fn an_infeasible_limit_has_status_1_and_tells_the_least_overflow() {
    let output = solve(&network(9), &["--solver", "brute"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("the least overflow found is 1 (peak 10, limit 9)"),
        "{}",
        stderr(&output)
    );
    let output = solve(&network(9), &["--solver", "brute", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&value["feasible"], &value["overflow"], &value["proved_infeasible"]),
        (&false.into(), &1.into(), &true.into())
    );
}

#[test]
fn solvers_that_ignore_memory_say_when_their_result_does_not_fit() {
    let output = solve(&network(10), &["--solver", "pase"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("least overflow found is 6"), "{}", stderr(&output));
    assert_eq!(solve(&network(16), &["--solver", "pase"]).status.code(), Some(0));
}

#[test]
fn bad_input_and_bad_usage_have_status_2_and_name_the_place() {
    let table = [
        (
            network(10).replace("[1,7]", "[1]"),
            vec![],
            "nodes.usages[1]: 2 entries, but the node has 1 choices",
        ),
        (
            network(10).replace("[0,0,0,", "["),
            vec![],
            "edges.costs[0]: 1 entries, but nodes 0 and 1 have 2 and 2 choices",
        ),
        ("not json".to_string(), vec![], "expected '{', found 'n'"),
        (network(10), vec!["--solver", "oracle"], "there is no solver `oracle`; choose exact"),
        (network(10), vec!["--time", "-1"], "is not a duration"),
        (network(10), vec!["--time", "NaN"], "is not a duration"),
    ];
    for (text, args, message) in table {
        let output = solve(&text, &args);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(stderr(&output).contains(message), "{}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"));
    }
    let missing = cargo_bin_cmd!("shardwright").args(["solve", "no/such/file.json"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("cannot open no/such/file.json"));
    let folder = cargo_bin_cmd!("shardwright").args(["solve", "."]).output().unwrap();
    assert!(stderr(&folder).contains(". is a folder, not a network"));
}

#[test]
fn the_result_is_also_written_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.txt");
    let output = solve(&network(10), &["--solver", "brute", "-q", "-o", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(fs::read_to_string(&path).unwrap(), "[1,0]\n");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("network.json");
    fs::write(&path, network(10)).unwrap();
    let program = cargo_bin_cmd!("shardwright").get_program().to_owned();
    let mut child = Command::new(program)
        .args(["solve", path.to_str().unwrap(), "--solver", "brute"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut messages = String::new();
    child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
    assert_eq!(messages, "");
}

#[test]
fn standard_input_is_read_as_a_dash() {
    let output = cargo_bin_cmd!("shardwright")
        .args(["solve", "-", "--solver", "brute", "-q"])
        .write_stdin(network(10))
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "[1,0]\n");
}

#[test]
fn solvers_are_listed() {
    let output = cargo_bin_cmd!("shardwright").arg("solvers").output().unwrap();
    for name in ["optcnn", "pase", "brute"] {
        assert!(stdout(&output).lines().any(|line| line.starts_with(name)), "{name}");
    }
    let output = cargo_bin_cmd!("shardwright").args(["solvers", "--json"]).output().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value.as_array().unwrap().iter().any(|row| row["name"] == "optcnn"));
}

#[test]
fn conversion_compresses_by_name_and_keeps_the_network() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    fs::write(file("a.json"), network(10)).unwrap();
    let convert = |args: &[&str]| cargo_bin_cmd!("shardwright").arg("convert").args(args).output().unwrap();
    assert_eq!(convert(&[&file("a.json"), "-o", &file("b.json.gz")]).status.code(), Some(0));
    assert!(fs::read(file("b.json.gz")).unwrap().starts_with(&[0x1f, 0x8b]));
    let output = cargo_bin_cmd!("shardwright")
        .args(["solve", &file("b.json.gz"), "--solver", "brute", "-q"])
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "[1,0]\n");
    assert_eq!(convert(&[&file("a.json"), "-o", &file("c.cfn")]).status.code(), Some(0));
    assert!(fs::read_to_string(file("c.cfn")).unwrap().contains("knapsack"));
    convert(&[&file("a.json"), "-o", &file("d.cfn"), "--without-memory"]);
    assert!(!fs::read_to_string(file("d.cfn")).unwrap().contains("knapsack"));
}

/// Enough assignments to keep the exhaustive solver busy for much longer than the test waits.
#[cfg(unix)]
#[test]
fn an_interrupt_returns_the_best_so_far() {
    let costs = vec!["[1,2]"; 25].join(",");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("network.json");
    fs::write(&path, format!(r#"{{"problem":{{"nodes":{{"costs":[{costs}]}}}}}}"#)).unwrap();
    let program = cargo_bin_cmd!("shardwright").get_program().to_owned();
    let mut child = Command::new(program)
        .args(["solve", path.to_str().unwrap(), "--solver", "brute", "--time", "600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The first improvement says that the search is on and the handler in place.
    let mut reader = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    std::io::BufRead::read_line(&mut reader, &mut text).unwrap();
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(text.contains("interrupted"), "{text}");
    assert_eq!(text.lines().last().map(|line| line.matches('0').count()), Some(25), "{text}");
}

#[test]
fn an_answer_on_standard_output_is_all_that_is_there_and_folders_are_checked_first() {
    let output = solve(&network(10), &["-o", "-"]);
    let lines = stdout(&output);
    assert!(
        lines.starts_with('[') && lines.trim_end().ends_with(']') && lines.lines().count() == 1,
        "{lines}"
    );
    let answer = stdout(&solve(&network(10), &["-o", "-", "--json"]));
    assert!(serde_json::from_str::<serde_json::Value>(&answer).unwrap()["feasible"].is_boolean(), "{answer}");
    let output = solve(&network(10), &["-o", "no/such/folder/choices.json"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), String::new()));
    assert!(stderr(&output).contains("cannot write no/such/folder/choices.json"), "{}", stderr(&output));
}
