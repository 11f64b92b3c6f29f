//! Options of `sessile bench graphs`.

use clap::Args;
use sessile_host::Contention;
use sessile_model::ReduceScatter;
use sessile_plan::DType;

use super::{Common, Place, parse};

/// Options of `sessile bench graphs`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct GraphsArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) place: Place,
    /// Ranks of the job [default: 2 on the host; on GPUs as many as were started]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) ranks: Option<u32>,
    /// Ranks that share a weight; the job is a multiple of it [default: all]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) gtp: Option<u32>,
    /// Ranks that share a weight in every second layer, as experts have it [default: as --gtp, in the same group]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) egtp: Option<u32>,
    /// Layers of the stack, each a graph
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse::whole::<u32>)]
    pub(crate) layers: u32,
    /// Rows and columns of each weight; several are measured one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512", value_parser = parse::whole::<u64>)]
    pub(crate) hidden: Vec<u64>,
    /// Tokens of each rank; one for all, or one for each of --hidden
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512", value_parser = parse::whole::<u64>)]
    pub(crate) tokens: Vec<u64>,
    /// Kinds of reduce-scatter, one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "ring,one_shot", value_parser = parse::word(parse::KINDS))]
    pub(crate) reduce_scatter: Vec<ReduceScatter>,
    /// Element type of weight gradients on the wire
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = parse::word(parse::WIRE_DTYPES))]
    pub(crate) wgrad_dtype: DType,
    /// Steps of a round, between two waits of the host
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = parse::whole::<u32>)]
    pub(crate) steps: u32,
    /// Rounds; the median and the spread are told
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = parse::whole::<u32>)]
    pub(crate) rounds: u32,
    /// Of the cost model that predicts what is exposed: the part of a reduce-scatter's time by which it delays products
    /// beside it, from 0 to 1; 0.5 is fitted to two H200s
    #[arg(long, value_name = "FRACTION", default_value = "0.5", value_parser = parse::contention)]
    pub(crate) contention: Contention,
}
