//! Prices of stages on a chain of layers, range by range.
//!
//! [`RangeCosts`] states the options of a range of layers on a shape. It is asked lazily, and once for all ranges with the same
//! kinds of layers: exchangeable blocks need no index.

use crate::lattice::{Lattice, Order};
use crate::oracle::{Precision, Query, Quote, Shape, StageOption, StageOracle};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// One way to run a range of layers on a shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeOption {
    /// Its time per micro-batch.
    pub seconds: f64,
    /// No way to run the range within this option's memory takes less time. Equal to `seconds` where the option is exact.
    pub lower_bound_seconds: f64,
    /// Memory per micro-batch in flight.
    pub bytes_per_micro_batch: f64,
    /// Memory beside that.
    pub fixed_bytes: f64,
}

impl RangeOption {
    /// The memory with this number of micro-batches in flight.
    pub fn bytes(&self, in_flight: u32) -> f64 {
        self.bytes_per_micro_batch * f64::from(in_flight) + self.fixed_bytes
    }
}

/// Options of ranges of a chain of layers.
pub trait RangeCosts {
    /// The number of layers.
    fn layers(&self) -> usize;

    /// Layers of equal kind are exchangeable: ranges with the same kinds have the same options.
    fn kind(&self, layer: usize) -> u32;

    /// The shapes of stages, in families. Within a family, devices and replicas both rise.
    fn families(&self) -> Vec<Vec<Shape>>;

    /// A lower bound of devices × seconds that a layer adds to any stage. Zero is always valid.
    fn device_seconds(&self, _layer: usize) -> f64 {
        0.0
    }

    /// The options of a range on a shape. An option that needs more time and memory than another may be left out.
    fn options(&mut self, range: Range<usize>, shape: Shape) -> Vec<RangeOption>;
}

/// Prices the stages of a chain.
pub struct ChainOracle<C> {
    costs: C,
    memory_bytes: f64,
    families: Vec<Vec<Shape>>,
    /// The class of every range, by its end and its length.
    classes: Vec<Vec<u32>>,
    options: FxHashMap<(u32, u32), Vec<RangeOption>>,
    tail: usize,
    whole: usize,
}

impl<C: RangeCosts> ChainOracle<C> {
    /// An oracle for chains under a memory limit per device.
    pub fn new(costs: C, memory_bytes: f64) -> ChainOracle<C> {
        let layers = costs.layers();
        let mut known: FxHashMap<(u32, u32), u32> = FxHashMap::default();
        // Ranges that end at a layer, shortest first: one more layer in front of a class is another class.
        let classes = (1..=layers)
            .map(|end| {
                let mut class = u32::MAX;
                let extend = |length: usize| {
                    let next = known.len() as u32;
                    class = *known.entry((class, costs.kind(end - length))).or_insert(next);
                    class
                };
                (1..=end).map(extend).collect()
            })
            .collect();
        let families = costs.families();
        ChainOracle {
            costs,
            memory_bytes,
            families,
            classes,
            options: FxHashMap::default(),
            tail: 0,
            whole: 0,
        }
    }

    /// The order of the chain.
    pub fn order(&self) -> Order {
        let layers = self.costs.layers() as u32;
        Order::new(layers as usize, (1..layers).map(|layer| (layer - 1, layer)))
    }

    /// The number of ranges and shapes that were asked for.
    pub fn asked(&self) -> usize {
        self.options.len()
    }

    fn range(&self) -> Range<usize> {
        let layers = self.costs.layers();
        layers - self.whole..layers - self.tail
    }

    fn stage_options(&mut self, query: Query) -> &[RangeOption] {
        let range = self.range();
        let class = self.classes[range.end - 1][range.len() - 1];
        let shape = self.families[query.family][query.shape];
        let key = (class, (query.family as u32) << 16 | query.shape as u32);
        let costs = &mut self.costs;
        self.options.entry(key).or_insert_with(|| costs.options(range, shape))
    }
}

impl<C: RangeCosts> StageOracle for ChainOracle<C> {
    fn families(&self) -> &[Vec<Shape>] {
        &self.families
    }

    fn device_seconds(&self, group: usize) -> f64 {
        self.costs.device_seconds(group)
    }

    fn enter(&mut self, _: &Lattice) {}

    fn open_tail(&mut self, _: &Lattice, tail: usize) {
        // Suffixes of a chain are numbered by their length.
        self.tail = tail;
    }

    fn open(&mut self, _: &Lattice, whole: usize) {
        self.whole = whole;
    }

    fn first_shape(&self, _: usize, _: f64) -> usize {
        0
    }

    fn quote(&mut self, _: &Lattice, query: Query, _: f64, _: Precision) -> Quote {
        let limit = self.memory_bytes;
        let fitting =
            self.stage_options(query).iter().filter(|option| option.bytes(query.in_flight) <= limit);
        fitting.fold(Quote::NONE, |best, option| Quote {
            lower_bound_seconds: best.lower_bound_seconds.min(option.lower_bound_seconds),
            seconds: best.seconds.min(option.seconds),
        })
    }

    fn option(&mut self, _: &Lattice, query: Query) -> Option<StageOption> {
        let limit = self.memory_bytes;
        let layers = self.range().map(|layer| layer as u32).collect();
        let options = self.stage_options(query).iter().enumerate();
        let fitting = options.filter(|(_, option)| option.bytes(query.in_flight) <= limit);
        let (index, best) = fitting.min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds))?;
        let memory_bytes = best.bytes(query.in_flight);
        Some(StageOption { seconds: best.seconds, memory_bytes, layers, options: vec![index as u32] })
    }
}
