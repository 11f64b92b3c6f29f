//! Recycled buffers for work that is not captured.
//!
//! A buffer that is given back carries events of its last uses; whoever takes it next waits for them on its own
//! stream. Nothing that was requested in capture ever enters the pool, and what a capture touched leaves it for good.
//!
//! Buffers are keyed by bytes and domain. Among the free ones of its key a *ticket* (which weight, which role) gets the
//! one it had last, if that is free, so that steps which repeat each other find the same addresses again.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use sessile_hal::{Comm, Device, DeviceError, EventScope, Memory, MemoryId, Stream};
use sessile_plan::{Domain, RequestSpec, Role};

use crate::{RuntimeError, agree};

/// Who asks: the same weight in the same role gets the same address where it can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    weight: String,
    role: Role,
    expert: Option<u32>,
}

impl Ticket {
    pub(crate) fn of(spec: &RequestSpec) -> Self {
        Ticket { weight: spec.weight.clone(), role: spec.role.clone(), expert: spec.expert }
    }
}

type Key = (Domain, u64);

struct Free<D: Device> {
    memory: D::Memory,
    last_uses: Vec<D::Event>,
    ticket: Ticket,
}

/// How a buffer that is out has been used so far.
struct Uses<D: Device> {
    streams: Vec<D::Stream>,
    captured: bool,
}

/// A buffer that came back by being dropped.
struct Dropped<D: Device> {
    memory: D::Memory,
    key: Key,
    ticket: Ticket,
}

type Returns<D> = Arc<Mutex<Vec<Dropped<D>>>>;

/// A buffer of the pool. Dropped without [`EagerPool::give_back`], it finds its way home all the same.
pub(crate) struct Lent<D: Device> {
    memory: D::Memory,
    key: Key,
    ticket: Ticket,
    /// `None` once it was given back.
    returns: Option<Returns<D>>,
}

impl<D: Device> std::fmt::Debug for Lent<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl<D: Device> Lent<D> {
    pub(crate) fn memory(&self) -> &D::Memory {
        &self.memory
    }
}

impl<D: Device> Drop for Lent<D> {
    fn drop(&mut self) {
        if let Some(returns) = self.returns.take() {
            returns.lock().unwrap_or_else(PoisonError::into_inner).push(Dropped {
                memory: self.memory.clone(),
                key: self.key.clone(),
                ticket: self.ticket.clone(),
            });
        }
    }
}

/// Pools keyed by bytes and domain.
pub(crate) struct EagerPool<D: Device> {
    free: BTreeMap<Key, Vec<Free<D>>>,
    out: HashMap<MemoryId, Uses<D>>,
    returns: Returns<D>,
    bytes: u64,
}

impl<D: Device> EagerPool<D> {
    pub(crate) fn new() -> Self {
        EagerPool { free: BTreeMap::new(), out: HashMap::new(), returns: Arc::default(), bytes: 0 }
    }

    /// Bytes allocated through the pool so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A buffer of exactly `bytes`, safe to write on `stream`. Registered memory names its communicator: where no free
    /// buffer is left, all members allocate and register one, or none of them does.
    pub(crate) fn take(
        &mut self,
        device: &D,
        stream: &D::Stream,
        (domain, bytes): Key,
        ticket: Ticket,
        window: Option<&D::Comm>,
        sealed: bool,
    ) -> Result<Lent<D>, RuntimeError> {
        self.take_dropped(device)?;
        let key = (domain, bytes);
        let free = self.free.get_mut(&key).and_then(|free| {
            let at = free.iter().rposition(|free| free.ticket == ticket).or(free.len().checked_sub(1))?;
            Some(free.remove(at))
        });
        let memory = match free {
            Some(free) => {
                for event in &free.last_uses {
                    device.wait(stream, event)?;
                }
                free.memory
            }
            None => {
                let memory = match window {
                    None => device.alloc(bytes, &key.0, "eager pool")?,
                    Some(_) if sealed => {
                        return Err(RuntimeError::PoolSealed { domain: key.0.to_string(), bytes });
                    }
                    Some(comm) => allocate_registered(device, comm, &key)?,
                };
                self.bytes += bytes;
                memory
            }
        };
        self.out.insert(memory.id(), Uses { streams: vec![stream.clone()], captured: false });
        Ok(Lent { memory, key, ticket, returns: Some(self.returns.clone()) })
    }

    /// Notes that work on `stream` uses a buffer, if it is one of the pool's.
    pub(crate) fn note_use(&mut self, memory: &D::Memory, stream: &D::Stream, captured: bool) {
        if let Some(uses) = self.out.get_mut(&memory.id()) {
            uses.captured |= captured;
            if !uses.streams.iter().any(|known| known.id() == stream.id()) {
                uses.streams.push(stream.clone());
            }
        }
    }

    /// Takes a buffer back whose last use was enqueued on `stream`, or on a stream that `stream` waited for.
    pub(crate) fn give_back(
        &mut self,
        device: &D,
        stream: &D::Stream,
        mut lent: Lent<D>,
    ) -> Result<(), DeviceError> {
        let last_use = device.event(EventScope::Internal)?;
        device.record(stream, &last_use)?;
        lent.returns = None;
        self.out.remove(&lent.memory.id());
        self.put(lent.memory.clone(), lent.key.clone(), lent.ticket.clone(), vec![last_use]);
        Ok(())
    }

    /// Lets a buffer go that a graph may use at every launch.
    pub(crate) fn let_go(&mut self, mut lent: Lent<D>) {
        lent.returns = None;
        self.out.remove(&lent.memory.id());
    }

    /// Takes in what was dropped: each waits for every stream that used it.
    fn take_dropped(&mut self, device: &D) -> Result<(), DeviceError> {
        let dropped = std::mem::take(&mut *self.returns.lock().unwrap_or_else(PoisonError::into_inner));
        for Dropped { memory, key, ticket } in dropped {
            let Some(uses) = self.out.remove(&memory.id()).filter(|uses| !uses.captured) else { continue };
            let mut last_uses = Vec::new();
            for stream in &uses.streams {
                let event = device.event(EventScope::Internal)?;
                device.record(stream, &event)?;
                last_uses.push(event);
            }
            self.put(memory, key, ticket, last_uses);
        }
        Ok(())
    }

    fn put(&mut self, memory: D::Memory, key: Key, ticket: Ticket, last_uses: Vec<D::Event>) {
        self.free.entry(key).or_default().push(Free { memory, last_uses, ticket });
    }
}

/// Allocates on every member, then registers; if one member can't, none does.
fn allocate_registered<D: Device>(device: &D, comm: &D::Comm, key: &Key) -> Result<D::Memory, RuntimeError> {
    let allocated = device.alloc(key.1, &key.0, "eager pool").map_err(RuntimeError::from);
    agree::same_size(comm, key.1)?;
    let memory = agree::share(comm, allocated)?;
    agree::share(comm, device.register_window(comm, &memory).map_err(RuntimeError::from))?;
    debug_assert_eq!(memory.domain(), &Domain::Symmetric(comm.name().to_owned()));
    Ok(memory)
}
