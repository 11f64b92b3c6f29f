//! The engine: a graph of tasks, each of which runs when all it depends on has ended.
//!
//! Dependencies are settled at enqueue: the last task of the stream, the latest record of an event, the previous
//! launch of a graph, the previous collective of a communicator. They always point to earlier tasks, so there are
//! no cycles within a rank. A collective is one *part* a rank and one *meeting* of all parts: it runs as a whole
//! when every part is ready, and ends every part.
//!
//! ```text
//! rank 0   gemm ── part ┐            ┌── add
//!                       ├─ meeting 7 ┤
//! rank 1   gemm ── part ┘            └── add
//! ```
//!
//! A task that is not in the table has ended. Everything here happens under one lock; operations run outside it.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use sessile_hal::{DeviceError, Op, Span, Ticket};

use crate::capture::Capture;
use crate::collective::{Call, Joint, Reads};
use crate::comm::{Failure, Group, Meeting, Origin};
use crate::exchange::Name;
use crate::executor::simulated::Timeline;
use crate::graph::{GraphCell, NodeWork};
use crate::kernel;
use crate::memory::{HostMemory, Lease};
use crate::sync::{Arc, Condvar, Mutex, Weak, lock};
use crate::waiting::Wait;

/// A task's number, from 1, in order of enqueue.
pub(crate) type TaskId = u64;

/// Stands for a task that has ended.
pub(crate) const DONE: TaskId = 0;

/// What a task does.
pub(crate) enum Work {
    /// Nothing: joins its dependencies.
    Mark,
    Op(Arc<Op<HostMemory>>),
    /// One member's part of a meeting.
    Part {
        group: Arc<Group>,
        number: u64,
        call: Arc<Call>,
        step: Step,
        origin: Option<Origin>,
    },
    /// Between two meetings: one member reads its peers' memory.
    Reads(Arc<ReadStep>),
}

/// One member's part of a meeting, before it has its number.
struct Part<'a> {
    group: &'a Arc<Group>,
    call: &'a Arc<Call>,
    origin: Option<Origin>,
    step: Step,
}

/// What a meeting is for.
#[derive(Clone)]
pub(crate) enum Step {
    /// The whole collective.
    Whole,
    /// All members have come: their memory may be read.
    Enter(Arc<ReadStep>),
    /// All members have read: their memory may be written again.
    Leave(Arc<ReadStep>),
}

/// One member's reading of its peers' memory.
#[derive(Default)]
pub(crate) struct ReadStep(Mutex<ReadState>);

#[derive(Default, Clone)]
struct ReadState {
    /// Known once all members have come.
    reads: Option<Arc<Reads>>,
    begun: u64,
}

impl ReadStep {
    /// What is read, once it is known.
    pub(crate) fn reads(&self) -> Option<Arc<Reads>> {
        lock(&self.0).reads.clone()
    }
}

pub(crate) struct Task {
    pub(crate) rank: u32,
    pub(crate) ticket: Ticket,
    pub(crate) node: Option<u32>,
    pub(crate) work: Work,
    /// What it waited for at its enqueue; some may have ended since.
    pub(crate) dependencies: Vec<TaskId>,
    dependents: Vec<TaskId>,
    blockers: usize,
    /// Host time of the enqueue, on the virtual clock.
    enqueued: u64,
    pub(crate) begun: u64,
}

/// Whether a rank's program can still enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// No thread of [`crate::World::run`] stands for it.
    Idle,
    Attached,
    Gone,
}

pub(crate) struct RankState {
    pub(crate) tickets: u64,
    pub(crate) streams: u32,
    pub(crate) events: u64,
    pub(crate) capture: Option<Capture>,
    pub(crate) presence: Presence,
    pub(crate) waiting: Option<Wait>,
    pub(crate) outcome: Option<Result<(), DeviceError>>,
    /// What its work ran into; the next named wait for the device reports it.
    pub(crate) fault: Option<DeviceError>,
    pub(crate) spans: Vec<Span>,
    /// By how much collectives delayed the kernels among the spans, on the virtual clock.
    pub(crate) delay_ns: u64,
    /// Where its program stands on the virtual clock.
    pub(crate) host_time: u64,
}

pub(crate) enum Clock {
    Wall(Instant),
    Steps(u64),
    /// Nanoseconds.
    Virtual(u64),
}

pub(crate) struct Engine {
    pub(crate) tasks: HashMap<TaskId, Task>,
    last_id: TaskId,
    /// Tasks that can run; a meeting stands here as its first member's part.
    pub(crate) ready: VecDeque<TaskId>,
    /// How many became ready since workers were last woken.
    pub(crate) fresh: usize,
    /// Jobs that workers have.
    pub(crate) running: usize,
    pub(crate) clock: Clock,
    pub(crate) ranks: Vec<RankState>,
    pub(crate) hosts: Arc<Vec<Condvar>>,
    pub(crate) names: HashMap<String, Name>,
    pub(crate) groups: Vec<Weak<Group>>,
    pub(crate) policy: crate::executor::scheduled::Policy,
    /// On the virtual clock only.
    pub(crate) timeline: Option<Timeline>,
    pub(crate) shape_only: bool,
    pub(crate) record_spans: bool,
    pub(crate) omit_exit_meeting: bool,
    pub(crate) shutdown: bool,
}

/// Ready work with the right to its bytes.
pub(crate) struct Job {
    /// The task, or all parts of the meeting.
    tasks: Vec<TaskId>,
    lease: Lease,
    kind: JobKind,
}

enum JobKind {
    Op(Arc<Op<HostMemory>>),
    Joint(Joint),
    Reads(Arc<Reads>),
    /// Without data there is nothing to do.
    Nothing,
}

impl Job {
    /// Does the work and gives the bytes back. `real_time`: whether spinning takes time.
    pub(crate) fn run(mut self, real_time: bool) -> (Vec<TaskId>, Result<(), DeviceError>) {
        let result = match &self.kind {
            JobKind::Op(op) => kernel::run(op, &mut self.lease, real_time),
            JobKind::Joint(joint) => {
                joint.run(&mut self.lease);
                Ok(())
            }
            JobKind::Reads(reads) => {
                reads.run(&mut self.lease);
                Ok(())
            }
            JobKind::Nothing => Ok(()),
        };
        (self.tasks, result)
    }
}

impl Engine {
    pub(crate) fn new(
        ranks: usize,
        hosts: Arc<Vec<Condvar>>,
        clock: Clock,
        policy: crate::executor::scheduled::Policy,
        options: &crate::WorldOptions,
    ) -> Self {
        let rank = || RankState {
            tickets: 0,
            streams: 0,
            events: 0,
            capture: None,
            presence: Presence::Idle,
            waiting: None,
            outcome: None,
            fault: None,
            spans: Vec::new(),
            delay_ns: 0,
            host_time: 0,
        };
        Engine {
            tasks: HashMap::new(),
            last_id: DONE,
            ready: VecDeque::new(),
            fresh: 0,
            running: 0,
            ranks: (0..ranks).map(|_| rank()).collect(),
            hosts,
            names: HashMap::new(),
            groups: Vec::new(),
            policy,
            timeline: matches!(clock, Clock::Virtual(_)).then(|| Timeline::new(options.costs.clone(), ranks)),
            shape_only: options.data != crate::Data::Real,
            clock,
            record_spans: options.record_spans,
            omit_exit_meeting: options.omit_exit_meeting,
            shutdown: false,
        }
    }

    pub(crate) fn now(&self) -> u64 {
        match self.clock {
            Clock::Wall(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Clock::Steps(now) | Clock::Virtual(now) => now,
        }
    }

    /// The number of a rank's next enqueue.
    pub(crate) fn ticket(&mut self, rank: u32) -> Ticket {
        let tickets = &mut self.ranks[rank as usize].tickets;
        *tickets += 1;
        Ticket(*tickets)
    }

    /// The host of `rank` takes time to enqueue something.
    pub(crate) fn spend(&mut self, rank: u32, graph: bool) {
        if let Some(timeline) = &self.timeline {
            self.ranks[rank as usize].host_time += timeline.host_ns(graph);
        }
    }

    /// Adds a task. [`DONE`] if it has nothing to do or to wait for.
    pub(crate) fn add(
        &mut self,
        rank: u32,
        ticket: Ticket,
        node: Option<u32>,
        work: Work,
        after: &[TaskId],
    ) -> TaskId {
        let mut dependencies: Vec<TaskId> =
            after.iter().copied().filter(|id| self.tasks.contains_key(id)).collect();
        dependencies.sort_unstable();
        dependencies.dedup();
        if let Work::Mark = work {
            match dependencies[..] {
                [] => return DONE,
                [only] => return only,
                _ => {}
            }
        }
        self.last_id += 1;
        let id = self.last_id;
        for dependency in &dependencies {
            if let Some(task) = self.tasks.get_mut(dependency) {
                task.dependents.push(id);
            }
        }
        let blockers = dependencies.len();
        let enqueued = self.ranks[rank as usize].host_time;
        let dependents = Vec::new();
        let task = Task { rank, ticket, node, work, dependencies, dependents, blockers, enqueued, begun: 0 };
        self.tasks.insert(id, task);
        if blockers == 0 {
            let now = self.now();
            if self.unblocked(id, now) {
                self.finish(id, now);
            }
        }
        id
    }

    /// Adds a member's part of the group's next collective: one meeting, or two with the reading of peers' memory
    /// between them.
    pub(crate) fn add_collective(
        &mut self,
        rank: u32,
        ticket: Ticket,
        node: Option<u32>,
        (group, call, origin): (&Arc<Group>, &Arc<Call>, Option<Origin>),
        after: &[TaskId],
    ) -> TaskId {
        let part = |step| Part { group, call, origin: origin.clone(), step };
        if !call.reads_peers() {
            return self.add_part(rank, ticket, node, part(Step::Whole), after);
        }
        let step = Arc::new(ReadStep::default());
        let enter = self.add_part(rank, ticket, node, part(Step::Enter(step.clone())), after);
        let reads = self.add(rank, ticket, node, Work::Reads(step.clone()), &[enter]);
        if self.omit_exit_meeting {
            return reads;
        }
        self.add_part(rank, ticket, node, part(Step::Leave(step)), &[reads])
    }

    /// Adds a member's part of the group's next meeting.
    fn add_part(
        &mut self,
        rank: u32,
        ticket: Ticket,
        node: Option<u32>,
        Part { group, call, origin, step }: Part<'_>,
        after: &[TaskId],
    ) -> TaskId {
        let Some(member) = group.seat(rank) else { return DONE };
        let id = self.last_id + 1; // what `add` will give
        let (number, previous, mismatch) = {
            let mut state = lock(&group.state);
            let (number, previous) = (state.next[member], state.last[member]);
            state.next[member] += 1;
            state.last[member] = id;
            let failed = state.failed.as_ref().is_some_and(|(from, _)| number >= *from);
            let mut mismatch = None;
            if !failed {
                let size = group.seats.len();
                let mine = call.signature();
                let meeting = state.meetings.entry(number).or_insert_with(|| Meeting {
                    parts: vec![None; size],
                    ready: 0,
                    ready_at: 0,
                    first: (rank, mine.clone()),
                });
                meeting.parts[member] = Some(id);
                let (peer, theirs) = meeting.first.clone();
                mismatch = (theirs != mine).then(|| DeviceError::CollectiveMismatch {
                    group: group.name.clone(),
                    number,
                    rank: peer,
                    have: theirs.to_string(),
                    peer: rank,
                    want: mine.to_string(),
                });
            }
            (number, previous, mismatch)
        };
        if let Some(error) = mismatch {
            self.fail_group(group, number, Failure::Mismatch(error));
        }
        let mut after = after.to_vec();
        after.push(previous);
        let work = Work::Part { group: group.clone(), number, call: call.clone(), step, origin };
        self.add(rank, ticket, node, work, &after)
    }

    /// Expands a launch into tasks; the task that ends with the last node.
    pub(crate) fn launch(&mut self, graph: &GraphCell, ticket: Ticket, tail: TaskId) -> TaskId {
        let rank = graph.rank;
        let launch = 1 + graph.launches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let start = self.add(rank, ticket, None, Work::Mark, &[tail, graph.launched.get()]);
        let mut ids: Vec<TaskId> = Vec::with_capacity(graph.nodes.len());
        for (index, node) in (0u32..).zip(&graph.nodes) {
            let mut after: Vec<TaskId> = node.dependencies.iter().map(|&d| ids[d as usize]).collect();
            if after.is_empty() {
                after.push(start);
            }
            let at = Some(index);
            let id = match &node.work {
                NodeWork::Op(op) => self.add(rank, ticket, at, Work::Op(op.clone()), &after),
                NodeWork::Collective { group, call } => {
                    let origin = Origin { graph: graph.label.clone(), launch };
                    self.add_collective(rank, ticket, at, (group, call, Some(origin)), &after)
                }
                NodeWork::Record(event) => {
                    let id = self.add(rank, ticket, at, Work::Mark, &after);
                    event.set_latest(id);
                    id
                }
                NodeWork::Wait(event) => {
                    // The latest record enqueued before, which may be a node of this launch.
                    after.push(event.latest());
                    self.add(rank, ticket, at, Work::Mark, &after)
                }
            };
            ids.push(id);
        }
        let mut ends: Vec<TaskId> = graph.sinks.iter().map(|&sink| ids[sink as usize]).collect();
        ends.push(start);
        let end = self.add(rank, ticket, None, Work::Mark, &ends);
        graph.launched.set(end);
        end
    }

    /// A task's dependencies have ended. Whether it has nothing left to do.
    fn unblocked(&mut self, id: TaskId, now: u64) -> bool {
        let Some(task) = self.tasks.get_mut(&id) else { return false };
        // Only on the virtual clock can a host be ahead of its device.
        let now = now.max(task.enqueued);
        task.begun = now;
        let rank = task.rank;
        match &task.work {
            Work::Mark => true,
            Work::Op(_) => {
                self.make_ready(id, now);
                false
            }
            // If the members never met, the meeting has told why.
            Work::Reads(step) if step.reads().is_none() => true,
            Work::Reads(_) => {
                self.make_ready(id, now);
                false
            }
            Work::Part { group, number, step, origin, .. } => {
                if let Step::Enter(step) = step {
                    lock(&step.0).begun = now;
                }
                let mut state = lock(&group.state);
                if let Some((from, failure)) = &state.failed
                    && number >= from
                {
                    let error = group.error(failure, rank, *number, origin.as_ref());
                    drop(state);
                    self.ranks[rank as usize].fault.get_or_insert(error);
                    return true;
                }
                if let Some(meeting) = state.meetings.get_mut(number) {
                    meeting.ready += 1;
                    meeting.ready_at = meeting.ready_at.max(now);
                    if let (true, Some(first)) = (meeting.ready == meeting.parts.len(), meeting.parts[0]) {
                        let at = meeting.ready_at;
                        drop(state);
                        self.make_ready(first, at);
                    }
                }
                false
            }
        }
    }

    /// A task, or a meeting by its first part, can run.
    fn make_ready(&mut self, id: TaskId, at: u64) {
        if self.timeline.is_some() {
            return self.ready_at(id, at);
        }
        self.ready.push_back(id);
        self.fresh += 1;
    }

    /// Ends a task, and every mark that thereby has nothing left to wait for.
    fn finish(&mut self, id: TaskId, now: u64) {
        let mut ended = vec![id];
        while let Some(id) = ended.pop() {
            let Some(task) = self.tasks.remove(&id) else { continue };
            for dependent in task.dependents {
                let Some(waiting) = self.tasks.get_mut(&dependent) else { continue };
                waiting.blockers -= 1;
                if waiting.blockers == 0 && self.unblocked(dependent, now) {
                    ended.push(dependent);
                }
            }
        }
    }

    /// From collective `from` on, the group's collectives do nothing and fail.
    pub(crate) fn fail_group(&mut self, group: &Arc<Group>, from: u64, failure: Failure) {
        let mut stuck: Vec<(u64, TaskId)> = {
            let mut state = lock(&group.state);
            if state.failed.as_ref().is_some_and(|(earlier, _)| *earlier <= from) {
                return;
            }
            state.failed = Some((from, failure.clone()));
            let (failed, whole) = state.meetings.drain().partition(|(number, _)| *number >= from);
            state.meetings = whole;
            let failed: HashMap<u64, Meeting> = failed;
            failed
                .into_iter()
                .flat_map(|(n, m)| m.parts.into_iter().flatten().map(move |id| (n, id)))
                .collect()
        };
        stuck.sort_unstable();
        let now = self.now();
        for (number, id) in stuck {
            if let Some(task) = self.tasks.get(&id).filter(|task| task.blockers == 0) {
                let rank = task.rank;
                let origin = match &task.work {
                    Work::Part { origin, .. } => origin.as_ref(),
                    _ => None,
                };
                let error = group.error(&failure, rank, number, origin);
                self.ranks[rank as usize].fault.get_or_insert(error);
                self.finish(id, now);
            }
        }
    }

    /// Takes the ready task at `index` as a job, if its bytes are free.
    pub(crate) fn claim(&mut self, index: usize) -> Option<Job> {
        let id = *self.ready.get(index)?;
        let job = self.job(id)?;
        self.ready.remove(index);
        if let (Clock::Wall(_), JobKind::Op(_)) = (&self.clock, &job.kind) {
            let now = self.now();
            if let Some(task) = self.tasks.get_mut(&id) {
                task.begun = now;
            }
        }
        Some(job)
    }

    /// A ready task, or a meeting by its first part, as a job, if its bytes are free.
    pub(crate) fn job(&self, id: TaskId) -> Option<Job> {
        let task = self.tasks.get(&id)?;
        let job = match &task.work {
            Work::Mark => return None,
            _ if self.shape_only => {
                let tasks = match &task.work {
                    Work::Part { group, number, .. } => {
                        lock(&group.state).meetings.get(number)?.parts.iter().flatten().copied().collect()
                    }
                    _ => vec![id],
                };
                Job { tasks, lease: Lease::nothing(), kind: JobKind::Nothing }
            }
            Work::Op(op) => {
                let lease = Lease::acquire(
                    op.operands().iter().map(|o| (o.view.memory(), o.view.range(), o.access.writes())),
                )?;
                Job { tasks: vec![id], lease, kind: JobKind::Op(op.clone()) }
            }
            Work::Reads(step) => {
                let reads = step.reads()?;
                Job { tasks: vec![id], lease: reads.lease()?, kind: JobKind::Reads(reads) }
            }
            Work::Part { group, number, .. } => {
                let state = lock(&group.state);
                let tasks: Vec<TaskId> =
                    state.meetings.get(number)?.parts.iter().flatten().copied().collect();
                let call = |id| match self.tasks.get(id).map(|task| &task.work) {
                    Some(Work::Part { call, .. }) => Some(call.clone()),
                    _ => None,
                };
                let joint = Joint { calls: tasks.iter().filter_map(call).collect() };
                Job { lease: joint.lease()?, tasks, kind: JobKind::Joint(joint) }
            }
        };
        Some(job)
    }

    /// Ends a job's tasks.
    pub(crate) fn complete(&mut self, tasks: &[TaskId], result: Result<(), DeviceError>) {
        let now = self.now();
        self.let_read(tasks);
        for id in tasks {
            let Some(task) = self.tasks.get(id) else { continue };
            let rank = &mut self.ranks[task.rank as usize];
            // Three steps of one collective are one span.
            let begin = match &task.work {
                Work::Part { step: Step::Enter(_), .. } => None,
                Work::Part { step: Step::Leave(step), .. } => Some(lock(&step.0).begun),
                Work::Reads(step) => self.omit_exit_meeting.then(|| lock(&step.0).begun),
                _ => Some(task.begun),
            };
            if let (true, Some(begin)) = (self.record_spans, begin) {
                rank.spans.push(Span { ticket: task.ticket, node: task.node, begin, end: now });
            }
            if let Err(error) = &result {
                rank.fault.get_or_insert_with(|| error.clone());
            }
            if let Work::Part { group, number, .. } = &task.work {
                lock(&group.state).meetings.remove(number);
            }
        }
        for id in tasks {
            self.finish(*id, now);
        }
    }

    /// If these tasks are a meeting that lets its members read: tells each what.
    fn let_read(&self, tasks: &[TaskId]) {
        let parts = tasks.iter().filter_map(|id| match self.tasks.get(id).map(|task| &task.work) {
            Some(Work::Part { call, step: Step::Enter(step), .. }) => Some((call, step)),
            _ => None,
        });
        let parts: Vec<_> = parts.collect();
        let calls: Vec<Arc<Call>> = parts.iter().map(|(call, _)| (*call).clone()).collect();
        for (call, step) in parts {
            lock(&step.0).reads = Reads::of(call, &calls).map(Arc::new);
        }
    }

    /// What a pending task will read of its peers, if all members have enqueued the meeting before it.
    pub(crate) fn will_read(&self, task: &Task) -> Option<Reads> {
        let enter = task.dependencies.iter().find_map(|id| self.tasks.get(id))?;
        let Work::Part { group, number, call, step: Step::Enter(_), .. } = &enter.work else { return None };
        let parts = lock(&group.state).meetings.get(number)?.parts.clone();
        let call_of = |id: &Option<TaskId>| match &self.tasks.get(&(*id)?)?.work {
            Work::Part { call, .. } => Some(call.clone()),
            _ => None,
        };
        let calls = parts.iter().map(call_of).collect::<Option<Vec<_>>>()?;
        Reads::of(call, &calls)
    }

    /// An error if a stream of `rank` captures.
    pub(crate) fn forbid_in_capture(&self, rank: u32, call: &'static str) -> Result<(), DeviceError> {
        match &self.ranks[rank as usize].capture {
            Some(capture) => Err(DeviceError::ForbiddenInCapture {
                call,
                stream: sessile_hal::Stream::label(capture.origin()).to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// A rank gives a communicator up: nothing of it that has not ended will have any effect.
    pub(crate) fn abort(&mut self, group: &Arc<Group>, by: u32) {
        let from = {
            let state = lock(&group.state);
            state.meetings.keys().chain(&state.next).copied().min().unwrap_or(0)
        };
        self.fail_group(group, from, Failure::Aborted(by));
    }

    /// A rank's program runs (again). Groups that only lost members which have all come back work on.
    pub(crate) fn attach(&mut self, rank: u32) {
        self.ranks[rank as usize].presence = Presence::Attached;
        for group in self.groups.iter().filter_map(Weak::upgrade) {
            let mut state = lock(&group.state);
            let lost = matches!(state.failed, Some((_, Failure::Lost(_))));
            if lost && state.next.iter().all(|next| *next == state.next[0]) {
                state.failed = None;
            }
        }
    }

    /// A rank's program has ended: what others wait for from it will not come.
    pub(crate) fn leave(&mut self, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        state.presence = Presence::Gone;
        state.waiting = None;
        state.capture = None;
        for group in self.groups.iter().filter_map(Weak::upgrade).collect::<Vec<_>>() {
            if let Some(member) = group.seat(rank) {
                let from = lock(&group.state).next[member];
                self.fail_group(&group, from, Failure::Lost(rank));
            }
        }
        self.settle();
    }

    /// Takes out tasks that wait for each other in a circle (collectives of two groups in crossed order). Their
    /// ranks are told.
    pub(crate) fn give_up(&mut self) -> HashMap<TaskId, Task> {
        let stuck = std::mem::take(&mut self.tasks);
        for task in stuck.values() {
            let what = "work of an earlier run, which was given up".to_owned();
            self.ranks[task.rank as usize]
                .fault
                .get_or_insert(DeviceError::Stalled { rank: task.rank, what });
            if let Work::Part { group, number, .. } = &task.work {
                lock(&group.state).meetings.remove(number);
            }
        }
        stuck
    }
}
