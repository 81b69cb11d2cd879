//! Runs training graphs on this machine: kernels, one thread each, and the serial interpreter.

pub mod kernels;
mod tensor;

pub use kernels::{Context, KernelError};
pub use tensor::{Data, Element, Elements, ElementsMut, Float, Value, View, ViewMut};
