//! Memory as the driver gives it: ranges of their own that can be shared, pieces of a pool, words that the host sees.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys;
use sessile_hal::DeviceError;

use crate::context::{Context, HANDLE_TYPE, Priority, RawStream};
use crate::error::cuda;

/// Memory with an address of its own that can be shared by file descriptor.
pub(crate) struct Mapping {
    pub(crate) address: u64,
    pub(crate) size: u64,
    handle: sys::CUmemGenericAllocationHandle,
    context: Arc<Context>,
}

impl Mapping {
    /// Allocates at least `bytes`; the address is a multiple of the granularity.
    pub(crate) fn alloc(context: &Arc<Context>, bytes: u64) -> Result<Self, DeviceError> {
        let size = bytes.max(1).next_multiple_of(context.granularity);
        let properties = context.properties()?;
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: both locals live over the call; `size` is a multiple of the granularity; 0 is the only flag.
        unsafe { cuda!(cuMemCreate(&raw mut handle, size as usize, &raw const properties, 0)) }?;
        Self::map(context, handle, size)
    }

    /// Maps memory that another process or rank exported with `size` bytes.
    pub(crate) fn import(context: &Arc<Context>, fd: &OwnedFd, size: u64) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut handle = 0;
        let os = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: `handle` lives over the call; for this handle type the driver takes the descriptor's number in place
        // of a pointer, and keeps no claim on it (Driver API: the caller closes it).
        unsafe { cuda!(cuMemImportFromShareableHandle(&raw mut handle, os, HANDLE_TYPE)) }?;
        Self::map(context, handle, size)
    }

    /// Takes the handle.
    fn map(
        context: &Arc<Context>,
        handle: sys::CUmemGenericAllocationHandle,
        size: u64,
    ) -> Result<Self, DeviceError> {
        let (mut address, length) = (0, size as usize);
        // SAFETY: `address` lives over the call; size and alignment are multiples of the granularity.
        let reserved = unsafe {
            cuda!(cuMemAddressReserve(&raw mut address, length, context.granularity as usize, 0, 0))
        };
        if let Err(error) = reserved {
            // SAFETY: the handle is ours and nothing is mapped from it here.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(error);
        }
        // From here on `drop` undoes everything; unmapping what is not mapped is an error that it ignores.
        let mapping = Mapping { address, size, handle, context: context.clone() };
        mapping.open()?;
        Ok(mapping)
    }

    /// Maps the handle at the address. The context is current, and nothing is mapped there.
    fn open(&self) -> Result<(), DeviceError> {
        let (context, length) = (&self.context, self.size as usize);
        // SAFETY: the range is reserved with this size, nothing is mapped there (callers), and the allocation has it.
        unsafe { cuda!(cuMemMap(self.address, length, 0, self.handle, 0)) }?;
        let access = sys::CUmemAccessDesc {
            location: context.location(),
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole range is mapped (line above); one descriptor is given.
        unsafe { cuda!(cuMemSetAccess(self.address, length, &raw const access, 1)) }
    }

    /// Gives the physical bytes back and maps fresh ones at the same address. No work in flight touches them, and no
    /// window holds them.
    pub(crate) fn renew(&mut self) -> Result<(), DeviceError> {
        let properties = self.context.properties()?;
        let _entered = self.context.enter()?;
        let mut fresh = 0;
        // SAFETY: as in `alloc`. Before the old ones go, so that an error changes nothing.
        unsafe { cuda!(cuMemCreate(&raw mut fresh, self.size as usize, &raw const properties, 0)) }?;
        // SAFETY: mapped at this address and size; no work in flight touches it (this function's contract).
        unsafe { cuda!(cuMemUnmap(self.address, self.size as usize)) }?;
        let old = std::mem::replace(&mut self.handle, fresh);
        // SAFETY: the old handle is ours and no longer mapped here; released here alone.
        unsafe { cuda!(cuMemRelease(old)) }?;
        self.open()
    }

    /// A descriptor that another process can import. Each call gives a new one.
    pub(crate) fn export(&self) -> Result<OwnedFd, DeviceError> {
        let _entered = self.context.enter()?;
        let mut fd: c_int = -1;
        // SAFETY: the handle is alive and was made for this handle type; for it the driver writes an `int`.
        unsafe { cuda!(cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, HANDLE_TYPE, 0)) }?;
        // SAFETY: the driver gave a new open descriptor to us, and nobody else has its number.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: mapped in `map` at this address and size, unmapped here alone; no work in flight touches it
            // (`crate::graveyard`).
            let _ = unsafe { sys::cuMemUnmap(self.address, self.size as usize) };
            // SAFETY: reserved in `map` with this size, and unmapped above.
            let _ = unsafe { sys::cuMemAddressFree(self.address, self.size as usize) };
            // SAFETY: ours since `map`; released here alone.
            let _ = unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

/// Borrowed descriptors as the socket functions take them.
pub(crate) fn borrow(fd: &OwnedFd) -> BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(fd)
}

/// The pool that ordinary memory comes from, with the stream on which it allocates and frees.
pub(crate) struct Pool {
    raw: sys::CUmemoryPool,
    stream: RawStream,
}

// SAFETY: a driver handle; the driver locks pools.
unsafe impl Send for Pool {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pool {}

/// Memory of the pool.
pub(crate) struct Block {
    pub(crate) address: u64,
    pool: Arc<Pool>,
}

impl Pool {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>, DeviceError> {
        let stream = RawStream::new(context, Priority::Normal)?;
        let _entered = context.enter()?;
        // SAFETY: the type is plain data, and the driver asks for unused fields to be zero.
        let mut properties = unsafe { std::mem::zeroed::<sys::CUmemPoolProps>() };
        properties.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = context.location();
        let mut raw = std::ptr::null_mut();
        // SAFETY: both locals live over the call. Destroyed in `drop`.
        unsafe { cuda!(cuMemPoolCreate(&raw mut raw, &raw const properties)) }?;
        Ok(Arc::new(Pool { raw, stream }))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.stream.context()
    }

    /// Allocates; the bytes may be used on every stream when this returns.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: u64) -> Result<Block, DeviceError> {
        let _entered = self.stream.context().enter()?;
        let mut address = 0;
        let size = bytes.max(1).next_multiple_of(256) as usize;
        // SAFETY: `address` lives over the call; pool and stream are alive and of one context.
        unsafe { cuda!(cuMemAllocFromPoolAsync(&raw mut address, size, self.raw, self.stream.raw())) }?;
        let block = Block { address, pool: self.clone() };
        self.stream.synchronize()?;
        Ok(block)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Ok(_entered) = self.stream.context().enter() {
            let _ = self.stream.synchronize();
            // SAFETY: made in `new`, destroyed here alone; every block holds the pool, so all are freed.
            let _ = unsafe { sys::cuMemPoolDestroy(self.raw) };
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Ok(_entered) = self.pool.stream.context().enter() {
            // SAFETY: allocated from the pool on this stream, freed here alone; no work in flight touches it
            // (`crate::graveyard`).
            let _ = unsafe { sys::cuMemFreeAsync(self.address, self.pool.stream.raw()) };
        }
    }
}

/// Copies bytes out of the device and waits. Nothing in flight may write them.
pub(crate) fn copy_out(pool: &Pool, to: &mut [u8], from: u64) -> Result<(), DeviceError> {
    let _entered = pool.stream.context().enter()?;
    // SAFETY: `to` is borrowed until the stream was synchronized below; the caller has checked that the view lies
    // inside live memory.
    unsafe { cuda!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), pool.stream.raw())) }?;
    pool.stream.synchronize()
}

/// Copies bytes into the device and waits. Nothing in flight may touch them.
pub(crate) fn copy_in(pool: &Pool, to: u64, from: &[u8]) -> Result<(), DeviceError> {
    let _entered = pool.stream.context().enter()?;
    // SAFETY: `from` is borrowed until the stream was synchronized below; the caller has checked that the view lies
    // inside live memory.
    unsafe { cuda!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), pool.stream.raw())) }?;
    pool.stream.synchronize()
}

/// A word that kernels write and the host reads while they run.
pub(crate) struct HostWords {
    host: *mut u32,
    pub(crate) address: u64,
    count: usize,
    context: Arc<Context>,
}

// SAFETY: the words are only read and written by volatile accesses; any thread may.
unsafe impl Send for HostWords {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostWords {}

impl HostWords {
    pub(crate) fn new(context: &Arc<Context>, count: usize) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` lives over the call. Freed in `drop`.
        unsafe { cuda!(cuMemHostAlloc(&raw mut raw, 4 * count, sys::CU_MEMHOSTALLOC_DEVICEMAP)) }?;
        let mut words = HostWords { host: raw.cast(), address: 0, count, context: context.clone() };
        // SAFETY: `raw` came from `cuMemHostAlloc` with device mapping.
        unsafe { cuda!(cuMemHostGetDevicePointer_v2(&raw mut words.address, raw, 0)) }?;
        (0..count).for_each(|at| words.set(at, 0));
        Ok(words)
    }

    pub(crate) fn get(&self, at: usize) -> u32 {
        assert!(at < self.count);
        // SAFETY: inside the allocation (line above), which lives as long as `self`; aligned to 4 (page aligned).
        let word = unsafe { self.host.add(at) };
        // SAFETY: `word` points to a live word; the device may write it at once, and the access is volatile.
        unsafe { word.read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, value: u32) {
        assert!(at < self.count);
        // SAFETY: as in `get`.
        let word = unsafe { self.host.add(at) };
        // SAFETY: as in `get`.
        unsafe { word.write_volatile(value) }
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: from `cuMemHostAlloc`, freed here alone, after all kernels of the device have ended.
            let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}
