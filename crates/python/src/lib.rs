//! The native half of the Python package: `shardwright._native`. What users see is in `python/shardwright`.
//!
//! Planning runs on a thread of its own without the interpreter's lock; the calling thread looks ten times a second
//! whether the user wants an end, and tells how the search goes.

mod handle;
mod task;

use pyo3::prelude::*;
use std::ffi::OsString;

pyo3::create_exception!(
    shardwright,
    PlanError,
    pyo3::exceptions::PyValueError,
    "No plan can be made: says why."
);
pyo3::create_exception!(shardwright, DoesNotFit, PlanError, "No plan fits the memory: says by how much.");

/// Runs the command line, and returns its exit status; `program` are the words that start it again.
#[pyfunction]
fn run(py: Python<'_>, program: Vec<OsString>, args: Vec<OsString>) -> u8 {
    py.detach(|| shardwright::run_as(program, args))
}

/// The module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("PlanError", module.py().get_type::<PlanError>())?;
    module.add("DoesNotFit", module.py().get_type::<DoesNotFit>())?;
    module.add_class::<handle::PlanHandle>()?;
    module.add_function(wrap_pyfunction!(run, module)?)?;
    module.add_function(wrap_pyfunction!(task::plan, module)?)?;
    module.add_function(wrap_pyfunction!(task::load, module)?)?;
    module.add_function(wrap_pyfunction!(task::devices, module)?)?;
    module.add_function(wrap_pyfunction!(task::axes, module)?)?;
    Ok(())
}
