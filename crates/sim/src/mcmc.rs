//! FlexFlow's search (Jia et al., arXiv 1807.05358, section 6): a random walk over configs that prefers fast steps.
//!
//! A proposal gives one variable (a layer, or an op) another of its choices, both picked evenly; it is taken if the
//! simulated step gets shorter, else with probability exp(β · (old - new)). Several chains start from known plans,
//! each with a seed of its own; a chain ends when its budget is spent, or when it has found nothing better
//! for half of it. What is ours: every chain ends with rounds over all variables that take any single change for the better
//! until there is none, as far as the budget goes.
//!
//! Steps are simulated without joining small all-reduces, which depends on all ops at once.

use crate::delta::{Delta, DeltaError};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use shardwright_plan::Problem;
use shardwright_search::Control;
use shardwright_space::Config;

/// A step longer by this share is taken with probability 1/e.
const TOLERANCE: f64 = 0.002;
/// How many proposals between two looks at the clock.
const PATIENCE: u64 = 256;
/// Proposals of a chain, if the control does not say: the paper's.
const PROPOSALS: u64 = 250_000;
/// A number that nobody has asked for yet.
const UNKNOWN: u32 = u32::MAX;

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Best {
    /// The config of every op, in the graph's order.
    pub configs: Vec<Config>,
    /// Picoseconds of the simulated step.
    pub makespan: u64,
    /// Which start led to it.
    pub start: usize,
    /// Proposals of all chains together.
    pub proposals: u64,
    /// Whether no change of a single variable makes it better.
    pub locally_optimal: bool,
}

/// Searches from every start at once, with as many proposals each as the control allows iterations; the best of all
/// chains, the first of equals. Deterministic, unless the control's deadline comes first.
///
/// # Errors
/// Where there is no start, or a step cannot be simulated change by change.
pub fn mcmc(
    problem: &Problem<'_>,
    starts: &[Vec<Config>],
    control: &Control<'_>,
) -> Result<Best, DeltaError> {
    let budget = control.iterations.unwrap_or(PROPOSALS);
    let chains: Vec<Best> = starts
        .par_iter()
        .enumerate()
        .map(|(start, configs)| {
            let mut chain = Chain::new(problem, configs, control.seed.wrapping_add(start as u64))?;
            chain.walk(budget, control)?;
            chain.climb(budget, control)?;
            let Chain { best, best_makespan, proposals, locally_optimal, .. } = chain;
            Ok(Best { configs: best, makespan: best_makespan, start, proposals, locally_optimal })
        })
        .collect::<Result<_, DeltaError>>()?;
    let proposals = chains.iter().map(|chain| chain.proposals).sum();
    let best = chains.into_iter().min_by_key(|chain| (chain.makespan, chain.start));
    let best = best.ok_or(DeltaError::Configs { ops: problem.graph.ops.len() })?;
    Ok(Best { proposals, ..best })
}

struct Chain<'p> {
    problem: &'p Problem<'p>,
    delta: Delta<'p>,
    /// Per variable: the numbers of its ops' configs, choice by choice.
    numbers: Vec<Vec<u32>>,
    changes: Vec<(u32, u32)>,
    random: Xoshiro256PlusPlus,
    best: Vec<Config>,
    best_makespan: u64,
    proposals: u64,
    locally_optimal: bool,
}

impl<'p> Chain<'p> {
    fn new(problem: &'p Problem<'p>, start: &[Config], seed: u64) -> Result<Self, DeltaError> {
        let delta = Delta::new(problem, start)?;
        let members = |v: usize| problem.variables.splits[v].ops.len();
        let numbers = problem.choices.iter().enumerate().map(|(v, c)| vec![UNKNOWN; c.len() * members(v)]);
        Ok(Self {
            problem,
            numbers: numbers.collect(),
            changes: Vec::new(),
            random: Xoshiro256PlusPlus::seed_from_u64(seed),
            best: start.to_vec(),
            best_makespan: delta.makespan(),
            proposals: 0,
            locally_optimal: false,
            delta,
        })
    }

    /// Proposes a choice of a variable.
    fn propose(&mut self, variable: usize, choice: usize) -> Result<u64, DeltaError> {
        let ops = &self.problem.variables.splits[variable].ops;
        self.changes.clear();
        for (member, op) in ops.iter().enumerate() {
            let known = &mut self.numbers[variable][choice * ops.len() + member];
            if *known == UNKNOWN {
                let config = &self.problem.choices[variable][choice].configs[member];
                *known = self.delta.number(op.index(), config);
            }
            self.changes.push((op.0, *known));
        }
        self.proposals += 1;
        self.delta.propose(&self.changes)
    }

    fn out_of_time(&self, control: &Control<'_>) -> bool {
        self.proposals.is_multiple_of(PATIENCE) && control.stop(0).is_some()
    }

    fn note_best(&mut self) {
        self.best_makespan = self.delta.makespan();
        self.best = self.delta.configs();
    }

    /// The random walk.
    fn walk(&mut self, budget: u64, control: &Control<'_>) -> Result<(), DeltaError> {
        let variables: Vec<usize> =
            (0..self.problem.choices.len()).filter(|&v| self.problem.choices[v].len() > 1).collect();
        let mut improved_at = 0;
        while !variables.is_empty()
            && self.proposals < budget
            && self.proposals - improved_at <= budget / 2
            && !self.out_of_time(control)
        {
            let variable = variables[self.random.random_range(0..variables.len())];
            let choice = self.random.random_range(0..self.problem.choices[variable].len());
            let old = self.delta.makespan();
            let new = self.propose(variable, choice)?;
            let worse = new.saturating_sub(old) as f64 / (old as f64 * TOLERANCE).max(1.0);
            if new <= old || self.random.random::<f64>() < (-worse).exp() {
                self.delta.accept();
                if new < self.best_makespan {
                    self.note_best();
                    improved_at = self.proposals;
                }
            } else {
                self.delta.reject()?;
            }
        }
        Ok(())
    }

    /// Rounds over all variables, taking every change for the better, from the best so far.
    fn climb(&mut self, budget: u64, control: &Control<'_>) -> Result<(), DeltaError> {
        self.delta = Delta::new(self.problem, &self.best)?;
        self.numbers.iter_mut().for_each(|numbers| numbers.fill(UNKNOWN));
        let most = self.proposals.saturating_add(budget);
        loop {
            let mut improved = false;
            for variable in 0..self.problem.choices.len() {
                for choice in 0..self.problem.choices[variable].len() {
                    if self.proposals >= most || self.out_of_time(control) {
                        return Ok(());
                    }
                    if self.propose(variable, choice)? < self.best_makespan {
                        self.delta.accept();
                        self.note_best();
                        improved = true;
                    } else {
                        self.delta.reject()?;
                    }
                }
            }
            if !improved {
                self.locally_optimal = true;
                return Ok(());
            }
        }
    }
}
