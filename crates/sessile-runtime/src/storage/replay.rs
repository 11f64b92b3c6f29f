//! Replay: launches in the sealed order, and a safe way back when the order is another one.

use sessile_hal::Device;
use sessile_plan::{LaunchOrder, StepCut};

use super::{Fencing, Runtime, Sealed, cursor::Place};
use crate::RuntimeError;

/// Whether a launch was the next one of the sealed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// It was: the plan's fences order it.
    AsSealed,
    /// It was not: all runner streams were joined first.
    Deviated,
}

impl<D: Device> Sealed<D> {
    /// The place of a launch of this runner now.
    fn place(&self, runner: usize) -> Place {
        let wraps = self.plan.options.step_cut == StepCut::Wrap;
        let runner = u32::try_from(runner).expect("a trace has fewer than 2^32 runners");
        self.cursor.place(&self.trace.steps, wraps, runner)
    }
}

impl<D: Device> Runtime<D> {
    /// Whether launching this runner now would follow the sealed order. If not, what an earlier runner prepared for
    /// it (a prefetched weight) is not there.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`], [`RuntimeError::UnknownRunner`].
    pub fn in_order(&self, runner: &str) -> Result<bool, RuntimeError> {
        let Some(sealed) = self.sealed() else {
            return Err(RuntimeError::WrongPhase {
                call: "replay",
                phase: "nothing is sealed",
                remedy: "discover every runner once, then seal",
            });
        };
        Ok(sealed.place(sealed.runner(runner)?).in_order)
    }

    /// Launches a runner's graph. The main stream then waits for its completion point alone: its reduce-scatters run
    /// on. Does not block the host. Every rank must launch the same runners in the same order.
    ///
    /// # Errors
    /// [`RuntimeError::NotCaptured`], [`RuntimeError::StaleArena`], [`RuntimeError::WrongPhase`],
    /// [`RuntimeError::UnknownRunner`], and those of the device.
    pub fn replay(&mut self, runner: &str) -> Result<Order, RuntimeError> {
        self.idle("replay")?;
        let sealed = self.sealed_mut("replay")?;
        let at = sealed.runner(runner)?;
        if sealed.runners[at].graph.is_none() {
            return Err(RuntimeError::NotCaptured { runner: runner.to_owned() });
        }
        if let Some(arena) = sealed.stale_arena(at) {
            let arena = sessile_hal::Memory::label(arena).to_owned();
            return Err(RuntimeError::StaleArena { runner: runner.to_owned(), arena });
        }
        let Place { in_order, begins, after } = sealed.place(at);
        let at_cut = begins && sealed.plan.options.step_cut == StepCut::Barrier;
        if !in_order || at_cut {
            self.join()?;
        }

        let main = self.main.clone();
        let device = self.device.clone();
        let borders = self.fencing == Fencing::Borders;
        let sealed = self.sealed_mut("replay")?;
        let overlapped = sealed.plan.launch_order == LaunchOrder::Overlapped;
        if borders {
            let this = &sealed.runners[at];
            for other in
                this.borders.iter().map(|other| &sealed.runners[*other]).filter(|other| other.in_flight)
            {
                device.wait(&this.stream, &other.end)?;
            }
        }
        let this = &mut sealed.runners[at];
        let graph = this.graph.as_ref().expect("checked above");
        device.record(&main, &this.start)?;
        device.wait(&this.stream, &this.start)?;
        device.launch(graph, &this.stream)?;
        this.in_flight = true;
        if borders {
            device.record(&this.stream, &this.end)?;
        }
        if overlapped && this.completes {
            device.wait(&main, &this.completion)?;
        } else {
            device.record(&this.stream, &this.end)?;
            device.wait(&main, &this.end)?;
            this.in_flight = false;
        }
        // Only now: a launch that failed before leaves the sealed order where it was.
        sealed.cursor = after;
        self.counters.replays += 1;
        self.counters.order_deviations += u64::from(!in_order);
        Ok(if in_order { Order::AsSealed } else { Order::Deviated })
    }

    /// Makes the main stream wait for everything that launched runners still have in flight. Call it before anything
    /// outside the plan reads what they write, as the optimizer does. Does not block the host.
    ///
    /// # Errors
    /// Those of the device.
    pub fn join(&mut self) -> Result<(), RuntimeError> {
        let main = self.main.clone();
        let device = self.device.clone();
        let Some(sealed) = (match &mut self.phase {
            super::Phase::Sealed(sealed) => Some(sealed),
            super::Phase::Open => None,
        }) else {
            return Ok(());
        };
        let mut joined = false;
        for runner in sealed.runners.iter_mut().filter(|runner| runner.in_flight) {
            device.record(&runner.stream, &runner.end)?;
            device.wait(&main, &runner.end)?;
            runner.in_flight = false;
            joined = true;
        }
        self.counters.joins += u64::from(joined);
        Ok(())
    }
}
