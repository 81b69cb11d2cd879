//! The cost network: variables with choices, unary and pairwise costs, and memory over time.
//!
//! The types here hold and evaluate a problem; they do not search. All data are in flat arenas, and equal pairwise
//! tables are stored once, so that a network of 100,000 edges with repeated tables stays small. A network is immutable:
//! [`NetworkBuilder`] checks every number first, so solvers may index without checks.
//!
//! Invariants of a [`Network`], enforced by the builder:
//! - every variable has at least one choice; all costs and usages are non-negative;
//! - a cost of [`FORBIDDEN`] or more means "must not be chosen" and is stored as exactly [`FORBIDDEN`];
//! - edges join `u < v`, sorted, at most one per pair; tables are row-major with `u` major;
//! - the sum of all largest finite costs is at most [`MAX_TOTAL`], as is the sum of all largest usages,
//!   so any total fits an `i64`.

mod builder;
mod scale;

pub use builder::{Limits, NetworkBuilder, NetworkError, SharedTable};
pub use scale::{FloatScale, ScaleError};

/// Costs at or above this value mean "forbidden": no feasible choice may pay one.
pub const FORBIDDEN: i64 = 1_000_000_000_000_000_000;

/// The largest sum of finite costs (or of usages) that a network may reach.
pub const MAX_TOTAL: i64 = 4_000_000_000_000_000_000;

/// Whether a cost means "must not be chosen".
pub const fn is_forbidden(cost: i64) -> bool {
    cost >= FORBIDDEN
}

/// The number of a variable in its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VarId(pub u32);

impl VarId {
    /// The index into dense vectors.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The time during which a variable's usage counts: `lo <= t < hi`; empty where `lo >= hi`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interval {
    /// First time at which the usage counts.
    pub lo: u64,
    /// First time at which it no longer counts.
    pub hi: u64,
}

impl Interval {
    /// Whether the interval is empty.
    pub const fn is_empty(self) -> bool {
        self.lo >= self.hi
    }
}

/// One pairwise table between `u` and `v`, `u < v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The row variable.
    pub u: VarId,
    /// The column variable.
    pub v: VarId,
    /// The shared table of costs; see [`Network::table`].
    pub table: u32,
}

/// A table in the shared arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TableSpan {
    offset: usize,
    len: usize,
}

/// Cost and usage of an assignment; see [`Network::evaluate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// Sum of all unary and pairwise costs, forbidden ones counted as [`FORBIDDEN`] each.
    pub cost: i128,
    /// Number of forbidden unary and pairwise costs.
    pub forbidden: usize,
    /// The largest total usage at any time.
    pub peak_usage: i64,
    /// Excess of the peak over the limit; zero without a limit.
    pub overflow: i64,
}

impl Evaluation {
    /// Whether the assignment respects the limit and has no forbidden cost.
    pub const fn feasible(&self) -> bool {
        self.forbidden == 0 && self.overflow == 0
    }
}

/// A cost network. Build one with [`NetworkBuilder`].
#[derive(Clone, Debug)]
pub struct Network {
    /// Prefix sums of choice counts; one more entry than variables.
    first_choice: Vec<u32>,
    unary: Vec<i64>,
    usage: Vec<i64>,
    intervals: Vec<Interval>,
    usage_limit: Option<i64>,
    edges: Vec<Edge>,
    tables: Vec<TableSpan>,
    cells: Vec<i64>,
    /// Prefix sums of degrees; one more entry than variables.
    first_neighbour: Vec<u32>,
    neighbours: Vec<(VarId, u32)>,
}

impl Network {
    /// Number of variables.
    pub fn variables(&self) -> usize {
        self.intervals.len()
    }

    /// Number of choices of `v`, at least one.
    pub fn choices(&self, v: VarId) -> usize {
        (self.first_choice[v.index() + 1] - self.first_choice[v.index()]) as usize
    }

    fn span(&self, v: VarId) -> std::ops::Range<usize> {
        self.first_choice[v.index()] as usize..self.first_choice[v.index() + 1] as usize
    }

    /// The cost of each choice of `v`.
    pub fn unary(&self, v: VarId) -> &[i64] {
        &self.unary[self.span(v)]
    }

    /// The usage of each choice of `v` while it is alive.
    pub fn usage(&self, v: VarId) -> &[i64] {
        &self.usage[self.span(v)]
    }

    /// When the usage of `v` counts.
    pub fn interval(&self, v: VarId) -> Interval {
        self.intervals[v.index()]
    }

    /// The most that may be used at any time, if limited.
    pub const fn usage_limit(&self) -> Option<i64> {
        self.usage_limit
    }

    /// The same network with no limit on usage.
    #[must_use]
    pub fn without_memory(mut self) -> Self {
        self.usage_limit = None;
        self
    }

    /// The same network with another limit, or none.
    #[must_use]
    pub fn with_usage_limit(&self, limit: Option<i64>) -> Self {
        Network { usage_limit: limit.map(|l| l.max(0)), ..self.clone() }
    }

    /// The same network in which all other choices of a variable are forbidden.
    ///
    /// # Panics
    /// If the choice does not exist.
    #[must_use]
    pub fn with_choice(&self, v: VarId, choice: u32) -> Self {
        let mut fixed = self.clone();
        let own = &mut fixed.unary[self.span(v)];
        let kept = own[choice as usize];
        own.fill(FORBIDDEN);
        own[choice as usize] = kept;
        fixed
    }

    /// All edges, sorted by `(u, v)`, at most one per pair.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Number of distinct tables.
    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// A shared table, row-major, its edge's `u` major.
    pub fn table(&self, table: u32) -> &[i64] {
        let span = self.tables[table as usize];
        &self.cells[span.offset..span.offset + span.len]
    }

    /// The neighbours of `v`, ascending, each with the index of the edge into [`Network::edges`].
    pub fn neighbours(&self, v: VarId) -> &[(VarId, u32)] {
        let (a, b) = (self.first_neighbour[v.index()], self.first_neighbour[v.index() + 1]);
        &self.neighbours[a as usize..b as usize]
    }

    /// The cost of an edge under two choices.
    pub fn pair(&self, edge: &Edge, choice_u: u32, choice_v: u32) -> i64 {
        self.table(edge.table)[choice_u as usize * self.choices(edge.v) + choice_v as usize]
    }

    /// Cost and usage of `choices`, one per variable.
    ///
    /// # Errors
    /// Where the number of choices is wrong or a choice does not exist.
    pub fn evaluate(&self, choices: &[u32]) -> Result<Evaluation, NetworkError> {
        if choices.len() != self.variables() {
            return Err(NetworkError::ChoiceCount { expected: self.variables(), got: choices.len() });
        }
        for (i, &c) in choices.iter().enumerate() {
            let have = self.choices(VarId(i as u32));
            if c as usize >= have {
                return Err(NetworkError::NoSuchChoice { variable: i, choice: u64::from(c), have });
            }
        }
        let mut cost = 0i128;
        let mut forbidden = 0;
        let mut add = |c: i64| {
            cost += i128::from(c);
            forbidden += usize::from(is_forbidden(c));
        };
        for (i, &c) in choices.iter().enumerate() {
            add(self.unary(VarId(i as u32))[c as usize]);
        }
        for edge in &self.edges {
            add(self.pair(edge, choices[edge.u.index()], choices[edge.v.index()]));
        }
        let peak_usage = self.peak_usage(choices);
        let overflow = self.usage_limit.map_or(0, |limit| (peak_usage - limit).max(0));
        Ok(Evaluation { cost, forbidden, peak_usage, overflow })
    }

    /// The largest total usage at any time.
    fn peak_usage(&self, choices: &[u32]) -> i64 {
        let mut events = Vec::new();
        for (i, &c) in choices.iter().enumerate() {
            let (v, span) = (VarId(i as u32), self.intervals[i]);
            let bytes = self.usage(v)[c as usize];
            if !span.is_empty() && bytes > 0 {
                events.push((span.lo, bytes));
                events.push((span.hi, -bytes));
            }
        }
        // Releases sort before acquisitions at the same time: intervals are half-open.
        events.sort_unstable();
        let (mut now, mut peak) = (0i64, 0i64);
        for (_, delta) in events {
            now += delta;
            peak = peak.max(now);
        }
        peak
    }
}
