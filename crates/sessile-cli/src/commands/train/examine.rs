//! What a run left behind, examined by planner, validator and checker, as the saved run's document.

use serde_json::value::RawValue;
use sessile_model::{GraphsOutcome, StepResult, TrainOutcome, config::Mode};
use sessile_plan::{Baselines, Plan, baseline_bytes, validate, write_plan, write_trace};
use sessile_runtime::check::{Overlap, Report, check, overlap};

use crate::{
    auto::Auto,
    failure::Failure,
    run::{
        ArenaBytes, Checked, Cuda, CudaGraphs, Execution, Generations, Memory, Options, OverlapPairs, Run,
        SCHEMA, Step, VERSION, domains, roles,
    },
};

/// The document, and the findings that are printed in full.
pub(super) struct Examined {
    pub(super) run: Run,
    /// Of the happens-before checker.
    pub(super) races: Vec<String>,
    /// Races beyond those listed.
    pub(super) unlisted: u64,
    /// Of the plan's validator.
    pub(super) faults: Vec<String>,
}

impl Examined {
    /// Whether no bit differs, gradients became ready equally often, and nothing was found.
    pub(super) fn good(&self) -> bool {
        let equal = match self.run.config.train.mode {
            Mode::Both => self.run.equal_bits == Some(true),
            Mode::Eager | Mode::Graphs => self.run.equal_bits != Some(false),
        };
        let violations = self.run.checker.as_ref().map_or(0, |checker| checker.violations);
        let graphs = self.run.cuda.as_ref().and_then(|cuda| cuda.graphs.as_ref());
        let kept = graphs.is_none_or(|graphs| graphs.addresses_kept);
        equal
            && kept
            && self.run.grad_ready.equal() != Some(false)
            && violations == 0
            && self.faults.is_empty()
    }
}

/// Examines a run.
pub(super) fn examine(
    outcome: &TrainOutcome,
    config: Options,
    cuda: Option<Cuda>,
) -> Result<Examined, Failure> {
    let steps: Vec<Step> = outcome.steps.iter().map(step).collect();
    let compared: Vec<bool> = outcome.steps.iter().filter_map(sessile_model::Step::equal).collect();
    let equal_bits = (!compared.is_empty()).then(|| compared.iter().all(|&equal| equal));
    let mut run = Run {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        config,
        steps,
        equal_bits,
        memory: None,
        domains: None,
        roles: None,
        reduce_scatter: outcome.kinds.into(),
        grad_ready: outcome.grad_ready,
        fences: None,
        replays: None,
        order_deviations: None,
        overlap: None,
        checker: None,
        cuda,
        auto: None,
        trace: None,
        plan: None,
    };
    let (mut races, mut unlisted, mut faults) = (Vec::new(), 0, Vec::new());
    if let Some(graphs) = &outcome.graphs {
        let report = check(&graphs.log);
        fill(&mut run, graphs, &report)?;
        unlisted = report.unlisted;
        races.extend(report.violations.iter().map(ToString::to_string));
        faults.extend(validate(&graphs.trace, &graphs.plan).iter().map(ToString::to_string));
    }
    Ok(Examined { run, races, unlisted, faults })
}

/// What only graphs have.
fn fill(run: &mut Run, graphs: &GraphsOutcome, report: &Report) -> Result<(), Failure> {
    let spans: Vec<_> = graphs.spans.iter().map(Vec::as_slice).collect();
    // Where no spans are taken there is nothing to count.
    let timed = spans.iter().any(|spans| !spans.is_empty());
    let pairs = timed.then(|| overlap(&graphs.log, &spans));
    run.memory = Some(memory(graphs));
    run.domains = Some(domains(&graphs.plan));
    run.roles = Some(roles(&graphs.trace));
    if let Some(cuda) = &mut run.cuda {
        cuda.graphs = Some(CudaGraphs {
            planned_bytes: graphs.footprint.planned,
            allocated_bytes: graphs.footprint.allocated,
            registered_bytes: graphs.footprint.registered,
            free_before_bytes: graphs.footprint.free,
            free_bytes: graphs.free,
            addresses_kept: graphs.addresses_kept,
            collective_kernels: graphs.kernels.clone(),
        });
    }
    run.auto = graphs.depths.clone().map(|depths| Auto::new(depths, run.config.train.memory_limit));
    run.fences = Some(graphs.plan.fences.len() as u64);
    run.replays = Some(graphs.replays);
    run.order_deviations = Some(graphs.order_deviations);
    run.overlap = pairs.map(|Overlap { cross_runner_pairs, sharing_arena }| OverlapPairs {
        cross_runner_pairs,
        sharing_arena,
    });
    let violations = report.violations.len() as u64 + report.unlisted;
    run.checker = Some(Checked { operations: report.operations, violations });
    run.trace = Some(raw(write_trace(&graphs.trace))?);
    run.plan = Some(raw(write_plan(&graphs.plan))?);
    Ok(())
}

fn memory(graphs: &GraphsOutcome) -> Memory {
    let GraphsOutcome { trace, plan, .. } = graphs;
    let Baselines { per_request, ring2, generations: [one, two, three], .. } =
        baseline_bytes(trace, plan.options.step_cut);
    Memory {
        arenas: arenas(plan),
        requests: plan.views.len() as u64,
        runners: trace.runners.len() as u64,
        per_request_bytes: per_request,
        ring2_bytes: ring2,
        generations_bytes: Generations { one, two, three },
        lower_bound_bytes: plan.lower_bound_bytes(),
        arena_bytes: plan.bytes(),
    }
}

fn arenas(plan: &Plan) -> Vec<ArenaBytes> {
    let arena =
        |arena: &sessile_plan::Arena| ArenaBytes { domain: arena.domain.to_string(), bytes: arena.bytes };
    plan.arenas.iter().map(arena).collect()
}

fn step(step: &sessile_model::Step) -> Step {
    let execution = |result: &StepResult| Execution {
        loss: result.loss.is_finite().then_some(result.loss),
        main_grad_digest: result.main_grad_digest.clone(),
    };
    Step {
        step: step.step,
        eager: step.eager.as_ref().map(execution),
        graphs: step.graphs.as_ref().map(execution),
    }
}

/// A document inside the document.
fn raw(text: String) -> Result<Box<RawValue>, Failure> {
    RawValue::from_string(text.trim().to_owned()).map_err(|error| {
        Failure::Run(format!("the trace or plan could not be put into the saved run: {error}"))
    })
}
