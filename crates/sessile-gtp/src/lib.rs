//! Generalized tensor parallelism: weights cut along dim 0 over a process group.
//!
//! A weight is all-gathered one step ahead of its GEMM, and its gradient is reduce-scattered right after its wgrad
//! GEMM and finalized one weight later:
//!
//! ```text
//!  backward of one runner with weights b, a (in that order)
//!   compute  | dgrad b | wgrad b | dgrad a | wgrad a | add b |C|        | add a |
//!   gather   | AG a |      | AG next runner's first |
//!   reduce              | reduce-scatter b | reduce-scatter a |
//!                                                   stage 1 ─┘  stage 2
//! ```
//!
//! `C` is the completion point: the runner's own all-gathers have ended, and the next runner may start. Stage 2
//! drains the runner's own reduce-scatters and adds the last gradient into `main_grad`.
#![forbid(unsafe_code)]

mod chain;
mod gather;
mod group;
mod gtp;
mod kind;
mod layout;
mod reduce;
mod repeat;
mod runner;
mod shard;
mod weight;

pub use chain::{ChainKind, Pass};
pub use gather::Gathered;
pub use group::{Group, GroupId};
pub use gtp::Gtp;
pub use kind::{Choice, KindError, ReduceScatter, Situation, UnknownKind, Wanted, choose};
pub use layout::RankLayout;
pub use repeat::Repeat;
pub use shard::Shard;
pub use weight::{Part, Weight, WeightId, WeightSpec};
