//! The short forms of operations with a body: modules, functions, reductions and loops.

use super::{
    error::{Result, TextError},
    lexer::Token,
    parser::Parser,
    syntax::{Argument, Attribute, Block, Operation, TensorTy, Type, Use},
};

impl<'a> Parser<'a> {
    /// `module @name attributes {...} { ... }`.
    pub(super) fn module(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        if let Token::Symbol(name) = self.lexer.peek() {
            self.lexer.next()?;
            operation.attributes.push(("sym_name", Attribute::Text(name)));
        }
        self.attributes_if_any(operation)?;
        operation.regions.push(self.region()?);
        Ok(())
    }

    /// `func.func public @main(%arg0: type {attributes}, ...) -> (type {attributes}, ...) { ... }`.
    pub(super) fn function(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        if let Token::Word(visibility @ ("public" | "private")) = self.lexer.peek() {
            self.lexer.next()?;
            operation.attributes.push(("sym_visibility", Attribute::Text(visibility)));
        }
        let Token::Symbol(name) = self.lexer.peek() else { return Err(self.unexpected("a function's name")) };
        self.lexer.next()?;
        operation.attributes.push(("sym_name", Attribute::Text(name)));
        self.expect(b'(')?;
        let mut of_arguments = Vec::new();
        let arguments = self.list_until(b')', |parser| {
            let Token::Value(name) = parser.lexer.peek() else {
                return Err(parser.unexpected("an argument; functions without a body cannot be planned"));
            };
            parser.lexer.next()?;
            parser.expect(b':')?;
            let ty = parser.value_type()?;
            of_arguments.push(parser.dict_or_empty()?);
            Ok(Argument { name, ty, location: parser.location()? })
        })?;
        let mut of_results = Vec::new();
        let mut results = Vec::new();
        if self.lexer.peek() == Token::Arrow {
            self.lexer.next()?;
            if self.accept(b'(')? {
                results = self.list_until(b')', |parser| {
                    let ty = parser.value_type()?;
                    of_results.push(parser.dict_or_empty()?);
                    Ok(ty)
                })?;
            } else {
                results.push(self.value_type()?);
                of_results.push(Attribute::Dict(Vec::new()));
            }
        }
        self.attributes_if_any(operation)?;
        let types = arguments.iter().map(|a| a.ty.clone()).collect();
        operation.attributes.push(("function_type", Attribute::Function(types, results)));
        operation.attributes.push(("arg_attrs", Attribute::List(of_arguments)));
        operation.attributes.push(("res_attrs", Attribute::List(of_results)));
        let mut body = self.region()?;
        body.arguments = arguments;
        operation.regions.push(body);
        Ok(())
    }

    /// `attributes {...}`, which is written if a body follows that a bare `{` would begin.
    fn attributes_if_any(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        if self.accept_word("attributes")? {
            let attributes = self.attribute_dict()?;
            operation.attributes.extend(attributes);
        }
        Ok(())
    }

    fn dict_or_empty(&mut self) -> Result<Attribute<'a>> {
        let open = self.lexer.peek() == Token::Mark(b'{');
        Ok(Attribute::Dict(if open { self.attribute_dict()? } else { Vec::new() }))
    }

    /// `(%0 init: %1), (%2 init: %3) applies op across dimensions = [1] : types`, or with a body after the types.
    pub(super) fn reduce(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        let mut inits = Vec::new();
        loop {
            self.expect(b'(')?;
            operation.operands.push(self.value_use()?);
            self.expect_word("init")?;
            self.expect(b':')?;
            inits.push(self.value_use()?);
            self.expect(b')')?;
            if !self.accept(b',')? {
                break;
            }
        }
        operation.operands.append(&mut inits);
        let applied = if self.accept_word("applies")? {
            let Token::Word(name) = self.lexer.peek() else { return Err(self.unexpected("an operation")) };
            self.lexer.next()?;
            Some(name)
        } else {
            None
        };
        self.expect_word("across")?;
        self.expect_word("dimensions")?;
        self.expect(b'=')?;
        operation.attributes.push(("dimensions", self.attribute()?));
        self.attribute_dict_if_any(operation)?;
        self.types(operation)?;
        let body = match applied {
            Some(name) => self.applied(operation, name)?,
            None => self.reducer(operation.operands.len() / 2)?,
        };
        operation.regions.push(body);
        Ok(())
    }

    /// A body that applies one operation to two elements.
    fn applied(&self, operation: &Operation<'a>, name: &'a str) -> Result<Block<'a>> {
        let element = match &operation.result_types[..] {
            [Type::Tensor(ty)] => Type::Tensor(TensorTy { sizes: "", ..*ty }),
            _ => {
                return Err(TextError::new(
                    operation.at,
                    "a reduction by a single operation must have one result",
                ));
            }
        };
        let at = operation.at;
        let value = |name| Use { at, name, index: 0 };
        let operation = |name, operands: &[&'a str], results: &[&'a str]| Operation {
            at,
            name,
            results: results.iter().map(|&r| (r, 1)).collect(),
            operands: operands.iter().map(|&o| value(o)).collect(),
            attributes: Vec::new(),
            regions: Vec::new(),
            operand_types: vec![element.clone(); operands.len()],
            result_types: vec![element.clone(); results.len()],
            location: None,
        };
        let argument = |name| Argument { name, ty: element.clone(), location: None };
        Ok(Block {
            arguments: vec![argument("a"), argument("b")],
            operations: vec![
                operation(name, &["a", "b"], &["r"]),
                operation("stablehlo.return", &["r"], &[]),
            ],
        })
    }

    /// `reducer(%a: type, %b: type) (%c: type, %d: type) { ... }`. The text pairs the two arguments of each operand; the
    /// generic form has all first arguments before all second ones.
    fn reducer(&mut self, operands: usize) -> Result<Block<'a>> {
        self.expect_word("reducer")?;
        let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
        for _ in 0..operands {
            self.expect(b'(')?;
            firsts.push(self.argument()?);
            self.expect(b',')?;
            seconds.push(self.argument()?);
            self.expect(b')')?;
        }
        let mut body = self.region()?;
        firsts.append(&mut seconds);
        body.arguments = firsts;
        Ok(body)
    }

    /// `(%a = %0, %b = %1) : types cond { ... } do { ... }`.
    pub(super) fn while_loop(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.expect(b'(')?;
        let mut names = Vec::new();
        operation.operands = self.list_until(b')', |parser| {
            let Token::Value(name) = parser.lexer.peek() else {
                return Err(parser.unexpected("a loop's value"));
            };
            parser.lexer.next()?;
            parser.expect(b'=')?;
            names.push(name);
            parser.value_use()
        })?;
        if !names.is_empty() {
            self.expect(b':')?;
            operation.operand_types.push(self.value_type()?);
            while self.accept(b',')? {
                operation.operand_types.push(self.value_type()?);
            }
        }
        self.check_operands(operation)?;
        operation.result_types = operation.operand_types.clone();
        self.attributes_if_any(operation)?;
        let types = &operation.operand_types;
        let arguments: Vec<_> = names
            .iter()
            .zip(types)
            .map(|(&name, ty)| Argument { name, ty: ty.clone(), location: None })
            .collect();
        for word in ["cond", "do"] {
            self.expect_word(word)?;
            let mut body = self.region()?;
            body.arguments = arguments.clone();
            operation.regions.push(body);
        }
        Ok(())
    }
}
