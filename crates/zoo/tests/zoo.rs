//! The zoo, compared with published parameter counts, and under hostile requests.

use shardwright_graph::{FactorKind, Graph, Optimizer, Phase, Role, factor_kinds, ops::Op, verify::verify};
use shardwright_zoo::{BuildOptions, FAMILIES, build};

fn graph(spec: &str) -> Graph {
    build(spec, &BuildOptions::default()).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

fn forward(spec: &str) -> Graph {
    let options = BuildOptions { training: false, ..BuildOptions::default() };
    build(spec, &options).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

fn error(spec: &str) -> String {
    match build(spec, &BuildOptions::default()) {
        Ok(graph) => panic!("{spec} built {} ops", graph.ops.len()),
        Err(error) => error.to_string(),
    }
}

/// Parameters whose name begins with one of these prefixes.
fn parameters_of(graph: &Graph, prefixes: &[&str]) -> u64 {
    let named = |name: &str| prefixes.iter().any(|p| name.starts_with(p));
    let shapes = graph.parameters().map(|t| graph.tensor(t)).filter(|t| named(&t.name));
    shapes.map(|t| t.ty.shape.elements()).sum()
}

#[test]
fn parameter_counts_are_the_published_ones() {
    let check = |spec: &str, published: u64| assert_eq!(forward(spec).parameter_count(), published, "{spec}");
    // torchvision's model pages.
    check("alexnet", 61_100_840);
    check("vgg16", 138_357_544);
    check("resnet101", 44_549_160);
    check("resnet101:depth=50", 25_557_032);
    check("resnet101:depth=152", 60_192_808);
    check("inception_v3", 23_834_568);
    check("densenet121", 7_978_856);
    // The modern form of LeNet-5.
    check("lenet5", 61_706);
    // OpenAI's GPT-2 checkpoints.
    check("gpt", 124_439_808);
    check("gpt:layers=24,hidden=1024,heads=16", 354_823_168);
    check("gpt:layers=36,hidden=1280,heads=20", 774_030_080);
    check("gpt:layers=48,hidden=1600,heads=25", 1_557_611_200);
    // bert-base-uncased with both pre-training heads.
    check("bert", 110_106_428);
    // Meta's and Mistral's checkpoints.
    check("llama", 1_235_814_400);
    check("llama:layers=32,hidden=4096,heads=32,kv_heads=32,ffn=11008,vocab=32000,tied=no", 6_738_415_616);
    check("llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,tied=no", 8_030_261_248);
    check("moe:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336", 46_702_792_704);
}

#[test]
fn berts_encoder_and_pooler_have_the_published_count() {
    let parts = ["embeddings.", "blocks.", "pooler."];
    assert_eq!(parameters_of(&forward("bert"), &parts), 109_482_240);
}

#[test]
fn the_transformers_body_is_pytorchs() {
    let graph = forward("transformer");
    assert_eq!(parameters_of(&graph, &["encoder.", "decoder."]), 44_140_544);
    assert_eq!(graph.parameter_count(), 44_140_544 + 37_000 * 512);
}

#[test]
fn recurrent_and_recommendation_models_have_the_parameters_of_their_formulas() {
    let lstm = |inputs: u64, hidden: u64| 4 * hidden * (inputs + hidden + 1);
    let check = |spec: &str, expected: u64| assert_eq!(forward(spec).parameter_count(), expected, "{spec}");
    let table = 100_000 * 2048;
    check("rnnlm", 2 * table + 100_000 + 2 * lstm(2048, 2048));
    check("rnntc", 20_000 * 1024 + 4 * lstm(1024, 1024) + 1024 * 2 + 2);
    let attention = 3 * 1024 * 1024;
    check("nmt", 3 * 32_000 * 1024 + 32_000 + 4 * lstm(1024, 1024) + attention);
    let mlp = |sizes: &[u64]| sizes.windows(2).map(|s| (s[0] + 1) * s[1]).sum::<u64>();
    let top = mlp(&[9 * 64, 1024, 1024, 1024, 1]);
    check("dlrm", 8 * 64_000_000 + mlp(&[64, 512, 512, 64]) + top);
    check("mlp", mlp(&[784, 1024, 1024, 1024, 10]));
}

#[test]
fn every_input_begins_with_the_batch_and_layers_split_it_as_samples() {
    for family in FAMILIES {
        // A size that no other dimension of the model has.
        let spec = format!("{}:batch=1013", family.name);
        let graph = forward(&spec);
        for tensor in graph.tensors.iter().filter(|t| t.role == Role::Input) {
            assert_eq!(tensor.ty.shape.first(), Some(&1013), "{spec}: {}", tensor.name);
        }
        let kinds = factor_kinds(&graph);
        for id in graph.op_ids().filter(|&id| matches!(graph.node(id).op, Op::Lstm(_) | Op::Conv(_))) {
            let rule = graph.rule(id);
            let factors = rule.factors.iter().zip(&kinds[id.index()]);
            let sizes: Vec<u64> =
                factors.filter(|(_, k)| **k == FactorKind::Sample).map(|(f, _)| f.size).collect();
            assert_eq!(sizes, [1013], "{spec}: {}", graph.node(id).name);
        }
    }
}

#[test]
fn unrolling_shares_weights() {
    for model in ["rnnlm", "rnntc", "nmt"] {
        let (whole, unrolled) = (forward(model), forward(&format!("{model}:unroll=40")));
        assert_eq!(whole.parameter_count(), unrolled.parameter_count(), "{model}");
        let cells = |g: &Graph| g.ops.iter().filter(|n| matches!(n.op, Op::Lstm(_))).count();
        assert_eq!(cells(&unrolled), 40 * cells(&whole), "{model}");
    }
}

#[test]
fn every_model_builds_and_verifies_at_its_default_and_tiny_sizes() {
    for family in FAMILIES {
        for spec in [family.name.to_string(), format!("{}:{}", family.name, family.tiny)] {
            let graph = graph(&spec);
            assert_eq!(verify(&graph), Ok(()), "{spec}");
            assert_eq!(graph.name, spec);
            let loss = graph.tensor(graph.loss().expect("a loss"));
            assert_eq!(loss.ty.rank(), 0, "{spec}");
            // Every trained tensor is updated.
            let weights = graph.parameters().count();
            assert_eq!(graph.gradients.len(), weights, "{spec}");
            assert_eq!(graph.carries.len(), weights, "{spec}");
            assert!(graph.total_flops() > 0 && graph.total_flops() < u64::MAX, "{spec}");
        }
    }
}

#[test]
fn every_rule_of_every_model_keeps_the_invariants_of_rules() {
    for family in FAMILIES {
        for spec in [family.name.to_string(), format!("{}:{}", family.name, family.tiny)] {
            let graph = graph(&spec);
            for id in graph.op_ids() {
                let check = graph.rule(id).check(&graph.input_types(id), &graph.output_types(id));
                assert_eq!(check, Ok(()), "{spec}: {}", graph.node(id).name);
            }
        }
    }
}

#[test]
fn no_forward_op_is_computed_in_vain() {
    for family in FAMILIES {
        let graph = forward(&format!("{}:{}", family.name, family.tiny));
        let consumers = graph.consumers();
        for node in &graph.ops {
            let read =
                node.outputs.iter().any(|&t| !consumers.of(t).is_empty() || graph.outputs.contains(&t));
            assert!(read, "{}: nobody reads {}", family.name, node.name);
        }
    }
}

#[test]
fn optimizers_keep_their_state() {
    for (optimizer, states) in
        [(Optimizer::sgd(0.1), 0), (Optimizer::momentum(0.1, 0.9), 1), (Optimizer::adam(1e-3), 2)]
    {
        let options = BuildOptions { optimizer, ..BuildOptions::default() };
        let graph = build("lenet5", &options).unwrap();
        let weights = graph.parameters().count();
        assert_eq!(graph.sources(Role::OptimizerState).count(), states * weights);
    }
}

#[test]
fn the_batch_option_is_overridden_by_the_callers_batch() {
    let options = BuildOptions { batch: Some(6), ..BuildOptions::default() };
    for spec in ["mlp", "mlp:batch=400"] {
        let graph = build(spec, &options).unwrap();
        let input = graph.sources(Role::Input).next().unwrap();
        assert_eq!(graph.tensor(input).ty.shape[0], 6);
    }
    let none = BuildOptions { batch: Some(0), ..BuildOptions::default() };
    assert!(build("mlp", &none).is_err());
}

/// The graph for which SoyBean's cost formulas were published.
#[test]
fn soybeans_network_is_square_layers_relu_and_a_loss_that_only_samples_split() {
    let graph = graph("mlp:batch=400,hidden=300,layers=5,loss=elementwise");
    assert_eq!(graph.parameter_count(), 5 * 300 * 300);
    let forward: Vec<_> =
        graph.ops.iter().filter(|n| n.phase == Phase::Forward).map(|n| &n.name[..]).collect();
    let layers = (1..=5).flat_map(|i| [format!("fc{i}"), format!("relu{i}")]);
    let expected: Vec<_> = layers.chain(["loss.log_softmax".into(), "loss".into()]).collect();
    assert_eq!(forward, expected);

    // The loss and its gradient: only the sample dimension may be split.
    let mut judged = 0;
    for id in graph.op_ids() {
        if matches!(graph.node(id).op, Op::LogSoftmax(_) | Op::LogSoftmaxGrad(_)) {
            let rule = graph.rule(id);
            let free: Vec<_> = rule.factors.iter().filter(|f| !f.whole).map(|f| f.size).collect();
            assert_eq!(free, [400], "{}", graph.node(id).name);
            judged += 1;
        }
    }
    assert_eq!(judged, 2);

    // Backward: one product per weight, and one per input except the first layer's.
    let products =
        |phase| graph.ops.iter().filter(|n| n.phase == phase && matches!(n.op, Op::Contract(_))).count();
    assert_eq!((products(Phase::Forward), products(Phase::Backward)), (5, 9));
}

#[test]
fn dropout_is_for_training() {
    let drops = |g: &Graph| g.ops.iter().filter(|n| matches!(n.op, Op::Dropout(_))).count();
    assert_eq!(drops(&forward("alexnet")), 0);
    assert_eq!(drops(&graph("alexnet:dropout=0")), 0);
    assert_eq!(drops(&graph("alexnet")), 2 * 2, "two forward, and the same masks on the way back");
}

#[test]
fn element_types_reach_every_weight() {
    use shardwright_graph::DType;
    for family in FAMILIES {
        for (name, dtype) in [("f32", DType::F32), ("bf16", DType::Bf16), ("f64", DType::F64)] {
            let graph = graph(&format!("{}:{},dtype={name}", family.name, family.tiny));
            for t in graph.parameters() {
                assert_eq!(graph.tensor(t).ty.dtype, dtype, "{}: {}", family.name, graph.tensor(t).name);
            }
        }
    }
}

#[test]
fn requests_that_make_no_sense_name_the_problem_and_the_remedy() {
    let check = |spec: &str, parts: &[&str]| {
        let text = error(spec);
        for part in parts {
            assert!(text.contains(part), "{spec}: `{text}` lacks `{part}`");
        }
    };
    check("vgg17", &["`vgg17`", "did you mean `vgg16`", "shardwright models"]);
    check("", &["no model", "mlp"]);
    check("mlp:hiden=3", &["`hiden`", "hidden", "batch", "dtype"]);
    check("mlp:hidden", &["`hidden`", "key=value"]);
    check("mlp:hidden=3,,", &["key=value"]);
    check("mlp:hidden=3,hidden=4", &["hidden", "twice"]);
    check("mlp:hidden=", &["hidden=", "whole number"]);
    check("mlp:hidden=-1", &["hidden=-1", "from 1 to"]);
    check("mlp:layers=0", &["layers=0", "from 1 to 20000"]);
    check("mlp:dtype=f16", &["dtype=f16", "f32, bf16, mixed, fp8, f64"]);
    check("alexnet:dropout=nan", &["dropout=nan", "from 0 to 0.99"]);
    check("alexnet:width=inf", &["width=inf", "from 0.001 to 64"]);
    check("alexnet:image=16", &["image=16", "from 63"]);
    check("gpt:hidden=100,heads=12", &["hidden=100", "heads=12", "multiple"]);
    check("llama:hidden=6,heads=2,kv_heads=1", &["even"]);
    check("llama:kv_heads=3", &["heads=32", "kv_heads=3"]);
    check("moe:top_k=9", &["top_k=9", "experts=8"]);
    check("rnnlm:seq=20,unroll=40", &["seq=20", "unroll=40"]);
    check("rnnlm:layers=1000,unroll=4096", &["20000", "lower layers or unroll"]);
    check("mlp:loss=elementwise,classes=7", &["classes", "leave it out"]);
    check("transformer:hidden=9,heads=3", &["hidden=9", "even"]);
}

/// Sizes at the top of every domain, one at a time and all together, give an error or a graph in short time.
#[test]
fn absurd_sizes_end_in_an_error_or_a_graph() {
    use shardwright_zoo::Domain;
    for family in FAMILIES {
        let mut specs = vec![];
        let mut all = vec![];
        for option in family.options {
            let largest = match option.domain {
                Domain::Count { max, .. } => max.to_string(),
                Domain::Number { max, .. } => max.to_string(),
                Domain::Choice(words) => words[words.len() - 1].to_string(),
            };
            // Deep models are only slow to build without optimisation.
            let deep = matches!(option.name, "layers" | "tables" | "unroll");
            let pair = format!("{}={largest}", option.name);
            if !deep {
                specs.push(format!("{}:{pair}", family.name));
                all.push(pair);
            }
        }
        specs.push(format!("{}:{}", family.name, all.join(",")));
        for spec in specs {
            if let Ok(graph) = build(&spec, &BuildOptions::default()) {
                assert!(graph.total_flops() > 0, "{spec}");
            }
        }
    }
}

#[test]
fn deep_models_build() {
    assert!(graph("gpt:layers=200,hidden=64,heads=1,vocab=100,seq=8").ops.len() > 5000);
    assert!(graph("rnnlm:layers=20,unroll=100,hidden=8,vocab=50").ops.len() > 10_000);
}

#[test]
fn the_models_page_says_what_is_built() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/models.md");
    let page = std::fs::read_to_string(path).expect("docs/models.md");
    for family in FAMILIES {
        let count = thousands(forward(family.name).parameter_count());
        let batch = family.options.iter().find(|o| o.name == "batch").expect("a batch").default_text();
        let row = format!("| `{}` | {count} | {batch} |", family.name);
        assert!(page.contains(&row), "docs/models.md lacks `{row}`");
    }
    let rows = page.split("## ").find(|s| s.starts_with("Published relatives")).expect("a section");
    for row in rows.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let count = thousands(forward(cells[1].trim_matches('`')).parameter_count());
        assert_eq!(count, cells[3], "{row}");
    }
}

/// `1234567` as `1,234,567`.
fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
