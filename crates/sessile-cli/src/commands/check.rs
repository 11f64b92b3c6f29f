//! `sessile check TRACE-OR-RUN`: grades with code that shares nothing with the planner.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use sessile_plan::{Plan, Trace, plan, read_plan, read_trace, validate};
use sessile_runtime::{check, log};

use super::{findings, json};
use crate::{
    args::CheckArgs,
    failure::{Failure, Verdict},
    input, output,
    run::{self, Run},
    ui::{Lines, count},
};

const EXPECTED: &str = "a sessile.trace (`train --trace-out`), sessile.run (`train --json`) or sessile.log \
                        (`train --log-out`) document";

/// What `--json` writes.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    version: u32,
    /// Which kind of document was checked.
    checked: &'static str,
    good: bool,
    /// What was looked at, and how many.
    counts: BTreeMap<&'static str, u64>,
    findings: Vec<String>,
    /// Findings beyond those listed.
    unlisted: u64,
}

/// What a check found.
struct Outcome {
    checked: &'static str,
    counts: Vec<(&'static str, u64)>,
    findings: Vec<String>,
    unlisted: u64,
}

/// Checks a document of one of three kinds.
pub(super) fn run(args: &CheckArgs) -> Result<Verdict, Failure> {
    let path = args.file.as_path();
    let [json_out] = output::prepare([("--json", args.common.json.as_deref())], &[path])?;
    let bytes = input::document(path, EXPECTED)?;
    let schema = input::schema(&bytes).map_err(|error| {
        let text: String = error.to_string().chars().take(300).collect();
        input::about(path, format_args!("no field `schema` could be read ({text}): give {EXPECTED}"))
    })?;
    let outcome = match schema.as_str() {
        Trace::SCHEMA => of_trace(args, &bytes)?,
        run::SCHEMA => of_run(path, &bytes)?,
        log::Log::SCHEMA => of_log(path, &bytes)?,
        other => {
            return Err(input::about(path, format_args!("field `schema` is `{other}`: give {EXPECTED}")));
        }
    };
    let found = outcome.findings.len() as u64 + outcome.unlisted;
    let good = found == 0;
    let mut lines = Lines::new(args.common.quiet);
    lines.line(format_args!("{}: {}", path.display(), outcome.checked))?;
    for (what, number) in &outcome.counts {
        lines.line(format_args!("  {what}: {}", count(*number)))?;
    }
    if good {
        lines.line("good: nothing found")?;
    } else {
        lines.line(format_args!("BAD: {} found", count(found)))?;
        findings::print(&mut lines, &outcome.findings, outcome.unlisted)?;
    }
    if let Some(file) = json_out {
        let Outcome { checked, counts, findings, unlisted } = outcome;
        let counts = counts.into_iter().collect();
        let document =
            Document { schema: "sessile.check", version: 1, checked, good, counts, findings, unlisted };
        output::write_all(vec![(file, json(&document)?)])?;
    }
    Ok(Verdict::from_good(good))
}

/// Plans the trace and validates the plan.
fn of_trace(args: &CheckArgs, bytes: &[u8]) -> Result<Outcome, Failure> {
    let path = args.file.as_path();
    let trace = read_trace(bytes).map_err(|error| input::about(path, error))?;
    let plan = plan(&trace, &args.choices.options()).map_err(|error| input::about(path, error))?;
    let mut outcome =
        Outcome { checked: "trace", counts: plan_counts(&plan), findings: Vec::new(), unlisted: 0 };
    outcome.add_violations(&trace, &plan);
    Ok(outcome)
}

/// Validates the saved plan, makes it again from its trace, and compares both executions of every step.
fn of_run(path: &Path, bytes: &[u8]) -> Result<Outcome, Failure> {
    let run = run::read(bytes).map_err(|error| input::about(path, error))?;
    let mut outcome = Outcome { checked: "run", counts: Vec::new(), findings: Vec::new(), unlisted: 0 };
    outcome.steps(&run);
    match (&run.trace, &run.plan) {
        (Some(trace), Some(plan)) => {
            let in_field = |field, error| input::about(path, format_args!("field `{field}`: {error}"));
            let trace = read_trace(trace.get().as_bytes()).map_err(|error| in_field("trace", error))?;
            let plan = read_plan(plan.get().as_bytes()).map_err(|error| in_field("plan", error))?;
            outcome.counts.extend(plan_counts(&plan));
            outcome.replan(&trace, &plan);
            outcome.add_violations(&trace, &plan);
            outcome.numbers(&run, &plan);
        }
        (None, None) => {}
        _ => {
            let why = "fields `trace` and `plan`: one is null and the other is not; save the run again";
            return Err(input::about(path, why));
        }
    }
    if let Some(checker) = run.checker.as_ref().filter(|checker| checker.violations > 0) {
        outcome.findings.push(format!("the run's own checker counted {} violations", checker.violations));
    }
    Ok(outcome)
}

/// Runs the happens-before checker.
fn of_log(path: &Path, bytes: &[u8]) -> Result<Outcome, Failure> {
    let log = log::read_log(bytes).map_err(|error| input::about(path, error))?;
    let report = check::check(&log);
    Ok(Outcome {
        checked: "event log",
        counts: vec![("ranks", log.ranks.len() as u64), ("operations", report.operations)],
        findings: report.violations.iter().map(ToString::to_string).collect(),
        unlisted: report.unlisted,
    })
}

fn plan_counts(plan: &Plan) -> Vec<(&'static str, u64)> {
    vec![("views", plan.views.len() as u64), ("fences", plan.fences.len() as u64), ("bytes", plan.bytes())]
}

impl Outcome {
    fn add_violations(&mut self, trace: &Trace, plan: &Plan) {
        self.findings.extend(validate(trace, plan).iter().map(ToString::to_string));
    }

    fn steps(&mut self, run: &Run) {
        self.counts.push(("steps", run.steps.len() as u64));
        if run.steps.is_empty() {
            self.findings.push("the run has no steps".to_owned());
        }
        let mut all = true;
        for step in &run.steps {
            let Some(equal) = step.equal() else { continue };
            all &= equal;
            if !equal {
                self.findings.push(format!(
                    "step {}: eager and graphs differ: {:?} and {:?}",
                    step.step, step.eager, step.graphs
                ));
            }
        }
        let compared = run.steps.iter().filter(|step| step.equal().is_some()).count();
        self.counts.push(("steps compared", compared as u64));
        let expected = (compared > 0).then_some(all);
        if run.equal_bits != expected {
            let (says, are) = (run.equal_bits, expected);
            self.findings.push(format!("`equal_bits` is {says:?}, but the steps say {are:?}"));
        }
    }

    fn replan(&mut self, trace: &Trace, saved: &Plan) {
        match plan(trace, &saved.options) {
            Ok(again) if again.digest() == saved.digest() => {}
            Ok(again) => self.findings.push(format!(
                "planning the trace again gives plan {}, the saved one is {}",
                again.digest(),
                saved.digest()
            )),
            Err(error) => self.findings.push(format!("the trace cannot be planned again: {error}")),
        }
    }

    fn numbers(&mut self, run: &Run, plan: &Plan) {
        let mut same = |what: &str, says: Option<u64>, is: u64| {
            if says != Some(is) {
                self.findings.push(format!("`{what}` is {says:?}, but the plan has {is}"));
            }
        };
        let memory = run.memory.as_ref();
        same("memory.arena_bytes", memory.map(|memory| memory.arena_bytes), plan.bytes());
        let bound = plan.lower_bound_bytes();
        same("memory.lower_bound_bytes", memory.map(|memory| memory.lower_bound_bytes), bound);
        same("memory.requests", memory.map(|memory| memory.requests), plan.views.len() as u64);
        same("fences", run.fences, plan.fences.len() as u64);
    }
}
