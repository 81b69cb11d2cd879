//! Literals that other programs write for numbers, and that are none in JSON: `NaN`, `Infinity`, `1e400`.
//!
//! They become texts, so that the reader's message names the layer that has them.

/// The file with such literals in quotes.
pub(super) fn quoted(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let length = match bytes[at] {
            b'"' => string_length(&bytes[at..]),
            byte if is_literal(byte) => bytes[at..].iter().take_while(|byte| is_literal(**byte)).count(),
            _ => 1,
        };
        let token = &bytes[at..at + length];
        let quote = is_literal(token[0]) && is_no_number(token);
        text.extend(quote.then_some(b'"'));
        text.extend_from_slice(token);
        text.extend(quote.then_some(b'"'));
        at += length;
    }
    text
}

fn is_literal(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

/// The bytes of a string with its quotes; to the end of the file where it is not closed.
fn string_length(bytes: &[u8]) -> usize {
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    bytes.len().min(at + 1)
}

/// Whether a literal reads as a number that is not finite.
fn is_no_number(token: &[u8]) -> bool {
    let value = str::from_utf8(token).ok().and_then(|text| text.parse::<f64>().ok());
    value.is_some_and(|value| !value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn only_literals_outside_of_strings_are_quoted() {
        let cases = [
            (r#"{"a":NaN,"b":[-Infinity,1e999]}"#, r#"{"a":"NaN","b":["-Infinity","1e999"]}"#),
            (r#"{"NaN":1e30,"b\"":"inf"}"#, r#"{"NaN":1e30,"b\"":"inf"}"#),
            (r#"{"a":true,"b":null,"c":-1.5e-3}"#, r#"{"a":true,"b":null,"c":-1.5e-3}"#),
            (r#"{"open\"#, r#"{"open\"#),
        ];
        for (text, expected) in cases {
            assert_eq!(quoted(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }
}
