//! How the members of a group meet: who they are, NCCL's communicator, windows.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sessile_hal::{DeviceError, Memory};
use sessile_plan::DType;
use sha2::{Digest, Sha256};

use crate::comm::{CommCell, Made, exchange};
use crate::context::{Context, Priority, RawStream};
use crate::core::Core;
use crate::device::CudaDevice;
use crate::handover;
use crate::link::Group;
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
            registers: false,
            near: true,
            signals: None,
        };
        if ranks.len() == 1 {
            return Ok(made);
        }
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let gpu = &core.context.gpu;
        // NCCL takes two ranks on one GPU only if they say that they are of different machines.
        let posing = Sha256::digest(std::env::var("NCCL_HOSTID").unwrap_or_default());
        let place =
            [&gpu.uuid[..], &posing[..], &[u8::from(gpu.shareable)], machine.trim().as_bytes()].concat();
        let places = exchange(core, made.group(), &place)?;
        let most = |bytes: usize| {
            let part: Vec<_> = places.iter().map(|place| place.get(..bytes)).collect();
            part.iter().map(|one| part.iter().filter(|other| *other == one).count()).max().unwrap_or(1)
        };
        let share = most(16);
        made.near = places.iter().all(|other| other.get(48..) == place.get(48..)) && gpu.shareable;
        if most(48) == 1 {
            made.registers = share == 1;
            made.nccl = Some(Arc::new(self.init_nccl(&made)?));
        }
        if made.near && ranks.len() <= MOST_RANKS {
            made.signals = self.make_signals(&made, u32::try_from(share).unwrap_or(u32::MAX))?;
        }
        Ok(made)
    }

    /// The signal words of own kernels; none if a member could not map those of another.
    fn make_signals(&self, made: &Made, share: u32) -> Result<Option<Signals>, DeviceError> {
        let core = self.core();
        let label = || format!("mailboxes of group `{}`", made.name);
        let pad = Mapping::alloc(&core.context, PAD).map_err(|error| core.no_memory(error, &label(), PAD))?;
        let (fd, words) = (pad.export()?, HostWords::new(&core.context, 4)?);
        let theirs = self.swap(made.group(), made.member, &fd)?;
        let mapped: Result<Vec<_>, _> = theirs
            .iter()
            .map(|fd| fd.as_ref().map(|fd| Mapping::import(&core.context, fd, pad.size)).transpose())
            .collect();
        let signals = mapped.and_then(|peers| {
            let address = |peer: &Option<Mapping>| peer.as_ref().map_or(pad.address, |peer| peer.address);
            let addresses: Vec<u64> = peers.iter().map(address).collect();
            let own = pad.address;
            Signals::new(&core.pool, own, Box::new((pad, peers)), &addresses, words, share)?
                .with(&core.pool, &core.options.one_shot)
        });
        // Nobody launches before all pads are ready. Who waits for what depends on the budget.
        let budget = core.options.one_shot.budget.map_or(u64::MAX, u64::from).to_le_bytes();
        let all = exchange(core, made.group(), &[&[u8::from(signals.is_ok())], &budget[..]].concat())?;
        if all.iter().any(|theirs| theirs.get(1..) != Some(&budget[..])) {
            let why = "its members have different budgets of multiprocessors for one_shot: give all the same";
            return Err(self.bad_group(&made.name, &made.ranks, why));
        }
        Ok(signals.ok().filter(|_| all.iter().all(|theirs| theirs.first() == Some(&1))))
    }

    fn init_nccl(&self, made: &Made) -> Result<RawComm, DeviceError> {
        let core = self.core();
        let (size, member) = (u32::try_from(made.ranks.len()).unwrap_or(u32::MAX), made.member);
        nccl::version()?;
        let mine = if member == 0 { nccl::unique_id()?.to_vec() } else { Vec::new() };
        let all = exchange(core, made.group(), &mine)?;
        let id = all.first().and_then(|id| <[u8; 128]>::try_from(&id[..]).ok());
        let id =
            id.ok_or_else(|| self.bad_group(&made.name, &made.ranks, "a member has no NCCL that works"))?;
        let (context, pool) = (core.context.clone(), core.pool.clone());
        let what = format!("making the communicator of group `{}`", made.name);
        let comm = while_hopeful(core, made.group(), what, move || {
            let comm = RawComm::init(&context, id, size, member)?;
            connect(&comm, &context, &pool, size).map(|()| comm)
        });
        let failed = |error| match error {
            DeviceError::Driver { .. } => DeviceError::Communicator {
                rank: core.rank,
                group: made.name.clone(),
                free: core.context.memory().map_or(0, |(free, _)| free),
                why: error.to_string(),
            },
            _ => error,
        };
        let comm = comm.map_err(failed)?;
        // Nobody uses it before all have theirs.
        let all = exchange(core, made.group(), &[]);
        all.inspect_err(|_| comm.abort()).map(|_| comm)
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
            for fd in self.swap(comm.group(), comm.member, &fd)? {
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
        let Some(nccl) = comm.nccl.clone().filter(|_| comm.registers) else {
            return Ok(Window::new(comm.id, members, peers, None));
        };
        let what = format!("registering `{}` with group `{}`", memory.label(), comm.name);
        let kept = memory.clone();
        let window = while_hopeful(core, comm.group(), what, move || {
            // SAFETY: the address and size are those of the allocation's own mapping, which `kept` holds as long as the
            // call takes, also if nobody waits for it any more, and which goes after its windows (`MemoryCell::drop`).
            let window = unsafe { nccl.register(address, size) };
            drop(kept);
            window
        })?;
        let window = window.ok_or_else(|| DeviceError::Unreachable {
            kernel: "register_window",
            group: comm.name.clone(),
            why: "NCCL gave no symmetric window: it needs cuMem allocations (NCCL_CUMEM_ENABLE) and direct NVLink or \
                  PCIe access between all members",
        })?;
        Ok(Window::new(comm.id, members, peers, Some(window)))
    }

    fn swap(&self, group: Group<'_>, member: u32, fd: &OwnedFd) -> Result<Vec<Option<OwnedFd>>, DeviceError> {
        let core = self.core();
        handover::between(&core.link, group, member, fd, core.options.deadline)
    }
}

/// Makes a call that waits for a group's members, as long as all may still come and the deadline is not over.
fn while_hopeful<T: Send + 'static>(
    core: &Core,
    group: Group<'_>,
    what: String,
    call: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    let deadline = core.options.deadline;
    within(deadline, || core.link.is_hopeless(group), call)
        .unwrap_or_else(|| Err(core.link.absent(group, what, deadline)))
}

/// Runs one collective of each kind and of a small and a large size. NCCL connects at the first use of an algorithm, and
/// the host waits for all peers then; here it waits with a deadline. The communicator is given up if one fails.
fn connect(comm: &RawComm, context: &Arc<Context>, pool: &Arc<Pool>, size: u32) -> Result<(), DeviceError> {
    let stream = RawStream::new(context, Priority::Normal).inspect_err(|_| comm.abort())?;
    let bytes = 4 * LARGE;
    let made = pool.alloc(bytes).and_then(|one| Ok((one, pool.alloc(bytes * u64::from(size))?)));
    let (one, all) = made.inspect_err(|_| comm.abort())?;
    use_all(comm, &stream, (one.address, all.address), size).inspect_err(|_| {
        // What was launched may use the memory, until the communicator has ended it.
        comm.abort();
        let _ = stream.synchronize();
    })
}

/// Elements of the large ones.
const LARGE: u64 = 4 << 20;

/// The collectives of [`connect`], from and to memory for `LARGE` elements of one rank and of all.
fn use_all(comm: &RawComm, stream: &RawStream, (one, all): (u64, u64), size: u32) -> Result<(), DeviceError> {
    let _entered = stream.context().enter()?;
    for count in [64, LARGE] {
        // SAFETY: `one` has room for `LARGE` elements and `all` for as many of each rank; both live until the stream
        // was synchronized, by the caller after an error.
        unsafe { comm.all_gather(stream, (one, all), count, DType::F32) }?;
        // SAFETY: as above.
        unsafe { comm.reduce_scatter(stream, (all, one), count, DType::F32) }?;
    }
    comm.group_start()?;
    let pairs = (0u32..).take(size as usize).try_for_each(|peer| {
        let block = u64::from(peer) * 1024;
        // SAFETY: as above; blocks of 64 elements lie inside both.
        unsafe { comm.send(stream, one, 64, DType::F32, peer) }?;
        // SAFETY: as above.
        unsafe { comm.recv(stream, all + block, 64, DType::F32, peer) }
    });
    comm.group_end().and(pairs)?;
    stream.synchronize()
}
