//! The bytes of one domain.

use std::sync::Arc;

use sessile_cuda::guest::GuestMemory;

/// Memory at a fixed address. A handle: clones share it, and the last one frees it.
#[derive(Clone)]
pub(crate) enum Arena {
    /// Of the host.
    Host(Arc<HostMemory>),
    /// Of a GPU.
    Cuda(GuestMemory),
}

/// Views begin at multiples of 256 bytes. Read and written by frameworks, through the address alone.
#[repr(align(256))]
#[derive(Clone)]
struct Unit(#[expect(dead_code, reason = "see above")] [u8; 256]);

pub(crate) struct HostMemory {
    address: u64,
    bytes: u64,
    /// Kept for its address. Frameworks write it through that.
    _units: Box<[Unit]>,
}

impl Arena {
    /// Zeroed memory of the host; `None` if there is none left.
    pub(crate) fn host(bytes: u64) -> Option<Arena> {
        let count = usize::try_from(bytes.div_ceil(256).max(1)).ok()?;
        let mut units: Vec<Unit> = Vec::new();
        units.try_reserve_exact(count).ok()?;
        units.resize(count, Unit([0; 256]));
        let mut units = units.into_boxed_slice();
        let address = units.as_mut_ptr() as u64;
        Some(Arena::Host(Arc::new(HostMemory { address, bytes, _units: units })))
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Arena::Host(memory) => memory.address,
            Arena::Cuda(memory) => memory.address(),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Arena::Host(memory) => memory.bytes,
            Arena::Cuda(memory) => memory.bytes(),
        }
    }

    /// Kind and number, as DLPack counts them.
    pub(crate) fn device(&self) -> (i32, i32) {
        match self {
            Arena::Host(_) => (1, 0),
            Arena::Cuda(memory) => (2, i32::try_from(memory.ordinal()).unwrap_or(0)),
        }
    }
}
