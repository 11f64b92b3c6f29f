//! From a trace to a plan: check, lay out, fence.

use crate::{
    baseline::{self, Layout},
    bound::{self, Bound},
    check,
    conflicts::Conflicts,
    digest,
    error::PlanError,
    fences, layout,
    limits::{DEPTH_MAX, GROUPS_MAX, NAME_BYTES_MAX},
    options::{PlanOptions, Strategy},
    plan::{Arena, PLAN_VERSION, Plan, View},
    request::{Domain, RequestId},
    roster::Roster,
    trace::Trace,
};

/// Makes the plan of a trace: a pure function of its arguments, equal on every rank, machine and build.
///
/// # Errors
/// [`PlanError::Trace`] for a trace that [`check_trace`](crate::check_trace) rejects,
/// [`PlanError::OptionOutOfRange`], [`PlanError::RingTooSmall`], and [`PlanError::FencesTooCostly`] for traces far
/// beyond any real one.
///
/// # Example
/// ```
/// use sessile_plan::{DType, Domain, PlanOptions, Request, RequestId, RequestSpec, Role, Runner, Trace};
///
/// let request = |id, rows| Request {
///     id: RequestId(id),
///     spec: RequestSpec {
///         weight: format!("w{id}"),
///         role: Role::WgradInput,
///         dtype: DType::Bf16,
///         shape: vec![rows, 128],
///         unsharded_shape: vec![rows, 128],
///         domain: Domain::Default,
///         group: None,
///         expert: None,
///         accumulates_into: None,
///     },
/// };
/// let runner = |id, rows| Runner { name: format!("r{id}"), requests: vec![request(id, rows)], points: vec![] };
/// let trace = Trace {
///     schema: Trace::SCHEMA.into(),
///     version: sessile_plan::TRACE_VERSION,
///     name: "three layers".into(),
///     runners: vec![runner(0, 4), runner(1, 2), runner(2, 4)],
///     steps: vec![vec![0, 1, 2]],
///     durations_ns: vec![],
/// };
/// let plan = sessile_plan::plan(&trace, &PlanOptions::default())?;
/// assert_eq!(plan.bytes(), 4 * 256); // without completion points launches are serial: all share
/// assert!(sessile_plan::validate(&trace, &plan).is_empty());
/// # Ok::<(), sessile_plan::PlanError>(())
/// ```
pub fn plan(trace: &Trace, options: &PlanOptions) -> Result<Plan, PlanError> {
    check::check_trace(trace)?;
    check_options(options)?;
    let roster = Roster::new(trace);
    let conflicts = Conflicts::new(&roster, options)?;
    let bounds = bound::lower_bounds(&roster, options, &conflicts);
    let layout = match options.strategy {
        Strategy::Sessile => layout::pack(&roster, options, &conflicts, &bounds),
        Strategy::Generations(count) => baseline::generations(&roster, count),
        Strategy::Ring(slots) => baseline::ring(&roster, slots)?,
        Strategy::PerRequest => baseline::per_request(&roster),
    };
    let launch_order = options.effective_launch_order();
    let fences = fences::fences(&roster, &layout, options.step_cut, launch_order)?;
    Ok(Plan {
        schema: Plan::SCHEMA.into(),
        version: PLAN_VERSION,
        trace_digest: digest::trace_digest(trace),
        options: options.clone(),
        launch_order,
        arenas: arenas(&roster, &layout, bounds),
        views: views(&roster, &layout),
        fences,
    })
}

/// Checks the numbers of the options.
pub(crate) fn check_options(options: &PlanOptions) -> Result<(), PlanError> {
    let count = match options.strategy {
        Strategy::Generations(count) => ("generations", count),
        Strategy::Ring(slots) => ("ring", slots),
        Strategy::Sessile | Strategy::PerRequest => ("depth", options.depth),
    };
    if options.depth_by_group.len() > GROUPS_MAX {
        return Err(PlanError::TooManyGroups { count: options.depth_by_group.len() });
    }
    for (group, &depth) in &options.depth_by_group {
        if !(1..=NAME_BYTES_MAX).contains(&group.len()) {
            return Err(PlanError::GroupName { bytes: group.len() });
        }
        if !(1..=DEPTH_MAX).contains(&depth) {
            return Err(PlanError::OptionOutOfRange { option: "depth_by_group", value: depth });
        }
    }
    for (option, value) in [("depth", options.depth), count] {
        if !(1..=DEPTH_MAX).contains(&value) {
            return Err(PlanError::OptionOutOfRange { option, value });
        }
    }
    Ok(())
}

fn arenas(roster: &Roster<'_>, layout: &Layout, bounds: Vec<Bound>) -> Vec<Arena> {
    let domains = roster.domains.iter().zip(&layout.bytes).zip(bounds);
    let arena = |((&domain, &bytes), bound): ((&&Domain, &u64), Bound)| {
        let mut peak: Vec<RequestId> =
            bound.requests.iter().map(|&request| roster.entries[request].id).collect();
        peak.sort_unstable();
        Arena { domain: domain.clone(), bytes, lower_bound_bytes: bound.bytes, peak }
    };
    domains.map(arena).collect()
}

fn views(roster: &Roster<'_>, layout: &Layout) -> Vec<View> {
    let mut views: Vec<View> = roster
        .entries
        .iter()
        .zip(&layout.offsets)
        .map(|(entry, &offset)| View {
            request: entry.id,
            arena: entry.domain as u32,
            offset,
            bytes: entry.bytes,
        })
        .collect();
    views.sort_unstable_by_key(|view| view.request);
    views
}
