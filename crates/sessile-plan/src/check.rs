//! Does a trace mean anything? Everything that planning rests on is checked here, once.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    error::TraceError,
    limits::{
        DOMAINS_MAX, LAUNCHED_MAX, LAUNCHES_MAX, NAME_BYTES_MAX, POINTS_MAX, RANK_MAX, REQUESTS_MAX,
        RUNNERS_MAX, STEPS_MAX, STREAMS_MAX, TOTAL_BYTES_MAX,
    },
    request::{Domain, RequestId, RequestSpec, Role},
    trace::{PointKind, TRACE_VERSION, Trace},
};

/// Checks the meaning of a trace: unique names and ids, launches that exist, sizes that fit, and points in an
/// order that can happen.
///
/// # Errors
/// The first fault found, with its field, value and remedy.
pub fn check_trace(trace: &Trace) -> Result<(), TraceError> {
    if trace.schema != Trace::SCHEMA {
        let found = trace.schema.chars().take(80).collect();
        return Err(TraceError::Schema { found, expected: Trace::SCHEMA });
    }
    if trace.version != TRACE_VERSION {
        return Err(TraceError::Version { found: trace.version.into(), expected: TRACE_VERSION });
    }
    if trace.name.len() > NAME_BYTES_MAX {
        return Err(TraceError::NameLength {
            field: "name".into(),
            bytes: trace.name.len(),
            limit: NAME_BYTES_MAX,
        });
    }
    check_counts(trace)?;
    let order = check_launches(trace)?;
    let owners = check_requests(trace)?;
    check_points(trace, &owners, &order)?;
    check_durations(trace)
}

/// The remedy for traces that are too large.
const SMALLER: &str = "plan fewer runners or micro-batches in one step";

/// First and last launch of a runner in one step.
#[derive(Clone, Copy)]
struct Launched {
    step: usize,
    first: usize,
    last: usize,
}

fn limit(field: &str, count: usize, limit: usize) -> Result<(), TraceError> {
    if count <= limit {
        return Ok(());
    }
    Err(TraceError::TooMany {
        field: field.into(),
        count: count as u64,
        limit: limit as u64,
        remedy: SMALLER,
    })
}

fn check_counts(trace: &Trace) -> Result<(), TraceError> {
    limit("runners", trace.runners.len(), RUNNERS_MAX)?;
    limit("steps", trace.steps.len(), STEPS_MAX)?;
    limit("launches of all steps", trace.launch_count(), LAUNCHES_MAX)?;
    limit(
        "requests of all runners",
        trace.runners.iter().map(|runner| runner.requests.len()).sum(),
        REQUESTS_MAX,
    )?;
    limit("points of all runners", trace.runners.iter().map(|runner| runner.points.len()).sum(), POINTS_MAX)
}

/// The largest duration of a point: a bit more than a day.
const DURATION_MAX: u64 = 100_000_000_000_000;

fn check_durations(trace: &Trace) -> Result<(), TraceError> {
    let durations = &trace.durations_ns;
    if durations.is_empty() {
        return Ok(());
    }
    let count = |field: String, found: usize, expected: usize| {
        if found == expected { Ok(()) } else { Err(TraceError::Durations { field, found, expected }) }
    };
    count("durations_ns".into(), durations.len(), trace.runners.len())?;
    for (r, (durations, runner)) in durations.iter().zip(&trace.runners).enumerate() {
        count(format!("durations_ns[{r}]"), durations.len(), runner.points.len())?;
        if let Some(at) = durations.iter().position(|&duration| duration > DURATION_MAX) {
            return Err(TraceError::TooMany {
                field: format!("nanoseconds of durations_ns[{r}][{at}]"),
                count: durations[at],
                limit: DURATION_MAX,
                remedy: "measure again, or leave durations_ns out",
            });
        }
    }
    Ok(())
}

/// For each runner, where it is launched: an entry for each step that does.
fn check_launches(trace: &Trace) -> Result<Vec<Vec<Launched>>, TraceError> {
    if trace.steps.is_empty() {
        return Err(TraceError::NoSteps);
    }
    let mut order: Vec<Vec<Launched>> = vec![Vec::new(); trace.runners.len()];
    let mut launched = 0u64;
    for (step, launches) in trace.steps.iter().enumerate() {
        if launches.is_empty() {
            return Err(TraceError::NoLaunches { step });
        }
        for (position, &runner) in launches.iter().enumerate() {
            let Some(seen) = order.get_mut(runner as usize) else {
                let runners = trace.runners.len();
                return Err(TraceError::LaunchOutOfRange { step, position, runner, runners });
            };
            match seen.last_mut() {
                Some(same) if same.step == step => same.last = position,
                _ => seen.push(Launched { step, first: position, last: position }),
            }
            let runner = &trace.runners[runner as usize];
            launched += (runner.requests.len() + runner.points.len() + 2) as u64;
        }
    }
    if launched > LAUNCHED_MAX {
        let field = "requests and points of all launches".into();
        return Err(TraceError::TooMany { field, count: launched, limit: LAUNCHED_MAX, remedy: SMALLER });
    }
    if let Some(index) = order.iter().position(Vec::is_empty) {
        return Err(TraceError::NeverLaunched { runner: trace.runners[index].name.clone(), index });
    }
    Ok(order)
}

/// Whether some step launches one runner after another was launched.
fn follows(later: &[Launched], earlier: &[Launched]) -> bool {
    later.iter().any(|later| {
        earlier
            .binary_search_by_key(&later.step, |earlier| earlier.step)
            .is_ok_and(|at| later.last > earlier[at].first)
    })
}

fn check_requests(trace: &Trace) -> Result<BTreeMap<RequestId, usize>, TraceError> {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    let mut owners = BTreeMap::new();
    let mut domains: BTreeSet<&Domain> = BTreeSet::new();
    let mut total = 0u64;
    for (r, runner) in trace.runners.iter().enumerate() {
        check_name(&runner.name, || format!("runners[{r}].name"))?;
        if let Some(first) = names.insert(&runner.name, r) {
            return Err(TraceError::DuplicateRunner { first, second: r, name: runner.name.clone() });
        }
        for (q, request) in runner.requests.iter().enumerate() {
            let field = || format!("runners[{r}].requests[{q}]");
            if let Some(first) = owners.insert(request.id, r) {
                let runner = trace.runners[first].name.clone();
                return Err(TraceError::DuplicateRequest { field: field(), id: request.id, runner });
            }
            check_spec(&request.spec, &field)?;
            domains.insert(&request.spec.domain);
            let bytes = request.spec.aligned_bytes().and_then(|bytes| bytes.checked_add(total));
            total = match bytes {
                Some(bytes) if bytes < TOTAL_BYTES_MAX => bytes,
                _ => {
                    let (field, shape) = (format!("{}.shape", field()), request.spec.shape.clone());
                    return Err(TraceError::TooManyBytes { field, shape, limit: TOTAL_BYTES_MAX });
                }
            };
        }
    }
    limit("domains of all requests", domains.len(), DOMAINS_MAX)?;
    Ok(owners)
}

fn check_spec(spec: &RequestSpec, field: &dyn Fn() -> String) -> Result<(), TraceError> {
    for (part, shape) in [("shape", &spec.shape), ("unsharded_shape", &spec.unsharded_shape)] {
        if shape.len() > RANK_MAX {
            let (count, limit) = (shape.len() as u64, RANK_MAX as u64);
            let (field, remedy) = (format!("{}.{part}", field()), "merge extents");
            return Err(TraceError::TooMany { field, count, limit, remedy });
        }
        if shape.contains(&0) {
            return Err(TraceError::EmptyShape {
                field: format!("{}.{part}", field()),
                shape: shape.clone(),
            });
        }
    }
    let within = |part: &str, name: &str| check_name(name, || format!("{}.{part}", field()));
    if spec.weight.len() > NAME_BYTES_MAX {
        within("weight", &spec.weight)?;
    }
    if let Role::User(name) = &spec.role {
        within("role", name)?;
    }
    if let Domain::Symmetric(group) = &spec.domain {
        within("domain", group)?;
    }
    for (part, name) in [("group", &spec.group), ("accumulates_into", &spec.accumulates_into)] {
        if let Some(name) = name {
            within(part, name)?;
        }
    }
    Ok(())
}

fn check_name(name: &str, field: impl Fn() -> String) -> Result<(), TraceError> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    Err(TraceError::NameLength { field: field(), bytes: name.len(), limit: NAME_BYTES_MAX })
}

fn check_points(
    trace: &Trace,
    owners: &BTreeMap<RequestId, usize>,
    order: &[Vec<Launched>],
) -> Result<(), TraceError> {
    // Index of the acquire point; releases can be checked only once all acquires are known.
    let mut acquired: BTreeMap<RequestId, usize> = BTreeMap::new();
    for (r, runner) in trace.runners.iter().enumerate() {
        let mut recorded = BTreeSet::new();
        let mut completed = false;
        for (at, point) in runner.points.iter().enumerate() {
            let field = || format!("runners[{r}].points[{at}]");
            if point.stream >= STREAMS_MAX {
                return Err(TraceError::StreamOutOfRange {
                    field: field(),
                    stream: point.stream,
                    limit: STREAMS_MAX,
                });
            }
            match &point.kind {
                PointKind::Acquire(request) => {
                    let Some(&owner) = owners.get(request) else {
                        return Err(TraceError::UnknownRequest { field: field(), request: *request });
                    };
                    if owner != r {
                        let owner = trace.runners[owner].name.clone();
                        return Err(TraceError::AcquireElsewhere {
                            field: field(),
                            request: *request,
                            owner,
                        });
                    }
                    if acquired.insert(*request, at).is_some() {
                        return Err(TraceError::Repeated {
                            field: field(),
                            action: "acquire",
                            request: *request,
                        });
                    }
                }
                PointKind::Record(event) => {
                    if !recorded.insert(*event) {
                        return Err(TraceError::DuplicateRecord { field: field(), event: *event });
                    }
                }
                PointKind::Wait(event) => {
                    if !recorded.contains(event) {
                        return Err(TraceError::WaitBeforeRecord { field: field(), event: *event });
                    }
                }
                PointKind::Collective(group) => check_name(group, || format!("{}.kind.collective", field()))?,
                PointKind::Complete => {
                    if std::mem::replace(&mut completed, true) {
                        return Err(TraceError::SecondComplete {
                            field: field(),
                            runner: runner.name.clone(),
                        });
                    }
                }
                PointKind::Release(_) | PointKind::Work => {}
            }
        }
    }
    let mut released = BTreeSet::new();
    for (r, runner) in trace.runners.iter().enumerate() {
        for (at, point) in runner.points.iter().enumerate() {
            let PointKind::Release(request) = point.kind else { continue };
            let field = || format!("runners[{r}].points[{at}]");
            let Some(&owner) = owners.get(&request) else {
                return Err(TraceError::UnknownRequest { field: field(), request });
            };
            if !released.insert(request) {
                return Err(TraceError::Repeated { field: field(), action: "release", request });
            }
            let acquire = acquired.get(&request).copied();
            let early = if owner == r { acquire > Some(at) } else { !follows(&order[r], &order[owner]) };
            if early {
                let acquired = match acquire {
                    Some(acquire) => format!("runners[{owner}].points[{acquire}] acquires it"),
                    None => format!("runner `{}` first needs it", trace.runners[owner].name),
                };
                return Err(TraceError::ReleaseBeforeAcquire { field: field(), request, acquired });
            }
        }
    }
    Ok(())
}
