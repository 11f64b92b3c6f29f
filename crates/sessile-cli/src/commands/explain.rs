//! `sessile plan --explain`: why a plan needs its bytes, what would need fewer, and how groups reduce.

use std::collections::{BTreeMap, BTreeSet};

use sessile_model::{ReduceScatter, Wanted};
use sessile_plan::{
    DType, Domain, Plan, PlanOptions, PointKind, Request, RequestId, RequestSpec, Role, Runner, Trace, plan,
};

use crate::{
    failure::Failure,
    ui::{Lines, count, ratio, table},
};

/// Requests of a peak that are named one by one.
const NAMED: usize = 12;

/// Prints all of it.
pub(super) fn print(lines: &mut Lines, trace: &Trace, made: &Plan) -> Result<(), Failure> {
    for arena in &made.arenas {
        lines.line("")?;
        lines.line(format_args!(
            "arena {}: {} bytes; these {} of its requests must be live at once and need {}",
            arena.domain,
            count(arena.bytes),
            arena.peak.len(),
            count(arena.lower_bound_bytes)
        ))?;
        lines.line(peak(trace, &arena.peak))?;
        if arena.peak.len() > NAMED {
            lines.line(format_args!("and {} smaller ones", arena.peak.len() - NAMED))?;
        }
    }
    lines.line("")?;
    lines.line(others(trace, made))?;
    lines.line("what another scope needs is not in a trace: `sessile simulate --scope layer` and `--scope module` tell")?;
    lines.line("")?;
    lines.line(kinds(trace))?;
    lines.line("")?;
    lines.line(automatic())
}

fn peak(trace: &Trace, peak: &[RequestId]) -> String {
    let at: BTreeMap<RequestId, (&Runner, &Request)> =
        trace.requests().map(|(runner, request)| (request.id, (&trace.runners[runner], request))).collect();
    let bytes = |request: &Request| request.spec.aligned_bytes().unwrap_or(0);
    let mut found: Vec<_> = peak.iter().filter_map(|id| at.get(id)).collect();
    found.sort_by_key(|(_, request)| (std::cmp::Reverse(bytes(request)), request.id));
    let row = |(runner, request): &&(&Runner, &Request)| {
        let spec = &request.spec;
        vec![runner.name.clone(), spec.weight.clone(), spec.role.to_string(), count(bytes(request))]
    };
    table(&["runner", "weight", "role", "bytes"], 3, found.iter().take(NAMED).map(row).collect())
}

/// The trace without the requests that `one_shot` does without, the others where its groups have them.
fn reduced_with_one_shot(trace: &Trace) -> Trace {
    let spare = |role: &Role| matches!(role, Role::RsOutput | Role::A2aScratch | Role::Fp32Output);
    let gone: BTreeSet<RequestId> = trace
        .requests()
        .filter(|(_, request)| spare(&request.spec.role))
        .map(|(_, request)| request.id)
        .collect();
    let mut fewer = Trace { durations_ns: Vec::new(), ..trace.clone() };
    for runner in &mut fewer.runners {
        runner.requests.retain(|request| !gone.contains(&request.id));
        for spec in runner.requests.iter_mut().map(|request| &mut request.spec) {
            if let (Role::WgradInput | Role::GatheredWeight, Some(group)) = (&spec.role, &spec.group) {
                spec.domain = Domain::Symmetric(group.clone());
            }
        }
        runner.points.retain(|point| match &point.kind {
            PointKind::Acquire(id) | PointKind::Release(id) => !gone.contains(id),
            _ => true,
        });
    }
    fewer
}

/// The trace with the requests changed. Durations are left out: they are those of the others.
fn changed(trace: &Trace, mut change: impl FnMut(&mut RequestSpec)) -> Trace {
    let mut other = Trace { durations_ns: Vec::new(), ..trace.clone() };
    for request in other.runners.iter_mut().flat_map(|runner| &mut runner.requests) {
        change(&mut request.spec);
    }
    other
}

/// A reduce-scatter over twice as many ranks leaves half of the rows to each; its input is the whole gradient still.
fn sharded_twice_as_wide(trace: &Trace) -> Trace {
    changed(trace, |spec| {
        if let (Role::RsOutput | Role::Fp32Output, Some(rows)) = (&spec.role, spec.shape.first_mut()) {
            *rows = rows.div_ceil(2);
        }
    })
}

/// The trace with gradients in bf16 on the wire; none if they are.
fn with_bf16_gradients(trace: &Trace) -> Option<Trace> {
    let on_the_wire = |spec: &RequestSpec| {
        spec.dtype == DType::F32 && matches!(spec.role, Role::WgradInput | Role::RsOutput | Role::A2aScratch)
    };
    trace.requests().any(|(_, request)| on_the_wire(&request.spec)).then(|| {
        changed(trace, |spec| {
            if on_the_wire(spec) {
                spec.dtype = DType::Bf16;
            }
        })
    })
}

fn others(trace: &Trace, made: &Plan) -> String {
    let options = |depth: u32| PlanOptions { depth, depth_by_group: BTreeMap::new(), ..made.options.clone() };
    let mut rows = vec![("this plan".to_owned(), made.bytes())];
    let mut add = |what: &str, trace: &Trace, options: &PlanOptions| {
        if let Ok(other) = plan(trace, options) {
            rows.push((what.to_owned(), other.bytes()));
        }
    };
    for depth in 1..=3 {
        if depth != made.options.depth || !made.options.depth_by_group.is_empty() {
            add(&format!("--depth {depth}"), trace, &options(depth));
        }
    }
    add("every group reduced with one_shot", &reduced_with_one_shot(trace), &made.options);
    add("weights sharded over twice as many ranks", &sharded_twice_as_wide(trace), &made.options);
    if let Some(narrower) = with_bf16_gradients(trace) {
        add("--wgrad-dtype bf16", &narrower, &made.options);
    }
    let row = |(what, bytes): &(String, u64)| vec![what.clone(), count(*bytes), ratio(*bytes, made.bytes())];
    table(&["with", "bytes", "to this plan"], 1, rows.iter().map(row).collect())
}

/// How each group reduces, as its requests show it.
fn kinds(trace: &Trace) -> String {
    let mut groups: BTreeMap<&str, Vec<&Request>> = BTreeMap::new();
    for (_, request) in trace.requests() {
        if let Some(group) =
            request.spec.group.as_deref().filter(|_| request.spec.role != Role::GatheredWeight)
        {
            groups.entry(group).or_default().push(request);
        }
    }
    let row = |(group, requests): (&&str, &Vec<&Request>)| {
        let has = |role: Role| requests.iter().find(|request| request.spec.role == role);
        let registered = |role: Role| has(role).is_some_and(|r| r.spec.domain != Domain::Default);
        let (kind, why) = match (has(Role::WgradInput), has(Role::A2aScratch), has(Role::RsOutput)) {
            (None, ..) => ("none", "no request is a reduce-scatter input".to_owned()),
            (_, Some(_), _) => (ReduceScatter::Fp32A2a.name(), "it asks for a2a_scratch".to_owned()),
            (_, None, None) if registered(Role::WgradInput) => (
                ReduceScatter::OneShot.name(),
                "its inputs are registered, and it asks for no output".to_owned(),
            ),
            _ if registered(Role::WgradInput) && registered(Role::RsOutput) => {
                (ReduceScatter::Symmetric.name(), "its inputs and outputs are registered".to_owned())
            }
            _ if registered(Role::WgradInput) => (
                ReduceScatter::Ring.name(),
                "its inputs are registered, its outputs are not: symmetric needs both before NCCL 2.29"
                    .to_owned(),
            ),
            _ => (
                ReduceScatter::Ring.name(),
                "it asks for outputs in the wire dtype, not registered".to_owned(),
            ),
        };
        vec![(*group).to_owned(), kind.to_owned(), why]
    };
    table(&["group", "reduce-scatter", "why"], 3, groups.iter().map(row).collect())
}

/// What `auto` chooses where, from the function that chooses.
fn automatic() -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for group_size in [1, 2, 4] {
        for registers in [true, false] {
            for wire in [DType::Bf16, DType::F32] {
                for fp32_accumulation in [false, true] {
                    let situation = sessile_model::Situation {
                        group_size,
                        wire,
                        registers,
                        fp32_accumulation,
                        chain: sessile_model::ChainKind::Graphed,
                    };
                    let Ok(choice) = sessile_model::choose(Wanted::Auto, situation) else { continue };
                    let yes = |it: bool| (if it { "yes" } else { "no" }).to_owned();
                    let ranks = if group_size == 4 { "3 or more".to_owned() } else { group_size.to_string() };
                    rows.push(vec![
                        ranks,
                        yes(registers),
                        wire.to_string(),
                        yes(fp32_accumulation),
                        choice.kind.to_string(),
                        choice.why.to_owned(),
                    ]);
                }
            }
        }
    }
    table(&["auto: ranks", "registers", "wire", "FP32 wanted", "kind", "why"], 6, rows)
}
