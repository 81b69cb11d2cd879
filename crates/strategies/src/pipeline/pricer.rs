//! Prices uniform plans of one model on one machine. Graphs and segment costs are computed once per distinct choice.

use super::{
    compose::{ModelCosts, PipelinePrice, compose, even_stages, step_bound, usual_schedule},
    degrees::{DegreeError, UniformPlan, UniformRequest, ZeroLevel},
    segment_costs::{SegmentCost, Segments, segment_costs},
    stage_checks::{check_products, tied, undivided},
    stage_mesh::{AxisRole, RoleMesh},
    uniform_configs::{UniformRules, expert_factor, uniform_assignment},
};
use crate::error::StrategyError;
use rayon::prelude::*;
use shardwright_cost::{Collective, Comm, CostFile, Engine};
use shardwright_graph::{BlockChain, Graph, OpId, Phase, RecomputePolicy, microbatch, remat, remat_whole};
use shardwright_machine::{AxisSet, Bytes, Machine};
use shardwright_plan::{Context, PlanError, repeated_step_lower_bound};
use shardwright_stages::schedule::Schedule;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A step in micro-batches with some ops recomputed, and the segment of each of its layers.
pub(crate) struct StepGraph {
    pub graph: Graph,
    pub segments: Vec<u32>,
    /// Number of segments. One without layers of its own has no costs.
    count: usize,
}

impl StepGraph {
    /// The step of a graph whose layers have these segments. The forward ops that `recomputed` picks are recomputed.
    pub fn of(
        base: &Graph,
        (layer_segments, segment_count): (&[u32], usize),
        micro_batches: NonZeroU32,
        recomputed: impl Fn(&Graph) -> Vec<OpId>,
        engine: Option<&Engine>,
    ) -> Result<Self, String> {
        let mut graph = microbatch(base, micro_batches).map_err(|error| error.to_string())?.graph;
        let ops = recomputed(&graph);
        if !ops.is_empty() {
            let whole = engine.is_some_and(|engine| engine.recomputes_whole_blocks);
            let clone = if whole { remat_whole } else { remat };
            graph = clone(&graph, &ops).map_err(|error| error.to_string())?;
        }
        let known: BTreeMap<&str, u32> =
            base.layers.iter().zip(layer_segments).map(|(layer, &at)| (layer.name.as_str(), at)).collect();
        let consumers = graph.consumers();
        let mut segments = vec![None; graph.layers.len()];
        for (at, layer) in graph.layers.iter().enumerate() {
            segments[at] = known.get(layer.name.as_str()).copied();
        }
        // Views of weights belong to those who read them.
        for (at, layer) in graph.layers.iter().enumerate() {
            if segments[at].is_none() {
                let output = graph.node(layer.forward).outputs.first();
                let reader = output.and_then(|t| consumers.of(*t).first());
                segments[at] = reader.and_then(|op| segments[graph.node(*op).layer.index()]);
            }
        }
        let segments = segments.into_iter().map(|segment| segment.unwrap_or(0)).collect();
        Ok(Self { graph, segments, count: segment_count })
    }

    /// The segments of its layers.
    pub(super) fn segments(&self) -> Segments<'_> {
        Segments { of_layer: &self.segments, count: self.count }
    }
}

/// The costs of a model's segments under one inner plan.
struct StageCosts {
    /// Per segment of the short step.
    segments: Vec<SegmentCost>,
    /// Bytes of weights that several segments read, on one device.
    tied_bytes: u64,
    /// The share of the first segment's fixed memory that belongs to these weights.
    tied_share: f64,
}

/// The choices that segment costs depend on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct InnerKey {
    devices: u32,
    degrees: [u32; 4],
    micro_batches: u32,
    zero: ZeroLevel,
    sequence: bool,
    recompute: RecomputePolicy,
}

/// A uniform plan and its price.
#[derive(Clone, Debug, PartialEq)]
pub struct PricedUniform {
    /// The plan.
    pub plan: UniformPlan,
    /// Its price.
    pub price: PipelinePrice,
}

impl PricedUniform {
    /// Seconds that the simulated step may take at best. Without stages, composed prices of gathered weights are often too high.
    pub fn least_seconds(&self) -> f64 {
        match self.plan.pipeline {
            1 => self.price.compute_seconds,
            _ => self.price.step_seconds,
        }
    }
}

/// Prices uniform plans.
pub struct UniformPricer<'a> {
    pub(super) graph: &'a Graph,
    pub(super) machine: &'a Machine,
    pub(super) costs: Option<&'a CostFile>,
    /// The model as a chain of segments.
    pub(super) chain: BlockChain,
    comm: Comm,
    batch: u64,
    graphs: Mutex<BTreeMap<(u32, RecomputePolicy), Arc<StepGraph>>>,
    /// Per policy: the names of the recomputed forward ops of the whole model.
    recomputed: Mutex<BTreeMap<RecomputePolicy, Arc<BTreeSet<String>>>>,
    stages: Mutex<BTreeMap<InnerKey, Arc<Result<StageCosts, DegreeError>>>>,
    bound: OnceLock<i64>,
}

impl<'a> UniformPricer<'a> {
    /// The pricer of a training step without micro-batches and recomputation.
    ///
    /// # Errors
    /// Where the model is no chain of repeated blocks, or has no batch.
    pub fn new(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, DegreeError> {
        let fail = |reason: String| DegreeError { reasons: vec![reason] };
        if graph.micro_batches.get() > 1 {
            return Err(fail(
                "the step is divided into micro-batches already: leave --micro-batches out".into(),
            ));
        }
        if graph.gradients.is_empty() {
            return Err(fail(format!("{} is no training step", graph.name)));
        }
        if !machine.is_homogeneous() {
            return Err(fail(format!(
                "the devices of {} differ: uniform plans need equal ones",
                machine.name()
            )));
        }
        let chain = BlockChain::of(graph).map_err(|error| fail(error.to_string()))?;
        let batch = graph.step_size().samples.ok_or_else(|| fail(format!("{} has no batch", graph.name)))?;
        let comm = Comm::new(machine, &machine.mesh().per_level());
        Ok(Self {
            graph,
            machine,
            costs,
            chain,
            comm,
            batch,
            graphs: Mutex::default(),
            recomputed: Mutex::default(),
            stages: Mutex::default(),
            bound: OnceLock::new(),
        })
    }

    /// The engine that runs the plans.
    pub(super) fn engine(&self) -> Option<&'static Engine> {
        self.machine.slowest().engine.and_then(Engine::of)
    }

    /// Samples of a step.
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// Blocks of the model.
    pub fn blocks(&self) -> u32 {
        self.chain.blocks()
    }

    /// Picoseconds that no plan's step is shorter than, with any number of micro-batches and whatever overlaps. Recomputation only
    /// adds to a step.
    ///
    /// # Errors
    /// Where the costs are of another device.
    pub fn step_lower_bound(&self) -> Result<i64, StrategyError> {
        if let Some(known) = self.bound.get() {
            return Ok(*known);
        }
        let mut repeats = vec![0u64; self.kept_segments()];
        self.chain.segments.iter().for_each(|segment| repeats[segment.like as usize] += 1);
        let bound = |count: NonZeroU32| -> Result<i64, StrategyError> {
            let Ok(step) = self.short_step(count, RecomputePolicy::Off) else { return Ok(i64::MAX) };
            let mesh = self.machine.mesh().clone();
            let context = Context::new(&step.graph, self.machine, self.costs, mesh, true)?;
            let segments = step.segments();
            Ok(repeated_step_lower_bound(&context, |op| repeats[segments.of_op(&context, op)])?)
        };
        let counts: Vec<NonZeroU32> = (1..=u32::try_from(self.batch).unwrap_or(u32::MAX))
            .filter(|count| self.batch.is_multiple_of(u64::from(*count)))
            .filter_map(NonZeroU32::new)
            .collect();
        let bounds = counts.into_par_iter().map(bound).collect::<Result<Vec<_>, _>>()?;
        let least = bounds.into_iter().min().unwrap_or(0);
        Ok(*self.bound.get_or_init(|| least))
    }

    /// Seconds of gathering so many bytes from all devices.
    pub(super) fn gather_seconds(&self, bytes: u64) -> f64 {
        self.comm.seconds(Collective::AllGather, self.comm.mesh().all(), Bytes(bytes)).0
    }

    /// The plans that a request allows: what it leaves open is chosen from them.
    ///
    /// # Errors
    /// Every degree that does not suit the model or the machine.
    pub fn plans(&self, request: &UniformRequest) -> Result<Vec<UniformPlan>, DegreeError> {
        let devices = self.machine.devices();
        let (tensor, pipeline) = (request.tensor.unwrap_or(1), request.pipeline.unwrap_or(1));
        let (context, expert) = (request.context.unwrap_or(1), request.expert.unwrap_or(1));
        let mut reasons = Vec::new();
        let inner = u64::from(tensor).saturating_mul(u64::from(pipeline)).saturating_mul(u64::from(context));
        let total = inner.saturating_mul(u64::from(request.data.unwrap_or(1)));
        let shown = |data: Option<u32>| {
            let all = [("tp", tensor), ("pp", pipeline), ("cp", context), ("dp", data.unwrap_or(1))];
            let used: Vec<String> =
                all.iter().filter(|(_, n)| *n > 1).map(|(key, n)| format!("{key}={n}")).collect();
            match &used[..] {
                [] => "dp=1".to_string(),
                [one] => one.clone(),
                _ => format!("{} = {total}", used.join(" × ")),
            }
        };
        let fits = match request.data {
            Some(_) => total == u64::from(devices),
            None => u64::from(devices).is_multiple_of(inner),
        };
        if !fits {
            let relation = if request.data.is_some() { "is not" } else { "does not divide" };
            reasons.push(format!(
                "{} {relation} the number of devices of {}, {devices}",
                shown(request.data),
                self.machine.name()
            ));
        }
        let data = request.data.unwrap_or_else(|| (u64::from(devices) / inner).max(1) as u32);
        if !data.is_multiple_of(expert) {
            reasons.push(format!("ep={expert} does not divide the data-parallel degree, {data}"));
        }
        if !self.batch.is_multiple_of(u64::from(data)) {
            reasons.push(format!("dp={data} does not divide the batch, {}", self.batch));
        }
        let per_replica = (self.batch / u64::from(data)).max(1);
        let sizes: Vec<u64> = match request.micro_batch {
            Some(size) if !per_replica.is_multiple_of(size) => {
                reasons.push(format!(
                    "mbs={size} does not divide the samples of a replica, {per_replica} (batch {} / dp {data})",
                    self.batch
                ));
                Vec::new()
            }
            Some(size) => vec![size],
            None => (1..=per_replica.min(64)).filter(|size| per_replica.is_multiple_of(*size)).collect(),
        };
        let schedules = self.schedules(request, pipeline, &mut reasons);
        let whole = UniformPlan {
            tensor,
            pipeline,
            context,
            expert,
            data,
            micro_batch: self.batch,
            micro_batches: 1,
            zero: request.zero.unwrap_or_default(),
            sequence: request.sequence.unwrap_or(false),
            recompute: RecomputePolicy::Off,
            schedule: Schedule::Accumulate,
        };
        if !reasons.is_empty() {
            reasons.extend(self.step(&whole).map_or_else(|_| Vec::new(), |step| undivided(&step, &whole)));
            return Err(DegreeError { reasons });
        }
        let recompute = request.recompute.unwrap_or_default();
        let mut plans = Vec::new();
        let mut refused = BTreeSet::new();
        for micro_batch in sizes {
            for &schedule in &schedules {
                let micro_batches = u32::try_from(per_replica / micro_batch).unwrap_or(u32::MAX);
                if let Err(error) = schedule.check(pipeline, micro_batches) {
                    refused.insert(format!("mbs={micro_batch}: {error}"));
                    continue;
                }
                plans.push(UniformPlan { micro_batch, micro_batches, recompute, schedule, ..whole });
            }
        }
        match plans.is_empty() {
            true => Err(DegreeError { reasons: refused.into_iter().take(4).collect() }),
            false => Ok(plans),
        }
    }

    /// The schedules that a request allows, with chunks that divide the blocks.
    fn schedules(&self, request: &UniformRequest, pipeline: u32, reasons: &mut Vec<String>) -> Vec<Schedule> {
        let blocks = self.blocks();
        let mut refuse = |reason: String| {
            reasons.push(reason);
            Vec::new()
        };
        let divides = |chunks: u32| self.divides(pipeline.saturating_mul(chunks));
        let name = request.schedule.unwrap_or(match (pipeline, request.chunks) {
            (1, _) => "accumulate",
            (_, None | Some(1)) => "1f1b",
            _ => "interleaved",
        });
        if pipeline == 1 && name != "accumulate" && request.schedule.is_some() {
            return refuse(format!("schedule={name} needs pipeline stages: give pp"));
        }
        let chunks: Vec<u32> = match (name, request.chunks) {
            ("interleaved", Some(chunks)) => vec![chunks],
            ("interleaved", None) => (2..=(blocks / pipeline).max(2)).filter(|v| divides(*v)).collect(),
            ("zb-v" | "dualpipe-v", None | Some(2)) => vec![2],
            (_, None | Some(1)) => vec![1],
            (_, Some(chunks)) => return refuse(format!("vp={chunks}: {name} has a fixed number of chunks")),
        };
        let fitting: Vec<u32> = chunks.iter().copied().filter(|v| divides(*v)).collect();
        if fitting.is_empty() {
            let stages = match chunks[..] {
                [1] => format!("pp={pipeline}"),
                [chunks] => format!("pp={pipeline} × {chunks} chunks"),
                _ => format!("pp={pipeline} × any number of chunks"),
            };
            return refuse(format!("{stages} does not divide the {blocks} blocks of the model"));
        }
        let of = |chunks: u32| match name {
            "gpipe" => Schedule::GPipe,
            "zb-h1" => Schedule::ZbH1,
            "zb-v" => Schedule::ZbV,
            "dualpipe-v" => Schedule::DualPipeV,
            _ => usual_schedule(pipeline, chunks),
        };
        fitting.into_iter().map(of).collect()
    }

    /// Whether blocks can be divided among so many stages.
    pub(super) fn divides(&self, stages: u32) -> bool {
        stages <= self.blocks() && even_stages(&self.segment_blocks(), stages).is_some()
    }

    /// The experts of a block; 1 in a model without.
    pub(super) fn experts(&self) -> u64 {
        let graph = &self.chain.short;
        let size = |op| expert_factor(graph, op).map(|f| graph.rule(op).factors[usize::from(f)].size);
        graph.layers.iter().find_map(|layer| size(layer.forward)).unwrap_or(1)
    }

    /// Blocks per segment of the model.
    pub(super) fn segment_blocks(&self) -> Vec<u32> {
        self.chain.segments.iter().map(|segment| segment.blocks).collect()
    }

    /// Number of segments of the short step.
    fn kept_segments(&self) -> usize {
        self.chain.segments.iter().map(|segment| segment.like as usize + 1).max().unwrap_or(1)
    }

    /// The short step of a plan.
    fn step(&self, plan: &UniformPlan) -> Result<Arc<StepGraph>, DegreeError> {
        let count = NonZeroU32::new(plan.micro_batches).unwrap_or(NonZeroU32::MIN);
        self.short_step(count, plan.recompute)
            .map_err(|reason| DegreeError { reasons: vec![format!("mbs={}: {reason}", plan.micro_batch)] })
    }

    /// The short step in so many micro-batches.
    fn short_step(&self, count: NonZeroU32, recompute: RecomputePolicy) -> Result<Arc<StepGraph>, String> {
        let key = (count.get(), recompute);
        if let Some(known) = self.graphs.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(known));
        }
        let segments = (&self.chain.short_segments[..], self.kept_segments());
        // Three blocks may repeat otherwise than all of them, so the policy looks at the whole model.
        let names = self.recomputed_names(recompute);
        let recomputed = |graph: &Graph| {
            let own = |op: &OpId| {
                let node = graph.node(*op);
                node.phase == Phase::Forward && names.contains(&node.name)
            };
            graph.op_ids().filter(own).collect()
        };
        let made = StepGraph::of(&self.chain.short, segments, count, recomputed, self.engine())?;
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(graphs.entry(key).or_insert_with(|| Arc::new(made))))
    }

    /// The names of the forward ops of the whole model that a policy recomputes.
    fn recomputed_names(&self, recompute: RecomputePolicy) -> Arc<BTreeSet<String>> {
        let mut names = self.recomputed.lock().unwrap_or_else(PoisonError::into_inner);
        let of_policy = || {
            let ops = recompute.ops(self.graph);
            Arc::new(ops.into_iter().map(|op| self.graph.node(op).name.clone()).collect())
        };
        Arc::clone(names.entry(recompute).or_insert_with(of_policy))
    }

    /// The price of a plan.
    ///
    /// # Errors
    /// Where its degrees do not suit the model or the machine's levels, or a stage cannot be priced.
    pub fn price(&self, plan: &UniformPlan) -> Result<PricedUniform, StrategyError> {
        let priced = self.price_below(plan, f64::INFINITY)?;
        priced.ok_or_else(|| internal("a finite step is below infinity"))
    }

    /// The price of a plan; none where its step cannot be shorter than `limit` seconds.
    ///
    /// # Errors
    /// As [`UniformPricer::price`].
    pub fn price_below(
        &self,
        plan: &UniformPlan,
        limit: f64,
    ) -> Result<Option<PricedUniform>, StrategyError> {
        let stages = plan.pipeline * plan.schedule.chunks();
        let ranges = even_stages(&self.segment_blocks(), stages);
        let ranges = ranges.ok_or_else(|| {
            let reason = format!("{stages} stages do not divide {} blocks", self.blocks());
            StrategyError::Degrees(DegreeError { reasons: vec![reason] })
        })?;
        self.price_stages(plan, &ranges, limit)
    }

    /// The price of a plan whose stages have these segments.
    pub(super) fn price_stages(
        &self,
        plan: &UniformPlan,
        ranges: &[Range<usize>],
        limit: f64,
    ) -> Result<Option<PricedUniform>, StrategyError> {
        let devices = self.machine.devices() / plan.pipeline;
        let (own, tied_bytes) = self.model_segments(plan)?;
        let segments: Vec<&SegmentCost> = own.iter().collect();
        let permute = |bytes: u64, from: u32, to: u32| self.send(devices, bytes, from, to);
        let send = |bytes: u64, from: u32| {
            let to = (from + 1) % plan.pipeline.max(1);
            let whole = permute(bytes, from, to);
            // Megatron's scatter and gather (arXiv 2104.04473, section 4.1): equal copies send a part each.
            let parts = segments.iter().find(|cost| cost.boundary_bytes == bytes);
            let parted = parts.filter(|cost| cost.boundary_copies > 1).map(|cost| {
                permute(bytes / u64::from(cost.boundary_copies), from, to) + cost.boundary_gather
            });
            parted.map_or(whole, |parted| parted.min(whole))
        };
        let tied = match plan.pipeline {
            1 => 0.0,
            stages => permute(tied_bytes, 0, stages - 1),
        };
        let model = ModelCosts {
            segments: segments.clone(),
            blocks: self.segment_blocks(),
            send: &send,
            blocking: !self.machine.slowest().overlap,
            tied,
        };
        if step_bound(plan, &model, ranges) >= limit {
            return Ok(None);
        }
        let price = compose(plan, &model, ranges, devices)
            .map_err(|error| StrategyError::Degrees(DegreeError { reasons: vec![error.to_string()] }))?;
        Ok(Some(PricedUniform { plan: *plan, price }))
    }

    /// The costs of every segment of the model.
    ///
    /// # Errors
    /// As [`UniformPricer::price`].
    pub fn segments(&self, plan: &UniformPlan) -> Result<Vec<SegmentCost>, StrategyError> {
        Ok(self.model_segments(plan)?.0)
    }

    /// The costs of every segment of the model, and bytes of weights that the end stages share.
    fn model_segments(&self, plan: &UniformPlan) -> Result<(Vec<SegmentCost>, u64), StrategyError> {
        let costs = self.stage_costs(plan, self.machine.devices() / plan.pipeline)?;
        let costs = costs.as_ref().as_ref().map_err(|error| StrategyError::Degrees(error.clone()))?;
        let like = self.chain.segments.iter().map(|segment| costs.segments[segment.like as usize]);
        let mut segments: Vec<SegmentCost> = like.collect();
        // The last stage holds its own copy of weights that it shares with the first.
        if let Some(last) = segments.last_mut().filter(|_| plan.pipeline > 1) {
            let copy = costs.segments[0].memory.fixed as f64 * costs.tied_share;
            last.memory.fixed = last.memory.fixed.saturating_add(copy as u64);
        }
        Ok((segments, costs.tied_bytes))
    }

    /// Seconds of sending bytes from every device of a group to its partner in another.
    fn send(&self, devices: u32, bytes: u64, from: u32, to: u32) -> f64 {
        if bytes == 0 || from == to {
            return 0.0;
        }
        let differs = |level: &usize| {
            let unit = |group: u32| group * devices / self.machine.devices_per_unit(*level).max(1);
            unit(from) != unit(to)
        };
        let level = (0..self.machine.levels().len()).find(differs).unwrap_or(0);
        let mesh = self.comm.mesh();
        let axes: AxisSet =
            mesh.all().iter().filter(|axis| mesh.axis(*axis).level.index() == level).collect();
        self.comm.seconds(Collective::Permute, axes, Bytes(bytes)).0
    }

    fn stage_costs(
        &self,
        plan: &UniformPlan,
        devices: u32,
    ) -> Result<Arc<Result<StageCosts, DegreeError>>, StrategyError> {
        let key = InnerKey {
            devices,
            degrees: [plan.tensor, plan.context, plan.expert, plan.data],
            micro_batches: plan.micro_batches,
            zero: plan.zero,
            sequence: plan.sequence,
            recompute: plan.recompute,
        };
        if let Some(known) = self.stages.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(known));
        }
        let made = match self.simulate_stage(plan, devices) {
            Err(StrategyError::Degrees(error)) => Err(error),
            other => Ok(other?),
        };
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(stages.entry(key).or_insert_with(|| Arc::new(made))))
    }

    fn simulate_stage(&self, plan: &UniformPlan, devices: u32) -> Result<StageCosts, StrategyError> {
        let step = self.step(plan)?;
        let machine = self
            .machine
            .restrict(u64::from(devices))
            .map_err(|error| DegreeError { reasons: vec![format!("pp={}: {error}", plan.pipeline)] })?;
        let mesh = role_mesh(&machine, plan, 1)?;
        let context = Context::new(&step.graph, &machine, self.costs, mesh.mesh.clone(), true)?;
        let rules = UniformRules { zero: plan.zero, sequence: plan.sequence };
        let assignment = uniform_assignment(&context, &mesh, rules).without_impossible_sums(
            context.graph,
            &context.shapes,
            context.mesh(),
        );
        let segments = step.segments();
        check_products(&context, &mesh, &assignment, &segments, plan)?;
        let mut costs = segment_costs(&context, &assignment, &segments)?;
        let tensor = mesh.axes(|role| role == AxisRole::Tensor);
        for cost in costs.iter_mut().filter(|_| !plan.sequence && !tensor.is_empty()) {
            let bytes = Bytes(cost.boundary_bytes);
            cost.boundary_copies = context.mesh().group_size(tensor);
            cost.boundary_gather = context.resharder.comm().seconds(Collective::AllGather, tensor, bytes).0;
        }
        let (tied_bytes, tied_share) = tied(&context, &assignment, &segments, &costs);
        Ok(StageCosts { segments: costs, tied_bytes, tied_share })
    }
}

fn internal(reason: &str) -> StrategyError {
    PlanError::Internal { reason: reason.into() }.into()
}

/// The mesh of a machine by the plan's roles, with `stages` groups of devices outermost.
pub(super) fn role_mesh(machine: &Machine, plan: &UniformPlan, stages: u32) -> Result<RoleMesh, DegreeError> {
    let degrees = [
        (AxisRole::Tensor, plan.tensor),
        (AxisRole::Context, plan.context),
        (AxisRole::Expert, plan.expert),
        (AxisRole::Data, plan.data / plan.expert.max(1)),
        (AxisRole::Stage, stages),
    ];
    RoleMesh::new(machine, degrees).map_err(|(role, degree)| {
        let key = match role {
            AxisRole::Tensor => "tp",
            AxisRole::Context => "cp",
            AxisRole::Expert => "ep",
            AxisRole::Data => "dp",
            AxisRole::Stage => "pp",
        };
        let levels: Vec<String> =
            machine.levels().iter().map(|level| format!("{} {}", level.count, level.name)).collect();
        let reason = format!(
            "{key}={degree} is not made of whole parts of the levels of {} ({}), innermost first",
            machine.name(),
            levels.join(" × ")
        );
        DegreeError { reasons: vec![reason] }
    })
}
