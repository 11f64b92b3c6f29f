//! What this machine has for the CUDA device, what each thing enables, and how to get what is missing.
//!
//! Needs no GPU: what can't be looked at is said to be missing, with the reason.

use cudarc::driver::sys;
use serde::Serialize;
use sessile_hal::DeviceError;

use crate::error::cuda;
use crate::gpu::{Gpu, gpus, peer_access, raw_device};
use crate::job::Job;
use crate::kernel::compile::{Target, Unit, compile};
use crate::library::{Library, load};
use crate::nccl;

/// How well a thing is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// There.
    Good,
    /// There, with something to know.
    Limited,
    /// Not there, or not usable.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub name: String,
    /// How well it is there.
    pub state: State,
    /// What was found: a version, a number, a reason.
    pub found: String,
    /// What it is needed for.
    pub enables: String,
    /// How to get it or what to do; empty if nothing.
    pub remedy: String,
}

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    let mut findings = libraries();
    let gpus = gpus();
    findings.extend(of_gpus(&gpus));
    findings.extend(gpus.iter().flat_map(|gpus| between(gpus)));
    findings.push(kernels());
    findings.push(multicast(gpus.as_deref().ok()));
    findings.push(launcher());
    findings
}

/// Whether these findings let a rank with a GPU run.
pub fn cuda_can_run(findings: &[Finding]) -> bool {
    let needed = |finding: &&Finding| !finding.name.contains(" and ") && finding.name != JOB;
    findings.iter().filter(needed).all(|finding| finding.state != State::Missing)
}

/// Name of what is found of the launcher.
const JOB: &str = "job";

fn finding(name: impl Into<String>, state: State, found: impl ToString, enables: &str) -> Finding {
    Finding {
        name: name.into(),
        state,
        found: found.to_string(),
        enables: enables.to_owned(),
        remedy: String::new(),
    }
}

/// The reason alone; the remedy has a field of its own.
fn reason(error: &DeviceError) -> String {
    match error {
        DeviceError::LibraryMissing { tried, why, .. } => format!("{why}; tried {tried}"),
        DeviceError::TooOld { have, need, .. } => format!("version {have}, {need} or newer is needed"),
        other => other.to_string(),
    }
}

fn libraries() -> Vec<Finding> {
    let look = |library: Library| {
        let version = load(library).and_then(|()| version(library));
        let (state, found) = match &version {
            Ok(version) => (State::Good, version.clone()),
            Err(error) => (State::Missing, reason(error)),
        };
        let mut found = finding(library.name(), state, found, library.enables());
        if state == State::Missing {
            found.remedy = library.remedy().to_owned();
        }
        found
    };
    let mut findings: Vec<Finding> = Library::ALL.into_iter().map(look).collect();
    if let Ok(version) = nccl::version() {
        findings.extend(nccl_features(version));
    }
    findings
}

/// A library's version for people, or that it is too old.
fn version(library: Library) -> Result<String, DeviceError> {
    let old = |have: i32, need: i32| DeviceError::TooOld {
        what: library.name(),
        have: have.into(),
        need: need.into(),
        remedy: library.remedy(),
    };
    match library {
        Library::Driver => {
            let version = crate::gpu::driver_version()?;
            if version < crate::OLDEST_DRIVER {
                return Err(old(version, crate::OLDEST_DRIVER));
            }
            Ok(format!("for CUDA {}.{}", version / 1000, version % 1000 / 10))
        }
        Library::Nvrtc => {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: both locals live over the call; the library is loaded (caller).
            let _ = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
            Ok(format!("{major}.{minor}"))
        }
        Library::CublasLt => {
            // SAFETY: no precondition; the library is loaded (caller).
            let version = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
            Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
        }
        Library::Nccl => {
            let version = nccl::version()?;
            if version < nccl::OLDEST {
                return Err(old(version, nccl::OLDEST));
            }
            Ok(nccl_version(version))
        }
    }
}

fn nccl_version(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

fn nccl_features(version: i32) -> Vec<Finding> {
    let enables = "symmetric reduce-scatters inside graphs";
    let gate = if nccl::needs_gate(version) {
        let found = format!(
            "NCCL {} may start symmetric kernels in graphs before their producer has written: an event node is put \
             between the two",
            nccl_version(version)
        );
        Finding {
            remedy: format!("NCCL {} or newer needs no such node", nccl_version(nccl::WAITS_IN_GRAPHS)),
            ..finding("symmetric kernels in graphs", State::Limited, found, enables)
        }
    } else {
        finding("symmetric kernels in graphs", State::Good, "wait for their producer", enables)
    };
    let windows = "reduce-scatters from registered memory";
    vec![finding("NCCL windows", State::Good, "since NCCL 2.27", windows), gate]
}

fn of_gpus(gpus: &Result<Vec<Gpu>, DeviceError>) -> Vec<Finding> {
    let enables = "training with --device cuda: one rank for each";
    let none = |found: String| Finding {
        remedy:
            "see `nvidia-smi` and CUDA_VISIBLE_DEVICES; without one, --device host does everything but speed"
                .to_owned(),
        ..finding("GPU", State::Missing, found, enables)
    };
    let gpus = match gpus {
        Err(error) => return vec![none(reason(error))],
        Ok(gpus) if gpus.is_empty() => return vec![none("none is visible".to_owned())],
        Ok(gpus) => gpus,
    };
    let mut findings = Vec::new();
    for gpu in gpus {
        let (major, minor) = gpu.capability;
        let found = format!(
            "{}, compute capability {major}.{minor}, {} GiB, {} multiprocessors",
            gpu.name,
            gpu.memory >> 30,
            gpu.multiprocessors
        );
        let name = format!("GPU {}", gpu.ordinal);
        findings.push(if gpu.capability >= (8, 0) {
            finding(&name, State::Good, found, enables)
        } else {
            let remedy = "a GPU of compute capability 8.0 or newer has bf16".to_owned();
            Finding { remedy, ..finding(&name, State::Missing, found, enables) }
        });
        let shares = "registered memory that other processes and NCCL windows can use";
        findings.push(if gpu.shareable {
            finding(format!("{name}, shareable memory"), State::Good, "by file descriptor", shares)
        } else {
            Finding {
                remedy: "run on Linux with the NVIDIA driver, outside of virtual GPUs".to_owned(),
                ..finding(format!("{name}, shareable memory"), State::Missing, "no", shares)
            }
        });
    }
    findings
}

/// How each pair of GPUs reaches the other.
fn between(gpus: &[Gpu]) -> Vec<Finding> {
    let enables = "one_shot, and symmetric reduce-scatters";
    let mut findings = Vec::new();
    for (from, to) in
        gpus.iter().enumerate().flat_map(|(at, from)| gpus[at + 1..].iter().map(move |to| (from, to)))
    {
        let name = format!("GPU {} and {}", from.ordinal, to.ordinal);
        let both = peer_access(from.ordinal, to.ordinal)
            .and_then(|there| Ok(there && peer_access(to.ordinal, from.ordinal)?));
        findings.push(match both {
            Ok(true) if native_atomics(from.ordinal, to.ordinal) == Ok(true) => finding(
                name,
                State::Good,
                "read each other's memory, over NVLink (atomics are native)",
                enables,
            ),
            Ok(true) => Finding {
                remedy: "GPUs that NVLink joins are several times faster".to_owned(),
                ..finding(name, State::Limited, "read each other's memory, not over NVLink", enables)
            },
            Ok(false) => Finding {
                remedy: "see `nvidia-smi topo -p2p r`; ring and fp32_a2a work without".to_owned(),
                ..finding(name, State::Missing, "can't read each other's memory", enables)
            },
            Err(error) => finding(name, State::Missing, reason(&error), enables),
        });
    }
    findings
}

fn native_atomics(from: u32, to: u32) -> Result<bool, DeviceError> {
    let (from, to) = (raw_device(from.cast_signed())?, raw_device(to.cast_signed())?);
    let what = sys::CUdevice_P2PAttribute_enum::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    let mut value = 0;
    // SAFETY: `value` lives over the call; both devices came from the driver.
    unsafe { cuda!(cuDeviceGetP2PAttribute(&raw mut value, what, from, to)) }?;
    Ok(value != 0)
}

/// Compiles the smallest unit: what a run would do first.
fn kernels() -> Finding {
    let enables = "every operation of the model but matrix products";
    match compile(Unit::Matrix, Target { capability: (9, 0) }) {
        Ok(_) => finding("kernels", State::Good, "compile for sm_90a", enables),
        Err(error) => Finding {
            remedy: Library::Nvrtc.remedy().to_owned(),
            ..finding("kernels", State::Missing, reason(&error), enables)
        },
    }
}

fn multicast(gpus: Option<&[Gpu]>) -> Finding {
    let enables = "nothing that sessile does: it never uses it";
    let set = std::env::var("NCCL_NVLS_ENABLE");
    let name = "NVLink multicast";
    let Some(gpus) = gpus else { return finding(name, State::Good, "unknown without a driver", enables) };
    if !gpus.iter().any(|gpu| gpu.multicast) {
        return finding(name, State::Good, "not supported", enables);
    }
    match set.as_deref() {
        Ok("0") => finding(name, State::Good, "supported; NCCL_NVLS_ENABLE=0 keeps NCCL off it", enables),
        _ => Finding {
            remedy:
                "export NCCL_NVLS_ENABLE=0 keeps NCCL off it; --launch sets that unless you set another value"
                    .to_owned(),
            ..finding(name, State::Limited, "supported; NCCL may use it", enables)
        },
    }
}

fn launcher() -> Finding {
    let enables = "which rank of which job this process is";
    match Job::from_env() {
        Ok(job) if job.world == 1 => finding(JOB, State::Good, "a job of one rank (no launcher)", enables),
        Ok(job) => finding(JOB, State::Good, format!("{job:?}"), enables),
        Err(error) => finding(JOB, State::Missing, error, enables),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_what_it_enables_and_how_to_get_it() {
        let findings = examine();
        for library in Library::ALL {
            assert!(findings.iter().any(|finding| finding.name == library.name()), "{findings:#?}");
        }
        for finding in findings {
            assert!(!finding.found.is_empty() && !finding.enables.is_empty(), "{finding:?}");
            let explained = finding.state == State::Good || !finding.remedy.is_empty() || finding.name == JOB;
            assert!(explained, "{finding:?}");
        }
    }

    #[test]
    fn versions_of_nccl_that_start_early_are_told() {
        let gate = |version| nccl_features(version).pop().expect("the gate");
        assert_eq!(gate(22_809).state, State::Limited);
        assert!(gate(22_809).found.contains("2.28.9") && gate(22_809).remedy.contains("2.30.7"));
        assert_eq!(gate(23_007).state, State::Good);
    }
}
