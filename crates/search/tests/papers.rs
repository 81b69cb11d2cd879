//! The solvers of the papers against exhaustive search and against PaSE's published optima.

mod common;

use common::{PAPERS, recipes};
use proptest::prelude::*;
use shardwright_search::brute::Brute;
use shardwright_search::pase::Pase;
use shardwright_search::{
    Control, FrozenClock, Interval, Network, NetworkBuilder, Solver, StopReason, VarId, registry,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn without_memory_every_solver_finds_the_optimum(recipe in recipes(6, 4, false)) {
        let network = recipe.build();
        let truth = Brute.solve(&network, &Control::new());
        for solver in PAPERS {
            let found = solver.solve(&network, &Control::new());
            prop_assert_eq!(found.cost, truth.cost, "{}", solver.name());
            prop_assert_eq!(&found.stop_reason, &truth.stop_reason, "{}", solver.name());
            if let Some(choice) = found.choice {
                let evaluation = network.evaluate(&choice).unwrap();
                prop_assert!(evaluation.feasible());
                prop_assert_eq!(Some(evaluation.cost), found.cost.map(i128::from));
            }
        }
    }

    #[test]
    fn with_memory_their_optimum_is_a_bound_and_feasibility_is_reported(recipe in recipes(5, 4, true)) {
        let network = recipe.build();
        let truth = Brute.solve(&network, &Control::new());
        for solver in PAPERS {
            let found = solver.solve(&network, &Control::new());
            if let Some(optimum) = truth.cost {
                prop_assert!(found.bound <= optimum);
            }
            match (&found.choice, &found.least_overflow) {
                (Some(choice), None) => {
                    prop_assert!(found.proved_optimal());
                    prop_assert!(network.evaluate(choice).unwrap().feasible());
                    prop_assert_eq!(found.cost, truth.cost);
                }
                (None, Some((overflow, choice))) => {
                    prop_assert!(*overflow > 0);
                    prop_assert_eq!(network.evaluate(choice).unwrap().overflow, *overflow);
                    prop_assert_eq!(found.stop_reason, StopReason::Exhausted);
                }
                _ => prop_assert_eq!(found.stop_reason, StopReason::Infeasible),
            }
        }
    }
}

/// Every node joined to every other: no elimination helps.
fn clique(nodes: u32, choices: usize) -> Network {
    let mut builder = NetworkBuilder::new();
    for node in 0..nodes {
        let costs: Vec<i64> = (0..choices as i64).map(|c| (c * 7 + i64::from(node)) % 5).collect();
        builder.variable(&costs, &[], Interval::default()).unwrap();
    }
    for a in 0..nodes {
        for b in a + 1..nodes {
            let table: Vec<i64> =
                (0..choices * choices).map(|i| (i as i64 * 31 + i64::from(a * b)) % 11).collect();
            builder.edge(VarId(a), VarId(b), &table).unwrap();
        }
    }
    builder.build().unwrap()
}

#[test]
fn tables_that_do_not_fit_are_refused_before_allocation() {
    let control = Control { memory_bytes: 1 << 20, ..Control::new() };
    for solver in PAPERS {
        let outcome = solver.solve(&clique(30, 20), &control);
        let StopReason::Refused(why) = outcome.stop_reason else { panic!("{:?}", outcome.stop_reason) };
        assert!(why.contains("more than the 1 MiB of memory"), "{why}");
    }
}

/// A line of nodes whose tables are all different.
fn line(nodes: u32, choices: usize) -> Network {
    let mut builder = NetworkBuilder::new();
    for node in 0..nodes {
        builder.variable(&vec![0; choices], &[], Interval::default()).unwrap();
        if node > 0 {
            let costs = (0..choices * choices).map(|i| (i as i64 * 31 + i64::from(node)) % 1009);
            builder.edge(VarId(node - 1), VarId(node), &costs.collect::<Vec<_>>()).unwrap();
        }
    }
    builder.build().unwrap()
}

/// Sixty tables of 80 KB: tables that eliminations create count too.
#[test]
fn every_solver_respects_the_memory_limit() {
    let solve = |name: &str, network: &Network, mebibytes: u64| {
        let control = Control { memory_bytes: mebibytes << 20, ..Control::new().iteration_limit(1) };
        registry::find(name).unwrap().solver().solve(network, &control)
    };
    let network = &line(61, 100);
    for name in ["optcnn", "pase", "exact"] {
        let outcome = solve(name, network, 4);
        assert!(matches!(&outcome.stop_reason, StopReason::Refused(why) if why.contains("--ram")), "{name}");
        assert!(outcome.choice.is_none());
        assert!(solve(name, network, 64).choice.is_some(), "{name}");
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    // Five nodes of 40 choices: the first table takes 10^8 sums, enough for several threads.
    let network = clique(5, 40);
    let solve = |threads| Pase.solve(&network, &Control { threads, ..Control::new() });
    let (one, many) = (solve(1), solve(3));
    assert!(one.proved_optimal());
    assert_eq!((one.cost, one.choice), (many.cost, many.choice));
}

#[test]
fn a_deadline_stops_a_long_table() {
    let control = Control::new().time_limit(&FrozenClock, std::time::Duration::ZERO);
    for solver in PAPERS {
        assert_eq!(solver.solve(&clique(5, 60), &control).stop_reason, StopReason::Deadline);
    }
}
