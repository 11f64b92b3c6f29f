//! `sessile compare TRACE...`: all strategies on the same requests, with a barrier at the step cut.

mod svg;

use std::{collections::BTreeMap, path::Path, time::Instant};

use serde::Serialize;
use sessile_model::simulate::{depth_of_trace, depth_text, groups_of_trace, replay};
use sessile_plan::{Baselines, Plan, PlanOptions, StepCut, Trace, baseline_bytes, plan};

use super::{depth, json};
use crate::{
    args::CompareArgs,
    failure::{Failure, Verdict},
    input, output,
    ui::{Lines, Progress, clean, count, milliseconds, ratio, table},
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
    /// What exposed time rests on.
    durations: Durations,
}

/// Where durations come from.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Durations {
    /// The trace holds them.
    Measured,
    /// Modelled for want of them.
    Modelled,
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

impl BaselineBytes {
    fn rows(&self) -> [(&'static str, Option<u64>); 5] {
        [
            ("per-request", Some(self.per_request)),
            ("ring:2", self.ring2),
            ("generations:1", Some(self.generations1)),
            ("generations:2", Some(self.generations2)),
            ("generations:3", Some(self.generations3)),
        ]
    }
}

/// By depth in runners, and with depths by group that were chosen.
#[derive(Serialize)]
struct ByDepth {
    #[serde(rename = "1")]
    one: Planned,
    #[serde(rename = "2")]
    two: Planned,
    #[serde(rename = "3")]
    three: Planned,
    auto: Planned,
}

impl ByDepth {
    fn rows(&self) -> [(String, &Planned); 4] {
        [
            ("sessile, depth 1".to_owned(), &self.one),
            ("sessile, depth 2".to_owned(), &self.two),
            ("sessile, depth 3".to_owned(), &self.three),
            (format!("sessile, auto: {}", self.auto.text), &self.auto),
        ]
    }
}

#[derive(Serialize)]
struct Planned {
    bytes: u64,
    lower_bound_bytes: u64,
    fences: u64,
    solve_ms: f64,
    exposed_fraction: f64,
    depth: BTreeMap<String, u32>,
    /// Whether depths count the launches that use the group, or all launches.
    by_group: bool,
    /// The depths, as people read them.
    #[serde(skip)]
    text: String,
}

/// Compares all strategies on each trace.
pub(super) fn run(args: &CompareArgs) -> Result<Verdict, Failure> {
    let inputs: Vec<&Path> = args.traces.iter().map(|path| path.as_path()).collect();
    let wanted = [("--json", args.common.json.as_deref()), ("--svg", args.svg.as_deref())];
    let [json_out, svg_out] = output::prepare(wanted, &inputs)?;
    let progress = Progress::new(args.common.quiet, 0);
    let mut traces = Vec::new();
    for path in inputs {
        let trace = input::trace(path)?;
        progress.phase(&trace.name);
        traces.push(compare(&trace, path)?);
    }
    progress.end();
    let document = Document { schema: "sessile.compare", version: 2, traces };
    let mut files = Vec::new();
    if let Some(file) = json_out {
        files.push((file, json(&document)?));
    }
    if let Some(file) = svg_out {
        files.push((file, svg::picture(&document.traces).into_bytes()));
    }
    output::write_all(files)?;
    let mut lines = Lines::new(args.common.quiet);
    for (at, compared) in document.traces.iter().enumerate() {
        if at > 0 {
            lines.line("")?;
        }
        lines.line(format_args!(
            "{}: {} requests of {} runners; exposed time from {} durations",
            clean(&compared.name),
            count(compared.requests),
            count(compared.runners),
            match compared.durations {
                Durations::Measured => "measured",
                Durations::Modelled => "modelled",
            }
        ))?;
        lines.line(rows(compared))?;
        if compared.baselines.ring2.is_some_and(|ring| ring < compared.sessile.two.bytes) {
            lines.line(
                "ring:2 counts requests, not launches: it reuses bytes nearer than depth 2, so graphs wait",
            )?;
        }
    }
    Ok(Verdict::Good)
}

fn compare(trace: &Trace, path: &Path) -> Result<Compared, Failure> {
    let Baselines { per_request, ring2, generations: [generations1, generations2, generations3], .. } =
        baseline_bytes(trace, StepCut::Barrier);
    let groups = groups_of_trace(trace);
    let timed = |options: &PlanOptions| -> Result<(Plan, f64), Failure> {
        let started = Instant::now();
        let made = plan(trace, options).map_err(|error| input::about(path, error))?;
        Ok((made, milliseconds(started.elapsed())))
    };
    let row = |(made, solve_ms): (Plan, f64), exposed_fraction, depth, by_group, text| Planned {
        bytes: made.bytes(),
        lower_bound_bytes: made.lower_bound_bytes(),
        fences: made.fences.len() as u64,
        solve_ms,
        exposed_fraction,
        depth,
        by_group,
        text,
    };
    let planned = |depth| {
        let timed = timed(&PlanOptions { depth, ..PlanOptions::default() })?;
        let times = replay(trace, &timed.0).map_err(|error| Failure::Run(error.to_string()))?;
        let depths: BTreeMap<String, u32> = groups.iter().map(|group| (group.clone(), depth)).collect();
        Ok(row(timed, times.exposed_fraction(), depths, false, depth.to_string()))
    };
    let auto = || {
        let found = depth_of_trace(trace, &PlanOptions::default(), None).map_err(depth::failure)?;
        let chosen = &found.candidates[found.chosen];
        let (exposed, depth) = (chosen.exposed_fraction, chosen.depth.clone());
        Ok(row(timed(&found.plan.options)?, exposed, depth, chosen.by_group, depth_text(chosen)))
    };
    Ok(Compared {
        name: trace.name.clone(),
        requests: trace.requests().count() as u64,
        runners: trace.runners.len() as u64,
        baselines: BaselineBytes { per_request, ring2, generations1, generations2, generations3 },
        sessile: ByDepth { one: planned(1)?, two: planned(2)?, three: planned(3)?, auto: auto()? },
        durations: if trace.durations_ns.is_empty() { Durations::Modelled } else { Durations::Measured },
    })
}

/// The ratio is to sessile at the default depth, 2.
fn rows(compared: &Compared) -> String {
    let base = compared.sessile.two.bytes;
    let baseline = |(name, bytes): (&str, Option<u64>)| {
        let shown = bytes.map_or_else(|| "cannot capture".to_owned(), count);
        let ratio = bytes.map_or_else(String::new, |bytes| ratio(bytes, base));
        let mut row = vec![name.to_owned(), shown, ratio];
        row.resize(7, String::new());
        row
    };
    let ours = |(name, planned): (String, &Planned)| {
        vec![
            name,
            count(planned.bytes),
            ratio(planned.bytes, base),
            count(planned.lower_bound_bytes),
            count(planned.fences),
            format!("{:.2}", 100.0 * planned.exposed_fraction),
            format!("{:.3}", planned.solve_ms),
        ]
    };
    let baselines = compared.baselines.rows().into_iter().map(baseline);
    let rows = baselines.chain(compared.sessile.rows().into_iter().map(ours)).collect();
    let head = ["strategy", "bytes", "to depth 2", "lower bound", "fences", "exposed %", "solve ms"];
    table(&head, 1, rows)
}
