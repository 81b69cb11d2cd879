//! Usage over time of each value of a variable: disjoint spans of rows, one usage per value.
//!
//! A network variable has one span; merging variables adds their spans. Rows are indices into the model's `slack`.

/// Usages of all values over the rows `lo..hi`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row.
    pub lo: u32,
    /// The row after the last.
    pub hi: u32,
    /// Usage by value.
    pub usage: Vec<i64>,
}

/// Disjoint spans, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// The spans.
    pub spans: Vec<Span>,
}

impl Profile {
    /// Whether all usages are zero.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Keeps only some values.
    pub fn keep(&mut self, keep: &[bool]) {
        for s in &mut self.spans {
            super::model::retain(&mut s.usage, keep);
        }
    }

    /// The sum of spans that may overlap, in disjoint ascending form.
    pub fn from_overlapping(mut parts: Vec<Span>) -> Self {
        parts.retain(|s| s.lo < s.hi);
        if parts.len() <= 1 {
            return Profile { spans: parts };
        }
        let mut cuts: Vec<u32> = parts.iter().flat_map(|s| [s.lo, s.hi]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let values = parts[0].usage.len();
        // Differences at the cuts, then running sums: linear in the number of spans.
        let mut delta = vec![0i64; cuts.len() * values];
        let mut cover = vec![0i32; cuts.len()];
        for s in &parts {
            for (row, sign) in [(s.lo, 1), (s.hi, -1)] {
                let at = cuts.partition_point(|&c| c < row);
                cover[at] += sign;
                for (d, &u) in delta[at * values..(at + 1) * values].iter_mut().zip(&s.usage) {
                    *d += i64::from(sign) * u;
                }
            }
        }
        let mut spans: Vec<Span> = Vec::new();
        let mut now = vec![0i64; values];
        let mut covered = 0;
        for k in 0..cuts.len().saturating_sub(1) {
            covered += cover[k];
            for (n, &d) in now.iter_mut().zip(&delta[k * values..(k + 1) * values]) {
                *n += d;
            }
            if covered == 0 {
                continue;
            }
            match spans.last_mut() {
                Some(last) if last.hi == cuts[k] && last.usage == now => last.hi = cuts[k + 1],
                _ => spans.push(Span { lo: cuts[k], hi: cuts[k + 1], usage: now.clone() }),
            }
        }
        Profile { spans }
    }

    /// The usages as a function of another variable: its value `i` selects value `map[i]` here.
    pub fn mapped(&self, map: &[u32]) -> Vec<Span> {
        self.spans
            .iter()
            .map(|s| Span { lo: s.lo, hi: s.hi, usage: map.iter().map(|&m| s.usage[m as usize]).collect() })
            .collect()
    }

    /// Whether value `a` never uses more than value `b`.
    pub fn no_more(&self, a: usize, b: usize) -> bool {
        self.spans.iter().all(|s| s.usage[a] <= s.usage[b])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_spans_add_up() {
        let span = |lo, hi, usage: &[i64]| Span { lo, hi, usage: usage.to_vec() };
        let p =
            Profile::from_overlapping(vec![span(0, 4, &[1, 2]), span(2, 6, &[10, 0]), span(8, 9, &[1, 1])]);
        let got: Vec<_> = p.spans.iter().map(|s| (s.lo, s.hi, s.usage.clone())).collect();
        assert_eq!(got, [(0, 2, vec![1, 2]), (2, 4, vec![11, 2]), (4, 6, vec![10, 0]), (8, 9, vec![1, 1])]);
    }
}
