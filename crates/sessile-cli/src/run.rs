//! The saved run: what `sessile train --json FILE` writes and `sessile check FILE` reads.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use sessile_cuda::{CudaDevice, driver_version, nccl};
use sessile_hal::DeviceError;
use sessile_model::{Choice, CollectiveKernel, FreeBytes, GradReady, Kinds, TrainConfig};
use sessile_plan::{Domain, Plan, Trace};

use crate::auto::Auto;

/// Value of `schema`.
pub(crate) const SCHEMA: &str = "sessile.run";
/// Version of the format that this build reads and writes.
pub(crate) const VERSION: u32 = 1;

/// Takes `null`, but not that the field is missing.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Option::deserialize(from)
}

/// Every option's value, defaults included.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Options {
    pub(crate) device: String,
    #[serde(flatten)]
    pub(crate) train: TrainConfig,
    /// `null`: the project's own documentation.
    #[serde(deserialize_with = "nullable")]
    pub(crate) data: Option<PathBuf>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) json: Option<PathBuf>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) trace_out: Option<PathBuf>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) timeline: Option<PathBuf>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) log_out: Option<PathBuf>,
}

/// One execution of one step.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Execution {
    /// `null` if not a number.
    #[serde(deserialize_with = "nullable")]
    pub(crate) loss: Option<f64>,
    /// SHA-256 over the main gradients of all ranks.
    pub(crate) main_grad_digest: String,
}

/// One step; `null` for an execution that was not made.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    pub(crate) step: u32,
    #[serde(deserialize_with = "nullable")]
    pub(crate) eager: Option<Execution>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) graphs: Option<Execution>,
}

impl Step {
    /// Whether both executions agree; `None` if only one was made.
    pub(crate) fn equal(&self) -> Option<bool> {
        Some(self.eager.as_ref()? == self.graphs.as_ref()?)
    }
}

/// Bytes of one arena.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ArenaBytes {
    /// `default` or `symmetric(group)`.
    pub(crate) domain: String,
    pub(crate) bytes: u64,
}

/// Bytes by number of generations.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Generations {
    #[serde(rename = "1")]
    pub(crate) one: u64,
    #[serde(rename = "2")]
    pub(crate) two: u64,
    #[serde(rename = "3")]
    pub(crate) three: u64,
}

/// What the buffers of rank 0 take, and would take.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Memory {
    pub(crate) arenas: Vec<ArenaBytes>,
    pub(crate) requests: u64,
    pub(crate) runners: u64,
    pub(crate) per_request_bytes: u64,
    /// `null` where its capture would fail.
    #[serde(deserialize_with = "nullable")]
    pub(crate) ring2_bytes: Option<u64>,
    pub(crate) generations_bytes: Generations,
    pub(crate) lower_bound_bytes: u64,
    pub(crate) arena_bytes: u64,
}

/// Where an arena's memory comes from.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DomainKind {
    Default,
    Symmetric,
}

/// One domain of the plan.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DomainBytes {
    pub(crate) name: String,
    /// `null` for the device's own memory.
    #[serde(deserialize_with = "nullable")]
    pub(crate) group: Option<String>,
    pub(crate) kind: DomainKind,
    /// Whether its arena is registered with the group.
    pub(crate) window: bool,
    pub(crate) bytes: u64,
}

/// Domains of a plan.
pub(crate) fn domains(plan: &Plan) -> Vec<DomainBytes> {
    let domain = |arena: &sessile_plan::Arena| {
        let (group, kind) = match &arena.domain {
            Domain::Default => (None, DomainKind::Default),
            Domain::Symmetric(group) => (Some(group.clone()), DomainKind::Symmetric),
        };
        let window = kind == DomainKind::Symmetric;
        DomainBytes { name: arena.domain.to_string(), group, kind, window, bytes: arena.bytes }
    };
    plan.arenas.iter().map(domain).collect()
}

/// What is asked for in one role.
#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RoleBytes {
    pub(crate) requests: u64,
    /// Sum over the requests, as if none shared.
    pub(crate) bytes: u64,
}

/// Requests of a trace by role.
pub(crate) fn roles(trace: &Trace) -> BTreeMap<String, RoleBytes> {
    let mut roles: BTreeMap<String, RoleBytes> = BTreeMap::new();
    for (_, request) in trace.requests() {
        let role = roles.entry(request.spec.role.to_string()).or_default();
        role.requests += 1;
        role.bytes += request.spec.aligned_bytes().unwrap_or(0);
    }
    roles
}

/// How gradients were reduced.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReduceScatters {
    pub(crate) dense: String,
    /// `null` without experts.
    #[serde(deserialize_with = "nullable")]
    pub(crate) expert: Option<String>,
    /// For people.
    pub(crate) why: String,
}

impl From<Kinds> for ReduceScatters {
    fn from(kinds: Kinds) -> Self {
        let Kinds { dense, expert } = kinds;
        let why = match expert {
            None => format!("dense: {}", dense.why),
            Some(expert) => format!("dense: {}; expert: {}", dense.why, expert.why),
        };
        let name = |choice: Choice| choice.kind.to_string();
        ReduceScatters { dense: name(dense), expert: expert.map(name), why }
    }
}

/// Pairs of operations of different runners that were in flight at once.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OverlapPairs {
    pub(crate) cross_runner_pairs: u64,
    /// Those of them that touch one arena.
    pub(crate) sharing_arena: u64,
}

/// What only a run on GPUs has, of rank 0.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cuda {
    pub(crate) gpu: String,
    /// As the driver counts, such as 13000.
    pub(crate) driver: i32,
    /// As NCCL counts, such as 22809.
    pub(crate) nccl: i32,
    /// `null` for a run of eager execution only.
    #[serde(deserialize_with = "nullable")]
    pub(crate) graphs: Option<CudaGraphs>,
}

impl Cuda {
    /// What is known before the run.
    ///
    /// # Errors
    /// Those of driver and NCCL.
    pub(crate) fn about(device: &CudaDevice) -> Result<Cuda, DeviceError> {
        let (driver, nccl) = (driver_version()?, nccl::version()?);
        Ok(Cuda { gpu: device.gpu().name.clone(), driver, nccl, graphs: None })
    }
}

/// Memory and kernels of the graphs.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CudaGraphs {
    pub(crate) planned_bytes: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) registered_bytes: u64,
    /// Free on the GPU before the arenas were allocated.
    #[serde(deserialize_with = "nullable")]
    pub(crate) free_before_bytes: Option<u64>,
    /// Free after each replayed step.
    #[serde(deserialize_with = "nullable")]
    pub(crate) free_bytes: Option<FreeBytes>,
    /// Whether every rank's arenas stayed where they were sealed.
    pub(crate) addresses_kept: bool,
    /// What the captured collectives became.
    pub(crate) collective_kernels: Vec<CollectiveKernel>,
}

/// What the happens-before checker found.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Checked {
    pub(crate) operations: u64,
    pub(crate) violations: u64,
}

/// The document. What does not apply to a run of eager execution only is `null`.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    pub(crate) schema: String,
    pub(crate) version: u32,
    pub(crate) config: Options,
    pub(crate) steps: Vec<Step>,
    /// `null` if only one execution was made.
    #[serde(deserialize_with = "nullable")]
    pub(crate) equal_bits: Option<bool>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) memory: Option<Memory>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) domains: Option<Vec<DomainBytes>>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) roles: Option<BTreeMap<String, RoleBytes>>,
    pub(crate) reduce_scatter: ReduceScatters,
    pub(crate) grad_ready: GradReady,
    #[serde(deserialize_with = "nullable")]
    pub(crate) fences: Option<u64>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) replays: Option<u64>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) order_deviations: Option<u64>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) overlap: Option<OverlapPairs>,
    #[serde(deserialize_with = "nullable")]
    pub(crate) checker: Option<Checked>,
    /// `null` on the host device.
    #[serde(deserialize_with = "nullable")]
    pub(crate) cuda: Option<Cuda>,
    /// What depths were chosen from, by their time in a replayed step; `null` if they were given.
    #[serde(deserialize_with = "nullable")]
    pub(crate) auto: Option<Auto>,
    /// The recorded requests of rank 0.
    #[serde(deserialize_with = "nullable")]
    pub(crate) trace: Option<Box<RawValue>>,
    /// The plan of rank 0.
    #[serde(deserialize_with = "nullable")]
    pub(crate) plan: Option<Box<RawValue>>,
}

/// Reads a saved run.
///
/// # Errors
/// One message: the field or place, and what to do.
pub(crate) fn read(bytes: &[u8]) -> Result<Run, String> {
    #[derive(Deserialize)]
    struct Header {
        version: u64,
    }
    let remedy = "save it again with `sessile train --json FILE`";
    let bad = |error: serde_json::Error| {
        let text: String = error.to_string().chars().take(300).collect();
        format!("is no saved run of version {VERSION}: {text}; {remedy}")
    };
    let header: Header = serde_json::from_slice(bytes).map_err(bad)?;
    if header.version != u64::from(VERSION) {
        return Err(format!(
            "field `version` is {}: this build reads version {VERSION}; {remedy}",
            header.version
        ));
    }
    serde_json::from_slice(bytes).map_err(bad)
}
