//! NCCL: its functions, checked, and communicators and windows that own themselves.
//!
//! The library is found by the project itself rather than by the bindings, which look for one file name only. Results
//! are taken as numbers: a newer library may give codes that the bindings do not know.
//!
//! Communicators are blocking. Non-blocking ones start a thread for every call, also in eager execution; here the calls
//! that wait for peers (making, registering, ending) run on threads of their own with a deadline instead
//! (`within`).

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId, ncclWindow_t};
use libloading::os::unix::Library as Loaded;
use sessile_hal::DeviceError;
use sessile_plan::DType;

use crate::context::{Context, RawStream};
use crate::library::{Library, handle};

/// The oldest NCCL with windows, as NCCL counts.
pub const OLDEST: i32 = 22_700;
/// From this version on symmetric kernels wait for what was launched before them also in graphs.
pub const WAITS_IN_GRAPHS: i32 = 23_007;
/// The first version whose symmetric kernels do not.
pub const STARTS_EARLY: i32 = 22_800;

/// Whether a version's symmetric kernels may start before the kernel ahead of them has written, so that something else
/// than a kernel must stand between the two.
pub fn needs_gate(version: i32) -> bool {
    (STARTS_EARLY..WAITS_IN_GRAPHS).contains(&version)
}

type Code = c_int;

macro_rules! functions {
    ($($field:ident = $name:ident ( $($argument:ty),* ) ;)*) => {
        /// The functions that are used.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            error_string: unsafe extern "C" fn(Code) -> *const c_char,
            last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
        }

        impl Functions {
            fn find(library: &Loaded) -> Result<Self, String> {
                Ok(Functions {
                    $($field: symbol(library, concat!(stringify!($name), "\0"))?,)*
                    error_string: symbol(library, "ncclGetErrorString\0")?,
                    last_error: symbol(library, "ncclGetLastError\0")?,
                })
            }
        }
    };
}

functions! {
    version = ncclGetVersion(*mut c_int);
    unique_id = ncclGetUniqueId(*mut ncclUniqueId);
    init = ncclCommInitRank(*mut ncclComm_t, c_int, ncclUniqueId, c_int);
    finalize = ncclCommFinalize(ncclComm_t);
    destroy = ncclCommDestroy(ncclComm_t);
    abort = ncclCommAbort(ncclComm_t);
    async_error = ncclCommGetAsyncError(ncclComm_t, *mut Code);
    group_start = ncclGroupStart();
    group_end = ncclGroupEnd();
    all_gather = ncclAllGather(*const c_void, *mut c_void, usize, c_int, ncclComm_t, CUstream);
    reduce_scatter = ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, CUstream);
    send = ncclSend(*const c_void, usize, c_int, c_int, ncclComm_t, CUstream);
    recv = ncclRecv(*mut c_void, usize, c_int, c_int, ncclComm_t, CUstream);
    register = ncclCommWindowRegister(ncclComm_t, *mut c_void, usize, *mut ncclWindow_t, c_int);
    deregister = ncclCommWindowDeregister(ncclComm_t, ncclWindow_t);
}

fn symbol<T: Copy>(library: &Loaded, name: &str) -> Result<T, String> {
    // SAFETY: the caller's field gives the function's C type as NCCL 2.27 and later declare it in nccl.h, which keeps
    // its binary interface within major version 2; the library is never unloaded (`crate::library`).
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol).map_err(|error| error.to_string())
}

fn functions() -> Result<&'static Functions, DeviceError> {
    static FOUND: OnceLock<Result<Functions, DeviceError>> = OnceLock::new();
    let find = || {
        let missing = |why| DeviceError::LibraryMissing {
            library: Library::Nccl.name(),
            enables: Library::Nccl.enables(),
            tried: "the functions of NCCL 2.27".to_owned(),
            why,
            remedy: Library::Nccl.remedy(),
        };
        Functions::find(handle(Library::Nccl)?).map_err(missing)
    };
    FOUND.get_or_init(find).as_ref().map_err(Clone::clone)
}

fn check(call: &'static str, code: Code, comm: ncclComm_t) -> Result<(), DeviceError> {
    if code == 0 {
        return Ok(());
    }
    let functions = functions()?;
    // SAFETY: any code may be asked for; the text is static.
    let name = unsafe { (functions.error_string)(code) };
    // SAFETY: a null communicator is allowed ("the last error of any communicator"); others are alive (callers).
    let text = unsafe { (functions.last_error)(comm) };
    Err(DeviceError::Driver {
        call,
        code: code.into(),
        name: crate::error::owned(name),
        text: crate::error::owned(text),
    })
}

/// Version of the loaded library, such as 22809.
///
/// # Errors
/// [`DeviceError::LibraryMissing`], [`DeviceError::Driver`].
pub fn version() -> Result<i32, DeviceError> {
    let mut version = 0;
    // SAFETY: `version` lives over the call.
    let code = unsafe { (functions()?.version)(&raw mut version) };
    check("ncclGetVersion", code, std::ptr::null_mut()).map(|()| version)
}

/// What ranks need to find each other: 128 bytes that one of them makes.
pub(crate) fn unique_id() -> Result<[u8; 128], DeviceError> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: `id` lives over the call.
    let code = unsafe { (functions()?.unique_id)(&raw mut id) };
    check("ncclGetUniqueId", code, std::ptr::null_mut())?;
    Ok(id.internal.map(|byte| byte.cast_unsigned()))
}

/// Runs `call` on a thread of its own and gives up waiting after `deadline`, or when `give_up` says so; the thread then
/// goes on by itself. `None` if it was given up.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    mut give_up: impl FnMut() -> bool,
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = channel();
    let spawned = std::thread::Builder::new().name("sessile-nccl".to_owned()).spawn(move || {
        let _ = sender.send(call());
    });
    spawned.ok()?;
    let until = std::time::Instant::now() + deadline;
    loop {
        if let Ok(result) = receiver.recv_timeout(Duration::from_millis(20)) {
            return Some(result);
        }
        if give_up() || std::time::Instant::now() > until {
            return None;
        }
    }
}

/// A communicator. Ends itself in order when dropped, unless it was aborted.
pub(crate) struct RawComm {
    raw: ncclComm_t,
    aborted: AtomicBool,
    context: Arc<Context>,
}

// SAFETY: a handle of the library. Calls on it are made by the rank's own thread under the device's lock, and
// `ncclCommAbort` and `ncclCommGetAsyncError`, which NCCL allows from other threads.
unsafe impl Send for RawComm {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawComm {}

/// A kind of element, as NCCL numbers them (nccl.h, ncclDataType_t).
fn element(dtype: DType) -> c_int {
    match dtype {
        DType::U32 => 3,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

const SUM: c_int = 0;
const SYMMETRIC: c_int = 1;

impl RawComm {
    /// Makes this rank's part; returns when all ranks have come. Blocks.
    pub(crate) fn init(
        context: &Arc<Context>,
        id: [u8; 128],
        size: u32,
        rank: u32,
    ) -> Result<Self, DeviceError> {
        let functions = functions()?;
        let _entered = context.enter()?;
        let id = ncclUniqueId { internal: id.map(|byte| byte.cast_signed()) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` lives over the call; the context is current on this thread.
        let code = unsafe { (functions.init)(&raw mut raw, size.cast_signed(), id, rank.cast_signed()) };
        check("ncclCommInitRank", code, std::ptr::null_mut())?;
        Ok(RawComm { raw, aborted: AtomicBool::new(false), context: context.clone() })
    }

    fn alive(&self, call: &'static str) -> Result<&'static Functions, DeviceError> {
        if self.aborted.load(Ordering::SeqCst) {
            return Err(DeviceError::Driver {
                call,
                code: -1,
                name: "aborted".to_owned(),
                text: "the communicator was given up".to_owned(),
            });
        }
        functions()
    }

    /// An error that came up behind the host's back.
    pub(crate) fn async_error(&self) -> Result<(), DeviceError> {
        let functions = self.alive("ncclCommGetAsyncError")?;
        let mut error = 0;
        // SAFETY: the communicator is alive (checked); `error` lives over the call.
        let code = unsafe { (functions.async_error)(self.raw, &raw mut error) };
        check("ncclCommGetAsyncError", code, self.raw)?;
        // 7 is ncclInProgress.
        if error == 7 { Ok(()) } else { check("collective", error, self.raw) }
    }

    /// Ends it at once; kernels in flight end too, without effect.
    pub(crate) fn abort(&self) {
        if self.aborted.swap(true, Ordering::SeqCst) {
            return;
        }
        if let (Ok(functions), Ok(_entered)) = (functions(), self.context.enter()) {
            // SAFETY: alive until this call, which the flag lets happen once; NCCL allows it from any thread and state.
            let _ = unsafe { (functions.abort)(self.raw) };
        }
    }

    /// Between this and [`Self::group_end`] calls are collected; they are launched together.
    pub(crate) fn group_start(&self) -> Result<(), DeviceError> {
        // SAFETY: no precondition.
        check("ncclGroupStart", unsafe { (self.alive("ncclGroupStart")?.group_start)() }, self.raw)
    }

    pub(crate) fn group_end(&self) -> Result<(), DeviceError> {
        // SAFETY: follows `group_start` on this thread.
        check("ncclGroupEnd", unsafe { (self.alive("ncclGroupEnd")?.group_end)() }, self.raw)
    }

    /// # Safety
    /// `send` and `recv` are device addresses of `count` and of size times `count` elements of live memory, which stay
    /// so until the work has ended.
    pub(crate) unsafe fn all_gather(
        &self,
        stream: &RawStream,
        (send, recv): (u64, u64),
        count: u64,
        dtype: DType,
    ) -> Result<(), DeviceError> {
        let functions = self.alive("ncclAllGather")?;
        let (from, to, count) = (send as *const c_void, recv as *mut c_void, count as usize);
        // SAFETY: communicator and stream are alive; the addresses are the caller's promise.
        let code = unsafe { (functions.all_gather)(from, to, count, element(dtype), self.raw, stream.raw()) };
        check("ncclAllGather", code, self.raw)
    }

    /// # Safety
    /// As [`Self::all_gather`], with the extents exchanged: `count` elements are received.
    pub(crate) unsafe fn reduce_scatter(
        &self,
        stream: &RawStream,
        (send, recv): (u64, u64),
        count: u64,
        dtype: DType,
    ) -> Result<(), DeviceError> {
        let functions = self.alive("ncclReduceScatter")?;
        let (from, to, count) = (send as *const c_void, recv as *mut c_void, count as usize);
        // SAFETY: communicator and stream are alive; the addresses are the caller's promise.
        let code = unsafe {
            (functions.reduce_scatter)(from, to, count, element(dtype), SUM, self.raw, stream.raw())
        };
        check("ncclReduceScatter", code, self.raw)
    }

    /// Sends `count` elements to `peer`.
    ///
    /// # Safety
    /// `from` is the device address of `count` elements of live memory, which stays so until the work has ended.
    pub(crate) unsafe fn send(
        &self,
        stream: &RawStream,
        from: u64,
        count: u64,
        dtype: DType,
        peer: u32,
    ) -> Result<(), DeviceError> {
        let functions = self.alive("ncclSend")?;
        let (from, peer) = (from as *const c_void, peer.cast_signed());
        // SAFETY: communicator and stream are alive; the address is the caller's promise.
        let code =
            unsafe { (functions.send)(from, count as usize, element(dtype), peer, self.raw, stream.raw()) };
        check("ncclSend", code, self.raw)
    }

    /// Receives `count` elements from `peer`.
    ///
    /// # Safety
    /// As [`Self::send`], for writing.
    pub(crate) unsafe fn recv(
        &self,
        stream: &RawStream,
        to: u64,
        count: u64,
        dtype: DType,
        peer: u32,
    ) -> Result<(), DeviceError> {
        let functions = self.alive("ncclRecv")?;
        let (to, peer) = (to as *mut c_void, peer.cast_signed());
        // SAFETY: communicator and stream are alive; the address is the caller's promise.
        let code =
            unsafe { (functions.recv)(to, count as usize, element(dtype), peer, self.raw, stream.raw()) };
        check("ncclRecv", code, self.raw)
    }

    /// Registers memory with all ranks, at the same size on each. Blocks. `None` if the library took it and gave no
    /// window: it has no symmetric memory here.
    ///
    /// # Safety
    /// `address` begins `bytes` of live memory made for sharing (`Mapping`), which stays so until the window is gone.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        bytes: u64,
    ) -> Result<Option<RawWindow>, DeviceError> {
        let functions = self.alive("ncclCommWindowRegister")?;
        let _entered = self.context.enter()?;
        let (at, mut raw) = (address as *mut c_void, std::ptr::null_mut());
        // SAFETY: the communicator is alive; `raw` lives over the call; the memory is the caller's promise.
        let code = unsafe { (functions.register)(self.raw, at, bytes as usize, &raw mut raw, SYMMETRIC) };
        check("ncclCommWindowRegister", code, self.raw)?;
        Ok((!raw.is_null()).then(|| RawWindow { raw, comm: self.clone() }))
    }
}

impl Drop for RawComm {
    fn drop(&mut self) {
        if self.aborted.load(Ordering::SeqCst) {
            return;
        }
        let (Ok(functions), Ok(_entered)) = (functions(), self.context.enter()) else { return };
        // SAFETY: alive and healthy; all its work has ended (`crate::graveyard`), no graph holds it.
        let _ = unsafe { (functions.finalize)(self.raw) };
        // SAFETY: finalized above; destroyed here alone.
        let _ = unsafe { (functions.destroy)(self.raw) };
    }
}

/// Memory registered with a communicator.
pub(crate) struct RawWindow {
    raw: ncclWindow_t,
    comm: Arc<RawComm>,
}

// SAFETY: a handle of the library, used only to give it back.
unsafe impl Send for RawWindow {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawWindow {}

impl Drop for RawWindow {
    fn drop(&mut self) {
        // An aborted communicator has given its windows back already.
        if let (Ok(functions), Ok(_entered)) =
            (self.comm.alive("ncclCommWindowDeregister"), self.comm.context.enter())
        {
            // SAFETY: registered with this communicator, which is alive (held); given back here alone, after all work
            // that uses it (`crate::graveyard`).
            let _ = unsafe { (functions.deregister)(self.comm.raw, self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_that_start_early_are_gated() {
        for (version, gated) in
            [(22_705, false), (22_800, true), (22_907, true), (23_006, true), (23_007, false)]
        {
            assert_eq!(needs_gate(version), gated, "{version}");
        }
    }

    #[test]
    fn waiting_is_given_up_at_the_deadline_or_when_told() {
        assert_eq!(within(Duration::from_secs(5), || false, || 7), Some(7));
        let slow = || std::thread::sleep(Duration::from_secs(2));
        assert_eq!(within(Duration::from_millis(50), || false, slow), None);
        assert_eq!(within(Duration::from_secs(5), || true, slow), None);
    }
}
