//! Plans of whole training steps: costs by hand, and exact against everything else.

#[path = "../../plan/tests/graphs/mod.rs"]
mod graphs;

use graphs::{Step, finish, mlp, product, random_graph, recomputed, source, steps};
use proptest::prelude::*;
use shardwright_cost::{Collective, Comm, OperatorTimes};
use shardwright_graph::{
    DType, GraphBuilder, Op, Real, Role, TensorType,
    ops::{Contract, Reduce, Sgd},
};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{
    ConfigConstraint, Constraints, Context, Plan, PlanError, compute_lower_bound, optcnn_bytes, picoseconds,
};
use shardwright_search::{Control, registry};
use shardwright_space::Assignment;
use shardwright_strategies::{Planner, STRATEGIES, Solution, StrategyError, find, plan, recipes};
use shardwright_zoo::{BuildOptions, build};

/// The answer of a strategy.
fn solve<'a>(
    planner: &Planner<'a>,
    name: &str,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Solution<'a>, StrategyError> {
    find(name)?.solve(planner, constraints, control)
}

#[test]
fn data_parallel_mlp_on_two_devices_costs_what_it_does_by_hand() {
    let (graph, machine) = (mlp(), builtin("flat:2").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let found = solve(&planner, "data", &Constraints::default(), &Control::new()).unwrap();
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
    let costs = found.context.price(&found.assignment).unwrap();
    assert_eq!((costs.compute(), costs.comm()), (compute.iter().sum(), moved));
    assert_eq!(found.objective(), compute.iter().sum::<i64>() + moved);
    // Each device sends all of both gradients once (two halves there and back).
    assert_eq!(costs.traffic.total(), Bytes(2 * 4 * (16 * 32 + 32 * 4)));
}

#[test]
fn a_plan_survives_its_json_and_other_versions_are_refused() {
    let (graph, machine) = (mlp(), builtin("flat:4").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let answer = plan(&planner, find("auto").unwrap(), &Constraints::default(), &Control::new()).unwrap();
    let plan = answer.plan;
    assert_eq!(Plan::from_json(plan.to_json().unwrap().as_bytes()), Ok(plan.clone()));
    assert_eq!(plan.ops.len(), graph.ops.len());
    let other = plan.to_json().unwrap().replacen("\"format_version\": 1", "\"format_version\": 9", 1);
    assert!(Plan::from_json(other.as_bytes()).unwrap_err().contains("version 9"));
    assert!(find("best").is_err_and(|e| e.to_string().contains("owt")));
}

#[test]
fn a_plan_reads_back_as_the_assignment_it_describes_and_only_for_its_graph_and_machine() {
    let model = "mlp:batch=64,hidden=256,layers=3";
    let graph = build(model, &BuildOptions::default()).unwrap();
    for machine in ["flat:4", "p100x16", "flat:64"] {
        let machine = builtin(machine).unwrap();
        let planner = Planner::new(&graph, &machine, None, false);
        let (auto, control) = (find("auto").unwrap(), Control::new());
        let answer = plan(&planner, auto, &Constraints::default(), &control).unwrap();
        let plan = answer.plan;
        let mesh = plan.mesh(&machine).unwrap();
        assert_eq!(mesh.axes(), answer.mesh.axes());
        assert_eq!(plan.assignment(&graph, &mesh).unwrap(), answer.assignment);
        // On 64 devices the plan is on finer axes than the problem.
        let searched = planner.problem(&control).unwrap().context.mesh().axes();
        assert_eq!(plan.space.coarse.is_some(), mesh.axes() != searched);
        assert!(plan.mesh(&builtin("flat:2").unwrap()).unwrap_err().to_string().contains("plan again"));
        let other = build("mlp:batch=64,hidden=512,layers=3", &BuildOptions::default()).unwrap();
        let error = plan.assignment(&other, &mesh).unwrap_err().to_string();
        assert!(error.contains("differs in shapes"), "{error}");
        let other = build("mlp:batch=64,hidden=256,layers=4", &BuildOptions::default()).unwrap();
        let error = plan.assignment(&other, &mesh).unwrap_err().to_string();
        assert!(error.contains("same model with the same options"), "{error}");
        let mut wrong = plan.clone();
        wrong.ops[0].axes[0] = Some("zz".into());
        let error = wrong.assignment(&graph, &mesh).unwrap_err().to_string();
        assert!(error.contains("no factor `zz`"), "{error}");
        wrong.ops[0].axes.pop();
        assert!(wrong.assignment(&graph, &mesh).is_err());
        let context = planner.context(mesh, false).unwrap();
        assert_eq!(context.price(&answer.assignment).unwrap().objective(), plan.objective);
        let few = Assignment::new(answer.assignment.configs[1..].to_vec());
        assert!(context.price(&few).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// `exact` is never beaten and equals brute force. All sums agree. Ops that choose for themselves do no worse than
    /// layers.
    #[test]
    fn exact_is_never_beaten_and_equals_brute_force(
        samples in prop::sample::select(vec![2u64, 6, 8, 512]),
        inputs in prop::sample::select(vec![4u64, 5, 1024]),
        steps in steps(),
        machine in prop::sample::select(vec!["flat:2", "flat:4", "flat:3", "k80x64:8"]),
        recompute in any::<u16>(),
    ) {
        let graph = recomputed(random_graph(samples, inputs, &steps), recompute);
        let machine = builtin(machine).unwrap();
        let control = Control::new();
        let mut optima = Vec::new();
        // Pins are outside of the space that `exact` searches.
        let constraints = Constraints { spmd: true, ..Constraints::default() };
        for untied in [false, true] {
            let planner = Planner::new(&graph, &machine, None, untied);
            let exact = solve(&planner, "exact", &constraints, &control).unwrap();
            // A recipe on merged axes may be cheaper than everything on the prime axes that are searched.
            let optimum = exact.coarse.as_ref().map_or(exact.objective(), |coarse| coarse.objective);
            let bound = exact.coarse.as_ref().map_or(exact.lower_bound, |coarse| Some(coarse.lower_bound));
            prop_assert_eq!(Some(optimum), bound, "proved");
            prop_assert!(exact.objective() <= optimum);
            let problem = planner.problem(&control).unwrap();
            // SoyBean cuts binary axes only, and orders them freely, which the space does not. Walks and placements
            // minimise the simulated step.
            let others = ["soybean", "soybean-time", "mcmc", "place"];
            for strategy in STRATEGIES.iter().filter(|strategy| !others.contains(&strategy.name())) {
                let name = strategy.name();
                let other = strategy.solve(&planner, &constraints, &control).unwrap();
                let sharded = ["zero1", "zero2", "fsdp", "hsdp", "ep", "megatron-sp"].contains(&name);
                let expressible = (untied || !sharded) && name != "auto";
                prop_assert!(exact.objective() <= other.objective() || !expressible, "{}", name);
                // PaSE's tables hold the whole network, without any of the reductions that `exact` starts with.
                prop_assert!(name != "pase" || optimum == other.objective());
                // `auto` gives up the proof only for a shorter simulated step. The bound of the searched space holds for
                // plans of that space alone.
                if name == "auto" {
                    let inside = exact.coarse.is_none() && problem.contains(&other.assignment);
                    prop_assert!(!inside || exact.lower_bound == other.lower_bound);
                    prop_assert!(other.lower_bound.is_some_and(|bound| bound <= other.objective()));
                }
                let costs = other.context.price(&other.assignment).unwrap();
                prop_assert_eq!(costs.objective(), other.objective(), "{}", name);
            }
            let assignments = problem.choices.iter().map(|c| c.len() as f64).product::<f64>();
            if assignments < 2e6 {
                let brute = registry::find("brute").unwrap().solver().solve(&problem.network, &control);
                prop_assert_eq!(brute.cost, Some(optimum));
            }
            optima.push(optimum);
        }
        prop_assert!(optima[1] <= optima[0], "untied {} tied {}", optima[1], optima[0]);
    }
}

fn holding(memory: Bytes) -> Constraints {
    Constraints { memory: Some(memory), ..Constraints::default() }
}

#[test]
fn a_memory_limit_is_kept_at_the_least_cost_and_an_impossible_one_names_a_possible_one() {
    let mut b = GraphBuilder::new("wide");
    let x = source(&mut b, "x", &[64, 256], Role::Input);
    let y = product(&mut b, "fc1", x, 512);
    let z = product(&mut b, "fc2", y, 256);
    let (graph, machine) = (finish(b, z), builtin("flat:4").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let control = Control::new().iteration_limit(1000);
    let run = |name: &str, constraints: &Constraints| solve(&planner, name, constraints, &control);
    let free = run("exact", &Constraints::default()).unwrap();
    let peak = |found: &Solution<'_>| found.context.price(&found.assignment).unwrap().peak_memory;
    // A limit that the free plan keeps changes nothing.
    let same = run("exact", &holding(peak(&free))).unwrap();
    assert_eq!(same.objective(), free.objective());
    let Err(StrategyError::Plan(PlanError::DoesNotFit { least: Some(least), .. })) =
        run("exact", &holding(Bytes(1000)))
    else {
        panic!("nothing fits into 1000 bytes")
    };
    // The limit that the error names can be kept.
    let tight = run("exact", &holding(Bytes(least))).unwrap();
    assert!(peak(&tight) <= Bytes(least));
    assert!(tight.objective() >= free.objective());
    // Data parallelism repeats the weights on every device.
    let data = run("data", &Constraints::default()).unwrap();
    assert!(peak(&data) > Bytes(least));
    assert!(run("data", &holding(Bytes(least))).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Every plan priced one by one: the search's answer keeps the limit, its bounds on time and memory hold for all plans,
    /// and a plan that it proves optimal is the cheapest.
    #[test]
    fn under_a_limit_bounds_hold_for_whole_plans_one_by_one(
        samples in prop::sample::select(vec![2u64, 6, 64]),
        inputs in prop::sample::select(vec![4u64, 5, 256]),
        steps in prop::collection::vec(prop_oneof![
            prop::sample::select(vec![2u64, 3, 64]).prop_map(Step::Product),
            (1usize..3).prop_map(Step::Chain),
            (0usize..8).prop_map(Step::AddEarlier),
        ], 0..3),
        pick in any::<prop::sample::Index>(),
        recompute in any::<u16>(),
    ) {
        let graph = recomputed(random_graph(samples, inputs, &steps), recompute);
        let machine = builtin("flat:2").unwrap();
        let planner = Planner::new(&graph, &machine, None, false);
        let problem = planner.problem(&Control::new()).unwrap();
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
                let costs = problem.context.price(&problem.assignment(choices)).unwrap();
                (costs.peak_memory.0, costs.objective())
            })
            .collect();
        let control = Control::new().iteration_limit(1000);
        let limit = priced[pick.index(priced.len())].0;
        let least = priced.iter().filter(|(peak, _)| *peak <= limit).map(|(_, objective)| *objective).min();
        let found = solve(&planner, "exact", &holding(Bytes(limit)), &control).unwrap();
        prop_assert!(found.costs.peak_memory.0 <= limit);
        prop_assert!(Some(found.objective()) >= least && found.lower_bound <= least);
        prop_assert!(!found.proved_optimal() || Some(found.objective()) == least);
        let least_memory = priced.iter().map(|(peak, _)| *peak).min().unwrap();
        match solve(&planner, "exact", &holding(Bytes(least_memory - 1)), &control) {
            Err(StrategyError::Plan(PlanError::DoesNotFit { least, lower_bound, .. })) => {
                prop_assert!(least >= Some(least_memory) && lower_bound >= least_memory);
            }
            Err(StrategyError::Plan(PlanError::NotFound { least, lower_bound, .. })) => {
                prop_assert!(least >= Some(least_memory) && lower_bound < least_memory);
            }
            other => prop_assert!(false, "{:?}", other.map(|found| found.assignment)),
        }
    }
}

#[test]
fn given_configs_are_kept_at_the_least_cost_and_priced_or_refused_with_a_reason() {
    let (graph, machine) = (mlp(), builtin("flat:4").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let (auto, control) = (find("auto").unwrap(), Control::new());
    let planned = |constraints: &Constraints| plan(&planner, auto, constraints, &control);
    let given = |text: &str| {
        let configs = vec![ConfigConstraint::parse(text).unwrap()];
        planned(&Constraints { configs, ..Constraints::default() })
    };
    let free = planned(&Constraints::default()).unwrap().plan;
    let kept = given("fc?=o2,n2").unwrap().plan;
    let configs: Vec<_> =
        kept.layers.iter().filter(|l| l.name.starts_with("fc")).map(|l| l.config.as_str()).collect();
    assert_eq!(configs, ["n2·o2", "n2·o2"]);
    assert!(kept.objective >= free.objective && kept.proved_optimal);
    assert!(kept.warnings.iter().any(|w| w.contains("the constraints on configs cost")));
    let refused = |text: &str| given(text).unwrap_err().to_string();
    assert!(refused("fc1=o64").contains("`fc1` cannot be split so; it can be"), "{}", refused("fc1=o64"));
    assert!(refused("conv*=n4").contains("no layer has such a name"));
}

const GIB: f64 = (1u64 << 30) as f64;

#[test]
fn megatron_splits_columns_then_rows_inside_a_node_and_samples_outside() {
    let options = BuildOptions { batch: Some(16), ..BuildOptions::default() };
    let graph = build("gpt:layers=1,hidden=64,heads=4,seq=16,vocab=512", &options).unwrap();
    let machine = builtin("p100x16").unwrap();
    let planner = Planner::new(&graph, &machine, None, false);
    let answer = plan(&planner, find("megatron").unwrap(), &Constraints::default(), &Control::new()).unwrap();
    let plan = answer.plan;
    let config = |end: &str| &plan.layers.iter().find(|l| l.name.ends_with(end)).unwrap().config[..];
    assert_eq!((config("mlp.fc1"), config("mlp.fc2")), ("n4·o4", "n4·c4"));
    assert_eq!((config("attn.q"), config("attn.context")), ("n4·h4", "n4·h4"));
    assert!(config("attn.out").starts_with("n4·h4"), "rows of the output projection: {}", config("attn.out"));
    assert_eq!((config("ln1"), config("mlp.residual")), ("d0=4", "d0=4"));
}

/// A layer of Llama 3 8B, one sample of 8192 tokens: plain attention holds scores of 4 GiB several times.
#[test]
fn fused_attention_needs_no_memory_for_scores() {
    let machine = builtin("flat:1").unwrap();
    let peak = |form: &str| {
        let sizes =
            "layers=1,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=1000,seq=8192,batch=1,dtype=bf16";
        let graph = build(&format!("llama:{sizes},attention={form}"), &BuildOptions::default()).unwrap();
        let planner = Planner::new(&graph, &machine, None, false);
        let data = find("data").unwrap();
        plan(&planner, data, &Constraints::default(), &Control::new()).unwrap().plan.peak_memory_bytes
    };
    let (fused, plain) = (peak("fused") as f64 / GIB, peak("plain") as f64 / GIB);
    assert!(fused < 4.0 && plain > 12.0, "fused: {fused} GiB, plain: {plain} GiB");
}

#[test]
fn data_parallelism_sends_all_weights_twice_per_device() {
    let graph = build("vgg16", &BuildOptions { batch: Some(512), ..Default::default() }).unwrap();
    let machine = builtin("p100x16").unwrap();
    let context = Context::new(&graph, &machine, None, machine.mesh().clone(), true).unwrap();
    let data = recipes::DATA.assignment(&context);
    let weights: u64 = graph
        .tensors
        .iter()
        .filter(|t| t.producer.is_none() && t.role == Role::Parameter)
        .map(|t| t.ty.shape.iter().product::<u64>())
        .sum();
    // 16.45 GiB by the paper's figure 8. Gradients of biases are reshaped before they meet their weights: their
    // sums are counted as tensors between two ops, a little above the server's.
    let (counted, server) = (optcnn_bytes(&context, &data), 2 * 16 * weights * 4);
    assert!(server <= counted && counted < server + server / 10_000, "{counted} {server}");
}

#[test]
fn no_plan_computes_less_than_the_bound_and_one_without_communication_computes_just_that() {
    for (model, machine) in [
        ("mlp:batch=64,hidden=256,layers=2", "flat:8"),
        ("lenet5:batch=32", "a100x64:16"),
        ("gpt:layers=1,hidden=64,heads=4,batch=8,seq=16,vocab=128", "flat:8"),
    ] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let machine = builtin(machine).unwrap();
        let (planner, control) =
            (Planner::new(&graph, &machine, None, false), Control::new().iteration_limit(200));
        let bound = compute_lower_bound(&planner.problem(&control).unwrap().context).unwrap();
        assert!(bound > 0, "{model}");
        for strategy in STRATEGIES {
            let found = strategy.solve(&planner, &Constraints::default(), &control).unwrap();
            assert!(bound <= found.costs.compute(), "{model} {}: {bound}", strategy.name());
        }
    }
    // One device leaves no choice: all of it is computing.
    let graph = build("lenet5", &BuildOptions::default()).unwrap();
    let machine = builtin("flat:1").unwrap();
    let planner = Planner::new(&graph, &machine, None, false);
    let found = solve(&planner, "exact", &Constraints::default(), &Control::new()).unwrap();
    assert_eq!(compute_lower_bound(&found.context).unwrap(), found.objective());
}
