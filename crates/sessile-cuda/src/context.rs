//! The driver's context of one GPU, and the streams and events that live in it.
//!
//! Each owned type here, in `exec` and in `physical` holds its context and destroys itself when dropped. None of them waits for work: whoever drops
//! one has made sure that nothing in flight touches it ([`crate::graveyard`]).
//!
//! Every call of the driver is made through [`Context::enter`]: it makes the context current and lets the thread make
//! calls that a capture of its own would forbid (Driver API, `cuThreadExchangeStreamCaptureMode`: in relaxed mode "the
//! local thread is not prohibited from potentially unsafe API calls"). What must not happen during a capture is
//! refused by [`crate::device`] before it comes here.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode_enum as Mode};
use sessile_hal::DeviceError;

use crate::error::cuda;
use crate::exec::{NodeId, RawGraph};
use crate::gpu::{Gpu, attribute, gpus, raw_device};

/// The primary context of one GPU.
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    pub(crate) gpu: Gpu,
    /// Lowest and highest priority of streams.
    priorities: (c_int, c_int),
    /// Sizes and addresses of shareable memory are multiples of this.
    pub(crate) granularity: u64,
}

// SAFETY: `raw` is a driver handle; "the driver API is thread-safe" for a context that each thread makes current for
// itself (CUDA C Programming Guide, Driver API, Context), which `enter` does. `device` and `gpu` are plain data.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; no method changes a field.
unsafe impl Sync for Context {}

/// While it lives, the context is current on this thread and the thread's calls are unrestricted by its captures.
pub(crate) struct Entered {
    before: sys::CUstreamCaptureMode,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: `before` holds the mode that the driver gave in `enter`, and lives over the call.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

impl Context {
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, DeviceError> {
        let gpu = gpus()?.into_iter().nth(ordinal as usize).ok_or(DeviceError::NoGpu { ordinal })?;
        let device = raw_device(ordinal.cast_signed())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` lives over the call; `device` came from the driver. Released in `drop`.
        unsafe { cuda!(cuDevicePrimaryCtxRetain(&raw mut raw, device)) }?;
        let mut context = Context { raw, device, gpu, priorities: (0, 0), granularity: 1 };
        let entered = context.enter()?;
        let (mut low, mut high) = (0, 0);
        // SAFETY: both locals live over the call; a context is current (`entered`).
        unsafe { cuda!(cuCtxGetStreamPriorityRange(&raw mut low, &raw mut high)) }?;
        let mut granularity = 0;
        let properties = context.properties()?;
        let recommended = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: both locals live over the call and `properties` is fully initialized.
        unsafe {
            cuda!(cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, recommended))
        }?;
        drop(entered);
        context.priorities = (low, high);
        context.granularity = granularity as u64;
        Ok(Arc::new(context))
    }

    pub(crate) fn enter(&self) -> Result<Entered, DeviceError> {
        // SAFETY: `raw` is retained until `self` is dropped.
        unsafe { cuda!(cuCtxSetCurrent(self.raw)) }?;
        let mut before = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `before` lives over the call, which swaps it with the thread's mode; `Entered` swaps it back.
        unsafe { cuda!(cuThreadExchangeStreamCaptureMode(&raw mut before)) }?;
        Ok(Entered { before })
    }

    /// Makes the context current if it is not, for calls that captures don't forbid: one look at the thread's state where
    /// `enter` makes three calls.
    pub(crate) fn be_current(&self) -> Result<(), DeviceError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` lives over the call.
        unsafe { cuda!(cuCtxGetCurrent(&raw mut current)) }?;
        if current == self.raw {
            return Ok(());
        }
        // SAFETY: `raw` is retained until `self` is dropped.
        unsafe { cuda!(cuCtxSetCurrent(self.raw)) }
    }

    /// Free and total bytes of the GPU's memory.
    pub(crate) fn memory(&self) -> Result<(u64, u64), DeviceError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both locals live over the call; a context is current.
        unsafe { cuda!(cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free as u64, total as u64))
    }

    /// What shareable memory of this GPU is made with.
    pub(crate) fn properties(&self) -> Result<sys::CUmemAllocationProp, DeviceError> {
        use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as RDMA;
        let rdma = u8::from(attribute(self.device, RDMA)? != 0);
        Ok(sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: HANDLE_TYPE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: rdma,
                usage: 0,
                reserved: [0; 4],
            },
        })
    }

    pub(crate) fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device,
        }
    }
}

pub(crate) const HANDLE_TYPE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; all objects of the context hold the `Arc` and are gone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// How soon the work of a stream is taken up when there is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    Normal,
    High,
}

/// A stream of the driver.
pub(crate) struct RawStream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

/// An event of the driver, without timing.
pub(crate) struct RawEvent {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread whose current context is its own, which every method sees to.
unsafe impl Send for RawStream {}
// SAFETY: as for `Send`; the driver locks what calls from several threads share.
unsafe impl Sync for RawStream {}
// SAFETY: as for `RawStream`.
unsafe impl Send for RawEvent {}
// SAFETY: as for `RawStream`.
unsafe impl Sync for RawEvent {}

/// Inside or outside a capture, for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum As {
    /// An ordinary record or wait; in a capture, an edge.
    Plain,
    /// In a capture, a node of its own.
    Node,
}

impl RawStream {
    pub(crate) fn new(context: &Arc<Context>, priority: Priority) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let level = if priority == Priority::High { context.priorities.1 } else { context.priorities.0 };
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` lives over the call; a context is current. Destroyed in `drop`.
        unsafe { cuda!(cuStreamCreateWithPriority(&raw mut raw, flags, level)) }?;
        Ok(RawStream { raw, context: context.clone() })
    }

    /// A stream that somebody else made. Dropping it would destroy it: `crate::guest` never does.
    pub(crate) fn of_handle(raw: sys::CUstream, context: &Arc<Context>) -> Self {
        RawStream { raw, context: context.clone() }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn record(&self, event: &RawEvent, how: As) -> Result<(), DeviceError> {
        let flags =
            if how == As::Node { sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32 } else { 0 };
        // SAFETY: stream and event are alive (borrowed), of one context, which the device has made current.
        unsafe { cuda!(cuEventRecordWithFlags(event.raw, self.raw, flags)) }
    }

    pub(crate) fn wait(&self, event: &RawEvent, how: As) -> Result<(), DeviceError> {
        let flags =
            if how == As::Node { sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_EXTERNAL as u32 } else { 0 };
        // SAFETY: stream and event are alive (borrowed), of one context, which the device has made current.
        unsafe { cuda!(cuStreamWaitEvent(self.raw, event.raw, flags)) }
    }

    pub(crate) fn begin_capture(&self) -> Result<(), DeviceError> {
        let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive (borrowed) and not the legacy stream; the device has made its context current.
        unsafe { cuda!(cuStreamBeginCapture_v2(self.raw, mode)) }
    }

    /// Ends a capture; the graph, or the error that broke it. The stream captures no more in both cases.
    pub(crate) fn end_capture(&self) -> Result<RawGraph, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is alive (borrowed); `raw` lives over the call.
        let ended = unsafe { cuda!(cuStreamEndCapture(self.raw, &raw mut raw)) };
        let graph = RawGraph::new(raw, &self.context);
        ended.map(|()| graph)
    }

    /// The nodes that the stream's next node will depend on.
    pub(crate) fn frontier(&self) -> Result<Vec<NodeId>, DeviceError> {
        let mut status = MaybeUninit::<sys::CUstreamCaptureStatus>::uninit();
        let (mut id, mut graph, mut nodes, mut count) = (0, std::ptr::null_mut(), std::ptr::null(), 0usize);
        let mut data = std::ptr::null();
        // SAFETY: the stream is alive (borrowed); all out-parameters are locals that live over the call. With a place
        // for the edge data, edges that carry some are no error (Driver API, `cuStreamGetCaptureInfo`).
        unsafe {
            cuda!(cuStreamGetCaptureInfo_v3(
                self.raw,
                status.as_mut_ptr(),
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut data,
                &raw mut count,
            ))
        }?;
        if nodes.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: not null, and the driver gave `count` nodes, "valid until the next API call that operates on the
        // stream or until the capture is terminated" (Driver API); they are copied at once.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, count) };
        Ok(nodes.iter().map(|node| NodeId::of(*node)).collect())
    }

    /// Makes the next node of a capturing stream depend on `nodes` too.
    pub(crate) fn depend_on(&self, nodes: &[NodeId]) -> Result<(), DeviceError> {
        let mut nodes: Vec<sys::CUgraphNode> = nodes.iter().map(|node| node.raw()).collect();
        let flags =
            sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_ADD_CAPTURE_DEPENDENCIES as u32;
        // SAFETY: the stream is alive (borrowed) and captures; the nodes are of the same capture (`frontier` of its
        // streams) and live over the call with the length given; no edge data is default edges.
        unsafe {
            cuda!(cuStreamUpdateCaptureDependencies_v2(
                self.raw,
                nodes.as_mut_ptr(),
                std::ptr::null(),
                nodes.len(),
                flags,
            ))
        }
    }

    /// Waits until all work of the stream has ended, however long that takes.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive (borrowed); the device has made its context current.
        unsafe { cuda!(cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created in `new`, destroyed here alone. Work left in it is no error: "resources associated
            // with hStream will be released automatically once the device has completed all work" (Driver API).
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl RawEvent {
    pub(crate) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `raw` lives over the call; a context is current. Destroyed in `drop`.
        unsafe { cuda!(cuEventCreate(&raw mut raw, flags)) }?;
        Ok(RawEvent { raw, context: context.clone() })
    }

    /// Whether the work before the latest record has ended; true if there was none.
    pub(crate) fn is_done(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event is alive (borrowed); the device has made its context current.
        let code = unsafe { sys::cuEventQuery(self.raw) };
        if code == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        crate::error::driver("cuEventQuery", code).map(|()| true)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created in `new`, destroyed here alone; no graph holds it any more, since graphs own their
            // events (`crate::graph`). A record in flight is no error (Driver API, `cuEventDestroy`).
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
