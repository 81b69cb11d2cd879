//! Branch and bound: proves what the bound at the root cannot.
//!
//! Depth first. A node is a stage; its bound is raised briefly, useless values go, an assignment is
//! tried, and the variable that the bound is least decided about is split into its likeliest value and
//! the rest. Only assignments better than `limit` are looked for.

use super::ascent::Pace;
use super::dual::prefix_sums;
use super::island::Island;
use super::model::Model;
use super::search::Stop;
use super::stage::Stage;

/// Work for looking for an assignment at a node, relative to one pass over it.
const PRIMAL_SHARE: u64 = 20;

/// How many variables are tried at a node.
const CANDIDATES: usize = 6;

struct Node {
    stage: Stage,
    bound: i64,
}

/// A tree under search.
pub struct Branch {
    stack: Vec<Node>,
    /// Only assignments that cost less are looked for.
    pub limit: i64,
    /// The best one found and its labels in the model given at the start.
    pub found: Option<(i64, Vec<u32>)>,
    /// Nodes looked at.
    pub nodes: u64,
    seed: u64,
}

impl Branch {
    /// A tree over a model made by [`Model::compact`]; `bound` is known to hold for it.
    pub fn new(model: Model, limit: i64, bound: i64, seed: u64) -> Self {
        Branch { stack: vec![Node { stage: Stage::new(model), bound }], limit, found: None, nodes: 0, seed }
    }

    /// Whether everything was looked at: nothing costs less than `limit`.
    pub fn done(&self) -> bool {
        self.stack.is_empty()
    }

    /// No assignment that is still to be found costs less.
    pub fn bound(&self) -> i64 {
        self.stack.iter().map(|n| n.bound).min().map_or(self.limit, |b| b.min(self.limit))
    }

    /// About `work` steps.
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

    /// Looks at one node and pushes its children. Returns the work done.
    fn visit(&mut self, node: Node, stop: Stop<'_>) -> u64 {
        let Node { mut stage, mut bound } = node;
        let mut work = 1000;
        let mut values;
        loop {
            if stage.core.variables() == 0 {
                self.offer(&stage, stage.core.constant, &[]);
                return work;
            }
            work += stage.ascent.advance(&stage.core, u64::MAX, Some(self.limit), stop);
            let (b, v) = stage.ascent.best().certify_values(&stage.core);
            bound = bound.max(b);
            values = v;
            if bound >= self.limit {
                return work;
            }
            let size = stage.core.value_count();
            match stage.narrow(&values, self.limit - 1, 0.0, Pace::BRIEF) {
                Err(_) => return work,
                Ok(false) => break,
                Ok(true) if stage.core.value_count() * 10 > size * 9 => {
                    work += stage.ascent.advance(&stage.core, u64::MAX, Some(self.limit), stop);
                    if stage.core.variables() > 0 {
                        values = stage.ascent.best().certify_values(&stage.core).1;
                        break;
                    }
                }
                Ok(true) => {}
            }
        }
        work += self.look(&stage, stop);
        if bound < self.limit {
            work += self.split(&stage, bound, &values, stop);
        }
        work
    }

    /// Tries to find an assignment at a node.
    fn look(&mut self, stage: &Stage, stop: Stop<'_>) -> u64 {
        let cells: usize = stage.core.value_count() + stage.core.slack.len();
        let work = cells as u64 * PRIMAL_SHARE;
        let dual = stage.ascent.best();
        let mut island = Island::new(&stage.core, dual.decode(&stage.core), self.seed ^ self.nodes);
        island.advance(&stage.core, work, &dual.lambda, stop);
        if let Some(best) = &island.best {
            self.offer(stage, best.cost, &best.x);
        }
        work
    }

    fn offer(&mut self, stage: &Stage, cost: i64, x: &[u32]) {
        if cost < self.limit {
            self.limit = cost;
            self.found = Some((cost, stage.lift(x)));
        }
    }

    /// Splits a variable into its likeliest value and the rest. Candidates are those that the bound is
    /// least decided about, the more so the more their usage is worth; the one that raises the bounds of
    /// both sides most is taken, and the trials become the children. Returns the work done.
    fn split(&mut self, stage: &Stage, bound: i64, values: &[i64], stop: Stop<'_>) -> u64 {
        let mut work = 0;
        let mut best: Option<(f64, [Option<Node>; 2])> = None;
        for (v, likely) in candidates(stage) {
            let bounds = &values[stage.core.values(v)];
            let mut score = 1.0;
            let mut children = [None, None];
            for (child, keep_likely) in children.iter_mut().zip([false, true]) {
                let keep: Vec<bool> = (0..bounds.len()).map(|i| (i == likely) == keep_likely).collect();
                let least = (0..bounds.len()).filter(|&i| keep[i]).map(|i| bounds[i]).min();
                let known = least.map_or(self.limit, |l| l.max(bound));
                *child = self.attempt(stage, v, &keep, known, &mut work, stop);
                let reached = child.as_ref().map_or(self.limit, |c| c.bound.min(self.limit));
                score *= (reached - bound) as f64 + 1.0;
            }
            // A side that is closed makes the choice: nothing is lost by taking the other one.
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

    /// A child and its bound; none if it holds nothing better than `limit`.
    fn attempt(
        &self,
        stage: &Stage,
        v: u32,
        keep: &[bool],
        known: i64,
        work: &mut u64,
        stop: Stop<'_>,
    ) -> Option<Node> {
        if known >= self.limit {
            return None;
        }
        let mut stage = stage.restrict(v, keep, Pace::BRIEF).ok()?;
        if stage.core.variables() == 0 {
            return Some(Node { stage, bound: known });
        }
        *work += stage.ascent.advance(&stage.core, u64::MAX, Some(self.limit), stop);
        let bound = known.max(stage.ascent.best().certify(&stage.core));
        (bound < self.limit).then_some(Node { stage, bound })
    }
}

/// The variables most worth splitting, each with its likeliest value.
fn candidates(stage: &Stage) -> Vec<(u32, usize)> {
    let core = &stage.core;
    let dual = stage.ascent.best();
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
