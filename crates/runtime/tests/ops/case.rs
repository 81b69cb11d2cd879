//! Shared by the generic tests: values for the examples of op kinds, and comparison of values.

pub use shardwright_graph::examples::{Case, Rng};
use shardwright_graph::{Role, Tensor};
use shardwright_runtime::{HostTensor as Value, initial_value};

/// Values for the inputs of a case.
pub fn values(case: &Case, seed: u64) -> Vec<Value> {
    case.inputs
        .iter()
        .enumerate()
        .map(|(i, (ty, init))| {
            let tensor = Tensor {
                name: format!("input{i}"),
                ty: ty.clone(),
                role: Role::Input,
                producer: None,
                init: Some(*init),
            };
            initial_value(seed, &tensor)
        })
        .collect()
}

/// Asserts that two tensors agree to `tolerance`, relative to the larger of one and their largest element.
pub fn assert_close(expected: &Value, actual: &Value, tolerance: f64, what: &str) {
    assert_eq!(expected.ty(), actual.ty(), "{what}");
    let (expected, actual) = (expected.to_f64_vec(), actual.to_f64_vec());
    let scale = expected.iter().fold(1.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    for (i, (e, a)) in expected.iter().zip(&actual).enumerate() {
        let same = e == a || (e.is_nan() && a.is_nan());
        assert!(same || (e - a).abs() <= tolerance * scale, "{what}: element {i} is {a}, expected {e}");
    }
}
