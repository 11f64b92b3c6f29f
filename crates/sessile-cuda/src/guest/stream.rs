//! Events on the framework's streams, and marks in its captures.

use std::ffi::c_void;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use cudarc::driver::sys;
use sessile_hal::DeviceError;

use super::{Guest, Yard};
use crate::context::{As, RawEvent, RawStream};
use crate::error::cuda;
use crate::exec::RawGraph;

/// A node of a captured graph, and the nodes that must end before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedNode {
    /// Its identity in the graph.
    pub id: u64,
    /// Identities of the nodes before it.
    pub after: Vec<u64>,
}

/// An event. A handle: clones share it; the last one buries it in its guest's yard.
#[derive(Clone)]
pub struct GuestEvent(Arc<EventCell>);

struct EventCell {
    raw: Option<RawEvent>,
    yard: Arc<Yard>,
}

impl Drop for EventCell {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.yard.bury(Box::new(raw));
        }
    }
}

impl GuestEvent {
    pub(super) fn raw(&self) -> Result<&RawEvent, DeviceError> {
        self.0.raw.as_ref().ok_or_else(|| not_capturing("event"))
    }
}

fn not_capturing(what: &str) -> DeviceError {
    DeviceError::NotCapturing { stream: what.to_owned() }
}

/// A capture under way on a stream.
struct Capture {
    graph: sys::CUgraph,
    nodes: *const sys::CUgraphNode,
    count: usize,
}

impl Capture {
    /// # Safety
    /// No call was made on the stream since the capture was asked for.
    unsafe fn frontier(&self) -> &[sys::CUgraphNode] {
        if self.nodes.is_null() {
            return &[];
        }
        // SAFETY: not null, and the driver gave `count` nodes, valid until the next call on the stream, which was not made
        // (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.nodes, self.count) }
    }
}

/// # Safety
/// Live streams and a live event of the current context, outside captures.
pub(super) unsafe fn record_then_wait(
    event: sys::CUevent,
    from: sys::CUstream,
    to: sys::CUstream,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    unsafe { cuda!(cuEventRecord(event, from)) }?;
    // SAFETY: the caller's promise; 0 is the only flag outside captures.
    unsafe { cuda!(cuStreamWaitEvent(to, event, 0)) }
}

impl Guest {
    /// An event without timing.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn event(&self) -> Result<GuestEvent, DeviceError> {
        let raw = Some(RawEvent::new(&self.context)?);
        Ok(GuestEvent(Arc::new(EventCell { raw, yard: self.yard.clone() })))
    }

    /// Whether a stream captures.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn is_capturing(&self, stream: u64) -> Result<bool, DeviceError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.capture(stream) }?.is_some())
    }

    /// Records an event, in a capture as a node that survives it.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU; a graph that is captured owns the event ([`Guest::keep`]).
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn record(&self, event: &GuestEvent, stream: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let how = if unsafe { self.is_capturing(stream) }? { As::Node } else { As::Plain };
        let _entered = self.context.enter()?;
        self.borrow(stream).record(event.raw()?, how)
    }

    /// Waits for the latest record of an event, in a capture as a node that survives it.
    ///
    /// # Safety
    /// As for [`Guest::record`].
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn wait(&self, event: &GuestEvent, stream: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let how = if unsafe { self.is_capturing(stream) }? { As::Node } else { As::Plain };
        let _entered = self.context.enter()?;
        self.borrow(stream).wait(event.raw()?, how)
    }

    /// Where a capture stands on a stream, added to `into`: the nodes that its next node will depend on.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU.
    ///
    /// # Errors
    /// [`DeviceError::NotCapturing`], [`DeviceError::Driver`].
    pub unsafe fn frontier(&self, stream: u64, into: &mut Vec<u64>) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let capture = unsafe { self.capture(stream) }?.ok_or_else(|| not_capturing("of a mark"))?;
        // SAFETY: nothing was called on the stream since.
        into.extend(unsafe { capture.frontier() }.iter().map(|node| *node as u64));
        Ok(())
    }

    /// Outside captures: what is enqueued on `to` from here on waits for what `from` has now.
    ///
    /// # Safety
    /// Both are live streams of this GPU, and neither captures.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn order(&self, event: &GuestEvent, from: u64, to: u64) -> Result<(), DeviceError> {
        self.context.be_current()?;
        let raw = event.raw()?.raw();
        // SAFETY: the streams are alive (the caller's promise), the event is borrowed; all are of the current context.
        unsafe { record_then_wait(raw, from as sys::CUstream, to as sys::CUstream) }
    }

    /// All nodes of the capture that a stream takes part in, so far.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU.
    ///
    /// # Errors
    /// [`DeviceError::NotCapturing`], [`DeviceError::Driver`].
    pub unsafe fn captured(&self, stream: u64) -> Result<Vec<CapturedNode>, DeviceError> {
        // SAFETY: the caller's promise.
        let capture = unsafe { self.capture(stream) }?.ok_or_else(|| not_capturing("of a capture"))?;
        let _entered = self.context.enter()?;
        // The graph is the capture's: never destroyed here.
        let graph = ManuallyDrop::new(RawGraph::new(capture.graph, &self.context));
        let node = |node: crate::exec::RawNode| CapturedNode {
            id: node.id.raw() as u64,
            after: node.after.iter().map(|before| before.raw() as u64).collect(),
        };
        Ok(graph.nodes()?.into_iter().map(node).collect())
    }

    /// Makes the graph that a stream captures, and every executable made of it, own something until it is destroyed. The
    /// driver drops it on a thread of its own, where it must not be called.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU; dropping `kept` calls nothing of CUDA.
    ///
    /// # Errors
    /// [`DeviceError::NotCapturing`], [`DeviceError::Driver`].
    pub unsafe fn keep<T: Send + 'static>(&self, stream: u64, kept: T) -> Result<(), DeviceError> {
        unsafe extern "C" fn destroy<T>(kept: *mut c_void) {
            // SAFETY: `kept` is what `Box::into_raw` gave below; the driver calls this once.
            drop(unsafe { Box::from_raw(kept.cast::<T>()) });
        }
        // SAFETY: the caller's promise.
        let capture = unsafe { self.capture(stream) }?.ok_or_else(|| not_capturing("of a graph"))?;
        let _entered = self.context.enter()?;
        let kept = Box::into_raw(Box::new(kept));
        let mut object = std::ptr::null_mut();
        let flags = sys::CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: `object` lives over the call; the destructor fits the box.
        let made =
            unsafe { cuda!(cuUserObjectCreate(&raw mut object, kept.cast(), Some(destroy::<T>), 1, flags)) };
        if let Err(error) = made {
            // SAFETY: the driver has not taken it, so it is ours alone.
            drop(unsafe { Box::from_raw(kept) });
            return Err(error);
        }
        let moved = sys::CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the graph is under capture, the object was made above; its one reference goes to the graph.
        unsafe { cuda!(cuGraphRetainUserObject(capture.graph, object, 1, moved)) }
    }

    /// A stream of the framework, never destroyed here.
    pub(super) fn borrow(&self, stream: u64) -> ManuallyDrop<RawStream> {
        ManuallyDrop::new(RawStream::of_handle(stream as sys::CUstream, &self.context))
    }

    /// # Safety
    /// `stream` is a live stream of this GPU.
    unsafe fn capture(&self, stream: u64) -> Result<Option<Capture>, DeviceError> {
        // Captures don't forbid this question.
        self.context.be_current()?;
        let mut status = MaybeUninit::<sys::CUstreamCaptureStatus>::zeroed();
        let (mut id, mut graph, mut nodes, mut count) = (0, std::ptr::null_mut(), std::ptr::null(), 0usize);
        let mut data = std::ptr::null();
        // SAFETY: the stream is alive (the caller's promise); all out-parameters are locals that live over the call.
        // With a place for the edge data, edges that carry some are no error.
        unsafe {
            cuda!(cuStreamGetCaptureInfo_v3(
                stream as sys::CUstream,
                status.as_mut_ptr(),
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut data,
                &raw mut count,
            ))
        }?;
        // SAFETY: zeroed (which is the value for none), then written by the call.
        let status = unsafe { status.assume_init() };
        match status {
            sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
                Err(DeviceError::CaptureInvalid { stream: format!("{stream:#x}") })
            }
            sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_ACTIVE => {
                Ok(Some(Capture { graph, nodes, count }))
            }
        }
    }
}
