//! The kernels' source, compiled at run time and kept on disk.
//!
//! GPUs of capability 9.0 get machine code for `sm_90a`, others get PTX, which their driver compiles. The result is
//! kept under the hash of all that went into it; a damaged file is compiled again.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys::{self, nvrtcResult};
use sessile_hal::DeviceError;
use sha2::{Digest, Sha256};

use crate::library::{Library, load};

/// A source file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Element by element, bits pinned.
    Elementwise,
    /// Norms, losses, embeddings.
    Model,
    /// Attention.
    Attention,
    /// Matrix products that the library lacks.
    Matrix,
    /// Routing to experts.
    Experts,
    /// The one-shot reduce-scatter.
    OneShot,
    /// The same with all ranks in one launch, for tools that let one launch run at a time.
    #[cfg(test)]
    Together,
}

impl Unit {
    /// All of them.
    pub const ALL: [Unit; 6] =
        [Unit::Elementwise, Unit::Model, Unit::Attention, Unit::Matrix, Unit::Experts, Unit::OneShot];

    /// The file's name.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Elementwise => "elementwise.cu",
            Unit::Model => "model.cu",
            Unit::Attention => "attention.cu",
            Unit::Matrix => "matrix.cu",
            Unit::Experts => "experts.cu",
            Unit::OneShot => "oneshot/kernels.cu",
            #[cfg(test)]
            Unit::Together => "oneshot/together.cu",
        }
    }

    /// The whole text that is compiled.
    pub fn source(self) -> String {
        let own = match self {
            Unit::Elementwise => include_str!("../../kernels/elementwise.cu"),
            Unit::Model => include_str!("../../kernels/model.cu"),
            Unit::Attention => include_str!("../../kernels/attention.cu"),
            Unit::Matrix => include_str!("../../kernels/matrix.cu"),
            Unit::Experts => include_str!("../../kernels/experts.cu"),
            Unit::OneShot => concat!(
                include_str!("../../kernels/oneshot/rounds.cuh"),
                include_str!("../../kernels/oneshot/push.cuh"),
                include_str!("../../kernels/oneshot/pull.cuh"),
                include_str!("../../kernels/oneshot/copy.cuh"),
                include_str!("../../kernels/oneshot/bulk.cuh"),
                include_str!("../../kernels/oneshot/kernels.cu"),
            ),
            #[cfg(test)]
            Unit::Together => return format!("#define TOGETHER\n{}", Unit::OneShot.source()),
        };
        format!("{}\n{own}", include_str!("../../kernels/common.cuh"))
    }

    /// Whether products and sums may be contracted.
    fn contracts(self) -> bool {
        matches!(self, Unit::Model | Unit::Attention | Unit::Matrix)
    }
}

/// What a unit is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Compute capability.
    pub capability: (u32, u32),
}

impl Target {
    /// Whether it gets machine code rather than PTX.
    pub fn is_binary(self) -> bool {
        self.capability == (9, 0)
    }

    fn options(self, unit: Unit) -> Vec<String> {
        let (major, minor) = self.capability;
        let arch = if self.is_binary() { "sm_90a".to_owned() } else { format!("compute_{major}{minor}") };
        vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            format!("--fmad={}", unit.contracts()),
            "--ftz=false".to_owned(),
            "--prec-div=true".to_owned(),
            "--prec-sqrt=true".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ]
    }
}

/// A compiled unit: the image for the driver, and what the compiler said of registers and spills.
pub struct Compiled {
    /// Machine code or PTX.
    pub image: Vec<u8>,
    /// The compiler's log.
    pub log: String,
}

/// Compiles a unit now.
///
/// # Errors
/// [`DeviceError::LibraryMissing`]; [`DeviceError::Driver`] with the compiler's log as text.
pub fn compile(unit: Unit, target: Target) -> Result<Compiled, DeviceError> {
    compile_text(&unit.source(), unit, target)
}

/// Compiles a text as if it were a unit's: part of it, or a changed one, to see what the compiler makes of it.
///
/// # Errors
/// As [`compile`].
pub fn compile_text(text: &str, unit: Unit, target: Target) -> Result<Compiled, DeviceError> {
    load(Library::Nvrtc)?;
    let source = c_string(text);
    let name = c_string(unit.name());
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw`, `source` and `name` live over the call; no headers are given.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut raw,
            source.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    check("nvrtcCreateProgram", created, "")?;
    let program = Program(raw);
    let options: Vec<CString> = target.options(unit).iter().map(|option| c_string(option)).collect();
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let count = i32::try_from(pointers.len()).unwrap_or(0);
    // SAFETY: the program is alive; the options and the array of pointers to them live over the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, count, pointers.as_ptr()) };
    let log = program.log();
    check("nvrtcCompileProgram", compiled, &log)?;
    let image = if target.is_binary() { program.cubin() } else { program.ptx() }?;
    Ok(Compiled { image, log })
}

/// The image of a unit, from disk if it is there.
///
/// # Errors
/// As [`compile`].
pub(crate) fn image(unit: Unit, target: Target) -> Result<Vec<u8>, DeviceError> {
    let path = folder().map(|folder| folder.join(key(unit, target)));
    if let Some(image) = path.as_deref().and_then(read) {
        return Ok(image);
    }
    let compiled = compile(unit, target)?;
    if let Some(path) = path {
        keep(&path, &compiled.image);
    }
    Ok(compiled.image)
}

/// Name of the file that keeps a unit.
fn key(unit: Unit, target: Target) -> String {
    let mut hash = Sha256::new();
    hash.update(env!("CARGO_PKG_VERSION"));
    hash.update(unit.source());
    target.options(unit).iter().for_each(|option| hash.update(option));
    let digest: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{digest}.bin", unit.name().trim_end_matches(".cu"))
}

/// Where compiled kernels are kept: `SESSILE_CACHE`, else the user's cache folder; nowhere if there is none.
fn folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    from("SESSILE_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|cache| cache.join("sessile")))
        .or_else(|| from("HOME").map(|home| home.join(".cache/sessile")))
}

/// A kept image, if it is whole: the file begins with the hash of the rest.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (hash, image) = bytes.split_at_checked(32)?;
    (Sha256::digest(image).as_slice() == hash).then(|| image.to_vec())
}

/// Keeps an image; a folder that can't be written is no error.
fn keep(path: &Path, image: &[u8]) {
    use std::os::unix::fs::DirBuilderExt;
    let Some(folder) = path.parent() else { return };
    let _ = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    let mut bytes = Sha256::digest(image).to_vec();
    bytes.extend_from_slice(image);
    if std::fs::write(&temporary, bytes).is_ok() && std::fs::rename(&temporary, path).is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

fn check(call: &'static str, code: nvrtcResult, log: &str) -> Result<(), DeviceError> {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: any code may be asked for.
    let name = unsafe { sys::nvrtcGetErrorString(code) };
    Err(DeviceError::Driver {
        call,
        code: code as i64,
        name: crate::error::owned(name),
        text: log.to_owned(),
    })
}

/// A program of the compiler.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive; `size` lives over the call.
        let _ = unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut size) };
        let mut log = vec![0u8; size + 1];
        // SAFETY: `log` has the size that the compiler asked for, and a zero after it.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn cubin(&self) -> Result<Vec<u8>, DeviceError> {
        let mut size = 0;
        // SAFETY: the program is alive and compiled; `size` lives over the call.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) }, "")?;
        let mut image = vec![0u8; size];
        // SAFETY: `image` has the size that the compiler asked for.
        check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) }, "")?;
        Ok(image)
    }

    /// With its terminating zero, as the driver wants it.
    fn ptx(&self) -> Result<Vec<u8>, DeviceError> {
        let mut size = 0;
        // SAFETY: the program is alive and compiled; `size` lives over the call.
        check("nvrtcGetPTXSize", unsafe { sys::nvrtcGetPTXSize(self.0, &raw mut size) }, "")?;
        let mut image = vec![0u8; size];
        // SAFETY: `image` has the size that the compiler asked for.
        check("nvrtcGetPTX", unsafe { sys::nvrtcGetPTX(self.0, image.as_mut_ptr().cast()) }, "")?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `compile`, destroyed here alone.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_units_and_targets_apart() {
        let (hopper, ampere) = (Target { capability: (9, 0) }, Target { capability: (8, 0) });
        let mut keys: Vec<_> =
            Unit::ALL.iter().flat_map(|unit| [key(*unit, hopper), key(*unit, ampere)]).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 2 * Unit::ALL.len());
    }

    #[test]
    fn a_damaged_file_is_not_used() {
        let folder = std::env::temp_dir().join(format!("sessile-cuda-{}", std::process::id()));
        let path = folder.join("kept.bin");
        keep(&path, b"image");
        assert_eq!(read(&path).as_deref(), Some(&b"image"[..]));
        let mut bytes = std::fs::read(&path).expect("kept");
        bytes[33] ^= 1;
        std::fs::write(&path, &bytes).expect("writes");
        assert_eq!(read(&path), None);
        std::fs::write(&path, b"short").expect("writes");
        assert_eq!(read(&path), None);
        std::fs::remove_dir_all(&folder).expect("removes");
    }
}
