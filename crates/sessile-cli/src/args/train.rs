//! Options of `sessile train`.

use std::path::PathBuf;

use clap::Args;
use sessile_model::{
    ReduceScatter, Repeat, Wanted,
    config::{GraphScope, Mode, ModuleKind, Overlap, ScheduleOrder, TrainConfig},
};
use sessile_plan::{DType, StepCut, Strategy};

use super::{Common, GroupDepths, Place, parse};

/// Ranks of a job on the host.
pub(crate) const HOST_RANKS: u32 = 4;

/// Options of `sessile train`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) job: Job,
    #[command(flatten)]
    pub(crate) model: Model,
    #[command(flatten)]
    pub(crate) graphs: Graphs,
    #[command(flatten)]
    pub(crate) files: Files,
}

/// Where and how long.
#[derive(Args, Debug)]
#[command(next_help_heading = "Job")]
pub(crate) struct Job {
    #[command(flatten)]
    pub(crate) place: Place,
    /// Ranks of the job [default: 4 on the host; on GPUs as many as were started]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) ranks: Option<u32>,
    /// Ranks that share a weight; --ranks is a multiple of it [default: 2, or 1 of one rank]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    gtp: Option<u32>,
    /// Ranks that share a weight of an expert; --ranks is a multiple of it [default: as --gtp]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    egtp: Option<u32>,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = parse::whole::<u32>)]
    steps: u32,
    /// Micro-batches of a step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse::whole::<u32>)]
    microbatches: u32,
    /// Micro-batches in flight at once, each with its own graphs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse::whole::<u32>)]
    microbatches_in_flight: u32,
    /// Seed of weights and data
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse::whole::<u64>)]
    seed: u64,
    /// Run the device on one thread in the legal order of this seed [default: worker threads]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u64>)]
    pub(crate) schedule_seed: Option<u64>,
    /// Which kind of order the seed draws
    #[arg(long, value_name = "ORDER", requires = "schedule_seed", default_value = "random", value_parser = parse::word(parse::ORDERS))]
    schedule_order: ScheduleOrder,
    /// Learning rate, in millionths
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = parse::whole::<u32>)]
    learning_rate_micro: u32,
}

/// The transformer.
#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct Model {
    /// Transformer layers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse::whole::<u32>)]
    layers: u32,
    /// Hidden size
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = parse::whole::<u64>)]
    hidden: u64,
    /// Inner size of the MLP [default: 4 times --hidden]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u64>)]
    ffn: Option<u64>,
    /// Attention heads; --hidden is a multiple of it
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse::whole::<u64>)]
    heads: u64,
    /// Experts of a mixture, which take the place of an MLP; 0: none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse::whole::<u32>)]
    experts: u32,
    /// Experts that each token goes to
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse::whole::<u32>)]
    top_k: u32,
    /// Every so many layers, the last of them has experts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse::whole::<u32>)]
    moe_every: u32,
    /// Further predictions, each one token on, by one shared layer and the output layer
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse::whole::<u32>)]
    mtp: u32,
    /// Tokens (bytes of text) of a sequence; of several lengths, steps take turns
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64", value_parser = parse::whole::<u64>)]
    seq: Vec<u64>,
    /// Sequences of a micro-batch, on each rank
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse::whole::<u64>)]
    batch: u64,
    /// Element type of weight gradients on the wire
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = parse::word(parse::WIRE_DTYPES))]
    wgrad_dtype: DType,
    /// How gradients are reduced: auto, ring, symmetric, fp32_a2a or one_shot
    #[arg(long, value_name = "KIND", default_value = "ring")]
    reduce_scatter: Wanted,
    /// How gradients of experts are [default: as --reduce-scatter]
    #[arg(long, value_name = "KIND")]
    expert_reduce_scatter: Option<Wanted>,
    /// Let auto sum in FP32 where ranks cannot read each other's memory
    #[arg(long)]
    fp32_accumulation: bool,
}

/// Graphs and their buffers.
#[derive(Args, Debug)]
#[command(next_help_heading = "Graphs")]
pub(crate) struct Graphs {
    /// Executions to make; both are compared to the bit
    #[arg(long, value_name = "MODE", default_value = "both", value_parser = parse::word(parse::MODES))]
    mode: Mode,
    /// What one graph covers
    #[arg(long, value_name = "SCOPE", default_value = "module", value_parser = parse::word(parse::SCOPES))]
    graph_scope: GraphScope,
    /// Modules to capture; the rest stays eager
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "attention,mlp,moe", value_parser = parse::word(parse::MODULES))]
    graph_modules: Vec<ModuleKind>,
    /// Capture embedding and output layer too
    #[arg(long)]
    graph_heads: bool,
    /// What happens when one backward uses a weight more than once
    #[arg(long, value_name = "POLICY", default_value = "drain", value_parser = parse::word(parse::REPEATS))]
    repeat: Repeat,
    /// How bytes are given to buffers: sessile, generations:N, ring:N or per-request
    #[arg(long, value_name = "NAME", default_value = "sessile")]
    strategy: Strategy,
    /// Launches apart before bytes are reused; 1 makes launches serial; auto measures the discovery and chooses
    #[arg(long, value_name = "N|auto", default_value = "2", value_parser = parse::depth_or_auto)]
    depth: parse::Depth,
    #[command(flatten)]
    groups: GroupDepths,
    /// With --depth auto: the least exposed communication whose arenas fit so many bytes
    #[arg(long, value_name = "BYTES", value_parser = parse::whole::<u64>)]
    memory_limit: Option<u64>,
    /// What happens between two steps
    #[arg(long, value_name = "CUT", default_value = "barrier", value_parser = parse::word(parse::CUTS))]
    step_cut: StepCut,
    /// Whether reduce-scatters may run on into the next graphs
    #[arg(long, value_name = "ON|OFF", default_value = "on", value_parser = parse::word(parse::OVERLAPS))]
    overlap: Overlap,
}

/// Files of `sessile train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Files")]
pub(crate) struct Files {
    /// Text to train on [default: the project's own documentation]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Write the recorded requests, for plan, compare and check
    #[arg(long, value_name = "FILE")]
    pub(crate) trace_out: Option<PathBuf>,
    /// Write a timeline that opens in Perfetto
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
    /// Write the event log, for check
    #[arg(long, value_name = "FILE")]
    pub(crate) log_out: Option<PathBuf>,
}

impl TrainArgs {
    /// Whether some group may get the one-shot reduce-scatter.
    pub(crate) fn may_reduce_in_one_shot(&self) -> bool {
        let model = &self.model;
        let kinds = [Some(model.reduce_scatter), model.expert_reduce_scatter];
        let may = |kind| matches!(kind, Wanted::Auto | Wanted::Exactly(ReduceScatter::OneShot));
        kinds.into_iter().flatten().any(may)
    }

    /// The configuration for a job of so many ranks unless options say otherwise, not yet checked.
    pub(crate) fn config(&self, ranks: u32) -> TrainConfig {
        let TrainArgs { job, model, graphs, .. } = self;
        let ranks = job.ranks.unwrap_or(ranks);
        let mut graph_modules = graphs.graph_modules.clone();
        graph_modules.sort();
        graph_modules.dedup();
        TrainConfig {
            ranks,
            gtp: job.gtp.unwrap_or(ranks.clamp(1, 2)),
            egtp: job.egtp,
            layers: model.layers,
            hidden: model.hidden,
            ffn: model.ffn.unwrap_or(model.hidden.saturating_mul(4)),
            heads: model.heads,
            experts: model.experts,
            top_k: model.top_k,
            moe_every: model.moe_every,
            mtp: model.mtp,
            seq: model.seq.clone(),
            batch: model.batch,
            steps: job.steps,
            microbatches: job.microbatches,
            microbatches_in_flight: job.microbatches_in_flight,
            seed: job.seed,
            schedule_seed: job.schedule_seed,
            schedule_order: job.schedule_order,
            mode: graphs.mode,
            graph_scope: graphs.graph_scope,
            graph_modules,
            graph_heads: graphs.graph_heads,
            repeat: graphs.repeat,
            strategy: graphs.strategy,
            depth: match graphs.depth {
                parse::Depth::Fixed(depth) => depth,
                parse::Depth::Auto => TrainConfig::default().depth,
            },
            depth_auto: graphs.depth == parse::Depth::Auto,
            memory_limit: graphs.memory_limit,
            depth_by_group: graphs.groups.by_group(),
            step_cut: graphs.step_cut,
            overlap: graphs.overlap,
            wgrad_dtype: model.wgrad_dtype,
            reduce_scatter: model.reduce_scatter,
            expert_reduce_scatter: model.expert_reduce_scatter,
            fp32_accumulation: model.fp32_accumulation,
            learning_rate_micro: job.learning_rate_micro,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: TrainArgs,
    }

    #[test]
    fn the_defaults_of_the_command_line_are_those_of_the_model() {
        assert_eq!(Alone::parse_from(["train"]).args.config(HOST_RANKS), TrainConfig::default());
    }

    #[test]
    fn ffn_follows_hidden() {
        let config = Alone::parse_from(["train", "--hidden", "40"]).args.config(HOST_RANKS);
        assert_eq!(config.ffn, 160);
    }

    #[test]
    fn modules_are_a_set() {
        let config =
            Alone::parse_from(["train", "--graph-modules", "mlp,attention,mlp"]).args.config(HOST_RANKS);
        assert_eq!(config.graph_modules, [ModuleKind::Attention, ModuleKind::Mlp]);
    }
}
