//! What this machine has, and what is missing for which use.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sessile_cuda::library::{Library, load};
use sessile_cuda::{driver_version, gpus};

/// Libraries with their remedies, the driver's version, the GPUs. Opens no GPU; never fails for what is missing.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("version", env!("CARGO_PKG_VERSION"))?;
    let libraries = PyDict::new(py);
    for library in Library::ALL {
        let entry = PyDict::new(py);
        let loaded = load(library);
        entry.set_item("found", loaded.is_ok())?;
        entry.set_item("enables", library.enables())?;
        if loaded.is_err() {
            entry.set_item("remedy", library.remedy())?;
        }
        libraries.set_item(library.name(), entry)?;
    }
    report.set_item("libraries", libraries)?;
    report.set_item("driver", driver_version().ok())?;
    let list = PyList::empty(py);
    match gpus() {
        Ok(gpus) => {
            for gpu in gpus {
                let entry = PyDict::new(py);
                entry.set_item("ordinal", gpu.ordinal)?;
                entry.set_item("name", gpu.name)?;
                entry.set_item("capability", gpu.capability)?;
                entry.set_item("memory_bytes", gpu.memory)?;
                entry.set_item("shareable", gpu.shareable)?;
                list.append(entry)?;
            }
            report.set_item("problem", py.None())?;
        }
        Err(error) => report.set_item("problem", error.to_string())?,
    }
    report.set_item("gpus", list)?;
    report.set_item(
        "devices",
        if report.get_item("problem")?.is_some_and(|p| p.is_none()) { "cuda, cpu" } else { "cpu" },
    )?;
    Ok(report)
}
