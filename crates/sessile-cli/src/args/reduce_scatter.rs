//! Options of `sessile bench reduce-scatter`.

use std::path::PathBuf;

use clap::Args;

use super::{Common, parse};

/// Options of `sessile bench reduce-scatter`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ReduceScatterArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Ranks, one for each GPU: 2 to 16
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse::whole::<u32>)]
    pub(crate) ranks: u32,
    /// Ranks of a group [default: all]; with fewer, all groups run at once
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) gtp: Option<u32>,
    /// Bytes of the whole BF16 gradient of a rank, multiples of 64 KiB that the ranks of a group share evenly
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "65536,262144,1048576,4194304,16777216,67108864,268435456,1073741824",
        value_parser = parse::whole::<u64>
    )]
    pub(crate) sizes: Vec<u64>,
    /// Rounds of each measurement; the median and the spread are told
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = parse::whole::<u32>)]
    pub(crate) rounds: u32,
    /// Python with PyTorch, for what frameworks run
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Leave out what frameworks run
    #[arg(long)]
    pub(crate) no_torch: bool,
    /// Also draw the rates
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Run nothing: tell what figures of two H200s lead to expect of a group of this size, without a GPU
    #[arg(long, conflicts_with_all = ["json", "svg", "rounds", "python", "no_torch"])]
    pub(crate) expected: bool,
    /// Measure NCCL's symmetric kernel alone and write the rows to stdout, as a part of another run
    #[arg(long, hide = true)]
    pub(crate) part: bool,
}

impl ReduceScatterArgs {
    /// Ranks of a group.
    pub(crate) fn group(&self) -> u32 {
        self.gtp.unwrap_or(self.ranks)
    }
}
