//! Price and memory of sets of recomputed ops, where every variable has one config: what local search asks thousands of times.

use super::{
    charges::{KeepCharge, KeepCharges, Span, other_charges},
    costs::{FetchCase, FetchCases},
    space::{KeepSpace, Moment},
};
use crate::{
    error::PlanError,
    memory::{NetworkCharge, local_bytes},
    search_problem::SearchProblem,
    transfer_times::TransferTimes,
};
use rustc_hash::FxHashMap;
use shardwright_cost::Layout;
use shardwright_graph::{OpId, TensorId};
use shardwright_search::is_forbidden;
use shardwright_space::{Endpoint, Transfer};
use std::collections::BTreeMap;

/// The price of a set of recomputed ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepPrice {
    /// Picoseconds of the step.
    pub time: i64,
    /// Bytes that the network counts.
    pub peak: u64,
    /// Bytes above the limit, added up over all moments.
    pub excess: u128,
}

/// Prices sets of recomputed ops.
pub struct KeepPricer<'p, 'a> {
    problem: &'p SearchProblem<'a>,
    space: &'p KeepSpace,
    charges: KeepCharges<'p, 'a>,
    /// Time that no state changes.
    fixed: i64,
    /// Per op of the space: the time of its clone.
    again: Vec<i64>,
    /// Times of transfers: positions of producer and reader, and the time by their states.
    fetches: Vec<(Option<usize>, Option<usize>, [i64; 4])>,
    /// Bytes that no state changes.
    held: BTreeMap<Span, i64>,
    sizes: FxHashMap<(TensorId, Endpoint), u64>,
}

impl<'p, 'a> KeepPricer<'p, 'a> {
    /// The first choice of every variable of a problem is its config. None where a transfer has no pairwise price.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn new(problem: &'p SearchProblem<'a>, space: &'p KeepSpace) -> Result<Option<Self>, PlanError> {
        let context = &*problem.context;
        let graph = context.graph;
        let Some(FetchCases { plain, cases }) = FetchCases::of(context, space) else { return Ok(None) };
        let times = context.times_on_slowest(context.mesh())?;
        let transfer_times = TransferTimes::new(graph, &context.resharder);
        let config = |op: OpId| {
            let (variable, member) = context.variables.index[op.index()];
            &problem.choices[variable as usize][0].configs[member as usize]
        };
        let layout = |end: &Endpoint| end.layout(&context.shapes, config(end.op), context.mesh());
        let fetch = |transfers: &[Transfer]| -> Result<i64, PlanError> {
            transfers.iter().try_fold(0i64, |sum, Transfer { tensor, from, to }| {
                let time = transfer_times.time(*tensor, &layout(from), &layout(to))?;
                let runs = if is_forbidden(time) { 1 } else { i64::from(graph.runs(to.op)) };
                Ok(sum.saturating_add(time.saturating_mul(runs)))
            })
        };
        let own = |op: OpId| {
            let time = times.compute(op, config(op)) + times.exchange(&context.resharder, op, config(op));
            i64::from(graph.runs(op)) * time
        };
        let mut pricer = Self {
            problem,
            space,
            charges: KeepCharges::new(context, space),
            fixed: graph.op_ids().map(own).sum::<i64>().saturating_add(fetch(&plain)?),
            again: space.ops.iter().map(|keep| own(keep.op)).collect(),
            fetches: Vec::new(),
            held: BTreeMap::new(),
            sizes: FxHashMap::default(),
        };
        for case in cases {
            let mut times = [0; 4];
            for (time, transfers) in times.iter_mut().zip(&case.transfers) {
                *time = fetch(transfers)?;
            }
            if times == [times[0]; 4] {
                pricer.fixed = pricer.fixed.saturating_add(times[0]);
            } else {
                pricer.fetches.push((case.producer, case.reader, times));
            }
        }
        let whole = Layout::replicated(context.mesh().len());
        for (charge, span) in other_charges(context, space) {
            let bytes = match charge {
                NetworkCharge::Stored { tensor, at } => {
                    local_bytes(context, tensor, &at.map_or(whole, |at| layout(&at)))
                }
                NetworkCharge::Smaller { tensor, ends } => {
                    ends.iter().map(|end| local_bytes(context, tensor, &layout(end))).min().unwrap_or(0)
                }
                NetworkCharge::Copy(Transfer { tensor, from, to }) => {
                    let to = layout(&to);
                    if layout(&from) == to { 0 } else { local_bytes(context, tensor, &to) }
                }
            };
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            let held = pricer.held.entry(span).or_default();
            *held = held.saturating_add(bytes);
        }
        Ok(Some(pricer))
    }

    /// The time of an op's clone, without its transfers.
    pub fn clone_time(&self, op: OpId) -> i64 {
        self.space.position(op).map_or(0, |at| self.again[at])
    }

    /// The bytes of an op's results on all devices together.
    pub fn result_bytes(&self, op: OpId) -> u64 {
        let graph = self.problem.context.graph;
        graph.node(op).outputs.iter().map(|&tensor| graph.tensor(tensor).ty.bytes()).sum()
    }

    fn size(&mut self, tensor: TensorId, end: &Endpoint) -> u64 {
        let context = &*self.problem.context;
        *self.sizes.entry((tensor, *end)).or_insert_with(|| {
            let (variable, member) = context.variables.index[end.op.index()];
            let config = &self.problem.choices[variable as usize][0].configs[member as usize];
            local_bytes(context, tensor, &end.layout(&context.shapes, config, context.mesh()))
        })
    }

    /// The price of recomputing some ops, and views of them, under a limit of memory.
    pub fn price(&mut self, recomputed: &[OpId], limit: u64) -> KeepPrice {
        let mut chosen = vec![false; self.space.ops.len()];
        for op in self.space.with_views(recomputed) {
            if let Some(at) = self.space.position(op) {
                chosen[at] = true;
            }
        }
        let states = self.space.states(&chosen);
        let again = |at: Option<usize>| at.is_some_and(|at| states[at].is_recomputed());
        let mut time = self.fixed;
        for (at, cost) in self.again.iter().enumerate() {
            time = time.saturating_add(if again(Some(at)) { *cost } else { 0 });
        }
        for &(producer, reader, times) in &self.fetches {
            time = time.saturating_add(times[FetchCase::index(again(producer), again(reader))]);
        }
        // Changes of held bytes at the moments of ops and clones.
        let graph = self.problem.context.graph;
        let mut moments: Vec<Moment> = graph.op_ids().map(Moment::of).collect();
        moments
            .extend(self.space.ops.iter().zip(&states).filter_map(|(own, state)| state.clone_moment(own.op)));
        moments.sort_unstable();
        let index = |moment: Moment| moments.partition_point(|known| *known < moment);
        let mut changes = vec![0i64; moments.len() + 1];
        for (span, &bytes) in &self.held {
            changes[index(span.from)] += bytes;
            changes[index(span.to) + usize::from(span.inclusive)] -= bytes;
        }
        let mut charges: Vec<KeepCharge> = Vec::new();
        for (at, &state) in states.iter().enumerate() {
            self.charges.of(at, state, &mut charges);
        }
        for KeepCharge { tensor, held, span } in charges {
            let bytes = held.ends().iter().map(|end| self.size(tensor, end)).min().unwrap_or(0);
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            changes[index(span.from)] += bytes;
            changes[index(span.to) + usize::from(span.inclusive)] -= bytes;
        }
        let (mut sum, mut peak, mut excess) = (0i64, 0u64, 0u128);
        for change in &changes {
            sum += change;
            let held = u64::try_from(sum).unwrap_or(0);
            peak = peak.max(held);
            excess += u128::from(held.saturating_sub(limit));
        }
        KeepPrice { time, peak, excess }
    }
}
