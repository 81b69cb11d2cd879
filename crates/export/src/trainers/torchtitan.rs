//! torchtitan's config.

use super::Step;

impl Step<'_> {
    /// Sections of a TOML config of torchtitan.
    pub(super) fn torchtitan(mut self) -> String {
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
        if own.ep > 1 {
            // Experts are divided by tensor parallelism too.
            text += &format!("expert_tensor_parallel_degree = {}\n", own.tp);
        }
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
            // Without these two keys torchtitan takes a layer off the first and the last stage.
            let (first, last) = self.ends().unwrap_or((most, most));
            text += &format!(
                "pipeline_parallel_layers_per_stage = {most}\n\
                 pipeline_parallel_first_stage_less_layers = {}\n\
                 pipeline_parallel_last_stage_less_layers = {}\n",
                most.saturating_sub(first),
                most.saturating_sub(last)
            );
        }
        if own.recompute == "elementwise" {
            self.miss("recompute elementwise: `selective` by op is the nearest, which computes every second product again");
        }
        let mode = match own.recompute.as_str() {
            "off" => "none",
            "elementwise" => "selective",
            other => other,
        };
        text += &format!("\n[activation_checkpoint]\nmode = \"{mode}\"\n");
        if mode == "selective" {
            text += "selective_ac_option = \"op\"\n";
        }
        let newer = match own.pp {
            1 => String::new(),
            _ => format!(
                "; those have num_pp_microbatches = {} for pipeline_parallel_microbatch_size",
                self.micro_batches
            ),
        };
        let version = "# Keys of torchtitan 0.2; versions without TOML take them as `--section.key value`";
        format!("{}{version}{newer}.\n{text}", self.notes("#"))
    }
}
