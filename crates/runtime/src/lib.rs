//! Runs training graphs on this machine: kernels, one thread each, the serial interpreter, and the reference
//! executor of lowered programs.

pub mod cores;
mod init;
pub mod kernels;
mod math;
pub mod measure;
mod reference;
mod serial;
mod tensor;

pub use init::{initial_block, initial_value, mix};
pub use kernels::{Context, KernelError};
pub use reference::Reference;
pub use serial::{RunError, Serial};
pub use tensor::{Data, Element, Elements, ElementsMut, Float, Value, View, ViewMut};
