//! Options of `sessile simulate`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use sessile_host::Contention;
use sessile_model::{
    Wanted,
    config::{GraphScope, Overlap},
    simulate::{KindSet, Speeds},
};
use sessile_plan::{DType, LaunchOrder, PlanOptions, StepCut, Strategy};

use super::{Common, parse, plan::GroupDepths};

/// Options of `sessile simulate`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) model: Model,
    #[command(flatten)]
    pub(crate) job: Job,
    #[command(flatten)]
    pub(crate) choices: Choices,
    #[command(flatten)]
    speeds: SpeedArgs,
    /// Write the recorded requests, for plan, compare and check
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    pub(crate) trace_out: Option<PathBuf>,
    /// Write a timeline that opens in Perfetto
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    pub(crate) timeline: Option<PathBuf>,
}

/// What is simulated.
#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct Model {
    /// nemotron4-340b, nemotron4-quarter, hybrid-mamba-moe, dsv3, proxy (what train trains), or a TOML file of one's own
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) model: PathBuf,
    /// Multi-token prediction depths of dsv3
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse::whole::<u32>)]
    pub(crate) mtp: u32,
    /// Capture the FP32 output layer of dsv3 too
    #[arg(long)]
    pub(crate) heads: bool,
    /// What one graph covers
    #[arg(long, value_name = "SCOPE", default_value = "module", value_parser = parse::word(parse::SCOPES))]
    pub(crate) scope: GraphScope,
    /// Element type of weight gradients on the wire
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = parse::word(parse::WIRE_DTYPES))]
    pub(crate) wgrad_dtype: DType,
    /// Kind of reduce-scatter: auto, ring, symmetric, fp32_a2a or one_shot
    #[arg(long, value_name = "KIND", default_value = "ring")]
    pub(crate) reduce_scatter: Wanted,
    /// Kind of the group `expert` [default: as --reduce-scatter]
    #[arg(long, value_name = "KIND")]
    pub(crate) expert_reduce_scatter: Option<Wanted>,
    /// Whose buffers fp32_a2a and symmetric ask for: own, or those of the framework that sessile is compared to
    #[arg(long, value_name = "SET", default_value = "own", value_parser = parse::word(parse::KIND_SETS))]
    pub(crate) kind_set: KindSet,
    /// Gather weights, and plan the buffers that hold them
    #[arg(long)]
    pub(crate) with_gathered: bool,
}

/// On what.
#[derive(Args, Debug)]
#[command(next_help_heading = "Job")]
pub(crate) struct Job {
    /// Ranks of the job; a list shows weak scaling [default: the fewest that the model's groups span]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = parse::whole::<u32>)]
    pub(crate) ranks: Vec<u32>,
    /// Ranks of a node: groups within one use its links
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse::whole::<u32>)]
    pub(crate) gpus_per_node: u32,
    /// Whether one rank stands for all, or each runs
    #[arg(long, value_name = "ON|OFF", default_value = "on", action = ArgAction::Set, value_parser = parse::word(parse::FOLDS))]
    pub(crate) fold: bool,
}

/// What shapes the plan.
#[derive(Args, Debug)]
#[command(next_help_heading = "Plan")]
pub(crate) struct Choices {
    /// How bytes are given to buffers: sessile, generations:N, ring:N or per-request
    #[arg(long, value_name = "NAME", default_value = "sessile")]
    strategy: Strategy,
    /// Launches apart before bytes are reused; auto simulates 1 to 3 for every group and chooses
    #[arg(long, value_name = "N|auto", default_value = "2", value_parser = parse::depth_or_auto)]
    pub(crate) depth: parse::Depth,
    #[command(flatten)]
    pub(crate) groups: GroupDepths,
    /// With --depth auto: the least exposed communication whose arenas fit so many bytes
    #[arg(long, value_name = "BYTES", value_parser = parse::whole::<u64>)]
    pub(crate) memory_limit: Option<u64>,
    /// What happens between two steps
    #[arg(long, value_name = "CUT", default_value = "barrier", value_parser = parse::word(parse::CUTS))]
    step_cut: StepCut,
    /// Whether reduce-scatters may run on into the next graphs
    #[arg(long, value_name = "ON|OFF", default_value = "on", value_parser = parse::word(parse::OVERLAPS))]
    overlap: Overlap,
}

impl Choices {
    /// As the planner takes them.
    pub(crate) fn options(&self) -> PlanOptions {
        PlanOptions {
            strategy: self.strategy,
            depth: match self.depth {
                parse::Depth::Fixed(depth) => depth,
                parse::Depth::Auto => PlanOptions::default().depth,
            },
            depth_by_group: self.groups.by_group(),
            step_cut: self.step_cut,
            launch_order: match self.overlap {
                Overlap::On => LaunchOrder::Overlapped,
                Overlap::Off => LaunchOrder::Serial,
            },
        }
    }
}

/// Speeds of the modelled device. Assumed, not measured.
#[derive(Args, Debug)]
#[command(next_help_heading = "Modelled device")]
struct SpeedArgs {
    /// GEMMs, in TFLOP/s
    #[arg(long, value_name = "N", default_value_t = Speeds::default().gemm_tflops, value_parser = parse::whole::<u64>)]
    gemm_tflops: u64,
    /// Memory, in GB/s; 0: moving bytes takes no time
    #[arg(long, value_name = "N", default_value_t = Speeds::default().memory_gbs, value_parser = parse::whole::<u64>)]
    memory_gbs: u64,
    /// Links inside a node, in GB/s
    #[arg(long, value_name = "N", default_value_t = Speeds::default().node_gbs, value_parser = parse::whole::<u64>)]
    node_gbs: u64,
    /// Links between nodes, in GB/s
    #[arg(long, value_name = "N", default_value_t = Speeds::default().network_gbs, value_parser = parse::whole::<u64>)]
    network_gbs: u64,
    /// Of every collective, in microseconds
    #[arg(long, value_name = "N", default_value_t = Speeds::default().latency_us, value_parser = parse::whole::<u64>)]
    latency_us: u64,
    /// Of each hop of a sum over replicas, in microseconds
    #[arg(long, value_name = "N", default_value_t = Speeds::default().hop_us, value_parser = parse::whole::<u64>)]
    hop_us: u64,
    /// Of every kernel, in microseconds
    #[arg(long, value_name = "N", default_value_t = Speeds::default().kernel_us, value_parser = parse::whole::<u64>)]
    kernel_us: u64,
    /// Host time of an enqueue, in microseconds
    #[arg(long, value_name = "N", default_value_t = Speeds::default().launch_us, value_parser = parse::whole::<u64>)]
    launch_us: u64,
    /// Host time of a graph launch, in microseconds
    #[arg(long, value_name = "N", default_value_t = Speeds::default().graph_launch_us, value_parser = parse::whole::<u64>)]
    graph_launch_us: u64,
    /// The part of a collective's time by which it delays kernels beside it, from 0, which costs them nothing, to 1, where
    /// running beside gains nothing
    #[arg(long, value_name = "FRACTION", default_value_t = Speeds::default().contention, value_parser = parse::contention)]
    contention: Contention,
}

impl SimulateArgs {
    /// As the simulator takes them.
    pub(crate) fn speeds(&self) -> Speeds {
        let SpeedArgs {
            gemm_tflops,
            memory_gbs,
            node_gbs,
            network_gbs,
            latency_us,
            hop_us,
            kernel_us,
            launch_us,
            graph_launch_us,
            contention,
        } = self.speeds;
        Speeds {
            gemm_tflops,
            memory_gbs,
            node_gbs,
            network_gbs,
            latency_us,
            hop_us,
            kernel_us,
            launch_us,
            graph_launch_us,
            contention,
        }
    }
}
