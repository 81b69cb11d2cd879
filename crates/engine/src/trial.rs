//! Trials of work stealing: steps with and without it, side by side in the same run.
//!
//! Predictions may be wrong, and stealing costs cache misses that they leave out. So once per [`PERIOD`] a few steps run in pairs,
//! one without stealing and one with it. Stealing stays on until the next trial if it was faster in every pair, or clearly faster in
//! the median.

use shardwright_assist::WORTHWHILE_RATIO;

/// Steps from one trial to the next.
const PERIOD: u64 = 64;
/// Whether the steps of a trial steal: pairs, in an order in which no drift favours either. The run's first step allocates
/// memory and is left out.
const TRIAL: [bool; 8] = [false, true, true, false, false, true, true, false];
/// Largest ratio of the median steps, with over without stealing, if stealing was not faster in every pair.
const CLEAR_RATIO: f64 = 0.9;

/// Decides step by step whether tasks may be stolen.
#[derive(Debug, Default)]
pub struct StealTrial {
    /// Durations of the trial's steps.
    durations: [u64; TRIAL.len()],
    /// What the last trial decided.
    pays: bool,
}

impl StealTrial {
    /// Whether tasks may be stolen in this step. `before` is the duration of the step before it, in any unit.
    pub fn step(&mut self, step: u64, before: u64) -> bool {
        let at = (step % PERIOD) as usize;
        if let Some(duration) = at.checked_sub(2).and_then(|nth| self.durations.get_mut(nth)) {
            *duration = before;
        }
        if at == TRIAL.len() + 1 {
            self.pays = self.has_paid();
        }
        at.checked_sub(1).and_then(|nth| TRIAL.get(nth)).copied().unwrap_or(self.pays)
    }

    /// Whether steps with stealing were shorter in every pair and a little in the median, or clearly in the median.
    fn has_paid(&self) -> bool {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for (pair, steals) in self.durations.chunks_exact(2).zip(TRIAL.chunks_exact(2)) {
            let (stealing, alone) = if steals[0] { (pair[0], pair[1]) } else { (pair[1], pair[0]) };
            with.push(stealing);
            without.push(alone);
        }
        let always = with.iter().zip(&without).all(|(stealing, alone)| stealing < alone);
        median(with) < if always { WORTHWHILE_RATIO } else { CLEAR_RATIO } * median(without)
    }
}

/// The median duration: outliers do not count.
fn median(mut times: Vec<u64>) -> f64 {
    times.sort_unstable();
    let skipped = times.len().saturating_sub(1) / 2;
    let middle = &times[skipped..times.len() - skipped];
    middle.iter().sum::<u64>() as f64 / middle.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps that steal, given the durations of steps without and with stealing.
    fn stealing(without: u64, with: u64, steps: u64) -> Vec<u64> {
        let mut trial = StealTrial::default();
        let (mut before, mut stealing) = (1000, Vec::new());
        for step in 0..steps {
            let steals = trial.step(step, before);
            before = if steals { with } else { without };
            stealing.extend(steals.then_some(step));
        }
        stealing
    }

    #[test]
    fn stealing_is_tried_and_kept_where_it_pays() {
        assert_eq!(stealing(100, 99, 12), [2, 3, 6, 7]);
        assert_eq!(stealing(100, 90, 12), [2, 3, 6, 7, 9, 10, 11]);
        let long = stealing(100, 90, 300);
        assert!(!long.contains(&65) && long.contains(&64) && long.contains(&80), "tried again");
    }

    #[test]
    fn a_lucky_step_proves_nothing_and_an_unlucky_one_hides_nothing() {
        let pays = |durations| StealTrial { durations, pays: false }.has_paid();
        assert!(!pays([100, 60, 101, 100, 100, 94, 94, 100]), "faster on the whole, but not in every pair");
        assert!(pays([100, 60, 96, 100, 100, 97, 97, 100]), "a little faster in every pair");
        assert!(pays([100, 60, 160, 100, 100, 60, 60, 100]), "much faster but for one");
    }
}
