//! The tests themselves: other solvers on our files, and our solvers on the published problems.

use crate::common::{PAPERS, assert_same, recipes, written};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use shardwright_search::brute::Brute;
use shardwright_search::exact::Exact;
use shardwright_search::format::{NamedNetwork, read_iopddl, write_cfn};
use shardwright_search::pase::Pase;
use shardwright_search::{Control, Network, Solver, VarId, min_marginals};
use std::path::PathBuf;
use std::process::Command;

/// The folder of the published problems: `SHARDWRIGHT_SHARED`, or `shared` beside the checkout.
fn shared() -> PathBuf {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    std::env::var_os("SHARDWRIGHT_SHARED").map_or(beside, PathBuf::from)
}

/// Why the published problems cannot be used.
pub fn no_shared_data() -> Option<&'static str> {
    (!shared().join("pase").is_dir()).then_some("no shared data (set SHARDWRIGHT_SHARED to its folder)")
}

/// Why toulbar2 cannot be used.
pub fn no_toulbar2() -> Option<&'static str> {
    let found = Command::new("toulbar2").arg("--help").output().is_ok();
    (!found).then_some("toulbar2 is not installed (apt-get install toulbar2)")
}

/// Reads a published problem.
fn shared_problem(path: &str) -> NamedNetwork {
    let file = std::fs::File::open(shared().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    read_iopddl(file).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The optimum that toulbar2 proves; `None` if it proves that there is no solution.
fn toulbar2(network: &Network) -> Result<Option<i64>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("network.cfn");
    let file = std::fs::File::create(&path).map_err(|error| error.to_string())?;
    write_cfn(network, "test", file).map_err(|error| error.to_string())?;
    let output = Command::new("toulbar2").arg(&path).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if let Some(rest) = text.lines().find_map(|line| line.strip_prefix("Optimum: ")) {
        let number = rest.split_whitespace().next().and_then(|number| number.parse().ok());
        return number.map(Some).ok_or(text);
    }
    if text.contains("No solution") || text.contains("contradiction") { Ok(None) } else { Err(text) }
}

pub fn toulbar2_finds_the_optimum_of_brute_on_our_files() {
    for memory in [false, true] {
        let mut runner =
            TestRunner::new(Config { cases: 150, failure_persistence: None, ..Config::default() });
        let result = runner.run(&recipes(5, 4, memory), |recipe| {
            let network = recipe.build();
            let truth = Brute.solve(&network, &Control::new());
            let theirs = toulbar2(&network).map_err(TestCaseError::fail)?;
            prop_assert_eq!(theirs, truth.cost);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

pub fn pase_networks_are_proved_optimal() {
    for name in ["alexnet", "rnnlm", "inception3", "transformer", "resnet101"] {
        for devices in ["p4", "p8"] {
            let problem = shared_problem(&format!("pase/pase-{name}-{devices}.json.gz"));
            let found = Exact.solve(&problem.network, &Control::new());
            assert!(found.proved_optimal(), "{name}-{devices}");
            assert_eq!(found.cost, Pase.solve(&problem.network, &Control::new()).cost, "{name}-{devices}");
        }
    }
}

pub fn pase_networks_have_their_published_optima() {
    let table = [
        ("alexnet-p4", 148_215_719_552),
        ("alexnet-p8", 97_098_296_512),
        ("rnnlm-p4", 6_866_837_733_376),
        ("rnnlm-p8", 4_024_963_186_688),
        ("inception3-p4", 986_757_044_608),
        ("inception3-p8", 782_140_602_432),
        ("transformer-p4", 2_189_181_321_216),
        ("transformer-p8", 1_421_082_828_800),
    ];
    for (name, optimum) in table {
        let problem = shared_problem(&format!("pase/pase-{name}.json.gz"));
        for solver in PAPERS {
            let outcome = solver.solve(&problem.network, &Control::new());
            assert_eq!(outcome.cost, Some(optimum), "{name} {}", solver.name());
            assert!(outcome.proved_optimal());
        }
    }
}

pub fn resnet101_costs_the_same_for_every_solver() {
    for name in ["resnet101-p4", "resnet101-p8"] {
        let problem = shared_problem(&format!("pase/pase-{name}.json.gz"));
        let costs = PAPERS.map(|solver| solver.solve(&problem.network, &Control::new()).cost);
        assert!(costs[0].is_some() && costs.iter().all(|&cost| cost == costs[0]), "{name}: {costs:?}");
    }
}

pub fn contest_problems_survive_a_round_trip() {
    for name in ["B", "G"] {
        let problem = shared_problem(&format!("iopddl/asplos-2025-iopddl-{name}.json.gz"));
        assert_eq!(problem.name, format!("asplos-2025-iopddl-{name}"));
        assert_same(&problem.network, &read_iopddl(&written(&problem.network)[..]).unwrap().network);
    }
}

pub fn the_best_choice_of_every_variable_costs_the_optimum() {
    for name in ["pase/pase-inception3-p4.json.gz", "pase/pase-transformer-p8.json.gz"] {
        let network = shared_problem(name).network;
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
