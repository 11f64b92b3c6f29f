//! The choice of depths: every small vector of depths is simulated, and the table decides.

use std::collections::{BTreeMap, BTreeSet};

use sessile_host::RankFailure;
use sessile_plan::{DType, Plan, PlanOptions, RequestSpec, Role, Strategy, Trace, plan};
use sessile_runtime::RuntimeError;

use super::{SimulateConfig, Simulated, replay, simulate};
use crate::train::TrainError;

/// Depths that are tried for each group.
pub const DEPTHS: [u32; 3] = [1, 2, 3];

/// Exposed time, as a fraction of the backward, that fewer bytes are worth.
pub const WORTH: f64 = 0.005;

/// One vector of depths and what it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// By group.
    pub depth: BTreeMap<String, u32>,
    /// Whether depths count the launches that use the group, or all launches.
    pub by_group: bool,
    /// Bytes of all arenas.
    pub bytes: u64,
    /// Their lower bound.
    pub lower_bound_bytes: u64,
    /// Fences of the plan.
    pub fences: u64,
    /// Time of the backward.
    pub backward_ns: u64,
    /// Exposed time of it.
    pub exposed_ns: u64,
    /// Exposed time as a fraction of it.
    pub exposed_fraction: f64,
}

/// Candidates, in order of depth, and the index of the chosen one.
pub type DepthTable = (Vec<Candidate>, usize);

/// All candidates and the one that was chosen.
#[derive(Clone, Debug)]
pub struct AutoDepth {
    /// In order of depth.
    pub candidates: Vec<Candidate>,
    /// Index of the choice.
    pub chosen: usize,
    /// Its simulation.
    pub simulated: Simulated,
}

/// No vector of depths fits the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--memory-limit {limit}: the smallest plan takes {bytes} bytes ({depth}); in the way are {}; {}",
    .largest.join(", "), .remedies.join(", or ")
)]
pub struct OverLimit {
    /// What was allowed.
    pub limit: u64,
    /// What the smallest takes.
    pub bytes: u64,
    /// Its depths.
    pub depth: String,
    /// The largest requests that must be live at once.
    pub largest: Vec<String>,
    /// What would help.
    pub remedies: Vec<&'static str>,
}

/// Why there is no choice.
#[derive(Debug, thiserror::Error)]
pub enum AutoError {
    /// A simulation failed.
    #[error(transparent)]
    Simulation(#[from] TrainError),
    /// Nothing fits.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
}

/// Depths as people read them: `dense 2, expert 1`, or `2 for all launches`.
pub fn depth_text(candidate: &Candidate) -> String {
    let Candidate { depth, by_group, .. } = candidate;
    if !by_group {
        return format!("{} for all launches", depth.values().copied().max().unwrap_or(1));
    }
    let each: Vec<String> = depth.iter().map(|(group, depth)| format!("{group} {depth}")).collect();
    each.join(", ")
}

/// Which candidate is best: without a limit the fewest bytes within [`WORTH`] of the least exposed, under a limit the
/// least exposed that fits. Ties go to fewer bytes, then to the smaller depths. `None` if nothing fits.
pub fn choose_depth(candidates: &[Candidate], limit: Option<u64>) -> Option<usize> {
    let all = 0..candidates.len();
    let exposed = |at: &usize| (candidates[*at].exposed_fraction * 1e9) as u64;
    if let Some(limit) = limit {
        let fitting = all.filter(|&at| candidates[at].bytes <= limit);
        return fitting.min_by_key(|at| (exposed(at), candidates[*at].bytes, *at));
    }
    let least = all.clone().map(|at| exposed(&at)).min()?;
    let near = all.filter(|at| exposed(at) <= least + (WORTH * 1e9) as u64);
    near.min_by_key(|at| (candidates[*at].bytes, *at))
}

/// Groups whose depths vary by themselves; those after them follow the last.
const GROUPS: usize = 3;

/// Every vector of [`DEPTHS`] over groups. A group that is `fixed` keeps its depth.
fn vectors(groups: &[String], fixed: &BTreeMap<String, u32>) -> Vec<BTreeMap<String, u32>> {
    let free: Vec<&String> = groups.iter().filter(|group| !fixed.contains_key(*group)).collect();
    let mut vectors = vec![fixed.clone()];
    for (at, group) in free.iter().enumerate() {
        let longer = |vector: &BTreeMap<String, u32>| -> Vec<BTreeMap<String, u32>> {
            let with = |depth: u32| {
                let mut vector = vector.clone();
                vector.insert((*group).clone(), depth);
                vector
            };
            match at.checked_sub(GROUPS) {
                None => DEPTHS.iter().map(|&depth| with(depth)).collect(),
                Some(_) => vec![with(vector[free[GROUPS - 1]])],
            }
        };
        vectors = vectors.iter().flat_map(longer).collect();
    }
    vectors
}

/// A vector of depths, and whether each counts the launches of its group.
type Vector = (BTreeMap<String, u32>, bool);

/// Every vector of depths by group, then one depth for all launches: where groups alternate, it can hold fewer bytes.
fn all_vectors(groups: &[String], fixed: &BTreeMap<String, u32>) -> Vec<Vector> {
    let mut all: Vec<Vector> = match groups.len() {
        0 => Vec::new(),
        _ => vectors(groups, fixed).into_iter().map(|vector| (vector, true)).collect(),
    };
    if groups.len() != 1 && fixed.is_empty() {
        let names: Vec<String> = if groups.is_empty() { vec!["all".to_owned()] } else { groups.to_vec() };
        all.extend(DEPTHS.map(|depth| (names.iter().map(|name| (name.clone(), depth)).collect(), false)));
    }
    all
}

/// Options with these depths; what belongs to no group gets the largest.
fn with_depths(options: &PlanOptions, (depth, by_group): &Vector) -> PlanOptions {
    PlanOptions {
        depth: depth.values().copied().max().unwrap_or(options.depth),
        depth_by_group: if *by_group { depth.clone() } else { BTreeMap::new() },
        ..options.clone()
    }
}

/// Groups whose reduce-scatters and gathers ask for buffers, those with the most bytes first.
pub fn groups_of_trace(trace: &Trace) -> Vec<String> {
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, request) in trace.requests() {
        if let Some(group) =
            request.spec.group.as_deref().filter(|_| !matches!(request.spec.role, Role::User(_)))
        {
            let sum = bytes.entry(group).or_default();
            *sum = sum.saturating_add(request.spec.aligned_bytes().unwrap_or(0));
        }
    }
    let mut groups: Vec<(&str, u64)> = bytes.into_iter().collect();
    groups.sort_by_key(|&(group, bytes)| (u64::MAX - bytes, group));
    groups.into_iter().map(|(group, _)| group.to_owned()).collect()
}

/// The depths chosen for a trace, and its plan.
#[derive(Clone, Debug)]
pub struct TraceDepth {
    /// In order of depth.
    pub candidates: Vec<Candidate>,
    /// Index of the choice.
    pub chosen: usize,
    /// The plan at the chosen depths.
    pub plan: Plan,
}

/// Plans a trace at every vector of [`DEPTHS`] over its groups, and at each as one depth for all launches, replays each plan on the virtual clock and chooses. Groups
/// that `options` gives a depth keep it; a trace without groups has one depth for all.
///
/// # Errors
/// [`TrainError::Plan`]; [`OverLimit`] if no vector fits; those of the device.
pub fn depth_of_trace(
    trace: &Trace,
    options: &PlanOptions,
    limit: Option<u64>,
) -> Result<TraceDepth, AutoError> {
    let mut candidates = Vec::new();
    let mut plans = Vec::new();
    for vector in all_vectors(&groups_of_trace(trace), &options.depth_by_group) {
        let options = with_depths(options, &vector);
        let made = plan(trace, &options).map_err(TrainError::Plan)?;
        let failed = |error| {
            let error = RuntimeError::from(error);
            TrainError::Rank(Box::new(RankFailure::Failed { rank: 0, error }))
        };
        let times = replay(trace, &made).map_err(failed)?;
        let (depth, by_group) = vector;
        candidates.push(Candidate {
            depth,
            by_group,
            bytes: made.bytes(),
            lower_bound_bytes: made.lower_bound_bytes(),
            fences: made.fences.len() as u64,
            backward_ns: times.total_ns,
            exposed_ns: times.exposed_ns,
            exposed_fraction: times.exposed_fraction(),
        });
        plans.push(made);
    }
    match choose_depth(&candidates, limit) {
        Some(chosen) => Ok(TraceDepth { candidates, chosen, plan: plans.swap_remove(chosen) }),
        None => {
            let smallest = (0..plans.len()).min_by_key(|&at| plans[at].bytes()).unwrap_or(0);
            let depth = depth_text(&candidates[smallest]);
            Err(over_limit(limit, trace, &plans[smallest], depth, &options.depth_by_group).into())
        }
    }
}

/// Simulates every vector of [`DEPTHS`] over the model's groups, and each as one depth for all launches, and chooses. `observe` is told each as it ends.
///
/// # Errors
/// Those of [`simulate`]; [`OverLimit`] if no vector fits.
pub fn auto_depth(
    config: &SimulateConfig,
    limit: Option<u64>,
    observe: &dyn Fn(&Candidate),
) -> Result<AutoDepth, AutoError> {
    config.check().map_err(TrainError::from)?;
    let groups: Vec<String> = config.model.groups.iter().map(|group| group.name.clone()).collect();
    let vectors = all_vectors(&groups, &config.plan.depth_by_group);
    let mut candidates = Vec::new();
    let mut kept: Option<(usize, Simulated)> = None;
    let mut smallest: Option<(Trace, Plan, String)> = None;
    for vector in vectors {
        let mut config = config.clone();
        config.plan = with_depths(&config.plan, &vector);
        let (depth, by_group) = vector;
        let simulated = simulate(&config)?;
        let plan = &simulated.plan;
        let candidate = Candidate {
            depth,
            by_group,
            bytes: plan.bytes(),
            lower_bound_bytes: plan.lower_bound_bytes(),
            fences: plan.fences.len() as u64,
            backward_ns: simulated.backward.total_ns,
            exposed_ns: simulated.backward.exposed_ns,
            exposed_fraction: simulated.backward.exposed_fraction(),
        };
        observe(&candidate);
        if smallest.as_ref().is_none_or(|(_, least, _)| plan.bytes() < least.bytes()) {
            smallest = Some((simulated.trace.clone(), plan.clone(), depth_text(&candidate)));
        }
        candidates.push(candidate);
        // Only the best so far is kept: a simulation holds its log.
        let chosen = choose_depth(&candidates, limit);
        if chosen == Some(candidates.len() - 1) {
            kept = Some((candidates.len() - 1, simulated));
        }
    }
    // An earlier one may be best again once the least exposed is known.
    match (choose_depth(&candidates, limit), kept, smallest) {
        (Some(chosen), Some((at, simulated)), _) if at == chosen => {
            Ok(AutoDepth { candidates, chosen, simulated })
        }
        (Some(chosen), ..) => {
            let mut config = config.clone();
            let Candidate { depth, by_group, .. } = &candidates[chosen];
            config.plan = with_depths(&config.plan, &(depth.clone(), *by_group));
            let simulated = simulate(&config)?;
            Ok(AutoDepth { candidates, chosen, simulated })
        }
        (None, _, Some((trace, plan, depth))) => {
            Err(over_limit(limit, &trace, &plan, depth, &config.plan.depth_by_group).into())
        }
        (None, _, None) => unreachable!("a model has a group, and a group three depths"),
    }
}

/// What stands in the way of a limit: the three largest requests at the peaks of the smallest plan, and what would make
/// those peaks lower.
fn over_limit(
    limit: Option<u64>,
    trace: &Trace,
    plan: &Plan,
    depth: String,
    fixed: &BTreeMap<String, u32>,
) -> OverLimit {
    let peak: BTreeSet<_> = plan.arenas.iter().flat_map(|arena| &arena.peak).collect();
    let mut at_peak: Vec<_> =
        trace.requests().map(|(_, request)| request).filter(|request| peak.contains(&request.id)).collect();
    let bytes = |id| plan.view(id).map_or(0, |view| view.bytes);
    at_peak.sort_by_key(|request| (std::cmp::Reverse(bytes(request.id)), request.id));
    let largest =
        at_peak.iter().take(3).map(|request| format!("{} ({} bytes)", request.spec, bytes(request.id)));
    let any = |test: &dyn Fn(&RequestSpec) -> bool| at_peak.iter().any(|request| test(&request.spec));
    // A gradient in f32 beside others in bf16 is one that has to be.
    let narrow =
        trace.requests().any(|(_, q)| q.spec.role == Role::WgradInput && q.spec.dtype == DType::Bf16);
    let wide = any(&|spec| spec.role == Role::WgradInput && spec.dtype == DType::F32);
    let help = [
        (true, "raise the limit"),
        (plan.options.strategy != Strategy::Sessile, "use --strategy sessile"),
        (fixed.values().any(|&depth| depth > 1), "leave the depths of single groups out"),
        (wide && !narrow, "use --wgrad-dtype bf16"),
        (any(&|spec| spec.role == Role::A2aScratch), "reduce with ring, which needs no scratch"),
        (any(&|spec| matches!(spec.role, Role::RsOutput | Role::Fp32Output)), "shard wider"),
    ];
    OverLimit {
        limit: limit.unwrap_or(0),
        bytes: plan.bytes(),
        depth,
        largest: largest.collect(),
        remedies: help.into_iter().filter_map(|(applies, what)| applies.then_some(what)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(depth: u32, bytes: u64, exposed_fraction: f64) -> Candidate {
        Candidate {
            depth: BTreeMap::from([("dense".to_owned(), depth)]),
            by_group: true,
            bytes,
            lower_bound_bytes: bytes,
            fences: 0,
            backward_ns: 1_000_000,
            exposed_ns: (exposed_fraction * 1e6) as u64,
            exposed_fraction,
        }
    }

    #[test]
    fn fewest_bytes_within_half_a_percent_of_the_least_exposed() {
        let table = [candidate(1, 100, 0.2), candidate(2, 150, 0.004), candidate(3, 300, 0.0)];
        assert_eq!(choose_depth(&table, None), Some(1));
        let apart = [candidate(1, 100, 0.2), candidate(2, 150, 0.006), candidate(3, 300, 0.0)];
        assert_eq!(choose_depth(&apart, None), Some(2));
        assert_eq!(choose_depth(&[], None), None);
    }

    #[test]
    fn under_a_limit_the_least_exposed_that_fits() {
        let table = [candidate(1, 100, 0.2), candidate(2, 150, 0.004), candidate(3, 300, 0.0)];
        let chosen = [99, 100, 299, 300].map(|limit| choose_depth(&table, Some(limit)));
        assert_eq!(chosen, [None, Some(0), Some(1), Some(2)]);
    }
}
