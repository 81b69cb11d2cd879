//! Stored tensors that have not entered the graph.
//!
//! A stored tensor is a [`PendingTensor`] until the first op reads it. It then becomes a weight or constant of the graph,
//! in the shape that the op needs, and a [`TensorSource`] records which elements of the file are its contents.

use super::{
    error::{NodeError, NodeResult, shown},
    importer::{Base, Importer},
    literal::count,
    storage::{MOST_FOLDED, NoExternalData, StoredTensor},
    view::View,
};
use shardwright_graph::{Init, Real, Role, Shape, TensorId, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// A tensor of the file that may enter the graph.
pub(crate) struct PendingTensor {
    pub stored: Arc<StoredTensor>,
    /// The selected shape; the stored one's without selections.
    pub shape: Vec<u64>,
    pub selections: Vec<AxisSelection>,
    role: Role,
    /// The tensor in the graph, once an op has read it.
    pub tensor: Option<TensorId>,
    /// The initial value if the file lacks the contents.
    init: Option<Init>,
    /// Whether every reader gets its own tensor; see [`Importer::untied`].
    untied: bool,
}

/// A selection of positions along one dimension, range by range: a part of a stored tensor, or its blocks in another
/// order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AxisSelection {
    /// The dimension.
    pub axis: usize,
    /// The positions, range by range.
    pub ranges: Vec<Range<u64>>,
}

impl AxisSelection {
    /// One contiguous range.
    pub(crate) fn range(axis: usize, range: Range<u64>) -> Self {
        Self { axis, ranges: vec![range] }
    }

    /// The number of selected positions.
    fn size(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }
}

/// A tensor of the graph whose contents come from the file.
#[derive(Clone, Debug)]
pub struct TensorSource {
    /// The tensor in the graph. Its shape has the selected elements in the same order.
    pub tensor: TensorId,
    /// The tensor in the file.
    pub stored: Arc<StoredTensor>,
    /// The selections from the stored tensor, applied in order; empty for the whole tensor.
    pub selections: Vec<AxisSelection>,
}

impl Importer<'_> {
    /// A view of a stored tensor that no op has read yet.
    pub(super) fn entry(&mut self, stored: StoredTensor, role: Role) -> View {
        let view = View::plain(Base::Stored(self.pending.len() as u32), &stored.shape);
        let (shape, stored) = (stored.shape.clone(), stored.into());
        self.pending.push(PendingTensor {
            stored,
            shape,
            selections: Vec::new(),
            role,
            tensor: None,
            init: None,
            untied: false,
        });
        view
    }

    /// Parts of a stored tensor along a dimension, each its own tensor. `None` if an op has read it already, or if the view
    /// is not a plain view of a stored tensor.
    pub fn stored_parts(&mut self, view: &View, axis: usize, sizes: &[u64]) -> Option<Vec<View>> {
        if view.size(axis) != sizes.iter().sum::<u64>() {
            return None;
        }
        let mut start = 0;
        sizes
            .iter()
            .map(|&size| {
                start += size;
                self.stored_selection(view, vec![AxisSelection::range(axis, start - size..start)])
            })
            .collect()
    }

    /// A selection of a stored tensor as its own tensor. `None` if an op has read it already, or if the view is not a plain
    /// view of a stored tensor.
    pub fn stored_selection(&mut self, view: &View, selections: Vec<AxisSelection>) -> Option<View> {
        let Base::Stored(number) = view.base else { return None };
        let entry = &self.pending[number as usize];
        let whole = View::plain(view.base, &entry.shape) == *view && entry.selections.is_empty();
        if entry.tensor.is_some() || !whole {
            return None;
        }
        let mut shape = entry.shape.clone();
        for cut in &selections {
            shape[cut.axis] = cut.size();
        }
        let (stored, role, init) = (entry.stored.clone(), entry.role, entry.init);
        let part = View::plain(Base::Stored(self.pending.len() as u32), &shape);
        self.pending.push(PendingTensor {
            stored,
            shape,
            selections,
            role,
            tensor: None,
            init,
            untied: true,
        });
        Some(part)
    }

    /// Exporters merge weights that are equal at export time: all zero biases of a fresh model become one. So a
    /// one-dimensional weight that repeats one number, or whose contents are missing, is a separate weight for every node
    /// that reads it.
    pub(super) fn untied(&mut self, view: View) -> View {
        let Base::Stored(number) = view.base else { return view };
        let entry = &self.pending[number as usize];
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
        self.pending[number as usize].untied = true;
        view
    }

    /// Sets the initial value of a stored tensor whose contents the file lacks.
    pub fn starts_as(&mut self, view: &View, init: Init) {
        if let Base::Stored(entry) = view.base {
            self.pending[entry as usize].init.get_or_insert(init);
        }
    }

    /// Makes a stored tensor a constant, which is not trained.
    pub fn freeze(&mut self, view: &View) {
        if let Base::Stored(entry) = view.base {
            self.pending[entry as usize].role = Role::Constant;
        }
    }

    /// Whether a view shows a stored tensor that no op has read yet.
    pub fn is_fresh(&self, view: &View) -> bool {
        matches!(view.base, Base::Stored(entry) if self.pending[entry as usize].tensor.is_none())
    }

    /// Whether a view shows a stored weight or constant.
    pub fn is_stored(&self, view: &View) -> bool {
        match view.base {
            Base::Stored(_) => true,
            Base::Tensor(t) => self.b.graph().tensor(t).producer.is_none(),
        }
    }

    /// One row of a stored tensor whose rows repeat over the file's batch; it broadcasts to any batch. A tensor without
    /// contents is taken to repeat: nothing in the file says otherwise.
    pub fn rebatched(&mut self, view: &View) -> NodeResult<Option<View>> {
        let Base::Stored(number) = view.base else { return Ok(None) };
        if let Some(row) = self.rows.get(&number) {
            return Ok(Some(row.clone()));
        }
        let stored = self.pending[number as usize].stored.clone();
        if let Some(elements) = count(&stored.shape) {
            self.budget.work(elements.min(MOST_FOLDED))?;
        }
        let repeats = match stored.fold(self.external)? {
            Some(contents) => self.rebatch.repeats(&contents),
            None => stored.is_missing() && self.rebatch.fits(&stored.shape),
        };
        if !repeats {
            return Ok(None);
        }
        let row = self.stored_selection(view, vec![AxisSelection::range(0, 0..1)]);
        if let Some(row) = &row {
            if stored.is_missing() {
                let (name, shape) = (shown(&stored.name), &stored.shape);
                self.notes.push(format!(
                    "the file lacks the contents of `{name}` {shape:?}: its rows are taken to be equal, one per sample"
                ));
            }
            self.rows.insert(number, row.clone());
        }
        Ok(row)
    }

    /// Adds a stored tensor to the graph as a weight or constant.
    pub(super) fn declare(&mut self, number: u32, shape: &Shape) -> NodeResult<TensorId> {
        let entry = &self.pending[number as usize];
        let (stored, selections) = (entry.stored.clone(), entry.selections.clone());
        if count(&entry.shape) != count(shape) {
            return Err(NodeError::invalid(format!(
                "`{}` has shape {:?}, expected {shape}",
                shown(&stored.name),
                entry.shape
            )));
        }
        let ty = TensorType::new(stored.dtype, shape.clone());
        let init = match (entry.role, entry.init) {
            (_, Some(init)) => init,
            (Role::Parameter, None) => default_init(&stored.shape),
            _ => constant_init(&stored),
        };
        let tensor = self.b.source(&shown(&stored.name), ty, entry.role, init)?;
        self.pending[number as usize].tensor = Some(tensor);
        self.sources.push(TensorSource { tensor, stored, selections });
        Ok(tensor)
    }
}

/// PyTorch's default for a weight whose inputs are all dimensions but the largest.
fn default_init(shape: &[u64]) -> Init {
    let elements = shape.iter().fold(1u64, |n, &s| n.saturating_mul(s));
    let inputs = elements / shape.iter().max().copied().unwrap_or(1).max(1);
    shardwright_zoo::layers::fan_in(if shape.len() < 2 { elements } else { inputs })
}

/// The initial value of a constant that repeats one number. Other constants are set from the file before a run.
fn constant_init(stored: &StoredTensor) -> Init {
    // A constant that cannot be read now is reported by `load` before a run.
    let uniform = stored.fold(&NoExternalData).ok().flatten().and_then(|l| l.uniform());
    Init::Constant(Real(uniform.filter(|x| x.is_finite()).unwrap_or(0.0)))
}
