//! The parser of MLIR's generic form: operations, regions, types. `attributes.rs` parses attributes, `pretty.rs` the short
//! forms that JAX prints, which become the generic form.
//!
//! Recursive descent in one pass. Nesting is limited, so that no text can exhaust the stack.

use super::{
    error::{Result, TextError},
    lexer::{Lexer, Token},
    syntax::{Alias, Argument, Block, Operation, Program, TensorTy, Type, Use},
};

/// The most levels of regions and attributes. JAX's programs stay below ten.
const MOST_NESTED: usize = 48;

/// The state of the parser.
pub(super) struct Parser<'a> {
    pub lexer: Lexer<'a>,
    depth: usize,
}

/// Parses a whole text.
pub(super) fn parse(text: &str) -> Result<Program<'_>> {
    let mut parser = Parser { lexer: Lexer::new(text)?, depth: 0 };
    let mut aliases = Vec::new();
    let mut module = None;
    loop {
        match parser.lexer.peek() {
            Token::End => break,
            Token::Hash(name) => {
                parser.lexer.next()?;
                parser.expect(b'=')?;
                aliases.push(parser.alias(name)?);
            }
            Token::Word("module") | Token::Text("builtin.module") if module.is_none() => {
                module = Some(parser.operation()?);
            }
            _ => {
                return Err(
                    parser.unexpected("a module; is this StableHLO text as `lowered.as_text()` gives it?")
                );
            }
        }
    }
    aliases.sort_unstable();
    let missing = || {
        TextError::new(0, "there is no module in this file; write it with `jax.jit(f).lower(...).as_text()`")
    };
    Ok(Program { module: module.ok_or_else(missing)?, aliases })
}

impl<'a> Parser<'a> {
    /// An error that states what was expected instead of the current token.
    pub fn unexpected(&self, expected: &str) -> TextError {
        let found = match self.lexer.peek() {
            Token::End => "the text ends here; is the file complete? Expected".to_string(),
            _ => {
                let word = &self.lexer.text()[self.lexer.at()..self.lexer.end()];
                let short: String = word.chars().take(40).collect();
                format!("found `{}`, expected", short.escape_debug())
            }
        };
        TextError::new(self.lexer.at(), format!("{found} {expected}"))
    }

    /// Runs `read` one level deeper.
    pub fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= MOST_NESTED {
            let reason = format!("nested more than {MOST_NESTED} levels deep, unlike any program of JAX");
            return Err(TextError::new(self.lexer.at(), reason));
        }
        self.depth += 1;
        let result = read(self);
        self.depth -= 1;
        result
    }

    pub fn accept(&mut self, mark: u8) -> Result<bool> {
        let found = self.lexer.peek() == Token::Mark(mark);
        if found {
            self.lexer.next()?;
        }
        Ok(found)
    }

    pub fn expect(&mut self, mark: u8) -> Result<()> {
        if self.accept(mark)? { Ok(()) } else { Err(self.unexpected(&format!("`{}`", mark as char))) }
    }

    pub fn accept_word(&mut self, word: &str) -> Result<bool> {
        let found = self.lexer.peek() == Token::Word(word);
        if found {
            self.lexer.next()?;
        }
        Ok(found)
    }

    pub fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.accept_word(word)? { Ok(()) } else { Err(self.unexpected(&format!("`{word}`"))) }
    }

    pub fn expect_arrow(&mut self) -> Result<()> {
        if self.lexer.peek() != Token::Arrow {
            return Err(self.unexpected("`->`"));
        }
        self.lexer.next().map(drop)
    }

    /// Items up to the closing mark, separated by commas. The opening mark is already read.
    pub fn list_until<T>(
        &mut self,
        close: u8,
        mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut items = Vec::new();
        if self.accept(close)? {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if !self.accept(b',')? {
                self.expect(close)?;
                return Ok(items);
            }
        }
    }

    /// `%x` or `%x#1`.
    pub fn value_use(&mut self) -> Result<Use<'a>> {
        let at = self.lexer.at();
        let Token::Value(name) = self.lexer.peek() else {
            return Err(self.unexpected("a value such as `%0`"));
        };
        let end = self.lexer.end();
        self.lexer.next()?;
        let mut index = 0;
        if let Token::Hash(number) = self.lexer.peek()
            && self.lexer.at() == end
        {
            index = number.parse().map_err(|_| self.unexpected("the number of a result"))?;
            self.lexer.next()?;
        }
        Ok(Use { at, name, index })
    }

    /// An operation, in generic or short form.
    pub fn operation(&mut self) -> Result<Operation<'a>> {
        let mut operation = Operation {
            at: self.lexer.at(),
            name: "",
            results: Vec::new(),
            operands: Vec::new(),
            attributes: Vec::new(),
            regions: Vec::new(),
            operand_types: Vec::new(),
            result_types: Vec::new(),
            location: None,
        };
        if let Token::Value(_) = self.lexer.peek() {
            operation.results = self.result_names()?;
            self.expect(b'=')?;
        }
        operation.at = self.lexer.at();
        match self.lexer.peek() {
            Token::Text(name) => {
                self.lexer.next()?;
                operation.name = name;
                self.generic(&mut operation)?;
            }
            Token::Word(name) => {
                self.lexer.next()?;
                operation.name = name;
                self.pretty(&mut operation)?;
            }
            _ => return Err(self.unexpected("an operation")),
        }
        operation.location = self.location()?;
        self.check_results(&operation)?;
        Ok(operation)
    }

    fn result_names(&mut self) -> Result<Vec<(&'a str, u32)>> {
        let mut names = Vec::new();
        loop {
            let Token::Value(name) = self.lexer.peek() else {
                return Err(self.unexpected("a result's name"));
            };
            self.lexer.next()?;
            let mut count = 1;
            if self.accept(b':')? {
                let Token::Number(number) = self.lexer.peek() else {
                    return Err(self.unexpected("the number of results"));
                };
                count = number.parse().map_err(|_| self.unexpected("the number of results"))?;
                self.lexer.next()?;
            }
            names.push((name, count));
            if !self.accept(b',')? {
                return Ok(names);
            }
        }
    }

    fn check_results(&self, operation: &Operation<'a>) -> Result<()> {
        let named: u64 = operation.results.iter().map(|(_, count)| u64::from(*count)).sum();
        if named != 0 && named != operation.result_types.len() as u64 {
            let made = operation.result_types.len();
            let reason = format!("`{}` has {made} results, but {named} are named", operation.name);
            return Err(TextError::new(operation.at, reason));
        }
        Ok(())
    }

    /// The part after the name in the generic form.
    fn generic(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.expect(b'(')?;
        operation.operands = self.list_until(b')', Self::value_use)?;
        if self.accept(b'<')? {
            operation.attributes = self.attribute_dict()?;
            self.expect(b'>')?;
        }
        if self.accept(b'(')? {
            operation.regions = self.list_until(b')', Self::region)?;
        }
        if self.lexer.peek() == Token::Mark(b'{') {
            let more = self.attribute_dict()?;
            operation.attributes.extend(more);
        }
        self.expect(b':')?;
        (operation.operand_types, operation.result_types) = self.function_type()?;
        self.check_operands(operation)
    }

    pub fn check_operands(&self, operation: &Operation<'a>) -> Result<()> {
        let (values, types) = (operation.operands.len(), operation.operand_types.len());
        if values != types {
            let reason = format!("`{}` has {values} operands, but {types} types for them", operation.name);
            return Err(TextError::new(operation.at, reason));
        }
        Ok(())
    }

    /// `{ ... }`: a region of one block.
    pub fn region(&mut self) -> Result<Block<'a>> {
        self.nested(|parser| {
            parser.expect(b'{')?;
            let mut block = Block::default();
            if let Token::Label(_) = parser.lexer.peek() {
                parser.lexer.next()?;
                if parser.accept(b'(')? {
                    block.arguments = parser.list_until(b')', Self::argument)?;
                }
                parser.expect(b':')?;
            }
            parser.operations(&mut block)?;
            Ok(block)
        })
    }

    /// Operations up to the closing brace.
    pub fn operations(&mut self, block: &mut Block<'a>) -> Result<()> {
        while !self.accept(b'}')? {
            if let Token::Label(_) = self.lexer.peek() {
                return Err(TextError::new(self.lexer.at(), "regions of several blocks are not StableHLO"));
            }
            let operation = self.operation()?;
            block.operations.push(operation);
        }
        Ok(())
    }

    /// `%x: tensor<f32>`.
    pub fn argument(&mut self) -> Result<Argument<'a>> {
        let Token::Value(name) = self.lexer.peek() else {
            return Err(self.unexpected("an argument"));
        };
        self.lexer.next()?;
        self.expect(b':')?;
        let ty = self.value_type()?;
        Ok(Argument { name, ty, location: self.location()? })
    }

    /// `(types) -> types`, or one list of types for operands and results.
    pub fn function_type(&mut self) -> Result<(Vec<Type<'a>>, Vec<Type<'a>>)> {
        self.expect(b'(')?;
        let operands = self.list_until(b')', Self::value_type)?;
        self.expect_arrow()?;
        Ok((operands, self.result_types()?))
    }

    /// One type, or several in parentheses.
    pub fn result_types(&mut self) -> Result<Vec<Type<'a>>> {
        if self.accept(b'(')? {
            self.list_until(b')', Self::value_type)
        } else {
            Ok(vec![self.value_type()?])
        }
    }

    pub fn value_type(&mut self) -> Result<Type<'a>> {
        let start = self.lexer.at();
        match self.lexer.next()? {
            Token::Word("tensor") => Ok(Type::Tensor(self.tensor_type()?)),
            Token::Word(_) | Token::Bang(_) => {
                if self.lexer.peek() == Token::Mark(b'<') && self.lexer.at() == self.lexer.before() {
                    self.lexer.bracketed()?;
                }
                Ok(Type::Other(&self.lexer.text()[start..self.lexer.before()]))
            }
            _ => Err(TextError::new(start, "expected a type such as `tensor<4x8xf32>`")),
        }
    }

    /// The part after `tensor`; checks the form of the sizes.
    pub fn tensor_type(&mut self) -> Result<TensorTy<'a>> {
        let at = self.lexer.at();
        if self.lexer.peek() != Token::Mark(b'<') {
            return Err(self.unexpected("`<`"));
        }
        let inside = self.lexer.bracketed()?;
        // Without a letter there is no element type, which is refused below.
        let split = inside.bytes().position(|b| b.is_ascii_alphabetic() && b != b'x').unwrap_or(inside.len());
        let (sizes, element) = inside.split_at(split);
        let dims = sizes.strip_suffix('x');
        let numbers =
            |text: &str| text.split('x').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        if sizes.contains('?') {
            let reason = format!(
                "tensor<{inside}> has a size that is not known; lower the function with concrete shapes"
            );
            return Err(TextError::new(at, reason));
        }
        let plain = !element.is_empty() && element.bytes().all(|b| b.is_ascii_alphanumeric());
        if !plain || !(sizes.is_empty() || dims.is_some_and(numbers)) {
            let short: String = inside.chars().take(60).collect();
            return Err(TextError::new(
                at,
                format!("tensor<{short}> is not a tensor type such as `tensor<4x8xf32>`"),
            ));
        }
        Ok(TensorTy { element, sizes })
    }

    /// `loc(...)`, if present.
    pub fn location(&mut self) -> Result<Option<&'a str>> {
        if !self.accept_word("loc")? {
            return Ok(None);
        }
        if self.lexer.peek() != Token::Mark(b'(') {
            return Err(self.unexpected("`(`"));
        }
        self.lexer.bracketed().map(Some)
    }

    /// The text of an alias.
    fn alias(&mut self, name: &'a str) -> Result<Alias<'a>> {
        let start = self.lexer.at();
        if let Some(meaning) = self.location()? {
            return Ok(Alias { name, location: true, meaning });
        }
        self.attribute()?;
        let meaning = &self.lexer.text()[start..self.lexer.before()];
        Ok(Alias { name, location: false, meaning })
    }
}
