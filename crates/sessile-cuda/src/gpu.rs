//! The GPUs of a machine, as the driver describes them.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use cudarc::driver::sys;
use sessile_hal::DeviceError;

use crate::error::cuda;
use crate::library::{Library, load};

/// The oldest driver that has every function used here, as the driver counts.
pub const OLDEST_DRIVER: i32 = 13_000;

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Number among the visible GPUs.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Identity, the same in every process.
    pub uuid: [u8; 16],
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of L2.
    pub l2: u64,
    /// Whether memory can be shared between processes by file descriptor.
    pub shareable: bool,
    /// Whether the driver supports multicast (reported only; never used).
    pub multicast: bool,
}

/// Version of the loaded driver, such as 13000.
///
/// # Errors
/// [`DeviceError::LibraryMissing`], [`DeviceError::Driver`].
pub fn driver_version() -> Result<i32, DeviceError> {
    load(Library::Driver)?;
    let mut version = 0;
    // SAFETY: `version` is a local that lives over the call; the function may be called before `cuInit`.
    unsafe { cuda!(cuDriverGetVersion(&raw mut version)) }?;
    Ok(version)
}

/// The visible GPUs.
///
/// # Errors
/// [`DeviceError::LibraryMissing`], [`DeviceError::TooOld`], [`DeviceError::Driver`].
pub fn gpus() -> Result<Vec<Gpu>, DeviceError> {
    let version = driver_version()?;
    if version < OLDEST_DRIVER {
        return Err(DeviceError::TooOld {
            what: Library::Driver.name(),
            have: version.into(),
            need: OLDEST_DRIVER.into(),
            remedy: Library::Driver.remedy(),
        });
    }
    // SAFETY: no precondition; 0 is the only flag there is.
    unsafe { cuda!(cuInit(0)) }?;
    let mut count = 0;
    // SAFETY: `count` lives over the call; `cuInit` succeeded above.
    unsafe { cuda!(cuDeviceGetCount(&raw mut count)) }?;
    (0..count).map(gpu).collect()
}

fn gpu(ordinal: c_int) -> Result<Gpu, DeviceError> {
    let device = raw_device(ordinal)?;
    let mut name = [0u8; 256];
    // SAFETY: `name` has the 256 bytes that the call is told of; `device` came from the driver.
    unsafe { cuda!(cuDeviceGetName(name.as_mut_ptr().cast(), 256, device)) }?;
    let mut uuid = MaybeUninit::<sys::CUuuid>::uninit();
    // SAFETY: `uuid` has room for the 16 bytes that are written; `device` came from the driver.
    unsafe { cuda!(cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device)) }?;
    // SAFETY: the call above succeeded, so all 16 bytes are written.
    let uuid = unsafe { uuid.assume_init() };
    let mut memory = 0;
    // SAFETY: `memory` lives over the call; `device` came from the driver.
    unsafe { cuda!(cuDeviceTotalMem_v2(&raw mut memory, device)) }?;
    use sys::CUdevice_attribute_enum as A;
    let get = |what| attribute(device, what);
    let count = |what| get(what).map(|value| u32::try_from(value).unwrap_or(0));
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(Gpu {
        ordinal: u32::try_from(ordinal).unwrap_or(0),
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        uuid: uuid.bytes.map(|byte| byte.cast_unsigned()),
        capability: (
            count(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            count(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: count(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: memory as u64,
        l2: u64::from(count(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        shareable: get(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0,
        multicast: get(A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)? != 0,
    })
}

pub(crate) fn raw_device(ordinal: c_int) -> Result<sys::CUdevice, DeviceError> {
    let mut device = 0;
    // SAFETY: `device` lives over the call; a wrong ordinal is an error of the driver.
    unsafe { cuda!(cuDeviceGet(&raw mut device, ordinal)) }?;
    Ok(device)
}

pub(crate) fn attribute(device: sys::CUdevice, what: sys::CUdevice_attribute) -> Result<c_int, DeviceError> {
    let mut value = 0;
    // SAFETY: `value` lives over the call; `device` came from the driver.
    unsafe { cuda!(cuDeviceGetAttribute(&raw mut value, what, device)) }?;
    Ok(value)
}

/// Whether one GPU can read and write another's memory.
///
/// # Errors
/// [`DeviceError::Driver`].
pub fn peer_access(from: u32, to: u32) -> Result<bool, DeviceError> {
    let (from, to) = (raw_device(from.cast_signed())?, raw_device(to.cast_signed())?);
    let mut can = 0;
    // SAFETY: `can` lives over the call; both devices came from the driver.
    unsafe { cuda!(cuDeviceCanAccessPeer(&raw mut can, from, to)) }?;
    Ok(can != 0)
}
