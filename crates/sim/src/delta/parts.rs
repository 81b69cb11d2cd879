//! What an op's config means for its tasks: worked out once per op and config, then looked up.

use crate::delta::{
    NONE,
    ways::{Hop, Ways},
};
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, LayoutError};
use shardwright_graph::OpId;
use shardwright_lower::{Value, Work, window_fetches};
use shardwright_plan::{OpTimes, Problem, picoseconds};
use shardwright_space::{Config, elementwise_config, input_layout, output_layout};
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
    /// Per op: its configs.
    configs: Vec<Vec<Config>>,
    numbers: Vec<FxHashMap<Config, u32>>,
    /// Per op and config: which part, or [`NONE`].
    known: Vec<Vec<u32>>,
    /// Per op and layout: which part the op is as a sum of partial results, or [`NONE`].
    sums: Vec<Vec<u32>>,
    parts: Vec<Part>,
    layouts: Vec<u32>,
    /// Operand, fetch.
    windows: Vec<(u32, Hop)>,
}

impl<'p> Parts<'p> {
    pub fn new(problem: &'p Problem<'p>, times: OpTimes<'p>) -> Self {
        let ops = problem.graph.ops.len();
        Self {
            problem,
            times,
            configs: vec![Vec::new(); ops],
            numbers: vec![FxHashMap::default(); ops],
            known: vec![Vec::new(); ops],
            sums: vec![Vec::new(); ops],
            parts: Vec::new(),
            layouts: Vec::new(),
            windows: Vec::new(),
        }
    }

    /// The number of an op's config.
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        if let Some(&known) = self.numbers[op].get(config) {
            return known;
        }
        let next = self.configs[op].len() as u32;
        self.configs[op].push(config.clone());
        self.numbers[op].insert(config.clone(), next);
        self.known[op].push(NONE);
        next
    }

    /// The config of a number.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        &self.configs[op][number as usize]
    }

    /// An op under a config. `shapes` are the numbers of its operands' and results' shapes.
    pub fn part(
        &mut self,
        op: usize,
        config: u32,
        ways: &mut Ways<'_>,
        shapes: &[u32],
    ) -> Result<Part, LayoutError> {
        let known = self.known[op][config as usize];
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
        let (problem, config) = (self.problem, &self.configs[op][number as usize]);
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
        self.known[op][number as usize] = self.parts.len() as u32;
        self.parts.push(part);
        Ok(part)
    }

    /// An op as a sum of partial results in a layout.
    pub fn sum(&mut self, op: usize, layout: u32, ways: &Ways<'_>, shapes: &[u32]) -> Part {
        let known = self.sums[op].get(layout as usize).copied().unwrap_or(NONE);
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
        if self.sums[op].len() <= layout as usize {
            self.sums[op].resize(layout as usize + 1, NONE);
        }
        self.sums[op][layout as usize] = self.parts.len() as u32;
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
