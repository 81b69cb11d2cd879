//! Re-layouts by number: how to get from one layout of a tensor to another, looked up in flat tables.
//!
//! Layouts are numbered per shape of tensor, in order of appearance; every pair is worked out once. What takes no time is
//! left out: whoever waits for it waits for what comes before.

use crate::delta::{NONE, lanes::Lanes};
use crate::schedule::Links;
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, LayoutError, Placement, Reduction, Relayouts, Tensor, TensorShape};
use shardwright_machine::AxisSet;
use shardwright_plan::picoseconds;

/// A step of a way, or a fetch of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    pub duration: u64,
    /// The ports that it takes up, as bits of a lane's streams.
    pub ports: u64,
    /// The lanes that take part.
    pub members: u64,
    /// Which of them act together: see [`Ways::groups`].
    pub groups: u32,
}

/// The way between two layouts.
#[derive(Clone, Copy, Debug)]
struct Way {
    seconds: f64,
    first: u32,
    count: u32,
}

/// One of several layouts that a tensor is brought into.
#[derive(Clone, Copy, Debug)]
pub struct Branch {
    pub to: u32,
    /// The branch that it is made from; [`NONE`]: the tensor as it was.
    pub from: u32,
    way: u32,
}

struct PerShape {
    tensor: Tensor,
    layouts: Vec<Layout>,
    /// Per layout: whether some axis holds parts of a sum.
    sums: Vec<bool>,
    /// From, to: the way, or [`NONE`] if nobody has asked yet.
    pairs: Vec<Vec<u32>>,
}

/// All ways between layouts of all shapes.
pub struct Ways<'a> {
    relayouts: &'a Relayouts,
    numbers: FxHashMap<TensorShape, u32>,
    shapes: Vec<PerShape>,
    ways: Vec<Way>,
    hops: Vec<Hop>,
    open: Vec<u32>,
    pub lanes: Lanes,
    /// Streams that every transfer takes up beside its ports: a lane's computing, where nothing overlaps.
    beside: u64,
    /// Sets of axes, and the lanes that act together along them.
    groups: Vec<(AxisSet, Vec<u64>)>,
}

impl<'a> Ways<'a> {
    /// `links`: whether transfers wait for computing, too.
    pub fn new(relayouts: &'a Relayouts, lanes: Lanes, links: Links) -> Self {
        Self {
            relayouts,
            lanes,
            beside: u64::from(links == Links::Core),
            groups: Vec::new(),
            numbers: FxHashMap::default(),
            shapes: Vec::new(),
            ways: Vec::new(),
            hops: Vec::new(),
            open: Vec::new(),
        }
    }

    /// Whether everybody moves data for itself, on the core that computes.
    pub fn each_for_itself(&self) -> bool {
        self.beside != 0
    }

    /// The number of a shape.
    pub fn shape(&mut self, shape: TensorShape) -> u32 {
        let next = self.shapes.len() as u32;
        let tensor = self.relayouts.tensor(shape);
        let number = *self.numbers.entry(shape).or_insert(next);
        if number == next {
            self.shapes.push(PerShape { tensor, layouts: Vec::new(), sums: Vec::new(), pairs: Vec::new() });
        }
        number
    }

    /// The number of a layout of tensors of a shape.
    pub fn layout(&mut self, shape: u32, layout: Layout) -> u32 {
        let shape = &mut self.shapes[shape as usize];
        if let Some(known) = shape.layouts.iter().position(|other| *other == layout) {
            return known as u32;
        }
        let sums = layout.axes_where(|p| p == Placement::Partial(Reduction::Sum));
        shape.layouts.push(layout);
        shape.sums.push(!sums.is_empty());
        shape.pairs.push(Vec::new());
        shape.layouts.len() as u32 - 1
    }

    /// Whether some axis of a layout holds parts of a sum.
    pub fn is_partial_sum(&self, shape: u32, layout: u32) -> bool {
        self.shapes[shape as usize].sums[layout as usize]
    }

    /// The layout of a number.
    pub fn layout_of(&self, shape: u32, number: u32) -> &Layout {
        &self.shapes[shape as usize].layouts[number as usize]
    }

    /// A collective along some axes: bit 0 of a lane's streams is computing, bit 1 + l the port to level l.
    pub fn collective(&mut self, duration: u64, axes: AxisSet, members: u64) -> Hop {
        // What costs nothing is local: nobody waits for others.
        let axes = if duration == 0 { AxisSet::EMPTY } else { axes };
        let ports = u64::from(self.relayouts.comm().mesh().levels_crossed(axes)) << 1 | self.beside;
        let known = self.groups.iter().position(|(other, _)| *other == axes);
        let groups = known.unwrap_or_else(|| {
            self.groups.push((axes, self.lanes.groups(axes)));
            self.groups.len() - 1
        });
        Hop { duration, ports, members, groups: groups as u32 }
    }

    /// The lanes that act together in a hop.
    pub fn groups(&self, hop: Hop) -> &[u64] {
        &self.groups[hop.groups as usize].1
    }

    /// The steps of a branch that matter.
    pub fn hops(&self, branch: &Branch) -> std::ops::Range<usize> {
        let way = &self.ways[branch.way as usize];
        way.first as usize..(way.first + way.count) as usize
    }

    /// A step.
    pub fn hop(&self, hop: usize) -> Hop {
        self.hops[hop]
    }

    fn way(&mut self, shape: u32, from: u32, to: u32) -> Result<u32, LayoutError> {
        let per = &self.shapes[shape as usize];
        match per.pairs[from as usize].get(to as usize) {
            Some(&way) if way != NONE => Ok(way),
            _ => self.work_out(shape, from, to),
        }
    }

    #[cold]
    fn work_out(&mut self, shape: u32, from: u32, to: u32) -> Result<u32, LayoutError> {
        let per = &self.shapes[shape as usize];
        let (start, goal) = (per.layouts[from as usize], per.layouts[to as usize]);
        let seconds = self.relayouts.times(&per.tensor, &start)?.to(&goal)?.0;
        let found = self.relayouts.find(&per.tensor, &start, &goal)?;
        let first = self.hops.len() as u32;
        let mut there = self.lanes.of_layout(&start);
        for step in &found.steps {
            let duration = u64::try_from(picoseconds(step.seconds)).unwrap_or(0);
            let after = self.lanes.of_layout(step.after.layout());
            // What takes no time only matters where it makes lanes forget the tensor.
            if duration > 0 || self.lanes.count() > 1 {
                let hop = self.collective(duration, step.axes, there | after);
                self.hops.push(hop);
            }
            there = after;
        }
        let way = self.ways.len() as u32;
        self.ways.push(Way { seconds, first, count: self.hops.len() as u32 - first });
        let per = &mut self.shapes[shape as usize];
        let row = &mut per.pairs[from as usize];
        if row.len() <= to as usize {
            row.resize(per.layouts.len(), NONE);
        }
        row[to as usize] = way;
        Ok(way)
    }

    /// Ways from one layout to several different others: what [`Relayouts::spread`] finds, from the tables.
    pub fn spread(
        &mut self,
        shape: u32,
        home: u32,
        wanted: &[u32],
        out: &mut Vec<Branch>,
    ) -> Result<(), LayoutError> {
        out.clear();
        if let [only] = wanted {
            out.push(Branch { to: *only, from: NONE, way: self.way(shape, home, *only)? });
            return Ok(());
        }
        let mut open = std::mem::take(&mut self.open);
        open.clear();
        open.extend_from_slice(wanted);
        let layouts = &self.shapes[shape as usize].layouts;
        open.sort_unstable_by(|&a, &b| layouts[a as usize].cmp(&layouts[b as usize]));
        while !open.is_empty() {
            let mut best: Option<(f64, u32, usize, u32)> = None;
            for source in std::iter::once(NONE).chain(0..out.len() as u32) {
                let from = if source == NONE { home } else { out[source as usize].to };
                for (at, &to) in open.iter().enumerate() {
                    let way = self.way(shape, from, to)?;
                    let seconds = self.ways[way as usize].seconds;
                    if best.is_none_or(|(least, ..)| seconds < least) {
                        best = Some((seconds, source, at, way));
                    }
                }
            }
            let Some((_, from, at, way)) = best else { break };
            out.push(Branch { to: open.remove(at), from, way });
        }
        self.open = open;
        Ok(())
    }
}
