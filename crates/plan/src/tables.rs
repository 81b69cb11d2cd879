//! Tables of transfer times: from every layout that a tensor is made in to every layout that an op needs it in.
//!
//! Many choices of a layer leave a tensor in the same layout, so tables are made over distinct layouts and spread
//! over choices afterwards; equal tables (layers that repeat) are made once.

use crate::{error::PlanError, times::picoseconds};
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, Relayouts, TensorShape};
use shardwright_graph::{Graph, TensorId};
use std::sync::{Arc, RwLock};

/// Distinct values, and which of them each choice has.
pub struct Distinct<T> {
    /// In order of first appearance.
    pub values: Vec<T>,
    /// Per choice: which value.
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

    /// The value that a choice has.
    pub fn value(&self, choice: usize) -> &T {
        &self.values[self.of[choice] as usize]
    }
}

type Key = (TensorShape, Vec<Layout>, Vec<Layout>);

/// Makes and remembers tables.
pub struct Tables<'a> {
    graph: &'a Graph,
    relayouts: &'a Relayouts,
    known: RwLock<FxHashMap<Key, Arc<[i64]>>>,
}

impl<'a> Tables<'a> {
    /// No tables yet.
    pub fn new(graph: &'a Graph, relayouts: &'a Relayouts) -> Self {
        Self { graph, relayouts, known: RwLock::default() }
    }

    /// A tensor's shape for the cost model.
    pub fn shape(&self, tensor: TensorId) -> Result<TensorShape, PlanError> {
        let ty = &self.graph.tensor(tensor).ty;
        TensorShape::new(&ty.shape, ty.dtype.bytes() as u32).map_err(|source| self.error(tensor, source))
    }

    fn error(&self, tensor: TensorId, source: shardwright_cost::LayoutError) -> PlanError {
        PlanError::Tensor { tensor: self.graph.tensor(tensor).name.clone(), source }
    }

    /// Gets ready for questions that start from these layouts.
    pub fn prepare(&self, tensor: TensorId, from: &[Layout]) -> Result<(), PlanError> {
        self.relayouts.prepare(&self.relayouts.tensor(self.shape(tensor)?), from);
        Ok(())
    }

    /// Picoseconds from one layout to another.
    pub fn time(&self, tensor: TensorId, from: &Layout, to: &Layout) -> Result<i64, PlanError> {
        if from == to {
            return Ok(0);
        }
        let ready = self.relayouts.tensor(self.shape(tensor)?);
        let times = self.relayouts.times(&ready, from).and_then(|times| times.to(to));
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
        if let Some(table) = self.known.read().ok().as_ref().and_then(|known| known.get(&key)) {
            return Ok(table.clone());
        }
        let ready = self.relayouts.tensor(key.0);
        let times = self.relayouts.table(&ready, &from.values, &to.values);
        let times = times.map_err(|source| self.error(tensor, source))?;
        let table: Arc<[i64]> = times.into_iter().map(picoseconds).collect();
        if let Ok(mut known) = self.known.write() {
            known.insert(key, table.clone());
        }
        Ok(table)
    }
}
