//! A plan with its lowered program: what `run`, `simulate` and `profile` work on.

use shardwright_assist::PlannedTask;
use shardwright_engine::PlannedSchedule;
use shardwright_lower::{InstructionId, LowerOptions, ParallelGraph, lower_with};
use shardwright_plan::Plan;
use shardwright_request::{OpenedPlan, Request, read_plan};
use shardwright_sim::{Classes, Links, Schedule};
use shardwright_space::Sharing;

/// A plan and the program that devices run.
pub struct LoweredPlan {
    /// The plan with its inputs.
    pub opened: OpenedPlan,
    /// The program.
    pub program: ParallelGraph,
    sharing: Sharing,
}

impl LoweredPlan {
    /// Lowers a plan as it runs.
    pub fn new(opened: OpenedPlan) -> anyhow::Result<Self> {
        Self::with(opened, LowerOptions::default())
    }

    /// Lowers a plan with other options.
    pub fn with(opened: OpenedPlan, options: LowerOptions) -> anyhow::Result<Self> {
        // Engine and simulator go through the instructions of all micro-batches.
        let program =
            lower_with(&opened.inputs.graph, &opened.resharder(), &opened.assignment, options)?.unrolled();
        Ok(Self { opened, program, sharing: options.sharing })
    }

    /// Opens the plan file that a request names; none where it names a model.
    pub fn of_file(request: &Request) -> anyhow::Result<Option<Self>> {
        let plan = read_plan(&request.model.name)?;
        plan.map(|plan| Self::new(OpenedPlan::of(plan, request)?)).transpose()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.opened.plan
    }

    /// The tasks of the plan as the simulator sees them, with the times that the cost model predicts.
    pub fn schedule(&self, classes: Classes, links: Links) -> anyhow::Result<Schedule> {
        let (context, assignment) = (self.opened.context()?, &self.opened.assignment);
        Ok(shardwright_sim::schedule(&context, assignment, &self.program, classes, links, self.sharing)?)
    }

    /// The planned times of all tasks on all devices, for scheduling assistants.
    pub fn planned_schedule(&self) -> anyhow::Result<PlannedSchedule> {
        let schedule = self.schedule(Classes::each(&self.program.mesh), Links::Fifo)?;
        let line = schedule.simulate();
        let planned = |device: u32, at: usize| {
            let task = schedule.task(InstructionId(at as u32), device)? as usize;
            // From picoseconds to nanoseconds.
            Some(PlannedTask {
                start: line.start[task] / 1000,
                duration: schedule.tasks.duration(task) / 1000,
            })
        };
        let instructions = 0..self.program.instructions.len();
        let of_device = |device: u32| instructions.clone().map(|at| planned(device, at)).collect();
        Ok(PlannedSchedule((0..self.plan().devices).map(of_device).collect()))
    }
}
