//! Tensors that the file stores, on their way into the graph.
//!
//! Each is an [`Entry`] until the first op reads it; then it becomes a weight or constant of the graph, in the shape that
//! the op asks for, and a [`Source`] says which elements of the file are its contents.

use super::{
    error::{Tried, shown},
    importer::{Base, Importer},
    stored::{NoExternalData, Stored},
    view::View,
};
use shardwright_graph::{Init, Real, Role, Shape, TensorId, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// A tensor of the file that may enter the graph.
pub(crate) struct Entry {
    pub stored: Arc<Stored>,
    /// Its shape; not the stored one's if only a part of that is meant.
    pub shape: Vec<u64>,
    pub cuts: Vec<Cut>,
    role: Role,
    /// The tensor in the graph, once an op has read it.
    pub tensor: Option<TensorId>,
    /// How its first value is found where the file lacks it.
    init: Option<Init>,
    /// Whether every reader gets a tensor of its own; see [`Importer::untied`].
    untied: bool,
}

/// What is taken of a stored tensor: positions of one dimension, range after range. A part of it, or its blocks in
/// another order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The dimension.
    pub axis: usize,
    /// The positions.
    pub ranges: Vec<Range<u64>>,
}

impl Cut {
    /// Positions that follow each other.
    pub(crate) fn range(axis: usize, range: Range<u64>) -> Self {
        Self { axis, ranges: vec![range] }
    }

    /// How many positions are taken.
    fn size(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }
}

/// A tensor of the graph whose contents come from the file.
#[derive(Clone, Debug)]
pub struct Source {
    /// The tensor in the graph; its shape has the same elements in the same order as the stored one's.
    pub tensor: TensorId,
    /// What the file stores.
    pub stored: Arc<Stored>,
    /// What is taken of it, one after the other, where it is not the whole.
    pub cuts: Vec<Cut>,
}

impl Importer<'_> {
    /// A view of a stored tensor that no op has read yet.
    pub(super) fn entry(&mut self, stored: Stored, role: Role) -> View {
        let view = View::plain(Base::Stored(self.entries.len() as u32), &stored.shape);
        let (shape, stored) = (stored.shape.clone(), stored.into());
        self.entries.push(Entry {
            stored,
            shape,
            cuts: Vec::new(),
            role,
            tensor: None,
            init: None,
            untied: false,
        });
        view
    }

    /// Parts of a stored tensor along a dimension, each a tensor of its own; none if it was read already or is
    /// no stored tensor as it lies.
    pub fn stored_parts(&mut self, view: &View, axis: usize, sizes: &[u64]) -> Option<Vec<View>> {
        if view.size(axis) != sizes.iter().sum::<u64>() {
            return None;
        }
        let mut start = 0;
        sizes
            .iter()
            .map(|&size| {
                start += size;
                self.stored_cut(view, vec![Cut::range(axis, start - size..start)])
            })
            .collect()
    }

    /// What is cut from a stored tensor, as a tensor of its own; none if it was read already or is no stored
    /// tensor as it lies.
    pub fn stored_cut(&mut self, view: &View, cuts: Vec<Cut>) -> Option<View> {
        let Base::Stored(number) = view.base else { return None };
        let entry = &self.entries[number as usize];
        let whole = View::plain(view.base, &entry.shape) == *view && entry.cuts.is_empty();
        if entry.tensor.is_some() || !whole {
            return None;
        }
        let mut shape = entry.shape.clone();
        for cut in &cuts {
            shape[cut.axis] = cut.size();
        }
        let (stored, role, init) = (entry.stored.clone(), entry.role, entry.init);
        let part = View::plain(Base::Stored(self.entries.len() as u32), &shape);
        self.entries.push(Entry { stored, shape, cuts, role, tensor: None, init, untied: true });
        Some(part)
    }

    /// Exporters merge weights that are equal when they export: all zero biases of a fresh model are one. So a
    /// one-dimensional weight that is the same number throughout, or whose contents are missing, is a separate
    /// weight for every node that reads it.
    pub(super) fn untied(&mut self, view: View) -> View {
        let Base::Stored(number) = view.base else { return view };
        let entry = &self.entries[number as usize];
        if entry.role != Role::Parameter || entry.stored.shape.len() != 1 {
            return view;
        }
        if entry.tensor.is_some() || entry.untied {
            let uniform = || entry.stored.fold(self.external).ok().flatten().and_then(|l| l.uniform());
            if !(entry.stored.is_missing() || uniform().is_some()) {
                return view;
            }
            let copy = entry.stored.as_ref().clone();
            return View { base: self.entry(copy, Role::Parameter).base, ..view };
        }
        self.entries[number as usize].untied = true;
        view
    }

    /// Says how a stored tensor starts where the file lacks its contents.
    pub fn starts_as(&mut self, view: &View, init: Init) {
        if let Base::Stored(entry) = view.base {
            self.entries[entry as usize].init.get_or_insert(init);
        }
    }

    /// Makes a stored tensor a constant: one that is not trained.
    pub fn freeze(&mut self, view: &View) {
        if let Base::Stored(entry) = view.base {
            self.entries[entry as usize].role = Role::Constant;
        }
    }

    /// Whether a view looks at a stored tensor that no op has read yet.
    pub fn is_fresh(&self, view: &View) -> bool {
        matches!(view.base, Base::Stored(entry) if self.entries[entry as usize].tensor.is_none())
    }

    /// Whether a view looks at a weight or constant that no op has computed.
    pub fn is_stored(&self, view: &View) -> bool {
        match view.base {
            Base::Stored(_) => true,
            Base::Tensor(t) => self.b.graph().tensor(t).producer.is_none(),
        }
    }

    /// One row of a stored tensor that holds the file's batch in equal rows: it broadcasts to any batch.
    pub fn rebatched(&mut self, view: &View) -> Tried<Option<View>> {
        let Base::Stored(number) = view.base else { return Ok(None) };
        if let Some(row) = self.rows.get(&number) {
            return Ok(Some(row.clone()));
        }
        let entry = &self.entries[number as usize];
        let (stored, constant) = (entry.stored.clone(), entry.role == Role::Constant);
        let contents = stored.fold(self.external)?.filter(|l| constant || !l.assumed);
        if !contents.is_some_and(|l| self.rebatch.repeats(&l)) {
            return Ok(None);
        }
        let row = self.stored_cut(view, vec![Cut::range(0, 0..1)]);
        if let Some(row) = &row {
            self.rows.insert(number, row.clone());
        }
        Ok(row)
    }

    /// Makes a stored tensor a weight or constant of the graph.
    pub(super) fn declare(&mut self, number: u32, shape: &Shape) -> Tried<TensorId> {
        let entry = &self.entries[number as usize];
        let (stored, cuts) = (entry.stored.clone(), entry.cuts.clone());
        let ty = TensorType::new(stored.dtype, shape.clone());
        let init = match (entry.role, entry.init) {
            (_, Some(init)) => init,
            (Role::Parameter, None) => default_init(&stored.shape),
            _ => constant_init(&stored),
        };
        let tensor = self.b.source(&shown(&stored.name), ty, entry.role, init)?;
        self.entries[number as usize].tensor = Some(tensor);
        self.sources.push(Source { tensor, stored, cuts });
        Ok(tensor)
    }
}

/// PyTorch's default, for a weight whose inputs are all dimensions but the largest.
fn default_init(shape: &[u64]) -> Init {
    let elements = shape.iter().fold(1u64, |n, &s| n.saturating_mul(s));
    let inputs = elements / shape.iter().max().copied().unwrap_or(1).max(1);
    crate::layers::fan_in(if shape.len() < 2 { elements } else { inputs })
}

/// A constant's contents, where one number says them all; else it is set before a run.
fn constant_init(stored: &Stored) -> Init {
    let uniform = stored.fold(&NoExternalData).ok().flatten().and_then(|l| l.uniform());
    Init::Constant(Real(uniform.filter(|x| x.is_finite()).unwrap_or(0.0)))
}
