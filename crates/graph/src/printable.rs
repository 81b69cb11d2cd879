//! Text from files, made fit for a terminal: invisible and direction-changing characters escaped, long text cut.

/// Escapes characters that a terminal or an editor would act on instead of showing, and cuts the middle out of text of
/// more than `most` characters. Names and messages keep their beginning and their end.
pub fn printable(text: &str, most: usize) -> String {
    // An escaped character takes up to ten; the text is cut first, so that the work is bounded by `most`.
    let keep_end = most / 3;
    let length = text.chars().count();
    let mut out = String::with_capacity(text.len().min(2 * most + 32));
    if length <= most {
        push_escaped(&mut out, text.chars());
        return out;
    }
    push_escaped(&mut out, text.chars().take(most - keep_end));
    let cut = length - most;
    out.push_str(&format!("...({cut} more)..."));
    push_escaped(&mut out, text.chars().skip(length - keep_end));
    out
}

fn push_escaped(out: &mut String, chars: impl Iterator<Item = char>) {
    for c in chars {
        if is_invisible(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
}

/// Control characters, and format characters that show nothing, reorder the text around them or end a line.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_move_the_cursor_or_reorder_text_are_escaped() {
        let hostile = "a\u{1b}[2Jb\u{202e}c\rd\u{200b}\u{9b}e\u{2028}f\u{e0041}";
        let shown = printable(hostile, 100);
        assert_eq!(shown, "a\\u{1b}[2Jb\\u{202e}c\\u{d}d\\u{200b}\\u{9b}e\\u{2028}f\\u{e0041}");
        assert_eq!(printable("größe/层.1 \"x\"", 100), "größe/层.1 \"x\"");
    }

    #[test]
    fn long_text_keeps_its_beginning_and_its_end() {
        let long = format!("node `{}`: the reason", "x".repeat(100_000));
        let shown = printable(&long, 90);
        assert!(shown.starts_with("node `xxx") && shown.ends_with("`: the reason"), "{shown}");
        assert!(shown.contains("...(99929 more)..."), "{shown}");
        assert!(printable(&"\u{202e}".repeat(1000), 90).chars().count() < 90 * 10);
    }
}
