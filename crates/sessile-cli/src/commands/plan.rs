//! `sessile plan TRACE`.

use std::{collections::BTreeMap, time::Instant};

use serde::Serialize;
use sessile_model::simulate::replay_spans;
use sessile_plan::{Plan, Request, RequestId, Runner, Trace, write_plan, write_plan_csv};
use sessile_runtime::timeline::{Ticks, write_timeline};

use super::{
    depth::{depths_text, planned},
    explain, json,
};
use crate::{
    args::PlanArgs,
    auto::Auto,
    failure::{Failure, Verdict},
    input, output,
    ui::{Lines, clean, count, milliseconds, table},
};

/// Views and fences that are printed unless all are asked for.
const SHOWN: usize = 20;

/// What `--json` writes.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    trace: &'a str,
    digest: String,
    bytes: u64,
    lower_bound_bytes: u64,
    requests: u64,
    runners: u64,
    fences: u64,
    solve_ms: f64,
    /// `null` unless the depth was to be chosen.
    auto: Option<&'a Auto>,
    plan: &'a Plan,
}

/// Plans a trace.
pub(super) fn run(args: &PlanArgs) -> Result<Verdict, Failure> {
    if let Some(capacity) = args.capacity {
        return Err(Failure::Input(format!(
            "--capacity {capacity}: this is for packing files (.csv); for a trace use --depth auto --memory-limit"
        )));
    }
    let wanted = [
        ("--json", args.common.json.as_deref()),
        ("--out", args.out.as_deref()),
        ("--csv", args.csv.as_deref()),
        ("--timeline", args.timeline.as_deref()),
    ];
    let [json_out, plan_out, csv_out, timeline_out] = output::prepare(wanted, &[&args.trace])?;
    let trace = input::trace(&args.trace)?;
    let started = Instant::now();
    let (plan, auto) = planned(&args.choices, &trace).map_err(|failure| failure.about(&args.trace))?;
    let solve_ms = milliseconds(started.elapsed());

    let mut files = Vec::new();
    if let Some(file) = plan_out {
        files.push((file, write_plan(&plan).into_bytes()));
    }
    if let Some(file) = csv_out {
        files.push((file, write_plan_csv(&trace, &plan).into_bytes()));
    }
    if let Some(file) = timeline_out {
        files.push((file, timeline(&trace, &plan)?));
    }
    if let Some(file) = json_out {
        let document = Document {
            schema: "sessile.plan-report",
            version: 2,
            trace: &trace.name,
            digest: plan.digest(),
            bytes: plan.bytes(),
            lower_bound_bytes: plan.lower_bound_bytes(),
            requests: plan.views.len() as u64,
            runners: trace.runners.len() as u64,
            fences: plan.fences.len() as u64,
            solve_ms,
            auto: auto.as_ref(),
            plan: &plan,
        };
        files.push((file, json(&document)?));
    }
    output::write_all(files)?;
    print(&trace, &plan, auto.as_ref(), args)?;
    Ok(Verdict::Good)
}

/// What a replay of the trace under the plan does when.
fn timeline(trace: &Trace, plan: &Plan) -> Result<Vec<u8>, Failure> {
    let (log, spans) = replay_spans(trace, plan).map_err(|error| Failure::Run(error.to_string()))?;
    let mut bytes = Vec::new();
    write_timeline(&log, &[&spans], Ticks::Nanoseconds, &mut bytes)
        .map_err(|error| Failure::Run(format!("the timeline could not be written: {error}")))?;
    Ok(bytes)
}

/// Requests by id, each with its runner.
type Names<'a> = BTreeMap<RequestId, (&'a Runner, &'a Request)>;

fn print(trace: &Trace, plan: &Plan, auto: Option<&Auto>, args: &PlanArgs) -> Result<(), Failure> {
    let names: Names<'_> = trace.requests().map(|(r, q)| (q.id, (&trace.runners[r], q))).collect();
    let shown = if args.all { usize::MAX } else { SHOWN };
    let mut lines = Lines::new(args.common.quiet);
    let options = &plan.options;
    lines.line(format_args!(
        "{}: {} requests of {} runners, strategy {}, depth {}",
        clean(&trace.name),
        count(plan.views.len() as u64),
        count(trace.runners.len() as u64),
        options.strategy,
        depths_text(trace, options)
    ))?;
    lines.line(format_args!("plan {}", plan.digest()))?;
    lines.line("")?;
    lines.line(arenas(plan))?;
    lines.line("")?;
    if let Some(auto) = auto {
        lines.line(auto.table("step"))?;
        lines.line("")?;
    }
    lines.line(views(plan, &names, shown))?;
    more(&mut lines, "views", plan.views.len(), shown)?;
    lines.line("")?;
    if plan.fences.is_empty() {
        lines.line("no fences: nothing is reused that stream order does not protect")?;
    } else {
        lines.line(fences(plan, &names, shown))?;
        more(&mut lines, "fences", plan.fences.len(), shown)?;
    }
    if args.explain { explain::print(&mut lines, trace, plan) } else { Ok(()) }
}

fn more(lines: &mut Lines, what: &str, total: usize, shown: usize) -> Result<(), Failure> {
    if total > shown {
        lines.line(format_args!("and {} more {what}: --all shows them", count((total - shown) as u64)))?;
    }
    Ok(())
}

fn arenas(plan: &Plan) -> String {
    let row = |arena: &sessile_plan::Arena| {
        vec![arena.domain.to_string(), count(arena.bytes), count(arena.lower_bound_bytes)]
    };
    table(&["arena", "bytes", "lower bound"], 1, plan.arenas.iter().map(row).collect())
}

fn views(plan: &Plan, names: &Names<'_>, shown: usize) -> String {
    let row = |view: &sessile_plan::View| {
        let arena = plan.arenas.get(view.arena as usize).map(|arena| arena.domain.to_string());
        let (runner, what) = names.get(&view.request).map_or_else(Default::default, |(runner, request)| {
            (runner.name.clone(), format!("{} {}", request.spec.weight, request.spec.role))
        });
        vec![runner, what, arena.unwrap_or_default(), count(view.offset), count(view.bytes)]
    };
    let rows = plan.views.iter().take(shown).map(row).collect();
    table(&["runner", "view", "arena", "offset", "bytes"], 3, rows)
}

fn fences(plan: &Plan, names: &Names<'_>, shown: usize) -> String {
    let name = |id: RequestId| {
        names.get(&id).map_or_else(String::new, |(runner, request)| {
            format!("{}: {} {}", runner.name, request.spec.weight, request.spec.role)
        })
    };
    let row = |fence: &sessile_plan::Fence| vec![name(fence.release), name(fence.acquire)];
    let rows = plan.fences.iter().take(shown).map(row).collect();
    table(&["fence after the last read of", "before the first write of"], 2, rows)
}
