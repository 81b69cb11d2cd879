//! Exchanges: who gives which block of a tensor to whom. Every collective is one, or two behind each other.
//!
//! A group of devices holds blocks of one tensor and wants other blocks of it. What each device has to fetch from
//! which other follows from that alone ([`Exchange::between`]): all-gather, reduce-scatter, all-to-all, broadcast,
//! reduce, gather, scatter, send, permute, halo exchange and slices differ only in the blocks.
//!
//! | collective | holds | wants | combined |
//! |---|---|---|---|
//! | all-gather | its block | the whole | |
//! | reduce-scatter | all of a partial sum | its block | yes |
//! | all-to-all | its block of one dimension | its block of another | |
//! | broadcast, scatter | one device: the whole | the whole, its block | |
//! | reduce, gather | a partial sum, its block | one device: the whole | reduce |
//! | send, permute | a block | another's block | |
//! | halo exchange | its block | its block and some rows of the neighbours | |
//!
//! An all-reduce is a reduce-scatter and an all-gather of the tensor seen as one long row, whatever its shape, so
//! that every device adds up its share ([`all_reduce`]); small ones are added up by everybody at once.
//!
//! Partial results are always combined in the order of the group's members: the result does not depend on timing.

use crate::walk::{Combine, Place, Walk};
use shardwright_graph::{Block, DType, Dims, Shape};
use smallvec::{SmallVec, smallvec};

/// What one member of the group has and wants, as blocks of the whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Member {
    /// What it holds before.
    pub holds: Option<Block>,
    /// What it holds afterwards.
    pub wants: Option<Block>,
}

/// A block that a member's result is put together of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Take {
    /// The block of the whole tensor.
    pub block: Block,
    /// The members that it comes from: one, or all whose partial results are combined, in order.
    pub from: SmallVec<[usize; 1]>,
}

/// An exchange within one group.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Element type.
    pub dtype: DType,
    /// How blocks are combined that several members hold parts of; none: they are copied.
    pub combine: Option<Combine>,
    /// What each member has and wants.
    pub members: Vec<Member>,
    /// What each member takes, from whom.
    pub takes: Vec<Vec<Take>>,
}

/// Why there is no such exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// Nobody holds what a member wants.
    #[error("member {member} wants {wanted} elements, of which the group holds {found}")]
    NotHeld {
        /// The member.
        member: usize,
        /// How many elements it wants.
        wanted: u64,
        /// How many were found.
        found: u64,
    },
}

/// Sizes of a block.
pub fn extents(block: &Block) -> Shape {
    block.iter().map(|r| r.end - r.start).collect()
}

fn volume(block: &Block) -> u64 {
    block.iter().map(|r| r.end.saturating_sub(r.start)).product()
}

fn intersection(a: &Block, b: &Block) -> Option<Block> {
    let common = a.iter().zip(b).map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
    let common: Block = common.collect();
    common.iter().all(|r| r.start < r.end).then_some(common)
}

fn contains(outer: &Block, inner: &Block) -> bool {
    outer.iter().zip(inner).all(|(o, i)| o.start <= i.start && i.end <= o.end)
}

impl Exchange {
    /// The exchange after which every member holds what it wants.
    ///
    /// Where several members hold the same block, a member takes its own, or else the one that is nearest.
    pub fn between(
        dtype: DType,
        combine: Option<Combine>,
        members: Vec<Member>,
    ) -> Result<Self, ExchangeError> {
        let takes = (0..members.len())
            .map(|at| match &members[at].wants {
                None => Ok(Vec::new()),
                Some(wants) if combine.is_some() => combined(&members, at, wants),
                Some(wants) => copied(&members, at, wants),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { dtype, combine, members, takes })
    }

    /// An exchange whose takes are known; each must cover what its member wants.
    pub fn new(
        dtype: DType,
        combine: Option<Combine>,
        members: Vec<Member>,
        takes: Vec<Vec<Take>>,
    ) -> Result<Self, ExchangeError> {
        for (at, (member, takes)) in members.iter().zip(&takes).enumerate() {
            let wanted = member.wants.as_ref().map_or(0, volume);
            let held = |take: &Take| {
                let inside = |&m: &usize| members[m].holds.as_ref().is_some_and(|h| contains(h, &take.block));
                take.from.iter().all(inside)
            };
            let found = takes.iter().filter(|take| held(take)).map(|take| volume(&take.block)).sum();
            if found != wanted {
                return Err(ExchangeError::NotHeld { member: at, wanted, found });
            }
        }
        Ok(Self { dtype, combine, members, takes })
    }

    /// The block that `from` gives to `to`: never more than one.
    pub fn given(&self, from: usize, to: usize) -> Option<&Block> {
        self.takes[to].iter().find(|take| take.from.contains(&from)).map(|take| &take.block)
    }

    /// Bytes that go from one member to others.
    pub fn traffic(&self) -> u64 {
        let of_take = |to: usize, take: &Take| {
            volume(&take.block) * take.from.iter().filter(|&&from| from != to).count() as u64
        };
        let elements: u64 = self
            .takes
            .iter()
            .enumerate()
            .flat_map(|(to, takes)| takes.iter().map(move |t| of_take(to, t)))
            .sum();
        elements * self.dtype.bytes()
    }
}

fn combined(members: &[Member], at: usize, wants: &Block) -> Result<Vec<Take>, ExchangeError> {
    let holds = |m: &Member| m.holds.as_ref().is_some_and(|h| contains(h, wants));
    let from: SmallVec<[usize; 1]> = (0..members.len()).filter(|&m| holds(&members[m])).collect();
    let holders = members.iter().filter(|m| m.holds.is_some()).count();
    // Leaving out somebody's part would be a wrong sum.
    if from.len() != holders || holders == 0 {
        return Err(ExchangeError::NotHeld { member: at, wanted: volume(wants), found: 0 });
    }
    Ok(vec![Take { block: wants.clone(), from }])
}

fn copied(members: &[Member], at: usize, wants: &Block) -> Result<Vec<Take>, ExchangeError> {
    // Members in order of distance, oneself first.
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_key(|&m| (m.abs_diff(at), m));
    let mut takes: Vec<Take> = Vec::new();
    let mut found = 0;
    for from in order {
        let Some(block) = members[from].holds.as_ref().and_then(|held| intersection(held, wants)) else {
            continue;
        };
        if takes.iter().any(|take| contains(&take.block, &block)) {
            continue;
        }
        found += volume(&block);
        takes.push(Take { block, from: smallvec![from] });
    }
    if found != volume(wants) {
        return Err(ExchangeError::NotHeld { member: at, wanted: volume(wants), found });
    }
    Ok(takes)
}

/// Tensors of fewer bytes are combined by every member on its own: one exchange instead of two.
const DIRECT_BYTES: u64 = 16 << 10;

/// The exchanges of an all-reduce of `elements` among `members`, one after the other.
pub fn all_reduce(
    dtype: DType,
    combine: Combine,
    elements: u64,
    members: usize,
) -> Result<Vec<Exchange>, ExchangeError> {
    let whole: Block = smallvec![0..elements];
    let all = Some(whole);
    if elements * dtype.bytes() <= DIRECT_BYTES || members <= 2 {
        let member = Member { holds: all.clone(), wants: all };
        return Ok(vec![Exchange::between(dtype, Some(combine), vec![member; members])?]);
    }
    // Shares in whole cache lines, so that no two devices write one.
    let line = 64 / dtype.bytes();
    let share = elements.div_ceil(line).div_ceil(members as u64) * line;
    let shares: Vec<Option<Block>> = (0..members as u64)
        .map(|m| (m * share).min(elements)..((m + 1) * share).min(elements))
        .map(|range| (!range.is_empty()).then(|| smallvec![range]))
        .collect();
    let scatter = shares.iter().map(|share| Member { holds: all.clone(), wants: share.clone() });
    let gather = shares.iter().map(|share| Member { holds: share.clone(), wants: all.clone() });
    Ok(vec![
        Exchange::between(dtype, Some(combine), scatter.collect())?,
        Exchange::between(dtype, None, gather.collect())?,
    ])
}

/// How one take is carried out on memory.
#[derive(Clone, Debug)]
pub struct Assembly {
    /// The members that it comes from.
    pub from: SmallVec<[usize; 1]>,
    /// Over the result and what each of them gives.
    pub walk: Walk,
}

/// Where a block lies in a larger one.
fn origin(block: &Block, inside: &Block) -> Dims {
    block.iter().zip(inside).map(|(b, i)| b.start - i.start).collect()
}

impl Exchange {
    /// The walks that put the result of member `to` together. Members for whom `packed` holds give just what is
    /// taken, as [`Exchange::packing`] makes it; from others their whole block is seen.
    pub fn assemblies(&self, to: usize, packed: impl Fn(usize) -> bool) -> Vec<Assembly> {
        let Some(wants) = &self.members[to].wants else { return Vec::new() };
        let result = extents(wants);
        let assemble = |take: &Take| {
            let block = extents(&take.block);
            let given = |&from: &usize| match &self.members[from].holds {
                Some(holds) if !packed(from) => (extents(holds), origin(&take.block, holds)),
                _ => (block.clone(), Dims::from_elem(0, block.len())),
            };
            let given: SmallVec<[(Shape, Dims); 2]> = take.from.iter().map(given).collect();
            let target = Place { shape: &result, origin: &origin(&take.block, wants) };
            let mut places: SmallVec<[Place<'_>; 4]> = smallvec![target];
            places.extend(given.iter().map(|(shape, origin)| Place { shape, origin }));
            Assembly { from: take.from.clone(), walk: Walk::new(&block, &places) }
        };
        self.takes[to].iter().map(assemble).collect()
    }

    /// The walk that packs what `from` gives to `to` into a buffer of its own.
    pub fn packing(&self, from: usize, to: usize) -> Option<Walk> {
        let (block, holds) = (self.given(from, to)?, self.members[from].holds.as_ref()?);
        let (sizes, held) = (extents(block), extents(holds));
        let zero = Dims::from_elem(0, sizes.len());
        let target = Place { shape: &sizes, origin: &zero };
        Some(Walk::new(&sizes, &[target, Place { shape: &held, origin: &origin(block, holds) }]))
    }
}
