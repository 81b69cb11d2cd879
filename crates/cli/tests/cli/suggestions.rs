//! Mistyped names: every message says which name was meant.

use crate::{refused, shardwright};

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

#[test]
fn every_mistyped_name_is_answered_with_the_nearest() {
    let cases = [
        ("--machine 8xh10", "did you mean `8xh100`?"),
        ("--machine fat:4", "did you mean `flat:4`?"),
        ("--solver exakt", "did you mean `exact`?"),
        ("--solvr exact", "'--solver'"),
        ("--schedule gpip", "did you mean `gpipe`?"),
        ("--engine torch-eagr", "did you mean `torch-eager`?"),
        ("--precision bf61", "did you mean `bf16`?"),
        ("--gradients f23", "did you mean `f32`?"),
        ("--recompute ful", "did you mean `full`?"),
        ("--recompute-policy op", "did you mean `ops`?"),
        ("--optimizer adm", "did you mean `adam`?"),
        ("--costs h20", "did you mean `h200`?"),
        ("--loss crossentropy", "did you mean `cross-entropy`?"),
        ("--role x=paramter", "did you mean `parameter`?"),
        ("--pipeline atuo", "did you mean `auto`?"),
        ("--micro-batches aut", "did you mean `auto`?"),
        ("--memory non", "did you mean `none`?"),
        ("--as tp=2,recompute=ful", "did you mean `full`?"),
        ("--as tp=2,schedule=gpip", "did you mean `gpipe`?"),
        ("--as tp=2,ppp=2", "did you mean `pp`?"),
        ("--fix f1=c4", "did you mean `fc1`?"),
    ];
    for (option, part) in cases {
        refused(&[&["plan", MODEL][..], &option.split(' ').collect::<Vec<_>>()].concat(), part);
    }
    for (args, part) in [
        ("plan alexnt", "did you mean `alexnet`?"),
        ("models alexnt", "did you mean `alexnet`?"),
        ("plan gpt:layer=3", "did you mean `layers`?"),
        ("plan gpt:attention=fusd", "did you mean `fused`?"),
        ("plan meta-llama/Llama-3-8B", "did you mean `llama3-8b`?"),
        ("machines h10x64", "did you mean `h100x64`?"),
        ("compare mlp --solver exat", "did you mean `exact`?"),
        ("solve network.json --solver exat", "did you mean `exact`?"),
        ("export plan.json --to jaxx", "'jax'"),
        ("network mlp --format iopdl", "'iopddl'"),
        ("simulate plan.json --links shard", "did you mean `shared`?"),
        ("pln mlp", "'plan'"),
    ] {
        refused(&args.split(' ').collect::<Vec<_>>(), part);
    }
}

#[test]
fn the_nearest_op_is_named_and_a_missing_plan_is_no_wrong_plan() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").to_str().unwrap().to_string();
    let made = shardwright(&["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-o", &plan]);
    assert!(made.status.success(), "{made:?}");
    refused(&["explain", &plan, "cf1"], "did you mean `fc1`?");
    let missing = format!("{plan}n");
    refused(&["explain", &missing], "cannot read ");
    refused(&["diff", &plan, &missing], "cannot read ");
    refused(&["export", &missing, "--to", "megatron"], "cannot read ");
}

#[test]
fn a_missing_file_is_answered_with_the_nearest_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let made = ["plan", MODEL, "--machine", "flat:2", "--solver", "data", "-q", "-o", &path("plan.json")];
    assert!(shardwright(&made).status.success());
    for command in ["simulate", "explain", "run"] {
        refused(&[command, &path("plam.json")], "did you mean `plan.json`?");
    }
    refused(&["plan", &path("plan.jsn.onnx")], "cannot read");
    refused(
        &["plan", MODEL, "--machine", "flat:2", "--costs", &path("plann.json")],
        "did you mean `plan.json`?",
    );
}
