//! Fused attention against the plain form, on sequences of several blocks: scores, softmax and sums one number at a time.

use crate::case::assert_close;
use shardwright_graph::{
    DType, Init, Op, Real, Role, Shape, Tensor, TensorType,
    ops::{Attention, AttentionGrad, Cast, Dropout, Transpose},
};
use shardwright_runtime::{Context, HostTensor as Value, initial_value, kernels::evaluate};

const N: usize = 2;
const Q: usize = 150;
const K: usize = 280;
/// Key heads, and query heads of each.
const H: usize = 2;
const R: usize = 2;
/// Sizes of heads.
const D: usize = 9;
const E: usize = 5;
const SCORES: [u64; 4] = [N as u64, (H * R) as u64, Q as u64, K as u64];

fn random(name: &str, shape: &[usize]) -> Value {
    let ty = TensorType::new(DType::F64, shape.iter().map(|&n| n as u64).collect::<Shape>());
    let init = Some(Init::Normal(Real(1.0)));
    initial_value(3, &Tensor { name: name.into(), ty, role: Role::Input, producer: None, init })
}

fn run(op: impl Into<Op>, inputs: &[&Value]) -> Vec<Value> {
    evaluate(&op.into(), inputs, &mut Context { step: 4, ..Context::default() }).unwrap()
}

fn value(shape: &[usize], data: Vec<f64>) -> Value {
    Value::from_vec(shape.iter().map(|&n| n as u64).collect::<Shape>(), data)
}

/// Results and gradients of the plain form, which stores all scores.
struct Plain {
    y: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dbias: Vec<f64>,
}

/// `bias` has a value per query head and key.
fn plain(op: &Attention, [q, k, v, bias, dy]: [&[f64]; 5]) -> Plain {
    let ones = value(&[N, H * R, Q, K], vec![1.0; N * H * R * Q * K]);
    let kept =
        op.dropout.clone().map_or(ones.clone(), |dropout| run(dropout, &[&ones]).remove(0)).to_f64_vec();
    let (sum, zeros) = (|n: usize, f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>(), |n| vec![0.0; n]);
    let mut out = Plain {
        y: zeros(N * Q * H * R * E),
        lse: zeros(N * H * R * Q),
        dq: zeros(q.len()),
        dk: zeros(k.len()),
        dv: zeros(v.len()),
        dbias: zeros(bias.len()),
    };
    for (n, head, i) in (0..N).flat_map(|n| (0..H * R).flat_map(move |h| (0..Q).map(move |i| (n, h, i)))) {
        let at_q = ((n * Q + i) * H * R + head) * D;
        let at_y = ((n * Q + i) * H * R + head) * E;
        let at_k = |j: usize| ((n * K + j) * H + head / R) * D;
        let at_v = |j: usize| ((n * K + j) * H + head / R) * E;
        let row = (n * H * R + head) * Q + i;
        let kept = &kept[row * K..][..K];
        let p = i as i64 + op.diagonal;
        let sees = |j: usize| {
            op.before.is_none_or(|b| j as i64 >= p - b as i64)
                && op.after.is_none_or(|a| j as i64 <= p + a as i64)
        };
        let score = |j: usize| {
            let product = sum(D, &|c| q[at_q + c] * k[at_k(j) + c]);
            if sees(j) { op.scale.0 * product + bias[head * K + j] } else { f64::NEG_INFINITY }
        };
        let s: Vec<f64> = (0..K).map(score).collect();
        let max = s.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
        let total = sum(K, &|j| if sees(j) { (s[j] - max).exp() } else { 0.0 });
        out.lse[row] = if total == 0.0 { f64::NEG_INFINITY } else { max + total.ln() };
        let weights: Vec<f64> =
            (0..K).map(|j| if sees(j) { (s[j] - max).exp() / total } else { 0.0 }).collect();
        for c in 0..E {
            out.y[at_y + c] = sum(K, &|j| weights[j] * kept[j] * v[at_v(j) + c]);
        }
        let dweights = |j: usize| kept[j] * sum(E, &|c| dy[at_y + c] * v[at_v(j) + c]);
        let mean = sum(K, &|j| weights[j] * dweights(j));
        for j in 0..K {
            let ds = weights[j] * (dweights(j) - mean);
            out.dbias[head * K + j] += ds;
            for c in 0..D {
                out.dq[at_q + c] += op.scale.0 * ds * k[at_k(j) + c];
                out.dk[at_k(j) + c] += op.scale.0 * ds * q[at_q + c];
            }
            for c in 0..E {
                out.dv[at_v(j) + c] += weights[j] * kept[j] * dy[at_y + c];
            }
        }
    }
    out
}

fn variants() -> Vec<Attention> {
    let (q, k) = (Q as u64, K as u64);
    let full = Attention::new(0.4, q, k);
    let causal = full.clone().causal();
    let dropout = Some(Dropout::new(0.25, 11, &SCORES.into()));
    vec![
        full.clone(),
        causal.clone(),
        Attention { diagonal: (K - Q) as i64, ..causal.clone() },
        Attention { before: Some(70), ..causal.clone() },
        Attention { before: Some(130), after: Some(40), diagonal: 20, ..full.clone() },
        // The first queries see no key.
        Attention { diagonal: -100, ..causal.clone() },
        Attention { dropout: dropout.clone(), ..full },
        Attention { dropout, ..causal },
    ]
}

#[test]
fn every_variant_equals_the_plain_form() {
    let [q, k, v] = [random("q", &[N, Q, H * R, D]), random("k", &[N, K, H, D]), random("v", &[N, K, H, E])];
    let (bias, dy) = (random("bias", &[H * R, 1, K]), random("dy", &[N, Q, H * R, E]));
    let data = [&q, &k, &v, &bias, &dy].map(Value::to_f64_vec);
    let narrow = |x: &Value| run(Cast { dtype: DType::F32 }, &[x]).remove(0);
    let widen = |x: &Value| run(Cast { dtype: DType::F64 }, &[x]).remove(0);
    for op in variants() {
        let expected = plain(&op, [&data[0], &data[1], &data[2], &data[3], &data[4]]);
        let (y, lse) = (value(&[N, Q, H * R, E], expected.y), value(&[N, H * R, Q], expected.lse));
        let found = run(op.clone(), &[&q, &k, &v, &bias]);
        assert_close(&y, &found[0], 1e-12, &format!("{op:?}"));
        assert_close(&lse, &found[1], 1e-12, &format!("log-sum-exp of {op:?}"));
        let inputs32 = [&q, &k, &v, &bias].map(narrow);
        let found32 = run(op.clone(), &inputs32.iter().collect::<Vec<_>>());
        assert_close(&y, &widen(&found32[0]), 1e-5, &format!("{op:?} in f32"));
        assert_close(&lse, &widen(&found32[1]), 1e-5, &format!("log-sum-exp of {op:?} in f32"));

        let grad = AttentionGrad { forward: op.clone(), bias_grad: true };
        let found = run(grad.clone(), &[&q, &k, &v, &found[0], &found[1], &dy, &bias]);
        let expected = [
            value(&[N, Q, H * R, D], expected.dq),
            value(&[N, K, H, D], expected.dk),
            value(&[N, K, H, E], expected.dv),
            value(&[H * R, 1, K], expected.dbias),
        ];
        for ((expected, found), what) in expected.iter().zip(&found).zip(["q", "k", "v", "bias"]) {
            assert_close(expected, found, 1e-12, &format!("gradient of {what} in {grad:?}"));
        }
    }
}

#[test]
fn orders_of_dimensions_and_heads_change_no_result() {
    let [q, k, v] = [random("q", &[N, Q, H * R, D]), random("k", &[N, K, H, D]), random("v", &[N, K, H, E])];
    let op = Attention::new(0.4, Q as u64, K as u64).causal();
    let turn = |x: &Value| run(Transpose { perm: [0, 2, 1, 3].into_iter().collect() }, &[x]).remove(0);
    let expected = run(op.clone(), &[&q, &k, &v]);
    let found = run(op.clone().heads_first(), &[&turn(&q), &turn(&k), &turn(&v)]);
    assert_close(&expected[0], &turn(&found[0]), 0.0, "heads first");
    assert_close(&expected[1], &found[1], 0.0, "log-sum-exp of heads first");
    let grouped = value(&[N, Q, H, R, D], q.to_f64_vec());
    let found = run(op, &[&grouped, &k, &v]);
    assert_eq!(expected[0].to_f64_vec(), found[0].to_f64_vec(), "heads as two dimensions");
}

/// The scores of one head here are 64 MiB; the kernels' scratch memory is some blocks.
#[test]
fn no_kernel_holds_the_scores() {
    let s = 4096;
    let [q, k, v] = ["q", "k", "v"]
        .map(|name| run(Cast { dtype: DType::F32 }, &[&random(name, &[1, s, 1, 8])]).remove(0));
    let op = Attention::new(1.0, s as u64, s as u64).causal();
    let mut context = Context::default();
    let found = evaluate(&op.clone().into(), &[&q, &k, &v], &mut context).unwrap();
    let grad = AttentionGrad { forward: op, bias_grad: false };
    evaluate(&grad.into(), &[&q, &k, &v, &found[0], &found[1], &found[0]], &mut context).unwrap();
    assert!(context.scratch.bytes() < 1 << 18, "{} bytes", context.scratch.bytes());
}
