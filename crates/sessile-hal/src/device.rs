//! The device itself.

use std::fmt;

use sessile_plan::Domain;

use crate::{Collective, Comm, DeviceError, Graph, Memory, Note, Op, Span, Ticket, Transfer, View};

/// Where an event may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventScope {
    /// Between eager streams, or as an edge inside one capture.
    Internal,
    /// Also across graphs: in a capture, record and wait become nodes.
    External,
}

/// What a device needs of its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Alignment of allocation bases, in bytes.
    pub base_align: u64,
    /// Alignment of the base of registered memory, in bytes.
    pub window_align: u64,
}

/// A stream handle.
pub trait Stream: Clone + Send + Sync + fmt::Debug + 'static {
    /// The name it was made under.
    fn label(&self) -> &str;
    /// Identity on its rank.
    fn id(&self) -> u32;
}

/// One rank's device.
///
/// # Life cycle
/// 1. Make streams, events, memory, communicators.
/// 2. Enqueue; record and wait events; capture and launch graphs.
/// 3. Drop handles in any order. What a graph or work in flight still touches lives on until that is gone.
///
/// # Capture
/// [`begin_capture`](Device::begin_capture) puts a stream into capture: enqueues become nodes. Another stream joins
/// the capture when it waits for an internal event recorded on a capturing stream, and must be waited for in turn
/// by the first stream before [`end_capture`](Device::end_capture). Calls that are forbidden in capture (allocation,
/// named waits on a capturing stream, launching, making a communicator) are errors and change nothing.
pub trait Device: Clone + Send + Sync + 'static {
    /// Allocations.
    type Memory: Memory;
    /// Streams.
    type Stream: Stream;
    /// Events.
    type Event: Clone + Send + Sync + fmt::Debug + 'static;
    /// Graphs.
    type Graph: Graph;
    /// Communicators.
    type Comm: Comm;

    /// This rank in the job.
    fn rank(&self) -> u32;

    /// Number of ranks in the job.
    fn world_size(&self) -> u32;

    /// Alignments.
    fn limits(&self) -> Limits;

    /// Bytes that [`alloc`](Device::alloc) takes for so many in this domain.
    fn allocated_bytes(&self, bytes: u64, domain: &Domain) -> u64;

    /// Bytes that can still be allocated, where the device has a memory of its own; `None` where it shares the machine's.
    ///
    /// # Errors
    /// Those of the device.
    fn free_bytes(&self) -> Result<Option<u64>, DeviceError>;

    /// Allocates. The bytes hold no data; the host device fills them with 0xFF (NaN in bf16 and f32).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::ForbiddenInCapture`] while a stream of this rank captures.
    fn alloc(&self, bytes: u64, domain: &Domain, label: &str) -> Result<Self::Memory, DeviceError>;

    /// Registers `memory` as a window with exactly this communicator. Collective; before any capture. A second time with
    /// the same communicator it does nothing.
    ///
    /// # Errors
    /// [`DeviceError::WindowAlignment`], [`DeviceError::WrongDomain`], [`DeviceError::ForbiddenInCapture`] (the capture
    /// stays intact), and those of [`Comm::exchange`].
    fn register_window(&self, comm: &Self::Comm, memory: &Self::Memory) -> Result<(), DeviceError>;

    /// Gives the physical bytes of an allocation back and maps fresh ones at the same address. What was in them, and
    /// every registration, is gone; [`Memory::mapping`] changes, so that whoever relied on the old bytes can tell. The
    /// caller has waited for all work that touches them.
    ///
    /// # Errors
    /// [`DeviceError::ForbiddenInCapture`], [`DeviceError::OutOfMemory`].
    fn remap(&self, memory: &Self::Memory) -> Result<(), DeviceError>;

    /// Makes a stream.
    ///
    /// # Errors
    /// Those of the device.
    fn stream(&self, label: &str) -> Result<Self::Stream, DeviceError>;

    /// Makes an event.
    ///
    /// # Errors
    /// Those of the device.
    fn event(&self, scope: EventScope) -> Result<Self::Event, DeviceError>;

    /// Makes the communicator of `ranks` (world ranks, in group order, this rank among them). Collective over
    /// `ranks`; blocks the host.
    ///
    /// # Errors
    /// [`DeviceError::BadGroup`], [`DeviceError::PeerTimeout`], [`DeviceError::PeerLost`].
    fn communicator(&self, name: &str, ranks: &[u32]) -> Result<Self::Comm, DeviceError>;

    /// Enqueues an operation. Capture: recorded as a node.
    ///
    /// # Errors
    /// [`DeviceError::CaptureInvalid`] if the stream's capture was broken by an earlier error.
    fn enqueue(&self, stream: &Self::Stream, op: Op<Self::Memory>) -> Result<Ticket, DeviceError>;

    /// Enqueues collectives of one kind that travel as one batch: they start and end together, as one piece of work with
    /// one ticket. Views of different transfers may not overlap where one is written. Capture: recorded as a node.
    ///
    /// # Errors
    /// Before anything is enqueued: [`DeviceError::Operands`] if the views' sizes do not fit,
    /// [`DeviceError::NotRegistered`] if a view is not in a window of `comm` where the kind needs it; as
    /// [`Device::enqueue`].
    fn collective_batch(
        &self,
        stream: &Self::Stream,
        comm: &Self::Comm,
        kind: Collective,
        transfers: &[Transfer<Self::Memory>],
    ) -> Result<Ticket, DeviceError>;

    /// Enqueues one collective: a batch of one.
    ///
    /// # Errors
    /// As [`Device::collective_batch`].
    fn collective(
        &self,
        stream: &Self::Stream,
        comm: &Self::Comm,
        kind: Collective,
        send: &View<Self::Memory>,
        recv: &View<Self::Memory>,
    ) -> Result<Ticket, DeviceError> {
        let transfer = Transfer { send: send.clone(), recv: recv.clone() };
        self.collective_batch(stream, comm, kind, &[transfer])
    }

    /// Records an event after all work enqueued on the stream so far. Capture: an edge for internal events, a
    /// record node for external ones.
    ///
    /// # Errors
    /// As [`Device::enqueue`].
    fn record(&self, stream: &Self::Stream, event: &Self::Event) -> Result<Ticket, DeviceError>;

    /// Makes later work of the stream wait for the event's latest record. Capture: an edge for internal events
    /// (which must have been recorded in the same capture), a wait node for external ones.
    ///
    /// # Errors
    /// [`DeviceError::CaptureIsolation`] for an internal event from outside the capture, which breaks the capture; as
    /// [`Device::enqueue`].
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<Ticket, DeviceError>;

    /// Starts capture on a stream.
    ///
    /// # Errors
    /// [`DeviceError::AlreadyCapturing`].
    fn begin_capture(&self, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Ends the capture that began on this stream. The stream and all that joined are back in eager mode, also
    /// if this fails.
    ///
    /// # Errors
    /// [`DeviceError::NotCapturing`], [`DeviceError::CaptureUnjoined`], [`DeviceError::CaptureInvalid`].
    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph, DeviceError>;

    /// Gives the capture up, from any state; harmless when there is none. Nothing that was captured remains.
    fn abort_capture(&self, stream: &Self::Stream);

    /// Whether the stream is part of a capture.
    fn is_capturing(&self, stream: &Self::Stream) -> bool;

    /// Launches a graph after all work enqueued on the stream.
    ///
    /// # Errors
    /// [`DeviceError::ForbiddenInCapture`] on a capturing stream.
    fn launch(&self, graph: &Self::Graph, stream: &Self::Stream) -> Result<Ticket, DeviceError>;

    /// Named wait: until all work enqueued on the stream has ended.
    ///
    /// # Errors
    /// [`DeviceError::PeerTimeout`], [`DeviceError::Stalled`], [`DeviceError::PeerLost`], and what work itself ran into,
    /// told once, at the rank's next named wait whatever its stream.
    fn wait_stream(&self, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Named wait: enqueues nothing, waits for the stream, then copies the view's bytes out.
    ///
    /// # Errors
    /// As [`Device::wait_stream`].
    fn read(&self, stream: &Self::Stream, view: &View<Self::Memory>) -> Result<Vec<u8>, DeviceError>;

    /// Named wait: waits for the stream, then copies bytes into the view.
    ///
    /// # Errors
    /// [`DeviceError::Operands`] if the sizes differ; as [`Device::wait_stream`].
    fn write(
        &self,
        stream: &Self::Stream,
        view: &View<Self::Memory>,
        bytes: &[u8],
    ) -> Result<(), DeviceError>;

    /// Tells a device that keeps a log what happened besides work. Others do nothing.
    fn note(&self, note: Note<'_, Self::Memory, Self::Graph>) {
        let _ = note;
    }

    /// When operations and collectives of this rank ran, since the last call; in order of begin. A collective begins when
    /// the rank's own part is ready.
    fn take_spans(&self) -> Vec<Span>;
}
