//! `sessile check TRACE-OR-RUN`: grades with code that shares nothing with the planner.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use sessile_model::{
    GradReady, Kinds,
    config::Mode,
    simulate::{TraceDepth, depth_of_trace},
};
use sessile_plan::{
    Baselines, Plan, PlanOptions, Trace, baseline_bytes, plan, read_plan, read_trace, validate,
};
use sessile_runtime::{check, log};

use super::{
    depth::{planned, refuse},
    findings, json,
};
use crate::{
    args::CheckArgs,
    auto::Auto,
    failure::{Failure, Verdict},
    input, output,
    run::{self, Execution, ReduceScatters, Run},
    ui::{Lines, clean, count},
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
    let Some(path) = args.file.as_deref() else {
        return Err(Failure::Input(format!("nothing to check: name {EXPECTED}, or use --self-test")));
    };
    let [json_out] = output::prepare([("--json", args.common.json.as_deref())], &[path])?;
    let bytes = input::document(path, EXPECTED)?;
    let schema = input::schema(&bytes).map_err(|error| {
        let text: String = error.to_string().chars().take(300).collect();
        input::about(path, format_args!("no field `schema` could be read ({text}): give {EXPECTED}"))
    })?;
    let outcome = match schema.as_str() {
        Trace::SCHEMA => of_trace(path, args, &bytes)?,
        run::SCHEMA => {
            refuse(&args.choices, "a saved run is checked as it was planned: leave it out")?;
            of_run(path, &bytes)?
        }
        log::Log::SCHEMA => {
            refuse(&args.choices, "an event log is not planned: leave it out")?;
            of_log(path, &bytes)?
        }
        other => {
            return Err(input::about(path, format_args!("field `schema` is `{other}`: give {EXPECTED}")));
        }
    };
    let found = outcome.findings.len() as u64 + outcome.unlisted;
    let good = found == 0;
    let mut lines = Lines::new(args.common.quiet);
    lines.line(format_args!("{}: {}", clean(&path.display().to_string()), outcome.checked))?;
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
fn of_trace(path: &Path, args: &CheckArgs, bytes: &[u8]) -> Result<Outcome, Failure> {
    let trace = read_trace(bytes).map_err(|error| input::about(path, error))?;
    let (plan, _) = planned(&args.choices, &trace).map_err(|failure| failure.about(path))?;
    let mut outcome =
        Outcome { checked: "trace", counts: plan_counts(&plan), findings: Vec::new(), unlisted: 0 };
    outcome.add_violations(&trace, &plan);
    Ok(outcome)
}

/// Validates the saved plan, makes it again from its trace, and compares both executions of every step.
fn of_run(path: &Path, bytes: &[u8]) -> Result<Outcome, Failure> {
    let run = run::read(bytes).map_err(|error| input::about(path, error))?;
    let mut outcome = Outcome { checked: "run", counts: Vec::new(), findings: Vec::new(), unlisted: 0 };
    outcome.findings.extend(run.config.train.check().err().map(|error| format!("`config`: {error}")));
    outcome.steps(&run);
    outcome.presence(&run);
    outcome.gradients(&run);
    // Where one is missing, that is a finding already.
    if let (Some(trace), Some(plan)) = (&run.trace, &run.plan) {
        let in_field = |field, error| input::about(path, format_args!("field `{field}`: {error}"));
        let trace = read_trace(trace.get().as_bytes()).map_err(|error| in_field("trace", error))?;
        let plan = read_plan(plan.get().as_bytes()).map_err(|error| in_field("plan", error))?;
        outcome.counts.extend(plan_counts(&plan));
        outcome.replan(&trace, &plan);
        outcome.add_violations(&trace, &plan);
        outcome.numbers(&run, &trace, &plan);
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
        let config = &run.config.train;
        if run.steps.len() as u64 != u64::from(config.steps) {
            let (has, says) = (run.steps.len(), config.steps);
            self.findings.push(format!("the run has {has} steps, but `config.steps` is {says}"));
        }
        let mut all = true;
        for (number, step) in (1_u32..).zip(&run.steps) {
            if step.step != number {
                self.findings.push(format!("step {number} is numbered {}", step.step));
            }
            let eager = ("eager", &step.eager, config.mode != Mode::Graphs);
            let graphs = ("graphs", &step.graphs, config.mode != Mode::Eager);
            for (name, execution, wanted) in [eager, graphs] {
                match execution {
                    Some(execution) => self.execution(number, name, execution),
                    None if wanted => self.findings.push(format!("step {number}: `{name}` is null")),
                    None => {}
                }
                if execution.is_some() && !wanted {
                    self.findings
                        .push(format!("step {number}: `{name}` is not null, but `config.mode` has none"));
                }
            }
            if let (Some(eager), Some(graphs)) = (&step.eager, &step.graphs) {
                let equal = eager == graphs;
                all &= equal;
                if !equal {
                    self.findings.push(format!(
                        "step {number}: eager and graphs differ: {} and {}",
                        described(eager),
                        described(graphs)
                    ));
                }
            }
        }
        let compared = run.steps.iter().filter(|step| step.equal().is_some()).count();
        self.counts.push(("steps compared", compared as u64));
        let expected = (compared > 0).then_some(all);
        if run.equal_bits != expected {
            let (says, are) = (or_null(run.equal_bits), or_null(expected));
            self.findings.push(format!("`equal_bits` is {says}, but the steps say {are}"));
        }
    }

    fn execution(&mut self, number: u32, name: &str, execution: &Execution) {
        if !execution.loss.is_some_and(f64::is_finite) {
            self.findings.push(format!("step {number}: the loss of `{name}` is not finite"));
        }
        let digest = &execution.main_grad_digest;
        if digest.len() != 64 || !digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            self.findings.push(format!(
                "step {number}: `main_grad_digest` of `{name}` is `{}`, but no 64 hexadecimal digits",
                short(digest)
            ));
        }
    }

    /// What only graphs have is there exactly if there were graphs.
    fn presence(&mut self, run: &Run) {
        let mode = run.config.train.mode;
        let fields = [
            ("trace", run.trace.is_some()),
            ("plan", run.plan.is_some()),
            ("memory", run.memory.is_some()),
            ("domains", run.domains.is_some()),
            ("roles", run.roles.is_some()),
            ("grad_ready.graphs", run.grad_ready.graphs.is_some()),
            ("fences", run.fences.is_some()),
            ("checker", run.checker.is_some()),
            ("replays", run.replays.is_some()),
            ("order_deviations", run.order_deviations.is_some()),
            ("overlap", run.overlap.is_some()),
        ];
        let chosen = run.config.train.depth_auto && mode != Mode::Eager;
        if run.auto.is_some() != chosen {
            let says = if chosen { "null, but" } else { "not null, but no" };
            self.findings.push(format!("`auto` is {says} depths were chosen"));
        }
        for (field, present) in fields {
            match (present, mode) {
                (false, Mode::Graphs | Mode::Both) => {
                    self.findings.push(format!("`{field}` is null, but the run has graphs"));
                }
                (true, Mode::Eager) => {
                    self.findings.push(format!("`{field}` is not null, but the run has no graphs"));
                }
                _ => {}
            }
        }
        if run.checker.as_ref().is_some_and(|checker| checker.operations == 0) {
            self.findings.push("`checker.operations` is 0: nothing was checked".to_owned());
        }
        if let Some(pairs) =
            run.overlap.as_ref().filter(|pairs| pairs.sharing_arena > pairs.cross_runner_pairs)
        {
            self.findings.push(format!(
                "`overlap.sharing_arena` is {}, more than all {} pairs",
                pairs.sharing_arena, pairs.cross_runner_pairs
            ));
        }
    }

    /// Kinds must be those that the options choose on the device, and gradients ready equally often.
    fn gradients(&mut self, run: &Run) {
        let config = &run.config.train;
        let expert = (config.experts > 0).then(|| config.expert_kind(true)).transpose();
        if let (Ok(dense), Ok(expert)) = (config.dense_kind(true), expert) {
            let kinds = ReduceScatters::from(Kinds { dense, expert });
            let says = &run.reduce_scatter;
            if (&says.dense, &says.expert) != (&kinds.dense, &kinds.expert) {
                self.findings.push("`reduce_scatter` is not what `config` chooses".to_owned());
            }
        }
        let GradReady { eager, graphs } = run.grad_ready;
        if eager.is_some() != (config.mode != Mode::Graphs) {
            self.findings
                .push("`grad_ready.eager` must be null exactly if `config.mode` is graphs".to_owned());
        }
        if run.grad_ready.equal() == Some(false) {
            let (eager, graphs) = (or_null(eager), or_null(graphs));
            self.findings.push(format!("`grad_ready`: {eager} times eagerly, {graphs} times from graphs"));
        }
        if [eager, graphs].contains(&Some(0)) {
            self.findings.push("`grad_ready` is 0: no gradient became ready".to_owned());
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

    /// Depths that were chosen must be those that the durations of the trace choose.
    fn choice(&mut self, run: &Run, trace: &Trace, saved: &Plan, options: &PlanOptions) {
        let limit = run.config.train.memory_limit;
        match depth_of_trace(trace, options, limit) {
            Ok(TraceDepth { candidates, chosen, plan }) => {
                let (depths, says) = (&plan.options, &saved.options);
                if (depths.depth, &depths.depth_by_group) != (says.depth, &says.depth_by_group) {
                    self.findings.push("`plan.options`: the trace chooses other depths".to_owned());
                }
                if run.auto.as_ref().is_some_and(|auto| *auto != Auto::new((candidates, chosen), limit)) {
                    self.findings.push("`auto` is not what the trace gives".to_owned());
                }
            }
            Err(error) => self.findings.push(format!("no depth can be chosen for the trace: {error}")),
        }
    }

    /// Compares the run's numbers with those of the trace and of the options, never with each other.
    fn numbers(&mut self, run: &Run, trace: &Trace, saved: &Plan) {
        let config = &run.config.train;
        let mut options = config.plan_options();
        if config.depth_auto {
            self.choice(run, trace, saved, &options);
            // All but the depths is as configured.
            options.depth = saved.options.depth;
            options.depth_by_group = saved.options.depth_by_group.clone();
        }
        if saved.options != options {
            self.findings.push("`plan.options` are not those of `config`".to_owned());
        }
        let Ok(plan) = plan(trace, &options) else { return };
        if run.domains.as_ref().is_some_and(|says| *says != run::domains(&plan)) {
            self.findings.push("`domains` are not those of the plan".to_owned());
        }
        if run.roles.as_ref().is_some_and(|says| *says != run::roles(trace)) {
            self.findings.push("`roles` are not those of the trace".to_owned());
        }
        let mut same = |what: &str, says: Option<u64>, is: Option<u64>| {
            if says != is {
                self.findings.push(format!("`{what}` is {}, but must be {}", or_null(says), or_null(is)));
            }
        };
        same("fences", run.fences, Some(plan.fences.len() as u64));
        if run.order_deviations == Some(0) {
            // Every length's first step is its discovery.
            let lengths = trace.steps.len().max(1);
            let replayed = lengths..(config.steps as usize).max(lengths);
            let replays = replayed.map(|step| trace.steps[step % lengths].len() as u64).sum();
            same("replays", run.replays, Some(replays));
        }
        let Some(memory) = &run.memory else { return };
        let Baselines { per_request, ring2, generations: [one, two, three], .. } =
            baseline_bytes(trace, options.step_cut);
        same("memory.arena_bytes", Some(memory.arena_bytes), Some(plan.bytes()));
        same("memory.lower_bound_bytes", Some(memory.lower_bound_bytes), Some(plan.lower_bound_bytes()));
        same("memory.requests", Some(memory.requests), Some(trace.requests().count() as u64));
        same("memory.runners", Some(memory.runners), Some(trace.runners.len() as u64));
        same("memory.per_request_bytes", Some(memory.per_request_bytes), Some(per_request));
        same("memory.ring2_bytes", memory.ring2_bytes, ring2);
        same("memory.generations_bytes.1", Some(memory.generations_bytes.one), Some(one));
        same("memory.generations_bytes.2", Some(memory.generations_bytes.two), Some(two));
        same("memory.generations_bytes.3", Some(memory.generations_bytes.three), Some(three));
        let arenas = plan.arenas.iter().map(|arena| (arena.domain.to_string(), arena.bytes));
        if !memory.arenas.iter().map(|arena| (arena.domain.clone(), arena.bytes)).eq(arenas) {
            self.findings.push("`memory.arenas` are not those of the plan".to_owned());
        }
    }
}

/// As JSON has it.
fn or_null(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}

fn described(execution: &Execution) -> String {
    let loss = execution.loss.map_or_else(|| "not finite".to_owned(), |loss| loss.to_string());
    format!("loss {loss} with gradients {}", short(&execution.main_grad_digest))
}

/// A digest, or what is in its place.
fn short(text: &str) -> String {
    text.chars().take(64).collect()
}
