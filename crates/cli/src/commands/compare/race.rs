//! Strategies against each other: on one machine, and under several limits of memory.

use crate::planning::{PlanningArgs, Request};
use crate::progress::ProgressLine;
use shardwright_machine::Bytes;
use shardwright_plan::{
    Demands, PlanError, Problem, evaluate, moved, optcnn_bytes,
    strategy::{Space, Strategy},
};
use shardwright_report::{Limited, Row, mark_front};
use shardwright_search::Control;
use shardwright_sim::{SimError, find, search, simulate_step};
use std::time::Instant;

/// A model on a machine with all choices priced, and how strategies may search them.
pub struct Race<'r> {
    planning: &'r PlanningArgs,
    request: &'r Request,
    line: &'r ProgressLine,
    problem: Problem<'r>,
    /// SoyBean's cuts are of prime axes.
    prime: Problem<'r>,
}

impl<'r> Race<'r> {
    /// Prices everything.
    pub fn new(
        planning: &'r PlanningArgs,
        request: &'r Request,
        line: &'r ProgressLine,
    ) -> anyhow::Result<Self> {
        line.say(&format!("pricing every choice on {}", devices(request)));
        let problem = request.problem(&planning.control(request, find("auto")?))?;
        Ok(Self { planning, request, line, problem, prime: request.prime()? })
    }

    /// Runs strategies one after the other.
    pub fn run(&self, strategies: &[&'static Strategy]) -> anyhow::Result<Vec<Row>> {
        let demands = self.planning.demands(self.request);
        let rows = strategies.iter().map(|strategy| self.row(strategy, &demands));
        let mut rows: Vec<Row> = rows.collect::<anyhow::Result<_>>()?;
        let data = rows.iter().find(|row| row.solver == "data").and_then(|row| row.step_seconds);
        for row in &mut rows {
            row.speedup_over_data = data.zip(row.step_seconds).map(|(data, own)| data / own);
        }
        Ok(rows)
    }

    /// The best plans under `limits` limits between what the leanest plan holds and what the fastest one does, and
    /// without any.
    pub fn front(&self, limits: u64, data: Option<f64>) -> anyhow::Result<Vec<Limited>> {
        let auto = find("auto")?;
        let mut plans = vec![self.limited(auto, None, data)?];
        let most = plans[0].row.peak_memory_bytes.unwrap_or(0);
        if let Some(least) = self.leanest()?.filter(|&least| least < most) {
            for at in (0..limits).rev() {
                let part = u128::from(most - least) * u128::from(at) / u128::from(limits);
                plans.push(self.limited(auto, Some(Bytes(least + part as u64)), data)?);
            }
        }
        plans.reverse();
        share(&mut plans);
        mark_front(&mut plans);
        Ok(plans)
    }

    fn limited(
        &self,
        auto: &'static Strategy,
        limit: Option<Bytes>,
        data: Option<f64>,
    ) -> anyhow::Result<Limited> {
        let demands = Demands { memory: limit, ..self.planning.demands(self.request) };
        let mut row = self.row(auto, &demands)?;
        row.speedup_over_data = data.zip(row.step_seconds).map(|(data, own)| data / own);
        Ok(Limited { memory_limit_bytes: limit.map(|limit| limit.0), on_front: false, row })
    }

    /// The smallest limit that is known to be kept: what a limit that nothing can keep is answered with.
    fn leanest(&self) -> anyhow::Result<Option<u64>> {
        let exact = find("exact")?;
        self.line.say("looking for the leanest plan");
        let demands = Demands { memory: Some(Bytes(1)), ..self.planning.demands(self.request) };
        match search(&self.problem, exact, &demands, &self.control(exact)) {
            Err(SimError::Plan(PlanError::DoesNotFit { least, .. })) => Ok(least),
            Err(error) => Err(error.into()),
            Ok(_) => Ok(None),
        }
    }

    /// Each search has the whole time limit for itself.
    fn control(&self, strategy: &Strategy) -> Control<'static> {
        let start = Instant::now();
        let deadline = start.checked_add(self.planning.time);
        Control { start, deadline, ..self.planning.control(self.request, strategy) }
    }

    fn row(&self, strategy: &'static Strategy, demands: &Demands) -> anyhow::Result<Row> {
        let limit = demands.memory.map_or_else(String::new, |limit| format!(", {} bytes at most", limit.0));
        self.line.say(&format!("searching on {}: {}{limit}", devices(self.request), strategy.name));
        let control = self.control(strategy);
        let whole = match strategy.space {
            Space::Whole => Some(self.request.problem_of(strategy, &control)?),
            _ => None,
        };
        let tilings = matches!(strategy.space, Space::Tilings(_));
        let problem = if let Some(whole) = &whole {
            whole
        } else if tilings {
            &self.prime
        } else {
            &self.problem
        };
        let mut row = Row { solver: strategy.name, ..Row::default() };
        match search(problem, strategy, demands, &control) {
            Ok(found) => {
                row.search_seconds = control.elapsed().as_secs_f64();
                let costs = evaluate(problem, &found.configs)?;
                row.step_seconds = Some(simulate_step(problem, &found.configs)?.times.step_seconds);
                row.traffic_bytes = Some(costs.traffic.total().0);
                row.peak_memory_bytes = Some(costs.peak_memory.0);
                row.objective = Some(found.objective);
                let counted = found.moved.ok_or(()).or_else(|()| moved(problem, &found.configs, &control));
                row.soybean_elements = counted.ok().map(|moved| moved.total_elements);
                row.optcnn_bytes = Some(optcnn_bytes(problem, &found.configs));
                row.proved_optimal = strategy.solver.is_some() && found.objective <= found.bound;
            }
            Err(error) => row.failure = Some(error.to_string()),
        }
        Ok(row)
    }
}

/// A plan that was found under one limit may keep another and be better than what was found there, where the time was
/// up before that was proved.
fn share(plans: &mut [Limited]) {
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

fn devices(request: &Request) -> String {
    match request.machine.devices() {
        1 => "one device".into(),
        devices => format!("{devices} devices"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_plan_that_keeps_a_limit_counts_wherever_it_was_found() {
        let plan = |limit: Option<u64>, found: Option<(i64, u64)>| Limited {
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
