//! Each family of errors as its Python exception, with its values as attributes.
//!
//! The classes live in `sessile.errors`, where people read them; this module fills them.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sessile_cuda::guest::GaveUp;
use sessile_hal::DeviceError;
use sessile_plan::{FormatError, PlanError, TraceError};
use sessile_runtime::RuntimeError;
use sessile_runtime::log::LogError;

/// An error on its way to Python: the class, the message, the fields.
#[derive(Debug)]
pub(crate) struct Failure {
    class: &'static str,
    message: String,
    fields: Vec<(&'static str, Field)>,
}

#[derive(Debug)]
enum Field {
    Text(String),
    Number(u64),
    Nothing,
}

impl Failure {
    fn new(class: &'static str, message: impl Into<String>) -> Failure {
        Failure { class, message: message.into(), fields: Vec::new() }
    }

    fn text(mut self, name: &'static str, value: impl Into<String>) -> Failure {
        self.fields.push((name, Field::Text(value.into())));
        self
    }

    fn number(mut self, name: &'static str, value: u64) -> Failure {
        self.fields.push((name, Field::Number(value)));
        self
    }

    fn maybe(mut self, name: &'static str, value: Option<String>) -> Failure {
        self.fields.push((name, value.map_or(Field::Nothing, Field::Text)));
        self
    }

    /// A call in a phase that does not allow it.
    pub(crate) fn phase(call: &'static str, phase: &'static str, remedy: &'static str) -> Failure {
        RuntimeError::WrongPhase { call, phase, remedy }.into()
    }

    /// A value that an argument can't have.
    pub(crate) fn argument(name: &'static str, value: &str, remedy: &str) -> Failure {
        Failure::new("ArgumentError", format!("{name} is {value}: {remedy}"))
            .text("argument", name)
            .text("value", value)
    }

    fn raise(&self, py: Python<'_>) -> PyResult<PyErr> {
        let class = py.import("sessile.errors")?.getattr(self.class)?;
        let fields = PyDict::new(py);
        for (name, value) in &self.fields {
            match value {
                Field::Text(text) => fields.set_item(name, text)?,
                Field::Number(number) => fields.set_item(name, number)?,
                Field::Nothing => fields.set_item(name, py.None())?,
            }
        }
        Ok(PyErr::from_value(class.call((&self.message,), Some(&fields))?))
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        Python::attach(|py| failure.raise(py).unwrap_or_else(|error| error))
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Failure {
        let message = error.to_string();
        let mismatch = |runner: String, index: usize, expected: Option<String>, found: Option<String>| {
            Failure::new("MismatchError", message.clone())
                .text("runner", runner)
                .number("index", index as u64)
                .maybe("expected", expected)
                .maybe("found", found)
        };
        let peer = |rank: u32| Failure::new("AgreementError", message.clone()).number("rank", rank.into());
        match error {
            RuntimeError::Device(error) => error.into(),
            RuntimeError::Trace(error) => error.into(),
            RuntimeError::Plan(error) => error.into(),
            RuntimeError::WrongPhase { call, phase, remedy } => Failure::new("PhaseError", message)
                .text("call", call)
                .text("phase", phase)
                .text("remedy", remedy),
            RuntimeError::UnknownRunner { runner }
            | RuntimeError::NotCaptured { runner }
            | RuntimeError::CapturedTwice { runner } => {
                Failure::new("RunnerError", message).text("runner", runner)
            }
            RuntimeError::DiscoveryDiffers { runner, index, first, second } => {
                mismatch(runner, index, Some(first), Some(second))
            }
            RuntimeError::RequestMismatch { runner, index, expected, found }
            | RuntimeError::OrderDiffers { runner, index, expected, found } => {
                mismatch(runner, index, Some(expected), Some(found))
            }
            RuntimeError::UnplannedRequest { runner, index, found, .. } => {
                mismatch(runner, index, None, Some(found))
            }
            RuntimeError::Unconsumed { runner, consumed, first_left, .. } => {
                mismatch(runner, consumed, Some(first_left), None)
            }
            RuntimeError::PlanMismatch(d) => peer(d.rank)
                .text("group", d.group)
                .text("runner", d.runner)
                .number("index", d.index as u64)
                .maybe("expected", d.expected)
                .maybe("found", d.found),
            RuntimeError::OptionsDiffer { rank, found, first } => {
                peer(rank).text("expected", first).text("found", found)
            }
            RuntimeError::OffsetMismatch { group, rank } => peer(rank).text("group", group),
            RuntimeError::WindowSizes { group, rank, found, expected } => peer(rank)
                .text("group", group)
                .text("expected", expected.to_string())
                .text("found", found.to_string()),
            RuntimeError::PeerAllocFailed { rank, .. } | RuntimeError::PeerFailed { rank, .. } => peer(rank),
            RuntimeError::UnknownGroup { group } => Failure::new("GroupError", message).text("group", group),
            _ => Failure::new("StorageError", message),
        }
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        let failure = Failure::new("DeviceError", error.to_string());
        match error {
            DeviceError::LibraryMissing { library, remedy, .. } => {
                failure.text("library", library).text("remedy", remedy)
            }
            DeviceError::TooOld { what, remedy, .. } => failure.text("library", what).text("remedy", remedy),
            DeviceError::OutOfMemory { requested, free, .. } => {
                failure.number("requested", requested).number("free", free)
            }
            _ => failure,
        }
    }
}

/// After a reduction that gave up nothing of its group is reduced any more.
const START_AGAIN: &str = "end all ranks and start again from the last checkpoint: no reduction of the group adds anything \
                           from that round on";

impl From<GaveUp> for Failure {
    fn from(gave_up: GaveUp) -> Failure {
        let GaveUp { group, rank, missing, round, .. } = gave_up.clone();
        Failure::new("DeviceError", format!("{}: {START_AGAIN}", DeviceError::from(gave_up)))
            .text("group", group)
            .number("rank", rank.into())
            .number("missing", missing.into())
            .number("round", round.into())
            .text("remedy", START_AGAIN)
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Failure {
        Failure::new("TraceError", error.to_string())
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Failure {
        Failure::new("PlanError", error.to_string())
    }
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Failure {
        Failure::new("FormatError", error.to_string())
    }
}

impl From<LogError> for Failure {
    fn from(error: LogError) -> Failure {
        Failure::new("FormatError", error.to_string())
    }
}
