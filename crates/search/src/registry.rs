//! The solvers that are built in, by the names that users give them.
//!
//! The one list that command line, tests and benchmarks go through: a solver that is not here does not
//! exist for them.

use crate::brute::Brute;
use crate::exact::Exact;
use crate::optcnn::OptCnn;
use crate::outcome::Solver;
use crate::pase::Pase;

/// A built-in solver and what to say about it.
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// Whether its search keeps the memory limit; others only report whether their result does.
    pub respects_memory: bool,
    make: fn() -> Box<dyn Solver + Send + Sync>,
}

impl Entry {
    /// A fresh instance with default settings.
    pub fn solver(&self) -> Box<dyn Solver + Send + Sync> {
        (self.make)()
    }
}

/// All solvers; the first is the default.
pub const SOLVERS: &[Entry] = &[
    Entry {
        name: "exact",
        about: "anytime, with memory: reductions, message-passing bounds, forest moves, branch and bound",
        respects_memory: true,
        make: || Box::new(Exact),
    },
    Entry {
        name: "pase",
        about: "PaSE: min-degree order, tables over dependent sets; optimal without memory limits",
        respects_memory: false,
        make: || Box::new(Pase),
    },
    Entry {
        name: "optcnn",
        about: "OptCNN: node and edge elimination, then enumeration; optimal without memory limits",
        respects_memory: false,
        make: || Box::new(OptCnn::default()),
    },
    Entry {
        name: "brute",
        about: "every assignment, for small networks and tests",
        respects_memory: true,
        make: || Box::new(Brute),
    },
];

/// The solver of a name.
pub fn find(name: &str) -> Option<&'static Entry> {
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
