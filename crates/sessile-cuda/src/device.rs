//! The device of one rank.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sessile_hal::{
    Collective, Comm, Device, DeviceError, EventScope, Limits, Memory, MemoryId, NodeKind, Op, Span, Stream,
    Ticket, Transfer, View,
};
use sessile_plan::Domain;

use crate::capture::{Capture, WaitIs};
use crate::collective::{self, Work};
use crate::comm::{CommCell, CudaComm};
use crate::context::{As, Context, Priority, RawEvent, RawStream};
use crate::core::{Core, Handle, Parts};
use crate::event::{CudaEvent, EventCell};
use crate::gpu::Gpu;
use crate::graph::{CudaGraph, GraphCell, check_symmetric, describe};
use crate::job::Job;
use crate::kernel::{Launcher, run};
use crate::link::{Answer, Link};
use crate::memory::{Backing, CudaMemory, LARGE, MemoryCell};
use crate::nccl::{self, needs_gate};
use crate::oneshot::OneShotOptions;
use crate::physical::{Mapping, copy_in, copy_out};
use crate::stream::{CudaStream, StreamCell};

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Number among the visible GPUs; by default the job's local rank, modulo their number.
    pub ordinal: Option<u32>,
    /// Longest time of a named wait.
    pub deadline: Duration,
    /// Whether spans are taken. Each operation then has a tiny kernel before and after it, in graphs too.
    pub spans: bool,
    /// Whether a symmetric reduce-scatter may be captured as a kernel that does not use the registration.
    pub allow_plain: bool,
    /// Streams whose labels have these first words get a high priority: what runs on them is small and others wait for it.
    pub urgent: Vec<String>,
    /// How the one-shot reduce-scatter uses the GPU.
    pub one_shot: OneShotOptions,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions {
            ordinal: None,
            deadline: Duration::from_secs(600),
            spans: false,
            allow_plain: false,
            urgent: vec!["gather".to_owned(), "reduce".to_owned()],
            one_shot: OneShotOptions::default(),
        }
    }
}

/// The CUDA device of one rank. A handle: clones share it.
#[derive(Clone)]
pub struct CudaDevice {
    handle: Arc<Handle>,
}

/// How long a rank that will not come looks for rank 0, to say so: about as long as processes of a job start apart, and rank
/// 0 opens its GPU.
const FAREWELL: Duration = Duration::from_secs(10);

fn open_gpu(job: &Job, options: &DeviceOptions) -> Result<Arc<Context>, DeviceError> {
    let visible = u32::try_from(crate::gpu::gpus()?.len()).unwrap_or(u32::MAX);
    if visible == 0 {
        return Err(DeviceError::NoGpu { ordinal: 0 });
    }
    Context::open(options.ordinal.unwrap_or(job.local_rank % visible))
}

impl CudaDevice {
    /// Opens this rank's GPU and meets the other ranks, who are told if it can't be opened.
    ///
    /// # Errors
    /// [`DeviceError::LibraryMissing`], [`DeviceError::TooOld`], [`DeviceError::NoGpu`],
    /// [`DeviceError::Rendezvous`], [`DeviceError::Driver`].
    pub fn open(job: &Job, options: DeviceOptions) -> Result<Self, DeviceError> {
        let context = match open_gpu(job, &options) {
            Ok(context) => context,
            Err(error) => {
                Self::decline(job, options.deadline, &error.to_string());
                return Err(error);
            }
        };
        let link = Link::connect(job, options.deadline)?;
        let core = Core::new(Parts { rank: job.rank, world: job.world, options, context, link })?;
        Ok(CudaDevice { handle: Arc::new(Handle { core }) })
    }

    /// Instead of [`CudaDevice::open`], for a rank that can't even begin, for this reason: the others' waits for it end with
    /// [`DeviceError::PeerFailed`]. It looks a few seconds for those who are not there yet, at most until `deadline`.
    pub fn decline(job: &Job, deadline: Duration, why: &str) {
        if job.world > 1
            && let Ok(link) = Link::connect(job, deadline.min(FAREWELL))
        {
            link.fail(why);
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.core().context.gpu
    }

    /// Free and total bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn free_memory(&self) -> Result<(u64, u64), DeviceError> {
        self.core().context.memory()
    }

    /// This rank can't go on, for this reason: the others' waits for it end with [`DeviceError::PeerFailed`], and when the
    /// device goes it gives its communicators up and waits for nobody. Without it a device that goes waits for the others
    /// to come to an end, too.
    pub fn fail(&self, why: &str) {
        self.core().given_up.store(true, Ordering::SeqCst);
        self.core().link.fail(why);
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    fn own(&self, handle: &Arc<Handle>, what: &dyn fmt::Debug) -> Result<(), DeviceError> {
        if Arc::ptr_eq(&self.handle, handle) {
            return Ok(());
        }
        Err(DeviceError::ForeignHandle { what: format!("{what:?}") })
    }

    fn own_memory(&self, memory: &CudaMemory) -> Result<(), DeviceError> {
        self.own(&memory.0.handle, memory)
    }

    /// Fails while a stream of this rank captures.
    fn forbid_in_capture(&self, call: &'static str) -> Result<(), DeviceError> {
        match &self.core().state().capture {
            None => Ok(()),
            Some(capture) => {
                Err(DeviceError::ForbiddenInCapture { call, stream: capture.origin.label().to_owned() })
            }
        }
    }

    /// Fails if the stream is part of a capture.
    fn forbid_capturing(&self, stream: &CudaStream, call: &'static str) -> Result<(), DeviceError> {
        if self.is_capturing(stream) {
            return Err(DeviceError::ForbiddenInCapture { call, stream: stream.label().to_owned() });
        }
        Ok(())
    }
}

/// Whether an allocation is a mapping of its own and not a block of the pool.
fn is_large(bytes: u64, domain: &Domain) -> bool {
    bytes >= LARGE || matches!(domain, Domain::Symmetric(_))
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Graph = CudaGraph;
    type Comm = CudaComm;

    fn rank(&self) -> u32 {
        self.core().rank
    }

    fn world_size(&self) -> u32 {
        self.core().world
    }

    fn allocated_bytes(&self, bytes: u64, domain: &Domain) -> u64 {
        if is_large(bytes, domain) { bytes.next_multiple_of(self.core().context.granularity) } else { bytes }
    }

    fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        Ok(Some(self.free_memory()?.0))
    }

    fn limits(&self) -> Limits {
        Limits { base_align: 256, window_align: 4096 }
    }

    fn alloc(&self, bytes: u64, domain: &Domain, label: &str) -> Result<CudaMemory, DeviceError> {
        self.forbid_in_capture("alloc")?;
        let core = self.core();
        core.reap();
        let large = is_large(bytes, domain);
        let take = || {
            if large {
                Mapping::alloc(&core.context, bytes).map(Backing::Mapping)
            } else {
                core.pool.alloc(bytes).map(Backing::Block)
            }
        };
        let backing = match take() {
            // What was dropped may still be there; it goes once its work has ended.
            Err(error) if crate::error::is_full(&error) && !core.graveyard.is_empty() => {
                core.reap_all(core.options.deadline);
                take()
            }
            taken => taken,
        };
        let backing = backing.map_err(|error| core.no_memory(error, label, bytes))?;
        let address = match &backing {
            Backing::Block(block) => block.address,
            Backing::Mapping(mapping) => mapping.address,
        };
        let mut state = core.state();
        let id = MemoryId { rank: core.rank, serial: state.memories };
        state.memories += 1;
        drop(state);
        Ok(CudaMemory(Arc::new(MemoryCell {
            handle: self.handle.clone(),
            id,
            bytes,
            domain: domain.clone(),
            label: label.to_owned(),
            address,
            mapping: AtomicU64::new(0),
            parts: Mutex::new(crate::memory::Parts { windows: Vec::new(), backing: Some(backing) }),
        })))
    }

    fn register_window(&self, comm: &CudaComm, memory: &CudaMemory) -> Result<(), DeviceError> {
        self.own(&comm.0.handle, comm)?;
        self.own_memory(memory)?;
        self.forbid_in_capture("register_window")?;
        let cell = &comm.0;
        let wrong = match memory.domain() {
            Domain::Symmetric(name) if *name == cell.name => None,
            domain => Some(DeviceError::WrongDomain {
                label: memory.label().to_owned(),
                domain: domain.to_string(),
                group: cell.name.clone(),
            }),
        };
        // A member that can't register says so, so that no peer waits for it.
        let known = [u8::from(memory.0.window(cell.id).is_some())];
        let mine =
            if wrong.is_some() { Vec::new() } else { [&memory.bytes().to_le_bytes()[..], &known].concat() };
        let all = comm.exchange(&mine)?;
        if let Some(error) = wrong {
            return Err(error);
        }
        if all.iter().any(Vec::is_empty) {
            return Err(self.bad_group(&cell.name, &cell.ranks, "a member could not register its window"));
        }
        if all.iter().any(|other| *other != mine) {
            return Err(self.bad_group(&cell.name, &cell.ranks, "members gave windows of different sizes"));
        }
        if known == [1] {
            return Ok(());
        }
        let window = self.make_window(cell, memory);
        if let Err(error) = &window
            && !matches!(error, DeviceError::Unreachable { .. })
        {
            // Others may be inside NCCL's call, where they would wait for this rank.
            cell.give_up(error);
            return Err(error.clone());
        }
        let all = comm.exchange(&[u8::from(window.is_ok())])?;
        let window = window?;
        if all.iter().any(|ok| *ok != [1]) {
            return Err(self.bad_group(&cell.name, &cell.ranks, "a member could not register its window"));
        }
        memory.0.parts().windows.push(window);
        Ok(())
    }

    fn remap(&self, memory: &CudaMemory) -> Result<(), DeviceError> {
        self.own_memory(memory)?;
        self.forbid_in_capture("remap")?;
        memory.0.remap(self.core())
    }

    fn stream(&self, label: &str) -> Result<CudaStream, DeviceError> {
        let core = self.core();
        let kind = label.split(' ').next().unwrap_or_default();
        let priority = if core.options.urgent.iter().any(|name| name == kind) {
            Priority::High
        } else {
            Priority::Normal
        };
        let raw = Arc::new(RawStream::new(&core.context, priority)?);
        let end = RawEvent::new(&core.context)?;
        core.add_stream(&raw);
        let mut state = core.state();
        let id = state.streams;
        state.streams += 1;
        drop(state);
        let cell = StreamCell { handle: self.handle.clone(), id, label: label.to_owned(), raw, end };
        Ok(CudaStream(Arc::new(cell)))
    }

    fn event(&self, scope: EventScope) -> Result<CudaEvent, DeviceError> {
        let core = self.core();
        let raw = Some(RawEvent::new(&core.context)?);
        let edge = match scope {
            EventScope::Internal => Some(RawEvent::new(&core.context)?),
            EventScope::External => None,
        };
        let mut state = core.state();
        let id = state.events;
        state.events += 1;
        drop(state);
        Ok(CudaEvent(Arc::new(EventCell { handle: self.handle.clone(), id, scope, raw, edge })))
    }

    fn communicator(&self, name: &str, ranks: &[u32]) -> Result<CudaComm, DeviceError> {
        let core = self.core();
        let bad = |why| self.bad_group(name, ranks, why);
        if ranks.iter().any(|rank| *rank >= core.world) {
            return Err(bad("a rank is not in the world"));
        }
        if ranks.iter().enumerate().any(|(at, rank)| ranks[..at].contains(rank)) {
            return Err(bad("a rank is named twice"));
        }
        let member = ranks
            .iter()
            .position(|rank| *rank == core.rank)
            .ok_or_else(|| bad("this rank is not a member"))?;
        self.forbid_in_capture("communicator")?;
        let deadline = core.options.deadline;
        let id = match core.link.join(name, ranks, deadline) {
            Answer::Joined(id) => id,
            Answer::Refused => return Err(bad("the name belongs to a group of other ranks")),
            other => return Err(core.link.unanswered(other, format!("making group `{name}`"), deadline)),
        };
        let made = self.meet(id, name, ranks, u32::try_from(member).unwrap_or(u32::MAX));
        // The others need not wait for a member that can't make its part.
        let cell = made
            .and_then(|made| CommCell::new(&self.handle, made))
            .inspect_err(|error| core.link.abort(id, &error.to_string()))?;
        let cell = Arc::new(cell);
        core.add_comm(&cell);
        Ok(CudaComm(cell))
    }

    fn enqueue(&self, stream: &CudaStream, op: Op<CudaMemory>) -> Result<Ticket, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        op.operands().iter().try_for_each(|operand| self.own_memory(operand.view.memory()))?;
        self.push(stream, NodeKind::Op, |enqueue| {
            enqueue.with_scratch(|core, stream, scratch| {
                let mut launcher = Launcher {
                    modules: &core.modules,
                    products: &core.products,
                    stream,
                    fault: core.fault.address,
                    scratch,
                };
                run(&mut launcher, &op)
            })?;
            enqueue.keep(op);
            Ok(())
        })
    }

    fn collective_batch(
        &self,
        stream: &CudaStream,
        comm: &CudaComm,
        kind: Collective,
        transfers: &[Transfer<CudaMemory>],
    ) -> Result<Ticket, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own(&comm.0.handle, comm)?;
        for Transfer { send, recv } in transfers {
            self.own_memory(send.memory())?;
            self.own_memory(recv.memory())?;
        }
        comm.0.usable()?;
        collective::check(kind, transfers, &comm.0)?;
        let gated =
            kind == Collective::SymmetricReduceScatter && comm.size() > 1 && needs_gate(nccl::version()?);
        let core = self.core();
        comm.0.in_call.store(true, Ordering::SeqCst);
        let pushed = self.push(stream, NodeKind::Collective, |enqueue| {
            enqueue.after_last(comm)?;
            if let Some(gate) = comm.0.gate.as_ref().filter(|_| gated) {
                let how = if enqueue.captures { As::Node } else { As::Plain };
                enqueue.raw().record(gate, how)?;
            }
            enqueue.with_scratch(|core, stream, scratch| {
                Work { modules: &core.modules, stream, scratch }.run(&comm.0, kind, transfers)
            })?;
            enqueue.ends(comm)?;
            enqueue.keep((comm.clone(), transfers.to_vec()));
            Ok(())
        });
        comm.0.in_call.store(false, Ordering::SeqCst);
        if let (Ok(ticket), Collective::SymmetricReduceScatter) = (&pushed, kind)
            && comm.size() > 1
            && !core.options.allow_plain
            && let Some(capture) = core.state().capture.as_mut().filter(|capture| capture.has(stream))
        {
            capture.symmetric.push((*ticket, comm.0.name.clone()));
        }
        // What NCCL says of a communicator that was given up while it waited is not the cause.
        if pushed.is_err() {
            comm.0.usable()?;
        }
        pushed
    }

    fn record(&self, stream: &CudaStream, event: &CudaEvent) -> Result<Ticket, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own(&event.0.handle, event)?;
        let captures = self.is_capturing(stream);
        if captures && event.0.scope == EventScope::External {
            return self.push(stream, NodeKind::Record, |enqueue| {
                event.0.raw.iter().try_for_each(|raw| enqueue.raw().record(raw, As::Node))?;
                enqueue.keep(event.clone());
                Ok(())
            });
        }
        let core = self.core();
        let _entered = core.context.enter()?;
        let mut state = core.state();
        if let Some(capture) = state.capture.as_mut().filter(|_| captures) {
            capture.check(stream)?;
            event.0.edge.iter().try_for_each(|edge| stream.0.raw.record(edge, As::Plain))?;
            capture.record(stream, event);
        } else {
            event.0.raw.iter().try_for_each(|raw| stream.0.raw.record(raw, As::Plain))?;
            if let Some(capture) = &mut state.capture {
                capture.forget(event);
            }
        }
        Ok(state.ticket())
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<Ticket, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own(&event.0.handle, event)?;
        let core = self.core();
        let is = match &mut core.state().capture {
            Some(capture) => capture.wait_is(stream, event)?,
            None => WaitIs::Eager,
        };
        if is == WaitIs::Node {
            return self.push(stream, NodeKind::Wait, |enqueue| {
                event.0.raw.iter().try_for_each(|raw| enqueue.raw().wait(raw, As::Node))?;
                enqueue.keep(event.clone());
                Ok(())
            });
        }
        let _entered = core.context.enter()?;
        let mut state = core.state();
        if is == WaitIs::Edge {
            event.0.edge.iter().try_for_each(|edge| stream.0.raw.wait(edge, As::Plain))?;
            if let Some(capture) = &mut state.capture {
                capture.join(stream, event);
            }
        } else {
            event.0.raw.iter().try_for_each(|raw| stream.0.raw.wait(raw, As::Plain))?;
        }
        Ok(state.ticket())
    }

    fn begin_capture(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.own(&stream.0.handle, stream)?;
        let core = self.core();
        let _entered = core.context.enter()?;
        let mut state = core.state();
        if let Some(running) = &state.capture {
            return Err(DeviceError::AlreadyCapturing { stream: running.origin.label().to_owned() });
        }
        stream.0.raw.begin_capture()?;
        state.capture = Some(Capture::begin(stream));
        Ok(())
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        let core = self.core();
        let _entered = core.context.enter()?;
        let mut state = core.state();
        let Some(capture) = state.capture.take_if(|capture| capture.origin.id() == stream.id()) else {
            return Err(DeviceError::NotCapturing { stream: stream.label().to_owned() });
        };
        let id = state.graphs;
        state.graphs += 1;
        drop(state);
        let joined = capture.joined();
        let ended = stream.0.raw.end_capture();
        let cell = joined.and(ended).and_then(|graph| {
            for (comm, last) in &capture.comms {
                comm.0.tail.iter().try_for_each(|tail| graph.add_record(tail, last).map(drop))?;
            }
            let (nodes, kernels) = describe(&graph, &capture.steps)?;
            check_symmetric(&kernels, &capture.symmetric)?;
            let exec = graph.instantiate()?;
            if let Some(spans) = &core.spans {
                let of = |ticket| nodes.iter().position(|node| node.ticket == Some(ticket));
                let places =
                    capture.steps.iter().map(|step| of(step.ticket).and_then(|at| u32::try_from(at).ok()));
                spans.captured(id, places.collect());
            }
            Ok(GraphCell {
                handle: self.handle.clone(),
                exec: Some(exec),
                nodes,
                kernels,
                comms: capture.comms.into_iter().map(|(comm, _)| comm).collect(),
                id,
                _owned: capture.owned,
            })
        });
        core.reap();
        cell.map(|cell| CudaGraph(Arc::new(cell)))
    }

    fn abort_capture(&self, stream: &CudaStream) {
        if self.own(&stream.0.handle, stream).is_err() {
            return;
        }
        let core = self.core();
        let Ok(_entered) = core.context.enter() else { return };
        let Some(capture) = core.state().capture.take_if(|capture| capture.has(stream)) else { return };
        drop(capture.origin.0.raw.end_capture());
        drop(capture);
        core.reap();
    }

    fn is_capturing(&self, stream: &CudaStream) -> bool {
        self.own(&stream.0.handle, stream).is_ok()
            && self.core().state().capture.as_ref().is_some_and(|capture| capture.has(stream))
    }

    fn launch(&self, graph: &CudaGraph, stream: &CudaStream) -> Result<Ticket, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own(&graph.0.handle, graph)?;
        self.forbid_capturing(stream, "launch")?;
        graph.0.comms.iter().try_for_each(|comm| comm.0.usable())?;
        let core = self.core();
        core.reap_sometimes();
        let _entered = core.context.enter()?;
        let mut state = core.state();
        if let Some(exec) = &graph.0.exec {
            exec.launch(&stream.0.raw)?;
        }
        let ticket = state.ticket();
        if let Some(spans) = &core.spans {
            spans.launched(graph.0.id, ticket);
        }
        Ok(ticket)
    }

    fn wait_stream(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.forbid_capturing(stream, "wait_stream")?;
        self.core().wait_for(&stream.0)
    }

    fn read(&self, stream: &CudaStream, view: &View<CudaMemory>) -> Result<Vec<u8>, DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own_memory(view.memory())?;
        self.forbid_capturing(stream, "read")?;
        self.core().wait_for(&stream.0)?;
        let mut bytes = vec![0; view.range().bytes() as usize];
        if !bytes.is_empty() {
            copy_out(&self.core().pool, &mut bytes, view.address())?;
        }
        Ok(bytes)
    }

    fn write(&self, stream: &CudaStream, view: &View<CudaMemory>, bytes: &[u8]) -> Result<(), DeviceError> {
        self.own(&stream.0.handle, stream)?;
        self.own_memory(view.memory())?;
        if bytes.len() as u64 != view.range().bytes() {
            return Err(DeviceError::Operands {
                kernel: "write",
                expected: format!("{} bytes", view.range().bytes()),
                given: vec![(view.dtype(), bytes.len() as u64 / view.dtype().size())],
            });
        }
        self.forbid_capturing(stream, "write")?;
        self.core().wait_for(&stream.0)?;
        if bytes.is_empty() {
            return Ok(());
        }
        copy_in(&self.core().pool, view.address(), bytes)
    }

    fn take_spans(&self) -> Vec<Span> {
        let core = self.core();
        let spans = core.spans.as_ref().map(|spans| spans.take());
        spans
            .transpose()
            .unwrap_or_else(|error| {
                core.tell_later(error);
                None
            })
            .unwrap_or_default()
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device of rank {}", self.core().rank)
    }
}
