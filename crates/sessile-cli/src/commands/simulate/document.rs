//! What `--json` writes.

use serde::Serialize;
use sessile_host::Contention;
use sessile_model::{
    config::GraphScope,
    simulate::{Candidate, KindSet, PhaseTimes, SimulateConfig, Simulated},
};
use sessile_plan::{DType, Plan, PlanOptions, StepCut, baseline_bytes, trace_digest};

use super::{Run, Subject};
use crate::{args::SimulateArgs, auto::Auto};

/// The document.
#[derive(Serialize)]
pub(super) struct Document {
    schema: &'static str,
    version: u32,
    pub(super) model: String,
    pub(super) scope: GraphScope,
    pub(super) wgrad_dtype: DType,
    pub(super) kind_set: KindSet,
    pub(super) with_gathered: bool,
    pub(super) options: PlanOptions,
    pub(super) groups: Vec<Group>,
    pub(super) device: Device,
    pub(super) leaves_out: Vec<&'static str>,
    /// One entry a number of ranks.
    pub(super) runs: Vec<Simulation>,
    /// `null` unless the depth was to be chosen.
    pub(super) auto: Option<Auto>,
}

/// A process group.
#[derive(Serialize)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) size: u32,
    pub(super) stride: u32,
    pub(super) kind: String,
    pub(super) why: &'static str,
    /// Whether its links are those of a node.
    pub(super) in_node: bool,
}

/// The modelled device.
#[derive(Serialize)]
pub(super) struct Device {
    pub(super) gemm_tflops: u64,
    pub(super) memory_gbs: u64,
    pub(super) node_gbs: u64,
    pub(super) network_gbs: u64,
    pub(super) latency_us: u64,
    pub(super) hop_us: u64,
    pub(super) kernel_us: u64,
    pub(super) launch_us: u64,
    pub(super) graph_launch_us: u64,
    pub(super) contention: f64,
    pub(super) gpus_per_node: u32,
}

/// Bytes of one arena.
#[derive(Serialize)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) lower_bound_bytes: u64,
}

/// Times of a phase.
#[derive(Serialize)]
pub(super) struct Phase {
    pub(super) total_ns: u64,
    pub(super) compute_ns: u64,
    pub(super) communication_ns: u64,
    pub(super) exposed_ns: u64,
    pub(super) idle_ns: u64,
    pub(super) exposed_fraction: f64,
}

impl From<PhaseTimes> for Phase {
    fn from(times: PhaseTimes) -> Phase {
        let PhaseTimes { total_ns, compute_ns, communication_ns, exposed_ns, idle_ns } = times;
        let exposed_fraction = times.exposed_fraction();
        Phase { total_ns, compute_ns, communication_ns, exposed_ns, idle_ns, exposed_fraction }
    }
}

/// The baselines on the same requests; `null` where one cannot capture them.
#[derive(Serialize)]
pub(super) struct Baselines {
    #[serde(rename = "per-request")]
    pub(super) per_request: u64,
    #[serde(rename = "ring:2")]
    pub(super) ring2: Option<u64>,
    #[serde(rename = "generations:1")]
    pub(super) generations1: u64,
    #[serde(rename = "generations:2")]
    pub(super) generations2: u64,
    #[serde(rename = "generations:3")]
    pub(super) generations3: u64,
}

/// One number of ranks.
#[derive(Serialize)]
pub(super) struct Simulation {
    pub(super) ranks: u32,
    /// Ranks that ran a program; each stands for `ranks / ran`.
    pub(super) ran: u32,
    pub(super) requests: u64,
    pub(super) runners: u64,
    trace_digest: String,
    pub(super) plan_digest: String,
    pub(super) bytes: u64,
    pub(super) lower_bound_bytes: u64,
    pub(super) fences: u64,
    pub(super) domains: Vec<Domain>,
    pub(super) persistent_bytes: u64,
    eager_bytes: u64,
    pub(super) baselines: Baselines,
    pub(super) backward: Phase,
    pub(super) sync: Phase,
    pub(super) optimizer: Phase,
    pub(super) step_ns: u64,
    /// Step time of the first entry over this one's: the work of a rank is the same.
    pub(super) weak_scaling: f64,
}

impl Document {
    pub(super) fn new(
        args: &SimulateArgs,
        config: &SimulateConfig,
        subject: &Subject,
        runs: &[Run],
        candidates: Option<(Vec<Candidate>, usize)>,
    ) -> Document {
        let group = |shape: &sessile_model::simulate::GroupShape| {
            let choice = config.kind(shape).ok()?;
            let (name, kind, in_node) =
                (shape.name.clone(), choice.kind.name().to_owned(), config.in_node(shape));
            Some(Group { name, size: shape.size, stride: shape.stride, kind, why: choice.why, in_node })
        };
        let first = runs.first().map_or(0, |run| run.simulated.step_ns());
        let auto = candidates.map(|table| Auto::new(table, args.choices.memory_limit));
        Document {
            schema: "sessile.simulate",
            version: 2,
            model: config.model.name.clone(),
            scope: config.scope,
            wgrad_dtype: config.wgrad_dtype,
            kind_set: args.model.kind_set,
            with_gathered: config.with_gathered || matches!(subject, Subject::Proxy(_)),
            options: runs.first().map_or_else(|| config.plan.clone(), |run| run.plan.options.clone()),
            groups: config.model.groups.iter().filter_map(group).collect(),
            device: device(config),
            leaves_out: leaves_out(config, subject),
            runs: runs.iter().map(|run| simulation(run, first)).collect(),
            auto,
        }
    }
}

fn device(config: &SimulateConfig) -> Device {
    let speeds = config.speeds;
    Device {
        gemm_tflops: speeds.gemm_tflops,
        memory_gbs: speeds.memory_gbs,
        node_gbs: speeds.node_gbs,
        network_gbs: speeds.network_gbs,
        latency_us: speeds.latency_us,
        hop_us: speeds.hop_us,
        kernel_us: speeds.kernel_us,
        launch_us: speeds.launch_us,
        graph_launch_us: speeds.graph_launch_us,
        contention: speeds.contention.fraction(),
        gpus_per_node: config.gpus_per_node,
    }
}

/// What a step has and the simulation has not.
fn leaves_out(config: &SimulateConfig, subject: &Subject) -> Vec<&'static str> {
    let always = [
        "what kernels take from collectives beside them",
        "differences between ranks: stragglers, imbalance of experts, failures",
    ];
    let shapes = [
        "the forward, embedding and output layer (unless captured), the loss",
        "attention itself, norms, activation functions, routers: of each weight only its two GEMMs",
        "collectives of tensor, context and pipeline parallelism, and the exchange of tokens between experts",
        "overlap of the sums over replicas with the backward",
    ];
    let gathers = ["all-gathers of weights and the buffers they fill (--with-gathered puts them in)"];
    let contention = ["what collectives take from kernels beside them (--contention puts it in)"];
    let is_shapes = matches!(subject, Subject::Shapes(_));
    let parts: [(bool, &[&'static str]); 4] = [
        (is_shapes, &shapes),
        (is_shapes && !config.with_gathered, &gathers),
        (config.speeds.contention == Contention::NONE, &contention),
        (true, &always),
    ];
    parts.into_iter().filter(|(is_out, _)| *is_out).flat_map(|(_, parts)| parts).copied().collect()
}

fn simulation(run: &Run, first_step_ns: u64) -> Simulation {
    let Run { ranks, simulated, trace, plan } = run;
    let Simulated { persistent_bytes, eager_bytes, backward, sync, optimizer, ran, .. } = simulated;
    let sessile_plan::Baselines {
        per_request,
        ring2,
        generations: [generations1, generations2, generations3],
        ..
    } = baseline_bytes(trace, StepCut::Barrier);
    let step_ns = simulated.step_ns();
    Simulation {
        ranks: *ranks,
        ran: *ran,
        requests: trace.requests().count() as u64,
        runners: trace.runners.len() as u64,
        trace_digest: trace_digest(trace),
        plan_digest: plan.digest(),
        bytes: plan.bytes(),
        lower_bound_bytes: plan.lower_bound_bytes(),
        fences: plan.fences.len() as u64,
        domains: domains(plan),
        persistent_bytes: *persistent_bytes,
        eager_bytes: *eager_bytes,
        baselines: Baselines { per_request, ring2, generations1, generations2, generations3 },
        backward: (*backward).into(),
        sync: (*sync).into(),
        optimizer: (*optimizer).into(),
        step_ns,
        weak_scaling: if step_ns == 0 { 1.0 } else { first_step_ns as f64 / step_ns as f64 },
    }
}

fn domains(plan: &Plan) -> Vec<Domain> {
    let domain = |arena: &sessile_plan::Arena| Domain {
        name: arena.domain.to_string(),
        bytes: arena.bytes,
        lower_bound_bytes: arena.lower_bound_bytes,
    };
    plan.arenas.iter().map(domain).collect()
}
