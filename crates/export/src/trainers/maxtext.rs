//! MaxText's config.

use super::Step;

impl Step<'_> {
    /// Keys of a YAML config of MaxText.
    pub(super) fn maxtext(mut self) -> String {
        let own = self.degrees;
        if own.pp > 1 && own.schedule != "gpipe" {
            let nearest = if own.vp > 1 { "its circular pipeline" } else { "GPipe" };
            self.miss(format!("schedule {}: MaxText runs {nearest}", own.schedule));
        }
        if own.zero == 2 {
            self.miss("ZeRO level 2: the optimizer state is sharded, gradients are not");
        }
        if own.recompute == "selective" {
            self.miss("recompute selective: `minimal` is the nearest policy");
        }
        let replicas = own.dp / own.ep.max(1);
        let (data, fsdp) = if own.zero == 3 { (self.groups, replicas / self.groups) } else { (replicas, 1) };
        let mut text = self.degrees_by_link([
            ("tensor", own.tp),
            ("context", own.cp),
            ("expert", own.ep),
            ("fsdp", fsdp),
            ("data", data),
            ("pipeline", own.pp),
        ]);
        if own.zero == 1 || own.zero == 2 {
            text += "shard_optimizer_over_data: true\n";
        }
        let devices = u64::from(own.tp) * u64::from(own.cp) * u64::from(own.dp) * u64::from(own.pp);
        let per_device = self.batch as f64 / devices as f64;
        if own.pp > 1 {
            let layers = own.blocks.iter().max().copied().unwrap_or(1);
            if self.ends().is_some() {
                self.miss("first and last stages with fewer layers");
            }
            text += &format!(
                "num_layers_per_pipeline_stage: {layers}\nnum_pipeline_repeats: {}\n\
                 num_pipeline_microbatches: {}\nper_device_batch_size: {per_device}\n",
                own.vp, self.micro_batches
            );
        } else {
            let steps = self.micro_batches;
            let one = per_device / steps as f64;
            text += &format!("gradient_accumulation_steps: {steps}\nper_device_batch_size: {one}\n");
        }
        text.extend(self.tokens.map(|tokens| format!("max_target_length: {tokens}\n")));
        let policy = match own.recompute.as_str() {
            "full" => "full",
            "selective" => "minimal",
            "elementwise" => "minimal_with_context",
            _ => "none",
        };
        text += &format!("remat_policy: '{policy}'\n");
        format!("{}{text}", self.notes("#"))
    }

    /// Every degree as a part inside of nodes (`ici`) and a part between them (`dcn`), the innermost degree first.
    fn degrees_by_link(&self, degrees: [(&str, u32); 6]) -> String {
        let mut left = self.local.max(1);
        let mut text = String::new();
        for (key, degree) in degrees {
            let inside = greatest_common_divisor(degree, left);
            left /= inside;
            let between = degree / inside;
            text += &format!("ici_{key}_parallelism: {inside}\ndcn_{key}_parallelism: {between}\n");
        }
        text
    }
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a.max(1) } else { greatest_common_divisor(b, a % b) }
}
