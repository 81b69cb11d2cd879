//! Uniform plans as the options of trainers: Megatron-LM, NeMo, torchtitan, MaxText, DeepSpeed.
//!
//! Every text lists what its trainer has no option for. Plans that equal a recipe of data parallelism (`data`, `zero1`, `zero2`,
//! `fsdp`, `hsdp`) are uniform too. A plan that is not uniform has no such form.

use serde_json::{Value, json};
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
    let step = Step {
        degrees,
        groups,
        micro_batches,
        batch: degrees.mbs * u64::from(degrees.dp) * micro_batches,
        tokens: tokens.map(|(tokens, samples)| (tokens / samples).round() as u64),
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
    if plan.pipeline.is_some() || !["off", "selective", "full"].contains(&recompute) {
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

    /// Schedules that Megatron-LM and NeMo have: 1F1B, and interleaved with chunks.
    fn megatron_schedule(&mut self) {
        let name = self.degrees.schedule.clone();
        if !["accumulate", "1f1b", "interleaved"].contains(&name.as_str()) {
            self.miss(format!("schedule {name}: the trainer runs 1F1B"));
        }
    }

    fn megatron(mut self) -> String {
        let own = self.degrees;
        self.megatron_schedule();
        let mut lines = vec![
            format!("--tensor-model-parallel-size {}", own.tp),
            format!("--pipeline-model-parallel-size {}", own.pp),
        ];
        let interleaved = own.schedule == "interleaved";
        if interleaved {
            lines.push(format!("--num-virtual-stages-per-pipeline-rank {}", own.vp));
        }
        if own.cp > 1 {
            lines.push(format!("--context-parallel-size {}", own.cp));
        }
        if own.ep > 1 {
            lines.push(format!("--expert-model-parallel-size {}", own.ep));
        }
        lines.push(format!("--micro-batch-size {}", own.mbs));
        lines.push(format!("--global-batch-size {}", self.batch));
        lines.extend(self.tokens.map(|tokens| format!("--seq-length {tokens}")));
        if own.sp {
            lines.push("--sequence-parallel".into());
        }
        match own.zero {
            0 => {}
            1 => lines.push("--use-distributed-optimizer".into()),
            level => {
                let strategy = if level == 2 { "optim_grads" } else { "optim_grads_params" };
                lines.push("--use-megatron-fsdp".into());
                lines.push(format!("--data-parallel-sharding-strategy {strategy}"));
                self.miss_groups();
            }
        }
        match own.recompute.as_str() {
            "full" => lines.push(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".into(),
            ),
            "selective" => lines.push("--recompute-granularity selective".into()),
            _ => {}
        }
        if let Some((first, last)) = self.ends().filter(|_| !interleaved) {
            lines.push(format!("--decoder-first-pipeline-num-layers {first}"));
            lines.push(format!("--decoder-last-pipeline-num-layers {last}"));
        } else if self.ends().is_some() {
            self.miss("first and last stages with fewer layers, together with chunks");
        }
        format!("{}{}\n", self.notes("#"), lines.join("\n"))
    }

    fn nemo(mut self) -> String {
        let own = self.degrees;
        self.megatron_schedule();
        let strategy = |key: &str, value: String| format!("trainer.strategy.{key}={value}");
        let mut lines = vec![
            strategy("tensor_model_parallel_size", own.tp.to_string()),
            strategy("pipeline_model_parallel_size", own.pp.to_string()),
            strategy("context_parallel_size", own.cp.to_string()),
            strategy("expert_model_parallel_size", own.ep.to_string()),
            strategy("sequence_parallel", if own.sp { "True".into() } else { "False".into() }),
            format!("data.micro_batch_size={}", own.mbs),
            format!("data.global_batch_size={}", self.batch),
        ];
        if own.schedule == "interleaved" {
            lines.push(strategy("virtual_pipeline_model_parallel_size", own.vp.to_string()));
        }
        lines.extend(self.tokens.map(|tokens| format!("data.seq_length={tokens}")));
        match own.zero {
            0 => lines.push(strategy("ddp.use_distributed_optimizer", "False".into())),
            1 => lines.push(strategy("ddp.use_distributed_optimizer", "True".into())),
            level => self.miss(format!("ZeRO level {level}: recipes shard the optimizer state only")),
        }
        if own.recompute != "off" {
            lines.push(format!("model.config.recompute_granularity={}", own.recompute));
        }
        if own.recompute == "full" {
            lines.push("model.config.recompute_method=uniform".into());
            lines.push("model.config.recompute_num_layers=1".into());
        }
        if let Some((first, last)) = self.ends() {
            lines.push(format!("model.config.num_layers_in_first_pipeline_stage={first}"));
            lines.push(format!("model.config.num_layers_in_last_pipeline_stage={last}"));
        }
        format!("{}{}\n", self.notes("#"), lines.join("\n"))
    }

    fn torchtitan(mut self) -> String {
        let own = self.degrees;
        let schedule = match own.schedule.as_str() {
            "gpipe" => Some("GPipe"),
            "1f1b" => Some("1F1B"),
            "interleaved" => Some("Interleaved1F1B"),
            "zb-v" => Some("ZBVZeroBubble"),
            "dualpipe-v" => Some("DualPipeV"),
            _ => None,
        };
        if schedule.is_none() && own.pp > 1 {
            self.miss(format!("schedule {}: torchtitan's nearest is 1F1B", own.schedule));
        }
        if own.tp > 1 && !own.sp {
            self.miss("tensor parallelism without sequence parallelism: torchtitan always uses both");
        }
        if own.zero == 1 || own.zero == 2 {
            self.miss(format!(
                "ZeRO level {}: FSDP without resharding after the forward pass is nearest",
                own.zero
            ));
        }
        let (replicas, shards) =
            if own.zero == 0 { (own.dp, 1) } else { (self.groups, own.dp / self.groups) };
        // With a pipeline, a replica's samples of a step are divided into micro-batches.
        let local = if own.pp > 1 { own.mbs * self.micro_batches } else { own.mbs };
        let mut text =
            format!("[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\n", self.batch);
        text.extend(self.tokens.map(|tokens| format!("seq_len = {tokens}\n")));
        text += &format!(
            "\n[parallelism]\ndata_parallel_replicate_degree = {replicas}\ndata_parallel_shard_degree = {shards}\n\
             tensor_parallel_degree = {}\ncontext_parallel_degree = {}\nexpert_parallel_degree = {}\n\
             pipeline_parallel_degree = {}\n",
            own.tp, own.cp, own.ep, own.pp
        );
        if own.zero > 0 {
            let again = if own.zero == 3 { "always" } else { "never" };
            text += &format!("fsdp_reshard_after_forward = \"{again}\"\n");
        }
        if own.pp > 1 {
            text += &format!(
                "pipeline_parallel_schedule = \"{}\"\npipeline_parallel_microbatch_size = {}\n",
                schedule.unwrap_or("1F1B"),
                own.mbs
            );
            let most = own.blocks.iter().max().copied().unwrap_or(1);
            let ends = u32::from(self.ends().is_some());
            text += &format!("pipeline_parallel_layers_per_stage = {most}\n");
            if ends == 1 {
                text += "pipeline_parallel_first_stage_less_layers = 1\npipeline_parallel_last_stage_less_layers = 1\n";
            }
        }
        let mode = if own.recompute == "off" { "none" } else { own.recompute.as_str() };
        text += &format!("\n[activation_checkpoint]\nmode = \"{mode}\"\n");
        if mode == "selective" {
            text += "selective_ac_option = \"op\"\n";
        }
        format!("{}{text}", self.notes("#"))
    }

    fn maxtext(mut self) -> String {
        let own = self.degrees;
        if own.pp > 1 {
            self.miss(format!("schedule {}: MaxText's pipelines are circular", own.schedule));
        }
        if own.zero == 1 || own.zero == 2 {
            self.miss(format!(
                "ZeRO level {}: weights are sharded too (fsdp), or nothing is (data)",
                own.zero
            ));
        }
        if own.recompute == "selective" {
            self.miss("recompute selective: `minimal` is the nearest policy");
        }
        let devices = u64::from(own.tp) * u64::from(own.cp) * u64::from(own.dp) * u64::from(own.pp);
        let sharded = own.zero > 0;
        let all = own.dp / own.ep.max(1);
        let (data, fsdp) = if sharded { (self.groups, all / self.groups) } else { (all, 1) };
        let mut text = format!(
            "ici_tensor_parallelism: {}\nici_context_parallelism: {}\nici_expert_parallelism: {}\n\
             ici_data_parallelism: {data}\nici_fsdp_parallelism: {fsdp}\nici_pipeline_parallelism: {}\n",
            own.tp, own.cp, own.ep, own.pp
        );
        if own.pp > 1 {
            let layers = own.blocks.iter().max().copied().unwrap_or(1);
            text += &format!(
                "num_layers_per_pipeline_stage: {layers}\nnum_pipeline_microbatches: {}\n",
                self.micro_batches
            );
            text += &format!("per_device_batch_size: {}\n", self.batch as f64 / devices as f64);
        } else {
            let one = self.batch as f64 / self.micro_batches as f64 / devices as f64;
            text += &format!(
                "gradient_accumulation_steps: {}\nper_device_batch_size: {one}\n",
                self.micro_batches
            );
        }
        text.extend(self.tokens.map(|tokens| format!("max_target_length: {tokens}\n")));
        let policy = match own.recompute.as_str() {
            "full" => "full",
            "selective" => "minimal",
            _ => "save_everything",
        };
        if own.recompute == "off" {
            self.miss("recompute off: the policy's name depends on MaxText's version");
        }
        text += &format!("remat_policy: '{policy}'\n");
        format!("{}{text}", self.notes("#"))
    }

    fn deepspeed(mut self) -> String {
        let own = self.degrees;
        if own.pp > 1 {
            self.miss(format!("pp={}: give PipelineModule num_stages={}", own.pp, own.pp));
            if own.schedule != "1f1b" {
                self.miss(format!("schedule {}: DeepSpeed's pipelines run 1F1B", own.schedule));
            }
            if own.zero > 1 {
                self.miss(format!("ZeRO level {} with a pipeline: DeepSpeed allows level 1", own.zero));
            }
        }
        self.miss_groups();
        if own.sp {
            self.miss("sequence parallelism in the tensor-parallel group");
        }
        if own.cp > 1 {
            self.miss(format!("cp={}: DeepSpeed-Ulysses splits heads instead", own.cp));
        }
        if own.ep > 1 {
            self.miss(format!("ep={}: give it to the MoE layers (ep_size)", own.ep));
        }
        if own.recompute != "off" {
            self.miss(format!("recompute {}: the model's code marks what is checkpointed", own.recompute));
        }
        let mut config = json!({
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": own.mbs,
            "gradient_accumulation_steps": self.micro_batches,
            "zero_optimization": {"stage": own.zero},
            "bf16": {"enabled": true},
        });
        if own.tp > 1 {
            config["tensor_parallel"] = json!({"autotp_size": own.tp});
        }
        config["not_mapped"] = Value::from(self.unmapped.clone());
        format!("{config:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        Step { degrees, groups: 1, micro_batches: 96, batch, tokens: Some(2048), unmapped: Vec::new() }
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
}
