//! Every limit on what a trace or plan may hold, in one place. Beyond them is an error, never a slow path.

/// Bytes of one JSON document.
pub const DOCUMENT_BYTES_MAX: usize = 64 << 20;
/// Requests of one trace.
pub const REQUESTS_MAX: usize = 1 << 20;
/// Runners of one trace.
pub const RUNNERS_MAX: usize = 1 << 16;
/// Points of one trace.
pub const POINTS_MAX: usize = 1 << 22;
/// Alternative steps of one trace.
pub const STEPS_MAX: usize = 1 << 12;
/// Launches of all steps of one trace.
pub const LAUNCHES_MAX: usize = 1 << 20;
/// Requests and points of all launches of all steps, two more for each launch: what the planner walks.
pub const LAUNCHED_MAX: u64 = 1 << 22;
/// Streams of one runner.
pub const STREAMS_MAX: u32 = 64;
/// Extents of one shape.
pub const RANK_MAX: usize = 8;
/// Bytes of one name: trace, runner, weight, role, group, accumulator.
pub const NAME_BYTES_MAX: usize = 256;
/// Domains of one trace, and arenas of one plan.
pub const DOMAINS_MAX: usize = 1024;
/// Bytes of all requests of one trace, each rounded up to [`VIEW_ALIGN`](crate::VIEW_ALIGN).
pub const TOTAL_BYTES_MAX: u64 = 1 << 56;
/// Groups with a depth of their own.
pub const GROUPS_MAX: usize = 1 << 10;
/// Depth, generations and ring slots.
pub const DEPTH_MAX: u32 = 1024;

/// Pairs of conflicting blocks in one domain. Beyond, the blocks of one class are laid as one.
pub(crate) const PAIRS_MAX: usize = 1 << 23;
/// Uses in one window of the search for the lower bound.
pub(crate) const WINDOW_MAX: usize = 1 << 11;
/// Nodes, times the chains they know of, and conflicts that the search for conflicts of one step may look at.
pub(crate) const ORDER_WORK_MAX: u64 = 1 << 32;
/// Nodes and former occupants that the search for fences may look at.
pub(crate) const FENCE_WORK_MAX: u64 = 1 << 32;
/// Pairs of requests with their uses, and edges between points, that the check of one plan may look at.
pub(crate) const VALIDATE_WORK_MAX: u64 = 1 << 30;
