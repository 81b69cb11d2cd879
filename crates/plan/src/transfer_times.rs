//! Tables of transfer times: from every layout in which a tensor is produced to every layout in which an op needs it.
//!
//! Many choices of a layer leave a tensor in the same layout. So tables are over distinct layouts, and expanded over
//! choices afterwards. Equal tables (of repeated layers) are computed once.

use crate::{error::PlanError, op_times::picoseconds};
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, Placement, Resharder, TensorShape};
use shardwright_graph::{Graph, TensorId};
use shardwright_search::FORBIDDEN;
use std::sync::{Arc, RwLock};

/// The distinct values of a sequence, and the value of each choice.
pub struct Distinct<T> {
    /// In order of first appearance.
    pub values: Vec<T>,
    /// Per choice: the index of its value.
    pub of: Vec<u32>,
}

impl<T: std::hash::Hash + Eq + Clone> Distinct<T> {
    /// The distinct values of a sequence.
    pub fn of(sequence: impl Iterator<Item = T>) -> Self {
        let mut known: FxHashMap<T, u32> = FxHashMap::default();
        let mut values = Vec::new();
        let of = sequence
            .map(|value| {
                *known.entry(value).or_insert_with_key(|value| {
                    values.push(value.clone());
                    values.len() as u32 - 1
                })
            })
            .collect();
        Self { values, of }
    }

    /// The classes of equal values alone.
    pub fn kinds(&self) -> Distinct<()> {
        Distinct { values: vec![(); self.values.len()], of: self.of.clone() }
    }

    /// The value that a choice has.
    pub fn value(&self, choice: usize) -> &T {
        &self.values[self.of[choice] as usize]
    }
}

fn has_partial(layout: &Layout) -> bool {
    !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
}

/// Whether a layout has partial sums along an axis where the tensor has none.
fn becomes_partial(from: &Layout, to: &Layout) -> bool {
    let partial = to.axes_where(|p| matches!(p, Placement::Partial(_)));
    partial.iter().any(|axis| from.get(axis) != to.get(axis))
}

type Key = (TensorShape, Vec<Layout>, Vec<Layout>);

/// Computes and caches tables.
pub struct TransferTimes<'a> {
    graph: &'a Graph,
    resharder: &'a Resharder,
    cache: RwLock<FxHashMap<Key, Arc<[i64]>>>,
}

impl<'a> TransferTimes<'a> {
    /// No tables yet.
    pub fn new(graph: &'a Graph, resharder: &'a Resharder) -> Self {
        Self { graph, resharder, cache: RwLock::default() }
    }

    /// A tensor's shape for the cost model.
    pub fn shape(&self, tensor: TensorId) -> Result<TensorShape, PlanError> {
        let ty = &self.graph.tensor(tensor).ty;
        TensorShape::new(&ty.shape, ty.dtype.bytes() as u32).map_err(|source| self.error(tensor, source))
    }

    fn error(&self, tensor: TensorId, source: shardwright_cost::LayoutError) -> PlanError {
        PlanError::Tensor { tensor: self.graph.tensor(tensor).name.clone(), source }
    }

    /// Prepares the reshard paths that start from these layouts.
    pub fn prepare(&self, tensor: TensorId, from: &[Layout]) -> Result<(), PlanError> {
        self.resharder.prepare(&self.resharder.tensor(self.shape(tensor)?), from);
        Ok(())
    }

    /// Picoseconds from one layout to another; forbidden where a complete tensor would become a partial sum.
    pub fn time(&self, tensor: TensorId, from: &Layout, to: &Layout) -> Result<i64, PlanError> {
        if from == to {
            return Ok(0);
        }
        if becomes_partial(from, to) {
            return Ok(FORBIDDEN);
        }
        let ready = self.resharder.tensor(self.shape(tensor)?);
        let times = self.resharder.times(&ready, from).and_then(|times| times.to(to));
        times.map(picoseconds).map_err(|source| self.error(tensor, source))
    }

    /// Picoseconds from each layout (rows) to each layout (columns).
    pub fn table(
        &self,
        tensor: TensorId,
        from: &Distinct<Layout>,
        to: &Distinct<Layout>,
    ) -> Result<Arc<[i64]>, PlanError> {
        let key = (self.shape(tensor)?, from.values.clone(), to.values.clone());
        if let Some(table) = self.cache.read().ok().as_ref().and_then(|known| known.get(&key)) {
            return Ok(table.clone());
        }
        let table: Arc<[i64]> = if to.values.iter().any(has_partial) {
            let cells = from.values.iter().flat_map(|from| to.values.iter().map(move |to| (from, to)));
            cells.map(|(from, to)| self.time(tensor, from, to)).collect::<Result<_, _>>()?
        } else {
            let times = self.resharder.table(&self.resharder.tensor(key.0), &from.values, &to.values);
            let times = times.map_err(|source| self.error(tensor, source))?;
            times.into_iter().map(picoseconds).collect()
        };
        if let Ok(mut known) = self.cache.write() {
            known.insert(key, table.clone());
        }
        Ok(table)
    }
}
