//! A StableHLO program as its text says it: operations with operands, attributes, regions and types, all in MLIR's
//! generic form. The module and its functions are operations too. Nothing here knows what an operation means.

use std::borrow::Cow;

/// What a tensor's elements are, in StableHLO's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TensorTy<'a> {
    /// `f32`, `i1`, `ui32`.
    pub element: &'a str,
    /// The text of the sizes, `4x8x` or nothing: few types are looked at more than once.
    pub sizes: &'a str,
}

/// The type of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Type<'a> {
    Tensor(TensorTy<'a>),
    /// Any other, as written.
    Other(&'a str),
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Attribute<'a> {
    /// Present without a value.
    Unit,
    Bool(bool),
    /// A number as written, with its type if one is given.
    Number(&'a str, Option<&'a str>),
    /// A string as written between its quotes.
    Text(&'a str),
    Symbol(&'a str),
    /// `array<i64: 1, 2>`, its element type first.
    Array(&'a str, Vec<&'a str>),
    List(Vec<Attribute<'a>>),
    Dict(Vec<(&'a str, Attribute<'a>)>),
    Dense(Dense<'a>),
    /// `#stablehlo.gather<...>`: name and what is between the brackets.
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
    /// One for all elements.
    Splat(&'a str),
    /// One each, as written.
    List(Vec<&'a str>),
    /// The bytes of the elements in hexadecimal.
    Bytes(&'a str),
}

/// One of the results of an operation, or an argument: `%3#1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Use<'a> {
    pub at: usize,
    pub name: &'a str,
    pub index: u32,
}

/// A value that an operation or a block introduces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Argument<'a> {
    pub name: &'a str,
    pub ty: Type<'a>,
    pub location: Option<&'a str>,
}

/// The one block of a region.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Block<'a> {
    pub arguments: Vec<Argument<'a>>,
    pub operations: Vec<Operation<'a>>,
}

/// An operation.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Operation<'a> {
    /// Where it begins in the text.
    pub at: usize,
    /// With its dialect: `stablehlo.add`.
    pub name: &'a str,
    /// Names of its results, each for one or several: `%3:2`.
    pub results: Vec<(&'a str, u32)>,
    pub operands: Vec<Use<'a>>,
    /// In the order of the text.
    pub attributes: Vec<(&'a str, Attribute<'a>)>,
    pub regions: Vec<Block<'a>>,
    pub operand_types: Vec<Type<'a>>,
    pub result_types: Vec<Type<'a>>,
    /// What stands in its `loc(...)`.
    pub location: Option<&'a str>,
}

/// A whole text: the module, and what `#loc1` and the like stand for.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Program<'a> {
    pub module: Operation<'a>,
    /// Sorted by name.
    pub aliases: Vec<Alias<'a>>,
}

/// A name for something that is written once and meant often.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Alias<'a> {
    /// Without its `#`.
    pub name: &'a str,
    /// Whether it stands for a location.
    pub location: bool,
    /// The text of what it stands for; of a location, what is inside of its `loc(...)`.
    pub meaning: &'a str,
}

impl<'a> Operation<'a> {
    /// The attribute of this name.
    pub fn attribute(&self, name: &str) -> Option<&Attribute<'a>> {
        self.attributes.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}
