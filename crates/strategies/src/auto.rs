//! `auto`: the default. The answers of all other strategies are its candidates, and the shortest simulated step wins.
//!
//! 1. The recipes and the best uniform plan, at once: so there is an answer from the beginning.
//! 2. `exact`, with most of the time. Its answer is proved, of the network's sum without overlap.
//! 3. `optcnn` and `pase`. Answers of equal sums may overlap differently.
//! 4. `place`, where the longest path of whole layers does not rule it out, and SoyBean's cuts.
//! 5. Walks on the simulated step from the fastest candidates.
//!
//! Nothing can be proved of the simulated step. So a walk has to gain [`LEAST_GAIN`] before it costs a proof of the sum. The
//! lower bound stays that of the sum.

use crate::{
    Planner, Solution, Strategy,
    baselines::{PricedRecipe, baseline},
    error::StrategyError,
    exact::{Exact, untied_on_prime_axes},
    expert::EXPERT,
    mcmc::Mcmc,
    network_search::milliseconds,
    optcnn::OptCnn,
    pase::{self, Pase},
    place::{self, Place},
    polish::polish,
    recipes::{RECIPES, Recipe},
    soybean::{SOYBEAN, SOYBEAN_TIME},
};
use shardwright_plan::{Constraints, Optimised, PlanError, compute_lower_bound};
use shardwright_search::{Control, StopReason};
use shardwright_sim::simulate_step;

/// The strategy `auto`.
pub struct Auto;

const NAME: &str = "auto";
/// The least gain of the simulated step for which a walk gives a proof up.
const LEAST_GAIN: f64 = 0.01;
/// Walks start from the searched answer too if its step is longer than the fastest by at most this share.
const NEAR: f64 = 0.05;
/// The most bytes that the tables of `optcnn` and `pase` take: a fraction of a second of work.
const MOST_TABLES: u64 = 256 << 20;

impl Strategy for Auto {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "the shortest simulated step of all strategies, and of walks from there"
    }

    fn optimises(&self) -> Optimised {
        Optimised::Sum
    }

    fn searches_within_memory(&self) -> bool {
        true
    }

    fn accepts(&self, _: &Recipe) -> bool {
        true
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let recipes = planner.recipes(constraints, control)?;
        let search = || match planner.kept(Exact.name(), constraints) {
            Some(kept) => Ok(kept),
            None => Exact.solve(planner, constraints, &control.all_but(4)),
        };
        let mut candidates = Candidates { all: Vec::new(), planner, constraints };
        let searched = match search() {
            Err(StrategyError::Plan(error)) if error.is_without_answer() && !error.is_too_large() => {
                Err(error)
            }
            searched => {
                let searched = searched?;
                if !candidates.add(Exact.name(), searched.clone())? {
                    // The program is too large to be simulated: the sum decides.
                    return Ok(searched);
                }
                Ok(searched)
            }
        };
        let planned = control.elapsed();
        for recipe in RECIPES {
            let own = baseline(recipes, recipe.name(), constraints).filter(|own| own.keeps(constraints));
            // When the time is up, nothing more is simulated.
            let in_time = |own: &&PricedRecipe<'_>| own.step.is_some() || !control.is_over();
            if let Some(own) = own.filter(|own| candidates.all.is_empty() || in_time(own)) {
                candidates.add(recipe.name(), own.solution())?;
            }
        }
        candidates.run_others(control)?;
        // Where no plan per layer fits, plans per op are searched, as recipes that shard weights are.
        let searched = match searched {
            Err(error) if !planner.is_untied() => {
                match untied_on_prime_axes(
                    planner,
                    constraints,
                    &candidates.solutions(),
                    &control.all_but(4),
                )? {
                    Some(mut untied) if candidates.add(Exact.name(), untied.clone())? => {
                        untied.search_notes.push(error.outcome());
                        Ok(untied)
                    }
                    _ => Err(error),
                }
            }
            searched => searched,
        };
        let proof = searched.as_ref().ok().cloned();
        let Fastest { mut solution, name, note } = candidates.fastest(searched, control)?;
        // A note on the fastest candidate is no longer of the plan that a walk leads to.
        if !candidates.polish(&mut solution, name, proof, control)? {
            solution.search_notes.extend(note);
        }
        solution.stages.polish_seconds = control.elapsed().saturating_sub(planned).as_secs_f64();
        Ok(solution)
    }
}

/// The fastest candidate.
struct Fastest<'a> {
    /// Its answer, with what `exact` searched and proved.
    solution: Solution<'a>,
    /// The strategy that found it.
    name: &'static str,
    /// A fact about it, for people.
    note: Option<String>,
}

/// The strategies' answers that keep the constraints, with their simulated steps.
struct Candidates<'c, 'a> {
    all: Vec<(&'static str, Solution<'a>)>,
    planner: &'c Planner<'a>,
    constraints: &'c Constraints,
}

impl<'a> Candidates<'_, 'a> {
    /// Adds an answer; false where its program is too large to be simulated.
    fn add(&mut self, name: &'static str, mut answer: Solution<'a>) -> Result<bool, StrategyError> {
        if answer.step.is_none() {
            match simulate_step(&answer.context, &answer.assignment).map_err(StrategyError::from) {
                Err(StrategyError::Size(_)) => return Ok(false),
                step => answer.step = Some(step?),
            }
        }
        self.all.push((name, answer));
        Ok(true)
    }

    /// The answers.
    fn solutions(&self) -> Vec<&Solution<'a>> {
        self.all.iter().map(|(_, answer)| answer).collect()
    }

    /// The answer with the shortest step; the first of equals.
    fn best(&self) -> Option<&(&'static str, Solution<'a>)> {
        self.all.iter().min_by_key(|(_, answer)| makespan(answer))
    }

    /// Runs the other strategies, unless their answers are kept already. One without an answer is no candidate.
    fn run_others(&mut self, control: &Control<'_>) -> Result<(), StrategyError> {
        for name in [EXPERT, Mcmc.name()] {
            if let Some(kept) = self.planner.kept(name, self.constraints) {
                self.add(name, kept)?;
            }
        }
        // Listeners hear of sums; these strategies report other quantities, or other spaces.
        let quiet = Control { progress: None, ..control.clone() };
        let tables = Control { memory_bytes: control.memory_bytes.min(MOST_TABLES), ..quiet.clone() };
        self.run(&OptCnn, &tables.share(6))?;
        if self.planner.kept(Pase.name(), self.constraints).is_some()
            || self.pase_is_faster(&tables.share(6))?
        {
            self.run(&Pase, &tables.share(4))?;
        }
        if self.planner.kept(Place.name(), self.constraints).is_some()
            || (!control.is_over() && self.place_may_be_faster()?)
        {
            self.run(&Place, &quiet.share(3))?;
        }
        self.run(&SOYBEAN_TIME, &quiet.share(3))?;
        self.run(&SOYBEAN, &quiet.share(3))
    }

    /// Whether PaSE's answer on the searched axes is faster than all others: then it is worth a refinement.
    fn pase_is_faster(&self, control: &Control<'_>) -> Result<bool, StrategyError> {
        let Some(problem) = self.planner.problem_if_built().filter(|_| !control.is_over()) else {
            return Ok(false);
        };
        let Ok(answer) = pase::SEARCH.run(problem, self.constraints, control) else { return Ok(false) };
        match simulate_step(&problem.context, &answer.assignment).map_err(StrategyError::from) {
            Err(StrategyError::Size(_)) => Ok(false),
            step => Ok(step?.makespan < self.shortest()),
        }
    }

    /// Whether the longest path of whole layers leaves room for a shorter step.
    fn place_may_be_faster(&self) -> Result<bool, StrategyError> {
        let offered = !self.constraints.spmd && self.constraints.configs.is_empty();
        let prime = self.planner.prime()?;
        Ok(offered && place::is_small(&prime) && place::longest_path(&prime)? < self.shortest())
    }

    /// The shortest step so far.
    fn shortest(&self) -> u64 {
        self.best().map_or(u64::MAX, |(_, answer)| makespan(answer))
    }

    fn run(&mut self, strategy: &dyn Strategy, control: &Control<'_>) -> Result<(), StrategyError> {
        let answer = match self.planner.kept(strategy.name(), self.constraints) {
            Some(kept) => kept,
            None if control.is_over() => return Ok(()),
            None => match strategy.solve(self.planner, self.constraints, control) {
                Ok(answer) => answer,
                Err(_) => return Ok(()),
            },
        };
        self.add(strategy.name(), answer)?;
        Ok(())
    }

    /// The fastest candidate. What was searched, and proved, is that of `exact`.
    fn fastest(
        &self,
        searched: Result<Solution<'a>, PlanError>,
        control: &Control<'_>,
    ) -> Result<Fastest<'a>, StrategyError> {
        let Some(&(name, ref best)) = self.best() else {
            let free = self.constraints.configs.is_empty();
            let recipes = self.planner.recipes(self.constraints, control)?.iter().filter(|_| free);
            let least = recipes.map(|own| own.costs.peak_memory.0).min();
            return Err(searched.err().unwrap_or_else(nothing).of_solver(NAME).with_known(least).into());
        };
        let best = best.clone();
        let step = milliseconds(makespan(&best) as i64);
        let (mut solution, note) = match searched {
            Ok(_) if name == Exact.name() => return Ok(Fastest { solution: best, name, note: None }),
            Ok(searched) => {
                let note = format!(
                    "{name} has the shortest simulated step: {step:.3} ms; the plan of exact takes {:.3} ms",
                    milliseconds(self.makespan_of(Exact.name()) as i64)
                );
                (searched.with_answer_of(best, self.planner.problem_if_built())?, note)
            }
            Err(error) => {
                let stop_reason = control.stop(0).unwrap_or(StopReason::Exhausted);
                let note = format!("the plan is that of {name}");
                let (moves, placements) = (None, Vec::new());
                let computing = compute_lower_bound(&best.context)?;
                let lower_bound = Some(computing);
                let mut solution = Solution { lower_bound, stop_reason, moves, placements, ..best };
                solution.search_notes.push(error.outcome());
                (solution, note)
            }
        };
        solution.optimised = Optimised::Simulated;
        Ok(Fastest { solution, name, note: Some(note) })
    }

    fn makespan_of(&self, name: &str) -> u64 {
        self.all.iter().find(|(own, _)| *own == name).map_or(u64::MAX, |(_, answer)| makespan(answer))
    }

    /// Replaces the solution, which `name` found, by the best of walks from it, and from the answer of `exact`, if that gains
    /// enough; returns whether it did. `proof` is the answer of `exact`: its bound holds again if a walk returns to the searched
    /// space.
    fn polish(
        &self,
        solution: &mut Solution<'a>,
        name: &'static str,
        proof: Option<Solution<'a>>,
        control: &Control<'_>,
    ) -> Result<bool, StrategyError> {
        let problem = self.planner.problem_if_built();
        let shortest = makespan(solution);
        let near = (shortest as f64 * (1.0 + NEAR)) as u64;
        let other = self.all.iter().find(|(name, answer)| {
            *name == Exact.name() && answer.assignment != solution.assignment && makespan(answer) <= near
        });
        let mut start = Some((name, &*solution));
        let mut found: Option<(Solution<'a>, String)> = None;
        let mut least = match solution.proved_optimal() {
            true => (shortest as f64 * (1.0 - LEAST_GAIN)) as u64,
            false => shortest.saturating_sub(1),
        };
        // A walk may trade the sum for the step, but no recipe is cheaper by the sum than its result.
        let sums = self.all.iter().filter(|(_, answer)| answer.optimised == Optimised::Nothing);
        let most = sums.map(|(_, answer)| answer.objective()).min().unwrap_or(i64::MAX);
        let most = most.max(solution.objective());
        let mut next = other.map(|(name, answer)| (*name, answer));
        while let Some((name, from)) = start {
            if let Some((step, assignment)) = polish(from, problem, least, self.constraints, control)? {
                let better = Solution::new(from.context.clone(), assignment, Optimised::Simulated)?;
                if better.objective() > most {
                    start = next.take();
                    continue;
                }
                least = step.makespan.saturating_sub(1);
                let note = format!(
                    "polished on the simulated step, from the plan of {name}: {:.3} ms became {:.3} ms; without overlap that plan \
                     takes {:.3} ms{} and this one {:.3} ms",
                    milliseconds(makespan(from) as i64),
                    milliseconds(step.makespan as i64),
                    milliseconds(from.objective()),
                    if from.proved_optimal() { " (proved optimal)" } else { "" },
                    milliseconds(better.objective())
                );
                found = Some((Solution { step: Some(step), ..better }, note));
            }
            start = next.take();
        }
        let Some((better, note)) = found else { return Ok(false) };
        let mut search_notes = std::mem::take(&mut solution.search_notes);
        search_notes.push(note);
        let searched = proof.unwrap_or_else(|| solution.clone());
        *solution = Solution { search_notes, ..searched.with_answer_of(better, problem)? };
        Ok(true)
    }
}

/// Picoseconds of the simulated step.
fn makespan(answer: &Solution<'_>) -> u64 {
    answer.step.map_or(u64::MAX, |step| step.makespan)
}

fn nothing() -> PlanError {
    PlanError::NoPlan { solver: NAME.into(), reason: "there are no candidates".into() }
}
