//! Hostile problems: each is refused with a message that names the place, or proved to have no stages.

use shardwright_stages::format::{Overrides, Problem, read};
use shardwright_stages::{Control, StopReason, no_fit};

const LAYERS: &str = include_str!("../../../fuzz/regressions/stages/layers.json");
const TABLE: &str = include_str!("../../../fuzz/regressions/stages/table.json");
const PIPER: &str = include_str!("../../../fuzz/regressions/stages/piper.json");

fn refused(text: &str, part: &str) {
    let error = read(text.as_bytes(), &Overrides::default()).expect_err(part).to_string();
    assert!(error.contains(part), "{error:?} does not say {part:?}");
}

#[test]
fn wrong_values_are_refused_by_name() {
    let table: &[(&str, &str, &str, &str)] = &[
        (PIPER, "\"timePerSample\":2.5", "\"timePerSample\":-2.5", "layer 2 at degree 1 is negative"),
        (PIPER, "\"timePerSample\":2.5", "\"timePerSample\":1e300", "1e30 or more"),
        (PIPER, "\"timePerSample\":2.5", "\"timePerSample\":1e999", "node 2 at degree 1 must be a number"),
        (PIPER, "\"timePerSample\":2.5", "\"timePerSample\":NaN", "node 2 at degree 1 must be a number"),
        (
            PIPER,
            "\"maxDevices\":3",
            "\"maxDevices\":-Infinity",
            "`maxDevices` of the file must be a whole number",
        ),
        (LAYERS, "\"objective\":\"step\"", "\"objective\":nul", "expected ident"),
        (
            PIPER,
            "\"timePerSample\":2.5",
            "\"timePerSample\":\"x\"",
            "option 0 of node 2 at degree 1 must be a number",
        ),
        (PIPER, "\"timePerSample\":2.5,", "", "`timePerSample` of option 0 of node 2 at degree 1 is missing"),
        (PIPER, "\"destId\":2", "\"destId\":9", "there is no such node"),
        (PIPER, "\"destId\":2", "\"destId\":1", "the edge from 1 to 1 is a cycle"),
        (PIPER, "\"id\":2,", "\"id\":1,", "node 1 appears twice"),
        (PIPER, "\"syncTimeFw\":{\"1\":0.0}", "\"syncTimeFw\":{}", "lacks the edge with node 1"),
        (PIPER, "\"syncTimeFw\":{\"1\":0.0}", "\"syncTimeFw\":{\"1\":0.0,\"1\":1.0}", "names node 1 twice"),
        (
            PIPER,
            "\"syncTimeFw\":{\"1\":0.0}",
            "\"syncTimeFw\":{\"1\":0.0,\"2\":1.0}",
            "there is no edge between 2",
        ),
        (PIPER, "\"maxDevices\":3", "\"maxDevices\":0", "`maxDevices` of the file is 0"),
        (PIPER, "\"maxDevices\":3", "\"maxDevices\":2.5", "whole number"),
        (PIPER, "\"maxDevices\":3", "\"maxDevices\":99999999999", "`maxDevices` of the file is 99999999999"),
        (PIPER, "\"mbsInBatch\":2", "\"mbsInBatch\":-2", "`mbsInBatch` of the file is -2"),
        (PIPER, "\"bandwidth\":5.0", "\"bandwidth\":0", "positive"),
        (
            PIPER,
            "\"maxMemoryPerDevice\":50.0",
            "\"maxMemoryPerDevice\":-1",
            "the memory per device is negative",
        ),
        (
            PIPER,
            "{\"1\":[{\"id\":\"vanilla\",\"timePerSample\":1.5",
            "{\"0\":[{\"id\":\"vanilla\",\"timePerSample\":1.5",
            "degree of node 1",
        ),
        (
            LAYERS,
            "{\"from\":\"c\",\"to\":\"b\"",
            "{\"from\":\"a\",\"to\":\"b\"",
            "the edge from a to b appears twice",
        ),
        (LAYERS, "{\"from\":\"c\",\"to\":\"b\"", "{\"from\":\"b\",\"to\":\"a\"", "is on a cycle"),
        (LAYERS, "\"name\":\"c\"", "\"name\":\"a\"", "layer a appears twice"),
        (LAYERS, "\"objective\":\"step\"", "\"objective\":\"fast\"", "bottleneck"),
        (LAYERS, "shardwright-stages-1", "shardwright-stages-9", "this version reads"),
        (TABLE, "\"kinds\":[\"embed\"]", "\"kinds\":[\"nothing\"]", "no layer has this kind"),
        (TABLE, "\"lower_bound_seconds\":1.5", "\"lower_bound_seconds\":2.5", "is above its time"),
        (TABLE, "\"data_parallel\":2", "\"data_parallel\":0", "`data_parallel` of entry 1"),
    ];
    for (text, from, to, part) in table {
        assert!(text.contains(from), "{from}");
        refused(&text.replacen(from, to, 1), part);
    }
    refused("{}", "neither");
    refused("[1,2]", "a list, not an object");
    refused(&"[".repeat(100_000), "a list, not an object");
    refused(&format!("{{\"layers\":{}", "[".repeat(100_000)), "EOF while parsing");
}

#[test]
fn nothing_that_fits_is_a_proof_with_a_reason() {
    let reason = |text: &str, overrides: Overrides| {
        let problem = read(text.as_bytes(), &overrides).unwrap();
        assert_eq!(problem.solve(&Control::default()).stop_reason, StopReason::Infeasible);
        no_fit(&problem)
    };
    let memory = |bytes| Overrides { memory_bytes: Some(bytes), ..Overrides::default() };
    assert!(reason(PIPER, memory(5.0)).contains("layer 2 alone takes at least 6 bytes"));
    let one = Overrides { devices: Some(1), ..memory(10.0) };
    assert!(reason(PIPER, one).contains("together"));
    assert!(reason(TABLE, memory(2.0)).contains("all stages together do not fit 4 devices of 2 bytes"));
    let text = PIPER.replace(
        "{\"1\":[{\"id\":\"vanilla\",\"timePerSample\":2.5",
        "{\"8\":[{\"id\":\"vanilla\",\"timePerSample\":2.5",
    );
    assert!(reason(&text, Overrides::default()).contains("layer 2 has no option for 3 devices"));
}

#[test]
fn a_stopped_search_returns_a_valid_bound() {
    let problem = read(LAYERS.as_bytes(), &Overrides::default()).unwrap();
    let outcome = problem.solve(&Control { stop: &|| true, ..Control::default() });
    let best = problem.solve(&Control::default());
    assert!(outcome.lower_bound_seconds <= best.objective_seconds * (1.0 + 1e-9));
    assert!(best.proved_optimal());
    assert_eq!(best, problem.solve(&Control::default()));
    assert!(matches!(problem, Problem::Layers(_)));
}

#[test]
fn a_wide_graph_with_too_many_suffixes_still_gets_stages_and_a_bound() {
    // Forty independent layers have 2^40 suffixes; their times differ, so that no two are exchangeable.
    let layers: Vec<String> = (0..40)
        .map(|v| {
            format!("{{\"name\":\"{v}\",\"options\":{{\"1\":[{{\"id\":\"o\",\"seconds\":{}}}]}}}}", v + 1)
        })
        .collect();
    let text = format!(
        "{{\"devices\":4,\"memory_bytes\":9,\"micro_batches\":1,\"bandwidth_bytes_per_second\":1,\"layers\":[{}]}}",
        layers.join(",")
    );
    let overrides = Overrides { micro_batches: Some(4), ..Overrides::default() };
    let problem = read(text.as_bytes(), &overrides).unwrap();
    let outcome = problem.solve(&Control { memory_bytes: 1 << 20, ..Control::default() });
    assert!(outcome.stages.is_some());
    assert!(outcome.lower_bound_seconds > 0.0 && outcome.lower_bound_seconds <= outcome.objective_seconds);
}
