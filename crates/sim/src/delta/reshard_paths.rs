//! Reshard paths between numbered layouts, looked up in flat tables.
//!
//! Layouts are numbered per tensor shape, in order of appearance. Every pair is computed once. Steps without a duration
//! are left out: their successors depend on their predecessors.

use crate::delta::{NONE, device_classes::DeviceClasses};
use crate::{schedule::Links, tasks::duration};
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, LayoutError, Placement, Reduction, ReshardTensor, Resharder, TensorShape};
use shardwright_machine::AxisSet;
use shardwright_plan::picoseconds;

/// A step of a path, or a halo exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReshardStep {
    pub duration: u64,
    /// The streams that it occupies, as bits of a class.
    pub ports: u64,
    /// The device classes that take part.
    pub members: u64,
    /// The groups of members that act together: see [`ReshardPaths::groups`].
    pub groups: u32,
}

/// The path between two layouts.
#[derive(Clone, Copy, Debug)]
struct ReshardPath {
    seconds: f64,
    first: u32,
    count: u32,
}

/// A layout of a reshard tree.
#[derive(Clone, Copy, Debug)]
pub struct ReshardBranch {
    pub to: u32,
    /// The branch that it starts from; [`NONE`]: the stored layout.
    pub from: u32,
    path: u32,
}

struct ShapeLayouts {
    tensor: ReshardTensor,
    layouts: Vec<Layout>,
    /// Per layout: whether some axis holds partial sums.
    sums: Vec<bool>,
    /// From, to: the path, or [`NONE`] before the first request.
    pairs: Vec<Vec<u32>>,
}

/// All reshard paths between layouts of all shapes.
pub struct ReshardPaths<'a> {
    resharder: &'a Resharder,
    numbers: FxHashMap<TensorShape, u32>,
    shapes: Vec<ShapeLayouts>,
    reshard_paths: Vec<ReshardPath>,
    steps: Vec<ReshardStep>,
    open: Vec<u32>,
    pub device_classes: DeviceClasses,
    /// Streams that every transfer occupies beside its ports: the compute stream, where cores move data.
    compute_bit: u64,
    /// Sets of axes, with the groups of device classes along them.
    groups: Vec<(AxisSet, Vec<u64>)>,
}

impl<'a> ReshardPaths<'a> {
    /// `links` says whether transfers also wait for computation.
    pub fn new(resharder: &'a Resharder, device_classes: DeviceClasses, links: Links) -> Self {
        Self {
            resharder,
            device_classes,
            compute_bit: u64::from(links == Links::Core),
            groups: Vec::new(),
            numbers: FxHashMap::default(),
            shapes: Vec::new(),
            reshard_paths: Vec::new(),
            steps: Vec::new(),
            open: Vec::new(),
        }
    }

    /// Whether each member moves its data separately, on the compute core.
    pub fn is_per_member(&self) -> bool {
        self.compute_bit != 0
    }

    /// The number of a shape.
    pub fn shape(&mut self, shape: TensorShape) -> u32 {
        let next = self.shapes.len() as u32;
        let tensor = self.resharder.tensor(shape);
        let number = *self.numbers.entry(shape).or_insert(next);
        if number == next {
            self.shapes.push(ShapeLayouts {
                tensor,
                layouts: Vec::new(),
                sums: Vec::new(),
                pairs: Vec::new(),
            });
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

    /// Whether some axis of a layout holds partial sums.
    pub fn is_partial_sum(&self, shape: u32, layout: u32) -> bool {
        self.shapes[shape as usize].sums[layout as usize]
    }

    /// The layout with a number.
    pub fn layout_of(&self, shape: u32, number: u32) -> &Layout {
        &self.shapes[shape as usize].layouts[number as usize]
    }

    /// A collective along some axes. Bit 0 of a class's streams is the compute stream, bit 1 + l the port to level l.
    pub fn collective(&mut self, duration: u64, axes: AxisSet, members: u64) -> ReshardStep {
        // A collective without a duration is local: its members do not wait for each other.
        let axes = if duration == 0 { AxisSet::EMPTY } else { axes };
        let ports = u64::from(self.resharder.comm().occupied_levels(axes)) << 1 | self.compute_bit;
        let known = self.groups.iter().position(|(other, _)| *other == axes);
        let groups = known.unwrap_or_else(|| {
            self.groups.push((axes, self.device_classes.groups(axes)));
            self.groups.len() - 1
        });
        ReshardStep { duration, ports, members, groups: groups as u32 }
    }

    /// The groups of device classes that act together in a step.
    pub fn groups(&self, step: ReshardStep) -> &[u64] {
        &self.groups[step.groups as usize].1
    }

    /// The steps of a branch that take time or change the device classes.
    pub fn steps(&self, branch: &ReshardBranch) -> std::ops::Range<usize> {
        let path = &self.reshard_paths[branch.path as usize];
        path.first as usize..(path.first + path.count) as usize
    }

    /// A step.
    pub fn step(&self, step: usize) -> ReshardStep {
        self.steps[step]
    }

    fn path(&mut self, shape: u32, from: u32, to: u32) -> Result<u32, LayoutError> {
        let per = &self.shapes[shape as usize];
        match per.pairs[from as usize].get(to as usize) {
            Some(&path) if path != NONE => Ok(path),
            _ => self.work_out(shape, from, to),
        }
    }

    #[cold]
    fn work_out(&mut self, shape: u32, from: u32, to: u32) -> Result<u32, LayoutError> {
        let per = &self.shapes[shape as usize];
        let (start, goal) = (per.layouts[from as usize], per.layouts[to as usize]);
        let seconds = self.resharder.times(&per.tensor, &start)?.to(&goal)?.0;
        let found = self.resharder.find(&per.tensor, &start, &goal)?;
        let first = self.steps.len() as u32;
        let mut there = self.device_classes.of_layout(&start);
        for step in &found.steps {
            let duration = duration(picoseconds(step.seconds));
            let after = self.device_classes.of_layout(step.after.layout());
            // A step without a duration only matters if it removes the tensor from device classes.
            if duration > 0 || self.device_classes.count() > 1 {
                let step = self.collective(duration, step.axes, there | after);
                self.steps.push(step);
            }
            there = after;
        }
        let path = self.reshard_paths.len() as u32;
        self.reshard_paths.push(ReshardPath { seconds, first, count: self.steps.len() as u32 - first });
        let per = &mut self.shapes[shape as usize];
        let row = &mut per.pairs[from as usize];
        if row.len() <= to as usize {
            row.resize(per.layouts.len(), NONE);
        }
        row[to as usize] = path;
        Ok(path)
    }

    /// Appends the steps from one layout to another.
    pub fn steps_between(
        &mut self,
        shape: u32,
        from: u32,
        to: u32,
        out: &mut Vec<ReshardStep>,
    ) -> Result<(), LayoutError> {
        let path = self.path(shape, from, to)?;
        let ReshardPath { first, count, .. } = self.reshard_paths[path as usize];
        out.extend_from_slice(&self.steps[first as usize..(first + count) as usize]);
        Ok(())
    }

    /// Reshard paths from one layout to several others: the result of [`Resharder::reshard_many`], from the tables.
    pub fn reshard_many(
        &mut self,
        shape: u32,
        stored: u32,
        wanted: &[u32],
        out: &mut Vec<ReshardBranch>,
    ) -> Result<(), LayoutError> {
        out.clear();
        if let [only] = wanted {
            out.push(ReshardBranch { to: *only, from: NONE, path: self.path(shape, stored, *only)? });
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
                let from = if source == NONE { stored } else { out[source as usize].to };
                for (at, &to) in open.iter().enumerate() {
                    let path = self.path(shape, from, to)?;
                    let seconds = self.reshard_paths[path as usize].seconds;
                    if best.is_none_or(|(least, ..)| seconds < least) {
                        best = Some((seconds, source, at, path));
                    }
                }
            }
            let Some((_, from, at, path)) = best else { break };
            out.push(ReshardBranch { to: open.remove(at), from, path });
        }
        self.open = open;
        Ok(())
    }
}
