//! The choice of depths: every small vector of depths is simulated, and the table decides.

use std::collections::BTreeMap;

use sessile_plan::{Plan, Trace};

use super::{SimulateConfig, Simulated, simulate};
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
    "--memory-limit {limit}: the smallest plan takes {bytes} bytes ({depth}); in the way are {}; raise the limit, use \
     --wgrad-dtype bf16, another kind of reduce-scatter, or shard wider", .largest.join(", ")
)]
pub struct OverLimit {
    /// What was allowed.
    pub limit: u64,
    /// What the smallest takes.
    pub bytes: u64,
    /// Its depths.
    pub depth: String,
    /// Its largest requests.
    pub largest: Vec<String>,
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

/// Depths as people read them: `dense 2, expert 1`.
pub fn depth_text(depth: &BTreeMap<String, u32>) -> String {
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

/// Simulates every vector of [`DEPTHS`] over the model's groups and chooses. `observe` is told each as it ends.
///
/// # Errors
/// Those of [`simulate`]; [`OverLimit`] if no vector fits.
pub fn auto_depth(
    config: &SimulateConfig,
    limit: Option<u64>,
    observe: &dyn Fn(&Candidate),
) -> Result<AutoDepth, AutoError> {
    config.check().map_err(TrainError::from)?;
    let mut vectors: Vec<BTreeMap<String, u32>> = vec![BTreeMap::new()];
    for group in &config.model.groups {
        let longer = |vector: &BTreeMap<String, u32>| {
            let vector = vector.clone();
            DEPTHS.map(move |depth| {
                let mut vector = vector.clone();
                vector.insert(group.name.clone(), depth);
                vector
            })
        };
        vectors = vectors.iter().flat_map(longer).collect();
    }
    let mut candidates = Vec::new();
    let mut kept: Option<(usize, Simulated)> = None;
    let mut smallest: Option<(Trace, Plan, BTreeMap<String, u32>)> = None;
    for depth in vectors {
        let mut config = config.clone();
        config.plan.depth = depth.values().copied().max().unwrap_or(1);
        config.plan.depth_by_group = depth.clone();
        let simulated = simulate(&config)?;
        let plan = &simulated.plan;
        let candidate = Candidate {
            depth: depth.clone(),
            bytes: plan.bytes(),
            lower_bound_bytes: plan.lower_bound_bytes(),
            fences: plan.fences.len() as u64,
            backward_ns: simulated.backward.total_ns,
            exposed_ns: simulated.backward.exposed_ns,
            exposed_fraction: simulated.backward.exposed_fraction(),
        };
        observe(&candidate);
        if smallest.as_ref().is_none_or(|(_, least, _)| plan.bytes() < least.bytes()) {
            smallest = Some((simulated.trace.clone(), plan.clone(), depth));
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
            let depth = candidates[chosen].depth.clone();
            config.plan.depth = depth.values().copied().max().unwrap_or(1);
            config.plan.depth_by_group = depth;
            let simulated = simulate(&config)?;
            Ok(AutoDepth { candidates, chosen, simulated })
        }
        (None, _, Some((trace, plan, depth))) => Err(OverLimit {
            limit: limit.unwrap_or(0),
            bytes: plan.bytes(),
            depth: depth_text(&depth),
            largest: largest(&trace, &plan),
        }
        .into()),
        (None, _, None) => unreachable!("a model has a group, and a group three depths"),
    }
}

/// The three largest requests.
fn largest(trace: &Trace, plan: &Plan) -> Vec<String> {
    let mut requests: Vec<_> = trace.requests().map(|(_, request)| request).collect();
    let bytes = |id| plan.view(id).map_or(0, |view| view.bytes);
    requests.sort_by_key(|request| (std::cmp::Reverse(bytes(request.id)), request.id));
    requests.iter().take(3).map(|request| format!("{} ({} bytes)", request.spec, bytes(request.id))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(depth: u32, bytes: u64, exposed_fraction: f64) -> Candidate {
        Candidate {
            depth: BTreeMap::from([("dense".to_owned(), depth)]),
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
