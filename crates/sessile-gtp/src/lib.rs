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
mod gtp;
mod layout;
mod shard;
mod weight;

pub use chain::{ChainKind, Pass};
pub use gtp::Gtp;
pub use layout::RankLayout;
pub use shard::Shard;
pub use weight::{Weight, WeightId};
