//! A trace beside a plan's predictions: how much of the time is matched, and which assumption was wrong by how much.
//!
//! Products are matched by their shapes where the trace has them, everything else by its kind. A trace whose work is not the plan's is
//! refused: factors of another model would be noise.

use crate::{
    events::TraceError,
    kernels::{DeviceWork, KernelKind, ProductSizes},
};
use shardwright_cost::{BELIEVED, LearnedOp, WorkKind};
use shardwright_graph::DType;
use std::collections::{BTreeMap, BTreeSet};

/// The least share of a trace's time that must be of kinds, and of product shapes, that the plan has.
const LEAST_MATCHED: f64 = 0.7;
/// The most that the number of products per step may differ by, as a factor.
const MOST_PRODUCTS: f64 = 2.0;

/// Of so many products one may be a kernel too many, where their number gives the number of steps.
const MOST_EXTRA: usize = 8;

/// The time that a plan predicts for an op or collective on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Its kind.
    pub kind: KernelKind,
    /// Its product's sizes.
    pub product: Option<ProductSizes>,
    /// Class, element type and sizes of its workload.
    pub workload: Option<(&'static str, DType, Vec<u64>)>,
    /// The time.
    pub seconds: f64,
}

/// A trace that does not belong to a plan.
#[derive(Debug, thiserror::Error)]
pub enum MatchError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The work is another's.
    #[error(
        "this is a trace of another model or plan: {reason}; give the plan that ran with --ran, with the same model, batch and engine"
    )]
    AnotherModel {
        /// How that was seen.
        reason: String,
    },
    /// The number of steps is unknown.
    #[error(
        "the trace does not mark its steps, and {products} products are not about a multiple of the plan's {planned}; profile whole steps, with `schedule=` and `prof.step()` in PyTorch"
    )]
    Steps {
        /// Products in the trace.
        products: usize,
        /// Products of one step of the plan.
        planned: usize,
    },
    /// A factor that is not believed.
    #[error(
        "{what} took {factor:.3} times the predicted time, which is not believed; check that the machine and the engine are those that ran"
    )]
    Unbelievable {
        /// The kind.
        what: &'static str,
        /// Measured over predicted.
        factor: f64,
    },
}

/// What one kind of work took.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The kind.
    pub kind: KernelKind,
    /// Number per step and device, in the trace and in the plan.
    pub counts: [f64; 2],
    /// Seconds per step and device, measured and predicted.
    pub seconds: [f64; 2],
}

impl Finding {
    /// Measured over predicted.
    pub fn factor(&self) -> f64 {
        self.seconds[0] / self.seconds[1]
    }
}

/// What a trace says about a plan's predictions.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Steps in the trace.
    pub steps: u32,
    /// Devices in the trace.
    pub devices: u32,
    /// The share of the time that is of kinds which the plan predicts.
    pub matched: f64,
    /// The share of the time that was matched by shapes.
    pub by_shape: f64,
    /// Per kind: what it took, the most important first.
    pub kinds: Vec<Finding>,
    /// Factors of ops whose shapes are known.
    pub ops: Vec<LearnedOp>,
    /// The longest of what was not matched: name and seconds per step.
    pub unmatched: Vec<(String, f64)>,
    /// Seconds per step in which the device did nothing.
    pub idle: f64,
}

impl Findings {
    /// Compares a trace with the predictions for one device.
    ///
    /// # Errors
    /// Where the trace is of another model, or the number of its steps is unknown.
    pub fn of(work: &DeviceWork, predictions: &[Prediction]) -> Result<Self, MatchError> {
        let steps = steps(work, predictions)?;
        let per_step = f64::from(steps) * f64::from(work.devices);
        let total: f64 = work.kernels.iter().map(|kernel| kernel.seconds).sum();
        if total <= 0.0 || !total.is_finite() {
            return Err(TraceError::Empty("no op of it took any time").into());
        }
        let planned: BTreeMap<KernelKind, Finding> = predicted(predictions);
        let mut kinds = planned.clone();
        let mut unmatched: BTreeMap<&str, f64> = BTreeMap::new();
        for kernel in &work.kernels {
            match kinds.get_mut(&kernel.kind) {
                Some(finding) => {
                    finding.counts[0] += 1.0 / per_step;
                    finding.seconds[0] += kernel.seconds / per_step;
                }
                None => *unmatched.entry(&kernel.name).or_default() += kernel.seconds / per_step,
            }
        }
        let missed: f64 = unmatched.values().sum::<f64>() * per_step;
        let matched = 1.0 - missed / total;
        let other = |reason: String| Err(MatchError::AnotherModel { reason });
        let mut unmatched: Vec<(String, f64)> =
            unmatched.into_iter().map(|(name, seconds)| (name.to_string(), seconds)).collect();
        unmatched.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if matched < LEAST_MATCHED {
            let longest: Vec<&str> = unmatched.iter().take(3).map(|(name, _)| &name[..]).collect();
            return other(format!(
                "{:.0}% of its time is work that the plan does not have ({})",
                100.0 * (1.0 - matched),
                longest.join(", ")
            ));
        }
        check_counts(&kinds)?;
        let (ops, by_shape) = shapes(work, predictions, per_step)?;
        // What the plan has and the trace lacks says nothing about its time.
        let mut kinds: Vec<Finding> = kinds.into_values().filter(|found| found.counts[0] > 0.0).collect();
        kinds.retain(|finding| finding.seconds[1] > 0.0);
        kinds.sort_by(|a, b| (b.seconds[0] + b.seconds[1]).total_cmp(&(a.seconds[0] + a.seconds[1])));
        if let Some(finding) = kinds.iter().find(|finding| !BELIEVED.contains(&finding.factor())) {
            return Err(MatchError::Unbelievable { what: finding.kind.name(), factor: finding.factor() });
        }
        unmatched.truncate(5);
        let idle = (work.span / f64::from(steps) - total / per_step).max(0.0);
        let (steps, devices) = (steps, work.devices);
        Ok(Self { steps, devices, matched, by_shape: by_shape / total, kinds, ops, unmatched, idle })
    }

    /// The finding that explains most of the difference between measured and predicted time.
    pub fn worst(&self) -> Option<&Finding> {
        let missed = |finding: &&Finding| (finding.seconds[0] - finding.seconds[1]).abs();
        self.kinds.iter().max_by(|a, b| missed(a).total_cmp(&missed(b)))
    }
}

fn predicted(predictions: &[Prediction]) -> BTreeMap<KernelKind, Finding> {
    let mut kinds: BTreeMap<KernelKind, Finding> = BTreeMap::new();
    for prediction in predictions {
        let kind = prediction.kind;
        let finding = kinds.entry(kind).or_insert(Finding { kind, counts: [0.0; 2], seconds: [0.0; 2] });
        // Ops that a kernel fuses cost nothing of their own.
        finding.counts[1] += f64::from(u8::from(prediction.seconds > 0.0));
        finding.seconds[1] += prediction.seconds;
    }
    kinds
}

/// Steps by the trace's marks, or by the number of products.
fn steps(work: &DeviceWork, predictions: &[Prediction]) -> Result<u32, MatchError> {
    if let Some(steps) = work.steps {
        return Ok(steps);
    }
    let product = KernelKind::Work(WorkKind::Products);
    let products =
        work.kernels.iter().filter(|kernel| kernel.kind == product).count() / work.devices as usize;
    let planned = predictions.iter().filter(|prediction| prediction.kind == product).count();
    if planned == 0 {
        return Ok(1);
    }
    // A product may be two kernels, where its depth is split: the number is about a multiple.
    let steps = ((products + planned / 2) / planned).max(1);
    match products.abs_diff(steps * planned) * MOST_EXTRA <= products || steps == 1 {
        true => Ok(steps as u32),
        false => Err(MatchError::Steps { products, planned }),
    }
}

/// Refuses a trace that has far more or fewer products, convolutions or attentions per step than the plan.
fn check_counts(kinds: &BTreeMap<KernelKind, Finding>) -> Result<(), MatchError> {
    for kind in [WorkKind::Products, WorkKind::Convolutions, WorkKind::Attention] {
        let Some(finding) = kinds.get(&KernelKind::Work(kind)) else { continue };
        let [measured, planned] = finding.counts;
        let important = finding.seconds[1] > 0.1 * kinds.values().map(|all| all.seconds[1]).sum::<f64>();
        // Convolutions and attention are several kernels each.
        let most = if kind == WorkKind::Products { MOST_PRODUCTS } else { 4.0 * MOST_PRODUCTS };
        if important && (measured > most * planned || measured * MOST_PRODUCTS < planned) {
            let what = kind.name();
            return Err(MatchError::AnotherModel {
                reason: format!("it has {measured:.0} {what} per step, the plan {planned:.0}"),
            });
        }
    }
    Ok(())
}

/// Factors of products whose shapes the trace has, and the seconds of the trace that they are.
fn shapes(
    work: &DeviceWork,
    predictions: &[Prediction],
    per_step: f64,
) -> Result<(Vec<LearnedOp>, f64), MatchError> {
    // By shape: seconds, number.
    let mut measured: BTreeMap<ProductSizes, (f64, f64)> = BTreeMap::new();
    for kernel in &work.kernels {
        if let Some(product) = kernel.product {
            let (seconds, number) = measured.entry(product).or_default();
            *seconds += kernel.seconds;
            *number += 1.0;
        }
    }
    let mut planned: BTreeMap<ProductSizes, (f64, f64)> = BTreeMap::new();
    for prediction in predictions {
        if let Some(product) = prediction.product {
            let (seconds, number) = planned.entry(product).or_default();
            *seconds += prediction.seconds;
            *number += 1.0;
        }
    }
    let of_shapes: f64 = measured.values().map(|(seconds, _)| seconds).sum();
    let known: f64 = measured
        .iter()
        .filter(|(shape, _)| planned.contains_key(*shape))
        .map(|(_, (seconds, _))| seconds)
        .sum();
    if of_shapes > 0.0 && known < LEAST_MATCHED * of_shapes {
        let foreign = measured.iter().filter(|(shape, _)| !planned.contains_key(*shape));
        let longest = foreign.max_by(|a, b| a.1.0.total_cmp(&b.1.0)).map(|(shape, _)| *shape);
        let [batch, m, n, k] = longest.unwrap_or_default();
        return Err(MatchError::AnotherModel {
            reason: format!(
                "{:.0}% of the time of its products is of shapes that the plan does not have, such as {batch} x [{m} x {k}] x [{k} x {n}]",
                100.0 * (1.0 - known / of_shapes)
            ),
        });
    }
    let mut ops = Vec::new();
    let mut seen = BTreeSet::new();
    for prediction in predictions {
        let (Some(product), Some((class, dtype, sizes))) = (prediction.product, &prediction.workload) else {
            continue;
        };
        let (Some(&(seconds, _)), Some(&(predicted, _))) = (measured.get(&product), planned.get(&product))
        else {
            continue;
        };
        let factor = seconds / per_step / predicted;
        if predicted > 0.0 && BELIEVED.contains(&factor) && seen.insert((*class, *dtype, sizes)) {
            ops.push(LearnedOp { class: (*class).into(), dtype: *dtype, sizes: sizes.clone(), factor });
        }
    }
    Ok((ops, known))
}
