//! Counts faults, so that the same two operations are one violation however often they were replayed.

use std::collections::HashMap;

use super::bytes::Mark;
use super::order::{NONE, Order, Point, accesses};
use super::report::{Hazard, MemoryName, Operation, Reason, Violation, name};
use crate::log::{Entry, Log};

/// Most violations that are listed one by one. More are counted.
const MAX_LISTED: usize = 1 << 16;

/// Where work stands in the program, whichever replay it is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    Node { rank: u32, graph: u32, node: u32 },
    Eager { rank: u32, stream: u32, label: String },
    Host { rank: u32, stream: u32 },
}

impl Place {
    fn of(log: &Log, point: &Point) -> Place {
        let rank = point.rank;
        match &log.ranks[rank as usize].entries[point.entry as usize] {
            Entry::Launch { graph, .. } => Place::Node { rank, graph: *graph, node: point.node },
            Entry::Enqueue { stream, work, label, .. } => {
                Place::Eager { rank, stream: *stream, label: name(work, label) }
            }
            Entry::HostWait { stream, .. } => Place::Host { rank, stream: *stream },
            _ => Place::Host { rank, stream: NONE },
        }
    }
}

/// What makes two faults the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Race {
        first: Place,
        second: Place,
        memory: (u32, u64),
        range: (u64, u64),
        hazard: Hazard,
    },
    Meeting {
        code: &'static str,
        group: String,
        ranks: Vec<u32>,
    },
    /// A fault of one operation, or of one rank.
    One {
        code: &'static str,
        rank: u32,
        what: String,
    },
    Other(usize),
}

struct Found {
    /// Place in program order of the first occurrence, to list by.
    at: (u32, u32, u32, u32),
    violation: Violation,
}

/// The faults of one log.
pub(super) struct Tally<'a> {
    log: &'a Log,
    order: &'a Order,
    known: HashMap<Key, Option<usize>>,
    found: Vec<Found>,
    unlisted: u64,
}

impl<'a> Tally<'a> {
    pub(super) fn new(log: &'a Log, order: &'a Order) -> Tally<'a> {
        Tally { log, order, known: HashMap::new(), found: Vec::new(), unlisted: 0 }
    }

    /// The operation of a point.
    pub(super) fn operation(&self, point: u32) -> Operation {
        Operation::of(self.log, &self.order.points[point as usize])
    }

    /// Counts two accesses that conflict and that nothing orders.
    pub(super) fn race(&mut self, one: &Mark, other: &Mark) {
        let (log, points) = (self.log, &self.order.points);
        let at = |mark: &Mark| {
            let point = &points[mark.point as usize];
            (point.entry, point.rank, point.node)
        };
        let (first, second) = if at(one) <= at(other) { (one, other) } else { (other, one) };
        let (from, to) = (&points[first.point as usize], &points[second.point as usize]);
        let (a, b) = (accesses(log, from)[first.access as usize], accesses(log, to)[second.access as usize]);
        let hazard = match (first.writes, second.writes) {
            (true, true) => Hazard::WriteAfterWrite,
            (false, _) => Hazard::WriteAfterRead,
            (true, false) => Hazard::ReadAfterWrite,
        };
        let (start, end) = (a.start.max(b.start), a.end.min(b.end));
        let key = Key::Race {
            first: Place::of(log, from),
            second: Place::of(log, to),
            memory: (a.rank, a.memory),
            range: (start, end),
            hazard,
        };
        self.add(key, (from.entry, from.rank, to.entry, to.rank), || Reason::Unordered {
            hazard,
            memory: memory(log, a.rank, a.memory),
            start,
            end,
            first: Operation::of(log, from),
            second: Operation::of(log, to),
        });
    }

    /// Counts any other fault.
    pub(super) fn fault(&mut self, reason: Reason) {
        let meeting = |group: &String, ranks: Vec<u32>| Key::Meeting {
            code: reason.code(),
            group: group.clone(),
            ranks,
        };
        let (key, entry) = match &reason {
            Reason::CollectiveMismatch { group, first, second, .. } => {
                (meeting(group, vec![first.rank, second.rank]), first.entry)
            }
            Reason::MissingPart { group, missing, present, .. }
            | Reason::MissingExchange { group, missing, present, .. } => {
                (meeting(group, missing.clone()), present.entry)
            }
            Reason::WindowMismatch { group, rank, .. } => (meeting(group, vec![*rank]), NONE),
            Reason::NeverWritten { memory, reader: by, .. }
            | Reason::DirtyPadding { memory, reader: by, .. }
            | Reason::OutsideView { memory, operation: by, .. }
            | Reason::StaleView { memory, operation: by }
            | Reason::ForeignWindow { memory, operation: by, .. } => {
                let what = format!("{memory} {:?} {:?} {} {:?}", by.graph, by.node, by.label, by.stream);
                (Key::One { code: reason.code(), rank: by.rank, what }, by.entry)
            }
            Reason::AccumulationOrder { memory, entry, .. } => {
                (Key::One { code: reason.code(), rank: memory.rank, what: memory.to_string() }, *entry)
            }
            Reason::ReadyCount { rank, weight, entry, .. } => {
                (Key::One { code: reason.code(), rank: *rank, what: weight.clone() }, *entry)
            }
            Reason::AfterSeal { what, memory, entry } => {
                let what = format!("{what} {memory}");
                (Key::One { code: reason.code(), rank: memory.rank, what }, *entry)
            }
            Reason::NeedlessWait { rank, runner, node, .. } => {
                (Key::One { code: reason.code(), rank: *rank, what: format!("{runner} {node}") }, NONE)
            }
            _ => (Key::Other(self.found.len()), NONE),
        };
        self.add(key, (entry, 0, 0, 0), || reason);
    }

    fn add(&mut self, key: Key, at: (u32, u32, u32, u32), reason: impl FnOnce() -> Reason) {
        if let Some(known) = self.known.get(&key) {
            if let Some(found) = known.and_then(|known| self.found.get_mut(known)) {
                found.violation.count += 1;
            }
        } else if self.found.len() < MAX_LISTED {
            self.known.insert(key, Some(self.found.len()));
            self.found.push(Found { at, violation: Violation { reason: reason(), count: 1 } });
        } else if self.known.len() < 16 * MAX_LISTED {
            self.known.insert(key, None);
            self.unlisted += 1;
        } else {
            // Beyond this the same violation may be counted again: memory stays bounded, and none is hidden.
            self.unlisted += 1;
        }
    }

    /// The violations in program order, and how many are not listed.
    pub(super) fn finish(mut self) -> (Vec<Violation>, u64) {
        self.found.sort_by_key(|found| found.at);
        (self.found.into_iter().map(|found| found.violation).collect(), self.unlisted)
    }
}

pub(super) fn memory(log: &Log, rank: u32, serial: u64) -> MemoryName {
    let owner = log.ranks.iter().find(|log| log.rank == rank);
    let listed = owner.and_then(|log| log.memories.iter().find(|memory| memory.serial == serial));
    MemoryName { rank, serial, label: listed.map(|memory| memory.label.clone()).unwrap_or_default() }
}
