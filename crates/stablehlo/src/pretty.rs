//! The short forms in which JAX prints operations, converted to the generic form.
//!
//! Most operations print as `name operands, key = value, ... : types`, which [`Parser::plain`] parses. The others have one
//! function each; those with a body are in `bodies`.

use super::{
    error::{Result, TextError},
    lexer::Token,
    parser::Parser,
    syntax::{Attribute, Operation, Type},
};
use std::borrow::Cow;

/// Short names of attributes: operation, short name, generic name.
const SHORT_NAMES: &[(&str, &str, &str)] = &[
    ("stablehlo.broadcast_in_dim", "dims", "broadcast_dimensions"),
    ("stablehlo.concatenate", "dim", "dimension"),
    ("stablehlo.dynamic_slice", "sizes", "slice_sizes"),
    ("stablehlo.iota", "dim", "iota_dimension"),
    ("stablehlo.pad", "high", "edge_padding_high"),
    ("stablehlo.pad", "interior", "interior_padding"),
    ("stablehlo.pad", "low", "edge_padding_low"),
    ("stablehlo.reverse", "dims", "dimensions"),
    ("stablehlo.rng_bit_generator", "algorithm", "rng_algorithm"),
    ("stablehlo.transpose", "dims", "permutation"),
];

impl<'a> Parser<'a> {
    /// The part after the name in the short form.
    pub fn pretty(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        match operation.name {
            "module" => {
                operation.name = "builtin.module";
                self.module(operation)
            }
            "func.func" => self.function(operation),
            "call" | "func.call" => {
                operation.name = "func.call";
                self.call(operation, "callee")
            }
            "stablehlo.custom_call" => self.call(operation, "call_target_name"),
            "return" | "func.return" | "stablehlo.return" => {
                operation.name =
                    if operation.name == "stablehlo.return" { operation.name } else { "func.return" };
                self.terminator(operation)
            }
            "stablehlo.constant" => self.constant(operation),
            "stablehlo.compare" => self.compare(operation),
            "stablehlo.select" => self.select(operation),
            "stablehlo.slice" => self.slice(operation),
            "stablehlo.reduce" => self.reduce(operation),
            "stablehlo.dot_general" => self.dot_general(operation),
            "stablehlo.convolution" => self.convolution(operation),
            "stablehlo.while" => self.while_loop(operation),
            "sdy.mesh" => self.mesh(operation),
            "sdy.sharding_constraint" => self.sharding_constraint(operation),
            name if name.contains('.') => self.plain(operation),
            _ => Err(TextError::new(
                operation.at,
                format!("`{}` is not an operation of StableHLO", operation.name),
            )),
        }
    }

    pub(super) fn attribute_dict_if_any(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        if self.accept_word("attributes")? || self.lexer.peek() == Token::Mark(b'{') {
            let attributes = self.attribute_dict()?;
            operation.attributes.extend(attributes);
        }
        Ok(())
    }

    /// `@f(%0, %1) {attributes} : (types) -> types`.
    fn call(&mut self, operation: &mut Operation<'a>, key: &'static str) -> Result<()> {
        let Token::Symbol(name) = self.lexer.peek() else { return Err(self.unexpected("a function's name")) };
        self.lexer.next()?;
        let callee = if key == "callee" { Attribute::Symbol(name) } else { Attribute::Text(name) };
        operation.attributes.push((key, callee));
        self.expect(b'(')?;
        operation.operands = self.list_until(b')', Self::value_use)?;
        self.attribute_dict_if_any(operation)?;
        self.expect(b':')?;
        (operation.operand_types, operation.result_types) = self.function_type()?;
        self.check_operands(operation)
    }

    /// `return %0, %1 : type, type`.
    fn terminator(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        if let Token::Value(_) = self.lexer.peek() {
            self.operands(operation)?;
            self.expect(b':')?;
            operation.operand_types.push(self.value_type()?);
            while self.accept(b',')? {
                operation.operand_types.push(self.value_type()?);
            }
        }
        self.check_operands(operation)
    }

    /// Values separated by commas, up to a comma that no value follows. Returns whether more of the operation may follow.
    fn operands(&mut self, operation: &mut Operation<'a>) -> Result<bool> {
        while let Token::Value(_) = self.lexer.peek() {
            operation.operands.push(self.value_use()?);
            if !self.accept(b',')? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The types at the end: `(types) -> types`, one type for all, or one type per operand and result.
    pub(super) fn types(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.expect(b':')?;
        if self.lexer.peek() == Token::Mark(b'(') {
            (operation.operand_types, operation.result_types) = self.function_type()?;
            return self.check_operands(operation);
        }
        let mut types = vec![self.value_type()?];
        while self.accept(b',')? {
            types.push(self.value_type()?);
        }
        let operands = operation.operands.len();
        if self.lexer.peek() == Token::Arrow {
            self.lexer.next()?;
            operation.operand_types = types;
            operation.result_types = self.result_types()?;
            // One type may stand for all operands.
            if operation.operand_types.len() == 1 && operands > 1 {
                operation.operand_types = vec![operation.operand_types[0].clone(); operands];
            }
        } else if types.len() == 1 {
            operation.operand_types = vec![types[0].clone(); operands];
            operation.result_types = types;
        } else {
            operation.operand_types = types.clone();
            operation.result_types = types;
        }
        self.check_operands(operation)
    }

    /// `name %0, %1, key = value, WORD {attributes} : types`; the operands may be in parentheses.
    fn plain(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        let parenthesised = self.accept(b'(')?;
        let mut more = self.operands(operation)?;
        while more {
            let Token::Word(short) = self.lexer.peek() else { break };
            self.lexer.next()?;
            if !self.accept(b'=')? {
                return Err(self.unexpected(&format!("`=` after `{short}`")));
            }
            let value = match self.lexer.peek() {
                // An enumeration's value has no key.
                Token::Word(word) if !matches!(word, "true" | "false" | "array" | "dense") => {
                    self.lexer.next()?;
                    Attribute::Dialect("stablehlo", Cow::Borrowed(word))
                }
                // A colon after a number begins the types here.
                Token::Number(number) => {
                    self.lexer.next()?;
                    Attribute::Number(number, None)
                }
                _ => self.attribute()?,
            };
            let long = SHORT_NAMES.iter().find(|(name, s, _)| *name == operation.name && *s == short);
            operation.attributes.push((long.map_or(short, |entry| entry.2), value));
            more = self.accept(b',')?;
        }
        if parenthesised {
            self.expect(b')')?;
        }
        self.attribute_dict_if_any(operation)?;
        self.types(operation)
    }

    /// `dense<0> : tensor<i32>`.
    fn constant(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.attribute_dict_if_any(operation)?;
        let at = self.lexer.at();
        let Attribute::Dense(dense) = self.attribute()? else {
            return Err(TextError::new(at, "expected the constant's values, `dense<...>`"));
        };
        operation.result_types.push(Type::Tensor(dense.ty));
        operation.attributes.push(("value", Attribute::Dense(dense)));
        Ok(())
    }

    /// `GT, %0, %1, FLOAT : types`.
    fn compare(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        let Token::Word(direction) = self.lexer.peek() else { return Err(self.unexpected("a comparison")) };
        self.lexer.next()?;
        self.expect(b',')?;
        let enumeration =
            |kind: &str, word: &str| Attribute::Dialect("stablehlo", format!("{kind} {word}").into());
        operation.attributes.push(("comparison_direction", enumeration("comparison_direction", direction)));
        if self.operands(operation)?
            && let Token::Word(kind) = self.lexer.peek()
        {
            self.lexer.next()?;
            operation.attributes.push(("compare_type", enumeration("comparison_type", kind)));
        }
        self.types(operation)
    }

    /// `%0, %1, %2 : type of the condition, type of the rest`.
    fn select(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.operands(operation)?;
        self.attribute_dict_if_any(operation)?;
        self.types(operation).or_else(|fault| {
            // Two types for three operands: the second is that of both branches and the result.
            let [condition, branch] = &operation.operand_types[..] else { return Err(fault) };
            if operation.operands.len() != 3 {
                return Err(fault);
            }
            operation.result_types = vec![branch.clone()];
            operation.operand_types = vec![condition.clone(), branch.clone(), branch.clone()];
            Ok(())
        })
    }

    /// `%0 [0:8, 0:64:2] : types`.
    fn slice(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        operation.operands.push(self.value_use()?);
        self.expect(b'[')?;
        let [mut starts, mut limits, mut strides] = [const { Vec::new() }; 3];
        self.list_until(b']', |parser| {
            starts.push(parser.whole_number()?);
            parser.expect(b':')?;
            limits.push(parser.whole_number()?);
            strides.push(if parser.accept(b':')? { parser.whole_number()? } else { "1" });
            Ok(())
        })?;
        for (key, values) in [("start_indices", starts), ("limit_indices", limits), ("strides", strides)] {
            operation.attributes.push((key, Attribute::Array("i64", values)));
        }
        self.types(operation)
    }

    fn whole_number(&mut self) -> Result<&'a str> {
        let Token::Number(number) = self.lexer.peek() else { return Err(self.unexpected("a number")) };
        self.lexer.next()?;
        Ok(number)
    }

    /// `%0, %1, batching_dims = [0] x [0], contracting_dims = [1] x [0], precision = [...] : types`.
    fn dot_general(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        let mut numbers: Vec<String> = Vec::new();
        let mut more = self.operands(operation)?;
        while more {
            let Token::Word(key) = self.lexer.peek() else { break };
            self.lexer.next()?;
            self.expect(b'=')?;
            match key {
                "batching_dims" | "contracting_dims" => {
                    let kind = if key == "batching_dims" { "batching" } else { "contracting" };
                    let lhs = self.numbers()?;
                    self.expect_word("x")?;
                    let rhs = self.numbers()?;
                    numbers.push(format!("lhs_{kind}_dimensions = {lhs}, rhs_{kind}_dimensions = {rhs}"));
                }
                "precision" => {
                    self.numbers()?;
                }
                "algorithm" => {
                    self.lexer.bracketed()?;
                }
                _ => {
                    return Err(TextError::new(
                        self.lexer.at(),
                        format!("`{key}` is not an attribute of dot_general"),
                    ));
                }
            }
            more = self.accept(b',')?;
        }
        let value = Attribute::Dialect("stablehlo.dot", numbers.join(", ").into());
        operation.attributes.push(("dot_dimension_numbers", value));
        self.attribute_dict_if_any(operation)?;
        self.types(operation)
    }

    /// A bracketed list as text.
    fn numbers(&mut self) -> Result<String> {
        if self.lexer.peek() != Token::Mark(b'[') {
            return Err(self.unexpected("`[`"));
        }
        Ok(format!("[{}]", self.lexer.bracketed()?))
    }

    /// `(%0, %1) dim_numbers = [...]x[...]->[...], window = {...} {attributes} : types`.
    fn convolution(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        self.expect(b'(')?;
        operation.operands = self.list_until(b')', Self::value_use)?;
        self.expect_word("dim_numbers")?;
        self.expect(b'=')?;
        let input = self.numbers()?;
        self.expect_word("x")?;
        let kernel = self.numbers()?;
        self.expect_arrow()?;
        let output = self.numbers()?;
        let value = Attribute::Dialect("stablehlo.conv", format!("{input}x{kernel}->{output}").into());
        operation.attributes.push(("dimension_numbers", value));
        self.expect(b',')?;
        self.expect_word("window")?;
        self.expect(b'=')?;
        for (key, value) in self.attribute_dict()? {
            let long = match key {
                "stride" => "window_strides",
                "pad" => "padding",
                "lhs_dilate" => "lhs_dilation",
                "rhs_dilate" => "rhs_dilation",
                "reverse" => "window_reversal",
                _ => {
                    return Err(TextError::new(
                        operation.at,
                        format!("`{key}` is not an attribute of a convolution's window"),
                    ));
                }
            };
            operation.attributes.push((long, value));
        }
        self.attribute_dict_if_any(operation)?;
        self.types(operation)
    }

    /// `@mesh = <["x"=2]>`: a sharding by the user. It is ignored, since planning chooses the shardings.
    fn mesh(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        let Token::Symbol(name) = self.lexer.peek() else { return Err(self.unexpected("a mesh's name")) };
        self.lexer.next()?;
        self.expect(b'=')?;
        if self.lexer.peek() != Token::Mark(b'<') {
            return Err(self.unexpected("`<`"));
        }
        let mesh = self.lexer.bracketed()?;
        operation.attributes.push(("sym_name", Attribute::Text(name)));
        operation.attributes.push(("mesh", Attribute::Dialect("sdy.mesh", Cow::Borrowed(mesh))));
        self.attribute_dict_if_any(operation)
    }

    /// `%0 <@mesh, [{"x"}]> : type`.
    fn sharding_constraint(&mut self, operation: &mut Operation<'a>) -> Result<()> {
        operation.operands.push(self.value_use()?);
        if self.lexer.peek() != Token::Mark(b'<') {
            return Err(self.unexpected("`<`"));
        }
        let sharding = self.lexer.bracketed()?;
        operation.attributes.push(("sharding", Attribute::Dialect("sdy.sharding", Cow::Borrowed(sharding))));
        self.types(operation)
    }
}
