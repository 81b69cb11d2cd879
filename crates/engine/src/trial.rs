//! Whether help helps: steps with and without it, side by side in the same run.
//!
//! Predictions may be off, and moving work costs caches that nobody has counted. So now and then a few steps run without help and a few
//! with it, and what was clearly faster is kept until the next trial.

/// Steps from one trial to the next.
const PERIOD: u64 = 128;
/// Steps of each kind in a trial. The first step of all asks for memory and is not among them.
const EACH: u64 = 3;
/// How much shorter steps with help have to be.
const WORTH: f64 = 0.98;

/// What is known about help.
#[derive(Debug, Default)]
pub struct Trial {
    without: Vec<u64>,
    with: Vec<u64>,
    worth: bool,
}

impl Trial {
    /// The step before this one took so long; whether there is to be help in this one.
    pub fn step(&mut self, step: u64, before: u64) -> bool {
        let at = step % PERIOD;
        match at {
            0 => (self.without, self.with) = (Vec::new(), Vec::new()),
            _ if (2..EACH + 2).contains(&at) => self.without.push(before),
            _ if (EACH + 2..2 * EACH + 2).contains(&at) => self.with.push(before),
            _ => {}
        }
        if at == 2 * EACH + 1 {
            self.worth = (middle(&mut self.with) as f64) < WORTH * middle(&mut self.without) as f64;
        }
        match at {
            1..=EACH => false,
            _ if at <= 2 * EACH => at > 0 || self.worth,
            _ => self.worth,
        }
    }
}

fn middle(times: &mut [u64]) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
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
        assert_eq!(helped(100, 99, 12), [4, 5, 6]);
        assert_eq!(helped(100, 90, 12), [4, 5, 6, 7, 8, 9, 10, 11]);
        let long = helped(100, 90, 300);
        assert!(!long.contains(&129) && long.contains(&128) && long.contains(&140), "tried again");
    }
}
