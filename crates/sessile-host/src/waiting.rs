//! Named waits: what a blocked host waits for, and when it can stop.

use std::collections::HashSet;
use std::time::Instant;

use sessile_hal::{ByteRange, DeviceError};

use crate::comm::{Failure, Group};
use crate::engine::{Engine, Presence, TaskId, Work};
use crate::executor;
use crate::memory::{HostMemory, Lease};
use crate::sync::{Arc, MutexGuard, lock, wait_for};
use crate::world::Core;

/// What a blocked host waits for.
#[derive(Clone)]
pub(crate) enum Wait {
    /// The end of a task.
    Task { task: TaskId, stream: String },
    /// All payloads of an exchange.
    Exchange { group: Arc<Group>, number: u64 },
    /// All members of a new communicator.
    Join { group: Arc<Group> },
    /// Any change: bytes it wants are in use.
    Turn,
}

/// A member that somebody waits for, and in what.
struct Missing {
    rank: u32,
    what: String,
}

impl Core {
    /// Blocks `rank` until `wait` is over, nothing can end it any more, or the deadline passes.
    pub(crate) fn block<'a>(
        &'a self,
        mut engine: MutexGuard<'a, Engine>,
        rank: u32,
        wait: Wait,
    ) -> (MutexGuard<'a, Engine>, Result<(), DeviceError>) {
        if let Some(outcome) = engine.judge(rank, &wait) {
            return (engine, outcome);
        }
        let at = rank as usize;
        let begun = Instant::now();
        engine.ranks[at].waiting = Some(wait);
        engine.ranks[at].outcome = None;
        loop {
            self.advance(&mut engine);
            if let Some(outcome) = engine.ranks[at].outcome.take() {
                return (engine, outcome);
            }
            let deadline = self.options.deadline;
            let left = deadline.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let wait = engine.ranks[at].waiting.take();
                let error = match wait.as_ref().and_then(|wait| engine.missing(wait)) {
                    Some(Missing { rank: missing, what }) => {
                        DeviceError::PeerTimeout { rank, missing, what, after: deadline }
                    }
                    None => DeviceError::Stalled { rank, what: engine.describe(wait.as_ref()) },
                };
                return (engine, Err(error));
            }
            engine = wait_for(&self.hosts[at], engine, left);
        }
    }

    /// What only a moment without running hosts allows: the scheduler's steps, and the verdict that nothing will
    /// happen any more.
    pub(crate) fn advance(&self, engine: &mut Engine) {
        let stepped = self.options.mode.is_stepped();
        if !engine.all_blocked(stepped) {
            return;
        }
        if stepped {
            executor::step(engine);
        } else if engine.ready.is_empty() && engine.running == 0 {
            engine.stall();
        }
    }

    /// A lease for the host of `rank`, which waits its turn if an operation in flight uses the bytes.
    pub(crate) fn host_lease<'a>(
        &'a self,
        mut engine: MutexGuard<'a, Engine>,
        rank: u32,
        memory: &HostMemory,
        range: ByteRange,
        writes: bool,
    ) -> Result<Lease, DeviceError> {
        loop {
            if let Some(lease) = Lease::acquire([(memory, range, writes)]) {
                return Ok(lease);
            }
            let outcome;
            (engine, outcome) = self.block(engine, rank, Wait::Turn);
            outcome?;
        }
    }

    /// Gives a host's lease back and lets those go on that waited for it.
    pub(crate) fn return_lease(&self, lease: Lease) {
        drop(lease);
        let mut engine = lock(&self.engine);
        engine.settle();
        engine.fresh += engine.ready.len();
        self.poke(&mut engine);
    }
}

impl Engine {
    /// Whether no host can enqueue anything now.
    fn all_blocked(&self, idle_counts: bool) -> bool {
        self.ranks.iter().all(|rank| match rank.presence {
            Presence::Gone => true,
            Presence::Idle => idle_counts || rank.waiting.is_some(),
            Presence::Attached => rank.waiting.is_some(),
        })
    }

    /// The outcome of a wait, if it has one by now.
    fn judge(&mut self, rank: u32, wait: &Wait) -> Option<Result<(), DeviceError>> {
        let gone = |r: &u32| self.ranks[*r as usize].presence == Presence::Gone;
        match wait {
            Wait::Task { task, .. } => {
                if self.tasks.contains_key(task) {
                    return None;
                }
                let now = self.now();
                let state = &mut self.ranks[rank as usize];
                state.host_time = state.host_time.max(now);
                Some(state.fault.take().map_or(Ok(()), Err))
            }
            Wait::Exchange { group, number } => {
                let state = lock(&group.state);
                if state.rounds.missing(*number).is_none() {
                    drop(state);
                    self.meet(rank, group);
                    return Some(Ok(()));
                }
                if let Some((from, failure @ Failure::Aborted(_))) = &state.failed {
                    return Some(Err(group.error(failure, rank, *from, None)));
                }
                let lost = (0..).zip(&group.seats).find(|(m, r)| gone(r) && state.rounds.lacks(*number, *m));
                lost.map(|(_, &peer)| {
                    Err(DeviceError::PeerLost {
                        rank,
                        peer,
                        what: format!("exchange {number} of `{}`", group.name),
                    })
                })
            }
            Wait::Join { group } => {
                let state = lock(&group.state);
                if state.refused {
                    return Some(Err(DeviceError::BadGroup {
                        name: group.name.clone(),
                        ranks: group.ranks.clone(),
                        why: "a member asked for other ranks under this name",
                    }));
                }
                if state.present.iter().all(|&present| present) {
                    drop(state);
                    self.meet(rank, group);
                    return Some(Ok(()));
                }
                let lost = state.present.iter().zip(&group.seats).find(|(present, r)| !**present && gone(r));
                lost.map(|(_, &peer)| {
                    Err(DeviceError::PeerLost { rank, peer, what: format!("communicator `{}`", group.name) })
                })
            }
            Wait::Turn => None,
        }
    }

    /// Hosts of a group have met: on the virtual clock, at the time of the last.
    fn meet(&mut self, rank: u32, group: &Group) {
        let last = group.seats.iter().map(|&member| self.ranks[member as usize].host_time).max();
        self.ranks[rank as usize].host_time = last.unwrap_or(0);
    }

    /// Ends the waits that are over. Whether there were any.
    pub(crate) fn settle(&mut self) -> bool {
        let mut any = false;
        for rank in 0..self.ranks.len() {
            let Some(wait) = self.ranks[rank].waiting.take() else { continue };
            let outcome = match wait {
                Wait::Turn => Some(Ok(())),
                _ => self.judge(rank as u32, &wait),
            };
            match outcome {
                None => self.ranks[rank].waiting = Some(wait),
                Some(outcome) => {
                    self.ranks[rank].outcome = Some(outcome);
                    self.hosts[rank].notify_all();
                    any = true;
                }
            }
        }
        any
    }

    /// Nothing can run any more: every wait fails.
    pub(crate) fn stall(&mut self) {
        for rank in 0..self.ranks.len() {
            if let Some(wait) = self.ranks[rank].waiting.take() {
                let what = self.describe(Some(&wait));
                self.ranks[rank].outcome = Some(Err(DeviceError::Stalled { rank: rank as u32, what }));
                self.hosts[rank].notify_all();
            }
        }
    }

    fn describe(&self, wait: Option<&Wait>) -> String {
        let what = match wait {
            Some(Wait::Task { stream, .. }) => format!("stream `{stream}`"),
            Some(Wait::Exchange { group, number }) => format!("exchange {number} of `{}`", group.name),
            Some(Wait::Join { group }) => format!("communicator `{}`", group.name),
            Some(Wait::Turn) | None => "bytes that are in use".to_owned(),
        };
        match (wait, wait.and_then(|wait| self.missing(wait))) {
            (Some(Wait::Task { .. }), Some(Missing { rank, what: in_what })) => {
                format!("{what}: {in_what} lacks rank {rank}")
            }
            (_, Some(Missing { rank, .. })) => format!("{what}: rank {rank} is missing"),
            _ => what,
        }
    }

    /// A member whose arrival the wait hangs on.
    fn missing(&self, wait: &Wait) -> Option<Missing> {
        match wait {
            Wait::Task { task, .. } => self.missing_behind(*task),
            Wait::Exchange { group, number } => {
                let member = lock(&group.state).rounds.missing(*number)?;
                Some(Missing {
                    rank: group.seats[member],
                    what: format!("exchange {number} of `{}`", group.name),
                })
            }
            Wait::Join { group } => {
                let member = lock(&group.state).present.iter().position(|&present| !present)?;
                Some(Missing { rank: group.seats[member], what: format!("communicator `{}`", group.name) })
            }
            Wait::Turn => None,
        }
    }

    /// Searches what `task` depends on, over all ranks, for a collective that lacks a member.
    fn missing_behind(&self, task: TaskId) -> Option<Missing> {
        let mut seen = HashSet::from([task]);
        let mut open = vec![task];
        while let Some(id) = open.pop() {
            let Some(task) = self.tasks.get(&id) else { continue };
            let mut next = task.dependencies.clone();
            if let Work::Part { group, number, origin, .. } = &task.work {
                let state = lock(&group.state);
                if let Some(meeting) = state.meetings.get(number) {
                    if let Some(member) = meeting.parts.iter().position(Option::is_none) {
                        let what = group.describe(*number, origin.as_ref());
                        return Some(Missing { rank: group.seats[member], what });
                    }
                    next.extend(meeting.parts.iter().flatten());
                }
            }
            open.extend(next.into_iter().filter(|id| seen.insert(*id)));
        }
        None
    }

    /// The tasks that some host waits for, with all they depend on.
    pub(crate) fn needed(&self) -> HashSet<TaskId> {
        let mut seen = HashSet::new();
        let mut open: Vec<TaskId> = Vec::new();
        for rank in &self.ranks {
            if let Some(Wait::Task { task, .. }) = &rank.waiting {
                open.push(*task);
            }
        }
        while let Some(id) = open.pop() {
            let Some(task) = self.tasks.get(&id) else { continue };
            if !seen.insert(id) {
                continue;
            }
            open.extend(&task.dependencies);
            if let Work::Part { group, number, .. } = &task.work
                && let Some(meeting) = lock(&group.state).meetings.get(number)
            {
                open.extend(meeting.parts.iter().flatten());
            }
        }
        seen
    }
}
