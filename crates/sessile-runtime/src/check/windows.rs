//! Registered memory: only its own group uses it, and all members of a group give the same places of it.

use std::collections::HashMap;

use super::order::{NONE, Point, Role};
use super::report::{Operation, Reason};
use super::tally::memory;
use crate::log::{Entry, Log, LogAccess, LogComm, Mode, RankLog, Work};

/// Kinds whose input, and for the second number also whose output, must be registered.
const REGISTERED: [(&str, bool); 3] = [
    ("symmetric_reduce_scatter", true),
    ("reduce_scatter_accumulate", false),
    ("reduce_scatter_store", false),
];

/// Views in windows: (window in order of registration with the communicator, offset, bytes).
type Places = Vec<(u32, u64, u64)>;

/// One communicator over all ranks: name, ranks, and how many of them the rank had made before.
type Group<'a> = (&'a str, &'a [u32], u32);

/// Where members lie in one collective of a group, in order of rank.
type Meetings<'a> = HashMap<Group<'a>, Vec<Vec<(u32, Places)>>>;

/// Reports every fault of these rules.
pub(super) fn faults(log: &Log, report: &mut dyn FnMut(Reason)) {
    let mut meetings: Meetings<'_> = HashMap::new();
    for at in 0..log.ranks.len() {
        walk(log, at, &mut meetings, report);
    }
    let mut groups: Vec<_> = meetings.iter().collect();
    groups.sort_by_key(|(group, _)| **group);
    for ((name, ..), collectives) in groups {
        for (number, members) in collectives.iter().enumerate() {
            let Some((_, expected)) = members.first() else { continue };
            if let Some((rank, found)) = members.iter().find(|(_, found)| found != expected) {
                report(Reason::WindowMismatch {
                    group: (*name).to_owned(),
                    number: number as u64,
                    rank: *rank,
                    expected: expected.clone(),
                    found: found.clone(),
                });
            }
        }
    }
}

/// A window: the communicator it is registered with, and its number there.
type Window = (u32, u32);

struct Rank<'a> {
    log: &'a RankLog,
    windows: HashMap<u64, Window>,
    registrations: HashMap<u32, u32>,
}

impl Rank<'_> {
    fn registered(&mut self, memory: u64, comm: u32) {
        let number = self.registrations.entry(comm).or_default();
        self.windows.insert(memory, (comm, *number));
        *number += 1;
    }

    /// Where a collective's registered views lie, and which of its accesses are not where they must be: (memory, owner).
    fn places(&self, comm: u32, kind: &str, accesses: &[LogAccess]) -> (Places, Vec<(u64, Option<u32>)>) {
        let needs = REGISTERED.iter().find(|(name, _)| *name == kind).map(|(_, both)| *both);
        let (mut places, mut foreign) = (Vec::new(), Vec::new());
        for access in accesses.iter().filter(|access| access.rank == self.log.rank) {
            let window = self.windows.get(&access.memory);
            let needed = needs.is_some_and(|both| both || access.mode == Mode::Read);
            match window {
                Some((owner, _)) if *owner != comm => foreign.push((access.memory, Some(*owner))),
                None if needed => foreign.push((access.memory, None)),
                Some((_, number)) if needed => {
                    places.push((*number, access.start, access.end - access.start));
                }
                _ => {}
            }
        }
        (places, foreign)
    }
}

fn walk<'a>(log: &'a Log, at: usize, meetings: &mut Meetings<'a>, report: &mut dyn FnMut(Reason)) {
    let rank = &log.ranks[at];
    let groups = groups(&rank.comms);
    let mut numbers = vec![0_usize; rank.comms.len()];
    let mut state = Rank { log: rank, windows: HashMap::new(), registrations: HashMap::new() };
    let mut collective = |state: &Rank<'_>, place: (u32, u32), work: &'a Work, accesses: &[LogAccess]| {
        let Work::Collective { comm, kind } = work else { return };
        let (places, foreign) = state.places(*comm, kind, accesses);
        let number = numbers[*comm as usize];
        numbers[*comm as usize] += 1;
        let collectives = meetings.entry(groups[*comm as usize]).or_default();
        if collectives.len() <= number {
            collectives.resize_with(number + 1, Vec::new);
        }
        if REGISTERED.iter().any(|(name, _)| name == kind) {
            collectives[number].push((rank.rank, places));
        }
        for (serial, owner) in foreign {
            let (entry, node) = place;
            let rank_at = u32::try_from(at).unwrap_or(u32::MAX);
            let point = Point { role: Role::Work, rank: rank_at, entry, node, chain: NONE, number: 0 };
            let name = |comm: u32| rank.comms[comm as usize].name.clone();
            report(Reason::ForeignWindow {
                memory: memory(log, rank.rank, serial),
                owner: owner.map(name),
                group: name(*comm),
                operation: Operation::of(log, &point),
            });
        }
    };
    for (entry_at, entry) in rank.entries.iter().enumerate() {
        let entry_at = u32::try_from(entry_at).unwrap_or(u32::MAX);
        match entry {
            Entry::Registered { memory, comm } => state.registered(*memory, *comm),
            // Fresh bytes are not registered any more.
            Entry::Fresh { accesses } => {
                for access in accesses.iter().filter(|access| access.rank == rank.rank) {
                    state.windows.remove(&access.memory);
                }
            }
            Entry::Enqueue { work, accesses, .. } => collective(&state, (entry_at, NONE), work, accesses),
            Entry::Launch { graph, .. } => {
                for (node_at, node) in rank.graphs[*graph as usize].nodes.iter().enumerate() {
                    let place = (entry_at, u32::try_from(node_at).unwrap_or(u32::MAX));
                    collective(&state, place, &node.work, &node.accesses);
                }
            }
            _ => {}
        }
    }
}

fn groups(comms: &[LogComm]) -> Vec<Group<'_>> {
    let mut made: HashMap<(&str, &[u32]), u32> = HashMap::new();
    comms
        .iter()
        .map(|comm| {
            let count = made.entry((&comm.name, &comm.ranks)).or_default();
            let group = (comm.name.as_str(), comm.ranks.as_slice(), *count);
            *count += 1;
            group
        })
        .collect()
}
