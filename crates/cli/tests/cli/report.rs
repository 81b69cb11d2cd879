//! `plan --report`, `report` and `explain`, as a user or a script meets them. What the page shows is tested in a
//! browser: `report/test`.

use crate::{json, refused, shardwright};
use serde_json::Value;
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

#[test]
fn a_difference_says_what_each_change_is_worth() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (path(&folder, "a.json"), path(&folder, "b.json"));
    let plan = |solver: &str, path: &str| {
        json(&["plan", MODEL, "--machine", "flat:4", "--solver", solver, "-o", path, "--json"])
    };
    let (data, exact) = (plan("data", &a), plan("exact", &b));
    let answer = json(&["diff", &a, &b, "--json"]);
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
    }
    let same = String::from_utf8(shardwright(&["diff", &a, &a]).stdout).unwrap();
    assert!(same.contains("no op is split otherwise"), "{same}");
    let text = String::from_utf8(shardwright(&["diff", &a, &b]).stdout).unwrap();
    assert!(text.contains("alone") && text.contains("simulated step"), "{text}");
    json(&["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-o", &b, "--json"]);
    refused(&["diff", &a, &b], "different devices");
}

#[test]
fn reports_that_cannot_be_made_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, page) = (path(&folder, "p.json"), path(&folder, "a.html"));
    json(&["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-o", &plan, "--json"]);
    refused(&["report", "no-such-plan.json", "-o", &page], "no-such-plan.json");
    refused(&["report", "vgg16", "-o", &page], "not a plan");
    refused(&["report", &plan, "-o", &path(&folder, "no/folder/a.html")], "cannot write");
    refused(&["explain", &plan, "fc"], "has no op `fc`; there is ");
    let changed = std::fs::read_to_string(&plan).unwrap().replace("hidden=512", "hidden=256");
    std::fs::write(&plan, changed).unwrap();
    refused(&["report", &plan, "-o", &page], "plan");
    assert!(!Path::new(&page).exists());
}
