//! Whether help helps: steps with and without it, side by side in the same run.
//!
//! Predictions may be off, and moving work costs caches that nobody has counted. So now and then a few steps run in pairs, one without
//! help and one with it, and help stays until the next trial where it was faster in every pair, or by much on the whole.

/// Steps from one trial to the next.
const PERIOD: u64 = 64;
/// Whether the steps of a trial have help: pairs, in an order in which no drift favours either. The first step of all asks for memory and
/// is not among them.
const TRIAL: [bool; 8] = [false, true, true, false, false, true, true, false];
/// How much shorter steps with help have to be, if they are in every pair; and if not.
const WORTH: f64 = 0.98;
const CLEARLY: f64 = 0.9;

/// What is known about help.
#[derive(Debug, Default)]
pub struct Trial {
    /// How long the steps of the trial took.
    took: [u64; TRIAL.len()],
    worth: bool,
}

impl Trial {
    /// The step before this one took so long; whether there is to be help in this one.
    pub fn step(&mut self, step: u64, before: u64) -> bool {
        let at = (step % PERIOD) as usize;
        if let Some(took) = at.checked_sub(2).and_then(|tried| self.took.get_mut(tried)) {
            *took = before;
        }
        if at == TRIAL.len() + 1 {
            self.worth = self.pays();
        }
        at.checked_sub(1).and_then(|tried| TRIAL.get(tried)).copied().unwrap_or(self.worth)
    }

    /// Steps with help were a little shorter in every pair, or clearly on the whole.
    fn pays(&self) -> bool {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for (took, help) in self.took.chunks_exact(2).zip(TRIAL.chunks_exact(2)) {
            let (helped, alone) = if help[0] { (took[0], took[1]) } else { (took[1], took[0]) };
            with.push(helped);
            without.push(alone);
        }
        let always = with.iter().zip(&without).all(|(helped, alone)| helped < alone);
        middle(with) < if always { WORTH } else { CLEARLY } * middle(without)
    }
}

/// The middle of so many times, where a few may be off.
fn middle(mut times: Vec<u64>) -> f64 {
    times.sort_unstable();
    let skipped = times.len().saturating_sub(1) / 2;
    let middle = &times[skipped..times.len() - skipped];
    middle.iter().sum::<u64>() as f64 / middle.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which steps have help, where steps take so long without it and so long with it.
    fn helped(without: u64, with: u64, steps: u64) -> Vec<u64> {
        let mut trial = Trial::default();
        let (mut before, mut helped) = (1000, Vec::new());
        for step in 0..steps {
            let help = trial.step(step, before);
            before = if help { with } else { without };
            helped.extend(help.then_some(step));
        }
        helped
    }

    #[test]
    fn help_is_tried_and_kept_where_it_helps() {
        assert_eq!(helped(100, 99, 12), [2, 3, 6, 7]);
        assert_eq!(helped(100, 90, 12), [2, 3, 6, 7, 9, 10, 11]);
        let long = helped(100, 90, 300);
        assert!(!long.contains(&65) && long.contains(&64) && long.contains(&80), "tried again");
    }

    #[test]
    fn a_lucky_step_proves_nothing_and_an_unlucky_one_hides_nothing() {
        let pays = |took| Trial { took, worth: false }.pays();
        assert!(!pays([100, 60, 101, 100, 100, 94, 94, 100]), "faster on the whole, but not in every pair");
        assert!(pays([100, 60, 96, 100, 100, 97, 97, 100]), "a little faster in every pair");
        assert!(pays([100, 60, 160, 100, 100, 60, 60, 100]), "much faster but for one");
    }
}
