//! An independent solver on the files that we write: toulbar2 must find the optimum of `brute`.
//!
//! Skipped, with a printed reason, where `toulbar2` is not installed (Debian has a package).

mod common;

use common::recipes;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use shardwright_search::brute::Brute;
use shardwright_search::format::write_cfn;
use shardwright_search::{Control, Network, Solver};
use std::process::Command;

/// The optimum that toulbar2 proves; `None` where it proves that there is no solution.
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

#[test]
fn toulbar2_finds_the_optimum_of_brute_on_our_files() {
    if Command::new("toulbar2").arg("--help").output().is_err() {
        println!("skipped: toulbar2 is not installed (apt-get install toulbar2)");
        return;
    }
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
