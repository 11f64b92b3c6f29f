//! A decoder-only byte-level transformer in the style of Nemotron-4, with sharded weights: what `sessile train`, the
//! benchmarks and the tests run.
//!
//! RMS norm, causal attention, squared-ReLU MLP, untied embedding and output layer, AdamW. Forward and backward are
//! written against the device contract.
#![forbid(unsafe_code)]

mod buffers;
pub mod config;
mod data;
mod module;
mod optimizer;
pub mod report;
mod schedule;
mod train;
mod trainer;
mod unit;

pub use config::{ConfigError, TrainConfig};
pub use report::{GraphsOutcome, Step, StepResult, TrainOutcome};
pub use sessile_gtp::Pass;
pub use train::{Executing, TrainError, TrainEvent, train, world_options};
pub use trainer::{DENSE, Execution, Trainer};
