//! Places whole items (layers) on devices: partitions with evenly loaded devices and little communication.
//!
//! This implements the idea of "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware
//! Support" (arXiv 1906.08168). Its abstract says that costs are modelled and the graph is partitioned by heuristics for
//! little communication and good balance; the details here are ours. [`candidates`] computes placements by several
//! heuristics, including plain baselines. Only a simulation can tell which is best.
//!
//! ```
//! use shardwright_place::{Axis, Devices, Flow, Items, Link, candidates, measure};
//!
//! // Two towers of three items that meet at the end.
//! let items: Vec<(Vec<u64>, u64)> = vec![(vec![1000], 1); 7];
//! let flow = |from, to| Flow { from, to, bytes: 10 };
//! let items = Items::new(&items, [flow(0, 2), flow(2, 4), flow(1, 3), flow(3, 5), flow(4, 6), flow(5, 6)]);
//! let link = Link { latency: 5, per_byte: 1.0 };
//! let devices = Devices::new(&[Axis { size: 2, link }], |_| (0, u64::MAX));
//! let all = candidates(&items, &devices, 0.2);
//! let bisection = all.iter().find(|c| c.name == "bisection").unwrap();
//! assert_eq!(measure(&items, &devices, &bisection.place).cut_bytes, 10);
//! ```

mod items;
mod multilevel;
mod orders;
mod refine;
mod schedule;
mod totals;

pub use items::{Axis, Devices, Flow, Items, Link};
pub use refine::refine;
pub use totals::{PlacementQuality, PlacementTotals};

/// A placement and the heuristic that found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the heuristic.
    pub name: String,
    /// Whether it is a plain baseline that the others are compared with.
    pub baseline: bool,
    /// Per item: its device.
    pub place: Vec<u32>,
}

/// Factors on the balance tolerance of `bisection, even` and `bisection, uneven`. Either may win: the simulated step decides.
const EVEN: f64 = 0.25;
const UNEVEN: f64 = 4.0;

/// Placements by all heuristics. `balance` is the relative amount by which a device's work may exceed its share.
pub fn candidates(items: &Items, devices: &Devices, balance: f64) -> Vec<Candidate> {
    let plain = |name: &str, place| Candidate { name: name.into(), baseline: true, place };
    let mut all = vec![
        plain("single", orders::single(items, devices)),
        plain("round-robin", orders::round_robin(items, devices)),
        plain("chunks", orders::chunks(items, devices)),
    ];
    all.extend(searched(items, devices, balance));
    all
}

/// Placements with little communication and good balance.
fn searched(items: &Items, devices: &Devices, balance: f64) -> Vec<Candidate> {
    let earliest = schedule::earliest_finish(items, devices);
    let refined = |name: &str, balance, place| Candidate {
        name: name.into(),
        baseline: false,
        place: refine(items, devices, balance, place),
    };
    let bisected = |name, balance| refined(name, balance, multilevel::bisection(items, devices, balance));
    vec![
        refined("heft, refined", balance, earliest.clone()),
        Candidate { name: "heft".into(), baseline: false, place: earliest },
        refined("linear", balance, orders::linear(items, devices, balance)),
        bisected("bisection", balance),
        bisected("bisection, even", balance * EVEN),
        bisected("bisection, uneven", balance * UNEVEN),
    ]
}

/// Communication and balance of a placement, without simulation.
pub fn measure(items: &Items, devices: &Devices, place: &[u32]) -> PlacementQuality {
    PlacementTotals::new(items, devices, 0.0, place.to_vec()).measure()
}
