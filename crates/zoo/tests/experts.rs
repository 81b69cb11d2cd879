//! Mixtures of experts, compared with plain loops over tokens: every router, with and without dropped tokens.

use shardwright_graph::{DType, Graph, GraphBuilder, ops::UnaryFn};
use shardwright_runtime::Serial;
use shardwright_zoo::layers::{self, ExpertGroups, Moe, Router, Scoring};

const SAMPLES: usize = 2;
const TOKENS: usize = 7;
const CHANNELS: usize = 4;

fn mixture(experts: u64, top_k: u64, capacity_factor: f64, router: Router) -> Moe {
    Moe { experts, top_k, inner: 3, activation: UnaryFn::Silu, capacity_factor, router }
}

/// The layer's result.
fn computed(cfg: &Moe) -> (Graph, Vec<f64>) {
    let mut b = GraphBuilder::new("experts");
    let shape = [SAMPLES, TOKENS, CHANNELS].map(|size| size as u64);
    let x = layers::data(&mut b, "x", DType::F64, &shape).unwrap();
    let y = layers::moe(&mut b, x, cfg).unwrap();
    b.output(y);
    let graph = b.finish();
    let mut run = Serial::new(&graph, 9, &[]);
    run.evaluate().unwrap();
    let values = run.value(y).unwrap().to_f64_vec();
    (graph, values)
}

/// Positions of the `count` largest numbers among `open`.
fn largest(x: &[f64], open: &[usize], count: usize) -> Vec<usize> {
    let mut order = open.to_vec();
    order.sort_by(|&i, &j| x[j].total_cmp(&x[i]));
    order.truncate(count);
    order
}

/// A token's experts and their weights, from its logits.
fn choices(cfg: &Moe, logits: &[f64]) -> Vec<(usize, f64)> {
    let softmax = |of: &[f64]| -> Vec<f64> {
        let total: f64 = of.iter().map(|x| x.exp()).sum();
        of.iter().map(|x| x.exp() / total).collect()
    };
    let router = &cfg.router;
    let scores: Vec<f64> = match router.scoring {
        Scoring::SoftmaxOfChosen => logits.to_vec(),
        Scoring::Softmax => softmax(logits),
        Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let mut open: Vec<usize> = (0..logits.len()).collect();
    if let Some(groups) = router.groups {
        let members: Vec<&[usize]> = open.chunks(logits.len() / groups.count as usize).collect();
        let sum = |of: &&[usize]| -> f64 {
            largest(&scores, of, groups.scores as usize).iter().map(|&i| scores[i]).sum()
        };
        let sums: Vec<f64> = members.iter().map(sum).collect();
        let all: Vec<usize> = (0..members.len()).collect();
        open = largest(&sums, &all, groups.top as usize).iter().flat_map(|&g| members[g].to_vec()).collect();
    }
    let chosen = largest(&scores, &open, cfg.top_k as usize);
    let mut weights: Vec<f64> = chosen.iter().map(|&i| scores[i]).collect();
    if router.scoring == Scoring::SoftmaxOfChosen {
        weights = softmax(&weights);
    }
    let total = if router.normalised { weights.iter().sum() } else { 1.0 };
    chosen.into_iter().zip(weights.iter().map(|w| w / total * router.scale)).collect()
}

/// The same layer, token by token.
fn expected(graph: &Graph, cfg: &Moe) -> Vec<f64> {
    let run = Serial::new(graph, 9, &[]);
    let source = |name: &str| {
        let id = graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap();
        run.value(id).unwrap().to_f64_vec()
    };
    let [x, router] = ["x", "gate.weight"].map(source);
    let [gate, up, down] = ["gate", "up", "down"].map(|name| source(&format!("experts.{name}.weight")));
    let (experts, inner) = (cfg.experts as usize, cfg.inner as usize);
    // Row vector times one of several matrices.
    let product = |v: &[f64], w: &[f64], which: usize, columns: usize| -> Vec<f64> {
        let w = &w[which * v.len() * columns..][..v.len() * columns];
        (0..columns).map(|o| v.iter().enumerate().map(|(c, v)| v * w[c * columns + o]).sum()).collect()
    };
    let mut y = vec![];
    for sample in x.chunks(TOKENS * CHANNELS) {
        let mut used = vec![0; experts];
        for token in sample.chunks(CHANNELS) {
            let mut sum = vec![0.0; CHANNELS];
            for (expert, weight) in choices(cfg, &product(token, &router, 0, experts)) {
                used[expert] += 1;
                if used[expert] > cfg.capacity(TOKENS as u64) {
                    continue;
                }
                let silu = |x: f64| x / (1.0 + (-x).exp());
                let (gate, up) = (product(token, &gate, expert, inner), product(token, &up, expert, inner));
                let hidden: Vec<f64> = gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect();
                for (sum, done) in sum.iter_mut().zip(product(&hidden, &down, expert, CHANNELS)) {
                    *sum += weight * done;
                }
            }
            y.extend(sum);
        }
    }
    y
}

#[test]
fn every_router_gives_what_a_loop_over_tokens_gives() {
    let groups = |scores| Some(ExpertGroups { count: 4, top: 2, scores });
    let plain = Router::new(Scoring::Softmax);
    let v3 = Router {
        normalised: true,
        groups: groups(2),
        correction: true,
        scale: 2.5,
        ..Router::new(Scoring::Sigmoid)
    };
    let routers = [
        ("Mixtral", Router::new(Scoring::SoftmaxOfChosen)),
        ("Qwen", plain),
        ("Qwen, normalised", Router { normalised: true, ..plain }),
        ("DeepSeek-V2", Router { groups: groups(1), scale: 16.0, ..plain }),
        ("DeepSeek-V3", v3),
    ];
    for (name, router) in routers {
        let mut dropped = 0;
        for (experts, top_k, capacity) in [(8, 3, 8.0), (8, 2, 1.0), (8, 1, 0.5), (16, 4, 1.25)] {
            let cfg = mixture(experts, top_k, capacity, router);
            let (graph, found) = computed(&cfg);
            let expected = expected(&graph, &cfg);
            assert_eq!(found.len(), expected.len());
            for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
                assert!((x - y).abs() <= 1e-12 * (1.0 + y.abs()), "{name} {cfg:?}: {i} is {x}, not {y}");
            }
            dropped += expected.chunks(CHANNELS).filter(|token| token.iter().all(|x| *x == 0.0)).count();
        }
        assert!(dropped > 0, "{name}: no token was dropped, so that nothing was tested");
    }
}

#[test]
fn tokens_that_find_their_expert_full_get_nothing() {
    // One expert with three slots for seven tokens: the first three are served, the rest are dropped.
    let cfg = mixture(1, 1, 0.4, Router::new(Scoring::Softmax));
    assert_eq!(cfg.capacity(TOKENS as u64), 3);
    for (i, token) in computed(&cfg).1.chunks(CHANNELS).enumerate() {
        assert_eq!(token.iter().any(|&v| v != 0.0), i % TOKENS < 3, "token {i}");
    }
}

#[test]
fn capacity_is_never_zero_nor_more_than_there_are_tokens() {
    let check = |experts, top_k, capacity_factor, tokens, expected| {
        let cfg = mixture(experts, top_k, capacity_factor, Router::new(Scoring::Softmax));
        assert_eq!(cfg.capacity(tokens), expected, "{cfg:?}");
    };
    check(8, 2, 1.25, 1024, 320);
    check(8, 2, 1.0, 3, 1);
    check(65536, 1, 0.01, 7, 1);
    check(1, 1, 1e6, u64::MAX, u64::MAX);
    check(4, 4, 1e6, 10, 10);
}

#[test]
fn experts_multiply_only_the_tokens_that_chose_them() {
    let options = shardwright_zoo::BuildOptions { batch: Some(2), ..Default::default() };
    let flops = |spec: &str| -> u64 { shardwright_zoo::build(spec, &options).unwrap().model_flops() };
    let of = |top_k: u64| {
        flops(&format!(
            "moe:layers=2,hidden=64,heads=4,ffn=256,vocab=100,seq=256,experts=8,capacity=1,top_k={top_k}"
        ))
    };
    // All else is equal, so that the experts of one choice are the difference; no term grows with the square of a sequence.
    let [one, two, eight] = [1, 2, 8].map(of);
    assert_eq!(eight - one, 7 * (two - one));
    let (tokens, products) = (2 * 256, 3 * 3);
    assert_eq!(two - one, 2 * tokens * products * 2 * 64 * 256);
}
