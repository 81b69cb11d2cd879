//! A model with its core and its bound. Values that the bound proves useless are removed.

use super::ascent::{Ascent, AscentSchedule};
use super::contract::Infeasible;
use super::core::Core;
use super::dual::Dual;
use super::memo::TableMemo;
use super::model::Model;
use super::reduce::{reduce, reduce_around};

/// A model, the dense form of its live part, and the ascent of its bound.
#[derive(Clone, Debug)]
pub struct Subproblem {
    /// The model.
    pub model: Model,
    /// Its live part.
    pub core: Core,
    /// Its bound.
    pub ascent: Ascent,
}

impl Subproblem {
    /// The subproblem of a reduced model, with an initial bound.
    pub fn new(model: Model) -> Self {
        let core = Core::new(&model);
        let ascent = Ascent::new(&core, Dual::new(&core), AscentSchedule::FULL);
        Subproblem { model, core, ascent }
    }

    /// Removes values whose bound exceeds `limit`, if they are at least `share` of all values. Returns whether the
    /// subproblem changed.
    pub fn narrow(
        &mut self,
        bounds: &[i64],
        limit: i64,
        share: f64,
        schedule: AscentSchedule,
    ) -> Result<bool, Infeasible> {
        let useless = bounds.iter().filter(|&&b| b > limit).count();
        if useless == 0 || (useless as f64) < share * bounds.len() as f64 {
            return Ok(false);
        }
        let mut memo = TableMemo::new();
        for v in 0..self.core.variables() {
            let keep: Vec<bool> = bounds[self.core.values(v)].iter().map(|&b| b <= limit).collect();
            if !keep.contains(&true) {
                return Err(Infeasible);
            }
            if keep.contains(&false) {
                self.model.keep(self.core.ids[v as usize], &keep, &mut memo);
            }
        }
        reduce(&mut self.model, memo, &|| false)?;
        self.rebuild(schedule);
        Ok(true)
    }

    /// The subproblem with only some values of `v`.
    pub fn restrict(
        &self,
        v: u32,
        keep: &[bool],
        schedule: AscentSchedule,
    ) -> Result<Subproblem, Infeasible> {
        let mut subproblem = self.clone();
        let id = self.core.ids[v as usize];
        subproblem.model.keep(id, keep, &mut TableMemo::off());
        reduce_around(&mut subproblem.model, id)?;
        subproblem.rebuild(schedule);
        Ok(subproblem)
    }

    fn rebuild(&mut self, schedule: AscentSchedule) {
        let core = Core::new(&self.model);
        self.ascent = self.ascent.resume(&self.core, &core, schedule);
        self.core = core;
    }

    /// The model's labels for an assignment of the core.
    pub fn lift(&self, x: &[u32]) -> Vec<u32> {
        let mut labels = vec![0; self.model.vars.len()];
        for (v, (&id, &value)) in self.core.ids.iter().zip(x).enumerate() {
            labels[id as usize] = self.core.labels[self.core.values(v as u32).start + value as usize];
        }
        self.model.lift(&mut labels);
        labels
    }

    /// The model's labels for labels of its compact form; `live` were the live variables at compaction.
    pub fn lift_compact(&self, live: &[u32], labels: &[u32]) -> Vec<u32> {
        let mut all = vec![0; self.model.vars.len()];
        for (&id, &l) in live.iter().zip(labels) {
            all[id as usize] = self.model.vars[id as usize].labels[l as usize];
        }
        self.model.lift(&mut all);
        all
    }
}
