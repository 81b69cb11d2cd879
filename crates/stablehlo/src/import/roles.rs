//! Infers the roles of the program's arguments from their use.
//!
//! A result that is computed element by element from an argument of the same type is that argument's next value:
//! `w - 0.1 * g`, `0.9 * m + 0.1 * g`. A result with exactly one such argument takes it; the others are matched in the order of
//! arguments and results. An argument with a next value is a weight if it reaches the loss (a result that is no next
//! value), a product or a table; otherwise it is optimizer state. All other arguments are inputs. The user may override
//! roles by name.
//!
//! A program that is not a training step (`x + f(x)`) can look the same in places. So next values are only sought in
//! programs that look like a training step: a scalar result is left that can be the loss, or memory of arguments is
//! donated, or every one of several results is a next value.

use super::draft::{DraftGraph, Slot, Source};
use shardwright_graph::{Op, Role};

/// Per argument: its role, and the index of the result that is its next value.
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

fn argument(draft: &DraftGraph, slot: Slot) -> Option<usize> {
    match draft.source(slot) {
        Source::Argument(i) => Some(i),
        _ => None,
    }
}

/// The arguments from which a result is computed element by element, in ascending order.
fn origins(draft: &DraftGraph, result: Slot) -> Vec<usize> {
    let mut found = Vec::new();
    let mut seen = std::collections::HashSet::from([result]);
    let mut open = vec![result];
    while let Some(slot) = open.pop() {
        if let Some(i) = argument(draft, slot) {
            found.push(i);
        }
        let producer = draft.producer(slot).filter(|op| pointwise(&op.op));
        // Only a tensor of the result's size can be its previous value.
        open.extend(producer.into_iter().flat_map(|op| &op.inputs).filter(|&&s| {
            draft.ty(s).shape.elements() == draft.ty(result).shape.elements() && seen.insert(s)
        }));
    }
    found.sort_unstable();
    found
}

/// Infers the role and next value of each argument. `arguments` and `results` are slots in program order.
pub(super) fn infer(draft: &DraftGraph, arguments: &[Slot], results: &[Slot], donated: bool) -> Roles {
    let mut candidates: Vec<Vec<usize>> = results
        .iter()
        .map(|&r| {
            if argument(draft, r).is_some() {
                return Vec::new();
            }
            let mut from = origins(draft, r);
            from.retain(|&a| draft.ty(arguments[a]) == draft.ty(r));
            from
        })
        .collect();
    let mut next = vec![None; arguments.len()];
    settle_single(&mut candidates, &mut next);
    settle_in_order(&mut candidates, &mut next);
    let taken: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
    let loss = (0..results.len()).any(|r| {
        let ty = draft.ty(results[r]);
        !taken.contains(&r) && ty.rank() == 0 && ty.dtype.is_float()
    });
    if !loss && !donated && (taken.len() < results.len() || taken.len() < 2) {
        next.fill(None);
    }
    let weights = weights(draft, arguments, results, &next);
    let roles = (0..arguments.len())
        .map(|a| match (next[a], weights[a]) {
            (None, _) => Role::Input,
            (Some(_), true) => Role::Parameter,
            (Some(_), false) => Role::OptimizerState,
        })
        .collect();
    Roles { roles, next }
}

/// Assigns results with a single candidate, repeatedly.
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

/// Assigns the remaining results in order: as many pairs as possible with arguments and results both ascending (the
/// longest common subsequence), since programs return their state in the order of their arguments.
fn settle_in_order(candidates: &mut [Vec<usize>], next: &mut [Option<usize>]) {
    let open: Vec<usize> = {
        let taken: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
        (0..candidates.len()).filter(|r| !taken.contains(r) && !candidates[*r].is_empty()).collect()
    };
    // best[j]: the most pairs of the results so far whose last argument is below j, with the choices made.
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
        // A result is in the longest sequence only if the count changes there.
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

/// Whether each argument reaches a result that is no next value, a product or a table.
fn weights(draft: &DraftGraph, arguments: &[Slot], results: &[Slot], next: &[Option<usize>]) -> Vec<bool> {
    let carried: std::collections::HashSet<usize> = next.iter().flatten().copied().collect();
    let mut reaches = vec![false; draft.slots()];
    for (r, slot) in results.iter().enumerate() {
        reaches[slot.0 as usize] |= !carried.contains(&r);
    }
    for op in draft.ops.iter().rev() {
        let looks_up = matches!(
            op.op,
            Op::Contract(_) | Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) | Op::Gather(_)
        );
        if looks_up || op.outputs.iter().any(|o| reaches[o.0 as usize]) {
            for input in &op.inputs {
                reaches[input.0 as usize] = true;
            }
        }
    }
    arguments.iter().map(|slot| reaches[slot.0 as usize]).collect()
}
