//! Whole tiny models in f64: the gradient of the loss by every parameter equals finite differences, and
//! training lowers the loss.

use shardwright_graph::{
    BuildError, DType, GraphBuilder, Init, Op, Optimizer, Real, Role, Shape, TensorId, TensorType,
    ops::{
        AvgPool, Binary, BinaryFn, Combine, Compare, CompareFn, Contract, Conv, ConvGeometry, CrossEntropy,
        Dispatch, Dropout, Fill, Gather, Iota, Lstm, MaxPool, Normalize, PoolGeometry, Reduce, Reshape,
        Route, Select, SlotGrid, Slots, Softmax, SumExp, TakeAlong, Unary, UnaryFn,
    },
    train,
};
use shardwright_runtime::{HostTensor, Serial};

/// A model under construction; every method adds a forward op or a common group of ops.
struct Net {
    b: GraphBuilder,
}

impl Net {
    fn new(name: &str) -> Self {
        Self { b: GraphBuilder::new(name) }
    }

    fn source(&mut self, name: &str, shape: &[u64], role: Role, init: Init) -> TensorId {
        let dtype = if matches!(init, Init::Below(_)) { DType::I32 } else { DType::F64 };
        self.b.source(name, TensorType::new(dtype, shape), role, init).unwrap()
    }

    fn input(&mut self, name: &str, shape: &[u64]) -> TensorId {
        self.source(name, shape, Role::Input, Init::Normal(Real(1.0)))
    }

    fn ids(&mut self, name: &str, shape: &[u64], below: u64) -> TensorId {
        self.source(name, shape, Role::Input, Init::Below(below))
    }

    fn param(&mut self, name: &str, shape: &[u64], deviation: f64) -> TensorId {
        self.source(name, shape, Role::Parameter, Init::Normal(Real(deviation)))
    }

    fn op(&mut self, op: impl Into<Op>, inputs: &[TensorId]) -> TensorId {
        let op = op.into();
        self.b.emit(op.kind(), op, inputs).unwrap()
    }

    fn einsum(&mut self, spec: &str, inputs: &[TensorId]) -> TensorId {
        self.op(Contract::parse(spec).unwrap(), inputs)
    }

    fn unary(&mut self, f: UnaryFn, x: TensorId) -> TensorId {
        self.op(Unary { f }, &[x])
    }

    fn binary(&mut self, f: BinaryFn, x: TensorId, y: TensorId) -> TensorId {
        self.op(Binary { f }, &[x, y])
    }

    fn reshape(&mut self, x: TensorId, shape: &[u64]) -> TensorId {
        self.op(Reshape { shape: Shape::new(shape) }, &[x])
    }

    fn shape(&self, x: TensorId) -> Vec<u64> {
        self.b.shape(x).to_vec()
    }

    /// A linear layer on the last dimension.
    fn linear(&mut self, name: &str, x: TensorId, width: u64) -> TensorId {
        let shape = self.shape(x);
        let inner = shape[shape.len() - 1];
        let w = self.param(&format!("{name}.w"), &[inner, width], (inner as f64).powf(-0.5));
        let bias = self.param(&format!("{name}.b"), &[width], 0.1);
        let spec = if shape.len() == 3 { "bsk,kn->bsn" } else { "bk,kn->bn" };
        let y = self.einsum(spec, &[x, w]);
        self.binary(BinaryFn::Add, y, bias)
    }

    fn norm(&mut self, name: &str, norm: Normalize, x: TensorId) -> TensorId {
        let shape: Vec<u64> = norm.params.iter().map(|&d| self.shape(x)[d]).collect();
        let mut inputs = vec![x];
        if norm.centered {
            inputs.push(self.op(norm.mean(), &[x]));
        }
        let variance = self.op(norm.variance(), &inputs.clone());
        inputs.push(variance);
        if norm.scaled {
            inputs.push(self.param(&format!("{name}.gamma"), &shape, 1.0));
        }
        if norm.shifted {
            inputs.push(self.param(&format!("{name}.beta"), &shape, 0.3));
        }
        self.op(norm, &inputs)
    }

    fn conv(&mut self, name: &str, x: TensorId, out: u64, kernel: u64, geometry: ConvGeometry) -> TensorId {
        let channels = self.shape(x)[1] / geometry.groups;
        let deviation = ((channels * kernel * kernel) as f64).powf(-0.5);
        let w = self.param(&format!("{name}.w"), &[out, channels, kernel, kernel], deviation);
        let bias = self.param(&format!("{name}.b"), &[out, 1, 1], 0.1);
        let y = self.op(Conv { geometry }, &[x, w]);
        self.binary(BinaryFn::Add, y, bias)
    }

    /// The mean cross-entropy over all rows.
    fn loss(&mut self, logits: TensorId, labels: TensorId) -> TensorId {
        let shape = self.shape(logits);
        let m = self.op(Reduce::max([shape.len() - 1].into_iter().collect()), &[logits]);
        let s = self.op(SumExp {}, &[logits, m]);
        let op = CrossEntropy::over(self.b.ty(logits));
        let losses = self.op(op, &[logits, labels, m, s]);
        let rows = self.shape(losses);
        self.op(Reduce::mean((0..rows.len()).collect(), &rows), &[losses])
    }

    /// Compares every parameter's gradient with finite differences at some coordinates, then trains.
    fn check(mut self, loss: TensorId) {
        const STEP: f64 = 1e-5;
        self.b.output(loss);
        let built: Result<(), BuildError> = train(&mut self.b, loss, &Optimizer::adam(0.01));
        built.unwrap();
        let graph = self.b.finish();
        assert_eq!(graph.gradients.len(), graph.parameters().count(), "every parameter has a gradient");
        let keep: Vec<TensorId> = graph.gradients.iter().map(|g| g.gradient).collect();
        let mut serial = Serial::new(&graph, 11, &keep);
        serial.evaluate().unwrap();
        let gradients: Vec<Vec<f64>> = keep.iter().map(|&t| serial.value(t).unwrap().to_f64_vec()).collect();
        let mut flowing = 0;
        for (pair, gradient) in graph.gradients.iter().zip(&gradients) {
            let name = &graph.tensor(pair.parameter).name;
            let value = serial.value(pair.parameter).unwrap().clone();
            let elements = value.to_f64_vec();
            let scale = gradient.iter().fold(1e-2f64, |m, g| m.max(g.abs()));
            flowing += usize::from(scale > 1e-2);
            for probe in 0..elements.len().min(5) {
                let i = (probe * 7919 + 3) % elements.len();
                let mut loss_at = |x: f64| {
                    let mut moved = elements.clone();
                    moved[i] = x;
                    serial.set(pair.parameter, HostTensor::from_vec(value.shape().clone(), moved)).unwrap();
                    serial.evaluate().unwrap();
                    serial.loss().unwrap()
                };
                let difference = (loss_at(elements[i] + STEP) - loss_at(elements[i] - STEP)) / (2.0 * STEP);
                assert!(
                    (difference - gradient[i]).abs() <= 1e-6 * scale,
                    "{}: gradient of {name}[{i}] is {}, finite differences give {difference}",
                    graph.name,
                    gradient[i]
                );
            }
            serial.set(pair.parameter, value).unwrap();
        }
        assert!(2 * flowing >= gradients.len(), "most gradients are not nearly zero");
        serial.step().unwrap();
        let before = serial.loss().unwrap();
        for _ in 0..30 {
            serial.step().unwrap();
        }
        let after = serial.loss().unwrap();
        assert!(after < 0.9 * before, "{}: training took the loss from {before} to {after}", graph.name);
    }
}

#[test]
fn mlp_with_a_shared_weight() {
    let mut net = Net::new("mlp");
    let x = net.input("x", &[6, 5]);
    let labels = net.ids("labels", &[6], 4);
    let h = net.linear("first", x, 7);
    let h = net.unary(UnaryFn::Tanh, h);
    let shared = net.param("shared", &[7, 7], 0.5);
    let y = net.einsum("bk,kn->bn", &[h, shared]);
    let y = net.unary(UnaryFn::Sigmoid, y);
    let h = net.binary(BinaryFn::Add, h, y);
    let y = net.einsum("bk,nk->bn", &[h, shared]);
    let y = net.unary(UnaryFn::Silu, y);
    let h = net.binary(BinaryFn::Mul, h, y);
    let logits = net.linear("last", h, 4);
    let loss = net.loss(logits, labels);
    net.check(loss);
}

#[test]
fn cnn_with_pooling_and_batch_norm() {
    let mut net = Net::new("cnn");
    let x = net.input("x", &[4, 3, 8, 8]);
    let labels = net.ids("labels", &[4], 5);
    let same = ConvGeometry { pad: [(1, 1); 2].into_iter().collect(), ..ConvGeometry::plain(2) };
    let h = net.conv("first", x, 4, 3, same.clone());
    let h = net.norm("bn1", Normalize::batch(&[4, 4, 8, 8], 1e-5), h);
    let h = net.unary(UnaryFn::Relu, h);
    let pooled = net.b.add("pool", MaxPool { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]) }, &[h]);
    let h = pooled.unwrap()[0];
    let skip = h;
    let h = net.conv("second", h, 4, 3, ConvGeometry { groups: 2, ..same });
    let h = net.norm("bn2", Normalize::batch(&[4, 4, 4, 4], 1e-5), h);
    let h = net.binary(BinaryFn::Add, h, skip);
    let h = net.unary(UnaryFn::GeluTanh, h);
    let strided = ConvGeometry { stride: [2, 2].into_iter().collect(), ..ConvGeometry::plain(2) };
    let h = net.conv("third", h, 6, 1, strided);
    let h = net.op(AvgPool { geometry: PoolGeometry::plain(&[2, 2], &[1, 1]) }, &[h]);
    let h = net.op(Reduce::mean([2, 3].into_iter().collect(), &[4, 6, 1, 1]), &[h]);
    let logits = net.linear("last", h, 5);
    let loss = net.loss(logits, labels);
    net.check(loss);
}

/// One LSTM layer over `x[t, b, i]`; gives the hidden states.
fn lstm(net: &mut Net, name: &str, x: TensorId, hidden: u64) -> TensorId {
    let shape = net.shape(x);
    let w = net.param(&format!("{name}.w"), &[shape[2], 4, hidden], 0.5);
    let u = net.param(&format!("{name}.u"), &[hidden, 4, hidden], 0.5);
    let bias = net.param(&format!("{name}.b"), &[4, hidden], 0.1);
    let h0 = net.param(&format!("{name}.h0"), &[shape[1], hidden], 0.5);
    let c0 = net.param(&format!("{name}.c0"), &[shape[1], hidden], 0.5);
    let gx = net.einsum("tbi,igh->tbgh", &[x, w]);
    let gx = net.binary(BinaryFn::Add, gx, bias);
    net.b.add(name, Lstm {}, &[gx, u, h0, c0]).unwrap()[0]
}

#[test]
fn lstm_language_model() {
    let mut net = Net::new("lstm");
    let (time, batch, vocabulary) = (5, 3, 9);
    let tokens = net.ids("tokens", &[time, batch], vocabulary);
    let labels = net.ids("labels", &[time, batch], vocabulary);
    let table = net.param("table", &[vocabulary, 4], 1.0);
    let h = net.op(Gather { axis: 0, base: 0, extent: vocabulary }, &[table, tokens]);
    let h = lstm(&mut net, "lstm1", h, 5);
    let h = lstm(&mut net, "lstm2", h, 6);
    let logits = net.linear("last", h, vocabulary);
    let loss = net.loss(logits, labels);
    net.check(loss);
}

/// Causal self-attention of `x[b, s, d]`.
fn attention(net: &mut Net, x: TensorId, heads: u64) -> TensorId {
    let [b, s, d] = net.shape(x).try_into().unwrap();
    let size = d / heads;
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let y = net.linear(name, x, d);
        net.reshape(y, &[b, s, heads, size])
    });
    let scores = net.einsum("bqhd,bkhd->bhqk", &[q, k]);
    let scale = Real((size as f64).powf(-0.5));
    let scores = net.unary(UnaryFn::Affine { scale, shift: Real(0.0) }, scores);
    let ty = TensorType::new(DType::I32, [s, s]);
    let [row, column] = [0, 1].map(|axis| net.op(Iota { ty: ty.clone(), axis, start: 0 }, &[]));
    let visible = net.op(Compare { f: CompareFn::Ge }, &[row, column]);
    let never = TensorType::new(DType::F64, Shape::scalar());
    let never = net.op(Fill { value: Real(f64::NEG_INFINITY), ty: never }, &[]);
    let scores = net.op(Select {}, &[visible, scores, never]);
    let weights = net.op(Softmax { axis: 3 }, &[scores]);
    let y = net.einsum("bhqk,bkhd->bqhd", &[weights, v]);
    let y = net.reshape(y, &[b, s, d]);
    net.linear("out", y, d)
}

#[test]
fn transformer_block() {
    let mut net = Net::new("transformer");
    let (b, s, d, vocabulary) = (2, 4, 6, 7);
    let tokens = net.ids("tokens", &[b, s], vocabulary);
    let labels = net.ids("labels", &[b, s], vocabulary);
    let table = net.param("table", &[vocabulary, d], 1.0);
    let place = net.param("place", &[s, d], 0.5);
    let h = net.op(Gather { axis: 0, base: 0, extent: vocabulary }, &[table, tokens]);
    let h = net.binary(BinaryFn::Add, h, place);
    let shape = [b, s, d];
    let y = net.norm("ln1", Normalize::layer(&shape, 1e-5), h);
    let y = attention(&mut net, y, 2);
    let h = net.binary(BinaryFn::Add, h, y);
    let y = net.norm("rms", Normalize::rms(&shape, 1e-5), h);
    let y = net.linear("up", y, 2 * d);
    let y = net.unary(UnaryFn::Gelu, y);
    let y = net.linear("down", y, d);
    // The same mask at every evaluation of one step, so finite differences see one function.
    let y = net.op(Dropout::new(0.2, 1, &Shape::new(&shape)), &[y]);
    let h = net.binary(BinaryFn::Add, h, y);
    let h = net.norm("ln2", Normalize::layer(&shape, 1e-5), h);
    let logits = net.einsum("bsk,nk->bsn", &[h, table]);
    let loss = net.loss(logits, labels);
    net.check(loss);
}

#[test]
fn mixture_of_experts() {
    let mut net = Net::new("moe");
    let (groups, tokens, d, experts, capacity, hidden) = (2, 6, 5, 4, 3, 6);
    let x = net.input("x", &[groups, tokens, d]);
    let labels = net.ids("labels", &[groups, tokens], 3);
    let h = net.linear("in", x, d);
    let gate = net.param("gate", &[d, experts], 1.0);
    let scores = net.einsum("nsd,de->nse", &[h, gate]);
    let probabilities = net.op(Softmax { axis: 2 }, &[scores]);
    let chosen = net.op(Route { k: 2, groups: 2, top_groups: 1, group_scores: 2 }, &[probabilities]);
    let weights = net.op(TakeAlong { axis: 2, base: 0, extent: experts }, &[probabilities, chosen]);
    // Six tokens for three slots of two experts in each of two groups: some are dropped.
    let slots = net.op(Slots { experts, capacity }, &[chosen]);
    let grid = SlotGrid::new(experts, capacity);
    let inputs = net.op(Dispatch::new(grid), &[h, slots]);
    let up = net.param("up", &[experts, d, hidden], 0.5);
    let down = net.param("down", &[experts, hidden, d], 0.5);
    let y = net.einsum("necd,edf->necf", &[inputs, up]);
    let y = net.unary(UnaryFn::Silu, y);
    let y = net.einsum("necf,efd->necd", &[y, down]);
    let y = net.op(Combine { grid }, &[y, slots, weights]);
    let h = net.binary(BinaryFn::Add, h, y);
    let logits = net.linear("last", h, 3);
    let loss = net.loss(logits, labels);
    net.check(loss);
}

/// Every norm alone, with its statistics, which the generic tests of single ops cannot differentiate.
#[test]
fn norms_and_losses_with_their_statistics() {
    let shape = [4, 3, 2];
    let grouped = Normalize {
        axes: [0, 2].into_iter().collect(),
        params: [1, 2].into_iter().collect(),
        count: 8,
        ..Normalize::layer(&shape, 1e-2)
    };
    let bare = Normalize { scaled: false, shifted: false, ..Normalize::layer(&shape, 1e-2) };
    let across = Normalize {
        axes: [0].into_iter().collect(),
        params: [0].into_iter().collect(),
        centered: false,
        count: 4,
        ..Normalize::layer(&shape, 1e-2)
    };
    for norm in [
        Normalize::layer(&shape, 1e-2),
        Normalize::rms(&shape, 1e-2),
        Normalize::batch(&shape, 1e-2),
        grouped,
        bare,
        across,
    ] {
        let mut net = Net::new("norm");
        let x = net.param("x", &shape, 1.0);
        let labels = net.ids("labels", &[4, 3], 2);
        let y = net.norm("norm", norm, x);
        let loss = net.loss(y, labels);
        net.check(loss);
    }
}
