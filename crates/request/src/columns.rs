//! Text in columns: lines that wrap at words, and names shortened in the middle.

/// The width of everything that is printed for people.
pub const WIDTH: usize = 80;

/// `start` and the text after it, in lines of at most 80 characters. Further lines begin below the text.
pub fn hanging(start: &str, text: &str) -> String {
    let indent = start.chars().count();
    let lines = wrapped(text, WIDTH.saturating_sub(indent));
    format!("{start}{}", lines.join(&format!("\n{:indent$}", "")))
}

/// The text in lines of at most `width` characters, broken at spaces. A longer word has a line of its own. At least one line.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.len() - 1;
        let line = &mut lines[line];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

/// The text in at most `width` characters: the middle of a longer one becomes `…`.
pub fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_string();
    }
    let kept = width.saturating_sub(1);
    let (head, tail) = (kept.div_ceil(2), kept / 2);
    text.chars().take(head).chain(['…']).chain(text.chars().skip(count - tail)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_words_and_lose_none() {
        let text = "data parallelism over 8 nodes × tensor parallelism over 8 GPUs";
        for width in 1..80 {
            let lines = wrapped(text, width);
            assert_eq!(lines.join(" "), text);
            assert!(
                lines.iter().all(|line| line.chars().count() <= width || !line.contains(' ')),
                "{lines:?}"
            );
        }
        assert_eq!(wrapped("", 10), [""]);
    }

    #[test]
    fn further_lines_begin_below_the_text() {
        let text = "word ".repeat(30);
        let shown = hanging("name  ", text.trim_end());
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.len() == 2 && lines[0].starts_with("name  word") && lines[1].starts_with("      word"));
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH));
        assert_eq!(shown.split_whitespace().count(), 31);
    }

    #[test]
    fn long_names_keep_both_ends() {
        assert_eq!(shortened("blocks.0.attention.queries", 11), "block…eries");
        assert_eq!(shortened("é×ü", 3), "é×ü");
        assert_eq!(shortened("é×üa", 3), "é…a");
    }
}
