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
//! Where collectives delay kernels, the end of a running kernel moves with each collective that begins or ends beside it: a
//! later revision of the event takes the place of the earlier one.
//!
//! Events are handled only while every host is blocked. A host goes on at the time of the event that ended its wait, or
//! later, so nothing is ever enqueued in the past.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use sessile_hal::Ticket;

use crate::collective::Call;
use crate::contention::Contention;
use crate::cost::{CostModel, Costs};
use crate::engine::{Clock, Engine, Step, TaskId, Work};
use crate::executor::compute::{Compute, Running};
use crate::sync::lock;

/// What happens next, and when everything is free again.
pub(crate) struct Timeline {
    costs: CostModel,
    events: BinaryHeap<Reverse<Event>>,
    /// Each rank's kernels.
    engines: Vec<Compute>,
    /// Collectives that delay kernels, and of which ranks.
    in_flight: HashMap<TaskId, Vec<u32>>,
    /// When each rank's links are free.
    links: HashMap<(u32, String), u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// Its work is over: before anything else that happens at the same time.
    Ends,
    /// It is in flight, and delays kernels.
    Begins,
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
    /// Of a kernel's end: 0 of all else.
    revision: u64,
}

impl Timeline {
    pub(crate) fn new(costs: CostModel, ranks: usize) -> Self {
        let engines = (0..ranks).map(|_| Compute::new(costs.contention)).collect();
        let (events, in_flight, links) = (BinaryHeap::new(), HashMap::new(), HashMap::new());
        Timeline { costs, events, engines, in_flight, links }
    }

    /// The next event that is still to happen.
    fn next(&mut self) -> Option<Event> {
        loop {
            let Reverse(event) = self.events.pop()?;
            if event.revision == 0 || self.engines[event.rank as usize].expects(event.revision) {
                return Some(event);
            }
        }
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
        let Some(event) = engine.timeline.as_mut().and_then(Timeline::next) else {
            engine.stall();
            return;
        };
        engine.clock = Clock::Virtual(event.at);
        match event.what {
            What::Ready => engine.occupy(event.task, event.at),
            What::Begins => engine.crowd(event.task, event.at),
            What::Ends => {
                engine.vacate(&event);
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
        self.expect(id, What::Ready, at, 0);
    }

    fn expect(&mut self, id: TaskId, what: What, at: u64, revision: u64) {
        let (Some(timeline), Some(task)) = (&mut self.timeline, self.tasks.get(&id)) else { return };
        let (rank, ticket, node) = (task.rank, task.ticket, task.node);
        timeline.events.push(Reverse(Event { at, what, rank, ticket, node, task: id, revision }));
    }

    /// A kernel runs: where its end is known, it is to be expected.
    fn expect_kernel(&mut self, running: Option<Running>) {
        let Some(Running { task, begun, end, revision }) = running else { return };
        if let Some(task) = self.tasks.get_mut(&task) {
            task.begun = begun;
        }
        if let Some(end) = end {
            self.expect(task, What::Ends, end, revision);
        }
    }

    /// Takes what the task needs as soon as it is free from `at` on.
    fn occupy(&mut self, id: TaskId, at: u64) {
        let (Some(timeline), Some(task)) = (&mut self.timeline, self.tasks.get(&id)) else { return };
        if let Work::Op(op) = &task.work {
            let alone = timeline.costs.op_ns(op);
            let running = timeline.engines[task.rank as usize].push(id, alone, at);
            return self.expect_kernel(running);
        }
        let contends = timeline.costs.contention != Contention::NONE;
        let Some((begin, end)) = self.occupy_links(id, at) else { return };
        if contends && begin < end {
            self.expect(id, What::Begins, begin, 0);
        }
        self.expect(id, What::Ends, end, 0);
    }

    /// Takes the links of a collective: from when until when.
    fn occupy_links(&mut self, id: TaskId, at: u64) -> Option<(u64, u64)> {
        let members = self.members(id)?;
        let timeline = self.timeline.as_mut()?;
        let (link, length) = match &self.tasks.get(&id)?.work {
            Work::Mark | Work::Op(_) => return None,
            Work::Reads(step) => {
                let reads = step.reads()?;
                let link = timeline.costs.link(&reads.call().group).name.clone();
                (link, cost_of(&timeline.costs, reads.call()).transfer)
            }
            Work::Part { group, call, step, .. } => {
                let costs = cost_of(&timeline.costs, call);
                let length = match step {
                    Step::Whole => costs.latency.saturating_add(costs.transfer),
                    Step::Enter(_) => costs.latency,
                    Step::Leave(_) => 0,
                };
                (timeline.costs.link(&group.name).name.clone(), length)
            }
        };
        let keys: Vec<_> = members.iter().map(|&rank| (rank, link.clone())).collect();
        let free = keys.iter().filter_map(|key| timeline.links.get(key)).max();
        let begin = at.max(free.copied().unwrap_or(0));
        let end = begin.saturating_add(length);
        timeline.links.extend(keys.into_iter().map(|key| (key, end)));
        Some((begin, end))
    }

    /// The ranks whose links a collective takes, and whose kernels it delays.
    fn members(&self, id: TaskId) -> Option<Vec<u32>> {
        let task = self.tasks.get(&id)?;
        match &task.work {
            Work::Mark | Work::Op(_) => None,
            Work::Reads(_) => Some(vec![task.rank]),
            Work::Part { group, number, .. } => {
                let parts = lock(&group.state).meetings.get(number)?.parts.clone();
                Some(parts.iter().flatten().filter_map(|id| Some(self.tasks.get(id)?.rank)).collect())
            }
        }
    }

    /// A collective is in flight from `at` on.
    fn crowd(&mut self, id: TaskId, at: u64) {
        let Some(members) = self.members(id) else { return };
        for &rank in &members {
            self.set_beside(rank, at, |collectives| collectives + 1);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.in_flight.insert(id, members);
        }
    }

    /// What had its turn, or was in flight, is so no longer.
    fn vacate(&mut self, event: &Event) {
        let Some(timeline) = &mut self.timeline else { return };
        let rank = event.rank as usize;
        if event.revision != 0 {
            let (delay, running) = timeline.engines[rank].pop(event.at);
            if self.record_spans {
                self.ranks[rank].delay_ns += delay;
            }
            return self.expect_kernel(running);
        }
        for rank in timeline.in_flight.remove(&event.task).into_iter().flatten() {
            self.set_beside(rank, event.at, |collectives| collectives - 1);
        }
    }

    fn set_beside(&mut self, rank: u32, at: u64, change: impl Fn(u64) -> u64) {
        let Some(timeline) = &mut self.timeline else { return };
        let compute = &mut timeline.engines[rank as usize];
        let running = compute.set_beside(change(compute.beside()), at);
        self.expect_kernel(running);
    }
}

fn cost_of(costs: &CostModel, call: &Call) -> Costs {
    let sum = |(sent, received): (u64, u64), transfer: &sessile_hal::Transfer<_>| {
        let of = |view: &sessile_hal::View<crate::memory::HostMemory>| view.range().bytes();
        (sent.saturating_add(of(&transfer.send)), received.saturating_add(of(&transfer.recv)))
    };
    costs.collective_ns(call.kind, &call.group, call.size, call.transfers.iter().fold((0, 0), sum))
}
