//! What sessile does in a program whose context, streams, kernels and graphs are a framework's.
//!
//! | file | what |
//! |---|---|
//! | `mod` | the GPU, and what waits to be destroyed |
//! | `memory` | arenas, and those of the other ranks of a group |
//! | `stream` | events on the framework's streams; where its captures stand, and what their edges say |
//! | `launch` | launches of its graphs that are made again and again |
//! | `reduce` | the one-shot reduce-scatter on the framework's streams |
//!
//! Streams come as handles, as `torch.cuda.Stream.cuda_stream` gives them. Calls on them are unsafe: only the framework
//! knows whether they are alive.

mod launch;
mod memory;
mod reduce;
mod stream;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use sessile_hal::DeviceError;

pub use launch::GuestLaunch;
pub use memory::{GuestMemory, Offer};
pub use reduce::{Block, GaveUp, GuestGroup, PAD_BYTES};
pub use stream::{CapturedNode, GuestEvent};

use crate::context::Context;
use crate::error::cuda;
use crate::kernel::{Modules, compile::Unit};
use crate::physical::Pool;

/// Something to be destroyed.
type Remains = Box<dyn Send>;

/// One GPU in a program of a framework.
pub struct Guest {
    context: Arc<Context>,
    pool: Arc<Pool>,
    modules: OnceLock<Modules>,
    /// Dropped and perhaps still in use: a graph lets go of what it held on a thread where the driver may not be called.
    yard: Arc<Yard>,
}

/// What was dropped.
#[derive(Default)]
pub(crate) struct Yard(Mutex<Vec<Remains>>);

impl Yard {
    pub(crate) fn bury(&self, remains: Remains) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(remains);
    }

    fn take(&self) -> Vec<Remains> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Guest {
    /// The GPU with this number, in its primary context, which frameworks use too. Every call for one GPU gives the same
    /// guest, which stays until the process ends: the last owner of its memory may be a graph, which lets go of it where
    /// the driver may not be called.
    ///
    /// # Errors
    /// [`DeviceError::LibraryMissing`], [`DeviceError::TooOld`], [`DeviceError::NoGpu`], [`DeviceError::Driver`].
    pub fn open(ordinal: u32) -> Result<Arc<Guest>, DeviceError> {
        static GUESTS: Mutex<BTreeMap<u32, Arc<Guest>>> = Mutex::new(BTreeMap::new());
        let mut guests = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(guest) = guests.get(&ordinal) {
            return Ok(guest.clone());
        }
        let context = Context::open(ordinal)?;
        let pool = Pool::new(&context)?;
        let guest = Arc::new(Guest { context, pool, modules: OnceLock::new(), yard: Arc::default() });
        guests.insert(ordinal, guest.clone());
        Ok(guest)
    }

    /// Number of the GPU.
    pub fn ordinal(&self) -> u32 {
        self.context.gpu.ordinal
    }

    /// Where it is: the GPU, then the machine. Ranks whose machines are equal can map each other's memory.
    pub fn place(&self) -> ([u8; 16], String) {
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        (self.context.gpu.uuid, machine.trim().to_owned())
    }

    /// Free and total bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.memory()
    }

    /// Destroys what was dropped. The caller has waited for the whole GPU, and no capture is going on.
    pub fn reap(&self) {
        drop(self.yard.take());
    }

    /// Writes zeros and waits.
    fn zero(&self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the range was mapped just now (the only caller), and nothing else knows of it.
        unsafe { cuda!(cuMemsetD8_v2(address, 0, bytes as usize)) }?;
        // SAFETY: a context is current; the call has no other precondition.
        unsafe { cuda!(cuCtxSynchronize()) }
    }

    /// The kernels of the one-shot reduce-scatter, loaded once.
    fn modules(&self) -> Result<&Modules, DeviceError> {
        if let Some(modules) = self.modules.get() {
            return Ok(modules);
        }
        let modules = Modules::load_units(&self.context, &[Unit::OneShot])?;
        Ok(self.modules.get_or_init(|| modules))
    }
}
