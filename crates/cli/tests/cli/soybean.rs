//! `--solver soybean`, as a user or a script meets it.

use crate::shardwright;
use serde_json::json;

#[test]
fn the_golden_values_come_out_of_plan() {
    for (batch, hidden, layers, devices, cuts, total) in [
        (400, 300, 5, 2, json!([780_000]), 780_000),
        (400, 300, 5, 4, json!([780_000, 480_000]), 1_740_000),
        (512, 8192, 4, 2, json!([25_165_824]), 25_165_824),
        (512, 8192, 4, 4, json!([25_165_824, 18_874_368]), 62_914_560),
        (512, 8192, 4, 8, json!([25_165_824, 18_874_368, 12_582_912]), 113_246_208),
        (2048, 1024, 5, 2, json!([10_485_760]), 10_485_760),
        (2048, 1024, 5, 4, json!([10_485_760, 8_912_896]), 28_311_552),
        (2048, 1024, 5, 8, json!([10_485_760, 8_912_896, 4_456_448]), 46_137_344),
    ] {
        let model = format!("mlp:batch={batch},hidden={hidden},layers={layers},loss=elementwise");
        let machine = format!("flat:{devices}");
        let plan = crate::json(&["plan", &model, "--machine", &machine, "--solver", "soybean", "--json"]);
        assert_eq!(plan["soybean"]["cuts"], cuts, "{model} on {machine}");
        assert_eq!(plan["soybean"]["total_elements"], total);
    }
}

#[test]
fn compare_counts_every_plan_by_soybeans_measure() {
    let model = "mlp:batch=400,hidden=300,layers=5,loss=elementwise";
    let rows = crate::json(&["compare", model, "--machine", "flat:4", "--json"]);
    let elements = |solver: &str| {
        let rows = rows["rows"].as_array().unwrap();
        rows.iter().find(|row| row["solver"] == solver).unwrap()["soybean_elements"].as_u64().unwrap()
    };
    assert_eq!(elements("soybean"), 1_740_000);
    assert_eq!(elements("data"), 2 * 3 * 5 * 300 * 300);
    for solver in ["auto", "exact", "optcnn", "pase", "model", "owt", "megatron", "soybean-time"] {
        assert!(elements(solver) >= 1_740_000, "{solver}");
    }
}

#[test]
fn devices_that_cannot_be_halved_are_refused_and_the_others_still_compared() {
    let model = "mlp:batch=48,hidden=48,layers=2";
    let refused = shardwright(&["plan", model, "--machine", "flat:6", "--solver", "soybean"]);
    assert_eq!(refused.status.code(), Some(2));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("6 is not a power of two"), "{text}");
    let rows = crate::json(&["compare", model, "--machine", "flat:6", "--json"]);
    for row in rows["rows"].as_array().unwrap() {
        let own = row["solver"].as_str().unwrap().starts_with("soybean");
        assert_eq!(row["step_seconds"].is_null(), own, "{row}");
        assert!(row["soybean_elements"].is_null());
    }
}

#[test]
fn solvers_lists_it() {
    let listed = crate::json(&["solvers", "--json"]);
    let names: Vec<&str> = listed.as_array().unwrap().iter().filter_map(|row| row["name"].as_str()).collect();
    for name in ["auto", "exact", "soybean", "soybean-time", "data", "brute"] {
        assert_eq!(names.iter().filter(|n| **n == name).count(), 1, "{name}: {names:?}");
    }
}
