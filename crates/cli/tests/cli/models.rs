//! `shardwright models`, as a user or a script meets it.

use crate::{json, refused, shardwright};

#[test]
fn models_are_listed_with_their_sizes() {
    let list = json(&["models", "--json"]);
    let list = list.as_array().unwrap();
    assert!(list.len() > 50, "{}", list.len());
    let llama = list.iter().find(|m| m["name"] == "llama3-8b").unwrap();
    assert_eq!(llama["parameters"], 8_030_261_248_u64);
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
fn a_config_file_is_described_and_bad_ones_name_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let path = path.to_str().unwrap();
    let config = |heads: u64, kind: &str| {
        let text = format!(
            r#"{{"model_type": "{kind}", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": {heads},
            "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 32}}"#
        );
        std::fs::write(path, text).unwrap();
    };
    config(4, "llama");
    let model = json(&["models", path, "--batch", "2", "--seq", "8", "--json"]);
    assert_eq!(model["parameters"], 2 * 128 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64));
    assert_eq!(model["inputs"][0], "tokens i32[2,8]");
    let plan = json(&["plan", path, "--batch", "8", "--seq", "8", "--machine", "4xa100", "--json"]);
    assert!(plan["throughput"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    config(5, "llama");
    refused(&["plan", path, "--batch", "8"], "`num_attention_heads`: 5 does not divide hidden_size = 64");
    config(4, "lama");
    refused(&["plan", path], "`model_type`: `lama` is not known; did you mean `llama`?");
    config(4, "bert");
    refused(&["plan", path, "--seq", "33"], "32 learned positions, so a sequence of 33 tokens is too long");
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
