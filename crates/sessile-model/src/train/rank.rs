//! One rank's execution of a run, on any device.

use std::collections::BTreeMap;

use sessile_hal::{Device, Graph, NodeKind, Span};
use sessile_plan::{Plan, Trace};
use sessile_runtime::{
    Counters, Footprint, RuntimeError,
    log::{Log, LogLevel, RankLog, Recorded},
};

use super::{Executing, TrainEvent};
use crate::{
    config::TrainConfig,
    report::{CollectiveKernel, FreeBytes, GraphsOutcome, StepResult},
    simulate::DepthTable,
    trainer::{Execution, Trainer},
};

/// What an execution leaves on a rank.
pub(super) struct RankOutcome {
    pub(super) steps: Vec<StepResult>,
    pub(super) ready: u64,
    graphs: Option<RankGraphs>,
}

struct RankGraphs {
    trace: Trace,
    plan: Plan,
    depths: Option<DepthTable>,
    footprint: Footprint,
    free: Option<FreeBytes>,
    addresses_kept: bool,
    kernels: Vec<CollectiveKernel>,
    counters: Counters,
    log: RankLog,
    spans: Vec<Span>,
}

/// What is known at the seal and must hold to the end.
struct Sealed {
    depths: Option<DepthTable>,
    footprint: Footprint,
    addresses: Vec<u64>,
    free: Option<FreeBytes>,
}

pub(super) fn merge(ranks: Vec<RankOutcome>) -> Option<GraphsOutcome> {
    let mut ranks: Vec<RankGraphs> = ranks.into_iter().filter_map(|rank| rank.graphs).collect();
    let spans = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.spans)).collect();
    let logs = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.log)).collect();
    let addresses_kept = ranks.iter().all(|rank| rank.addresses_kept);
    let first = ranks.into_iter().next()?;
    Some(GraphsOutcome {
        trace: first.trace,
        plan: first.plan,
        depths: first.depths,
        footprint: first.footprint,
        free: first.free,
        addresses_kept,
        kernels: first.kernels,
        replays: first.counters.replays,
        order_deviations: first.counters.order_deviations,
        log: Log::from_ranks(logs),
        spans,
    })
}

pub(super) fn run_rank<D: Device>(
    config: &TrainConfig,
    device: D,
    text: &[u8],
    executing: Executing,
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<RankOutcome, RuntimeError> {
    let level = match executing {
        Executing::Eager => LogLevel::Off,
        Executing::Graphs => LogLevel::On,
    };
    // Spans of an execution before this one are not this one's.
    device.take_spans();
    let device = Recorded::new(device, level);
    let first = device.rank() == 0;
    let graphed = executing == Executing::Graphs;
    let mut trainer = Trainer::new(config, device.clone(), text, graphed)?;
    let lengths = u32::try_from(config.seq.len()).unwrap_or(u32::MAX);
    let mut steps = Vec::new();
    let mut sealed = None;
    let mut spans = Vec::new();
    for step in 1..=config.steps {
        let execution = match (graphed, step) {
            (false, _) => Execution::Eager,
            (true, step) if step <= lengths => Execution::Discover,
            (true, _) => Execution::Replay,
        };
        if execution == Execution::Discover && step > 1 {
            trainer.runtime_mut().next_alternative()?;
        }
        let result = trainer.train_step(execution)?;
        if first {
            observe(&TrainEvent::Step { executing, step, loss: result.loss });
        }
        steps.push(result);
        if execution == Execution::Discover && step == lengths {
            trainer.runtime_mut().join()?;
            device.wait_stream(trainer.gtp().runtime_ref().main())?;
            spans = device.take_spans();
            // A schedule has steps and no clock.
            let measured = if config.schedule_seed.is_none() { &spans[..] } else { &[] };
            sealed = Some(seal(&mut trainer, measured, first.then_some(observe))?);
        }
        if let (Some(Sealed { free, .. }), Execution::Replay) = (&mut sealed, execution)
            && let Some(now) = device.free_bytes()?
        {
            let free = free.get_or_insert(FreeBytes { first: now, least: now, last: now });
            (free.least, free.last) = (free.least.min(now), now);
        }
    }
    let runtime = trainer.gtp().runtime_ref();
    let graphs = match (runtime.trace(), runtime.plan(), sealed) {
        (Some(trace), Some(plan), Some(sealed)) => Some(RankGraphs {
            trace: trace.clone(),
            plan: plan.clone(),
            depths: sealed.depths,
            footprint: sealed.footprint,
            free: sealed.free,
            addresses_kept: runtime.arena_addresses() == sealed.addresses,
            kernels: collective_kernels(&trainer),
            counters: runtime.counters(),
            log: device.take_log(),
            spans: spans.into_iter().chain(device.take_spans()).collect(),
        }),
        _ => None,
    };
    let ready = trainer.gtp().ready().iter().sum();
    Ok(RankOutcome { steps, ready, graphs })
}

/// Seals, with what the spans of the discovery tell, and captures; `observe` is told what that takes before it is allocated.
fn seal<D: Device>(
    trainer: &mut Trainer<'_, D>,
    spans: &[Span],
    observe: Option<&(dyn Fn(&TrainEvent) + Sync)>,
) -> Result<Sealed, RuntimeError> {
    let (options, depths) = trainer.measure(spans)?;
    let footprint = trainer.footprint(&options)?;
    if let Some(observe) = observe {
        observe(&TrainEvent::Planned(footprint));
    }
    trainer.seal_with(&options)?;
    trainer.capture_all()?;
    let runtime = trainer.gtp().runtime_ref();
    if let (Some(observe), Some(plan), Some(trace)) = (observe, runtime.plan(), runtime.trace()) {
        observe(&TrainEvent::Captured { runners: trace.runners.len(), arena_bytes: plan.bytes() });
    }
    Ok(Sealed { depths, footprint, addresses: runtime.arena_addresses(), free: None })
}

/// The kernels that the captured collectives became, by how often.
fn collective_kernels<D: Device>(trainer: &Trainer<'_, D>) -> Vec<CollectiveKernel> {
    let runtime = trainer.gtp().runtime_ref();
    let mut counts: BTreeMap<(String, u32, u32), u64> = BTreeMap::new();
    for graph in trainer.launch_names().iter().filter_map(|name| runtime.graph(name)) {
        let nodes = graph.nodes();
        for kernel in graph.kernels() {
            if nodes.get(kernel.node as usize).is_some_and(|node| node.kind == NodeKind::Collective) {
                *counts.entry((kernel.name.clone(), kernel.grid, kernel.block)).or_default() += 1;
            }
        }
    }
    counts
        .into_iter()
        .map(|((name, blocks, threads), nodes)| CollectiveKernel { name, blocks, threads, nodes })
        .collect()
}
