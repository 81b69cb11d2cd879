//! The JSON form: what it looks like, that it holds everything, and that no text whatever can do harm.

mod common;

use common::{any_graph, mlp};
use proptest::prelude::*;
use serde_json::{Value, json};
use shardwright_graph::{Graph, ReadError, verify::verify};

#[test]
fn a_graph_is_written_one_line_per_tensor_and_op() {
    let text = mlp().to_json();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], r#"{"format":"shardwright-graph","version":1,"name":"mlp","#);
    assert_eq!(lines[2], r#"{"name":"x","type":"f32[64,100]","role":"input","init":{"normal":1.0}},"#);
    let op = r#"{"name":"fc0.matmul","op":{"kind":"contract","spec":"mk,kn->mn"},"inputs":[0,1],"outputs":[3],"layer":0,"phase":"forward"},"#;
    assert!(lines.contains(&op), "{text}");
    assert!(text.ends_with("\"carries\":[]}\n"));
}

/// Changes the MLP's JSON and checks what the reader says.
#[track_caller]
fn check(change: impl FnOnce(&mut Value), expected: &str) {
    let mut json: Value = serde_json::from_str(&mlp().to_json()).unwrap();
    change(&mut json);
    let error = Graph::from_json(json.to_string().as_bytes()).expect_err("read without error").to_string();
    assert!(error.contains(expected), "`{error}` does not say `{expected}`");
}

#[test]
fn errors_name_the_place() {
    check(|j| j["format"] = json!("network"), "field `format` is \"network\", not \"shardwright-graph\"");
    check(|j| drop(j.as_object_mut().unwrap().remove("format")), "field `format` is missing");
    check(|j| j["version"] = json!(2), "version 2 is not supported");
    check(|j| j["version"] = json!("1"), "invalid type: string \"1\", expected u64");
    check(|j| j["surprise"] = json!(2), "unknown field `surprise`");
    check(|j| drop(j.as_object_mut().unwrap().remove("layers")), "missing field `layers`");
    check(|j| j["ops"][1]["op"] = json!({"kind": "conjure"}), "op #1 `fc0.add`: unknown variant `conjure`");
    check(|j| j["ops"][0]["op"]["surprise"] = json!(1), "op #0 `fc0.matmul`: unknown field `surprise`");
    check(|j| j["ops"][0]["op"]["spec"] = json!("mk,kn"), "op #0 `fc0.matmul`: einsum `mk,kn` has no `->`");
    check(|j| j["ops"][3]["surprise"] = json!(1), "item 3: unknown field `surprise`");
    check(|j| j["ops"][3]["inputs"] = json!([-1]), "item 3: invalid value: integer `-1`");
    check(|j| j["ops"][3]["inputs"] = json!([1u64 << 32]), "item 3: invalid value");
    check(|j| j["ops"][3]["inputs"] = json!([9999]), "there is no tensor %9999");
    check(|j| j["ops"][3]["outputs"] = json!([9999]), "there is no tensor %9999");
    check(|j| j["ops"][3]["outputs"] = j["ops"][2]["outputs"].clone(), "which op #2 makes");
    check(|j| j["ops"][0]["inputs"][0] = j["ops"][2]["outputs"][0].clone(), "has not made yet (a cycle");
    check(|j| j["ops"][0]["layer"] = json!(1000), "there is no layer @1000");
    check(|j| j["layers"][0] = json!(1000), "there is no op #1000");
    check(|j| j["tensors"][1]["name"] = json!("x"), "tensor %1 `x`: another tensor has this name");
    check(|j| j["tensors"][0]["type"] = json!("f32[64"), "item 0: `f32[64` is not a tensor type");
    check(|j| j["tensors"][0]["type"] = json!("f32[18446744073709551615,2]"), "more than 2^48 elements");
    check(|j| j["tensors"][0]["type"] = json!("f32[18446744073709551616]"), "is not a tensor type");
    check(|j| j["tensors"][0]["type"] = json!("f32[64,101]"), "op #0 `fc0.matmul` (contract): einsum");
    check(|j| j["tensors"][0]["role"] = json!("weight"), "item 0: unknown variant `weight`");
    check(|j| j["gradients"][0] = json!([1]), "item 0: invalid length 1");
}

#[test]
fn text_that_is_not_json_is_placed_by_line_and_column() {
    let error = Graph::from_json(b"{\"format\":\"shardwright-graph\",\n oops").unwrap_err();
    assert_eq!(error.to_string(), "line 2, column 2: key must be a string");
    let error = Graph::from_json(b"").unwrap_err();
    assert!(matches!(error, ReadError::Syntax { .. }), "{error}");
    let deep = ["{\"format\":\"shardwright-graph\",\"version\":1,\"name\":", &"[".repeat(1_000_000)].concat();
    assert!(Graph::from_json(deep.as_bytes()).is_err());
    let twice = r#"{"format":"shardwright-graph","version":1,"version":1}"#;
    assert!(
        Graph::from_json(twice.as_bytes()).unwrap_err().to_string().contains("duplicate field `version`")
    );
    assert!(Graph::from_json(b"{\"format\":\"shardwright-graph\",\"name\":\"\xff\"}").is_err());
}

/// All places in a JSON value, as pointers.
fn places(value: &Value, at: String, all: &mut Vec<String>) {
    match value {
        Value::Array(items) => (0..items.len()).for_each(|i| places(&items[i], format!("{at}/{i}"), all)),
        Value::Object(fields) => fields.iter().for_each(|(k, v)| places(v, format!("{at}/{k}"), all)),
        _ => {}
    }
    all.push(at);
}

/// Reads a text; what comes out must be an error or a graph that passes the verifier and round trips.
fn survives(text: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(graph) = Graph::from_json(text) {
        prop_assert_eq!(verify(&graph), Ok(()));
        let again = Graph::from_json(graph.to_json().as_bytes());
        prop_assert_eq!(again.as_ref(), Ok(&graph));
        graph.total_flops();
        graph.parameter_count();
        shardwright_graph::factor_kinds(&graph);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn reading_what_was_written_gives_the_same_graph(graph in any_graph()) {
        let text = graph.to_json();
        let back = Graph::from_json(text.as_bytes());
        prop_assert_eq!(back.as_ref(), Ok(&graph));
        prop_assert_eq!(back.unwrap().to_json(), text);
    }

    #[test]
    fn changed_bytes_do_no_harm(
        graph in any_graph(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut text = graph.to_json().into_bytes();
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len()));
        }
        survives(&text)?;
    }

    #[test]
    fn changed_values_do_no_harm(
        graph in any_graph(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0..12usize, any::<prop::sample::Index>()), 1..4),
    ) {
        let mut json: Value = serde_json::from_str(&graph.to_json()).unwrap();
        for (at, how, from) in changes {
            let mut all = Vec::new();
            places(&json, String::new(), &mut all);
            let source = json.pointer(from.get::<String>(&all)).cloned().unwrap_or(Value::Null);
            let place = at.get(&all).clone();
            let (parent, field) = place.rsplit_once('/').unwrap_or(("", ""));
            if how == 0 {
                match json.pointer_mut(parent) {
                    Some(Value::Object(fields)) => drop(fields.remove(field)),
                    Some(Value::Array(items)) => drop(items.pop()),
                    _ => {}
                }
                continue;
            }
            let Some(value) = json.pointer_mut(&place) else { continue };
            *value = match (how, value.as_u64()) {
                (1, Some(n)) => json!(n.wrapping_add(1)),
                (2, Some(n)) => json!(n.saturating_sub(1)),
                (3, _) => json!(u64::MAX),
                (4, _) => json!(-1),
                (5, _) => json!(u32::MAX),
                (6, _) => json!("f32[4294967296,65536]"),
                (7, _) => json!([0, 0]),
                (8, _) => json!(1e308),
                (9, _) => json!(0),
                _ => source,
            };
        }
        survives(json.to_string().as_bytes())?;
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        survives(&bytes)?;
    }
}
