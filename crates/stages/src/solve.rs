//! The search over stages: bisection on the slowest stage's time, and intervals of it where the sum of times counts too.
//!
//! One pass of [`crate::walk`] decides whether all stages can stay within a time. Bisection then closes the gap between the best
//! pipeline and the largest time that was proved too short. Oracles that are not exact get a second search on their bounds.

use crate::control::{Control, Progress};
use crate::lattice::{Lattice, Order};
use crate::oracle::{Shape, StageOption, StageOracle};
use crate::walk::{NO_LIMIT, PathStage, Side, Stopped, Walk};

/// Relative difference below which two times count as equal.
pub const TOLERANCE: f64 = 1e-9;

/// What a pipeline minimises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// The slowest stage's time: the time per micro-batch of a long run.
    Bottleneck,
    /// A step that fills and drains the pipeline: the sum of all stages' times, and the slowest again for every further
    /// micro-batch.
    Step {
        /// Micro-batches per step.
        micro_batches: u64,
    },
}

impl Objective {
    /// The objective of these stage times.
    pub fn value(self, seconds: &[f64]) -> f64 {
        let slowest = seconds.iter().copied().fold(0.0, f64::max);
        match self {
            Objective::Bottleneck => slowest,
            Objective::Step { micro_batches } => {
                seconds.iter().sum::<f64>() + slowest * micro_batches.saturating_sub(1) as f64
            }
        }
    }
}

/// Devices and replicas that all stages share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The stages' devices add up to at most this.
    pub devices: u32,
    /// The stages' replicas add up to at most this.
    pub replicas: u32,
}

/// A stage of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedStage {
    /// Tensor-parallel degree and replicas.
    pub shape: Shape,
    /// Micro-batches that are in flight at once.
    pub in_flight: u32,
    /// Layers, options, time and memory.
    pub option: StageOption,
}

/// Why a search stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The stages are proved optimal.
    Optimal,
    /// It is proved that no stages fit.
    Infeasible,
    /// The caller stopped the search.
    Stopped,
    /// The order has too many suffixes, or the oracle is not exact: the best stages found, and a bound.
    Exhausted,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The best stages, first stage first.
    pub stages: Option<Vec<PlacedStage>>,
    /// Their objective; infinite without stages.
    pub objective_seconds: f64,
    /// No stages have a smaller objective; infinite where it is proved that none fit.
    pub lower_bound_seconds: f64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
}

impl Outcome {
    /// Whether the stages are proved optimal.
    pub fn proved_optimal(&self) -> bool {
        self.stop_reason == StopReason::Optimal
    }
}

/// Steps from the floor that are larger are not tried; any pipeline will do then.
const FAR_STEP: f64 = 30.0;

/// Chains of single topological orders are tried first where the order has more suffixes than this.
const SMALL_LATTICE: usize = 4000;

/// Finds stages for an oracle's layers under an order.
pub fn solve<O: StageOracle>(
    oracle: &mut O,
    order: &Order,
    limits: Limits,
    objective: Objective,
    control: &Control<'_>,
) -> Outcome {
    let groups = order.groups();
    let mut best = Incumbent { control, lower: 0.0, upper: f64::INFINITY, stages: None };
    // Bits, sums of the oracle per family, fronts and extensions.
    let suffix_bytes = groups / 8 + 64 * oracle.families().len() + 128;
    let limit = (control.memory_bytes / suffix_bytes).clamp(2, 1 << 24);
    let small = Lattice::all(order, SMALL_LATTICE.min(limit), control.stop).ok();
    let mut complete = small.is_some();
    if small.is_none() {
        for chain in [order.topological().unwrap_or_default(), order.latest()] {
            let lattice = Lattice::chain(&chain);
            let mut search = Search::new(&lattice, oracle, limits, objective, Side::Options, control);
            if search.run(&mut best, false).is_err() {
                return best.outcome(StopReason::Stopped);
            }
        }
    }
    let lattice = small.or_else(|| Lattice::all(order, limit, control.stop).ok());
    if let Some(lattice) = lattice {
        complete = true;
        let mut search = Search::new(&lattice, oracle, limits, objective, Side::Options, control);
        if search.run(&mut best, true).is_err() {
            return best.outcome(StopReason::Stopped);
        }
        if !best.is_optimal() {
            // The oracle's times are not exact: what its bounds allow is the lower bound of the answer.
            let mut bounds = Incumbent { control, lower: best.lower, upper: f64::INFINITY, stages: None };
            let mut search = Search::new(&lattice, oracle, limits, objective, Side::Bounds, control);
            let end = search.run(&mut bounds, true);
            best.raise(bounds.lower.min(best.upper), "bounds");
            if end.is_err() {
                return best.outcome(StopReason::Stopped);
            }
        }
    }
    let reason = match best.stages {
        Some(_) if best.is_optimal() => StopReason::Optimal,
        None if complete && best.lower.is_infinite() => StopReason::Infeasible,
        _ if (control.stop)() => StopReason::Stopped,
        _ => StopReason::Exhausted,
    };
    best.outcome(reason)
}

/// The best stages so far and the bound.
struct Incumbent<'a> {
    control: &'a Control<'a>,
    lower: f64,
    upper: f64,
    stages: Option<Vec<PlacedStage>>,
}

impl Incumbent<'_> {
    fn is_optimal(&self) -> bool {
        self.upper <= self.lower * (1.0 + 2.0 * TOLERANCE) || self.upper <= self.lower + f64::MIN_POSITIVE
    }

    fn tell(&self, source: &str) {
        let best_seconds = self.upper.is_finite().then_some(self.upper);
        (self.control.progress)(&Progress { best_seconds, lower_bound_seconds: self.lower, source });
    }

    fn raise(&mut self, lower: f64, source: &str) {
        if lower > self.lower {
            self.lower = lower;
            self.tell(source);
        }
    }

    fn outcome(self, stop_reason: StopReason) -> Outcome {
        let lower_bound_seconds = if stop_reason == StopReason::Optimal { self.upper } else { self.lower };
        Outcome { stages: self.stages, objective_seconds: self.upper, lower_bound_seconds, stop_reason }
    }
}

/// A search over one lattice.
struct Search<'a, O: StageOracle> {
    walk: Walk<'a, O>,
    objective: Objective,
    /// The slowest stage of the best pipeline of this search.
    slowest: f64,
}

impl<'a, O: StageOracle> Search<'a, O> {
    fn new(
        lattice: &'a Lattice,
        oracle: &'a mut O,
        limits: Limits,
        objective: Objective,
        side: Side,
        control: &Control<'a>,
    ) -> Self {
        let walk = Walk::new(lattice, oracle, limits.devices, limits.replicas, side, control.stop);
        Search { walk, objective, slowest: f64::INFINITY }
    }

    /// Improves the incumbent. `proof` says that the lattice has all suffixes: what fails here fails everywhere.
    fn run(&mut self, best: &mut Incumbent<'_>, proof: bool) -> Result<(), Stopped> {
        let floor = self.walk.total_work() / f64::from(self.walk.devices) * (1.0 - 1e-11);
        let rounds = match self.objective {
            Objective::Bottleneck => 1.0,
            Objective::Step { micro_batches } => micro_batches as f64,
        };
        best.raise(floor * rounds, "work");
        let bottleneck = self.bottleneck(best, floor, proof)?;
        match self.objective {
            Objective::Bottleneck => Ok(()),
            Objective::Step { .. } if bottleneck.is_infinite() => Ok(()),
            Objective::Step { .. } => self.intervals(best, bottleneck, rounds - 1.0, proof),
        }
    }

    /// Takes a pipeline as the incumbent if it is better. Returns the sum of its stages' times, and the slowest.
    fn accept(&mut self, best: &mut Incumbent<'_>, path: &[PathStage], source: &str) -> (f64, f64) {
        let stages = if self.walk.side == Side::Options { self.place(path) } else { None };
        let seconds = match &stages {
            Some(stages) => stages.iter().map(|stage| stage.option.seconds).collect(),
            None => self.walk.seconds(path),
        };
        let slowest = Objective::Bottleneck.value(&seconds);
        self.slowest = self.slowest.min(slowest);
        let value = self.objective.value(&seconds);
        if value < best.upper && (stages.is_some() || self.walk.side == Side::Bounds) {
            best.upper = value;
            best.stages = stages;
            if self.walk.side == Side::Options {
                best.tell(source);
            }
        }
        (seconds.iter().sum(), slowest)
    }

    fn place(&mut self, path: &[PathStage]) -> Option<Vec<PlacedStage>> {
        path.iter()
            .map(|stage| {
                let (lattice, oracle) = (self.walk.lattice, &mut *self.walk.oracle);
                oracle.open_tail(lattice, stage.tail);
                oracle.open(lattice, stage.whole);
                let option = oracle.option(lattice, stage.query)?;
                let shape = oracle.families()[stage.query.family][stage.query.shape];
                Some(PlacedStage { shape, in_flight: stage.query.in_flight, option })
            })
            .collect()
    }

    /// Minimises the slowest stage's time. Returns a lower bound of it on this lattice, infinite where nothing fits.
    fn bottleneck(&mut self, best: &mut Incumbent<'_>, floor: f64, proof: bool) -> Result<f64, Stopped> {
        let is_bottleneck = self.objective == Objective::Bottleneck;
        // A step only needs the bound roughly: its intervals refine it.
        let tolerance = if is_bottleneck && proof { TOLERANCE } else { 1e-3 };
        // `lower` was refused. `proved` is a bound, which differs where a refusal left gaps.
        let (mut lower, mut proved) = (floor, floor);
        if is_bottleneck {
            self.slowest = best.upper;
            lower = lower.max(best.lower);
        }
        let mut step = 0.01;
        let (mut proving, mut found) = (false, false);
        while self.slowest > lower * (1.0 + 2.0 * tolerance) && self.slowest > f64::MIN_POSITIVE {
            let just_below =
                if found { self.slowest * (1.0 - tolerance) } else { self.slowest.min(NO_LIMIT) };
            let target = if proving {
                just_below
            } else if found {
                0.5 * (lower + self.slowest)
            } else if lower > 0.0 && step < FAR_STEP {
                // Optima lie close to the floor: approach it from below in growing steps.
                lower * (1.0 + step)
            } else {
                just_below
            };
            step *= 3.0;
            let at_most = target.min(just_below);
            if let Some(path) = self.walk.within(at_most)? {
                found = true;
                self.accept(best, &path, "bisection");
                // The pass and the option sum in different orders: rounding must not stall the bisection.
                self.slowest = self.slowest.min(at_most);
            } else if at_most == NO_LIMIT {
                if proof && !self.proves_nothing() {
                    best.raise(f64::INFINITY, "memory");
                }
                return Ok(f64::INFINITY);
            } else {
                lower = at_most;
                if !self.proves_nothing() {
                    proved = lower;
                }
                if proof && is_bottleneck {
                    best.raise(proved, "bisection");
                }
            }
            // Every other pass close to the end asks for a proof directly.
            proving = !proving && self.slowest <= lower * 1.01;
        }
        Ok(proved)
    }

    /// Whether the last pass refused options whose lower bounds it could not refuse.
    fn proves_nothing(&self) -> bool {
        self.walk.side == Side::Options && self.walk.gaps
    }

    /// Minimises the sum of times and `further` times the slowest, over intervals of the slowest stage's time.
    fn intervals(
        &mut self,
        best: &mut Incumbent<'_>,
        least: f64,
        further: f64,
        proof: bool,
    ) -> Result<(), Stopped> {
        // Intervals of the slowest stage's time: (bound of the objective, least, most).
        let mut open = vec![(least * further, least, NO_LIMIT)];
        let (mut gaps, mut rounds) = (false, 0);
        loop {
            let next = (0..open.len()).min_by(|&a, &b| open[a].0.total_cmp(&open[b].0));
            let bound = next.map_or(best.upper, |next| open[next].0);
            if proof && !gaps {
                best.raise(bound.min(best.upper), "intervals");
            }
            let Some(next) = next else { return Ok(()) };
            if bound >= best.upper * (1.0 - TOLERANCE) || (!proof && rounds >= 20) {
                return Ok(());
            }
            rounds += 1;
            let (_, least, most) = open.swap_remove(next);
            let sum_limit = best.upper * (1.0 - TOLERANCE) - further * least;
            let path = self.walk.least_sum(most, sum_limit)?;
            gaps |= self.proves_nothing();
            let Some(path) = path else { continue };
            let (sum, slowest) = self.accept(best, &path, "intervals");
            let below = slowest * (1.0 - 1e-12);
            if below > least {
                let middle = 0.5 * (least + below);
                for (least, most) in [(least, middle), (middle, below)] {
                    open.push((sum * (1.0 - 1e-12) + further * least, least, most));
                }
            }
        }
    }
}

/// Finds stages for a problem by layers.
pub fn solve_layers(problem: &crate::LayerProblem, control: &Control<'_>) -> Outcome {
    let (groups, order) = crate::reduce(problem);
    let mut oracle = crate::LayerOracle::new(problem, groups);
    let limits = Limits { devices: problem.devices, replicas: problem.most_replicas() };
    solve(&mut oracle, &order, limits, problem.objective, control)
}
