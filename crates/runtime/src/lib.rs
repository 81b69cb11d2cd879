//! Runs training graphs on this machine: single-threaded kernels, the serial interpreter, the reference
//! executor of lowered programs, and measurements of ops and cores.

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
pub use tensor::{Data, Element, Elements, ElementsMut, Float, HostTensor, View, ViewMut};
