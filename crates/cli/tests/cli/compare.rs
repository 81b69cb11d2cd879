//! `shardwright compare` beyond its table: its page, device counts, limits of memory.

use crate::{json, refused, shardwright};
use serde_json::Value;
use shardwright_request::{show_bytes, show_seconds};

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

/// The data inside of a page.
fn data(path: &str) -> Value {
    let html = std::fs::read_to_string(path).unwrap();
    let (_, rest) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// A row without its time, which no two runs share.
fn timeless(row: &Value) -> Value {
    let mut row = row.clone();
    row.as_object_mut().unwrap().remove("search_seconds");
    row
}

#[test]
fn a_comparison_comes_with_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("c.html").to_str().unwrap().to_string();
    let args = format!(
        "compare {MODEL} --machine flat:4 --solver auto,exact,data --devices 1,2,4 --pareto 2 --time 1"
    );
    let args: Vec<&str> = args.split(' ').collect();
    let answer = json(&[&args[..], &["--report", &page, "--json"]].concat());
    assert_eq!(data(&page), answer);
    let solvers = |rows: &Value| list(rows).iter().map(|row| row["solver"].clone()).collect::<Vec<_>>();
    assert_eq!(solvers(&answer["rows"]), ["auto", "exact", "data", "expert"]);

    // Every count is what the machine of that size gives, and the last is the machine itself.
    let scaling = list(&answer["scaling"]);
    assert_eq!(scaling.iter().map(|own| own["devices"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4]);
    assert_eq!(scaling[2]["rows"], answer["rows"]);
    let alone = json(&["compare", MODEL, "--machine", "flat:2", "--solver", "auto,exact,data", "--json"]);
    for (row, other) in list(&scaling[1]["rows"]).iter().zip(list(&alone["rows"])) {
        assert_eq!(timeless(row), timeless(other));
    }
    let steps: Vec<&Value> = list(&scaling[0]["rows"]).iter().map(|row| &row["objective"]).collect();
    assert!(steps.iter().all(|step| *step == steps[0]), "one device has nothing to choose: {steps:?}");

    // In words: steps of rows and of every device count.
    let text = String::from_utf8(shardwright(&args).stdout).unwrap();
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect())
        .collect();
    let step = |row: &Value| show_seconds(row["step_seconds"].as_f64().unwrap());
    for row in list(&answer["rows"]) {
        let own = lines.iter().find(|line| line.first() == row["solver"].as_str().as_ref()).unwrap();
        assert!(own.contains(&&step(row)[..]), "{own:?}");
        assert!(own.contains(&&show_bytes(row["peak_memory_bytes"].as_u64().unwrap())[..]), "{own:?}");
    }
    // One device has no uniform plan.
    for row in list(&answer["rows"]) {
        let own =
            |scale: &Value| list(&scale["rows"]).iter().find(|own| own["solver"] == row["solver"]).map(step);
        let steps: Vec<String> =
            scaling.iter().map(|scale| own(scale).unwrap_or_else(|| "-".into())).collect();
        let line: Vec<&str> =
            row["solver"].as_str().into_iter().chain(steps.iter().map(|s| &s[..])).collect();
        assert!(lines.contains(&line), "{line:?}: {text}");
    }
    assert!(text.contains("memory limit"), "{text}");
}

#[test]
fn limits_of_memory_are_kept_and_less_memory_is_never_faster_if_nothing_overlaps() {
    let model = ["compare", MODEL, "--machine", "flat:4", "--optimizer", "adam", "--untied"];
    let answer =
        json(&[&model[..], &["--solver", "exact,data", "--pareto", "4", "--time", "1", "--json"]].concat());
    let plans: Vec<&Value> =
        list(&answer["pareto"]).iter().filter(|plan| plan["failure"].is_null()).collect();
    assert!(plans.len() >= 3, "{answer}");
    assert!(plans.last().unwrap()["memory_limit_bytes"].is_null(), "the last has no limit");
    let bytes = |plan: &Value, key: &str| plan[key].as_u64();
    for plan in &plans {
        let limit = bytes(plan, "memory_limit_bytes").unwrap_or(u64::MAX);
        assert!(bytes(plan, "peak_memory_bytes").unwrap() <= limit, "{plan}");
        let beaten = plans.iter().any(|other| {
            let place = |own: &Value| {
                (own["step_seconds"].as_f64().unwrap(), bytes(own, "peak_memory_bytes").unwrap())
            };
            let (other, own) = (place(other), place(plan));
            other != own && other.0 <= own.0 && other.1 <= own.1
        });
        assert_eq!(plan["on_front"], !beaten, "{plan}");
    }
    // Where both are proved, a wider limit costs nothing.
    for pair in plans.windows(2).filter(|pair| pair.iter().all(|plan| plan["proved_optimal"] == true)) {
        assert!(pair[0]["objective"].as_i64() >= pair[1]["objective"].as_i64(), "{pair:?}");
    }
}

#[test]
fn no_row_is_faster_than_auto() {
    for (model, machine) in [(MODEL, "p100x16:8"), ("mlp:batch=400,hidden=300,layers=5", "flat:4")] {
        let answer = json(&["compare", model, "--machine", machine, "--proposals", "500", "--json"]);
        let rows = list(&answer["rows"]);
        assert_eq!(rows[0]["solver"], "auto");
        let auto = rows[0]["step_seconds"].as_f64().unwrap();
        for row in rows {
            assert!(row["step_seconds"].as_f64().is_none_or(|step| auto <= step), "{auto}: {row}");
        }
    }
}

#[test]
fn the_batch_may_grow_with_the_devices() {
    let model = "mlp:hidden=512,layers=3";
    let args = ["compare", model, "--machine", "flat:4", "--solver", "data", "--devices", "1,4"];
    let answer = json(&[&args[..], &["--batch-per-device", "16", "--json"]].concat());
    let batches: Vec<u64> =
        list(&answer["scaling"]).iter().map(|own| own["batch"].as_u64().unwrap()).collect();
    assert_eq!(batches, [16, 64]);
    let fixed =
        json(&["compare", model, "--machine", "flat:4", "--batch", "64", "--solver", "data", "--json"]);
    assert_eq!(timeless(&fixed["rows"][0]), timeless(&answer["rows"][0]));
}

#[test]
fn what_cannot_be_compared_is_told_at_once() {
    refused(&["compare", MODEL, "--machine", "flat:4", "--devices", "2,8"], "ask for 1 to 4");
    refused(&["compare", MODEL, "--machine", "flat:4", "--solver", "data,magic"], "magic");
    refused(&["compare", MODEL, "--batch", "64", "--batch-per-device", "16"], "--batch");
}
