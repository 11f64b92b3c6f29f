//! The recorded order as a timeline: each piece of work takes one unit, and begins as soon as everything that the trace or a
//! fence puts before it has ended. It shows order and what waits for what, not time.
//!
//! ```text
//!  lane 0  ▇ work   ┆ wait          a launch begins where the one before completes (or ends, if launches are serial);
//!  lane 1     ▇ collective          a fence is an arrow from the release to the acquire
//! ```

use std::collections::BTreeMap;

use serde::Serialize;
use sessile_plan::{LaunchOrder, Plan, PointKind, RequestId, Trace};

/// Pieces of work that are shown.
const SLICES_MAX: usize = 20_000;

/// A timeline.
#[derive(Debug, Serialize)]
pub(super) struct Order {
    /// Names of lanes.
    pub(super) lanes: Vec<String>,
    pub(super) slices: Vec<Slice>,
    /// Waits for a fence: lane and time of the release, lane and time of the acquire, how long the acquire waited.
    pub(super) arrows: Vec<[u32; 5]>,
    /// Launches that are shown, and all of a step.
    pub(super) shown: u32,
    pub(super) launches: u32,
}

/// One piece of work.
#[derive(Debug, Serialize)]
pub(super) struct Slice {
    lane: u32,
    begin: u32,
    end: u32,
    /// `work`, `collective` or `wait`.
    kind: &'static str,
    launch: u32,
    /// The collective's group.
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
}

struct Builder<'a> {
    trace: &'a Trace,
    lanes: BTreeMap<String, u32>,
    slices: Vec<Slice>,
    arrows: Vec<[u32; 5]>,
    /// Where and when each request was last released.
    released: BTreeMap<RequestId, (u32, u32)>,
    /// When the last collective of each group ended.
    groups: BTreeMap<String, u32>,
    /// When each runner's last launch ended.
    ended: BTreeMap<u32, u32>,
    waits: BTreeMap<RequestId, Vec<RequestId>>,
}

/// The first step's timeline.
pub(super) fn order(trace: &Trace, plan: &Plan) -> Order {
    let mut waits: BTreeMap<RequestId, Vec<RequestId>> = BTreeMap::new();
    for fence in &plan.fences {
        waits.entry(fence.acquire).or_default().push(fence.release);
    }
    let mut builder = Builder {
        trace,
        lanes: BTreeMap::new(),
        slices: Vec::new(),
        arrows: Vec::new(),
        released: BTreeMap::new(),
        groups: BTreeMap::new(),
        ended: BTreeMap::new(),
        waits,
    };
    let none = Vec::new();
    let launches = trace.steps.first().unwrap_or(&none);
    let mut start = 0;
    let mut shown = 0;
    for (&runner, launch) in launches.iter().zip(0..) {
        if builder.slices.len() >= SLICES_MAX {
            break;
        }
        let (complete, end) = builder.launch(runner, launch, start);
        start = if plan.launch_order == LaunchOrder::Serial { end } else { complete };
        shown += 1;
    }
    let mut lanes = vec![String::new(); builder.lanes.len()];
    for (name, at) in builder.lanes {
        lanes[at as usize] = name;
    }
    Order { lanes, slices: builder.slices, arrows: builder.arrows, shown, launches: launches.len() as u32 }
}

impl Builder<'_> {
    fn lane(&mut self, name: &str) -> u32 {
        let next = self.lanes.len() as u32;
        *self.lanes.entry(name.to_owned()).or_insert(next)
    }

    /// Places a launch that may start at `start`; when it completes and when it ends.
    fn launch(&mut self, runner: u32, launch: u32, start: u32) -> (u32, u32) {
        let start = start.max(self.ended.get(&runner).copied().unwrap_or(0));
        let points = &self.trace.runners[runner as usize].points;
        // Launches in flight at once need lanes of their own: two take turns.
        let of = |stream: u32| {
            format!(
                "{} · stream {stream}",
                if launch.is_multiple_of(2) { "even launches" } else { "odd launches" }
            )
        };
        let mut streams: BTreeMap<u32, u32> = BTreeMap::new();
        let mut events: BTreeMap<u32, u32> = BTreeMap::new();
        let (mut complete, mut end) = (None, start);
        for point in points {
            let lane = self.lane(&of(point.stream));
            let now = *streams.entry(point.stream).or_insert(start);
            let slice = |builder: &mut Self, begin: u32, kind, group: Option<String>| {
                builder.slices.push(Slice { lane, begin, end: begin + 1, kind, launch, group });
                begin + 1
            };
            let next = match &point.kind {
                PointKind::Acquire(id) => {
                    let mut at = now;
                    for release in self.waits.get(id).cloned().unwrap_or_default() {
                        if let Some(&(from, when)) = self.released.get(&release) {
                            self.arrows.push([from, when, lane, now.max(when), when.saturating_sub(now)]);
                            at = at.max(when);
                        }
                    }
                    if at > now {
                        let wait = Slice { lane, begin: now, end: at, kind: "wait", launch, group: None };
                        self.slices.push(wait);
                    }
                    at
                }
                PointKind::Release(id) => {
                    self.released.insert(*id, (lane, now));
                    now
                }
                PointKind::Record(event) => {
                    events.insert(*event, now);
                    now
                }
                PointKind::Wait(event) => now.max(events.get(event).copied().unwrap_or(start)),
                PointKind::Collective(group) => {
                    let begin = now.max(self.groups.get(group).copied().unwrap_or(0));
                    let done = slice(self, begin, "collective", Some(group.clone()));
                    self.groups.insert(group.clone(), done);
                    done
                }
                PointKind::Work => slice(self, now, "work", None),
                PointKind::Complete => {
                    complete = Some(now);
                    now
                }
            };
            streams.insert(point.stream, next);
            end = end.max(next);
        }
        // Without recorded order a launch is one piece.
        if points.is_empty() {
            let lane = self.lane(&of(0));
            self.slices.push(Slice { lane, begin: start, end: start + 1, kind: "work", launch, group: None });
            end = start + 1;
        }
        self.ended.insert(runner, end);
        (complete.unwrap_or(end), end)
    }
}
