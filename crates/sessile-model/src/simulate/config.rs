//! Everything a simulation depends on.

use sessile_gtp::{ChainKind, Choice, Situation, Wanted, choose};
use sessile_host::{Contention, CostModel, Link};
use sessile_plan::{DType, PlanOptions, limits::RUNNERS_MAX};

use super::shapes::{GroupShape, ModelShape, WeightShape};
use crate::config::{ConfigError, GraphScope};

/// Speeds, as people give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speeds {
    /// GEMMs, in TFLOP/s.
    pub gemm_tflops: u64,
    /// Memory, in GB/s; 0: moving bytes takes no time.
    pub memory_gbs: u64,
    /// Links inside a node, in GB/s.
    pub node_gbs: u64,
    /// Links between nodes, in GB/s.
    pub network_gbs: u64,
    /// Of every collective, in microseconds.
    pub latency_us: u64,
    /// Of each hop between nodes, in microseconds.
    pub hop_us: u64,
    /// Of every kernel, in microseconds.
    pub kernel_us: u64,
    /// Host time of an enqueue, in microseconds.
    pub launch_us: u64,
    /// Host time of a graph launch, in microseconds.
    pub graph_launch_us: u64,
    /// The part of a collective's time by which it delays kernels beside it.
    pub contention: Contention,
}

impl Default for Speeds {
    /// 1.2 PFLOP/s, 4 TB/s, 500 and 45 GB/s, 20 us; 5 us a hop between nodes, 2 us a kernel, 3 us an enqueue, 10 us a graph; no
    /// contention, so exposed time is the least that speeds like these leave.
    fn default() -> Self {
        Speeds {
            gemm_tflops: 1200,
            memory_gbs: 4000,
            node_gbs: 500,
            network_gbs: 45,
            latency_us: 20,
            hop_us: 5,
            kernel_us: 2,
            launch_us: 3,
            graph_launch_us: 10,
            contention: Contention::NONE,
        }
    }
}

/// Options of a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulateConfig {
    /// The model.
    pub model: ModelShape,
    /// What one runner covers.
    pub scope: GraphScope,
    /// Dtype of weight gradients on the wire.
    pub wgrad_dtype: DType,
    /// Kind of reduce-scatter of all groups.
    pub reduce_scatter: Wanted,
    /// Kind of the group `expert`, if another one.
    pub expert_reduce_scatter: Option<Wanted>,
    /// Whether sums in FP32 are wanted although they cost more storage.
    pub fp32_accumulation: bool,
    /// Whether weights are gathered, or whole on every rank.
    pub with_gathered: bool,
    /// Ranks of the job.
    pub ranks: u32,
    /// Ranks of a node: groups within one use its links.
    pub gpus_per_node: u32,
    /// Whether one rank stands for all.
    pub folded: bool,
    /// How bytes are given to requests, and when they are reused.
    pub plan: PlanOptions,
    /// Speeds.
    pub speeds: Speeds,
}

impl SimulateConfig {
    /// A model as it comes: module scope, bf16, the communicator's own reduce-scatter, the fewest ranks, nodes of 64.
    pub fn new(model: ModelShape) -> Self {
        let ranks = u32::try_from(model.least_ranks()).unwrap_or(u32::MAX);
        SimulateConfig {
            model,
            scope: GraphScope::Module,
            wgrad_dtype: DType::Bf16,
            reduce_scatter: Wanted::Exactly(sessile_gtp::ReduceScatter::Ring),
            expert_reduce_scatter: None,
            fp32_accumulation: false,
            with_gathered: false,
            ranks,
            gpus_per_node: 64,
            folded: true,
            plan: PlanOptions::default(),
            speeds: Speeds::default(),
        }
    }

    /// Checks all options together.
    ///
    /// # Errors
    /// The first that cannot work.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.model.check()?;
        let error = |option, value: String, remedy: String| Err(ConfigError { option, value, remedy });
        let runners: u64 = self
            .model
            .layers
            .iter()
            .map(|layer| match self.scope {
                GraphScope::Module => u64::from(layer.count) * layer.modules.len() as u64,
                GraphScope::Layer => u64::from(layer.count),
            })
            .sum();
        if runners > RUNNERS_MAX as u64 {
            let remedy = format!(
                "{} has {runners} of them, a runner each: the limit is {RUNNERS_MAX}; lower the count of its layers",
                self.model.name
            );
            let scope = match self.scope {
                GraphScope::Module => "module",
                GraphScope::Layer => "layer",
            };
            return error("--scope", scope.into(), remedy);
        }
        let least = self.model.least_ranks();
        if self.ranks == 0 || self.ranks > 65_536 || !u64::from(self.ranks).is_multiple_of(least) {
            let remedy = format!(
                "use a multiple of {least}, which the groups of {} span, up to 65536",
                self.model.name
            );
            return error("--ranks", self.ranks.to_string(), remedy);
        }
        if !self.folded && self.ranks > 256 {
            let remedy = "use at most 256 ranks, each a thread, or let one rank stand for all".to_owned();
            return error("--ranks", self.ranks.to_string(), remedy);
        }
        if self.gpus_per_node == 0 {
            return error("--gpus-per-node", "0".into(), "use 1 or more".into());
        }
        if self.wgrad_dtype == DType::U32 {
            return error("--wgrad-dtype", "u32".into(), "use bf16 or f32".into());
        }
        let speeds = &self.speeds;
        let needed = [
            ("--gemm-tflops", speeds.gemm_tflops),
            ("--node-gbs", speeds.node_gbs),
            ("--network-gbs", speeds.network_gbs),
        ];
        if let Some((option, _)) = needed.into_iter().find(|(_, value)| *value == 0) {
            return error(option, "0".into(), "use 1 to 1000000: GEMMs and links need a speed".into());
        }
        let each = [
            ("--gemm-tflops", speeds.gemm_tflops),
            ("--memory-gbs", speeds.memory_gbs),
            ("--node-gbs", speeds.node_gbs),
            ("--network-gbs", speeds.network_gbs),
            ("--latency-us", speeds.latency_us),
            ("--hop-us", speeds.hop_us),
            ("--kernel-us", speeds.kernel_us),
            ("--launch-us", speeds.launch_us),
            ("--graph-launch-us", speeds.graph_launch_us),
        ];
        if let Some((option, value)) = each.into_iter().find(|(_, value)| *value > 1_000_000) {
            return error(option, value.to_string(), "use at most 1000000".into());
        }
        for depth in self.plan.depth_by_group.keys() {
            if !self.model.groups.iter().any(|group| group.name == *depth) {
                let names: Vec<_> = self.model.groups.iter().map(|group| group.name.as_str()).collect();
                let remedy = format!("{} has the groups {}", self.model.name, names.join(", "));
                return error("--depth-group", depth.clone(), remedy);
            }
        }
        for group in &self.model.groups {
            self.kind(group)?;
        }
        Ok(())
    }

    /// How gradients of a group are reduced. The host device can register memory.
    ///
    /// # Errors
    /// A kind that cannot run.
    pub fn kind(&self, group: &GroupShape) -> Result<Choice, ConfigError> {
        let (option, wanted) = match self.expert_reduce_scatter {
            Some(wanted) if group.name == "expert" => ("--expert-reduce-scatter", wanted),
            _ => ("--reduce-scatter", self.reduce_scatter),
        };
        let situation = Situation {
            group_size: group.size,
            wire: self.wgrad_dtype,
            registers: true,
            fp32_accumulation: self.fp32_accumulation,
            chain: ChainKind::Graphed,
        };
        choose(wanted, situation).map_err(|error| ConfigError {
            option,
            value: wanted.to_string(),
            remedy: error.remedy.to_owned(),
        })
    }

    /// Dtype of a weight's gradient.
    pub(crate) fn dtype(&self, weight: &WeightShape) -> DType {
        if weight.fp32 { DType::F32 } else { self.wgrad_dtype }
    }

    /// Tokens that a weight sees.
    pub(crate) fn tokens(&self, weight: &WeightShape) -> u64 {
        weight.tokens.unwrap_or(self.model.tokens)
    }

    /// Whether a group lies inside a node.
    pub fn in_node(&self, group: &GroupShape) -> bool {
        u64::from(group.size) * u64::from(group.stride) <= u64::from(self.gpus_per_node)
    }

    /// The cost model: the link of each group is that of its node, or the network, which all groups that leave the node
    /// share.
    pub fn costs(&self) -> CostModel {
        let speeds = &self.speeds;
        let link = |name: &str, gbs: u64, hop_us: u64| Link {
            name: name.to_owned(),
            bytes_per_second: gbs * 1_000_000_000,
            latency_ns: speeds.latency_us * 1_000,
            hop_ns: hop_us * 1_000,
        };
        let node = || link("node", speeds.node_gbs, 0);
        let network = || link("network", speeds.network_gbs, 0);
        let links = self
            .model
            .groups
            .iter()
            .map(|group| (group.name.clone(), if self.in_node(group) { node() } else { network() }));
        CostModel {
            gemm_flops: speeds.gemm_tflops * 1_000_000_000_000,
            memory_bytes: speeds.memory_gbs * 1_000_000_000,
            kernel_ns: speeds.kernel_us * 1_000,
            launch_ns: speeds.launch_us * 1_000,
            graph_launch_ns: speeds.graph_launch_us * 1_000,
            contention: speeds.contention,
            links: links.collect(),
            other_link: link("network", speeds.network_gbs, speeds.hop_us),
        }
    }
}
