//! What the benches of single ops have in common.

use divan::{Bencher, counter::BytesCount};
use shardwright_graph::{Init, Op, Real, Role, Tensor, TensorType};
use shardwright_runtime::{Context, Value, initial_value, kernels::run};

pub fn value(ty: TensorType) -> Value {
    let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(1000) };
    let tensor = Tensor { name: "x".into(), ty, role: Role::Input, producer: None, init: Some(init) };
    initial_value(0, &tensor)
}

/// Times one op on random inputs of these types.
pub fn bench(bencher: Bencher<'_, '_>, op: impl Into<Op>, inputs: &[&str]) {
    let op = op.into();
    let inputs: Vec<Value> = inputs.iter().map(|t| value(t.parse().unwrap())).collect();
    let types: Vec<TensorType> = inputs.iter().map(Value::ty).collect();
    let output_types = op.operator().infer(&types).unwrap();
    let bytes = op.operator().bytes(&types, &output_types);
    let mut outputs: Vec<Value> = output_types.iter().map(Value::zeros).collect();
    let mut context = Context::default();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        let views: Vec<_> = inputs.iter().map(Value::view).collect();
        let mut views_mut: Vec<_> = outputs.iter_mut().map(Value::view_mut).collect();
        run(&op, &views, &mut views_mut, &mut context).unwrap();
    });
}
