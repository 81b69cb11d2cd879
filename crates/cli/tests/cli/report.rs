//! `plan --report`, `report` and `explain`, as a user or a script meets them. What the page shows is tested in a
//! browser: `report/test`.

use crate::{json, refused, shardwright};
use serde_json::Value;
use shardwright_request::{show_bytes, show_seconds};
use std::path::Path;

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_string()
}

/// The data inside of a page.
fn data(path: &str) -> Value {
    let html = std::fs::read_to_string(path).unwrap();
    let (_, rest) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_plan_comes_with_its_report_and_has_it_again_later() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, first, later) = (path(&folder, "p.json"), path(&folder, "a.html"), path(&folder, "b.html"));
    let args = ["plan", MODEL, "--machine", "flat:4", "-o", &plan, "--report", &first, "--json"];
    let made = json(&args);
    assert_eq!(data(&first)["plan"], made);
    assert!(!data(&first)["search"].as_array().unwrap().is_empty());
    let told = shardwright(&["report", &plan, "-o", &later]);
    assert!(told.status.success() && String::from_utf8_lossy(&told.stdout).contains("report written to"));
    let later = data(&later);
    assert_eq!((&later["plan"], &later["steps"]), (&made, &data(&first)["steps"]));
    assert_eq!(later["steps"][0]["step_ps"].as_f64().unwrap() / 1e12, made["simulated"]["step_seconds"]);
}

#[test]
fn explanations_name_the_op_and_what_else_it_could_do() {
    let folder = tempfile::tempdir().unwrap();
    let plan = path(&folder, "p.json");
    let made = json(&["plan", MODEL, "--machine", "flat:4", "--solver", "exact", "-o", &plan, "--json"]);
    let op = made["layers"][0]["name"].as_str().unwrap();
    let text = String::from_utf8(shardwright(&["explain", &plan]).stdout).unwrap();
    assert!(text.contains(op) && text.contains("next best"), "{text}");
    let text = String::from_utf8(shardwright(&["explain", &plan, op]).stdout).unwrap();
    assert!(text.contains("instead") && text.contains("note:"), "{text}");
    let all = json(&["explain", &plan, "--json"]);
    let rows = all["choices"].as_array().unwrap();
    assert_eq!(rows.len(), made["layers"].as_array().unwrap().len());
    for row in rows {
        // What is proved cannot be improved by one change.
        let changes =
            row["alternatives"].as_array().unwrap().iter().map(|a| a["change_seconds"].as_f64().unwrap());
        assert!(changes.into_iter().all(|change| change >= 0.0), "{row}");
    }
}

/// Seconds as the whole picoseconds that they come from.
fn picoseconds(value: &Value) -> i64 {
    (value.as_f64().unwrap() * 1e12).round() as i64
}

/// A difference as people read it.
fn signed(value: &Value) -> String {
    let seconds = value.as_f64().unwrap();
    format!("{}{}", if seconds < 0.0 { '-' } else { '+' }, show_seconds(seconds.abs()))
}

#[test]
fn explanations_add_up_and_are_those_of_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, page) = (path(&folder, "p.json"), path(&folder, "p.html"));
    let args =
        ["plan", MODEL, "--machine", "flat:4", "--solver", "owt", "-o", &plan, "--report", &page, "--json"];
    let made = json(&args);
    let all = json(&["explain", &plan, "--most", "6", "--json"]);
    let rows = all["choices"].as_array().unwrap();
    let shown = data(&page);
    let explanations = shown["explanations"].as_array().unwrap();
    assert_eq!(rows.len(), explanations.len());
    let (mut own, mut shared, mut differ) = (0, 0, 0);
    for (row, explanation) in rows.iter().zip(explanations) {
        let op = &made["ops"][explanation["op"].as_u64().unwrap() as usize];
        assert_eq!((&row["op"], &row["reoptimised"]), (&op["name"], &explanation["reoptimised"]));
        let options: Vec<&Value> =
            std::iter::once(&row["chosen"]).chain(row["alternatives"].as_array().unwrap()).collect();
        let drawn = explanation["options"].as_array().unwrap();
        assert_eq!(options.len(), drawn.len());
        for (option, drawn) in options.iter().zip(drawn) {
            let part = |name: &str| {
                assert_eq!(
                    picoseconds(&option[format!("{name}_seconds")]),
                    drawn[format!("{name}_ps")].as_i64().unwrap()
                );
                drawn[format!("{name}_ps")].as_i64().unwrap()
            };
            let total = part("compute") + part("inside") + part("neighbours");
            assert_eq!((picoseconds(&option["seconds"]), &option["config"]), (total, &drawn["config"]));
            let change = total - picoseconds(&row["chosen"]["seconds"]);
            assert_eq!(picoseconds(&option["change_seconds"]), change);
            let anew = picoseconds(&option["reoptimised_change_seconds"]);
            assert_eq!(Some(anew), drawn["reoptimised_ps"].as_i64());
            assert!(anew <= change, "what else is chosen anew cannot be worse");
            differ += usize::from(anew < change);
        }
        let chosen = |name: &str| picoseconds(&row["chosen"][name]);
        own += chosen("compute_seconds") + chosen("inside_seconds");
        shared += chosen("neighbours_seconds");
    }
    assert!(differ > 0, "a recipe can be improved by more than one change");
    assert_eq!(
        Some(own + shared / 2),
        made["objective"].as_i64(),
        "every transfer between layers has two ends"
    );

    // What holds the memory, here, in the page and in the simulator.
    let simulated = json(&["simulate", &plan, "--json"]);
    let class = &shown["steps"][0]["classes"][0];
    let memory = &all["memory"];
    assert_eq!(memory["peak_memory_bytes"], simulated["devices"][0]["peak_memory_bytes"]);
    assert_eq!(memory["peak_memory_bytes"], class["peak_memory_bytes"]);
    assert_eq!((&memory["kinds"], &memory["largest"]), (&class["peak"]["kinds"], &class["peak"]["largest"]));
    assert_eq!(picoseconds(&memory["at_seconds"]), class["peak"]["at_ps"].as_i64().unwrap());
    let bytes =
        |list: &Value| list.as_array().unwrap().iter().map(|own| own["bytes"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(bytes(&memory["kinds"]), memory["peak_memory_bytes"].as_u64().unwrap());

    // And in words.
    let text = String::from_utf8(shardwright(&["explain", &plan]).stdout).unwrap();
    for (row, line) in rows.iter().zip(text.lines().skip(1)) {
        let (own, next) = (&row["chosen"], &row["alternatives"][0]);
        let words = [&row["op"], &own["config"]].map(|own| own.as_str().unwrap().to_string());
        let figures =
            [show_seconds(own["seconds"].as_f64().unwrap()), next["config"].as_str().unwrap().into()];
        let changes = [signed(&next["change_seconds"]), signed(&next["reoptimised_change_seconds"])];
        let expected = [&words[..], &figures, &changes].concat().join(" ");
        assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), expected);
    }
    let told = |own: &Value, name: &str| {
        format!("{} {}", own["kind"].as_str().unwrap(), show_bytes(own["bytes"].as_u64().unwrap())) + name
    };
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for own in memory["kinds"].as_array().unwrap() {
        assert!(lines.contains(&told(own, "")), "{own}: {text}");
    }
    for own in memory["largest"].as_array().unwrap() {
        assert!(
            lines.contains(&told(own, &format!(" {}", own["tensor"].as_str().unwrap()))),
            "{own}: {text}"
        );
    }
}

#[test]
fn one_op_is_explained_under_the_plans_limit_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let plan = path(&folder, "p.json");
    let model = ["mlp:batch=64,hidden=256,layers=1", "--machine", "flat:4", "--untied"];
    let make = |limit: &str| {
        let more = ["--solver", "exact", "--memory", limit, "-o", &plan, "--json"];
        json(&[&["plan"][..], &model, &more].concat())
    };
    let free = make("1GB");
    let limit = free["peak_memory_bytes"].as_u64().unwrap() * 9 / 10;
    let made = make(&format!("{limit}B"));
    let op = made["layers"][0]["name"].as_str().unwrap();
    let row = &json(&["explain", &plan, op, "--most", "3", "--json"])["choices"][0];
    assert_eq!(row["reoptimised"], "at-least", "the network counts less memory than plans need: {row}");
    let change = |option: &serde_json::Value| option["reoptimised_change_seconds"].as_f64();
    assert!(change(&row["chosen"]).unwrap() <= 0.0, "the plan itself is not below its lower bound: {row}");
    // The list has one bound per alternative, without the limit; the op alone has the better of that and one within the limit.
    let list = json(&["explain", &plan, "--most", "100", "--json"]);
    let listed = list["choices"].as_array().unwrap().iter().find(|choice| choice["op"] == op).unwrap();
    let known = |config: &serde_json::Value| {
        let all = listed["alternatives"].as_array().unwrap().iter().chain([&listed["chosen"]]);
        all.filter(|option| &option["config"] == config).find_map(change)
    };
    for option in row["alternatives"].as_array().unwrap().iter().chain([&row["chosen"]]) {
        let without = known(&option["config"]);
        assert!(without.is_some() && change(option) >= without, "{option} is below {without:?}");
    }
}

#[test]
fn plans_on_different_axes_of_one_machine_have_a_difference() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (path(&folder, "a.json"), path(&folder, "b.json"));
    let plan = |solver: &str, path: &str| {
        let model = ["plan", "mlp:batch=400,hidden=300,layers=5", "--machine", "flat:4"];
        json(&[&model[..], &["--solver", solver, "-o", path, "--json"]].concat())
    };
    let (model, exact) = (plan("model", &a), plan("exact", &b));
    assert_ne!(model["axes"], exact["axes"], "the test is too tame");
    let answer = json(&["diff", &a, &b, "--json"]);
    assert_eq!(answer["objective"], serde_json::json!([model["objective"], exact["objective"]]));
    assert!(!answer["changes"].as_array().unwrap().is_empty());
}

#[test]
fn a_difference_says_what_each_change_is_worth() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (path(&folder, "a.json"), path(&folder, "b.json"));
    let plan = |solver: &str, path: &str| {
        json(&["plan", MODEL, "--machine", "flat:4", "--solver", solver, "-o", path, "--json"])
    };
    let (data, exact) = (plan("data", &a), plan("exact", &b));
    let page = path(&folder, "d.html");
    let answer = json(&["diff", &a, &b, "--report", &page, "--json"]);
    assert_eq!(self::data(&page)["difference"], answer);
    assert_eq!(self::data(&page)["plan"], exact);
    let steps = self::data(&page)["steps"].clone();
    for (at, plan) in [&exact, &data].into_iter().enumerate() {
        assert_eq!(steps[at]["step_ps"].as_f64().unwrap() / 1e12, plan["simulated"]["step_seconds"]);
    }
    let back = json(&["diff", &b, &a, "--json"]);
    let undone = |name: &Value| {
        let all = back["changes"].as_array().unwrap();
        all.iter().find(|change| change["op"] == *name).unwrap()["alone_seconds"].clone()
    };
    assert_eq!(answer["objective"], serde_json::json!([data["objective"], exact["objective"]]));
    let changes = answer["changes"].as_array().unwrap();
    let of = |plan: &Value, name: &Value| {
        let layers = plan["layers"].as_array().unwrap().iter();
        layers.clone().find(|layer| layer["name"] == *name).unwrap()["config"].clone()
    };
    assert!(!changes.is_empty());
    for change in changes {
        let op = &change["op"];
        assert_eq!((&change["before"], &change["after"]), (&of(&data, op), &of(&exact, op)));
        assert_eq!(change["undone_seconds"], undone(op), "the way back is the other way's first step");
    }
    let same = String::from_utf8(shardwright(&["diff", &a, &a]).stdout).unwrap();
    assert!(same.contains("all ops have equal configs"), "{same}");
    let text = String::from_utf8(shardwright(&["diff", &a, &b]).stdout).unwrap();
    assert!(text.contains("alone") && text.contains("simulated step"), "{text}");
    for change in changes {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{} ", change["op"].as_str().unwrap())))
            .unwrap();
        let ends = format!("{} {}", signed(&change["alone_seconds"]), signed(&change["undone_seconds"]));
        assert!(line.split_whitespace().collect::<Vec<_>>().join(" ").ends_with(&ends), "{line}: {ends}");
    }
    json(&["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-o", &b, "--json"]);
    refused(&["diff", &a, &b], "different devices");
}

#[test]
fn reports_that_cannot_be_made_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, page) = (path(&folder, "p.json"), path(&folder, "a.html"));
    json(&["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-o", &plan, "--json"]);
    refused(&["report", "no-such-plan.json", "-o", &page], "no-such-plan.json");
    refused(&["report", "vgg16", "-o", &page], "cannot read vgg16");
    refused(&["report", &plan, "-o", &path(&folder, "no/folder/a.html")], "cannot write");
    refused(&["explain", &plan, "fc"], "has no op `fc`; did you mean ");
    let changed = std::fs::read_to_string(&plan).unwrap().replace("hidden=512", "hidden=256");
    std::fs::write(&plan, changed).unwrap();
    refused(&["report", &plan, "-o", &page], "plan");
    assert!(!Path::new(&page).exists());
}

#[test]
fn micro_batches_leave_out_alternatives_that_no_reshard_leads_to() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, page) = (path(&folder, "plan.json"), path(&folder, "page.html"));
    let model = "gpt:layers=2,hidden=256,heads=4,vocab=1000,seq=64";
    let args =
        ["plan", model, "--machine", "flat:4", "--batch", "64", "--micro-batches", "4", "-q", "-o", &plan];
    assert!(shardwright(&args).status.success());
    for args in [&["report", &plan, "-o", &page][..], &["explain", &plan, "loss"]] {
        let output = shardwright(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
