//! Lists the configs of all variables, with their costs, patterns and sizes.

use super::{
    Limits,
    held_memory::{HeldMemory, WantedSize},
    listing::{EndExample, Listed, Listing},
    relaxation::{Between, ClassConfigs, End, EndKind, Relaxation, TableKind, TransferKind},
};
use crate::{context::Context, error::PlanError, variable_classes::VariableClasses, variables::Variables};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::{Comm, PatternResharder, PatternTensor, Placement, TensorShape};
use shardwright_graph::{FactorIndex, TensorId};
use shardwright_machine::{Bytes, Level, Topology};
use shardwright_search::Control;
use shardwright_space::{AxisUse, Config, Endpoint, Transfer, count_configs};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Relaxation {
    /// The relaxation with large groups, with prices for memory where there is a limit; none where the control stops.
    pub fn new(
        context: &Context<'_>,
        limit: Option<Bytes>,
        most: i64,
        limits: &Limits,
        control: &Control<'_>,
    ) -> Result<Option<Self>, PlanError> {
        let mesh = context.machine.mesh();
        let times = context.times_on_slowest(mesh)?;
        let variables: &Variables = &context.variables;
        let ends_of = |transfer: &Transfer| {
            let variable = |end: &Endpoint| variables.index[end.op.index()].0;
            (variable(&transfer.from), variable(&transfer.to))
        };
        let mut inside: Vec<Vec<&Transfer>> = vec![Vec::new(); variables.members.len()];
        for transfer in &context.transfers.pairs {
            let (from, to) = ends_of(transfer);
            if from == to {
                inside[to as usize].push(transfer);
            }
        }
        let classes = VariableClasses::new(context.graph, variables, times.kinds(), &inside, |_| ());
        let rule = |first: u32| &context.shapes[variables.members[first as usize].forward().index()].rule;
        let counts: Vec<usize> = classes
            .first
            .iter()
            .map(|&first| count_configs(rule(first), mesh, limits.most_configs))
            .collect();
        let is_listed = listed(&counts, limits);
        // Kinds of endpoints and transfers.
        let mut end_ids: FxHashMap<(EndKind, u32), u32> = FxHashMap::default();
        let mut end_examples: Vec<EndExample> = Vec::new();
        let mut tensor_ids: FxHashMap<TensorShape, u32> = FxHashMap::default();
        let mut kind_ids: FxHashMap<(u32, u32, u32), u32> = FxHashMap::default();
        let mut kinds: Vec<TransferKind> = Vec::new();
        let mut pairs: BTreeMap<(u32, u32), Between> = BTreeMap::new();
        let mut shapes: Vec<TensorShape> = Vec::new();
        let mut within: Vec<Vec<u32>> = vec![Vec::new(); classes.first.len()];
        for transfer in &context.transfers.pairs {
            let (from_variable, to_variable) = ends_of(transfer);
            let shape = shape_of(context, transfer.tensor)?;
            let tensor = *tensor_ids.entry(shape).or_insert_with(|| {
                shapes.push(shape);
                shapes.len() as u32 - 1
            });
            let mut end = |end: &Endpoint| {
                let (variable, member) = variables.index[end.op.index()];
                let class = classes.of[variable as usize];
                *end_ids.entry(((class, member, end.port, end.reduced), tensor)).or_insert_with(|| {
                    // The endpoint of the class's first variable stands for all.
                    let op = variables.members[classes.first[class as usize] as usize].ops[member as usize];
                    end_examples.push(EndExample { end: Endpoint { op, ..*end }, class, member, tensor });
                    end_examples.len() as u32 - 1
                })
            };
            let (from, to) = (end(&transfer.from), end(&transfer.to));
            let runs = context.graph.runs(transfer.to.op);
            let kind = *kind_ids.entry((from, to, runs)).or_insert_with(|| {
                kinds.push(TransferKind { from, to, runs, table: Vec::new(), columns: 0 });
                kinds.len() as u32 - 1
            });
            let class = classes.of[to_variable as usize] as usize;
            if from_variable != to_variable {
                let pair = (from_variable.min(to_variable), from_variable.max(to_variable));
                pairs.entry(pair).or_default().push((kind, from_variable < to_variable));
            } else if classes.first[class] == to_variable && is_listed[class] {
                within[class].push(kind);
            }
        }
        // Reshards of a tensor with too many patterns count as free.
        let mut partial = vec![false; shapes.len()];
        for (own, is_partial) in end_examples.iter().zip(may_be_partial(context, &classes, &end_examples)) {
            partial[own.tensor as usize] |= is_partial;
        }
        let mut memory = limit.map(|limit| HeldMemory::new(context, &classes, limit));
        let wanted = memory.as_ref().map_or(&[][..], HeldMemory::wanted);
        let mut ends_of_class: Vec<Vec<usize>> = vec![Vec::new(); classes.first.len()];
        let mut sizes_of_class = ends_of_class.clone();
        end_examples.iter().enumerate().for_each(|(at, own)| ends_of_class[own.class as usize].push(at));
        wanted.iter().enumerate().for_each(|(at, own)| sizes_of_class[own.class as usize].push(at));
        let resharder = PatternResharder::new(context.machine).with_patterns(limits.most_patterns);
        let patterns_of = |partial: &[bool]| -> Vec<Option<PatternTensor>> {
            let tensors = shapes.par_iter().zip(partial);
            tensors.map(|(shape, &partial)| resharder.tensor(shape, partial)).collect()
        };
        let listing = Listing {
            context,
            times: &times,
            comm: Comm::new(context.machine, mesh),
            symmetric: !has_torus(context),
            control,
        };
        let list = |tensors: &[Option<PatternTensor>]| -> Option<Vec<Listed>> {
            let class = |class: usize| {
                let split = &variables.members[classes.first[class] as usize];
                let end = |&at: &usize| {
                    let end = &end_examples[at];
                    (end, tensors[end.tensor as usize].as_ref())
                };
                let ends: Vec<_> = ends_of_class[class].iter().map(end).collect();
                let sizes: Vec<&WantedSize> = sizes_of_class[class].iter().map(|&at| &wanted[at]).collect();
                if is_listed[class] {
                    listing.listed(split, &ends, &sizes)
                } else {
                    Some(listing.free(split, &ends, &sizes))
                }
            };
            (0..classes.first.len()).into_par_iter().map(class).collect()
        };
        let mut tensors = patterns_of(&partial);
        let mut made = list(&tensors);
        if made.is_none() && control.stop_by_time().is_none() {
            // A config of several axes leaves partial results where none of one axis does.
            tensors = patterns_of(&vec![true; shapes.len()]);
            made = list(&tensors);
        }
        let Some(made) = made else { return Ok(None) };
        let mut own_classes = Vec::new();
        let mut patterns: Vec<Vec<u32>> = vec![Vec::new(); end_examples.len()];
        let mut sizes: Vec<Vec<i64>> = vec![Vec::new(); wanted.len()];
        for (at, own) in made.into_iter().enumerate() {
            own_classes.push(ClassConfigs { inside: std::mem::take(&mut within[at]), ..own.class });
            ends_of_class[at].iter().zip(own.patterns).for_each(|(&end, own)| patterns[end] = own);
            sizes_of_class[at].iter().zip(own.sizes).for_each(|(&size, own)| sizes[size] = own);
        }
        if let Some(memory) = &mut memory {
            memory.fill(sizes);
        }
        let end = |(EndExample { class, tensor, .. }, patterns): (EndExample, Vec<u32>)| {
            let (sets, times, is_source) = (Vec::new(), Vec::new(), false);
            End { class, tensor, patterns, sets, is_source, times }
        };
        let mut ends: Vec<End> = end_examples.into_iter().zip(patterns).map(end).collect();
        kinds.iter().for_each(|kind| ends[kind.from as usize].is_source = true);
        let mut table_ids: FxHashMap<([u32; 2], Between), u32> = FxHashMap::default();
        let mut tables: Vec<TableKind> = Vec::new();
        let pair = |((u, v), mut transfers): ((u32, u32), Between)| {
            transfers.sort_unstable();
            let own = [u, v].map(|variable| classes.of[variable as usize]);
            let table = *table_ids.entry((own, transfers.clone())).or_insert_with(|| {
                tables.push(TableKind { classes: own, transfers, table: Arc::default() });
                tables.len() as u32 - 1
            });
            ((u, v), table)
        };
        let pairs = pairs.into_iter().map(pair).collect();
        let (classes, of, times) = (own_classes, classes.of, FxHashMap::default());
        Ok(Some(Self { classes, of, ends, tensors, kinds, tables, pairs, times, memory, most }))
    }
}

/// Per endpoint: whether some config leaves partial results there. What an axis does to a tensor hardly depends on the other axes, so
/// configs that use one axis tell.
fn may_be_partial(context: &Context<'_>, classes: &VariableClasses, ends: &[EndExample]) -> Vec<bool> {
    let mesh = context.machine.mesh();
    let mut configs: Vec<Vec<Vec<Config>>> = Vec::with_capacity(classes.first.len());
    for &first in &classes.first {
        let split = &context.variables.members[first as usize];
        let rule = &context.shapes[split.forward().index()].rule;
        let uses =
            mesh.all().iter().flat_map(|axis| (0..rule.factors.len()).map(move |factor| (axis, factor)));
        let single = uses.map(|(axis, factor)| {
            let mut config = Config::replicated(mesh.len());
            config.set(axis, AxisUse::Split(factor as FactorIndex));
            config
        });
        let valid = single.filter(|config| config.check(rule, mesh).is_ok());
        configs.push(valid.map(|config| split.configs(&context.shapes, mesh, &config)).collect());
    }
    let is_partial = |own: &EndExample| {
        configs[own.class as usize].iter().any(|configs| {
            let layout = own.end.layout(&context.shapes, &configs[own.member as usize], mesh);
            !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
        })
    };
    ends.iter().map(is_partial).collect()
}

/// Which classes with so many configs are listed: the smallest ones, as many as fit.
fn listed(counts: &[usize], limits: &Limits) -> Vec<bool> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&class| counts[class]);
    let mut listed = vec![false; counts.len()];
    let mut all = 0;
    for class in order {
        all += counts[class];
        listed[class] = counts[class] <= limits.most_configs && all <= limits.most_configs_in_all;
    }
    listed
}

/// Whether a level is a torus, where axes of a class are not interchangeable in all prices.
fn has_torus(context: &Context<'_>) -> bool {
    let torus = |level: &Level| matches!(level.link.topology, Topology::Torus { .. });
    context.machine.levels().iter().any(torus)
}

fn shape_of(context: &Context<'_>, tensor: TensorId) -> Result<TensorShape, PlanError> {
    let known = context.graph.tensor(tensor);
    TensorShape::new(&known.ty.shape, known.ty.dtype.bytes() as u32)
        .map_err(|source| PlanError::Tensor { tensor: known.name.clone(), source })
}
