//! How the values of a StableHLO program lie under a plan.
//!
//! XLA has no word for partial sums between ops: a value that an op leaves as a partial result is said to lie as it does
//! once it is summed up, which makes XLA sum it up right there, and then as its readers want it.

use crate::tensor_paths::{PlanLayouts, partial};
use serde::Serialize;
use shardwright_cost::{Arrangement, Layout, LayoutError, Resharder};
use shardwright_graph::{Graph, Role, TensorId, batch_dims};
use shardwright_machine::Mesh;
use shardwright_space::Assignment;
use shardwright_stablehlo::{ImportedProgram, OperandUse, TensorView};
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
    /// How its operands come to lie, where that is known: the stops on their way, what the operation needs last.
    pub operands: Vec<Option<Vec<Spec>>>,
    /// How its results come to lie: summed up first, where they are partial sums, and from then on last.
    pub results: Vec<Option<Vec<Spec>>>,
}

/// How everything lies.
#[derive(Clone, Debug, Serialize)]
pub struct Shardings {
    /// The program's arguments.
    pub arguments: Vec<Spec>,
    /// The roles of the program's arguments.
    pub roles: Vec<Role>,
    /// Per argument: the dimension that runs over the samples of the batch.
    pub batch_dims: Vec<Option<usize>>,
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
        "the plan keeps `{tensor}` on some devices only, which shardings of XLA and DTensor cannot express; plan with `--spmd`"
    )]
    Pinned {
        /// The tensor.
        tensor: String,
    },
    /// A layout that cannot be.
    #[error("`{tensor}`: {source}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// Why not.
        source: LayoutError,
    },
}

impl Shardings {
    /// Those of a program whose graph has these configs, on the mesh of `resharder`. The graph is the program's own,
    /// wherever it is kept.
    ///
    /// # Errors
    /// Where the configs pin ops to devices.
    pub fn of(
        program: &ImportedProgram,
        graph: &Graph,
        resharder: &Resharder,
        assignment: &Assignment,
    ) -> Result<Self, ExportError> {
        let known = PlanLayouts::of(graph, resharder, assignment)?;
        let mesh = known.mesh;
        let settled = |t: TensorId| known.paths[t.index()].settled;
        let whole = |t: TensorId, layout: Option<Layout>| {
            let dims = (0..graph.tensor(t).ty.rank()).map(Some).collect();
            let layout = layout.unwrap_or_else(|| Layout::replicated(mesh.len()));
            spec(&TensorView { tensor: t, dims }, &Arrangement::canonical(&layout), mesh)
        };
        let result = |&t: &TensorId| {
            let stored = graph.carries.iter().find(|carry| carry.new == t).map(|carry| carry.old);
            whole(t, settled(stored.unwrap_or(t)))
        };
        let operand = |reader: &OperandUse| {
            let layout = known.layouts.input(reader.op, reader.input, &known.shapes[reader.op.index()], mesh);
            // A sum that is done on partial results reads what nobody can name.
            let chain = (!partial(&layout)).then(|| known.paths[reader.view.tensor.index()].to(&layout))?;
            Some(chain.iter().map(|at| spec(&reader.view, at, mesh)).collect::<Vec<Spec>>())
        };
        let reshards = |reader: &&OperandUse| {
            let layout = known.layouts.input(reader.op, reader.input, &known.shapes[reader.op.index()], mesh);
            settled(reader.view.tensor) != Some(layout)
        };
        // A view lies as all who look want it, where they want the same.
        let looked_at = |view_readers: &[OperandUse]| {
            let wanted = view_readers.iter().map(operand).collect::<Option<Vec<_>>>()?;
            let first = wanted.first()?.clone();
            wanted.iter().all(|stops| stops.last() == first.last()).then_some(first)
        };
        // Operations that only show a tensor in another way come after the one that makes it, and must not undo its split.
        let mut there = vec![false; graph.tensors.len()];
        let mut made = |(place, after): (&Option<TensorView>, &Vec<OperandUse>)| {
            let place = place.as_ref()?;
            let layouts: Vec<Layout> = known.paths[place.tensor.index()].made()?.collect();
            let shown = std::mem::replace(&mut there[place.tensor.index()], true);
            let mut stops: Vec<Spec> =
                layouts.iter().map(|layout| spec(place, &Arrangement::canonical(layout), mesh)).collect();
            stops.extend(after.iter().filter_map(operand).flatten());
            stops.dedup();
            if shown {
                stops.drain(..stops.len() - 1);
            }
            Some(stops)
        };
        let sites = program.sites.iter().map(|site| {
            let (at, name) = (site.at, site.name.clone());
            if let Some(stops) = looked_at(&site.view_readers) {
                return SiteSpecs { at, name, operands: vec![Some(stops)], results: vec![None] };
            }
            let read = |(reader, views): (&Option<OperandUse>, &Vec<OperandUse>)| {
                let own = operand(reader.as_ref()?)?;
                // Forms that are shown where the value lies need no constraint, which would hide that readers share a reshard.
                let forms = views.iter().filter(reshards).filter_map(operand).flatten();
                let mut stops: Vec<Spec> = forms.chain(own).collect();
                stops.dedup();
                Some(stops)
            };
            let operands = site.operands.iter().zip(&site.operand_views).map(read).collect();
            let results = site.results.iter().zip(&site.result_views).map(&mut made).collect();
            SiteSpecs { at, name, operands, results }
        });
        let sites: Vec<SiteSpecs> = sites.collect();
        let batch = batch_dims(graph);
        Ok(Self {
            batch_dims: program.arguments.iter().map(|&t| batch[t.index()]).collect(),
            arguments: program.arguments.iter().map(|&t| whole(t, settled(t))).collect(),
            roles: program.arguments.iter().map(|&t| graph.tensor(t).role).collect(),
            results: program.results.iter().map(result).collect(),
            sites,
        })
    }
}

/// An arrangement in the dimensions of a value.
fn spec(place: &TensorView, at: &Arrangement, mesh: &Mesh) -> Spec {
    let names = |dim: usize| {
        let axes = at.axes_of(dim as u8);
        axes.iter().map(|&axis| mesh.axis(axis).name.clone()).collect()
    };
    Spec(place.dims.iter().map(|dim| dim.map(names)).collect())
}
