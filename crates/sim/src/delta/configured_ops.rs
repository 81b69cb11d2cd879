//! Ops under configs: durations, layouts, halo exchanges and completions, computed once per config of equal ops.

use crate::delta::{
    NONE,
    reshard_paths::{ReshardPaths, ReshardStep},
};
use crate::tasks::duration;
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, LayoutError};
use shardwright_graph::{Op, OpId};
use shardwright_lower::{Value, Work, halo_exchanges};
use shardwright_plan::{Context, OpTimes, picoseconds};
use shardwright_space::{Config, OpShapes, completion, elementwise_config, input_layout, output_layout};
use smallvec::SmallVec;

/// An op under a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfiguredOp {
    pub duration: u64,
    /// Start of the layouts of its operands, then of its results, in [`ConfiguredOps::layouts`].
    layouts: u32,
    /// Start of its halo exchanges in [`ConfiguredOps::halos`], and their number.
    halos: u32,
    halo_count: u32,
    /// The device classes that it runs on.
    pub device_classes: u64,
    /// The tasks after it, if it reduces a result itself.
    pub completion: Option<CompletionTasks>,
}

/// The tasks of an op that reduces a result itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionTasks {
    /// Which result.
    pub output: u32,
    /// Duration of the completion.
    pub duration: u64,
    /// Start of the reduction's steps in [`ConfiguredOps::reductions`], and their number.
    steps: u32,
    count: u32,
}

/// All ops under all requested configs.
pub struct ConfiguredOps<'p> {
    context: &'p Context<'p>,
    times: OpTimes<'p>,
    /// Per op: its kind. Ops of one kind are equal, with operands of equal shapes; unrolled networks have many of them.
    kinds: Vec<u32>,
    /// Per kind: its configs.
    configs: Vec<Vec<Config>>,
    numbers: Vec<FxHashMap<Config, u32>>,
    /// Per kind and config: its index in `entries`, or [`NONE`].
    indices: Vec<Vec<u32>>,
    /// Per kind and layout: the index of the op as a sum of partial results, or [`NONE`].
    sums: Vec<Vec<u32>>,
    entries: Vec<ConfiguredOp>,
    layouts: Vec<u32>,
    /// Operand and exchange.
    halos: Vec<(u32, ReshardStep)>,
    /// Steps of the reductions of results that ops complete.
    reductions: Vec<ReshardStep>,
}

impl<'p> ConfiguredOps<'p> {
    pub fn new(context: &'p Context<'p>, times: OpTimes<'p>) -> Self {
        let mut known: FxHashMap<(&Op, &OpShapes), u32> = FxHashMap::default();
        let kinds = context.graph.ops.iter().zip(&context.shapes[..]).map(|(node, shapes)| {
            let next = known.len() as u32;
            *known.entry((&node.op, shapes)).or_insert(next)
        });
        let kinds: Vec<u32> = kinds.collect();
        let count = known.len();
        Self {
            context,
            times,
            kinds,
            configs: vec![Vec::new(); count],
            numbers: vec![FxHashMap::default(); count],
            indices: vec![Vec::new(); count],
            sums: vec![Vec::new(); count],
            entries: Vec::new(),
            layouts: Vec::new(),
            halos: Vec::new(),
            reductions: Vec::new(),
        }
    }

    /// The number of an op's config.
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        let kind = self.kinds[op] as usize;
        if let Some(&known) = self.numbers[kind].get(config) {
            return known;
        }
        let next = self.configs[kind].len() as u32;
        self.configs[kind].push(config.clone());
        self.numbers[kind].insert(config.clone(), next);
        self.indices[kind].push(NONE);
        next
    }

    /// The config with a number.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        &self.configs[self.kinds[op] as usize][number as usize]
    }

    /// The op under a config. `shapes` are the numbers of its operands' and results' shapes.
    pub fn get(
        &mut self,
        op: usize,
        config: u32,
        reshard_paths: &mut ReshardPaths<'_>,
        shapes: &[u32],
    ) -> Result<ConfiguredOp, LayoutError> {
        let known = self.indices[self.kinds[op] as usize][config as usize];
        if known != NONE {
            return Ok(self.entries[known as usize]);
        }
        self.compute(op, config, reshard_paths, shapes)
    }

    #[cold]
    fn compute(
        &mut self,
        op: usize,
        number: u32,
        reshard_paths: &mut ReshardPaths<'_>,
        shapes: &[u32],
    ) -> Result<ConfiguredOp, LayoutError> {
        let kind = self.kinds[op] as usize;
        let (context, config) = (self.context, &self.configs[kind][number as usize]);
        let (of, mesh) = (&context.shapes[op], context.mesh());
        let layouts = self.layouts.len() as u32;
        let halos = self.halos.len() as u32;
        for (i, &shape) in shapes.iter().enumerate().take(of.inputs.len()) {
            let layout = input_layout(of, i, config, mesh);
            self.layouts.push(reshard_paths.layout(shape, layout));
            let stored = Value {
                tensor: context.graph.ops[op].inputs[i],
                ty: of.inputs[i].clone(),
                at: Arrangement::canonical(&layout),
                cuts: SmallVec::new(),
                made_by: None,
                last_read: None,
                kept: false,
            };
            for (_, work) in halo_exchanges(&context.resharder, of, i, config, &stored) {
                let Work::HaloExchange { axes, seconds, .. } = work else { continue };
                let duration = duration(picoseconds(seconds));
                if duration > 0 {
                    let members = reshard_paths.device_classes.of_layout(&layout);
                    self.halos.push((i as u32, reshard_paths.collective(duration, axes, members)));
                }
            }
        }
        for o in 0..of.outputs.len() {
            let layout = output_layout(of, o, config, mesh);
            self.layouts.push(reshard_paths.layout(shapes[of.inputs.len() + o], layout));
        }
        let completed = completion(of, config, mesh);
        let completing = self.times.completion(OpId::new(op), config);
        let main = duration(self.times.compute(OpId::new(op), config) - completing);
        let device_classes = reshard_paths.device_classes.of_config(config);
        debug_assert!(device_classes.is_some(), "only configs with supported pins get numbers");
        let device_classes = device_classes.unwrap_or_else(|| reshard_paths.device_classes.all());
        let halo_count = self.halos.len() as u32 - halos;
        let completion = match completed {
            None => None,
            Some(own) => {
                let shape = shapes[of.inputs.len() + own.output];
                let [from, to] = [own.from, own.to].map(|layout| reshard_paths.layout(shape, layout));
                let steps = self.reductions.len() as u32;
                reshard_paths.steps_between(shape, from, to, &mut self.reductions)?;
                let count = self.reductions.len() as u32 - steps;
                Some(CompletionTasks {
                    output: own.output as u32,
                    duration: duration(completing),
                    steps,
                    count,
                })
            }
        };
        let configured =
            ConfiguredOp { duration: main, layouts, halos, halo_count, device_classes, completion };
        self.indices[kind][number as usize] = self.entries.len() as u32;
        self.entries.push(configured);
        Ok(configured)
    }

    /// An op as a sum of partial results in a layout.
    pub fn sum(
        &mut self,
        op: usize,
        layout: u32,
        reshard_paths: &ReshardPaths<'_>,
        shapes: &[u32],
    ) -> ConfiguredOp {
        let kind = self.kinds[op] as usize;
        let known = self.sums[kind].get(layout as usize).copied().unwrap_or(NONE);
        if known != NONE {
            return self.entries[known as usize];
        }
        let of = &self.context.shapes[op];
        let config =
            elementwise_config(reshard_paths.layout_of(shapes[0], layout), &of.rule, self.context.mesh());
        let duration = duration(self.times.compute(OpId::new(op), &config));
        let (layouts, halos) = (self.layouts.len() as u32, self.halos.len() as u32);
        self.layouts.extend(std::iter::repeat_n(layout, shapes.len()));
        let device_classes =
            reshard_paths.device_classes.of_layout(reshard_paths.layout_of(shapes[0], layout));
        let configured =
            ConfiguredOp { duration, layouts, halos, halo_count: 0, device_classes, completion: None };
        if self.sums[kind].len() <= layout as usize {
            self.sums[kind].resize(layout as usize + 1, NONE);
        }
        self.sums[kind][layout as usize] = self.entries.len() as u32;
        self.entries.push(configured);
        configured
    }

    /// The layout of an operand or a result. Results are numbered after operands.
    pub fn layout(&self, configured: &ConfiguredOp, slot: u32) -> u32 {
        self.layouts[(configured.layouts + slot) as usize]
    }

    /// The steps that reduce the result that it completes.
    pub fn reduction(&self, completion: &CompletionTasks) -> &[ReshardStep] {
        &self.reductions[completion.steps as usize..(completion.steps + completion.count) as usize]
    }

    /// Its halo exchanges, by operand.
    pub fn halos(&self, configured: &ConfiguredOp) -> &[(u32, ReshardStep)] {
        &self.halos[configured.halos as usize..(configured.halos + configured.halo_count) as usize]
    }
}
