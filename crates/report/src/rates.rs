//! What a device could do at most, by its data sheet: the roofs over the ops of the page.

use serde::Serialize;
use shardwright_plan::Context;

/// A device's rates; of unequal devices the lowest of each.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceRates {
    /// The device's name.
    pub name: String,
    /// Bytes per second between the device and its memory.
    pub bytes_per_second: f64,
    /// Floating-point operations per second, by number format.
    pub peaks: Vec<PeakRate>,
}

/// The peak rate of a number format.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PeakRate {
    /// `f32`, `tf32`, `bf16` and so on.
    pub format: &'static str,
    /// Floating-point operations per second.
    pub flops_per_second: f64,
}

impl DeviceRates {
    /// The rates of a context's machine.
    pub fn of(context: &Context<'_>) -> Self {
        let device = context.machine.slowest();
        let peak = &device.peak;
        let stated = [
            ("f64", peak.f64),
            ("f32", peak.f32),
            ("tf32", peak.tf32),
            ("bf16", peak.bf16),
            ("f16", peak.f16),
            ("f8", peak.f8),
        ];
        let rate = |(format, rate): (&'static str, Option<_>)| {
            rate.map(|rate: shardwright_machine::FlopsPerSecond| PeakRate {
                format,
                flops_per_second: rate.0,
            })
        };
        Self {
            name: device.name.clone(),
            bytes_per_second: device.memory_bandwidth.0,
            peaks: stated.into_iter().filter_map(rate).collect(),
        }
    }
}
