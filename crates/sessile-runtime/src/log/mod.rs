//! The event log: what was enqueued, in program order of each rank, with every byte range.
//!
//! The log is what the checker reads. It holds no times and no plan: only stream order, events, graph edges,
//! collectives and host waits, so that order can be proven from it alone.

mod error;
mod json;
mod lives;
mod recorded;
mod validate;

pub use error::LogError;
pub use json::{LOG_SCHEMA, MAX_LOG_BYTES, read_log, write_log};
pub use lives::Lives;
pub use recorded::{LogLevel, Recorded, RecordedComm, RecordedEvent, RecordedGraph};

use serde::{Deserialize, Serialize};

/// Version of the log format that this build reads and writes.
pub const LOG_VERSION: u32 = 1;

/// The name under which a kernel that fills with zeros is logged.
pub const ZERO: &str = "zero";

/// How an access uses its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Reads.
    Read,
    /// Overwrites.
    Write,
    /// Reads and writes.
    Update,
}

/// A byte range of one allocation and its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogAccess {
    /// The rank whose memory it is.
    pub rank: u32,
    /// Serial number of the allocation on that rank.
    pub memory: u64,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Its use.
    pub mode: Mode,
}

/// What an operation is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Work {
    /// A kernel: its name.
    Op(String),
    /// A collective of the communicator with this index in [`RankLog::comms`].
    Collective {
        /// Index of the communicator.
        comm: u32,
        /// Its kind, as `reduce_scatter`.
        kind: String,
    },
    /// Records an event (numbered on the rank).
    Record(u32),
    /// Waits for an event.
    Wait(u32),
    /// Joins its dependencies.
    Empty,
}

/// A view that a plan gave to a runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogView {
    /// The request, for people.
    pub label: String,
    /// Serial number of the arena.
    pub memory: u64,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// One past the last byte of the tensor; the rest is padding, which a reduce-scatter must find zero.
    pub logical_end: u64,
}

/// One node of a captured graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogNode {
    /// What it does.
    pub work: Work,
    /// Its name, for people.
    pub label: String,
    /// Its byte ranges.
    pub accesses: Vec<LogAccess>,
    /// Nodes that end first, as the device reports its edges.
    pub dependencies: Vec<u32>,
}

/// A captured graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogGraph {
    /// The runner's name.
    pub runner: String,
    /// The views that it may use, if it was captured for a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub views: Option<Vec<LogView>>,
    /// Its nodes, dependencies first.
    pub nodes: Vec<LogNode>,
}

/// One enqueue or named wait of a rank's host program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Entry {
    /// Work on a stream.
    Enqueue {
        /// The device's ticket.
        ticket: u64,
        /// The stream.
        stream: u32,
        /// What it is.
        work: Work,
        /// Its name, for people.
        label: String,
        /// Its byte ranges.
        accesses: Vec<LogAccess>,
    },
    /// A graph launch.
    Launch {
        /// The device's ticket.
        ticket: u64,
        /// The stream.
        stream: u32,
        /// Index into [`RankLog::graphs`].
        graph: u32,
    },
    /// The host waited for a stream (and then perhaps read or wrote bytes).
    HostWait {
        /// The stream.
        stream: u32,
        /// What the host then touched.
        accesses: Vec<LogAccess>,
    },
    /// The host met its peers of a communicator.
    Exchange {
        /// Index into [`RankLog::comms`].
        comm: u32,
    },
    /// What was in these bytes is gone: they were allocated, or mapped again.
    Fresh {
        /// All bytes of one allocation, as a write.
        accesses: Vec<LogAccess>,
    },
    /// An allocation was registered as a window of a communicator.
    Registered {
        /// Its serial number.
        memory: u64,
        /// Index into [`RankLog::comms`].
        comm: u32,
    },
    /// A plan was sealed over the arenas with these serial numbers.
    Sealed {
        /// The arenas.
        arenas: Vec<u64>,
    },
    /// The sealed plan was given up.
    Released {},
    /// A training step begins. Steps of one name do the same work; what follows an empty name is compared with nothing.
    Step {
        /// Its name.
        name: String,
    },
    /// Eager work from here on is the discovery of a runner, or of none.
    Discovering {
        /// The runner.
        runner: Option<String>,
    },
    /// A weight's gradient became ready.
    Ready {
        /// The weight.
        weight: String,
    },
}

/// A communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogComm {
    /// The group's name.
    pub name: String,
    /// World ranks, in group order.
    pub ranks: Vec<u32>,
}

/// An allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogMemory {
    /// Serial number on its rank.
    pub serial: u64,
    /// The name it was allocated under.
    pub label: String,
    /// Its size.
    pub bytes: u64,
    /// Whether it is an arena of a plan.
    pub arena: bool,
    /// Whether it lies in the registered memory of a group.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub symmetric: bool,
    /// Whether the order of additions into it matters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accumulator: bool,
}

/// What one rank did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankLog {
    /// World rank.
    pub rank: u32,
    /// Labels of streams, by id.
    pub streams: Vec<String>,
    /// Communicators in the order this rank made them. The n-th one of a name and its ranks is the same
    /// communicator on every member.
    pub comms: Vec<LogComm>,
    /// Allocations.
    pub memories: Vec<LogMemory>,
    /// Graphs.
    pub graphs: Vec<LogGraph>,
    /// Program order.
    pub entries: Vec<Entry>,
}

/// What a job did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// Always `sessile.log`.
    pub schema: String,
    /// [`LOG_VERSION`].
    pub version: u32,
    /// One entry a rank, in order of rank.
    pub ranks: Vec<RankLog>,
}

impl Log {
    /// Value of `schema`.
    pub const SCHEMA: &'static str = "sessile.log";
}
