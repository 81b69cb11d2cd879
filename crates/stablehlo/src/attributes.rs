//! Parses attributes. Dialect attributes (`#stablehlo.gather<...>`) are kept as text for their readers.

use super::{
    error::{Result, TextError},
    lexer::Token,
    parser::Parser,
    syntax::{Attribute, Dense, DenseValues, Type},
};
use std::borrow::Cow;

impl<'a> Parser<'a> {
    /// `{a = 1, b}`.
    pub fn attribute_dict(&mut self) -> Result<Vec<(&'a str, Attribute<'a>)>> {
        self.expect(b'{')?;
        self.list_until(b'}', |parser| {
            let name = match parser.lexer.peek() {
                Token::Word(name) | Token::Text(name) => name,
                _ => return Err(parser.unexpected("an attribute's name")),
            };
            parser.lexer.next()?;
            let value = if parser.accept(b'=')? { parser.attribute()? } else { Attribute::Unit };
            Ok((name, value))
        })
    }

    pub fn attribute(&mut self) -> Result<Attribute<'a>> {
        self.nested(Self::attribute_here)
    }

    fn attribute_here(&mut self) -> Result<Attribute<'a>> {
        let at = self.lexer.at();
        match self.lexer.peek() {
            Token::Number(number) => {
                self.lexer.next()?;
                Ok(Attribute::Number(number, self.number_type()?))
            }
            Token::Text(text) => {
                self.lexer.next()?;
                // A string may have a type, which carries no information.
                self.number_type()?;
                Ok(Attribute::Text(text))
            }
            Token::Symbol(name) => {
                self.lexer.next()?;
                Ok(Attribute::Symbol(name))
            }
            Token::Hash(name) => {
                let end = self.lexer.end();
                self.lexer.next()?;
                let open = self.lexer.peek() == Token::Mark(b'<') && self.lexer.at() == end;
                let body = if open { self.lexer.bracketed()? } else { "" };
                Ok(Attribute::Dialect(name, Cow::Borrowed(body)))
            }
            Token::Mark(b'[') => {
                self.lexer.next()?;
                Ok(Attribute::List(self.list_until(b']', Self::attribute)?))
            }
            Token::Mark(b'{') => Ok(Attribute::Dict(self.attribute_dict()?)),
            Token::Mark(b'(') => {
                let (operands, results) = self.function_type()?;
                Ok(Attribute::Function(operands, results))
            }
            Token::Word(word) => match word {
                "true" | "false" => {
                    self.lexer.next()?;
                    Ok(Attribute::Bool(word == "true"))
                }
                "unit" => {
                    self.lexer.next()?;
                    Ok(Attribute::Unit)
                }
                "array" => self.array(),
                "dense" => {
                    self.lexer.next()?;
                    Ok(Attribute::Dense(self.dense(at)?))
                }
                "dense_resource" => Err(TextError::new(
                    at,
                    "the values of this constant are not in the text; pass it to the function as an argument, or \
                     write the text with all its constants",
                )),
                _ => Ok(Attribute::Type(self.value_type()?)),
            },
            Token::Bang(_) => Ok(Attribute::Type(self.value_type()?)),
            _ => Err(self.unexpected("an attribute")),
        }
    }

    /// `: i64` after a number.
    fn number_type(&mut self) -> Result<Option<&'a str>> {
        if !self.accept(b':')? {
            return Ok(None);
        }
        match self.value_type()? {
            Type::Other(name) => Ok(Some(name)),
            Type::Tensor(_) => Err(self.unexpected("the type of a number")),
        }
    }

    /// `array<i64: 1, 2>`.
    fn array(&mut self) -> Result<Attribute<'a>> {
        self.lexer.next()?;
        self.expect(b'<')?;
        let Token::Word(element) = self.lexer.peek() else { return Err(self.unexpected("an element type")) };
        self.lexer.next()?;
        let items = if self.accept(b':')? {
            self.list_until(b'>', Self::literal)?
        } else {
            self.expect(b'>')?;
            Vec::new()
        };
        Ok(Attribute::Array(element, items))
    }

    /// A number or a truth value as text.
    fn literal(&mut self) -> Result<&'a str> {
        match self.lexer.peek() {
            Token::Number(text) | Token::Word(text @ ("true" | "false")) => {
                self.lexer.next()?;
                Ok(text)
            }
            Token::Mark(b'(') => {
                Err(TextError::new(self.lexer.at(), "complex numbers are not supported; use real ones"))
            }
            _ => Err(self.unexpected("a number")),
        }
    }

    /// The part after `dense`.
    fn dense(&mut self, at: usize) -> Result<Dense<'a>> {
        self.expect(b'<')?;
        let values = match self.lexer.peek() {
            Token::Text(text) => {
                self.lexer.next()?;
                DenseValues::Bytes(text)
            }
            Token::Mark(b'[') => {
                let mut values = Vec::new();
                self.dense_list(&mut values)?;
                DenseValues::List(values)
            }
            // An empty tensor has no values.
            Token::Mark(b'>') => DenseValues::List(Vec::new()),
            _ => DenseValues::Splat(self.literal()?),
        };
        self.expect(b'>')?;
        self.expect(b':')?;
        self.expect_word("tensor")?;
        Ok(Dense { at, values, ty: self.tensor_type()? })
    }

    fn dense_list(&mut self, values: &mut Vec<&'a str>) -> Result<()> {
        self.nested(|parser| {
            parser.expect(b'[')?;
            parser
                .list_until(b']', |parser| {
                    if parser.lexer.peek() == Token::Mark(b'[') {
                        parser.dense_list(values)
                    } else {
                        values.push(parser.literal()?);
                        Ok(())
                    }
                })
                .map(drop)
        })
    }
}
