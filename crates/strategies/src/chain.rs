//! Markov chains of FlexFlow's search (Jia et al., arXiv 1807.05358, section 6): a random walk over configs that prefers fast
//! steps.
//!
//! A proposal gives one variable (a layer, or an op) another of its choices; it is taken if the simulated step gets
//! shorter, else with probability exp(β · (old - new)). Several chains start from known plans, each with a seed of its
//! own; a chain ends when its budget is spent, or when it has found nothing better for half of it, and goes back to the
//! best that it knows after every hundredth of it (the authors' program does so). What is ours: half of the proposals change a
//! variable on the critical path, since nothing else can make the step shorter by itself; and every chain ends with
//! rounds over all variables that take any single change for the better until there is none, as far as the budget goes.
//! Where variables are whole layers on devices, half of the proposals move several at once that hang together: a layer alone
//! seldom gains anything by leaving those that it shares weights with.
//!
//! Steps are simulated without joining small all-reduces, which depends on all ops at once.

use crate::moves::Moves;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use shardwright_machine::{AxisSet, Bytes};
use shardwright_plan::{Context, peak};
use shardwright_search::{Control, LogEntry, Progress};
use shardwright_sim::{Delta, DeltaError};
use shardwright_space::Assignment;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A step longer by this share is taken with probability 1/e.
const TOLERANCE: f64 = 0.002;
/// How many proposals between two looks at the clock; of a very large program one takes milliseconds.
const PATIENCE: u64 = 16;
/// A walk ends when it has found nothing better for this part of its time, and for so many seconds.
const IDLE_SHARE: u32 = 2;
const LEAST_IDLE: Duration = Duration::from_secs(1);
/// How many proposals between two looks at the critical path.
const REFRESH: u64 = 256;
/// A chain goes back to its best after this part of its budget, and not before so many proposals.
const RETURNS: u64 = 100;
const LEAST_BEFORE_RETURN: u64 = 1000;

/// Limits of the chains.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Proposals of each chain, and as many again for its last rounds.
    pub proposals: u64,
    /// The most that one device may hold at once.
    pub memory: Option<Bytes>,
    /// Variables that must stay as they are at the start.
    pub fixed: Vec<usize>,
    /// Axes that ops may be pinned along.
    pub pins: AxisSet,
    /// A step longer by this share is taken with probability 1/e right after a chain went back to its best; then ever less, down to the share that
    /// FlexFlow's walk always takes. None: always that one.
    pub heat: Option<f64>,
    /// Whether a chain ends before its budget and its time when it has found nothing better for long.
    pub ends_idle: bool,
}

/// The best assignment of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainResult {
    /// The assignment.
    pub assignment: Assignment,
    /// Picoseconds of the simulated step.
    pub makespan: u64,
    /// Which start led to it.
    pub start: usize,
    /// Proposals that were simulated.
    pub proposals: u64,
    /// Whether no change of a single variable makes it better.
    pub locally_optimal: bool,
}

/// Runs a chain from every start; the results, best first. Deterministic, unless the control's
/// deadline comes first.
///
/// # Errors
/// Where a step cannot be simulated change by change.
pub fn run_chains(
    context: &Context<'_>,
    moves: &Moves<'_>,
    starts: &[Assignment],
    limits: &Limits,
    control: &Control<'_>,
) -> Result<Vec<ChainResult>, DeltaError> {
    let shared = AtomicU64::new(u64::MAX);
    // Each chain gets its share of the time, however many run at once.
    let at_once = rayon::current_num_threads().clamp(1, starts.len().max(1)) as u32;
    let share = control.remaining().map(|left| left * at_once / starts.len().max(1) as u32);
    let run = |(start, assignment): (usize, &Assignment)| {
        let own = share.and_then(|share| control.clock.now().checked_add(share));
        let deadline = control.deadline.map(|deadline| own.map_or(deadline, |own| own.min(deadline)));
        let mut chain = Chain {
            context,
            moves,
            limits,
            control: &Control { deadline, iterations: None, ..control.clone() },
            shared: &shared,
            delta: Delta::with_pins(context, assignment, limits.pins)?,
            numbers: moves.unknown_numbers(),
            changes: Vec::new(),
            together: Vec::new(),
            random: Xoshiro256PlusPlus::seed_from_u64(control.seed.wrapping_add(start as u64)),
            best: Vec::new(),
            best_makespan: u64::MAX,
            proposals: 0,
            locally_optimal: false,
            began: control.clock.now(),
            improved: control.clock.now(),
        };
        chain.note_best();
        chain.walk()?;
        chain.climb()?;
        Ok(chain.into_result(start))
    };
    let chains: Result<Vec<ChainResult>, DeltaError> = starts.par_iter().enumerate().map(run).collect();
    let mut chains = chains?;
    chains.sort_by_key(|chain| (chain.makespan, chain.start));
    Ok(chains)
}

struct Chain<'p> {
    context: &'p Context<'p>,
    moves: &'p Moves<'p>,
    limits: &'p Limits,
    control: &'p Control<'p>,
    /// The shortest step that any chain knows.
    shared: &'p AtomicU64,
    delta: Delta<'p>,
    /// Per variable: the numbers of its ops' configs, choice by choice.
    numbers: Vec<Vec<Option<u32>>>,
    changes: Vec<(u32, u32)>,
    /// The variables of a proposal.
    together: Vec<usize>,
    random: Xoshiro256PlusPlus,
    /// Per op: the number of its config in the best plan.
    best: Vec<u32>,
    best_makespan: u64,
    proposals: u64,
    locally_optimal: bool,
    /// When the chain began, and when it last found something better.
    began: Duration,
    improved: Duration,
}

impl Chain<'_> {
    /// Proposes a choice of a variable; none if its tensors cannot be laid out so.
    fn propose(&mut self, variable: usize, choice: usize) -> Result<Option<u64>, DeltaError> {
        self.together.clear();
        self.together.push(variable);
        self.propose_together(choice)
    }

    /// Proposes a choice of some variables; none if tensors cannot be laid out so.
    fn propose_together(&mut self, choice: usize) -> Result<Option<u64>, DeltaError> {
        self.changes.clear();
        for &variable in &self.together {
            let (ops, configs) = (self.moves.ops(variable), self.moves.configs(variable, choice));
            for (member, (op, config)) in ops.iter().zip(configs).enumerate() {
                let known = &mut self.numbers[variable][choice * ops.len() + member];
                let number = *known.get_or_insert_with(|| self.delta.number(op.index(), config));
                self.changes.push((op.0, number));
            }
        }
        self.proposals += 1;
        match self.delta.propose(&self.changes) {
            Err(DeltaError::Layout(_)) => Ok(None),
            makespan => makespan.map(Some),
        }
    }

    fn out_of_time(&self) -> bool {
        self.proposals.is_multiple_of(PATIENCE) && (self.control.stop(0).is_some() || self.is_idle())
    }

    /// Whether the last improvement is long ago.
    fn is_idle(&self) -> bool {
        let now = self.control.clock.now();
        let idle = now.saturating_sub(self.improved);
        self.limits.ends_idle && idle > LEAST_IDLE.max(now.saturating_sub(self.began) / IDLE_SHARE)
    }

    /// Whether what is proposed keeps the memory limit.
    fn fits(&self) -> bool {
        self.limits.memory.is_none_or(|limit| peak(self.context, &self.delta.assignment()) <= limit)
    }

    fn note_best(&mut self) {
        self.best_makespan = self.delta.makespan();
        self.improved = self.control.clock.now();
        self.delta.numbers(&mut self.best);
        if self.shared.fetch_min(self.best_makespan, Ordering::Relaxed) > self.best_makespan
            && let Some(listener) = self.control.progress
        {
            let best = i64::try_from(self.best_makespan).ok();
            let entry =
                LogEntry { elapsed: self.control.elapsed(), iteration: self.proposals, best, bound: 0 };
            listener(&Progress { entry, source: "mcmc" });
        }
    }

    /// Makes the best plan the current one.
    fn return_to_best(&mut self) -> Result<(), DeltaError> {
        self.changes.clear();
        for (op, &number) in self.best.iter().enumerate() {
            if self.delta.chosen(op) != number {
                self.changes.push((op as u32, number));
            }
        }
        if !self.changes.is_empty() {
            self.delta.propose(&self.changes)?;
            self.delta.accept();
        }
        Ok(())
    }

    /// Variables that can move, of those that own the given ops.
    fn movable(&self, ops: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut variables: Vec<usize> = ops.map(|op| self.moves.variable(op)).collect();
        variables.sort_unstable();
        variables.dedup();
        variables.retain(|&v| self.moves.count(v) > 1 && !self.limits.fixed.contains(&v));
        variables
    }

    /// Whether two variables have the same config: that of their first ops.
    fn have_same_config(&self, a: usize, b: usize) -> bool {
        let config = |variable: usize| {
            let lead = self.moves.ops(variable)[0].index();
            self.delta.config(lead, self.delta.chosen(lead))
        };
        config(a) == config(b)
    }

    /// Chooses what moves with a variable: nothing, or a cluster that it is in, or what of that is where it is.
    fn gather(&mut self, variable: usize) {
        self.together.clear();
        self.together.push(variable);
        let clusters = self.moves.clusters(variable);
        if clusters.is_empty() || self.random.random::<bool>() {
            return;
        }
        let cluster = self.moves.cluster(clusters[self.random.random_range(0..clusters.len())]);
        let all = self.random.random::<bool>();
        for other in cluster.iter().map(|&other| other as usize).filter(|&other| other != variable) {
            if !self.limits.fixed.contains(&other) && (all || self.have_same_config(variable, other)) {
                self.together.push(other);
            }
        }
    }

    /// The random walk.
    fn walk(&mut self) -> Result<(), DeltaError> {
        let budget = self.limits.proposals;
        let all = self.movable(0..self.best.len());
        let mut critical = Vec::new();
        let mut improved_at = 0;
        let patience = (budget / RETURNS).max(LEAST_BEFORE_RETURN);
        while !all.is_empty()
            && self.proposals < budget
            && self.proposals - improved_at <= budget / 2
            && !self.out_of_time()
        {
            if self.proposals.is_multiple_of(REFRESH) {
                critical = self.movable(self.delta.critical_ops().into_iter());
            }
            if (self.proposals + 1).is_multiple_of(patience) {
                self.return_to_best()?;
            }
            let guided = !critical.is_empty() && self.random.random::<bool>();
            let from = if guided { &critical } else { &all };
            let variable = from[self.random.random_range(0..from.len())];
            let choice = self.random.random_range(0..self.moves.count(variable));
            let old = self.delta.makespan();
            self.gather(variable);
            let Some(new) = self.propose_together(choice)? else { continue };
            let tolerance = self.tolerance((self.proposals % patience) as f64 / patience as f64);
            let worse = new.saturating_sub(old) as f64 / (old as f64 * tolerance).max(1.0);
            let taken = new <= old || self.random.random::<f64>() < (-worse).exp();
            if taken && self.fits() {
                self.delta.accept();
                if new < self.best_makespan {
                    self.note_best();
                    improved_at = self.proposals;
                }
            } else {
                self.delta.reject();
            }
        }
        Ok(())
    }

    /// By how much longer a step may be, after so much of the way from one return to the next.
    fn tolerance(&self, way: f64) -> f64 {
        self.limits.heat.map_or(TOLERANCE, |heat| heat * (TOLERANCE / heat).powf(way))
    }

    /// Rounds over all variables, taking every change for the better, from the best so far.
    fn climb(&mut self) -> Result<(), DeltaError> {
        self.return_to_best()?;
        let all = self.movable(0..self.best.len());
        let most = self.proposals.saturating_add(self.limits.proposals);
        loop {
            let mut improved = false;
            for &variable in &all {
                for choice in 0..self.moves.count(variable) {
                    if self.proposals >= most || self.out_of_time() {
                        return Ok(());
                    }
                    let Some(new) = self.propose(variable, choice)? else { continue };
                    if new < self.best_makespan && self.fits() {
                        self.delta.accept();
                        self.note_best();
                        improved = true;
                    } else {
                        self.delta.reject();
                    }
                }
            }
            if !improved {
                self.locally_optimal = true;
                return Ok(());
            }
        }
    }

    fn into_result(self, start: usize) -> ChainResult {
        let configs = self.best.iter().enumerate().map(|(op, &number)| self.delta.config(op, number).clone());
        ChainResult {
            assignment: Assignment::of(self.context.graph, configs.collect()),
            makespan: self.best_makespan,
            start,
            proposals: self.proposals,
            locally_optimal: self.locally_optimal,
        }
    }
}
