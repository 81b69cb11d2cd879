//! How uneven devices are: how fast each of several was, moment by moment, while all of them did the same.
//!
//! Cores of one computer are never equally fast: other users of the processor, its clock and its memory slow some of them down for some time, then
//! others. Devices that work together wait for the slowest, so a step takes longer than any of them does on average.

/// The most moments, devices, microseconds of a moment, and thousandths of the usual time.
const MAX_MOMENTS: usize = 100_000;
const MAX_DEVICES: usize = 4096;
const MAX_MICROSECONDS: u64 = 3_600_000_000;
const MAX_THOUSANDTHS: u64 = 1_000_000;

/// How long the same work took each of several devices, one moment after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paces {
    moments: Vec<Moment>,
}

/// What devices were like for some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// How long this lasted, in microseconds.
    pub microseconds: u64,
    /// Per device: what its work took, in thousandths of what it took all of them on average.
    pub thousandths: Vec<u64>,
}

impl Moment {
    /// What work of so many seconds on each device says about them; none if that is nothing.
    pub fn of(seconds: &[f64], lasted: f64) -> Option<Self> {
        let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
        let share = |seconds: &f64| ((1000.0 * seconds / mean).round() as u64).clamp(1, MAX_THOUSANDTHS);
        let microseconds = (1e6 * lasted).round() as u64;
        let known = mean > 0.0 && mean.is_finite() && (1..=MAX_MICROSECONDS).contains(&microseconds);
        known.then(|| Self { microseconds, thousandths: seconds.iter().map(share).collect() })
    }
}

impl Paces {
    /// From moments in their order.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn new(moments: Vec<Moment>) -> Result<Self, String> {
        let devices = moments.first().map_or(0, |first| first.thousandths.len());
        if moments.len() > MAX_MOMENTS || !(1..=MAX_DEVICES).contains(&devices) {
            return Err(format!(
                "{} moments of {devices} devices; there are 1 to {MAX_MOMENTS}, of 1 to {MAX_DEVICES}",
                moments.len()
            ));
        }
        for (at, Moment { microseconds, thousandths }) in moments.iter().enumerate() {
            if thousandths.len() != devices {
                return Err(format!(
                    "moment {at} has {} devices where moment 0 has {devices}",
                    thousandths.len()
                ));
            }
            if !(1..=MAX_MICROSECONDS).contains(microseconds) {
                return Err(format!("moment {at} lasts {microseconds} µs; above zero, and an hour at most"));
            }
            if let Some(wrong) = thousandths.iter().find(|t| !(1..=MAX_THOUSANDTHS).contains(*t)) {
                return Err(format!("moment {at}: {wrong} thousandths; from 1 to {MAX_THOUSANDTHS}"));
            }
        }
        Ok(Self { moments })
    }

    /// As written: microseconds, then thousandths.
    pub(crate) fn from_rows(rows: Vec<Vec<u64>>) -> Result<Self, String> {
        let moment = |mut row: Vec<u64>| {
            let thousandths = row.split_off(row.len().min(1));
            Moment { microseconds: row.first().copied().unwrap_or(0), thousandths }
        };
        Self::new(rows.into_iter().map(moment).collect())
    }

    /// As they are written.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Vec<u64>> {
        let row = |m: &Moment| std::iter::once(m.microseconds).chain(m.thousandths.iter().copied()).collect();
        self.moments.iter().map(row)
    }

    /// All moments, in order; there is at least one.
    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    /// How many devices there were.
    pub fn devices(&self) -> usize {
        self.moments[0].thousandths.len()
    }

    /// How much longer than the average the slowest device takes, in the mean over time: 0.1 for a tenth.
    pub fn slowest(&self) -> f64 {
        let (mut sum, mut time) = (0.0, 0.0);
        for Moment { microseconds, thousandths } in &self.moments {
            let (most, length) = (thousandths.iter().max().copied().unwrap_or(1000), *microseconds as f64);
            (sum, time) = (sum + length * most as f64 / 1000.0, time + length);
        }
        sum / time - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_relative_to_the_average() {
        let moment = Moment::of(&[0.2, 0.3, 0.4], 0.01).unwrap();
        assert_eq!(moment, Moment { microseconds: 10_000, thousandths: vec![667, 1000, 1333] });
        assert_eq!(Moment::of(&[0.0, 0.0], 1.0), None);
        assert_eq!(Moment::of(&[], 1.0), None);
        let even = Moment { microseconds: 30_000, thousandths: vec![1000; 3] };
        let paces = Paces::new(vec![moment, even]).unwrap();
        assert!((paces.slowest() - 0.333 / 4.0).abs() < 1e-6, "{}", paces.slowest());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused =
            |rows: &[&[u64]]| Paces::from_rows(rows.iter().map(|row| row.to_vec()).collect()).unwrap_err();
        assert!(refused(&[]).contains("0 moments"));
        assert!(refused(&[&[]]).contains("0 devices"));
        assert!(refused(&[&[5]]).contains("0 devices"));
        assert!(refused(&[&[5, 1000], &[5, 1000, 1000]]).contains("moment 1 has 2 devices"));
        assert!(refused(&[&[0, 1000]]).contains("lasts 0"));
        assert!(refused(&[&[5, 0]]).contains("0 thousandths"));
        assert!(refused(&[&[5, u64::MAX]]).contains("thousandths; from"));
        let rows = vec![vec![5, 900, 1100], vec![7, 1000, 1000]];
        let paces = Paces::from_rows(rows.clone()).unwrap();
        assert_eq!(paces.rows().collect::<Vec<_>>(), rows);
        assert_eq!(paces.devices(), 2);
    }
}
