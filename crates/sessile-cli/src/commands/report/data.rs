//! What the page draws, as JSON inside it. Every number on the page is one of these.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use sessile_model::simulate::replay;
use sessile_plan::{
    Plan, PlanOptions, PointKind, RequestId, StepCut, Strategy, Trace, baseline_bytes, plan, validate,
};

use super::order::{Order, order};
use crate::run::Run;

/// Value of `schema`.
const SCHEMA: &str = "sessile.report";
/// Findings that are shown in full.
const FINDINGS_MAX: usize = 200;

#[derive(Debug, Serialize)]
pub(super) struct Data {
    schema: &'static str,
    version: u32,
    title: String,
    source: String,
    plan_digest: String,
    strategy: String,
    depth: u32,
    depth_by_group: BTreeMap<String, u32>,
    step_cut: StepCut,
    bytes: u64,
    lower_bound_bytes: u64,
    arenas: Vec<ArenaData>,
    /// `null` without a trace: requests then stand side by side, in order of their number.
    launches: Option<Launches>,
    roles: Vec<String>,
    requests: Vec<RequestData>,
    /// Indices into `requests`: released, acquired.
    fences: Vec<[u32; 2]>,
    memory: Vec<MemoryRow>,
    depths: Vec<DepthRow>,
    run: Option<RunData>,
    order: Option<Order>,
    findings: Vec<String>,
    unlisted: u64,
}

#[derive(Debug, Serialize)]
struct ArenaData {
    domain: String,
    bytes: u64,
    lower_bound_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Launches {
    runners: Vec<String>,
    /// Indices into `runners`.
    order: Vec<u32>,
    /// Positions in `order` at which an alternative step begins.
    steps: Vec<u32>,
}

/// One request. Times are positions in the replay order: launch 3 lasts from 3 to 4.
#[derive(Debug, Serialize)]
struct RequestData {
    id: u32,
    arena: u32,
    offset: u64,
    bytes: u64,
    name: String,
    role: u32,
    dtype: String,
    shape: Vec<u64>,
    /// One entry a launch of its runner.
    lives: Vec<[f64; 2]>,
}

#[derive(Debug, Serialize)]
struct MemoryRow {
    name: String,
    /// `null` where it cannot capture the trace.
    bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct DepthRow {
    name: String,
    bytes: u64,
    lower_bound_bytes: u64,
    fences: u64,
    /// Of the backward, or of the step; `null` if it could not be replayed.
    exposed_fraction: Option<f64>,
    /// Whether it is the plan that the page shows.
    shown: bool,
}

#[derive(Debug, Serialize)]
struct RunData {
    steps: Vec<StepData>,
    equal_bits: Option<bool>,
    replays: Option<u64>,
    order_deviations: Option<u64>,
    cross_runner_pairs: Option<u64>,
    sharing_arena: Option<u64>,
    operations: Option<u64>,
    violations: Option<u64>,
}

#[derive(Debug, Serialize)]
struct StepData {
    step: u32,
    eager: Option<f64>,
    graphs: Option<f64>,
}

/// What a simulation says of depths.
pub(super) struct Candidate {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) lower_bound_bytes: u64,
    pub(super) fences: u64,
    pub(super) exposed_fraction: f64,
    /// Whether it is the plan that the page shows.
    pub(super) shown: bool,
}

/// Where a report comes from.
pub(super) struct Sources<'a> {
    /// The file that was read.
    pub(super) source: String,
    pub(super) trace: Option<&'a Trace>,
    pub(super) plan: &'a Plan,
    pub(super) run: Option<&'a Run>,
    pub(super) candidates: Vec<Candidate>,
}

impl Data {
    pub(super) fn new(sources: &Sources<'_>) -> Data {
        let Sources { source, trace, plan: planned, run, .. } = sources;
        let arenas = planned.arenas.iter().map(|arena| ArenaData {
            domain: arena.domain.to_string(),
            bytes: arena.bytes,
            lower_bound_bytes: arena.lower_bound_bytes,
        });
        let index: BTreeMap<RequestId, u32> =
            planned.views.iter().zip(0..).map(|(view, at)| (view.request, at)).collect();
        let fence =
            |fence: &sessile_plan::Fence| Some([*index.get(&fence.release)?, *index.get(&fence.acquire)?]);
        let (roles, requests) = requests(*trace, planned);
        let mut findings: Vec<String> =
            trace.map(|trace| validate(trace, planned)).iter().flatten().map(ToString::to_string).collect();
        let unlisted = findings.len().saturating_sub(FINDINGS_MAX) as u64;
        findings.truncate(FINDINGS_MAX);
        Data {
            schema: SCHEMA,
            version: 1,
            title: trace.map_or_else(|| source.clone(), |trace| trace.name.clone()),
            source: source.clone(),
            plan_digest: planned.digest(),
            strategy: planned.options.strategy.to_string(),
            depth: planned.options.depth,
            depth_by_group: planned.options.depth_by_group.clone(),
            step_cut: planned.options.step_cut,
            bytes: planned.bytes(),
            lower_bound_bytes: planned.lower_bound_bytes(),
            arenas: arenas.collect(),
            launches: trace.map(launches),
            roles,
            requests,
            fences: planned.fences.iter().filter_map(fence).collect(),
            memory: memory(*trace, planned),
            depths: depths(sources),
            run: run.map(run_data),
            order: trace.map(|trace| order(trace, planned)),
            findings,
            unlisted,
        }
    }
}

fn launches(trace: &Trace) -> Launches {
    let mut steps = Vec::new();
    let mut order = Vec::new();
    for step in &trace.steps {
        steps.push(order.len() as u32);
        order.extend(step);
    }
    Launches { runners: trace.runners.iter().map(|runner| runner.name.clone()).collect(), order, steps }
}

/// Where in its runner a request is acquired and released: runner and fraction of its points.
type Spot = (usize, f64);

fn requests(trace: Option<&Trace>, plan: &Plan) -> (Vec<String>, Vec<RequestData>) {
    let Some(trace) = trace else {
        let bare = |(at, view): (usize, &sessile_plan::View)| RequestData {
            id: view.request.0,
            arena: view.arena,
            offset: view.offset,
            bytes: view.bytes,
            name: format!("request {}", view.request.0),
            role: 0,
            dtype: String::new(),
            shape: Vec::new(),
            lives: vec![[at as f64, at as f64 + 1.0]],
        };
        return (vec!["request".to_owned()], plan.views.iter().enumerate().map(bare).collect());
    };
    let specs: BTreeMap<_, _> =
        trace.requests().map(|(r, request)| (request.id, (r, &request.spec))).collect();
    let names: BTreeSet<String> = specs.values().map(|(_, spec)| spec.role.to_string()).collect();
    let roles: Vec<String> = names.into_iter().collect();
    let mut spots: BTreeMap<RequestId, (Spot, Spot)> =
        specs.iter().map(|(id, (r, _))| (*id, ((*r, 0.0), (*r, 1.0)))).collect();
    for (r, runner) in trace.runners.iter().enumerate() {
        let points = runner.points.len().max(1) as f64;
        for (at, point) in runner.points.iter().enumerate() {
            match &point.kind {
                PointKind::Acquire(id) => {
                    spots.entry(*id).and_modify(|spot| spot.0 = (r, at as f64 / points));
                }
                PointKind::Release(id) => {
                    spots.entry(*id).and_modify(|spot| spot.1 = (r, (at + 1) as f64 / points));
                }
                _ => {}
            }
        }
    }
    let order: Vec<usize> = trace.steps.iter().flatten().map(|&runner| runner as usize).collect();
    let mut positions: Vec<Vec<usize>> = vec![Vec::new(); trace.runners.len()];
    for (at, &runner) in order.iter().enumerate() {
        positions[runner].push(at);
    }
    let lives = |id: RequestId| -> Vec<[f64; 2]> {
        let Some(((owner, from), (last, to))) = spots.get(&id) else { return Vec::new() };
        let end = |start: usize| {
            // The next launch of the runner that releases it; around the step cut it lives to the end.
            let next = positions[*last].iter().find(|&&at| at >= start);
            next.map_or(order.len() as f64, |&at| at as f64 + to)
        };
        positions[*owner].iter().map(|&at| [round(at as f64 + from), round(end(at))]).collect()
    };
    let full = |view: &sessile_plan::View| {
        let spec = specs.get(&view.request);
        let (owner, role) = spec.map_or((0, String::new()), |(r, spec)| (*r, spec.role.to_string()));
        RequestData {
            id: view.request.0,
            arena: view.arena,
            offset: view.offset,
            bytes: view.bytes,
            name: spec.map_or_else(String::new, |(_, spec)| {
                format!("{} · {}", spec.weight, trace.runners[owner].name)
            }),
            role: roles.binary_search(&role).unwrap_or(0) as u32,
            dtype: spec.map_or_else(String::new, |(_, spec)| spec.dtype.to_string()),
            shape: spec.map_or_else(Vec::new, |(_, spec)| spec.shape.clone()),
            lives: lives(view.request),
        }
    };
    let all = plan.views.iter().map(full).collect();
    (roles, all)
}

/// Three digits behind the point are enough to draw.
fn round(position: f64) -> f64 {
    (position * 1000.0).round() / 1000.0
}

fn memory(trace: Option<&Trace>, plan: &Plan) -> Vec<MemoryRow> {
    let row = |name: &str, bytes| MemoryRow { name: name.to_owned(), bytes };
    let mut rows = vec![row(&format!("this plan ({})", plan.options.strategy), Some(plan.bytes()))];
    rows.push(row("lower bound", Some(plan.lower_bound_bytes())));
    if let Some(trace) = trace {
        let sessile_plan::Baselines { per_request, ring2, generations: [one, two, three], .. } =
            baseline_bytes(trace, plan.options.step_cut);
        rows.push(row("generations:1", Some(one)));
        rows.push(row("generations:2", Some(two)));
        rows.push(row("generations:3", Some(three)));
        rows.push(row("ring:2", ring2));
        rows.push(row("per-request", Some(per_request)));
    }
    rows
}

/// The candidates that were chosen from, or the plans at depth 1 to 3, replayed on the virtual clock.
fn depths(sources: &Sources<'_>) -> Vec<DepthRow> {
    if !sources.candidates.is_empty() {
        let row = |candidate: &Candidate| DepthRow {
            name: candidate.name.clone(),
            bytes: candidate.bytes,
            lower_bound_bytes: candidate.lower_bound_bytes,
            fences: candidate.fences,
            exposed_fraction: Some(candidate.exposed_fraction),
            shown: candidate.shown,
        };
        return sources.candidates.iter().map(row).collect();
    }
    let Some(trace) = sources.trace else { return Vec::new() };
    let at = |depth: u32| {
        let options = PlanOptions {
            strategy: Strategy::Sessile,
            depth,
            depth_by_group: BTreeMap::new(),
            ..sources.plan.options.clone()
        };
        let planned = plan(trace, &options).ok()?;
        Some(DepthRow {
            name: depth.to_string(),
            bytes: planned.bytes(),
            lower_bound_bytes: planned.lower_bound_bytes(),
            fences: planned.fences.len() as u64,
            exposed_fraction: replay(trace, &planned).ok().map(|times| times.exposed_fraction()),
            shown: sources.plan.options == options,
        })
    };
    (1..=3).filter_map(at).collect()
}

fn run_data(run: &Run) -> RunData {
    let steps = run.steps.iter().map(|step| StepData {
        step: step.step,
        eager: step.eager.as_ref().and_then(|execution| execution.loss),
        graphs: step.graphs.as_ref().and_then(|execution| execution.loss),
    });
    RunData {
        steps: steps.collect(),
        equal_bits: run.equal_bits,
        replays: run.replays,
        order_deviations: run.order_deviations,
        cross_runner_pairs: run.overlap.as_ref().map(|overlap| overlap.cross_runner_pairs),
        sharing_arena: run.overlap.as_ref().map(|overlap| overlap.sharing_arena),
        operations: run.checker.as_ref().map(|checked| checked.operations),
        violations: run.checker.as_ref().map(|checked| checked.violations),
    }
}
