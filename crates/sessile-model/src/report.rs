//! What a run found.

use serde::{Deserialize, Serialize};
use sessile_gtp::Choice;
use sessile_plan::{Plan, Trace};
use sessile_runtime::{Footprint, log::Log};

use crate::{config::TrainConfig, simulate::DepthTable};

/// Version of the run format.
pub const RUN_VERSION: u32 = 1;

/// One execution of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// Mean over ranks and micro-batches.
    pub loss: f64,
    /// SHA-256 over the `main_grad`s of all ranks, in rank order, before the optimizer.
    pub main_grad_digest: String,
}

/// One step in the executions that were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Number, from 1.
    pub step: u32,
    /// Eager execution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager: Option<StepResult>,
    /// Graphs (step 1 is the discovery, eager by nature).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graphs: Option<StepResult>,
}

impl Step {
    /// Whether both executions agree to the bit; `None` if only one was made.
    pub fn equal(&self) -> Option<bool> {
        let (eager, graphs) = (self.eager.as_ref()?, self.graphs.as_ref()?);
        Some(
            eager.loss.to_bits() == graphs.loss.to_bits()
                && eager.main_grad_digest == graphs.main_grad_digest,
        )
    }
}

/// Free bytes of a device, read after each replayed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FreeBytes {
    /// After the first.
    pub first: u64,
    /// The least.
    pub least: u64,
    /// After the last.
    pub last: u64,
}

/// A kernel that captured collectives became.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveKernel {
    /// Its symbol.
    pub name: String,
    /// Blocks of its grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Nodes of all graphs together that run it.
    pub nodes: u64,
}

/// What the graph execution leaves besides its steps, for rank 0 unless said otherwise.
pub struct GraphsOutcome {
    /// What was discovered.
    pub trace: Trace,
    /// What was planned.
    pub plan: Plan,
    /// What its depths were chosen from, if they were.
    pub depths: Option<DepthTable>,
    /// What the arenas take of the device's memory, as known before they were allocated.
    pub footprint: Footprint,
    /// Free memory of the device over the replayed steps; `None` if it has none of its own.
    pub free: Option<FreeBytes>,
    /// Whether every rank's arenas are still where they were sealed.
    pub addresses_kept: bool,
    /// What collectives became in the graphs, where the device has kernels.
    pub kernels: Vec<CollectiveKernel>,
    /// Graph launches.
    pub replays: u64,
    /// Launches out of the sealed order.
    pub order_deviations: u64,
    /// The log of all ranks.
    pub log: Log,
    /// When work ran, by rank; matches the log's tickets.
    pub spans: Vec<Vec<sessile_hal::Span>>,
}

/// How gradients were reduced, and why so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// Those of dense weights.
    pub dense: Choice,
    /// Those of experts, if there are any.
    pub expert: Option<Choice>,
}

/// How often gradients of rank 0 became ready, over all weights; by execution, if it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradReady {
    /// Eagerly.
    pub eager: Option<u64>,
    /// From graphs.
    pub graphs: Option<u64>,
}

impl GradReady {
    /// Whether both agree; `None` if only one execution was made.
    pub fn equal(&self) -> Option<bool> {
        Some(self.eager? == self.graphs?)
    }
}

/// What a run gives back.
pub struct TrainOutcome {
    /// The options, defaults filled in.
    pub config: TrainConfig,
    /// How gradients were reduced.
    pub kinds: Kinds,
    /// How often gradients became ready.
    pub grad_ready: GradReady,
    /// All steps.
    pub steps: Vec<Step>,
    /// Present if graphs were run.
    pub graphs: Option<GraphsOutcome>,
}
