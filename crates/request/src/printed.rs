//! Messages for a terminal. They may quote text of any file, so they are escaped and cut here, the one place before they
//! are shown.

use shardwright_graph::printable;

/// The longest line of a message.
const LONGEST_LINE: usize = 2000;
/// The most lines of a message.
const MOST_LINES: usize = 200;

/// A message of one or more lines, escaped and cut.
pub fn printed(message: &str) -> String {
    let mut lines: Vec<String> =
        message.lines().take(MOST_LINES).map(|line| printable(line, LONGEST_LINE)).collect();
    let cut = message.lines().count().saturating_sub(MOST_LINES);
    if cut > 0 {
        lines.push(format!("... and {cut} more lines"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_kept_and_everything_else_is_tamed() {
        assert_eq!(printed("unsupported ops:\n  Foo x2: a, b"), "unsupported ops:\n  Foo x2: a, b");
        assert_eq!(printed("a\u{1b}]0;title\u{7}b"), "a\\u{1b}]0;title\\u{7}b");
        let long = printed(&format!("{}\n", "x".repeat(100_000)).repeat(1000));
        assert!(long.len() < 500_000 && long.ends_with("and 800 more lines"), "{}", long.len());
    }
}
