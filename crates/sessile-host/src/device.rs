//! The device of one rank.

use sessile_hal::{
    ByteRange, Collective, Comm, Device, DeviceError, EventScope, Limits, Memory, Op, Span, Stream, Ticket,
    Transfer, View,
};
use sessile_plan::Domain;

use crate::capture::{Capture, WaitIs};
use crate::collective::Call;
use crate::comm::HostComm;
use crate::engine::{Engine, Work};
use crate::event::HostEvent;
use crate::graph::{HostGraph, NodeWork};
use crate::memory::{BASE_ALIGN, HostMemory, Slot};
use crate::stream::HostStream;
use crate::sync::{Arc, MutexGuard, lock};
use crate::waiting::Wait;
use crate::world::{Core, Data, Handle};

/// The CPU device of one rank of a [`World`](crate::World). A handle: clones share it.
#[derive(Clone)]
pub struct HostDevice {
    handle: Arc<Handle>,
    rank: u32,
}

impl HostDevice {
    pub(crate) fn new(handle: Arc<Handle>, rank: u32) -> Self {
        HostDevice { handle, rank }
    }

    fn core(&self) -> &Core {
        &self.handle.core
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        lock(&self.core().engine)
    }

    /// Checks that a handle of world `world` and rank `rank` is ours.
    fn own(&self, world: u64, rank: u32, handle: &dyn std::fmt::Debug) -> Result<(), DeviceError> {
        if world == self.core().id && rank == self.rank {
            return Ok(());
        }
        Err(DeviceError::ForeignHandle { what: format!("{handle:?}") })
    }

    fn own_stream(&self, stream: &HostStream) -> Result<(), DeviceError> {
        self.own(stream.0.world, stream.0.rank, stream)
    }

    fn own_event(&self, event: &HostEvent) -> Result<(), DeviceError> {
        self.own(event.0.world, event.0.rank, event)
    }

    fn own_comm(&self, comm: &HostComm) -> Result<(), DeviceError> {
        let rank = comm.group.ranks.get(comm.member as usize).copied().unwrap_or(u32::MAX);
        self.own(comm.handle.core.id, rank, comm)
    }

    fn own_memory(&self, memory: &HostMemory) -> Result<(), DeviceError> {
        if memory.belongs_to(&self.core().accounts[self.rank as usize]) {
            return Ok(());
        }
        Err(DeviceError::ForeignHandle { what: format!("{memory:?}") })
    }

    /// Enqueues an operation or a collective.
    fn push(&self, stream: &HostStream, work: NodeWork) -> Result<Ticket, DeviceError> {
        let mut engine = self.engine();
        if let Some(capture) = capture_of(&engine, self.rank, stream) {
            capture.check(stream)?;
            let ticket = engine.ticket(self.rank);
            if let Some(capture) = &mut engine.ranks[self.rank as usize].capture {
                capture.push(stream, ticket, work)?;
            }
            return Ok(ticket);
        }
        let ticket = engine.ticket(self.rank);
        engine.spend(self.rank, false);
        let after = [stream.0.tail.get()];
        let task = match &work {
            NodeWork::Op(op) => engine.add(self.rank, ticket, None, Work::Op(op.clone()), &after),
            NodeWork::Collective { group, call } => {
                engine.add_collective(self.rank, ticket, None, (group, call, None), &after)
            }
            NodeWork::Record(_) | NodeWork::Wait(_) => after[0],
        };
        stream.0.tail.set(task);
        self.went_on(engine);
        Ok(ticket)
    }

    /// After an enqueue: wakes workers, and hosts whose waits it ended (by a failure of a group).
    fn went_on(&self, mut engine: MutexGuard<'_, Engine>) {
        engine.settle();
        self.core().poke(&mut engine);
    }

    /// Waits for a stream; the lock is held again afterwards.
    fn wait_for_stream(
        &self,
        stream: &HostStream,
        call: &'static str,
    ) -> Result<MutexGuard<'_, Engine>, DeviceError> {
        self.own_stream(stream)?;
        let engine = self.engine();
        if capture_of(&engine, self.rank, stream).is_some() {
            return Err(forbidden(call, stream));
        }
        let wait = Wait::Task { task: stream.0.tail.get(), stream: stream.label().to_owned() };
        let (engine, outcome) = self.core().block(engine, self.rank, wait);
        outcome.map(|()| engine)
    }
}

/// Bytes of a view that the host is to hold.
fn length(view: &View<HostMemory>) -> Result<usize, DeviceError> {
    usize::try_from(view.range().bytes()).map_err(|_| DeviceError::Operands {
        kernel: "read",
        expected: "a view that fits the host's memory".to_owned(),
        given: vec![(view.dtype(), view.elements())],
    })
}

fn forbidden(call: &'static str, stream: &HostStream) -> DeviceError {
    DeviceError::ForbiddenInCapture { call, stream: stream.label().to_owned() }
}

/// The rank's capture, if the stream is part of it.
fn capture_of<'a>(engine: &'a Engine, rank: u32, stream: &HostStream) -> Option<&'a Capture> {
    engine.ranks[rank as usize].capture.as_ref().filter(|capture| capture.has(stream))
}

impl Device for HostDevice {
    type Memory = HostMemory;
    type Stream = HostStream;
    type Event = HostEvent;
    type Graph = HostGraph;
    type Comm = HostComm;

    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.core().options.ranks
    }

    fn allocated_bytes(&self, bytes: u64, _domain: &Domain) -> u64 {
        bytes
    }

    fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        Ok(self.core().accounts[self.rank as usize].free())
    }

    fn limits(&self) -> Limits {
        Limits { base_align: BASE_ALIGN, window_align: BASE_ALIGN }
    }

    fn alloc(&self, bytes: u64, domain: &Domain, label: &str) -> Result<HostMemory, DeviceError> {
        self.engine().forbid_in_capture(self.rank, "alloc")?;
        let account = &self.core().accounts[self.rank as usize];
        HostMemory::alloc(account, bytes, domain, label, self.core().options.data != Data::Real)
    }

    fn register_window(&self, comm: &HostComm, memory: &HostMemory) -> Result<(), DeviceError> {
        self.own_comm(comm)?;
        self.own_memory(memory)?;
        self.engine().forbid_in_capture(self.rank, "register_window")?;
        let group = &comm.group;
        let wrong = match memory.domain() {
            Domain::Symmetric(name) if *name == group.name => None,
            domain => Some(DeviceError::WrongDomain {
                label: memory.label().to_owned(),
                domain: domain.to_string(),
                group: group.name.clone(),
            }),
        };
        // A member that can't register says so, so that no peer waits for it.
        let mine = if wrong.is_some() { Vec::new() } else { memory.bytes().to_le_bytes().to_vec() };
        let all = comm.exchange(&mine)?;
        if let Some(error) = wrong {
            return Err(error);
        }
        let why = if all.iter().any(Vec::is_empty) {
            "a member could not register its window"
        } else if all.iter().any(|other| *other != mine) {
            "members gave windows of different sizes"
        } else {
            memory.set_window(group.id);
            return Ok(());
        };
        Err(DeviceError::BadGroup { name: group.name.clone(), ranks: group.ranks.clone(), why })
    }

    fn remap(&self, memory: &HostMemory) -> Result<(), DeviceError> {
        self.own_memory(memory)?;
        let engine = self.engine();
        engine.forbid_in_capture(self.rank, "remap")?;
        let all = ByteRange { start: 0, end: memory.bytes() };
        let mut lease = self.core().host_lease(engine, self.rank, memory, all, true)?;
        memory.remap(&mut lease);
        self.core().return_lease(lease);
        Ok(())
    }

    fn stream(&self, label: &str) -> Result<HostStream, DeviceError> {
        let mut engine = self.engine();
        let id = engine.ranks[self.rank as usize].streams;
        engine.ranks[self.rank as usize].streams += 1;
        Ok(HostStream::new(self.core().id, self.rank, id, label))
    }

    fn event(&self, scope: EventScope) -> Result<HostEvent, DeviceError> {
        let mut engine = self.engine();
        let id = engine.ranks[self.rank as usize].events;
        engine.ranks[self.rank as usize].events += 1;
        Ok(HostEvent::new(self.core().id, self.rank, id, scope))
    }

    fn communicator(&self, name: &str, ranks: &[u32]) -> Result<HostComm, DeviceError> {
        let group = self.core().form_group(self.rank, name, ranks)?;
        let member =
            group.member(self.rank).and_then(|member| u32::try_from(member).ok()).unwrap_or(u32::MAX);
        Ok(HostComm { handle: self.handle.clone(), group, member })
    }

    fn enqueue(&self, stream: &HostStream, op: Op<HostMemory>) -> Result<Ticket, DeviceError> {
        self.own_stream(stream)?;
        op.operands().iter().try_for_each(|operand| self.own_memory(operand.view.memory()))?;
        self.push(stream, NodeWork::Op(Arc::new(op)))
    }

    fn collective_batch(
        &self,
        stream: &HostStream,
        comm: &HostComm,
        kind: Collective,
        transfers: &[Transfer<HostMemory>],
    ) -> Result<Ticket, DeviceError> {
        self.own_stream(stream)?;
        self.own_comm(comm)?;
        for Transfer { send, recv } in transfers {
            self.own_memory(send.memory())?;
            self.own_memory(recv.memory())?;
        }
        comm.group.aborted(self.rank)?;
        let call = Arc::new(Call::new(kind, transfers, comm.member, &comm.group)?);
        self.push(stream, NodeWork::Collective { group: comm.group.clone(), call })
    }

    fn record(&self, stream: &HostStream, event: &HostEvent) -> Result<Ticket, DeviceError> {
        self.own_stream(stream)?;
        self.own_event(event)?;
        let mut engine = self.engine();
        let inside = match capture_of(&engine, self.rank, stream) {
            Some(capture) => capture.check(stream).map(|()| true)?,
            None => false,
        };
        let ticket = engine.ticket(self.rank);
        match &mut engine.ranks[self.rank as usize].capture {
            Some(capture) if inside => capture.record(stream, event, ticket)?,
            capture => {
                if let Some(capture) = capture {
                    capture.forget(event);
                }
                event.set_latest(stream.0.tail.get());
            }
        }
        Ok(ticket)
    }

    fn wait(&self, stream: &HostStream, event: &HostEvent) -> Result<Ticket, DeviceError> {
        self.own_stream(stream)?;
        self.own_event(event)?;
        let mut engine = self.engine();
        let next = Ticket(engine.ranks[self.rank as usize].tickets + 1);
        let is = match &mut engine.ranks[self.rank as usize].capture {
            Some(capture) => capture.wait(stream, event, next)?,
            None => WaitIs::Eager,
        };
        let ticket = engine.ticket(self.rank);
        if is == WaitIs::Eager {
            let after = [stream.0.tail.get(), event.latest()];
            let task = engine.add(self.rank, ticket, None, Work::Mark, &after);
            stream.0.tail.set(task);
        }
        Ok(ticket)
    }

    fn begin_capture(&self, stream: &HostStream) -> Result<(), DeviceError> {
        self.own_stream(stream)?;
        let mut engine = self.engine();
        let capture = &mut engine.ranks[self.rank as usize].capture;
        if let Some(running) = capture {
            return Err(DeviceError::AlreadyCapturing { stream: running.origin().label().to_owned() });
        }
        *capture = Some(Capture::begin(stream));
        Ok(())
    }

    fn end_capture(&self, stream: &HostStream) -> Result<HostGraph, DeviceError> {
        self.own_stream(stream)?;
        let mut engine = self.engine();
        let capture = &mut engine.ranks[self.rank as usize].capture;
        match capture.take_if(|capture| capture.origin().id() == stream.id()) {
            None => Err(DeviceError::NotCapturing { stream: stream.label().to_owned() }),
            Some(capture) => Ok(HostGraph::new(self.core().id, self.rank, stream.label(), capture.end()?)),
        }
    }

    fn abort_capture(&self, stream: &HostStream) {
        if self.own_stream(stream).is_ok() {
            let mut engine = self.engine();
            engine.ranks[self.rank as usize].capture.take_if(|capture| capture.has(stream));
        }
    }

    fn is_capturing(&self, stream: &HostStream) -> bool {
        self.own_stream(stream).is_ok() && capture_of(&self.engine(), self.rank, stream).is_some()
    }

    fn launch(&self, graph: &HostGraph, stream: &HostStream) -> Result<Ticket, DeviceError> {
        self.own_stream(stream)?;
        self.own(graph.0.world, graph.0.rank, graph)?;
        let mut engine = self.engine();
        if capture_of(&engine, self.rank, stream).is_some() {
            return Err(forbidden("launch", stream));
        }
        let ticket = engine.ticket(self.rank);
        engine.spend(self.rank, true);
        let end = engine.launch(&graph.0, ticket, stream.0.tail.get());
        stream.0.tail.set(end);
        self.went_on(engine);
        Ok(ticket)
    }

    fn wait_stream(&self, stream: &HostStream) -> Result<(), DeviceError> {
        self.wait_for_stream(stream, "wait_stream").map(drop)
    }

    fn read(&self, stream: &HostStream, view: &View<HostMemory>) -> Result<Vec<u8>, DeviceError> {
        self.own_memory(view.memory())?;
        let engine = self.wait_for_stream(stream, "read")?;
        let mut lease = self.core().host_lease(engine, self.rank, view.memory(), view.range(), false)?;
        let bytes = match lease.slots().pop() {
            _ if self.core().options.data != Data::Real => vec![0; length(view)?],
            Some(Slot::Read(bytes)) => bytes.to_vec(),
            _ => Vec::new(),
        };
        self.core().return_lease(lease);
        Ok(bytes)
    }

    fn write(&self, stream: &HostStream, view: &View<HostMemory>, bytes: &[u8]) -> Result<(), DeviceError> {
        self.own_memory(view.memory())?;
        if bytes.len() as u64 != view.range().bytes() {
            return Err(DeviceError::Operands {
                kernel: "write",
                expected: format!("{} bytes", view.range().bytes()),
                given: vec![(view.dtype(), bytes.len() as u64 / view.dtype().size())],
            });
        }
        let engine = self.wait_for_stream(stream, "write")?;
        let mut lease = self.core().host_lease(engine, self.rank, view.memory(), view.range(), true)?;
        if let (Some(Slot::Write(to)), Data::Real) = (lease.slots().pop(), self.core().options.data) {
            to.copy_from_slice(bytes);
        }
        self.core().return_lease(lease);
        Ok(())
    }

    fn take_spans(&self) -> Vec<Span> {
        let mut spans = std::mem::take(&mut self.engine().ranks[self.rank as usize].spans);
        spans.sort_by_key(|span| (span.begin, span.ticket, span.node));
        spans
    }
}

impl std::fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host device of rank {}", self.rank)
    }
}
