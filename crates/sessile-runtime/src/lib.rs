//! Discovery, agreement, seal, capture, fenced replay, event log and checker. Generic over the device contract.
#![forbid(unsafe_code)]

pub mod agree;
pub mod check;
mod discovery;
mod error;
pub mod events;
pub mod log;
pub mod order;
mod pool;
mod storage;
pub mod timeline;

pub use error::{Disagreement, RuntimeError};
pub use storage::{
    Counters, Cursor, Fencing, Footprint, HasRuntime, Marker, Order, Place, Runtime, Slot, capture, discover,
};
