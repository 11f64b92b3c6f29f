//! What a rank's program may do, and when: views, seals, and how often gradients become ready.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::order::{NONE, Point, Role};
use super::report::{Operation, Reason};
use super::tally::memory;
use crate::log::{Entry, Log, LogAccess, LogGraph, LogMemory, RankLog};

/// Reports every fault of these rules.
pub(super) fn faults(log: &Log, report: &mut dyn FnMut(Reason)) {
    for (at, rank) in log.ranks.iter().enumerate() {
        let memories = rank.memories.iter().map(|memory| (memory.serial, memory)).collect();
        let mut program = Program {
            log,
            at,
            rank,
            memories,
            sealed: false,
            remapped: BTreeSet::new(),
            arenas: BTreeSet::new(),
            stale: BTreeSet::new(),
            checked: BTreeSet::new(),
        };
        program.run(report);
        ready_counts(rank, report);
    }
}

struct Program<'a> {
    log: &'a Log,
    at: usize,
    rank: &'a RankLog,
    memories: HashMap<u64, &'a LogMemory>,
    sealed: bool,
    /// Memory that was mapped again since the seal: it is registered anew.
    remapped: BTreeSet<u64>,
    /// Arenas of the sealed plan.
    arenas: BTreeSet<u64>,
    /// Arenas of plans that were given up.
    stale: BTreeSet<u64>,
    /// Graphs whose views were checked.
    checked: BTreeSet<u32>,
}

impl Program<'_> {
    fn run(&mut self, report: &mut dyn FnMut(Reason)) {
        for (at, entry) in self.rank.entries.iter().enumerate() {
            let at = u32::try_from(at).unwrap_or(u32::MAX);
            match entry {
                Entry::Sealed { arenas } => {
                    self.sealed = true;
                    self.remapped.clear();
                    self.arenas = arenas.iter().copied().collect();
                }
                Entry::Released {} => {
                    self.sealed = false;
                    self.stale.append(&mut self.arenas);
                }
                Entry::Fresh { accesses } => self.fresh(at, accesses, report),
                Entry::Registered { memory, .. } if self.sealed && !self.remapped.contains(memory) => {
                    let memory = self.name(*memory);
                    report(Reason::AfterSeal { what: "registration", memory, entry: at });
                }
                Entry::Enqueue { accesses, .. } | Entry::HostWait { accesses, .. } => {
                    self.stale_views((at, NONE), accesses, report);
                }
                Entry::Launch { graph, .. } => {
                    let logged = &self.rank.graphs[*graph as usize];
                    for (node, logged) in logged.nodes.iter().enumerate() {
                        self.stale_views((at, node as u32), &logged.accesses, report);
                    }
                    if self.checked.insert(*graph) {
                        self.views(at, logged, report);
                    }
                }
                _ => {}
            }
        }
    }

    fn name(&self, serial: u64) -> super::MemoryName {
        memory(self.log, self.rank.rank, serial)
    }

    fn operation(&self, (entry, node): (u32, u32)) -> Operation {
        let rank = u32::try_from(self.at).unwrap_or(u32::MAX);
        Operation::of(self.log, &Point { role: Role::Work, rank, entry, node, chain: NONE, number: 0 })
    }

    fn own<'b>(&self, accesses: &'b [LogAccess]) -> impl Iterator<Item = &'b LogAccess> + use<'b> {
        let rank = self.rank.rank;
        accesses.iter().filter(move |access| access.rank == rank)
    }

    /// An allocation, or a second mapping of one that the log has seen before.
    fn fresh(&mut self, at: u32, accesses: &[LogAccess], report: &mut dyn FnMut(Reason)) {
        for access in self.own(accesses) {
            let serial = access.memory;
            if self.arenas.contains(&serial) || self.remapped.contains(&serial) {
                self.remapped.insert(serial);
            } else if self.sealed && self.memories.get(&serial).is_some_and(|memory| memory.symmetric) {
                report(Reason::AfterSeal { what: "allocation", memory: self.name(serial), entry: at });
            }
        }
    }

    fn stale_views(&self, place: (u32, u32), accesses: &[LogAccess], report: &mut dyn FnMut(Reason)) {
        if self.stale.is_empty() {
            return;
        }
        for access in self.own(accesses).filter(|access| self.stale.contains(&access.memory)) {
            report(Reason::StaleView { memory: self.name(access.memory), operation: self.operation(place) });
        }
    }

    /// Every byte of an arena that a graph touches lies in one of its views.
    fn views(&self, at: u32, graph: &LogGraph, report: &mut dyn FnMut(Reason)) {
        let Some(views) = &graph.views else { return };
        for (node, logged) in graph.nodes.iter().enumerate() {
            for access in self.own(&logged.accesses) {
                let arena = self.memories.get(&access.memory).is_some_and(|memory| memory.arena);
                let within = views.iter().any(|view| {
                    view.memory == access.memory && view.start <= access.start && access.end <= view.end
                });
                if arena && !within && access.start < access.end {
                    report(Reason::OutsideView {
                        memory: self.name(access.memory),
                        start: access.start,
                        end: access.end,
                        operation: self.operation((at, node as u32)),
                    });
                }
            }
        }
    }
}

/// In steps of one name every gradient becomes ready equally often. The first one is eager.
fn ready_counts(rank: &RankLog, report: &mut dyn FnMut(Reason)) {
    let mut steps: Vec<(&str, u32, BTreeMap<&str, u64>)> = Vec::new();
    for (at, entry) in rank.entries.iter().enumerate() {
        match entry {
            Entry::Step { name } => {
                steps.push((name, u32::try_from(at).unwrap_or(u32::MAX), BTreeMap::new()));
            }
            Entry::Ready { weight } => {
                if let Some((_, _, counts)) = steps.last_mut() {
                    *counts.entry(weight).or_default() += 1;
                }
            }
            _ => {}
        }
    }
    let mut first: HashMap<&str, usize> = HashMap::new();
    for (at, (name, entry, found)) in steps.iter().enumerate().filter(|(_, step)| !step.0.is_empty()) {
        let expected = &steps[*first.entry(name).or_insert(at)].2;
        let weights: BTreeSet<&str> = expected.keys().chain(found.keys()).copied().collect();
        for weight in weights {
            let count = |counts: &BTreeMap<&str, u64>| counts.get(weight).copied().unwrap_or(0);
            let (expected, found) = (count(expected), count(found));
            if expected != found {
                report(Reason::ReadyCount {
                    rank: rank.rank,
                    weight: weight.to_owned(),
                    step: (*name).to_owned(),
                    entry: *entry,
                    expected,
                    found,
                });
            }
        }
    }
}
