//! A plan with its inputs, as Python holds it.

use crate::PlanError;
use pyo3::prelude::*;
use shardwright_cost::Resharder;
use shardwright_export::{ExportError, Layouts, Shardings, collectives, to_sdy, xla_memory};
use shardwright_graph::Graph;
use shardwright_report::Page;
use shardwright_request::{Detail, OpenedPlan, Program, WallClock, summarise};
use shardwright_search::Control;
use shardwright_space::Assignment;
use std::time::Duration;

/// The time limit for the costs of alternatives on a page.
const PATIENCE: Duration = Duration::from_secs(20);

/// A plan with its inputs.
#[pyclass(frozen, module = "shardwright._native")]
pub(crate) struct PlanHandle(OpenedPlan);

impl PlanHandle {
    pub(crate) fn new(opened: OpenedPlan) -> Self {
        Self(opened)
    }

    fn program(&self) -> anyhow::Result<&Program> {
        let OpenedPlan { inputs, plan, .. } = &self.0;
        inputs.program.as_ref().ok_or_else(|| {
            anyhow::anyhow!(
                "only plans of StableHLO programs have shardings; this one was made for {}",
                plan.model
            )
        })
    }

    fn program_shardings(&self) -> anyhow::Result<Shardings> {
        let OpenedPlan { inputs, assignment, .. } = &self.0;
        let program = self.program()?;
        Ok(Shardings::of(&program.imported, &inputs.graph, &self.0.resharder(), assignment)?)
    }

    fn page(&self) -> anyhow::Result<String> {
        let OpenedPlan { plan, assignment, .. } = &self.0;
        let control = Control::new().time_limit(WallClock::global(), PATIENCE);
        let mut page = Vec::new();
        Page::new(&self.0.context()?, plan, assignment, &[], &control)?.write(&mut page)?;
        Ok(String::from_utf8(page)?)
    }

    fn exported<T: serde::Serialize>(
        &self,
        export: impl FnOnce(&Graph, &Resharder, &Assignment) -> Result<T, ExportError>,
    ) -> anyhow::Result<String> {
        let exported = export(&self.0.inputs.graph, &self.0.resharder(), &self.0.assignment)?;
        Ok(serde_json::to_string(&exported)?)
    }
}

fn failed(error: anyhow::Error) -> PyErr {
    PlanError::new_err(shardwright_request::printed(&format!("{error:#}")))
}

#[pymethods]
impl PlanHandle {
    /// The plan's JSON.
    fn to_json(&self) -> PyResult<String> {
        self.0.plan.to_json().map_err(|error| PlanError::new_err(error.to_string()))
    }

    /// The plan as people read it; `detail` is `verdict`, `usual` or `all`.
    fn table(&self, detail: &str) -> PyResult<String> {
        let detail = match detail {
            "verdict" => Detail::Verdict,
            "all" => Detail::All,
            _ => Detail::Usual,
        };
        let mut text = Vec::new();
        summarise(&mut text, &self.0.plan, detail)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The report: a page of HTML.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.page()).map_err(failed)
    }

    /// The layouts of the program's values: JSON.
    fn shardings(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| Ok(serde_json::to_string(&self.program_shardings()?)?)).map_err(failed)
    }

    /// The program with its shardings in Shardy's dialect.
    fn to_sdy(&self, py: Python<'_>) -> PyResult<String> {
        let write = || {
            let OpenedPlan { plan, mesh, .. } = &self.0;
            Ok(to_sdy(&self.program()?.text, &plan.model, &self.program_shardings()?, mesh)?)
        };
        py.detach(write).map_err(failed)
    }

    /// Bytes that XLA's program needs on one device; `donated` are positions of arguments whose memory it may reuse.
    fn xla_memory(&self, py: Python<'_>, donated: Vec<usize>) -> PyResult<u64> {
        let bytes = || {
            let imported = &self.program()?.imported;
            let donated: Vec<_> =
                donated.iter().filter_map(|&i| imported.arguments.get(i).copied()).collect();
            let OpenedPlan { inputs, assignment, .. } = &self.0;
            Ok(xla_memory(&inputs.graph, &self.0.resharder(), assignment, &donated, &imported.stacks)?)
        };
        py.detach(bytes).map_err(failed)
    }

    /// The collectives that an engine runs: JSON.
    fn collectives(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.exported(collectives)).map_err(failed)
    }

    /// The layouts of every forward op's tensors and of the weights: JSON.
    fn layouts(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.exported(Layouts::of)).map_err(failed)
    }
}
