//! One random generator per op kind. A new op kind adds its generator here and is then covered by the
//! generic tests; the list is checked against the registry.

use crate::{
    case::{Case, Rng},
    nn_cases, shape_cases, window_cases,
};
use shardwright_graph::{
    DType, Init, Op, Real, Shape, TensorType,
    ops::{
        Binary, BinaryFn, Bitcast, Broadcast, Cast, Compare, CompareFn, Contract, Fill, Iota, Literal,
        Opaque, Reduce, Reshape, Select, Unary, UnaryFn, UnaryGrad,
    },
};

pub type Generator = fn(&mut Rng) -> Case;

/// Every op kind with its generator.
pub const GENERATORS: &[(&str, Generator)] = &[
    ("adam", nn_cases::adam),
    ("avg_pool", window_cases::avg_pool),
    ("avg_pool_grad", window_cases::avg_pool_grad),
    ("binary", binary),
    ("bitcast", bitcast),
    ("broadcast", broadcast),
    ("cast", cast),
    ("compare", compare),
    ("concat", shape_cases::concat),
    ("contract", contract),
    ("conv", window_cases::conv),
    ("conv_grad_input", window_cases::conv_grad_input),
    ("conv_grad_weight", window_cases::conv_grad_weight),
    ("cross_entropy", nn_cases::cross_entropy),
    ("cross_entropy_grad", nn_cases::cross_entropy_grad),
    ("cumsum", shape_cases::cumsum),
    ("dropout", nn_cases::dropout),
    ("dynamic_slice", shape_cases::dynamic_slice),
    ("dynamic_update", shape_cases::dynamic_update),
    ("fill", fill),
    ("gather", shape_cases::gather),
    ("iota", iota),
    ("literal", literal),
    ("log_softmax", nn_cases::log_softmax),
    ("log_softmax_grad", nn_cases::log_softmax_grad),
    ("lstm", shape_cases::lstm),
    ("lstm_grad", shape_cases::lstm_grad),
    ("max_pool", window_cases::max_pool),
    ("max_pool_grad", window_cases::max_pool_grad),
    ("momentum", nn_cases::momentum),
    ("normalize", nn_cases::normalize),
    ("norm_grad_input", nn_cases::norm_grad_input),
    ("norm_grad_params", nn_cases::norm_grad_params),
    ("norm_grad_stats", nn_cases::norm_grad_stats),
    ("one_hot", shape_cases::one_hot),
    ("opaque", opaque),
    ("pad", shape_cases::pad),
    ("put_along", shape_cases::put_along),
    ("reduce", reduce),
    ("reshape", reshape),
    ("reverse", shape_cases::reverse),
    ("scatter_add", shape_cases::scatter_add),
    ("select", select),
    ("sgd", nn_cases::sgd),
    ("slice", shape_cases::slice),
    ("softmax", nn_cases::softmax),
    ("softmax_grad", nn_cases::softmax_grad),
    ("sort", shape_cases::sort),
    ("sum_exp", nn_cases::sum_exp),
    ("take_along", shape_cases::take_along),
    ("top_k", shape_cases::top_k),
    ("top_k_mask", shape_cases::top_k_mask),
    ("transpose", shape_cases::transpose),
    ("transpose_grad", shape_cases::transpose_grad),
    ("unary", unary),
    ("unary_grad", unary_grad),
    ("variance", nn_cases::variance),
];

pub const NORMAL: Init = Init::Normal(Real(1.0));
/// Truth values: zero or one.
pub const BITS: Init = Init::Below(2);

pub fn f64s(shape: impl Into<Shape>) -> (TensorType, Init) {
    (TensorType::new(DType::F64, shape), NORMAL)
}

pub fn bools(shape: impl Into<Shape>) -> (TensorType, Init) {
    (TensorType::new(DType::Bool, shape), BITS)
}

pub fn case(op: impl Into<Op>, inputs: Vec<(TensorType, Init)>) -> Case {
    Case { op: op.into(), inputs }
}

/// A shape that broadcasts to `shape`: some dimensions one, some leading ones missing.
pub fn broadcastable(rng: &mut Rng, shape: &[u64]) -> Vec<u64> {
    let skip = rng.between(0, shape.len() as u64) as usize;
    shape[skip..].iter().map(|&n| if rng.between(0, 2) == 0 { 1 } else { n }).collect()
}

fn binary(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 4);
    let other = broadcastable(rng, &shape);
    use BinaryFn::*;
    let f = rng.pick(&[
        Add,
        And,
        Atan2,
        Div,
        Max,
        Min,
        Mul,
        Or,
        Pow,
        Rem,
        ShiftLeft,
        ShiftRight,
        ShiftRightSigned,
        Sub,
        Xor,
    ]);
    let bits = rng.flip();
    let tensor = |s: Vec<u64>| match f {
        And | Or | Xor if bits => bools(s),
        And | Or | Rem | ShiftLeft | ShiftRight | ShiftRightSigned | Xor => {
            (TensorType::new(DType::I64, s), Init::Below(70))
        }
        _ => f64s(s),
    };
    let mut inputs = vec![tensor(shape), tensor(other)];
    if rng.flip() {
        inputs.swap(0, 1);
    }
    // Away from zero.
    if matches!(f, Div | Pow) {
        inputs[1].1 = Init::Constant(Real(1.7));
    }
    if matches!(f, Atan2 | Pow) {
        inputs[0].1 = Init::Constant(Real(1.3));
    }
    case(Binary { f }, inputs)
}

fn bitcast(rng: &mut Rng) -> Case {
    // Whole numbers to floats: small ones are tiny floats, all different.
    let ty = TensorType::new(DType::I64, &rng.shape(0, 3)[..]);
    case(Bitcast { dtype: DType::F64 }, vec![(ty, Init::Below(1 << 52))])
}

fn broadcast(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    let mut dims = vec![];
    let mut from = vec![];
    for (d, &n) in shape.iter().enumerate() {
        match rng.between(0, 2) {
            0 => {}
            1 => (dims.push(d), from.push(1)).1,
            _ => (dims.push(d), from.push(n)).1,
        }
    }
    case(Broadcast { shape: Shape::new(&shape), dims: dims.into() }, vec![f64s(&from[..])])
}

fn cast(rng: &mut Rng) -> Case {
    let dtype = rng.pick(&[DType::F64, DType::F32, DType::I32, DType::I64, DType::Bool]);
    let shape = rng.shape(0, 3);
    case(Cast { dtype }, vec![f64s(&shape[..])])
}

fn compare(rng: &mut Rng) -> Case {
    use CompareFn::*;
    let shape = rng.shape(0, 3);
    let other = broadcastable(rng, &shape);
    let whole = |s: &[u64]| (TensorType::new(DType::I64, s), Init::Below(3));
    case(Compare { f: rng.pick(&[Eq, Ne, Lt, Le, Gt, Ge]) }, vec![whole(&shape), whole(&other)])
}

fn contract(rng: &mut Rng) -> Case {
    let specs = [
        "mk,kn->mn",
        "mk,nk->mn",
        "km,kn->nm",
        "bmk,bkn->bmn",
        "bqhd,bkhd->bhqk",
        "bhqk,bkhd->bqhd",
        "bsk,kn->bsn",
        "gtec,gtm->egcm",
        "ab->ba",
        "abc->b",
        "m,n->mn",
        "k,k->",
        "mk,k->m",
        "amk,kn->mn",
        "abmk,bkn->abmn",
        "ab,cd->",
    ];
    let spec = Contract::parse(rng.pick(&specs)).unwrap();
    let sizes: Vec<u64> = (0..128).map(|_| rng.size()).collect();
    let inputs =
        spec.operands.iter().map(|o| f64s(o.iter().map(|&c| sizes[c as usize]).collect::<Shape>())).collect();
    case(spec, inputs)
}

fn fill(rng: &mut Rng) -> Case {
    let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
    case(Fill { value: Real(1.5), ty }, vec![])
}

fn iota(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    let axis = rng.between(0, shape.len() as u64 - 1) as usize;
    let dtype = rng.pick(&[DType::F64, DType::I32, DType::I64]);
    case(Iota { ty: TensorType::new(dtype, &shape[..]), axis, start: rng.between(0, 3) }, vec![])
}

fn literal(rng: &mut Rng) -> Case {
    let ty = TensorType::new(rng.pick(&[DType::F64, DType::I32]), &rng.shape(0, 3)[..]);
    let values = (0..ty.shape.elements()).map(|i| Real(i as f64)).collect::<Vec<_>>().into();
    case(Literal { ty, values }, vec![])
}

fn opaque(rng: &mut Rng) -> Case {
    let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
    case(Opaque { call: "library".into(), makes: vec![ty.clone()] }, vec![(ty, NORMAL)])
}

fn reduce(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 4);
    let axes = (0..shape.len()).filter(|_| rng.flip()).collect();
    let op = match rng.between(0, 2) {
        0 => Reduce::sum(axes),
        1 => Reduce::mean(axes, &shape),
        _ => Reduce::max(axes),
    };
    case(op, vec![f64s(&shape[..])])
}

fn reshape(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    // Merge some neighbours, then split some sizes again.
    let mut merged: Vec<u64> = vec![];
    for &n in &shape {
        match merged.last_mut() {
            Some(last) if rng.flip() => *last *= n,
            _ => merged.push(n),
        }
    }
    let mut to = vec![];
    for n in merged {
        let divisors: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
        let d = rng.pick(&divisors);
        if rng.flip() { to.extend([d, n / d]) } else { to.push(n) }
    }
    case(Reshape { shape: Shape::new(&to) }, vec![f64s(&shape[..])])
}

fn select(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 3);
    let mut shapes = [shape.clone(), broadcastable(rng, &shape), broadcastable(rng, &shape)];
    shapes.rotate_left(rng.between(0, 2) as usize);
    case(Select {}, vec![bools(&shapes[0][..]), f64s(&shapes[1][..]), f64s(&shapes[2][..])])
}

fn unary_fn(rng: &mut Rng) -> UnaryFn {
    use UnaryFn::*;
    rng.pick(&[
        Abs,
        Affine { scale: Real(-1.5), shift: Real(0.5) },
        Ceil,
        Cos,
        Erf,
        ErfInv,
        Exp,
        Expm1,
        Floor,
        Gelu,
        GeluTanh,
        LeakyRelu(Real(0.1)),
        Log,
        Log1p,
        Neg,
        Power(Real(2.5)),
        Reciprocal,
        Relu,
        Round,
        Rsqrt,
        Sigmoid,
        Sign,
        Silu,
        Sin,
        Sqrt,
        Square,
        Tan,
        Tanh,
    ])
}

/// Values inside the function's domain: positive and away from zero where it needs that.
fn domain(f: UnaryFn) -> Init {
    use UnaryFn::*;
    match f {
        Log | Log1p | Power(_) | Reciprocal | Rsqrt | Sqrt => Init::Constant(Real(1.3)),
        ErfInv | Tan => Init::Constant(Real(0.4)),
        _ => NORMAL,
    }
}

fn unary(rng: &mut Rng) -> Case {
    let f = unary_fn(rng);
    let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
    case(Unary { f }, vec![(ty, domain(f))])
}

fn unary_grad(rng: &mut Rng) -> Case {
    let f = unary_fn(rng);
    let ty = TensorType::new(DType::F64, &rng.shape(0, 3)[..]);
    case(UnaryGrad { f }, vec![(ty.clone(), domain(f)), (ty, NORMAL)])
}
