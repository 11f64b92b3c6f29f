//! Everything a training run depends on.

use serde::{Deserialize, Serialize};
use sessile_plan::{DType, StepCut, Strategy};

/// Rows of the embedding and of the output layer: one a byte.
pub const VOCAB: u64 = 256;

/// Which executions a run makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Eager execution only.
    Eager,
    /// Captured graphs only.
    Graphs,
    /// Both, from the same seed, compared to the bit.
    Both,
}

/// What one runner covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphScope {
    /// Attention or MLP of one layer.
    Module,
    /// A whole layer.
    Layer,
}

/// A kind of module that can be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModuleKind {
    /// Norm, QKV, causal attention, projection.
    Attention,
    /// Norm, up-projection, squared ReLU, down-projection.
    Mlp,
}

/// Whether reduce-scatters may run on into the next graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    /// They may.
    On,
    /// Every launch waits for the end of the one before.
    Off,
}

/// Which legal order the host device runs when a schedule seed is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleOrder {
    /// Any, drawn from the seed.
    #[default]
    Random,
    /// Writers as early as possible, readers as late as possible.
    WritersEarly,
    /// Readers as early as possible, writers as late as possible.
    ReadersEarly,
}

/// Options of a training run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// Ranks of the job.
    pub ranks: u32,
    /// Size of a weight's process group; `ranks` is a multiple of it.
    pub gtp: u32,
    /// Transformer layers.
    pub layers: u32,
    /// Hidden size.
    pub hidden: u64,
    /// Inner size of the MLP.
    pub ffn: u64,
    /// Attention heads.
    pub heads: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Sequences of a micro-batch, per rank.
    pub batch: u64,
    /// Optimizer steps.
    pub steps: u32,
    /// Micro-batches of a step.
    pub microbatches: u32,
    /// Micro-batches in flight at once (1F1B); each has its own runners.
    pub microbatches_in_flight: u32,
    /// Seed of weights and data.
    pub seed: u64,
    /// Seed of the scheduled order; none: worker threads.
    pub schedule_seed: Option<u64>,
    /// Order of the scheduled execution.
    pub schedule_order: ScheduleOrder,
    /// Which executions to make.
    pub mode: Mode,
    /// What one runner covers.
    pub graph_scope: GraphScope,
    /// Kinds of modules that are captured; the rest stays eager.
    pub graph_modules: Vec<ModuleKind>,
    /// How bytes are given to requests.
    pub strategy: Strategy,
    /// Launches apart before bytes are reused; 1 makes launches serial.
    pub depth: u32,
    /// What happens between two steps.
    pub step_cut: StepCut,
    /// Whether reduce-scatters may run on.
    pub overlap: Overlap,
    /// Dtype of weight gradients on the wire.
    pub wgrad_dtype: DType,
    /// Learning rate in units of 1e-6, so that the configuration is exact.
    pub learning_rate_micro: u32,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            ranks: 4,
            gtp: 2,
            layers: 4,
            hidden: 96,
            ffn: 384,
            heads: 4,
            seq: 64,
            batch: 4,
            steps: 60,
            microbatches: 1,
            microbatches_in_flight: 1,
            seed: 1,
            schedule_seed: None,
            schedule_order: ScheduleOrder::Random,
            mode: Mode::Both,
            graph_scope: GraphScope::Module,
            graph_modules: vec![ModuleKind::Attention, ModuleKind::Mlp],
            strategy: Strategy::Sessile,
            depth: 2,
            step_cut: StepCut::Barrier,
            overlap: Overlap::On,
            wgrad_dtype: DType::Bf16,
            learning_rate_micro: 3000,
        }
    }
}

/// A configuration that cannot run. Names the option, its value and what would do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} = {value}: {remedy}")]
pub struct ConfigError {
    /// The option, as on the command line.
    pub option: &'static str,
    /// Its value.
    pub value: String,
    /// What to do.
    pub remedy: String,
}

impl TrainConfig {
    /// Checks all options together.
    ///
    /// # Errors
    /// The first option that cannot work.
    pub fn check(&self) -> Result<(), ConfigError> {
        let range = |option, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError { option, value: value.to_string(), remedy: format!("use {low} to {high}") })
            }
        };
        range("--ranks", self.ranks.into(), 1, 64)?;
        range("--gtp", self.gtp.into(), 1, 64)?;
        range("--layers", self.layers.into(), 1, 256)?;
        range("--hidden", self.hidden, 8, 8192)?;
        range("--ffn", self.ffn, 8, 65536)?;
        range("--heads", self.heads, 1, 256)?;
        range("--seq", self.seq, 2, 8192)?;
        range("--batch", self.batch, 1, 1024)?;
        range("--steps", self.steps.into(), 1, 1_000_000)?;
        range("--microbatches", self.microbatches.into(), 1, 256)?;
        range("--microbatches-in-flight", self.microbatches_in_flight.into(), 1, 16)?;
        range("--depth", self.depth.into(), 1, 64)?;
        range("--learning-rate-micro", self.learning_rate_micro.into(), 1, 1_000_000)?;
        if !self.ranks.is_multiple_of(self.gtp) {
            return Err(ConfigError {
                option: "--gtp",
                value: self.gtp.to_string(),
                remedy: format!("--ranks {} must be a multiple of --gtp", self.ranks),
            });
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(ConfigError {
                option: "--heads",
                value: self.heads.to_string(),
                remedy: format!("--hidden {} must be a multiple of --heads", self.hidden),
            });
        }
        if self.microbatches_in_flight > self.microbatches {
            return Err(ConfigError {
                option: "--microbatches-in-flight",
                value: self.microbatches_in_flight.to_string(),
                remedy: format!("--microbatches is {}: no more can be in flight", self.microbatches),
            });
        }
        if self.graph_modules.is_empty() && self.mode != Mode::Eager {
            return Err(ConfigError {
                option: "--graph-modules",
                value: "(none)".into(),
                remedy: "name attention, mlp or both, or use --mode eager".into(),
            });
        }
        if self.steps == 1 && self.mode != Mode::Eager {
            return Err(ConfigError {
                option: "--steps",
                value: self.steps.to_string(),
                remedy: "step 1 is the discovery and runs eagerly; use --steps 2 or more, or --mode eager"
                    .into(),
            });
        }
        if self.wgrad_dtype == DType::U32 {
            return Err(ConfigError {
                option: "--wgrad-dtype",
                value: self.wgrad_dtype.to_string(),
                remedy: "use bf16 or f32".into(),
            });
        }
        let tokens = self.seq * self.batch;
        let width = self.ffn.max(3 * self.hidden).max(VOCAB);
        let elements = tokens.saturating_mul(width);
        if elements > 1 << 28 {
            return Err(ConfigError {
                option: "--batch",
                value: self.batch.to_string(),
                remedy: format!(
                    "{tokens} tokens of {width} elements need over 2^28 elements in one buffer; lower --batch, --seq, \
                     --hidden or --ffn"
                ),
            });
        }
        Ok(())
    }
}
