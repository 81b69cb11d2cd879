//! Kernels of mixtures of experts against definitions with one-hot products, which they avoid.

use crate::case::{Case, Rng, assert_close, values};
use shardwright_graph::{
    DType, Op, TensorType,
    examples::Examples,
    ops::{Combine, CombineGradWeights, Contract, Dispatch, OneHot, Route, Slice, SlotGrid, Slots},
};
use shardwright_runtime::{Context, HostTensor as Value, KernelError, kernels::evaluate};

fn run(op: impl Into<Op>, inputs: &[&Value]) -> Value {
    let op = op.into();
    evaluate(&op, inputs, &mut Context::default()).unwrap_or_else(|e| panic!("{op:?}: {e}")).remove(0)
}

fn einsum(spec: &str, inputs: &[&Value]) -> Value {
    run(Contract::parse(spec).unwrap(), inputs)
}

fn cases(generate: fn(&mut Rng) -> Case) -> impl Iterator<Item = (u64, Case)> {
    (100..160).map(move |seed| (seed, generate(&mut Rng::new(seed))))
}

/// `[n, s, k, e, p]`: 1 where the id names the slot, for the experts and slots held.
fn one_hot(grid: &SlotGrid, slot_ids: &Value, [experts, slots]: [u64; 2]) -> Value {
    let marks = run(OneHot { depth: grid.dropped(), base: 0, dtype: DType::F64 }, &[slot_ids]);
    let [n, s, k] = [0, 1, 2].map(|d| slot_ids.shape()[d]);
    let marks = Value::from_vec([n, s, k, grid.experts, grid.capacity], marks.to_f64_vec());
    let (e, p) = (grid.first_expert, grid.first_slot);
    let op = Slice {
        start: [0, 0, 0, e, p].into_iter().collect(),
        limit: [n, s, k, e + experts, p + slots].into_iter().collect(),
        stride: [1; 5].into_iter().collect(),
    };
    run(op, &[&marks])
}

fn ones(shape: [u64; 3]) -> Value {
    Value::from_vec(shape, vec![1.0f64; shape.iter().product::<u64>() as usize])
}

#[test]
fn dispatch_is_a_product_with_one_hot_slot_ids() {
    for (seed, case) in cases(Dispatch::case) {
        let Op::Dispatch(op) = &case.op else { unreachable!() };
        let values = values(&case, seed);
        let marks = one_hot(&op.grid, &values[1], [op.experts, op.slots]);
        let shape = [0, 1, 2].map(|d| values[1].shape()[d]);
        let weights = values.get(2).cloned().unwrap_or_else(|| ones(shape));
        let weighted = einsum("nskep,nsk->nskep", &[&marks, &weights]);
        let expected = einsum("nskep,nsc->nepc", &[&weighted, &values[0]]);
        let actual = run(op.clone(), &values.iter().collect::<Vec<_>>());
        assert_close(&expected, &actual, 1e-12, &format!("{case:?}"));
    }
}

#[test]
fn combine_and_the_gradient_of_its_weights_are_products_with_one_hot_slot_ids() {
    for (seed, case) in cases(Combine::case) {
        let Op::Combine(op) = &case.op else { unreachable!() };
        let values = values(&case, seed);
        let held = [values[0].shape()[1], values[0].shape()[2]];
        let marks = one_hot(&op.grid, &values[1], held);
        let shape = [0, 1, 2].map(|d| values[1].shape()[d]);
        let weights = values.get(2).cloned().unwrap_or_else(|| ones(shape));
        let weighted = einsum("nskep,nsk->nskep", &[&marks, &weights]);
        let expected = einsum("nskep,nepc->nsc", &[&weighted, &values[0]]);
        let actual = run(op.clone(), &values.iter().collect::<Vec<_>>());
        assert_close(&expected, &actual, 1e-12, &format!("{case:?}"));
    }
    for (seed, case) in cases(CombineGradWeights::case) {
        let Op::CombineGradWeights(op) = &case.op else { unreachable!() };
        let values = values(&case, seed);
        let held = [values[0].shape()[1], values[0].shape()[2]];
        let marks = one_hot(&op.grid, &values[1], held);
        let chosen = einsum("nskep,nepc->nskc", &[&marks, &values[0]]);
        let expected = einsum("nskc,nsc->nsk", &[&chosen, &values[2]]);
        let actual = run(op.clone(), &values.iter().collect::<Vec<_>>());
        assert_close(&expected, &actual, 1e-12, &format!("{case:?}"));
    }
}

#[test]
fn a_token_gets_the_slot_after_those_of_earlier_tokens_of_its_expert() {
    for (seed, case) in cases(Slots::case) {
        let Op::Slots(Slots { experts, capacity }) = case.op else { unreachable!() };
        let values = values(&case, seed);
        let shape = values[0].shape().clone();
        let group = (shape[1] * shape[2]) as usize;
        let found = run(case.op.clone(), &[&values[0]]);
        assert_eq!(found.ty(), TensorType::new(DType::I32, shape));
        let (ids, found) = (values[0].to_f64_vec(), found.to_f64_vec());
        for (ids, found) in ids.chunks(group).zip(found.chunks(group)) {
            for (i, &id) in ids.iter().enumerate() {
                let before = ids[..i].iter().filter(|&&other| other == id).count() as f64;
                let dropped = before >= capacity as f64;
                let all = (experts * capacity) as f64;
                assert_eq!(found[i], if dropped { all } else { id * capacity as f64 + before }, "{case:?}");
            }
        }
    }
}

/// Positions of the largest elements, by repeated search.
fn largest(x: &[f64], among: &[usize], count: usize) -> Vec<usize> {
    let mut found: Vec<usize> = vec![];
    for _ in 0..count {
        let rest = among.iter().copied().filter(|i| !found.contains(i));
        found.extend(rest.reduce(|best, i| if x[i] > x[best] { i } else { best }));
    }
    found
}

#[test]
fn routes_are_the_largest_elements_of_the_best_groups() {
    for (seed, case) in cases(Route::case) {
        let Op::Route(op) = &case.op else { unreachable!() };
        let values = values(&case, seed);
        let row = *values[0].shape().last().unwrap() as usize;
        let size = row / op.groups as usize;
        let found = run(case.op.clone(), &[&values[0]]).to_f64_vec();
        for (x, found) in values[0].to_f64_vec().chunks(row).zip(found.chunks(op.k as usize)) {
            let score = |group: usize| -> f64 {
                let members: Vec<usize> = (group * size..(group + 1) * size).collect();
                largest(x, &members, op.group_scores as usize).iter().map(|&i| x[i]).sum()
            };
            let scores: Vec<f64> = (0..op.groups as usize).map(score).collect();
            let groups: Vec<usize> = (0..op.groups as usize).collect();
            let mut open: Vec<usize> = largest(&scores, &groups, op.top_groups as usize)
                .iter()
                .flat_map(|group| group * size..(group + 1) * size)
                .collect();
            open.sort_unstable();
            let expected: Vec<f64> = largest(x, &open, op.k as usize).iter().map(|&i| i as f64).collect();
            assert_eq!(found, expected, "{case:?}");
        }
    }
}

#[test]
fn ties_go_to_lower_positions_and_anything_beats_nan() {
    let top = |k: u64, row: &[f64]| {
        run(Route::top(k), &[&Value::from_vec([row.len() as u64], row.to_vec())]).to_f64_vec()
    };
    assert_eq!(top(2, &[1.0, 3.0, 3.0, 3.0]), [1.0, 2.0]);
    assert_eq!(top(3, &[0.0, -0.0, 0.0, -0.0]), [0.0, 1.0, 2.0]);
    assert_eq!(top(2, &[f64::NAN, f64::NEG_INFINITY, 1.0]), [2.0, 1.0]);
    assert_eq!(top(2, &[f64::NAN, f64::NAN, f64::NAN]), [0.0, 1.0]);
    // A group with NaN comes last, even if its other score is the best.
    let row = Value::from_vec([4], vec![9.0, f64::NAN, 1.0, 0.5]);
    let op = Route { k: 1, groups: 2, top_groups: 1, group_scores: 2 };
    assert_eq!(run(op, &[&row]).to_f64_vec(), [2.0]);
}

#[test]
fn numbers_that_name_no_expert_or_slot_are_refused() {
    for bad in [-1i64, 4, i64::MIN, i64::MAX] {
        let ids = Value::from_vec([1, 2, 1], vec![3, bad]);
        let op = Slots { experts: 4, capacity: 2 }.into();
        let error = evaluate(&op, &[&ids], &mut Context::default()).unwrap_err();
        assert_eq!(error, KernelError::BadValue(format!("expert {bad} at place 1 is outside 0..4")));
    }
    let grid = SlotGrid::new(2, 3);
    let x = Value::from_vec([1, 2, 1], vec![1.0f32, 2.0]);
    for bad in [-1i64, 7, i64::MIN, i64::MAX] {
        let slot_ids = Value::from_vec([1, 2, 1], vec![6, bad]);
        let op = Dispatch::new(grid).into();
        let error = evaluate(&op, &[&x, &slot_ids], &mut Context::default()).unwrap_err();
        assert_eq!(error, KernelError::BadValue(format!("slot id {bad} at place 1 is outside 0..=6")));
    }
    // The number of all slots stands for none.
    let slot_ids = Value::from_vec([1, 2, 1], vec![6i64, 4]);
    assert_eq!(run(Dispatch::new(grid), &[&x, &slot_ids]).to_f64_vec(), [0.0, 0.0, 0.0, 0.0, 2.0, 0.0]);
}
