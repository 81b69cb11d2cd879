//! Megatron-LM's arguments, and NeMo's recipes, which set the same options of Megatron Core.

use super::Step;

/// Megatron FSDP's name for what it shards.
fn sharding_strategy(zero: u32) -> &'static str {
    if zero == 2 { "optim_grads" } else { "optim_grads_params" }
}

impl Step<'_> {
    /// Schedules that Megatron-LM and NeMo have: 1F1B, and interleaved with chunks.
    fn megatron_schedule(&mut self) {
        let name = self.degrees.schedule.clone();
        if !["accumulate", "1f1b", "interleaved"].contains(&name.as_str()) {
            self.miss(format!("schedule {name}: the trainer runs 1F1B"));
        }
    }

    /// Arguments of Megatron-LM.
    pub(super) fn megatron(mut self) -> String {
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
                lines.push("--use-distributed-optimizer".into());
                lines.push("--use-megatron-fsdp".into());
                lines.push(format!("--data-parallel-sharding-strategy {}", sharding_strategy(level)));
                lines.push("--no-gradient-accumulation-fusion".into());
                self.miss_groups();
            }
        }
        match own.recompute.as_str() {
            "full" => lines.push(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".into(),
            ),
            "selective" => lines.push("--recompute-granularity selective".into()),
            "elementwise" => {
                let modules = self.elementwise_modules().join(" ");
                lines.push(format!("--recompute-granularity selective --recompute-modules {modules}"));
            }
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

    /// Overrides of a NeMo 2 recipe.
    pub(super) fn nemo(mut self) -> String {
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
        let sharded = if own.zero == 0 { "False" } else { "True" };
        lines.push(format!("optim.config.use_distributed_optimizer={sharded}"));
        if own.zero > 1 {
            lines.push(strategy("fsdp", "megatron".into()));
            lines.push(strategy("ddp.data_parallel_sharding_strategy", sharding_strategy(own.zero).into()));
            self.miss_groups();
        }
        match own.recompute.as_str() {
            "off" => {}
            "elementwise" => {
                let modules = self.elementwise_modules();
                lines.push("model.config.recompute_granularity=selective".into());
                lines.push(format!("model.config.recompute_modules=[{}]", modules.join(",")));
            }
            other => lines.push(format!("model.config.recompute_granularity={other}")),
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

    /// Megatron's modules whose results are computed again under the policy `elementwise`.
    fn elementwise_modules(&mut self) -> Vec<&'static str> {
        if self.experts {
            return vec!["layernorm", "moe_act"];
        }
        self.miss("recompute elementwise: activations of dense layers, which Megatron's fused activations compute again by themselves");
        vec!["layernorm"]
    }
}
