//! Prints programs in MLIR's generic form. Printed programs parse to the same operations.

use super::syntax::{Alias, Attribute, Block, DenseValues, Operation, Program, Type};
use std::fmt::{self, Write};

impl fmt::Display for Program<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Alias { name, location, meaning } in &self.aliases {
            if *location {
                writeln!(f, "#{name} = loc({meaning})")?
            } else {
                writeln!(f, "#{name} = {meaning}")?
            }
        }
        operation(f, &self.module, 0)?;
        f.write_char('\n')
    }
}

fn separated<T>(
    f: &mut fmt::Formatter<'_>,
    items: impl IntoIterator<Item = T>,
    mut item: impl FnMut(&mut fmt::Formatter<'_>, T) -> fmt::Result,
) -> fmt::Result {
    for (i, x) in items.into_iter().enumerate() {
        if i > 0 {
            f.write_str(", ")?;
        }
        item(f, x)?;
    }
    Ok(())
}

fn operation(f: &mut fmt::Formatter<'_>, op: &Operation<'_>, depth: usize) -> fmt::Result {
    write!(f, "{:1$}", "", depth * 2)?;
    if !op.results.is_empty() {
        separated(f, &op.results, |f, (name, count)| {
            if *count == 1 { write!(f, "%{name}") } else { write!(f, "%{name}:{count}") }
        })?;
        f.write_str(" = ")?;
    }
    write!(f, "\"{}\"(", op.name)?;
    separated(f, &op.operands, |f, value| match value.index {
        0 => write!(f, "%{}", value.name),
        index => write!(f, "%{}#{index}", value.name),
    })?;
    f.write_str(")")?;
    if !op.attributes.is_empty() {
        f.write_str(" <")?;
        dict(f, &op.attributes)?;
        f.write_str(">")?;
    }
    if !op.regions.is_empty() {
        f.write_str(" (")?;
        separated(f, &op.regions, |f, block| region(f, block, depth))?;
        f.write_str(")")?;
    }
    f.write_str(" : ")?;
    function(f, &op.operand_types, &op.result_types)?;
    location(f, op.location)
}

fn location(f: &mut fmt::Formatter<'_>, location: Option<&str>) -> fmt::Result {
    location.map_or(Ok(()), |text| write!(f, " loc({text})"))
}

fn region(f: &mut fmt::Formatter<'_>, block: &Block<'_>, depth: usize) -> fmt::Result {
    f.write_str("{\n")?;
    if !block.arguments.is_empty() {
        write!(f, "{:1$}^bb0(", "", depth * 2)?;
        separated(f, &block.arguments, |f, argument| {
            write!(f, "%{}: ", argument.name)?;
            ty(f, &argument.ty)?;
            location(f, argument.location)
        })?;
        f.write_str("):\n")?;
    }
    for op in &block.operations {
        operation(f, op, depth + 1)?;
        f.write_char('\n')?;
    }
    write!(f, "{:1$}}}", "", depth * 2)
}

fn dict(f: &mut fmt::Formatter<'_>, attributes: &[(&str, Attribute<'_>)]) -> fmt::Result {
    f.write_str("{")?;
    separated(f, attributes, |f, (name, value)| {
        if plain(name) {
            f.write_str(name)?;
        } else {
            write!(f, "\"{name}\"")?;
        }
        if *value == Attribute::Unit {
            return Ok(());
        }
        f.write_str(" = ")?;
        attribute(f, value)
    })?;
    f.write_str("}")
}

/// Whether a name needs no quotes.
fn plain(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'$'))
}

fn attribute(f: &mut fmt::Formatter<'_>, value: &Attribute<'_>) -> fmt::Result {
    match value {
        Attribute::Unit => f.write_str("unit"),
        Attribute::Bool(b) => write!(f, "{b}"),
        Attribute::Number(number, None) => f.write_str(number),
        Attribute::Number(number, Some(ty)) => write!(f, "{number} : {ty}"),
        Attribute::Text(text) => write!(f, "\"{text}\""),
        Attribute::Symbol(name) if plain(name) => write!(f, "@{name}"),
        Attribute::Symbol(name) => write!(f, "@\"{name}\""),
        Attribute::Array(element, items) if items.is_empty() => write!(f, "array<{element}>"),
        Attribute::Array(element, items) => {
            write!(f, "array<{element}: ")?;
            separated(f, items, |f, item| f.write_str(item))?;
            f.write_str(">")
        }
        Attribute::List(items) => {
            f.write_str("[")?;
            separated(f, items, attribute)?;
            f.write_str("]")
        }
        Attribute::Dict(items) => dict(f, items),
        Attribute::Dense(dense) => {
            match &dense.values {
                DenseValues::Splat(value) => write!(f, "dense<{value}>")?,
                DenseValues::Bytes(bytes) => write!(f, "dense<\"{bytes}\">")?,
                DenseValues::List(values) => {
                    // The nesting of lists repeats what the type states.
                    f.write_str("dense<[")?;
                    separated(f, values, |f, value| f.write_str(value))?;
                    f.write_str("]>")?;
                }
            }
            f.write_str(" : ")?;
            ty(f, &Type::Tensor(dense.ty))
        }
        Attribute::Dialect(name, body) if body.is_empty() => write!(f, "#{name}"),
        Attribute::Dialect(name, body) => write!(f, "#{name}<{body}>"),
        Attribute::Type(t) => ty(f, t),
        Attribute::Function(operands, results) => function(f, operands, results),
    }
}

fn function(f: &mut fmt::Formatter<'_>, operands: &[Type<'_>], results: &[Type<'_>]) -> fmt::Result {
    f.write_str("(")?;
    separated(f, operands, ty)?;
    f.write_str(") -> (")?;
    separated(f, results, ty)?;
    f.write_str(")")
}

fn ty(f: &mut fmt::Formatter<'_>, ty: &Type<'_>) -> fmt::Result {
    match ty {
        Type::Tensor(t) => write!(f, "tensor<{}{}>", t.sizes, t.element),
        Type::Other(text) => f.write_str(text),
    }
}
