//! What a device can run into.

use std::time::Duration;

use sessile_plan::DType;

use crate::MemoryId;

/// An error of a device or of a peer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Not enough memory now; permanent while nothing is freed.
    #[error(
        "rank {rank}: no memory for `{label}`: {requested} bytes asked for, {free} free: free memory of its device, or ask for less"
    )]
    OutOfMemory {
        /// Where.
        rank: u32,
        /// For what.
        label: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes left.
        free: u64,
    },
    /// A view would leave its memory.
    #[error(
        "{dtype}[{elements}] from {offset} does not fit `{label}` ({memory}, {available} bytes), or is not \
         aligned to its element size"
    )]
    OutOfRange {
        /// The allocation.
        memory: MemoryId,
        /// Its name.
        label: String,
        /// Where the view would begin.
        offset: u64,
        /// Its length.
        elements: u64,
        /// Its element type.
        dtype: DType,
        /// Bytes that exist.
        available: u64,
    },
    /// Operands do not fit the kernel or collective.
    #[error("{kernel}: operands {given:?} do not fit; expected {expected}")]
    Operands {
        /// The kernel or collective.
        kernel: &'static str,
        /// What it needs.
        expected: String,
        /// What it got.
        given: Vec<(DType, u64)>,
    },
    /// Registered memory must begin at a stricter alignment.
    #[error("window of `{label}`: base must be a multiple of {needed}, is {address:#x}")]
    WindowAlignment {
        /// The allocation.
        label: String,
        /// Its address.
        address: u64,
        /// What the device needs.
        needed: u64,
    },
    /// The memory was allocated for another domain.
    #[error("`{label}` belongs to {domain}, not to group `{group}`: allocate it from symmetric({group})")]
    WrongDomain {
        /// The allocation.
        label: String,
        /// Where it came from.
        domain: String,
        /// The group that was to use it.
        group: String,
    },
    /// A view that must lie in a window of the communicator does not.
    #[error(
        "{kernel}: `{label}` is not registered with group `{group}`: allocate it from symmetric({group}) and register \
         it before the capture"
    )]
    NotRegistered {
        /// The collective.
        kernel: &'static str,
        /// The allocation.
        label: String,
        /// The group of the communicator.
        group: String,
    },
    /// The communicator was given up.
    #[error("rank {rank}: group `{group}` was aborted by rank {by}: make a new communicator")]
    Aborted {
        /// Who was told.
        rank: u32,
        /// The group.
        group: String,
        /// Who aborted.
        by: u32,
    },
    /// The call is not allowed while capturing.
    #[error("{call} is not allowed in capture (stream `{stream}`): do it before the capture begins")]
    ForbiddenInCapture {
        /// The call.
        call: &'static str,
        /// The capturing stream.
        stream: String,
    },
    /// The stream captures already.
    #[error("stream `{stream}` is capturing already: end or abort that capture first")]
    AlreadyCapturing {
        /// The stream.
        stream: String,
    },
    /// No capture began on the stream.
    #[error("no capture began on stream `{stream}`")]
    NotCapturing {
        /// The stream.
        stream: String,
    },
    /// A stream joined the capture and was not waited for.
    #[error(
        "stream `{joined}` joined the capture of `{origin}` and was not joined back: wait for its last event"
    )]
    CaptureUnjoined {
        /// The stream the capture began on.
        origin: String,
        /// The stream left over.
        joined: String,
    },
    /// A capture waited for an internal event from outside.
    #[error(
        "stream `{stream}` waits in capture for an internal event recorded outside it: use an external event"
    )]
    CaptureIsolation {
        /// The capturing stream.
        stream: String,
    },
    /// The capture was broken by an earlier error.
    #[error("the capture of stream `{stream}` was broken by an earlier error: abort it")]
    CaptureInvalid {
        /// The stream.
        stream: String,
    },
    /// A group's ranks are wrong.
    #[error("group `{name}` of ranks {ranks:?}: {why}")]
    BadGroup {
        /// The group.
        name: String,
        /// Its ranks.
        ranks: Vec<u32>,
        /// What is wrong.
        why: &'static str,
    },
    /// A peer did not come in time.
    #[error(
        "rank {rank} waited {after:?} for rank {missing} in {what}: it is gone, stuck, or took another path"
    )]
    PeerTimeout {
        /// Who waited.
        rank: u32,
        /// Who did not come.
        missing: u32,
        /// For what.
        what: String,
        /// How long.
        after: Duration,
    },
    /// What the members of a group gave to one exchange of their hosts is too long.
    #[error(
        "rank {rank}: the members of group `{group}` exchange {bytes} bytes at once, and at most {most} are sent: use \
         smaller groups, or exchange it in parts"
    )]
    ExchangeTooLong {
        /// Who was told; all members are.
        rank: u32,
        /// The group.
        group: String,
        /// Of all members together.
        bytes: u64,
        /// What can be sent.
        most: u64,
    },
    /// A peer has gone.
    #[error("rank {rank}: peer rank {peer} has gone while in {what}")]
    PeerLost {
        /// Who noticed.
        rank: u32,
        /// Who has gone.
        peer: u32,
        /// In what.
        what: String,
    },
    /// A peer could not go on.
    #[error("rank {rank}: rank {peer} could not go on: {why}")]
    PeerFailed {
        /// Who was told.
        rank: u32,
        /// Who could not.
        peer: u32,
        /// What it said.
        why: String,
    },
    /// Ranks met in different collectives.
    #[error("group `{group}`, collective {number}: rank {rank} enqueued {have}, rank {peer} enqueued {want}")]
    CollectiveMismatch {
        /// The group.
        group: String,
        /// Which collective of the group, from 0.
        number: u64,
        /// One rank.
        rank: u32,
        /// What it enqueued.
        have: String,
        /// The other.
        peer: u32,
        /// What that one enqueued.
        want: String,
    },
    /// Nothing can run any more and somebody waits.
    #[error("rank {rank} waits for {what}, and nothing that was enqueued can run")]
    Stalled {
        /// Who waits.
        rank: u32,
        /// For what.
        what: String,
    },
    /// A library of the device's vendor is not there.
    #[error("no {library} ({why}; tried {tried}): it is needed for {enables}. To get it: {remedy}")]
    LibraryMissing {
        /// Its name.
        library: &'static str,
        /// What needs it.
        enables: &'static str,
        /// What was looked for.
        tried: String,
        /// What the loader said.
        why: String,
        /// How to get it.
        remedy: &'static str,
    },
    /// A library or driver is older than what is used here.
    #[error("{what} is version {have}, {need} or newer is needed: {remedy}")]
    TooOld {
        /// What.
        what: &'static str,
        /// Its version, as it counts itself.
        have: i64,
        /// The oldest that will do.
        need: i64,
        /// How to get it.
        remedy: &'static str,
    },
    /// There is no such GPU.
    #[error("no GPU {ordinal} is visible: see `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoGpu {
        /// Its number.
        ordinal: u32,
    },
    /// The ranks could not meet.
    #[error("rank {rank} could not meet the others at {address}: {why}")]
    Rendezvous {
        /// Who tried.
        rank: u32,
        /// Where.
        address: String,
        /// What went wrong.
        why: String,
    },
    /// A kind of collective that the group cannot run.
    #[error("{kernel} can't run in group `{group}`: {why}")]
    Unreachable {
        /// The collective.
        kernel: &'static str,
        /// The group.
        group: String,
        /// Why, and what helps.
        why: &'static str,
    },
    /// A symmetric collective was captured as a kernel that does not use the registration.
    #[error(
        "group `{group}` asked for a symmetric reduce-scatter and NCCL chose {kernel}: ask for `ring`, or allow the \
         plain kernel"
    )]
    PlainKernel {
        /// The group.
        group: String,
        /// What runs instead.
        kernel: String,
    },
    /// A captured graph allocates or frees memory, and would have other addresses at each launch.
    #[error("the captured graph holds a node that allocates or frees memory: allocate before the capture")]
    AllocationInGraph,
    /// A call of the device's driver or library failed.
    #[error("{call} failed: {name} ({code}): {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Its result.
        code: i64,
        /// The result's name.
        name: String,
        /// What it says.
        text: String,
    },
    /// The library that carries a group's collectives could not make its part.
    #[error(
        "rank {rank}: could not make the communicator of group `{group}`: {why}; {free} bytes of the GPU's memory are free: \
         it needs some for each group, so free memory, or make fewer groups; NCCL_DEBUG=WARN says more"
    )]
    Communicator {
        /// Where.
        rank: u32,
        /// The group.
        group: String,
        /// Bytes left.
        free: u64,
        /// What it said.
        why: String,
    },
    /// A handle of another rank or device.
    #[error("{what} belongs to another device")]
    ForeignHandle {
        /// The handle.
        what: String,
    },
}

impl DeviceError {
    /// Whether the call may succeed later without any change by the caller.
    pub fn is_transient(&self) -> bool {
        matches!(self, DeviceError::PeerTimeout { .. })
    }
}
