//! Putting work on a stream, eagerly or into a capture.

use std::sync::{Arc, MutexGuard};

use sessile_hal::{DeviceError, NodeKind, Stream, Ticket};

use crate::comm::CudaComm;
use crate::context::{As, RawStream};
use crate::core::{Core, State};
use crate::device::CudaDevice;
use crate::exec::NodeId;
use crate::spans::{Edge, Subject};
use crate::stream::CudaStream;

impl CudaDevice {
    /// Enqueues work on a stream: notes which nodes it adds if the stream captures, and takes a ticket if it succeeds.
    pub(crate) fn push(
        &self,
        stream: &CudaStream,
        kind: NodeKind,
        work: impl FnOnce(&mut Enqueue<'_>) -> Result<(), DeviceError>,
    ) -> Result<Ticket, DeviceError> {
        let core = self.core();
        let _entered = core.context.enter()?;
        let state = core.state();
        let captures = match &state.capture {
            Some(capture) if capture.has(stream) => capture.check(stream).map(|()| true)?,
            _ => false,
        };
        let before = if captures { stream.0.raw.frontier()? } else { Vec::new() };
        let subject = match &state.capture {
            Some(capture) if captures => Subject::Captured {
                graph: state.graphs,
                step: u32::try_from(capture.steps.len()).unwrap_or(u32::MAX),
            },
            _ => Subject::Eager(Ticket(state.tickets + 1)),
        };
        let stamped = matches!(kind, NodeKind::Op | NodeKind::Collective);
        let stamp = |edge| match &core.spans {
            Some(spans) if stamped => spans.stamp(&core.modules, &stream.0.raw, subject, edge),
            _ => Ok(()),
        };
        let mut enqueue = Enqueue { core, stream, state, captures };
        let done = stamp(Edge::Begin).and_then(|()| work(&mut enqueue)).and_then(|()| stamp(Edge::End));
        let mut state = enqueue.state;
        let ticket = Ticket(state.tickets + 1);
        let done = done.and_then(|()| if captures { stream.0.raw.frontier() } else { Ok(Vec::new()) });
        match (done, &mut state.capture) {
            (Ok(after), Some(capture)) if captures => {
                capture.push(stream, ticket, kind, (before, after));
            }
            (Err(error), Some(capture)) if captures => {
                // Some of its nodes may be there.
                capture.break_it();
                return Err(error);
            }
            (Err(error), _) => return Err(error),
            (Ok(_), _) => {}
        }
        Ok(state.ticket())
    }
}

/// Work that is being put on a stream.
pub(crate) struct Enqueue<'a> {
    core: &'a Core,
    stream: &'a CudaStream,
    state: MutexGuard<'a, State>,
    pub(crate) captures: bool,
}

impl Enqueue<'_> {
    pub(crate) fn raw(&self) -> &RawStream {
        &self.stream.0.raw
    }

    /// What the graph must own, if there is one. Work in flight needs no owner: what is dropped waits for it.
    pub(crate) fn keep(&mut self, what: impl Send + Sync + 'static) {
        if let Some(capture) = self.state.capture.as_mut().filter(|_| self.captures) {
            capture.owned.push(Box::new(what));
        }
    }

    /// Runs `work` with memory for intermediate results: in a capture the graph's own; otherwise the stream's, whose
    /// order keeps its users apart.
    pub(crate) fn with_scratch<T>(
        &mut self,
        work: impl FnOnce(
            &Core,
            &RawStream,
            &mut dyn FnMut(u64) -> Result<u64, DeviceError>,
        ) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut taken = Vec::new();
        let (core, stream) = (self.core, self.stream);
        let mut kept = if self.captures { None } else { self.state.scratch.remove(&stream.id()) };
        let mut scratch = |bytes: u64| {
            // One piece can be the kept one; more pieces of the same work are new.
            if taken.is_empty()
                && let Some((block, _)) = kept.take_if(|(_, have)| *have >= bytes)
            {
                let address = block.address;
                taken.push((block, bytes));
                return Ok(address);
            }
            let block = core.pool.alloc(bytes)?;
            let address = block.address;
            taken.push((block, bytes));
            Ok(address)
        };
        let result = work(core, &stream.0.raw, &mut scratch);
        let mut taken: Vec<_> = taken.into_iter().chain(kept).collect();
        if self.captures {
            for (block, _) in taken {
                self.keep(block);
            }
        } else if !taken.is_empty() {
            taken.sort_by_key(|(_, bytes)| *bytes);
            if let Some(largest) = taken.pop() {
                self.state.scratch.insert(stream.id(), largest);
            }
            for (block, _) in taken {
                core.graveyard.bury(Box::new(block));
            }
        }
        result
    }

    /// Puts a communicator's collectives in order: waits for the one before, whatever stream or graph it is in.
    pub(crate) fn after_last(&mut self, comm: &CudaComm) -> Result<(), DeviceError> {
        let Some(tail) = &comm.0.tail else { return Ok(()) };
        let raw = &self.stream.0.raw;
        let Some(capture) = self.state.capture.as_mut().filter(|_| self.captures) else {
            return raw.wait(tail, As::Plain);
        };
        match capture.comms.iter().find(|(known, _)| Arc::ptr_eq(&known.0, &comm.0)) {
            Some((_, last)) => raw.depend_on(last),
            None => raw.wait(tail, As::Node),
        }
    }

    /// Notes the end of a collective.
    pub(crate) fn ends(&mut self, comm: &CudaComm) -> Result<(), DeviceError> {
        let Some(tail) = &comm.0.tail else { return Ok(()) };
        let raw = &self.stream.0.raw;
        let Some(capture) = self.state.capture.as_mut().filter(|_| self.captures) else {
            return raw.record(tail, As::Plain);
        };
        let last: Vec<NodeId> = raw.frontier()?;
        match capture.comms.iter_mut().find(|(known, _)| Arc::ptr_eq(&known.0, &comm.0)) {
            Some((_, known)) => *known = last,
            None => capture.comms.push((comm.clone(), last)),
        }
        Ok(())
    }
}
