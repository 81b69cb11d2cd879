//! Builds a network and checks its input.
//!
//! Errors name the variable or edge, numbered in the order of adding, and the expected input.

use super::{Edge, FORBIDDEN, Interval, MAX_TOTAL, Network, TableSpan, VarId, is_forbidden};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::Hasher;

/// Why a network was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NetworkError {
    #[error("variable {variable} has no choices; every variable needs at least one")]
    NoChoices { variable: usize },
    #[error("variable {variable} has {choices} choices; at most {limit} are allowed")]
    TooManyChoices { variable: usize, choices: usize, limit: usize },
    #[error("more than {limit} variables; raise `Limits::variables` if that is intended")]
    TooManyVariables { limit: usize },
    #[error("more than {limit} edges; raise `Limits::edges` if that is intended")]
    TooManyEdges { limit: usize },
    #[error("edge {edge} brings the different tables to more than {limit} cells; raise `Limits::cells`")]
    TooManyCells { edge: usize, limit: usize },
    #[error("variable {variable} has {usages} usages for {choices} choices; give one per choice or none")]
    UsageCount { variable: usize, usages: usize, choices: usize },
    #[error("variable {variable}, choice {choice}: cost {cost} is negative; costs start at zero")]
    NegativeCost { variable: usize, choice: usize, cost: i64 },
    #[error("variable {variable}, choice {choice}: usage {usage} is negative; usages start at zero")]
    NegativeUsage { variable: usize, choice: usize, usage: i64 },
    #[error("edge {edge} names variable {variable}, but there are only {variables}")]
    NoSuchVariable { edge: usize, variable: usize, variables: usize },
    #[error("edge {edge} between variables {u} and {v}: {got} costs, expected {rows} x {cols}")]
    RaggedTable { edge: usize, u: usize, v: usize, got: usize, rows: usize, cols: usize },
    #[error("edge {edge}, entry {entry}: cost {cost} is negative; costs start at zero")]
    NegativePairCost { edge: usize, entry: usize, cost: i64 },
    #[error("the usage limit {limit} is negative")]
    NegativeLimit { limit: i64 },
    #[error("the largest finite costs sum to more than {MAX_TOTAL}; scale the costs down")]
    CostTotal,
    #[error("the largest usages sum to more than {MAX_TOTAL}; scale the usages and the limit down")]
    UsageTotal,
    #[error("{got} choices given for {expected} variables")]
    ChoiceCount { expected: usize, got: usize },
    #[error("variable {variable}: there is no choice {choice}, it has {have}")]
    NoSuchChoice { variable: usize, choice: u64, have: usize },
}

/// Size limits of a network, which protect against hostile input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most variables.
    pub variables: usize,
    /// The most choices of one variable.
    pub choices: usize,
    /// The most edges, including parallel ones.
    pub edges: usize,
    /// The most cells of all distinct tables together (8 bytes each).
    pub cells: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { variables: 1 << 22, choices: 1 << 20, edges: 1 << 23, cells: 1 << 29 }
    }
}

/// A table that several edges of one builder share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedTable(u32);

/// Collects variables and edges, checks them, and makes a [`Network`].
#[derive(Clone, Debug)]
pub struct NetworkBuilder {
    limits: Limits,
    first_choice: Vec<u32>,
    unary: Vec<i64>,
    usage: Vec<i64>,
    intervals: Vec<Interval>,
    usage_limit: Option<i64>,
    pool: TablePool,
    edges: Vec<Edge>,
    edges_seen: usize,
}

impl Default for NetworkBuilder {
    fn default() -> Self {
        Self::with_limits(Limits::default())
    }
}

impl NetworkBuilder {
    /// An empty builder with the default limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty builder with given limits.
    pub fn with_limits(limits: Limits) -> Self {
        NetworkBuilder {
            limits,
            first_choice: vec![0],
            unary: Vec::new(),
            usage: Vec::new(),
            intervals: Vec::new(),
            usage_limit: None,
            pool: TablePool::default(),
            edges: Vec::new(),
            edges_seen: 0,
        }
    }

    /// Number of variables so far.
    pub fn variables(&self) -> usize {
        self.intervals.len()
    }

    /// Number of choices of a variable; `None` if it does not exist.
    pub fn choices(&self, v: VarId) -> Option<usize> {
        let (a, b) = (self.first_choice.get(v.index())?, self.first_choice.get(v.index() + 1)?);
        Some((b - a) as usize)
    }

    /// Sets the limit of the total usage at any time.
    ///
    /// # Errors
    /// Where the limit is negative.
    pub fn usage_limit(&mut self, limit: i64) -> Result<&mut Self, NetworkError> {
        if limit < 0 {
            return Err(NetworkError::NegativeLimit { limit });
        }
        self.usage_limit = Some(limit);
        Ok(self)
    }

    /// Adds a variable: one cost per choice, one usage per choice (or none), and the time during which usage counts.
    ///
    /// # Errors
    /// Where a number is negative, counts differ or a limit is passed.
    pub fn variable(
        &mut self,
        costs: &[i64],
        usages: &[i64],
        interval: Interval,
    ) -> Result<VarId, NetworkError> {
        let variable = self.variables();
        if variable >= self.limits.variables.min(u32::MAX as usize / 2) {
            return Err(NetworkError::TooManyVariables { limit: self.limits.variables });
        }
        if costs.is_empty() {
            return Err(NetworkError::NoChoices { variable });
        }
        let room = u32::MAX as usize - self.unary.len();
        let limit = self.limits.choices.min(room);
        if costs.len() > limit {
            return Err(NetworkError::TooManyChoices { variable, choices: costs.len(), limit });
        }
        if !usages.is_empty() && usages.len() != costs.len() {
            return Err(NetworkError::UsageCount { variable, usages: usages.len(), choices: costs.len() });
        }
        if let Some(choice) = costs.iter().position(|&c| c < 0) {
            return Err(NetworkError::NegativeCost { variable, choice, cost: costs[choice] });
        }
        if let Some(choice) = usages.iter().position(|&c| c < 0) {
            return Err(NetworkError::NegativeUsage { variable, choice, usage: usages[choice] });
        }
        self.unary.extend(costs.iter().map(|&c| c.min(FORBIDDEN)));
        if usages.is_empty() {
            self.usage.resize(self.unary.len(), 0);
        } else {
            self.usage.extend_from_slice(usages);
        }
        self.first_choice.push(self.unary.len() as u32);
        self.intervals.push(interval);
        Ok(VarId(variable as u32))
    }

    /// Adds a table between two variables, row-major with the choices of `a` major. Tables on the same
    /// pair add up, in either direction; a table from a variable to itself adds its diagonal to the costs.
    ///
    /// # Errors
    /// Where a variable does not exist, the size is wrong, a cost is negative or a limit is passed.
    pub fn edge(&mut self, a: VarId, b: VarId, costs: &[i64]) -> Result<&mut Self, NetworkError> {
        let edge = self.edges_seen;
        let (rows, cols) = self.check_edge(a, b, costs.len())?;
        if let Some(entry) = costs.iter().position(|&c| c < 0) {
            return Err(NetworkError::NegativePairCost { edge, entry, cost: costs[entry] });
        }
        self.edges_seen += 1;
        if a == b {
            let first = self.first_choice[a.index()] as usize;
            for c in 0..rows {
                self.unary[first + c] = add_costs(self.unary[first + c], costs[c * cols + c]);
            }
            return Ok(self);
        }
        let table = if a < b {
            self.pool.intern(costs.iter().map(|&c| c.min(FORBIDDEN)))
        } else {
            self.pool.intern((0..costs.len()).map(|i| costs[(i % rows) * cols + i / rows].min(FORBIDDEN)))
        };
        if self.pool.cells.len() > self.limits.cells {
            return Err(NetworkError::TooManyCells { edge, limit: self.limits.cells });
        }
        self.edges.push(Edge { u: a.min(b), v: a.max(b), table });
        Ok(self)
    }

    /// Adds a table for several edges; see [`NetworkBuilder::join`].
    ///
    /// # Errors
    /// Where a cost is negative or a limit is passed; both name the next edge.
    pub fn table(&mut self, costs: &[i64]) -> Result<SharedTable, NetworkError> {
        let edge = self.edges_seen;
        if let Some(entry) = costs.iter().position(|&c| c < 0) {
            return Err(NetworkError::NegativePairCost { edge, entry, cost: costs[entry] });
        }
        let table = self.pool.intern(costs.iter().map(|&c| c.min(FORBIDDEN)));
        if self.pool.cells.len() > self.limits.cells {
            return Err(NetworkError::TooManyCells { edge, limit: self.limits.cells });
        }
        Ok(SharedTable(table))
    }

    /// Adds an edge with a shared table, row-major with the choices of `a` major.
    ///
    /// # Errors
    /// As [`NetworkBuilder::edge`].
    pub fn join(&mut self, a: VarId, b: VarId, table: SharedTable) -> Result<&mut Self, NetworkError> {
        // A table of another builder has no cells here and fails the check of sizes.
        let cells = self.pool.spans.get(table.0 as usize).map_or(0, |span| span.len);
        self.check_edge(a, b, cells)?;
        if a >= b {
            let costs = self.pool.get(table.0).to_vec();
            return self.edge(a, b, &costs);
        }
        self.edges_seen += 1;
        self.edges.push(Edge { u: a, v: b, table: table.0 });
        Ok(self)
    }

    /// Checks an edge whose table has `got` cells, and returns its rows and columns.
    fn check_edge(&self, a: VarId, b: VarId, got: usize) -> Result<(usize, usize), NetworkError> {
        let edge = self.edges_seen;
        if edge >= self.limits.edges.min(u32::MAX as usize / 4) {
            return Err(NetworkError::TooManyEdges { limit: self.limits.edges });
        }
        let variables = self.variables();
        let count = |v: VarId| {
            self.choices(v).ok_or(NetworkError::NoSuchVariable { edge, variable: v.index(), variables })
        };
        let (rows, cols) = (count(a)?, count(b)?);
        if got != rows * cols {
            let (u, v) = (a.index(), b.index());
            return Err(NetworkError::RaggedTable { edge, u, v, got, rows, cols });
        }
        Ok((rows, cols))
    }

    /// Checks the totals and makes the network.
    ///
    /// # Errors
    /// Where the largest total of costs or usages does not fit.
    pub fn build(mut self) -> Result<Network, NetworkError> {
        self.sum_parallel_edges();
        self.check_totals()?;
        let variables = self.variables();
        let mut first_neighbour = vec![0u32; variables + 1];
        for e in &self.edges {
            first_neighbour[e.u.index() + 1] += 1;
            first_neighbour[e.v.index() + 1] += 1;
        }
        for i in 0..variables {
            first_neighbour[i + 1] += first_neighbour[i];
        }
        let mut next = first_neighbour.clone();
        let mut neighbours = vec![(VarId(0), 0u32); self.edges.len() * 2];
        // Edges are sorted by (u, v): writing the smaller ends first keeps every list ascending.
        for (i, e) in self.edges.iter().enumerate() {
            neighbours[next[e.v.index()] as usize] = (e.u, i as u32);
            next[e.v.index()] += 1;
        }
        for (i, e) in self.edges.iter().enumerate() {
            neighbours[next[e.u.index()] as usize] = (e.v, i as u32);
            next[e.u.index()] += 1;
        }
        let (tables, cells) = self.pool.compact(&mut self.edges);
        Ok(Network {
            first_choice: self.first_choice,
            unary: self.unary,
            usage: self.usage,
            intervals: self.intervals,
            usage_limit: self.usage_limit,
            edges: self.edges,
            tables,
            cells,
            first_neighbour,
            neighbours,
        })
    }

    fn sum_parallel_edges(&mut self) {
        // A stable sort by pair, so that tables are summed in the order of adding.
        self.edges.sort_by_key(|e| (e.u, e.v));
        let mut merged: Vec<Edge> = Vec::with_capacity(self.edges.len());
        for &e in &self.edges {
            match merged.last_mut() {
                Some(last) if (last.u, last.v) == (e.u, e.v) => {
                    let sum: Vec<i64> = self
                        .pool
                        .get(last.table)
                        .iter()
                        .zip(self.pool.get(e.table))
                        .map(|(&x, &y)| add_costs(x, y))
                        .collect();
                    last.table = self.pool.intern(sum.into_iter());
                }
                _ => merged.push(e),
            }
        }
        self.edges = merged;
    }

    fn check_totals(&self) -> Result<(), NetworkError> {
        let largest = |costs: &[i64]| {
            i128::from(costs.iter().copied().filter(|&c| !is_forbidden(c)).max().unwrap_or(0))
        };
        let table_max: Vec<i128> =
            (0..self.pool.spans.len()).map(|t| largest(self.pool.get(t as u32))).collect();
        let (mut cost, mut usage) = (0i128, 0i128);
        for v in 0..self.variables() {
            let span = self.first_choice[v] as usize..self.first_choice[v + 1] as usize;
            cost += largest(&self.unary[span.clone()]);
            usage += i128::from(self.usage[span].iter().copied().max().unwrap_or(0));
        }
        cost += self.edges.iter().map(|e| table_max[e.table as usize]).sum::<i128>();
        if cost > i128::from(MAX_TOTAL) {
            return Err(NetworkError::CostTotal);
        }
        if usage > i128::from(MAX_TOTAL) {
            return Err(NetworkError::UsageTotal);
        }
        Ok(())
    }
}

/// The sum of two costs, forbidden where either is.
fn add_costs(a: i64, b: i64) -> i64 {
    let (a, b) = (a.min(FORBIDDEN), b.min(FORBIDDEN));
    // The sum of two finite costs may pass the threshold, which the check of totals in `build` cannot see. It counts as
    // forbidden: such a sum is a quintillion.
    (a + b).min(FORBIDDEN)
}

/// A pool that stores equal tables once.
#[derive(Clone, Debug, Default)]
struct TablePool {
    cells: Vec<i64>,
    spans: Vec<TableSpan>,
    by_hash: FxHashMap<u64, Vec<u32>>,
}

impl TablePool {
    fn get(&self, table: u32) -> &[i64] {
        let s = self.spans[table as usize];
        &self.cells[s.offset..s.offset + s.len]
    }

    /// The number of the table with these cells, which is added if new.
    fn intern(&mut self, costs: impl Iterator<Item = i64>) -> u32 {
        let offset = self.cells.len();
        let mut hasher = FxHasher::default();
        self.cells.extend(costs.inspect(|&c| hasher.write_i64(c)));
        let len = self.cells.len() - offset;
        let found = self.by_hash.entry(hasher.finish()).or_default();
        let (old, new) = self.cells.split_at(offset);
        for &t in found.iter() {
            let s = self.spans[t as usize];
            if &old[s.offset..s.offset + s.len] == new {
                self.cells.truncate(offset);
                return t;
            }
        }
        let id = self.spans.len() as u32;
        found.push(id);
        self.spans.push(TableSpan { offset, len });
        id
    }

    /// Only the tables in use, renumbered in order of first use.
    fn compact(self, edges: &mut [Edge]) -> (Vec<TableSpan>, Vec<i64>) {
        let mut renumbered = vec![u32::MAX; self.spans.len()];
        let mut spans = Vec::new();
        let mut cells = Vec::new();
        for e in edges {
            let slot = &mut renumbered[e.table as usize];
            if *slot == u32::MAX {
                *slot = spans.len() as u32;
                let old = self.spans[e.table as usize];
                spans.push(TableSpan { offset: cells.len(), len: old.len });
                cells.extend_from_slice(&self.cells[old.offset..old.offset + old.len]);
            }
            e.table = *slot;
        }
        (spans, cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(costs: [&[i64]; 2]) -> (NetworkBuilder, VarId, VarId) {
        let mut b = NetworkBuilder::new();
        let u = b.variable(costs[0], &[], Interval::default()).unwrap();
        let v = b.variable(costs[1], &[], Interval::default()).unwrap();
        (b, u, v)
    }

    #[test]
    fn parallel_edges_add_up_in_either_direction() {
        let (mut b, u, v) = two([&[1, 2], &[0, 0, 0]]);
        b.edge(u, v, &[1, 2, 3, 4, 5, 6]).unwrap();
        b.edge(v, u, &[10, 40, 20, 50, 30, 60]).unwrap();
        let n = b.build().unwrap();
        assert_eq!(n.edges().len(), 1);
        assert_eq!(n.table(n.edges()[0].table), &[11, 22, 33, 44, 55, 66]);
        assert_eq!(n.evaluate(&[1, 2]).unwrap().cost, 68);
    }

    #[test]
    fn equal_tables_are_stored_once() {
        let mut b = NetworkBuilder::new();
        let v: Vec<_> = (0..9).map(|_| b.variable(&[0, 0], &[], Interval::default()).unwrap()).collect();
        for w in v.windows(2) {
            b.edge(w[0], w[1], &[0, 1, 1, 0]).unwrap();
        }
        let n = b.build().unwrap();
        assert_eq!((n.edges().len(), n.tables()), (8, 1));
        assert_eq!(n.neighbours(VarId(4)).iter().map(|x| x.0.0).collect::<Vec<_>>(), [3, 5]);
    }

    #[test]
    fn a_self_edge_adds_its_diagonal() {
        let (mut b, u, _) = two([&[1, 2], &[0]]);
        b.edge(u, u, &[10, 99, 99, 20]).unwrap();
        assert_eq!(b.build().unwrap().unary(u), &[11, 22]);
    }

    #[test]
    fn wrong_input_names_the_place() {
        let (mut b, u, v) = two([&[1, 2], &[0]]);
        let ragged = b.edge(u, v, &[1, 2, 3]).unwrap_err();
        assert_eq!(ragged, NetworkError::RaggedTable { edge: 0, u: 0, v: 1, got: 3, rows: 2, cols: 1 });
        assert!(matches!(b.edge(u, VarId(7), &[]), Err(NetworkError::NoSuchVariable { variable: 7, .. })));
        assert!(matches!(b.edge(u, v, &[0, -1]), Err(NetworkError::NegativePairCost { entry: 1, .. })));
        assert!(matches!(b.usage_limit(-1), Err(NetworkError::NegativeLimit { .. })));
        let none = Interval::default();
        assert!(matches!(b.variable(&[], &[], none), Err(NetworkError::NoChoices { variable: 2 })));
        assert!(matches!(b.variable(&[-4], &[], none), Err(NetworkError::NegativeCost { .. })));
        assert!(matches!(b.variable(&[4], &[-1], none), Err(NetworkError::NegativeUsage { .. })));
        assert!(matches!(b.variable(&[4], &[1, 2], none), Err(NetworkError::UsageCount { .. })));
    }

    #[test]
    fn totals_that_cannot_fit_are_refused() {
        let mut b = NetworkBuilder::new();
        for _ in 0..5 {
            b.variable(&[FORBIDDEN - 1], &[], Interval::default()).unwrap();
        }
        assert_eq!(b.build().unwrap_err(), NetworkError::CostTotal);
        let mut b = NetworkBuilder::new();
        b.variable(&[0], &[i64::MAX], Interval::default()).unwrap();
        assert_eq!(b.build().unwrap_err(), NetworkError::UsageTotal);
    }

    #[test]
    fn usage_counts_on_half_open_intervals() {
        let mut b = NetworkBuilder::new();
        b.variable(&[0], &[5], Interval { lo: 0, hi: 2 }).unwrap();
        b.variable(&[0], &[7], Interval { lo: 2, hi: 4 }).unwrap();
        b.variable(&[0], &[9], Interval { lo: 4, hi: 1 }).unwrap();
        b.variable(&[0], &[1], Interval { lo: 3, hi: 9 }).unwrap();
        b.usage_limit(6).unwrap();
        let e = b.build().unwrap().evaluate(&[0; 4]).unwrap();
        assert_eq!((e.peak_usage, e.overflow, e.feasible()), (8, 2, false));
    }

    #[test]
    fn forbidden_costs_are_counted_and_make_an_assignment_infeasible() {
        let (mut b, u, v) = two([&[1, i64::MAX], &[0, 0]]);
        b.edge(u, v, &[0, FORBIDDEN + 5, 0, FORBIDDEN]).unwrap();
        let n = b.build().unwrap();
        assert!(n.evaluate(&[0, 0]).unwrap().feasible());
        let bad = n.evaluate(&[1, 1]).unwrap();
        assert_eq!((bad.forbidden, bad.cost), (2, 2 * i128::from(FORBIDDEN)));
    }
}
