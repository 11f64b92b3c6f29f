//! A device that writes down the calls it gets and can be told to fail one.

use std::sync::{Arc, Mutex, PoisonError};

use sessile_hal::{
    Collective, Comm, Device, DeviceError, EventScope, Limits, Op, Span, Stream, Ticket, Transfer, View,
};
use sessile_host::HostDevice;
use sessile_plan::Domain;

#[derive(Default)]
struct Notes {
    calls: Vec<String>,
    /// The call of this name, after this many of them, fails.
    fail: Option<(&'static str, usize)>,
    /// The call of this name panics.
    panic: Option<&'static str>,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Spy {
    device: HostDevice,
    notes: Arc<Mutex<Notes>>,
}

impl std::fmt::Debug for Spy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "spy on {:?}", self.device)
    }
}

impl Spy {
    pub(crate) fn new(device: HostDevice) -> Self {
        Spy { device, notes: Arc::default() }
    }

    /// The calls since the last time.
    pub(crate) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner).calls)
    }

    /// Makes the next call of this name fail, after `skip` that work.
    pub(crate) fn fail(&self, call: &'static str, skip: usize) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).fail = Some((call, skip));
    }

    /// Makes the next call of this name panic.
    pub(crate) fn panic_in(&self, call: &'static str) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).panic = Some(call);
    }

    fn note(&self, call: &'static str, of: &str) -> Result<(), DeviceError> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.calls.push(format!("{call} {of}"));
        assert_ne!(notes.panic, Some(call), "injected into {call}");
        match &mut notes.fail {
            Some((name, 0)) if *name == call => {
                notes.fail = None;
                Err(DeviceError::Stalled { rank: self.device.rank(), what: format!("injected into {call}") })
            }
            Some((name, skip)) if *name == call => {
                *skip -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Device for Spy {
    type Memory = <HostDevice as Device>::Memory;
    type Stream = <HostDevice as Device>::Stream;
    type Event = <HostDevice as Device>::Event;
    type Graph = <HostDevice as Device>::Graph;
    type Comm = <HostDevice as Device>::Comm;

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

    fn alloc(&self, bytes: u64, domain: &Domain, label: &str) -> Result<Self::Memory, DeviceError> {
        self.note("alloc", label)?;
        self.device.alloc(bytes, domain, label)
    }

    fn register_window(&self, comm: &Self::Comm, memory: &Self::Memory) -> Result<(), DeviceError> {
        self.note("register_window", comm.name())?;
        self.device.register_window(comm, memory)
    }

    fn remap(&self, memory: &Self::Memory) -> Result<(), DeviceError> {
        self.note("remap", sessile_hal::Memory::label(memory))?;
        self.device.remap(memory)
    }

    fn stream(&self, label: &str) -> Result<Self::Stream, DeviceError> {
        self.note("stream", label)?;
        self.device.stream(label)
    }

    fn event(&self, scope: EventScope) -> Result<Self::Event, DeviceError> {
        self.note("event", &format!("{scope:?}"))?;
        self.device.event(scope)
    }

    fn communicator(&self, name: &str, ranks: &[u32]) -> Result<Self::Comm, DeviceError> {
        self.note("communicator", name)?;
        self.device.communicator(name, ranks)
    }

    fn enqueue(&self, stream: &Self::Stream, op: Op<Self::Memory>) -> Result<Ticket, DeviceError> {
        self.note("enqueue", stream.label())?;
        self.device.enqueue(stream, op)
    }

    fn collective_batch(
        &self,
        stream: &Self::Stream,
        comm: &Self::Comm,
        kind: Collective,
        transfers: &[Transfer<Self::Memory>],
    ) -> Result<Ticket, DeviceError> {
        self.note("collective", stream.label())?;
        self.device.collective_batch(stream, comm, kind, transfers)
    }

    fn record(&self, stream: &Self::Stream, event: &Self::Event) -> Result<Ticket, DeviceError> {
        self.note("record", stream.label())?;
        self.device.record(stream, event)
    }

    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<Ticket, DeviceError> {
        self.note("wait", stream.label())?;
        self.device.wait(stream, event)
    }

    fn begin_capture(&self, stream: &Self::Stream) -> Result<(), DeviceError> {
        self.note("begin_capture", stream.label())?;
        self.device.begin_capture(stream)
    }

    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph, DeviceError> {
        self.note("end_capture", stream.label())?;
        self.device.end_capture(stream)
    }

    fn abort_capture(&self, stream: &Self::Stream) {
        // Giving up can't fail.
        let _ = self.note("abort_capture", stream.label());
        self.device.abort_capture(stream);
    }

    fn is_capturing(&self, stream: &Self::Stream) -> bool {
        self.device.is_capturing(stream)
    }

    fn launch(&self, graph: &Self::Graph, stream: &Self::Stream) -> Result<Ticket, DeviceError> {
        self.note("launch", stream.label())?;
        self.device.launch(graph, stream)
    }

    fn wait_stream(&self, stream: &Self::Stream) -> Result<(), DeviceError> {
        self.note("wait_stream", stream.label())?;
        self.device.wait_stream(stream)
    }

    fn read(&self, stream: &Self::Stream, view: &View<Self::Memory>) -> Result<Vec<u8>, DeviceError> {
        self.note("read", stream.label())?;
        self.device.read(stream, view)
    }

    fn write(
        &self,
        stream: &Self::Stream,
        view: &View<Self::Memory>,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        self.note("write", stream.label())?;
        self.device.write(stream, view, bytes)
    }

    fn take_spans(&self) -> Vec<Span> {
        self.device.take_spans()
    }
}
