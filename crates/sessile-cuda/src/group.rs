//! How the members of a group meet: who they are, NCCL's communicator, windows.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sessile_hal::{DeviceError, Memory};

use crate::comm::{CommCell, Made, exchange};
use crate::device::CudaDevice;
use crate::memory::{Backing, CudaMemory, Window};
use crate::nccl::{self, RawComm, within};
use crate::physical::Mapping;

impl CudaDevice {
    /// The members' places, by group order, and what NCCL is there.
    pub(crate) fn meet(&self, id: u64, name: &str, ranks: &[u32], member: u32) -> Result<Made, DeviceError> {
        let core = self.core();
        let mut made =
            Made { id, name: name.to_owned(), ranks: ranks.to_vec(), member, nccl: None, near: true };
        if ranks.len() == 1 {
            return Ok(made);
        }
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let gpu = &core.context.gpu;
        let place = [&gpu.uuid[..], &[u8::from(gpu.shareable)], machine.trim().as_bytes()].concat();
        let places = exchange(core, id, name, &place)?;
        let mut gpus: Vec<_> = places.iter().map(|place| place.get(..16)).collect();
        gpus.sort();
        gpus.dedup();
        made.near = places.iter().all(|other| other.get(16..) == place.get(16..)) && gpu.shareable;
        if gpus.len() == ranks.len() {
            made.nccl = Some(Arc::new(self.init_nccl(&made)?));
        }
        Ok(made)
    }

    fn init_nccl(&self, made: &Made) -> Result<RawComm, DeviceError> {
        let core = self.core();
        let (size, member) = (u32::try_from(made.ranks.len()).unwrap_or(u32::MAX), made.member);
        // Everybody comes to every exchange, whatever went wrong, so that nobody waits for long.
        let offer = if member == 0 {
            nccl::unique_id().map(|id| id.to_vec())
        } else {
            nccl::version().map(|_| Vec::new())
        };
        let mut mine = offer.as_ref().map_or_else(|_| vec![0], Clone::clone);
        mine.truncate(128);
        let all = exchange(core, made.id, &made.name, &mine)?;
        offer?;
        let id: [u8; 128] = match all.first().map(|id| <[u8; 128]>::try_from(&id[..])) {
            Some(Ok(id)) if all[1..].iter().all(Vec::is_empty) => id,
            _ => return Err(self.bad_group(&made.name, &made.ranks, "a member has no NCCL that works")),
        };
        let (context, deadline) = (core.context.clone(), core.options.deadline);
        let lost = || core.link.lost(&made.ranks).is_some();
        let comm = within(deadline, lost, move || RawComm::init(&context, id, size, member));
        let comm = comm.unwrap_or_else(|| {
            let what = format!("making the communicator of group `{}`", made.name);
            Err(match core.link.lost(&made.ranks) {
                Some(peer) => DeviceError::PeerLost { rank: core.rank, peer, what },
                None => {
                    let missing = made.ranks.iter().copied().find(|rank| *rank != core.rank).unwrap_or(0);
                    DeviceError::PeerTimeout { rank: core.rank, missing, what, after: deadline }
                }
            })
        });
        let all = exchange(core, made.id, &made.name, &[u8::from(comm.is_ok())])?;
        let comm = comm?;
        if all.iter().any(|ok| *ok != [1]) {
            comm.abort();
            return Err(self.bad_group(&made.name, &made.ranks, "a member could not make its communicator"));
        }
        Ok(comm)
    }

    pub(crate) fn bad_group(&self, name: &str, ranks: &[u32], why: &'static str) -> DeviceError {
        DeviceError::BadGroup { name: name.to_owned(), ranks: ranks.to_vec(), why }
    }

    /// Registers a mapping with NCCL and maps the other members' memory.
    pub(crate) fn make_window(&self, comm: &CommCell, memory: &CudaMemory) -> Result<Window, DeviceError> {
        let core = self.core();
        let (address, size, fd) = match &memory.0.parts().backing {
            Some(Backing::Mapping(mapping)) => (mapping.address, mapping.size, mapping.export()?),
            _ => {
                return Err(DeviceError::WindowAlignment {
                    label: memory.label().to_owned(),
                    address: memory.address(),
                    needed: core.context.granularity,
                });
            }
        };
        let mut members = Vec::new();
        let mut peers = Vec::new();
        if comm.near {
            for fd in self.swap(comm, &fd)? {
                members.push(match fd {
                    None => address,
                    Some(fd) => {
                        let peer = Mapping::import(&core.context, &fd, size)?;
                        let at = peer.address;
                        peers.push(peer);
                        at
                    }
                });
            }
        }
        let Some(nccl) = comm.nccl.clone() else {
            return Ok(Window::new(comm.id, members, peers, None));
        };
        let lost = || core.link.lost(&comm.ranks).is_some();
        let registered = within(core.options.deadline, lost, move || {
            // SAFETY: the address and size are those of the allocation's own mapping, which the caller holds until
            // this returns, and which goes after its windows (`MemoryCell::drop`).
            unsafe { nccl.register(address, size) }
        });
        let window = match registered {
            Some(result) => result?,
            None => {
                let peer = core.link.lost(&comm.ranks).unwrap_or(0);
                let what = format!("registering `{}` with group `{}`", memory.label(), comm.name);
                return Err(DeviceError::PeerLost { rank: core.rank, peer, what });
            }
        };
        let window = window.ok_or_else(|| DeviceError::Unreachable {
            kernel: "register_window",
            group: comm.name.clone(),
            why: "NCCL gave no symmetric window: it needs cuMem allocations (NCCL_CUMEM_ENABLE) and direct NVLink or \
                  PCIe access between all members",
        })?;
        Ok(Window::new(comm.id, members, peers, Some(window)))
    }

    fn swap(&self, comm: &CommCell, fd: &OwnedFd) -> Result<Vec<Option<OwnedFd>>, DeviceError> {
        let failed = |error: std::io::Error| DeviceError::Rendezvous {
            rank: self.core().rank,
            address: format!("the members of group `{}` on this machine", comm.name),
            why: error.to_string(),
        };
        let hand = crate::handover::Handover::new();
        let invitation = hand.as_ref().map(|hand| hand.invitation.clone()).unwrap_or_default();
        let invitations = comm.exchange(&invitation)?;
        let hand = hand.map_err(failed)?;
        hand.swap(&invitations, comm.member as usize, fd, self.core().options.deadline).map_err(failed)
    }
}
