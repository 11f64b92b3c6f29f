//! The transformer that training runs use, on the virtual clock and without data: the very code that `sessile train` runs.

use sessile_gtp::Gtp;
use sessile_hal::Device;
use sessile_host::{HostDevice, World};
use sessile_runtime::{
    RuntimeError,
    log::{LogLevel, Recorded},
};

use super::{RankOutcome, Settled, SimulateConfig, Simulated, finish, settle, world};
use crate::{
    config::TrainConfig,
    train::TrainError,
    trainer::{Execution, Trainer},
};

/// Simulates a step of a training run: discovery, seal, capture, one replay. Speeds and folding are those of `simulation`,
/// all else is the training run's. The backward of the result holds the forward, too.
///
/// # Errors
/// As [`simulate`](super::simulate).
pub fn simulate_proxy(config: &TrainConfig, simulation: &SimulateConfig) -> Result<Simulated, TrainError> {
    config.check()?;
    let world = world(config.ranks, simulation);
    // Nothing is read: only the length counts.
    let text = vec![b' '; usize::try_from(config.window().saturating_add(1)).unwrap_or(usize::MAX)];
    let results = world.run(|device| run_rank(config, &text, &world, device));
    finish(results, world.running())
}

fn run_rank(
    config: &TrainConfig,
    text: &[u8],
    world: &World,
    device: HostDevice,
) -> Result<RankOutcome, RuntimeError> {
    let rank = device.rank();
    let device = Recorded::new(device, LogLevel::On);
    let mut trainer = Trainer::new(config, device.clone(), text, true)?;
    let persistent_bytes = world.live_bytes(rank);
    settle(&mut trainer, &device, world)?;
    trainer.train_step(Execution::Discover)?;
    let discovered = settle(&mut trainer, &device, world)?;
    world.record_spans(false);
    let (options, _) = trainer.measure(&discovered.spans)?;
    trainer.seal_with(&options)?;
    trainer.capture_all()?;
    trainer.begin_step()?;
    settle(&mut trainer, &device, world)?;
    world.record_spans(true);
    trainer.run_microbatches(Execution::Replay)?;
    trainer.runtime_mut().join()?;
    let backward = settle(&mut trainer, &device, world)?;
    trainer.finish_step()?;
    let optimizer = settle(&mut trainer, &device, world)?;
    let gtp: &Gtp<_> = trainer.gtp();
    RankOutcome::of(gtp.runtime_ref(), persistent_bytes, [backward, Settled::default(), optimizer], &device)
}
