//! The time of an op on a device, and its source: a measurement, an interpolation of nearby measurements, or the
//! roofline.

use crate::{
    cost_file::{CostFile, CostTable, Mode},
    engine::Engine,
    learned::WorkKind,
    roofline::{arithmetic_rate, roofline_in, rounding_seconds, stream_seconds},
};
use shardwright_graph::{DType, Gemm, RooflineKind, Workload, WorkloadSizes};
use shardwright_machine::{Device, Seconds, Tf32Use};
use std::collections::BTreeMap;

/// Measurements farther away than this are ignored. The distance is Euclidean in base-two logarithms of sizes.
const REACH: f32 = 1.5;
/// Number of nearest measurements that are averaged.
const NEIGHBOURS: usize = 4;

/// The source of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TimeSource {
    /// Measured for exactly these sizes.
    Measured,
    /// Measured for nearby sizes, scaled by the ratio of rooflines.
    Interpolated,
    /// The roofline alone.
    Roofline,
}

/// A time and its source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The time.
    pub seconds: Seconds,
    /// Its source.
    pub source: TimeSource,
}

/// The cost file is of another device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the costs were measured on `{measured}`, but the machine's device is `{device}`; measure that one, or leave the costs out"
)]
pub struct WrongDevice {
    /// The device in the cost file.
    pub measured: String,
    /// The machine's device.
    pub device: String,
}

/// Operator times of one device, under the device's engine.
#[derive(Clone, Copy, Debug)]
pub struct OperatorTimes<'a> {
    device: &'a Device,
    costs: Option<&'a CostFile>,
    engine: Option<&'static Engine>,
    /// Whether convolutions run in the memory format `channels_last`.
    channels_last: bool,
}

impl<'a> OperatorTimes<'a> {
    /// Times by the roofline alone, or by measurements first if there are any.
    pub fn new(device: &'a Device, costs: Option<&'a CostFile>) -> Result<Self, WrongDevice> {
        if let Some(costs) = costs.filter(|costs| !costs.device.eq_ignore_ascii_case(&device.name)) {
            return Err(WrongDevice { measured: costs.device.clone(), device: device.name.clone() });
        }
        let engine = device.engine.and_then(Engine::of);
        let channels_last = engine.is_some_and(|engine| engine.channels_last);
        Ok(Self { device, costs, engine, channels_last })
    }

    /// The same where convolutions keep contiguous tensors.
    #[must_use]
    pub fn contiguous(mut self, contiguous: bool) -> Self {
        self.channels_last &= !contiguous;
        self
    }

    /// The same in the memory format of other times.
    #[must_use]
    pub fn like(self, other: &Self) -> Self {
        self.contiguous(!other.channels_last)
    }

    /// The time by the data sheet, in the engine's formats.
    fn model(&self, workload: &Workload) -> Seconds {
        let single = self.engine.filter(|_| workload.dtype == DType::F32);
        if single.is_some_and(|engine| engine.tf32_classes.contains(workload.class.name)) {
            let device = Device { tf32: Tf32Use::All, ..self.device.clone() };
            return roofline_in(&device, workload, self.channels_last);
        }
        roofline_in(self.device, workload, self.channels_last)
    }

    /// The engine that runs the ops.
    pub fn engine(&self) -> Option<&'static Engine> {
        self.engine
    }

    /// The time of a kernel's traffic at a share of the memory bandwidth.
    pub fn stream(&self, bytes: u64, share: f64) -> Seconds {
        let seconds = stream_seconds(self.device, bytes as f64, share);
        let run = self.costs.and_then(|costs| costs.run.as_ref());
        Seconds(seconds.0 * run.map_or(1.0, |run| run.kind_factor(WorkKind::MemoryBound)))
    }

    /// The time that a product in 8-bit floats does not take if so many elements of its operands were rounded before; zero for others.
    pub fn rounded_before(&self, workload: &Workload, elements: u64) -> Seconds {
        let RooflineKind::EightBitProduct(product) = &workload.roofline else { return Seconds::ZERO };
        let in_eight_bits = self.device.peak.f8.is_some() && product.align == Gemm::ALIGNED;
        let run = self.costs.and_then(|costs| costs.run.as_ref());
        match in_eight_bits && run.is_none() {
            true => rounding_seconds(self.device, elements as f64, workload.dtype),
            false => Seconds::ZERO,
        }
    }

    /// How a workload's products and convolutions are computed.
    fn mode(&self, workload: &Workload) -> Mode {
        let convolution = matches!(workload.roofline, RooflineKind::Convolution { .. });
        let tf32 = workload.dtype == DType::F32
            && self.device.peak.tf32.is_some_and(|rate| rate.0 == arithmetic_rate(self.device, workload));
        let in_tf32 = self.engine.filter(|_| workload.dtype == DType::F32 && self.device.peak.tf32.is_some());
        let in_tf32 = in_tf32.is_some_and(|engine| engine.tf32_classes.contains(workload.class.name));
        Mode::new(tf32 || in_tf32, convolution && self.channels_last)
    }

    /// The time of an unaligned 16-bit product that the engine pads, with the copy of its larger operand.
    fn padded(&self, workload: &Workload) -> Option<Estimate> {
        let engine =
            self.engine.filter(|engine| engine.pads_products || engine.unaligned_slowdown.is_some())?;
        let RooflineKind::Product(product) = &workload.roofline else { return None };
        if product.align == Gemm::ALIGNED || workload.dtype.bytes() != 2 || workload.sizes.len() != 4 {
            return None;
        }
        let round = |size: &u64| size.next_multiple_of(Gemm::ALIGNED);
        let mut sizes: WorkloadSizes = workload.sizes.iter().map(round).collect();
        sizes[0] = workload.sizes[0];
        let aligned = self.alone(&workload.resized(&sizes));
        if let Some(slowdown) = engine.unaligned_slowdown {
            return Some(Estimate { seconds: Seconds(aligned.seconds.0 * slowdown), ..aligned });
        }
        let Gemm { batch, m, n, k, .. } = *product;
        let copied =
            2 * batch.saturating_mul(k).saturating_mul(m.max(n)).saturating_mul(workload.dtype.bytes());
        let seconds = Seconds(aligned.seconds.0 + stream_seconds(self.device, copied as f64, 0.9).0);
        Some(Estimate { seconds, ..aligned })
    }

    /// The time of a workload, inside of a step of the engine.
    pub fn estimate(&self, workload: &Workload) -> Estimate {
        let alone = self.padded(workload).unwrap_or_else(|| self.alone(workload));
        let slows = matches!(workload.roofline, RooflineKind::Product(_) | RooflineKind::Attention { .. });
        let single = workload.dtype == DType::F32 && self.mode(workload) == Mode::Usual;
        let slowdown =
            |engine: &Engine| if single { engine.single_slowdown } else { engine.product_slowdown };
        let slowdown = self.engine.filter(|_| slows).map_or(1.0, slowdown);
        // Costs that learned from a run know how many times as long such work took there.
        let learned = self.costs.and_then(|costs| costs.run.as_ref()).map_or(1.0, |run| run.factor(workload));
        Estimate { seconds: Seconds(alone.seconds.0 * slowdown * learned), ..alone }
    }

    /// The time of a workload that runs alone.
    fn alone(&self, workload: &Workload) -> Estimate {
        let model = self.model(workload);
        // An engine's kernels follow each other without the time of a launch.
        let gap = self.engine.map(|engine| Seconds(engine.gap_us * 1e-6));
        let at_least_launch = |seconds: Seconds| seconds.max(gap.unwrap_or(self.device.launch_overhead));
        // An attention kernel of the engine's own is not the one that was measured.
        let own = matches!(workload.roofline, RooflineKind::Attention { .. })
            && self.engine.is_some_and(|engine| engine.attention_shares.is_some());
        let costs = self.costs.filter(|_| !own);
        let Some(table) = costs.and_then(|costs| costs.table(workload, self.mode(workload))) else {
            return Estimate { seconds: model, source: TimeSource::Roofline };
        };
        if let Some(seconds) = table.exact(&workload.sizes) {
            return Estimate { seconds: at_least_launch(seconds), source: TimeSource::Measured };
        }
        match interpolate(table, workload, |nearby| self.model(nearby)) {
            Some(ratio) => {
                let seconds = at_least_launch(Seconds(model.0 * ratio));
                Estimate { seconds, source: TimeSource::Interpolated }
            }
            None => Estimate { seconds: model, source: TimeSource::Roofline },
        }
    }
}

/// The ratio of a workload's time to its model: the geometric mean of the nearest measurements' ratios, weighted by the
/// inverse square of their distance.
fn interpolate(table: &CostTable, workload: &Workload, model: impl Fn(&Workload) -> Seconds) -> Option<f64> {
    let logs: smallvec::SmallVec<[f32; 12]> = workload.sizes.iter().map(|&s| (s as f32).log2()).collect();
    let mut nearest: [(f32, usize); NEIGHBOURS] = [(f32::INFINITY, usize::MAX); NEIGHBOURS];
    for i in 0..table.len() {
        let distance: f32 = table.row_logs(i).iter().zip(&logs).map(|(a, b)| (a - b) * (a - b)).sum();
        if distance < nearest[NEIGHBOURS - 1].0 {
            nearest[NEIGHBOURS - 1] = (distance, i);
            nearest.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        }
    }
    let (mut weights, mut sum) = (0.0, 0.0);
    for (distance, i) in nearest.into_iter().filter(|n| n.0 <= REACH * REACH) {
        let nearby = workload.resized(table.row(i));
        let ratio = table.seconds[i] / model(&nearby).0;
        let weight = 1.0 / f64::from(distance.max(1e-6));
        weights += weight;
        sum += weight * ratio.ln();
    }
    (weights > 0.0).then(|| (sum / weights).exp())
}

/// Number of uses of each time source, per workload class. A plan reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeSourceCounts {
    counts: BTreeMap<(&'static str, TimeSource), u64>,
}

impl TimeSourceCounts {
    /// Counts one use.
    pub fn record(&mut self, workload: &Workload, source: TimeSource) {
        *self.counts.entry((workload.class.name, source)).or_default() += 1;
    }

    /// Uses of a source, over all classes.
    pub fn total(&self, source: TimeSource) -> u64 {
        self.counts.iter().filter(|((_, s), _)| *s == source).map(|(_, n)| n).sum()
    }

    /// All counts, by class and source.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, TimeSource, u64)> + '_ {
        self.counts.iter().map(|(&(class, source), &n)| (class, source, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cost_file::TableText, roofline::roofline};
    use shardwright_graph::{RooflineKind, WorkloadClass, WorkloadSizes};
    use shardwright_machine::builtin;

    fn gemm(sizes: [u64; 4]) -> Workload {
        let (class, roofline) = (WorkloadClass::find("gemm").unwrap(), RooflineKind::Stream);
        let none = WorkloadSizes::new();
        Workload { class, dtype: DType::F32, sizes: none, flops: 0, bytes: 0, roofline }.resized(&sizes)
    }

    /// Measurements that are exactly `factor` times the roofline.
    fn measured(device: &Device, factor: f64, sizes: &[[u64; 4]]) -> CostFile {
        let rows = sizes
            .iter()
            .map(|s| {
                let nanoseconds = (roofline(device, &gemm(*s)).0 * factor * 1e9).round() as u64;
                s.iter().copied().chain([nanoseconds]).collect()
            })
            .collect();
        let table = TableText { class: "gemm".into(), dtype: DType::F32, mode: Mode::Usual, rows };
        CostFile::new(["h200", "2026-01-01", "s", "m"].map(String::from), vec![table]).unwrap()
    }

    #[test]
    fn measured_then_interpolated_then_roofline() {
        let machine = builtin("h200x64").unwrap();
        let device = &machine.spec().device;
        let costs = measured(device, 3.0, &[[1, 512, 512, 512], [1, 1024, 1024, 1024]]);
        let times = OperatorTimes::new(device, Some(&costs)).unwrap();
        let check = |sizes, source, factor: f64| {
            let estimate = times.estimate(&gemm(sizes));
            let ratio = estimate.seconds.0 / roofline(device, &gemm(sizes)).0;
            assert_eq!(estimate.source, source, "{sizes:?}");
            assert!((ratio / factor - 1.0).abs() < 1e-3, "{sizes:?}: {ratio}");
        };
        check([1, 512, 512, 512], TimeSource::Measured, 3.0);
        check([1, 512, 1024, 512], TimeSource::Interpolated, 3.0);
        check([1, 16384, 16384, 512], TimeSource::Roofline, 1.0);
        let bare = OperatorTimes::new(device, None).unwrap().estimate(&gemm([1, 512, 512, 512]));
        assert_eq!(bare.source, TimeSource::Roofline);
    }

    #[test]
    fn costs_of_another_device_are_refused() {
        let machine = builtin("p100x16").unwrap();
        let costs = CostFile::builtin("h200").unwrap().unwrap();
        let error = OperatorTimes::new(&machine.spec().device, Some(&costs)).unwrap_err().to_string();
        assert!(error.contains("`H200`") && error.contains("P100"), "{error}");
    }

    #[test]
    fn counts_are_kept_by_source() {
        let mut counts = TimeSourceCounts::default();
        counts.record(&gemm([1, 1, 1, 1]), TimeSource::Roofline);
        counts.record(&gemm([1, 2, 1, 1]), TimeSource::Roofline);
        counts.record(&gemm([1, 2, 1, 1]), TimeSource::Measured);
        assert_eq!((counts.total(TimeSource::Roofline), counts.total(TimeSource::Interpolated)), (2, 0));
        assert_eq!(
            counts.counts().collect::<Vec<_>>(),
            [("gemm", TimeSource::Measured, 1), ("gemm", TimeSource::Roofline, 2)]
        );
    }
}
