//! Crossover of two assignments. The connected components of their difference can be exchanged one by one, each with
//! its own exact change of cost; only memory couples them.

use super::core::Core;
use super::state::{State, local_cost};

/// Copies from `other` every connected component of the difference that lowers the cost of `state` and fits. Returns
/// whether `state` changed.
pub fn crossover(core: &Core, state: &mut State, other: &State) -> bool {
    let n = core.variables() as usize;
    let mut piece = vec![u32::MAX; n];
    let mut pieces: Vec<Vec<u32>> = Vec::new();
    for v in 0..n as u32 {
        if state.x[v as usize] == other.x[v as usize] || piece[v as usize] != u32::MAX {
            continue;
        }
        let id = pieces.len() as u32;
        piece[v as usize] = id;
        let mut members = vec![v];
        let mut next = 0;
        while next < members.len() {
            for link in core.links(members[next]) {
                let w = link.to as usize;
                if piece[w] == u32::MAX && state.x[w] != other.x[w] {
                    piece[w] = id;
                    members.push(link.to);
                }
            }
            next += 1;
        }
        pieces.push(members);
    }
    let mut place = vec![u32::MAX; n];
    let mut gains: Vec<(i64, i64, usize)> = Vec::new();
    for (k, members) in pieces.iter().enumerate() {
        for (i, &v) in members.iter().enumerate() {
            place[v as usize] = i as u32;
        }
        let inside = |v: u32| (piece[v as usize] == k as u32).then(|| place[v as usize] as usize);
        let old = local_cost(core, members, |v| state.x[v as usize], inside);
        let value =
            |v: u32| if piece[v as usize] == k as u32 { other.x[v as usize] } else { state.x[v as usize] };
        let new = local_cost(core, members, value, inside);
        if (new.1, new.0) < (old.1, old.0) {
            gains.push((new.1 - old.1, new.0 - old.0, k));
        }
    }
    gains.sort_unstable();
    let mut taken = false;
    for (forbidden, cost, k) in gains {
        let set = |state: &mut State, from: &[u32]| {
            for (&v, &c) in pieces[k].iter().zip(from) {
                core.add_load(&mut state.load, v, state.x[v as usize], -1);
                core.add_load(&mut state.load, v, c, 1);
                state.x[v as usize] = c;
            }
        };
        let before: Vec<u32> = pieces[k].iter().map(|&v| state.x[v as usize]).collect();
        let after: Vec<u32> = pieces[k].iter().map(|&v| other.x[v as usize]).collect();
        set(state, &after);
        if core.overflow(&state.load) > 0 {
            set(state, &before);
        } else {
            state.cost += cost;
            state.forbidden += forbidden;
            taken = true;
        }
    }
    taken
}
