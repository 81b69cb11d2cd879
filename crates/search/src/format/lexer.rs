//! A pull lexer for JSON over a bounded buffer, made for files that are almost only integers.
//!
//! It reads any `Read` through one fixed buffer, so that memory does not grow with the text, and has a fast path for
//! lists of integers. It is not a general JSON library: numbers must be whole, and unneeded values are skipped without
//! being built.

use super::number::{BadNumber, LONGEST_NUMBER, parse_integer};
use std::io::{self, Read};

/// The deepest nesting of a skipped value. The formats here need five levels.
const DEEPEST: u32 = 128;

/// The longest string (names and keys); longer ones are refused.
const LONGEST_STRING: usize = 1 << 16;

const BUFFER: usize = 1 << 18;

/// An error at one byte of the text. The caller adds the location in the structure.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The source failed: a read error, or damaged compressed data.
    Source(io::Error),
    /// The text is not what was expected.
    Text { offset: u64, problem: String },
    /// A limit on size was reached.
    TooLarge { problem: String },
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Source(error)
    }
}

pub(crate) struct Lexer<R> {
    source: R,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    /// Bytes of text before the buffer's current content.
    passed: u64,
    /// The most bytes of text: small compressed input can have an endless text.
    text_limit: u64,
}

impl<R: Read> Lexer<R> {
    pub fn new(source: R, text_limit: u64) -> Self {
        Lexer { source, buffer: vec![0; BUFFER].into_boxed_slice(), at: 0, end: 0, passed: 0, text_limit }
    }

    /// The position of the next byte in the text.
    pub fn offset(&self) -> u64 {
        self.passed + self.at as u64
    }

    pub fn fault<T>(&self, problem: impl Into<String>) -> Result<T, Fault> {
        Err(Fault::Text { offset: self.offset(), problem: problem.into() })
    }

    /// Moves the unread bytes to the front of the buffer and reads more. False at the end of the text.
    #[cold]
    fn refill(&mut self) -> Result<bool, Fault> {
        self.buffer.copy_within(self.at..self.end, 0);
        self.passed += self.at as u64;
        self.end -= self.at;
        self.at = 0;
        let before = self.end;
        while self.end < self.buffer.len() {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => break,
                Ok(count) => self.end += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.passed + self.end as u64 > self.text_limit {
            return Err(Fault::TooLarge {
                problem: format!("the text is longer than the limit of {} bytes", self.text_limit),
            });
        }
        Ok(self.end > before)
    }

    /// The next byte, not consumed; `None` at the end of the text.
    #[inline]
    fn peek(&mut self) -> Result<Option<u8>, Fault> {
        if self.at == self.end && !self.refill()? {
            return Ok(None);
        }
        Ok(Some(self.buffer[self.at]))
    }

    /// The next byte that is not white space, not consumed.
    pub fn peek_token(&mut self) -> Result<Option<u8>, Fault> {
        while let Some(byte) = self.peek()? {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(Some(byte));
            }
            self.at += 1;
        }
        Ok(None)
    }

    /// Consumes `wanted`; the error names the byte found instead.
    pub fn expect(&mut self, wanted: u8) -> Result<(), Fault> {
        match self.peek_token()? {
            Some(byte) if byte == wanted => {
                self.at += 1;
                Ok(())
            }
            other => self.fault(format!("expected '{}', found {}", wanted as char, show(other))),
        }
    }

    /// Between the elements of a list or object: consumes `,` (true) or `close` (false).
    pub fn more(&mut self, close: u8) -> Result<bool, Fault> {
        match self.peek_token()? {
            Some(b',') => {
                self.at += 1;
                Ok(true)
            }
            Some(byte) if byte == close => {
                self.at += 1;
                Ok(false)
            }
            other => self.fault(format!("expected ',' or '{}', found {}", close as char, show(other))),
        }
    }

    /// After an opening bracket: consumes `close` (true) if nothing is inside.
    pub fn closes_at_once(&mut self, close: u8) -> Result<bool, Fault> {
        let closes = self.peek_token()? == Some(close);
        self.at += usize::from(closes);
        Ok(closes)
    }

    /// Refuses anything but white space after the value.
    pub fn expect_end(&mut self) -> Result<(), Fault> {
        match self.peek_token()? {
            None => Ok(()),
            other => self.fault(format!("expected the end of the text, found {}", show(other))),
        }
    }

    /// A string, with its escapes resolved.
    pub fn string(&mut self) -> Result<String, Fault> {
        let mut bytes = Vec::new();
        self.quoted(|byte| {
            bytes.push(byte);
            bytes.len() <= LONGEST_STRING
        })?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(_) => self.fault("a string is not valid UTF-8"),
        }
    }

    /// Reads a quoted string and passes each byte to `take`, which may refuse it.
    fn quoted(&mut self, mut take: impl FnMut(u8) -> bool) -> Result<(), Fault> {
        self.expect(b'"')?;
        let mut give = |lexer: &Self, bytes: &[u8]| match bytes.iter().all(|&byte| take(byte)) {
            true => Ok(()),
            false => lexer.fault(format!("a string is longer than {LONGEST_STRING} bytes")),
        };
        loop {
            let Some(byte) = self.peek()? else { return self.fault("the text ends inside a string") };
            self.at += 1;
            match byte {
                b'"' => return Ok(()),
                b'\\' => {
                    let mut utf8 = [0; 4];
                    let text = self.escape()?.encode_utf8(&mut utf8);
                    give(self, text.as_bytes())?;
                }
                0..0x20 => return self.fault("a control character inside a string"),
                _ => give(self, &[byte])?,
            }
        }
    }

    /// The character that an escape stands for, after the backslash.
    fn escape(&mut self) -> Result<char, Fault> {
        let Some(byte) = self.peek()? else { return self.fault("the text ends inside a string") };
        self.at += 1;
        Ok(match byte {
            b'"' | b'\\' | b'/' => byte as char,
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let high = self.four_hex_digits()?;
                if !(0xd800..0xdc00).contains(&high) {
                    return char::from_u32(high)
                        .map_or_else(|| self.fault("a lone surrogate in an escape"), Ok);
                }
                for wanted in [b'\\', b'u'] {
                    if self.peek()? != Some(wanted) {
                        return self.fault("a lone surrogate in an escape");
                    }
                    self.at += 1;
                }
                let low = self.four_hex_digits()?;
                if !(0xdc00..0xe000).contains(&low) {
                    return self.fault("a lone surrogate in an escape");
                }
                let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                char::from_u32(code).map_or_else(|| self.fault("a lone surrogate in an escape"), Ok)?
            }
            _ => return self.fault("an unknown escape in a string"),
        })
    }

    fn four_hex_digits(&mut self) -> Result<u32, Fault> {
        let mut value = 0;
        for _ in 0..4 {
            let digit = self.peek()?.and_then(|byte| (byte as char).to_digit(16));
            let Some(digit) = digit else { return self.fault("expected four hexadecimal digits") };
            self.at += 1;
            value = value * 16 + digit;
        }
        Ok(value)
    }

    /// A whole number that fits 64 bits.
    pub fn integer(&mut self) -> Result<i64, Fault> {
        self.peek_token()?;
        // A number at the end of the buffer is completed first, so that it can be parsed as a slice.
        if self.end - self.at < LONGEST_NUMBER {
            self.refill()?;
        }
        let rest = &self.buffer[self.at..self.end];
        match parse_integer(rest) {
            Ok((value, length)) => {
                self.at += length;
                Ok(value)
            }
            Err(kind) => {
                let shown: String = rest
                    .iter()
                    .take(24)
                    .take_while(|byte| !b",]} \n\r\t".contains(byte))
                    .map(|&b| printable(b))
                    .collect();
                match (kind, shown.is_empty()) {
                    (_, true) => {
                        let next = self.peek()?;
                        self.fault(format!("expected a whole number, found {}", show(next)))
                    }
                    (BadNumber::Malformed, _) => {
                        self.fault(format!("expected a whole number, found {shown}"))
                    }
                    (BadNumber::Fraction, _) => {
                        self.fault(format!("{shown} is not a whole number (scale the costs first)"))
                    }
                    (BadNumber::Huge, _) => self.fault(format!("{shown} does not fit 64 bits")),
                }
            }
        }
    }

    /// A bracketed list of non-negative whole numbers, appended to `out`; at most `room` numbers. An error has the index of
    /// its element.
    pub fn naturals(&mut self, out: &mut Vec<i64>, room: usize) -> Result<(), (usize, Fault)> {
        let first = out.len();
        self.expect(b'[').map_err(|fault| (0, fault))?;
        if self.closes_at_once(b']').map_err(|fault| (0, fault))? {
            return Ok(());
        }
        loop {
            let index = out.len() - first;
            if index >= room {
                let problem = "more numbers than the limit allows".to_string();
                return Err((index, Fault::TooLarge { problem }));
            }
            // Plain digits directly followed by a comma or bracket: nearly all of the text.
            if let Some(done) = self.fast_naturals(out, first + room) {
                if done {
                    return Ok(());
                }
                continue;
            }
            let offset = self.offset();
            let value = self.integer().map_err(|fault| (index, fault))?;
            if value < 0 {
                let problem = format!("{value} is negative");
                return Err((index, Fault::Text { offset, problem }));
            }
            out.push(value);
            if !self.more(b']').map_err(|fault| (index, fault))? {
                return Ok(());
            }
        }
    }

    /// The fast path of [`Lexer::naturals`], for numbers that are completely inside the buffer. `Some(true)`: the list is
    /// closed. `Some(false)`: some numbers were read, and the buffer must be refilled. `None`: the next number needs the
    /// slow path.
    #[inline]
    fn fast_naturals(&mut self, out: &mut Vec<i64>, most: usize) -> Option<bool> {
        let text = &self.buffer[..self.end];
        let start = self.at;
        let mut at = start;
        let mut left = most - out.len();
        while left > 0 && at + LONGEST_NUMBER < text.len() {
            let mut value = u64::from(text[at].wrapping_sub(b'0'));
            if value > 9 {
                break;
            }
            let mut next = at + 1;
            loop {
                let digit = text[next].wrapping_sub(b'0');
                if digit > 9 {
                    break;
                }
                value = value.wrapping_mul(10).wrapping_add(u64::from(digit));
                next += 1;
                // Eighteen digits always fit; longer numbers go to the slow path, which checks.
                if next - at > 18 {
                    break;
                }
            }
            let leading_zero = text[at] == b'0' && next - at > 1;
            match text[next] {
                b',' if !leading_zero => {
                    out.push(value as i64);
                    at = next + 1;
                    left -= 1;
                }
                b']' if !leading_zero => {
                    out.push(value as i64);
                    self.at = next + 1;
                    return Some(true);
                }
                _ => break,
            }
        }
        self.at = at;
        (at > start).then_some(false)
    }

    /// Skips one value of any kind. Iterative: depth is a counter, not the call stack.
    pub fn skip_value(&mut self) -> Result<(), Fault> {
        let mut closers: Vec<u8> = Vec::new();
        loop {
            match self.peek_token()? {
                Some(open @ (b'{' | b'[')) => {
                    self.at += 1;
                    let close = if open == b'{' { b'}' } else { b']' };
                    if !self.closes_at_once(close)? {
                        if closers.len() >= DEEPEST as usize {
                            return self.fault(format!("values are nested more than {DEEPEST} deep"));
                        }
                        closers.push(close);
                        if close == b'}' {
                            self.quoted(|_| true)?;
                            self.expect(b':')?;
                        }
                        continue;
                    }
                }
                Some(b'"') => self.quoted(|_| true)?,
                Some(b't') => self.word("true")?,
                Some(b'f') => self.word("false")?,
                Some(b'n') => self.word("null")?,
                Some(b'-' | b'0'..=b'9') => self.skip_number()?,
                other => return self.fault(format!("expected a value, found {}", show(other))),
            }
            loop {
                let Some(&close) = closers.last() else { return Ok(()) };
                if !self.more(close)? {
                    closers.pop();
                    continue;
                }
                if close == b'}' {
                    self.quoted(|_| true)?;
                    self.expect(b':')?;
                }
                break;
            }
        }
    }

    /// Consumes `null` if it is next.
    pub fn takes_null(&mut self) -> Result<bool, Fault> {
        if self.peek_token()? != Some(b'n') {
            return Ok(false);
        }
        self.word("null")?;
        Ok(true)
    }

    fn word(&mut self, word: &str) -> Result<(), Fault> {
        for wanted in word.bytes() {
            if self.peek()? != Some(wanted) {
                return self.fault(format!("expected {word}"));
            }
            self.at += 1;
        }
        Ok(())
    }

    fn skip_number(&mut self) -> Result<(), Fault> {
        while let Some(b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') = self.peek()? {
            self.at += 1;
        }
        Ok(())
    }
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() { byte as char } else { '?' }
}

/// A byte for a message.
fn show(byte: Option<u8>) -> String {
    match byte {
        None => "the end of the text".to_string(),
        Some(byte) if byte.is_ascii_graphic() => format!("'{}'", byte as char),
        Some(byte) => format!("byte 0x{byte:02x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &str) -> Result<Vec<i64>, String> {
        let mut out = Vec::new();
        let mut lexer = Lexer::new(text.as_bytes(), 1 << 30);
        match lexer.naturals(&mut out, 1000).and_then(|()| lexer.expect_end().map_err(|fault| (0, fault))) {
            Ok(()) => Ok(out),
            Err((index, Fault::Text { problem, .. } | Fault::TooLarge { problem })) => {
                Err(format!("[{index}] {problem}"))
            }
            Err((_, Fault::Source(error))) => Err(error.to_string()),
        }
    }

    #[test]
    fn integers_are_read_in_all_their_spellings() {
        assert_eq!(numbers("[]"), Ok(vec![]));
        assert_eq!(numbers(" [ 0 , 1,\n 23 ] "), Ok(vec![0, 1, 23]));
        assert_eq!(
            numbers("[1e3, 5.0, 2.50E1, 0e99, 1000000000000000000]"),
            Ok(vec![1000, 5, 25, 0, 1_000_000_000_000_000_000])
        );
        assert_eq!(numbers("[9223372036854775807]"), Ok(vec![i64::MAX]));
    }

    #[test]
    fn numbers_that_are_no_naturals_are_refused_with_their_index() {
        let table = [
            ("[1,-2]", "[1] -2 is negative"),
            ("[1,2,NaN]", "[2] expected a whole number, found NaN"),
            ("[null]", "[0] expected a whole number, found null"),
            ("[Infinity]", "[0] expected a whole number, found Infinity"),
            ("[1.5]", "[0] 1.5 is not a whole number (scale the costs first)"),
            ("[9223372036854775808]", "[0] 9223372036854775808 does not fit 64 bits"),
            ("[1e400]", "[0] 1e400 does not fit 64 bits"),
            ("[01]", "[0] expected a whole number, found 01"),
            ("[1,,2]", "[1] expected a whole number, found ','"),
            ("[1,]", "[1] expected a whole number, found ']'"),
            ("[1 2]", "[0] expected ',' or ']', found '2'"),
            ("[0x10]", "[0] expected a whole number, found 0x10"),
            ("[1", "[0] expected ',' or ']', found the end of the text"),
            ("[\"1\"]", "[0] expected a whole number, found \"1\""),
        ];
        for (text, message) in table {
            assert_eq!(numbers(text), Err(message.to_string()), "{text}");
        }
    }

    #[test]
    fn long_lists_cross_the_buffer_unharmed() {
        let values: Vec<i64> = (0..200_000).map(|i| i * 7_919 % 1_000_003).collect();
        let text = format!("[{}]", values.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
        let mut out = Vec::new();
        assert!(Lexer::new(text.as_bytes(), 1 << 30).naturals(&mut out, usize::MAX / 2).is_ok());
        assert_eq!(out, values);
    }

    #[test]
    fn skipping_passes_over_one_value_and_refuses_deep_ones() {
        let skip = |text: &str| {
            let mut lexer = Lexer::new(text.as_bytes(), 1 << 30);
            lexer.skip_value().and_then(|()| lexer.expect_end()).is_ok()
        };
        for good in ["1", "-1.5e-7", "\"a\\u00e9\\\"\"", "[]", "{}", "[1,[2,{\"a\":[true,false,null]}],{}]"] {
            assert!(skip(good), "{good}");
        }
        for bad in ["", "[1", "{\"a\"}", "{1:2}", "[1,]", "tru", "\"\\x\"", "\"\\ud800\"", "nan"] {
            assert!(!skip(bad), "{bad}");
        }
        assert!(skip(&format!("{}{}", "[".repeat(100), "]".repeat(100))));
        assert!(!skip(&"[".repeat(1_000_000)));
    }
}
