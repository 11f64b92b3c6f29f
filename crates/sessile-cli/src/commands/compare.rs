//! `sessile compare TRACE...`: all strategies on the same requests, with a barrier at the step cut.

use std::{path::Path, time::Instant};

use serde::Serialize;
use sessile_plan::{Baselines, PlanOptions, StepCut, Trace, baseline_bytes, plan};

use super::json;
use crate::{
    args::CompareArgs,
    failure::{Failure, Verdict},
    input, output,
    ui::{Lines, clean, count, milliseconds, ratio, table},
};

/// What `--json` writes.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    version: u32,
    traces: Vec<Compared>,
}

#[derive(Serialize)]
struct Compared {
    name: String,
    requests: u64,
    runners: u64,
    baselines: BaselineBytes,
    sessile: ByDepth,
}

/// `null` where a baseline cannot capture the trace.
#[derive(Serialize)]
struct BaselineBytes {
    #[serde(rename = "per-request")]
    per_request: u64,
    #[serde(rename = "ring:2")]
    ring2: Option<u64>,
    #[serde(rename = "generations:1")]
    generations1: u64,
    #[serde(rename = "generations:2")]
    generations2: u64,
    #[serde(rename = "generations:3")]
    generations3: u64,
}

/// By depth in runners.
#[derive(Serialize)]
struct ByDepth {
    #[serde(rename = "1")]
    one: Planned,
    #[serde(rename = "2")]
    two: Planned,
    #[serde(rename = "3")]
    three: Planned,
}

#[derive(Serialize)]
struct Planned {
    bytes: u64,
    lower_bound_bytes: u64,
    fences: u64,
    solve_ms: f64,
}

/// Compares all strategies on each trace.
pub(super) fn run(args: &CompareArgs) -> Result<Verdict, Failure> {
    let inputs: Vec<&Path> = args.traces.iter().map(|path| path.as_path()).collect();
    let [json_out] = output::prepare([("--json", args.common.json.as_deref())], &inputs)?;
    let mut traces = Vec::new();
    for path in inputs {
        traces.push(compare(&input::trace(path)?, path, args)?);
    }
    let document = Document { schema: "sessile.compare", version: 1, traces };
    if let Some(file) = json_out {
        output::write_all(vec![(file, json(&document)?)])?;
    }
    let mut lines = Lines::new(args.common.quiet);
    for (at, compared) in document.traces.iter().enumerate() {
        if at > 0 {
            lines.line("")?;
        }
        lines.line(format_args!(
            "{}: {} requests of {} runners",
            clean(&compared.name),
            count(compared.requests),
            count(compared.runners)
        ))?;
        lines.line(rows(compared))?;
    }
    Ok(Verdict::Good)
}

fn compare(trace: &Trace, path: &Path, args: &CompareArgs) -> Result<Compared, Failure> {
    let Baselines { per_request, ring2, generations: [generations1, generations2, generations3], .. } =
        baseline_bytes(trace, StepCut::Barrier);
    let planned = |depth| {
        let depth_by_group = args.groups.by_group();
        let options =
            PlanOptions { depth, depth_by_group, step_cut: StepCut::Barrier, ..PlanOptions::default() };
        let started = Instant::now();
        let plan = plan(trace, &options).map_err(|error| input::about(path, error))?;
        Ok(Planned {
            bytes: plan.bytes(),
            lower_bound_bytes: plan.lower_bound_bytes(),
            fences: plan.fences.len() as u64,
            solve_ms: milliseconds(started.elapsed()),
        })
    };
    Ok(Compared {
        name: trace.name.clone(),
        requests: trace.requests().count() as u64,
        runners: trace.runners.len() as u64,
        baselines: BaselineBytes { per_request, ring2, generations1, generations2, generations3 },
        sessile: ByDepth { one: planned(1)?, two: planned(2)?, three: planned(3)? },
    })
}

/// The ratio is to sessile at the default depth, 2.
fn rows(compared: &Compared) -> String {
    let base = compared.sessile.two.bytes;
    let baseline = |name: &str, bytes: Option<u64>| {
        let shown = bytes.map_or_else(|| "cannot capture".to_owned(), count);
        let ratio = bytes.map_or_else(String::new, |bytes| ratio(bytes, base));
        vec![name.to_owned(), shown, ratio, String::new(), String::new(), String::new()]
    };
    let ours = |depth: u32, planned: &Planned| {
        vec![
            format!("sessile, depth {depth}"),
            count(planned.bytes),
            ratio(planned.bytes, base),
            count(planned.lower_bound_bytes),
            count(planned.fences),
            format!("{:.3}", planned.solve_ms),
        ]
    };
    let BaselineBytes { per_request, ring2, generations1, generations2, generations3 } = compared.baselines;
    let rows = vec![
        baseline("per-request", Some(per_request)),
        baseline("ring:2", ring2),
        baseline("generations:1", Some(generations1)),
        baseline("generations:2", Some(generations2)),
        baseline("generations:3", Some(generations3)),
        ours(1, &compared.sessile.one),
        ours(2, &compared.sessile.two),
        ours(3, &compared.sessile.three),
    ];
    table(&["strategy", "bytes", "to depth 2", "lower bound", "fences", "solve ms"], 1, rows)
}
