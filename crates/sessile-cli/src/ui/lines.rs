//! The only place that writes to stdout and stderr.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
};

use crate::failure::Failure;

/// Lines of data on stdout.
///
/// A reader that goes away (`sessile plan … | head`) silences the rest and changes no verdict.
#[derive(Debug)]
pub(crate) struct Lines {
    quiet: bool,
    closed: bool,
}

impl Lines {
    /// Writes nothing if `quiet`.
    pub(crate) fn new(quiet: bool) -> Lines {
        Lines { quiet, closed: false }
    }

    /// Writes a line.
    ///
    /// # Errors
    /// That stdout cannot be written to, as when a disk is full.
    pub(crate) fn line(&mut self, line: impl Display) -> Result<(), Failure> {
        if self.quiet || self.closed {
            return Ok(());
        }
        match writeln!(io::stdout().lock(), "{line}") {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            Err(error) => Err(Failure::Run(format!("stdout could not be written: {error}"))),
        }
    }
}

/// Writes an error to stderr.
pub(crate) fn error(failure: &Failure) {
    note(format_args!("error: {failure}"));
}

/// Writes a line to stderr. That nobody can read it is no fault.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}
