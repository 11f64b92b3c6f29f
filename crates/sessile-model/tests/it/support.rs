//! Small runs with access to every rank's trainer.

use std::collections::BTreeSet;

use sessile_host::{HostDevice, World};
use sessile_model::{Execution, StepResult, TrainConfig, Trainer, config::ScheduleOrder, world_options};
use sessile_plan::{Fence, Plan, Trace};
use sessile_runtime::{
    RuntimeError,
    check::{Overlap, Report, check, overlap},
    log::{Log, LogLevel, Recorded},
};

pub(crate) type Device = Recorded<HostDevice>;

/// The project's own words: long enough for every test.
pub(crate) const TEXT: &[u8] = include_bytes!("../../../../docs/DESIGN.md");

/// A model that steps in milliseconds and still has padding, several layers and runners.
pub(crate) fn tiny() -> TrainConfig {
    TrainConfig {
        layers: 2,
        hidden: 24,
        ffn: 40,
        heads: 2,
        seq: vec![8],
        batch: 1,
        steps: 4,
        ..TrainConfig::default()
    }
}

/// How the host device runs, by name.
pub(crate) fn scheduled(config: &TrainConfig, schedule: &str, seed: u64) -> TrainConfig {
    let (schedule_seed, schedule_order) = match schedule {
        "threads" => (None, ScheduleOrder::Random),
        "random" => (Some(seed), ScheduleOrder::Random),
        "writers-early" => (Some(seed), ScheduleOrder::WritersEarly),
        "readers-early" => (Some(seed), ScheduleOrder::ReadersEarly),
        other => panic!("no schedule {other}"),
    };
    TrainConfig { schedule_seed, schedule_order, ..config.clone() }
}

pub(crate) struct Outcome {
    pub(crate) steps: Vec<StepResult>,
    pub(crate) trace: Trace,
    pub(crate) plan: Plan,
    pub(crate) ready: Vec<u64>,
    pub(crate) deviations: u64,
    pub(crate) report: Report,
    pub(crate) overlap: Overlap,
}

/// Eager steps, as a reference.
pub(crate) fn eager(config: &TrainConfig) -> Vec<StepResult> {
    eager_with(config, |trainer| {
        (0..config.steps).map(|_| trainer.train_step(Execution::Eager)).collect::<Result<_, _>>()
    })
}

/// Eager steps, and how often each gradient became ready.
pub(crate) fn eager_counted(config: &TrainConfig) -> (Vec<StepResult>, Vec<u64>) {
    let world = World::new(world_options(&TrainConfig { schedule_seed: None, ..config.clone() }));
    let ranks = world.run(|device| -> Result<_, RuntimeError> {
        let mut trainer = Trainer::new(config, device, TEXT, false)?;
        let steps = (0..config.steps).map(|_| trainer.train_step(Execution::Eager));
        let steps = steps.collect::<Result<_, _>>()?;
        Ok((steps, trainer.gtp().ready().to_vec()))
    });
    ranks.into_iter().next().expect("there is a rank 0").expect("eager runs")
}

pub(crate) fn eager_with(
    config: &TrainConfig,
    program: impl Fn(&mut Trainer<'_, HostDevice>) -> Result<Vec<StepResult>, RuntimeError> + Sync,
) -> Vec<StepResult> {
    let world = World::new(world_options(&TrainConfig { schedule_seed: None, ..config.clone() }));
    let ranks = world.run(|device| program(&mut Trainer::new(config, device, TEXT, false)?));
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.expect("eager runs")).collect();
    ranks.into_iter().next().expect("there is a rank 0")
}

/// Graphs: one discovered step of each sequence length, then the program, which steps as it likes.
pub(crate) fn graphs_with(
    config: &TrainConfig,
    omit: &BTreeSet<Fence>,
    program: impl Fn(&mut Trainer<'_, Device>) -> Result<Vec<StepResult>, RuntimeError> + Sync,
) -> Outcome {
    let world = World::new(world_options(config));
    let ranks = world.run(|device| -> Result<_, RuntimeError> {
        let device = Recorded::new(device, LogLevel::On);
        let mut trainer = Trainer::new(config, device.clone(), TEXT, true)?;
        let mut steps = Vec::new();
        for at in 0..config.seq.len() {
            if at > 0 {
                trainer.runtime_mut().next_alternative()?;
            }
            steps.push(trainer.train_step(Execution::Discover)?);
        }
        trainer.seal()?;
        trainer.runtime_mut().omit_fences(omit.iter().copied());
        trainer.capture_all()?;
        steps.extend(program(&mut trainer)?);
        let runtime = trainer.gtp().runtime_ref();
        let (trace, plan) =
            (runtime.trace().expect("sealed").clone(), runtime.plan().expect("sealed").clone());
        let deviations = runtime.counters().order_deviations;
        let spans = sessile_hal::Device::take_spans(&device);
        Ok((steps, trace, plan, trainer.gtp().ready().to_vec(), deviations, device.take_log(), spans))
    });
    let mut ranks: Vec<_> = ranks.into_iter().map(|rank| rank.expect("graphs run")).collect();
    let spans: Vec<_> = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.6)).collect();
    let logs = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.5)).collect();
    let log = Log::from_ranks(logs);
    let spans: Vec<&[_]> = spans.iter().map(Vec::as_slice).collect();
    let (steps, trace, plan, ready, deviations, ..) = ranks.into_iter().next().expect("there is a rank 0");
    Outcome { steps, trace, plan, ready, deviations, report: check(&log), overlap: overlap(&log, &spans) }
}

pub(crate) fn graphs(config: &TrainConfig) -> Outcome {
    graphs_with(config, &BTreeSet::new(), |trainer| {
        let replayed = config.seq.len() as u32..config.steps;
        replayed.map(|_| trainer.train_step(Execution::Replay)).collect::<Result<_, _>>()
    })
}

/// Fails with the first difference, named.
pub(crate) fn assert_equal(context: &str, eager: &[StepResult], graphs: &[StepResult]) {
    assert_eq!(eager.len(), graphs.len(), "{context}: number of steps");
    for (at, (one, other)) in eager.iter().zip(graphs).enumerate() {
        assert_eq!(one.loss.to_bits(), other.loss.to_bits(), "{context}: loss of step {}", at + 1);
        assert_eq!(one.main_grad_digest, other.main_grad_digest, "{context}: main_grad of step {}", at + 1);
    }
}

pub(crate) fn assert_clean(context: &str, report: &Report) {
    assert!(report.operations > 0, "{context}: nothing was checked");
    let first: Vec<String> = report.violations.iter().take(3).map(ToString::to_string).collect();
    assert!(first.is_empty(), "{context}: {}", first.join("\n"));
}
