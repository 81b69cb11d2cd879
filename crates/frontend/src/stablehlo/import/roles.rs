//! What the program's arguments are for, from how they are used.
//!
//! A result that is computed element by element from an argument of the same type is that argument's next value
//! (`w - 0.1 * g`, `0.9 * m + 0.1 * g`): a result with one such argument takes it, then what is left is settled in
//! the order of arguments and results. Of the arguments that have a next value, those that reach a result without
//! one (the loss), or a product or a table, are weights; the others are optimizer state. All other arguments are
//! inputs. People may say otherwise by name.
//!
//! A program that only computes something (`x + f(x)`) looks the same in places, so next values are looked for only
//! in what looks like a training step: a number is left over that can be its loss, or memory of arguments is given
//! away, or every result is a next value and there are several.

use super::steps::{Slot, Source, Steps};
use shardwright_graph::{Op, Role};

/// Arguments by position: role, and the position of the result that is its next value.
pub(super) struct Roles {
    pub roles: Vec<Role>,
    pub next: Vec<Option<usize>>,
}

/// Whether an op computes each element from one element of each operand.
pub(super) fn pointwise(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Select(_)
            | Op::Compare(_)
            | Op::Cast(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Broadcast(_)
    )
}

fn argument(steps: &Steps, slot: Slot) -> Option<usize> {
    match steps.source(slot) {
        Source::Argument(i) => Some(i),
        _ => None,
    }
}

/// The arguments that each result is computed from element by element, in rising order.
fn origins(steps: &Steps, result: Slot) -> Vec<usize> {
    let mut found = Vec::new();
    let mut seen = std::collections::HashSet::from([result]);
    let mut open = vec![result];
    while let Some(slot) = open.pop() {
        if let Some(i) = argument(steps, slot) {
            found.push(i);
        }
        let maker = steps.maker(slot).filter(|step| pointwise(&step.op));
        // Only what has the result's size can be its former value.
        open.extend(maker.into_iter().flat_map(|step| &step.inputs).filter(|&&s| {
            steps.ty(s).shape.elements() == steps.ty(result).shape.elements() && seen.insert(s)
        }));
    }
    found.sort_unstable();
    found
}

/// Finds each argument's role and next value; `arguments` and `results` are slots in the program's order.
pub(super) fn infer(steps: &Steps, arguments: &[Slot], results: &[Slot], donated: bool) -> Roles {
    let mut candidates: Vec<Vec<usize>> = results
        .iter()
        .map(|&r| {
            if argument(steps, r).is_some() {
                return Vec::new();
            }
            let mut from = origins(steps, r);
            from.retain(|&a| steps.ty(arguments[a]) == steps.ty(r));
            from
        })
        .collect();
    let mut next = vec![None; arguments.len()];
    settle_single(&mut candidates, &mut next);
    settle_in_order(&mut candidates, &mut next);
    let taken: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
    let loss = (0..results.len()).any(|r| {
        let ty = steps.ty(results[r]);
        !taken.contains(&r) && ty.rank() == 0 && ty.dtype.is_float()
    });
    if !loss && !donated && (taken.len() < results.len() || taken.len() < 2) {
        next.fill(None);
    }
    let weights = weights(steps, arguments, results, &next);
    let roles = (0..arguments.len())
        .map(|a| match (next[a], weights[a]) {
            (None, _) => Role::Input,
            (Some(_), true) => Role::Parameter,
            (Some(_), false) => Role::OptimizerState,
        })
        .collect();
    Roles { roles, next }
}

/// Results with one argument left take it, until none has.
fn settle_single(candidates: &mut [Vec<usize>], next: &mut [Option<usize>]) {
    let mut open: Vec<usize> = (0..candidates.len()).collect();
    loop {
        let before = open.len();
        open.retain(|&r| {
            candidates[r].retain(|&a| next[a].is_none_or(|taken| taken == r));
            if let [only] = candidates[r][..]
                && next[only].is_none()
            {
                next[only] = Some(r);
                return false;
            }
            !candidates[r].is_empty()
        });
        if open.len() == before {
            return;
        }
    }
}

/// What is left is taken in order: as many pairs as possible with arguments and results both rising (the longest
/// common subsequence), since programs return their state in the order in which they take it.
fn settle_in_order(candidates: &mut [Vec<usize>], next: &mut [Option<usize>]) {
    let open: Vec<usize> = {
        let taken: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
        (0..candidates.len()).filter(|r| !taken.contains(r) && !candidates[*r].is_empty()).collect()
    };
    // best[j]: the most pairs of the first results whose last argument is below j; kept with what they chose.
    let width = next.len();
    let mut best = vec![0u32; width + 1];
    let mut choice: Vec<Vec<u32>> = Vec::with_capacity(open.len());
    for &r in &open {
        let mut row = best.clone();
        for &a in &candidates[r] {
            row[a + 1] = row[a + 1].max(best[a] + 1);
        }
        for j in 1..=width {
            row[j] = row[j].max(row[j - 1]);
        }
        choice.push(best);
        best = row;
    }
    let mut end = width;
    let mut current = best;
    for (i, &r) in open.iter().enumerate().rev() {
        let before = &choice[i];
        // Whether this result is part of the longest: only if taking it is needed.
        if current[end] > before[end] {
            let pick =
                candidates[r].iter().copied().filter(|&a| a < end && before[a] + 1 == current[end]).min();
            if let Some(a) = pick {
                next[a] = Some(r);
                end = a;
            }
        }
        current = before.clone();
    }
}

/// Whether each argument reaches a result that is no next value, or a product or a table.
fn weights(steps: &Steps, arguments: &[Slot], results: &[Slot], next: &[Option<usize>]) -> Vec<bool> {
    let carried: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
    let mut reaches = vec![false; steps.slots()];
    for (r, slot) in results.iter().enumerate() {
        reaches[slot.0 as usize] |= !carried.contains(&r);
    }
    for step in steps.steps.iter().rev() {
        let looks_up = matches!(
            step.op,
            Op::Contract(_) | Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) | Op::Gather(_)
        );
        if looks_up || step.outputs.iter().any(|o| reaches[o.0 as usize]) {
            for input in &step.inputs {
                reaches[input.0 as usize] = true;
            }
        }
    }
    arguments.iter().map(|slot| reaches[slot.0 as usize]).collect()
}
