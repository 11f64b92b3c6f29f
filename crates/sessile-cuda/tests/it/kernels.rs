//! Every kernel is compiled for the GPUs it is meant for, and what the compiler says of it is held against limits.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use sessile_cuda::kernel::compile::{Compiled, Target, Unit, compile};
use sessile_cuda::library::{Library, load};

/// Whether the compiler is there; says so if it is not. `SESSILE_NVRTC=required` makes that a failure.
pub(crate) fn compiler_is_there(test: &str) -> bool {
    match load(Library::Nvrtc) {
        Ok(()) => true,
        Err(error) => {
            assert_ne!(std::env::var("SESSILE_NVRTC").as_deref(), Ok("required"), "{error}");
            eprintln!("skipped: {test}: {error}");
            false
        }
    }
}

/// The one-shot kernels as they run on Hopper, compiled once for all tests.
pub(crate) fn one_shot() -> &'static Compiled {
    static COMPILED: OnceLock<Compiled> = OnceLock::new();
    COMPILED.get_or_init(|| compile_for_hopper(Unit::OneShot))
}

fn compile_for_hopper(unit: Unit) -> Compiled {
    compile(unit, Target { capability: (9, 0) }).unwrap_or_else(|why| panic!("{why}"))
}

/// What the assembler reports of a kernel.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    registers: u32,
    stack: u32,
    spills: u32,
}

/// Reports by kernel, from the log of `--ptxas-options=-v`.
fn reports(log: &str) -> BTreeMap<String, Report> {
    let mut reports: BTreeMap<String, Report> = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if let Some(rest) = line.split("Function properties for ").nth(1) {
            name = rest.trim().to_owned();
        }
        let before = |unit: &str| -> u32 {
            let words = line.split(unit).next().unwrap_or_default();
            words.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or(0)
        };
        let report = reports.entry(name.clone()).or_default();
        if line.contains("bytes spill stores") {
            report.stack = before(" bytes stack frame");
            report.spills = before(" bytes spill stores") + before(" bytes spill loads");
        }
        if line.contains("Used ") && line.contains("registers") {
            report.registers = before(" registers");
        }
    }
    reports.remove("");
    reports
}

#[test]
fn kernels_compile_for_hopper_without_spills_or_multicast() {
    if !compiler_is_there("kernels_compile_for_hopper_without_spills_or_multicast") {
        return;
    }
    for unit in Unit::ALL {
        let made;
        let compiled = if unit == Unit::OneShot {
            one_shot()
        } else {
            made = compile_for_hopper(unit);
            &made
        };
        let reports = reports(&compiled.log);
        assert!(reports.values().any(|report| report.registers > 0), "{}: {}", unit.name(), compiled.log);
        for (kernel, report) in &reports {
            println!("{:<16} {kernel:<28} {report:?}", unit.name());
            assert_eq!(report.spills, 0, "{kernel}: {report:?}");
            assert_eq!(report.stack, 0, "{kernel}: {report:?}");
            // Attention and the one-shot keep what is in flight in registers; 128 let 512 threads run, 168 let 288.
            let most = match unit {
                Unit::OneShot => 168,
                Unit::Attention => 128,
                _ => 64,
            };
            // A function that is called has no registers of its own.
            assert!(report.registers <= most, "{kernel}: {report:?}");
        }
        assert_eq!(&compiled.image[..4], b"\x7fELF", "machine code");
    }
}

#[test]
fn kernels_compile_to_ptx_for_other_gpus_with_no_float_atomics_and_no_multicast() {
    let test = "kernels_compile_to_ptx_for_other_gpus_with_no_float_atomics_and_no_multicast";
    if !compiler_is_there(test) {
        return;
    }
    for unit in Unit::ALL {
        for capability in [(8, 0), (10, 0)] {
            let compiled = compile(unit, Target { capability }).unwrap_or_else(|why| panic!("{why}"));
            let ptx = String::from_utf8_lossy(&compiled.image);
            assert!(ptx.contains(".entry"), "{}", unit.name());
            for line in ptx.lines().map(str::trim) {
                let atomic = line.starts_with("atom") || line.starts_with("red.");
                assert!(!(atomic && (line.contains(".f32") || line.contains("f16"))), "{line}");
                assert!(!line.contains("multimem"), "{line}");
            }
            if unit == Unit::OneShot {
                // Publishing and taking of signal words, and data that is not kept in L1 nor read as if it never changed.
                let words = [
                    "st.release.sys",
                    "fence.acq_rel.sys",
                    "st.relaxed.sys.global.u32",
                    "ld.relaxed.sys.global.u32",
                    "ld.acquire.sys",
                    "atom.add.acq_rel.gpu",
                ];
                let packets = ["st.relaxed.sys.global.b128", "ld.relaxed.sys.global.b128"];
                for needed in words.iter().chain(&packets) {
                    assert!(ptx.contains(needed), "{needed}");
                }
                let bulk = ["cp.async.bulk.shared::cluster.global.mbarrier", "fence.proxy.async"];
                assert!(
                    bulk.iter().all(|needed| ptx.contains(needed) == (capability >= (9, 0))),
                    "{capability:?}"
                );
                assert!(ptx.contains("ld.global.L1::no_allocate.v4"));
                // Before a rank is told that its input was read, a barrier follows a store of what was read.
                assert!(ptx.contains("st.volatile.shared.u32"));
                assert!(!ptx.contains("ld.global.nc"));
            }
            if matches!(unit, Unit::Elementwise | Unit::OneShot) {
                assert!(!ptx.contains("fma."), "contraction is off where bits are pinned");
            }
        }
    }
}
