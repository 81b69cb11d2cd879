//! Min-marginals against searches with the choice fixed.

mod common;

use common::{Recipe, recipes, shared_problem};
use proptest::prelude::*;
use shardwright_search::brute::Brute;
use shardwright_search::pase::Pase;
use shardwright_search::{Control, Interval, NetworkBuilder, Solver, StopReason, VarId, min_marginals};

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn they_are_what_is_left_with_the_choice_made(recipe in recipes(6, 4, false)) {
        let network = recipe.build();
        let marginals = min_marginals(&network, f64::INFINITY, &Control::new()).unwrap();
        for (variable, node) in recipe.nodes.iter().enumerate() {
            for choice in 0..node.costs.len() {
                let (v, choice) = (VarId(variable as u32), choice as u32);
                let truth = Brute.solve(&network.with_choice(v, choice), &Control::new());
                prop_assert!(truth.choice.is_none_or(|all| all[variable] == choice));
                prop_assert_eq!(marginals.least(v, choice), truth.cost);
            }
        }
    }
}

#[test]
fn the_best_choice_of_every_variable_costs_the_optimum() {
    for name in ["pase/pase-inception3-p4.json.gz", "pase/pase-transformer-p8.json.gz"] {
        let Some(problem) = shared_problem(name) else { continue };
        let network = problem.network;
        let optimum = Pase.solve(&network, &Control::new()).cost;
        let marginals = min_marginals(&network, f64::INFINITY, &Control::new()).unwrap();
        for v in (0..network.variables() as u32).map(VarId) {
            let choices = 0..network.choices(v) as u32;
            assert_eq!(
                choices.filter_map(|choice| marginals.least(v, choice)).min(),
                optimum,
                "{name}: {v:?}"
            );
        }
    }
}

#[test]
fn what_takes_too_much_work_is_refused() {
    let recipe = Recipe { nodes: Vec::new(), edges: Vec::new(), limit: None };
    assert!(min_marginals(&recipe.build(), 0.0, &Control::new()).is_ok(), "nothing is no work");
    let mut builder = NetworkBuilder::new();
    builder.variable(&[1, 2], &[], Interval::default()).unwrap();
    let refused = min_marginals(&builder.build().unwrap(), 1.0, &Control::new());
    assert!(matches!(refused, Err(StopReason::Refused(_))), "{refused:?}");
}
