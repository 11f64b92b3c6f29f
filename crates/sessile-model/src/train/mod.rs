//! Training runs: all ranks in this process on the host device, or one rank in this process on any device.

mod gather;
mod rank;

use std::time::Duration;

use sessile_hal::Device;
use sessile_host::{Order, RankFailure, World, WorldOptions};
use sessile_plan::PlanError;
use sessile_runtime::{Footprint, RuntimeError};

use self::rank::{RankOutcome, run_rank};
use crate::{
    config::{ConfigError, Mode, ScheduleOrder, TrainConfig},
    report::{GradReady, Kinds, Step, TrainOutcome},
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
    /// Runners were discovered; what their arenas will take of a rank's memory, before they are allocated.
    Planned(Footprint),
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
    /// No depths can be chosen.
    #[error("{reason}")]
    Depth {
        /// Why.
        reason: String,
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
            RankFailure::Failed { error: RuntimeError::Undecided { reason }, .. } => {
                TrainError::Depth { reason }
            }
            failure => TrainError::Rank(Box::new(failure)),
        }
    }
}

/// Trains as configured on the host device, every mode that is asked for from the same seed.
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
    // The host device always can.
    let kinds = prepare(config, text, true)?;
    let execute = |executing| {
        observe(&TrainEvent::Begin(executing));
        let mut options = world_options(config);
        options.record_spans = executing == Executing::Graphs;
        let world = World::new(options);
        let results = world.run(|device| run_rank(config, device, text, executing, observe));
        Ok(results.into_iter().collect::<Result<Vec<_>, _>>()?)
    };
    finish(config, kinds, execute)
}

/// Trains this process's rank on its device; the other ranks do the same in theirs. Collective over the job. All ranks
/// get the steps; the event log and spans of all ranks are gathered at rank 0 alone.
///
/// # Errors
/// As [`train`].
pub fn train_rank<D: Device>(
    config: &TrainConfig,
    device: &D,
    text: &[u8],
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<TrainOutcome, TrainError> {
    let kinds = prepare(config, text, device.limits().window_align > 0)?;
    let failed = |error| TrainError::from(RankFailure::Failed { rank: device.rank(), error });
    let execute = |executing| {
        observe(&TrainEvent::Begin(executing));
        run_rank(config, device.clone(), text, executing, observe).map(|rank| vec![rank]).map_err(failed)
    };
    let mut outcome = finish(config, kinds, execute)?;
    if let Some(graphs) = &mut outcome.graphs {
        gather::gather(device, graphs).map_err(failed)?;
    }
    Ok(outcome)
}

/// Checks what can be checked before anything runs.
fn prepare(config: &TrainConfig, text: &[u8], registers: bool) -> Result<Kinds, TrainError> {
    config.check()?;
    let needed = config.window().saturating_add(1);
    if (text.len() as u64) < needed {
        return Err(TrainError::TextTooShort { bytes: text.len(), needed });
    }
    let expert = (config.experts > 0).then(|| config.expert_kind(registers)).transpose()?;
    Ok(Kinds { dense: config.dense_kind(registers)?, expert })
}

/// Makes the executions that are asked for and puts what the ranks of this process found together.
fn finish(
    config: &TrainConfig,
    kinds: Kinds,
    execute: impl Fn(Executing) -> Result<Vec<RankOutcome>, TrainError>,
) -> Result<TrainOutcome, TrainError> {
    let eager = match config.mode {
        Mode::Eager | Mode::Both => Some(execute(Executing::Eager)?),
        Mode::Graphs => None,
    };
    let graphs = match config.mode {
        Mode::Graphs | Mode::Both => Some(execute(Executing::Graphs)?),
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
    Ok(TrainOutcome {
        config: config.clone(),
        kinds,
        grad_ready,
        steps,
        graphs: graphs.and_then(rank::merge),
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
