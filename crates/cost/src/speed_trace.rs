//! Measured speed variation of devices: samples over time of several devices that ran the same work.
//!
//! Cores of one computer are never equally fast. Other processes, the clock rate and memory slow some cores down for
//! some time, then others. Devices that work together wait for the slowest, so a step takes longer than the average
//! device.

/// Upper limits of a trace: samples, devices, microseconds of a sample and thousandths of the average time.
const MAX_SAMPLES: usize = 100_000;
const MAX_DEVICES: usize = 4096;
const MAX_MICROSECONDS: u64 = 3_600_000_000;
const MAX_THOUSANDTHS: u64 = 1_000_000;

/// The relative times of several devices, sample after sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeedTrace {
    samples: Vec<SpeedSample>,
}

/// The relative times of all devices over one period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeedSample {
    /// Length of the period in microseconds.
    pub microseconds: u64,
    /// Per device: the time of its work in thousandths of the average over all devices.
    pub thousandths: Vec<u64>,
}

impl SpeedSample {
    /// The sample of a period of `length` seconds in which device d worked `seconds[d]`. `None` if the average or the
    /// length is out of range.
    pub fn of(seconds: &[f64], length: f64) -> Option<Self> {
        let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
        let share = |seconds: &f64| ((1000.0 * seconds / mean).round() as u64).clamp(1, MAX_THOUSANDTHS);
        let microseconds = (1e6 * length).round() as u64;
        let valid = mean > 0.0 && mean.is_finite() && (1..=MAX_MICROSECONDS).contains(&microseconds);
        valid.then(|| Self { microseconds, thousandths: seconds.iter().map(share).collect() })
    }
}

impl SpeedTrace {
    /// A trace of samples in time order.
    ///
    /// # Errors
    /// The reason why the samples are invalid.
    pub fn new(samples: Vec<SpeedSample>) -> Result<Self, String> {
        let devices = samples.first().map_or(0, |first| first.thousandths.len());
        if samples.len() > MAX_SAMPLES || !(1..=MAX_DEVICES).contains(&devices) {
            return Err(format!(
                "{} samples of {devices} devices; expected 1 to {MAX_SAMPLES} samples of 1 to {MAX_DEVICES} devices",
                samples.len()
            ));
        }
        for (at, SpeedSample { microseconds, thousandths }) in samples.iter().enumerate() {
            if thousandths.len() != devices {
                return Err(format!(
                    "sample {at} has {} devices where sample 0 has {devices}",
                    thousandths.len()
                ));
            }
            if !(1..=MAX_MICROSECONDS).contains(microseconds) {
                return Err(format!(
                    "sample {at} lasts {microseconds} µs; expected more than zero and at most an hour"
                ));
            }
            if let Some(wrong) = thousandths.iter().find(|t| !(1..=MAX_THOUSANDTHS).contains(*t)) {
                return Err(format!("sample {at}: {wrong} thousandths; expected 1 to {MAX_THOUSANDTHS}"));
            }
        }
        Ok(Self { samples })
    }

    /// Reads rows of the file: microseconds, then thousandths.
    pub(crate) fn from_rows(rows: Vec<Vec<u64>>) -> Result<Self, String> {
        let sample = |mut row: Vec<u64>| {
            let thousandths = row.split_off(row.len().min(1));
            SpeedSample { microseconds: row.first().copied().unwrap_or(0), thousandths }
        };
        Self::new(rows.into_iter().map(sample).collect())
    }

    /// The rows of the file.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Vec<u64>> {
        let row =
            |m: &SpeedSample| std::iter::once(m.microseconds).chain(m.thousandths.iter().copied()).collect();
        self.samples.iter().map(row)
    }

    /// All samples in time order, at least one.
    pub fn samples(&self) -> &[SpeedSample] {
        &self.samples
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.samples[0].thousandths.len()
    }

    /// How much longer the slowest device takes than the average device, averaged over time: 0.1 means a tenth.
    pub fn slowest(&self) -> f64 {
        let (mut sum, mut time) = (0.0, 0.0);
        for SpeedSample { microseconds, thousandths } in &self.samples {
            let (most, length) = (thousandths.iter().copied().fold(0, u64::max), *microseconds as f64);
            (sum, time) = (sum + length * most as f64 / 1000.0, time + length);
        }
        sum / time - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_relative_to_the_average() {
        let sample = SpeedSample::of(&[0.2, 0.3, 0.4], 0.01).unwrap();
        assert_eq!(sample, SpeedSample { microseconds: 10_000, thousandths: vec![667, 1000, 1333] });
        assert_eq!(SpeedSample::of(&[0.0, 0.0], 1.0), None);
        assert_eq!(SpeedSample::of(&[], 1.0), None);
        let even = SpeedSample { microseconds: 30_000, thousandths: vec![1000; 3] };
        let trace = SpeedTrace::new(vec![sample, even]).unwrap();
        assert!((trace.slowest() - 0.333 / 4.0).abs() < 1e-6, "{}", trace.slowest());
    }

    #[test]
    fn invalid_samples_are_refused() {
        let refused = |rows: &[&[u64]]| {
            SpeedTrace::from_rows(rows.iter().map(|row| row.to_vec()).collect()).unwrap_err()
        };
        assert!(refused(&[]).contains("0 samples"));
        assert!(refused(&[&[]]).contains("0 devices"));
        assert!(refused(&[&[5]]).contains("0 devices"));
        assert!(refused(&[&[5, 1000], &[5, 1000, 1000]]).contains("sample 1 has 2 devices"));
        assert!(refused(&[&[0, 1000]]).contains("lasts 0"));
        assert!(refused(&[&[5, 0]]).contains("0 thousandths"));
        assert!(refused(&[&[5, u64::MAX]]).contains("thousandths; expected"));
        let rows = vec![vec![5, 900, 1100], vec![7, 1000, 1000]];
        let trace = SpeedTrace::from_rows(rows.clone()).unwrap();
        assert_eq!(trace.rows().collect::<Vec<_>>(), rows);
        assert_eq!(trace.devices(), 2);
    }
}
