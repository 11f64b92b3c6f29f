//! Launches of captured runners: their order, and what runs on beside them.

use sessile_hal::DeviceError;
use sessile_runtime::RuntimeError;
use sessile_runtime::log::Lives;
use sessile_runtime::order::Mark;

use super::Core;
use crate::cuda::{Cuda, Launch};
use crate::error::Failure;

impl Core {
    pub(super) fn count_event_nodes(&self, runner: usize) -> (usize, usize) {
        let (Some(sealed), Some(cuda)) = (&self.sealed, &self.cuda) else { return (0, 0) };
        let Some(known) = sealed.runners.get(runner) else { return (0, 0) };
        let released = known.marks.iter().filter_map(|mark| match mark {
            Mark::Release(id) if known.order.is_some() => Some(*id),
            _ => None,
        });
        let (fences, waits) = cuda.event_nodes(
            released.chain(sealed.unreleased(runner)),
            known.requests.iter().map(|planned| planned.request.id),
        );
        (fences + usize::from(sealed.runs_on(runner)), waits)
    }

    /// Which plan this is, and what launches of a runner need.
    pub(crate) fn launch_of(&self, runner: usize, exec: u64, lane: Option<u64>) -> (u64, Option<Launch>) {
        (self.seals, self.cuda.as_ref().map(|cuda| cuda.launcher(runner, exec, lane)))
    }

    /// The next launch is that of a captured runner of plan number `seal`: counts it, and joins everything first if it is out
    /// of order or begins a step. Refused once a reduction has given up: what it would compute rests on nothing.
    pub(crate) fn next_launch(&mut self, seal: u64, at: usize, main: u64) -> Result<bool, Failure> {
        self.idle("replay")?;
        let wraps = self.options.step_cut == sessile_plan::StepCut::Wrap;
        let Some(sealed) = &mut self.sealed else {
            return Err(Failure::phase(
                "replay",
                "nothing is sealed",
                "discover every runner once, then seal",
            ));
        };
        let Some(runner) = sealed.runners.get(at).filter(|_| seal == self.seals) else {
            return Err(Failure::phase(
                "replay",
                "the runner is of another plan",
                "look it up after the seal",
            ));
        };
        if !runner.captured {
            let runner = sealed.trace.runners[at].name.clone();
            return Err(RuntimeError::NotCaptured { runner }.into());
        }
        if let Some(gave_up) = self.cuda.as_ref().and_then(Cuda::gave_up) {
            return Err(gave_up.into());
        }
        let place = sealed.cursor.place(&sealed.trace.steps, wraps, u32::try_from(at).unwrap_or(u32::MAX));
        sealed.cursor = place.after;
        self.counters.replays += 1;
        self.counters.order_deviations += u64::from(!place.in_order);
        if let Some(cuda) = &mut self.cuda
            && (!place.in_order || (place.begins && !wraps))
        {
            join(cuda, self.log.as_mut(), main)?;
        }
        Ok(place.in_order)
    }

    /// A launch was made, on `main` or on a stream of the runner's own.
    pub(crate) fn log_launch(&mut self, runner: usize, main: u64, lane: Option<u64>) {
        if let Some(log) = &mut self.log {
            log.launched(runner, main, lane);
        }
    }

    pub(crate) fn cuda_mut(&mut self) -> Option<&mut Cuda> {
        self.cuda.as_mut()
    }
}

/// Makes `main` wait for all that runs on.
pub(super) fn join(cuda: &mut Cuda, log: Option<&mut Lives>, main: u64) -> Result<(), DeviceError> {
    let Some(log) = log else { return cuda.join(main) };
    let joined: Vec<(usize, u64)> = cuda.in_flight().collect();
    cuda.join(main)?;
    joined.into_iter().for_each(|(runner, lane)| log.joined(runner, lane, main));
    Ok(())
}
