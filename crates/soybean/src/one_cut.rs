//! One cut as a problem of its own: a tiling for every group, a request for every unit, least elements moved.
//!
//! A *request* is SoyBean's aligned form of an op: split along one loop, each side computes its half. What it needs
//! and leaves of each tensor follows from the sharding rule: a dimension that the loop leads is cut, a result without the
//! loop is a partial sum, an operand without it is needed by both sides, a window reaches into the other side. An op
//! repeats itself on both sides only where no loop can be halved.
//!
//! Many answers move equally little, and later cuts are not equally cheap after all of them; the paper does not say
//! which one it takes. Here every tiling has a *rank*, and of equally cheap answers the one of least total rank wins:
//! tensors stay whole rather than being cut, weights above all, and the first dimensions are cut first.

use crate::{
    share::{Share, Tiling, halves},
    step::{Step, Unit},
};
use shardwright_graph::{Block, FactorIndex, OpId, Region, Role, TensorId};
use shardwright_space::OpShapes;
use smallvec::SmallVec;
use std::ops::Range;

/// How many times as much the rank of a weight counts.
const WEIGHT_RANK: u64 = 16;

/// Which loop of its unit a request splits; none: both sides compute everything.
pub(crate) type Request = Option<u32>;

/// What a unit may do, and what that costs under each tiling of the groups that it touches.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub requests: Vec<Request>,
    pub ends: Vec<End>,
}

/// A group that a unit touches.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub group: u32,
    /// Row-major: requests, then the group's tilings.
    pub costs: Vec<u64>,
}

/// One cut.
#[derive(Clone, Debug)]
pub(crate) struct OneCut {
    /// Per group.
    pub tilings: Vec<Vec<Tiling>>,
    /// Per group: the rank of each tiling, which decides between equally cheap answers.
    pub ranks: Vec<Vec<u64>>,
    /// Per unit.
    pub units: Vec<Choice>,
}

/// One answer: positions in the lists of [`OneCut`]. Its cost is in elements, or in what `weigh` gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Elements moved, weighed.
    pub cost: u64,
    /// The total rank of the tilings.
    pub rank: u64,
    /// Per group.
    pub tilings: Vec<u32>,
    /// Per unit.
    pub requests: Vec<u32>,
    /// Whether nothing moves less.
    pub proved: bool,
}

impl Choice {
    /// What a request costs under a tiling of every group.
    pub fn cost(&self, request: usize, tiling: impl Fn(u32) -> u32) -> u64 {
        let cell = |end: &End| {
            let width = end.costs.len() / self.requests.len();
            end.costs[request * width + tiling(end.group) as usize]
        };
        self.ends.iter().map(cell).sum()
    }

    /// The cheapest request, the first of equals, and its cost.
    pub fn cheapest(&self, tiling: impl Fn(u32) -> u32) -> (u32, u64) {
        let costs = (0..self.requests.len()).map(|r| (r as u32, self.cost(r, &tiling)));
        costs.min_by_key(|&(_, cost)| cost).unwrap_or((0, 0))
    }
}

impl OneCut {
    /// What an answer, perhaps to other costs, costs here.
    pub fn cost(&self, answer: &Answer) -> u64 {
        let chosen = self.units.iter().zip(&answer.requests);
        chosen.map(|(unit, &r)| unit.cost(r as usize, |g| answer.tilings[g as usize])).sum()
    }

    /// The answer that goes with a tiling of every group.
    pub fn answer(&self, tilings: Vec<u32>, proved: bool) -> Answer {
        let chosen = self.units.iter().map(|unit| unit.cheapest(|g| tilings[g as usize]));
        let (requests, costs): (Vec<u32>, Vec<u64>) = chosen.unzip();
        let rank = self.ranks.iter().zip(&tilings).map(|(ranks, &t)| ranks[t as usize]).sum();
        Answer { cost: costs.iter().sum(), rank, tilings, requests, proved }
    }
}

/// How far the cuts have come: what the devices that are still together share.
pub(crate) struct Regions {
    /// Per group: the stored region.
    stored: Vec<Block>,
    /// Per op: the part of each loop, from which the ghost regions of operands and results follow.
    parts: Vec<SmallVec<[Range<u64>; 6]>>,
}

impl Regions {
    /// Before the first cut.
    pub fn whole(step: &Step<'_>) -> Self {
        let whole = |t: &TensorId| step.graph.tensor(*t).ty.shape.iter().map(|&size| 0..size).collect();
        let loops = |s: &OpShapes| s.rule.factors.iter().map(|f| 0..f.size).collect();
        Self {
            stored: step.members.iter().map(whole).collect(),
            parts: step.shapes.iter().map(loops).collect(),
        }
    }

    /// The next cut: `forced` may name the only request that a unit has, `weigh` says what it costs to move so many
    /// elements of a tensor.
    pub fn cut(
        &self,
        step: &Step<'_>,
        forced: impl Fn(&Unit) -> Option<Request>,
        weigh: impl Fn(TensorId, u64) -> u64,
    ) -> OneCut {
        let tilings: Vec<Vec<Tiling>> = self.stored.iter().map(tilings).collect();
        let stored: Vec<Vec<Share>> = self
            .stored
            .iter()
            .zip(&tilings)
            .map(|(region, tilings)| tilings.iter().map(|&t| Share::stored(region, t)).collect())
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
            let ends = self.ends(step, unit, &requests, &stored, &weigh);
            Choice { requests, ends }
        };
        let units = step.units.iter().map(choice).collect();
        let weight =
            |t: &TensorId| if step.graph.tensor(*t).role == Role::Parameter { WEIGHT_RANK } else { 1 };
        let ranks = tilings.iter().zip(&step.members).map(|(tilings, t)| {
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

    /// What a unit's requests cost, by group.
    fn ends(
        &self,
        step: &Step<'_>,
        unit: &Unit,
        requests: &[Request],
        stored: &[Vec<Share>],
        weigh: &impl Fn(TensorId, u64) -> u64,
    ) -> Vec<End> {
        let mut ends: Vec<End> = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            // An operand that several ops of the unit want in the same way travels once.
            let mut wanted: SmallVec<[(TensorId, Share); 4]> = SmallVec::new();
            for (member, &op) in unit.ops.iter().enumerate() {
                let node = step.graph.node(op);
                let form = Form::new(step, self, op, request.map(|l| unit.loops[l as usize][member]));
                let mut add = |t: TensorId, cost: &dyn Fn(&Share) -> u64| {
                    // A single number has no volume: what it takes to move it is a delay.
                    if step.graph.tensor(t).ty.shape.elements() == 1 {
                        return;
                    }
                    let group = step.group[t.index()];
                    let shares = &stored[group as usize];
                    let end = match ends.iter().position(|end| end.group == group) {
                        Some(known) => &mut ends[known],
                        None => {
                            ends.push(End { group, costs: vec![0; requests.len() * shares.len()] });
                            let last = ends.len() - 1;
                            &mut ends[last]
                        }
                    };
                    let row = &mut end.costs[at * shares.len()..(at + 1) * shares.len()];
                    for (cell, share) in row.iter_mut().zip(shares) {
                        *cell += weigh(t, cost(share));
                    }
                };
                for (i, &t) in node.inputs.iter().enumerate() {
                    let want = form.input(i);
                    if !wanted.iter().any(|(known, share)| *known == t && *share == want) {
                        add(t, &|stored| stored.to(&want));
                        wanted.push((t, want));
                    }
                }
                for (o, &t) in node.outputs.iter().enumerate() {
                    let made = form.output(o);
                    add(t, &|stored| made.to(stored));
                }
            }
        }
        ends
    }

    /// Narrows everything to the first side, as an answer says; all other groups of devices are alike.
    pub fn narrow(&mut self, step: &Step<'_>, cut: &OneCut, answer: &Answer) {
        for ((region, tilings), &chosen) in self.stored.iter_mut().zip(&cut.tilings).zip(&answer.tilings) {
            if let Tiling::Cut(dim) = tilings[chosen as usize] {
                let [first, _] = halves(region, usize::from(dim));
                *region = first;
            }
        }
        for ((unit, choice), &chosen) in step.units.iter().zip(&cut.units).zip(&answer.requests) {
            let Some(which) = choice.requests[chosen as usize] else { continue };
            for (op, &f) in unit.ops.iter().zip(&unit.loops[which as usize]) {
                let part = &mut self.parts[op.index()][usize::from(f)];
                part.end = part.start + (part.end - part.start) / 2;
            }
        }
    }
}

/// The tilings that a region can have.
fn tilings(region: &Block) -> Vec<Tiling> {
    let even = |r: &Range<u64>| (r.end - r.start).is_multiple_of(2);
    let cuts = region.iter().enumerate().filter(|(_, r)| even(r)).map(|(d, _)| Tiling::Cut(d as u8));
    cuts.chain([Tiling::Replicated]).collect()
}

/// An op's region and its two sides under a request.
pub(crate) struct Form<'a> {
    whole: Region<'a>,
    sides: [Region<'a>; 2],
    split: Option<FactorIndex>,
}

impl<'a> Form<'a> {
    pub fn new(step: &Step<'a>, regions: &Regions, op: OpId, split: Option<FactorIndex>) -> Self {
        let shapes = &step.shapes[op.index()];
        let mut whole = Region::whole(&shapes.rule, &shapes.inputs, &shapes.outputs);
        whole.parts.clone_from(&regions.parts[op.index()]);
        let side = |at: u64| split.map_or_else(|| whole.clone(), |f| whole.clone().split(f, at, 2));
        Self { sides: [side(0), side(1)], whole, split }
    }

    pub fn input(&self, i: usize) -> Share {
        Share::of_op(self.whole.input_block(i), [0, 1].map(|s: usize| self.sides[s].input_block(i)))
    }

    pub fn output(&self, o: usize) -> Share {
        let region = self.whole.output_block(o);
        match self.split {
            Some(f) if !self.whole.rule.outputs[o].has(f) => Share::partial(region),
            _ => Share::of_op(region, [0, 1].map(|s: usize| self.sides[s].output_block(o))),
        }
    }
}
