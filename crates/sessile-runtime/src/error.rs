//! What can go wrong between discovery and release.

use std::fmt;

use serde::{Deserialize, Serialize};
use sessile_hal::DeviceError;
use sessile_plan::{PlanError, TraceError};

use crate::storage::Footprint;

/// The first place where ranks of a group disagree about what they discovered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disagreement {
    /// The group that compared.
    pub group: String,
    /// World rank that differs from the most common plan of the group.
    pub rank: u32,
    /// The first runner that differs.
    pub runner: String,
    /// Index of the first request of that runner that differs.
    pub index: usize,
    /// What most ranks have there.
    pub expected: Option<String>,
    /// What `rank` has there.
    pub found: Option<String>,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |side: &Option<String>| side.clone().unwrap_or_else(|| "nothing".into());
        write!(
            f,
            "ranks of group `{}` discovered different storage: rank {} differs at runner `{}`, request {}: {} where \
             the others have {}; make every rank request the same buffers in the same order, also for an expert \
             without tokens",
            self.group,
            self.rank,
            self.runner,
            self.index,
            text(&self.found),
            text(&self.expected)
        )
    }
}

/// An error of the runtime. Usage errors leave all state as it was.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The first rank could not decide for all.
    #[error("{reason}")]
    Undecided {
        /// Why.
        reason: String,
    },
    /// The device or a peer.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// What was discovered is not a valid trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The strategy cannot lay out what was discovered.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A call came in a phase that does not allow it.
    #[error("{call} is not possible while {phase}: {remedy}")]
    WrongPhase {
        /// The call.
        call: &'static str,
        /// The phase.
        phase: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A runner nobody discovered.
    #[error("runner `{runner}` was not discovered: run it once in discovery before the seal")]
    UnknownRunner {
        /// Its name.
        runner: String,
    },
    /// Replay of a runner that was not captured.
    #[error("runner `{runner}` has no graph: capture it after the seal")]
    NotCaptured {
        /// Its name.
        runner: String,
    },
    /// A runner captured a second time.
    #[error("runner `{runner}` has a graph already: release the plan before capturing again")]
    CapturedTwice {
        /// Its name.
        runner: String,
    },
    /// A runner was discovered twice with different requests.
    #[error(
        "runner `{runner}` was discovered twice with different storage: request {index} was {first}, now {second}; \
         give each micro-batch or shape a runner of its own"
    )]
    DiscoveryDiffers {
        /// Its name.
        runner: String,
        /// The first request that differs.
        index: usize,
        /// What the first discovery had there.
        first: String,
        /// What the second had.
        second: String,
    },
    /// A capture asked for something else than the discovery did.
    #[error(
        "runner `{runner}`, request {index}: capture asks for {found}, discovery recorded {expected}; capture must \
         run the same code on the same shapes as discovery"
    )]
    RequestMismatch {
        /// The runner.
        runner: String,
        /// Which request, from 0.
        index: usize,
        /// What was recorded.
        expected: String,
        /// What is asked for.
        found: String,
    },
    /// A capture asked for more than was discovered.
    #[error(
        "runner `{runner}`, request {index}: capture asks for {found} ({bytes} bytes) beyond the {index} requests of \
         its discovery; the arenas are sealed: discover the runner again with everything it needs"
    )]
    UnplannedRequest {
        /// The runner.
        runner: String,
        /// Which request, from 0.
        index: usize,
        /// What is asked for.
        found: String,
        /// Its size.
        bytes: u64,
    },
    /// A capture ended before asking for everything.
    #[error(
        "runner `{runner}`: capture ended after {consumed} of {planned} requests; {bytes_left} bytes of {domain} \
         {dtype} are left, first {first_left}; capture must run the same code as discovery"
    )]
    Unconsumed {
        /// The runner.
        runner: String,
        /// Requests that were made.
        consumed: usize,
        /// Requests that were planned.
        planned: usize,
        /// Bytes left in the domain and dtype of the first left request.
        bytes_left: u64,
        /// That domain.
        domain: String,
        /// That dtype.
        dtype: String,
        /// The first request left over.
        first_left: String,
    },
    /// A capture used streams, events and releases in another order than the discovery, on which the plan rests.
    #[error(
        "runner `{runner}`, order point {index}: capture has {found} where discovery had {expected}; capture must run \
         the same code as discovery"
    )]
    OrderDiffers {
        /// The runner.
        runner: String,
        /// Which point, from 0.
        index: usize,
        /// What the discovery had there.
        expected: String,
        /// What the capture has.
        found: String,
    },
    /// A buffer of a runner was released where no runner was active.
    #[error("{request} was released outside any runner: release it inside the runner that reads it last")]
    ReleasedOutsideRunner {
        /// The request.
        request: String,
    },
    /// A view of a plan that was given up.
    #[error("{request} belongs to a plan that was given up: drop its views when releasing the plan")]
    StaleSlot {
        /// The request.
        request: String,
    },
    /// Ranks discovered different things.
    #[error("{0}")]
    PlanMismatch(Disagreement),
    /// Ranks seal with different options.
    #[error("rank {rank} seals with {found}, the first rank with {first}: every rank needs the same options")]
    OptionsDiffer {
        /// The first rank that differs.
        rank: u32,
        /// Its options.
        found: String,
        /// Those of the first rank.
        first: String,
    },
    /// The offsets of symmetric views differ between ranks.
    #[error(
        "group `{group}`: symmetric views lie at different offsets on rank {rank}: same trace and options needed"
    )]
    OffsetMismatch {
        /// The group.
        group: String,
        /// The rank that differs.
        rank: u32,
    },
    /// Eager work asked for registered memory after the seal, and no free buffer was left. Nobody waits for this rank.
    #[error(
        "eager work asks for {bytes} bytes of {domain} after the seal, and none of that size are free: registration is \
         collective and ends with the seal; run the same eager work once before it"
    )]
    PoolSealed {
        /// The domain.
        domain: String,
        /// What was asked for.
        bytes: u64,
    },
    /// Members of a group asked for registered memory of different sizes.
    #[error(
        "group `{group}`: rank {rank} asks for a window of {found} bytes where the others ask for {expected}: every \
         rank must ask for the same registered buffers in the same order"
    )]
    WindowSizes {
        /// The group.
        group: String,
        /// The rank that differs.
        rank: u32,
        /// What it asks for.
        found: u64,
        /// What most members ask for.
        expected: u64,
    },
    /// An arena's bytes were given back and mapped again since the runner was captured.
    #[error(
        "runner `{runner}`: the bytes of {arena} were mapped again since its capture, so its graph is out of date: \
         capture it again"
    )]
    StaleArena {
        /// The runner.
        runner: String,
        /// The arena.
        arena: String,
    },
    /// A rank could not allocate its arenas; all ranks gave theirs back.
    #[error(
        "rank {rank} could not allocate its arenas ({detail}); all ranks gave theirs back and can seal again"
    )]
    PeerAllocFailed {
        /// The rank.
        rank: u32,
        /// What it met.
        detail: String,
    },
    /// The arenas need more than the device has free. Nothing was allocated.
    #[error(
        "rank {rank}: the arenas need {} bytes ({} planned, {} of them registered) and {free} are free: use a smaller \
         depth or graph scope, shard over more ranks, or free memory",
        footprint.allocated, footprint.planned, footprint.registered
    )]
    DoesNotFit {
        /// The rank.
        rank: u32,
        /// What is needed.
        footprint: Footprint,
        /// What is free.
        free: u64,
    },
    /// A rank could not prepare its plan.
    #[error("rank {rank} could not seal: {detail}")]
    PeerFailed {
        /// The rank.
        rank: u32,
        /// What it met.
        detail: String,
    },
    /// A domain's communicator was not given to the runtime.
    #[error("group `{group}` is not known to the runtime: add its communicator before the seal")]
    UnknownGroup {
        /// The group.
        group: String,
    },
}
