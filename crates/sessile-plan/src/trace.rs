//! The trace: everything the discovery pass recorded, and all that planning may rest on.
//!
//! ```text
//!  step 0         F0  F1  ...  B1  B0           one entry a graph launch; one of the steps runs between two step cuts
//!  runner B1      streams 0 (origin) and 1 (reduce-scatter)
//!    stream 0     acquire a   record e0            wait e1  release b   complete  ...  (end)
//!    stream 1                       wait e0  collective g  release a  record e1
//! ```
//!
//! A runner's `points` are in enqueue order, and hold all that was enqueued: `work` for operations, `collective` for
//! collectives. The other points take no time: what was acquired is first written by the next work of its stream, and
//! what was released was last read by the work before. Two points are ordered if they are on one stream, or if a
//! `record` precedes one and the matching `wait` precedes the other. Nothing else is assumed, except what
//! launching graphs always gives (graph-launch order; see the module `order`).

use serde::{Deserialize, Serialize};

use crate::{
    format::{at_most, at_most_each},
    limits::{LAUNCHES_MAX, POINTS_MAX, REQUESTS_MAX, RUNNERS_MAX, STEPS_MAX},
    request::{Request, RequestId},
};

/// Version of the trace format that this build reads and writes.
pub const TRACE_VERSION: u32 = 1;

/// A stream inside one runner. 0 is the stream the capture began on.
pub type StreamIndex = u32;

/// One step of the recorded order inside a runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PointKind {
    /// Just before the first write of a request.
    Acquire(RequestId),
    /// Just after the last read of a request. The request may belong to an earlier runner.
    Release(RequestId),
    /// Records an event (numbered inside the runner).
    Record(u32),
    /// Waits for an event recorded earlier in the same runner.
    Wait(u32),
    /// A collective of the named group. Collectives of one group run in the order they were enqueued.
    Collective(String),
    /// Operations other than collectives: one or more, with nothing else on their stream between.
    Work,
    /// The end of stage 1: the next runner may start once this point is reached.
    Complete,
}

/// A point and the stream it was enqueued on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The stream, numbered inside the runner.
    pub stream: StreamIndex,
    /// What was enqueued.
    pub kind: PointKind,
}

/// One graph: a module's forward or backward, for one micro-batch slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runner {
    /// Unique name, for people and for agreement between ranks.
    pub name: String,
    /// Requests in the order the discovery made them.
    #[serde(deserialize_with = "at_most::<_, _, REQUESTS_MAX>")]
    pub requests: Vec<Request>,
    /// The recorded order. Empty: nothing is proven, every request lives as long as its runner.
    #[serde(default, deserialize_with = "at_most::<_, _, POINTS_MAX>")]
    pub points: Vec<Point>,
}

impl Runner {
    /// Whether it has a request or a collective of this group.
    pub fn uses(&self, group: &str) -> bool {
        let collective = |point: &Point| matches!(&point.kind, PointKind::Collective(of) if of == group);
        self.requests.iter().any(|request| request.spec.group.as_deref() == Some(group))
            || self.points.iter().any(collective)
    }
}

/// What one rank discovered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Always `sessile.trace`.
    pub schema: String,
    /// [`TRACE_VERSION`].
    pub version: u32,
    /// For people.
    pub name: String,
    /// All runners.
    #[serde(deserialize_with = "at_most::<_, _, RUNNERS_MAX>")]
    pub runners: Vec<Runner>,
    /// Alternative steps, of which exactly one runs between two step cuts (one for each sequence length, say). Each
    /// lists its launches in order, as indices into `runners`; a runner may be launched more than once, and by several
    /// steps. What no step launches together may share everything.
    #[serde(deserialize_with = "at_most_each::<_, _, STEPS_MAX, LAUNCHES_MAX>")]
    pub steps: Vec<Vec<u32>>,
    /// Nanoseconds that each point took in the discovery, by runner and point, reduced over the ranks; 0 for points that
    /// take no time. Empty: not measured. They serve to choose depths and to compare; no plan at a given depth rests on
    /// them, and they are no part of the digest.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "at_most_each::<_, _, RUNNERS_MAX, POINTS_MAX>"
    )]
    pub durations_ns: Vec<Vec<u64>>,
}

impl Trace {
    /// Value of `schema`.
    pub const SCHEMA: &'static str = "sessile.trace";

    /// Launches of all steps.
    pub fn launch_count(&self) -> usize {
        self.steps.iter().map(Vec::len).sum()
    }

    /// All requests with the index of the runner that makes them.
    pub fn requests(&self) -> impl Iterator<Item = (usize, &Request)> {
        self.runners.iter().enumerate().flat_map(|(r, runner)| runner.requests.iter().map(move |q| (r, q)))
    }
}
