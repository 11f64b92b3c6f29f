//! The virtual clock: an event-driven simulation, on one thread, of when each task would run.
//!
//! ```text
//!  host time of a rank   ─launch─launch──────────┬ waits ┬─ ...        moves with each enqueue and each named wait
//!  event queue           ready(op) ─▶ engine free? ─▶ ends(op) ─▶ its dependents become ready
//! ```
//!
//! A task becomes ready when all it depends on has ended, but not before its host enqueued it. Ready kernels queue for the
//! rank's compute engine, meetings for the links of all members; both serve in the order of readiness, and ties go by
//! rank and place in the program, so the times are a function of the programs and the cost model alone.
//!
//! Events are handled only while every host is blocked. A host goes on at the time of the event that ended its wait, or
//! later, so nothing is ever enqueued in the past.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use sessile_hal::Ticket;

use crate::collective::Call;
use crate::cost::{CostModel, Costs};
use crate::engine::{Clock, Engine, Step, TaskId, Work};
use crate::sync::lock;

/// What happens next, and when everything is free again.
pub(crate) struct Timeline {
    costs: CostModel,
    events: BinaryHeap<Reverse<Event>>,
    /// When each rank's compute engine is free.
    engines: Vec<u64>,
    /// When each rank's links are free.
    links: HashMap<(u32, String), u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// Its work is over: before anything else that happens at the same time.
    Ends,
    /// It waits for its engine or its links.
    Ready,
}

/// Ordered by time, then by what does not depend on which host thread was faster.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: u64,
    what: What,
    rank: u32,
    ticket: Ticket,
    node: Option<u32>,
    task: TaskId,
}

impl Timeline {
    pub(crate) fn new(costs: CostModel, ranks: usize) -> Self {
        Timeline { costs, events: BinaryHeap::new(), engines: vec![0; ranks], links: HashMap::new() }
    }

    /// Host time of an enqueue, or of a graph launch.
    pub(crate) fn host_ns(&self, graph: bool) -> u64 {
        if graph { self.costs.graph_launch_ns } else { self.costs.launch_ns }
    }
}

/// Handles events until some host can go on, or nothing is left to happen: then every host that still waits has stalled.
/// Call it only while every host is blocked.
pub(crate) fn run(engine: &mut Engine) {
    loop {
        if engine.settle() {
            return;
        }
        let event = engine.timeline.as_mut().and_then(|timeline| timeline.events.pop());
        let Some(Reverse(event)) = event else {
            engine.stall();
            return;
        };
        engine.clock = Clock::Virtual(event.at);
        match event.what {
            What::Ready => {
                if let Some(end) = engine.occupy(event.task, event.at) {
                    engine.expect(event.task, What::Ends, end);
                }
            }
            What::Ends => {
                // Gone if its group failed meanwhile.
                if let Some(job) = engine.job(event.task) {
                    let (tasks, result) = job.run(false);
                    engine.complete(&tasks, result);
                }
            }
        }
    }
}

impl Engine {
    /// A task, or a meeting by its first part, has only to find its engine or links free from `at` on.
    pub(crate) fn ready_at(&mut self, id: TaskId, at: u64) {
        self.expect(id, What::Ready, at);
    }

    fn expect(&mut self, id: TaskId, what: What, at: u64) {
        let (Some(timeline), Some(task)) = (&mut self.timeline, self.tasks.get(&id)) else { return };
        let (rank, ticket, node) = (task.rank, task.ticket, task.node);
        timeline.events.push(Reverse(Event { at, what, rank, ticket, node, task: id }));
    }

    /// Takes what the task needs as soon as it is free from `at` on; when it will have ended.
    fn occupy(&mut self, id: TaskId, at: u64) -> Option<u64> {
        let timeline = self.timeline.as_mut()?;
        let task = self.tasks.get(&id)?;
        let (rank, mut begin) = (task.rank, at);
        match &task.work {
            Work::Mark => None,
            Work::Op(op) => {
                let free = &mut timeline.engines[rank as usize];
                begin = begin.max(*free);
                let end = begin.saturating_add(timeline.costs.op_ns(op));
                *free = end;
                if let Some(task) = self.tasks.get_mut(&id) {
                    task.begun = begin;
                }
                Some(end)
            }
            Work::Reads(step) => {
                let reads = step.reads()?;
                let link = timeline.costs.link(&reads.call().group).name.clone();
                let costs = cost_of(&timeline.costs, reads.call());
                let free = timeline.links.entry((rank, link)).or_default();
                begin = begin.max(*free);
                *free = begin.saturating_add(costs.transfer);
                Some(*free)
            }
            Work::Part { group, number, call, step, .. } => {
                let costs = cost_of(&timeline.costs, call);
                let length = match step {
                    Step::Whole => costs.latency.saturating_add(costs.transfer),
                    Step::Enter(_) => costs.latency,
                    Step::Leave(_) => 0,
                };
                let link = &timeline.costs.link(&group.name).name;
                let parts = lock(&group.state).meetings.get(number)?.parts.clone();
                let members: Vec<u32> =
                    parts.iter().flatten().filter_map(|id| Some(self.tasks.get(id)?.rank)).collect();
                let keys: Vec<_> = members.iter().map(|&rank| (rank, link.clone())).collect();
                let free = keys.iter().filter_map(|key| timeline.links.get(key)).max();
                begin = begin.max(free.copied().unwrap_or(0));
                let end = begin.saturating_add(length);
                for key in keys {
                    timeline.links.insert(key, end);
                }
                Some(end)
            }
        }
    }
}

fn cost_of(costs: &CostModel, call: &Call) -> Costs {
    let sum = |(sent, received): (u64, u64), transfer: &sessile_hal::Transfer<_>| {
        let of = |view: &sessile_hal::View<crate::memory::HostMemory>| view.range().bytes();
        (sent.saturating_add(of(&transfer.send)), received.saturating_add(of(&transfer.recv)))
    };
    costs.collective_ns(call.kind, &call.group, call.size, call.transfers.iter().fold((0, 0), sum))
}
