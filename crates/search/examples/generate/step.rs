//! Generates cost networks of any size like those of the contest: the training step of a transformer on a
//! two-dimensional mesh.
//!
//! They have the features of the real problems. A tensor of rank r has (r+1)² layouts; a matrix product chooses the
//! factor that each mesh axis splits; edges charge the reshard. Aliases (updates in place, converts) forbid one, and most
//! nodes are such leaves. Weights live for the whole step, forward activations until their backward use. Scalars are hubs
//! with thousands of neighbours. The memory limit is a little above the least possible peak. Costs are bytes per link and
//! multiply-adds per device.

use shardwright_search::{FORBIDDEN, Interval, Network, NetworkBuilder, NetworkError, VarId};

/// Parameters of the network.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Transformer blocks of about 120 nodes and 155 edges each.
    pub layers: u32,
    /// Devices along the two axes of the mesh.
    pub mesh: [i64; 2],
    /// Aliases of every operation.
    pub followers: u32,
    /// The memory limit as a percentage of the least peak; `None`: no limit.
    pub memory_percent: Option<i64>,
}

/// The dimension that each mesh axis splits; `NONE`: replicated.
type Layout = [u8; 2];
const NONE: u8 = u8::MAX;

const BATCH: i64 = 256;
const SEQUENCE: i64 = 1024;
const HIDDEN: i64 = 4096;
const HEADS: i64 = 32;

struct Node {
    shape: Vec<i64>,
    /// The layout of the result under each choice.
    layouts: Vec<Layout>,
    costs: Vec<i64>,
    born: u64,
    last_use: u64,
    always: bool,
}

struct Edge {
    from: usize,
    to: usize,
    table: Vec<i64>,
}

/// The step under construction. Time is the number of operations so far.
struct Step<'s> {
    settings: &'s Settings,
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    now: u64,
}

/// The network of one training step.
pub fn network(settings: &Settings) -> Result<Network, NetworkError> {
    let mut step = Step { settings, nodes: Vec::new(), edges: Vec::new(), now: 0 };
    step.train();
    step.build()
}

/// Tensors of a block's forward pass that its backward pass reads.
struct Block {
    weights: [usize; 4],
    input: usize,
    query: usize,
    key: usize,
    scores: usize,
    context: usize,
    middle: usize,
    wide: usize,
}

impl Step<'_> {
    fn train(&mut self) {
        let rate = self.value(&[], true);
        let model = [BATCH, SEQUENCE, HIDDEN];
        let shapes = [
            vec![HIDDEN, 3 * HIDDEN],
            vec![HIDDEN, HIDDEN],
            vec![HIDDEN, 4 * HIDDEN],
            vec![4 * HIDDEN, HIDDEN],
        ];
        let mut x = self.value(&model, false);
        let mut blocks = Vec::new();
        for _ in 0..self.settings.layers {
            let weights = [0, 1, 2, 3].map(|w| self.value(&shapes[w], true));
            let input = x;
            let norm = self.elementwise(&[x]);
            let qkv = self.product(norm, weights[0], &[BATCH, SEQUENCE, 3 * HIDDEN], HIDDEN);
            let heads = [BATCH, HEADS, SEQUENCE, HIDDEN / HEADS];
            let query = self.reshaped(qkv, &heads);
            let key = self.reshaped(qkv, &heads);
            let scores = self.product(query, key, &[BATCH, HEADS, SEQUENCE, SEQUENCE], HIDDEN / HEADS);
            let soft = self.elementwise(&[scores]);
            let context = self.product(soft, key, &heads, SEQUENCE);
            let flat = self.reshaped(context, &model);
            let out = self.product(flat, weights[1], &model, HIDDEN);
            let middle = self.elementwise(&[x, out]);
            let norm = self.elementwise(&[middle]);
            let wide = self.product(norm, weights[2], &[BATCH, SEQUENCE, 4 * HIDDEN], HIDDEN);
            let active = self.elementwise(&[wide]);
            let narrow = self.product(active, weights[3], &model, 4 * HIDDEN);
            x = self.elementwise(&[middle, narrow]);
            blocks.push(Block { weights, input, query, key, scores, context, middle, wide });
        }
        let mut gradient = self.elementwise(&[x]);
        for block in blocks.into_iter().rev() {
            let wide = [BATCH, SEQUENCE, 4 * HIDDEN];
            let d_wide = self.product(gradient, block.weights[3], &wide, HIDDEN);
            self.update(block.wide, gradient, block.weights[3], rate);
            let d_wide = self.elementwise(&[d_wide, block.wide]);
            let d_middle = self.product(d_wide, block.weights[2], &model, 4 * HIDDEN);
            self.update(block.middle, d_wide, block.weights[2], rate);
            let d_middle = self.elementwise(&[d_middle, gradient]);
            let d_context = self.product(d_middle, block.weights[1], &model, HIDDEN);
            self.update(block.context, d_middle, block.weights[1], rate);
            let heads = [BATCH, HEADS, SEQUENCE, HIDDEN / HEADS];
            let d_context = self.reshaped(d_context, &heads);
            let d_scores =
                self.product(d_context, block.key, &[BATCH, HEADS, SEQUENCE, SEQUENCE], HIDDEN / HEADS);
            let d_scores = self.elementwise(&[d_scores, block.scores]);
            let d_query = self.product(d_scores, block.key, &heads, SEQUENCE);
            let d_key = self.product(d_scores, block.query, &heads, SEQUENCE);
            let d_heads = self.elementwise(&[d_query, d_key]);
            let d_flat = self.reshaped(d_heads, &model);
            let d_input = self.product(d_flat, block.weights[0], &model, 3 * HIDDEN);
            self.update(block.input, d_flat, block.weights[0], rate);
            gradient = self.elementwise(&[d_input, d_middle]);
        }
    }

    /// A tensor with any layout.
    fn value(&mut self, shape: &[i64], always: bool) -> usize {
        let layouts = self.layouts(shape);
        let costs = vec![0; layouts.len()];
        self.node(shape, layouts, costs, always)
    }

    fn node(&mut self, shape: &[i64], layouts: Vec<Layout>, costs: Vec<i64>, always: bool) -> usize {
        self.now += 1;
        let (born, last_use) = (self.now, self.now);
        self.nodes.push(Node { shape: shape.to_vec(), layouts, costs, born, last_use, always });
        self.nodes.len() - 1
    }

    /// All layouts of a shape with even splits.
    fn layouts(&self, shape: &[i64]) -> Vec<Layout> {
        let options = || std::iter::once(NONE).chain(0..shape.len() as u8);
        let all = options().flat_map(|first| options().map(move |second| [first, second]));
        all.filter(|&layout| {
            (0..shape.len()).all(|dim| {
                let parts: i64 = (0..2)
                    .filter(|&axis| layout[axis] == dim as u8)
                    .map(|axis| self.settings.mesh[axis])
                    .product();
                shape[dim] % parts == 0
            })
        })
        .collect()
    }

    fn bytes(&self, node: usize, layout: Layout) -> i64 {
        let whole: i64 = self.nodes[node].shape.iter().product::<i64>() * 2;
        (0..2)
            .filter(|&axis| layout[axis] != NONE)
            .fold(whole, |bytes, axis| bytes / self.settings.mesh[axis])
    }

    /// Cost of a reshard, axis by axis.
    fn change(&self, node: usize, from: Layout, to: Layout) -> i64 {
        let local = self.bytes(node, from);
        (0..2)
            .map(|axis| match (from[axis], to[axis]) {
                (a, b) if a == b => 0,
                (NONE, _) => 0,
                (_, NONE) => local * (self.settings.mesh[axis] - 1),
                _ => local / self.settings.mesh[axis] * (self.settings.mesh[axis] - 1),
            })
            .sum()
    }

    /// Connects a value to its reader: `wanted` is the layout that each choice of the reader needs.
    fn join(&mut self, from: usize, to: usize, wanted: &[Layout]) {
        let table = self.nodes[from]
            .layouts
            .iter()
            .flat_map(|&have| wanted.iter().map(move |&want| (have, want)))
            .map(|(have, want)| self.change(from, have, want))
            .collect();
        self.nodes[from].last_use = self.now;
        self.edges.push(Edge { from, to, table });
    }

    /// A result in the layout of its operands, which all have its shape.
    fn elementwise(&mut self, operands: &[usize]) -> usize {
        let shape = self.nodes[operands[0]].shape.clone();
        let out = self.value(&shape, false);
        for &operand in operands {
            let wanted = self.nodes[out].layouts.clone();
            self.join(operand, out, &wanted);
        }
        self.follow(out);
        out
    }

    /// A reshape: splits of the batch stay, others are lost.
    fn reshaped(&mut self, operand: usize, shape: &[i64]) -> usize {
        let out = self.value(shape, false);
        let wanted: Vec<Layout> = self.nodes[out]
            .layouts
            .iter()
            .map(|layout| layout.map(|dim| if dim == 0 { 0 } else { NONE }))
            .collect();
        self.join(operand, out, &wanted);
        self.follow(out);
        out
    }

    /// A matrix product: each axis splits the rows (the batch), the columns or the sum, or replicates.
    fn product(&mut self, a: usize, b: usize, shape: &[i64], inner: i64) -> usize {
        let last = shape.len() as u8 - 1;
        let (a_last, b_rank) = (self.nodes[a].shape.len() as u8 - 1, self.nodes[b].shape.len() as u8);
        let batched = b_rank > 2;
        // Per use: layouts of a, b and the result, and whether the axis has partial sums.
        let uses = [
            (0, if batched { 0 } else { NONE }, 0, false),
            (NONE, b_rank - 1, last, false),
            (a_last, if batched { b_rank - 1 } else { 0 }, NONE, true),
            (NONE, NONE, NONE, false),
        ];
        let work: i64 = shape.iter().product::<i64>() / 1024 * inner / 1024;
        let bytes: i64 = shape.iter().product::<i64>() * 2;
        let (mut of_a, mut of_b, mut layouts, mut costs) = (vec![], vec![], vec![], vec![]);
        for first in uses {
            for second in uses {
                let both = [first, second];
                let parts = |axis: usize| {
                    if both[axis].0 == NONE && both[axis].1 == NONE { 1 } else { self.settings.mesh[axis] }
                };
                let layout = both.map(|used| used.2);
                let share = (0..2)
                    .filter(|&axis| layout[axis] != NONE)
                    .fold(bytes, |bytes, axis| bytes / self.settings.mesh[axis]);
                let sums: i64 = (0..2)
                    .filter(|&axis| both[axis].3)
                    .map(|axis| 2 * share / self.settings.mesh[axis] * (self.settings.mesh[axis] - 1))
                    .sum();
                of_a.push(both.map(|used| used.0));
                of_b.push(both.map(|used| used.1));
                layouts.push(layout);
                costs.push(work / parts(0) / parts(1) + sums);
            }
        }
        let out = self.node(shape, layouts, costs, false);
        self.join(a, out, &of_a);
        self.join(b, out, &of_b);
        self.follow(out);
        out
    }

    /// Gradient of a weight, and the weight's update in place.
    fn update(&mut self, input: usize, gradient: usize, weight: usize, rate: usize) {
        let shape = self.nodes[weight].shape.clone();
        let change = self.product(input, gradient, &shape, BATCH * SEQUENCE);
        for _ in 0..2 {
            let state = self.value(&shape, true);
            let wanted = self.nodes[state].layouts.clone();
            self.join(change, state, &wanted);
            self.alias(state);
            let scalar = vec![[NONE, NONE]; wanted.len()];
            self.join(rate, state, &scalar);
        }
        let new = self.alias(weight);
        let wanted = self.nodes[new].layouts.clone();
        self.join(change, new, &wanted);
    }

    /// A node that must have the layout of another.
    fn alias(&mut self, of: usize) -> usize {
        let (shape, layouts) = (self.nodes[of].shape.clone(), self.nodes[of].layouts.clone());
        let count = layouts.len();
        let out = self.node(&shape, layouts, vec![0; count], false);
        self.nodes[of].last_use = self.now;
        let table = (0..count * count).map(|i| if i % count == i / count { 0 } else { FORBIDDEN }).collect();
        self.edges.push(Edge { from: of, to: out, table });
        out
    }

    fn follow(&mut self, of: usize) {
        for _ in 0..self.settings.followers {
            let alias = self.alias(of);
            // Converts and broadcasts are fused, so they take no memory.
            self.nodes[alias].last_use = 0;
        }
    }

    fn build(self) -> Result<Network, NetworkError> {
        let mut builder = NetworkBuilder::new();
        let end = self.now + 1;
        let mut change = vec![0i64; end as usize + 1];
        for (index, node) in self.nodes.iter().enumerate() {
            let interval = match node.always {
                true => Interval { lo: 0, hi: end },
                false => Interval {
                    lo: node.born,
                    hi: if node.last_use < node.born { node.born } else { node.last_use + 1 },
                },
            };
            let usages: Vec<i64> =
                node.layouts.iter().map(|&layout| self.bytes(index, layout).max(1)).collect();
            let least = usages.iter().min().copied().unwrap_or(0);
            if !interval.is_empty() {
                change[interval.lo as usize] += least;
                change[interval.hi as usize] -= least;
            }
            builder.variable(&node.costs, &usages, interval)?;
        }
        for edge in &self.edges {
            builder.edge(VarId(edge.from as u32), VarId(edge.to as u32), &edge.table)?;
        }
        if let Some(percent) = self.settings.memory_percent {
            let (mut now, mut peak) = (0, 0);
            for step in change {
                now += step;
                peak = now.max(peak);
            }
            builder.usage_limit(peak / 100 * percent)?;
        }
        builder.build()
    }
}
