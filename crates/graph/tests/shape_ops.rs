//! Ops that move elements, look up ids or run along a dimension: their rules, line by line, and attributes
//! that must be refused.

use shardwright_graph::{
    DType, Dims, Op, Real, TensorType,
    ops::{
        Combine, CombineGradWeights, Concat, Cumsum, Dispatch, Gather, Lstm, LstmGrad, OneHot, Pad, Route,
        ScatterAdd, Slice, SlotGrid, Slots, Transpose, TransposeGrad,
    },
};

fn types(texts: &[&str]) -> Vec<TensorType> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

fn dims(sizes: &[u64]) -> Dims {
    Dims::from_slice(sizes)
}

fn slice(start: &[u64], limit: &[u64], stride: &[u64]) -> Op {
    Slice { start: dims(start), limit: dims(limit), stride: dims(stride) }.into()
}

fn pad(low: &[u64], high: &[u64], interior: &[u64]) -> Op {
    Pad { low: dims(low), high: dims(high), interior: dims(interior), value: Real(0.0) }.into()
}

fn transpose(perm: &[usize]) -> Op {
    Transpose { perm: perm.into() }.into()
}

fn gather(axis: usize, base: u64, extent: u64) -> Op {
    Gather { axis, base, extent }.into()
}

fn scatter(axis: usize, base: u64, extent: u64, rows: u64) -> Op {
    ScatterAdd { axis, base, extent, rows }.into()
}

#[test]
fn rules_read_as_written() {
    let check = |op: Op, inputs: &[&str], expected: &str| {
        let inputs = types(inputs);
        let outputs = op.operator().infer(&inputs).unwrap();
        let rule = op.rule(&inputs, &outputs);
        assert_eq!(rule.check(&inputs, &outputs), Ok(()), "{op:?}");
        assert_eq!(rule.to_string(), expected, "{op:?}");
    };
    let perm: &[usize] = &[2, 0, 1];
    check(transpose(perm), &["f32[2,3,5]"], "([d0, d1, d2])->([d2, d0, d1]) {d0=2, d1=3, d2=5}");
    // The gradient keeps the forward op's names.
    check(
        TransposeGrad { perm: perm.into() }.into(),
        &["f32[5,2,3]"],
        "([d2, d0, d1])->([d0, d1, d2]) {d0=2, d1=3, d2=5}",
    );
    check(
        Concat { axis: 1 }.into(),
        &["f32[2,3,5]", "f32[2,4,5]"],
        "([d0, _, d2], [d0, _, d2])->([d0, _, d2]) {d0=2, d2=5}",
    );
    check(slice(&[0, 1], &[4, 8], &[1, 2]), &["i32[4,8]"], "([d0, _])->([d0, _]) {d0=4}");
    check(pad(&[0, 1], &[0, 0], &[0, 0]), &["bool[4,8]"], "([d0, _])->([d0, _]) {d0=4}");
    check(
        gather(0, 0, 9),
        &["f32[9,6]", "i32[2,4]"],
        "([v, d1], [i0, i1])->([i0, i1, d1]) {v=9, i0=2, i1=4, d1=6} reduction={v}",
    );
    check(gather(0, 0, 9), &["bool[9]", "i64[]"], "([v], [])->([]) {v=9} whole={v}");
    check(
        scatter(1, 2, 9, 4),
        &["i32[2]", "f32[3,2,6]"],
        "([i0], [d0, i0, d2])->([d0, v, d2]) {v=4, i0=2, d0=3, d2=6} reduction={i0}",
    );
    check(
        OneHot { depth: 7, base: 0, dtype: DType::F32 }.into(),
        &["i32[2,3]"],
        "([d0, d1])->([d0, d1, depth]) {d0=2, d1=3, depth=7}",
    );
    check(Route::top(2).into(), &["f32[4,8]"], "([d0, _])->([d0, _]) {d0=4}");
    check(
        Cumsum { axis: 0, exclusive: false, reverse: false }.into(),
        &["f32[4,8]"],
        "([d0, d1])->([d0, d1]) {d0=4, d1=8} whole={d0}",
    );
    check(
        Lstm {}.into(),
        &["f32[5,2,4,3]", "f32[3,4,3]", "f32[2,3]", "f32[2,3]"],
        "([t, b, gate, h], [k, gate, h], [b, k], [b, h])->([t, b, h], [t, b, h], [t, b, gate, h]) \
         {t=5, b=2, gate=4, h=3, k=3} whole={t, gate, h, k}",
    );
    check(
        LstmGrad { dy: true, dc: false }.into(),
        &["f32[6,4,3]", "f32[2,6]", "f32[2,3]", "f32[1,2,3]", "f32[1,2,3]", "f32[1,2,4,3]", "f32[1,2,3]"],
        "([k, gate, h], [b, k], [b, h], [t, b, h], [t, b, h], [t, b, gate, h], [t, b, h])->\
         ([t, b, gate, h], [k, gate, h], [b, k], [b, h]) {t=1, b=2, gate=4, h=3, k=6} reduction={b, h} \
         whole={t, gate, k}",
    );
}

#[test]
fn attributes_and_inputs_that_do_not_fit_are_refused() {
    const HUGE: u64 = u64::MAX;
    let top_k = |k| Op::from(Route::top(k));
    let route = |[k, groups, top_groups, group_scores]: [u64; 4]| {
        Op::from(Route { k, groups, top_groups, group_scores })
    };
    let slots = |experts, capacity| Op::from(Slots { experts, capacity });
    let grid = |first_expert, first_slot| SlotGrid { first_expert, first_slot, ..SlotGrid::new(4, 3) };
    let dispatch = |grid, experts, slots| Op::from(Dispatch { grid, experts, slots });
    let combine = |grid| Op::from(Combine { grid });
    let one_hot = |depth, base| Op::from(OneHot { depth, base, dtype: DType::F32 });
    let cumsum = |axis| Op::from(Cumsum { axis, exclusive: false, reverse: false });
    let concat = |axis| Op::from(Concat { axis });
    let lstm_grad = |dy, dc| Op::from(LstmGrad { dy, dc });
    let states = ["f32[3,4,3]", "f32[2,3]", "f32[2,3]", "f32[5,2,3]", "f32[5,2,3]", "f32[5,2,4,3]"];
    let cases: &[(Op, &[&str])] = &[
        (transpose(&[0]), &["f32[2,3]"]),
        (transpose(&[0, 0]), &["f32[2,3]"]),
        (transpose(&[0, 2]), &["f32[2,3]"]),
        (transpose(&[0, usize::MAX]), &["f32[2,3]"]),
        (TransposeGrad { perm: vec![1, usize::MAX].into() }.into(), &["f32[2,3]"]),
        (transpose(&[1, 0]), &["f32[2,3]", "f32[2,3]"]),
        (concat(2), &["f32[2,3]"]),
        (concat(usize::MAX), &["f32[2,3]"]),
        (concat(0), &[]),
        (concat(0), &["f32[2,3]", "f32[2,4]"]),
        (concat(0), &["f32[2,3]", "f64[2,3]"]),
        (concat(0), &["f32[2,3]", "f32[2]"]),
        (slice(&[0], &[3], &[1]), &["f32[2,3]"]),
        (slice(&[0, 0], &[2, 4], &[1, 1]), &["f32[2,3]"]),
        (slice(&[0, 2], &[2, 2], &[1, 1]), &["f32[2,3]"]),
        (slice(&[0, HUGE], &[2, 3], &[1, 1]), &["f32[2,3]"]),
        (slice(&[0, 0], &[2, HUGE], &[1, 1]), &["f32[2,3]"]),
        (slice(&[0, 0], &[2, 3], &[1, 0]), &["f32[2,3]"]),
        (slice(&[0, 0], &[2, 3], &[1]), &["f32[2,3]"]),
        (pad(&[HUGE, 0], &[1, 0], &[0, 0]), &["f32[2,3]"]),
        (pad(&[0, 0], &[HUGE, 0], &[0, 0]), &["f32[2,3]"]),
        (pad(&[0, 0], &[0, 0], &[HUGE, 0]), &["f32[2,3]"]),
        (pad(&[0, 0], &[0, 0], &[0, HUGE / 2 + 1]), &["f32[2,3]"]),
        (pad(&[0], &[0], &[0]), &["f32[2,3]"]),
        (gather(2, 0, 2), &["f32[2,3]", "i32[4]"]),
        (gather(0, 0, 1), &["f32[2,3]", "i32[4]"]),
        (gather(0, HUGE, HUGE), &["f32[2,3]", "i32[4]"]),
        (gather(0, 0, 2), &["f32[2,3]", "f32[4]"]),
        (gather(0, 0, 2), &["f32[2,3]"]),
        (scatter(0, 0, 2, 0), &["i32[4]", "f32[4,3]"]),
        (scatter(0, 0, 2, 3), &["i32[4]", "f32[4,3]"]),
        (scatter(0, 0, HUGE, HUGE), &["i32[5]", "f32[4,3]"]),
        (scatter(1, 0, 2, 2), &["i32[4]", "f32[4,3]"]),
        (scatter(usize::MAX, 0, 2, 2), &["i32[4]", "f32[4,3]"]),
        (scatter(0, 0, 2, 2), &["i32[4]", "i32[4,3]"]),
        (one_hot(0, 0), &["i32[4]"]),
        (one_hot(HUGE, 1), &["i32[4]"]),
        (one_hot(1, HUGE), &["i32[4]"]),
        (one_hot(3, 0), &["f32[4]"]),
        (top_k(0), &["f32[2,3]"]),
        (top_k(4), &["f32[2,3]"]),
        (top_k(HUGE), &["f32[2,3]"]),
        (top_k(1), &["f32[]"]),
        (top_k(1), &["i32[3]"]),
        (route([1, 0, 0, 1]), &["f32[2,6]"]),
        (route([1, 4, 1, 1]), &["f32[2,6]"]),
        (route([1, 3, 4, 1]), &["f32[2,6]"]),
        (route([1, 3, 0, 1]), &["f32[2,6]"]),
        (route([1, 3, 1, 3]), &["f32[2,6]"]),
        (route([1, 3, 1, 0]), &["f32[2,6]"]),
        (route([5, 3, 2, 1]), &["f32[2,6]"]),
        (route([HUGE, HUGE, HUGE, HUGE]), &["f32[2,6]"]),
        (slots(4, 0), &["i32[2,5,2]"]),
        (slots(0, 3), &["i32[2,5,2]"]),
        (slots(HUGE, HUGE), &["i32[2,5,2]"]),
        (slots(1 << 21, 1), &["i32[2,5,2]"]),
        (slots(4, 3), &["i32[5,2]"]),
        (slots(4, 3), &["f32[2,5,2]"]),
        (dispatch(grid(0, 0), 4, 0), &["f32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(grid(1, 0), 4, 3), &["f32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(grid(0, HUGE), 4, 3), &["f32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(SlotGrid::new(HUGE, HUGE), HUGE, HUGE), &["f32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(SlotGrid::new(1 << 31, 1), 1, 1), &["f32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(grid(0, 0), 4, 3), &["f32[2,5,6]", "i32[2,4,2]"]),
        (dispatch(grid(0, 0), 4, 3), &["f32[2,5,6]", "f32[2,5,2]"]),
        (dispatch(grid(0, 0), 4, 3), &["i32[2,5,6]", "i32[2,5,2]"]),
        (dispatch(grid(0, 0), 4, 3), &["f32[2,5,6]", "i32[2,5,2]", "f64[2,5,2]"]),
        (dispatch(grid(0, 0), 4, 3), &["f32[2,5,6]", "i32[2,5,2]", "f32[2,5,1]"]),
        (dispatch(grid(0, 0), 4, 3), &["f32[2,5,6]"]),
        (dispatch(grid(0, 0), 4, 3), &[]),
        (combine(grid(1, 0)), &["f32[2,4,3,6]", "i32[2,5,2]"]),
        (combine(grid(0, 0)), &["f32[2,4,3]", "i32[2,5,2]"]),
        (combine(grid(0, 0)), &["f32[2,4,3,6]", "i32[5,2]"]),
        (combine(grid(0, 0)), &["f32[2,4,3,6]", "i32[3,5,2]"]),
        (combine(grid(0, 0)), &["f32[2,4,3,6]", "i32[2,5,2]", "f32[2,5,3]"]),
        (combine(grid(0, 0)), &[]),
        (CombineGradWeights { grid: grid(0, 0) }.into(), &["f32[2,4,3,6]", "i32[2,5,2]"]),
        (CombineGradWeights { grid: grid(0, 0) }.into(), &["f32[2,4,3,6]", "i32[2,5,2]", "f32[2,5,7]"]),
        (cumsum(2), &["f32[2,3]"]),
        (cumsum(0), &["bool[2,3]"]),
        (Lstm {}.into(), &["f32[5,2,3,3]", "f32[3,4,3]", "f32[2,3]", "f32[2,3]"]),
        (Lstm {}.into(), &["f32[5,2,4,3]", "f32[6,4,3]", "f32[2,6]", "f32[2,3]"]),
        (Lstm {}.into(), &["f32[5,2,4,3]", "f32[3,4,3]", "f32[3,2]", "f32[2,3]"]),
        (Lstm {}.into(), &["f32[5,2,4,3]", "f32[3,4,3]", "f32[2,3]", "f64[2,3]"]),
        (Lstm {}.into(), &["f32[5,2,4,3]", "f32[3,4,3]", "f32[2,3]"]),
        (Lstm {}.into(), &[]),
        (lstm_grad(false, false), &states),
        (lstm_grad(true, false), &states),
    ];
    for (op, inputs) in cases {
        let result = op.operator().infer(&types(inputs));
        assert!(result.is_err(), "{op:?} accepts {inputs:?} as {result:?}");
    }
}

#[test]
fn odd_but_legal_attributes_are_accepted() {
    const HUGE: u64 = u64::MAX;
    let check = |op: Op, input: &str, expected: &str| {
        assert_eq!(op.operator().infer(&types(&[input])), Ok(types(&[expected])), "{op:?}");
    };
    // A stride past the end takes one element; gaps between the elements of a single one are none.
    check(slice(&[2], &[9], &[HUGE]), "f32[9]", "f32[1]");
    check(pad(&[0], &[0], &[HUGE]), "f32[1]", "f32[1]");
    check(transpose(&[]), "f32[]", "f32[]");
    check(Route::top(3).into(), "f32[2,3]", "i32[2,3]");
    check(Slots { experts: 1, capacity: (1 << 31) - 1 }.into(), "i64[2,3,1]", "i32[2,3,1]");
}
