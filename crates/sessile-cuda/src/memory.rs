//! Memory.
//!
//! Memory of a symmetric domain, and any of [`LARGE`] bytes or more, has an address range of its own (virtual memory
//! management): its handle can be shared with other processes and registered with NCCL, and its bytes can be exchanged
//! under the same address. Smaller memory comes from a pool.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sessile_hal::{DeviceError, Memory, MemoryId};
use sessile_plan::Domain;

use crate::core::{Core, Handle};
use crate::nccl::RawWindow;
use crate::physical::{Block, Mapping};

/// From this size on an allocation has an address range of its own.
pub(crate) const LARGE: u64 = 1 << 20;

/// An allocation of the CUDA device. A handle: clones share it.
#[derive(Clone)]
pub struct CudaMemory(pub(crate) Arc<MemoryCell>);

pub(crate) struct MemoryCell {
    pub(crate) handle: Arc<Handle>,
    pub(crate) id: MemoryId,
    pub(crate) bytes: u64,
    pub(crate) domain: Domain,
    pub(crate) label: String,
    pub(crate) address: u64,
    pub(crate) mapping: AtomicU64,
    pub(crate) parts: Mutex<Parts>,
}

/// What an allocation owns.
pub(crate) struct Parts {
    pub(crate) windows: Vec<Window>,
    pub(crate) backing: Option<Backing>,
}

pub(crate) enum Backing {
    Block(Block),
    Mapping(Mapping),
}

/// A registration with one communicator.
pub(crate) struct Window {
    /// Identity of the communicator.
    pub(crate) comm: u64,
    /// Address of the allocation of each member, in group order, in this process. Empty if members can't be reached.
    pub(crate) members: Vec<u64>,
    /// Kept: what the addresses of other members are mapped by.
    _peers: Vec<Mapping>,
    /// Kept: NCCL's own registration.
    _nccl: Option<RawWindow>,
}

impl Window {
    pub(crate) fn new(comm: u64, members: Vec<u64>, peers: Vec<Mapping>, nccl: Option<RawWindow>) -> Self {
        Window { comm, members, _peers: peers, _nccl: nccl }
    }
}

impl MemoryCell {
    pub(crate) fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges the physical bytes, where the allocation has an address range of its own; otherwise the bytes stay and
    /// only their number changes. The caller has waited for all work that touches them.
    pub(crate) fn remap(&self, core: &Core) -> Result<(), DeviceError> {
        core.reap_all(core.options.deadline);
        let mut parts = self.parts();
        parts.windows.clear();
        let renewed = match &mut parts.backing {
            Some(Backing::Mapping(mapping)) => mapping.renew(),
            _ => Ok(()),
        };
        renewed.map_err(|error| core.no_memory(error, &self.label, self.bytes))?;
        self.mapping.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Addresses of the members' allocations in the window of a communicator, if there is one.
    pub(crate) fn window(&self, comm: u64) -> Option<Vec<u64>> {
        self.parts().windows.iter().find(|window| window.comm == comm).map(|window| window.members.clone())
    }
}

impl Drop for MemoryCell {
    fn drop(&mut self) {
        let mut parts = self.parts();
        let windows = std::mem::take(&mut parts.windows);
        let backing = parts.backing.take();
        drop(parts);
        let graveyard = &self.handle.core.graveyard;
        // Windows first: what is registered must exist.
        if !windows.is_empty() {
            graveyard.bury(Box::new(windows));
        }
        graveyard.bury(Box::new(backing));
    }
}

impl Memory for CudaMemory {
    fn id(&self) -> MemoryId {
        self.0.id
    }

    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    fn domain(&self) -> &Domain {
        &self.0.domain
    }

    fn label(&self) -> &str {
        &self.0.label
    }

    fn address(&self) -> u64 {
        self.0.address
    }

    fn mapping(&self) -> u64 {
        self.0.mapping.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({}, {} bytes at {:#x})", self.0.label, self.0.id, self.0.bytes, self.0.address)
    }
}
