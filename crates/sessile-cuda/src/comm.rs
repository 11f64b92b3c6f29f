//! Communicators.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use sessile_hal::{Collective, Comm, DeviceError};

use crate::context::RawEvent;
use crate::core::{Core, Handle};
use crate::link::Group;
use crate::nccl::RawComm;
use crate::oneshot::{OneShotOptions, Signals};

/// A communicator of the CUDA device. A handle: clones share it, and graphs hold clones.
#[derive(Clone)]
pub struct CudaComm(pub(crate) Arc<CommCell>);

pub(crate) struct CommCell {
    pub(crate) handle: Arc<Handle>,
    /// Number of the group in the job, the same on all ranks.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) ranks: Vec<u32>,
    /// This rank's position in `ranks`.
    pub(crate) member: u32,
    /// Absent in a group of one, and where ranks share a GPU and NCCL was not told that they may (`NCCL_HOSTID`).
    pub(crate) nccl: Option<Arc<RawComm>>,
    /// Whether NCCL may register memory with the group: not where ranks share a GPU.
    pub(crate) registers: bool,
    /// Whether all members run on one machine, so that they can map each other's memory.
    pub(crate) near: bool,
    /// For own kernels; absent where members can't map each other's memory.
    pub(crate) signals: Option<Signals>,
    /// Recorded after each collective and waited for by the next, so that they run in order on whatever streams.
    pub(crate) tail: Option<RawEvent>,
    /// Recorded between a producer and a symmetric kernel, where NCCL needs something else than a kernel there.
    pub(crate) gate: Option<RawEvent>,
    /// Whether a call of NCCL goes on, which may wait for peers.
    pub(crate) in_call: AtomicBool,
    /// Why it is of no use any more.
    failed: Mutex<Option<DeviceError>>,
    /// Since when a member that has left is waited for.
    pub(crate) waits_for_left: Mutex<Option<Instant>>,
}

/// What a member tells the others when a communicator is made.
pub(crate) struct Made {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) ranks: Vec<u32>,
    pub(crate) member: u32,
    pub(crate) nccl: Option<Arc<RawComm>>,
    pub(crate) registers: bool,
    pub(crate) near: bool,
    pub(crate) signals: Option<Signals>,
}

impl Made {
    pub(crate) fn group(&self) -> Group<'_> {
        Group { id: self.id, name: &self.name, ranks: &self.ranks }
    }
}

impl CommCell {
    pub(crate) fn new(handle: &Arc<Handle>, made: Made) -> Result<Self, DeviceError> {
        let context = &handle.core.context;
        let Made { id, name, ranks, member, nccl, registers, near, signals } = made;
        Ok(CommCell {
            handle: handle.clone(),
            id,
            name,
            ranks,
            member,
            nccl,
            registers,
            near,
            signals,
            tail: Some(RawEvent::new(context)?),
            gate: Some(RawEvent::new(context)?),
            in_call: AtomicBool::new(false),
            failed: Mutex::new(None),
            waits_for_left: Mutex::new(None),
        })
    }

    /// The error of a kind of collective that can't run in this group.
    pub(crate) fn unreachable(&self, kind: Collective) -> DeviceError {
        DeviceError::Unreachable {
            kernel: kind.name(),
            group: self.name.clone(),
            why: if kind.scaled().is_some() {
                "its members must run on one machine, on GPUs that can map each other's memory, at most 16 of them"
            } else {
                "NCCL needs a GPU of its own for each rank: start no more ranks than GPUs, or give each rank another \
                 NCCL_HOSTID, as --launch N --share-gpus does"
            },
        }
    }

    /// Fails if the communicator was given up or lost a member.
    pub(crate) fn usable(&self) -> Result<(), DeviceError> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Gives it up with `error`: kernels in flight end without effect. True the first time.
    pub(crate) fn fail(&self, error: DeviceError) -> bool {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.is_some() {
            return false;
        }
        *failed = Some(error);
        drop(failed);
        if let Some(signals) = &self.signals {
            signals.words.set(3, 1);
        }
        if let Some(nccl) = self.nccl.clone() {
            // NCCL returns only when the graphs that hold its kernels are gone, but ends the kernels at once.
            let _ = std::thread::Builder::new().name("sessile-abort".to_owned()).spawn(move || nccl.abort());
        }
        true
    }

    pub(crate) fn group(&self) -> Group<'_> {
        Group { id: self.id, name: &self.name, ranks: &self.ranks }
    }

    /// Gives it up since this rank can't go on in it: no member waits for it, and all are told why.
    pub(crate) fn give_up(&self, error: &DeviceError) {
        if self.fail(error.clone()) {
            self.handle.core.link.abort(self.id, &error.to_string());
        }
    }

    /// All-gathers bytes between the members' hosts.
    pub(crate) fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.usable()?;
        exchange(&self.handle.core, self.group(), payload)
    }
}

/// All-gathers bytes in a group.
pub(crate) fn exchange(core: &Core, group: Group<'_>, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
    core.link.exchange(group, payload, core.options.deadline)
}

impl CudaComm {
    /// Other options of the one-shot reduce-scatter, for what is enqueued from now on. All members set the same at the
    /// same place. Nothing happens where the kernels can't run.
    pub fn set_one_shot(&self, options: OneShotOptions) {
        if let Some(signals) = &self.0.signals {
            signals.set(options);
        }
    }
}

impl Drop for CommCell {
    fn drop(&mut self) {
        let graveyard = &self.handle.core.graveyard;
        graveyard.bury(Box::new(self.nccl.take()));
        // After the work that records them.
        graveyard.bury(Box::new((self.tail.take(), self.gate.take(), self.signals.take())));
    }
}

impl Comm for CudaComm {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn ranks(&self) -> &[u32] {
        &self.0.ranks
    }

    fn rank(&self) -> u32 {
        self.0.member
    }

    fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.0.exchange(payload)
    }

    fn usable(&self) -> Result<(), DeviceError> {
        self.0.handle.core.news();
        self.0.usable()
    }

    fn abort(&self) {
        let core = &self.0.handle.core;
        let error = DeviceError::Aborted { rank: core.rank, group: self.0.name.clone(), by: core.rank };
        if self.0.fail(error.clone()) {
            core.link.abort(self.0.id, "");
            core.tell_later(error);
        }
    }
}

impl fmt::Debug for CudaComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group `{}` of ranks {:?}, member {}", self.0.name, self.0.ranks, self.0.member)
    }
}
