//! Kernels against definitions written index by index: slow, and independent of strides, merged loops, tiles and matrix
//! products.

use crate::case::{Case, Rng, assert_close, values};
use shardwright_graph::{
    DType, Dims, Op, Real, Shape,
    examples::{Examples, f64s},
    ops::{
        Bitcast, Cast, Concat, Cumsum, DynamicSlice, DynamicUpdate, Gather, Lstm, OneHot, Pad, PutAlong,
        Reverse, ScatterAdd, Slice, Sort, TakeAlong, TopK, Transpose,
    },
};
use shardwright_runtime::{Context, HostTensor as Value, KernelError, kernels::evaluate};

/// Every position of a shape, last dimension fastest.
fn positions(shape: &[u64]) -> impl Iterator<Item = Vec<u64>> {
    (0..shape.iter().product()).map(|mut i: u64| {
        let mut at = vec![0; shape.len()];
        for d in (0..shape.len()).rev() {
            at[d] = i % shape[d];
            i /= shape[d];
        }
        at
    })
}

/// A tensor by its definition.
struct Naive {
    shape: Vec<u64>,
    data: Vec<f64>,
}

impl Naive {
    fn of(value: &Value) -> Self {
        Self { shape: value.shape().to_vec(), data: value.to_f64_vec() }
    }

    /// The tensor whose element at each position is given by `f`.
    fn by(shape: &[u64], f: impl Fn(&[u64]) -> f64) -> Self {
        Self { shape: shape.to_vec(), data: positions(shape).map(|at| f(&at)).collect() }
    }

    fn at(&self, position: &[u64]) -> f64 {
        let index = position.iter().zip(&self.shape).fold(0, |i, (p, n)| {
            assert!(p < n);
            i * n + p
        });
        self.data[index as usize]
    }
}

fn run(case: &Case, values: &[Value]) -> Vec<Value> {
    let values: Vec<&Value> = values.iter().collect();
    evaluate(&case.op, &values, &mut Context::default()).unwrap_or_else(|e| panic!("{case:?}: {e}"))
}

/// Asserts that the kernel equals the definition within a tolerance: zero for kernels that only move elements.
fn check(case: &Case, seed: u64, tolerance: f64, define: impl Fn(&[Naive], &[u64]) -> Naive) {
    let values = values(case, seed);
    let actual = run(case, &values).remove(0);
    let naive: Vec<Naive> = values.iter().map(Naive::of).collect();
    let expected = define(&naive, actual.shape());
    let expected = Value::from_vec(Shape::new(&expected.shape), expected.data);
    let actual = Value::from_vec(actual.shape().clone(), actual.to_f64_vec());
    assert_close(&expected, &actual, tolerance, &format!("{case:?}"));
}

fn cases(generate: fn(&mut Rng) -> Case) -> impl Iterator<Item = (u64, Case)> {
    (100..140).map(move |seed| (seed, generate(&mut Rng::new(seed))))
}

#[test]
fn transpose_moves_each_element_to_its_permuted_position() {
    let mut all: Vec<(u64, Case)> = cases(Transpose::case).collect();
    // Past one tile, with ragged edges, with rows that stay whole, with nothing that joins.
    let large: [(&[u64], &[usize]); 6] = [
        (&[37, 50], &[1, 0]),
        (&[3, 33, 17], &[0, 2, 1]),
        (&[2, 18, 3, 20], &[0, 2, 1, 3]),
        (&[5, 19, 40], &[2, 1, 0]),
        (&[4, 5, 6, 7], &[2, 3, 0, 1]),
        (&[2, 3, 4, 5, 6], &[4, 2, 0, 3, 1]),
    ];
    all.extend(
        large.map(|(shape, perm)| {
            (1, Case::new(Transpose { perm: perm.into() }, vec![f64s(Shape::new(shape))]))
        }),
    );
    for (seed, case) in all {
        let Op::Transpose(op) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let mut from = at.to_vec();
                (0..at.len()).for_each(|i| from[op.perm[i]] = at[i]);
                x[0].at(&from)
            })
        });
    }
}

#[test]
fn the_inverse_of_a_transposition_undoes_it() {
    for (seed, case) in cases(Transpose::case) {
        let Op::Transpose(op) = &case.op else { unreachable!() };
        let values = values(&case, seed);
        let there = run(&case, &values);
        let back: Op = shardwright_graph::ops::TransposeGrad { perm: op.perm.clone() }.into();
        let back = evaluate(&back, &[&there[0]], &mut Context::default()).unwrap();
        assert_eq!(back[0], values[0], "{case:?}");
    }
}

#[test]
fn slice_takes_every_stride_th_element_from_start_to_limit() {
    for (seed, case) in cases(Slice::case) {
        let Op::Slice(op) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let from: Vec<u64> = (0..at.len()).map(|d| op.start[d] + at[d] * op.stride[d]).collect();
                x[0].at(&from)
            })
        });
    }
}

#[test]
fn pad_puts_its_value_wherever_no_element_lands() {
    for (seed, case) in cases(Pad::case) {
        let Op::Pad(op) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let mut from = vec![];
                for (d, &at) in at.iter().enumerate() {
                    let (Some(past), step) = (at.checked_sub(op.low[d]), op.interior[d] + 1) else {
                        return op.value.0;
                    };
                    if past % step != 0 || past / step >= x[0].shape[d] {
                        return op.value.0;
                    }
                    from.push(past / step);
                }
                x[0].at(&from)
            })
        });
    }
}

#[test]
fn concat_holds_its_inputs_one_after_the_other() {
    for (seed, case) in cases(Concat::case) {
        let Op::Concat(Concat { axis }) = case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let mut at = at.to_vec();
                for x in x {
                    if at[axis] < x.shape[axis] {
                        return x.at(&at);
                    }
                    at[axis] -= x.shape[axis];
                }
                unreachable!("past the last input")
            })
        });
    }
}

#[test]
fn gather_takes_the_named_rows_and_zeros_for_rows_elsewhere() {
    for (seed, case) in cases(Gather::case) {
        let Op::Gather(Gather { axis, base, .. }) = case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let rank = x[1].shape.len();
                let id = x[1].at(&at[axis..axis + rank]);
                let row = id - base as f64;
                if row < 0.0 || row >= x[0].shape[axis] as f64 {
                    return 0.0;
                }
                let from = [&at[..axis], &[row as u64], &at[axis + rank..]].concat();
                x[0].at(&from)
            })
        });
    }
}

#[test]
fn scatter_add_sums_the_rows_of_equal_ids() {
    for (seed, case) in cases(ScatterAdd::case) {
        let Op::ScatterAdd(op) = &case.op else { unreachable!() };
        check(&case, seed, 1e-12, |x, shape| {
            Naive::by(shape, |at| {
                let id = (at[op.axis] + op.base) as f64;
                positions(&x[0].shape)
                    .filter(|place| x[0].at(place) == id)
                    .map(|place| x[1].at(&[&at[..op.axis], &place[..], &at[op.axis + 1..]].concat()))
                    .sum()
            })
        });
    }
}

#[test]
fn one_hot_marks_the_position_that_the_id_names() {
    for (seed, case) in cases(OneHot::case) {
        let Op::OneHot(op) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let (position, rest) = at.split_last().unwrap();
                f64::from(u8::from(x[0].at(rest) == (op.base + position) as f64))
            })
        });
    }
}

#[test]
fn cumsum_adds_the_elements_up_to_each_one() {
    for (seed, case) in cases(Cumsum::case) {
        let Op::Cumsum(op) = &case.op else { unreachable!() };
        check(&case, seed, 1e-12, |x, shape| {
            Naive::by(shape, |at| {
                let own = at[op.axis];
                let counts = |i: u64| {
                    let before = if op.reverse { i > own } else { i < own };
                    before || (i == own && !op.exclusive)
                };
                let mut at = at.to_vec();
                (0..shape[op.axis])
                    .filter(|&i| counts(i))
                    .map(|i| {
                        at[op.axis] = i;
                        x[0].at(&at)
                    })
                    .sum()
            })
        });
    }
}

#[test]
fn lstm_follows_its_equations_step_by_step() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (seed, case) in cases(Lstm::case) {
        let values = values(&case, seed);
        let outputs = run(&case, &values);
        let [gx, u, h0, c0] = [0, 1, 2, 3].map(|i| Naive::of(&values[i]));
        let [y, c, gates] = [0, 1, 2].map(|i| Naive::of(&outputs[i]));
        let &[steps, batch, _, hidden] = &gx.shape[..] else { unreachable!() };
        let (mut state, mut cell) = (h0.data, c0.data);
        for t in 0..steps {
            let before = state.clone();
            for b in 0..batch {
                for j in 0..hidden {
                    let gate = |n: u64| {
                        let recurrent =
                            (0..hidden).map(|k| before[(b * hidden + k) as usize] * u.at(&[k, n, j]));
                        gx.at(&[t, b, n, j]) + recurrent.sum::<f64>()
                    };
                    let [i, f, g, o] = [sigmoid(gate(0)), sigmoid(gate(1)), gate(2).tanh(), sigmoid(gate(3))];
                    let place = (b * hidden + j) as usize;
                    cell[place] = f * cell[place] + i * g;
                    state[place] = o * cell[place].tanh();
                    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{case:?}: {a} and {b}");
                    for (n, value) in [i, f, g, o].into_iter().enumerate() {
                        close(gates.at(&[t, b, n as u64, j]), value);
                    }
                    close(c.at(&[t, b, j]), cell[place]);
                    close(y.at(&[t, b, j]), state[place]);
                }
            }
        }
    }
}

#[test]
fn moving_elements_is_the_same_for_every_element_type() {
    let pad = Pad {
        low: Dims::from_slice(&[1, 0]),
        high: Dims::from_slice(&[0, 2]),
        interior: Dims::from_slice(&[0, 1]),
        value: Real(1.0),
    };
    let ops: [Op; 4] = [
        Transpose { perm: vec![1, 0].into() }.into(),
        Slice::along(1, 1, 4, &[3, 5]).into(),
        pad.into(),
        Concat { axis: 1 }.into(),
    ];
    let x = Value::from_vec([3, 5], (0..15).map(|i| f64::from(i % 2)).collect::<Vec<f64>>());
    let run = |op: &Op, x: &Value| evaluate(op, &[x], &mut Context::default()).unwrap().remove(0);
    for op in &ops {
        for dtype in DType::ALL {
            let cast: Op = Cast { dtype }.into();
            assert_eq!(run(op, &run(&cast, &x)), run(&cast, &run(op, &x)), "{op:?} {dtype}");
        }
    }
}

#[test]
fn ids_outside_the_whole_table_are_refused() {
    let table = Value::from_vec([4, 2], vec![0.0f64; 8]);
    let op: Op = Gather { axis: 0, base: 2, extent: 8 }.into();
    let gather = |id: i64| {
        let ids = Value::from_vec([2], vec![3i64, id]);
        evaluate(&op, &[&table, &ids], &mut Context::default())
    };
    for id in [0, 7] {
        assert!(gather(id).is_ok(), "{id}");
    }
    for id in [-1, 8, i64::MIN, i64::MAX] {
        assert!(matches!(gather(id), Err(KernelError::BadValue(_))), "{id}");
    }
}

#[test]
fn strides_and_gaps_past_the_end_do_not_matter() {
    let x = Value::from_vec([3], vec![1.0f64, 2.0, 3.0]);
    let huge = || Dims::from_elem(u64::MAX, 1);
    let [zero, one] = [0, 1].map(|n| Dims::from_elem(n, 1));
    let slice = Slice { start: one.clone(), limit: Dims::from_elem(3, 1), stride: huge() };
    let taken = evaluate(&slice.into(), &[&x], &mut Context::default()).unwrap().remove(0);
    assert_eq!(taken.to_f64_vec(), [2.0]);
    let pad = Pad { low: one, high: zero, interior: huge(), value: Real(7.0) };
    let padded = evaluate(&pad.into(), &[&taken], &mut Context::default()).unwrap().remove(0);
    assert_eq!(padded.to_f64_vec(), [7.0, 2.0]);
}

/// The starts of a box, moved to where it fits.
fn place(starts: &[Naive], shape: &[u64], sizes: &[u64]) -> Vec<u64> {
    (0..shape.len()).map(|d| (starts[d].data[0] as u64).min(shape[d] - sizes[d])).collect()
}

#[test]
fn a_dynamic_slice_takes_the_box_at_its_place() {
    for (seed, case) in cases(DynamicSlice::case) {
        let Op::DynamicSlice(DynamicSlice { sizes }) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            let start = place(&x[1..], &x[0].shape, sizes);
            Naive::by(shape, |at| x[0].at(&at.iter().zip(&start).map(|(a, s)| a + s).collect::<Vec<_>>()))
        });
    }
}

#[test]
fn a_dynamic_update_replaces_the_box_at_its_place() {
    for (seed, case) in cases(DynamicUpdate::case) {
        check(&case, seed, 0.0, |x, shape| {
            let start = place(&x[2..], shape, &x[1].shape);
            Naive::by(shape, |at| {
                let inside = (0..at.len()).all(|d| (start[d]..start[d] + x[1].shape[d]).contains(&at[d]));
                let within = || at.iter().zip(&start).map(|(a, s)| a - s).collect::<Vec<_>>();
                if inside { x[1].at(&within()) } else { x[0].at(at) }
            })
        });
    }
}

#[test]
fn taking_along_a_dimension_reads_the_row_that_each_id_names() {
    for (seed, case) in cases(TakeAlong::case) {
        let Op::TakeAlong(TakeAlong { axis, base, .. }) = case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let row = x[1].at(at) - base as f64;
                let mut from = at.to_vec();
                from[axis] = row as u64;
                if row < 0.0 || row >= x[0].shape[axis] as f64 { 0.0 } else { x[0].at(&from) }
            })
        });
    }
}

#[test]
fn putting_along_a_dimension_sums_what_names_each_row() {
    for (seed, case) in cases(PutAlong::case) {
        let Op::PutAlong(PutAlong { axis, base, .. }) = case.op else { unreachable!() };
        check(&case, seed, 1e-12, |x, shape| {
            Naive::by(shape, |at| {
                (0..x[0].shape[axis])
                    .map(|i| {
                        let mut from = at.to_vec();
                        from[axis] = i;
                        if x[0].at(&from) == (at[axis] + base) as f64 { x[1].at(&from) } else { 0.0 }
                    })
                    .sum()
            })
        });
    }
}

#[test]
fn reverse_turns_dimensions_around() {
    for (seed, case) in cases(Reverse::case) {
        let Op::Reverse(Reverse { axes }) = &case.op else { unreachable!() };
        check(&case, seed, 0.0, |x, shape| {
            Naive::by(shape, |at| {
                let turn = |(d, &p): (usize, &u64)| if axes.contains(&d) { shape[d] - 1 - p } else { p };
                x[0].at(&at.iter().enumerate().map(turn).collect::<Vec<_>>())
            })
        });
    }
}

#[test]
fn sorting_puts_an_element_behind_all_that_come_before_it() {
    for (seed, case) in cases(Sort::case) {
        let Op::Sort(Sort { axis, descending }) = case.op else { unreachable!() };
        let values = values(&case, seed);
        let sorted = run(&case, &values);
        let keys = Naive::of(&values[0]);
        for (before, after) in values.iter().map(Naive::of).zip(sorted.iter().map(Naive::of)) {
            for at in positions(&keys.shape) {
                let other = |i: u64| {
                    let mut to = at.clone();
                    to[axis] = i;
                    to
                };
                let key = keys.at(&at);
                let first = |i: &u64| {
                    let k = keys.at(&other(*i));
                    if k == key { *i < at[axis] } else { (k < key) != descending }
                };
                let rank = (0..keys.shape[axis]).filter(first).count() as u64;
                assert_eq!(after.at(&other(rank)), before.at(&at), "{case:?}");
            }
        }
    }
}

#[test]
fn top_k_are_the_first_of_a_falling_sort_with_their_places() {
    for (seed, case) in cases(TopK::case) {
        let Op::TopK(TopK { k }) = case.op else { unreachable!() };
        let values = values(&case, seed);
        let found = run(&case, &values);
        let (x, top, places) = (Naive::of(&values[0]), Naive::of(&found[0]), Naive::of(&found[1]));
        let row = *x.shape.last().unwrap() as usize;
        for (line, (top, places)) in
            x.data.chunks(row).zip(top.data.chunks(k as usize).zip(places.data.chunks(k as usize)))
        {
            let mut order: Vec<usize> = (0..row).collect();
            order.sort_by(|&a, &b| line[b].total_cmp(&line[a]).then(a.cmp(&b)));
            for i in 0..k as usize {
                assert_eq!((top[i], places[i] as usize), (line[order[i]], order[i]));
            }
        }
    }
}

#[test]
fn not_a_number_sorts_last_when_rising() {
    let x = Value::from_vec([4], vec![f32::NAN, 2.0, f32::NEG_INFINITY, 1.0]);
    let sorted =
        evaluate(&Sort { axis: 0, descending: false }.into(), &[&x], &mut Context::default()).unwrap();
    let sorted = sorted[0].as_slice::<f32>().unwrap();
    assert_eq!(sorted[..3], [f32::NEG_INFINITY, 1.0, 2.0]);
    assert!(sorted[3].is_nan());
}

#[test]
fn bits_are_kept_by_a_bitcast() {
    let x = Value::from_vec([2], vec![0x3f80_0000i32, -0x4000_0000]);
    let op = Bitcast { dtype: DType::F32 }.into();
    let floats = evaluate(&op, &[&x], &mut Context::default()).unwrap().remove(0);
    assert_eq!(floats.as_slice::<f32>().unwrap(), [1.0, -2.0]);
    let back = evaluate(&Bitcast { dtype: DType::I32 }.into(), &[&floats], &mut Context::default()).unwrap();
    assert_eq!(back[0], x);
}
