//! Tests that need other programs or data: toulbar2, and the problems published with PaSE and the contest.
//!
//! A test harness of our own reports a test as ignored, with the reason, if its requirement is missing. The standard
//! harness can only decide that at compile time. It understands the arguments of `cargo test` and `cargo nextest`.

#[path = "../common/mod.rs"]
mod common;

mod cases;

use std::panic::catch_unwind;
use std::process::ExitCode;

/// A test with its requirement, which returns the reason if it is missing.
struct Case {
    name: &'static str,
    missing: fn() -> Option<&'static str>,
    run: fn(),
}

macro_rules! case {
    ($missing:ident, $name:ident) => {
        Case { name: stringify!($name), missing: cases::$missing, run: cases::$name }
    };
}

const CASES: &[Case] = &[
    case!(no_toulbar2, toulbar2_finds_the_optimum_of_brute_on_our_files),
    case!(no_shared_data, pase_networks_are_proved_optimal),
    case!(no_shared_data, pase_networks_have_their_published_optima),
    case!(no_shared_data, resnet101_costs_the_same_for_every_solver),
    case!(no_shared_data, contest_problems_survive_a_round_trip),
    case!(no_shared_data, the_best_choice_of_every_variable_costs_the_optimum),
];

/// The arguments of the standard harness that matter here.
#[derive(Default)]
struct Arguments {
    list: bool,
    exact: bool,
    ignored: bool,
    include_ignored: bool,
    filters: Vec<String>,
    skips: Vec<String>,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut parsed = Arguments::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--list" => parsed.list = true,
                "--exact" => parsed.exact = true,
                "--ignored" => parsed.ignored = true,
                "--include-ignored" => parsed.include_ignored = true,
                "--skip" => parsed.skips.extend(arguments.next()),
                "--format" | "--color" | "--test-threads" | "--logfile" | "-Z" => {
                    arguments.next();
                }
                other if other.starts_with('-') => {}
                _ => parsed.filters.push(argument),
            }
        }
        parsed
    }

    fn selects(&self, name: &str) -> bool {
        let matches = |text: &String| if self.exact { name == text } else { name.contains(text.as_str()) };
        (self.filters.is_empty() || self.filters.iter().any(matches)) && !self.skips.iter().any(matches)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse(std::env::args().skip(1));
    let mut failures = 0;
    for case in CASES.iter().filter(|case| arguments.selects(case.name)) {
        let missing = (case.missing)();
        if arguments.ignored && missing.is_none() {
            continue;
        }
        if arguments.list {
            println!("{}: test", case.name);
            continue;
        }
        match missing {
            Some(reason) if !arguments.ignored && !arguments.include_ignored => {
                println!("test {} ... ignored, {reason}", case.name);
            }
            _ => {
                let passed = catch_unwind(case.run).is_ok();
                failures += u32::from(!passed);
                println!("test {} ... {}", case.name, if passed { "ok" } else { "FAILED" });
            }
        }
    }
    // The standard harness's exit code.
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::from(101) }
}
