//! Why no stages fit: the plainest reason that can be named.

use crate::format::Problem;
use crate::problem::LayerProblem;
use crate::table::TableProblem;
use std::collections::BTreeSet;

/// The reason in words, for a problem that is proved to have no stages.
pub fn no_fit(problem: &Problem) -> String {
    match problem {
        Problem::Layers(problem) => layers(problem),
        Problem::Table(problem) => table(problem),
    }
}

fn layers(problem: &LayerProblem) -> String {
    let mut largest: Option<(f64, &str)> = None;
    for layer in &problem.layers {
        let usable =
            layer.options.iter().filter(|&(&degree, _)| degree <= problem.devices).flat_map(|(_, list)| list);
        let least =
            usable.map(|option| option.bytes_per_micro_batch + option.fixed_bytes).min_by(f64::total_cmp);
        let Some(least) = least else {
            return format!("layer {} has no option for {} devices or fewer", layer.name, problem.devices);
        };
        if largest.is_none_or(|(most, _)| least > most) {
            largest = Some((least, &layer.name));
        }
    }
    match largest {
        Some((bytes, name)) if bytes > problem.memory_bytes => format!(
            "layer {name} alone takes at least {bytes:.0} bytes per device, and the limit is {:.0}",
            problem.memory_bytes
        ),
        _ => together(problem.devices, problem.memory_bytes),
    }
}

fn table(problem: &TableProblem) -> String {
    let fits = |of: &dyn Fn(&crate::RangeOption) -> bool| {
        let usable = problem.stages.iter().filter(|stage| stage.shape.devices() <= problem.devices);
        let usable = usable.filter(|stage| stage.options.iter().any(|option| of(&option.costs)));
        usable.flat_map(|stage| stage.kinds.iter().copied()).collect::<BTreeSet<u32>>()
    };
    let (any, fitting) = (fits(&|_| true), fits(&|option| option.bytes(1) <= problem.memory_bytes));
    for (name, kind) in problem.layers.iter().zip(&problem.layer_kinds) {
        if !any.contains(kind) {
            return format!(
                "layer {name} is in no stage with an option for {} devices or fewer",
                problem.devices
            );
        }
        if !fitting.contains(kind) {
            return format!("no stage with layer {name} fits {:.0} bytes per device", problem.memory_bytes);
        }
    }
    together(problem.devices, problem.memory_bytes)
}

fn together(devices: u32, memory_bytes: f64) -> String {
    format!(
        "every layer fits a device alone, but all stages together do not fit {devices} devices of {memory_bytes:.0} bytes"
    )
}
