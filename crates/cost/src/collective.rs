//! The cost of collectives: seconds by the α-β model, and the exact bytes over every axis.
//!
//! Every collective over a set of axes has a few algorithms, each taking `α + β · bytes`. The cheapest for the message size
//! is chosen, as NCCL's tuner does. In the table, m is the number of a group's units at a level, R the ring rate (see
//! `rates`), λ the latency and n the number of members. Sums and maxima are over the levels crossed:
//!
//! | collective | algorithm | α | β |
//! |---|---|---|---|
//! | all-gather, reduce-scatter | ring | Σ (m-1)·outer·λ | (n-1)/n · max 1/R |
//! | | hierarchical | Σ (m-1)·λ | max (m-1)/m · 1/R |
//! | all-reduce | ring, hierarchical | twice the above | twice the above |
//! | | tree | 2 Σ ⌈log2 m⌉·λ | 2 · max 1/R |
//! | broadcast, reduce | ring | Σ (m-1)·outer·λ | max 1/R |
//! | | tree | Σ ⌈log2 m⌉·λ | max 1/R |
//! | scatter, gather | tree | Σ ⌈log2 m⌉·λ | max (m-1)·inside/n · 1/R |
//! | all-to-all | direct | Σ (m-1)·inside·λ | max over levels of the unit's egress |
//! | | hierarchical | Σ (m-1)·λ | as above, everything at every level |
//! | permute | direct | max λ | every device to one other, the narrowest level |
//! | | exchanges | twice all-to-all | twice all-to-all |
//! | send, halo | direct | max λ | rate of the narrowest level |
//!
//! `outer` is the number of the group's units at the levels outside, `inside` its members within one unit. A flat ring
//! visits units in order, so it crosses an outer level only between them (NCCL counts its latency the same way,
//! `src/graph/tuning.cc`). On a torus the m-1 steps of the hierarchical algorithms are those of one ring per dimension,
//! and a tree's depth is the number of wires to the farthest unit. Phases of a hierarchical algorithm use different
//! links and are pipelined, so the slowest level counts, not the sum. It is therefore never worse than the flat ring.
//! NCCL has no hierarchical all-gather, reduce-scatter or all-reduce over several levels of switches, so it is not
//! offered there: vTrain's steps with 16-way tensor parallelism over two nodes take the time of one ring. A reshard in
//! several collectives, one per level, is found by `reshard`.
//! Bandwidth terms assume messages in pieces small enough to keep all links busy.
//!
//! If a machine's file has measured times for a collective in groups of this size, they replace the model.
//!
//! **Sizes.** The byte count is the larger side on one device: before a reduce-scatter or scatter, after an all-gather
//! or gather. The other collectives do not change the size.

use crate::rates::{Crossings, LevelCrossing};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use shardwright_machine::{
    AxisId, AxisSet, Bytes, CollectiveKind, CollectiveMeasurement, LevelId, MAX_AXES, Machine, Mesh, Seconds,
};
use std::sync::{OnceLock, RwLock};

/// A pattern of communication within groups of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// Every member gets the sum (or maximum) over all members.
    AllReduce,
    /// Every member gets its part of the sum.
    ReduceScatter,
    /// Every member gets all parts.
    AllGather,
    /// Every member sends a different part to each other.
    AllToAll,
    /// One member's data goes to all.
    Broadcast,
    /// The sum goes to one member.
    Reduce,
    /// One member sends each other its part.
    Scatter,
    /// One member receives the parts of all.
    Gather,
    /// One member of each group sends to one other.
    Send,
    /// Every member sends all of its data to one other.
    Permute,
}

impl Collective {
    /// All collectives.
    pub const ALL: [Collective; 10] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::AllToAll,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Scatter,
        Collective::Gather,
        Collective::Send,
        Collective::Permute,
    ];

    fn pattern(self) -> Pattern {
        match self {
            Collective::AllReduce => Pattern::AllReduce,
            Collective::ReduceScatter | Collective::AllGather => Pattern::Half,
            Collective::AllToAll => Pattern::Exchange,
            Collective::Broadcast | Collective::Reduce => Pattern::Fan,
            Collective::Scatter | Collective::Gather => Pattern::Deal,
            Collective::Send => Pattern::Send,
            Collective::Permute => Pattern::Permute,
        }
    }
}

impl From<CollectiveKind> for Collective {
    fn from(measured: CollectiveKind) -> Self {
        match measured {
            CollectiveKind::AllReduce => Collective::AllReduce,
            CollectiveKind::ReduceScatter => Collective::ReduceScatter,
            CollectiveKind::AllGather => Collective::AllGather,
            CollectiveKind::AllToAll => Collective::AllToAll,
            CollectiveKind::Permute => Collective::Permute,
        }
    }
}

/// The algorithm of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// One ring (or chain) through all members, units in order.
    Ring,
    /// A binary tree per level.
    Tree,
    /// A ring, or an exchange, per level: inner levels first, on smaller and smaller parts.
    Hierarchical,
    /// Directly from sender to receiver.
    Direct,
}

/// Collectives with the same cost formula share a row of the table.
#[derive(Clone, Copy)]
enum Pattern {
    AllReduce,
    Half,
    Exchange,
    Fan,
    Deal,
    Send,
    Permute,
    Halo,
}

/// A collective over several levels is as slow as the slowest. Links of a level on which it would take less than this share of its time
/// are free for others: a ring through nodes leaves most of NVLink.
const OCCUPIES: f64 = 0.5;
const PATTERNS: usize = 8;
const CHOICES: usize = 3;

/// `alpha + beta * bytes` seconds.
#[derive(Clone, Copy, Debug)]
struct Affine {
    alpha: f64,
    beta: f64,
    algorithm: Algorithm,
}

const NEVER: Affine = Affine { alpha: f64::INFINITY, beta: 0.0, algorithm: Algorithm::Direct };

/// The cost model of one set of axes.
#[derive(Debug)]
struct Profile {
    members: u32,
    /// The levels whose links it keeps busy, as bits.
    occupied: u32,
    rows: [[Affine; CHOICES]; PATTERNS],
    /// Measured times, which replace the model.
    measured: Vec<(Collective, CollectiveMeasurement)>,
    /// How many times as long collectives take inside of steps.
    slowdown: Vec<(Collective, f64)>,
}

impl Profile {
    fn new(machine: &Machine, axes: AxisSet, absent: AxisSet) -> Profile {
        let crossings = Crossings::new(machine, axes, absent);
        let n = f64::from(crossings.members);
        // A ring visits the units of an outer level in order, and all units of an inner level within each.
        let mut outer = 1.0;
        let (mut chain, mut per_level, mut tree, mut pairs, mut farthest) = (0.0, 0.0, 0.0, 0.0, 0f64);
        let (mut ring, mut hierarchical, mut deal, mut shift, mut single) = (0f64, 0f64, 0f64, 0f64, 0f64);
        let (mut direct, mut staged) = (0f64, 0f64);
        for c in crossings.iter() {
            let units = f64::from(c.units);
            let inside = f64::from(c.inside);
            chain += (units - 1.0) * outer * c.latency;
            per_level += c.ring_steps * c.latency;
            tree += c.tree_depth * c.latency;
            pairs += (units - 1.0) * inside * c.latency;
            farthest = farthest.max(c.latency);
            ring = ring.max(c.ring);
            hierarchical = hierarchical.max((units - 1.0) / units * c.ring);
            deal = deal.max((units - 1.0) * inside / n * c.ring);
            // `exchange` counts every byte of a device. Direct messages cross this level only between members whose
            // outermost difference is here: units * inside of n members share the outer digits.
            direct = direct.max(c.exchange * units * inside / n);
            staged = staged.max(c.exchange);
            shift = shift.max(c.shift);
            single = single.max(c.single);
            outer *= units;
        }
        let busy = |c: &LevelCrossing| c.ring >= OCCUPIES * ring;
        let occupied =
            crossings.levels().filter(|(_, c)| busy(c)).fold(0, |all, (level, _)| all | 1 << level);
        let line = |algorithm, alpha, beta| Affine { alpha, beta, algorithm };
        let scatter = (n - 1.0) / n;
        let mut rows = [[NEVER; CHOICES]; PATTERNS];
        rows[Pattern::Half as usize][0] = line(Algorithm::Ring, chain, scatter * ring);
        rows[Pattern::AllReduce as usize][0] = line(Algorithm::Ring, 2.0 * chain, 2.0 * scatter * ring);
        rows[Pattern::AllReduce as usize][1] = line(Algorithm::Tree, 2.0 * tree, 2.0 * ring);
        if crossings.nest_rings {
            rows[Pattern::Half as usize][1] = line(Algorithm::Hierarchical, per_level, hierarchical);
            rows[Pattern::AllReduce as usize][2] =
                line(Algorithm::Hierarchical, 2.0 * per_level, 2.0 * hierarchical);
        }
        rows[Pattern::Fan as usize][0] = line(Algorithm::Ring, chain, ring);
        rows[Pattern::Fan as usize][1] = line(Algorithm::Tree, tree, ring);
        rows[Pattern::Deal as usize][0] = line(Algorithm::Tree, tree, deal);
        rows[Pattern::Exchange as usize][0] = line(Algorithm::Direct, pairs, direct);
        rows[Pattern::Exchange as usize][1] = line(Algorithm::Hierarchical, per_level, staged);
        rows[Pattern::Send as usize][0] = line(Algorithm::Direct, farthest, single);
        // A permutation may overload one wire. Sent in even parts through all members, it is two exchanges.
        rows[Pattern::Permute as usize] = [
            line(Algorithm::Direct, farthest, shift),
            line(Algorithm::Hierarchical, 2.0 * per_level, 2.0 * staged),
            line(Algorithm::Ring, 2.0 * pairs, 2.0 * direct),
        ];
        rows[Pattern::Halo as usize][0] = line(Algorithm::Direct, farthest, ring);
        let measured = if absent.is_empty() { measured(machine, axes) } else { Vec::new() };
        let slowdown = &machine.spec().slowdown;
        let slowdown = slowdown.iter().map(|(&kind, &factor)| (kind.into(), factor)).collect();
        Profile { members: crossings.members, occupied, rows, measured, slowdown }
    }

    /// The measured time, or that of the cheapest algorithm, earlier ones winning ties.
    fn time(&self, kind: Collective, bytes: Bytes) -> (Algorithm, f64) {
        let (algorithm, seconds) = match self.measured.iter().find(|(measured, _)| *measured == kind) {
            Some((_, measured)) => (Algorithm::Direct, measured.at(bytes).0),
            None => self.best(kind.pattern(), bytes.0 as f64),
        };
        (algorithm, seconds * self.slowdown(kind))
    }

    /// How many times as long as modelled a collective takes inside of steps.
    fn slowdown(&self, kind: Collective) -> f64 {
        self.slowdown.iter().find(|(slowed, _)| *slowed == kind).map_or(1.0, |(_, factor)| *factor)
    }

    fn best(&self, pattern: Pattern, bytes: f64) -> (Algorithm, f64) {
        let mut best = (Algorithm::Direct, f64::INFINITY);
        for line in &self.rows[pattern as usize] {
            let seconds = line.alpha + line.beta * bytes;
            if seconds < best.1 {
                best = (line.algorithm, seconds);
            }
        }
        best
    }
}

/// The measured collectives of groups along axes of one level.
fn measured(machine: &Machine, axes: AxisSet) -> Vec<(Collective, CollectiveMeasurement)> {
    let mesh = machine.mesh();
    let mut levels = axes.iter().map(|axis| mesh.axis(axis).level);
    let Some(level) = levels.next().filter(|first| levels.all(|level| level == *first)) else {
        return Vec::new();
    };
    let (name, members) = (&machine.levels()[level.index()].name, mesh.group_size(axes));
    let here = machine.spec().measured.iter().filter(|m| m.level == *name && m.members == members);
    here.map(|measured| (measured.collective.into(), measured.clone())).collect()
}

/// Bytes sent over each axis of a mesh, summed over all devices. A byte counts for the outermost axis on which its
/// sender and receiver differ: that is the slowest link it crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    axes: [u64; MAX_AXES],
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic { axes: [0; MAX_AXES] }
    }
}

impl Traffic {
    /// Bytes that crossed an axis.
    pub fn axis(&self, axis: AxisId) -> Bytes {
        Bytes(self.axes[axis.index()])
    }

    /// Bytes that crossed a level.
    pub fn level(&self, mesh: &Mesh, level: LevelId) -> Bytes {
        let axes = mesh.axes().iter().zip(&self.axes).filter(|(axis, _)| axis.level == level);
        axes.map(|(_, &bytes)| Bytes(bytes)).sum()
    }

    /// All bytes sent.
    pub fn total(&self) -> Bytes {
        self.axes.iter().map(|&bytes| Bytes(bytes)).sum()
    }

    /// Adds bytes that crossed an axis.
    pub fn add(&mut self, axis: AxisId, bytes: u128) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.axes[axis.index()] = self.axes[axis.index()].saturating_add(bytes);
    }

    /// The traffic of this many repetitions.
    pub fn times(mut self, count: u32) -> Self {
        self.axes.iter_mut().for_each(|bytes| *bytes = bytes.saturating_mul(u64::from(count)));
        self
    }

    /// Adds another traffic.
    pub fn merge(&mut self, other: &Traffic) {
        for (mine, theirs) in self.axes.iter_mut().zip(&other.axes) {
            *mine = mine.saturating_add(*theirs);
        }
    }
}

/// The cost of communication on one mesh of one machine. Queries are cheap: every set of axes is computed once.
#[derive(Debug)]
pub struct Comm {
    machine: Machine,
    mesh: Mesh,
    /// By the bits of the set of axes, if no axis is absent: the usual case, read without a lock.
    whole: Vec<OnceLock<Box<Profile>>>,
    /// By axes and absent axes.
    partial: RwLock<FxHashMap<(AxisSet, AxisSet), std::sync::Arc<Profile>>>,
}

impl Comm {
    /// The costs on a mesh of the machine, with prime or merged axes.
    pub fn new(machine: &Machine, mesh: &Mesh) -> Comm {
        let whole = (0..1usize << mesh.len()).map(|_| OnceLock::new()).collect();
        Comm { machine: machine.clone(), mesh: mesh.clone(), whole, partial: RwLock::default() }
    }

    /// The mesh of the axes.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    fn with<T>(&self, axes: AxisSet, absent: AxisSet, ask: impl Fn(&Profile) -> T) -> T {
        let axes = axes.intersect(self.mesh.all());
        let absent = absent.intersect(self.mesh.all()).minus(axes);
        let make = |absent| Profile::new(&self.machine, self.mesh.primes(axes), self.mesh.primes(absent));
        if absent.is_empty() {
            return ask(self.whole[axes.0 as usize].get_or_init(|| Box::new(make(absent))));
        }
        if let Some(profile) = self.partial.read().ok().as_ref().and_then(|map| map.get(&(axes, absent))) {
            return ask(profile);
        }
        let profile = std::sync::Arc::new(make(absent));
        if let Ok(mut map) = self.partial.write() {
            map.insert((axes, absent), profile.clone());
        }
        ask(&profile)
    }

    /// The levels whose links a collective along these axes keeps busy, as bits: those on which it takes at least half of its time.
    pub fn occupied_levels(&self, axes: AxisSet) -> u32 {
        self.with(axes, AxisSet::EMPTY, |profile| profile.occupied)
    }

    /// Time of a collective that all groups along the axes run at once.
    pub fn seconds(&self, collective: Collective, axes: AxisSet, bytes: Bytes) -> Seconds {
        self.choose(collective, axes, AxisSet::EMPTY, bytes).1
    }

    /// The cheapest algorithm and its time for a tensor that lives on one digit of the `absent` axes. Devices of other
    /// digits take no part and use no bandwidth.
    pub fn choose(
        &self,
        kind: Collective,
        axes: AxisSet,
        absent: AxisSet,
        bytes: Bytes,
    ) -> (Algorithm, Seconds) {
        if axes.is_empty() {
            return (Algorithm::Direct, Seconds::ZERO);
        }
        let (algorithm, seconds) = self.with(axes, absent, |profile| profile.time(kind, bytes));
        (algorithm, Seconds(seconds))
    }

    /// Time by one algorithm, if the collective has it.
    pub fn seconds_by(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        axes: AxisSet,
        bytes: Bytes,
    ) -> Option<Seconds> {
        self.with(axes, AxisSet::EMPTY, |profile| {
            let rows = profile.rows[collective.pattern() as usize];
            let line = rows.iter().find(|line| line.algorithm == algorithm && line.alpha.is_finite())?;
            Some(Seconds((line.alpha + line.beta * bytes.0 as f64) * profile.slowdown(collective)))
        })
    }

    /// Time of a halo exchange along a dimension that the axes split: every part sends `down` bytes to the part
    /// before it and `up` bytes to the part after it. With two parts each has only one neighbour.
    pub fn halo_seconds(&self, axes: AxisSet, down: Bytes, up: Bytes) -> Seconds {
        if axes.is_empty() || (down.0 == 0 && up.0 == 0) {
            return Seconds::ZERO;
        }
        self.with(axes, AxisSet::EMPTY, |profile| {
            let bytes = if profile.members == 2 { down.max(up) } else { down + up };
            let measured = profile.measured.iter().any(|(kind, _)| *kind == Collective::Permute);
            Seconds(match measured {
                true => profile.time(Collective::Permute, bytes).1,
                false => {
                    profile.best(Pattern::Halo, bytes.0 as f64).1 * profile.slowdown(Collective::Permute)
                }
            })
        })
    }

    /// Number of groups along the axes that take part.
    fn groups(&self, axes: AxisSet, absent: AxisSet) -> u128 {
        u128::from(self.mesh.group_size(self.mesh.all().minus(axes).minus(absent)))
    }

    /// The exact bytes that a collective sends over each axis, summed over all devices, by the algorithm of
    /// [`Comm::choose`]. [`Collective::Permute`] is counted as if every device sent; reshards know which blocks stay and
    /// count it themselves.
    pub fn traffic(&self, kind: Collective, axes: AxisSet, absent: AxisSet, bytes: Bytes) -> Traffic {
        let mut traffic = Traffic::default();
        if axes.is_empty() {
            return traffic;
        }
        let groups = self.groups(axes, absent);
        let (algorithm, _) = self.choose(kind, axes, absent, bytes);
        let all = u128::from(bytes.0);
        let n = u128::from(self.mesh.group_size(axes));
        let passes = if kind == Collective::AllReduce { 2 } else { 1 };
        let outermost = axes.iter().next();
        let (mut outer, mut before) = (1, 0);
        for axis in axes.iter() {
            let size = u128::from(self.mesh.axis(axis).size);
            let inner = n / outer / size;
            let level = self.mesh.axis(axis).level;
            let sent = match (kind.pattern(), algorithm) {
                // Each of the ring's n links, the closing one included, does not carry one of the n parts. The links up
                // to here together leave out a share of the bytes, rounded down.
                (Pattern::AllReduce | Pattern::Half, Algorithm::Ring) => {
                    let links = if Some(axis) == outermost { size } else { outer * (size - 1) };
                    let left_out = all * (before + links) / n - all * before / n;
                    before += links;
                    passes * (links * all - left_out)
                }
                // Nested rings and trees: every member but the first of each gets everything once.
                (Pattern::AllReduce | Pattern::Half | Pattern::Fan, _) => passes * outer * (size - 1) * all,
                // The parts for members whose outermost difference is this axis.
                (Pattern::Exchange, Algorithm::Direct) => (size - 1) * inner * all,
                // Level by level, each exchange moves the bytes that leave their unit.
                (Pattern::Exchange, _) => {
                    let here = |at: &AxisId| self.mesh.axis(*at).level == level;
                    let units: u128 =
                        axes.iter().filter(here).map(|a| u128::from(self.mesh.axis(a).size)).product();
                    let minor = axes.iter().filter(|at| here(at) && *at > axis);
                    let minor: u128 = minor.map(|a| u128::from(self.mesh.axis(a).size)).product();
                    n * (size - 1) * minor * all / units
                }
                (Pattern::Deal, _) => all * (size - 1) / size,
                (Pattern::Send, _) if Some(axis) == outermost => all,
                (Pattern::Permute, _) if Some(axis) == outermost => n * all,
                (Pattern::Send | Pattern::Permute | Pattern::Halo, _) => 0,
            };
            traffic.add(axis, groups * sent);
            outer *= size;
        }
        traffic
    }
}

/// Bytes to synchronise `replicas` copies of parameters as OptCNN counts them (ICML 2018, section 5.2 and Fig. 8):
/// each copy sends its gradients to a parameter server and receives the parameters.
pub fn parameter_server_traffic(replicas: u64, parameters: Bytes) -> Bytes {
    Bytes(replicas.saturating_mul(2).saturating_mul(parameters.0))
}
