//! The CPU device: a real device, not a stub. Work runs asynchronously and only in the order that the program's
//! edges demand, operations receive only the byte ranges they declared, and replayed graphs run with only the
//! edges they have, so that a missing fence gives a wrong number instead of luck.
//!
//! A [`World`] holds all ranks of a job in one process. It runs tasks on worker threads, under a seeded scheduler
//! ([`Mode`]), which can also run the two adversarial orders ([`Order`]), or on a virtual clock ([`CostModel`]). On the
//! latter, and without data ([`Data`]), it is a simulator: the same programs, thousands of ranks.
//!
//! ```
//! use sessile_hal::{Device, DeviceError, Kernel, Op, View};
//! use sessile_host::{World, WorldOptions};
//! use sessile_plan::{DType, Domain};
//!
//! let world = World::new(WorldOptions::threads(2, 2));
//! let results = world.run(|device| {
//!     let stream = device.stream("compute")?;
//!     let memory = device.alloc(16, &Domain::Default, "buffer")?;
//!     let view = View::whole(&memory, DType::F32)?;
//!     let value = device.rank() as f32;
//!     device.enqueue(&stream, Op::new(Kernel::Fill { value }, "fill", vec![view.clone()])?)?;
//!     let bytes = device.read(&stream, &view)?; // waits for the stream
//!     Ok::<_, DeviceError>(bytes[12..] == value.to_le_bytes())
//! });
//! assert_eq!(results, [Ok(true), Ok(true)]);
//! ```
//!
//! # Inside
//!
//! | module | holds |
//! |---|---|
//! | `world`, `device` | ranks and their threads; the contract's calls |
//! | `engine` | tasks, their dependencies, meetings of collectives |
//! | `executor` | worker threads, the scheduler, or the virtual clock |
//! | `cost`, `contention` | what work costs on the virtual clock |
//! | `waiting`, `exchange` | hosts that block, and when they can stop |
//! | `stream`, `event`, `graph`, `capture` | what orders tasks |
//! | `comm`, `collective` | groups, and what collectives compute |
//! | `memory` | allocations and the borrow table: all unsafe code but one call |
//! | `kernel` | the computations |
//! | `sync` | the one door for locks and threads |
#![deny(unsafe_code)]

mod capture;
mod collective;
mod comm;
mod contention;
mod cost;
mod device;
mod engine;
mod event;
mod exchange;
mod executor;
mod graph;
mod kernel;
#[allow(unsafe_code, reason = "allocations and slices of them; each block carries its proof")]
mod memory;
mod stream;
mod sync;
mod waiting;
mod world;

pub use comm::HostComm;
pub use contention::Contention;
pub use cost::{CostModel, Link};
pub use device::HostDevice;
pub use event::HostEvent;
pub use executor::{Mode, Order};
pub use graph::HostGraph;
pub use memory::HostMemory;
pub use stream::HostStream;
pub use world::{Data, RankFailure, World, WorldOptions};
