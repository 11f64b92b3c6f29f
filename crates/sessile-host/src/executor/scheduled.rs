//! The seeded scheduler: one task at a time, in an order that the policy picks among all legal ones.
//!
//! # The adversarial orders
//!
//! A race is a pair of tasks of one rank that touch the same bytes, one of them writing, which no chain of
//! dependencies orders. The program *meant* the order of enqueue. So the adversary looks for pairs whose earlier
//! task is still to run, and *holds* that task until the later one has run:
//!
//! - [`Order::WritersEarly`] holds an earlier reader while a later writer of its bytes is pending and not ordered
//!   after it (write after read), and an earlier writer likewise (write after write); if such a reader stands between
//!   two writers, the later writer is held for the earlier one instead, so that it runs between writer and reader;
//! - [`Order::ReadersEarly`] holds an earlier writer while such a reader is pending (read after write), or a
//!   writer.
//!
//! A later task that is ordered after the held one can't run before it anyway, so in a program without races
//! nothing is held, and where one edge is missing the pair does run in the wrong order: everything else goes first,
//! and nothing else stands between the later task and its turn. Pairs that host code orders can't race and are not
//! seen here either: the later task isn't enqueued yet. Among tasks that are not held, those that a host waits for
//! go first (so that others are as late as they can be when the host enqueues more), the latest enqueued first.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use sessile_hal::{ByteRange, MemoryId, Transfer};

use super::Order;
use crate::engine::{Clock, Engine, Step, Task, TaskId, Work};
use crate::sync::lock;

/// How the next task is picked.
pub(crate) struct Policy {
    order: Order,
    rng: fastrand::Rng,
}

impl Policy {
    pub(crate) fn new(order: Order, seed: u64) -> Self {
        Policy { order, rng: fastrand::Rng::with_seed(seed) }
    }
}

/// Runs tasks until some host can go on, or nothing is left to run: then every host that still waits has stalled.
/// Call it only while every host is blocked.
pub(crate) fn run(engine: &mut Engine) {
    let lookahead = (engine.policy.order != Order::Random).then(|| Lookahead::new(engine));
    loop {
        if engine.settle() {
            return;
        }
        if engine.ready.is_empty() {
            engine.stall();
            return;
        }
        let index = pick(engine, lookahead.as_ref());
        let job = engine.claim(index).or_else(|| (0..engine.ready.len()).find_map(|at| engine.claim(at)));
        // Bytes can be in use only by a host that is not blocked; it will call again.
        let Some(job) = job else { return };
        let (tasks, result) = job.run(false);
        if let Clock::Steps(steps) = &mut engine.clock {
            *steps += 1;
        }
        engine.complete(&tasks, result);
    }
}

/// Position of a task in its rank's program; the rank breaks ties, so that the order does not depend on which host
/// thread was faster.
fn enqueued(task: &Task) -> (u64, Option<u32>, u32) {
    (task.ticket.0, task.node, task.rank)
}

/// The index of the ready task to run next.
fn pick(engine: &mut Engine, lookahead: Option<&Lookahead>) -> usize {
    let mut choices: Vec<_> = (0..engine.ready.len())
        .filter_map(|index| {
            let id = engine.ready[index];
            let task = engine.tasks.get(&id)?;
            let held = lookahead.is_some_and(|ahead| ahead.holds(engine, id));
            let needless = lookahead.is_some_and(|ahead| !ahead.needed.contains(&id));
            Some((held, needless, Reverse(enqueued(task)), index))
        })
        .collect();
    choices.sort_unstable();
    let at = match choices.first() {
        // Every order is legal, or the adversary must let one of the held go: any.
        Some((held, ..)) if lookahead.is_none() || *held => engine.policy.rng.usize(..choices.len()),
        _ => 0,
    };
    choices.get(at).map_or(0, |choice| choice.3)
}

/// Pending tasks beyond this many, in order of enqueue, are not looked at: the search is quadratic.
const HORIZON: usize = 8192;

/// What the adversary knows while all hosts are blocked: nothing is enqueued meanwhile, so it stays true.
struct Lookahead {
    needed: HashSet<TaskId>,
    /// The later tasks for which an earlier one is held.
    held_for: HashMap<TaskId, Vec<TaskId>>,
}

/// One use of bytes by a pending task.
struct Use {
    range: ByteRange,
    writes: bool,
    enqueued: (u64, Option<u32>, u32),
    task: TaskId,
    node: usize,
}

impl Lookahead {
    fn new(engine: &Engine) -> Self {
        let order = Merged::new(engine);
        let mut uses: HashMap<MemoryId, Vec<Use>> = HashMap::new();
        for (id, task) in &engine.tasks {
            let Some(&node) = order.node_of.get(id) else { continue };
            let mut add = |view: &sessile_hal::View<crate::memory::HostMemory>, writes| {
                let memory = sessile_hal::Memory::id(view.memory());
                let used = Use { range: view.range(), writes, enqueued: enqueued(task), task: *id, node };
                uses.entry(memory).or_default().push(used);
            };
            match &task.work {
                Work::Mark => {}
                Work::Op(op) => op.operands().iter().for_each(|o| add(&o.view, o.access.writes())),
                Work::Part { step: Step::Whole, call, .. } => {
                    for Transfer { send, recv } in &call.transfers {
                        add(send, false);
                        add(recv, true);
                    }
                }
                Work::Part { step: Step::Enter(_) | Step::Leave(_), .. } => {}
                Work::Reads(step) => {
                    let reads = step.reads().or_else(|| engine.will_read(task).map(std::sync::Arc::new));
                    for (view, writes) in reads.iter().flat_map(|reads| reads.uses()) {
                        add(view, writes);
                    }
                }
            }
        }
        let writers_early = engine.policy.order == Order::WritersEarly;
        let mut held_for: HashMap<TaskId, Vec<TaskId>> = HashMap::new();
        for uses in uses.values_mut() {
            uses.sort_unstable_by_key(|used| used.enqueued);
            for (at, early) in uses.iter().enumerate() {
                for late in &uses[at + 1..] {
                    let sought = if writers_early { late.writes } else { early.writes };
                    if sought && early.range.overlaps(late.range) && order.unordered(early.node, late.node) {
                        // Held back, a writer would take its own reader along, and both would see what they should.
                        // What shows is the late writer between the two: so it waits for the early one, and the
                        // reader is held for it.
                        let read_between = |used: &Use| {
                            !used.writes
                                && used.enqueued < late.enqueued
                                && used.range.overlaps(early.range)
                                && used.range.overlaps(late.range)
                                && order.unordered(used.node, late.node)
                        };
                        if writers_early && early.writes && uses[at + 1..].iter().any(read_between) {
                            held_for.entry(late.task).or_default().push(early.task);
                            continue;
                        }
                        held_for.entry(early.task).or_default().push(late.task);
                    }
                }
            }
        }
        Lookahead { needed: engine.needed(), held_for }
    }

    /// Whether the ready task (or any part of its meeting) is to wait for a later one.
    fn holds(&self, engine: &Engine, id: TaskId) -> bool {
        let pending = |id: &TaskId| {
            self.held_for.get(id).is_some_and(|late| late.iter().any(|late| engine.tasks.contains_key(late)))
        };
        match engine.tasks.get(&id).map(|task| &task.work) {
            Some(Work::Part { group, number, .. }) => {
                let state = lock(&group.state);
                state.meetings.get(number).is_some_and(|m| m.parts.iter().flatten().any(pending))
            }
            _ => pending(&id),
        }
    }
}

/// Pending tasks with the parts of a collective merged into one node, and who is ordered before whom.
struct Merged {
    node_of: HashMap<TaskId, usize>,
    /// Bit set of ancestors of each node.
    ancestors: Vec<Vec<u64>>,
}

impl Merged {
    fn new(engine: &Engine) -> Self {
        let mut ids: Vec<TaskId> = engine.tasks.keys().copied().collect();
        ids.sort_unstable();
        ids.truncate(HORIZON);
        let mut node_of: HashMap<TaskId, usize> = HashMap::new();
        let mut nodes: Vec<Vec<TaskId>> = Vec::new();
        for &id in &ids {
            if node_of.contains_key(&id) {
                continue;
            }
            let mut members = vec![id];
            if let Some(Work::Part { group, number, .. }) = engine.tasks.get(&id).map(|task| &task.work)
                && let Some(meeting) = lock(&group.state).meetings.get(number)
            {
                members.extend(meeting.parts.iter().flatten().filter(|part| **part != id));
            }
            for member in &members {
                node_of.insert(*member, nodes.len());
            }
            nodes.push(members);
        }
        let mut before: Vec<Vec<usize>> = Vec::with_capacity(nodes.len());
        let mut after: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
        for (node, members) in nodes.iter().enumerate() {
            let mut from: Vec<usize> = members
                .iter()
                .filter_map(|id| engine.tasks.get(id))
                .flat_map(|task| task.dependencies.iter().filter_map(|id| node_of.get(id).copied()))
                .collect();
            from.sort_unstable();
            from.dedup();
            for &earlier in &from {
                after[earlier].push(node);
            }
            before.push(from);
        }
        let words = nodes.len().div_ceil(64);
        let mut ancestors: Vec<Vec<u64>> = vec![Vec::new(); nodes.len()];
        let mut blockers: Vec<usize> = before.iter().map(Vec::len).collect();
        let mut open: Vec<usize> = (0..nodes.len()).filter(|&node| blockers[node] == 0).collect();
        while let Some(node) = open.pop() {
            let mut set = vec![0u64; words];
            for &earlier in &before[node] {
                set[earlier / 64] |= 1 << (earlier % 64);
                for (word, other) in set.iter_mut().zip(&ancestors[earlier]) {
                    *word |= other;
                }
            }
            ancestors[node] = set;
            for &later in &after[node] {
                blockers[later] -= 1;
                if blockers[later] == 0 {
                    open.push(later);
                }
            }
        }
        Merged { node_of, ancestors }
    }

    fn unordered(&self, a: usize, b: usize) -> bool {
        let has = |of: usize, node: usize| {
            self.ancestors[of].get(node / 64).is_some_and(|word| word >> (node % 64) & 1 == 1)
        };
        a != b && !has(a, b) && !has(b, a)
    }
}
