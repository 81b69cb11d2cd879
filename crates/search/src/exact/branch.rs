//! Branch and bound, for proofs that the bound at the root cannot give.
//!
//! The search is depth first, and a node is a subproblem. Visiting a node raises its bound briefly, removes useless
//! values and tries an assignment. Then it splits the least decided variable into its likeliest value and the rest.
//! Only assignments cheaper than `limit` are sought.

use super::ascent::AscentSchedule;
use super::dual::prefix_sums;
use super::island::Island;
use super::model::Model;
use super::search::Stop;
use super::subproblem::Subproblem;

/// Work of the primal search at a node, relative to one pass over it.
const PRIMAL_SHARE: u64 = 20;

/// Branching variables tried at a node.
const CANDIDATES: usize = 6;

struct Node {
    subproblem: Subproblem,
    bound: i64,
}

/// A tree under search.
pub struct Branch {
    stack: Vec<Node>,
    /// Only cheaper assignments are sought.
    pub limit: i64,
    /// The best assignment found: its cost and its labels in the original model.
    pub found: Option<(i64, Vec<u32>)>,
    /// Nodes visited.
    pub nodes: u64,
    seed: u64,
}

impl Branch {
    /// A tree over a model made by [`Model::compact`], with a valid lower bound.
    pub fn new(model: Model, limit: i64, bound: i64, seed: u64) -> Self {
        Branch {
            stack: vec![Node { subproblem: Subproblem::new(model), bound }],
            limit,
            found: None,
            nodes: 0,
            seed,
        }
    }

    /// Whether the tree is exhausted: no assignment costs less than `limit`.
    pub fn done(&self) -> bool {
        self.stack.is_empty()
    }

    /// A lower bound on the cost of every assignment not yet found.
    pub fn bound(&self) -> i64 {
        self.stack.iter().map(|n| n.bound).min().map_or(self.limit, |b| b.min(self.limit))
    }

    /// Visits nodes for about `work` steps.
    pub fn advance(&mut self, work: u64, stop: Stop<'_>) {
        let mut done = 0;
        while done < work
            && !stop()
            && let Some(node) = self.stack.pop()
        {
            if node.bound < self.limit {
                self.nodes += 1;
                done += self.visit(node, stop);
            }
        }
    }

    /// Visits one node and pushes its children. Returns the work done.
    fn visit(&mut self, node: Node, stop: Stop<'_>) -> u64 {
        let Node { mut subproblem, mut bound } = node;
        let mut work = 1000;
        let mut values;
        loop {
            if subproblem.core.variables() == 0 {
                self.offer(&subproblem, subproblem.core.constant, &[]);
                return work;
            }
            work += subproblem.ascent.advance(&subproblem.core, u64::MAX, Some(self.limit), stop);
            let (b, v) = subproblem.ascent.best().certify_values(&subproblem.core);
            bound = bound.max(b);
            values = v;
            if bound >= self.limit {
                return work;
            }
            let size = subproblem.core.value_count();
            match subproblem.narrow(&values, self.limit - 1, 0.0, AscentSchedule::BRIEF) {
                Err(_) => return work,
                Ok(false) => break,
                Ok(true) if subproblem.core.value_count() * 10 > size * 9 => {
                    work += subproblem.ascent.advance(&subproblem.core, u64::MAX, Some(self.limit), stop);
                    if subproblem.core.variables() > 0 {
                        values = subproblem.ascent.best().certify_values(&subproblem.core).1;
                        break;
                    }
                }
                Ok(true) => {}
            }
        }
        work += self.look(&subproblem, stop);
        if bound < self.limit {
            work += self.split(&subproblem, bound, &values, stop);
        }
        work
    }

    /// Searches for an assignment at a node.
    fn look(&mut self, subproblem: &Subproblem, stop: Stop<'_>) -> u64 {
        let cells: usize = subproblem.core.value_count() + subproblem.core.slack.len();
        let work = cells as u64 * PRIMAL_SHARE;
        let dual = subproblem.ascent.best();
        let mut island = Island::new(&subproblem.core, dual.decode(&subproblem.core), self.seed ^ self.nodes);
        island.advance(&subproblem.core, work, &dual.lambda, stop);
        if let Some(best) = &island.best {
            self.offer(subproblem, best.cost, &best.x);
        }
        work
    }

    fn offer(&mut self, subproblem: &Subproblem, cost: i64, x: &[u32]) {
        if cost < self.limit {
            self.limit = cost;
            self.found = Some((cost, subproblem.lift(x)));
        }
    }

    /// Splits a variable into its likeliest value and the rest. Candidates are the least decided variables, weighted
    /// by the price of their usage. The candidate that raises the bounds of both sides most is taken, and its trials
    /// become the children. Returns the work done.
    fn split(&mut self, subproblem: &Subproblem, bound: i64, values: &[i64], stop: Stop<'_>) -> u64 {
        let mut work = 0;
        let mut best: Option<(f64, [Option<Node>; 2])> = None;
        for (v, likely) in candidates(subproblem) {
            let bounds = &values[subproblem.core.values(v)];
            let mut score = 1.0;
            let mut children = [None, None];
            for (child, keep_likely) in children.iter_mut().zip([false, true]) {
                let keep: Vec<bool> = (0..bounds.len()).map(|i| (i == likely) == keep_likely).collect();
                let least = (0..bounds.len()).filter(|&i| keep[i]).map(|i| bounds[i]).min();
                let known = least.map_or(self.limit, |l| l.max(bound));
                *child = self.attempt(subproblem, v, &keep, known, &mut work, stop);
                let reached = child.as_ref().map_or(self.limit, |c| c.bound.min(self.limit));
                score *= (reached - bound) as f64 + 1.0;
            }
            // If one side is closed, the other is the only child: no candidate is better.
            let closed = children.iter().any(Option::is_none);
            if best.as_ref().is_none_or(|b| score > b.0) {
                best = Some((score, children));
            }
            if closed {
                break;
            }
        }
        // The likely value goes on top of the stack.
        self.stack.extend(best.into_iter().flat_map(|b| b.1).flatten());
        work
    }

    /// A child with its bound; `None` if it has no assignment below `limit`.
    fn attempt(
        &self,
        subproblem: &Subproblem,
        v: u32,
        keep: &[bool],
        known: i64,
        work: &mut u64,
        stop: Stop<'_>,
    ) -> Option<Node> {
        if known >= self.limit {
            return None;
        }
        let mut subproblem = subproblem.restrict(v, keep, AscentSchedule::BRIEF).ok()?;
        if subproblem.core.variables() == 0 {
            return Some(Node { subproblem, bound: known });
        }
        *work += subproblem.ascent.advance(&subproblem.core, u64::MAX, Some(self.limit), stop);
        let bound = known.max(subproblem.ascent.best().certify(&subproblem.core));
        (bound < self.limit).then_some(Node { subproblem, bound })
    }
}

/// The best branching variables, each with its likeliest value.
fn candidates(subproblem: &Subproblem) -> Vec<(u32, usize)> {
    let core = &subproblem.core;
    let dual = subproblem.ascent.best();
    let prefix = prefix_sums(&dual.lambda);
    let mut scored: Vec<(f64, u32, usize)> = Vec::new();
    let mut price = Vec::new();
    for v in 0..core.variables() {
        let occupancy = &dual.occupancy[core.values(v)];
        let mut likely = 0;
        for (i, &o) in occupancy.iter().enumerate() {
            if o > occupancy[likely] {
                likely = i;
            }
        }
        price.clear();
        price.resize(occupancy.len(), 0.0);
        for s in core.spans(v) {
            let per_unit = prefix[s.hi as usize] - prefix[s.lo as usize];
            for (p, &u) in price.iter_mut().zip(core.usage(v, s)) {
                *p += per_unit * u as f64;
            }
        }
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for &p in &price {
            low = low.min(p);
            high = high.max(p);
        }
        let open = 1.0 - occupancy[likely] / occupancy.iter().sum::<f64>().max(1e-9);
        scored.push(((open + 0.02) * (high - low + 1.0), v, likely));
    }
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    scored.iter().take(CANDIDATES).map(|s| (s.1, s.2)).collect()
}
