//! One cut as an optimisation problem: choose a tiling per group and a request per unit that move the fewest elements.
//!
//! A *request* is SoyBean's aligned form of an op: one loop is split, and each side computes its half. The sharding rule
//! gives the layout of each tensor under a request. A dimension that the loop leads is cut. A result without the loop is
//! a partial sum. An operand without it is needed whole by both sides. A window reaches into the other side. An op is
//! replicated only if none of its loops can be halved.
//!
//! Many solutions move equally few elements, and later cuts are not equally cheap after all of them. The paper does not
//! say which one it takes. Here every tiling has a *rank*, and ties go to the least total rank: tensors stay whole
//! rather than being cut, weights above all, and low dimensions are cut first.

use crate::{
    cut_layout::{CutLayout, Tiling, halves},
    tiling_graph::{TilingGraph, Unit},
};
use shardwright_graph::{Block, FactorIndex, OpId, Region, Role, TensorId};
use shardwright_space::OpShapes;
use smallvec::SmallVec;
use std::ops::Range;

/// The factor by which the rank of a weight's tiling counts more.
const WEIGHT_RANK: u64 = 16;

/// The loop of its unit that a request splits; `None`: both sides compute everything.
pub(crate) type Request = Option<u32>;

/// The requests of a unit, and their costs under each tiling of the groups that the unit touches.
#[derive(Clone, Debug)]
pub(crate) struct UnitChoice {
    /// Never empty.
    pub requests: Vec<Request>,
    pub group_costs: Vec<GroupCosts>,
}

/// The costs of a unit's requests for one group that it touches.
#[derive(Clone, Debug)]
pub(crate) struct GroupCosts {
    pub group: u32,
    /// Row-major: requests, then the group's tilings.
    pub costs: Vec<u64>,
}

/// One cut.
#[derive(Clone, Debug)]
pub(crate) struct OneCut {
    /// Per group: its possible tilings.
    pub tilings: Vec<Vec<Tiling>>,
    /// Per group: the rank of each tiling, which breaks ties.
    pub ranks: Vec<Vec<u64>>,
    /// Per unit: its requests and their costs.
    pub units: Vec<UnitChoice>,
}

/// A solution: indices into the lists of [`OneCut`]. Its cost is in elements, or in the unit of `weigh`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CutSolution {
    /// Elements moved, as weighed.
    pub cost: u64,
    /// The total rank of the tilings.
    pub rank: u64,
    /// Per group: the index of its tiling.
    pub tilings: Vec<u32>,
    /// Per unit: the index of its request.
    pub requests: Vec<u32>,
    /// Whether the solution is proved optimal.
    pub proved: bool,
}

impl UnitChoice {
    /// The cost of a request under a tiling of every group.
    pub fn cost(&self, request: usize, tiling: impl Fn(u32) -> u32) -> u64 {
        let cell = |touched: &GroupCosts| {
            let width = touched.costs.len() / self.requests.len();
            touched.costs[request * width + tiling(touched.group) as usize]
        };
        self.group_costs.iter().map(cell).sum()
    }

    /// The cheapest request and its cost; ties go to the first request.
    pub fn cheapest(&self, tiling: impl Fn(u32) -> u32) -> (u32, u64) {
        debug_assert!(!self.requests.is_empty(), "every unit has a request, if only to be replicated");
        let costs = (0..self.requests.len()).map(|r| (r as u32, self.cost(r, &tiling)));
        costs.min_by_key(|&(_, cost)| cost).unwrap_or((0, 0))
    }
}

impl OneCut {
    /// The cost of a solution under this cut's costs, which may differ from the costs it was found with.
    pub fn cost(&self, solution: &CutSolution) -> u64 {
        let chosen = self.units.iter().zip(&solution.requests);
        chosen.map(|(unit, &r)| unit.cost(r as usize, |g| solution.tilings[g as usize])).sum()
    }

    /// The solution with these tilings and the cheapest requests for them.
    pub fn solution(&self, tilings: Vec<u32>, proved: bool) -> CutSolution {
        let chosen = self.units.iter().map(|unit| unit.cheapest(|g| tilings[g as usize]));
        let (requests, costs): (Vec<u32>, Vec<u64>) = chosen.unzip();
        let rank = self.ranks.iter().zip(&tilings).map(|(ranks, &t)| ranks[t as usize]).sum();
        CutSolution { cost: costs.iter().sum(), rank, tilings, requests, proved }
    }
}

/// The state of the recursion: the part of every tensor and loop that one group of devices has.
pub(crate) struct Regions {
    /// Per group: the stored region.
    stored: Vec<Block>,
    /// Per op: the part of each loop. The regions of operands and results follow from it.
    parts: Vec<SmallVec<[Range<u64>; 6]>>,
}

impl Regions {
    /// The state before the first cut.
    pub fn whole(tiling_graph: &TilingGraph<'_>) -> Self {
        let whole =
            |t: &TensorId| tiling_graph.graph.tensor(*t).ty.shape.iter().map(|&size| 0..size).collect();
        let loops = |s: &OpShapes| s.rule.factors.iter().map(|f| 0..f.size).collect();
        Self {
            stored: tiling_graph.members.iter().map(whole).collect(),
            parts: tiling_graph.shapes.iter().map(loops).collect(),
        }
    }

    /// The next cut. `forced` may fix the request of a unit; `weigh` gives the cost of moving a number of elements of a
    /// tensor.
    pub fn cut(
        &self,
        tiling_graph: &TilingGraph<'_>,
        forced: impl Fn(&Unit) -> Option<Request>,
        weigh: impl Fn(TensorId, u64) -> u64,
    ) -> OneCut {
        let tilings: Vec<Vec<Tiling>> = self.stored.iter().map(tilings).collect();
        let stored: Vec<Vec<CutLayout>> = self
            .stored
            .iter()
            .zip(&tilings)
            .map(|(region, tilings)| tilings.iter().map(|&t| CutLayout::stored(region, t)).collect())
            .collect();
        let choice = |unit: &Unit| {
            let mut requests: Vec<Request> = (0..unit.loops.len())
                .filter(|&l| self.halves_evenly(unit, l))
                .map(|l| Some(l as u32))
                .collect();
            if let Some(only) = forced(unit).filter(|only| requests.contains(only)) {
                requests = vec![only];
            }
            if requests.is_empty() {
                requests.push(None);
            }
            let group_costs = self.group_costs(tiling_graph, unit, &requests, &stored, &weigh);
            UnitChoice { requests, group_costs }
        };
        let units = tiling_graph.units.iter().map(choice).collect();
        let weight = |t: &TensorId| {
            if tiling_graph.graph.tensor(*t).role == Role::Parameter { WEIGHT_RANK } else { 1 }
        };
        let ranks = tilings.iter().zip(&tiling_graph.members).map(|(tilings, t)| {
            let rank = |tiling: &Tiling| match tiling {
                Tiling::Replicated => 0,
                Tiling::Cut(dim) => weight(t) * (1 + u64::from(*dim)),
            };
            tilings.iter().map(rank).collect()
        });
        OneCut { ranks: ranks.collect(), tilings, units }
    }

    fn halves_evenly(&self, unit: &Unit, which: usize) -> bool {
        unit.ops.iter().zip(&unit.loops[which]).all(|(op, &f)| {
            let part = &self.parts[op.index()][usize::from(f)];
            (part.end - part.start).is_multiple_of(2)
        })
    }

    /// The costs of a unit's requests, by group.
    fn group_costs(
        &self,
        tiling_graph: &TilingGraph<'_>,
        unit: &Unit,
        requests: &[Request],
        stored: &[Vec<CutLayout>],
        weigh: &impl Fn(TensorId, u64) -> u64,
    ) -> Vec<GroupCosts> {
        let mut group_costs: Vec<GroupCosts> = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            // An operand that several ops of the unit need in the same layout moves once.
            let mut wanted: SmallVec<[(TensorId, CutLayout); 4]> = SmallVec::new();
            for (member, &op) in unit.ops.iter().enumerate() {
                let node = tiling_graph.graph.node(op);
                let op_regions =
                    OpRegions::new(tiling_graph, self, op, request.map(|l| unit.loops[l as usize][member]));
                let mut add = |t: TensorId, cost: &dyn Fn(&CutLayout) -> u64| {
                    // A single number has latency but no volume.
                    if tiling_graph.graph.tensor(t).ty.shape.elements() == 1 {
                        return;
                    }
                    let group = tiling_graph.group[t.index()];
                    let layouts = &stored[group as usize];
                    let touched = match group_costs.iter().position(|touched| touched.group == group) {
                        Some(known) => &mut group_costs[known],
                        None => {
                            group_costs
                                .push(GroupCosts { group, costs: vec![0; requests.len() * layouts.len()] });
                            let last = group_costs.len() - 1;
                            &mut group_costs[last]
                        }
                    };
                    let row = &mut touched.costs[at * layouts.len()..(at + 1) * layouts.len()];
                    for (cell, share) in row.iter_mut().zip(layouts) {
                        *cell += weigh(t, cost(share));
                    }
                };
                for (i, &t) in node.inputs.iter().enumerate() {
                    let want = op_regions.input(i);
                    if !wanted.iter().any(|(known, share)| *known == t && *share == want) {
                        add(t, &|stored| stored.to(&want));
                        wanted.push((t, want));
                    }
                }
                for (o, &t) in node.outputs.iter().enumerate() {
                    let made = op_regions.output(o);
                    add(t, &|stored| made.to(stored));
                }
            }
        }
        group_costs
    }

    /// Narrows all regions to the first side of a solved cut. The other groups of devices are equal to it.
    pub fn narrow(&mut self, tiling_graph: &TilingGraph<'_>, cut: &OneCut, solution: &CutSolution) {
        for ((region, tilings), &chosen) in self.stored.iter_mut().zip(&cut.tilings).zip(&solution.tilings) {
            if let Tiling::Cut(dim) = tilings[chosen as usize] {
                let [first, _] = halves(region, usize::from(dim));
                *region = first;
            }
        }
        for ((unit, choice), &chosen) in tiling_graph.units.iter().zip(&cut.units).zip(&solution.requests) {
            let Some(which) = choice.requests[chosen as usize] else { continue };
            for (op, &f) in unit.ops.iter().zip(&unit.loops[which as usize]) {
                let part = &mut self.parts[op.index()][usize::from(f)];
                part.end = part.start + (part.end - part.start) / 2;
            }
        }
    }
}

/// The tilings that a region can have: dimensions of even size, or replicated.
fn tilings(region: &Block) -> Vec<Tiling> {
    let even = |r: &Range<u64>| (r.end - r.start).is_multiple_of(2);
    let cuts = region.iter().enumerate().filter(|(_, r)| even(r)).map(|(d, _)| Tiling::Cut(d as u8));
    cuts.chain([Tiling::Replicated]).collect()
}

/// An op's region and its two sides under a request.
pub(crate) struct OpRegions<'a> {
    whole: Region<'a>,
    sides: [Region<'a>; 2],
    split: Option<FactorIndex>,
}

impl<'a> OpRegions<'a> {
    pub fn new(
        tiling_graph: &TilingGraph<'a>,
        regions: &Regions,
        op: OpId,
        split: Option<FactorIndex>,
    ) -> Self {
        let shapes = &tiling_graph.shapes[op.index()];
        let mut whole = Region::whole(&shapes.rule, &shapes.inputs, &shapes.outputs);
        whole.parts.clone_from(&regions.parts[op.index()]);
        let side = |at: u64| split.map_or_else(|| whole.clone(), |f| whole.clone().split(f, at, 2));
        Self { sides: [side(0), side(1)], whole, split }
    }

    pub fn input(&self, i: usize) -> CutLayout {
        CutLayout::of_op(self.whole.input_block(i), [0, 1].map(|s: usize| self.sides[s].input_block(i)))
    }

    pub fn output(&self, o: usize) -> CutLayout {
        let region = self.whole.output_block(o);
        match self.split {
            Some(f) if !self.whole.rule.outputs[o].has(f) => CutLayout::partial(region),
            _ => CutLayout::of_op(region, [0, 1].map(|s: usize| self.sides[s].output_block(o))),
        }
    }
}
