//! Fits an assignment into a memory limit: changes one variable at a time as long as the program's peak falls.
//!
//! The network counts less memory than the program holds. Near the smallest possible limit its answers may therefore
//! exceed the limit, though plans that keep it exist close by.

use shardwright_plan::{SearchProblem, peak};
use shardwright_search::{Control, StopReason};

/// Most programs whose peak is computed.
const MOST_PROGRAMS: usize = 2000;

/// Choices and the peak of their program in bytes.
pub type Peaked = (u64, Vec<u32>);

/// Lowers the peak of some choices until it keeps the limit, no single change lowers it, or the time is used up. Per
/// variable, only `allowed` choices are tried; the first that lowers the peak is taken.
pub fn descend(
    problem: &SearchProblem<'_>,
    allowed: &[Vec<u32>],
    (mut held, mut choices): Peaked,
    limit: u64,
    control: &Control<'_>,
) -> Peaked {
    let mut programs = 0;
    // Number of variables since the last change: all of them once means that no single change helps.
    let (mut variable, mut unchanged) = (0, 0);
    while held > limit && unchanged < choices.len() {
        unchanged += 1;
        for &choice in &allowed[variable] {
            let stop = control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit);
            if stop || programs == MOST_PROGRAMS {
                return (held, choices);
            }
            let before = std::mem::replace(&mut choices[variable], choice);
            if choice == before {
                continue;
            }
            programs += 1;
            match peak(&problem.context, &problem.assignment(&choices)).0 {
                lower if lower < held => (held, unchanged) = (lower, 0),
                _ => choices[variable] = before,
            }
        }
        variable = (variable + 1) % choices.len();
    }
    (held, choices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::Optimizer;
    use shardwright_machine::builtin;
    use shardwright_zoo::{BuildOptions, build};

    #[test]
    fn the_peak_falls_to_the_limit_or_as_far_as_single_changes_reach() {
        let options = BuildOptions { optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
        let graph = build("mlp:batch=64,hidden=64,layers=3", &options).unwrap();
        let machine = builtin("flat:4").unwrap();
        let problem = SearchProblem::new(&graph, &machine, None).unwrap();
        let all: Vec<Vec<u32>> = problem.choices.iter().map(|c| (0..c.len() as u32).collect()).collect();
        let start = vec![0; all.len()];
        let peak_of = |choices: &[u32]| peak(&problem.context, &problem.assignment(choices)).0;
        let first = peak_of(&start);
        let (least, choices) = descend(&problem, &all, (first, start.clone()), 0, &Control::new());
        assert!(least < first && peak_of(&choices) == least, "{least} {first}");
        for (variable, choice) in all.iter().enumerate().flat_map(|(v, all)| all.iter().map(move |&c| (v, c)))
        {
            let mut changed = choices.clone();
            changed[variable] = choice;
            assert!(peak_of(&changed) >= least);
        }
        let limit = (least + first) / 2;
        assert!(descend(&problem, &all, (first, start.clone()), limit, &Control::new()).0 <= limit);
        assert_eq!(descend(&problem, &all, (first, start.clone()), first, &Control::new()), (first, start));
    }
}
