//! One rank's training on its GPU.

use sessile_cuda::job::Job;
use sessile_model::{TrainConfig, TrainEvent, TrainOutcome, train_rank};

use crate::{
    args::TrainArgs,
    commands::place::{on_gpu, running},
    failure::Failure,
    run::Cuda,
};

/// Runs this rank.
pub(super) fn run(
    args: &TrainArgs,
    job: &Job,
    config: &TrainConfig,
    text: &[u8],
    observe: &(dyn Fn(&TrainEvent) + Sync),
) -> Result<(TrainOutcome, Cuda), Failure> {
    // Spans cost two small kernels for each operation.
    on_gpu(&args.job.place, job, args.files.timeline.is_some(), |device| {
        super::size::check_gpu(config, device.free_memory().map_err(running)?.0)?;
        let about = Cuda::about(device).map_err(running)?;
        let outcome = train_rank(config, device, text, observe).map_err(super::failure)?;
        Ok((outcome, about))
    })
}
