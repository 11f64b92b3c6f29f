//! Which part of a job this process is.

use std::time::Duration;

use sessile_cuda::{CudaDevice, DeviceOptions, OneShotOptions, gpus, job::Job, library::ready};
use sessile_hal::DeviceError;

use super::launch::{self, Launch};
use crate::{
    args::{DeviceName, Place, Sms},
    failure::Failure,
};

/// What this process has to do.
pub(super) enum Part {
    /// Run all ranks as threads, on the host device.
    Host,
    /// Start the ranks, each with a GPU, and wait for them.
    Launch(Launch),
    /// Be this rank, with a GPU.
    Rank(Job),
}

/// Ranks that may share GPUs.
const SHARING: u32 = 64;

/// Refuses a bound of one-shot reduce-scatters where there are none.
///
/// # Errors
/// As said.
pub(super) fn bounds_something(place: &Place, one_shot: bool) -> Result<(), Failure> {
    if place.one_shot_sms.is_none() || one_shot {
        return Ok(());
    }
    Err(Failure::Input(
        "--one-shot-sms: --reduce-scatter names no one_shot, which it would bound; leave one of them out"
            .to_owned(),
    ))
}

impl Part {
    /// Finds the part from options and environment.
    ///
    /// # Errors
    /// Options that do not go together, fewer GPUs than ranks, an environment that is not whole.
    pub(super) fn find(place: &Place) -> Result<Part, Failure> {
        match place.device {
            DeviceName::Host if place.launch.is_some() => Err(Failure::Input(
                "--launch starts processes for GPUs: add --device cuda, or use --ranks, whose ranks are threads"
                    .to_owned(),
            )),
            DeviceName::Host if place.one_shot_sms.is_some() => Err(Failure::Input(
                "--one-shot-sms counts multiprocessors of a GPU: add --device cuda, or leave it out".to_owned(),
            )),
            DeviceName::Host => Ok(Part::Host),
            DeviceName::Cuda => Part::on_gpus(place),
        }
    }

    fn on_gpus(place: &Place) -> Result<Part, Failure> {
        let started = launch::is_rank()?;
        if let (Some(ranks), false) = (place.launch, started) {
            let visible = gpus().map_err(opening)?.len();
            let share = place.share_gpus && ranks as usize > visible;
            if ranks == 0 || visible == 0 || ranks as usize > visible && !share {
                return Err(Failure::Input(format!(
                    "--launch {ranks}: {visible} GPUs are visible (`nvidia-smi`, CUDA_VISIBLE_DEVICES) and each rank \
                     needs one; use 1 to {visible}, or --share-gpus to try a job with fewer GPUs"
                )));
            }
            if share && ranks > SHARING {
                return Err(Failure::Input(format!(
                    "--launch {ranks} --share-gpus: at most {SHARING} ranks, since they take turns"
                )));
            }
            ready(ranks).map_err(opening)?;
            return Ok(Part::Launch(Launch { ranks, share }));
        }
        let job = Job::from_env().map_err(|error| Failure::Input(error.to_string()))?;
        let ready = ready(job.world).map_err(opening);
        let part = Part::Rank(job);
        part.or_tell(place, ready)?;
        Ok(part)
    }

    /// What this process has prepared before it has a GPU. If it could not, the other ranks are told why: some may be waiting
    /// for this one already.
    ///
    /// # Errors
    /// The given one.
    pub(super) fn or_tell<T>(&self, place: &Place, prepared: Result<T, Failure>) -> Result<T, Failure> {
        prepared.inspect_err(|failure| {
            if let Part::Rank(job) = self {
                CudaDevice::decline(job, Duration::from_secs(place.timeout.into()), &failure.to_string());
            }
        })
    }

    /// Ranks of the job: what `--ranks` says, which on GPUs can only repeat what was started.
    ///
    /// # Errors
    /// That it says something else.
    pub(super) fn ranks(&self, asked: Option<u32>, host: u32) -> Result<u32, Failure> {
        let ranks = match self {
            Part::Host => return Ok(asked.unwrap_or(host)),
            Part::Launch(launch) => launch.ranks,
            Part::Rank(job) => job.world,
        };
        match asked {
            Some(asked) if asked != ranks => Err(Failure::Input(format!(
                "--ranks {asked}: the job has {ranks}; leave --ranks out, or start as many (--launch, torchrun)"
            ))),
            _ => Ok(ranks),
        }
    }
}

/// Opens the GPU of a rank and runs on it. The other ranks are told why it failed, so that none waits for this one.
///
/// # Errors
/// That there is no GPU, that the ranks could not meet, and those of `run`.
pub(super) fn on_gpu<T>(
    place: &Place,
    job: &Job,
    spans: bool,
    run: impl FnOnce(&CudaDevice) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let device = open(place, job, spans)?;
    run(&device).inspect_err(|failure| device.fail(&failure.to_string()))
}

fn open(place: &Place, job: &Job, spans: bool) -> Result<CudaDevice, Failure> {
    let options = DeviceOptions {
        deadline: Duration::from_secs(place.timeout.into()),
        spans,
        allow_plain: place.allow_plain,
        one_shot: OneShotOptions { budget: place.sms().and_then(Sms::budget), ..OneShotOptions::default() },
        ..DeviceOptions::default()
    };
    CudaDevice::open(job, options).map_err(opening)
}

/// Whose fault an error of opening a GPU is.
fn opening(error: DeviceError) -> Failure {
    match error {
        DeviceError::LibraryMissing { .. } | DeviceError::TooOld { .. } | DeviceError::NoGpu { .. } => {
            Failure::Input(format!(
                "--device cuda: {error}; `sessile doctor` tells more, --device host needs no GPU"
            ))
        }
        other => running(other),
    }
}

/// An error of a device as the run's.
pub(super) fn running(error: DeviceError) -> Failure {
    Failure::Run(error.to_string())
}
