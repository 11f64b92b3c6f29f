//! A decoder-only byte-level transformer in the style of Nemotron-4, with sharded weights: what `sessile train`, the
//! benchmarks and the tests run.
//!
//! RMS norm, causal attention, squared-ReLU MLP or a mixture of experts, untied embedding and output layer, multi-token
//! prediction by one shared layer, AdamW. Forward and backward are written against the device contract.
#![forbid(unsafe_code)]

pub mod bench;
mod buffers;
pub mod config;
mod data;
mod heads;
mod linear;
mod module;
mod moe;
mod network;
mod optimizer;
pub mod report;
mod schedule;
pub mod simulate;
mod train;
mod trainer;
mod unit;

pub use config::{ConfigError, DENSE, EXPERT, TrainConfig};
pub use report::{
    CollectiveKernel, FreeBytes, GradReady, GraphsOutcome, Kinds, Step, StepResult, TrainOutcome,
};
pub use sessile_gtp::{
    ChainKind, Choice, Pass, RankLayout, ReduceScatter, Repeat, Situation, Wanted, choose,
};
pub use train::{Executing, TrainError, TrainEvent, train, train_rank, world_options};
pub use trainer::{Execution, Trainer};
