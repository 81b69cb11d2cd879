//! Prices for memory in the bound.
//!
//! A plan within a memory limit holds at most the limit at every time. So its cost is at least its cost plus, for some times,
//! a price times what it holds beyond the limit, which is negative: Lagrange multipliers. The least such sum over all
//! assignments is a bound for those within the limit, for any prices. Better prices follow from what the last solution
//! holds.
//!
//! Every plan's peak is at least what the network counts ([`crate::memory::network_peak`]), so that is what has a price. Copies
//! count as nothing here.

use crate::{
    context::Context,
    memory::{NetworkCharge, network_charges, slices},
    variable_classes::VariableClasses,
};
use rustc_hash::FxHashMap;
use shardwright_cost::Placement;
use shardwright_graph::TensorId;
use shardwright_machine::Bytes;
use shardwright_space::{Config, Endpoint};
use std::collections::BTreeMap;
use std::ops::Range;

/// The most times that have a price.
const MOST_TIMES: usize = 4;
/// The prices' step shrinks by this factor where the bound has fallen.
const SHRINK: f64 = 0.7;

/// Bytes of a tensor at an endpoint, per config of the class.
pub(super) type SizeId = u32;

/// What holds memory.
#[derive(Clone, Copy, Debug)]
enum Holder {
    /// Whatever is chosen.
    All(i64),
    /// A variable.
    One { variable: u32, size: SizeId },
    /// The smaller of two sizes of two variables, the lower variable first.
    Smaller { variables: [u32; 2], sizes: [SizeId; 2] },
}

/// A tensor at an endpoint of a class.
#[derive(Clone, Debug)]
pub(super) struct WantedSize {
    pub class: u32,
    pub member: u32,
    end: Endpoint,
    bytes: u64,
    times: u64,
}

impl WantedSize {
    /// The bytes that a device holds under a config of the endpoint's op.
    pub fn of(&self, context: &Context<'_>, config: &Config) -> i64 {
        let mesh = context.machine.mesh();
        let layout = self.end.layout(&context.shapes, config, mesh);
        self.in_parts(mesh.group_size(layout.axes_where(|p| matches!(p, Placement::Shard(_)))))
    }

    /// The bytes that a device holds of so many parts.
    pub fn in_parts(&self, parts: u32) -> i64 {
        let held = (self.bytes / u64::from(parts.max(1))).saturating_mul(self.times);
        i64::try_from(held).unwrap_or(i64::MAX)
    }
}

/// All memory that has a price.
#[derive(Debug)]
pub(super) struct HeldMemory {
    limit: i64,
    charges: Vec<(Holder, Range<u32>)>,
    wanted: Vec<WantedSize>,
    /// Sizes that are the smaller of two others.
    smaller: Vec<[SizeId; 2]>,
    /// Per size: bytes under each config of the class.
    pub sizes: Vec<Vec<i64>>,
    steps: usize,
    /// The priced times, with picoseconds per byte.
    prices: Vec<(u32, f64)>,
    step: f64,
    last_bound: i64,
}

/// Memory that depends on one variable: sizes with their prices.
pub(super) type OwnPrices = Vec<(SizeId, f64)>;

/// Memory that depends on two variables: the sizes of the lower and the higher one, with a price.
pub(super) type PairPrices = Vec<([SizeId; 2], f64)>;

/// What the current prices add to the network.
pub(super) struct Priced {
    /// Per variable.
    pub own: Vec<OwnPrices>,
    /// By pair of variables.
    pub pairs: BTreeMap<(u32, u32), PairPrices>,
    /// The same for all assignments: the price of the limit is subtracted here.
    pub constant: i64,
}

impl HeldMemory {
    /// Collects all charges. Sizes follow ([`HeldMemory::wanted`], [`HeldMemory::fill`]).
    pub fn new(context: &Context<'_>, classes: &VariableClasses, limit: Bytes) -> Self {
        let variables = &context.variables;
        let mut wanted: Vec<WantedSize> = Vec::new();
        let mut known: FxHashMap<(u32, u32, u32, bool, u64), SizeId> = FxHashMap::default();
        let mut size = |tensor: TensorId, end: &Endpoint| -> (u32, SizeId) {
            let (variable, member) = variables.index[end.op.index()];
            let class = classes.of[variable as usize];
            let (bytes, times) = (context.graph.tensor(tensor).ty.bytes(), slices(context, tensor));
            let key = (class, member, end.port, end.reduced, bytes.saturating_mul(times));
            let id = *known.entry(key).or_insert_with(|| {
                wanted.push(WantedSize { class, member, end: *end, bytes, times });
                wanted.len() as u32 - 1
            });
            (variable, id)
        };
        let mut charges = Vec::new();
        let mut smaller_inside = Vec::new();
        for (charge, when) in network_charges(context) {
            let holder = match charge {
                NetworkCharge::Copy(_) => continue,
                NetworkCharge::Stored { tensor, at: None } => {
                    let bytes = context.graph.tensor(*tensor).ty.bytes();
                    let all = bytes.saturating_mul(slices(context, *tensor));
                    Holder::All(i64::try_from(all).unwrap_or(i64::MAX))
                }
                NetworkCharge::Stored { tensor, at: Some(at) } => {
                    let (variable, size) = size(*tensor, at);
                    Holder::One { variable, size }
                }
                NetworkCharge::Smaller { tensor, ends: [a, b] } => {
                    let (a, b) = (size(*tensor, a), size(*tensor, b));
                    let (a, b) = (a.min(b), a.max(b));
                    if a.0 == b.0 {
                        smaller_inside.push((a.0, [a.1, b.1], when.clone()));
                        continue;
                    }
                    Holder::Smaller { variables: [a.0, b.0], sizes: [a.1, b.1] }
                }
            };
            charges.push((holder, when.clone()));
        }
        let mut made: FxHashMap<[SizeId; 2], SizeId> = FxHashMap::default();
        let mut smaller: Vec<[SizeId; 2]> = Vec::new();
        for (variable, both, when) in smaller_inside {
            let size = *made.entry(both).or_insert_with(|| {
                smaller.push(both);
                (wanted.len() + smaller.len()) as u32 - 1
            });
            charges.push((Holder::One { variable, size }, when));
        }
        let limit = i64::try_from(limit.0).unwrap_or(i64::MAX);
        let steps = context.graph.ops.len() + 1;
        let (sizes, prices) = (Vec::new(), Vec::new());
        Self { limit, charges, wanted, smaller, sizes, steps, prices, step: 1.0, last_bound: 0 }
    }

    /// Whether memory costs anything.
    pub fn has_prices(&self) -> bool {
        self.prices.iter().any(|(_, price)| *price > 0.0)
    }

    /// The sizes that the charges refer to.
    pub fn wanted(&self) -> &[WantedSize] {
        &self.wanted
    }

    /// Takes these sizes, per config of their classes.
    pub fn fill(&mut self, sizes: Vec<Vec<i64>>) {
        self.sizes = sizes;
        for both in &self.smaller {
            let [a, b] = both.map(|size| &self.sizes[size as usize]);
            let smaller = a.iter().zip(b).map(|(a, b)| *a.min(b)).collect();
            self.sizes.push(smaller);
        }
    }

    /// What the prices add to the network of so many variables.
    pub fn priced(&self, variables: usize) -> Priced {
        let mut priced = Priced { own: vec![Vec::new(); variables], pairs: BTreeMap::new(), constant: 0 };
        let mut constant: f64 = self.prices.iter().map(|(_, price)| -price * self.limit as f64).sum();
        for (holder, when) in &self.charges {
            let alive = self.prices.iter().filter(|(time, _)| when.contains(time));
            let price: f64 = alive.map(|(_, price)| price).sum();
            if price <= 0.0 {
                continue;
            }
            match *holder {
                Holder::All(bytes) => constant += price * bytes as f64,
                Holder::One { variable, size } => priced.own[variable as usize].push((size, price)),
                Holder::Smaller { variables: [u, v], sizes } => {
                    priced.pairs.entry((u, v)).or_default().push((sizes, price));
                }
            }
        }
        // Far more than the sums' rounding errors.
        priced.constant = (constant - constant.abs() * 1e-12 - 1.0).floor() as i64;
        let key = |a: &(SizeId, f64), b: &(SizeId, f64)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1));
        priced.own.iter_mut().for_each(|own| own.sort_unstable_by(key));
        for own in priced.pairs.values_mut() {
            own.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        }
        priced
    }

    /// The bytes held at every time where every variable has this config.
    fn held(&self, config: &[u32]) -> Vec<i64> {
        let mut changes = vec![0i64; self.steps + 1];
        for (holder, when) in &self.charges {
            let of = |variable: u32, size: SizeId| {
                let own = &self.sizes[size as usize];
                own[(config[variable as usize] as usize).min(own.len() - 1)]
            };
            let bytes = match *holder {
                Holder::All(bytes) => bytes,
                Holder::One { variable, size } => of(variable, size),
                Holder::Smaller { variables: [u, v], sizes: [a, b] } => of(u, a).min(of(v, b)),
            };
            changes[(when.start as usize).min(self.steps)] += bytes;
            changes[(when.end as usize).min(self.steps)] -= bytes;
        }
        let mut sum = 0i64;
        let sums = changes.iter().map(|change| {
            sum = sum.saturating_add(*change);
            sum
        });
        sums.collect()
    }

    /// Moves the prices towards those with the best bound, by what the last solution holds (a subgradient step of Polyak's
    /// length). False where nothing has a price and nothing needs one.
    pub fn move_prices(&mut self, config: &[u32], bound: i64, target: i64) -> bool {
        let held = self.held(config);
        let worst = (0..held.len()).max_by_key(|&time| held[time]).unwrap_or(0);
        if held[worst] > self.limit
            && self.prices.len() < MOST_TIMES
            && self.prices.iter().all(|(time, _)| *time as usize != worst)
        {
            self.prices.push((worst as u32, 0.0));
        }
        if self.prices.is_empty() {
            return false;
        }
        if bound < self.last_bound {
            self.step *= SHRINK;
        }
        self.last_bound = bound;
        let beyond: Vec<f64> =
            self.prices.iter().map(|(time, _)| (held[*time as usize] - self.limit) as f64).collect();
        // A price that is zero and should fall stays where it is.
        let moving = || self.prices.iter().zip(&beyond).filter(|((_, price), by)| *price > 0.0 || **by > 0.0);
        let square: f64 = moving().map(|(_, by)| by * by).sum();
        if square > 0.0 {
            let goal = if target == i64::MAX { bound as f64 * 0.1 } else { (target - bound) as f64 };
            let length = self.step * goal.max(bound as f64 * 1e-4) / square;
            for ((_, price), by) in self.prices.iter_mut().zip(&beyond) {
                *price = (*price + length * by).max(0.0);
            }
        }
        true
    }
}
