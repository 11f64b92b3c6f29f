//! The CUDA device: one rank, one GPU.
//!
//! | file | what |
//! |---|---|
//! | [`library`] | finds the vendor's libraries; a missing one is an error that names the remedy |
//! | `gpu`, `context`, `exec`, `physical` | the driver's objects, owned: streams and events, graphs, memory |
//! | `nccl` | communicators and windows, owned |
//! | [`doctor`] | what this machine has, and how to get the rest |
//! | [`kernel`] | the kernels, compiled at run time; matrix products |
//! | `link`, [`job`] | where the ranks' hosts meet |
//! | `oneshot` | the fused reduce-scatter: which way it goes, signal words, launches, protocols |
//! | `peer` | copies out of a peer's window, to measure the link |
//! | `handover` | shared memory between ranks of one machine |
//! | [`guest`] | arenas, marks and the one-shot reduce-scatter in a program whose streams are a framework's |
//! | `graveyard` | what was dropped and may still be in use |
//! | `enqueue`, `group` | putting work on a stream; how the members of a group meet |
//! | `device`, `stream`, `event`, `memory`, `graph`, `capture`, `comm`, `collective` | the contract, as in `sessile-host` |
//!
//! Nothing of CUDA is needed to build or to run the tests: libraries are loaded when a device is opened.
//!
//! # What a call may cost
//! Enqueues and launches return at once. Named waits look every 2 ms for peers that have gone, for communicators that
//! were given up and for errors of NCCL. Dropping a handle makes no call of the driver; what it owned is destroyed at
//! a later call, once the work that was enqueued before has ended.

#![allow(
    unsafe_code,
    reason = "this crate is where the vendor's C functions are called; each call carries its proof"
)]

mod capture;
mod collective;
mod comm;
mod context;
mod core;
mod device;
pub mod doctor;
mod enqueue;
mod error;
mod event;
mod exec;
mod gpu;
mod graph;
mod graveyard;
mod group;
pub mod guest;
mod handover;
pub mod job;
pub mod kernel;
pub mod library;
mod link;
mod memory;
pub mod nccl;
mod oneshot;
mod peer;
mod physical;
mod spans;
mod stream;

pub use comm::CudaComm;
pub use device::{CudaDevice, DeviceOptions};
pub use event::CudaEvent;
pub use gpu::{Gpu, OLDEST_DRIVER, driver_version, gpus, peer_access};
pub use graph::CudaGraph;
pub use memory::CudaMemory;
pub use oneshot::{OneShotOptions, Way};
pub use stream::CudaStream;
