//! Prices of assignments by hand, networks against prices, and search problems within memory.

mod graphs;

use graphs::{mlp, random_graph, recomputed, steps};
use proptest::prelude::*;
use shardwright_cost::{Collective, Comm};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Context, PlanError, SearchProblem, limited, network_peak, picoseconds};
use shardwright_search::{Control, Network, NetworkBuilder, VarId, registry};

#[test]
fn column_then_row_needs_one_sum_forwards_and_none_for_weights() {
    let (graph, machine) = (mlp(), builtin("flat:2").unwrap());
    let problem = SearchProblem::new(&graph, &machine, None).unwrap();
    let choice = |layer: &str, config: &str| {
        let at = graph.layers.iter().position(|l| l.name == layer).unwrap();
        let rule = &problem.context.shapes[graph.layers[at].forward.index()].rule;
        (0..problem.choices[at].len() as u32)
            .find(|&c| problem.forward_config(at, c).show(rule, problem.context.mesh()) == config)
            .unwrap()
    };
    let choices = [choice("fc1", "o2"), choice("fc2", "c2"), choice("loss", "whole")];
    let costs = problem.context.price(&problem.assignment(&choices)).unwrap();
    // The 8 x 4 results of the second product are added up over both devices; the hidden layer stays split,
    // forwards and backwards, and both weights are where they are needed.
    let comm = Comm::new(&machine, machine.mesh());
    let sum = comm.seconds(Collective::AllReduce, machine.mesh().all(), Bytes(4 * 8 * 4));
    assert_eq!(costs.comm(), picoseconds(sum));
    assert_eq!(costs.traffic.total(), Bytes(2 * 4 * 8 * 4));
}

/// The network with one choice left of each of its first variables.
fn fix(network: &Network, choices: &[u32]) -> Network {
    let mut builder = NetworkBuilder::new();
    let kept = |v: VarId| match choices.get(v.index()) {
        Some(&choice) => vec![choice],
        None => (0..network.choices(v) as u32).collect(),
    };
    for v in (0..network.variables()).map(|v| VarId(v as u32)) {
        let pick = |from: &[i64]| kept(v).iter().map(|&c| from[c as usize]).collect::<Vec<i64>>();
        builder.variable(&pick(network.unary(v)), &pick(network.usage(v)), network.interval(v)).unwrap();
    }
    for edge in network.edges() {
        let (rows, columns) = (kept(edge.u), kept(edge.v));
        let cells = rows.iter().flat_map(|&a| columns.iter().map(move |&b| (a, b)));
        let table: Vec<i64> = cells.map(|(a, b)| network.pair(edge, a, b)).collect();
        builder.edge(edge.u, edge.v, &table).unwrap();
    }
    if let Some(limit) = network.usage_limit() {
        builder.usage_limit(limit).unwrap();
    }
    builder.build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The network's memory over time is at most that of the price, whatever is chosen.
    #[test]
    fn the_networks_peak_is_at_most_that_of_the_price(
        samples in prop::sample::select(vec![2u64, 6, 8]),
        steps in steps(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 31),
        untied in any::<bool>(),
        recompute in any::<u16>(),
    ) {
        let graph = recomputed(random_graph(samples, 4, &steps), recompute);
        let machine = builtin("flat:4").unwrap();
        let build = if untied { SearchProblem::untied } else { SearchProblem::new };
        let problem = build(&graph, &machine, None).unwrap();
        let choices: Vec<u32> =
            problem.choices.iter().zip(picks.iter().cycle()).map(|(all, pick)| pick.index(all.len()) as u32).collect();
        let assignment = problem.assignment(&choices);
        let peak = network_peak(&problem.context, &assignment).0;
        prop_assert!(peak <= problem.context.price(&assignment).unwrap().peak_memory.0);
        // With every layer fixed, a limit is kept exactly from the network's peak on.
        let solve = |limit: u64| {
            let network = limited(&problem, Bytes(limit), &Control::new()).unwrap();
            let fixed = fix(&network, &choices);
            registry::find("exact").unwrap().solver().solve(&fixed, &Control::new()).choice.is_some()
        };
        prop_assert!(solve(peak));
        prop_assert!(!solve(peak - 1));
    }
}

#[test]
fn little_memory_means_coarser_axes_and_too_little_is_reported() {
    let graph = shardwright_zoo::build("mlp:batch=64,hidden=64,layers=3", &Default::default()).unwrap();
    let machine = builtin("flat:16").unwrap();
    let within = |memory_bytes| {
        let control = Control { memory_bytes, ..Control::new() };
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
        SearchProblem::within(&context, false, &control)
    };
    let bytes = |problem: &SearchProblem<'_>| {
        let network = &problem.network;
        (0..network.tables()).map(|table| 8 * network.table(table as u32).len() as u64).sum::<u64>()
    };
    let whole = within(u64::MAX).unwrap();
    let part = within(bytes(&whole) / 2).unwrap();
    assert!(part.context.mesh().len() < whole.context.mesh().len() && bytes(&part) <= bytes(&whole) / 2);
    let Err(PlanError::TooLarge { needed: 1, allowed: 0 }) = within(8) else {
        panic!("eight bytes are enough")
    };
}
