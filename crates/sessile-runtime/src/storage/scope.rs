//! Requests, releases and markers, in eager work, discovery and capture.
//!
//! The same calls serve all three. Eager work and discovery take buffers from the eager pools; discovery also notes
//! what it sees. Capture hands out the planned views, checks each request against the discovery, and puts the fences
//! where buffers are acquired and released.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use sessile_hal::{
    Collective, Comm, Device, DeviceError, EventScope, Memory, Note, Op, Stream, Ticket, Transfer, View,
};
use sessile_plan::{Domain, Fence, PointKind, RequestId, RequestSpec, VIEW_ALIGN};

use super::{Runtime, window_group};
use crate::{
    RuntimeError,
    discovery::Pass,
    pool::{self, Lent},
};

/// What the runtime is doing.
pub(super) enum Scope {
    Idle,
    Discover { runner: String, pass: Pass },
    Capture(Capturing),
}

/// A capture under way.
pub(super) struct Capturing {
    runner: String,
    at: usize,
    /// Requests made so far.
    consumed: usize,
    /// Requests of this runner released so far, for the tail fences.
    released: Vec<RequestId>,
    /// The order points so far, which must be those of the discovery.
    pass: Pass,
}

impl Scope {
    fn pass(&mut self) -> Option<&mut Pass> {
        match self {
            Scope::Idle => None,
            Scope::Discover { pass, .. } | Scope::Capture(Capturing { pass, .. }) => Some(pass),
        }
    }
}

/// A buffer that was asked for. Give it to [`Runtime::release`] after its last reader was enqueued.
///
/// One that is dropped instead (on the way out of a failure, say) goes back to its eager pool behind all work that the
/// runtime enqueued on it; a planned view that is dropped lives to the end of its runner.
#[derive(Debug)]
pub struct Slot<D: Device> {
    view: View<D::Memory>,
    request: Option<RequestId>,
    /// The buffer of an eager pool; `None` for a planned view.
    eager: Option<Lent<D>>,
    /// The seal that a planned view comes from.
    seal: u64,
}

impl<D: Device> Slot<D> {
    /// The bytes.
    pub fn view(&self) -> &View<D::Memory> {
        &self.view
    }

    /// Another handle of a planned view; `None` for an eager buffer, which has one owner.
    pub fn share(&self) -> Option<Self> {
        let share = || Slot { view: self.view.clone(), request: self.request, eager: None, seal: self.seal };
        self.eager.is_none().then(share)
    }

    /// The request, if a runner made it.
    pub fn request(&self) -> Option<RequestId> {
        self.request
    }
}

/// A recorded event inside one execution.
#[derive(Clone, Debug)]
pub struct Marker<D: Device> {
    event: D::Event,
    /// The pass of a discovery or capture that it belongs to, and its number there.
    noted: Option<(u64, u32)>,
}

impl<D: Device> Runtime<D> {
    /// The stream that computes now: the main stream, or inside a capture the runner's own.
    pub fn compute(&self) -> &D::Stream {
        match (&self.scope, self.sealed()) {
            (Scope::Capture(capturing), Some(sealed)) => &sealed.runners[capturing.at].stream,
            _ => &self.main,
        }
    }

    /// The runner being discovered or captured.
    pub fn runner(&self) -> Option<&str> {
        match &self.scope {
            Scope::Idle => None,
            Scope::Discover { runner, .. } => Some(runner),
            Scope::Capture(capturing) => Some(&capturing.runner),
        }
    }

    /// Whether a capture is under way.
    pub fn is_capturing(&self) -> bool {
        matches!(self.scope, Scope::Capture(_))
    }

    /// A buffer whose first write will be enqueued on `stream`.
    ///
    /// *Order*: nothing blocks the host. In capture the fences of the request become wait nodes here.
    ///
    /// # Errors
    /// In capture, before any device call: [`RuntimeError::RequestMismatch`], [`RuntimeError::UnplannedRequest`]; the
    /// capture stays valid. In discovery: [`RuntimeError::DiscoveryDiffers`]. Else those of the device.
    pub fn request(&mut self, stream: &D::Stream, spec: RequestSpec) -> Result<Slot<D>, RuntimeError> {
        if matches!(self.scope, Scope::Capture(_)) {
            return self.planned(stream, &spec);
        }
        let bytes = spec.aligned_bytes().unwrap_or(u64::MAX).max(VIEW_ALIGN);
        let logical = spec.bytes().unwrap_or(u64::MAX);
        let key = (self.device_domain(&spec.domain), bytes);
        let sealed = self.sealed().is_some();
        let window = window_group(&spec.domain).map(|group| self.group(group)).transpose()?.cloned();
        let ticket = pool::Ticket::of(&spec);
        let lent = self.pool.take(&self.device, stream, key, ticket, window.as_ref(), sealed)?;
        let view = View::new(lent.memory(), 0, logical / spec.dtype.size(), spec.dtype)?;
        let request = match &mut self.scope {
            Scope::Discover { runner, pass } => {
                let runner = runner.clone();
                // If it fails, dropping `lent` gives the buffer back.
                Some(self.discovery.request(pass, &runner, stream.id(), spec)?)
            }
            _ => None,
        };
        Ok(Slot { view, request, eager: Some(lent), seal: 0 })
    }

    fn planned(&mut self, stream: &D::Stream, spec: &RequestSpec) -> Result<Slot<D>, RuntimeError> {
        let (Scope::Capture(capturing), super::Phase::Sealed(sealed)) = (&mut self.scope, &self.phase) else {
            return Err(RuntimeError::WrongPhase {
                call: "request",
                phase: "no capture is under way",
                remedy: "capture the runner after the seal",
            });
        };
        let runner = &sealed.trace.runners[capturing.at];
        let index = capturing.consumed;
        let Some(expected) = runner.requests.get(index) else {
            return Err(RuntimeError::UnplannedRequest {
                runner: capturing.runner.clone(),
                index,
                found: spec.to_string(),
                bytes: spec.aligned_bytes().unwrap_or(u64::MAX),
            });
        };
        if &expected.spec != spec {
            return Err(RuntimeError::RequestMismatch {
                runner: capturing.runner.clone(),
                index,
                expected: in_full(&expected.spec, spec),
                found: in_full(spec, &expected.spec),
            });
        }
        let prepared = &sealed.runners[capturing.at];
        for fence in &prepared.waits[index] {
            let event = sealed.fence_events.get(&fence.release);
            if let Some(event) = event.filter(|_| !self.omitted.contains(fence)) {
                self.device.wait(stream, event)?;
            }
        }
        capturing.consumed += 1;
        capturing.pass.point(stream.id(), PointKind::Acquire(expected.id));
        Ok(Slot {
            view: prepared.views[index].clone(),
            request: Some(expected.id),
            eager: None,
            seal: self.seals,
        })
    }

    /// Gives a buffer back. Its last reader was enqueued on `stream`, or on a stream that `stream` waited for.
    ///
    /// *Order*: nothing blocks the host. In capture, if a fence waits for it, its event is recorded here. An eager buffer
    /// that is given back in a capture leaves the pool for good: the graph may use it at every launch.
    ///
    /// # Errors
    /// [`RuntimeError::StaleSlot`] for a view of a plan that was given up;
    /// [`RuntimeError::ReleasedOutsideRunner`] for a runner's request released outside any runner before the seal
    /// (the buffer is given back all the same); else those of the device.
    pub fn release(&mut self, stream: &D::Stream, slot: Slot<D>) -> Result<(), RuntimeError> {
        let mut outcome = Ok(());
        let current = self.sealed().is_some() && slot.seal == self.seals;
        if let (Some(id), None, false) = (slot.request, &slot.eager, current) {
            return Err(RuntimeError::StaleSlot { request: id.to_string() });
        }
        if let Some(id) = slot.request {
            match &mut self.scope {
                Scope::Discover { pass, .. } => pass.point(stream.id(), PointKind::Release(id)),
                Scope::Capture(capturing) if slot.eager.is_none() => {
                    capturing.released.push(id);
                    capturing.pass.point(stream.id(), PointKind::Release(id));
                    self.record_fence(stream, id)?;
                }
                Scope::Capture(_) => {}
                Scope::Idle if slot.eager.is_some() => {
                    outcome = Err(RuntimeError::ReleasedOutsideRunner { request: id.to_string() });
                }
                Scope::Idle => {}
            }
        }
        match slot.eager {
            Some(lent) if self.is_capturing() => self.pool.let_go(lent),
            Some(lent) => self.pool.give_back(&self.device, stream, lent)?,
            None => {}
        }
        outcome
    }

    fn record_fence(&self, stream: &D::Stream, id: RequestId) -> Result<(), DeviceError> {
        let Some(sealed) = self.sealed() else { return Ok(()) };
        let Some(event) = sealed.fence_events.get(&id) else { return Ok(()) };
        let waited = |fence: &Fence| fence.release == id && !self.omitted.contains(fence);
        if self.omitted.is_empty() || sealed.plan.fences.iter().any(waited) {
            self.device.record(stream, event)?;
        }
        Ok(())
    }

    /// Records a new event after everything enqueued on `stream`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn mark(&mut self, stream: &D::Stream) -> Result<Marker<D>, RuntimeError> {
        let event = self.device.event(EventScope::Internal)?;
        self.device.record(stream, &event)?;
        let noted = self.scope.pass().map(|pass| (pass.serial(), pass.record(stream.id())));
        Ok(Marker { event, noted })
    }

    /// Makes later work of `stream` wait for a marker.
    ///
    /// # Errors
    /// Those of the device.
    pub fn wait(&mut self, stream: &D::Stream, marker: &Marker<D>) -> Result<(), RuntimeError> {
        self.device.wait(stream, &marker.event)?;
        if let (Some(pass), Some((serial, number))) = (self.scope.pass(), marker.noted)
            && serial == pass.serial()
        {
            pass.point(stream.id(), PointKind::Wait(number));
        }
        Ok(())
    }

    /// Enqueues an operation.
    ///
    /// # Errors
    /// Those of the device.
    pub fn enqueue(&mut self, stream: &D::Stream, op: Op<D::Memory>) -> Result<Ticket, RuntimeError> {
        let captured = self.is_capturing();
        for operand in op.operands() {
            self.pool.note_use(operand.view.memory(), stream, captured);
        }
        let ticket = self.device.enqueue(stream, op)?;
        if let Some(pass) = self.scope.pass() {
            pass.work(stream.id(), ticket);
        }
        Ok(ticket)
    }

    /// Enqueues a collective of a known group.
    ///
    /// # Errors
    /// [`RuntimeError::UnknownGroup`] and those of the device.
    pub fn collective(
        &mut self,
        stream: &D::Stream,
        group: &str,
        kind: Collective,
        send: &View<D::Memory>,
        recv: &View<D::Memory>,
    ) -> Result<Ticket, RuntimeError> {
        let transfer = Transfer { send: send.clone(), recv: recv.clone() };
        self.collective_batch(stream, group, kind, &[transfer])
    }

    /// Enqueues collectives of a known group that travel as one batch.
    ///
    /// # Errors
    /// Before any call to the device: [`RuntimeError::UnknownGroup`], and [`DeviceError::WrongDomain`] for a view in the
    /// registered memory of another group. Those of the device.
    pub fn collective_batch(
        &mut self,
        stream: &D::Stream,
        group: &str,
        kind: Collective,
        transfers: &[Transfer<D::Memory>],
    ) -> Result<Ticket, RuntimeError> {
        let comm = self.group(group)?;
        for view in transfers.iter().flat_map(|Transfer { send, recv }| [send, recv]) {
            if let Domain::Symmetric(owner) = view.memory().domain()
                && owner != comm.name()
            {
                return Err(DeviceError::WrongDomain {
                    label: view.memory().label().to_owned(),
                    domain: view.memory().domain().to_string(),
                    group: comm.name().to_owned(),
                }
                .into());
            }
        }
        let ticket = self.device.collective_batch(stream, comm, kind, transfers)?;
        let captured = self.is_capturing();
        for view in transfers.iter().flat_map(|Transfer { send, recv }| [send, recv]) {
            self.pool.note_use(view.memory(), stream, captured);
        }
        if let Some(pass) = self.scope.pass() {
            pass.collective(stream.id(), group, ticket);
        }
        Ok(ticket)
    }

    /// Marks the end of stage 1 of the current runner: from here the next one may start. Outside runners it does
    /// nothing.
    ///
    /// # Errors
    /// Those of the device.
    pub fn complete(&mut self) -> Result<(), RuntimeError> {
        let stream = self.compute().clone();
        if let (Scope::Capture(capturing), Some(sealed)) = (&self.scope, self.sealed()) {
            self.device.record(&stream, &sealed.runners[capturing.at].completion)?;
        }
        if let Some(pass) = self.scope.pass() {
            pass.point(stream.id(), PointKind::Complete);
        }
        Ok(())
    }

    fn begin_discover(&mut self, runner: &str) -> Result<(), RuntimeError> {
        self.idle("discover")?;
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "discover",
                phase: "a plan is sealed",
                remedy: "release it before discovering again",
            });
        }
        self.passes += 1;
        let pass = self.discovery.begin(runner, self.main.id(), self.passes);
        self.device.note(Note::Discovering(Some(runner)));
        self.scope = Scope::Discover { runner: runner.to_owned(), pass };
        Ok(())
    }

    fn end_discover(&mut self) -> Result<(), RuntimeError> {
        self.device.note(Note::Discovering(None));
        match std::mem::replace(&mut self.scope, Scope::Idle) {
            Scope::Discover { runner, pass } => self.discovery.end(&runner, pass),
            other => {
                self.scope = other;
                Ok(())
            }
        }
    }

    fn begin_capture(&mut self, runner: &str) -> Result<(), RuntimeError> {
        self.idle("capture")?;
        let sealed = self.sealed_mut("capture")?;
        let at = sealed.runner(runner)?;
        if sealed.runners[at].graph.is_some() && sealed.stale_arena(at).is_none() {
            return Err(RuntimeError::CapturedTwice { runner: runner.to_owned() });
        }
        let stream = sealed.runners[at].stream.clone();
        self.device.begin_capture(&stream)?;
        self.passes += 1;
        let pass = Pass::new(at, stream.id(), self.passes);
        self.scope = Scope::Capture(Capturing {
            runner: runner.to_owned(),
            at,
            consumed: 0,
            released: Vec::new(),
            pass,
        });
        Ok(())
    }

    fn end_capture(&mut self) -> Result<(), RuntimeError> {
        let outcome = self.finish_capture();
        if outcome.is_err() {
            self.abort_scope();
        }
        self.scope = Scope::Idle;
        outcome
    }

    fn finish_capture(&mut self) -> Result<(), RuntimeError> {
        let (Scope::Capture(capturing), Some(sealed)) = (&self.scope, self.sealed()) else { return Ok(()) };
        let runner = &sealed.trace.runners[capturing.at];
        if let Some(left) = runner.requests.get(capturing.consumed) {
            let (domain, dtype) = (&left.spec.domain, left.spec.dtype);
            let bytes_left = runner.requests[capturing.consumed..]
                .iter()
                .filter(|request| request.spec.domain == *domain && request.spec.dtype == dtype)
                .filter_map(|request| request.spec.bytes())
                .sum();
            return Err(RuntimeError::Unconsumed {
                runner: capturing.runner.clone(),
                consumed: capturing.consumed,
                planned: runner.requests.len(),
                bytes_left,
                domain: domain.to_string(),
                dtype: dtype.to_string(),
                first_left: left.spec.to_string(),
            });
        }
        if let Some((index, expected, found)) = capturing.pass.differs(&runner.points) {
            return Err(RuntimeError::OrderDiffers {
                runner: capturing.runner.clone(),
                index,
                expected,
                found,
            });
        }
        // A request without a release point lives to the runner's tail: its fence is recorded there.
        let (at, stream) = (capturing.at, sealed.runners[capturing.at].stream.clone());
        for request in &runner.requests {
            let spans =
                sealed.trace.runners.iter().any(|runner| {
                    runner.points.iter().any(|point| point.kind == PointKind::Release(request.id))
                });
            if !spans && !capturing.released.contains(&request.id) {
                self.record_fence(&stream, request.id)?;
            }
        }
        let graph = self.device.end_capture(&stream)?;
        let note = Note::Captured { runner: &runner.name, graph: &graph, views: sealed.noted_views(at)? };
        self.device.note(note);
        let sealed = self.sealed_mut("capture")?;
        let mappings = sealed.arenas.iter().map(Memory::mapping).collect();
        let runner = &mut sealed.runners[at];
        (runner.graph, runner.mappings) = (Some(graph), mappings);
        Ok(())
    }

    /// Leaves whatever scope is active, from any state. A capture is given up, its request cursor forgotten.
    fn abort_scope(&mut self) {
        if let (Scope::Capture(capturing), Some(sealed)) = (&self.scope, self.sealed()) {
            self.device.abort_capture(&sealed.runners[capturing.at].stream);
        }
        if let Scope::Discover { .. } = self.scope {
            self.device.note(Note::Discovering(None));
        }
        self.scope = Scope::Idle;
    }
}

/// A spec as people read it, or every field of it where that would not tell it from the other.
fn in_full(spec: &RequestSpec, other: &RequestSpec) -> String {
    let text = spec.to_string();
    if text == other.to_string() { format!("{spec:?}") } else { text }
}

/// Something that holds a runtime, so that [`discover`] and [`capture`] can run its code inside a scope.
pub trait HasRuntime<D: Device> {
    /// The runtime.
    fn runtime(&mut self) -> &mut Runtime<D>;
}

impl<D: Device> HasRuntime<D> for Runtime<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        self
    }
}

/// Runs `body` eagerly as one pass over `runner`, noting what it asks for.
///
/// # Errors
/// Those of `body`; [`RuntimeError::WrongPhase`], [`RuntimeError::DiscoveryDiffers`]. The pass is then forgotten.
///
/// # Panics
/// If `body` does; the scope is left first.
pub fn discover<D: Device, H: HasRuntime<D>, E: From<RuntimeError>>(
    holder: &mut H,
    runner: &str,
    body: impl FnOnce(&mut H) -> Result<(), E>,
) -> Result<(), E> {
    holder.runtime().begin_discover(runner)?;
    within(holder, body)?;
    Ok(holder.runtime().end_discover()?)
}

/// Captures `body` as the graph of `runner`. Nothing runs on the device.
///
/// # Errors
/// Those of `body`, of the requests it makes, [`RuntimeError::Unconsumed`] and [`RuntimeError::OrderDiffers`]. The
/// capture is then given up, the streams are back in eager mode, the plan and arenas unchanged, and the runner can be
/// captured again.
///
/// # Panics
/// If `body` does; the capture is given up first.
pub fn capture<D: Device, H: HasRuntime<D>, E: From<RuntimeError>>(
    holder: &mut H,
    runner: &str,
    body: impl FnOnce(&mut H) -> Result<(), E>,
) -> Result<(), E> {
    holder.runtime().begin_capture(runner)?;
    within(holder, body)?;
    Ok(holder.runtime().end_capture()?)
}

fn within<D: Device, H: HasRuntime<D>, E>(
    holder: &mut H,
    body: impl FnOnce(&mut H) -> Result<(), E>,
) -> Result<(), E> {
    // State behind a panic is the holder's affair; the runtime's own is put right here.
    match catch_unwind(AssertUnwindSafe(|| body(holder))) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            holder.runtime().abort_scope();
            Err(error)
        }
        Err(panic) => {
            holder.runtime().abort_scope();
            resume_unwind(panic)
        }
    }
}
