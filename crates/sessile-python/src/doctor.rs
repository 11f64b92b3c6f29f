//! What this machine has, and what is missing for which use.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use sessile_cuda::doctor::{cuda_can_run, examine};

/// What `sessile doctor --json` writes, as a dictionary. Opens no GPU; never fails for what is missing.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let findings = examine();
    let report = serde_json::json!({
        "sessile": env!("CARGO_PKG_VERSION"),
        "cuda": cuda_can_run(&findings),
        "findings": findings,
    });
    let text = serde_json::to_string(&report).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
