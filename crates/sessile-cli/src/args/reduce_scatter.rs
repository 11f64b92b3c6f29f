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
    /// Bytes of the whole BF16 gradient of a rank, multiples of 64 KiB
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
    /// Measure NCCL's symmetric kernel alone and write the rows to stdout, as a part of another run
    #[arg(long, hide = true)]
    pub(crate) part: bool,
}
