//! Event logs: as text, and what the checker says of them.

use pyo3::prelude::*;
use sessile_runtime::check::check;
use sessile_runtime::log::{Log, LogError, read_log, write_log};

use crate::error::Failure;

pub(crate) fn write(log: &Log) -> Result<String, LogError> {
    let mut text = Vec::new();
    write_log(log, &mut text)?;
    String::from_utf8(text).map_err(|error| LogError::Write { text: error.to_string() })
}

/// Checks an event log; one line for each fault. What `sessile check` does.
#[pyfunction]
pub(crate) fn check_log(py: Python<'_>, log: &str) -> Result<Vec<String>, Failure> {
    let log = read_log(log.as_bytes())?;
    let report = py.detach(|| check(&log));
    Ok(report.violations.iter().map(|violation| violation.to_string()).collect())
}
