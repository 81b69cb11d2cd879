//! The moves of a random walk: the choices of every variable, those of the search problem and others, pinned ones among them.

use shardwright_graph::OpId;
use shardwright_machine::{AxisId, AxisSet};
use shardwright_plan::{Choices, Context};
use shardwright_space::{Assignment, AxisUse, Config, configs, configs_with_pins, count_configs};

/// The most configs of an op that are all listed, on axes without priced choices.
const MOST_LISTED: usize = 1024;

/// The most pinned configs of a variable; where there are more, some are left out evenly.
const MOST_PINNED: usize = 128;
/// On more axes than this there are too many pinned configs to list.
pub(crate) const MOST_PINNED_AXES: usize = 4;

/// The choices of every variable.
pub struct Moves<'p> {
    context: &'p Context<'p>,
    /// Per variable: the search problem's choices; empty where those are no moves.
    priced: &'p [Choices],
    /// Per variable: choices beyond the priced ones, each with one config per op.
    more: Vec<Vec<Vec<Config>>>,
    /// Per device: the config of a variable's ops, as often as any variable has ops; empty where devices are no choices.
    devices: Vec<Vec<Config>>,
    /// Variables that may move together.
    clusters: Vec<Vec<u32>>,
    /// Per variable: the clusters that it is in.
    of: Vec<Vec<u32>>,
}

impl<'p> Moves<'p> {
    /// The priced choices. Where there are none, all configs; of an op with too many, those that differ from the current
    /// assignment on one axis.
    pub fn new(context: &'p Context<'p>, priced: &'p [Choices], near: &Assignment) -> Self {
        let listed = |variable: usize| {
            if !priced.is_empty() {
                return Vec::new();
            }
            let split = &context.variables.members[variable];
            let lead = split.forward().index();
            let (rule, mesh) = (&context.shapes[lead].rule, context.mesh());
            let leading = if count_configs(rule, mesh, MOST_LISTED) <= MOST_LISTED {
                configs(rule, mesh)
            } else {
                let uses =
                    (0..rule.factors.len()).map(|f| AxisUse::Split(f as u8)).chain([AxisUse::Replicate]);
                let changed = mesh.all().iter().flat_map(|axis| {
                    uses.clone().map(move |used| {
                        let mut config = near.configs[lead].clone();
                        config.set(axis, used);
                        config
                    })
                });
                changed.filter(|config| config.check(rule, mesh).is_ok()).collect()
            };
            leading.iter().map(|config| split.configs(&context.shapes, mesh, config)).collect()
        };
        let more = (0..context.variables.members.len()).map(listed).collect();
        Self { context, priced, more, devices: Vec::new(), clusters: Vec::new(), of: Vec::new() }
    }

    /// Every variable on any one device, and nothing else: choice `d` is device `d`, of which `on` gives the config. The variables
    /// of a cluster may move together.
    pub fn whole(context: &'p Context<'p>, on: impl Fn(u32) -> Config, clusters: Vec<Vec<u32>>) -> Self {
        // All ops of a variable have the pins of its leading op.
        let members = &context.variables.members;
        let most = members.iter().map(|split| split.ops.len()).max().unwrap_or(0);
        let devices = (0..context.mesh().devices()).map(|device| vec![on(device); most]).collect();
        let mut of = vec![Vec::new(); members.len()];
        for (cluster, members) in clusters.iter().enumerate() {
            members.iter().for_each(|&member| of[member as usize].push(cluster as u32));
        }
        Self { context, priced: &[], more: vec![Vec::new(); members.len()], devices, clusters, of }
    }

    /// The assignment of one choice per variable.
    pub fn assignment(&self, choices: &[u32]) -> Assignment {
        let chosen = |&(variable, member): &(u32, u32)| {
            self.configs(variable as usize, choices[variable as usize] as usize)[member as usize].clone()
        };
        Assignment::of(self.context.graph, self.context.variables.index.iter().map(chosen).collect())
    }

    /// The choice of every variable under an assignment; the first where its config is none of them.
    pub fn choices(&self, assignment: &Assignment) -> Vec<u32> {
        let choice = |variable: usize| {
            let ops = self.ops(variable);
            let same = |&choice: &usize| {
                ops.iter()
                    .zip(self.configs(variable, choice))
                    .all(|(op, own)| *assignment.config(*op) == *own)
            };
            (0..self.count(variable)).find(same).unwrap_or(0) as u32
        };
        (0..self.more.len()).map(choice).collect()
    }

    /// The same, and configs that pin ops to one side of some axes, down to single devices.
    #[must_use]
    pub fn with_pins(mut self, apart: AxisSet) -> Self {
        let (context, mesh) = (self.context, self.context.mesh());
        if mesh.len() > MOST_PINNED_AXES {
            return self;
        }
        for (split, more) in context.variables.members.iter().zip(&mut self.more) {
            let pinned = |config: &Config| {
                let pins =
                    config.uses().iter().enumerate().filter(|(_, used)| matches!(used, AxisUse::Pin(_)));
                let mut axes = pins.map(|(axis, _)| AxisId(axis as u32)).peekable();
                axes.peek().is_some() && axes.all(|axis| apart.contains(axis))
            };
            let mut all = configs_with_pins(&context.shapes[split.forward().index()].rule, mesh);
            all.retain(pinned);
            let every = all.len().div_ceil(MOST_PINNED).max(1);
            let kept = all.iter().step_by(every);
            more.extend(kept.map(|config| split.configs(&context.shapes, mesh, config)));
        }
        self
    }

    fn listed(&self, variable: usize) -> usize {
        self.priced.get(variable).map_or(0, |choices| choices.len())
    }

    /// How many choices a variable has.
    pub fn count(&self, variable: usize) -> usize {
        self.listed(variable) + self.more[variable].len() + self.devices.len()
    }

    /// How many choices all variables have together.
    pub fn total(&self) -> usize {
        (0..self.more.len()).map(|variable| self.count(variable)).sum()
    }

    /// The ops of a variable.
    pub fn ops(&self, variable: usize) -> &'p [OpId] {
        &self.context.variables.members[variable].ops
    }

    /// Their configs under a choice.
    pub fn configs(&self, variable: usize, choice: usize) -> &[Config] {
        let listed = self.listed(variable);
        match choice.checked_sub(listed) {
            Some(device) if !self.devices.is_empty() => &self.devices[device][..self.ops(variable).len()],
            Some(more) => &self.more[variable][more],
            None => &self.priced[variable][choice].configs,
        }
    }

    /// The clusters that a variable may move with.
    pub fn clusters(&self, variable: usize) -> &[u32] {
        self.of.get(variable).map_or(&[], Vec::as_slice)
    }

    /// The variables of a cluster.
    pub fn cluster(&self, cluster: u32) -> &[u32] {
        &self.clusters[cluster as usize]
    }

    /// The variable that an op belongs to.
    pub fn variable(&self, op: usize) -> usize {
        self.context.variables.index[op].0 as usize
    }

    /// Room for a number per op of every choice of every variable.
    pub fn unknown_numbers(&self) -> Vec<Vec<Option<u32>>> {
        (0..self.more.len()).map(|v| vec![None; self.count(v) * self.ops(v).len()]).collect()
    }
}
