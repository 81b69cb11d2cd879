//! What an op's config means for its tasks: worked out once per config of ops that are alike, then looked up.

use crate::delta::{
    NONE,
    ways::{Hop, Ways},
};
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, LayoutError};
use shardwright_graph::{Op, OpId};
use shardwright_lower::{Value, Work, window_fetches};
use shardwright_plan::{OpTimes, Problem, picoseconds};
use shardwright_space::{Config, OpShapes, elementwise_config, input_layout, output_layout};
use smallvec::SmallVec;

/// One op under one config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub duration: u64,
    /// Where the layouts of its operands, then of its results start in [`Parts::layouts`].
    layouts: u32,
    /// Where its windows' fetches start in [`Parts::windows`], and how many there are.
    windows: u32,
    window_count: u32,
    /// The lanes that it runs on.
    pub lanes: u64,
}

/// All ops under all configs that were asked for.
pub struct Parts<'p> {
    problem: &'p Problem<'p>,
    times: OpTimes<'p>,
    /// Per op: its kind. Ops of one kind do the same on operands of the same shapes; unrolled nets are full of them.
    kinds: Vec<u32>,
    /// Per kind: its configs.
    configs: Vec<Vec<Config>>,
    numbers: Vec<FxHashMap<Config, u32>>,
    /// Per kind and config: which part, or [`NONE`].
    known: Vec<Vec<u32>>,
    /// Per kind and layout: which part the op is as a sum of partial results, or [`NONE`].
    sums: Vec<Vec<u32>>,
    parts: Vec<Part>,
    layouts: Vec<u32>,
    /// Operand, fetch.
    windows: Vec<(u32, Hop)>,
}

impl<'p> Parts<'p> {
    pub fn new(problem: &'p Problem<'p>, times: OpTimes<'p>) -> Self {
        let mut known: FxHashMap<(&Op, &OpShapes), u32> = FxHashMap::default();
        let kinds = problem.graph.ops.iter().zip(&problem.shapes).map(|(node, shapes)| {
            let next = known.len() as u32;
            *known.entry((&node.op, shapes)).or_insert(next)
        });
        let kinds: Vec<u32> = kinds.collect();
        let count = known.len();
        Self {
            problem,
            times,
            kinds,
            configs: vec![Vec::new(); count],
            numbers: vec![FxHashMap::default(); count],
            known: vec![Vec::new(); count],
            sums: vec![Vec::new(); count],
            parts: Vec::new(),
            layouts: Vec::new(),
            windows: Vec::new(),
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
        self.known[kind].push(NONE);
        next
    }

    /// The config of a number.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        &self.configs[self.kinds[op] as usize][number as usize]
    }

    /// An op under a config. `shapes` are the numbers of its operands' and results' shapes.
    pub fn part(
        &mut self,
        op: usize,
        config: u32,
        ways: &mut Ways<'_>,
        shapes: &[u32],
    ) -> Result<Part, LayoutError> {
        let known = self.known[self.kinds[op] as usize][config as usize];
        if known != NONE {
            return Ok(self.parts[known as usize]);
        }
        self.work_out(op, config, ways, shapes)
    }

    #[cold]
    fn work_out(
        &mut self,
        op: usize,
        number: u32,
        ways: &mut Ways<'_>,
        shapes: &[u32],
    ) -> Result<Part, LayoutError> {
        let kind = self.kinds[op] as usize;
        let (problem, config) = (self.problem, &self.configs[kind][number as usize]);
        let (of, mesh) = (&problem.shapes[op], problem.mesh());
        let layouts = self.layouts.len() as u32;
        let windows = self.windows.len() as u32;
        for (i, &shape) in shapes.iter().enumerate().take(of.inputs.len()) {
            let layout = input_layout(of, i, config, mesh);
            self.layouts.push(ways.layout(shape, layout));
            let stored = Value {
                tensor: problem.graph.ops[op].inputs[i],
                ty: of.inputs[i].clone(),
                at: Arrangement::canonical(&layout),
                cuts: SmallVec::new(),
                made_by: None,
                last_read: None,
                kept: false,
            };
            for (_, work) in window_fetches(&problem.relayouts, of, i, config, &stored) {
                let Work::Window { axes, seconds, .. } = work else { continue };
                let duration = u64::try_from(picoseconds(seconds)).unwrap_or(0);
                if duration > 0 {
                    let members = ways.lanes.of_layout(&layout);
                    self.windows.push((i as u32, ways.collective(duration, axes, members)));
                }
            }
        }
        for o in 0..of.outputs.len() {
            let layout = output_layout(of, o, config, mesh);
            self.layouts.push(ways.layout(shapes[of.inputs.len() + o], layout));
        }
        let duration = self.times.compute(OpId::new(op), config);
        let part = Part {
            duration: u64::try_from(duration).unwrap_or(0),
            layouts,
            windows,
            window_count: self.windows.len() as u32 - windows,
            lanes: ways.lanes.of_config(config).unwrap_or_else(|| ways.lanes.all()),
        };
        self.known[kind][number as usize] = self.parts.len() as u32;
        self.parts.push(part);
        Ok(part)
    }

    /// An op as a sum of partial results in a layout.
    pub fn sum(&mut self, op: usize, layout: u32, ways: &Ways<'_>, shapes: &[u32]) -> Part {
        let kind = self.kinds[op] as usize;
        let known = self.sums[kind].get(layout as usize).copied().unwrap_or(NONE);
        if known != NONE {
            return self.parts[known as usize];
        }
        let of = &self.problem.shapes[op];
        let config = elementwise_config(ways.layout_of(shapes[0], layout), &of.rule, self.problem.mesh());
        let duration = u64::try_from(self.times.compute(OpId::new(op), &config)).unwrap_or(0);
        let (layouts, windows) = (self.layouts.len() as u32, self.windows.len() as u32);
        self.layouts.extend(std::iter::repeat_n(layout, shapes.len()));
        let lanes = ways.lanes.of_layout(ways.layout_of(shapes[0], layout));
        let part = Part { duration, layouts, windows, window_count: 0, lanes };
        if self.sums[kind].len() <= layout as usize {
            self.sums[kind].resize(layout as usize + 1, NONE);
        }
        self.sums[kind][layout as usize] = self.parts.len() as u32;
        self.parts.push(part);
        part
    }

    /// The layout of an operand, or (counted on) of a result.
    pub fn layout(&self, part: &Part, slot: u32) -> u32 {
        self.layouts[(part.layouts + slot) as usize]
    }

    /// What its windows fetch, by operand.
    pub fn windows(&self, part: &Part) -> &[(u32, Hop)] {
        &self.windows[part.windows as usize..(part.windows + part.window_count) as usize]
    }
}
