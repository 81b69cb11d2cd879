//! The built-in solvers by name.
//!
//! Command line, tests and benchmarks use this list only.

use crate::brute::Brute;
use crate::exact::Exact;
use crate::optcnn::OptCnn;
use crate::outcome::Solver;
use crate::pase::Pase;

/// A built-in solver and its description.
pub struct SolverEntry {
    /// Its name.
    pub name: &'static str,
    /// One line of description.
    pub about: &'static str,
    /// Whether its search respects the memory limit. Others only report whether their result does.
    pub respects_memory: bool,
    make: fn() -> Box<dyn Solver + Send + Sync>,
}

impl SolverEntry {
    /// A new instance with default settings.
    pub fn solver(&self) -> Box<dyn Solver + Send + Sync> {
        (self.make)()
    }
}

/// All solvers; the first is the default.
pub const SOLVERS: &[SolverEntry] = &[
    SolverEntry {
        name: "exact",
        about: "anytime, with memory: reductions, message-passing bounds, forest moves, branch and bound",
        respects_memory: true,
        make: || Box::new(Exact),
    },
    SolverEntry {
        name: "pase",
        about: "PaSE: min-degree order, tables over dependent sets; optimal without memory limits",
        respects_memory: false,
        make: || Box::new(Pase),
    },
    SolverEntry {
        name: "optcnn",
        about: "OptCNN: node and edge elimination, then enumeration; optimal without memory limits",
        respects_memory: false,
        make: || Box::new(OptCnn::default()),
    },
    SolverEntry {
        name: "brute",
        about: "every assignment, for small networks and tests",
        respects_memory: true,
        make: || Box::new(Brute),
    },
];

/// The solver with this name.
pub fn find(name: &str) -> Option<&'static SolverEntry> {
    SOLVERS.iter().find(|entry| entry.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_solver_answers_to_its_name() {
        for entry in SOLVERS {
            assert_eq!(entry.solver().name(), entry.name);
        }
        assert!(find("no such solver").is_none());
    }
}
