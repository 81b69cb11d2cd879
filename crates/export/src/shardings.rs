//! How the values of a StableHLO program lie under a plan.
//!
//! XLA has no word for partial sums between ops: a value that an op leaves as a partial result is said to lie as its
//! readers want it, which makes XLA reduce it right there, scattered where the plan scatters it.

use serde::Serialize;
use shardwright_cost::{Layout, Placement};
use shardwright_frontend::stablehlo::{Imported, Place};
use shardwright_graph::{Graph, TensorId};
use shardwright_machine::{AxisId, Mesh};
use shardwright_space::{Config, OpShapes, Placed, place};
use std::fmt;

/// For each dimension the names of the axes that split it, outermost first; none where that is left to the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Spec(pub Vec<Option<Vec<String>>>);

impl Spec {
    /// Whether nothing is split, nor left open.
    pub fn is_whole(&self) -> bool {
        self.0.iter().all(|dim| dim.as_ref().is_some_and(Vec::is_empty))
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dim = |axes: &Option<Vec<String>>| match axes {
            Some(axes) => format!("{{{}}}", axes.join(", ")),
            None => "{?}".into(),
        };
        write!(f, "[{}]", self.0.iter().map(dim).collect::<Vec<_>>().join(", "))
    }
}

/// How an operation's values lie.
#[derive(Clone, Debug, Serialize)]
pub struct SiteSpecs {
    /// Where the operation begins in the text.
    pub at: usize,
    /// What its location calls it.
    pub name: Option<String>,
    /// How its operands have to lie, where that is known.
    pub operands: Vec<Option<Spec>>,
    /// How its results lie from then on.
    pub results: Vec<Option<Spec>>,
}

/// How everything lies.
#[derive(Clone, Debug, Serialize)]
pub struct Shardings {
    /// The program's arguments.
    pub arguments: Vec<Spec>,
    /// The program's results.
    pub results: Vec<Spec>,
    /// Its operations, in the order of the text.
    pub sites: Vec<SiteSpecs>,
}

/// Why a plan cannot be said in an engine's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// Ops that run on some devices only.
    #[error(
        "the plan keeps `{tensor}` on some devices only, which XLA's shardings cannot say; choose a solver without pins"
    )]
    Pinned {
        /// The tensor.
        tensor: String,
    },
}

impl Shardings {
    /// Those of a program whose graph has these configs. The graph is the program's own, wherever it is kept.
    ///
    /// # Errors
    /// Where the configs pin ops to devices.
    pub fn of(
        program: &Imported,
        graph: &Graph,
        mesh: &Mesh,
        configs: &[Config],
    ) -> Result<Self, ExportError> {
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let places = place(graph, &shapes, configs, mesh);
        if let Some(pinned) =
            places.tensors.iter().position(|p| p.home.is_some_and(|l| !l.absent().is_empty()))
        {
            return Err(ExportError::Pinned { tensor: graph.tensors[pinned].name.clone() });
        }
        let whole = Layout::replicated(mesh.len());
        let settled = |t: TensorId| settled(&places.tensors[t.index()]);
        let spec = |t: TensorId, layout: Layout| {
            let dims = (0..graph.tensor(t).ty.rank()).map(Some).collect();
            spec(&Place { tensor: t, dims }, &layout, mesh)
        };
        let arguments = program.arguments.iter().map(|&t| spec(t, settled(t).unwrap_or(whole))).collect();
        let result = |&t: &TensorId| {
            let stored = graph.carries.iter().find(|carry| carry.new == t).map(|carry| carry.old);
            spec(t, settled(stored.unwrap_or(t)).unwrap_or(whole))
        };
        let results = program.results.iter().map(result).collect();
        let sites = program.sites.iter().map(|site| {
            let operands = site.operands.iter().map(|reader| {
                let reader = reader.as_ref()?;
                let layout = places.input(reader.op, reader.input, &shapes[reader.op.index()], mesh);
                // A sum that is done on partial results reads what nobody can name.
                (!partial(&layout)).then(|| self::spec(&reader.place, &layout, mesh))
            });
            let results = site.results.iter().map(|place| {
                let place = place.as_ref()?;
                settled(place.tensor).map(|layout| self::spec(place, &layout, mesh))
            });
            SiteSpecs {
                at: site.at,
                name: site.name.clone(),
                operands: operands.collect(),
                results: results.collect(),
            }
        });
        Ok(Self { arguments, results, sites: sites.collect() })
    }
}

pub(crate) fn partial(layout: &Layout) -> bool {
    !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
}

/// How a tensor lies once it is no partial result any more: as it is made, and along the axes of partial results as all
/// its readers want it. None where readers take partial results, or nobody touches it.
pub(crate) fn settled(placed: &Placed) -> Option<Layout> {
    let home = placed.home?;
    let readers: Vec<&Layout> = placed.fetches.iter().flat_map(|fetch| &fetch.layouts).collect();
    if partial(&home) {
        if readers.iter().any(|layout| partial(layout)) {
            return None;
        }
        if let [only] = readers[..] {
            return Some(*only);
        }
    }
    let mut settled = home;
    for axis in home.axes_where(|p| matches!(p, Placement::Partial(_))).iter() {
        let wanted = readers.first().map_or(Placement::Replicated, |layout| layout.get(axis));
        let agreed = readers.iter().all(|layout| layout.get(axis) == wanted);
        settled = settled.with(axis, if agreed { wanted } else { Placement::Replicated });
    }
    Some(settled)
}

/// A layout in the dimensions of a value.
fn spec(place: &Place, layout: &Layout, mesh: &Mesh) -> Spec {
    let names = |dim: usize| {
        let axes = layout.shards(dim as u8);
        axes.iter().map(|axis: AxisId| mesh.axis(axis).name.clone()).collect()
    };
    Spec(place.dims.iter().map(|dim| dim.map(names)).collect())
}
