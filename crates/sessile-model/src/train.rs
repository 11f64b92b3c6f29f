//! Training runs on the host device: all ranks in this process.

use std::time::Duration;

use sessile_hal::{Device, Span};
use sessile_host::{HostDevice, Order, RankFailure, World, WorldOptions};
use sessile_plan::{Plan, PlanError, Trace};
use sessile_runtime::{
    RuntimeError,
    log::{Log, LogLevel, RankLog, Recorded},
};

use crate::{
    config::{ConfigError, Mode, ScheduleOrder, TrainConfig},
    report::{GradReady, GraphsOutcome, Kinds, Step, StepResult, TrainOutcome},
    trainer::{Execution, Trainer},
};

/// Which of the two executions an event speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executing {
    /// The eager one.
    Eager,
    /// The one from graphs.
    Graphs,
}

/// Progress of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainEvent {
    /// An execution builds its model.
    Begin(Executing),
    /// Runners were discovered, agreed, sealed and captured.
    Captured {
        /// How many.
        runners: usize,
        /// Bytes of all arenas of a rank.
        arena_bytes: u64,
    },
    /// A step ended.
    Step {
        /// Which execution.
        executing: Executing,
        /// Number, from 1.
        step: u32,
        /// Mean loss.
        loss: f64,
    },
}

/// Why a run gave no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// An option cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The text is too short for one sequence.
    #[error(
        "the text has {bytes} bytes, and --seq and --mtp need at least {needed}: a sequence, what is predicted behind it, and one to choose"
    )]
    TextTooShort {
        /// Its length.
        bytes: usize,
        /// What is needed.
        needed: u64,
    },
    /// The strategy cannot lay out what was discovered.
    #[error(transparent)]
    Plan(PlanError),
    /// A rank failed.
    #[error(transparent)]
    Rank(Box<RankFailure<RuntimeError>>),
}

impl From<RankFailure<RuntimeError>> for TrainError {
    fn from(failure: RankFailure<RuntimeError>) -> Self {
        match failure {
            RankFailure::Failed { error: RuntimeError::Plan(error), .. } => TrainError::Plan(error),
            failure => TrainError::Rank(Box::new(failure)),
        }
    }
}

struct RankOutcome {
    steps: Vec<StepResult>,
    ready: u64,
    graphs: Option<RankGraphs>,
}

struct RankGraphs {
    trace: Trace,
    plan: Plan,
    counters: sessile_runtime::Counters,
    log: RankLog,
    spans: Vec<Span>,
}

/// Trains as configured, every mode that is asked for from the same seed.
///
/// # Errors
/// [`TrainError::Config`] and [`TrainError::TextTooShort`] before anything runs; [`TrainError::Plan`] if the strategy
/// cannot hold the requests; [`TrainError::Rank`] names the rank
/// that failed first in order of rank.
pub fn train(
    config: &TrainConfig,
    text: &[u8],
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<TrainOutcome, TrainError> {
    config.check()?;
    let needed = config.window().saturating_add(1);
    if (text.len() as u64) < needed {
        return Err(TrainError::TextTooShort { bytes: text.len(), needed });
    }
    // The host device always can.
    let expert = (config.experts > 0).then(|| config.expert_kind(true)).transpose()?;
    let kinds = Kinds { dense: config.dense_kind(true)?, expert };
    let eager = match config.mode {
        Mode::Eager | Mode::Both => Some(execute(config, text, Executing::Eager, observe)?),
        Mode::Graphs => None,
    };
    let graphs = match config.mode {
        Mode::Graphs | Mode::Both => Some(execute(config, text, Executing::Graphs, observe)?),
        Mode::Eager => None,
    };
    let step_of = |ranks: &Option<Vec<RankOutcome>>, at: usize| {
        ranks.as_ref().and_then(|ranks| ranks[0].steps.get(at)).cloned()
    };
    let steps = (0..config.steps)
        .map(|at| Step {
            step: at + 1,
            eager: step_of(&eager, at as usize),
            graphs: step_of(&graphs, at as usize),
        })
        .collect();
    let ready = |ranks: &Option<Vec<RankOutcome>>| ranks.as_ref().map(|ranks| ranks[0].ready);
    let grad_ready = GradReady { eager: ready(&eager), graphs: ready(&graphs) };
    Ok(TrainOutcome { config: config.clone(), kinds, grad_ready, steps, graphs: graphs.and_then(merge) })
}

fn merge(ranks: Vec<RankOutcome>) -> Option<GraphsOutcome> {
    let mut ranks: Vec<RankGraphs> = ranks.into_iter().filter_map(|rank| rank.graphs).collect();
    let spans = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.spans)).collect();
    let logs = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.log)).collect();
    let first = ranks.into_iter().next()?;
    Some(GraphsOutcome {
        trace: first.trace,
        plan: first.plan,
        replays: first.counters.replays,
        order_deviations: first.counters.order_deviations,
        log: Log::from_ranks(logs),
        spans,
    })
}

/// How a world runs under this configuration.
pub fn world_options(config: &TrainConfig) -> WorldOptions {
    let options = match config.schedule_seed {
        // More workers than cores: an operation in flight is one that has begun, on a core or not.
        None => WorldOptions::threads(config.ranks, 2 * config.ranks as usize),
        Some(seed) => {
            let order = match config.schedule_order {
                ScheduleOrder::Random => Order::Random,
                ScheduleOrder::WritersEarly => Order::WritersEarly,
                ScheduleOrder::ReadersEarly => Order::ReadersEarly,
            };
            WorldOptions::scheduled(config.ranks, seed, order)
        }
    };
    // A step of a large model may take long, and a rank that has gone is noticed at once, without any deadline.
    WorldOptions { deadline: Duration::from_secs(600), ..options }
}

fn execute(
    config: &TrainConfig,
    text: &[u8],
    executing: Executing,
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<Vec<RankOutcome>, TrainError> {
    observe(&TrainEvent::Begin(executing));
    let mut options = world_options(config);
    options.record_spans = executing == Executing::Graphs;
    let world = World::new(options);
    let results = world.run(|device| run_rank(config, device, text, executing, observe));
    Ok(results.into_iter().collect::<Result<Vec<_>, _>>()?)
}

fn run_rank(
    config: &TrainConfig,
    device: HostDevice,
    text: &[u8],
    executing: Executing,
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<RankOutcome, RuntimeError> {
    let level = match executing {
        Executing::Eager => LogLevel::Off,
        Executing::Graphs => LogLevel::On,
    };
    let device = Recorded::new(device, level);
    let first = device.rank() == 0;
    let graphed = executing == Executing::Graphs;
    let mut trainer = Trainer::new(config, device.clone(), text, graphed)?;
    let lengths = u32::try_from(config.seq.len()).unwrap_or(u32::MAX);
    let mut steps = Vec::new();
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
            trainer.seal()?;
            trainer.capture_all()?;
            let runtime = trainer.gtp().runtime_ref();
            if let (true, Some(plan), Some(trace)) = (first, runtime.plan(), runtime.trace()) {
                observe(&TrainEvent::Captured { runners: trace.runners.len(), arena_bytes: plan.bytes() });
            }
        }
    }
    let runtime = trainer.gtp().runtime_ref();
    let graphs = match (runtime.trace(), runtime.plan()) {
        (Some(trace), Some(plan)) => Some(RankGraphs {
            trace: trace.clone(),
            plan: plan.clone(),
            counters: runtime.counters(),
            log: device.take_log(),
            spans: device.take_spans(),
        }),
        _ => None,
    };
    let ready = trainer.gtp().ready().iter().sum();
    Ok(RankOutcome { steps, ready, graphs })
}
