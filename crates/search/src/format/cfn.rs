//! Writes a network as a cost function network for toulbar2 (`cfn`), memory limits included.
//!
//! Finite costs are written unchanged. Forbidden costs become the upper bound of the file, which is one more than the
//! largest finite cost of any assignment.
//!
//! Memory needs auxiliary variables, because toulbar2's linear constraint (`knapsack`, since version 1.1) takes 0/1
//! variables only. If the usages of a variable are `u0 < u1 < ... < uk`, a 0/1 variable for each step j means that the
//! usage is at least `uj`, and has weight `uj - u(j-1)`. A hard table ties it to the choice. One constraint is written
//! for each time of maximal usage above the limit: these imply all other times.
//!
//! The first variables of the file are the network's, in order, so the first values of a solution are
//! the choices.

use super::write::JsonText;
use crate::network::{Network, VarId, is_forbidden};
use std::collections::BTreeSet;
use std::io::{self, Write};

/// toulbar2 refuses upper bounds much above this (its costs are 64-bit, with room for sums).
const LARGEST_BOUND: i64 = 500_000_000_000_000_000;

/// Writes `network` under `name`.
///
/// An assignment that costs 5e17 or more counts as forbidden in the file, since toulbar2 has no larger costs.
///
/// # Errors
/// Where `out` fails.
pub fn write_cfn(network: &Network, name: &str, out: impl Write) -> io::Result<()> {
    let top = upper_bound(network);
    let rows = binding_rows(network);
    let mut text = JsonText::new(out);
    // The format forbids spaces, brackets and other characters in names.
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().map(plain).collect();
    text.put(&format!("{{\"problem\":{{\"name\":\"n_{name}\",\"mustbe\":\"<{top}\"}},\n\"variables\":{{"))?;
    for v in vars(network) {
        text.put(&format!("{}\"v{}\":{}", if v.0 > 0 { "," } else { "" }, v.0, network.choices(v)))?;
    }
    let limited: BTreeSet<VarId> = rows.iter().flatten().copied().collect();
    for &v in &limited {
        for step in 1..levels(network, v).len() {
            text.put(&format!(",\"m{}_{step}\":2", v.0))?;
        }
    }
    // A constant function first, so that all others begin with a comma.
    text.put("},\n\"functions\":{\"constant\":{\"scope\":[],\"costs\":[0]}")?;
    let cost = |cost: &i64| if is_forbidden(*cost) { top } else { (*cost).min(top) }.unsigned_abs();
    for v in vars(network) {
        text.put(&format!(",\n\"u{0}\":{{\"scope\":[\"v{0}\"],\"costs\":", v.0))?;
        text.naturals(network.unary(v).iter().map(cost))?;
        text.put("}")?;
    }
    for edge in network.edges() {
        let (u, v) = (edge.u.0, edge.v.0);
        text.put(&format!(",\n\"e{u}_{v}\":{{\"scope\":[\"v{u}\",\"v{v}\"],\"costs\":"))?;
        text.naturals(network.table(edge.table).iter().map(cost))?;
        text.put("}")?;
    }
    for &v in &limited {
        for (step, &level) in levels(network, v).iter().enumerate().skip(1) {
            text.put(&format!(",\n\"t{0}_{step}\":{{\"scope\":[\"v{0}\",\"m{0}_{step}\"],\"costs\":", v.0))?;
            let table =
                network.usage(v).iter().flat_map(|&usage| if usage >= level { [top, 0] } else { [0, top] });
            text.naturals(table.map(i64::unsigned_abs))?;
            text.put("}")?;
        }
    }
    for (index, row) in rows.iter().enumerate() {
        write_row(&mut text, network, index, row, top)?;
    }
    text.put("}}\n")?;
    text.finish()
}

/// One memory row: the sum of usages above their minima is at most the limit minus the sum of the minima.
fn write_row<W: Write>(
    text: &mut JsonText<W>,
    network: &Network,
    index: usize,
    row: &[VarId],
    top: i64,
) -> io::Result<()> {
    let limit = i128::from(network.usage_limit().unwrap_or(i64::MAX));
    let least: i128 = row.iter().map(|&v| i128::from(levels(network, v)[0])).sum();
    let room = limit - least;
    if room < 0 {
        return text.put(&format!(",\n\"r{index}\":{{\"scope\":[],\"costs\":[{top}]}}"));
    }
    let steps: Vec<(VarId, usize, i64)> = row
        .iter()
        .flat_map(|&v| {
            let levels = levels(network, v);
            (1..levels.len()).map(move |step| (v, step, levels[step] - levels[step - 1]))
        })
        .collect();
    text.put(&format!(",\n\"r{index}\":{{\"scope\":["))?;
    text.separated(&steps, |text, (v, step, _)| text.put(&format!("\"m{}_{step}\"", v.0)))?;
    // toulbar2's constraint is "at least", so both sides change sign.
    text.put(&format!("],\"type\":\"knapsack\",\"params\":{{\"capacity\":{},\"weights\":[", -room))?;
    text.separated(&steps, |text, (_, _, weight)| text.put(&format!("{}", -weight)))?;
    text.put("]}}")
}

fn vars(network: &Network) -> impl Iterator<Item = VarId> + use<> {
    (0..network.variables()).map(|v| VarId(v as u32))
}

/// The different usages of a variable, ascending; at least one.
fn levels(network: &Network, v: VarId) -> Vec<i64> {
    let mut levels = network.usage(v).to_vec();
    levels.sort_unstable();
    levels.dedup();
    levels
}

/// One more than the largest finite cost of any assignment.
fn upper_bound(network: &Network) -> i64 {
    let largest = |costs: &[i64]| costs.iter().copied().filter(|&c| !is_forbidden(c)).max().unwrap_or(0);
    let unary: i128 = vars(network).map(|v| i128::from(largest(network.unary(v)))).sum();
    let tables: Vec<i64> = (0..network.tables()).map(|t| largest(network.table(t as u32))).collect();
    let pairs: i128 = network.edges().iter().map(|edge| i128::from(tables[edge.table as usize])).sum();
    (unary + pairs + 1).min(i128::from(LARGEST_BOUND)) as i64
}

/// The variables alive at each binding time: after a start, before the next end, with the largest usages together above
/// the limit.
fn binding_rows(network: &Network) -> Vec<Vec<VarId>> {
    let Some(limit) = network.usage_limit() else { return Vec::new() };
    let most = |v: VarId| network.usage(v).iter().copied().max().unwrap_or(0);
    // At equal times ends (false) come before beginnings (true): intervals are half-open.
    let mut events: Vec<(u64, bool, VarId)> = vars(network)
        .filter(|&v| !network.interval(v).is_empty() && most(v) > 0)
        .flat_map(|v| [(network.interval(v).lo, true, v), (network.interval(v).hi, false, v)])
        .collect();
    events.sort_unstable();
    let mut alive: BTreeSet<VarId> = BTreeSet::new();
    let (mut now, mut grown) = (0i64, false);
    let mut rows = Vec::new();
    for (_, begins, v) in events {
        if begins {
            alive.insert(v);
            now += most(v);
        } else {
            if grown && now > limit {
                rows.push(alive.iter().copied().collect());
            }
            alive.remove(&v);
            now -= most(v);
        }
        grown = begins;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{FORBIDDEN, Interval, NetworkBuilder};

    #[test]
    fn memory_becomes_one_constraint_per_binding_time() {
        let mut builder = NetworkBuilder::new();
        let a = builder.variable(&[1, FORBIDDEN], &[5, 9], Interval { lo: 0, hi: 2 }).unwrap();
        let b = builder.variable(&[7, 0, 0], &[4, 1, 4], Interval { lo: 1, hi: 3 }).unwrap();
        builder.variable(&[0], &[2], Interval { lo: 2, hi: 3 }).unwrap();
        builder.edge(a, b, &[0, 1, 2, 3, 4, 5]).unwrap();
        builder.usage_limit(10).unwrap();
        let mut text = Vec::new();
        write_cfn(&builder.build().unwrap(), "a b", &mut text).unwrap();
        let expected = r#"{"problem":{"name":"n_a_b","mustbe":"<14"},
"variables":{"v0":2,"v1":3,"v2":1,"m0_1":2,"m1_1":2},
"functions":{"constant":{"scope":[],"costs":[0]},
"u0":{"scope":["v0"],"costs":[1,14]},
"u1":{"scope":["v1"],"costs":[7,0,0]},
"u2":{"scope":["v2"],"costs":[0]},
"e0_1":{"scope":["v0","v1"],"costs":[0,1,2,3,4,5]},
"t0_1":{"scope":["v0","m0_1"],"costs":[0,14,14,0]},
"t1_1":{"scope":["v1","m1_1"],"costs":[14,0,0,14,14,0]},
"r0":{"scope":["m0_1","m1_1"],"type":"knapsack","params":{"capacity":-4,"weights":[-4,-3]}}}}
"#;
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
}
