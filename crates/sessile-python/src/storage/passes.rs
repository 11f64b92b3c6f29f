//! Passes over a runner: which call may come when, and the marks that a pass makes.

use sessile_runtime::RuntimeError;
use sessile_runtime::order::{Mark, Order};

use super::{Core, Scope};
use crate::error::Failure;
use crate::sealed::Follow;

impl Core {
    pub(super) fn discover(&mut self, runner: &str, launch: bool, stream: u64) -> Result<(), Failure> {
        self.idle("discover")?;
        self.open("discover")?;
        if !launch && self.discovery.index(runner).is_none() {
            return Err(RuntimeError::UnknownRunner { runner: runner.to_owned() }.into());
        }
        if let Some(cuda) = &mut self.cuda {
            cuda.begin(stream)?;
        }
        self.scope = Scope::Discover(self.discovery.begin(runner, launch));
        Ok(())
    }

    pub(super) fn capture(&mut self, runner: &str, stream: u64) -> Result<(), Failure> {
        let at = self.sealed_runner("capture", runner)?;
        let Some(sealed) = &self.sealed else { return Ok(()) };
        if sealed.runners[at].captured {
            return Err(RuntimeError::CapturedTwice { runner: runner.to_owned() }.into());
        }
        if let Some(cuda) = &mut self.cuda {
            if !cuda.begin(stream)? {
                let remedy = "enter it inside torch.cuda.graph, on the stream that captures";
                return Err(Failure::phase("capture", "the current stream captures nothing", remedy));
            }
            let begun = cuda.own(&sealed.arenas, at, stream);
            begun.and_then(|()| sealed.unproven(at).try_for_each(|id| cuda.wait_for(id, stream)))?;
        }
        self.follow(at, true);
        Ok(())
    }

    pub(super) fn end_pass(&mut self, stream: u64) -> Result<(), Failure> {
        self.released.clear();
        match std::mem::replace(&mut self.scope, Scope::Idle) {
            Scope::Idle => Err(Failure::phase("end", "no runner is active", "begin one first")),
            Scope::Discover(pass) => {
                let order = match &mut self.cuda {
                    Some(cuda) => cuda.proven(&pass.runner, stream)?,
                    None => Some(Order::program(&pass.marks)),
                };
                Ok(self.discovery.end(pass, order)?)
            }
            Scope::Follow(follow) => {
                let Some(sealed) = &mut self.sealed else { return Ok(()) };
                sealed.ended(&follow)?;
                let mut captured = None;
                if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
                    sealed.unreleased(follow.at).try_for_each(|id| cuda.record(id, stream))?;
                    let name = &sealed.trace.runners[follow.at].name;
                    captured = cuda.proven(name, stream)?;
                    sealed.still_proven(follow.at, captured.as_ref())?;
                }
                if let Some(log) = self.log.as_mut().filter(|_| follow.capture)
                    && let Some(order) = captured.as_ref().or(sealed.runners[follow.at].order.as_ref())
                {
                    log.captured(&sealed.trace, &sealed.plan, follow.at, order, &sealed.events);
                }
                sealed.runners[follow.at].captured |= follow.capture;
                Ok(())
            }
        }
    }

    /// Notes a mark in the pass; in a capture or replay it must be the one that the discovery had there.
    pub(super) fn mark(&mut self, mark: Mark, stream: u64) -> Result<(), Failure> {
        match (&mut self.scope, &self.sealed) {
            (Scope::Discover(pass), _) => {
                pass.marks.push(mark);
                if let Some(cuda) = &mut self.cuda {
                    cuda.mark(mark, stream)?;
                }
            }
            (Scope::Follow(follow), Some(sealed)) => {
                sealed.expect(follow, mark)?;
                if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
                    cuda.mark(mark, stream)?;
                    match mark {
                        Mark::Release(id) if sealed.runners[follow.at].order.is_some() => {
                            cuda.record(id, stream)?;
                        }
                        Mark::Complete => cuda.complete(follow.at, stream)?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn idle(&self, call: &'static str) -> Result<(), Failure> {
        match &self.scope {
            Scope::Idle => Ok(()),
            Scope::Discover(_) => Err(Failure::phase(
                call,
                "a runner is being discovered",
                "end the discovery of that runner first",
            )),
            Scope::Follow(follow) if follow.capture => {
                Err(Failure::phase(call, "a runner is being captured", "end or abort the capture first"))
            }
            Scope::Follow(_) => {
                Err(Failure::phase(call, "a runner is being replayed", "end the replay first"))
            }
        }
    }

    pub(super) fn open(&self, call: &'static str) -> Result<(), Failure> {
        match &self.sealed {
            None => Ok(()),
            Some(_) => {
                Err(Failure::phase(call, "a plan is sealed", "free it first; after the seal nothing grows"))
            }
        }
    }

    pub(super) fn sealed_runner(&self, call: &'static str, runner: &str) -> Result<usize, Failure> {
        self.idle(call)?;
        let Some(sealed) = &self.sealed else {
            let remedy = "discover every runner once, then seal";
            return Err(Failure::phase(call, "nothing is sealed", remedy));
        };
        let at = sealed.by_name.get(runner).copied();
        at.ok_or_else(|| RuntimeError::UnknownRunner { runner: runner.to_owned() }.into())
    }

    pub(super) fn follow(&mut self, at: usize, capture: bool) {
        self.released.clear();
        self.scope = Scope::Follow(Follow { at, request: 0, mark: 0, capture });
    }
}
