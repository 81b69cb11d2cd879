//! Keep states in the network against brute force: every config of every layer with every set of recomputed ops, each
//! transformed, priced and measured as the step that it is.

use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, OpId, Optimizer, Real, Role, TensorId, TensorType, microbatch,
    ops::{Binary, BinaryFn, Contract, Dropout, Reduce, Reshape, Softmax, Unary, UnaryFn},
    remat, train,
};
use shardwright_machine::{Bytes, Machine, builtin};
use shardwright_plan::{
    Candidates, Context, KeepPricer, KeepSpace, SearchProblem, keep_network, network_peak,
};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_space::{Assignment, Config};
use std::num::NonZeroU32;

/// One op of a random model: its kind, and numbers that choose its operands.
type RandomOp = (u8, usize, usize);

fn random_model(ops: &[RandomOp], micro_batches: u32) -> Graph {
    let mut b = GraphBuilder::new("random");
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let init = Init::Normal(Real(0.5));
    let x = b.source("x", ty(&[8, 4]), Role::Input, init).unwrap();
    let mut tensors: Vec<TensorId> = vec![x];
    for (i, &(kind, at, other)) in ops.iter().enumerate() {
        // Mostly the last result, so that graphs are deep.
        let at = if at % 3 == 0 { at % tensors.len() } else { tensors.len() - 1 };
        let x = tensors[at];
        let shape = b.shape(x).to_vec();
        let alike: Vec<TensorId> = tensors.iter().copied().filter(|&t| b.shape(t) == &shape[..]).collect();
        let y = alike[other % alike.len()];
        let name = format!("op{i}");
        tensors.push(match kind % 8 {
            0 | 1 => {
                let outputs = [2, 4, 16][other % 3];
                let w = b.source(&format!("w{i}"), ty(&[shape[1], outputs]), Role::Parameter, init).unwrap();
                b.emit(&name, Contract::parse("nk,ko->no").unwrap(), &[x, w]).unwrap()
            }
            2 => b.emit(&name, Binary { f: BinaryFn::Add }, &[x, y]).unwrap(),
            3 => b.emit(&name, Binary { f: BinaryFn::Mul }, &[x, y]).unwrap(),
            4 => b.emit(&name, Unary { f: UnaryFn::Gelu }, &[x]).unwrap(),
            5 => b.emit(&name, Softmax { axis: 1 }, &[x]).unwrap(),
            6 => b.emit(&name, Dropout::new(0.5, i as u64, &shape[..].into()), &[x]).unwrap(),
            _ => {
                // A view, what is computed on it, and a view back.
                let wide =
                    b.emit(&name, Reshape { shape: [shape[0], shape[1] / 2, 2].into() }, &[x]).unwrap();
                let square =
                    b.emit(&format!("{name}.square"), Unary { f: UnaryFn::Square }, &[wide]).unwrap();
                b.emit(&format!("{name}.back"), Reshape { shape: shape[..].into() }, &[square]).unwrap()
            }
        });
    }
    let last = tensors[tensors.len() - 1];
    let w = b.source("w", ty(&[b.shape(last)[1], 2]), Role::Parameter, init).unwrap();
    let last = b.emit("last", Contract::parse("nk,ko->no").unwrap(), &[last, w]).unwrap();
    let loss = b.emit("loss", Reduce::sum((0..2).collect()), &[last]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    microbatch(&b.finish(), NonZeroU32::new(micro_batches).unwrap()).unwrap().graph
}

/// Every set of recomputed ops.
fn sets(space: &KeepSpace) -> Vec<Vec<OpId>> {
    let ops = space.recomputable();
    let chosen = |bits: u32| (0..ops.len()).filter(|i| bits >> i & 1 == 1).map(|i| ops[i]).collect();
    (0..1u32 << ops.len()).map(chosen).collect()
}

/// The step that recomputes some ops, with each clone split as its original.
fn with_clones(graph: &Graph, space: &KeepSpace, set: &[OpId]) -> Graph {
    remat(graph, &space.with_views(set)).unwrap()
}

fn clones_follow(graph: &Graph, base: &Assignment) -> Assignment {
    let mut own = base.configs.iter();
    let mut configs: Vec<Config> = Vec::new();
    for node in &graph.ops {
        let original = node.recomputes.map(|original| configs[original.index()].clone());
        configs.push(original.unwrap_or_else(|| own.next().unwrap().clone()));
    }
    Assignment::of(graph, configs)
}

/// Price and memory of all assignments of a problem with all sets of recomputed ops. On one device the memory is that of the
/// step; on several, the network leaves out copies that only clones read.
fn all_prices(problem: &SearchProblem<'_>, space: &KeepSpace, machine: &Machine) -> Vec<(i64, u64)> {
    let mut choices = vec![0u32; problem.choices.len()];
    let mut assignments = Vec::new();
    'all: loop {
        assignments.push(choices.clone());
        for (choice, all) in choices.iter_mut().zip(&problem.choices) {
            *choice += 1;
            if (*choice as usize) < all.len() {
                continue 'all;
            }
            *choice = 0;
        }
        break;
    }
    let fixed: Vec<SearchProblem<'_>> =
        assignments.iter().map(|choices| fixed_configs(problem, choices)).collect();
    let mut pricers: Vec<KeepPricer<'_, '_>> =
        fixed.iter().map(|fixed| KeepPricer::new(fixed, space).unwrap().unwrap()).collect();
    let mut prices = Vec::new();
    for set in sets(space) {
        let graph = with_clones(problem.context.graph, space, &set);
        let mesh = problem.context.mesh().clone();
        let context = Context::new(&graph, machine, None, mesh, problem.context.untied).unwrap();
        for (choices, pricer) in assignments.iter().zip(&mut pricers) {
            let assignment = clones_follow(&graph, &problem.assignment(choices));
            // An assignment that takes partial sums of whole tensors is none.
            let Ok(costs) = context.layer_costs(&assignment, &Control::new()) else { continue };
            let held = network_peak(&context, &assignment).0;
            let counted = pricer.price(&set, u64::MAX).peak;
            assert!(counted <= held && (counted == held || machine.devices() > 1));
            prices.push((costs.objective(), counted));
        }
    }
    prices
}

/// The problem with one config per layer.
fn fixed_configs<'a>(problem: &SearchProblem<'a>, choices: &[u32]) -> SearchProblem<'a> {
    let configs = choices.iter().enumerate().map(|(v, &c)| vec![problem.forward_config(v, c).clone()]);
    let candidates = Candidates { mesh: problem.context.mesh().clone(), configs: configs.collect() };
    SearchProblem::among(&problem.context, candidates, &Control::new()).unwrap()
}

/// A few choices per layer, so that brute force ends.
fn few_choices<'a>(graph: &'a Graph, machine: &'a Machine, most: usize) -> SearchProblem<'a> {
    let all = SearchProblem::new(graph, machine, None).unwrap();
    let configs = (0..all.choices.len()).map(|v| {
        (0..all.choices[v].len().min(most)).map(|c| all.forward_config(v, c as u32).clone()).collect()
    });
    let candidates = Candidates { mesh: all.context.mesh().clone(), configs: configs.collect() };
    SearchProblem::among(&all.context, candidates, &Control::new()).unwrap()
}

fn check_network(graph: &Graph, machine: &Machine, most: usize) -> Result<(), TestCaseError> {
    let problem = few_choices(graph, machine, most);
    let space = KeepSpace::of(graph);
    if space.recomputable().len() > 8 || problem.choices.iter().map(|c| c.len()).product::<usize>() > 64 {
        return Ok(());
    }
    let prices = all_prices(&problem, &space, machine);
    let mut peaks: Vec<u64> = prices.iter().map(|(_, peak)| *peak).collect();
    peaks.sort_unstable();
    peaks.dedup();
    for limit in [peaks[0] - 1, peaks[0], peaks[peaks.len() / 3], peaks[peaks.len() - 1]] {
        let best = prices.iter().filter(|(_, peak)| *peak <= limit).map(|(time, _)| *time).min();
        let found = keep_network(&problem, &space, Some(Bytes(limit)), &Control::new()).unwrap();
        let found = found.expect("the network is small");
        let outcome = Exact.solve(&found.network, &Control::new());
        prop_assert_eq!(outcome.cost, best, "limit {}", limit);
        let Some(choice) = outcome.choice else { continue };
        // The solution is the step that it says, at its price.
        let solution = found.solution(&choice);
        let step = with_clones(graph, &space, &solution.recomputed);
        let context = Context::new(&step, machine, None, problem.context.mesh().clone(), false).unwrap();
        let assignment = clones_follow(&step, &problem.assignment(&solution.choices));
        let costs = context.layer_costs(&assignment, &Control::new()).unwrap();
        prop_assert_eq!(Some(costs.objective()), outcome.cost);
        let counted = KeepPricer::new(&fixed_configs(&problem, &solution.choices), &space)
            .unwrap()
            .unwrap()
            .price(&solution.recomputed, limit);
        prop_assert!(counted.peak <= limit);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// On one device: every set of recomputed ops.
    #[test]
    fn on_one_device_the_network_finds_the_best_set_of_recomputed_ops(
        ops in prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..7),
        divided in any::<bool>(),
    ) {
        let graph = random_model(&ops, if divided { 2 } else { 1 });
        check_network(&graph, &builtin("flat:1").unwrap(), 1)?;
    }

    /// On two devices: every config with every set.
    #[test]
    fn on_two_devices_the_network_finds_the_best_configs_and_sets(
        ops in prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..4),
    ) {
        let graph = random_model(&ops, 1);
        check_network(&graph, &builtin("flat:2").unwrap(), 2)?;
    }

    /// The price of a set, without a network.
    #[test]
    fn sets_have_the_price_and_memory_of_their_steps(
        ops in prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..10),
        seed in any::<u32>(),
        divided in any::<bool>(),
        devices in 1..3u32,
    ) {
        let graph = random_model(&ops, if divided { 4 } else { 1 });
        let machine = builtin(&format!("flat:{devices}")).unwrap();
        let all = SearchProblem::new(&graph, &machine, None).unwrap();
        let pick = |v: usize| (seed as usize % 7 * (v + 1) % all.choices[v].len()) as u32;
        let problem = fixed_configs(&all, &(0..all.choices.len()).map(pick).collect::<Vec<u32>>());
        let assignment = problem.assignment(&vec![0; problem.choices.len()]);
        let space = KeepSpace::of(&graph);
        let free = space.recomputable();
        let mut pricer = KeepPricer::new(&problem, &space).unwrap().unwrap();
        for bits in [0, seed, seed >> 7, !0u32] {
            let set: Vec<OpId> = free.iter().enumerate().filter(|(i, _)| bits >> (i % 32) & 1 == 1).map(|(_, &op)| op).collect();
            let step = with_clones(&graph, &space, &set);
            let context = Context::new(&step, &machine, None, problem.context.mesh().clone(), false).unwrap();
            let assignment = clones_follow(&step, &assignment);
            let Ok(costs) = context.layer_costs(&assignment, &Control::new()) else { continue };
            let price = pricer.price(&set, u64::MAX);
            prop_assert_eq!(price.time, costs.objective());
            let held = network_peak(&context, &assignment).0;
            prop_assert!(price.peak <= held, "{} is not at most {held}", price.peak);
            prop_assert!(machine.devices() > 1 || price.peak == held, "{} is not {held}", price.peak);
        }
    }
}
