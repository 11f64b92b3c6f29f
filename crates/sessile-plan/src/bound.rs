//! The lower bound: bytes that must be live at once, whatever the offsets.

use crate::{
    lifetime::{Depth, Lifetimes},
    options::{PlanOptions, StepCut, Strategy},
    roster::Roster,
    trace::Trace,
};

/// The largest sum of bytes that must be live at once under the options, over all domains.
///
/// Each request counts once, from its first launch to `depth` launches after its last; under the wrap-around
/// cut on the circle of launches. Where a step launches a runner again under the barrier, depth counts between
/// first launches only, as the plan may. For the strategies that sessile is measured against, `depth` is no
/// promise, and only requests that are live in one launch count together.
///
/// `trace` must pass [`check_trace`](crate::check_trace).
pub fn lower_bound(trace: &Trace, options: &PlanOptions) -> u64 {
    lower_bounds(&Roster::new(trace), options).into_iter().sum()
}

/// The bound of each domain, in roster order.
pub(crate) fn lower_bounds(roster: &Roster<'_>, options: &PlanOptions) -> Vec<u64> {
    let depth = match (options.strategy, options.step_cut) {
        (Strategy::Sessile, StepCut::Barrier) => Depth::FirstLaunch,
        (Strategy::Sessile, StepCut::Wrap) => Depth::EveryLaunch,
        _ => Depth::None,
    };
    let lifetimes = Lifetimes::new(roster, options, depth);
    (0..roster.domains.len())
        .map(|domain| lifetimes.load(roster, &roster.of_domain(domain)).into_iter().max().unwrap_or(0))
        .collect()
}
