//! How the members of a group meet: who they are, NCCL's communicator, windows.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sessile_hal::{DeviceError, Memory};
use sessile_plan::DType;

use crate::comm::{CommCell, Made, exchange};
use crate::context::{Context, Priority, RawStream};
use crate::device::CudaDevice;
use crate::handover::Handover;
use crate::memory::{Backing, CudaMemory, Window};
use crate::nccl::{self, RawComm, within};
use crate::oneshot::{MOST_RANKS, PAD, Signals};
use crate::physical::{HostWords, Mapping, Pool};

impl CudaDevice {
    /// The members' places, by group order, and what NCCL is there.
    pub(crate) fn meet(&self, id: u64, name: &str, ranks: &[u32], member: u32) -> Result<Made, DeviceError> {
        let core = self.core();
        let mut made = Made {
            id,
            name: name.to_owned(),
            ranks: ranks.to_vec(),
            member,
            nccl: None,
            near: true,
            signals: None,
        };
        if ranks.len() == 1 {
            return Ok(made);
        }
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let gpu = &core.context.gpu;
        let place = [&gpu.uuid[..], &[u8::from(gpu.shareable)], machine.trim().as_bytes()].concat();
        let places = exchange(core, id, name, &place)?;
        let mut gpus: Vec<_> = places.iter().map(|place| place.get(..16)).collect();
        let share =
            gpus.iter().map(|gpu| gpus.iter().filter(|other| *other == gpu).count()).max().unwrap_or(1);
        gpus.sort();
        gpus.dedup();
        made.near = places.iter().all(|other| other.get(16..) == place.get(16..)) && gpu.shareable;
        if gpus.len() == ranks.len() {
            made.nccl = Some(Arc::new(self.init_nccl(&made)?));
        }
        if made.near && ranks.len() <= MOST_RANKS {
            made.signals = self.make_signals(&made, u32::try_from(share).unwrap_or(u32::MAX))?;
        }
        Ok(made)
    }

    /// The signal words of own kernels; none if a member could not map them.
    fn make_signals(&self, made: &Made, share: u32) -> Result<Option<Signals>, DeviceError> {
        let core = self.core();
        let fd = Mapping::alloc(&core.context, PAD).and_then(|pad| pad.export().map(|fd| (pad, fd)));
        let mine = fd.and_then(|(pad, fd)| {
            let words = HostWords::new(&core.context, 4)?;
            Ok((pad, fd, words))
        });
        let signals = match mine {
            Err(error) => {
                // To the exchanges of the others, with nothing to offer.
                exchange(core, made.id, &made.name, &[])?;
                Err(error)
            }
            Ok((pad, fd, words)) => {
                let theirs = self.swap(made.id, &made.name, made.member, &fd)?;
                let mapped: Result<Vec<_>, _> = theirs
                    .iter()
                    .map(|fd| fd.as_ref().map(|fd| Mapping::import(&core.context, fd, pad.size)).transpose())
                    .collect();
                mapped.and_then(|peers| {
                    let address =
                        |peer: &Option<Mapping>| peer.as_ref().map_or(pad.address, |peer| peer.address);
                    let addresses: Vec<u64> = peers.iter().map(address).collect();
                    let own = pad.address;
                    Signals::new(&core.pool, own, Box::new((pad, peers)), &addresses, words, share)?
                        .with(&core.pool, &core.options.one_shot)
                })
            }
        };
        // Nobody launches before all pads are ready. Who waits for what depends on the budget.
        let budget = core.options.one_shot.budget.map_or(u64::MAX, u64::from).to_le_bytes();
        let all = exchange(core, made.id, &made.name, &[&[u8::from(signals.is_ok())], &budget[..]].concat())?;
        if all.iter().any(|theirs| theirs.get(1..) != Some(&budget[..])) {
            let why = "its members have different budgets of multiprocessors for one_shot: give all the same";
            return Err(self.bad_group(&made.name, &made.ranks, why));
        }
        Ok(signals.ok().filter(|_| all.iter().all(|theirs| theirs.first() == Some(&1))))
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
        let (pool, ranks) = (core.pool.clone(), size);
        let comm = within(deadline, lost, move || {
            let comm = RawComm::init(&context, id, ranks, member)?;
            connect(&comm, &context, &pool, ranks)?;
            Ok(comm)
        });
        let comm = comm.unwrap_or_else(|| {
            let what = format!("making the communicator of group `{}`", made.name);
            Err(core.link.absent(&made.ranks, what, deadline))
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
            for fd in self.swap(comm.id, &comm.name, comm.member, &fd)? {
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
                let what = format!("registering `{}` with group `{}`", memory.label(), comm.name);
                return Err(core.link.absent(&comm.ranks, what, core.options.deadline));
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

    fn swap(
        &self,
        group: u64,
        name: &str,
        member: u32,
        fd: &OwnedFd,
    ) -> Result<Vec<Option<OwnedFd>>, DeviceError> {
        let core = self.core();
        let failed = |error: std::io::Error| DeviceError::Rendezvous {
            rank: core.rank,
            address: format!("the members of group `{name}` on this machine"),
            why: error.to_string(),
        };
        let hand = Handover::new();
        let invitation = hand.as_ref().map(|hand| hand.invitation.clone()).unwrap_or_default();
        let invitations = exchange(core, group, name, &invitation)?;
        let hand = hand.map_err(failed)?;
        hand.swap(&invitations, member as usize, fd, core.options.deadline).map_err(failed)
    }
}

/// Runs one collective of each kind and of a small and a large size. NCCL connects at the first use of an algorithm, and
/// the host waits for all peers then; here it waits with a deadline.
fn connect(comm: &RawComm, context: &Arc<Context>, pool: &Arc<Pool>, size: u32) -> Result<(), DeviceError> {
    let stream = RawStream::new(context, Priority::Normal)?;
    let size = u64::from(size);
    let large = 4 << 20;
    let (one, all) = (pool.alloc(4 * large)?, pool.alloc(4 * large * size)?);
    let _entered = context.enter()?;
    for count in [64, large] {
        // SAFETY: `one` has room for `large` elements and `all` for as many of each rank; both live until the stream
        // was synchronized below.
        unsafe { comm.all_gather(&stream, (one.address, all.address), count, DType::F32) }?;
        // SAFETY: as above.
        unsafe { comm.reduce_scatter(&stream, (all.address, one.address), count, DType::F32) }?;
    }
    comm.group_start()?;
    let pairs = (0u32..).take(size as usize).try_for_each(|peer| {
        let block = u64::from(peer) * 1024;
        // SAFETY: as above; blocks of 64 elements lie inside both.
        unsafe { comm.send(&stream, one.address, 64, DType::F32, peer) }?;
        // SAFETY: as above.
        unsafe { comm.recv(&stream, all.address + block, 64, DType::F32, peer) }
    });
    comm.group_end().and(pairs)?;
    stream.synchronize()
}
