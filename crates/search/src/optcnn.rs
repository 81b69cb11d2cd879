//! OptCNN's graph search (Jia et al., ICML 2018, algorithm 1): eliminate nodes and edges, enumerate the rest.
//!
//! *Node elimination* removes a node `j` with exactly two neighbours `i` and `k` and adds an edge between those. For every
//! pair of their choices the edge costs as much as the best choice of `j` (equation 2). *Edge elimination* adds parallel
//! edges (equation 3). Both are repeated until neither applies. Then all strategies of the remaining nodes, the *kernel*,
//! are enumerated. Finally the eliminations are undone in reverse, and each node takes the choice of its minimum.
//! Series-parallel graphs reduce to two nodes. The paper requires one edge into `j` and one out of it. Costs have no
//! direction, so here any node with two neighbours is eliminated.
//!
//! Graphs that are not series-parallel leave larger kernels. If a kernel has more than [`OptCnn::most_strategies`]
//! strategies, two additions to the paper apply. First, nodes with a single neighbour are eliminated too (equation 2
//! without `k`), which may allow more eliminations. A kernel that is still too large is solved by PaSE's tables
//! ([`crate::pase`]). The result is therefore always exact, or the solver refuses because those tables do not fit the
//! memory. The search ignores the network's memory limits, as in the paper.

use crate::control::Control;
use crate::minsum::{self, INFINITE};
use crate::network::Network;
use crate::outcome::{Outcome, Recorder, Solver, StopReason};
use crate::pairwise::{Pair, Pairwise, finish_relaxed, transpose};
use crate::pase;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The solver; see the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct OptCnn {
    /// Kernels with more strategies than this are not enumerated.
    pub most_strategies: u64,
}

impl Default for OptCnn {
    fn default() -> Self {
        OptCnn { most_strategies: 1 << 20 }
    }
}

impl Solver for OptCnn {
    fn name(&self) -> &'static str {
        "optcnn"
    }

    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome {
        let recorder = Recorder::new(control);
        match minimise(Pairwise::of(network), self.most_strategies, control) {
            Ok((optimum, choice)) => finish_relaxed(network, recorder, optimum, &choice, "elimination"),
            Err(reason) => recorder.finish(reason),
        }
    }
}

fn minimise(
    costs: Pairwise,
    most_strategies: u64,
    control: &Control<'_>,
) -> Result<(i64, Vec<u32>), StopReason> {
    let mut graph = Graph::new(costs);
    let few = |graph: &Graph| graph.strategies().is_some_and(|count| count <= most_strategies);
    graph.eliminate(2, control)?;
    if !few(&graph) {
        graph.eliminate(1, control)?;
    }
    let (optimum, kernel) =
        if few(&graph) { graph.enumerate(control)? } else { graph.solve_by_tables(control)? };
    let mut choice = vec![0; graph.unary.len()];
    for (node, best) in kernel {
        choice[node as usize] = best;
    }
    graph.undo(&mut choice);
    Ok((optimum, choice))
}

/// An eliminated node with the tables that recover its choice.
struct EliminatedNode {
    node: u32,
    /// For each neighbour at the time (one or two), a table with its choices as rows and the node's as
    /// columns; the node's own costs are already in the first.
    tables: Vec<(u32, Arc<[i64]>)>,
}

/// The graph as it shrinks.
struct Graph {
    unary: Vec<Vec<i64>>,
    /// Tables by neighbour; each edge is stored at its lower end, whose choices are the rows.
    tables: Vec<BTreeMap<u32, Arc<[i64]>>>,
    neighbours: Vec<BTreeSet<u32>>,
    alive: BTreeSet<u32>,
    undo: Vec<EliminatedNode>,
    /// Bytes of all tables, including those of eliminated nodes.
    held: u64,
}

impl Graph {
    fn new(costs: Pairwise) -> Self {
        let count = costs.unary.len();
        let held = costs.table_bytes();
        let mut graph = Graph {
            unary: costs.unary,
            tables: vec![BTreeMap::new(); count],
            neighbours: vec![BTreeSet::new(); count],
            alive: (0..count as u32).collect(),
            undo: Vec::new(),
            held,
        };
        for Pair { u, v, cells } in costs.pairs {
            graph.tables[u as usize].insert(v, cells);
            graph.neighbours[u as usize].insert(v);
            graph.neighbours[v as usize].insert(u);
        }
        graph
    }

    fn choices(&self, node: u32) -> usize {
        self.unary[node as usize].len()
    }

    /// Removes the edge between two nodes and returns its table with `row`'s choices as rows.
    fn take_edge(&mut self, row: u32, column: u32) -> Arc<[i64]> {
        self.neighbours[row as usize].remove(&column);
        self.neighbours[column as usize].remove(&row);
        let cells =
            self.tables[row.min(column) as usize].remove(&row.max(column)).expect("neighbours have a table");
        if row < column { cells } else { transpose(&cells, self.choices(row)).into() }
    }

    /// Adds an edge; a parallel edge is added to it: edge elimination (equation 3).
    fn add_edge(&mut self, row: u32, column: u32, mut cells: Vec<i64>) {
        let (low, high) = (row.min(column), row.max(column));
        if row > column {
            cells = transpose(&cells, self.choices(column));
        }
        if let Some(parallel) = self.tables[low as usize].get(&high) {
            minsum::add_row(&mut cells, parallel);
        }
        self.tables[low as usize].insert(high, cells.into());
        self.neighbours[low as usize].insert(high);
        self.neighbours[high as usize].insert(low);
    }

    /// Eliminates nodes with two neighbours, and with `fewest` = 1 also those with one, until there are none. The lowest
    /// number comes first.
    fn eliminate(&mut self, fewest: usize, control: &Control<'_>) -> Result<(), StopReason> {
        let mut queue = self.alive.clone();
        while let Some(node) = queue.pop_first() {
            let ends: Vec<u32> = self.neighbours[node as usize].iter().copied().take(3).collect();
            if !(fewest..=2).contains(&ends.len()) {
                continue;
            }
            if let Some(reason) = control.stop(0) {
                return Err(reason);
            }
            self.make_room(node, &ends, control)?;
            match ends[..] {
                [i] => self.fold_leaf(node, i),
                [i, k] => self.eliminate_between(node, i, k),
                _ => {}
            }
            self.alive.remove(&node);
            queue.extend(ends);
        }
        Ok(())
    }

    /// Counts the tables that eliminating a node creates, or refuses if they exceed the memory.
    fn make_room(&mut self, node: u32, ends: &[u32], control: &Control<'_>) -> Result<(), StopReason> {
        let choices = |node: u32| self.choices(node) as u64;
        let with_ends: u64 = ends.iter().map(|&end| choices(node) * choices(end)).sum();
        let between: u64 = if ends.len() == 2 { choices(ends[0]) * choices(ends[1]) } else { 0 };
        self.held += 8 * (with_ends + between);
        if self.held <= control.memory_bytes {
            return Ok(());
        }
        Err(StopReason::Refused(format!(
            "the tables of optcnn's eliminations take more than the {} MiB of memory allowed; use exact, or allow more \
             memory (--ram)",
            control.memory_bytes >> 20
        )))
    }

    /// Node elimination (equation 2).
    fn eliminate_between(&mut self, node: u32, i: u32, k: u32) {
        let first = self.with_unary(node, i);
        let second = self.take_edge(k, node);
        let mut between = vec![INFINITE; self.choices(i) * self.choices(k)];
        for (row, out) in
            first.chunks_exact(self.choices(node)).zip(between.chunks_exact_mut(self.choices(k)))
        {
            minsum::min_sums(row, &second, out);
        }
        self.add_edge(i, k, between);
        self.undo.push(EliminatedNode { node, tables: vec![(i, first), (k, second)] });
    }

    /// Equation 2 for a node with one neighbour: its best cost goes into the neighbour's own.
    fn fold_leaf(&mut self, node: u32, i: u32) {
        let table = self.with_unary(node, i);
        let mut least = vec![INFINITE; self.choices(i)];
        minsum::mins(&table, self.choices(node), &mut least);
        minsum::add_row(&mut self.unary[i as usize], &least);
        self.undo.push(EliminatedNode { node, tables: vec![(i, table)] });
    }

    /// Takes the edge from `i` to a node and adds the node's own costs to every row.
    fn with_unary(&mut self, node: u32, i: u32) -> Arc<[i64]> {
        let mut table = self.take_edge(i, node).to_vec();
        for row in table.chunks_exact_mut(self.choices(node)) {
            minsum::add_row(row, &self.unary[node as usize]);
        }
        table.into()
    }

    /// Number of strategies of the kernel, if it fits 64 bits.
    fn strategies(&self) -> Option<u64> {
        self.alive.iter().try_fold(1u64, |count, &node| {
            // A node without neighbours is minimised by itself.
            let alone = self.neighbours[node as usize].is_empty();
            count.checked_mul(if alone { 1 } else { self.choices(node) as u64 })
        })
    }

    /// Tries every strategy of the kernel. Returns the least cost and each kernel node's choice.
    fn enumerate(&self, control: &Control<'_>) -> Result<(i64, Vec<(u32, u32)>), StopReason> {
        let (alone, joined): (Vec<u32>, Vec<u32>) =
            self.alive.iter().partition(|&&node| self.neighbours[node as usize].is_empty());
        let mut optimum = 0;
        let mut kernel = Vec::new();
        for node in alone {
            let unary = &self.unary[node as usize];
            let (best, cost) = minsum::argmin_sum(unary, &vec![0; unary.len()]);
            optimum = minsum::add(optimum, cost);
            kernel.push((node, best as u32));
        }
        // Partial sums by depth. The last node changes fastest.
        let mut digits = vec![0usize; joined.len()];
        let mut best = (INFINITE, digits.clone());
        let mut sums = vec![0i64; joined.len() + 1];
        let mut changed = 0;
        for tried in 0u64.. {
            if tried % 65536 == 65535
                && let Some(reason) = control.stop(0)
            {
                return Err(reason);
            }
            for depth in changed..joined.len() {
                let node = joined[depth];
                let mut cost = minsum::add(sums[depth], self.unary[node as usize][digits[depth]]);
                for (before, &other) in joined[..depth].iter().enumerate() {
                    // Kernel nodes are ascending, so the earlier one holds the table.
                    if let Some(table) = self.tables[other as usize].get(&node) {
                        cost = minsum::add(cost, table[digits[before] * self.choices(node) + digits[depth]]);
                    }
                }
                sums[depth + 1] = cost;
            }
            if sums[joined.len()] < best.0 {
                best = (sums[joined.len()], digits.clone());
            }
            let Some(depth) =
                (0..joined.len()).rfind(|&depth| digits[depth] + 1 < self.choices(joined[depth]))
            else {
                break;
            };
            digits[depth] += 1;
            digits[depth + 1..].fill(0);
            changed = depth;
        }
        kernel.extend(joined.iter().zip(&best.1).map(|(&node, &digit)| (node, digit as u32)));
        Ok((minsum::add(optimum, if joined.is_empty() { 0 } else { best.0 }), kernel))
    }

    /// The fallback for large kernels: PaSE's tables.
    fn solve_by_tables(&self, control: &Control<'_>) -> Result<(i64, Vec<(u32, u32)>), StopReason> {
        let nodes: Vec<u32> = self.alive.iter().copied().collect();
        let mut number = vec![0; self.unary.len()];
        for (index, &node) in nodes.iter().enumerate() {
            number[node as usize] = index as u32;
        }
        let kernel = Pairwise {
            unary: nodes.iter().map(|&node| self.unary[node as usize].clone()).collect(),
            pairs: nodes
                .iter()
                .flat_map(|&u| self.tables[u as usize].iter().map(move |(&v, cells)| (u, v, cells.clone())))
                .map(|(u, v, cells)| Pair { u: number[u as usize], v: number[v as usize], cells })
                .collect(),
        };
        let (optimum, choice) = pase::minimise(&kernel, control).map_err(|reason| match reason {
            StopReason::Refused(why) => StopReason::Refused(format!(
                "optcnn's eliminations leave a kernel of {} nodes, too many to enumerate, and {why}",
                nodes.len()
            )),
            other => other,
        })?;
        Ok((optimum, nodes.into_iter().zip(choice).collect()))
    }

    /// Undoes the eliminations in reverse order, so that every node's neighbours have their choices.
    fn undo(&self, choice: &mut [u32]) {
        for step in self.undo.iter().rev() {
            let width = self.choices(step.node);
            let row = |(end, table): &(u32, Arc<[i64]>)| -> Vec<i64> {
                table[choice[*end as usize] as usize * width..][..width].to_vec()
            };
            let first = row(&step.tables[0]);
            let second = step.tables.get(1).map_or_else(|| vec![0; width], row);
            choice[step.node as usize] = minsum::argmin_sum(&first, &second).0 as u32;
        }
    }
}
