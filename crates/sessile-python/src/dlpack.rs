//! Views as DLPack tensors: a pointer, a shape, and a function that gives the arena's handle back.
//!
//! The layout is that of DLPack's version 0 structures (`dlpack.h`), which has not changed since 2017 and which every
//! framework still takes.

#![allow(
    unsafe_code,
    reason = "the exchange with frameworks is a structure of C; each use carries its proof"
)]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use sessile_plan::DType;

use crate::arena::Arena;

/// `DLDevice`.
#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[repr(C)]
struct Type {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: Type,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// What a tensor owns: freed as a whole by its deleter. `managed` stays where it is, since the box does.
struct Owner {
    managed: Managed,
    shape: Vec<i64>,
    _arena: Arena,
}

const NAME: &CStr = c"dltensor";

/// Bytes of an arena from `offset` as a capsule that a framework's `from_dlpack` takes. The tensor that comes of it
/// keeps the arena alive.
///
/// # Errors
/// Those of Python. `None` if the view does not lie in the arena.
pub(crate) fn export(
    py: Python<'_>,
    arena: &Arena,
    offset: u64,
    dtype: DType,
    shape: &[u64],
) -> PyResult<Option<Py<PyAny>>> {
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent));
    let inside = bytes.and_then(|bytes| bytes.checked_add(offset)).is_some_and(|end| end <= arena.bytes());
    if !inside {
        return Ok(None);
    }
    let shape: Vec<i64> = shape.iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX)).collect();
    let (kind, id) = arena.device();
    let (code, bits) = match dtype {
        DType::Bf16 => (4, 16),
        DType::F32 => (2, 32),
        // Frameworks know signed integers of 32 bits everywhere, unsigned ones not.
        DType::U32 => (0, 32),
    };
    let mut owner = Box::new(Owner {
        managed: Managed {
            tensor: Tensor {
                data: (arena.address() + offset) as *mut c_void,
                device: Device { kind, id },
                ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
                dtype: Type { code, bits, lanes: 1 },
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
            context: std::ptr::null_mut(),
            deleter: Some(delete),
        },
        shape,
        _arena: arena.clone(),
    });
    owner.managed.tensor.shape = owner.shape.as_mut_ptr();
    let raw = Box::into_raw(owner);
    // SAFETY: `raw` came from `Box::into_raw` just now and is not null.
    unsafe { (*raw).managed.context = raw.cast() };
    // SAFETY: `raw` points to a live `Owner`; taking a field's address reads nothing.
    let managed = unsafe { &raw mut (*raw).managed };
    // SAFETY: the interpreter is attached (`py`); the pointer is not null; the name is static, as the capsule needs.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: the capsule was not made, so the owner is still ours alone.
        drop(unsafe { Box::from_raw(raw) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference that we own, not null (above).
    Ok(Some(unsafe { Bound::from_owned_ptr(py, capsule) }.unbind()))
}

/// The deleter. A framework calls it once, on any thread, perhaps without the interpreter.
unsafe extern "C" fn delete(managed: *mut Managed) {
    let Some(managed) = NonNull::new(managed) else { return };
    // SAFETY: frameworks pass the pointer that they were given, which lies in a live `Owner` until this call.
    let owner = unsafe { managed.as_ref() }.context.cast::<Owner>();
    // SAFETY: `context` is what `Box::into_raw` gave in `export`; called once (DLPack: the consumer calls it once).
    drop(unsafe { Box::from_raw(owner) });
}

/// The capsule's destructor: a capsule that no framework took still owns its tensor. One that was taken is renamed.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    let name: *const c_char = NAME.as_ptr();
    // SAFETY: Python passes a live capsule, and holds the interpreter's lock.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } == 1 {
        // SAFETY: as above; its name is as asked for.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, name) };
        // SAFETY: never taken (its name is unchanged), so this is the one call.
        unsafe { delete(managed.cast()) };
    }
}
