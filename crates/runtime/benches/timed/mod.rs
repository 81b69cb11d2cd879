//! Shared by the benches of single ops.

use divan::{Bencher, counter::BytesCount};
use shardwright_graph::{Init, Op, Real, Role, Tensor, TensorType};
use shardwright_runtime::{Context, HostTensor, initial_value, kernels::run};

pub fn value(ty: TensorType) -> HostTensor {
    let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(1000) };
    let tensor = Tensor { name: "x".into(), ty, role: Role::Input, producer: None, init: Some(init) };
    initial_value(0, &tensor)
}

/// Times one op on random inputs of these types.
pub fn bench(bencher: Bencher<'_, '_>, op: impl Into<Op>, inputs: &[&str]) {
    let op = op.into();
    let inputs: Vec<HostTensor> = inputs.iter().map(|t| value(t.parse().unwrap())).collect();
    let types: Vec<TensorType> = inputs.iter().map(HostTensor::ty).collect();
    let output_types = op.operator().infer(&types).unwrap();
    let bytes = op.operator().bytes(&types, &output_types);
    let mut outputs: Vec<HostTensor> = output_types.iter().map(HostTensor::zeros).collect();
    let mut context = Context::default();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        let views: Vec<_> = inputs.iter().map(HostTensor::view).collect();
        let mut views_mut: Vec<_> = outputs.iter_mut().map(HostTensor::view_mut).collect();
        run(&op, &views, &mut views_mut, &mut context).unwrap();
    });
}
