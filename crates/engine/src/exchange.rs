//! Exchanges: which member of a group sends which block of a tensor to which other. Every collective is one exchange, or two in a row.
//!
//! Each device of a group holds a block of one tensor and wants another block of it. The blocks determine all
//! transfers ([`Exchange::between`]): all-gather, reduce-scatter, all-to-all, broadcast,
//! reduce, gather, scatter, send, permute, halo exchange and slice differ only in the blocks.
//!
//! | collective | holds | wants | combined |
//! |---|---|---|---|
//! | all-gather | its block | the whole | |
//! | reduce-scatter | all of a partial sum | its block | yes |
//! | all-to-all | its block of one dimension | its block of another | |
//! | broadcast, scatter | one device: the whole | the whole, its block | |
//! | reduce, gather | a partial sum, its block | one device: the whole | reduce |
//! | send, permute | a block | another's block | |
//! | halo exchange | its block | its block and some of the neighbours' rows | |
//!
//! An all-reduce is a reduce-scatter and an all-gather of the tensor flattened to one dimension, so every
//! device reduces an equal share ([`all_reduce`]). For a small tensor every device reduces all of it: one exchange, not two.
//!
//! Partial results are always combined in the order of the group's members: the result does not depend on timing.

use crate::walk::{BlockView, Walk};
use shardwright_cost::Reduction;
use shardwright_graph::block::{contains, elements, extents, intersection, relative_to, start};
use shardwright_graph::{Block, DType, Dims, Shape};
use shardwright_lower::memory::all_reduce_share;
use smallvec::{SmallVec, smallvec};

/// The blocks of one member of the group, in positions of the whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Member {
    /// The block that it holds before the exchange.
    pub holds: Option<Block>,
    /// The block that it holds afterwards.
    pub wants: Option<Block>,
}

/// A block of a member's result, and the members that it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSource {
    /// The block, in positions of the whole tensor.
    pub block: Block,
    /// One member, or all members whose partial results are combined, in order.
    pub from: SmallVec<[usize; 1]>,
}

/// An exchange within one group.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Element type.
    pub dtype: DType,
    /// The reduction of partial results; none where blocks are copied.
    pub combine: Option<Reduction>,
    /// The blocks of each member.
    pub members: Vec<Member>,
    /// Per member: the blocks that its result consists of.
    pub sources: Vec<Vec<BlockSource>>,
}

/// Why an exchange is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The group does not hold the block that a member wants.
    #[error("member {member} wants {wanted} elements, of which the group holds {found}")]
    NotHeld {
        /// The member.
        member: usize,
        /// Number of elements that it wants.
        wanted: u64,
        /// Number of those that the group holds.
        found: u64,
    },
    /// A block comes from a device outside of the group: a bug of the lowered program.
    #[error("device {device}, which is not in the group, sends a block: this is a bug")]
    NotInGroup {
        /// The device.
        device: u32,
    },
}

impl Exchange {
    /// The exchange after which every member holds the block that it wants.
    ///
    /// Where several members hold the same block, a member sources its own, or else that of the nearest member.
    pub fn between(
        dtype: DType,
        combine: Option<Reduction>,
        members: Vec<Member>,
    ) -> Result<Self, ExchangeError> {
        let sources = (0..members.len())
            .map(|at| match &members[at].wants {
                None => Ok(Vec::new()),
                Some(wants) if combine.is_some() => combined_sources(&members, at, wants),
                Some(wants) => copied_sources(&members, at, wants),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { dtype, combine, members, sources })
    }

    /// An exchange with given sources, which must cover the block that each member wants.
    pub fn new(
        dtype: DType,
        combine: Option<Reduction>,
        members: Vec<Member>,
        sources: Vec<Vec<BlockSource>>,
    ) -> Result<Self, ExchangeError> {
        for (at, (member, sources)) in members.iter().zip(&sources).enumerate() {
            let wanted = member.wants.as_ref().map_or(0, elements);
            let held = |source: &BlockSource| {
                let inside =
                    |&m: &usize| members[m].holds.as_ref().is_some_and(|h| contains(h, &source.block));
                source.from.iter().all(inside)
            };
            let found =
                sources.iter().filter(|source| held(source)).map(|source| elements(&source.block)).sum();
            if found != wanted {
                return Err(ExchangeError::NotHeld { member: at, wanted, found });
            }
        }
        Ok(Self { dtype, combine, members, sources })
    }

    /// The block that `from` sends to `to`; there is at most one.
    pub fn sent(&self, from: usize, to: usize) -> Option<&Block> {
        self.sources[to].iter().find(|source| source.from.contains(&from)).map(|source| &source.block)
    }

    /// Bytes that members send to each other.
    pub fn traffic(&self) -> u64 {
        let of_source = |to: usize, source: &BlockSource| {
            elements(&source.block) * source.from.iter().filter(|&&from| from != to).count() as u64
        };
        let elements: u64 = self
            .sources
            .iter()
            .enumerate()
            .flat_map(|(to, sources)| sources.iter().map(move |t| of_source(to, t)))
            .sum();
        elements * self.dtype.bytes()
    }
}

/// The one source of a reduced block: every member that holds a partial result of it.
fn combined_sources(members: &[Member], at: usize, wants: &Block) -> Result<Vec<BlockSource>, ExchangeError> {
    let holds = |m: &Member| m.holds.as_ref().is_some_and(|h| contains(h, wants));
    let from: SmallVec<[usize; 1]> = (0..members.len()).filter(|&m| holds(&members[m])).collect();
    let holders = members.iter().filter(|m| m.holds.is_some()).count();
    // A sum without one member's part would be wrong.
    if from.len() != holders || holders == 0 {
        return Err(ExchangeError::NotHeld { member: at, wanted: elements(wants), found: 0 });
    }
    Ok(vec![BlockSource { block: wants.clone(), from }])
}

/// The sources of a copied block: disjoint parts, each from the nearest member that holds it.
fn copied_sources(members: &[Member], at: usize, wants: &Block) -> Result<Vec<BlockSource>, ExchangeError> {
    // Members by distance, the member itself first.
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_key(|&m| (m.abs_diff(at), m));
    let mut sources: Vec<BlockSource> = Vec::new();
    let mut found = 0;
    for from in order {
        let Some(block) = members[from].holds.as_ref().and_then(|held| intersection(held, wants)) else {
            continue;
        };
        if sources.iter().any(|source| contains(&source.block, &block)) {
            continue;
        }
        found += elements(&block);
        sources.push(BlockSource { block, from: smallvec![from] });
    }
    if found != elements(wants) {
        return Err(ExchangeError::NotHeld { member: at, wanted: elements(wants), found });
    }
    Ok(sources)
}

/// The exchanges of an all-reduce of `count` elements among `members`, one after the other.
pub fn all_reduce(
    dtype: DType,
    combine: Reduction,
    count: u64,
    members: usize,
) -> Result<Vec<Exchange>, ExchangeError> {
    let whole: Block = smallvec![0..count];
    let all = Some(whole);
    let Some(share) = all_reduce_share(count, dtype.bytes(), members as u64) else {
        let member = Member { holds: all.clone(), wants: all };
        return Ok(vec![Exchange::between(dtype, Some(combine), vec![member; members])?]);
    };
    let shares: Vec<Option<Block>> = (0..members as u64)
        .map(|m| (m * share).min(count)..((m + 1) * share).min(count))
        .map(|range| (!range.is_empty()).then(|| smallvec![range]))
        .collect();
    let scatter = shares.iter().map(|share| Member { holds: all.clone(), wants: share.clone() });
    let gather = shares.iter().map(|share| Member { holds: share.clone(), wants: all.clone() });
    Ok(vec![
        Exchange::between(dtype, Some(combine), scatter.collect())?,
        Exchange::between(dtype, None, gather.collect())?,
    ])
}

/// A [`BlockSource`] as a copy or reduction on memory.
#[derive(Clone, Debug)]
pub struct Assembly {
    /// The members that it comes from.
    pub from: SmallVec<[usize; 1]>,
    /// Over the result and the buffer of each of those members.
    pub walk: Walk,
}

/// Index of a block's first element in a block that contains it.
fn origin(block: &Block, outer: &Block) -> Dims {
    start(&relative_to(block, outer))
}

impl Exchange {
    /// The copies and reductions that make up the result of member `to`. A member for which `packed` holds sends only the
    /// needed block, as [`Exchange::packing`] packs it; the whole block of any other member is readable.
    pub fn assemblies(&self, to: usize, packed: impl Fn(usize) -> bool) -> Vec<Assembly> {
        let Some(wants) = &self.members[to].wants else { return Vec::new() };
        let result = extents(wants);
        let assemble = |source: &BlockSource| {
            let block = extents(&source.block);
            let given = |&from: &usize| match &self.members[from].holds {
                Some(holds) if !packed(from) => (extents(holds), origin(&source.block, holds)),
                _ => (block.clone(), Dims::from_elem(0, block.len())),
            };
            let given: SmallVec<[(Shape, Dims); 2]> = source.from.iter().map(given).collect();
            let target = BlockView { shape: &result, origin: &origin(&source.block, wants) };
            let mut places: SmallVec<[BlockView<'_>; 4]> = smallvec![target];
            places.extend(given.iter().map(|(shape, origin)| BlockView { shape, origin }));
            Assembly { from: source.from.clone(), walk: Walk::new(&block, &places) }
        };
        self.sources[to].iter().map(assemble).collect()
    }

    /// The walk that packs the block which `from` sends to `to` into a contiguous buffer.
    pub fn packing(&self, from: usize, to: usize) -> Option<Walk> {
        let (block, holds) = (self.sent(from, to)?, self.members[from].holds.as_ref()?);
        let (sizes, held) = (extents(block), extents(holds));
        let zero = Dims::from_elem(0, sizes.len());
        let target = BlockView { shape: &sizes, origin: &zero };
        Some(Walk::new(&sizes, &[target, BlockView { shape: &held, origin: &origin(block, holds) }]))
    }
}
