//! DeepSpeed's config.

use super::Step;
use serde_json::{Value, json};

impl Step<'_> {
    /// DeepSpeed's JSON config.
    pub(super) fn deepspeed(mut self) -> String {
        let own = self.degrees;
        if own.pp > 1 {
            self.miss(format!("pp={}: give PipelineModule num_stages={}", own.pp, own.pp));
            if own.schedule != "1f1b" {
                self.miss(format!("schedule {}: DeepSpeed's pipelines run 1F1B", own.schedule));
            }
        }
        let most = if own.pp > 1 { 1 } else { 3 };
        if own.zero > most {
            self.miss(format!("ZeRO level {} with a pipeline: DeepSpeed allows level {most}", own.zero));
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
            "zero_optimization": {"stage": own.zero.min(most)},
            "bf16": {"enabled": true},
        });
        if own.tp > 1 {
            config["tensor_parallel"] = json!({"autotp_size": own.tp});
        }
        config["not_mapped"] = Value::from(self.unmapped.clone());
        format!("{config:#}\n")
    }
}
