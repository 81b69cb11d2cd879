//! Plans of whole training steps: costs by hand, and exact against everything else.

use proptest::prelude::*;
use shardwright_cost::{Collective, Comm, OperatorTimes};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Op, Optimizer, Real, Role, TensorId, TensorType,
    ops::{Binary, BinaryFn, Contract, Reduce, Sgd, Softmax, Transpose, Unary, UnaryFn},
    train,
};
use shardwright_machine::{Bytes, Seconds, builtin};
use shardwright_plan::{
    Demands, Plan, PlanError, Problem, Wish, evaluate, limited, plan, refine, search, strategy,
};
use shardwright_search::{Control, registry};
use shardwright_space::Config;

const INIT: Init = Init::Normal(Real(1.0));

fn source(b: &mut GraphBuilder, name: &str, shape: &[u64], role: Role) -> TensorId {
    b.source(name, TensorType::new(DType::F32, shape), role, INIT).unwrap()
}

fn product(b: &mut GraphBuilder, name: &str, x: TensorId, outputs: u64) -> TensorId {
    let inputs = b.shape(x)[1];
    let w = source(b, &format!("{name}.w"), &[inputs, outputs], Role::Parameter);
    b.emit(name, Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap()
}

fn finish(mut b: GraphBuilder, y: TensorId) -> Graph {
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[y]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

/// Two products: 8 samples, 16 inputs, 32 hidden, 4 outputs.
fn mlp() -> Graph {
    let mut b = GraphBuilder::new("mlp");
    let x = source(&mut b, "x", &[8, 16], Role::Input);
    let y = product(&mut b, "fc1", x, 32);
    let z = product(&mut b, "fc2", y, 4);
    finish(b, z)
}

fn picoseconds(seconds: Seconds) -> i64 {
    (seconds.0 * 1e12).round() as i64
}

#[test]
fn data_parallel_mlp_on_two_devices_costs_what_it_does_by_hand() {
    let (graph, machine) = (mlp(), builtin("flat:2").unwrap());
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let found =
        search(&problem, strategy::find("data").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let device = machine.slowest();
    let times = OperatorTimes::new(&device, None).unwrap();
    let time = |op: Op, inputs: &[&[u64]]| {
        let inputs: Vec<_> = inputs.iter().map(|s| TensorType::new(DType::F32, *s)).collect();
        let outputs = op.operator().infer(&inputs).unwrap();
        picoseconds(times.estimate(&op.workload(&inputs, &outputs)).seconds)
    };
    let contract = |spec: &str, inputs: &[&[u64]]| time(Contract::parse(spec).unwrap().into(), inputs);
    let update = |shape: &[u64]| time(Sgd { lr: Real(0.1) }.into(), &[shape, shape]);
    // Four of the eight samples on each device.
    let compute = [
        contract("nc,co->no", &[&[4, 16], &[16, 32]]),
        contract("nc,co->no", &[&[4, 32], &[32, 4]]),
        time(Reduce::sum([0, 1].into_iter().collect()).into(), &[&[4, 4]]),
        // The gradient of the loss by itself, and of the sum by what it added up.
        time(
            shardwright_graph::ops::Fill { value: Real(1.0), ty: TensorType::new(DType::F32, []) }.into(),
            &[],
        ),
        time(
            shardwright_graph::ops::Broadcast {
                shape: shardwright_graph::Shape::new(&[4, 4]),
                dims: Default::default(),
            }
            .into(),
            &[&[]],
        ),
        contract("no,co->nc", &[&[4, 4], &[32, 4]]),
        contract("nc,no->co", &[&[4, 32], &[4, 4]]),
        contract("nc,no->co", &[&[4, 16], &[4, 32]]),
        update(&[16, 32]),
        update(&[32, 4]),
    ];
    let comm = Comm::new(&machine, machine.mesh());
    let reduce = |elements: u64| {
        picoseconds(comm.seconds(Collective::AllReduce, machine.mesh().all(), Bytes(4 * elements)))
    };
    // Both weights' gradients are added up over the devices; nothing else moves.
    let moved = reduce(16 * 32) + reduce(32 * 4);
    let costs = evaluate(&problem, &found.configs).unwrap();
    assert_eq!((costs.compute(), costs.comm()), (compute.iter().sum(), moved));
    assert_eq!(found.objective, compute.iter().sum::<i64>() + moved);
    // Each device sends all of both gradients once (two halves there and back).
    assert_eq!(costs.traffic.total(), Bytes(2 * 4 * (16 * 32 + 32 * 4)));
}

#[test]
fn column_then_row_needs_one_sum_forwards_and_none_for_weights() {
    let (graph, machine) = (mlp(), builtin("flat:2").unwrap());
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let choice = |layer: &str, config: &str| {
        let at = graph.layers.iter().position(|l| l.name == layer).unwrap();
        let rule = &problem.shapes[graph.layers[at].forward.index()].rule;
        (0..problem.choices[at].len() as u32)
            .find(|&c| problem.forward_config(at, c).show(rule, problem.mesh()) == config)
            .unwrap()
    };
    let choices = [choice("fc1", "o2"), choice("fc2", "c2"), choice("loss", "whole")];
    let costs = evaluate(&problem, &problem.configs(&choices)).unwrap();
    // The 8 x 4 results of the second product are added up over both devices; the hidden layer stays split,
    // forwards and backwards, and both weights are where they are needed.
    let comm = Comm::new(&machine, machine.mesh());
    let sum = comm.seconds(Collective::AllReduce, machine.mesh().all(), Bytes(4 * 8 * 4));
    assert_eq!(costs.comm(), picoseconds(sum));
    assert_eq!(costs.traffic.total(), Bytes(2 * 4 * 8 * 4));
}

#[test]
fn a_plan_survives_its_json_and_other_versions_are_refused() {
    let (graph, machine) = (mlp(), builtin("flat:4").unwrap());
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let plan = plan(&problem, strategy::find("auto").unwrap(), &Demands::default(), &Control::new()).unwrap();
    assert_eq!(Plan::from_json(plan.to_json().as_bytes()), Ok(plan.clone()));
    assert_eq!(plan.ops.len(), graph.ops.len());
    let other = plan.to_json().replacen("\"format_version\": 1", "\"format_version\": 9", 1);
    assert!(Plan::from_json(other.as_bytes()).unwrap_err().contains("version 9"));
    assert!(strategy::find("best").is_err_and(|e| e.to_string().contains("owt")));
}

#[test]
fn a_plan_is_recalled_as_the_configs_that_it_was_made_of_and_only_for_its_graph_and_machine() {
    use shardwright_frontend::zoo::{BuildOptions, build};
    let model = "mlp:batch=64,hidden=256,layers=3";
    let graph = build(model, &BuildOptions::default()).unwrap();
    for machine in ["flat:4", "p100x16", "flat:64"] {
        let machine = builtin(machine).unwrap();
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let (auto, control) = (strategy::find("auto").unwrap(), Control::new());
        let found = search(&problem, auto, &Demands::default(), &control).unwrap();
        let plan = plan(&problem, auto, &Demands::default(), &control).unwrap();
        let mesh = plan.mesh(&machine).unwrap();
        // On 64 devices the plan is on finer axes than the problem.
        let refined = refine(&problem, auto, &Demands::default(), &found, &control).best;
        let (axes, configs) = match &refined {
            Some(refined) => (refined.problem.mesh().axes(), &refined.found.configs),
            None => (problem.mesh().axes(), &found.configs),
        };
        assert_eq!(mesh.axes(), axes);
        assert_eq!(&plan.configs(&graph, &mesh).unwrap(), configs);
        assert!(plan.mesh(&builtin("flat:2").unwrap()).unwrap_err().to_string().contains("plan again"));
        let other = build("mlp:batch=64,hidden=512,layers=3", &BuildOptions::default()).unwrap();
        let error = plan.configs(&other, &mesh).unwrap_err().to_string();
        assert!(error.contains("differs in shapes"), "{error}");
        let other = build("mlp:batch=64,hidden=256,layers=4", &BuildOptions::default()).unwrap();
        let error = plan.configs(&other, &mesh).unwrap_err().to_string();
        assert!(error.contains("same model with the same options"), "{error}");
        let mut wrong = plan.clone();
        wrong.ops[0].axes[0] = Some("zz".into());
        let error = wrong.configs(&graph, &mesh).unwrap_err().to_string();
        assert!(error.contains("no factor `zz`"), "{error}");
        wrong.ops[0].axes.pop();
        assert!(wrong.configs(&graph, &mesh).is_err());
        assert!(evaluate(&problem, &found.configs[1..]).is_err());
    }
}

/// What a random graph does next.
#[derive(Clone, Debug)]
enum Step {
    Product(u64),
    /// So many ops that work element by element, one after the other.
    Chain(usize),
    Softmax,
    /// There and back: ops that only hand a layout on.
    Transposes,
    AddEarlier(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        prop::sample::select(vec![2u64, 3, 4, 8, 64]).prop_map(Step::Product),
        (1usize..4).prop_map(Step::Chain),
        Just(Step::Softmax),
        Just(Step::Transposes),
        (0usize..8).prop_map(Step::AddEarlier),
    ];
    prop::collection::vec(step, 1..6)
}

fn random_graph(samples: u64, inputs: u64, steps: &[Step]) -> Graph {
    let mut b = GraphBuilder::new("random");
    let x = source(&mut b, "x", &[samples, inputs], Role::Input);
    let mut made = vec![product(&mut b, "first", x, inputs)];
    for (i, step) in steps.iter().enumerate() {
        let last = made[made.len() - 1];
        let name = format!("op{i}");
        let next = match step {
            Step::Product(outputs) => product(&mut b, &name, last, *outputs),
            Step::Chain(length) => (0..*length).fold(last, |last, at| {
                b.emit(&format!("{name}.{at}"), Unary { f: UnaryFn::Relu }, &[last]).unwrap()
            }),
            Step::Softmax => b.emit(&name, Softmax { axis: 1 }, &[last]).unwrap(),
            Step::Transposes => ["there", "back"].into_iter().fold(last, |last, way| {
                let turn = Transpose { perm: [1, 0].into_iter().collect() };
                b.emit(&format!("{name}.{way}"), turn, &[last]).unwrap()
            }),
            Step::AddEarlier(which) => {
                let alike: Vec<_> = made.iter().copied().filter(|&t| b.shape(t) == b.shape(last)).collect();
                let earlier = alike[which % alike.len()];
                b.emit(&name, Binary { f: BinaryFn::Add }, &[last, earlier]).unwrap()
            }
        };
        made.push(next);
    }
    let last = made[made.len() - 1];
    finish(b, last)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The heart of the matter: exact is never beaten, equals brute force, and all sums agree; and ops that choose for
    /// themselves do no worse than layers.
    #[test]
    fn exact_is_never_beaten_and_equals_brute_force(
        samples in prop::sample::select(vec![2u64, 6, 8, 512]),
        inputs in prop::sample::select(vec![4u64, 5, 1024]),
        steps in steps(),
        machine in prop::sample::select(vec!["flat:2", "flat:4", "flat:3", "k80x64:8"]),
    ) {
        let graph = random_graph(samples, inputs, &steps);
        let machine = builtin(machine).unwrap();
        let control = Control::new();
        let mut optima = Vec::new();
        for build in [Problem::new, Problem::untied] {
            let problem = build(&graph, &machine, None).unwrap();
            let exact = strategy::find("exact").unwrap();
            let exact = search(&problem, exact, &Demands::default(), &control).unwrap();
            prop_assert_eq!(exact.objective, exact.bound, "proved");
            // SoyBean cuts binary axes only, and orders them freely, which the space does not.
            let tilings = |s: &&strategy::Strategy| matches!(s.space, strategy::Space::Tilings(_));
            for strategy in strategy::STRATEGIES.iter().filter(|s| !tilings(s)) {
                let other = search(&problem, strategy, &Demands::default(), &control).unwrap();
                let expressible = problem.untied || strategy.name != "fsdp";
                prop_assert!(exact.objective <= other.objective || !expressible, "{}", strategy.name);
                // PaSE's tables hold the whole network, without any of the reductions that `exact` starts with.
                prop_assert!(strategy.name != "pase" || exact.objective == other.objective);
                let costs = evaluate(&problem, &other.configs).unwrap();
                prop_assert_eq!(costs.objective(), other.objective, "{}", strategy.name);
            }
            let assignments = problem.choices.iter().map(|c| c.len() as f64).product::<f64>();
            if assignments < 2e6 {
                let brute = registry::find("brute").unwrap().solver().solve(&problem.network, &control);
                prop_assert_eq!(brute.cost, Some(exact.objective));
            }
            optima.push(exact.objective);
        }
        prop_assert!(optima[1] <= optima[0], "untied {} tied {}", optima[1], optima[0]);
    }
}

fn holding(memory: Bytes) -> Demands {
    Demands { memory: Some(memory), ..Demands::default() }
}

#[test]
fn a_memory_limit_is_kept_at_the_least_cost_and_an_impossible_one_says_what_would_do() {
    let mut b = GraphBuilder::new("wide");
    let x = source(&mut b, "x", &[64, 256], Role::Input);
    let y = product(&mut b, "fc1", x, 512);
    let z = product(&mut b, "fc2", y, 256);
    let (graph, machine) = (finish(b, z), builtin("flat:4").unwrap());
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let control = Control::new().iteration_limit(1000);
    let exact = strategy::find("exact").unwrap();
    let free = search(&problem, exact, &Demands::default(), &control).unwrap();
    let peak = |configs: &[Config]| evaluate(&problem, configs).unwrap().peak_memory;
    // Without a limit worth the name the plan is the same.
    let same = search(&problem, exact, &holding(peak(&free.configs)), &control).unwrap();
    assert_eq!(same.objective, free.objective);
    let Err(PlanError::DoesNotFit { least: Some(least), .. }) =
        search(&problem, exact, &holding(Bytes(1000)), &control)
    else {
        panic!("nothing fits into 1000 bytes")
    };
    // What is said to do does.
    let tight = search(&problem, exact, &holding(Bytes(least)), &control).unwrap();
    assert!(peak(&tight.configs) <= Bytes(least));
    assert!(tight.objective >= free.objective);
    // Data parallelism repeats the weights on every device.
    let data = search(&problem, strategy::find("data").unwrap(), &Demands::default(), &control).unwrap();
    assert!(peak(&data.configs) > Bytes(least));
    assert!(search(&problem, strategy::find("data").unwrap(), &holding(Bytes(least)), &control).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The network's memory over time is that of the evaluation, whatever is chosen.
    #[test]
    fn the_networks_peak_is_the_evaluations(
        samples in prop::sample::select(vec![2u64, 6, 8]),
        steps in steps(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 31),
        untied in any::<bool>(),
    ) {
        let (graph, machine) = (random_graph(samples, 4, &steps), builtin("flat:4").unwrap());
        let build = if untied { Problem::untied } else { Problem::new };
        let problem = build(&graph, &machine, None).unwrap();
        let choices: Vec<u32> =
            problem.choices.iter().zip(picks.iter().cycle()).map(|(all, pick)| pick.index(all.len()) as u32).collect();
        let peak = evaluate(&problem, &problem.configs(&choices)).unwrap().peak_memory.0;
        // With every layer fixed, a limit is kept exactly from the peak on.
        let solve = |limit: u64| {
            let network = limited(&problem, Bytes(limit)).unwrap();
            let fixed: Vec<Vec<u32>> = choices.iter().map(|&c| vec![c]).collect();
            let fixed = strategy::restrict(&network, &fixed).unwrap();
            registry::find("exact").unwrap().solver().solve(&fixed, &Control::new()).choice.is_some()
        };
        prop_assert!(solve(peak));
        prop_assert!(!solve(peak - 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Every plan priced one by one: the cheapest that keeps a limit is what the search finds, and the leanest is the
    /// smallest limit that it names.
    #[test]
    fn under_a_limit_exact_equals_brute_force_over_whole_plans(
        samples in prop::sample::select(vec![2u64, 6, 64]),
        inputs in prop::sample::select(vec![4u64, 5, 256]),
        steps in prop::collection::vec(prop_oneof![
            prop::sample::select(vec![2u64, 3, 64]).prop_map(Step::Product),
            (1usize..3).prop_map(Step::Chain),
            (0usize..8).prop_map(Step::AddEarlier),
        ], 0..3),
        pick in any::<prop::sample::Index>(),
    ) {
        let (graph, machine) = (random_graph(samples, inputs, &steps), builtin("flat:2").unwrap());
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let mut assignments: Vec<Vec<u32>> = vec![Vec::new()];
        for choices in &problem.choices {
            let longer = |all: &Vec<u32>| {
                let all = all.clone();
                (0..choices.len() as u32).map(move |c| all.iter().copied().chain([c]).collect())
            };
            assignments = assignments.iter().flat_map(longer).collect();
        }
        prop_assume!(assignments.len() <= 4096);
        let priced: Vec<(u64, i64)> = assignments
            .iter()
            .map(|choices| {
                let costs = evaluate(&problem, &problem.configs(choices)).unwrap();
                (costs.peak_memory.0, costs.objective())
            })
            .collect();
        let control = Control::new().iteration_limit(1000);
        let exact = strategy::find("exact").unwrap();
        let limit = priced[pick.index(priced.len())].0;
        let least = priced.iter().filter(|(peak, _)| *peak <= limit).map(|(_, objective)| *objective).min();
        let found = search(&problem, exact, &holding(Bytes(limit)), &control).unwrap();
        prop_assert_eq!((Some(found.objective), found.bound), (least, found.objective));
        let leanest = priced.iter().map(|(peak, _)| *peak).min().unwrap();
        match search(&problem, exact, &holding(Bytes(leanest - 1)), &control) {
            Err(PlanError::DoesNotFit { least, floor, proved, .. }) => {
                prop_assert_eq!((least, floor, proved), (Some(leanest), leanest, true));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}

#[test]
fn wishes_are_granted_at_the_least_cost_and_priced_or_refused_with_a_reason() {
    let (graph, machine) = (mlp(), builtin("flat:4").unwrap());
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let (auto, control) = (strategy::find("auto").unwrap(), Control::new());
    let wishing = |text: &str| {
        let demands = Demands { wishes: vec![Wish::parse(text).unwrap()], ..Demands::default() };
        plan(&problem, auto, &demands, &control)
    };
    let free = plan(&problem, auto, &Demands::default(), &control).unwrap();
    let kept = wishing("fc?=o2,n2").unwrap();
    let configs: Vec<_> =
        kept.layers.iter().filter(|l| l.name.starts_with("fc")).map(|l| l.config.as_str()).collect();
    assert_eq!(configs, ["n2·o2", "n2·o2"]);
    assert!(kept.objective >= free.objective && kept.proved_optimal);
    assert!(kept.warnings.iter().any(|w| w.contains("the wishes cost")));
    let refused = |text: &str| wishing(text).unwrap_err().to_string();
    assert!(refused("fc1=o64").contains("`fc1` cannot be split so; it can be"), "{}", refused("fc1=o64"));
    assert!(refused("conv*=n4").contains("no layer has such a name"));
}

#[test]
fn megatron_splits_columns_then_rows_inside_a_node_and_samples_outside() {
    use shardwright_frontend::zoo::{BuildOptions, build};
    let options = BuildOptions { batch: Some(16), ..BuildOptions::default() };
    let graph = build("gpt:layers=1,hidden=64,heads=4,seq=16,vocab=512", &options).unwrap();
    let machine = builtin("p100x16").unwrap();
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let plan =
        plan(&problem, strategy::find("megatron").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let config = |end: &str| &plan.layers.iter().find(|l| l.name.ends_with(end)).unwrap().config[..];
    assert_eq!((config("mlp.fc1"), config("mlp.fc2")), ("n4·o4", "n4·c4"));
    assert_eq!((config("attn.q"), config("attn.scores")), ("n4·h4", "n4·h4"));
    assert!(config("attn.out").starts_with("n4·h4"), "rows of the output projection: {}", config("attn.out"));
    assert_eq!((config("ln1"), config("mlp.residual")), ("d0=4", "d0=4"));
}

#[test]
fn little_memory_means_coarser_axes_and_too_little_is_told() {
    let graph =
        shardwright_frontend::zoo::build("mlp:batch=64,hidden=64,layers=3", &Default::default()).unwrap();
    let machine = builtin("flat:16").unwrap();
    let within = |memory_bytes| {
        let control = Control { memory_bytes, ..Control::new() };
        Problem::within(&graph, &machine, None, false, &control)
    };
    let bytes = |problem: &Problem<'_>| {
        let network = &problem.network;
        (0..network.tables()).map(|table| 8 * network.table(table as u32).len() as u64).sum::<u64>()
    };
    let whole = within(u64::MAX).unwrap();
    let part = within(bytes(&whole) / 2).unwrap();
    assert!(part.mesh().len() < whole.mesh().len() && bytes(&part) <= bytes(&whole) / 2);
    let Err(PlanError::TooLarge { needed: 1, allowed: 0 }) = within(8) else {
        panic!("eight bytes are enough")
    };
}
