//! Engines: what a framework makes of a step's ops. One table per engine (`engines/*.toml`), every rule with the measurement
//! behind it.
//!
//! An engine fuses memory-bound ops into kernels, multiplies in a memory format and an alignment of its own, takes host time
//! for every kernel, and holds memory of its own. A table names workload classes; the planner finds the groups
//! (`shardwright_plan`).

use crate::learned::WorkKind;
use serde::Deserialize;
use shardwright_machine::EngineName;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

/// How an engine runs ops.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// Its name.
    pub name: EngineName,
    /// What was measured: software, device and date.
    pub measured: String,
    /// Sets of workload classes that one kernel may compute together.
    #[serde(default)]
    pub families: Vec<BTreeSet<String>>,
    /// Whether a family is one call of a library, which computes statistics over any dimensions and what follows from them.
    #[serde(default)]
    pub calls: bool,
    /// The share of memory bandwidth that fused kernels reach.
    pub share: f64,
    /// The same for kernels with an op of a class, where it differs. `class.outer`: where the kernel reduces over leading
    /// dimensions. `class.wide`: where it reduces over more than [`WIDE`] trailing elements. `class.16bit`, `class.outer.16bit` and
    /// `class.wide.16bit`: where its tensors are 16-bit floats.
    #[serde(default)]
    pub shares: BTreeMap<String, f64>,
    /// How much faster the calls of a library are whose largest tensor fits the cache, in MiB and as a factor: they read it twice.
    #[serde(default)]
    pub cached: Option<CachedCalls>,
    /// Classes whose ops of all tensors run in one kernel, with their share of memory bandwidth: the optimizer's. `class.16bit`: where
    /// they are 16-bit floats.
    #[serde(default)]
    pub batched: BTreeMap<String, f64>,
    /// What differs in steps with f32 master weights.
    #[serde(default)]
    pub mixed: MixedRules,
    /// How much longer products and attention take inside of steps than alone: the device slows down under its power limit.
    #[serde(default = "one")]
    pub product_slowdown: f64,
    /// The same for products of f32 on vector units, which the power limit does not touch.
    #[serde(default = "one")]
    pub single_slowdown: f64,
    /// Whether a product adds a bias to its result at no cost.
    #[serde(default)]
    pub bias_epilogue: bool,
    /// Whether 16-bit products with unaligned sizes are padded first: they run at the rate of aligned ones, after a copy.
    #[serde(default)]
    pub pads_products: bool,
    /// How many times as long 16-bit products with unaligned sizes take as aligned ones, where they are neither padded nor run by the
    /// matrix library.
    #[serde(default)]
    pub unaligned_slowdown: Option<f64>,
    /// Whether convolutions run in the memory format `channels_last`.
    #[serde(default)]
    pub channels_last: bool,
    /// Whether a step keeps contiguous tensors if one of its convolutions suffers from `channels_last`: one of groups, or one that
    /// halves the channels or more with a kernel larger than one.
    #[serde(default)]
    pub contiguous_if_narrowing: bool,
    /// Classes whose f32 ops run in TF32 like convolutions.
    #[serde(default)]
    pub tf32_classes: BTreeSet<String>,
    /// Whether f32 products run in TF32 unless asked otherwise. Convolutions always do.
    #[serde(default)]
    pub tf32_products: bool,
    /// Microseconds on the device between two kernels.
    pub gap_us: f64,
    /// Microseconds of the host per kernel that a plan counts, which may be several on the device; none: the host launches whole steps.
    #[serde(default)]
    pub host_us_per_kernel: f64,
    /// The same for convolutions and their gradients, where they differ.
    #[serde(default)]
    pub host_us_per_convolution: Option<f64>,
    /// The same for updates, and for kernels that widen gradients: short loops over all weights.
    #[serde(default)]
    pub host_us_per_update: f64,
    /// Microseconds of the host per step.
    #[serde(default)]
    pub host_us_per_step: f64,
    /// Whether transfers run beside kernels. Else the engine waits for every collective before its next kernel.
    #[serde(default = "yes")]
    pub overlap: bool,
    /// Whether collectives of tensor parallelism run in parts beside the products that they belong to.
    #[serde(default)]
    pub pipelines_products: bool,
    /// Whether weights are rounded to 8-bit floats once per step, not for every product of every micro-batch.
    #[serde(default)]
    pub rounds_weights_once: bool,
    /// How many times as long each kind of kernel takes beside a collective, which runs on cores of the same device.
    #[serde(default)]
    pub beside_collectives: BTreeMap<WorkKind, f64>,
    /// Microseconds per kernel that `probe` measures (`host_launch` of machine files) on a host for which the tables' hold.
    #[serde(default)]
    pub probed_host_us: Option<f64>,
    /// Whether a recomputed block runs again as a whole, with results that nothing reads.
    #[serde(default)]
    pub recomputes_whole_blocks: bool,
    /// The shares of peak that fused attention reaches forwards and backwards, where its kernel is not the usual one.
    #[serde(default)]
    pub attention_shares: Option<[f64; 2]>,
    /// Whether weights that are gathered are copied out of the collective's buffer, and gradients that are reduced into one, in f32.
    #[serde(default)]
    pub copies_weights: bool,
    /// Whether keys and values are copied for every query head that shares them.
    #[serde(default)]
    pub repeats_key_heads: bool,
    /// Classes that the engine recomputes in the backward pass where that keeps fewer bytes.
    #[serde(default)]
    pub recomputes: BTreeSet<String>,
    /// Whether it also recomputes what a reduction in the same kernel reads: logits in f32, from those in 16 bits.
    #[serde(default)]
    pub recomputes_in_kernels: bool,
    /// Whether all updates follow the whole backward pass, so that gradients are held until then.
    #[serde(default)]
    pub updates_last: bool,
    /// Bytes of workspace that the engine keeps on the device: those of matrix libraries.
    #[serde(default)]
    pub workspace_mib: u64,
    /// Copies of an op's results that the engine holds beside them, by class. An engine that pads products copies only what is
    /// unaligned.
    #[serde(default)]
    pub copies: BTreeMap<String, u64>,
    /// Element-wise functions of which the backward pass keeps one tensor more than it needs, by the readers and writers between
    /// which they stand: `products` (the derivative needs the operand), `convolutions` (it follows one).
    #[serde(default)]
    pub saves: BTreeSet<String>,
    /// Memory of the device that is no part of a plan's peak.
    #[serde(default)]
    pub reserves: Reserves,
}

/// Rules of steps with f32 master weights, where they differ.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixedRules {
    /// Shares of memory bandwidth of classes whose ops of all tensors run in one kernel.
    #[serde(default)]
    pub batched: BTreeMap<String, f64>,
    /// Kernels per weight that widen its gradient.
    #[serde(default)]
    pub kernels_per_weight: u32,
}

/// Calls whose largest tensor fits the cache.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CachedCalls {
    /// The largest tensor, in MiB.
    pub mib: u64,
    /// How many times as fast they are.
    pub gain: f64,
}

/// Memory of a device that an engine takes beside a plan's tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserves {
    /// The context of the driver with its loaded kernels, in MiB.
    #[serde(default)]
    pub context_mib: u64,
    /// Buffers of the collectives' library, in MiB.
    #[serde(default)]
    pub collectives_mib: u64,
    /// What the allocator holds beyond the tensors, as a share of them: rounded sizes and fragments.
    #[serde(default)]
    pub fragments: f64,
}

impl Reserves {
    /// Bytes of a device's memory that no plan may fill. With several devices there are buffers of collectives.
    pub fn bytes(&self, memory: u64, many: bool) -> u64 {
        let fixed = self.context_mib + if many { self.collectives_mib } else { 0 };
        // Tensors and their fragments share what is left.
        let rest = memory.saturating_sub(fixed << 20) as f64;
        (fixed << 20).saturating_add((rest * self.fragments / (1.0 + self.fragments)) as u64)
    }
}

/// The widest rows that compilers reduce in registers.
pub const WIDE: u64 = 1024;

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

/// What decides which share of a class applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelKind {
    /// It reduces over leading dimensions.
    pub outer: bool,
    /// It reduces over wide rows.
    pub wide: bool,
    /// Its tensors are 16-bit floats.
    pub narrow: bool,
}

impl Engine {
    fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let mut table: toml::Table = toml::from_str(text)?;
        if let Some(like) = table.remove("like") {
            let named = |text: &&&str| {
                let other: Option<toml::Table> = toml::from_str(text).ok();
                other.is_some_and(|other| other.get("name") == Some(&like))
            };
            let other =
                TABLES.iter().find(named).map_or(Ok(toml::Table::new()), |text| toml::from_str(text))?;
            table = overridden(other, table);
        }
        table.try_into()
    }

    /// The table of an engine.
    pub fn of(name: EngineName) -> Option<&'static Engine> {
        ENGINES.get(&name)
    }

    /// The share of memory bandwidth of a kernel that computes ops of these classes.
    pub fn share_of<'c>(&self, classes: impl IntoIterator<Item = &'c str>, kind: KernelKind) -> f64 {
        let own = |class: &str| self.class_share(class, kind);
        classes.into_iter().filter_map(own).reduce(f64::min).unwrap_or(self.share)
    }

    /// The share of memory bandwidth of a class, if it has one of its own.
    pub fn class_share(&self, class: &str, kind: KernelKind) -> Option<f64> {
        let of = |key: String| self.shares.get(&key).copied();
        let narrow = |key: &str| kind.narrow.then(|| of(format!("{key}.16bit"))).flatten();
        let outer = || {
            let key = format!("{class}.outer");
            narrow(&key).or_else(|| of(key))
        };
        let wide = || {
            let key = format!("{class}.wide");
            narrow(&key).or_else(|| of(key))
        };
        let special = kind.outer.then(outer).flatten().or_else(|| kind.wide.then(wide).flatten());
        special.or_else(|| narrow(class)).or_else(|| of(class.into()))
    }

    /// The share of memory bandwidth of a class whose ops of all tensors run in one kernel.
    pub fn batched_share(&self, class: &str, mixed: bool, narrow: bool) -> Option<f64> {
        let own = mixed.then(|| self.mixed.batched.get(class)).flatten();
        let own = own.or_else(|| narrow.then(|| self.batched.get(&format!("{class}.16bit"))).flatten());
        own.or_else(|| self.batched.get(class)).copied()
    }

    /// Copies of an op's results that the engine holds beside them.
    pub fn copies_of(&self, class: &str) -> u64 {
        self.copies.get(class).copied().unwrap_or(0)
    }

    /// The families that a class belongs to, as bits.
    pub fn families_of(&self, class: &str) -> u64 {
        let bit = |(at, family): (usize, &BTreeSet<String>)| u64::from(family.contains(class)) << at;
        self.families.iter().enumerate().map(bit).sum()
    }
}

/// A table with the keys of another one, which override its own; tables inside are merged.
fn overridden(mut table: toml::Table, other: toml::Table) -> toml::Table {
    for (key, value) in other {
        let value = match (table.remove(&key), value) {
            (Some(toml::Value::Table(own)), toml::Value::Table(value)) => {
                toml::Value::Table(overridden(own, value))
            }
            (_, value) => value,
        };
        table.insert(key, value);
    }
    table
}

/// The engines' files. One with the key `like` has what it does not say from the engine of that name.
const TABLES: [&str; 9] = [
    include_str!("../engines/torch-eager.toml"),
    include_str!("../engines/torch-compile.toml"),
    include_str!("../engines/torchtitan.toml"),
    include_str!("../engines/torchtitan-eager.toml"),
    include_str!("../engines/megatron.toml"),
    include_str!("../engines/megatron-core.toml"),
    include_str!("../engines/megatron-bridge.toml"),
    include_str!("../engines/xla.toml"),
    include_str!("../engines/embedded.toml"),
];

static ENGINES: LazyLock<BTreeMap<EngineName, Engine>> = LazyLock::new(|| {
    let tables = TABLES.iter().filter_map(|text| Engine::parse(text).ok());
    tables.map(|engine| (engine.name, engine)).collect()
});

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::WorkloadClass;

    #[test]
    fn every_engine_has_a_table_of_known_classes() {
        for text in TABLES {
            let engine = Engine::parse(text).unwrap();
            let batched = &engine.mixed.batched;
            let named = engine.families.iter().flatten().chain(engine.shares.keys());
            let named =
                named.chain(engine.batched.keys()).chain(&engine.recomputes).chain(engine.copies.keys());
            let named = named.chain(batched.keys()).chain(&engine.tf32_classes);
            for class in named {
                let class = class.split('.').next().unwrap();
                assert!(WorkloadClass::find(class).is_some(), "{}: {class}", engine.name.name());
            }
            let all = engine.shares.values().chain(engine.batched.values()).chain([&engine.share]);
            let mut all = all.chain(batched.values());
            assert!(all.all(|share| (0.05..=1.0).contains(share)), "{engine:?}");
            assert!(engine.beside_collectives.values().all(|slowdown| (1.0..3.0).contains(slowdown)));
            assert!(engine.families.len() <= 64);
            assert_eq!(Engine::of(engine.name), Some(&engine));
        }
        assert!(EngineName::ALL.into_iter().all(|name| Engine::of(name).is_some()));
    }

    #[test]
    fn a_table_like_another_keeps_what_it_does_not_say() {
        let of = |name| Engine::of(name).unwrap();
        let (eager, own) = (of(EngineName::TorchEager), of(EngineName::TorchtitanEager));
        assert_eq!((own.host_us_per_kernel, &own.families), (eager.host_us_per_kernel, &eager.families));
        assert_eq!(own.shares["normalize"], eager.shares["normalize"]);
        assert_eq!(own.shares["concat"], 0.176);
        assert_eq!((own.batched["adam"], own.batched["sgd"]), (0.26, eager.batched["sgd"]));
        assert!(own.copies_weights && !eager.copies_weights);
    }

    #[test]
    fn a_kernel_is_as_slow_as_its_slowest_class() {
        let engine = Engine::of(EngineName::TorchEager).unwrap();
        let usual = KernelKind::default();
        let slow = engine.share_of(["unary", "normalize"], usual);
        assert!(slow < engine.share_of(["unary"], usual));
        let outer = KernelKind { outer: true, ..usual };
        let narrow = engine.share_of(["normalize"], KernelKind { narrow: true, ..outer });
        assert!(narrow < slow && slow < engine.share_of(["normalize"], outer));
    }
}
