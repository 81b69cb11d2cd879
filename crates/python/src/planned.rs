//! A plan, with what it was made from.

use crate::PlanError;
use pyo3::prelude::*;
use shardwright_cost::Relayouts;
use shardwright_export::{ExportError, Layouts, Shardings, collectives, to_sdy, xla_memory};
use shardwright_graph::Graph;
use shardwright_machine::Mesh;
use shardwright_plan::Plan;
use shardwright_report::Page;
use shardwright_request::{Detail, Program, Request, summarise};
use shardwright_search::Control;
use shardwright_space::Config;
use std::time::Duration;

/// The longest that a page is worked on for what alternatives cost with everything else chosen anew.
const PATIENCE: Duration = Duration::from_secs(20);

/// A plan and the request that it answers.
#[pyclass(frozen, module = "shardwright._native")]
pub(crate) struct Planned {
    plan: Plan,
    request: Request,
}

impl Planned {
    pub(crate) fn new(plan: Plan, request: Request) -> Self {
        Self { plan, request }
    }

    fn with_program<T>(&self, then: impl FnOnce(&Program) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let Some(program) = &self.request.program else {
            anyhow::bail!(
                "only plans of StableHLO programs have shardings; this one was made for {}",
                self.plan.model
            );
        };
        then(program)
    }

    fn with_shardings<T>(
        &self,
        then: impl FnOnce(&Program, &Shardings, &Mesh) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.with_program(|program| {
            let mesh = self.plan.mesh(&self.request.machine)?;
            let configs = self.plan.configs(&self.request.graph, &mesh)?;
            let relayouts = Relayouts::new(&self.request.machine, &mesh);
            let shardings = Shardings::of(&program.imported, &self.request.graph, &relayouts, &configs)?;
            then(program, &shardings, &mesh)
        })
    }

    fn page(&self) -> anyhow::Result<String> {
        let problem = self.request.bare(self.plan.mesh(&self.request.machine)?, self.plan.space.untied)?;
        let mut page = Vec::new();
        Page::new(&problem, &self.plan, &[], &Control::new().time_limit(PATIENCE))?.write(&mut page)?;
        Ok(String::from_utf8(page)?)
    }

    fn with_configs<T: serde::Serialize>(
        &self,
        then: impl FnOnce(&Graph, &Relayouts, &[Config]) -> Result<T, ExportError>,
    ) -> anyhow::Result<String> {
        let mesh = self.plan.mesh(&self.request.machine)?;
        let configs = self.plan.configs(&self.request.graph, &mesh)?;
        let relayouts = Relayouts::new(&self.request.machine, &mesh);
        Ok(serde_json::to_string(&then(&self.request.graph, &relayouts, &configs)?)?)
    }
}

fn failed(error: anyhow::Error) -> PyErr {
    PlanError::new_err(format!("{error:#}"))
}

#[pymethods]
impl Planned {
    /// The plan's JSON.
    fn to_json(&self) -> String {
        self.plan.to_json()
    }

    /// The plan as people read it; `detail` is `verdict`, `usual` or `all`.
    fn table(&self, detail: &str) -> PyResult<String> {
        let detail = match detail {
            "verdict" => Detail::Verdict,
            "all" => Detail::All,
            _ => Detail::Usual,
        };
        let mut text = Vec::new();
        summarise(&mut text, &self.plan, detail)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The report: a page of HTML.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.page()).map_err(failed)
    }

    /// How the values of the program lie: JSON.
    fn shardings(&self, py: Python<'_>) -> PyResult<String> {
        let json = |shardings: &Shardings| Ok(serde_json::to_string(shardings)?);
        py.detach(|| self.with_shardings(|_, shardings, _| json(shardings))).map_err(failed)
    }

    /// The program with its shardings in Shardy's dialect.
    fn to_sdy(&self, py: Python<'_>) -> PyResult<String> {
        let write = |program: &Program, shardings: &Shardings, mesh: &Mesh| {
            Ok(to_sdy(&program.text, &self.plan.model, shardings, mesh)?)
        };
        py.detach(|| self.with_shardings(write)).map_err(failed)
    }

    /// Bytes that XLA's program is given on one device; `donated` are positions of arguments whose memory it may use.
    fn xla_memory(&self, py: Python<'_>, donated: Vec<usize>) -> PyResult<u64> {
        let given = |program: &Program| {
            let arguments = &program.imported.arguments;
            let donated: Vec<_> = donated.iter().filter_map(|&i| arguments.get(i).copied()).collect();
            let mesh = self.plan.mesh(&self.request.machine)?;
            let configs = self.plan.configs(&self.request.graph, &mesh)?;
            let relayouts = Relayouts::new(&self.request.machine, &mesh);
            Ok(xla_memory(&self.request.graph, &relayouts, &configs, &donated)?)
        };
        py.detach(|| self.with_program(given)).map_err(failed)
    }

    /// What an engine has to exchange: JSON.
    fn collectives(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.with_configs(collectives)).map_err(failed)
    }

    /// How every op of the forward pass is split and how weights lie: JSON.
    fn layouts(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.with_configs(Layouts::of)).map_err(failed)
    }
}
