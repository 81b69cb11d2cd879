//! A plan with the inputs that it was made from, its mesh and its assignment. A plan file is parsed once, here.

use crate::{files::read, inputs::Inputs, request::Request};
use anyhow::Context as _;
use shardwright_cost::Resharder;
use shardwright_machine::Mesh;
use shardwright_plan::{Context, Plan};
use shardwright_space::Assignment;
use std::path::Path;

/// A plan, ready to be simulated, run, explained and exported.
pub struct OpenedPlan {
    /// The model and the machine.
    pub inputs: Inputs,
    /// The plan.
    pub plan: Plan,
    /// The mesh that the assignment is on.
    pub mesh: Mesh,
    /// The assignment.
    pub assignment: Assignment,
}

impl OpenedPlan {
    /// Opens a plan file with the model and the machine that it was made for.
    ///
    /// # Errors
    /// Where the file is no plan, or not one of its model and machine.
    pub fn open(file: &str) -> anyhow::Result<Self> {
        Self::of(read_known_plan(file)?, &Request::of_model(file))
    }

    /// Opens a plan with the model and the machine that it was made for; limits of the search are those of `given`.
    ///
    /// # Errors
    /// Where the plan is not one of its model and machine.
    pub fn of(plan: Plan, given: &Request) -> anyhow::Result<Self> {
        let file = &given.model.name;
        let request = plan.request.clone().with_context(|| {
            format!("{file}: the plan does not say how its model was asked for; plan again")
        })?;
        let request: Request = serde_json::from_value(request)
            .map_err(|error| anyhow::anyhow!("{file}: the plan's request is wrong: {error}; plan again"))?;
        let mut inputs = request.with_limits_of(given).open()?;
        inputs.graph = plan.step(inputs.graph)?;
        let mesh = plan.mesh(&inputs.machine)?;
        let assignment = plan.assignment(&inputs.graph, &mesh)?;
        Ok(Self { inputs, plan, mesh, assignment })
    }

    /// The context of the plan's mesh.
    ///
    /// # Errors
    /// Where the costs are of another device.
    pub fn context(&self) -> anyhow::Result<Context<'_>> {
        self.inputs.context(self.mesh.clone(), self.plan.space.untied)
    }

    /// Reshard paths on the plan's mesh.
    pub fn resharder(&self) -> Resharder {
        Resharder::new(&self.inputs.machine, &self.mesh)
    }
}

/// Reads a file that must be a plan.
///
/// # Errors
/// Where it cannot be read, or is no plan.
pub fn read_known_plan(name: &str) -> anyhow::Result<Plan> {
    if let Some(plan) = read_plan(name)? {
        return Ok(plan);
    }
    // A mistyped name is no file at all.
    std::fs::metadata(name).with_context(|| format!("cannot read {name}"))?;
    anyhow::bail!("{name} is not a plan: `plan -o` writes them, and their names end in .json")
}

/// Reads a plan file; none where the name is that of a model.
///
/// # Errors
/// Where the file cannot be read, or is a plan of another version.
pub fn read_plan(name: &str) -> anyhow::Result<Option<Plan>> {
    #[derive(serde::Deserialize)]
    struct Mark {
        #[serde(rename = "machine_fingerprint")]
        _mark: String,
    }
    let path = Path::new(name);
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        return Ok(None);
    }
    let bytes = read(path)?;
    if serde_json::from_slice::<Mark>(&bytes).is_err() {
        return Ok(None);
    }
    Plan::from_json(&bytes).map(Some).map_err(|reason| anyhow::anyhow!("{name}: {reason}"))
}
