//! "Did you mean": the known name nearest to a mistyped one. Machines, models, strategies and options use it.
//!
//! ```
//! use shardwright_suggest::did_you_mean;
//!
//! assert_eq!(did_you_mean("8xh10", ["8xh100", "8xa100"]), "; did you mean `8xh100`?");
//! assert_eq!(did_you_mean("toaster", ["8xh100", "8xa100"]), "");
//! ```

/// Longer names are no typos, and are not compared.
const LONGEST: usize = 64;

/// The text that a message about an unknown name appends: the nearest known name, or nothing.
pub fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    nearest(name, known).map_or_else(String::new, |known| format!("; did you mean `{known}`?"))
}

/// The message about a name that is none of a few: what it was to be, the names that exist, and the nearest of them.
///
/// ```
/// let message = shardwright_suggest::unknown("policy", "ful", &["off", "selective", "full"]);
/// assert_eq!(message, "there is no policy `ful`; choose off, selective or full; did you mean `full`?");
/// ```
pub fn unknown(what: &str, name: &str, known: &[&str]) -> String {
    let shown: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    let choices = match known {
        [] => "none".to_string(),
        [only] => only.to_string(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    };
    format!("there is no {what} `{shown}`; choose {choices}{}", did_you_mean(name, known.iter().copied()))
}

/// The known name with the fewest edits from `name`, where they are few enough for a typo: one edit per three letters.
/// Letters of either case are equal. Of equally near names the first counts.
pub fn nearest<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let name = letters(name);
    if name.is_empty() || name.len() > LONGEST {
        return None;
    }
    let allowed = (name.len() / 3).max(1);
    let distances = known.into_iter().map(|known| (edits(&name, &letters(known)), known));
    distances.filter(|&(distance, _)| distance <= allowed).min_by_key(|&(distance, _)| distance).map(|n| n.1)
}

fn letters(name: &str) -> Vec<char> {
    name.chars().take(LONGEST + 1).flat_map(char::to_lowercase).collect()
}

/// Insertions, deletions, replacements and swaps of neighbours that turn one name into another (optimal string alignment).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut rows: [Vec<usize>; 3] = [Vec::new(), Vec::new(), (0..=b.len()).collect()];
    for i in 1..=a.len() {
        rows.rotate_left(1);
        let [two_before, before, row] = &mut rows;
        row.clear();
        row.push(i);
        for j in 1..=b.len() {
            let replaced = before[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(before[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(two_before[j - 2] + 1);
            }
            row.push(least);
        }
    }
    rows[2][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        let count = |a: &str, b: &str| edits(&letters(a), &letters(b));
        for (a, b, expected) in [
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("auto", "atuo", 1),
            ("H100", "h100", 0),
            ("abc", "abc", 0),
            ("flat", "lfta", 2),
        ] {
            assert_eq!((count(a, b), count(b, a)), (expected, expected), "{a} {b}");
        }
    }

    #[test]
    fn messages_list_the_names_and_tame_what_was_typed() {
        assert_eq!(unknown("loss", "x\u{1b}", &["mse"]), "there is no loss `x\\u{1b}`; choose mse");
        assert!(unknown("loss", &"long".repeat(999), &["mse", "output"]).len() < 120);
    }

    #[test]
    fn only_typos_are_corrected() {
        let known = ["llama3-8b", "llama3-70b", "gpt3-175b"];
        assert_eq!(nearest("lama3-8b", known), Some("llama3-8b"));
        assert_eq!(nearest("LLaMA3-70B", known), Some("llama3-70b"));
        assert_eq!(nearest("bert", known), None);
        assert_eq!(nearest("", known), None);
        assert_eq!(nearest(&"llama3-8b".repeat(9), known), None);
    }
}
