//! Tables of a run.

use super::examine::Examined;
use crate::{
    commands::findings,
    failure::Failure,
    run::{Execution, Memory, Run, Step},
    ui::{Lines, count, notable, ratio, some, table},
};

/// Steps that are printed, about; steps that differ always are.
const STEPS: u64 = 12;

/// Prints steps, numbers, findings and the verdict.
pub(super) fn print(examined: &Examined, quiet: bool) -> Result<(), Failure> {
    let run = &examined.run;
    let mut lines = Lines::new(quiet);
    lines.line(steps(run))?;
    lines.line("")?;
    lines.line(reduce_scatter(run))?;
    lines.line("")?;
    if let Some(memory) = &run.memory {
        lines.line(bytes(memory))?;
        lines.line("")?;
        lines.line(numbers(run, memory))?;
        lines.line("")?;
    }
    if let Some(auto) = &run.auto {
        lines.line(auto.table("step"))?;
        lines.line("")?;
        if let Some(row) = auto.candidates.iter().find(|row| row.chosen) {
            lines.line(format_args!("depth {}, chosen from the durations of the discovery", row.text))?;
            lines.line("")?;
        }
    }
    if !examined.faults.is_empty() {
        lines.line(format_args!("the plan breaks {} rules:", examined.faults.len()))?;
        findings::print(&mut lines, &examined.faults, 0)?;
    }
    if !examined.races.is_empty() {
        lines.line("operations that nothing orders:")?;
        findings::print(&mut lines, &examined.races, examined.unlisted)?;
    }
    lines.line(verdict(run, examined.good()))
}

fn steps(run: &Run) -> String {
    let total = run.steps.len() as u64;
    let shown = |at: u64, step: &Step| notable(at + 1, total, STEPS) || step.equal() == Some(false);
    let row = |step: &Step| {
        let equal = match step.equal() {
            Some(true) => "equal",
            Some(false) => "DIFFERENT",
            None => "",
        };
        vec![step.step.to_string(), loss(step.eager.as_ref()), loss(step.graphs.as_ref()), equal.to_owned()]
    };
    let steps = run.steps.iter().enumerate().filter(|(at, step)| shown(*at as u64, step));
    let rows = steps.map(|(_, step)| row(step)).collect();
    table(&["step", "eager loss", "graphs loss", "bits"], 0, rows)
}

fn reduce_scatter(run: &Run) -> String {
    let kinds = &run.reduce_scatter;
    let expert = kinds.expert.as_ref().map(|kind| format!(", of experts {kind}")).unwrap_or_default();
    format!("reduce-scatter {}{expert} ({})", kinds.dense, kinds.why)
}

fn loss(execution: Option<&Execution>) -> String {
    match execution {
        None => String::new(),
        Some(Execution { loss: Some(loss), .. }) => format!("{loss:.6}"),
        Some(_) => "not finite".to_owned(),
    }
}

fn bytes(memory: &Memory) -> String {
    let mut rows = Vec::new();
    let base = memory.arena_bytes;
    for arena in &memory.arenas {
        rows.push(vec![format!("arena {}", arena.domain), count(arena.bytes), ratio(arena.bytes, base)]);
    }
    let mut add = |name: &str, bytes: u64| rows.push(vec![name.to_owned(), count(bytes), ratio(bytes, base)]);
    add("lower bound", memory.lower_bound_bytes);
    add("per-request", memory.per_request_bytes);
    if let Some(bytes) = memory.ring2_bytes {
        add("ring:2", bytes);
    }
    add("generations:1", memory.generations_bytes.one);
    add("generations:2", memory.generations_bytes.two);
    add("generations:3", memory.generations_bytes.three);
    if memory.ring2_bytes.is_none() {
        rows.push(vec!["ring:2".to_owned(), "cannot capture".to_owned(), String::new()]);
    }
    table(&["memory of rank 0", "bytes", "to this plan"], 1, rows)
}

fn numbers(run: &Run, memory: &Memory) -> String {
    let mut rows = Vec::new();
    let mut add = |name: &str, number: Option<u64>| {
        if let Some(number) = number {
            rows.push(vec![name.to_owned(), count(number)]);
        }
    };
    for (name, role) in run.roles.iter().flatten() {
        add(&format!("requests of {name}"), Some(role.requests));
    }
    add("requests", Some(memory.requests));
    add("runners", Some(memory.runners));
    add("fences", run.fences);
    add("replays", run.replays);
    add("launches out of order", run.order_deviations);
    add("overlapping pairs", run.overlap.as_ref().map(|pairs| pairs.cross_runner_pairs));
    add("of them in one arena", run.overlap.as_ref().map(|pairs| pairs.sharing_arena));
    add("gradients ready, eager", run.grad_ready.eager);
    add("gradients ready, graphs", run.grad_ready.graphs);
    add("operations checked", run.checker.as_ref().map(|checker| checker.operations));
    add("violations", run.checker.as_ref().map(|checker| checker.violations));
    table(&["run", "number"], 1, rows)
}

fn verdict(run: &Run, good: bool) -> String {
    let different = run.steps.iter().filter(|step| step.equal() == Some(false)).count();
    let violations = run.checker.as_ref().map(|checker| checker.violations);
    let total = some(run.steps.len() as u64, "step");
    let mut parts = vec![match run.equal_bits {
        Some(true) => format!("eager and graphs equal to the bit in {total}"),
        Some(false) => format!("eager and graphs differ in {different} of {total}"),
        None => format!("{total}, nothing to compare (--mode both compares)"),
    }];
    // Step 1 is the discovery, eager by nature.
    let replayed = run.steps.iter().filter(|step| step.step > 1 && step.graphs.is_some()).count() as u64;
    if run.replays.is_some() {
        parts.push(some(replayed, "replayed step"));
    }
    if run.grad_ready.equal() == Some(false) {
        parts.push("gradients did not become ready equally often".to_owned());
    }
    parts.extend(violations.map(|violations| some(violations, "violation")));
    format!("{}: {}", if good { "good" } else { "BAD" }, parts.join(", "))
}
