//! The Rust half of the Python package `sessile`: what is discovered, agreed on, planned, allocated and matched.
//!
//! Streams, kernels and graphs are the framework's; `python/sessile/torch` binds them to this. Nothing here knows of
//! torch.
//!
//! | file | what |
//! |---|---|
//! | `error` | each family of errors as its Python exception, with fields |
//! | `exchange` | a process group of the framework as a communicator that hosts compare plans over |
//! | `discovery` | runners, requests and recorded order, until they are a trace |
//! | `storage`, `sealed` | the life of planned storage on one rank; what exists between seal and free |
//! | `cuda` | marks, fences and launches on the framework's streams; memory that a group shares |
//! | `launcher` | launches of a captured runner |
//! | `arena`, `dlpack` | the bytes, and how a framework sees them |
//! | `planning`, `logs` | plans and traces without storage; event logs and their checker |
//! | `doctor` | what this machine has |

#![deny(unsafe_code)]

mod arena;
mod cuda;
mod discovery;
mod dlpack;
mod doctor;
mod error;
mod exchange;
mod launcher;
mod logs;
mod planning;
mod sealed;
mod storage;

use pyo3::prelude::*;

#[pymodule]
fn _sessile(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<storage::Core>()?;
    module.add_class::<launcher::Launcher>()?;
    module.add_class::<planning::Plan>()?;
    module.add_function(wrap_pyfunction!(planning::plan, module)?)?;
    module.add_function(wrap_pyfunction!(planning::check_trace, module)?)?;
    module.add_function(wrap_pyfunction!(logs::check_log, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::doctor, module)?)?;
    Ok(())
}
