//! The vendor's libraries: found and loaded before the first call, so that a missing one is an error and not a panic.
//!
//! A folder list in `SESSILE_CUDA_LIBS` (separated by `:`) is searched first, then the `nvidia` wheels of the active
//! Python environment (`VIRTUAL_ENV` or `CONDA_PREFIX`), then what the loader itself searches. A library that was
//! loaded by its path is found again under its name.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};
use sessile_hal::DeviceError;

/// A library of the vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver, `libcuda`.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Nccl];

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Library::Driver => "CUDA driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Nccl => "NCCL",
        }
    }

    /// What it is needed for.
    pub fn enables(self) -> &'static str {
        match self {
            Library::Driver => "every use of a GPU",
            Library::Nvrtc => "compiling the kernels (not needed once they are cached)",
            Library::CublasLt => "matrix products",
            Library::Nccl => "collectives between GPUs",
        }
    }

    /// How to get it.
    pub fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install the NVIDIA driver (580 or newer for CUDA 13)",
            Library::Nvrtc => {
                "pip install 'nvidia-cuda-nvrtc>=13,<14' and name its folder in SESSILE_CUDA_LIBS"
            }
            Library::CublasLt => {
                "pip install 'nvidia-cublas>=13,<14' and name its folder in SESSILE_CUDA_LIBS"
            }
            Library::Nccl => "pip install 'nvidia-nccl-cu13>=2.28' and name its folder in SESSILE_CUDA_LIBS",
        }
    }

    /// Names by which the loader may know it; the first that loads is used.
    fn names(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1", "libcuda.so"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
            Library::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// What must be loaded before it when it is loaded by path.
    fn before(self) -> &'static [&'static str] {
        match self {
            Library::Nvrtc => &["libnvrtc-builtins.so.13.0"],
            _ => &[],
        }
    }
}

/// Loads a library once; later calls are free.
///
/// # Errors
/// [`DeviceError::LibraryMissing`].
pub fn load(library: Library) -> Result<(), DeviceError> {
    handle(library).map(drop)
}

/// Checks that a job of so many ranks has what it needs on this machine. NVRTC is not looked for: kernels may be kept
/// compiled.
///
/// # Errors
/// [`DeviceError::LibraryMissing`], [`DeviceError::TooOld`].
pub fn ready(ranks: u32) -> Result<(), DeviceError> {
    load(Library::Driver)?;
    load(Library::CublasLt)?;
    if ranks > 1 {
        let have = crate::nccl::version()?;
        if have < crate::nccl::OLDEST {
            return Err(DeviceError::TooOld {
                what: Library::Nccl.name(),
                have: have.into(),
                need: crate::nccl::OLDEST.into(),
                remedy: Library::Nccl.remedy(),
            });
        }
    }
    Ok(())
}

/// The loaded library. It is never unloaded: its functions are called from statics.
pub(crate) fn handle(library: Library) -> Result<&'static Loaded, DeviceError> {
    static LOADED: [OnceLock<Result<Loaded, DeviceError>>; 4] = [const { OnceLock::new() }; 4];
    LOADED[library as usize].get_or_init(|| open(library)).as_ref().map_err(Clone::clone)
}

fn open(library: Library) -> Result<Loaded, DeviceError> {
    let mut why = String::new();
    for folder in folders() {
        for name in library.names() {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            for first in library.before() {
                // Kept open by forgetting it: the library itself asks for it by name later.
                if let Ok(loaded) = open_path(&folder.join(first)) {
                    std::mem::forget(loaded);
                }
            }
            match open_path(&path) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => why = error,
            }
        }
    }
    for name in library.names() {
        match open_path(Path::new(name)) {
            Ok(loaded) => return Ok(loaded),
            Err(error) => why = error,
        }
    }
    Err(DeviceError::LibraryMissing {
        library: library.name(),
        enables: library.enables(),
        tried: library.names().join(", "),
        why,
        remedy: library.remedy(),
    })
}

fn open_path(path: &Path) -> Result<Loaded, String> {
    // SAFETY: opening runs the library's initializers. These are the vendor's own libraries, asked for by their
    // names; their initializers have no precondition ("the library may be loaded with dlopen", CUDA and NCCL are
    // loaded so by every framework), and no handle is ever closed, so none of their code disappears.
    unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| error.to_string())
}

/// Folders to search before the loader's own.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("SESSILE_CUDA_LIBS")
        .map(|list| std::env::split_paths(&list).collect())
        .unwrap_or_default();
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os) {
        let lib = Path::new(&root).join("lib");
        let pythons = list(&lib).into_iter().filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3"))
        });
        for python in pythons {
            for package in list(&python.join("site-packages/nvidia")) {
                folders.push(package.join("lib"));
            }
        }
    }
    folders
}

/// The entries of a folder in order of name; none if it can't be read.
fn list(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_the_remedy() {
        for library in Library::ALL {
            if let Err(error) = load(library) {
                let text = error.to_string();
                assert!(text.contains(library.name()) && text.contains(library.remedy()), "{text}");
            }
        }
    }
}
