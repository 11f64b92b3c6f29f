//! A process group of the framework as a communicator that hosts compare plans over.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sessile_cuda::guest::{GaveUp, GuestGroup};
use sessile_hal::{Comm, DeviceError};

/// A group: its ranks, and a function that all-gathers bytes over it.
#[derive(Clone)]
pub(crate) struct Group(Arc<Cell>);

struct Cell {
    name: String,
    ranks: Vec<u32>,
    rank: u32,
    /// `Callable[[bytes], list[bytes]]`. `None`: a group of one.
    gather: Option<Py<PyAny>>,
    /// What the function raised last: it says more than an error that stands for it.
    raised: Mutex<Option<PyErr>>,
    /// What reduces over it in one shot, once it can.
    reducer: OnceLock<GuestGroup>,
}

impl Group {
    pub(crate) fn new(name: &str, ranks: Vec<u32>, rank: u32, gather: Option<Py<PyAny>>) -> Group {
        let cell = Cell {
            name: name.to_owned(),
            ranks,
            rank,
            gather,
            raised: Mutex::new(None),
            reducer: OnceLock::new(),
        };
        Group(Arc::new(cell))
    }

    /// Tells of what reduces over it, from now on.
    pub(crate) fn reduces(&self, reducer: &GuestGroup) {
        let _ = self.0.reducer.set(reducer.clone());
    }

    /// The reduction that gave up waiting for a rank, if one did.
    pub(crate) fn gave_up(&self) -> Option<GaveUp> {
        self.0.reducer.get()?.gave_up()
    }

    /// What Python raised in an exchange since the last call.
    pub(crate) fn raised(&self) -> Option<PyErr> {
        self.0.raised.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }

    fn gather(&self, payload: &[u8]) -> PyResult<Vec<Vec<u8>>> {
        let Some(gather) = &self.0.gather else { return Ok(vec![payload.to_vec()]) };
        Python::attach(|py| gather.call1(py, (PyBytes::new(py, payload),))?.extract(py))
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group `{}` of ranks {:?}", self.0.name, self.0.ranks)
    }
}

impl Comm for Group {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn ranks(&self) -> &[u32] {
        &self.0.ranks
    }

    fn rank(&self) -> u32 {
        self.0.rank
    }

    fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let why = match self.gather(payload) {
            Ok(all) if all.len() == self.0.ranks.len() => return Ok(all),
            Ok(all) => format!("an exchange of {} members gave {} messages", self.0.ranks.len(), all.len()),
            Err(error) => {
                let why = error.to_string();
                *self.0.raised.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                why
            }
        };
        let rank = self.0.ranks.get(self.0.rank as usize).copied().unwrap_or(self.0.rank);
        Err(DeviceError::Rendezvous { rank, address: format!("group `{}`", self.0.name), why })
    }

    /// Of the reductions in one shot; what the process group itself runs is the framework's to tell.
    fn usable(&self) -> Result<(), DeviceError> {
        self.gave_up().map_or(Ok(()), |gave_up| Err(gave_up.into()))
    }

    /// The process group is the framework's: aborting it is too.
    fn abort(&self) {}
}
