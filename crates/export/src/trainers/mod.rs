//! Uniform plans as the options of trainers: Megatron-LM, NeMo, torchtitan, MaxText, DeepSpeed.
//!
//! Every text lists what its trainer has no option for. `docs/training.md` names the versions that the options were checked against. Plans that equal a recipe of data parallelism (`data`, `zero1`, `zero2`,
//! `fsdp`, `hsdp`) are uniform too. A plan that is not uniform has no such form.

mod deepspeed;
mod maxtext;
mod megatron;
mod torchtitan;

use shardwright_plan::{AxisRoles, Plan, PlanDegrees};

/// A trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trainer {
    /// Megatron-LM: arguments of `pretrain_gpt.py`.
    Megatron,
    /// NeMo 2: overrides of a recipe.
    Nemo,
    /// torchtitan: sections of a TOML config.
    Torchtitan,
    /// MaxText: keys of a YAML config.
    Maxtext,
    /// DeepSpeed: its JSON config.
    Deepspeed,
}

/// A uniform plan and the sizes of its step.
struct Step<'p> {
    degrees: &'p PlanDegrees,
    /// Groups of devices that each hold all of the sharded state: more than one with `hsdp`.
    groups: u32,
    micro_batches: u64,
    batch: u64,
    tokens: Option<u64>,
    /// Devices that the innermost links join: those of a node, or of a whole TPU slice.
    local: u32,
    /// Whether tokens are sent to experts.
    experts: bool,
    /// What the trainer has no option for.
    unmapped: Vec<String>,
}

/// The options of a trainer for a uniform plan; none where the plan is not uniform.
pub fn to_trainer(plan: &Plan, trainer: Trainer) -> Option<String> {
    let recipe = of_recipe(plan);
    let groups = recipe.as_ref().map_or(1, |(_, groups)| *groups);
    let degrees = plan.uniform.as_ref().or(recipe.as_ref().map(|(degrees, _)| degrees))?;
    let micro_batches = u64::from(plan.micro_batches);
    let rates = &plan.throughput;
    let tokens = rates.tokens_per_second.zip(rates.samples_per_second);
    let tokens = tokens.filter(|(_, samples)| *samples > 0.0);
    let axes = &plan.parallelism.axes;
    let inner = axes.iter().filter(|axis| Some(&axis.level) == axes.last().map(|last| &last.level));
    let step = Step {
        local: inner.map(|axis| axis.size).product(),
        degrees,
        groups,
        micro_batches,
        batch: degrees.mbs * u64::from(degrees.dp) * micro_batches,
        tokens: tokens.map(|(tokens, samples)| (tokens / samples).round() as u64),
        experts: plan.ops.iter().any(|op| op.kind == "dispatch"),
        unmapped: Vec::new(),
    };
    Some(match trainer {
        Trainer::Megatron => step.megatron(),
        Trainer::Nemo => step.nemo(),
        Trainer::Torchtitan => step.torchtitan(),
        Trainer::Maxtext => step.maxtext(),
        Trainer::Deepspeed => step.deepspeed(),
    })
}

/// The degrees of a plan that equals a recipe of data parallelism, and the groups that its state is sharded within.
fn of_recipe(plan: &Plan) -> Option<(PlanDegrees, u32)> {
    let zero = match plan.parallelism.recipe.as_deref()? {
        "data" => 0,
        "zero1" => 1,
        "zero2" => 2,
        "fsdp" | "hsdp" => 3,
        _ => return None,
    };
    let recompute = plan.recompute.policy.as_str();
    if plan.pipeline.is_some() || !["off", "elementwise", "selective", "full"].contains(&recompute) {
        return None;
    }
    let sharded = |axis: &&AxisRoles| axis.weights_sharded > 0.5;
    let shards: u32 = plan.parallelism.axes.iter().filter(sharded).map(|axis| axis.size).product();
    let groups = if zero == 3 { plan.devices.checked_div(shards)? } else { 1 };
    let batch = (plan.throughput.samples_per_second? * plan.simulated.step_seconds).round() as u64;
    let parts = u64::from(plan.devices) * u64::from(plan.micro_batches);
    if parts == 0 || !batch.is_multiple_of(parts) || groups == 0 {
        return None;
    }
    let degrees = PlanDegrees {
        tp: 1,
        pp: 1,
        vp: 1,
        cp: 1,
        ep: 1,
        dp: plan.devices,
        mbs: batch / parts,
        zero,
        sp: false,
        recompute: recompute.into(),
        schedule: "accumulate".into(),
        blocks: Vec::new(),
    };
    Some((degrees, groups))
}

impl Step<'_> {
    /// What a trainer that shards over all devices cannot express.
    fn miss_groups(&mut self) {
        if self.groups > 1 {
            let size = self.degrees.dp / self.groups;
            self.miss(format!(
                "state sharded within groups of {size} devices: these options shard it over all"
            ));
        }
    }

    fn miss(&mut self, what: impl Into<String>) {
        self.unmapped.push(what.into());
    }

    /// Blocks of the ends and of the stages between them, where the ends have fewer.
    fn ends(&self) -> Option<(u32, u32)> {
        let blocks = &self.degrees.blocks;
        let (first, last) = (*blocks.first()?, *blocks.last()?);
        let inner = blocks.get(1..blocks.len() - 1)?;
        let uneven = inner.iter().any(|own| *own != first || *own != last);
        uneven.then_some((first, last))
    }

    /// What could not be mapped, as comment lines.
    fn notes(&self, mark: &str) -> String {
        match self.unmapped.is_empty() {
            true => format!("{mark} All degrees of the plan are mapped.\n"),
            false => self.unmapped.iter().map(|what| format!("{mark} Not mapped: {what}.\n")).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn degrees() -> PlanDegrees {
        PlanDegrees {
            tp: 8,
            pp: 8,
            vp: 3,
            cp: 1,
            ep: 1,
            dp: 16,
            mbs: 1,
            zero: 1,
            sp: true,
            recompute: "selective".into(),
            schedule: "interleaved".into(),
            blocks: vec![4; 24],
        }
    }

    fn step(degrees: &PlanDegrees) -> Step<'_> {
        let batch = 96 * u64::from(degrees.dp) * degrees.mbs;
        Step {
            degrees,
            groups: 1,
            micro_batches: 96,
            batch,
            tokens: Some(2048),
            local: 8,
            experts: false,
            unmapped: Vec::new(),
        }
    }

    #[test]
    fn megatron_has_an_argument_for_every_degree() {
        let text = step(&degrees()).megatron();
        for line in [
            "--tensor-model-parallel-size 8",
            "--num-virtual-stages-per-pipeline-rank 3",
            "--global-batch-size 1536",
            "--sequence-parallel",
            "--use-distributed-optimizer",
            "--recompute-granularity selective",
            "# All degrees of the plan are mapped.",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let other = PlanDegrees { schedule: "zb-h1".into(), vp: 1, ..degrees() };
        assert!(step(&other).megatron().contains("# Not mapped: schedule zb-h1"));
    }

    #[test]
    fn elementwise_recomputation_has_the_nearest_option_of_every_trainer() {
        let own = PlanDegrees { recompute: "elementwise".into(), ..degrees() };
        let text = step(&own).megatron();
        assert!(text.contains("--recompute-granularity selective --recompute-modules layernorm\n"), "{text}");
        assert!(text.contains("# Not mapped: recompute elementwise"), "{text}");
        let text = Step { experts: true, ..step(&own) }.megatron();
        assert!(text.contains("--recompute-modules layernorm moe_act"), "{text}");
        assert!(step(&own).nemo().contains("model.config.recompute_modules=[layernorm]"));
        assert!(step(&own).maxtext().contains("remat_policy: 'minimal_with_context'"));
        let text = step(&own).torchtitan();
        assert!(
            text.contains("mode = \"selective\"") && text.contains("# Not mapped: recompute elementwise"),
            "{text}"
        );
    }

    #[test]
    fn unmapped_degrees_are_named() {
        let own = degrees();
        let config: Value = serde_json::from_str(&step(&own).deepspeed()).unwrap();
        assert_eq!(config["train_batch_size"], 1536);
        assert_eq!(config["gradient_accumulation_steps"], 96);
        let missed = config["not_mapped"].to_string();
        assert!(missed.contains("num_stages=8") && missed.contains("interleaved"), "{missed}");
        let uneven = PlanDegrees { blocks: vec![1, 2, 2, 1], vp: 1, schedule: "1f1b".into(), ..degrees() };
        let text = step(&uneven).torchtitan();
        assert!(text.contains("pipeline_parallel_first_stage_less_layers = 1"), "{text}");
        assert!(text.contains("# Not mapped: ZeRO level 1"), "{text}");
        assert!(step(&uneven).megatron().contains("--decoder-first-pipeline-num-layers 1"));
        assert!(step(&own).maxtext().contains("num_layers_per_pipeline_stage: 4"));
        assert!(step(&own).nemo().contains("trainer.strategy.virtual_pipeline_model_parallel_size=3"));
    }

    #[test]
    fn torchtitan_gets_equal_stages_where_the_plan_has_them() {
        // torchtitan takes a layer off the first and the last stage unless it is told not to.
        let text = step(&degrees()).torchtitan();
        assert!(text.contains("pipeline_parallel_first_stage_less_layers = 0"), "{text}");
        assert!(text.contains("pipeline_parallel_last_stage_less_layers = 0"), "{text}");
        assert!(text.contains("num_pp_microbatches = 96"), "{text}");
        let experts = PlanDegrees { ep: 4, ..degrees() };
        assert!(step(&experts).torchtitan().contains("expert_tensor_parallel_degree = 8"));
    }

    #[test]
    fn maxtext_tells_nodes_from_links_inside_them() {
        let text = step(&degrees()).maxtext();
        for line in [
            "ici_tensor_parallelism: 8",
            "dcn_data_parallelism: 16",
            "dcn_pipeline_parallelism: 8",
            "ici_pipeline_parallelism: 1",
            "shard_optimizer_over_data: true",
            "num_pipeline_repeats: 3",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let kept = PlanDegrees { recompute: "off".into(), zero: 3, tp: 2, ..degrees() };
        let text = step(&kept).maxtext();
        assert!(text.contains("ici_fsdp_parallelism: 4\ndcn_fsdp_parallelism: 4"), "{text}");
        assert!(text.contains("remat_policy: 'none'"), "{text}");
        assert!(!text.contains("shard_optimizer_over_data"), "{text}");
    }

    #[test]
    fn sharded_gradients_and_weights_are_mapped_where_trainers_have_them() {
        let own = PlanDegrees { zero: 3, pp: 1, vp: 1, schedule: "accumulate".into(), ..degrees() };
        let text = step(&own).megatron();
        assert!(text.contains("--data-parallel-sharding-strategy optim_grads_params"), "{text}");
        assert!(text.contains("--use-distributed-optimizer"), "{text}");
        let text = step(&own).nemo();
        assert!(text.contains("trainer.strategy.fsdp=megatron"), "{text}");
        let config: Value = serde_json::from_str(&step(&own).deepspeed()).unwrap();
        assert_eq!(config["zero_optimization"]["stage"], 3);
        // DeepSpeed's pipelines take level 1 at most.
        let staged = PlanDegrees { zero: 3, ..degrees() };
        let config: Value = serde_json::from_str(&step(&staged).deepspeed()).unwrap();
        assert_eq!(config["zero_optimization"]["stage"], 1);
        assert!(config["not_mapped"].to_string().contains("ZeRO level 3"), "{config}");
    }
}
