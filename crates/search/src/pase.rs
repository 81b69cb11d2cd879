//! PaSE's dynamic program (Elango, IPDPS 2021): a min-degree order, then tables over dependent sets.
//!
//! `GenerateSeq` repeatedly removes the vertex with the fewest neighbours and connects these to each other. Let `v_i` be
//! the i-th vertex and `D(i)` its neighbours at its removal (the *dependent set*). For every combination `φ` of choices
//! over `D(i)` the recurrence (equation 4) computes
//!
//! ```text
//! R(i, φ) = min over C of  cost(v_i, C) + Σ edges from v_i to later vertices + Σ R(j, φ' on D(j))
//! ```
//!
//! where `j` runs over the connected subsets below `v_i`. Each has exactly one table whose earliest remaining vertex is
//! `v_i`, which identifies them here. The sum of `R` over the last vertices is the optimum, and backtracking through the
//! tables gives the choices.
//!
//! The differences from the released program concern only speed. In every table the vertex to be minimised over is
//! contiguous, and long tables are divided among threads. As in the paper, the search ignores memory limits. Table
//! sizes follow from the order alone, so a network whose tables would exceed [`Control::memory_bytes`] is refused at
//! once.

use crate::control::Control;
use crate::minsum::{self, INFINITE};
use crate::network::Network;
use crate::outcome::{Outcome, Recorder, Solver, StopReason};
use crate::pairwise::{Pairwise, finish_relaxed, transpose};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The solver; see the [module](self).
#[derive(Clone, Copy, Debug, Default)]
pub struct Pase;

impl Solver for Pase {
    fn name(&self) -> &'static str {
        "pase"
    }

    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome {
        let recorder = Recorder::new(control);
        match minimise(&Pairwise::of(network), control) {
            Ok((optimum, choice)) => {
                finish_relaxed(network, recorder, optimum, &choice, "dependent-set tables")
            }
            Err(reason) => recorder.finish(reason),
        }
    }
}

/// The optimum (without memory) and its choices.
pub(crate) fn minimise(costs: &Pairwise, control: &Control<'_>) -> Result<(i64, Vec<u32>), StopReason> {
    let sequence = generate_sequence(costs, control)?;
    Program::new(costs, &sequence).run(&sequence, control)
}

/// Number of additions of [`minimise`]; `None` if its tables do not fit the memory.
pub(crate) fn work(costs: &Pairwise, control: &Control<'_>) -> Option<f64> {
    let steps = generate_sequence(costs, control).ok()?;
    let cells =
        |step: &SequenceVertex| step.dependent.iter().map(|&u| costs.choices(u) as f64).product::<f64>();
    Some(steps.iter().map(|step| cells(step) * costs.choices(step.vertex) as f64).sum())
}

/// One vertex of the sequence and its dependent set, sorted by removal, last first.
pub(crate) struct SequenceVertex {
    pub vertex: u32,
    pub dependent: Vec<u32>,
}

/// `GenerateSeq`: vertices in min-degree order, ties to the lowest number. Refuses if the tables do not fit the memory.
pub(crate) fn generate_sequence(
    costs: &Pairwise,
    control: &Control<'_>,
) -> Result<Vec<SequenceVertex>, StopReason> {
    let count = costs.unary.len();
    let mut neighbours: Vec<Vec<u32>> = vec![Vec::new(); count];
    for pair in &costs.pairs {
        neighbours[pair.u as usize].push(pair.v);
        neighbours[pair.v as usize].push(pair.u);
    }
    for list in &mut neighbours {
        list.sort_unstable();
        list.dedup();
    }
    let mut queue: BTreeSet<(usize, u32)> = (0..count).map(|v| (neighbours[v].len(), v as u32)).collect();
    let mut steps = Vec::with_capacity(count);
    // The given tables and their transposes.
    let mut bytes = 2.0 * costs.table_bytes() as f64;
    while let Some((_, vertex)) = queue.pop_first() {
        let dependent = std::mem::take(&mut neighbours[vertex as usize]);
        let cells: f64 = dependent.iter().map(|&u| costs.choices(u) as f64).product();
        bytes += cells * 8.0;
        if bytes > control.memory_bytes as f64 {
            return Err(StopReason::Refused(format!(
                "the tables of pase take more than the {} MiB of memory allowed: they do not fit from node {vertex} on, \
                 whose dependent set has {} nodes and {cells:.1e} combinations; use exact, or allow more memory (--ram)",
                control.memory_bytes >> 20,
                dependent.len(),
            )));
        }
        for &u in &dependent {
            let list = &mut neighbours[u as usize];
            queue.remove(&(list.len(), u));
            *list = union_without(list, &dependent, [u, vertex]);
            queue.insert((list.len(), u));
        }
        steps.push(SequenceVertex { vertex, dependent });
    }
    // In tables the vertex that is removed last comes first, so that the next one to be removed is contiguous.
    let mut position = vec![0u32; count];
    for (index, step) in steps.iter().enumerate() {
        position[step.vertex as usize] = index as u32;
    }
    for step in &mut steps {
        step.dependent.sort_unstable_by_key(|&u| std::cmp::Reverse(position[u as usize]));
    }
    Ok(steps)
}

/// The union of two ascending lists, without two of its members.
fn union_without(a: &[u32], b: &[u32], without: [u32; 2]) -> Vec<u32> {
    let mut out = Vec::with_capacity(a.len() + b.len());
    let (mut i, mut j) = (0, 0);
    loop {
        let next = match (a.get(i), b.get(j)) {
            (Some(&x), Some(&y)) => x.min(y),
            (Some(&x), None) | (None, Some(&x)) => x,
            (None, None) => return out,
        };
        i += usize::from(a.get(i) == Some(&next));
        j += usize::from(b.get(j) == Some(&next));
        if !without.contains(&next) {
            out.push(next);
        }
    }
}

/// A table that depends on the vertex to be minimised over, which is the last of its scope.
pub(crate) struct Factor {
    /// The scope without the vertex itself, in the order of its dependent set.
    pub scope: Vec<u32>,
    pub cells: Arc<[i64]>,
    /// The index of the vertex whose minimisation made it; `None` for a pair's own table.
    pub made_by: Option<usize>,
}

/// The dynamic program: the tables to be combined at each vertex.
pub(crate) struct Program<'p> {
    costs: &'p Pairwise,
    pub waiting: Vec<Vec<Factor>>,
}

impl<'p> Program<'p> {
    pub fn new(costs: &'p Pairwise, sequence: &[SequenceVertex]) -> Self {
        let mut position = vec![0; costs.unary.len()];
        for (index, step) in sequence.iter().enumerate() {
            position[step.vertex as usize] = index;
        }
        let mut waiting: Vec<Vec<Factor>> = (0..costs.unary.len()).map(|_| Vec::new()).collect();
        // Edges that share a table and need it transposed share the transposed one too.
        let mut transposed: rustc_hash::FxHashMap<*const i64, Arc<[i64]>> = rustc_hash::FxHashMap::default();
        for pair in &costs.pairs {
            let (first, later, cells) = if position[pair.v as usize] < position[pair.u as usize] {
                (pair.v, pair.u, pair.cells.clone())
            } else {
                let transposed = transposed.entry(pair.cells.as_ptr());
                let turn = || transpose(&pair.cells, costs.choices(pair.v)).into();
                (pair.u, pair.v, transposed.or_insert_with(turn).clone())
            };
            waiting[first as usize].push(Factor { scope: vec![later], cells, made_by: None });
        }
        Program { costs, waiting }
    }

    fn run(
        mut self,
        sequence: &[SequenceVertex],
        control: &Control<'_>,
    ) -> Result<(i64, Vec<u32>), StopReason> {
        let optimum = self.eliminate(sequence, control)?;
        Ok((optimum, self.choices(sequence)))
    }

    /// Fills all tables and returns the optimum.
    pub fn eliminate(
        &mut self,
        sequence: &[SequenceVertex],
        control: &Control<'_>,
    ) -> Result<i64, StopReason> {
        let mut optimum = 0;
        for (at, step) in sequence.iter().enumerate() {
            if let Some(reason) = control.stop(0) {
                return Err(reason);
            }
            let table = self.least_over(step, control)?;
            match step.dependent.split_last() {
                None => optimum = minsum::add(optimum, table[0]),
                Some((&next, scope)) => {
                    let (scope, cells) = (scope.to_vec(), table.into());
                    self.waiting[next as usize].push(Factor { scope, cells, made_by: Some(at) });
                }
            }
        }
        Ok(optimum)
    }

    /// `R(i, φ)` for all `φ` over the dependent set.
    fn least_over(&self, step: &SequenceVertex, control: &Control<'_>) -> Result<Vec<i64>, StopReason> {
        let mut costs = Bucket::new(self, step);
        costs.merge_small();
        let size = costs.prefixes * costs.columns;
        let mut table = vec![INFINITE; size];
        // Starting threads takes about as long as this many sums.
        const WORTH_A_THREAD: usize = 1 << 20;
        let worth = (size * costs.width / WORTH_A_THREAD).min(costs.prefixes);
        // Finding the number of cores takes system calls, so it is done only if several threads are worth it.
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let useful = match control.threads {
            _ if worth <= 1 => 1,
            0 => worth.min(available()),
            threads => worth.min(threads),
        };
        if useful == 1 {
            costs.fill(0, &mut table, control)?;
            return Ok(table);
        }
        let share = costs.prefixes.div_ceil(useful);
        std::thread::scope(|scope| {
            let costs = &costs;
            let workers: Vec<_> = table
                .chunks_mut(share * costs.columns)
                .enumerate()
                .map(|(index, part)| scope.spawn(move || costs.fill(index * share, part, control)))
                .collect();
            // A worker panics only because of a bug; this thread then panics too.
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        Ok(table)
    }

    /// Backtracks through the tables: each vertex takes its best choice given the later ones.
    fn choices(&self, sequence: &[SequenceVertex]) -> Vec<u32> {
        let mut choice = vec![0u32; self.costs.unary.len()];
        for step in sequence.iter().rev() {
            let mut row = self.costs.unary[step.vertex as usize].clone();
            for factor in &self.waiting[step.vertex as usize] {
                let index = factor
                    .scope
                    .iter()
                    .fold(0, |index, &u| index * self.costs.choices(u) + choice[u as usize] as usize);
                let width = row.len();
                minsum::add_row(&mut row, &factor.cells[index * width..][..width]);
            }
            let best = row.iter().enumerate().min_by_key(|&(index, &cost)| (cost, index));
            choice[step.vertex as usize] = best.map_or(0, |(index, _)| index as u32);
        }
        choice
    }
}

/// The tables that are minimised over one vertex. The last vertex of the dependent set, which is removed next, indexes
/// the *columns* of the result; the others together are its *prefix*.
struct Bucket<'p> {
    unary: &'p [i64],
    /// Number of choices of the vertex.
    width: usize,
    columns: usize,
    prefixes: usize,
    /// Number of choices of each member of the prefix.
    sizes: Vec<usize>,
    /// Tables that do not depend on the column: one row for each prefix.
    rows: Vec<StridedTable>,
    /// Tables that depend on the column: a block of rows for each prefix, one row per column.
    blocks: Vec<StridedTable>,
}

/// A table and its strides along the prefix (zero for members that it does not depend on).
struct StridedTable {
    cells: Arc<[i64]>,
    strides: Vec<usize>,
}

impl StridedTable {
    fn offset(&self, digits: &[usize]) -> usize {
        self.strides.iter().zip(digits).map(|(stride, digit)| stride * digit).sum()
    }

    fn covers(&self, other: &StridedTable) -> bool {
        other.strides.iter().zip(&self.strides).all(|(&theirs, &ours)| theirs == 0 || ours > 0)
    }
}

impl<'p> Bucket<'p> {
    fn new(program: &'p Program<'_>, step: &SequenceVertex) -> Self {
        let unary = &program.costs.unary[step.vertex as usize][..];
        let choices = |u: u32| program.costs.choices(u);
        let (prefix, columns) = match step.dependent.split_last() {
            Some((&last, prefix)) => (prefix, choices(last)),
            None => (&[][..], 1),
        };
        let last = step.dependent.last().copied();
        let sizes: Vec<usize> = prefix.iter().map(|&u| choices(u)).collect();
        let (mut rows, mut blocks) = (Vec::new(), Vec::new());
        for factor in &program.waiting[step.vertex as usize] {
            let mut strides = vec![0; prefix.len()];
            let mut stride = unary.len();
            for &u in factor.scope.iter().rev() {
                if let Some(place) = prefix.iter().position(|&member| member == u) {
                    strides[place] = stride;
                }
                stride *= choices(u);
            }
            let part = StridedTable { cells: factor.cells.clone(), strides };
            let has_column = last.is_some() && factor.scope.last().copied() == last;
            if has_column { blocks.push(part) } else { rows.push(part) }
        }
        let prefixes = sizes.iter().product();
        Bucket { unary, width: unary.len(), columns, prefixes, sizes, rows, blocks }
    }

    /// Adds blocks into larger ones that cover them, if these are still small compared to the whole. This saves the
    /// addition for every prefix.
    fn merge_small(&mut self) {
        let whole = self.prefixes * self.columns * self.width;
        self.blocks.sort_by_key(|block| block.cells.len());
        let mut index = 0;
        while index < self.blocks.len() {
            let small = &self.blocks[index];
            let host = (index + 1..self.blocks.len())
                .find(|&host| self.blocks[host].covers(small) && self.blocks[host].cells.len() * 2 <= whole);
            let Some(host) = host else {
                index += 1;
                continue;
            };
            let small = self.blocks.remove(index);
            let host = &mut self.blocks[host - 1];
            let block = self.columns * self.width;
            let mut cells = host.cells.to_vec();
            for (place, target) in cells.chunks_exact_mut(block).enumerate() {
                // The host's strides give the digits of this block.
                let offset: usize = (0..self.sizes.len())
                    .filter(|&member| small.strides[member] > 0)
                    .map(|member| {
                        small.strides[member] * (place * block / host.strides[member] % self.sizes[member])
                    })
                    .sum();
                minsum::add_row(target, &small.cells[offset..offset + block]);
            }
            host.cells = cells.into();
        }
    }

    /// Fills a part of the result that starts at a prefix.
    fn fill(&self, first: usize, out: &mut [i64], control: &Control<'_>) -> Result<(), StopReason> {
        const CELLS_BETWEEN_LOOKS: usize = 1 << 22;
        let block = self.columns * self.width;
        let between = (CELLS_BETWEEN_LOOKS / block.max(1)).max(1);
        let mut digits = vec![0; self.sizes.len()];
        let mut row = vec![0; self.width];
        let mut sum = vec![0; if self.blocks.len() > 1 { block } else { 0 }];
        for (index, target) in out.chunks_exact_mut(self.columns).enumerate() {
            if index % between == between - 1
                && let Some(reason) = control.stop(0)
            {
                return Err(reason);
            }
            let mut rest = first + index;
            for (digit, &size) in digits.iter_mut().zip(&self.sizes).rev() {
                *digit = rest % size;
                rest /= size;
            }
            row.copy_from_slice(self.unary);
            for part in &self.rows {
                minsum::add_row(&mut row, &part.cells[part.offset(&digits)..][..self.width]);
            }
            let slice = |part: &'_ StridedTable| part.offset(&digits)..part.offset(&digits) + block;
            match &self.blocks[..] {
                [] => minsum::mins(&row, self.width, target),
                [only] => minsum::min_sums(&row, &only.cells[slice(only)], target),
                [one, more @ ..] => {
                    sum.copy_from_slice(&one.cells[slice(one)]);
                    for part in more {
                        minsum::add_row(&mut sum, &part.cells[slice(part)]);
                    }
                    minsum::min_sums(&row, &sum, target);
                }
            }
        }
        Ok(())
    }
}
