//! Tightens the rows of time: subtracts the least usages from the slack, drops rows that cannot overflow or that another
//! row implies, and reports values that cannot fit.

use super::contract::Infeasible;
use super::model::Model;
use super::profile::{Profile, Span};

/// Tightens all rows. Returns, per live variable with values that cannot fit, which values to keep.
pub fn tighten(model: &mut Model) -> Result<Vec<(u32, Vec<bool>)>, Infeasible> {
    if model.slack.is_empty() {
        return Ok(Vec::new());
    }
    subtract_least(model);
    if model.slack.iter().any(|&s| s < 0) {
        return Err(Infeasible);
    }
    let unfit = unfit_values(model);
    drop_rows(model);
    Ok(unfit)
}

/// Moves the least usage of each variable at each row into the slack.
fn subtract_least(model: &mut Model) {
    let mut delta = vec![0i64; model.slack.len() + 1];
    for var in model.vars.iter_mut().filter(|v| v.alive) {
        for s in &mut var.profile.spans {
            let least = s.usage.iter().copied().min().unwrap_or(0);
            if least > 0 {
                delta[s.lo as usize] += least;
                delta[s.hi as usize] -= least;
                for u in &mut s.usage {
                    *u -= least;
                }
            }
        }
        var.profile.spans.retain(|s| s.usage.iter().any(|&u| u > 0));
    }
    let mut now = 0;
    for (s, d) in model.slack.iter_mut().zip(&delta) {
        now += d;
        *s -= now;
    }
}

/// Values that overflow a row even if every other variable uses its least.
fn unfit_values(model: &Model) -> Vec<(u32, Vec<bool>)> {
    let least = RangeMin::new(&model.slack);
    let mut out = Vec::new();
    for v in model.live() {
        let var = &model.vars[v as usize];
        let mut keep = vec![true; var.unary.len()];
        for s in &var.profile.spans {
            let room = least.min(s.lo as usize, s.hi as usize);
            for (k, &u) in keep.iter_mut().zip(&s.usage) {
                *k &= u <= room;
            }
        }
        if keep.contains(&false) {
            out.push((v, keep));
        }
    }
    out
}

/// Drops rows that cannot overflow or are implied by a neighbouring row, and renumbers the rest.
fn drop_rows(model: &mut Model) {
    let rows = model.slack.len();
    let mut delta = vec![0i64; rows + 1];
    let (mut starts, mut ends) = (vec![false; rows + 1], vec![false; rows + 1]);
    for s in model.vars.iter().filter(|v| v.alive).flat_map(|v| &v.profile.spans) {
        let most = s.usage.iter().copied().max().unwrap_or(0);
        delta[s.lo as usize] += most;
        delta[s.hi as usize] -= most;
        starts[s.lo as usize] = true;
        ends[s.hi as usize] = true;
    }
    // For each kept row: whether a span starts (ends) between the previous kept row and it.
    let mut kept: Vec<usize> = Vec::new();
    let mut start_before: Vec<bool> = Vec::new();
    let mut end_before: Vec<bool> = Vec::new();
    let (mut started, mut ended) = (false, false);
    let mut now = 0;
    for r in 0..rows {
        now += delta[r];
        started |= starts[r];
        ended |= ends[r];
        if now <= model.slack[r] {
            continue;
        }
        // Drop previous rows that this one implies: none of their spans ended, and their slack is no less.
        while let Some(&last) = kept.last() {
            if ended || model.slack[last] < model.slack[r] {
                break;
            }
            kept.pop();
            started |= start_before.pop().unwrap_or(false);
            ended |= end_before.pop().unwrap_or(false);
        }
        // The previous row implies this one if no span started since and the slack is no less.
        if let Some(&last) = kept.last()
            && !started
            && model.slack[r] >= model.slack[last]
        {
            continue;
        }
        kept.push(r);
        start_before.push(started);
        end_before.push(ended);
        (started, ended) = (false, false);
    }
    if kept.len() == rows {
        return;
    }
    let renumber = |r: u32| kept.partition_point(|&k| k < r as usize) as u32;
    for var in model.vars.iter_mut().filter(|v| v.alive) {
        let mut spans: Vec<Span> = Vec::with_capacity(var.profile.spans.len());
        for s in std::mem::take(&mut var.profile.spans) {
            let (lo, hi) = (renumber(s.lo), renumber(s.hi));
            match spans.last_mut() {
                _ if lo == hi => {}
                Some(last) if last.hi == lo && last.usage == s.usage => last.hi = hi,
                _ => spans.push(Span { lo, hi, usage: s.usage }),
            }
        }
        var.profile = Profile { spans };
    }
    model.slack = kept.iter().map(|&r| model.slack[r]).collect();
    model.row_ids = kept.iter().map(|&r| model.row_ids[r]).collect();
}

/// Range minima in constant time (a sparse table).
struct RangeMin {
    levels: Vec<Vec<i64>>,
}

impl RangeMin {
    fn new(values: &[i64]) -> Self {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while width * 2 <= values.len() {
            let last = &levels[levels.len() - 1];
            let next = (0..=values.len() - width * 2).map(|i| last[i].min(last[i + width])).collect();
            levels.push(next);
            width *= 2;
        }
        RangeMin { levels }
    }

    fn min(&self, lo: usize, hi: usize) -> i64 {
        let level = (hi - lo).ilog2() as usize;
        self.levels[level][lo].min(self.levels[level][hi - (1 << level)])
    }
}
