//! `sessile simulate`: a backward of a large model, and what a step needs besides, on the virtual clock.
//!
//! ```text
//!  begin step ─▶ backward, eagerly (discovery) ─▶ seal ─▶ capture ─▶ begin step ─▶ backward, replayed ─▶ sums ─▶ AdamW
//!                                                                    └ measured from here on
//! ```
//!
//! Storage runtime, planner and sharded weights are those of a training run; the device has a clock and no data. Ranks do
//! the same work on the same shapes, so one may stand for all.

mod auto;
mod config;
mod kind_set;
mod measure;
mod models;
mod program;
mod proxy;
mod replay;
mod shapes;

use std::time::Duration;

use sessile_hal::{Comm, Device, Span};
use sessile_host::{Data, HostDevice, RankFailure, World, WorldOptions};
use sessile_plan::{Plan, StepCut, Trace};
use sessile_runtime::{
    HasRuntime, Runtime, RuntimeError,
    log::{Log, LogLevel, RankLog, Recorded},
};

pub use auto::{
    AutoDepth, AutoError, Candidate, DEPTHS, DepthTable, OverLimit, TraceDepth, WORTH, auto_depth,
    choose_depth, depth_of_trace, depth_text, groups_of_trace,
};
pub use config::{SimulateConfig, Speeds};
pub use kind_set::KindSet;
pub use measure::PhaseTimes;
pub use models::{BUILT_IN, built_in};
pub use proxy::simulate_proxy;
pub use replay::{modelled_ns, replay, replay_spans};
pub use shapes::{GroupShape, LayerShape, ModelShape, ModuleShape, WeightShape};

use crate::{config::ConfigError, train::TrainError};
use measure::Kinds;
use program::Program;

/// What a simulation gives. Figures are rank 0's.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// What the discovery recorded.
    pub trace: Trace,
    /// What it was planned as.
    pub plan: Plan,
    /// Bytes that live as long as the model: shards, gradients, optimizer, and the scratch that stands for activations.
    pub persistent_bytes: u64,
    /// Bytes of the eager pools, which only the discovery used.
    pub eager_bytes: u64,
    /// The replayed backward.
    pub backward: PhaseTimes,
    /// The sums over replicas.
    pub sync: PhaseTimes,
    /// The optimizer's step.
    pub optimizer: PhaseTimes,
    /// The event log of every rank that ran.
    pub log: Log,
    /// Spans of the replayed step, by rank that ran.
    pub spans: Vec<Vec<Span>>,
    /// Ranks that ran a program: all, or one that stands for all.
    pub ran: u32,
}

impl Simulated {
    /// Backward, sums and optimizer, one after another.
    pub fn step_ns(&self) -> u64 {
        self.backward.total_ns + self.sync.total_ns + self.optimizer.total_ns
    }
}

/// What the device tells of a phase.
#[derive(Clone, Default)]
struct Settled {
    spans: Vec<Span>,
    /// By how much collectives delayed the kernels among them.
    delay_ns: u64,
}

/// What one rank gives.
struct RankOutcome {
    trace: Trace,
    plan: Plan,
    persistent_bytes: u64,
    eager_bytes: u64,
    phases: [Settled; 3],
    log: RankLog,
}

/// Simulates as configured.
///
/// # Errors
/// [`TrainError::Config`] before anything runs; [`TrainError::Plan`] if the strategy cannot hold the requests;
/// [`TrainError::Rank`] if a rank failed.
pub fn simulate(config: &SimulateConfig) -> Result<Simulated, TrainError> {
    config.check()?;
    let world = world(config.ranks, config);
    let results = world.run(|device| run_rank(config, &world, device));
    finish(results, world.running())
}

/// Ranks on the virtual clock.
fn world(ranks: u32, config: &SimulateConfig) -> World {
    let data = if config.folded { Data::Folded } else { Data::ShapeOnly };
    World::new(WorldOptions {
        deadline: Duration::from_secs(600),
        ..WorldOptions::simulated(ranks, config.costs(), data)
    })
}

fn finish(
    results: Vec<Result<RankOutcome, RankFailure<RuntimeError>>>,
    ran: u32,
) -> Result<Simulated, TrainError> {
    let mut ranks = results.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter();
    let Some(mut first) = ranks.next() else {
        let error = ConfigError { option: "--ranks", value: "0".into(), remedy: "use 1 or more".into() };
        return Err(error.into());
    };
    let log = std::mem::take(&mut first.log);
    let kinds = Kinds::new(&log);
    let times = |phase: &Settled| kinds.times(&phase.spans, phase.delay_ns);
    let [backward, sync, optimizer] = first.phases.each_ref().map(times);
    let spans_of = |phases: &[Settled; 3]| phases.each_ref().map(|phase| phase.spans.as_slice()).concat();
    let mut spans = vec![spans_of(&first.phases)];
    let mut logs = vec![log];
    for rank in ranks {
        spans.push(spans_of(&rank.phases));
        logs.push(rank.log);
    }
    let RankOutcome { trace, plan, persistent_bytes, eager_bytes, .. } = first;
    let log = Log::from_ranks(logs);
    Ok(Simulated { trace, plan, persistent_bytes, eager_bytes, backward, sync, optimizer, log, spans, ran })
}

impl RankOutcome {
    fn of(
        runtime: &Runtime<Recorded<HostDevice>>,
        persistent_bytes: u64,
        phases: [Settled; 3],
        device: &Recorded<HostDevice>,
    ) -> Result<RankOutcome, RuntimeError> {
        let (Some(trace), Some(plan)) = (runtime.trace(), runtime.plan()) else {
            return Err(RuntimeError::WrongPhase {
                call: "simulate",
                phase: "nothing is sealed",
                remedy: "discover every runner once, then seal",
            });
        };
        Ok(RankOutcome {
            trace: trace.clone(),
            plan: plan.clone(),
            persistent_bytes,
            eager_bytes: runtime.eager_bytes(),
            phases,
            log: device.take_log(),
        })
    }
}

fn run_rank(config: &SimulateConfig, world: &World, device: HostDevice) -> Result<RankOutcome, RuntimeError> {
    let rank = device.rank();
    let device = Recorded::new(device, LogLevel::On);
    let mut program = Program::new(config, &device)?;
    let persistent_bytes = world.live_bytes(rank);
    world.record_spans(false);
    program.begin_step()?;
    settle(&mut program, &device, world)?;
    world.record_spans(true);
    program.discover()?;
    let discovered = settle(&mut program, &device, world)?;
    world.record_spans(false);
    program.runtime().measure(&discovered.spans)?;
    program.runtime().seal(&config.model.name, &config.plan)?;
    program.capture()?;
    // Behind a barrier every step is like the first.
    let steps = if config.plan.step_cut == StepCut::Wrap { 2 } else { 1 };
    let mut phases: [Settled; 3] = Default::default();
    for _ in 0..steps {
        program.begin_step()?;
        settle(&mut program, &device, world)?;
        world.record_spans(true);
        program.replay()?;
        phases[0] = settle(&mut program, &device, world)?;
        program.sync()?;
        phases[1] = settle(&mut program, &device, world)?;
        program.optimize()?;
        phases[2] = settle(&mut program, &device, world)?;
    }
    RankOutcome::of(program.gtp().runtime_ref(), persistent_bytes, phases, &device)
}

/// Waits for all ranks and all work, and takes what the device tells of the time since the last call.
fn settle(
    program: &mut impl HasRuntime<Recorded<HostDevice>>,
    device: &Recorded<HostDevice>,
    world: &World,
) -> Result<Settled, RuntimeError> {
    let runtime = program.runtime();
    device.wait_stream(runtime.main())?;
    runtime.world().exchange(&[])?;
    Ok(Settled { spans: device.take_spans(), delay_ns: world.take_delay_ns(device.rank()) })
}
