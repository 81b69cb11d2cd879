//! Min-marginals against searches with the choice fixed.

mod common;

use common::{Recipe, recipes};
use proptest::prelude::*;
use shardwright_search::brute::Brute;
use shardwright_search::{Control, Interval, NetworkBuilder, Solver, StopReason, VarId, min_marginals};

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn they_equal_the_optimum_with_the_choice_fixed(recipe in recipes(6, 4, false)) {
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
fn too_much_work_is_refused() {
    let recipe = Recipe { nodes: Vec::new(), edges: Vec::new(), limit: None };
    assert!(min_marginals(&recipe.build(), 0.0, &Control::new()).is_ok(), "an empty network takes no work");
    let mut builder = NetworkBuilder::new();
    builder.variable(&[1, 2], &[], Interval::default()).unwrap();
    let refused = min_marginals(&builder.build().unwrap(), 1.0, &Control::new());
    assert!(matches!(refused, Err(StopReason::Refused(_))), "{refused:?}");
}
