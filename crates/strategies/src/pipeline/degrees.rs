//! The degrees of a uniform plan, as trainers' options state them: `tp=8,pp=8,vp=3,mbs=1,zero=1,sp,recompute=selective`.

use shardwright_graph::RecomputePolicy;
use shardwright_stages::schedule::{SCHEDULES, Schedule};
use shardwright_suggest::{did_you_mean, unknown};
use std::fmt;

/// What ZeRO shards over data-parallel replicas (Rajbhandari et al., arXiv 1910.02054).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ZeroLevel {
    /// Nothing.
    #[default]
    Off,
    /// Optimizer state.
    State,
    /// Also gradients.
    Gradients,
    /// Also weights.
    Weights,
}

impl ZeroLevel {
    /// All levels.
    pub const ALL: [Self; 4] = [Self::Off, Self::State, Self::Gradients, Self::Weights];

    /// The level's number: 0 to 3.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// The degrees that a user stated; the others are chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UniformRequest {
    /// Tensor parallelism.
    pub tensor: Option<u32>,
    /// Pipeline stages.
    pub pipeline: Option<u32>,
    /// Chunks per device.
    pub chunks: Option<u32>,
    /// Context parallelism: parts of a sequence.
    pub context: Option<u32>,
    /// Expert parallelism, a part of data parallelism.
    pub expert: Option<u32>,
    /// Data-parallel replicas.
    pub data: Option<u32>,
    /// Samples per micro-batch and replica.
    pub micro_batch: Option<u64>,
    /// What is sharded over replicas.
    pub zero: Option<ZeroLevel>,
    /// Sequence parallelism in the tensor-parallel group.
    pub sequence: Option<bool>,
    /// Which forward ops are recomputed.
    pub recompute: Option<RecomputePolicy>,
    /// The schedule, by name.
    pub schedule: Option<&'static str>,
}

/// The keys of a uniform request.
const KEYS: [&str; 11] = ["tp", "pp", "vp", "cp", "ep", "dp", "mbs", "zero", "sp", "recompute", "schedule"];

impl UniformRequest {
    /// Parses `tp=8,pp=8,vp=3,mbs=1,zero=1,sp,recompute=selective,schedule=1f1b`.
    ///
    /// # Errors
    /// Where a key is unknown or given twice, or a value is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut request = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value)));
            if !KEYS.contains(&key) {
                let nearest = did_you_mean(key, KEYS);
                return Err(format!("unknown key `{key}`; there are {}{nearest}", KEYS.join(", ")));
            }
            if seen.contains(&key) {
                return Err(format!("`{key}` is given twice"));
            }
            seen.push(key);
            request.set(key, value)?;
        }
        if seen.is_empty() {
            return Err("no degree is given: write for example tp=8,pp=8,mbs=1".into());
        }
        Ok(request)
    }

    fn set(&mut self, key: &str, value: Option<&str>) -> Result<(), String> {
        let wrong = |what: &str| format!("`{key}={}`: give {what}", value.unwrap_or(""));
        let number = || {
            let number = value.and_then(|value| value.parse::<u32>().ok()).filter(|number| *number > 0);
            number.ok_or_else(|| wrong("a whole number from 1 on"))
        };
        match key {
            "tp" => self.tensor = Some(number()?),
            "pp" => self.pipeline = Some(number()?),
            "vp" => self.chunks = Some(number()?),
            "cp" => self.context = Some(number()?),
            "ep" => self.expert = Some(number()?),
            "dp" => self.data = Some(number()?),
            "mbs" => self.micro_batch = Some(u64::from(number()?)),
            "zero" => {
                let level = value.and_then(|value| value.parse::<usize>().ok());
                let level = level.and_then(|level| ZeroLevel::ALL.get(level).copied());
                self.zero = Some(level.ok_or_else(|| wrong("0, 1, 2 or 3"))?);
            }
            "sp" => {
                self.sequence = Some(match value {
                    None | Some("1" | "on" | "true") => true,
                    Some("0" | "off" | "false") => false,
                    Some(_) => return Err(wrong("on or off")),
                });
            }
            "recompute" => {
                let known = RecomputePolicy::ALL.into_iter().find(|policy| Some(policy.name()) == value);
                let none = (value == Some("none")).then_some(RecomputePolicy::Off);
                let names = RecomputePolicy::ALL.map(RecomputePolicy::name);
                let wrong = || unknown("policy of recomputation", value.unwrap_or(""), &names);
                self.recompute = Some(known.or(none).ok_or_else(wrong)?);
            }
            _ => {
                let names = SCHEDULES.map(|(name, _)| name);
                let known = names.into_iter().find(|name| Some(*name) == value);
                let wrong = || unknown("schedule", value.unwrap_or(""), &names);
                self.schedule = Some(known.ok_or_else(wrong)?);
            }
        }
        Ok(())
    }
}

/// A uniform plan: all degrees are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniformPlan {
    /// Tensor parallelism.
    pub tensor: u32,
    /// Pipeline stages: groups of devices.
    pub pipeline: u32,
    /// Context parallelism.
    pub context: u32,
    /// Expert parallelism.
    pub expert: u32,
    /// Data-parallel replicas.
    pub data: u32,
    /// Samples per micro-batch and replica.
    pub micro_batch: u64,
    /// Micro-batches per step.
    pub micro_batches: u32,
    /// What is sharded over replicas.
    pub zero: ZeroLevel,
    /// Sequence parallelism in the tensor-parallel group.
    pub sequence: bool,
    /// Which forward ops are recomputed.
    pub recompute: RecomputePolicy,
    /// The schedule, with its chunks.
    pub schedule: Schedule,
}

impl fmt::Display for UniformPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, pipeline, context, expert, data, micro_batch, .. } = self;
        write!(f, "tp={tensor},pp={pipeline}")?;
        if let Schedule::Interleaved { chunks } = self.schedule {
            write!(f, ",vp={chunks}")?;
        }
        for (key, degree) in [("cp", context), ("ep", expert)] {
            if *degree > 1 {
                write!(f, ",{key}={degree}")?;
            }
        }
        write!(f, ",dp={data},mbs={micro_batch},zero={}", self.zero.number())?;
        if self.sequence {
            write!(f, ",sp")?;
        }
        write!(f, ",recompute={},schedule={}", self.recompute.name(), self.schedule.name())
    }
}

/// Why degrees do not suit a model on a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", reasons.join("\n"))]
pub struct DegreeError {
    /// Every degree that does not suit, in words.
    pub reasons: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_key_by_key() {
        let read = UniformRequest::parse("tp=8, pp=8,vp=3,mbs=1,zero=1,sp,recompute=selective").unwrap();
        let sequence = read.sequence;
        assert_eq!(
            (read.tensor, read.pipeline, read.chunks, sequence),
            (Some(8), Some(8), Some(3), Some(true))
        );
        assert_eq!((read.micro_batch, read.zero), (Some(1), Some(ZeroLevel::State)));
        assert_eq!(read.recompute, Some(RecomputePolicy::Selective));
        assert_eq!((read.data, read.schedule), (None, None));
        for (text, reason) in [
            ("tq=8", "unknown key `tq`"),
            ("tp=0", "`tp=0`: give a whole number from 1 on"),
            ("tp", "`tp=`"),
            ("tp=2,tp=2", "`tp` is given twice"),
            ("zero=4", "0, 1, 2 or 3"),
            ("recompute=some", "off, elementwise, selective or full"),
            ("recompute=ful", "did you mean `full`?"),
            ("schedule=2f2b", "1f1b"),
            ("schedule=interleved", "did you mean `interleaved`?"),
            ("schedule=gpip", "did you mean `gpipe`?"),
            ("", "no degree is given"),
            ("tp=99999999999", "a whole number"),
        ] {
            let error = UniformRequest::parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
