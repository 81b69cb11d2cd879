//! Walks with pins: ops on parts of a small machine, layers side by side.

use crate::{
    chain::{Limits, run_chains},
    moves::{MOST_PINNED_AXES, Moves},
    place,
};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_plan::{Constraints, Context, peak};
use shardwright_search::Control;
use shardwright_space::Assignment;

/// The most device classes that pins make.
const MOST_CLASSES: u64 = 8;

/// The innermost axes that pins are tried along, and how many device classes they make: all devices of a small machine, a few
/// of a large one.
pub fn pinned_axes(mesh: &Mesh) -> (AxisSet, u64) {
    let (mut axes, mut classes) = (AxisSet::EMPTY, 1);
    if mesh.len() > MOST_PINNED_AXES {
        return (axes, classes);
    }
    for (at, axis) in mesh.axes().iter().enumerate().rev() {
        if classes * u64::from(axis.size) > MOST_CLASSES {
            break;
        }
        axes = axes.with(AxisId(at as u32));
        classes *= u64::from(axis.size);
    }
    (axes, classes)
}

/// Whether an assignment keeps the memory limit.
pub fn fits(context: &Context<'_>, constraints: &Constraints, assignment: &Assignment) -> bool {
    constraints.memory.is_none_or(|limit| peak(context, assignment) <= limit)
}

/// Walks on with pins, from the best assignment without and from whole layers on devices. Pins make devices differ, and the
/// simulation takes longer by the number of device classes.
pub fn walk_with_pins(
    context: &Context<'_>,
    moves: Moves<'_>,
    best: &Assignment,
    mut limits: Limits,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Vec<Assignment> {
    let (axes, classes) = pinned_axes(context.mesh());
    if constraints.spmd || classes == 1 {
        return Vec::new();
    }
    let mut starts = vec![best.clone()];
    if axes == context.mesh().all() && limits.fixed.is_empty() {
        let placed = place::start(context, constraints, control).ok().flatten();
        starts.extend(placed.filter(|assignment| fits(context, constraints, assignment)));
    }
    limits.pins = axes;
    limits.proposals /= classes;
    match run_chains(context, &moves.with_pins(axes), &starts, &limits, control) {
        Ok(chains) => chains.into_iter().map(|chain| chain.assignment).collect(),
        // More levels than delta simulation supports.
        Err(_) => starts,
    }
}
