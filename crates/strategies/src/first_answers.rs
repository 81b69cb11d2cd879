//! First answers of a step's variants: lower bounds, and the recipes that fit, before anything is searched.
//!
//! 1. More micro-batches hold less and gather more often. So every policy of recomputation has a ladder: it looks for the smallest
//!    number of micro-batches in which a recipe fits, by doubling steps and then halves. Policies take turns. A variant whose
//!    memory bound exceeds the limit is ruled out.
//! 2. Every number of micro-batches gets a lower bound on computing. That of the step that recomputes nothing bounds all policies.
//! 3. Other variants follow, those with the least computing first, until computing rules out all others.
//! 4. Where time is left, recipes are priced in variants that may be their best one: [`crate::variant_baselines`].

use crate::{
    error::StrategyError,
    known_plan::KnownPlan,
    variant_baselines::{FirstAnswer, VariantBaselines},
    variant_race::Race,
    variants::{Variant, VariantGraphError},
};
use rayon::prelude::*;
use shardwright_graph::{OpId, RecomputePolicy, recomputed_ops};
use shardwright_plan::{memory_lower_bound, step_lower_bound};
use shardwright_search::Control;
use std::num::NonZeroU32;

/// The ladders may take one in so many parts of the time, and so may the bounds.
const LADDERS: u32 = 6;
/// All first answers together.
const FIRST_ANSWERS: u32 = 3;

/// Lower bounds that hold for all plans of a variant; zero where nothing is known.
#[derive(Clone, Copy, Default)]
pub(crate) struct Bounds {
    /// Picoseconds of computing that no step avoids, with overlap or without.
    pub computing: i64,
    /// Bytes that some device holds.
    pub memory: u64,
}

/// What is known of a variant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Visited,
    RuledOut,
    /// It recomputes what another variant recomputes.
    Same,
}

/// A variant before its search.
pub(crate) struct Entry {
    /// The variant.
    pub variant: Variant,
    /// Its bounds.
    pub bounds: Bounds,
    /// The fastest recipe.
    pub first_answer: Option<FirstAnswer>,
    /// Whether the bounds are the variant's own, not those of the step that recomputes nothing.
    is_exact: bool,
    state: State,
}

impl Entry {
    /// Whether the variant's own memory is bounded.
    pub(crate) fn is_bounded(&self) -> bool {
        self.is_exact || self.state != State::Open
    }
}

/// The first answers of all variants.
pub(crate) struct FirstAnswers {
    /// The variants that are not ruled out.
    pub entries: Vec<Entry>,
    /// The fastest plan that is known.
    pub incumbent: Option<(Variant, KnownPlan)>,
    /// The recipes in their best variants.
    pub baselines: VariantBaselines,
    /// Variants that memory rules out.
    pub ruled_out: usize,
    /// Facts, for people.
    pub notes: Vec<String>,
}

/// Finds first answers of variants.
///
/// # Errors
/// Where a recipe cannot be priced.
pub(crate) fn first_answers(
    race: &Race<'_, '_>,
    variants: &[Variant],
) -> Result<FirstAnswers, StrategyError> {
    let (all, ladders) = (race.control.share(FIRST_ANSWERS), race.control.share(LADDERS));
    let limit = race.constraints.memory.map_or(u64::MAX, |limit| limit.0);
    let mut visits = Visits {
        race,
        limit,
        entries: Vec::new(),
        recomputed: Vec::new(),
        shortest: f64::INFINITY,
        decided: None,
        incumbent: None,
        baselines: VariantBaselines::default(),
    };
    let notes = visits.list(variants);
    visits.take_expert();
    visits.climb(&ladders)?;
    // Bounds have time of their own, also where a ladder took longer.
    visits.bound(&race.control.share(LADDERS))?;
    visits.visit_rest(&all)?;
    visits.visit_for_baselines(&all)?;
    let Visits { mut entries, incumbent, baselines, .. } = visits;
    let is_left = |own: &Entry| matches!(own.state, State::Open | State::Visited);
    let ruled_out = entries.iter().filter(|own| own.state == State::RuledOut).count();
    if !entries.iter().any(is_left) {
        // The refusal of the leanest variant says how much is missing.
        let out = entries.into_iter().filter(|own| own.state == State::RuledOut);
        entries = out.min_by_key(|own| own.bounds.memory).into_iter().collect();
    } else {
        entries.retain(is_left);
    }
    Ok(FirstAnswers { entries, incumbent, baselines, ruled_out, notes })
}

struct Visits<'v, 'r, 'g> {
    race: &'v Race<'r, 'g>,
    limit: u64,
    entries: Vec<Entry>,
    /// The ops that visited variants recompute.
    recomputed: Vec<(NonZeroU32, Vec<OpId>)>,
    /// Seconds of the fastest recipe.
    shortest: f64,
    /// A variant whose first answer memory does not limit.
    decided: Option<Variant>,
    incumbent: Option<(Variant, KnownPlan)>,
    baselines: VariantBaselines,
}

impl Visits<'_, '_, '_> {
    /// Lists the variants that exist. Returns a note on the others.
    fn list(&mut self, variants: &[Variant]) -> Vec<String> {
        let mut counts: Vec<NonZeroU32> = variants.iter().map(|variant| variant.micro_batches).collect();
        counts.sort_unstable();
        counts.dedup();
        let exists = |&micro_batches: &NonZeroU32| {
            let step = Variant { micro_batches, ..Variant::BASE }.graph(self.race.base);
            (micro_batches, step.err())
        };
        let known: Vec<(NonZeroU32, Option<VariantGraphError>)> = counts.par_iter().map(exists).collect();
        let missing: Vec<_> =
            known.iter().filter_map(|(count, error)| Some((count, error.as_ref()?))).collect();
        for &variant in variants {
            if missing.iter().all(|(count, _)| **count != variant.micro_batches) {
                self.entries.push(Entry {
                    variant,
                    bounds: Bounds::default(),
                    first_answer: None,
                    is_exact: false,
                    state: State::Open,
                });
            }
        }
        let all = counts.len();
        let note = |(_, error): &(_, &VariantGraphError)| {
            format!("{} of {all} numbers of micro-batches are impossible: {error}", missing.len())
        };
        missing.first().map(note).into_iter().collect()
    }

    /// Takes the best uniform plan as the first answer of its variant.
    fn take_expert(&mut self) {
        let Some(expert) = self.race.known_expert() else { return };
        let (variant, (known, held)) = (expert.variant, expert.fastest());
        let first = FirstAnswer { seconds: known.seconds, held };
        for own in self.entries.iter_mut().filter(|own| own.variant == variant) {
            own.first_answer = Some(first);
        }
        self.shortest = first.seconds;
        if !self.race.binds(first.held) {
            self.decided = Some(variant);
        }
        self.incumbent = Some((variant, known.clone()));
    }

    /// Whether a variant is at most as fast as the fastest recipe, or as a variant that memory does not limit.
    fn is_hopeless(&self, at: usize) -> bool {
        let own = &self.entries[at];
        own.bounds.computing as f64 / 1e12 >= self.shortest
            || self.decided.is_some_and(|known| known.keeps_no_less_than(own.variant))
    }

    /// Climbs the ladders of all policies in turn.
    fn climb(&mut self, limits: &Control<'_>) -> Result<(), StrategyError> {
        let mut ladders: Vec<Ladder> =
            RecomputePolicy::ALL.map(|policy| Ladder::of(&self.entries, policy)).into();
        loop {
            let mut moved = false;
            for ladder in &mut ladders {
                let Some((rung, at)) = ladder.next() else { continue };
                if self.shortest.is_finite() && limits.is_over() {
                    return Ok(());
                }
                if self.is_hopeless(at) {
                    ladder.end();
                    continue;
                }
                moved = true;
                self.visit(at, limits)?;
                match self.entries[at].state {
                    State::Same => ladder.end(),
                    _ => ladder.note(rung, self.entries[at].first_answer.is_some()),
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    /// Bounds of the numbers of micro-batches that are still open, as far as there is time.
    fn bound(&mut self, limits: &Control<'_>) -> Result<(), StrategyError> {
        let race = self.race;
        let open = (0..self.entries.len()).filter(|&at| {
            let own = &self.entries[at];
            own.state == State::Open && !own.is_exact && !self.is_hopeless(at)
        });
        let mut counts: Vec<NonZeroU32> = open.map(|at| self.entries[at].variant.micro_batches).collect();
        counts.dedup();
        // What the engine recomputes by itself belongs to every variant.
        let engine = self.entries.first().and_then(|own| own.variant.engine);
        let bounds = counts.par_iter().map(|&micro_batches| -> Result<_, StrategyError> {
            // Where the time does not suffice for bounds, nothing is claimed.
            if limits.is_over() {
                return Ok((micro_batches, Bounds::default()));
            }
            let step = race.step(Variant { micro_batches, engine, ..Variant::BASE })?;
            let context = race.inputs.planner(&step.graph).prime()?;
            let computing = step_lower_bound(&context, race.constraints.spmd)?;
            Ok((micro_batches, Bounds { computing, memory: memory_lower_bound(&context).0 }))
        });
        for (count, bounds) in bounds.collect::<Result<Vec<_>, _>>()? {
            let open = |own: &&mut Entry| own.variant.micro_batches == count && !own.is_exact;
            for entry in self.entries.iter_mut().filter(open) {
                // The memory of a step that keeps everything is no bound on one that recomputes.
                let own = entry.variant.recompute == RecomputePolicy::Off;
                entry.bounds = Bounds { memory: if own { bounds.memory } else { 0 }, ..bounds };
            }
        }
        Ok(())
    }

    /// Visits open variants, the one with the least computing first, until computing rules out all others.
    fn visit_rest(&mut self, limits: &Control<'_>) -> Result<(), StrategyError> {
        loop {
            let open = (0..self.entries.len()).filter(|&at| self.entries[at].state == State::Open);
            let next =
                open.filter(|&at| !self.is_hopeless(at)).min_by_key(|&at| self.entries[at].bounds.computing);
            let Some(at) = next.filter(|_| !(self.shortest.is_finite() && limits.is_over())) else {
                return Ok(());
            };
            self.visit(at, limits)?;
        }
    }

    /// Visits variants that may be the best ones of a recipe.
    fn visit_for_baselines(&mut self, limits: &Control<'_>) -> Result<(), StrategyError> {
        for at in 0..self.entries.len() {
            let own = &self.entries[at];
            let open = own.state == State::Open && self.baselines.may_improve(own.bounds.computing);
            if open && !limits.is_over() {
                self.visit(at, limits)?;
            }
        }
        Ok(())
    }

    /// Prices the recipes in a variant, unless its memory rules it out.
    fn visit(&mut self, at: usize, limits: &Control<'_>) -> Result<(), StrategyError> {
        let race = self.race;
        let variant = self.entries[at].variant;
        let step = race.step(variant)?;
        if variant.recompute != RecomputePolicy::Off {
            let key = (variant.micro_batches, recomputed_ops(&step.graph));
            let asked = |policy| {
                self.entries.iter().any(|own| own.variant == Variant { recompute: policy, ..variant })
            };
            let same = (key.1.is_empty() && asked(RecomputePolicy::Off)) || self.recomputed.contains(&key);
            if same {
                self.entries[at].state = State::Same;
                return Ok(());
            }
            self.recomputed.push(key);
        }
        let planner = race.inputs.planner(&step.graph);
        let context = planner.prime()?;
        let entry = &mut self.entries[at];
        let memory = memory_lower_bound(&context).0;
        entry.bounds.memory = memory;
        if !limits.is_over() {
            entry.bounds.computing = step_lower_bound(&context, race.constraints.spmd)?;
            entry.is_exact = true;
        }
        if memory > self.limit {
            entry.state = State::RuledOut;
            return Ok(());
        }
        let found = self.baselines.visit(variant, &planner, race.strategy, race.constraints, limits)?;
        entry.state = State::Visited;
        let known =
            entry.first_answer.filter(|known| found.first.is_none_or(|own| known.seconds <= own.seconds));
        entry.first_answer = known.or(found.first);
        if let Some(first) = found.first {
            self.shortest = self.shortest.min(first.seconds);
            if !race.binds(first.held) && self.decided.is_none_or(|known| variant.keeps_no_less_than(known)) {
                self.decided = Some(variant);
            }
        }
        if let Some(known) = found.known
            && self.incumbent.as_ref().is_none_or(|(_, best)| known.seconds < best.seconds)
        {
            self.incumbent = Some((variant, known));
        }
        Ok(())
    }
}

/// The search for the smallest number of micro-batches in which a recipe fits.
struct Ladder {
    /// The variants of a policy, in ascending numbers of micro-batches.
    rungs: Vec<usize>,
    /// The highest rung so far that does not fit, while none fits.
    fails: Option<usize>,
    /// The lowest rung that fits.
    fits: Option<usize>,
    stride: usize,
}

impl Ladder {
    fn of(entries: &[Entry], policy: RecomputePolicy) -> Self {
        let mut rungs: Vec<usize> =
            (0..entries.len()).filter(|&at| entries[at].variant.recompute == policy).collect();
        rungs.sort_by_key(|&at| entries[at].variant.micro_batches);
        Self { rungs, fails: None, fits: None, stride: 0 }
    }

    /// The next rung, and its variant.
    fn next(&self) -> Option<(usize, usize)> {
        let first = self.fails.map_or(0, |at| at + 1);
        let rung = match self.fits {
            Some(fits) => (first < fits).then(|| first + (fits - first) / 2),
            None => (first < self.rungs.len()).then(|| (first + self.stride).min(self.rungs.len() - 1)),
        };
        rung.map(|rung| (rung, self.rungs[rung]))
    }

    fn note(&mut self, rung: usize, fits: bool) {
        if fits {
            self.fits = Some(rung);
        } else {
            (self.fails, self.stride) = (Some(rung), 2 * self.stride + 1);
        }
    }

    fn end(&mut self) {
        self.rungs.clear();
        self.fits = None;
    }
}
