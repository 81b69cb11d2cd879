//! The syntax tree of a StableHLO program: operations with operands, attributes, regions and types, in MLIR's generic
//! form. The module and its functions are operations too. No meaning is attached to operations here.

use std::borrow::Cow;

/// A tensor type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TensorTy<'a> {
    /// `f32`, `i1`, `ui32`.
    pub element: &'a str,
    /// The text of the sizes, `4x8x` or empty. Sizes are parsed on use, since few types are used more than once.
    pub sizes: &'a str,
}

/// The type of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Type<'a> {
    Tensor(TensorTy<'a>),
    /// Any other type, as text.
    Other(&'a str),
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Attribute<'a> {
    /// An attribute without a value.
    Unit,
    Bool(bool),
    /// A number as text, with its type if given.
    Number(&'a str, Option<&'a str>),
    /// A string as text, without its quotes.
    Text(&'a str),
    Symbol(&'a str),
    /// `array<i64: 1, 2>`: element type and elements.
    Array(&'a str, Vec<&'a str>),
    List(Vec<Attribute<'a>>),
    Dict(Vec<(&'a str, Attribute<'a>)>),
    Dense(Dense<'a>),
    /// `#stablehlo.gather<...>`: the name and the text between the brackets.
    Dialect(&'a str, Cow<'a, str>),
    Type(Type<'a>),
    Function(Vec<Type<'a>>, Vec<Type<'a>>),
}

/// `dense<...> : tensor<...>`.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Dense<'a> {
    pub at: usize,
    pub values: DenseValues<'a>,
    pub ty: TensorTy<'a>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum DenseValues<'a> {
    /// One number for all elements.
    Splat(&'a str),
    /// One number per element, as text.
    List(Vec<&'a str>),
    /// The bytes of the elements in hexadecimal.
    Bytes(&'a str),
}

impl Dense<'_> {
    /// The number of elements that the text spells out, up to a small factor.
    pub fn written_elements(&self) -> usize {
        match &self.values {
            DenseValues::Splat(_) => 1,
            DenseValues::List(texts) => texts.len(),
            DenseValues::Bytes(text) => text.len() / 2,
        }
    }
}

/// The use of an operation's result or an argument: `%3#1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Use<'a> {
    pub at: usize,
    pub name: &'a str,
    pub index: u32,
}

/// An argument of a function or a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Argument<'a> {
    pub name: &'a str,
    pub ty: Type<'a>,
    pub location: Option<&'a str>,
}

/// The only block of a region.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Block<'a> {
    pub arguments: Vec<Argument<'a>>,
    pub operations: Vec<Operation<'a>>,
}

/// An operation.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Operation<'a> {
    /// The first byte in the text.
    pub at: usize,
    /// The name with its dialect: `stablehlo.add`.
    pub name: &'a str,
    /// Names of its results, each with its number of values: `%3:2`.
    pub results: Vec<(&'a str, u32)>,
    pub operands: Vec<Use<'a>>,
    /// Attributes in text order.
    pub attributes: Vec<(&'a str, Attribute<'a>)>,
    pub regions: Vec<Block<'a>>,
    pub operand_types: Vec<Type<'a>>,
    pub result_types: Vec<Type<'a>>,
    /// The text of its `loc(...)`.
    pub location: Option<&'a str>,
}

/// A whole text: the module, and the aliases such as `#loc1`.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Program<'a> {
    pub module: Operation<'a>,
    /// Sorted by name.
    pub aliases: Vec<Alias<'a>>,
}

/// An alias of an attribute or location.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Alias<'a> {
    /// The name, without `#`.
    pub name: &'a str,
    /// Whether it is an alias of a location.
    pub location: bool,
    /// The aliased text; of a location, the text inside `loc(...)`.
    pub meaning: &'a str,
}

impl<'a> Operation<'a> {
    /// The attribute of this name.
    pub fn attribute(&self, name: &str) -> Option<&Attribute<'a>> {
        self.attributes.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}
