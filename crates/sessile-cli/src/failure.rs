//! Why a command ended early, and with which exit status.

use std::{fmt, path::Path, process::ExitCode};

use crate::ui::clean;

/// What a command that ran to its end found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All is as it must be.
    Good,
    /// Bits differ, or something is violated.
    Bad,
    /// A process that was started refused its input, and has said why.
    Refused,
}

impl Verdict {
    /// The worse of two.
    pub(crate) fn worse(self, other: Verdict) -> Verdict {
        match (self, other) {
            (Verdict::Refused, _) | (_, Verdict::Refused) => Verdict::Refused,
            (Verdict::Bad, _) | (_, Verdict::Bad) => Verdict::Bad,
            (Verdict::Good, Verdict::Good) => Verdict::Good,
        }
    }

    /// Good if this is true.
    pub(crate) fn from_good(good: bool) -> Verdict {
        if good { Verdict::Good } else { Verdict::Bad }
    }
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> ExitCode {
        match verdict {
            Verdict::Good => ExitCode::SUCCESS,
            Verdict::Bad => ExitCode::FAILURE,
            Verdict::Refused => ExitCode::from(2),
        }
    }
}

/// Why a command could not run to its end. One message: what, its value, what to do.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The input is at fault: exit status 2.
    Input(String),
    /// The run is at fault: exit status 1.
    Run(String),
}

impl Failure {
    /// The same about a file that was read, unless it is about an option.
    pub(crate) fn about(self, path: &Path) -> Failure {
        match self {
            Failure::Input(text) if !text.starts_with("--") => {
                Failure::Input(format!("{}: {text}", path.display()))
            }
            failure => failure,
        }
    }

    /// The exit status.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Input(_) => ExitCode::from(2),
            Failure::Run(_) => ExitCode::FAILURE,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Input(text) | Failure::Run(text)) = self;
        f.write_str(&clean(text))
    }
}
