//! Times of an op's parts: computing on one device, halo exchanges, and the reduction of a result that the op completes.
//!
//! The time depends on the number of parts of each factor, not on the axes that split it. Identical ops, frequent in
//! deep models, share their times. Where devices differ, an op waits for the slowest device that it runs on: of all
//! devices, or of those that it is pinned to.

use crate::fusion::FusedOp;
use rustc_hash::FxHashMap;
use shardwright_cost::{Comm, CostFile, Estimate, OperatorTimes, Resharder, TimeSource};
use shardwright_graph::{Graph, OpId, Region, TensorType, Workload};
use shardwright_machine::{AxisId, DeviceId, Machine, Mesh, Seconds};
use shardwright_space::{AxisUse, Config, OpShapes, completes, completion, halos};
use smallvec::SmallVec;
use std::sync::{Arc, RwLock};

/// Seconds as integer picoseconds, the unit of the search.
pub fn picoseconds(seconds: Seconds) -> i64 {
    // Saturates: the network refuses totals that do not fit.
    (seconds.0 * 1e12).round() as i64
}

/// Index of an op's class among the graph's distinct ops.
type Kind = u32;

type Parts = SmallVec<[u64; 6]>;

/// The outermost units that an op is pinned to, where devices differ; none if it runs on all.
type Units = Option<SmallVec<[u32; 4]>>;

/// Times of all ops of a graph under any config.
pub struct OpTimes<'a> {
    times: OperatorTimes<'a>,
    graph: &'a Graph,
    shapes: &'a [OpShapes],
    mesh: &'a Mesh,
    /// What the engine's kernels leave of each op; empty without an engine.
    fused: &'a [Option<FusedOp>],
    kinds: Arc<[Kind]>,
    /// Where devices differ: the machine that pins refer to, and measured times.
    mixed: Option<(&'a Machine, Option<&'a CostFile>)>,
    cache: RwLock<FxHashMap<(Kind, Parts, Units), i64>>,
}

impl<'a> OpTimes<'a> {
    /// Times are computed on demand.
    pub(crate) fn new(
        times: OperatorTimes<'a>,
        graph: &'a Graph,
        shapes: &'a [OpShapes],
        kinds: Arc<[Kind]>,
        mesh: &'a Mesh,
        fused: &'a [Option<FusedOp>],
    ) -> Self {
        Self { times, graph, shapes, mesh, fused, kinds, mixed: None, cache: RwLock::default() }
    }

    /// The same for a machine whose devices may differ: a pinned op takes the time of the devices that it is pinned to.
    #[must_use]
    pub fn on(mut self, machine: &'a Machine, costs: Option<&'a CostFile>) -> Self {
        self.mixed = (!machine.is_homogeneous()).then_some((machine, costs));
        self
    }

    /// The outermost units that a pinned op runs in, where devices differ.
    fn units(&self, config: &Config) -> Units {
        let (machine, _) = self.mixed?;
        let outermost = |axis: &AxisId| self.mesh.axis(*axis).level.0 == 0;
        let pin = |axis: AxisId| match config.get(axis) {
            AxisUse::Pin(digit) => Some((axis, u32::from(digit))),
            _ => None,
        };
        let pins: SmallVec<[(AxisId, u32); 4]> =
            self.mesh.all().iter().filter(outermost).filter_map(pin).collect();
        if pins.is_empty() {
            return None;
        }
        let first_of = |unit: u32| DeviceId(unit * machine.devices_per_unit(0));
        let keeps =
            |unit: &u32| pins.iter().all(|&(axis, digit)| self.mesh.digit(first_of(*unit), axis) == digit);
        Some((0..machine.levels()[0].count).filter(keeps).collect())
    }

    /// The time of a workload on the slowest device of some units, or of the machine.
    fn slowest(&self, estimate: impl Fn(&OperatorTimes<'_>) -> Estimate, units: &Units) -> Estimate {
        let (Some((machine, costs)), Some(units)) = (self.mixed, units) else {
            return estimate(&self.times);
        };
        let on = |unit: &u32| {
            let device = machine.device(DeviceId(unit * machine.devices_per_unit(0)));
            // Measurements of one kind of device do not apply to another.
            let times = OperatorTimes::new(device, costs).or_else(|_| OperatorTimes::new(device, None));
            debug_assert!(times.is_ok(), "a data sheet is always of its device");
            let times = times.ok()?.like(&self.times);
            Some(estimate(&times))
        };
        let slowest = units.iter().filter_map(on).max_by(|a, b| a.seconds.0.total_cmp(&b.seconds.0));
        slowest.unwrap_or_else(|| estimate(&self.times))
    }

    /// Per op: the index of its class among the graph's distinct ops.
    pub fn kinds(&self) -> &[u32] {
        &self.kinds
    }

    /// The time of one device on its part of an op, its completion included, in picoseconds.
    pub fn compute(&self, op: OpId, config: &Config) -> i64 {
        let parts = config.parts(&self.shapes[op.index()].rule, self.mesh);
        self.compute_parts(op, parts, self.units(config))
    }

    /// The time of one of so many parts per factor, on the slowest device, in picoseconds.
    pub(crate) fn compute_division(&self, op: OpId, parts: &[u64]) -> i64 {
        self.compute_parts(op, SmallVec::from_slice(parts), None)
    }

    fn compute_parts(&self, op: OpId, parts: Parts, units: Units) -> i64 {
        let key = (self.kinds[op.index()], parts, units);
        if let Some(&time) = self.cache.read().ok().as_ref().and_then(|known| known.get(&key)) {
            return time;
        }
        let time = picoseconds(self.estimate_parts(op, &key.1, &key.2).1.seconds)
            + self.completion_parts(op, &key.1, &key.2);
        if let Ok(mut known) = self.cache.write() {
            known.insert(key, time);
        }
        time
    }

    /// The workload of one part of an op, and its estimated time.
    pub fn estimate(&self, op: OpId, config: &Config) -> (Workload, Estimate) {
        let parts = config.parts(&self.shapes[op.index()].rule, self.mesh);
        self.estimate_parts(op, &parts, &self.units(config))
    }

    fn estimate_parts(&self, op: OpId, parts: &[u64], units: &Units) -> (Workload, Estimate) {
        let shapes = &self.shapes[op.index()];
        let mut region = Region::whole(&shapes.rule, &shapes.inputs, &shapes.outputs);
        for (factor, &parts) in parts.iter().enumerate() {
            region = region.split(factor as u8, 0, parts);
        }
        let local = self.graph.node(op).op.operator().localize(&region);
        let inputs: SmallVec<[TensorType; 4]> = (0..shapes.inputs.len())
            .map(|i| TensorType { dtype: shapes.inputs[i].dtype, shape: region.input_shape(i) })
            .collect();
        let outputs: SmallVec<[TensorType; 4]> = (0..shapes.outputs.len())
            .map(|o| TensorType { dtype: shapes.outputs[o].dtype, shape: region.output_shape(o) })
            .collect();
        let workload = local.workload(&inputs, &outputs);
        let part = self.fused.get(op.index()).and_then(Option::as_ref);
        let estimate = if local.operator().is_view() {
            Estimate { seconds: Seconds::ZERO, source: TimeSource::Roofline }
        } else if let Some((part, copies)) = part.and_then(|part| Some((part, part.copies.as_ref()?))) {
            let bytes = copies.bytes(&inputs, &outputs);
            let copied = |times: &OperatorTimes<'_>| {
                let alone = times.estimate(&workload);
                let rounded = times.rounded_before(&workload, copies.rounded_elements(&inputs)).0;
                let seconds = (alone.seconds.0 - rounded).max(0.0) + times.stream(bytes, part.share()).0;
                Estimate { seconds: Seconds(seconds), ..alone }
            };
            self.slowest(copied, units)
        } else if let Some(part) = part {
            let bytes = part.bytes(&local, &inputs, &outputs);
            let largest = inputs.iter().chain(&outputs).map(TensorType::bytes).max().unwrap_or(0);
            self.slowest(|times| fused_time(times, part, bytes, largest), units)
        } else {
            self.slowest(|times| times.estimate(&workload), units)
        };
        (workload, estimate)
    }

    /// The time of one device on its part of an op's completion, in picoseconds.
    pub fn completion(&self, op: OpId, config: &Config) -> i64 {
        let parts = config.parts(&self.shapes[op.index()].rule, self.mesh);
        self.completion_parts(op, &parts, &self.units(config))
    }

    fn completion_parts(&self, op: OpId, parts: &[u64], units: &Units) -> i64 {
        let shapes = &self.shapes[op.index()];
        let Some(output) = completes(&shapes.rule, parts) else { return 0 };
        let Some(completion) = self.graph.node(op).op.operator().completion() else { return 0 };
        let mut region = Region::whole(&shapes.rule, &shapes.inputs, &shapes.outputs);
        for (factor, &parts) in parts.iter().enumerate() {
            region = region.split(factor as u8, 0, parts);
        }
        let ty = |o: usize| TensorType { dtype: shapes.outputs[o].dtype, shape: region.output_shape(o) };
        let workload = completion.workload(&[ty(0), ty(output), ty(output)], &[ty(0)]);
        picoseconds(self.slowest(|times| times.estimate(&workload), units).seconds)
    }

    /// The time of the halo exchanges of an op's operands, in picoseconds.
    pub(crate) fn halo(&self, comm: &Comm, op: OpId, config: &Config) -> i64 {
        let shapes = &self.shapes[op.index()];
        (0..shapes.inputs.len())
            .flat_map(|i| halos(shapes, i, config, self.mesh))
            .map(|halo| picoseconds(comm.halo_seconds(halo.axes, halo.down, halo.up)))
            .sum()
    }

    /// The time of an op's own exchanges, in picoseconds: halos of its operands, and the reduction of a result that it
    /// completes.
    pub fn exchange(&self, resharder: &Resharder, op: OpId, config: &Config) -> i64 {
        let shapes = &self.shapes[op.index()];
        let path = completion(shapes, config, self.mesh).map(|own| own.path(shapes, resharder));
        debug_assert!(!matches!(path, Some(Err(_))), "a result that was laid out");
        let steps = path.and_then(Result::ok).map_or(Vec::new(), |path| path.steps);
        self.halo(resharder.comm(), op, config)
            + steps.iter().map(|step| picoseconds(step.seconds)).sum::<i64>()
    }
}

/// The time of an op inside of a kernel: its own traffic, and the kernel's start if it pays for it.
fn fused_time(times: &OperatorTimes<'_>, part: &FusedOp, bytes: u64, largest: u64) -> Estimate {
    let start = times.engine().filter(|_| part.starts).map_or(0.0, |engine| engine.gap_us * 1e-6);
    let cached = times.engine().and_then(|engine| engine.cached).filter(|_| part.call);
    let gain = cached.filter(|cached| largest <= cached.mib << 20).map_or(1.0, |cached| cached.gain);
    let seconds = Seconds(times.stream(bytes, (part.share() * gain).min(1.0)).0 + start);
    Estimate { seconds, source: TimeSource::Roofline }
}
