//! Options of `sessile bench`.

use clap::{Args, Subcommand};

use super::{GraphsArgs, ReduceScatterArgs};

/// Options of `sessile bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub(crate) what: Measure,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Measure {
    /// Reduce-scatter and addition of a gradient: the one-shot kernels, NCCL, what frameworks run
    ReduceScatter(ReduceScatterArgs),
    /// Backward of a stack of linear layers: eager, graphs, overlap, fences at borders and inside
    Graphs(GraphsArgs),
}
