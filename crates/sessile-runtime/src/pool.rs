//! Recycled buffers for work that is not captured.
//!
//! A buffer that is given back carries the event of its last use; whoever takes it next waits for that event on
//! its own stream. Nothing that was requested in capture ever enters the pool.

use std::collections::BTreeMap;

use sessile_hal::{Device, DeviceError, EventScope};
use sessile_plan::Domain;

struct Free<D: Device> {
    memory: D::Memory,
    last_use: D::Event,
}

/// Pools keyed by bytes and domain.
pub(crate) struct EagerPool<D: Device> {
    free: BTreeMap<(Domain, u64), Vec<Free<D>>>,
    bytes: u64,
}

impl<D: Device> EagerPool<D> {
    pub(crate) fn new() -> Self {
        EagerPool { free: BTreeMap::new(), bytes: 0 }
    }

    /// Bytes allocated through the pool so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A buffer of exactly `bytes`, safe to write on `stream`.
    pub(crate) fn take(
        &mut self,
        device: &D,
        stream: &D::Stream,
        bytes: u64,
        domain: &Domain,
    ) -> Result<D::Memory, DeviceError> {
        if let Some(free) = self.free.get_mut(&(domain.clone(), bytes)).and_then(Vec::pop) {
            device.wait(stream, &free.last_use)?;
            return Ok(free.memory);
        }
        let memory = device.alloc(bytes, domain, "eager pool")?;
        self.bytes += bytes;
        Ok(memory)
    }

    /// Takes a buffer back whose last use was enqueued on `stream`.
    pub(crate) fn give_back(
        &mut self,
        device: &D,
        stream: &D::Stream,
        memory: D::Memory,
        bytes: u64,
        domain: Domain,
    ) -> Result<(), DeviceError> {
        let last_use = device.event(EventScope::Internal)?;
        device.record(stream, &last_use)?;
        self.free.entry((domain, bytes)).or_default().push(Free { memory, last_use });
        Ok(())
    }
}
