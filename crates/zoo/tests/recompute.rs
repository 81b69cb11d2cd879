//! Policies of recomputation on models that people train: blocks are those of trainers, and what is kept is what they keep.

use shardwright_graph::{Graph, RecomputePolicy, recomputed_ops, remat};
use shardwright_zoo::{BuildOptions, build};
use std::collections::BTreeSet;

fn step(spec: &str) -> Graph {
    build(spec, &BuildOptions::default()).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

/// The names of the ops that a policy clones.
fn recomputed(graph: &Graph, policy: RecomputePolicy) -> BTreeSet<String> {
    let variant = remat(graph, &policy.ops(graph)).unwrap();
    recomputed_ops(&variant).into_iter().map(|op| graph.node(op).name.clone()).collect()
}

const LLAMA: &str = "llama:batch=2,layers=3,hidden=16,heads=4,kv_heads=2,ffn=24,vocab=32,seq=8";

#[test]
fn full_keeps_only_the_inputs_of_transformer_blocks() {
    let graph = step(LLAMA);
    let again = recomputed(&graph, RecomputePolicy::Full);
    for block in 0..3 {
        let in_block = |name: &str| again.contains(&format!("blocks.{block}.{name}"));
        for name in
            ["attn.norm", "attn.q", "attn.v", "attn.context", "attn.residual", "mlp.norm", "mlp.gated"]
        {
            assert!(in_block(name), "{name} of block {block} in {again:?}");
        }
        // No backward op reads what the residual adds, and the block's result is the next block's input.
        assert!(!in_block("mlp.down") && !in_block("mlp.residual"), "{again:?}");
    }
    assert!(again.iter().all(|name| name.starts_with("blocks.")), "{again:?}");
    assert!(recomputed(&graph, RecomputePolicy::Off).is_empty());
}

#[test]
fn selective_is_torchtitans_rule_where_attention_is_fused() {
    let again = recomputed(&step(LLAMA), RecomputePolicy::Selective);
    let in_block = |name: &str| again.contains(&format!("blocks.1.{name}"));
    // Every second product with a weight: k, out, up. The others and attention are kept.
    let products = ["attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down"];
    let recomputed: Vec<&str> = products.into_iter().filter(|name| in_block(name)).collect();
    assert_eq!(recomputed, ["attn.k", "attn.out", "mlp.up"]);
    assert!(!in_block("attn.context"));
    for name in
        ["attn.norm", "attn.q.rotary.rotated", "attn.residual", "mlp.norm", "mlp.gate.silu", "mlp.gated"]
    {
        assert!(in_block(name), "{name} in {again:?}");
    }
}

#[test]
fn selective_is_the_attention_core_where_scores_are_stored() {
    // Capped scores are stored: attention is a product, a softmax, a product.
    let graph = step("gemma2-2b:batch=1,layers=2,seq=16");
    let kinds = |layer: &str| {
        let variant = remat(&graph, &RecomputePolicy::Selective.ops(&graph)).unwrap();
        let ops = recomputed_ops(&variant).into_iter().map(|op| graph.node(op));
        let own = ops.filter(|node| node.name.starts_with(layer));
        own.map(|node| (node.name.clone(), node.op.kind())).collect::<Vec<_>>()
    };
    let own = kinds("blocks.1.");
    assert!(own.iter().any(|(_, kind)| *kind == "softmax"), "{own:?}");
    assert_eq!(own.iter().filter(|(_, kind)| *kind == "contract").count(), 1, "the scores: {own:?}");
    assert!(own.iter().all(|(name, _)| name.starts_with("blocks.1.attn.")), "{own:?}");
}

#[test]
fn elementwise_keeps_products_attention_statistics_and_exchanges_of_tokens() {
    let moe = "moe:batch=2,layers=2,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4";
    for spec in [LLAMA, moe, "gemma2-2b:batch=1,layers=2,seq=16", "resnet101:batch=2,depth=50,image=64"] {
        let graph = step(spec);
        let kind = |name: &str| graph.ops.iter().find(|node| node.name == name).map(|node| node.op.kind());
        let again = recomputed(&graph, RecomputePolicy::Elementwise);
        assert!(!again.is_empty(), "{spec}");
        for name in &again {
            let kept = ["contract", "linear", "conv", "attention", "dispatch", "combine", "mean", "variance"];
            assert!(!kept.contains(&kind(name).unwrap()), "{spec}: {name} in {again:?}");
        }
        let full = recomputed(&graph, RecomputePolicy::Full);
        assert!(again.is_subset(&full), "{spec}: {:?}", again.difference(&full).collect::<Vec<_>>());
    }
    let again = recomputed(&step(LLAMA), RecomputePolicy::Elementwise);
    for name in ["attn.norm", "attn.residual", "mlp.norm", "mlp.gate.silu", "mlp.gated"] {
        assert!(again.contains(&format!("blocks.1.{name}")), "{name} in {again:?}");
    }
}

#[test]
fn a_policy_that_keeps_no_less_recomputes_nothing_more() {
    for spec in [LLAMA, "gemma2-2b:batch=1,layers=2,seq=16", "vgg16:batch=1,image=32"] {
        let graph = step(spec);
        for (own, other) in
            RecomputePolicy::ALL.iter().flat_map(|own| RecomputePolicy::ALL.map(|other| (own, other)))
        {
            if own.keeps_no_less_than(other) {
                let (own, other) = (recomputed(&graph, *own), recomputed(&graph, other));
                assert!(own.is_subset(&other), "{spec}: {own:?} {other:?}");
            }
        }
    }
}

#[test]
fn convolutions_are_kept_by_selective_and_recomputed_by_full() {
    let graph = step("resnet101:batch=2,depth=50,image=64");
    let kind = |name: &str| graph.ops.iter().find(|node| node.name == name).map(|node| node.op.kind());
    let selective = recomputed(&graph, RecomputePolicy::Selective);
    assert!(
        !selective.is_empty() && selective.iter().all(|name| kind(name) != Some("conv")),
        "{selective:?}"
    );
    let full = recomputed(&graph, RecomputePolicy::Full);
    let convolutions = graph.ops.iter().filter(|node| node.op.kind() == "conv").count();
    let again = full.iter().filter(|name| kind(name) == Some("conv")).count();
    assert!(again * 2 > convolutions, "{again} of {convolutions}");
}

#[test]
fn every_model_has_blocks() {
    for spec in [
        "mlp:batch=8,input=12,hidden=8,layers=9,classes=6",
        "vgg16:batch=1,image=32",
        "densenet121:batch=1,image=32",
        "inception_v3:batch=1,image=96",
        "bert:batch=2,layers=3,hidden=8,heads=2,ffn=12,vocab=12,seq=4",
        "transformer:batch=2,layers=2,hidden=8,heads=2,ffn=12,vocab=12,seq=4",
        "moe:batch=2,layers=2,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4",
    ] {
        let graph = step(spec);
        for policy in [RecomputePolicy::Elementwise, RecomputePolicy::Selective, RecomputePolicy::Full] {
            let again = recomputed(&graph, policy);
            assert!(!again.is_empty(), "{spec}: {}", policy.name());
        }
    }
}
