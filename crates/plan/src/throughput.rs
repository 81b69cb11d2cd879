//! A plan's answer in a user's units: tokens or samples per second, the share of the device's peak, cost.

use serde::{Deserialize, Serialize};
use shardwright_cost::arithmetic_rate;
use shardwright_graph::{Graph, Workload};
use shardwright_machine::{Device, Machine};

/// What a plan's step amounts to per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Tokens per second, all devices together; none where samples are not sequences of tokens.
    pub tokens_per_second: Option<f64>,
    /// The same per device.
    pub tokens_per_second_per_device: Option<f64>,
    /// Samples per second, all devices together.
    pub samples_per_second: Option<f64>,
    /// Model flops utilisation: the time of the model's flops at the devices' peak, over the time of the step.
    ///
    /// Model flops are those of all matrix products and convolutions, forwards and backwards, each once. Peak is the data
    /// sheet's dense rate in the precision of each product.
    pub mfu: Option<f64>,
    /// Cost of a million tokens, in the currency of the price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_million_tokens: Option<f64>,
    /// Cost of a million samples, where samples are not sequences of tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_million_samples: Option<f64>,
}

/// The time of work at the device's peak in its number format.
fn work_seconds(device: &Device, work: &Workload) -> f64 {
    work.flops as f64 / arithmetic_rate(device, work)
}

/// Seconds that one device takes for the model's flops at its peak.
pub fn ideal_device_seconds(graph: &Graph, machine: &Machine) -> f64 {
    let device = machine.slowest();
    let seconds = |(work, runs): (Workload, u32)| work_seconds(&device, &work) * f64::from(runs);
    graph.model_work().map(seconds).sum()
}

impl Throughput {
    /// The throughput of a step that takes `step_seconds`.
    pub fn of(graph: &Graph, machine: &Machine, step_seconds: f64) -> Self {
        if step_seconds <= 0.0 {
            return Self::default();
        }
        let size = graph.step_size();
        let devices = f64::from(machine.devices());
        let per_second = |count: u64| count as f64 / step_seconds;
        let ideal = ideal_device_seconds(graph, machine);
        let tokens = size.tokens.map(per_second);
        Self {
            tokens_per_second: tokens,
            tokens_per_second_per_device: tokens.map(|tokens| tokens / devices),
            samples_per_second: size.samples.map(per_second),
            mfu: (ideal > 0.0).then(|| ideal / (devices * step_seconds)),
            cost_per_million_tokens: None,
            cost_per_million_samples: None,
        }
    }

    /// Adds the cost at a price per device and hour.
    pub fn priced(self, per_device_hour: f64, devices: u32) -> Self {
        let per_second = per_device_hour * f64::from(devices) / 3600.0;
        let million = |rate: f64| per_second / rate * 1e6;
        Self {
            cost_per_million_tokens: self.tokens_per_second.map(million),
            cost_per_million_samples: self
                .samples_per_second
                .filter(|_| self.tokens_per_second.is_none())
                .map(million),
            ..self
        }
    }
}
