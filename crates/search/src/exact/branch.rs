//! Branch and bound: proves what the bound at the root cannot.
//!
//! Depth first. A node is a stage; its bound is raised briefly, useless values go, an assignment is
//! tried, and the variable that the bound is least decided about is split into its likeliest value and
//! the rest. Only assignments better than `limit` are looked for.

use super::ascent::Pace;
use super::island::Island;
use super::model::Model;
use super::stage::Stage;

/// Work for looking for an assignment at a node, relative to one pass over it.
const PRIMAL_SHARE: u64 = 20;

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
    pub fn advance(&mut self, work: u64) {
        let mut done = 0;
        while done < work
            && let Some(node) = self.stack.pop()
        {
            if node.bound < self.limit {
                self.nodes += 1;
                done += self.visit(node);
            }
        }
    }

    /// Looks at one node and pushes its children. Returns the work done.
    fn visit(&mut self, node: Node) -> u64 {
        let Node { mut stage, mut bound } = node;
        let mut work = 1000;
        let mut values;
        loop {
            if stage.core.variables() == 0 {
                self.offer(&stage, stage.core.constant, &[]);
                return work;
            }
            work += stage.ascent.advance(&stage.core, u64::MAX, Some(self.limit));
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
                    work += stage.ascent.advance(&stage.core, u64::MAX, Some(self.limit));
                    if stage.core.variables() > 0 {
                        values = stage.ascent.best().certify_values(&stage.core).1;
                        break;
                    }
                }
                Ok(true) => {}
            }
        }
        work += self.look(&stage);
        if bound < self.limit {
            self.split(&stage, bound, &values);
        }
        work
    }

    /// Tries to find an assignment at a node.
    fn look(&mut self, stage: &Stage) -> u64 {
        let cells: usize = stage.core.value_count() + stage.core.slack.len();
        let work = cells as u64 * PRIMAL_SHARE;
        let dual = stage.ascent.best();
        let mut island = Island::new(&stage.core, dual.decode(&stage.core), self.seed ^ self.nodes);
        island.advance(&stage.core, work, &dual.lambda);
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

    fn split(&mut self, stage: &Stage, bound: i64, values: &[i64]) {
        let core = &stage.core;
        let dual = stage.ascent.best();
        let mut pick = (-1.0, 0, 0);
        for v in 0..core.variables() {
            let occupancy = &dual.occupancy[core.values(v)];
            let mut likely = 0;
            for (i, &o) in occupancy.iter().enumerate() {
                if o > occupancy[likely] {
                    likely = i;
                }
            }
            let open = 1.0 - occupancy[likely];
            if open > pick.0 {
                pick = (open, v, likely);
            }
        }
        let (_, v, likely) = pick;
        let bounds = &values[core.values(v)];
        let rest = (0..bounds.len()).filter(|&i| i != likely).map(|i| bounds[i]).min();
        // The likely value goes on top of the stack.
        for (keep_likely, least) in [(false, rest), (true, Some(bounds[likely]))] {
            let Some(least) = least else { continue };
            let bound = bound.max(least);
            if bound >= self.limit {
                continue;
            }
            let keep: Vec<bool> = (0..bounds.len()).map(|i| (i == likely) == keep_likely).collect();
            if let Ok(stage) = stage.restrict(v, &keep, Pace::BRIEF) {
                self.stack.push(Node { stage, bound });
            }
        }
    }
}
