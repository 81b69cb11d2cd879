//! Op kinds by example: rules as golden lines, attributes through JSON and back, workload classes.

mod common;

use common::examples;
use shardwright_graph::{Op, TensorType, WorkloadClass, examples::Rng};

#[test]
fn every_op_kind_has_an_example() {
    let kinds: Vec<_> = examples().iter().map(|e| e.op.kind()).collect();
    assert_eq!(kinds, Op::KINDS, "a golden example is of another kind");
    for examples in Op::EXAMPLES {
        for seed in 0..10 {
            assert_eq!((examples.case)(&mut Rng::new(seed)).op.kind(), examples.kind);
        }
    }
}

/// Cost files name classes; every class that an op has is found again by its name.
#[test]
fn every_workload_class_is_found_by_its_name() {
    for e in examples() {
        let outputs = e.op.operator().infer(&e.inputs).unwrap();
        let workload = e.op.workload(&e.inputs, &outputs);
        assert_eq!(WorkloadClass::find(workload.class.name), Some(workload.class), "{}", e.op.kind());
        assert_eq!(workload.resized(&workload.sizes).sizes, workload.sizes);
    }
}

#[test]
fn every_rule_prints_as_its_golden_line() {
    let mut wrong = String::new();
    for e in examples() {
        let outputs = e.op.operator().infer(&e.inputs).unwrap_or_else(|r| panic!("{}: {r}", e.op.kind()));
        let rule = e.op.rule(&e.inputs, &outputs);
        assert_eq!(rule.check(&e.inputs, &outputs), Ok(()), "{}", e.op.kind());
        if rule.to_string() != e.rule {
            wrong += &format!("{}:\n  is  {rule}\n  not {}\n", e.op.kind(), e.rule);
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn attributes_survive_json() {
    for e in examples() {
        let json = serde_json::to_string(&e.op).unwrap();
        assert_eq!(serde_json::from_str::<Op>(&json).unwrap(), e.op, "{json}");
        assert!(json.starts_with(&format!("{{\"kind\":\"{}\"", e.op.kind())), "{json}");
    }
}

#[test]
fn unknown_and_missing_attributes_are_refused() {
    for e in examples() {
        let json = serde_json::to_string(&e.op).unwrap();
        let unknown = format!("{},\"surprise\":1}}", json.strip_suffix('}').unwrap());
        assert!(serde_json::from_str::<Op>(&unknown).is_err(), "{unknown}");
        let serde_json::Value::Object(fields) = serde_json::from_str(&json).unwrap() else {
            panic!("{json}")
        };
        // A call of which nothing is known has no shared dimensions.
        for name in fields.keys().filter(|name| *name != "shared") {
            let mut fewer = fields.clone();
            fewer.remove(name);
            assert!(serde_json::from_value::<Op>(fewer.into()).is_err(), "{json} without {name}");
        }
    }
}

/// Operands that an op was not made for are refused or accepted, but whatever is accepted has a sound rule.
#[test]
fn no_kind_panics_on_operands_of_other_kinds() {
    let all = examples();
    let types: Vec<TensorType> = [
        "f32[]",
        "f32[1]",
        "f32[8,6]",
        "i32[3]",
        "bool[2,2,2]",
        "f64[281474976710656]",
        "f16[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
    ]
    .iter()
    .map(|t| t.parse().unwrap())
    .collect();
    let check = |op: &Op, inputs: &[TensorType]| {
        let Ok(outputs) = op.operator().infer(inputs) else { return };
        if outputs.iter().all(|o| o.shape.check().is_ok()) {
            let rule = op.rule(inputs, &outputs);
            assert_eq!(rule.check(inputs, &outputs), Ok(()), "{op:?} of {inputs:?}");
            op.operator().flops(inputs, &outputs);
            op.operator().bytes(inputs, &outputs);
        }
    };
    for e in &all {
        check(&e.op, &[]);
        for other in &all {
            check(&e.op, &other.inputs);
        }
        for a in &types {
            check(&e.op, &vec![a.clone(); e.inputs.len()]);
            for position in 0..e.inputs.len() {
                let mut inputs = e.inputs.clone();
                inputs[position] = a.clone();
                check(&e.op, &inputs);
            }
        }
    }
}
