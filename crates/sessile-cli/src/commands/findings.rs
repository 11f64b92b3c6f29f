//! Findings in full, but not without end.

use std::fmt::Display;

use crate::{
    failure::Failure,
    ui::{Lines, clean, count},
};

/// Findings that are printed.
const SHOWN: usize = 10;

/// Prints the first findings and how many more there are, those that `findings` does not hold included.
pub(super) fn print<F: Display>(lines: &mut Lines, findings: &[F], unlisted: u64) -> Result<(), Failure> {
    for finding in findings.iter().take(SHOWN) {
        lines.line(format_args!("  - {}", clean(&finding.to_string())))?;
    }
    let more = findings.len().saturating_sub(SHOWN) as u64 + unlisted;
    if more > 0 {
        lines.line(format_args!("  and {} more", count(more)))?;
    }
    Ok(())
}
