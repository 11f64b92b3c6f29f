//! A device that writes the event log of what passes through it.
//!
//! [`Recorded`] stands between the runtime and a device. Every call goes to the device first and is logged only if
//! the device took it, so that the log holds what was enqueued and nothing else. Captured work is remembered by
//! ticket; when the capture ends, the graph is logged **as the device reports it** ([`Graph::nodes`]), so that the
//! checker judges the edges that will run, not those somebody meant to make.
//!
//! The log never has a hole: a pause ends it, and recording again begins a new one ([`Recorded::set_recording`]).

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sessile_hal::{
    Access, Collective, Comm, Device, DeviceError, EventScope, Graph, GraphKernel, GraphNode, Kernel, Limits,
    Memory, NodeKind, Note, NotedView, Op, Span, Stream, Ticket, Transfer, View,
};
use sessile_plan::Domain;

use super::{Entry, LogAccess, LogComm, LogGraph, LogMemory, LogNode, LogView, Mode, RankLog, Work, ZERO};

/// Whether a log is kept at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// From the first call on.
    On,
    /// Never: nothing is remembered, and the log stays empty.
    Off,
}

/// A device that logs. A handle: clones share the log.
pub struct Recorded<D: Device> {
    device: D,
    journal: Journal,
    /// Streams on which a capture began and has not ended.
    origins: Arc<Mutex<HashMap<u32, D::Stream>>>,
}

impl<D: Device> Clone for Recorded<D> {
    fn clone(&self) -> Self {
        Recorded {
            device: self.device.clone(),
            journal: self.journal.clone(),
            origins: Arc::clone(&self.origins),
        }
    }
}

impl<D: Device> fmt::Debug for Recorded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorded").field("rank", &self.device.rank()).finish_non_exhaustive()
    }
}

/// An event with its number in the log.
#[derive(Clone, Debug)]
pub struct RecordedEvent<E> {
    inner: E,
    id: u32,
    scope: EventScope,
}

impl<E> RecordedEvent<E> {
    /// The device's event.
    pub fn inner(&self) -> &E {
        &self.inner
    }
}

/// A graph with its number in the log.
#[derive(Clone, Debug)]
pub struct RecordedGraph<G> {
    inner: G,
    id: u32,
}

impl<G> RecordedGraph<G> {
    /// The device's graph.
    pub fn inner(&self) -> &G {
        &self.inner
    }
}

impl<G: Graph> Graph for RecordedGraph<G> {
    fn nodes(&self) -> Vec<GraphNode> {
        self.inner.nodes()
    }

    fn kernels(&self) -> &[GraphKernel] {
        self.inner.kernels()
    }
}

/// A communicator that logs its exchanges.
#[derive(Clone, Debug)]
pub struct RecordedComm<C> {
    inner: C,
    id: u32,
    journal: Journal,
}

impl<C> RecordedComm<C> {
    /// The device's communicator.
    pub fn inner(&self) -> &C {
        &self.inner
    }
}

impl<C: Comm> Comm for RecordedComm<C> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn ranks(&self) -> &[u32] {
        self.inner.ranks()
    }

    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let answers = self.inner.exchange(payload)?;
        self.journal.entry(|_| Entry::Exchange { comm: self.id });
        Ok(answers)
    }

    fn usable(&self) -> Result<(), DeviceError> {
        self.inner.usable()
    }

    fn abort(&self) {
        self.inner.abort();
    }
}

impl<D: Device> Recorded<D> {
    /// Wraps a device. Streams, communicators and memory made before are not in the log.
    pub fn new(device: D, level: LogLevel) -> Self {
        let rank = device.rank();
        Recorded { device, journal: Journal::new(rank, level), origins: Arc::default() }
    }

    /// The device.
    pub fn inner(&self) -> &D {
        &self.device
    }

    /// The log so far. Recording goes on.
    pub fn take_log(&self) -> RankLog {
        self.journal.lock().rank.clone()
    }

    /// Pauses or resumes the log.
    ///
    /// While paused, no call adds an entry; what is allocated, captured or grouped is still listed, so that later
    /// entries can name it. Resuming **drops the entries from before the pause**: a log with a hole could show an
    /// order that never was (a wait would seem to see an older record than it saw). Resume where all ranks have
    /// just met, since the checker numbers collectives from there. Without effect under [`LogLevel::Off`].
    pub fn set_recording(&self, on: bool) {
        let mut log = self.journal.lock();
        if on && !log.recording {
            log.rank.entries = Vec::new();
        }
        log.recording = on && log.level == LogLevel::On;
    }

    /// Logs work that the device took: an entry, or, on a capturing stream, a node by ticket.
    fn work(&self, stream: &D::Stream, ticket: Ticket, work: impl FnOnce() -> LogNode) {
        let captured = self.device.is_capturing(stream);
        let mut log = self.journal.lock();
        if captured && log.level == LogLevel::On {
            log.captured.insert(ticket.0, work());
        } else if !captured && log.recording {
            let stream = log.stream(stream);
            let LogNode { work, label, accesses, .. } = work();
            log.rank.entries.push(Entry::Enqueue { ticket: ticket.0, stream, work, label, accesses });
        }
    }

    /// Logs a record or a wait. Inside a capture, internal events are edges, which the device reports itself.
    fn event_work(&self, stream: &D::Stream, scope: EventScope, ticket: Ticket, work: Work) {
        if scope == EventScope::External || !self.device.is_capturing(stream) {
            self.work(stream, ticket, || node(work, "", Vec::new()));
        }
    }

    fn host_wait(&self, stream: &D::Stream, accesses: impl FnOnce() -> Vec<LogAccess>) {
        self.journal.entry(|log| Entry::HostWait { stream: log.stream(stream), accesses: accesses() });
    }

    /// Logs that what was in an allocation's bytes is gone.
    fn fresh(&self, memory: &D::Memory) {
        let id = memory.id();
        let (start, end) = (0, memory.bytes());
        let access = LogAccess { rank: id.rank, memory: id.serial, start, end, mode: Mode::Write };
        self.journal.entry(|_| Entry::Fresh { accesses: vec![access] });
    }

    /// Forgets captured work once no capture is open.
    fn settle(&self) {
        let mut origins = self.origins.lock().unwrap_or_else(PoisonError::into_inner);
        origins.retain(|_, stream| self.device.is_capturing(stream));
        if origins.is_empty() {
            self.journal.lock().captured = HashMap::new();
        }
    }
}

impl<D: Device> Device for Recorded<D> {
    type Memory = D::Memory;
    type Stream = D::Stream;
    type Event = RecordedEvent<D::Event>;
    type Graph = RecordedGraph<D::Graph>;
    type Comm = RecordedComm<D::Comm>;

    fn rank(&self) -> u32 {
        self.device.rank()
    }

    fn world_size(&self) -> u32 {
        self.device.world_size()
    }

    fn allocated_bytes(&self, bytes: u64, domain: &Domain) -> u64 {
        self.device.allocated_bytes(bytes, domain)
    }

    fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        self.device.free_bytes()
    }

    fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn alloc(&self, bytes: u64, domain: &Domain, label: &str) -> Result<D::Memory, DeviceError> {
        let memory = self.device.alloc(bytes, domain, label)?;
        self.journal.lock().memory(&memory);
        self.fresh(&memory);
        Ok(memory)
    }

    fn register_window(&self, comm: &Self::Comm, memory: &D::Memory) -> Result<(), DeviceError> {
        self.device.register_window(&comm.inner, memory)?;
        let serial = memory.id().serial;
        self.journal.entry(|_| Entry::Registered { memory: serial, comm: comm.id });
        Ok(())
    }

    fn remap(&self, memory: &D::Memory) -> Result<(), DeviceError> {
        self.device.remap(memory)?;
        self.fresh(memory);
        Ok(())
    }

    fn note(&self, note: Note<'_, D::Memory, Self::Graph>) {
        let entry = match note {
            Note::Step(name) => Entry::Step { name: name.to_owned() },
            Note::Discovering(runner) => Entry::Discovering { runner: runner.map(str::to_owned) },
            Note::Ready(weight) => Entry::Ready { weight: weight.to_owned() },
            Note::Released => Entry::Released {},
            Note::Sealed(arenas) => {
                let mut log = self.journal.lock();
                for arena in arenas {
                    if let Some(at) = log.memory(arena) {
                        log.rank.memories[at].arena = true;
                    }
                }
                Entry::Sealed { arenas: arenas.iter().map(|arena| arena.id().serial).collect() }
            }
            Note::Accumulator(memory) => {
                let mut log = self.journal.lock();
                if let Some(at) = log.memory(memory) {
                    log.rank.memories[at].accumulator = true;
                }
                return;
            }
            Note::Captured { runner, graph, views } => {
                let mut log = self.journal.lock();
                if let Some(logged) = log.rank.graphs.get_mut(graph.id as usize) {
                    runner.clone_into(&mut logged.runner);
                    logged.views = Some(views.into_iter().map(noted).collect());
                }
                return;
            }
        };
        self.journal.entry(|_| entry);
    }

    fn stream(&self, label: &str) -> Result<D::Stream, DeviceError> {
        let stream = self.device.stream(label)?;
        let mut log = self.journal.lock();
        if log.level == LogLevel::On {
            log.stream(&stream);
        }
        Ok(stream)
    }

    fn event(&self, scope: EventScope) -> Result<Self::Event, DeviceError> {
        let inner = self.device.event(scope)?;
        Ok(RecordedEvent { inner, id: self.journal.lock().fresh_event(), scope })
    }

    fn communicator(&self, name: &str, ranks: &[u32]) -> Result<Self::Comm, DeviceError> {
        let inner = self.device.communicator(name, ranks)?;
        let mut log = self.journal.lock();
        let id = index(log.rank.comms.len());
        if log.level == LogLevel::On {
            let comm = LogComm { name: inner.name().to_owned(), ranks: inner.ranks().to_vec() };
            log.rank.comms.push(comm);
        }
        drop(log);
        self.journal.entry(|_| Entry::Exchange { comm: id });
        Ok(RecordedComm { inner, id, journal: self.journal.clone() })
    }

    fn enqueue(&self, stream: &D::Stream, op: Op<D::Memory>) -> Result<Ticket, DeviceError> {
        if !self.journal.keeps() {
            return self.device.enqueue(stream, op);
        }
        // Zeros have a name of their own: the checker looks for them in padding.
        let kernel = match op.kernel() {
            Kernel::Fill { value } if value.to_bits() == 0 => ZERO,
            kernel => kernel.name(),
        };
        let kernel = kernel.to_owned();
        let label = Arc::clone(op.label());
        let accesses = op.operands().iter().map(|operand| access(&operand.view, operand.access)).collect();
        let ticket = self.device.enqueue(stream, op)?;
        self.work(stream, ticket, || node(Work::Op(kernel), &label, accesses));
        Ok(ticket)
    }

    fn collective_batch(
        &self,
        stream: &D::Stream,
        comm: &Self::Comm,
        kind: Collective,
        transfers: &[Transfer<D::Memory>],
    ) -> Result<Ticket, DeviceError> {
        let ticket = self.device.collective_batch(stream, &comm.inner, kind, transfers)?;
        self.work(stream, ticket, || {
            let work = Work::Collective { comm: comm.id, kind: kind.name().to_owned() };
            let accesses = transfers.iter().flat_map(|Transfer { send, recv }| {
                [access(send, Access::Read), access(recv, kind.recv_access())]
            });
            node(work, kind.name(), accesses.collect())
        });
        Ok(ticket)
    }

    fn record(&self, stream: &D::Stream, event: &Self::Event) -> Result<Ticket, DeviceError> {
        let ticket = self.device.record(stream, &event.inner)?;
        self.event_work(stream, event.scope, ticket, Work::Record(event.id));
        Ok(ticket)
    }

    fn wait(&self, stream: &D::Stream, event: &Self::Event) -> Result<Ticket, DeviceError> {
        // An eager stream that waits for an internal event of a capture joins it: look after the call.
        let ticket = self.device.wait(stream, &event.inner)?;
        self.event_work(stream, event.scope, ticket, Work::Wait(event.id));
        Ok(ticket)
    }

    fn begin_capture(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.device.begin_capture(stream)?;
        let mut origins = self.origins.lock().unwrap_or_else(PoisonError::into_inner);
        origins.insert(stream.id(), stream.clone());
        Ok(())
    }

    fn end_capture(&self, stream: &D::Stream) -> Result<Self::Graph, DeviceError> {
        let ended = self.device.end_capture(stream);
        let graph = ended.map(|inner| {
            let id = self.journal.lock().graph(|| inner.nodes());
            RecordedGraph { inner, id }
        });
        self.settle();
        graph
    }

    fn abort_capture(&self, stream: &D::Stream) {
        self.device.abort_capture(stream);
        self.settle();
    }

    fn is_capturing(&self, stream: &D::Stream) -> bool {
        self.device.is_capturing(stream)
    }

    fn launch(&self, graph: &Self::Graph, stream: &D::Stream) -> Result<Ticket, DeviceError> {
        let ticket = self.device.launch(&graph.inner, stream)?;
        self.journal.entry(|log| Entry::Launch {
            ticket: ticket.0,
            stream: log.stream(stream),
            graph: graph.id,
        });
        Ok(ticket)
    }

    fn wait_stream(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.device.wait_stream(stream)?;
        self.host_wait(stream, Vec::new);
        Ok(())
    }

    fn read(&self, stream: &D::Stream, view: &View<D::Memory>) -> Result<Vec<u8>, DeviceError> {
        let bytes = self.device.read(stream, view)?;
        self.host_wait(stream, || vec![access(view, Access::Read)]);
        Ok(bytes)
    }

    fn write(&self, stream: &D::Stream, view: &View<D::Memory>, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.write(stream, view, bytes)?;
        self.host_wait(stream, || vec![access(view, Access::Write)]);
        Ok(())
    }

    fn take_spans(&self) -> Vec<Span> {
        self.device.take_spans()
    }
}

/// The log under its lock. The lock is never held across a call of the device.
#[derive(Clone)]
struct Journal(Arc<Mutex<State>>);

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Journal")
    }
}

impl Journal {
    fn new(rank: u32, level: LogLevel) -> Self {
        Journal(Arc::new(Mutex::new(State {
            level,
            recording: level == LogLevel::On,
            rank: RankLog { rank, ..RankLog::default() },
            streams: HashMap::new(),
            memories: HashMap::new(),
            captured: HashMap::new(),
            events: 0,
            graphs: 0,
        })))
    }

    /// A panic elsewhere leaves a log that is shorter, never one that is wrong.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keeps(&self) -> bool {
        self.lock().level == LogLevel::On
    }

    fn entry(&self, entry: impl FnOnce(&mut State) -> Entry) {
        let mut log = self.lock();
        if log.recording {
            let entry = entry(&mut log);
            log.rank.entries.push(entry);
        }
    }
}

struct State {
    level: LogLevel,
    recording: bool,
    rank: RankLog,
    /// Place in `rank.streams` by the device's stream id.
    streams: HashMap<u32, u32>,
    /// Place in `rank.memories` by serial.
    memories: HashMap<u64, usize>,
    /// Captured work whose graph is not known yet, by ticket.
    captured: HashMap<u64, LogNode>,
    events: u32,
    graphs: u32,
}

impl State {
    fn stream<S: Stream>(&mut self, stream: &S) -> u32 {
        let streams = &mut self.rank.streams;
        *self.streams.entry(stream.id()).or_insert_with(|| {
            streams.push(stream.label().to_owned());
            index(streams.len() - 1)
        })
    }

    /// Place of an allocation of this rank; `None` if no log is kept or the memory is a peer's.
    fn memory<M: Memory>(&mut self, memory: &M) -> Option<usize> {
        let id = memory.id();
        if self.level == LogLevel::Off || id.rank != self.rank.rank {
            return None;
        }
        let memories = &mut self.rank.memories;
        Some(*self.memories.entry(id.serial).or_insert_with(|| {
            memories.push(LogMemory {
                serial: id.serial,
                label: memory.label().to_owned(),
                bytes: memory.bytes(),
                arena: false,
                symmetric: memory.domain() != &Domain::Default,
                accumulator: false,
            });
            memories.len() - 1
        }))
    }

    fn fresh_event(&mut self) -> u32 {
        let id = self.events;
        self.events = self.events.wrapping_add(1);
        id
    }

    fn graph(&mut self, nodes: impl FnOnce() -> Vec<GraphNode>) -> u32 {
        let id = self.graphs;
        self.graphs += 1;
        if self.level == LogLevel::On {
            let nodes = nodes().into_iter().map(|node| self.node(node)).collect();
            self.rank.graphs.push(LogGraph { runner: format!("graph{id}"), views: None, nodes });
        }
        id
    }

    /// What the device holds as a node, with what the enqueue said about it.
    fn node(&mut self, reported: GraphNode) -> LogNode {
        let known = reported.ticket.and_then(|ticket| self.captured.remove(&ticket.0));
        let mut logged = known.unwrap_or_else(|| {
            // The device's own nodes touch no bytes of ours; an event we never saw matches no other.
            let work = match reported.kind {
                NodeKind::Record => Work::Record(self.fresh_event()),
                NodeKind::Wait => Work::Wait(self.fresh_event()),
                NodeKind::Empty => Work::Empty,
                NodeKind::Op | NodeKind::Collective => Work::Op("device".to_owned()),
            };
            node(work, "", Vec::new())
        });
        logged.dependencies = reported.dependencies;
        logged
    }
}

fn noted<M: Memory>(noted: NotedView<M>) -> LogView {
    let range = noted.view.range();
    LogView {
        label: noted.label,
        memory: noted.view.memory().id().serial,
        start: range.start,
        end: range.end,
        logical_end: range.start.saturating_add(noted.logical_bytes).min(range.end),
    }
}

fn node(work: Work, label: &str, accesses: Vec<LogAccess>) -> LogNode {
    LogNode { work, label: label.to_owned(), accesses, dependencies: Vec::new() }
}

fn access<M: Memory>(view: &View<M>, access: Access) -> LogAccess {
    let (id, range) = (view.memory().id(), view.range());
    let mode = match access {
        Access::Read => Mode::Read,
        Access::Write => Mode::Write,
        Access::ReadWrite => Mode::Update,
    };
    LogAccess { rank: id.rank, memory: id.serial, start: range.start, end: range.end, mode }
}

fn index(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
