//! `sessile report`: one self-contained HTML file.

mod data;
mod order;

use std::path::Path;

use serde::Deserialize;
use sessile_plan::{Plan, Trace, read_plan, read_trace, trace_digest};

use self::data::{Candidate, Data, Sources};
use super::depth::{planned, refuse};
use crate::{
    args::ReportArgs,
    auto::{Auto, Row},
    failure::{Failure, Verdict},
    input, output,
    run::{self, Run},
    ui::{Lines, clean, count},
};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

const EXPECTED: &str = "a saved run (`train --json`), a plan (`plan --out` or `plan --json`) or a trace";

/// What was read.
struct Subject {
    trace: Option<Trace>,
    plan: Plan,
    run: Option<Run>,
    /// The depths it was chosen from.
    candidates: Vec<Row>,
}

/// Writes the report.
pub(super) fn run(args: &ReportArgs) -> Result<Verdict, Failure> {
    let path = args.file.as_path();
    let mut inputs = vec![path];
    inputs.extend(args.trace.as_deref());
    inputs.extend(args.simulation.as_deref());
    let [out] = output::prepare([("--out", Some(args.out.as_path()))], &inputs)?;
    let subject = read(args)?;
    let candidates = match args.simulation.as_deref() {
        Some(path) => candidates(path, &subject.plan)?,
        None => subject.candidates,
    };
    let data = Data::new(&Sources {
        source: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        trace: subject.trace.as_ref(),
        plan: &subject.plan,
        run: subject.run.as_ref(),
        candidates: candidates.into_iter().map(|row| candidate(row, &subject.plan)).collect(),
    });
    let page = page(&data)?;
    let bytes = page.len() as u64;
    if let Some(out) = out {
        output::write_all(vec![(out, page.into_bytes())])?;
    }
    let mut lines = Lines::new(args.quiet);
    lines.line(format_args!("{}: {} bytes, open it in a browser", args.out.display(), count(bytes)))?;
    Ok(Verdict::Good)
}

/// The page with style, script and data in it.
fn page(data: &Data) -> Result<String, Failure> {
    let json = serde_json::to_string(data)
        .map_err(|error| Failure::Run(format!("the report could not be written as JSON: {error}")))?;
    // Nothing in the data may end the element that holds it.
    let json = json.replace('<', "\\u003c");
    let mut page = String::with_capacity(PAGE.len() + STYLE.len() + SCRIPT.len() + json.len());
    let mut rest = PAGE;
    for (mark, text) in [("/*STYLE*/", STYLE), ("/*DATA*/", json.as_str()), ("/*SCRIPT*/", SCRIPT)] {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(text);
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

fn read(args: &ReportArgs) -> Result<Subject, Failure> {
    let path = args.file.as_path();
    let bytes = input::document(path, EXPECTED)?;
    let schema = input::schema(&bytes).map_err(|error| {
        let text: String = error.to_string().chars().take(300).collect();
        input::about(path, format_args!("no field `schema` could be read ({text}): give {EXPECTED}"))
    })?;
    let given = args.trace.as_deref().map(input::trace).transpose()?;
    if schema != Trace::SCHEMA {
        let why = format!("{} holds its plan: leave it out, or report a trace", path.display());
        refuse(&args.choices, &why)?;
    }
    if given.is_some() && [run::SCHEMA, Trace::SCHEMA].contains(&schema.as_str()) {
        let why = format!("--trace is for a plan: {} has its own requests; leave it out", path.display());
        return Err(Failure::Input(why));
    }
    let subject = match schema.as_str() {
        run::SCHEMA => of_run(path, &bytes)?,
        Plan::SCHEMA => {
            let plan = read_plan(&bytes).map_err(|error| input::about(path, error))?;
            Subject { trace: given, plan, run: None, candidates: Vec::new() }
        }
        "sessile.plan-report" => {
            let (plan, candidates) = inner_plan(path, &bytes)?;
            Subject { trace: given, plan, run: None, candidates }
        }
        Trace::SCHEMA => {
            let trace = read_trace(&bytes).map_err(|error| input::about(path, error))?;
            let (plan, auto) = planned(&args.choices, &trace).map_err(|failure| failure.about(path))?;
            let candidates = auto.map(|auto| auto.candidates).unwrap_or_default();
            Subject { trace: Some(trace), plan, run: None, candidates }
        }
        other => {
            let other: String = other.chars().take(80).collect();
            return Err(input::about(path, format_args!("is a `{other}` document: give {EXPECTED}")));
        }
    };
    if let Some(trace) = &subject.trace
        && trace_digest(trace) != subject.plan.trace_digest
    {
        let why = "the plan is of another trace: give the trace that it was made from";
        return Err(input::about(args.trace.as_deref().unwrap_or(path), why));
    }
    Ok(subject)
}

fn of_run(path: &Path, bytes: &[u8]) -> Result<Subject, Failure> {
    let run = run::read(bytes).map_err(|error| input::about(path, error))?;
    let (Some(trace), Some(plan)) = (&run.trace, &run.plan) else {
        let why = "has no plan: it was made with --mode eager; train with --mode graphs or both";
        return Err(input::about(path, why));
    };
    let trace = read_trace(trace.get().as_bytes()).map_err(|error| input::about(path, error))?;
    let plan = read_plan(plan.get().as_bytes()).map_err(|error| input::about(path, error))?;
    let candidates = run.auto.as_ref().map(|auto| auto.candidates.clone()).unwrap_or_default();
    Ok(Subject { trace: Some(trace), plan, run: Some(run), candidates })
}

/// The plan inside what `plan --json` writes.
fn inner_plan(path: &Path, bytes: &[u8]) -> Result<(Plan, Vec<Row>), Failure> {
    #[derive(Deserialize)]
    struct Outer<'a> {
        #[serde(borrow)]
        plan: &'a serde_json::value::RawValue,
        auto: Option<Auto>,
    }
    let outer: Outer<'_> = serde_json::from_slice(bytes).map_err(|error| input::about(path, error))?;
    let plan = read_plan(outer.plan.get().as_bytes()).map_err(|error| input::about(path, error))?;
    Ok((plan, outer.auto.map(|auto| auto.candidates).unwrap_or_default()))
}

/// A row of the page. It is marked if it is of the plan that the page shows.
fn candidate(row: Row, plan: &Plan) -> Candidate {
    Candidate {
        shown: row.is_of(plan),
        name: row.text,
        bytes: row.bytes,
        lower_bound_bytes: row.lower_bound_bytes,
        fences: row.fences,
        exposed_fraction: row.exposed_fraction,
    }
}

/// The table of depths inside what `simulate --depth auto --json` writes, of the trace that was planned.
fn candidates(path: &Path, plan: &Plan) -> Result<Vec<Row>, Failure> {
    #[derive(Deserialize)]
    struct Document {
        schema: String,
        model: String,
        runs: Vec<Simulated>,
        auto: Option<Auto>,
    }
    #[derive(Deserialize)]
    struct Simulated {
        trace_digest: String,
    }
    let expected = "what `simulate --depth auto --json` writes";
    let bytes = input::document(path, expected)?;
    let bad = |why: String| input::about(path, format_args!("{why}: give {expected}"));
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    let Some(auto) = document.auto.filter(|_| document.schema == "sessile.simulate") else {
        return Err(bad("has no table of depths".to_owned()));
    };
    if document.runs.iter().all(|run| run.trace_digest != plan.trace_digest) {
        let why = "is of another trace: report what its `--trace-out` wrote";
        return Err(input::about(path, format_args!("the simulation of {} {why}", clean(&document.model))));
    }
    Ok(auto.candidates)
}
