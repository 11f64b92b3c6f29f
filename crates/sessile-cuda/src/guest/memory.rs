//! Arenas: memory with an address range of its own, which the ranks of a group can map.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use sessile_hal::DeviceError;

use super::{Guest, Yard};
use crate::error;
use crate::handover::Handover;
use crate::physical::Mapping;

/// Memory, zeroed. A handle: clones share it; the last one buries it in its guest's yard.
#[derive(Clone)]
pub struct GuestMemory(Arc<Cell>);

struct Cell {
    /// Whose it is, or who mapped it.
    rank: u32,
    mapping: Option<Mapping>,
    bytes: u64,
    yard: Arc<Yard>,
    guest: Arc<Guest>,
}

/// A rank's side of an exchange of memory with the other ranks of its group.
pub struct Offer {
    memory: GuestMemory,
    handover: Handover,
    fd: OwnedFd,
}

impl GuestMemory {
    /// Allocates. Not in a capture: the caller makes sure of that.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with what was free, [`DeviceError::Driver`].
    pub fn alloc(guest: &Arc<Guest>, rank: u32, label: &str, bytes: u64) -> Result<GuestMemory, DeviceError> {
        let mapping = Mapping::alloc(&guest.context, bytes).map_err(|cause| {
            if !error::is(&cause, cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                return cause;
            }
            let free = guest.memory().map_or(0, |(free, _)| free);
            DeviceError::OutOfMemory { rank, label: label.to_owned(), requested: bytes, free }
        })?;
        guest.zero(mapping.address, mapping.size)?;
        Ok(Self::of(guest, rank, mapping, bytes))
    }

    fn of(guest: &Arc<Guest>, rank: u32, mapping: Mapping, bytes: u64) -> GuestMemory {
        let (yard, guest) = (guest.yard.clone(), guest.clone());
        GuestMemory(Arc::new(Cell { rank, mapping: Some(mapping), bytes, yard, guest }))
    }

    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.0.mapping.as_ref().map_or(0, |mapping| mapping.address)
    }

    /// Its size, as asked for.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Number of its GPU.
    pub fn ordinal(&self) -> u32 {
        self.0.guest.ordinal()
    }

    /// Begins an exchange with the other ranks.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], [`DeviceError::Rendezvous`].
    pub fn offer(&self) -> Result<Offer, DeviceError> {
        let Some(mapping) = &self.0.mapping else { return Err(lost(self.0.rank, "the memory is gone")) };
        let handover = Handover::new().map_err(|cause| lost(self.0.rank, &cause.to_string()))?;
        Ok(Offer { fd: mapping.export()?, handover, memory: self.clone() })
    }
}

impl Offer {
    /// What every rank of the group must have of this one before any of them accepts.
    pub fn invitation(&self) -> &[u8] {
        &self.handover.invitation
    }

    /// The memory of all ranks in group order; at this rank's own place its own. `invitations` are those of all ranks, in
    /// group order; every rank offers the same number of bytes.
    ///
    /// # Errors
    /// [`DeviceError::Rendezvous`] if a rank does not come within `deadline`, [`DeviceError::Driver`].
    pub fn accept(
        self,
        invitations: &[Vec<u8>],
        member: usize,
        deadline: Duration,
    ) -> Result<Vec<GuestMemory>, DeviceError> {
        let Offer { memory, handover, fd } = self;
        let rank = memory.0.rank;
        let theirs = handover
            .swap(invitations, member, &fd, deadline, || false)
            .map_err(|cause| lost(rank, &cause.to_string()))?;
        let guest = &memory.0.guest;
        let size = memory.0.mapping.as_ref().map_or(0, |mapping| mapping.size);
        theirs
            .iter()
            .map(|fd| match fd {
                None => Ok(memory.clone()),
                Some(fd) => {
                    let mapping = Mapping::import(&guest.context, fd, size)?;
                    Ok(GuestMemory::of(guest, rank, mapping, memory.bytes()))
                }
            })
            .collect()
    }
}

fn lost(rank: u32, why: &str) -> DeviceError {
    DeviceError::Rendezvous {
        rank,
        address: "the exchange of memory on this machine".to_owned(),
        why: why.to_owned(),
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.take() {
            self.yard.bury(Box::new(mapping));
        }
    }
}
