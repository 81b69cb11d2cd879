//! Shared by the generic tests: random cases of every op kind, and comparison of values.

use shardwright_graph::{Init, Op, Role, Tensor, TensorType};
use shardwright_runtime::{Value, initial_value, mix};

/// A small deterministic generator: the same cases in every run.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(0x5eed)))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// A size that can be split in two most of the time.
    pub fn size(&mut self) -> u64 {
        if self.between(0, 4) == 0 { self.between(1, 5) } else { 2 * self.between(1, 3) }
    }

    pub fn flip(&mut self) -> bool {
        self.next().is_multiple_of(2)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.between(0, from.len() as u64 - 1) as usize]
    }

    pub fn shape(&mut self, low: u64, high: u64) -> Vec<u64> {
        (0..self.between(low, high)).map(|_| self.size()).collect()
    }
}

/// An op with its inputs' types and how to make values for them.
#[derive(Debug)]
pub struct Case {
    pub op: Op,
    pub inputs: Vec<(TensorType, Init)>,
}

impl Case {
    pub fn input_types(&self) -> Vec<TensorType> {
        self.inputs.iter().map(|(ty, _)| ty.clone()).collect()
    }

    pub fn output_types(&self) -> Vec<TensorType> {
        let types = self.op.operator().infer(&self.input_types());
        types.unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// Values for the inputs.
    pub fn values(&self, seed: u64) -> Vec<Value> {
        self.inputs
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
