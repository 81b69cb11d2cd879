//! The lexer: tokens of MLIR's text form with their positions.

use super::error::{Result, TextError};

/// A token of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Token<'a> {
    /// `stablehlo.add`, `tensor`, `true`.
    Word(&'a str),
    /// `%arg0`, without the sign.
    Value(&'a str),
    /// `@main` or `@"a b"`, without sign and quotes.
    Symbol(&'a str),
    /// `^bb0`.
    Label(&'a str),
    /// `#loc1`, `#stablehlo`, without the sign.
    Hash(&'a str),
    /// `!stablehlo.token`, without the sign.
    Bang(&'a str),
    /// A quoted string as written, without the quotes.
    Text(&'a str),
    /// `-1.5e-3`, `42`, `0xFF800000`.
    Number(&'a str),
    /// `->`.
    Arrow,
    /// Any other character.
    Mark(u8),
    /// The end of the text.
    End,
}

/// A position in the text and the token there.
pub(super) struct Lexer<'a> {
    text: &'a str,
    /// The position after the current token.
    position: usize,
    /// The current token and its first byte.
    token: Token<'a>,
    start: usize,
    /// The end of the previous token.
    before: usize,
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$' | b'-')
}

impl<'a> Lexer<'a> {
    pub fn new(text: &'a str) -> Result<Self> {
        let mut lexer = Self { text, position: 0, token: Token::End, start: 0, before: 0 };
        lexer.advance()?;
        Ok(lexer)
    }

    /// The current token.
    pub fn peek(&self) -> Token<'a> {
        self.token
    }

    /// The first byte of the current token.
    pub fn at(&self) -> usize {
        self.start
    }

    /// The end of the current token.
    pub fn end(&self) -> usize {
        self.position
    }

    /// The end of the previous token, before blanks and comments.
    pub fn before(&self) -> usize {
        self.before
    }

    pub fn text(&self) -> &'a str {
        self.text
    }

    /// Returns the current token and moves to the next.
    pub fn next(&mut self) -> Result<Token<'a>> {
        let token = self.token;
        self.advance()?;
        Ok(token)
    }

    /// Continues at a byte of the text, which must begin a character.
    pub fn jump(&mut self, position: usize) -> Result<()> {
        self.position = position;
        self.advance()
    }

    fn take(&self, from: usize, accept: impl Fn(u8) -> bool) -> usize {
        let rest = &self.text.as_bytes()[from..];
        from + rest.iter().position(|&b| !accept(b)).unwrap_or(rest.len())
    }

    fn skip_blanks(&mut self) {
        loop {
            self.position = self.take(self.position, |b| b.is_ascii_whitespace());
            if !self.text[self.position..].starts_with("//") {
                return;
            }
            self.position = self.take(self.position, |b| b != b'\n');
        }
    }

    fn advance(&mut self) -> Result<()> {
        self.before = self.position;
        self.skip_blanks();
        let (bytes, start) = (self.text.as_bytes(), self.position);
        self.start = start;
        let Some(&first) = bytes.get(start) else {
            self.token = Token::End;
            return Ok(());
        };
        // No token has a second byte of zero.
        let second = bytes.get(start + 1).copied().unwrap_or(0);
        let name = |lexer: &Self| &lexer.text[start + 1..lexer.take(start + 1, is_name)];
        let (token, end) = match first {
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => {
                let end = self.take(start, |b| is_name(b) && b != b'-');
                (Token::Word(&self.text[start..end]), end)
            }
            b'"' => {
                let end = self.close_quote(start)?;
                (Token::Text(&self.text[start + 1..end - 1]), end)
            }
            b'@' if second == b'"' => {
                let end = self.close_quote(start + 1)?;
                (Token::Symbol(&self.text[start + 2..end - 1]), end)
            }
            b'%' => (Token::Value(name(self)), start + 1 + name(self).len()),
            b'@' => (Token::Symbol(name(self)), start + 1 + name(self).len()),
            b'^' => (Token::Label(name(self)), start + 1 + name(self).len()),
            b'#' => (Token::Hash(name(self)), start + 1 + name(self).len()),
            b'!' => (Token::Bang(name(self)), start + 1 + name(self).len()),
            b'-' if second == b'>' => (Token::Arrow, start + 2),
            b'0'..=b'9' => self.number(start),
            b'-' | b'+' if second.is_ascii_digit() => self.number(start),
            _ if first.is_ascii() => (Token::Mark(first), start + 1),
            _ => {
                return Err(TextError::new(
                    start,
                    "this character does not belong in a program; is the file text?",
                ));
            }
        };
        (self.token, self.position) = (token, end);
        Ok(())
    }

    fn number(&self, start: usize) -> (Token<'a>, usize) {
        let bytes = self.text.as_bytes();
        let digits = start + usize::from(!bytes[start].is_ascii_digit());
        let end = if self.text[digits..].starts_with("0x") {
            self.take(digits + 2, |b| b.is_ascii_hexdigit())
        } else {
            let mut end = self.take(digits, |b| b.is_ascii_digit());
            if bytes.get(end) == Some(&b'.') {
                end = self.take(end + 1, |b| b.is_ascii_digit());
            }
            if matches!(bytes.get(end), Some(b'e' | b'E')) {
                let signed = end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
                if bytes.get(signed).is_some_and(u8::is_ascii_digit) {
                    end = self.take(signed, |b| b.is_ascii_digit());
                }
            }
            end
        };
        (Token::Number(&self.text[start..end]), end)
    }

    /// The end of the string whose opening quote is at `start`.
    fn close_quote(&self, start: usize) -> Result<usize> {
        let bytes = self.text.as_bytes();
        let mut i = start + 1;
        loop {
            match bytes.get(i) {
                Some(b'"') => return Ok(i + 1),
                Some(b'\\') => i += 2,
                Some(_) => i += 1,
                None => {
                    return Err(TextError::new(start, "this string is not closed; is the file complete?"));
                }
            }
        }
    }

    /// The text between the opening bracket at the current token and its closing bracket; continues after it. For text that
    /// is kept unparsed.
    pub fn bracketed(&mut self) -> Result<&'a str> {
        let (bytes, start) = (self.text.as_bytes(), self.start);
        if !matches!(self.token, Token::Mark(b'<' | b'(' | b'[' | b'{')) {
            return Err(TextError::new(start, "expected an opening bracket"));
        }
        let mut open = 0usize;
        let mut i = start;
        loop {
            match bytes.get(i) {
                None => {
                    return Err(TextError::new(start, "this bracket is not closed; is the file complete?"));
                }
                Some(b'"') => i = self.close_quote(i)? - 1,
                Some(b'-') if bytes.get(i + 1) == Some(&b'>') => i += 1,
                Some(b'<' | b'(' | b'[' | b'{') => open += 1,
                Some(b'>' | b')' | b']' | b'}') => {
                    open -= 1;
                    if open == 0 {
                        self.jump(i + 1)?;
                        return Ok(&self.text[start + 1..i]);
                    }
                }
                Some(_) => {}
            }
            i += 1;
        }
    }
}
