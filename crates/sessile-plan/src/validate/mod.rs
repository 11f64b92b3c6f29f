//! An independent check of a plan against its trace. Whoever solves does not grade: nothing here calls the planner,
//! the layout, the fences or the bound; only the types and the digest are shared.
//!
//! What is checked, in this order: the trace itself; the plan's header; arenas and views (I2); that no two requests
//! live at once share bytes and that sessile keeps its depth; the lower bound; that every reuse of bytes and every
//! accumulator is ordered (I4), and that no fence can be left out (I9).
//!
//! ```text
//!            offset ->  0      256     512     768
//!  launch 0  (r0)       |== a ==|== b ===========|
//!  launch 1  (r1)       |== c ==|                       c reuses a's bytes
//!
//!  needs: release of a before acquire of c, by the launch order or by the fence (a, c);
//!  with the fence (a, c) *and* serial launches, the fence is unnecessary.
//! ```
//!
//! Order is found by search over a graph of three unrolled steps (one under the barrier), edge by edge.

mod live;
mod reach;

use std::{collections::BTreeMap, fmt};

use crate::{
    check::check_trace,
    digest::trace_digest,
    limits::VALIDATE_WORK_MAX,
    options::{LaunchOrder, Strategy},
    plan::{PLAN_VERSION, Plan, View},
    request::{RequestId, RequestSpec, VIEW_ALIGN},
    trace::{PointKind, Trace},
};

/// What kind of fault a [`Violation`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// The trace is not valid; nothing else was checked.
    InvalidTrace,
    /// Schema, version or a number in the options is wrong.
    InvalidHeader,
    /// The plan was made from another trace.
    DigestMismatch,
    /// The launch order is not the one that the options give.
    LaunchOrderWrong,
    /// Arenas are not in order of domain, or a domain has two.
    ArenasUnsorted,
    /// An arena ends elsewhere than its last view.
    ArenaSizeWrong,
    /// An arena's lower bound is not the bytes of its `peak`, or two requests of that may share bytes.
    LowerBoundWrong,
    /// A view or a fence of a request that the trace does not have.
    UnknownRequest,
    /// A request without a view.
    MissingView,
    /// A request with two views.
    DuplicateView,
    /// Views are not in order of request.
    ViewsUnsorted,
    /// A view in an arena that does not exist.
    UnknownArena,
    /// A view in the arena of another domain.
    WrongDomain,
    /// A view of another size than its request's.
    WrongSize,
    /// A view whose offset is not aligned.
    Misaligned,
    /// A view that leaves its arena.
    OutsideArena,
    /// Two requests that are live at once share bytes.
    LiveOverlap,
    /// Bytes are reused by a runner nearer than the depth.
    ReusedTooSoon,
    /// Bytes are reused, and nothing orders the release before the acquire.
    ReuseNotOrdered,
    /// Two requests add into one accumulator, and nothing orders them.
    AccumulatorUnordered,
    /// Fences are not sorted, or one is there twice.
    FencesUnsorted,
    /// Everything is ordered without this fence.
    FenceUnnecessary,
    /// The check takes more work than its limit; nothing else is reported.
    TooCostly,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Reason; 23] = [
        Reason::InvalidTrace,
        Reason::InvalidHeader,
        Reason::DigestMismatch,
        Reason::LaunchOrderWrong,
        Reason::ArenasUnsorted,
        Reason::ArenaSizeWrong,
        Reason::LowerBoundWrong,
        Reason::UnknownRequest,
        Reason::MissingView,
        Reason::DuplicateView,
        Reason::ViewsUnsorted,
        Reason::UnknownArena,
        Reason::WrongDomain,
        Reason::WrongSize,
        Reason::Misaligned,
        Reason::OutsideArena,
        Reason::LiveOverlap,
        Reason::ReusedTooSoon,
        Reason::ReuseNotOrdered,
        Reason::AccumulatorUnordered,
        Reason::FencesUnsorted,
        Reason::FenceUnnecessary,
        Reason::TooCostly,
    ];

    /// Its stable name, for programs.
    pub fn code(self) -> &'static str {
        match self {
            Reason::InvalidTrace => "invalid_trace",
            Reason::InvalidHeader => "invalid_header",
            Reason::DigestMismatch => "digest_mismatch",
            Reason::LaunchOrderWrong => "launch_order_wrong",
            Reason::ArenasUnsorted => "arenas_unsorted",
            Reason::ArenaSizeWrong => "arena_size_wrong",
            Reason::LowerBoundWrong => "lower_bound_wrong",
            Reason::UnknownRequest => "unknown_request",
            Reason::MissingView => "missing_view",
            Reason::DuplicateView => "duplicate_view",
            Reason::ViewsUnsorted => "views_unsorted",
            Reason::UnknownArena => "unknown_arena",
            Reason::WrongDomain => "wrong_domain",
            Reason::WrongSize => "wrong_size",
            Reason::Misaligned => "misaligned",
            Reason::OutsideArena => "outside_arena",
            Reason::LiveOverlap => "live_overlap",
            Reason::ReusedTooSoon => "reused_too_soon",
            Reason::ReuseNotOrdered => "reuse_not_ordered",
            Reason::AccumulatorUnordered => "accumulator_unordered",
            Reason::FencesUnsorted => "fences_unsorted",
            Reason::FenceUnnecessary => "fence_unnecessary",
            Reason::TooCostly => "too_costly",
        }
    }

    /// What is wrong, in words.
    fn words(self) -> &'static str {
        match self {
            Reason::InvalidTrace => "the trace is not valid",
            Reason::InvalidHeader => "the plan's header is not one this build makes",
            Reason::DigestMismatch => "the plan was made from another trace: plan again",
            Reason::LaunchOrderWrong => "the launch order is not the one the options give",
            Reason::ArenasUnsorted => "arenas must be in order of domain, one for each",
            Reason::ArenaSizeWrong => "an arena must end where its last view ends",
            Reason::LowerBoundWrong => {
                "the lower bound must be the sum of the bytes of `peak`, whose requests conflict pairwise"
            }
            Reason::UnknownRequest => "the trace has no such request",
            Reason::MissingView => "every request needs a view",
            Reason::DuplicateView => "a request has one view only",
            Reason::ViewsUnsorted => "views must be in order of request",
            Reason::UnknownArena => "the plan has no such arena",
            Reason::WrongDomain => "the view must lie in the arena of the request's domain",
            Reason::WrongSize => "the view must have the request's aligned size",
            Reason::Misaligned => "the offset must be a multiple of 256",
            Reason::OutsideArena => "the view must lie inside its arena",
            Reason::LiveOverlap => "both are live at once and must not share bytes",
            Reason::ReusedTooSoon => "the second reuses bytes of the first nearer than the depth",
            Reason::ReuseNotOrdered => {
                "the second reuses bytes of the first, and nothing orders its acquire after that release: add a fence"
            }
            Reason::AccumulatorUnordered => {
                "both add into one accumulator, and nothing orders the second after the first: add a fence"
            }
            Reason::FencesUnsorted => "fences must be sorted, each there once",
            Reason::FenceUnnecessary => "all is ordered without this fence: leave it out",
            Reason::TooCostly => {
                "the check would exceed its limit of work: trace fewer launches or requests that share, or plan fewer fences"
            }
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// One request of a [`Violation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// The request.
    pub request: RequestId,
    /// What it is, if the trace has it.
    pub spec: Option<RequestSpec>,
    /// Its runner's name, if the trace has it.
    pub runner: Option<String>,
    /// Its view, if it has one.
    pub view: Option<View>,
    /// Where the fault shows.
    pub launch: Option<Launch>,
}

/// A launch of one of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Launch {
    /// Index into `steps`.
    pub step: usize,
    /// Index into that step.
    pub position: usize,
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps[{}][{}]", self.step, self.position)
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.request)?;
        if let Some(spec) = &self.spec {
            write!(f, " ({spec})")?;
        }
        if let Some(runner) = &self.runner {
            write!(f, " of runner `{runner}`")?;
        }
        if let Some(launch) = self.launch {
            write!(f, " at {launch}")?;
        }
        if let Some(view) = &self.view {
            let end = view.offset.saturating_add(view.bytes);
            write!(f, " in bytes {}..{end} of arena {}", view.offset, view.arena)?;
        }
        Ok(())
    }
}

/// A fault of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Its kind.
    pub reason: Reason,
    /// The request it is about; of two, the one that had the bytes first.
    pub first: Option<Party>,
    /// The other request.
    pub second: Option<Party>,
    /// The value that the plan should have, where one is wrong.
    pub expected: Option<String>,
    /// The value that it has.
    pub found: Option<String>,
}

impl Violation {
    fn new(reason: Reason) -> Violation {
        Violation { reason, first: None, second: None, expected: None, found: None }
    }

    fn between(reason: Reason, first: Party, second: Party) -> Violation {
        Violation { first: Some(first), second: Some(second), ..Violation::new(reason) }
    }

    fn about(mut self, party: Party) -> Violation {
        self.first = Some(party);
        self
    }

    fn values(mut self, expected: impl ToString, found: impl ToString) -> Violation {
        (self.expected, self.found) = (Some(expected.to_string()), Some(found.to_string()));
        self
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        for (word, party) in [(":", &self.first), (", then", &self.second)] {
            if let Some(party) = party {
                write!(f, "{word} {party}")?;
            }
        }
        write!(f, ": {}", self.reason.words())?;
        if let (Some(expected), Some(found)) = (&self.expected, &self.found) {
            write!(f, " (expected {expected}, found {found})")?;
        }
        Ok(())
    }
}

/// A request as the validator sees it.
struct Buffer<'a> {
    id: RequestId,
    spec: &'a RequestSpec,
    runner: usize,
    /// Index of the point that writes it first; none means the start of the launch.
    acquire: Option<usize>,
    /// The runner that releases it.
    releaser: usize,
    /// Index of the point that reads it last; none means the end of the launch.
    release: Option<usize>,
    view: Option<&'a View>,
}

impl Buffer<'_> {
    fn party(&self, trace: &Trace, launch: Option<Launch>) -> Party {
        Party {
            request: self.id,
            spec: Some(self.spec.clone()),
            runner: Some(trace.runners[self.runner].name.clone()),
            view: self.view.cloned(),
            launch,
        }
    }

    fn shares_bytes(&self, other: &Buffer<'_>) -> bool {
        let (Some(a), Some(b)) = (self.view, other.view) else { return false };
        a.arena == b.arena
            && a.offset < b.offset.saturating_add(b.bytes)
            && b.offset < a.offset.saturating_add(a.bytes)
    }
}

/// What the check may still look at.
struct Work {
    left: u64,
}

impl Work {
    /// `None` once it is spent.
    fn spend(&mut self, steps: usize) -> Option<()> {
        self.left = self.left.checked_sub(steps as u64)?;
        Some(())
    }
}

/// Checks everything a plan promises about its trace. Empty means that the plan is right. If that takes too much work,
/// the only violation is [`Reason::TooCostly`], and nothing is known of the plan.
pub fn validate(trace: &Trace, plan: &Plan) -> Vec<Violation> {
    if let Err(error) = check_trace(trace) {
        return vec![Violation::new(Reason::InvalidTrace).values("a valid trace", error)];
    }
    let mut found = Vec::new();
    if !header(plan, &mut found) {
        return found;
    }
    let digest = trace_digest(trace);
    if digest != plan.trace_digest {
        found.push(Violation::new(Reason::DigestMismatch).values(digest, &plan.trace_digest));
    }
    let buffers = buffers(trace, plan, &mut found);
    arenas(plan, &buffers, &mut found);
    let mut work = Work { left: VALIDATE_WORK_MAX };
    let checked = live::check(trace, plan, &buffers, &mut work, &mut found)
        .and_then(|()| reach::check(trace, plan, &buffers, &mut work, &mut found));
    if checked.is_none() {
        let sizes = (trace.launch_count(), buffers.len(), plan.fences.len());
        let more = format!("more, for {} launches, {} requests and {} fences", sizes.0, sizes.1, sizes.2);
        return vec![Violation::new(Reason::TooCostly).values(format!("{VALIDATE_WORK_MAX} steps"), more)];
    }
    found
}

/// Whether the header can be worked with.
fn header(plan: &Plan, found: &mut Vec<Violation>) -> bool {
    let wrong = Violation::new(Reason::InvalidHeader);
    if plan.schema != Plan::SCHEMA || plan.version != PLAN_VERSION {
        let (expected, is) = ((Plan::SCHEMA, PLAN_VERSION), (&plan.schema, plan.version));
        found.push(wrong.values(format!("{expected:?}"), format!("{is:?}")));
        return false;
    }
    let count = match plan.options.strategy {
        Strategy::Generations(count) | Strategy::Ring(count) => count,
        Strategy::Sessile | Strategy::PerRequest => 1,
    };
    let depths = &plan.options.depth_by_group;
    let mut counts = depths.values().copied().chain([plan.options.depth, count]);
    if let Some(count) = counts.find(|count| !(1..=1024).contains(count)) {
        found.push(wrong.values("1 to 1024", count));
        return false;
    }
    let overlaps = plan.options.depth > 1 || depths.values().any(|&depth| depth > 1);
    let order = if overlaps { plan.options.launch_order } else { LaunchOrder::Serial };
    if plan.launch_order != order {
        let wrong = Violation::new(Reason::LaunchOrderWrong);
        found.push(wrong.values(format!("{order:?}"), format!("{:?}", plan.launch_order)));
    }
    true
}

fn buffers<'a>(trace: &'a Trace, plan: &'a Plan, found: &mut Vec<Violation>) -> Vec<Buffer<'a>> {
    let mut buffers: Vec<Buffer<'a>> = Vec::new();
    let mut index: BTreeMap<RequestId, usize> = BTreeMap::new();
    for (r, runner) in trace.runners.iter().enumerate() {
        for request in &runner.requests {
            let (id, spec) = (request.id, &request.spec);
            index.insert(id, buffers.len());
            buffers.push(Buffer {
                id,
                spec,
                runner: r,
                acquire: None,
                releaser: r,
                release: None,
                view: None,
            });
        }
    }
    for (r, runner) in trace.runners.iter().enumerate() {
        // Of each stream: the last point that did something, and what was acquired and not written since.
        let mut busy: BTreeMap<u32, usize> = BTreeMap::new();
        let mut unwritten: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, point) in runner.points.iter().enumerate() {
            match &point.kind {
                PointKind::Acquire(id) => {
                    buffers[index[id]].acquire = Some(at);
                    unwritten.entry(point.stream).or_default().push(index[id]);
                }
                PointKind::Release(id) => {
                    let buffer = &mut buffers[index[id]];
                    buffer.releaser = r;
                    buffer.release = Some(busy.get(&point.stream).copied().unwrap_or(at));
                }
                PointKind::Work | PointKind::Collective(_) => {
                    for buffer in unwritten.remove(&point.stream).unwrap_or_default() {
                        buffers[buffer].acquire = Some(at);
                    }
                    busy.insert(point.stream, at);
                }
                PointKind::Wait(_) => _ = busy.insert(point.stream, at),
                PointKind::Record(_) | PointKind::Complete => {}
            }
        }
    }
    if let Some(pair) = plan.views.windows(2).find(|pair| pair[0].request > pair[1].request) {
        found.push(Violation::new(Reason::ViewsUnsorted).about(unknown(pair[1].request, Some(&pair[1]))));
    }
    for view in &plan.views {
        let Some(&at) = index.get(&view.request) else {
            found.push(Violation::new(Reason::UnknownRequest).about(unknown(view.request, Some(view))));
            continue;
        };
        if buffers[at].view.is_some() {
            let mut party = buffers[at].party(trace, None);
            party.view = Some(view.clone());
            found.push(Violation::between(Reason::DuplicateView, buffers[at].party(trace, None), party));
            continue;
        }
        buffers[at].view = Some(view);
    }
    for buffer in &buffers {
        match buffer.view {
            None => found.push(Violation::new(Reason::MissingView).about(buffer.party(trace, None))),
            Some(view) => check_view(trace, plan, buffer, view, found),
        }
    }
    buffers
}

fn unknown(request: RequestId, view: Option<&View>) -> Party {
    Party { request, spec: None, runner: None, view: view.cloned(), launch: None }
}

fn check_view(trace: &Trace, plan: &Plan, buffer: &Buffer<'_>, view: &View, found: &mut Vec<Violation>) {
    let violation = |reason| Violation::new(reason).about(buffer.party(trace, None));
    let elements: u64 = buffer.spec.shape.iter().product();
    let bytes = (elements * buffer.spec.dtype.size()).div_ceil(VIEW_ALIGN) * VIEW_ALIGN;
    if view.bytes != bytes {
        found.push(violation(Reason::WrongSize).values(bytes, view.bytes));
    }
    if !view.offset.is_multiple_of(VIEW_ALIGN) {
        found.push(violation(Reason::Misaligned));
    }
    let Some(arena) = plan.arenas.get(view.arena as usize) else {
        found
            .push(violation(Reason::UnknownArena).values(format!("below {}", plan.arenas.len()), view.arena));
        return;
    };
    if arena.domain != buffer.spec.domain {
        found.push(violation(Reason::WrongDomain).values(&buffer.spec.domain, &arena.domain));
    }
    match view.offset.checked_add(view.bytes) {
        Some(end) if end <= arena.bytes => {}
        _ => {
            found.push(violation(Reason::OutsideArena).values(format!("up to {}", arena.bytes), view.offset))
        }
    }
}

fn arenas(plan: &Plan, buffers: &[Buffer<'_>], found: &mut Vec<Violation>) {
    if let Some(pair) = plan.arenas.windows(2).find(|pair| pair[0].domain >= pair[1].domain) {
        let wrong = Violation::new(Reason::ArenasUnsorted);
        found.push(wrong.values(format!("{} after {}", pair[0].domain, pair[1].domain), "the reverse"));
    }
    let mut ends = vec![0; plan.arenas.len()];
    for view in buffers.iter().filter_map(|buffer| buffer.view) {
        if let Some(end) = ends.get_mut(view.arena as usize) {
            *end = view.offset.saturating_add(view.bytes).max(*end);
        }
    }
    for (arena, end) in plan.arenas.iter().zip(ends) {
        if arena.bytes != end {
            found.push(Violation::new(Reason::ArenaSizeWrong).values(end, arena.bytes));
        }
    }
}
