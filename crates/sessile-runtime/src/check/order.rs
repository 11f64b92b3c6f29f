//! The log as a directed graph of points.

use std::collections::{HashMap, HashSet};

use super::lanes::cover;
use super::report::{Operation, Reason};
use crate::log::{Entry, Log, LogAccess, RankLog, Work};

/// No node, no chain.
pub(super) const NONE: u32 = u32::MAX;

/// Most points of a log that is checked: some 3 GiB of them.
const MAX_POINTS: u64 = 1 << 25;

/// Most chains.
const MAX_CHAINS: u64 = 1 << 14;

/// Most ranks, or operations of a ring, that one fault names.
pub(super) const MAX_NAMED: usize = 64;

/// What a point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Work that is one piece, with its accesses.
    Work,
    /// Start of a rank's part of a collective, with its accesses.
    Start,
    /// End of that part.
    End,
    /// Where the parts of a collective, or hosts, meet.
    Meet,
    /// Entry or exit of a launch.
    Border,
}

/// A point of the order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) role: Role,
    /// Place in [`Log::ranks`].
    pub(super) rank: u32,
    /// Place in the rank's entries.
    pub(super) entry: u32,
    /// The node of the launched graph.
    pub(super) node: u32,
    /// The chain it belongs to, if it touches bytes.
    pub(super) chain: u32,
    /// Its number in the chain, from 1.
    pub(super) number: u32,
}

/// Lists of points by point, packed.
pub(super) struct Lists {
    starts: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    fn of(points: usize, edges: &[(u32, u32)], key: impl Fn(&(u32, u32)) -> (u32, u32)) -> Lists {
        let mut starts = vec![0_u32; points + 1];
        for edge in edges {
            starts[key(edge).0 as usize + 1] += 1;
        }
        for at in 0..points {
            starts[at + 1] += starts[at];
        }
        let mut free = starts.clone();
        let mut items = vec![0; edges.len()];
        for edge in edges {
            let (from, to) = key(edge);
            let place = &mut free[from as usize];
            items[*place as usize] = to;
            *place += 1;
        }
        Lists { starts, items }
    }

    pub(super) fn get(&self, at: u32) -> &[u32] {
        let at = at as usize;
        &self.items[self.starts[at] as usize..self.starts[at + 1] as usize]
    }
}

/// A part of a collective that was enqueued.
pub(super) struct Part {
    /// Place in [`Log::ranks`].
    pub(super) rank: u32,
    /// The kind it was enqueued as.
    pub(super) kind: String,
    /// Its start.
    pub(super) point: u32,
}

/// A meeting of a communicator's members, in a collective or of their hosts.
struct Meeting {
    point: u32,
    parts: Vec<Part>,
}

/// One communicator, seen from all ranks.
struct Group {
    name: String,
    ranks: Vec<u32>,
    collectives: Vec<Meeting>,
    exchanges: Vec<Meeting>,
}

/// The points of a log and their edges.
pub(super) struct Order {
    pub(super) points: Vec<Point>,
    pub(super) before: Lists,
    pub(super) after: Lists,
    pub(super) chains: u32,
    /// Faults of the meetings.
    pub(super) faults: Vec<Reason>,
}

impl Order {
    /// Builds the order of a valid log.
    ///
    /// # Errors
    /// A [`Reason::TooLarge`] if the log is beyond what is checked.
    pub(super) fn of(log: &Log) -> Result<Order, Box<Reason>> {
        let needed: u64 = log.ranks.iter().map(points_needed).fold(0, u64::saturating_add);
        let limit = |what, needed, limit| Err(Box::new(Reason::TooLarge { what, needed, limit }));
        if needed > MAX_POINTS {
            return limit("points", needed, MAX_POINTS);
        }
        let mut build = Build::default();
        for rank in 0..log.ranks.len() {
            build.rank(log, rank);
        }
        if build.edges.len() > u32::MAX as usize {
            return limit("edges", build.edges.len() as u64, u64::from(u32::MAX));
        }
        let chains = build.chain_lengths.len();
        if chains as u64 > MAX_CHAINS {
            return limit("chains", chains as u64, MAX_CHAINS);
        }
        let faults = build.faults(log);
        let Build { points, edges, .. } = build;
        Ok(Order {
            before: Lists::of(points.len(), &edges, |&(from, to)| (to, from)),
            after: Lists::of(points.len(), &edges, |&(from, to)| (from, to)),
            chains: u32::try_from(chains).unwrap_or(u32::MAX),
            points,
            faults,
        })
    }
}

/// An upper bound of the points, or of the edges inside graphs if that is more.
fn points_needed(log: &RankLog) -> u64 {
    let cost = |graph: &crate::log::LogGraph| {
        let edges: usize = graph.nodes.iter().map(|node| node.dependencies.len()).sum();
        2 + 3 * graph.nodes.len() as u64 + edges as u64 / 4
    };
    let graphs: Vec<u64> = log.graphs.iter().map(cost).collect();
    let entries = log.entries.iter().map(|entry| match entry {
        Entry::Launch { graph, .. } => graphs.get(*graph as usize).copied().unwrap_or(0),
        _ => 3,
    });
    entries.fold(0, u64::saturating_add)
}

/// The bytes that a point touches.
pub(super) fn accesses<'a>(log: &'a Log, point: &Point) -> &'a [LogAccess] {
    if !matches!(point.role, Role::Work | Role::Start) {
        return &[];
    }
    let rank = &log.ranks[point.rank as usize];
    match &rank.entries[point.entry as usize] {
        Entry::Launch { graph, .. } => &rank.graphs[*graph as usize].nodes[point.node as usize].accesses,
        Entry::Enqueue { accesses, .. } | Entry::HostWait { accesses, .. } | Entry::Fresh { accesses } => {
            accesses
        }
        _ => &[],
    }
}

#[derive(Default)]
struct Build {
    points: Vec<Point>,
    edges: Vec<(u32, u32)>,
    chain_lengths: Vec<u32>,
    groups: Vec<Group>,
    /// Place in `groups` by name, ranks, and how many of that name and ranks the rank had made before.
    group_of: HashMap<(String, Vec<u32>, u32), usize>,
}

/// Lanes of a graph and the chains they became.
struct GraphChains {
    lanes: Vec<Option<u32>>,
    first: u32,
}

/// Where one rank's program stands.
struct Program<'a> {
    log: &'a RankLog,
    /// Place in [`Log::ranks`].
    at: u32,
    /// What the host has met so far.
    host: Option<u32>,
    host_chain: Option<u32>,
    tails: Vec<Option<u32>>,
    /// What the host had met when the tail was enqueued: then the tail follows it already.
    tail_host: Vec<Option<u32>>,
    stream_chains: Vec<Option<u32>>,
    /// Latest record enqueued, by event.
    records: HashMap<u32, u32>,
    graphs: Vec<Option<GraphChains>>,
    /// Exit of the latest launch, by graph.
    launches: Vec<Option<u32>>,
    /// Place in `Build::groups`, by communicator.
    groups: Vec<usize>,
    /// Number of collectives and end of the latest, by communicator.
    collectives: Vec<(usize, Option<u32>)>,
    exchanges: Vec<usize>,
}

impl Build {
    fn point(&mut self, role: Role, place: (u32, u32, u32), before: impl IntoIterator<Item = u32>) -> u32 {
        let id = u32::try_from(self.points.len()).unwrap_or(u32::MAX);
        let (rank, entry, node) = place;
        self.points.push(Point { role, rank, entry, node, chain: NONE, number: 0 });
        self.edges.extend(before.into_iter().map(|from| (from, id)));
        id
    }

    fn new_chains(&mut self, count: u32) -> u32 {
        let first = u32::try_from(self.chain_lengths.len()).unwrap_or(u32::MAX);
        self.chain_lengths.resize(self.chain_lengths.len() + count as usize, 0);
        first
    }

    /// Makes the point the next operation of a chain.
    fn join_chain(&mut self, point: u32, chain: u32) {
        let number = &mut self.chain_lengths[chain as usize];
        *number += 1;
        let number = *number;
        let point = &mut self.points[point as usize];
        (point.chain, point.number) = (chain, number);
    }

    fn rank(&mut self, log: &Log, at: usize) {
        let rank = &log.ranks[at];
        let mut made: HashMap<(&str, &[u32]), u32> = HashMap::new();
        let mut groups = Vec::new();
        for comm in &rank.comms {
            let count = made.entry((&comm.name, &comm.ranks)).or_default();
            let key = (comm.name.clone(), comm.ranks.clone(), *count);
            *count += 1;
            let next = self.groups.len();
            let group = *self.group_of.entry(key).or_insert(next);
            if group == next {
                self.groups.push(Group {
                    name: comm.name.clone(),
                    ranks: comm.ranks.clone(),
                    collectives: Vec::new(),
                    exchanges: Vec::new(),
                });
            }
            groups.push(group);
        }
        let mut program = Program {
            log: rank,
            at: u32::try_from(at).unwrap_or(u32::MAX),
            host: None,
            host_chain: None,
            tails: vec![None; rank.streams.len()],
            tail_host: vec![None; rank.streams.len()],
            stream_chains: vec![None; rank.streams.len()],
            records: HashMap::new(),
            graphs: rank.graphs.iter().map(|_| None).collect(),
            launches: vec![None; rank.graphs.len()],
            groups,
            collectives: vec![(0, None); rank.comms.len()],
            exchanges: vec![0; rank.comms.len()],
        };
        for (entry, what) in rank.entries.iter().enumerate() {
            let entry = u32::try_from(entry).unwrap_or(u32::MAX);
            match what {
                Entry::Enqueue { stream, work, accesses, .. } => {
                    self.eager(&mut program, entry, *stream as usize, work, !accesses.is_empty());
                }
                Entry::Launch { stream, graph, .. } => {
                    self.launch(&mut program, entry, *stream as usize, *graph as usize);
                }
                Entry::HostWait { stream, accesses } => {
                    let before = program.host.into_iter().chain(program.tails[*stream as usize]);
                    let point = self.point(Role::Work, (program.at, entry, NONE), before);
                    if !accesses.is_empty() {
                        let chain = *program.host_chain.get_or_insert_with(|| self.new_chains(1));
                        self.join_chain(point, chain);
                    }
                    program.host = Some(point);
                }
                Entry::Fresh { accesses } => {
                    let point = self.point(Role::Work, (program.at, entry, NONE), program.host);
                    if !accesses.is_empty() {
                        let chain = *program.host_chain.get_or_insert_with(|| self.new_chains(1));
                        self.join_chain(point, chain);
                    }
                    program.host = Some(point);
                }
                Entry::Registered { .. }
                | Entry::Sealed { .. }
                | Entry::Released {}
                | Entry::Step { .. }
                | Entry::Discovering { .. }
                | Entry::Ready { .. } => {}
                Entry::Exchange { comm } => {
                    let comm = *comm as usize;
                    let number = program.exchanges[comm];
                    program.exchanges[comm] += 1;
                    // The arrival is a point of its own so that a report can name it.
                    let arrival = self.point(Role::Border, (program.at, entry, NONE), program.host);
                    let group = program.groups[comm];
                    let part = Part { rank: program.at, kind: "exchange".to_owned(), point: arrival };
                    program.host = Some(self.meet(group, number, part, |group| &mut group.exchanges));
                }
            }
        }
    }

    fn eager(&mut self, program: &mut Program<'_>, entry: u32, stream: usize, work: &Work, touches: bool) {
        let mut before: Vec<u32> = program.tails[stream].into_iter().collect();
        if program.tails[stream].is_none() || program.tail_host[stream] != program.host {
            before.extend(program.host);
        }
        if let Work::Wait(event) = work {
            before.extend(program.records.get(event));
        }
        let chain = if touches {
            *program.stream_chains[stream].get_or_insert_with(|| self.new_chains(1))
        } else {
            NONE
        };
        let (_, end) = self.work(program, (entry, NONE), work, before, chain);
        if let Work::Record(event) = work {
            program.records.insert(*event, end);
        }
        program.tails[stream] = Some(end);
        program.tail_host[stream] = program.host;
    }

    fn launch(&mut self, program: &mut Program<'_>, entry: u32, stream: usize, graph: usize) {
        let log = program.log;
        let nodes = &log.graphs[graph].nodes;
        if program.graphs[graph].is_none() {
            // Only what touches bytes needs a place in a chain.
            let (lanes, count) = cover(nodes, |node| !node.accesses.is_empty());
            program.graphs[graph] = Some(GraphChains { lanes, first: self.new_chains(count) });
        }
        let before = program.tails[stream].into_iter().chain(program.host).chain(program.launches[graph]);
        let before: Vec<u32> = before.collect();
        let enter = self.point(Role::Border, (program.at, entry, NONE), before);
        let mut ends = Vec::with_capacity(nodes.len());
        let mut last = vec![true; nodes.len()];
        for (at, node) in nodes.iter().enumerate() {
            let mut before: Vec<u32> = node.dependencies.iter().map(|&on| ends[on as usize]).collect();
            node.dependencies.iter().for_each(|&on| last[on as usize] = false);
            if before.is_empty() {
                before.push(enter);
            }
            if let Work::Wait(event) = &node.work {
                before.extend(program.records.get(event));
            }
            let chain = program.graphs[graph]
                .as_ref()
                .and_then(|chains| chains.lanes[at].map(|lane| chains.first + lane))
                .unwrap_or(NONE);
            let place = (entry, u32::try_from(at).unwrap_or(u32::MAX));
            let (_, end) = self.work(program, place, &node.work, before, chain);
            ends.push(end);
            if let Work::Record(event) = &node.work {
                program.records.insert(*event, end);
            }
        }
        let outer = ends.iter().zip(&last).filter(|&(_, last)| *last).map(|(&end, _)| end);
        let leave = self.point(Role::Border, (program.at, entry, NONE), outer.chain([enter]));
        program.launches[graph] = Some(leave);
        program.tails[stream] = Some(leave);
        program.tail_host[stream] = program.host;
    }

    /// Adds one piece of work; returns where it starts and ends.
    fn work(
        &mut self,
        program: &mut Program<'_>,
        (entry, node): (u32, u32),
        work: &Work,
        mut before: Vec<u32>,
        chain: u32,
    ) -> (u32, u32) {
        let place = (program.at, entry, node);
        let Work::Collective { comm, kind } = work else {
            let point = self.point(Role::Work, place, before);
            if chain != NONE {
                self.join_chain(point, chain);
            }
            return (point, point);
        };
        let comm = *comm as usize;
        let (number, latest) = program.collectives[comm];
        before.extend(latest);
        let start = self.point(Role::Start, place, before);
        let part = Part { rank: program.at, kind: kind.clone(), point: start };
        let meeting = self.meet(program.groups[comm], number, part, |group| &mut group.collectives);
        let end = self.point(Role::End, place, [meeting]);
        if chain != NONE {
            self.join_chain(start, chain);
            let Point { chain, number, .. } = self.points[start as usize];
            let end = &mut self.points[end as usize];
            (end.chain, end.number) = (chain, number);
        }
        program.collectives[comm] = (number + 1, Some(end));
        (start, end)
    }

    /// Adds a part to the n-th meeting of a group; returns the point where they meet.
    fn meet(
        &mut self,
        group: usize,
        number: usize,
        part: Part,
        of: impl Fn(&mut Group) -> &mut Vec<Meeting>,
    ) -> u32 {
        if of(&mut self.groups[group]).len() <= number {
            let Point { rank, entry, node, .. } = self.points[part.point as usize];
            let point = self.point(Role::Meet, (rank, entry, node), []);
            of(&mut self.groups[group]).push(Meeting { point, parts: Vec::new() });
        }
        let meeting = &mut of(&mut self.groups[group])[number];
        self.edges.push((part.point, meeting.point));
        let point = meeting.point;
        meeting.parts.push(part);
        point
    }

    /// What is wrong with the meetings: members that did not come, members that came to something else.
    fn faults(&self, log: &Log) -> Vec<Reason> {
        let mut faults = Vec::new();
        for group in &self.groups {
            for (meetings, exchange) in [(&group.collectives, false), (&group.exchanges, true)] {
                for (number, meeting) in meetings.iter().enumerate() {
                    self.meeting_faults(log, group, number as u64, meeting, exchange, &mut faults);
                }
            }
        }
        faults
    }

    fn meeting_faults(
        &self,
        log: &Log,
        group: &Group,
        number: u64,
        meeting: &Meeting,
        exchange: bool,
        faults: &mut Vec<Reason>,
    ) {
        let Some(first) = meeting.parts.first() else { return };
        let name = |part: &Part| Operation::of(log, &self.points[part.point as usize]);
        if let Some(other) = meeting.parts.iter().find(|part| part.kind != first.kind) {
            faults.push(Reason::CollectiveMismatch {
                group: group.name.clone(),
                number,
                first: name(first),
                second: name(other),
            });
        }
        if meeting.parts.len() < group.ranks.len() {
            let came: HashSet<u32> = meeting.parts.iter().map(|p| log.ranks[p.rank as usize].rank).collect();
            let missing = group.ranks.iter().copied().filter(|rank| !came.contains(rank));
            let missing = missing.take(MAX_NAMED).collect();
            let (group, present) = (group.name.clone(), name(first));
            faults.push(if exchange {
                Reason::MissingExchange { group, number, missing, present }
            } else {
                Reason::MissingPart { group, number, missing, present }
            });
        }
    }
}
