//! Attention that is fused computes what its products and softmax compute, forwards and backwards: random sizes, orders of
//! dimensions, masks and forms of the softmax and of its derivative.

use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Op, Real, Role, Shape, TensorId, TensorType, fuse_attention,
    ops::{
        Binary, BinaryFn, Compare, CompareFn, Contract, Iota, Reduce, Reshape, Select, Softmax, SoftmaxGrad,
        Unary, UnaryFn,
    },
};
use shardwright_runtime::Serial;

/// A step under construction.
struct Step {
    b: GraphBuilder,
    /// Sizes of letters.
    sizes: Vec<(char, u64)>,
}

#[derive(Clone, Debug)]
struct Form {
    sizes: [u64; 7],
    grouped: bool,
    orders: [usize; 8],
    mask: usize,
    forward: usize,
    backward: usize,
    scale: f64,
}

impl Step {
    fn shape(&self, letters: &str) -> Vec<u64> {
        let size = |c: char| self.sizes.iter().find(|(known, _)| *known == c).unwrap().1;
        letters.chars().map(size).collect()
    }

    fn source(&mut self, name: &str, letters: &str) -> TensorId {
        let ty = TensorType::new(DType::F64, self.shape(letters));
        self.b.source(name, ty, Role::Input, Init::Normal(Real(1.0))).unwrap()
    }

    fn op(&mut self, op: impl Into<Op>, inputs: &[TensorId]) -> TensorId {
        let op = op.into();
        self.b.emit(op.kind(), op, inputs).unwrap()
    }

    fn einsum(&mut self, a: (TensorId, &str), b: (TensorId, &str), result: &str) -> TensorId {
        self.op(Contract::parse(&format!("{},{}->{result}", a.1, b.1)).unwrap(), &[a.0, b.0])
    }

    fn unary(&mut self, f: UnaryFn, x: TensorId) -> TensorId {
        self.op(Unary { f }, &[x])
    }

    fn binary(&mut self, f: BinaryFn, x: TensorId, y: TensorId) -> TensorId {
        self.op(Binary { f }, &[x, y])
    }

    /// A reduction along the last dimension, which stays with size one.
    fn along_keys(&mut self, reduce: fn(usize) -> Reduce, x: TensorId) -> TensorId {
        let mut shape = self.b.shape(x).to_vec();
        let made = self.op(reduce(shape.len() - 1), &[x]);
        *shape.last_mut().unwrap() = 1;
        self.op(Reshape { shape: Shape::new(&shape) }, &[made])
    }
}

/// The step, and the number of its outputs. `wrong` spoils the gradient.
fn step(form: &Form, wrong: bool) -> Graph {
    let names = ['n', 'h', 'r', 'q', 'k', 'd', 'e'];
    let sizes = names.into_iter().zip(form.sizes).collect();
    let mut s = Step { b: GraphBuilder::new("step"), sizes };
    let pick = |options: &[&str], at: usize| {
        let found = options[form.orders[at] % options.len()];
        if form.grouped { found.to_string() } else { found.replace('r', "") }
    };
    let q_dims = pick(&["nqhrd", "nhrqd", "hnqrd", "nhqrd"], 0);
    let k_dims = pick(&["nkhd", "nhkd", "nhdk"], 1);
    let v_dims = pick(&["nkhe", "nhke", "nehk"], 2);
    // Keys come last: forms below reduce the last dimension.
    let scores = pick(&["nhrqk", "rnhqk", "nhqrk", "qhnrk"], 3);
    let o_dims = pick(&["nqhre", "nhrqe", "neqhr"], 4);
    let [q, k, v] = [("q", &q_dims), ("k", &k_dims), ("v", &v_dims)].map(|(name, dims)| s.source(name, dims));
    let product = s.einsum((q, &q_dims), (k, &k_dims), &scores);
    let factor = UnaryFn::Affine { scale: Real(form.scale), shift: Real(0.0) };
    let mut x = s.unary(factor, product);
    let seen = match form.mask {
        0 => None,
        1 => {
            let bias = s.source("bias", &scores[scores.len() - 1..]);
            x = s.binary(BinaryFn::Add, x, bias);
            None
        }
        _ => {
            let along = |letter: char| {
                let rank = scores.len();
                let axis = scores.chars().position(|c| c == letter).unwrap();
                let mut shape = vec![1; rank];
                shape[axis] = s.shape(&letter.to_string())[0];
                Iota { ty: TensorType::new(DType::I32, shape), axis, start: 0 }
            };
            let (i, j) = (along('q'), along('k'));
            let (i, j) = (s.op(i, &[]), s.op(j, &[]));
            let seen = s.op(Compare { f: CompareFn::Ge }, &[i, j]);
            let ty = TensorType::new(DType::F64, []);
            let hidden = s.b.source("hidden", ty, Role::Constant, Init::Constant(Real(-1e30))).unwrap();
            x = s.op(Select {}, &[seen, x, hidden]);
            Some(seen)
        }
    };
    let axis = scores.len() - 1;
    let most = s.along_keys(|axis| Reduce::max([axis].into_iter().collect()), x);
    let shifted = s.binary(BinaryFn::Sub, x, most);
    let exponentials = s.unary(UnaryFn::Exp, shifted);
    let sum_of =
        |s: &mut Step, x: TensorId| s.along_keys(|axis| Reduce::sum([axis].into_iter().collect()), x);
    let sum = sum_of(&mut s, exponentials);
    let weights = match form.forward {
        0 => s.op(Softmax { axis }, &[x]),
        _ => s.binary(BinaryFn::Div, exponentials, sum),
    };
    let o = s.einsum((weights, &scores), (v, &v_dims), &o_dims);
    let g = s.source("g", &o_dims);
    let dv = s.einsum((weights, &scores), (g, &o_dims), &pick(&["nkhe", "khne"], 5));
    let dp = s.einsum((v, &v_dims), (g, &o_dims), &scores);
    let mut ds = match form.backward {
        0 => s.op(SoftmaxGrad { axis }, &[weights, dp]),
        1 => {
            let products = s.binary(BinaryFn::Mul, weights, dp);
            let total = sum_of(&mut s, products);
            let inner = s.binary(BinaryFn::Sub, dp, total);
            s.binary(BinaryFn::Mul, inner, weights)
        }
        _ => {
            // As derivatives of a quotient: e (dp / z - sum(dp e / z²)).
            let square = s.unary(UnaryFn::Square, sum);
            let inverse = s.unary(UnaryFn::Reciprocal, square);
            let products = s.binary(BinaryFn::Mul, dp, inverse);
            let products = s.binary(BinaryFn::Mul, products, exponentials);
            let total = sum_of(&mut s, products);
            let quotient = s.binary(BinaryFn::Div, dp, sum);
            let inner = s.binary(BinaryFn::Sub, quotient, total);
            s.binary(BinaryFn::Mul, inner, exponentials)
        }
    };
    if let Some(seen) = seen {
        let ty = TensorType::new(DType::F64, []);
        let zero = s.b.source("zero", ty, Role::Constant, Init::Constant(Real(0.0))).unwrap();
        ds = s.op(Select {}, &[seen, ds, zero]);
    }
    let back = UnaryFn::Affine { scale: Real(form.scale * if wrong { 1.01 } else { 1.0 }), shift: Real(0.0) };
    ds = s.unary(back, ds);
    let dq = s.einsum((ds, &scores), (k, &k_dims), &pick(&["nqhrd", "rdqhn"], 6));
    let dk = s.einsum((ds, &scores), (q, &q_dims), &pick(&["nkhd", "hkdn"], 7));
    for t in [o, dq, dk, dv] {
        s.b.output(t);
    }
    s.b.finish()
}

/// The fused graph, and how many fused ops it has.
fn fused(graph: &Graph) -> (Graph, Vec<&'static str>) {
    let numbers: Vec<Option<f64>> = graph
        .tensors
        .iter()
        .map(|tensor| match tensor.init {
            Some(Init::Constant(value)) if tensor.role == Role::Constant => Some(value.0),
            _ => None,
        })
        .collect();
    let made = fuse_attention(graph.clone(), &[], &|t| Some(vec![numbers[t.index()]?])).unwrap().graph;
    assert_eq!(shardwright_graph::verify::verify(&made), Ok(()));
    let kinds = made.ops.iter().map(|node| node.op.kind());
    let kinds = kinds.filter(|kind| kind.starts_with("attention") || *kind == "contract").collect();
    (made, kinds)
}

fn outputs(graph: &Graph) -> Vec<Vec<f64>> {
    let mut serial = Serial::new(graph, 5, &[]);
    serial.evaluate().unwrap();
    graph.outputs.iter().map(|&t| serial.value(t).unwrap().to_f64_vec()).collect()
}

fn forms() -> impl Strategy<Value = Form> {
    let sizes = (1u64..4, 1u64..4, 1u64..4, 2u64..5, 2u64..5, 1u64..4, 1u64..4);
    let orders = prop::array::uniform8(0usize..12);
    let kinds = (0usize..3, 0usize..2, 0usize..3);
    (sizes, any::<bool>(), orders, kinds, prop::sample::select(vec![1.0, 0.5, 0.3])).prop_map(
        |((n, h, r, q, k, d, e), grouped, orders, (mask, forward, backward), scale)| Form {
            sizes: [n, h, if grouped { r } else { 1 }, q, k, d, e],
            grouped,
            orders,
            mask,
            forward,
            backward,
            scale,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_fused_step_computes_what_the_plain_one_computes(form in forms()) {
        let plain = step(&form, false);
        let (graph, kinds) = fused(&plain);
        // Where several dimensions have size one, orders may be ambiguous.
        let units = form.sizes[..3].iter().filter(|size| **size == 1).count();
        if units <= usize::from(!form.grouped) {
            prop_assert_eq!(kinds, ["attention", "attention_grad"]);
        }
        for (plain, fused) in outputs(&plain).iter().zip(outputs(&graph)) {
            for (a, b) in plain.iter().zip(fused) {
                prop_assert!((a - b).abs() < 1e-9 * (1.0 + a.abs()), "{} and {}", a, b);
            }
        }
    }

    #[test]
    fn a_step_with_another_gradient_stays_as_it_is(form in forms()) {
        let plain = step(&form, true);
        prop_assert_eq!(fused(&plain).0, plain);
    }
}
