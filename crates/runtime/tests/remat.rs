//! Recomputed steps compute the bits of stored ones: random sets of forward ops of whole models, dropout included.

use proptest::prelude::*;
use shardwright_graph::{
    Graph, OpId, Optimizer, Phase, RecomputePolicy, recomputed_ops, remat, remat_whole, verify::verify,
};
use shardwright_runtime::Serial;
use shardwright_zoo::{BuildOptions, build};

/// Small models of all families, in f32, so that every rounding shows.
const MODELS: [&str; 8] = [
    "mlp:batch=8,input=12,hidden=8,layers=3,classes=6",
    "gpt:batch=2,layers=2,hidden=8,heads=4,vocab=12,seq=4,dropout=0.3",
    "lenet5:batch=4,image=12,width=0.5,classes=4",
    "resnet101:batch=2,depth=50,image=32,width=0.0625,classes=4",
    "bert:batch=2,layers=1,hidden=8,heads=2,ffn=12,vocab=12,seq=4",
    "moe:batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4",
    "nmt:batch=4,seq=4,hidden=6,vocab=12",
    "dlrm:batch=4,tables=2,rows=8,dim=4,dense=6,bottom=6,top=6,lookups=2",
];

fn forward_ops(graph: &Graph) -> Vec<OpId> {
    graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward).collect()
}

/// Losses and all carried tensors after some steps, as bits.
fn trained(graph: &Graph, seed: u64) -> Vec<u64> {
    let mut run = Serial::new(graph, seed, &[]);
    let mut bits = Vec::new();
    for _ in 0..3 {
        run.step().unwrap();
        bits.extend(run.loss().map(f64::to_bits));
    }
    for carry in &graph.carries {
        let value = run.value(carry.old).unwrap();
        bits.extend(value.to_f64_vec().into_iter().map(f64::to_bits));
    }
    bits
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn recomputed_is_stored_to_the_bit(
        model in prop::sample::select(MODELS.to_vec()),
        seed in 0u64..1000,
        chosen in prop::collection::vec(any::<bool>(), 64),
    ) {
        let options = BuildOptions { optimizer: Optimizer::adam(0.01), ..BuildOptions::default() };
        let base = build(model, &options).unwrap();
        let named: Vec<OpId> = forward_ops(&base).into_iter().filter(|op| chosen[op.index() % 64]).collect();
        let graph = remat(&base, &named).unwrap();
        let clones = recomputed_ops(&graph);
        prop_assert!(clones.iter().all(|op| named.contains(op)));
        prop_assert_eq!(graph.ops.len(), base.ops.len() + clones.len());
        prop_assert_eq!(trained(&graph, seed), trained(&base, seed));
    }
}

#[test]
fn whole_blocks_run_again_with_results_that_nothing_reads() {
    let model = "gpt:batch=2,layers=3,hidden=8,heads=4,vocab=12,seq=4,dropout=0.3";
    let base = build(model, &BuildOptions::default()).unwrap();
    let named = RecomputePolicy::Full.ops(&base);
    let (needed, whole) = (remat(&base, &named).unwrap(), remat_whole(&base, &named).unwrap());
    let clones = |graph: &Graph| {
        let ops = recomputed_ops(graph).into_iter();
        ops.map(|op| base.node(op).name.clone()).collect::<Vec<_>>()
    };
    for block in 0..3 {
        let product = format!("blocks.{block}.mlp.fc2");
        assert!(!clones(&needed).contains(&product) && clones(&whole).contains(&product));
    }
    assert_eq!(recomputed_ops(&whole), named);
    verify(&whole).unwrap();
    assert_eq!(trained(&whole, 7), trained(&base, 7));
    // What has a clone says all: the same clones come from their originals.
    assert_eq!(remat_whole(&base, &recomputed_ops(&whole)).unwrap(), whole);
    assert_eq!(remat_whole(&base, &recomputed_ops(&needed)).unwrap(), needed);
}

#[test]
fn everything_can_be_recomputed() {
    for model in MODELS {
        let base = build(model, &BuildOptions::default()).unwrap();
        let graph = remat(&base, &forward_ops(&base)).unwrap();
        assert!(!recomputed_ops(&graph).is_empty(), "{model}");
        assert_eq!(trained(&graph, 7), trained(&base, 7), "{model}");
    }
}
