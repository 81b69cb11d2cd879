//! `shardwright models`, as a user or a script meets it.

use crate::{json, shardwright};

#[test]
fn models_are_listed_with_their_sizes() {
    let list = json(&["models", "--json"]);
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 16);
    let vgg = list.iter().find(|m| m["name"] == "vgg16").unwrap();
    assert_eq!(vgg["parameters"], 138_357_544);
    assert!(vgg["ops"].as_u64().unwrap() > 100);
    assert!(vgg["flops_per_step"].as_u64().unwrap() > 1_000_000_000_000);
}

#[test]
fn a_model_with_options_is_described_as_it_would_be_built() {
    let gpt = json(&["models", "gpt:layers=24,hidden=1024,heads=16", "--json"]);
    assert_eq!(gpt["parameters"], 354_823_168);
    let options = gpt["options"].as_array().unwrap();
    assert!(options.iter().any(|o| o["name"] == "seq" && o["default"] == "1024"));
}

#[test]
fn a_bad_model_is_bad_input() {
    let check = |model: &str, part: &str| {
        let output = shardwright(&["models", model]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{model}");
        assert!(output.stdout.is_empty() && text.contains(part), "{model}: {text}");
    };
    check("vgg", "vgg16");
    check("vgg16:lairs=3", "`lairs`");
    check("gpt:heads=7", "heads=7");
}
