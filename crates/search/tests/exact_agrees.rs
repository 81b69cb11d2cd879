//! `exact` against exhaustive search, with memory, stopped after any number of iterations.

mod common;

use common::recipes;
use proptest::prelude::*;
use shardwright_search::brute::Brute;
use shardwright_search::exact::Exact;
use shardwright_search::pase::Pase;
use shardwright_search::{Control, Interval, Network, NetworkBuilder, Solver, StopReason};

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn with_memory_exact_proves_the_optimum_of_brute(recipe in recipes(6, 4, true)) {
        let network = recipe.build();
        let truth = Brute.solve(&network, &Control::new());
        let found = Exact.solve(&network, &Control { threads: 1, ..Control::new() });
        prop_assert_eq!(found.cost, truth.cost);
        prop_assert_eq!(&found.stop_reason, &truth.stop_reason);
        if let Some(choice) = &found.choice {
            let evaluation = network.evaluate(choice).unwrap();
            prop_assert!(evaluation.feasible());
            prop_assert_eq!(Some(evaluation.cost), found.cost.map(i128::from));
        }
    }

    #[test]
    fn bounds_are_never_above_the_optimum_whenever_it_stops(recipe in recipes(7, 4, true), iterations in 0..6u64) {
        let network = recipe.build();
        let truth = Brute.solve(&network, &Control::new());
        let found = Exact.solve(&network, &Control { threads: 1, ..Control::new().iteration_limit(iterations) });
        match truth.cost {
            Some(optimum) => {
                prop_assert!(found.bound <= optimum, "bound {} above the optimum {optimum}", found.bound);
                prop_assert!(found.cost.is_none_or(|cost| cost >= optimum));
                prop_assert!(found.stop_reason != StopReason::Infeasible);
            }
            None => prop_assert_eq!(found.cost, None),
        }
        prop_assert!(found.log.windows(2).all(|pair| pair[0].bound <= pair[1].bound));
    }
}

/// A grid of variables, each joined to its neighbours by random tables.
fn grid(width: usize, height: usize, choices: usize, seed: u64) -> Network {
    let mut state = seed;
    let mut random = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % 1000) as i64
    };
    let mut builder = NetworkBuilder::new();
    let mut ids = Vec::new();
    for _ in 0..width * height {
        let costs: Vec<i64> = (0..choices).map(|_| random()).collect();
        ids.push(builder.variable(&costs, &vec![0; choices], Interval { lo: 0, hi: 0 }).unwrap());
    }
    for i in 0..width * height {
        let right = (i % width + 1 < width).then_some(i + 1);
        let below = (i + width < width * height).then_some(i + width);
        for j in [right, below].into_iter().flatten() {
            let table: Vec<i64> = (0..choices * choices).map(|_| random()).collect();
            builder.edge(ids[i], ids[j], &table).unwrap();
        }
    }
    builder.build().unwrap()
}

#[test]
fn grids_of_small_width_are_proved_by_elimination_before_any_search() {
    for seed in 0..20 {
        let network = grid(4, 15, 5, seed);
        let found = Exact.solve(&network, &Control::new().iteration_limit(1));
        assert!(found.proved_optimal(), "seed {seed}");
        assert_eq!(found.cost, Pase.solve(&network, &Control::new()).cost, "seed {seed}");
    }
}
