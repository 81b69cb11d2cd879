//! An assignment of the core with its current cost and load.

use super::core::Core;
use super::model::INF;

/// An assignment with its cost and usage.
#[derive(Clone, Debug)]
pub struct State {
    /// The value of each variable.
    pub x: Vec<u32>,
    /// The usage at each row.
    pub load: Vec<i64>,
    /// The sum of finite costs.
    pub cost: i64,
    /// Number of forbidden costs.
    pub forbidden: i64,
}

impl State {
    /// Evaluates an assignment.
    pub fn new(core: &Core, x: Vec<u32>) -> Self {
        let load = core.load(&x);
        let mut state = State { x, load, cost: core.constant, forbidden: 0 };
        for v in 0..core.variables() {
            let c = core.unary[core.values(v).start + state.x[v as usize] as usize];
            state.pay(c);
        }
        for (k, p) in core.pairs.iter().enumerate() {
            let at = state.x[p.u as usize] as usize * core.size(p.v) + state.x[p.v as usize] as usize;
            let c = core.exact_table(k as u32, p.u)[at];
            state.pay(c);
        }
        state
    }

    fn pay(&mut self, c: i64) {
        if c >= INF {
            self.forbidden += 1;
        } else {
            self.cost += c;
        }
    }

    /// Whether no cost is forbidden and every row fits.
    pub fn feasible(&self, core: &Core) -> bool {
        self.forbidden == 0 && core.overflow(&self.load) <= 0
    }
}

/// The finite cost and the number of forbidden costs of `vars` and their pairs. `x` gives a variable's value, `position`
/// its position in `vars`, if any.
pub fn local_cost(
    core: &Core,
    vars: &[u32],
    x: impl Fn(u32) -> u32,
    position: impl Fn(u32) -> Option<usize>,
) -> (i64, i64) {
    let (mut cost, mut forbidden) = (0i64, 0i64);
    let mut pay = |c: i64| {
        if c >= INF {
            forbidden += 1;
        } else {
            cost += c;
        }
    };
    for (i, &v) in vars.iter().enumerate() {
        let xv = x(v) as usize;
        pay(core.unary[core.values(v).start + xv]);
        for link in core.links(v) {
            // Pairs inside the set are counted at their later end.
            if position(link.to).is_none_or(|j| j < i) {
                let table = core.exact_table(link.pair, v);
                pay(table[xv * core.size(link.to) + x(link.to) as usize]);
            }
        }
    }
    (cost, forbidden)
}
