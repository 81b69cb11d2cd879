//! A model with its core and its bound, narrowed as the bound proves values useless.

use super::ascent::{Ascent, Pace};
use super::contract::Infeasible;
use super::core::Core;
use super::dual::Dual;
use super::memo::Memo;
use super::model::Model;
use super::reduce::{reduce, reduce_around};

/// A model, the dense form of what is left of it, and the ascent of its bound.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The model.
    pub model: Model,
    /// Its live part.
    pub core: Core,
    /// Its bound.
    pub ascent: Ascent,
}

impl Stage {
    /// A stage for a reduced model, with a bound from nothing.
    pub fn new(model: Model) -> Self {
        let core = Core::new(&model);
        let ascent = Ascent::new(&core, Dual::new(&core), Pace::FULL);
        Stage { model, core, ascent }
    }

    /// Removes values that cannot be part of an assignment that costs at most `limit`, given a bound per
    /// value, if at least `share` of all values go. Returns whether the stage changed.
    pub fn narrow(&mut self, bounds: &[i64], limit: i64, share: f64, pace: Pace) -> Result<bool, Infeasible> {
        let useless = bounds.iter().filter(|&&b| b > limit).count();
        if useless == 0 || (useless as f64) < share * bounds.len() as f64 {
            return Ok(false);
        }
        let mut memo = Memo::new();
        for v in 0..self.core.variables() {
            let keep: Vec<bool> = bounds[self.core.values(v)].iter().map(|&b| b <= limit).collect();
            if !keep.contains(&true) {
                return Err(Infeasible);
            }
            if keep.contains(&false) {
                self.model.keep(self.core.ids[v as usize], &keep, &mut memo);
            }
        }
        reduce(&mut self.model, memo)?;
        self.rebuild(pace);
        Ok(true)
    }

    /// The stage with only some values of `v` left.
    pub fn restrict(&self, v: u32, keep: &[bool], pace: Pace) -> Result<Stage, Infeasible> {
        let mut stage = self.clone();
        let id = self.core.ids[v as usize];
        stage.model.keep(id, keep, &mut Memo::off());
        reduce_around(&mut stage.model, id)?;
        stage.rebuild(pace);
        Ok(stage)
    }

    fn rebuild(&mut self, pace: Pace) {
        let core = Core::new(&self.model);
        self.ascent = self.ascent.resume(&self.core, &core, pace);
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

    /// The model's labels for labels of its compact form, made when `live` were its live variables.
    pub fn lift_compact(&self, live: &[u32], labels: &[u32]) -> Vec<u32> {
        let mut all = vec![0; self.model.vars.len()];
        for (&id, &l) in live.iter().zip(labels) {
            all[id as usize] = self.model.vars[id as usize].labels[l as usize];
        }
        self.model.lift(&mut all);
        all
    }
}
