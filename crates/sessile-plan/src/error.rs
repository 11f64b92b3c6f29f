//! Errors of reading traces and making plans.

use crate::{
    limits::{DEPTH_MAX, DOCUMENT_BYTES_MAX, GROUPS_MAX, NAME_BYTES_MAX},
    request::RequestId,
};

/// What can go wrong between a trace and a plan. Every variant is caused by the input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A strategy's name was not understood.
    #[error(
        "unknown strategy `{text}`: use sessile, generations:N, ring:N or per-request (N from 1 to 1024)"
    )]
    UnknownStrategy {
        /// What was given, shortened.
        text: String,
    },
    /// The requests do not fit a ring of this many slots.
    #[error(
        "ring:{slots} cannot capture runner `{runner}`: it writes {writers} live inputs of one shape \
         ({first} is the first); use ring:{writers}, generations:N or sessile"
    )]
    RingTooSmall {
        /// Slots asked for.
        slots: u32,
        /// The runner that needs more.
        runner: String,
        /// Inputs of one shape that it writes.
        writers: u32,
        /// The first of them.
        first: RequestId,
    },
    /// An option outside its range.
    #[error("option `{option}` is {value}: use a number from 1 to {DEPTH_MAX}")]
    OptionOutOfRange {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: u32,
    },
    /// More groups with depths of their own than is allowed.
    #[error("option `depth_by_group` names {count} groups: name up to {GROUPS_MAX}")]
    TooManyGroups {
        /// How many it names.
        count: usize,
    },
    /// The name of a group is empty or too long.
    #[error("option `depth_by_group` has a group name of {bytes} bytes: use 1 to {NAME_BYTES_MAX}")]
    GroupName {
        /// Its length.
        bytes: usize,
    },
    /// The trace itself is wrong.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Finding what conflicts needs more work than is allowed.
    #[error(
        "the conflicts of this trace need more than {limit} steps to find ({launches} launches, {requests} requests): \
         plan fewer launches a step, or a smaller depth"
    )]
    OrderTooCostly {
        /// The budget, in nodes and conflicts.
        limit: u64,
        /// Launches of all steps.
        launches: usize,
        /// Requests of the trace.
        requests: usize,
    },
    /// Finding the fences needs more work than is allowed.
    #[error(
        "the fences of this trace need more than {limit} steps to find ({launches} launches, {requests} requests): \
         plan fewer launches a step, or use strategy per-request"
    )]
    FencesTooCostly {
        /// The budget, in visited nodes and occupants.
        limit: u64,
        /// Launches of all steps.
        launches: usize,
        /// Requests of the trace.
        requests: usize,
    },
}

/// What is wrong with the meaning of a trace. `field` is a path such as `runners[3].points[7]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Durations that do not fit the points.
    #[error(
        "{field} has {found} entries: the trace has {expected}; measure again, or leave durations_ns out"
    )]
    Durations {
        /// Where.
        field: String,
        /// Entries there.
        found: usize,
        /// Runners, or points of the runner.
        expected: usize,
    },
    /// A count beyond its limit.
    #[error("{field} counts {count}: the limit is {limit}; {remedy}")]
    TooMany {
        /// What is counted.
        field: String,
        /// How many there are.
        count: u64,
        /// How many there may be.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A name that is empty or too long.
    #[error("the name in {field} has {bytes} bytes: use 1 to {limit}")]
    NameLength {
        /// Where.
        field: String,
        /// Its length.
        bytes: usize,
        /// The most it may have.
        limit: usize,
    },
    /// The wrong kind of document.
    #[error("field `schema` is `{found}`: this is no sessile trace, write `{expected}`")]
    Schema {
        /// What it says, shortened.
        found: String,
        /// What it must say.
        expected: &'static str,
    },
    /// A version that this build does not know.
    #[error("field `version` is {found}: this build reads version {expected}; record the trace again")]
    Version {
        /// What it says.
        found: u64,
        /// What it must say.
        expected: u32,
    },
    /// No step at all.
    #[error("`steps` is empty: a trace needs at least one step")]
    NoSteps,
    /// A step without launches.
    #[error("steps[{step}] is empty: a step needs at least one launch, as an index into `runners`")]
    NoLaunches {
        /// Which step.
        step: usize,
    },
    /// A launch of a runner that does not exist.
    #[error("steps[{step}][{position}] is {runner}: there are {runners} runners; use an index below that")]
    LaunchOutOfRange {
        /// Which step.
        step: usize,
        /// Which launch.
        position: usize,
        /// What it names.
        runner: u32,
        /// How many there are.
        runners: usize,
    },
    /// A runner that no step launches has no lifetime to plan.
    #[error("runner `{runner}` is never launched: add runners[{index}] to a step or leave it out")]
    NeverLaunched {
        /// Its name.
        runner: String,
        /// Its index.
        index: usize,
    },
    /// Two runners of one name.
    #[error("runners[{first}] and runners[{second}] are both named `{name}`: runner names must be unique")]
    DuplicateRunner {
        /// The first of them.
        first: usize,
        /// The second.
        second: usize,
        /// The name.
        name: String,
    },
    /// Two requests of one id.
    #[error("{field} has id {}, as a request of runner `{runner}` has: request ids must be unique", .id.0)]
    DuplicateRequest {
        /// The second of them.
        field: String,
        /// The id.
        id: RequestId,
        /// The runner of the first.
        runner: String,
    },
    /// A shape with no elements.
    #[error("{field} is {shape:?}, which has no elements: every extent must be at least 1")]
    EmptyShape {
        /// Where.
        field: String,
        /// The shape.
        shape: Vec<u64>,
    },
    /// A request, or all of them together, larger than any machine.
    #[error("{field} is {shape:?}: all requests up to here take more than {limit} bytes; check the extents")]
    TooManyBytes {
        /// Where.
        field: String,
        /// The shape that goes beyond.
        shape: Vec<u64>,
        /// The limit.
        limit: u64,
    },
    /// A stream number beyond the limit.
    #[error("{field} is on stream {stream}: use streams below {limit}")]
    StreamOutOfRange {
        /// Where.
        field: String,
        /// The stream.
        stream: u32,
        /// The limit.
        limit: u32,
    },
    /// A point names a request that does not exist.
    #[error("{field} names {request}, which no runner has: add it to `requests` or remove the point")]
    UnknownRequest {
        /// Where.
        field: String,
        /// The request.
        request: RequestId,
    },
    /// A request is acquired outside the runner that makes it.
    #[error("{field} acquires {request} of runner `{owner}`: a request is acquired only in its own runner")]
    AcquireElsewhere {
        /// Where.
        field: String,
        /// The request.
        request: RequestId,
        /// Its runner.
        owner: String,
    },
    /// A second acquire or release of one request.
    #[error("{field} is the second {action} of {request}: a request is acquired once and released once")]
    Repeated {
        /// Where.
        field: String,
        /// `acquire` or `release`.
        action: &'static str,
        /// The request.
        request: RequestId,
    },
    /// A release that comes before its acquire.
    #[error(
        "{field} releases {request} before {acquired}: release it later in its runner or in a runner launched later"
    )]
    ReleaseBeforeAcquire {
        /// Where.
        field: String,
        /// The request.
        request: RequestId,
        /// Where it is acquired.
        acquired: String,
    },
    /// An event recorded twice.
    #[error("{field} records event {event} again: number every record of a runner anew")]
    DuplicateRecord {
        /// Where.
        field: String,
        /// The event.
        event: u32,
    },
    /// A wait for an event that nothing recorded.
    #[error("{field} waits for event {event}, which no earlier point of this runner records")]
    WaitBeforeRecord {
        /// Where.
        field: String,
        /// The event.
        event: u32,
    },
    /// A second completion point.
    #[error("{field} is the second `complete` of runner `{runner}`: keep one")]
    SecondComplete {
        /// Where.
        field: String,
        /// The runner.
        runner: String,
    },
}

/// Why a document was not read. Nothing is kept of a document that fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The document is larger than the limit.
    #[error("the document has {bytes} bytes: the limit is {DOCUMENT_BYTES_MAX}; record fewer launches")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// Not the JSON that the schema describes.
    #[error(
        "line {line} column {column}, field `{field}`: {problem} (near `{near}`); see the JSON Schema of {schema}"
    )]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// Path of the field, as far as it was read.
        field: String,
        /// What the parser found.
        problem: String,
        /// The text there, shortened.
        near: String,
        /// Which kind of document was expected.
        schema: &'static str,
    },
    /// Another kind of document.
    #[error("field `schema` is `{found}`, expected `{expected}`: give a {expected} document")]
    Schema {
        /// What it says, shortened.
        found: String,
        /// What it must say.
        expected: &'static str,
    },
    /// A version that this build does not know.
    #[error(
        "field `version` is {found}, and this build reads version {expected} of {schema}: \
         write the document with this build, or read it with the one that wrote it"
    )]
    Version {
        /// What it says.
        found: u64,
        /// What it must say.
        expected: u32,
        /// Which kind of document.
        schema: &'static str,
    },
    /// Well-formed, but the trace means nothing.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Well-formed, but the plan contradicts itself.
    #[error("field `{field}` is {found}: {rule}; make the plan again from its trace")]
    Plan {
        /// Where.
        field: String,
        /// What it says.
        found: String,
        /// What must hold.
        rule: &'static str,
    },
}
