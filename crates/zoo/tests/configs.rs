//! Presets and config files: exact parameter counts, and hostile fields.

use serde_json::{Value, json};
use shardwright_graph::{Graph, ops::Op, verify::verify};
use shardwright_zoo::{BuildOptions, PRESETS, build, build_config, is_config, model_types};

fn forward(spec: &str) -> Graph {
    let options = BuildOptions { training: false, batch: Some(1), ..BuildOptions::default() };
    build(spec, &options).unwrap_or_else(|error| panic!("{spec}: {error}"))
}

#[test]
fn presets_have_the_published_numbers_of_parameters() {
    for (name, published) in [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-7b", 8_537_680_896),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("gemma3-1b", 999_885_952),
        ("phi-2", 2_779_683_840),
        ("phi3-mini", 3_821_079_552),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        // 12 h^2 + 13 h per layer, both tables and the last norm; the paper rounds to 175.0 B.
        ("gpt3-175b", 174_604_259_328),
        ("gpt-neox-20b", 20_554_567_680),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        // Without the router's corrections, 256 numbers in each of 58 layers: 671,026,419,200 with them.
        ("deepseek-v3", 671_026_404_352),
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
        ("t5-small", 60_506_624),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("vit-b16", 86_567_656),
        ("vit-l16", 304_326_632),
        ("vit-h14", 632_045_800),
    ] {
        assert_eq!(forward(name).parameter_count(), published, "{name}");
    }
}

/// A small config of every family, with every variant that its reader knows.
fn tiny() -> Vec<Value> {
    let llama = json!({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 40, "head_dim": 4});
    let of = |model_type: &str, more: Value| {
        let mut config = llama.clone();
        config["model_type"] = model_type.into();
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let experts = json!({"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12});
    let gemma = json!({"sliding_window": 2, "sliding_window_pattern": 2, "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0});
    let latent = json!({"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5});
    let none = json!({});
    vec![
        of("llama", json!({"attention_bias": true, "tie_word_embeddings": true})),
        of("llama", json!({"mlp_bias": true})),
        of("mistral", json!({"sliding_window": 3})),
        of("mixtral", experts.clone()),
        of("qwen2", none.clone()),
        of("qwen2_moe", experts.clone()),
        of("qwen3", none.clone()),
        of("qwen3_moe", experts),
        of("gemma", none.clone()),
        of("gemma2", gemma.clone()),
        of("gemma3_text", gemma.clone()),
        json!({"model_type": "gemma3", "text_config": of("gemma3_text", gemma)}),
        of("phi", json!({"partial_rotary_factor": 0.5})),
        of("phi", json!({"partial_rotary_factor": 0.5, "qk_layernorm": true, "tie_word_embeddings": true})),
        of("phi3", none.clone()),
        json!({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 9, "vocab_size": 40}),
        of("gpt_neox", json!({"rotary_pct": 0.5})),
        of("deepseek_v2", latent.clone()),
        of("deepseek_v2", {
            let mut limited = latent.clone();
            limited["topk_method"] = "group_limited_greedy".into();
            limited
        }),
        of("deepseek_v3", {
            let mut plain = latent;
            plain["q_lora_rank"] = Value::Null;
            plain
        }),
        of("bert", json!({"max_position_embeddings": 9})),
        json!({"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40,
            "relative_attention_num_buckets": 4, "relative_attention_max_distance": 3}),
        json!({"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 5}),
    ]
}

/// Counts of Transformers 5 for configs whose fields change the number of parameters.
#[test]
fn fields_that_change_the_parameters_count() {
    let base = |model_type: &str, hidden: u64, layers: u64, kv_heads: u64, inner: u64, vocab: u64| {
        json!({"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": 64})
    };
    let with = |mut config: Value, more: Value| {
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40});
    let latent = json!({"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 2, "kv_lora_rank": 12, "q_lora_rank": 20,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 4, "topk_group": 2,
        "attention_bias": true});
    let qwen2 = with(base("qwen2_moe", 32, 6, 1, 40, 137), experts.clone());
    let qwen3 = with(base("qwen3_moe", 32, 3, 1, 40, 100), experts);
    let phi = json!({"partial_rotary_factor": 0.5, "qk_layernorm": true});
    let small = |model_type: &str| base(model_type, 32, 2, 2, 24, 50);
    let biases = json!({"attention_bias": true, "mlp_bias": true});
    // No rank of queries, no number of shared experts and of layers without experts: the families' defaults.
    let short = json!({"moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "num_experts": 4, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
        "num_attention_heads": 2, "n_group": 2, "topk_group": 1});
    let vit = json!({"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 88, "image_size": 32, "patch_size": 8});
    for (config, count) in [
        (with(base("llama", 96, 2, 1, 40, 137), json!({"attention_bias": true, "mlp_bias": true})), 96_736),
        (with(qwen2, json!({"decoder_sparse_step": 2, "mlp_only_layers": [0], "qkv_bias": false})), 75_712),
        (with(qwen3, json!({"decoder_sparse_step": 2, "mlp_only_layers": []})), 31_376),
        (with(base("phi", 32, 1, 1, 88, 100), phi.clone()), 15_052),
        (with(with(base("phi", 64, 3, 4, 40, 100), phi), json!({"tie_word_embeddings": true})), 72_796),
        (with(base("deepseek_v3", 32, 1, 4, 88, 100), latent), 21_128),
        (with(small("mistral"), biases.clone()), 14_112),
        (with(small("qwen2"), biases.clone()), 14_240),
        (with(small("phi3"), biases.clone()), 14_112),
        (with(with(small("gemma"), biases.clone()), json!({"head_dim": 8})), 12_704),
        (with(with(small("qwen2_moe"), short.clone()), json!({"num_attention_heads": 4})), 1_097_440),
        (with(with(base("deepseek_v2", 16, 4, 2, 24, 50), short.clone()), biases), 196_952),
        (with(base("deepseek_v3", 16, 4, 2, 24, 50), short), 186_492),
        (
            with(
                base("bert", 96, 1, 4, 88, 137),
                json!({"architectures": ["BertForMaskedLM"], "type_vocab_size": 1}),
            ),
            83_937,
        ),
        (vit, 16_986),
    ] {
        let seq = (config["model_type"] != "vit").then_some(8);
        assert_eq!(of_config(&config, seq).map(|graph| graph.parameter_count()), Ok(count), "{config}");
    }
    let wrong = with(
        base("qwen2_moe", 32, 6, 1, 40, 137),
        json!({"mlp_only_layers": [6], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    );
    assert!(of_config(&wrong, None).unwrap_err().contains("mlp_only_layers"));
}

fn of_config(config: &Value, seq: Option<u64>) -> Result<Graph, String> {
    let options = BuildOptions { batch: Some(2), seq, ..BuildOptions::default() };
    build_config("config.json", config.to_string().as_bytes(), &options).map_err(|error| error.to_string())
}

#[test]
fn every_family_builds_a_whole_step_whose_weights_are_all_trained() {
    let configs = tiny();
    for model_type in model_types() {
        assert!(
            configs.iter().any(|config| config["model_type"] == model_type),
            "{model_type} is not tested"
        );
    }
    for config in &configs {
        let seq = (config["model_type"] != "vit").then_some(6);
        let graph = of_config(config, seq).unwrap_or_else(|error| panic!("{config}: {error}"));
        assert_eq!(verify(&graph), Ok(()), "{config}");
        assert_eq!(graph.gradients.len(), graph.parameters().count(), "{config}");
        let size = graph.step_size();
        assert_eq!((size.samples, size.tokens), (Some(2), seq.map(|seq| 2 * seq)), "{config}");
        assert!(is_config(config.to_string().as_bytes()), "{config}");
    }
    assert!(!is_config(b"{\"name\": \"a graph\"}") && !is_config(b"[1]") && !is_config(b"{"));
}

#[test]
fn presets_take_options_of_their_own() {
    let graph = forward("llama3-8b:seq=64,layers=2,dtype=bf16");
    assert_eq!(graph.step_size().tokens, Some(64));
    assert_eq!(graph.parameter_count(), 2 * 218_112_000 + 2 * 128_256 * 4096 + 4096);
    for preset in PRESETS {
        assert_eq!(
            forward(&format!("{}:layers=1", preset.name)).step_size().samples,
            Some(1),
            "{}",
            preset.name
        );
    }
    let error = |spec: &str| build(spec, &BuildOptions::default()).unwrap_err().to_string();
    assert!(error("vit-b16:seq=4").contains("leave seq out"), "{}", error("vit-b16:seq=4"));
    assert!(error("lama3-8b").contains("did you mean `llama3-8b`?"), "{}", error("lama3-8b"));
    assert!(error("gpt2:seq=2048").contains("1024 learned positions"), "{}", error("gpt2:seq=2048"));
}

/// A window hides what lies further back, and nothing else: the mask op is there in layers with a window only.
#[test]
fn windows_are_in_the_layers_that_have_them() {
    let windows = |config: &Value| {
        let graph = of_config(config, Some(6)).unwrap();
        // Capped scores are stored, with a mask of their own.
        let named = graph.ops.iter().filter(|node| match &node.op {
            Op::Attention(attention) => attention.before.is_some(),
            Op::Compare(_) => node.name.ends_with(".window"),
            _ => false,
        });
        named.map(|node| node.name.clone()).collect::<Vec<_>>()
    };
    let config = |model_type: &str| {
        let all = tiny();
        all.into_iter().find(|config| config["model_type"] == model_type).unwrap()
    };
    assert_eq!(windows(&config("mistral")), ["blocks.0.attn.context", "blocks.1.attn.context"]);
    assert_eq!(windows(&config("gemma2")), ["blocks.0.attn.mask.window"]);
    assert_eq!(windows(&config("llama")), Vec::<String>::new());
}

#[test]
fn bad_fields_are_named_with_their_values() {
    let llama = &tiny()[0];
    let with = |field: &str, value: Value| {
        let mut config = llama.clone();
        config[field] = value;
        of_config(&config, None).unwrap_err()
    };
    for (field, value, part) in [
        ("num_attention_heads", json!(3), "`num_key_value_heads`: 2 does not divide num_attention_heads = 3"),
        (
            "num_hidden_layers",
            json!(1_000_000_000),
            "`num_hidden_layers`: 1000000000 is not a whole number from 1 to 1000",
        ),
        ("hidden_size", json!(-16), "`hidden_size`: -16 is not a whole number"),
        ("hidden_size", json!("wide"), "`hidden_size`: \"wide\" is not a whole number"),
        ("vocab_size", Value::Null, "`vocab_size`: is missing"),
        ("intermediate_size", json!(0), "`intermediate_size`: 0 is not"),
        ("hidden_act", json!("magic"), "`hidden_act`: `magic` is no known activation"),
        ("head_dim", json!(3), "`head_dim`: 3 numbers of a head cannot be rotated in pairs"),
        ("rope_theta", json!(-1.0), "`rope_theta`: -1.0 is not a positive number"),
        ("tie_word_embeddings", json!(1), "`tie_word_embeddings`: 1 is neither true nor false"),
        ("model_type", json!("lama"), "`model_type`: `lama` is not known; did you mean `llama`?"),
        ("model_type", json!("mamba"), "`model_type`: `mamba` is not known; "),
        ("model_type", Value::Null, "`model_type`: is missing; known are llama, "),
    ] {
        let message = with(field, value);
        assert!(message.contains(part), "{message}");
    }
    let mut plain = llama.clone();
    plain.as_object_mut().unwrap().remove("head_dim");
    plain["num_attention_heads"] = json!(6);
    plain["num_key_value_heads"] = json!(6);
    let message = of_config(&plain, None).unwrap_err();
    assert!(message.contains("`num_attention_heads`: 6 does not divide hidden_size = 16"), "{message}");
    let mut experts = tiny().into_iter().find(|config| config["model_type"] == "mixtral").unwrap();
    experts["num_experts_per_tok"] = json!(5);
    let message = of_config(&experts, None).unwrap_err();
    assert!(message.contains("`num_experts_per_tok`: 5 is more than num_local_experts = 4"), "{message}");
    let deepseek = tiny().into_iter().find(|config| config["model_type"] == "deepseek_v3").unwrap();
    for (field, value, part) in [
        ("n_group", json!(3), "`n_group`: 3 does not divide n_routed_experts = 8"),
        ("topk_group", json!(5), "`topk_group`: 5 is more than n_group = 4"),
        (
            "num_experts_per_tok",
            json!(5),
            "`num_experts_per_tok`: 5 experts are more than 2 groups of 2 have",
        ),
        ("num_experts_per_tok", json!(9), "`num_experts_per_tok`: 9"),
        ("scoring_func", json!("tanh"), "`scoring_func`: `tanh` is not known; known are softmax, sigmoid"),
        ("topk_method", json!("best"), "`topk_method`: `best` is not known; known are greedy"),
        ("routed_scaling_factor", json!(0), "`routed_scaling_factor`: 0"),
        ("norm_topk_prob", json!("no"), "`norm_topk_prob`: \"no\" is neither true nor false"),
    ] {
        let mut config = deepseek.clone();
        config[field] = value;
        let message = of_config(&config, None).unwrap_err();
        assert!(message.contains(part), "{message}");
    }
    let bert = tiny().into_iter().find(|config| config["model_type"] == "bert").unwrap();
    let message = of_config(&bert, Some(10)).unwrap_err();
    assert!(message.contains("9 learned positions, so a sequence of 10 tokens is too long"), "{message}");
}
