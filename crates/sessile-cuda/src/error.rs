//! Codes of the vendor's libraries as errors: the call, the code, its name and its text.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{self, CUresult};
use sessile_hal::DeviceError;

/// One call of the driver, checked. The `unsafe` block around it holds the proof.
macro_rules! cuda {
    ($call:ident ( $($argument:expr),* $(,)? )) => {
        $crate::error::driver(stringify!($call), cudarc::driver::sys::$call($($argument),*))
    };
}
pub(crate) use cuda;

/// The result of the driver's function `call`.
pub(crate) fn driver(call: &'static str, code: CUresult) -> Result<(), DeviceError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (mut name, mut text): (*const c_char, *const c_char) = (std::ptr::null(), std::ptr::null());
    // SAFETY: `name` is a local that lives over the call; any code may be asked for ("CUDA_ERROR_INVALID_VALUE will be
    // returned and *pStr set to the NULL address" for an unknown one, Driver API, cuGetErrorName).
    let _ = unsafe { sys::cuGetErrorName(code, &raw mut name) };
    // SAFETY: as above, for the text.
    let _ = unsafe { sys::cuGetErrorString(code, &raw mut text) };
    Err(DeviceError::Driver { call, code: code as i64, name: owned(name), text: owned(text) })
}

/// Whether an error is the driver's `code`.
pub(crate) fn is(error: &DeviceError, code: CUresult) -> bool {
    matches!(error, DeviceError::Driver { code: have, .. } if *have == code as i64)
}

/// Whether the GPU had no memory for the call.
pub(crate) fn is_full(error: &DeviceError) -> bool {
    is(error, CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// A static string of a vendor's library.
pub(crate) fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: not null (checked above); the libraries return "a pointer to a NULL-terminated string" that is static
    // (cuGetErrorString, ncclGetErrorString, nvrtcGetErrorString) or lives until the next call on the thread
    // (ncclGetLastError); it is copied here, before any such call.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}
