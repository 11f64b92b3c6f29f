//! Everything a training run depends on.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sessile_gtp::{ChainKind, Choice, RankLayout, ReduceScatter, Repeat, Situation, Wanted, choose};
use sessile_plan::{DType, LaunchOrder, PlanOptions, StepCut, Strategy};

/// Name of the group that dense weights are sharded over.
pub const DENSE: &str = "dense";
/// Name of the group that weights of experts are sharded over.
pub const EXPERT: &str = "expert";

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
    /// Norm, router, and an MLP of each expert.
    Moe,
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
    /// Size of an expert weight's process group; `ranks` is a multiple of it. None: as `gtp`.
    pub egtp: Option<u32>,
    /// Transformer layers.
    pub layers: u32,
    /// Hidden size.
    pub hidden: u64,
    /// Inner size of the MLP.
    pub ffn: u64,
    /// Attention heads.
    pub heads: u64,
    /// Experts of a mixture; 0: MLPs only.
    pub experts: u32,
    /// Experts that each token goes to.
    pub top_k: u32,
    /// Every so many layers, the last of them has experts in place of its MLP.
    pub moe_every: u32,
    /// Further predictions, each one token on, by one shared layer and the output layer.
    pub mtp: u32,
    /// Tokens of a sequence; of several, steps take turns.
    pub seq: Vec<u64>,
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
    /// Whether embedding and output layer are captured too.
    pub graph_heads: bool,
    /// What happens when one backward uses a weight more than once.
    pub repeat: Repeat,
    /// How bytes are given to requests.
    pub strategy: Strategy,
    /// Launches apart before bytes are reused; 1 makes launches serial.
    pub depth: u32,
    /// Depths of single groups, `dense` or `expert`, counted in launches that use them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub depth_by_group: BTreeMap<String, u32>,
    /// Whether depths are chosen from what the discovery measured: `depth` is then not used, a group of `depth_by_group`
    /// keeps its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub depth_auto: bool,
    /// Bytes that all arenas of a rank may take, if depths are chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// What happens between two steps.
    pub step_cut: StepCut,
    /// Whether reduce-scatters may run on.
    pub overlap: Overlap,
    /// Dtype of weight gradients on the wire.
    pub wgrad_dtype: DType,
    /// How gradients are reduced.
    pub reduce_scatter: Wanted,
    /// How gradients of experts are. None: as the others.
    pub expert_reduce_scatter: Option<Wanted>,
    /// Whether sums in FP32 are wanted where peers' memory cannot be read.
    pub fp32_accumulation: bool,
    /// Learning rate in units of 1e-6, so that the configuration is exact.
    pub learning_rate_micro: u32,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            ranks: 4,
            gtp: 2,
            egtp: None,
            layers: 4,
            hidden: 96,
            ffn: 384,
            heads: 4,
            experts: 0,
            top_k: 2,
            moe_every: 2,
            mtp: 0,
            seq: vec![64],
            batch: 4,
            steps: 60,
            microbatches: 1,
            microbatches_in_flight: 1,
            seed: 1,
            schedule_seed: None,
            schedule_order: ScheduleOrder::Random,
            mode: Mode::Both,
            graph_scope: GraphScope::Module,
            graph_modules: vec![ModuleKind::Attention, ModuleKind::Mlp, ModuleKind::Moe],
            graph_heads: false,
            repeat: Repeat::Drain,
            strategy: Strategy::Sessile,
            depth: 2,
            depth_by_group: BTreeMap::new(),
            depth_auto: false,
            memory_limit: None,
            step_cut: StepCut::Barrier,
            overlap: Overlap::On,
            wgrad_dtype: DType::Bf16,
            reduce_scatter: Wanted::Exactly(ReduceScatter::Ring),
            expert_reduce_scatter: None,
            fp32_accumulation: false,
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

/// Checks that a number lies within its range.
fn range(option: &'static str, value: u64, low: u64, high: u64) -> Result<(), ConfigError> {
    refuse(!(low..=high).contains(&value), option, value, || format!("use {low} to {high}"))
}

/// An error about an option, if `wrong`.
fn refuse(
    wrong: bool,
    option: &'static str,
    value: impl ToString,
    remedy: impl FnOnce() -> String,
) -> Result<(), ConfigError> {
    if wrong { Err(ConfigError { option, value: value.to_string(), remedy: remedy() }) } else { Ok(()) }
}

impl TrainConfig {
    /// Ranks that share a dense weight.
    ///
    /// # Errors
    /// If `--ranks` is no multiple of `--gtp`.
    pub fn dense_layout(&self) -> Result<RankLayout, ConfigError> {
        layout("--gtp", self.ranks, self.gtp)
    }

    /// Ranks that share an expert's weight.
    ///
    /// # Errors
    /// If `--ranks` is no multiple of `--egtp`.
    pub fn expert_layout(&self) -> Result<RankLayout, ConfigError> {
        layout("--egtp", self.ranks, self.egtp.unwrap_or(self.gtp))
    }

    /// Whether a layer has experts in place of its MLP.
    pub fn is_moe(&self, layer: u32) -> bool {
        self.experts > 0 && (layer + 1).is_multiple_of(self.moe_every.max(1))
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> u64 {
        self.seq.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of text that one sequence takes: its tokens and those that are predicted behind them.
    pub fn window(&self) -> u64 {
        self.longest().saturating_add(1 + u64::from(self.mtp))
    }

    /// How gradients of dense weights are reduced, on a device that can register memory or not.
    ///
    /// # Errors
    /// A kind that was asked for and can't run.
    pub fn dense_kind(&self, registers: bool) -> Result<Choice, ConfigError> {
        self.kind("--reduce-scatter", self.reduce_scatter, self.gtp, registers)
    }

    /// How gradients of experts are.
    ///
    /// # Errors
    /// A kind that was asked for and can't run.
    pub fn expert_kind(&self, registers: bool) -> Result<Choice, ConfigError> {
        let (wanted, size) = (self.expert_reduce_scatter, self.egtp.unwrap_or(self.gtp));
        self.kind("--expert-reduce-scatter", wanted.unwrap_or(self.reduce_scatter), size, registers)
    }

    fn kind(
        &self,
        option: &'static str,
        wanted: Wanted,
        group_size: u32,
        registers: bool,
    ) -> Result<Choice, ConfigError> {
        let situation = Situation {
            group_size,
            wire: self.wgrad_dtype,
            registers,
            fp32_accumulation: self.fp32_accumulation,
            chain: ChainKind::Graphed,
        };
        choose(wanted, situation).map_err(|error| ConfigError {
            option,
            value: wanted.to_string(),
            remedy: error.remedy.to_owned(),
        })
    }

    /// What the plan is made with.
    pub fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            strategy: self.strategy,
            depth: self.depth,
            depth_by_group: self.depth_by_group.clone(),
            step_cut: self.step_cut,
            launch_order: match self.overlap {
                Overlap::On => LaunchOrder::Overlapped,
                Overlap::Off => LaunchOrder::Serial,
            },
        }
    }

    /// Checks all options together.
    ///
    /// # Errors
    /// The first option that cannot work.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        self.dense_layout()?;
        self.expert_layout()?;
        let TrainConfig { hidden, heads, experts, top_k, .. } = *self;
        refuse(!hidden.is_multiple_of(heads), "--heads", heads, || {
            format!("--hidden {hidden} must be a multiple of --heads")
        })?;
        refuse(experts > 0 && top_k > experts, "--top-k", top_k, || {
            format!("--experts is {experts}: a token cannot go to more")
        })?;
        refuse(
            self.microbatches_in_flight > self.microbatches,
            "--microbatches-in-flight",
            self.microbatches_in_flight,
            || format!("--microbatches is {}: no more can be in flight", self.microbatches),
        )?;
        let captures = self.mode != Mode::Eager;
        refuse(captures && self.graph_modules.is_empty(), "--graph-modules", "(none)", || {
            "name attention, mlp or moe, or use --mode eager".to_owned()
        })?;
        let only_moe = self.graph_modules.iter().all(|kind| *kind == ModuleKind::Moe);
        let any_moe = (0..self.layers).any(|layer| self.is_moe(layer));
        refuse(captures && only_moe && !any_moe && !self.graph_heads, "--graph-modules", "moe", || {
            "no layer has experts, so nothing would be captured: use --experts, or name attention or mlp"
                .to_owned()
        })?;
        let discoveries = self.seq.len() as u64;
        refuse(captures && u64::from(self.steps) <= discoveries, "--steps", self.steps, || {
            format!(
                "the first step of each sequence length is its discovery and runs eagerly; use --steps {} or more, or \
                 --mode eager",
                discoveries + 1
            )
        })?;
        refuse(self.wgrad_dtype == DType::U32, "--wgrad-dtype", self.wgrad_dtype, || {
            "use bf16 or f32".to_owned()
        })?;
        let tokens = self.longest() * self.batch;
        let wide = self.ffn.saturating_mul(u64::from(experts.max(1)));
        let width = wide.max(3 * self.hidden).max(VOCAB);
        refuse(tokens.saturating_mul(width) > 1 << 28, "--batch", self.batch, || {
            format!(
                "{tokens} tokens of {width} elements need over 2^28 elements in one buffer; lower --batch, --seq, \
                 --hidden, --ffn or --experts"
            )
        })
    }

    fn check_ranges(&self) -> Result<(), ConfigError> {
        range("--ranks", self.ranks.into(), 1, 64)?;
        range("--gtp", self.gtp.into(), 1, 64)?;
        range("--egtp", self.egtp.unwrap_or(self.gtp).into(), 1, 64)?;
        range("--layers", self.layers.into(), 1, 256)?;
        range("--hidden", self.hidden, 8, 8192)?;
        range("--ffn", self.ffn, 8, 65536)?;
        range("--heads", self.heads, 1, 256)?;
        range("--experts", self.experts.into(), 0, 128)?;
        range("--top-k", self.top_k.into(), 1, 128)?;
        range("--moe-every", self.moe_every.into(), 1, 256)?;
        range("--mtp", self.mtp.into(), 0, 16)?;
        refuse(!(1..=8).contains(&self.seq.len()), "--seq", format!("{} lengths", self.seq.len()), || {
            "use 1 to 8 lengths".to_owned()
        })?;
        for (at, &seq) in self.seq.iter().enumerate() {
            range("--seq", seq, 2, 8192)?;
            refuse(self.seq[..at].contains(&seq), "--seq", seq, || "name each length once".to_owned())?;
        }
        range("--batch", self.batch, 1, 1024)?;
        range("--steps", self.steps.into(), 1, 1_000_000)?;
        range("--microbatches", self.microbatches.into(), 1, 256)?;
        range("--microbatches-in-flight", self.microbatches_in_flight.into(), 1, 16)?;
        range("--depth", self.depth.into(), 1, 64)?;
        for (group, &depth) in &self.depth_by_group {
            let known = group == DENSE || group == EXPERT && self.experts > 0;
            refuse(!known, "--depth-group", group, || "name dense, or with --experts expert".to_owned())?;
            range("--depth-group", depth.into(), 1, 64)?;
        }
        let limit = self.memory_limit.filter(|_| !self.depth_auto).map(|limit| limit.to_string());
        if let Some(limit) = limit {
            refuse(true, "--memory-limit", &limit, || {
                "it chooses among depths: use it with --depth auto".into()
            })?;
        }
        refuse(self.depth_auto && self.schedule_seed.is_some(), "--depth", "auto", || {
            "a schedule has no clock to choose by: leave --schedule-seed out, or give a number".to_owned()
        })?;
        range("--learning-rate-micro", self.learning_rate_micro.into(), 1, 1_000_000)
    }
}

fn layout(option: &'static str, ranks: u32, size: u32) -> Result<RankLayout, ConfigError> {
    RankLayout::new(ranks, size).ok_or_else(|| ConfigError {
        option,
        value: size.to_string(),
        remedy: format!("--ranks {ranks} must be a multiple of {option}"),
    })
}
