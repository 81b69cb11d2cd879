//! Strategies side by side: on one machine, and under several memory limits.

use crate::interrupt;
use crate::progress::ProgressLine;
use shardwright_machine::{Bytes, show_bytes};
use shardwright_plan::{Constraints, PlanError, optcnn_bytes};
use shardwright_report::{MemoryLimitRow, Row, mark_front};
use shardwright_request::{Inputs, RecomputeUnit, WallClock};
use shardwright_search::Control;
use shardwright_sim::simulate_step;
use shardwright_strategies::{
    EXPERT, Expert, PlanAnswer, Planner, Solution, Strategy, StrategyError, Variant, VariantAnswer,
    VariantError, VariantGraph, VariantInputs, count_moves, find, plan_variants,
};
use std::io;

/// A variant of a model's step on a machine, and the strategies that search on it.
pub struct Race<'r> {
    inputs: &'r Inputs,
    step: &'r VariantGraph<'r>,
    line: &'r ProgressLine,
    planner: Planner<'r>,
}

impl<'r> Race<'r> {
    /// Nothing is priced before the first strategy.
    pub fn new(inputs: &'r Inputs, step: &'r VariantGraph<'r>, line: &'r ProgressLine) -> Self {
        let planner = variant_inputs(inputs).planner(&step.graph);
        Self { inputs, step, line, planner }
    }

    /// Runs strategies one after the other, and shows each row when it is there. Data parallelism runs first: all other rows
    /// are compared with it.
    pub fn run(
        &self,
        strategies: &[&'static dyn Strategy],
        show: &(dyn Fn(&Row) -> io::Result<()> + Sync),
    ) -> anyhow::Result<Vec<Row>> {
        let constraints = self.inputs.constraints();
        let mut expert = self.expert(strategies, &constraints)?;
        let mut order: Vec<(usize, &'static dyn Strategy)> = strategies.iter().copied().enumerate().collect();
        // `auto` comes last: the answers of the others are its candidates.
        order.sort_by_key(|(_, strategy)| match strategy.name() {
            "data" => 0,
            "auto" => 2,
            _ => 1,
        });
        let mut rows: Vec<(usize, Row)> = Vec::new();
        let mut data = None;
        let mut add = |at: usize, mut row: Row| -> io::Result<()> {
            if row.solver == "data" {
                data = row.step_seconds;
            }
            row.speedup_over_data = data.zip(row.step_seconds).map(|(data, own)| data / own);
            show(&row)?;
            rows.push((at, row));
            Ok(())
        };
        for (at, strategy) in order {
            if strategy.name() == "auto" {
                expert.take().into_iter().try_for_each(|row| add(strategies.len(), row))?;
            }
            add(at, self.row(strategy, &constraints)?)?;
        }
        rows.sort_by_key(|(at, _)| *at);
        Ok(rows.into_iter().map(|(_, row)| row).collect())
    }

    /// The row of the best uniform plan, beside the strategies that are held against it. Then it is a candidate of `auto`.
    fn expert(
        &self,
        strategies: &[&'static dyn Strategy],
        constraints: &Constraints,
    ) -> anyhow::Result<Option<Row>> {
        let auto = find("auto")?;
        if strategies.iter().all(|strategy| strategy.name() != auto.name()) {
            return Ok(None);
        }
        self.line.say(&format!("searching on {}: {EXPERT}", devices(self.inputs)));
        let (base, control) = (&self.inputs.graph, self.control(auto));
        let (variant, inputs) = (self.step.variant, variant_inputs(self.inputs));
        let found = Expert::find(base, &[variant], inputs, constraints, &control)?;
        let Some(found) = found else { return Ok(None) };
        let mut row = self.empty_row(EXPERT);
        row.search_seconds = control.elapsed().as_secs_f64();
        found.keep_in(variant, &self.planner, constraints)?;
        let Some(solution) = found.solution(variant, &self.planner, constraints)? else { return Ok(None) };
        self.fill(&mut row, &solution, constraints.memory, &control)?;
        Ok(Some(row))
    }

    /// The best plans of all variants under `limits` memory limits between the least memory of any plan and that of the
    /// fastest, and without any limit.
    pub fn front(
        &self,
        variants: &[Variant],
        limits: u64,
        data: Option<f64>,
    ) -> anyhow::Result<Vec<MemoryLimitRow>> {
        let mut plans = vec![self.limited(variants, None, data)?];
        let most = plans[0].row.peak_memory_bytes.unwrap_or(0);
        if let Some(least) = self.min_memory(variants)?.filter(|&least| least < most) {
            for at in (0..limits).rev() {
                let part = u128::from(most - least) * u128::from(at) / u128::from(limits);
                plans.push(self.limited(variants, Some(Bytes(least + part as u64)), data)?);
            }
        }
        plans.reverse();
        share(&mut plans);
        mark_front(&mut plans);
        Ok(plans)
    }

    /// The best plan of any variant under a limit.
    fn limited(
        &self,
        variants: &[Variant],
        limit: Option<Bytes>,
        data: Option<f64>,
    ) -> anyhow::Result<MemoryLimitRow> {
        let constraints = Constraints { memory: limit, ..self.inputs.constraints() };
        let auto = find("auto")?;
        let mut row = match variants {
            // The answers of all rows are candidates.
            &[only] if only == self.step.variant => self.row(auto, &constraints)?,
            _ => self.best_variant(variants, auto, &constraints),
        };
        row.speedup_over_data = data.zip(row.step_seconds).map(|(data, own)| data / own);
        Ok(MemoryLimitRow { memory_limit_bytes: limit.map(|limit| limit.0), on_front: false, row })
    }

    /// The row of the variant with the shortest step.
    fn best_variant(&self, variants: &[Variant], strategy: &dyn Strategy, constraints: &Constraints) -> Row {
        let limit =
            constraints.memory.map_or_else(String::new, |limit| format!(", {} at most", show_bytes(limit.0)));
        self.line.say(&format!("searching all variants on {}{limit}", devices(self.inputs)));
        let (base, control) = (&self.inputs.graph, self.control(strategy));
        let inputs = variant_inputs(self.inputs);
        let found = plan_variants(base, variants, inputs, strategy, constraints, &control);
        let search_seconds = control.elapsed().as_secs_f64();
        let row = Row { solver: "auto", search_seconds, ..Row::default() };
        match found {
            Ok(VariantAnswer { step, answer: PlanAnswer { plan, .. } }) => Row {
                step_seconds: Some(plan.simulated.step_seconds),
                traffic_bytes: Some(plan.traffic_bytes),
                peak_memory_bytes: Some(plan.peak_memory_bytes),
                fits: Some(plan.fits),
                objective: Some(plan.objective),
                proved_optimal: plan.proved_optimal,
                micro_batches: Some(plan.micro_batches),
                recompute: Some(step.policy),
                ..row
            },
            Err(VariantError { error, .. }) => Row { failure: Some(error.to_string()), ..row },
        }
    }

    /// The least memory known to suffice: of recipes, and from the refusal of a limit that no plan keeps. The variant that keeps
    /// least is the last one.
    fn min_memory(&self, variants: &[Variant]) -> anyhow::Result<Option<u64>> {
        let exact = find("exact")?;
        self.line.say("looking for the plan of least memory");
        let constraints = Constraints { memory: Some(Bytes(1)), ..self.inputs.constraints() };
        let last = variants.last().copied().unwrap_or(self.step.variant);
        let step = last.graph(&self.inputs.graph)?;
        let planner = variant_inputs(self.inputs).planner(&step.graph);
        let found = match exact.solve(&planner, &constraints, &self.control(exact)) {
            Err(StrategyError::Plan(
                PlanError::DoesNotFit { least, .. } | PlanError::NotFound { least, .. },
            )) => least,
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(None),
        };
        // Recipes shard weights, which plans with one config per layer cannot.
        let free = Constraints { memory: None, ..constraints };
        let recipes = planner.recipes(&free, &self.control(exact))?;
        let held = recipes.iter().filter(|own| own.keeps(&free)).map(|own| own.costs.peak_memory.0);
        Ok(found.into_iter().chain(held).min())
    }

    /// Each search has the whole time limit for itself.
    fn control(&self, strategy: &dyn Strategy) -> Control<'static> {
        let control = self.inputs.control(strategy, interrupt::flag());
        control.time_limit(WallClock::global(), self.inputs.request.time)
    }

    fn row(&self, strategy: &'static dyn Strategy, constraints: &Constraints) -> anyhow::Result<Row> {
        let limit =
            constraints.memory.map_or_else(String::new, |limit| format!(", {} at most", show_bytes(limit.0)));
        self.line.say(&format!("searching on {}: {}{limit}", devices(self.inputs), strategy.name()));
        let control = self.control(strategy);
        let mut row = self.empty_row(strategy.name());
        // A strategy that does not search within the limit is shown with its memory, whether it fits or not.
        let limit = constraints.memory;
        let memory = limit.filter(|_| strategy.searches_within_memory());
        let constraints = &Constraints { memory, ..constraints.clone() };
        match strategy.solve(&self.planner, constraints, &control) {
            Ok(mut found) => {
                row.search_seconds = control.elapsed().as_secs_f64();
                if found.step.is_none() {
                    found.step = Some(simulate_step(&found.context, &found.assignment)?);
                }
                self.planner.keep(strategy.name(), constraints, &found);
                self.fill(&mut row, &found, limit, &control)?;
            }
            Err(error) => row.failure = Some(error.to_string()),
        }
        Ok(row)
    }

    /// The row of a solver without its answer.
    fn empty_row(&self, solver: &'static str) -> Row {
        let Variant { micro_batches, .. } = self.step.variant;
        Row {
            solver,
            micro_batches: Some(micro_batches.get()),
            recompute: Some(self.step.policy),
            ..Row::default()
        }
    }

    /// Writes an answer with its simulated step into a row.
    fn fill(
        &self,
        row: &mut Row,
        found: &Solution<'_>,
        limit: Option<Bytes>,
        control: &Control<'_>,
    ) -> anyhow::Result<()> {
        row.step_seconds = found.step.map(|step| step.times.step_seconds);
        row.traffic_bytes = Some(found.costs.traffic.total().0);
        row.peak_memory_bytes = Some(found.costs.peak_memory.0);
        let limit = limit.or_else(|| self.inputs.machine.memory_limit());
        row.fits = Some(limit.is_none_or(|limit| found.costs.peak_memory <= limit));
        row.objective = Some(found.objective());
        row.optcnn_bytes = Some(optcnn_bytes(&found.context, &found.assignment));
        row.proved_optimal = found.coarse.is_none() && found.proved_optimal();
        row.soybean_elements = match &found.moves {
            Some(moves) => Some(moves.total_elements),
            None => {
                count_moves(&found.context, &found.assignment, control).ok().map(|moves| moves.total_elements)
            }
        };
        Ok(())
    }
}

/// A plan that was found under one limit may keep another and be better than what was found there, where the time was
/// up before that was proved.
fn share(plans: &mut [MemoryLimitRow]) {
    let found: Vec<Row> = plans.iter().map(|plan| plan.row.clone()).collect();
    for plan in plans.iter_mut() {
        let fits = |row: &&Row| {
            let held = row.peak_memory_bytes.unwrap_or(u64::MAX);
            row.objective.is_some() && plan.memory_limit_bytes.is_none_or(|limit| held <= limit)
        };
        let Some(best) = found.iter().filter(fits).min_by_key(|row| row.objective) else { continue };
        if plan.row.objective.is_none_or(|own| best.objective < Some(own)) {
            let search_seconds = plan.row.search_seconds;
            plan.row = Row { search_seconds, proved_optimal: false, ..best.clone() };
        }
    }
}

/// The parts of a planner that all variants share.
pub fn variant_inputs(inputs: &Inputs) -> VariantInputs<'_> {
    let Inputs { machine, costs, request, .. } = inputs;
    let recompute_ops = request.recompute_policy == RecomputeUnit::Ops;
    VariantInputs { machine, costs: costs.as_ref(), untied: request.untied, recompute_ops }
}

fn devices(inputs: &Inputs) -> String {
    match inputs.machine.devices() {
        1 => "one device".into(),
        devices => format!("{devices} devices"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_plan_that_keeps_a_limit_counts_wherever_it_was_found() {
        let plan = |limit: Option<u64>, found: Option<(i64, u64)>| MemoryLimitRow {
            memory_limit_bytes: limit,
            on_front: false,
            row: Row {
                objective: found.map(|(cost, _)| cost),
                peak_memory_bytes: found.map(|(_, held)| held),
                proved_optimal: true,
                ..Row::default()
            },
        };
        let mut plans = [
            plan(Some(8), None),
            plan(Some(10), Some((50, 9))),
            plan(Some(20), Some((60, 15))),
            plan(None, Some((40, 30))),
        ];
        share(&mut plans);
        let costs = plans.each_ref().map(|plan| (plan.row.objective, plan.row.proved_optimal));
        assert_eq!(costs, [(None, true), (Some(50), true), (Some(50), false), (Some(40), true)]);
    }
}
