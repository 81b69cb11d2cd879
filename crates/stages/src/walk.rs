//! One pass of dynamic programming over a lattice's suffixes, under a limit on every stage's time.
//!
//! The passes build pipelines from the last stage to the first. Memory counts the micro-batches in flight, which only depend on
//! the replicas of the stages behind: a suffix is summed up by the devices and the replicas that its stages take.

use crate::lattice::Lattice;
use crate::oracle::{Precision, Query, Quote, StageOracle};

/// Which side of a quote counts as a stage's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Times of options that exist.
    Options,
    /// Lower bounds, for oracles that are not exact.
    Bounds,
}

impl Side {
    pub(crate) fn of(self, quote: Quote) -> f64 {
        match self {
            Side::Options => quote.seconds,
            Side::Bounds => quote.lower_bound_seconds,
        }
    }
}

/// The caller's `stop` returned true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// A stage of a pipeline: the suffix that it begins, the suffix behind it, and its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PathStage {
    pub whole: usize,
    pub tail: usize,
    pub query: Query,
}

/// A time that every stage with an option takes less than: infinite times stand for stages without one.
pub(crate) const NO_LIMIT: f64 = f64::MAX;

/// Marks a suffix whose remaining layers fit on no number of devices.
pub(crate) const NO_DEVICES: u32 = u32::MAX;

/// The stages of a suffix, summed up, and the choice of its first stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub devices: u32,
    pub replicas: u32,
    /// The sum of the stages' times; zero where only the slowest stage counts.
    pub sum_seconds: f64,
    tail: u32,
    index: u32,
    family: u16,
    shape: u16,
}

impl State {
    fn dominates(&self, other: &State) -> bool {
        self.devices <= other.devices
            && self.replicas <= other.replicas
            && self.sum_seconds <= other.sum_seconds
    }
}

/// A lattice, an oracle, and the scratch memory of passes over them.
pub(crate) struct Walk<'a, O: StageOracle> {
    pub lattice: &'a Lattice,
    pub oracle: &'a mut O,
    pub devices: u32,
    pub replicas: u32,
    pub side: Side,
    pub stop: &'a dyn Fn() -> bool,
    /// Whether a quote of the last pass left open if a stage is fast enough: the pass then proves nothing.
    pub gaps: bool,
    /// Lower bound of devices × seconds of every suffix.
    work: Vec<f64>,
    seen: Vec<u32>,
    stamp: u32,
    stack: Vec<u32>,
    steps: u32,
}

impl<'a, O: StageOracle> Walk<'a, O> {
    pub fn new(
        lattice: &'a Lattice,
        oracle: &'a mut O,
        devices: u32,
        replicas: u32,
        side: Side,
        stop: &'a dyn Fn() -> bool,
    ) -> Self {
        oracle.enter(lattice);
        let mut work = vec![0.0; lattice.len()];
        for suffix in 1..lattice.len() {
            let (smaller, group) = lattice.origin(suffix);
            work[suffix] = work[smaller] + oracle.device_seconds(group as usize);
        }
        let seen = vec![0; lattice.len()];
        Walk {
            lattice,
            oracle,
            devices,
            replicas,
            side,
            stop,
            gaps: false,
            work,
            seen,
            stamp: 0,
            stack: Vec::new(),
            steps: 0,
        }
    }

    /// A lower bound of devices × seconds of all layers.
    pub fn total_work(&self) -> f64 {
        self.work[self.lattice.full()]
    }

    /// Starts a walk over the suffixes that contain `tail`.
    fn begin(&mut self, tail: usize) {
        self.stamp += 1;
        self.stack.clear();
        self.stack.push(tail as u32);
        self.seen[tail] = self.stamp;
        self.oracle.open_tail(self.lattice, tail);
    }

    /// The next larger suffix whose stage over `tail` may take at most `device_seconds`.
    fn next(&mut self, tail: usize, device_seconds: f64) -> Result<Option<usize>, Stopped> {
        while let Some(suffix) = self.stack.pop() {
            self.steps = self.steps.wrapping_add(1);
            if self.steps.is_multiple_of(1024) && (self.stop)() {
                return Err(Stopped);
            }
            for &larger in self.lattice.extensions(suffix as usize) {
                let larger = larger as usize;
                if self.seen[larger] != self.stamp {
                    self.seen[larger] = self.stamp;
                    // Sums of floating-point numbers differ by rounding; a relative margin keeps the bound valid.
                    let work = self.work[larger] - self.work[tail] - 1e-11 * self.work[larger];
                    if work <= device_seconds {
                        self.stack.push(larger as u32);
                    }
                }
            }
            if suffix as usize != tail {
                return Ok(Some(suffix as usize));
            }
        }
        Ok(None)
    }

    /// Whether the opened stage stays within a time.
    fn is_within(&mut self, query: Query, at_most_seconds: f64) -> bool {
        let quote = self.oracle.quote(self.lattice, query, at_most_seconds, Precision::Decision);
        self.gaps |= quote.seconds > at_most_seconds && quote.lower_bound_seconds <= at_most_seconds;
        self.side.of(quote) <= at_most_seconds
    }

    /// The least time of the opened stage, where it is at most `at_most_seconds`.
    fn least_seconds(&mut self, query: Query, at_most_seconds: f64) -> f64 {
        let quote = self.oracle.quote(self.lattice, query, at_most_seconds, Precision::Least);
        let (lower, upper) = (quote.lower_bound_seconds, quote.seconds);
        self.gaps |= lower <= at_most_seconds && upper > lower * (1.0 + 1e-11);
        self.side.of(quote)
    }

    /// For every suffix, the least devices that the layers before it take when every stage takes at most this time. Stages see
    /// as few micro-batches in flight as the position allows, so the result is a lower bound.
    pub fn least_devices_before(&mut self, at_most_seconds: f64) -> Result<Vec<u32>, Stopped> {
        let full = self.lattice.full();
        let mut need = vec![NO_DEVICES; full + 1];
        need[full] = 0;
        for tail in (0..full).rev() {
            let taken = least_devices(self.work[tail], at_most_seconds);
            let Some(spare) = self.devices.checked_sub(taken) else { continue };
            let in_flight = if tail == 0 { 1 } else { 2 };
            let mut best = NO_DEVICES;
            self.begin(tail);
            while let Some(whole) = self.next(tail, at_most_seconds * f64::from(spare))? {
                let rest = need[whole];
                if rest == NO_DEVICES || rest >= best || rest >= spare {
                    continue;
                }
                self.oracle.open(self.lattice, whole);
                for family in 0..self.oracle.families().len() {
                    let mut shape = self.oracle.first_shape(family, at_most_seconds);
                    while let Some(&candidate) = self.oracle.families()[family].get(shape) {
                        let devices = candidate.devices();
                        if devices > spare - rest || devices >= best - rest {
                            break;
                        }
                        if self.is_within(Query { family, shape, in_flight }, at_most_seconds) {
                            best = devices + rest;
                            break;
                        }
                        shape += 1;
                    }
                }
            }
            need[tail] = best;
        }
        Ok(need)
    }

    /// A pipeline whose stages all take at most this time, or `None` with proof that there is none.
    pub fn within(&mut self, at_most_seconds: f64) -> Result<Option<Vec<PathStage>>, Stopped> {
        self.gaps = false;
        let need = self.least_devices_before(at_most_seconds)?;
        if need[0] > self.devices {
            return Ok(None);
        }
        let full = self.lattice.full();
        let mut fronts: Vec<Vec<State>> = vec![Vec::new(); full + 1];
        fronts[0].push(State {
            devices: 0,
            replicas: 0,
            sum_seconds: 0.0,
            tail: 0,
            index: 0,
            family: 0,
            shape: 0,
        });
        // Per shape: the most micro-batches in flight known to fit, and the fewest known not to.
        let mut fits: Vec<(u32, u32)> = Vec::new();
        for tail in 0..full {
            let front = std::mem::take(&mut fronts[tail]);
            let Some(fewest) = front.first().map(|state| state.devices) else { continue };
            self.begin(tail);
            while let Some(whole) = self.next(tail, at_most_seconds * f64::from(self.devices - fewest))? {
                let rest = need[whole];
                let Some(spare) = self.devices.checked_sub(fewest).and_then(|left| left.checked_sub(rest))
                else {
                    continue;
                };
                self.oracle.open(self.lattice, whole);
                for family in 0..self.oracle.families().len() {
                    let mut shape = self.oracle.first_shape(family, at_most_seconds);
                    let shapes = self.oracle.families()[family].len();
                    if shape >= shapes || self.oracle.families()[family][shape].devices() > spare {
                        continue;
                    }
                    fits.clear();
                    fits.resize(shapes, (0, u32::MAX));
                    // Fewer replicas behind mean fewer micro-batches in flight. The first shape that fits dominates larger
                    // shapes of its family, and it only moves up as replicas grow.
                    'states: for (index, state) in front.iter().enumerate().rev() {
                        let found = loop {
                            let Some(&candidate) = self.oracle.families()[family].get(shape) else {
                                break 'states;
                            };
                            if candidate.devices() > spare {
                                break 'states;
                            }
                            let in_flight = in_flight(state.replicas, candidate.replicas);
                            let (yes, no) = fits[shape];
                            let accepted = if in_flight <= yes {
                                true
                            } else if in_flight >= no {
                                false
                            } else {
                                let query = Query { family, shape, in_flight };
                                let fit = self.is_within(query, at_most_seconds);
                                if fit {
                                    fits[shape].0 = in_flight
                                } else {
                                    fits[shape].1 = in_flight
                                }
                                fit
                            };
                            if accepted {
                                break candidate;
                            }
                            shape += 1;
                        };
                        let state = State {
                            devices: state.devices + found.devices(),
                            replicas: state.replicas + found.replicas,
                            sum_seconds: 0.0,
                            tail: tail as u32,
                            index: index as u32,
                            family: family as u16,
                            shape: shape as u16,
                        };
                        if state.devices > self.devices - rest || state.replicas > self.replicas {
                            continue;
                        }
                        insert_sorted(&mut fronts[whole], state);
                        if whole == full {
                            fronts[tail] = front;
                            return Ok(Some(self.path(&fronts, fronts[full].len() - 1)));
                        }
                    }
                }
            }
            fronts[tail] = front;
        }
        Ok(None)
    }

    /// The pipeline with the least sum of stage times, among those whose stages all take at most `at_most_seconds` and whose sum
    /// is below `sum_limit_seconds`; `None` with proof that there is none.
    pub fn least_sum(
        &mut self,
        at_most_seconds: f64,
        sum_limit_seconds: f64,
    ) -> Result<Option<Vec<PathStage>>, Stopped> {
        self.gaps = false;
        let need = self.least_devices_before(at_most_seconds)?;
        if need[0] > self.devices {
            return Ok(None);
        }
        let before = self.least_sum_before(at_most_seconds, &need)?;
        let full = self.lattice.full();
        let mut fronts: Vec<Vec<State>> = vec![Vec::new(); full + 1];
        fronts[0].push(State {
            devices: 0,
            replicas: 0,
            sum_seconds: 0.0,
            tail: 0,
            index: 0,
            family: 0,
            shape: 0,
        });
        let mut limit = sum_limit_seconds;
        for tail in 0..full {
            let front = std::mem::take(&mut fronts[tail]);
            let Some(fewest) = front.iter().map(|state| state.devices).min() else { continue };
            self.begin(tail);
            while let Some(whole) = self.next(tail, at_most_seconds * f64::from(self.devices - fewest))? {
                let rest = need[whole];
                let Some(spare) = self.devices.checked_sub(fewest).and_then(|left| left.checked_sub(rest))
                else {
                    continue;
                };
                self.oracle.open(self.lattice, whole);
                for family in 0..self.oracle.families().len() {
                    let first = self.oracle.first_shape(family, at_most_seconds);
                    for shape in first..self.oracle.families()[family].len() {
                        let candidate = self.oracle.families()[family][shape];
                        if candidate.devices() > spare {
                            break;
                        }
                        for (index, state) in front.iter().enumerate() {
                            let devices = state.devices + candidate.devices();
                            let replicas = state.replicas + candidate.replicas;
                            if devices > self.devices - rest || replicas > self.replicas {
                                continue;
                            }
                            let in_flight = in_flight(state.replicas, candidate.replicas);
                            let seconds =
                                self.least_seconds(Query { family, shape, in_flight }, at_most_seconds);
                            let sum_seconds = state.sum_seconds + seconds;
                            if seconds > at_most_seconds || sum_seconds + before[whole] >= limit {
                                continue;
                            }
                            let state = State {
                                devices,
                                replicas,
                                sum_seconds,
                                tail: tail as u32,
                                index: index as u32,
                                family: family as u16,
                                shape: shape as u16,
                            };
                            insert(&mut fronts[whole], state);
                            if whole == full {
                                limit = limit.min(sum_seconds);
                            }
                        }
                    }
                }
            }
            fronts[tail] = front;
        }
        let ends = &fronts[full];
        let best = (0..ends.len()).min_by(|&a, &b| ends[a].sum_seconds.total_cmp(&ends[b].sum_seconds));
        Ok(best.map(|best| self.path(&fronts, best)))
    }

    /// For every suffix, a lower bound of the sum of the times of the stages before it.
    fn least_sum_before(&mut self, at_most_seconds: f64, need: &[u32]) -> Result<Vec<f64>, Stopped> {
        let full = self.lattice.full();
        let mut sums = vec![f64::INFINITY; full + 1];
        sums[full] = 0.0;
        for tail in (0..full).rev() {
            if need[tail] == NO_DEVICES {
                continue;
            }
            let in_flight = if tail == 0 { 1 } else { 2 };
            self.begin(tail);
            while let Some(whole) = self.next(tail, at_most_seconds * f64::from(self.devices))? {
                if sums[whole] >= sums[tail] {
                    continue;
                }
                self.oracle.open(self.lattice, whole);
                for family in 0..self.oracle.families().len() {
                    let first = self.oracle.first_shape(family, at_most_seconds);
                    for shape in first..self.oracle.families()[family].len() {
                        if self.oracle.families()[family][shape].devices() > self.devices - need[whole] {
                            break;
                        }
                        let limit = at_most_seconds.min(sums[tail] - sums[whole]);
                        let seconds = self.least_seconds(Query { family, shape, in_flight }, limit);
                        if seconds <= limit {
                            // Rounding must not make the bound exceed a pipeline's sum.
                            sums[tail] = sums[tail].min((seconds + sums[whole]) * (1.0 - 1e-12));
                        }
                    }
                }
            }
        }
        Ok(sums)
    }

    /// The stages of a state of the full suffix, first stage first.
    fn path(&self, fronts: &[Vec<State>], end: usize) -> Vec<PathStage> {
        let (mut whole, mut index) = (self.lattice.full(), end);
        let mut path = Vec::new();
        while whole != 0 {
            let state = fronts[whole][index];
            let tail = state.tail as usize;
            let behind = fronts[tail][state.index as usize];
            let (family, shape) = (usize::from(state.family), usize::from(state.shape));
            let replicas = self.oracle.families()[family][shape].replicas;
            let in_flight = in_flight(behind.replicas, replicas);
            path.push(PathStage { whole, tail, query: Query { family, shape, in_flight } });
            (whole, index) = (tail, state.index as usize);
        }
        path
    }

    /// The times of a pipeline's stages.
    pub fn seconds(&mut self, path: &[PathStage]) -> Vec<f64> {
        path.iter()
            .map(|stage| {
                self.oracle.open_tail(self.lattice, stage.tail);
                self.oracle.open(self.lattice, stage.whole);
                self.least_seconds(stage.query, NO_LIMIT)
            })
            .collect()
    }
}

/// Piper's count of micro-batches in flight: the replicas of this stage and those behind it, per replica of this stage.
pub(crate) fn in_flight(replicas_behind: u32, replicas: u32) -> u32 {
    (replicas_behind + replicas).div_ceil(replicas)
}

/// The least number of devices that can do this work in time.
fn least_devices(device_seconds: f64, at_most_seconds: f64) -> u32 {
    if device_seconds <= 0.0 {
        return 0;
    }
    // The cast saturates; the margin keeps rounding on the safe side.
    (device_seconds / at_most_seconds * (1.0 - 1e-11)).ceil() as u32
}

/// Adds a state to a front that is sorted by rising devices and falling replicas.
fn insert_sorted(front: &mut Vec<State>, state: State) {
    let at = front.partition_point(|other| other.devices < state.devices);
    let dominated = at > 0 && front[at - 1].replicas <= state.replicas
        || front
            .get(at)
            .is_some_and(|other| other.devices == state.devices && other.replicas <= state.replicas);
    if dominated {
        return;
    }
    let end = at + front[at..].iter().take_while(|other| other.replicas >= state.replicas).count();
    front.splice(at..end, [state]);
}

/// Adds a state to an unsorted front of three measures.
fn insert(front: &mut Vec<State>, state: State) {
    if !front.iter().any(|other| other.dominates(&state)) {
        front.retain(|other| !state.dominates(other));
        front.push(state);
    }
}
