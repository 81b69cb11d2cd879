//! Prices of stages by layers.
//!
//! Sums over suffixes give every stage a lower bound in constant time per family, and its exact time where the fastest option of
//! every layer fits the memory. Other stages are knapsacks over their layers' options, solved once and kept.

use crate::knapsack::{Choice, Items, Selection};
use crate::lattice::Lattice;
use crate::oracle::{Precision, Query, Quote, Shape, StageOption, StageOracle};
use crate::problem::{LayerOption, LayerProblem};
use crate::reduce::Groups;
use rustc_hash::FxHashMap;
use std::ops::{Add, Sub};

/// Sums over layers for one degree.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Least times.
    seconds: f64,
    /// Least times of synchronising the weights of infinitely many replicas.
    sync_seconds: f64,
    bytes_per_micro_batch: f64,
    fixed_bytes: f64,
    /// Memory of the fastest options.
    fastest_bytes_per_micro_batch: f64,
    fastest_fixed_bytes: f64,
    /// Layers that have no options.
    missing: u32,
    /// Layers where no option is fastest under all circumstances.
    mixed: u32,
}

impl Add for Sums {
    type Output = Sums;
    fn add(self, other: Sums) -> Sums {
        Sums {
            seconds: self.seconds + other.seconds,
            sync_seconds: self.sync_seconds + other.sync_seconds,
            bytes_per_micro_batch: self.bytes_per_micro_batch + other.bytes_per_micro_batch,
            fixed_bytes: self.fixed_bytes + other.fixed_bytes,
            fastest_bytes_per_micro_batch: self.fastest_bytes_per_micro_batch
                + other.fastest_bytes_per_micro_batch,
            fastest_fixed_bytes: self.fastest_fixed_bytes + other.fastest_fixed_bytes,
            missing: self.missing + other.missing,
            mixed: self.mixed + other.mixed,
        }
    }
}

impl Sub for Sums {
    type Output = Sums;
    fn sub(self, other: Sums) -> Sums {
        Sums {
            seconds: self.seconds - other.seconds,
            sync_seconds: self.sync_seconds - other.sync_seconds,
            bytes_per_micro_batch: self.bytes_per_micro_batch - other.bytes_per_micro_batch,
            fixed_bytes: self.fixed_bytes - other.fixed_bytes,
            fastest_bytes_per_micro_batch: self.fastest_bytes_per_micro_batch
                - other.fastest_bytes_per_micro_batch,
            fastest_fixed_bytes: self.fastest_fixed_bytes - other.fastest_fixed_bytes,
            missing: self.missing - other.missing,
            mixed: self.mixed - other.mixed,
        }
    }
}

/// An edge between groups, with the least seconds of receiving and of sending over it, per family.
struct GroupEdge {
    from: u32,
    to: u32,
    receive_seconds: Vec<f64>,
    send_seconds: Vec<f64>,
}

/// Edges that cross a suffix's border: the least seconds of receiving and of sending.
#[derive(Clone, Copy, Debug, Default)]
struct Crossing {
    receive_seconds: f64,
    send_seconds: f64,
}

/// The opened stage on one family's shapes.
#[derive(Clone, Copy, Debug, Default)]
struct OpenFamily {
    sums: Sums,
    /// The least time on one replica: layers and edges.
    one_replica_seconds: f64,
}

/// Prices the stages of a [`LayerProblem`].
pub struct LayerOracle<'p> {
    problem: &'p LayerProblem,
    groups: Groups,
    degrees: Vec<u32>,
    families: Vec<Vec<Shape>>,
    edges: Vec<GroupEdge>,
    /// Edges of the problem by layer.
    incoming: Vec<Vec<(u32, f64)>>,
    outgoing: Vec<Vec<(u32, f64)>>,
    /// Per group and family.
    group_sums: Vec<Sums>,
    device_seconds: Vec<f64>,
    /// Memory per micro-batch and fixed memory of every option, per layer and family.
    memory: Vec<Vec<(f64, f64)>>,
    /// Per suffix and family.
    suffix_sums: Vec<Sums>,
    crossing: Vec<Crossing>,
    /// Rounding errors of sums and differences stay below these.
    seconds_margin: Vec<f64>,
    bytes_margin: f64,
    tail: usize,
    whole: usize,
    /// The edges that cross the border of the tail.
    tail_edges: Vec<u32>,
    open: Vec<OpenFamily>,
    quotes: FxHashMap<(u32, u32, u32, u32), Quote>,
    items: Items,
}

/// More quotes are not kept.
const MOST_QUOTES: usize = 4 << 20;

impl<'p> LayerOracle<'p> {
    /// An oracle for a problem that was checked. `groups` are layers that share a stage.
    pub fn new(problem: &'p LayerProblem, groups: Groups) -> LayerOracle<'p> {
        let mut degrees: Vec<u32> =
            problem.layers.iter().flat_map(|layer| layer.options.keys().copied()).collect();
        degrees.sort_unstable();
        degrees.dedup();
        degrees.retain(|&degree| degree <= problem.devices);
        let replicas = problem.replicas();
        let families = degrees
            .iter()
            .map(|&tensor| {
                let shapes = replicas.iter().map(|&replicas| Shape { tensor, replicas });
                shapes.take_while(|shape| shape.devices() <= problem.devices).collect()
            })
            .collect();
        let layers = problem.layers.len();
        let (mut incoming, mut outgoing) = (vec![Vec::new(); layers], vec![Vec::new(); layers]);
        for edge in &problem.edges {
            incoming[edge.to as usize].push((edge.from, edge.bytes));
            outgoing[edge.from as usize].push((edge.to, edge.bytes));
        }
        let mut oracle = LayerOracle {
            problem,
            groups,
            degrees,
            families,
            edges: Vec::new(),
            incoming,
            outgoing,
            group_sums: Vec::new(),
            device_seconds: Vec::new(),
            memory: Vec::new(),
            suffix_sums: Vec::new(),
            crossing: Vec::new(),
            seconds_margin: Vec::new(),
            bytes_margin: 0.0,
            tail: 0,
            whole: 0,
            tail_edges: Vec::new(),
            open: Vec::new(),
            quotes: FxHashMap::default(),
            items: Items::default(),
        };
        oracle.sum_groups();
        oracle.list_memory();
        oracle.price_edges();
        oracle
    }

    fn options(&self, layer: u32, degree: u32) -> &'p [LayerOption] {
        self.problem.layers[layer as usize].options.get(&degree).map_or(&[], Vec::as_slice)
    }

    fn sum_groups(&mut self) {
        let sync = 4.0 / self.problem.micro_batches as f64 / self.problem.bandwidth;
        for group in 0..self.groups.len() {
            let mut least_device_seconds = f64::INFINITY;
            for &degree in &self.degrees {
                let mut sums = Sums::default();
                for &layer in self.groups.layers(group) {
                    sums = sums + layer_sums(self.options(layer, degree), sync);
                }
                self.group_sums.push(sums);
                if sums.missing == 0 {
                    least_device_seconds = least_device_seconds.min(f64::from(degree) * sums.seconds);
                }
            }
            self.device_seconds.push(if least_device_seconds.is_finite() {
                least_device_seconds
            } else {
                0.0
            });
        }
    }

    fn list_memory(&mut self) {
        for layer in 0..self.problem.layers.len() as u32 {
            for &degree in &self.degrees {
                let options = self.options(layer, degree).iter();
                self.memory
                    .push(options.map(|option| (option.bytes_per_micro_batch, option.fixed_bytes)).collect());
            }
        }
    }

    fn price_edges(&mut self) {
        for edge in &self.problem.edges {
            let (from, to) = (self.groups.of(edge.from), self.groups.of(edge.to));
            if from == to {
                continue;
            }
            let least = |layer: u32, degree: u32, bytes: &dyn Fn(&LayerOption) -> Option<f64>| {
                let more = self.options(layer, degree).iter().map(|option| bytes(option).unwrap_or(0.0));
                let more = more.fold(f64::INFINITY, f64::min);
                2.0 * (edge.bytes + if more.is_finite() { more } else { 0.0 }) / self.problem.bandwidth
            };
            let receive =
                |&degree: &u32| least(edge.to, degree, &|o| o.receive_bytes.get(&edge.from).copied());
            let send = |&degree: &u32| least(edge.from, degree, &|o| o.send_bytes.get(&edge.to).copied());
            self.edges.push(GroupEdge {
                from,
                to,
                receive_seconds: self.degrees.iter().map(receive).collect(),
                send_seconds: self.degrees.iter().map(send).collect(),
            });
        }
    }

    /// Fills `items` with the options of the opened stage's layers, and returns the layers.
    fn fill_items(&mut self, lattice: &Lattice, query: Query) -> Vec<u32> {
        let shape = self.families[query.family][query.shape];
        let mut layers: Vec<u32> = lattice
            .difference(self.whole, self.tail)
            .flat_map(|group| self.groups.layers(group as usize).iter().copied())
            .collect();
        layers.sort_unstable();
        let is_inside = |layer: u32| {
            let group = self.groups.of(layer);
            lattice.contains(self.whole, group) && !lattice.contains(self.tail, group)
        };
        let in_flight = f64::from(query.in_flight);
        self.items.clear();
        for &layer in &layers {
            let (incoming, outgoing) = (&self.incoming[layer as usize], &self.outgoing[layer as usize]);
            let from: Vec<_> = incoming.iter().filter(|(other, _)| !is_inside(*other)).collect();
            let to: Vec<_> = outgoing.iter().filter(|(other, _)| !is_inside(*other)).collect();
            let options =
                self.problem.layers[layer as usize].options.get(&shape.tensor).map_or(&[][..], Vec::as_slice);
            self.items.push(options.iter().enumerate().map(|(index, option)| {
                let more = |bytes: &std::collections::BTreeMap<u32, f64>, other: &u32| {
                    bytes.get(other).copied().unwrap_or(0.0)
                };
                let received: f64 =
                    from.iter().map(|(other, bytes)| bytes + more(&option.receive_bytes, other)).sum();
                let sent: f64 = to.iter().map(|(other, bytes)| bytes + more(&option.send_bytes, other)).sum();
                Choice {
                    seconds: self.problem.option_seconds(option, received + sent, shape.replicas),
                    bytes: option.bytes_per_micro_batch * in_flight + option.fixed_bytes,
                    index: index as u32,
                }
            }));
        }
        layers
    }

    /// The least memory of the opened stage.
    fn least_bytes(&self, lattice: &Lattice, query: Query) -> f64 {
        let in_flight = f64::from(query.in_flight);
        let families = self.families.len();
        let groups = lattice.difference(self.whole, self.tail);
        let layers = groups.flat_map(|group| self.groups.layers(group as usize));
        let least = |&layer: &u32| {
            let memory = &self.memory[layer as usize * families + query.family];
            memory
                .iter()
                .map(|(per_micro_batch, fixed)| per_micro_batch * in_flight + fixed)
                .fold(f64::INFINITY, f64::min)
        };
        layers.map(least).sum()
    }

    fn select(&self, at_most_seconds: f64, tight: bool) -> Selection {
        self.items.select(self.problem.memory_bytes, at_most_seconds, tight)
    }
}

/// The sums of one layer.
fn layer_sums(options: &[LayerOption], sync_seconds_per_byte: f64) -> Sums {
    let least = |of: &dyn Fn(&LayerOption) -> f64| options.iter().map(of).fold(f64::INFINITY, f64::min);
    if options.is_empty() {
        return Sums { missing: 1, ..Sums::default() };
    }
    let (seconds, parameters) = (least(&|o| o.seconds), least(&|o| o.parameter_bytes));
    // An option that is as fast as any other on every shape and across every border.
    let is_never_slower = |option: &&LayerOption| {
        option.seconds <= seconds
            && option.parameter_bytes <= parameters
            && options.iter().all(|other| {
                let covers = |mine: &std::collections::BTreeMap<u32, f64>,
                              theirs: &std::collections::BTreeMap<u32, f64>| {
                    mine.iter().all(|(end, &bytes)| bytes <= theirs.get(end).copied().unwrap_or(0.0))
                };
                covers(&option.receive_bytes, &other.receive_bytes)
                    && covers(&option.send_bytes, &other.send_bytes)
            })
    };
    let fastest = options.iter().find(is_never_slower);
    Sums {
        seconds,
        sync_seconds: parameters * sync_seconds_per_byte,
        bytes_per_micro_batch: least(&|o| o.bytes_per_micro_batch),
        fixed_bytes: least(&|o| o.fixed_bytes),
        fastest_bytes_per_micro_batch: fastest.map_or(0.0, |option| option.bytes_per_micro_batch),
        fastest_fixed_bytes: fastest.map_or(0.0, |option| option.fixed_bytes),
        missing: 0,
        mixed: u32::from(fastest.is_none()),
    }
}

impl StageOracle for LayerOracle<'_> {
    fn families(&self) -> &[Vec<Shape>] {
        &self.families
    }

    fn device_seconds(&self, group: usize) -> f64 {
        self.device_seconds[group]
    }

    fn enter(&mut self, lattice: &Lattice) {
        let families = self.families.len();
        self.quotes.clear();
        self.suffix_sums = vec![Sums::default(); families];
        self.crossing = vec![Crossing::default(); families];
        let mut incoming: Vec<Vec<u32>> = vec![Vec::new(); self.groups.len()];
        let mut outgoing: Vec<Vec<u32>> = vec![Vec::new(); self.groups.len()];
        for (index, edge) in self.edges.iter().enumerate() {
            incoming[edge.to as usize].push(index as u32);
            outgoing[edge.from as usize].push(index as u32);
        }
        for suffix in 1..lattice.len() {
            let (smaller, group) = lattice.origin(suffix);
            let group = group as usize;
            for family in 0..families {
                let sums = self.suffix_sums[smaller * families + family]
                    + self.group_sums[group * families + family];
                self.suffix_sums.push(sums);
                let mut crossing = self.crossing[smaller * families + family];
                for &edge in &incoming[group] {
                    crossing.receive_seconds += self.edges[edge as usize].receive_seconds[family];
                    crossing.send_seconds += self.edges[edge as usize].send_seconds[family];
                }
                for &edge in &outgoing[group] {
                    crossing.receive_seconds -= self.edges[edge as usize].receive_seconds[family];
                    crossing.send_seconds -= self.edges[edge as usize].send_seconds[family];
                }
                self.crossing.push(crossing);
            }
        }
        let full = &self.suffix_sums[lattice.full() * families..];
        self.seconds_margin = (0..families)
            .map(|family| {
                let edges =
                    self.edges.iter().map(|edge| edge.receive_seconds[family] + edge.send_seconds[family]);
                1e-13 * (full[family].seconds + full[family].sync_seconds + edges.sum::<f64>())
            })
            .collect();
        let most = f64::from(self.problem.devices);
        let bytes = full.iter().map(|sums| {
            let per_micro_batch = sums.bytes_per_micro_batch + sums.fastest_bytes_per_micro_batch;
            per_micro_batch * most + sums.fixed_bytes + sums.fastest_fixed_bytes
        });
        self.bytes_margin = 1e-13 * bytes.fold(0.0, f64::max);
        self.open = vec![OpenFamily::default(); families];
    }

    fn open_tail(&mut self, lattice: &Lattice, tail: usize) {
        self.tail = tail;
        self.tail_edges.clear();
        let crosses =
            |edge: &GroupEdge| lattice.contains(tail, edge.to) && !lattice.contains(tail, edge.from);
        self.tail_edges
            .extend((0..self.edges.len() as u32).filter(|&edge| crosses(&self.edges[edge as usize])));
    }

    fn open(&mut self, lattice: &Lattice, whole: usize) {
        self.whole = whole;
        let families = self.families.len();
        for family in 0..families {
            let (whole_at, tail_at) = (whole * families + family, self.tail * families + family);
            let sums = self.suffix_sums[whole_at] - self.suffix_sums[tail_at];
            let mut edge_seconds =
                self.crossing[whole_at].receive_seconds + self.crossing[tail_at].send_seconds;
            for &edge in &self.tail_edges {
                let edge = &self.edges[edge as usize];
                // Edges from before the stage to behind it pass it by.
                if !lattice.contains(whole, edge.from) {
                    edge_seconds -= edge.receive_seconds[family] + edge.send_seconds[family];
                }
            }
            self.open[family] = OpenFamily { sums, one_replica_seconds: sums.seconds + edge_seconds };
        }
    }

    fn first_shape(&self, family: usize, at_most_seconds: f64) -> usize {
        let shapes = &self.families[family];
        let OpenFamily { sums, one_replica_seconds } = self.open[family];
        if sums.missing > 0 {
            return shapes.len();
        }
        let one = one_replica_seconds - self.seconds_margin[family];
        let sync = (sums.sync_seconds - self.seconds_margin[family]).max(0.0);
        if one <= at_most_seconds {
            return 0;
        }
        // (one - sync) / d + sync falls with d only if one replica takes longer than the synchronisation of many.
        if one <= sync || at_most_seconds <= sync {
            return shapes.len();
        }
        let least = (one - sync) / (at_most_seconds - sync) * (1.0 - 1e-11);
        shapes.partition_point(|shape| f64::from(shape.replicas) < least)
    }

    fn quote(
        &mut self,
        lattice: &Lattice,
        query: Query,
        at_most_seconds: f64,
        precision: Precision,
    ) -> Quote {
        let OpenFamily { sums, one_replica_seconds } = self.open[query.family];
        if sums.missing > 0 {
            return Quote::NONE;
        }
        let d = f64::from(self.families[query.family][query.shape].replicas);
        let in_flight = f64::from(query.in_flight);
        let margin = self.seconds_margin[query.family];
        let seconds = one_replica_seconds / d + sums.sync_seconds * (d - 1.0) / d;
        let lower_bound_seconds = (seconds - margin).max(0.0);
        if lower_bound_seconds > at_most_seconds {
            return Quote { lower_bound_seconds, seconds: f64::INFINITY };
        }
        let limit = self.problem.memory_bytes;
        if sums.bytes_per_micro_batch * in_flight + sums.fixed_bytes - self.bytes_margin > limit {
            return Quote::NONE;
        }
        let fastest_bytes = sums.fastest_bytes_per_micro_batch * in_flight + sums.fastest_fixed_bytes;
        if sums.mixed == 0 && fastest_bytes + self.bytes_margin <= limit && margin <= 1e-10 * seconds {
            return Quote { lower_bound_seconds: seconds, seconds };
        }
        let shape = (query.family as u32) << 16 | query.shape as u32;
        let key = (self.tail as u32, self.whole as u32, shape, query.in_flight);
        let tight = precision == Precision::Least;
        if let Some(&known) = self.quotes.get(&key) {
            let is_tight = known.seconds <= known.lower_bound_seconds * (1.0 + 1e-11);
            if known.lower_bound_seconds > at_most_seconds
                || is_tight
                || (!tight && known.seconds <= at_most_seconds)
            {
                return known;
            }
        }
        if self.least_bytes(lattice, query) - self.bytes_margin > limit {
            self.quotes.insert(key, Quote::NONE);
            return Quote::NONE;
        }
        self.fill_items(lattice, query);
        let selection = self.select(at_most_seconds, tight);
        let quote = Quote { lower_bound_seconds: selection.lower_bound_seconds, seconds: selection.seconds };
        if self.quotes.len() >= MOST_QUOTES {
            self.quotes.clear();
        }
        self.quotes.insert(key, quote);
        quote
    }

    fn option(&mut self, lattice: &Lattice, query: Query) -> Option<StageOption> {
        let layers = self.fill_items(lattice, query);
        let selection = self.select(f64::INFINITY, true);
        if selection.chosen.len() != layers.len() || selection.seconds.is_infinite() {
            return None;
        }
        let tensor = self.families[query.family][query.shape].tensor;
        let memory_bytes = layers
            .iter()
            .zip(&selection.chosen)
            .map(|(&layer, &index)| {
                let option = &self.options(layer, tensor)[index as usize];
                option.bytes_per_micro_batch * f64::from(query.in_flight) + option.fixed_bytes
            })
            .sum();
        Some(StageOption { seconds: selection.seconds, memory_bytes, layers, options: selection.chosen })
    }
}
