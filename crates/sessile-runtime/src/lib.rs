//! Discovery, agreement, seal, capture, fenced replay, event log and checker. Generic over the device contract.
#![forbid(unsafe_code)]

pub mod check;
pub mod log;
pub mod timeline;
