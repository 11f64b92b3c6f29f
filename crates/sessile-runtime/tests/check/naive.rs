//! The order of a log by its definitions, one by one, with no regard to cost: every operation has a start and an
//! end, the relation is closed by search, and all pairs are tried.

use std::collections::{BTreeMap, BTreeSet};

use sessile_runtime::log::{Entry, Log, LogAccess, Mode, RankLog, Work};

/// Rank, entry, node.
pub(crate) type Place = (u32, usize, Option<usize>);

/// What is true of a log.
pub(crate) struct Truth {
    /// Pairs of operations that conflict and are not ordered.
    pub(crate) races: BTreeSet<(Place, Place)>,
    /// Bytes that such a pair shares: rank, serial, byte.
    pub(crate) bytes: BTreeSet<(u32, u64, u64)>,
    /// Whether operations wait for one another in a ring.
    pub(crate) deadlock: bool,
}

/// One thing with a start and an end.
struct Thing {
    place: Place,
    log: usize,
    work: Option<Work>,
    accesses: Vec<LogAccess>,
}

struct World<'a> {
    log: &'a Log,
    things: Vec<Thing>,
    /// `after[x]` holds y: x comes before y. Start of thing i is 2i, its end 2i+1; meetings come behind.
    after: Vec<BTreeSet<usize>>,
}

fn start(thing: usize) -> usize {
    2 * thing
}

fn end(thing: usize) -> usize {
    2 * thing + 1
}

pub(crate) fn truth(log: &Log) -> Truth {
    let mut world = World { log, things: Vec::new(), after: Vec::new() };
    world.collect();
    world.within_ranks();
    world.between_ranks();
    world.judge()
}

impl World<'_> {
    fn collect(&mut self) {
        for (at, rank) in self.log.ranks.iter().enumerate() {
            for (entry, what) in rank.entries.iter().enumerate() {
                let mut add = |node, work: Option<Work>, accesses: &[LogAccess]| {
                    let place = (rank.rank, entry, node);
                    self.things.push(Thing { place, log: at, work, accesses: accesses.to_vec() });
                };
                match what {
                    Entry::Enqueue { work, accesses, .. } => add(None, Some(work.clone()), accesses),
                    Entry::HostWait { accesses, .. } => add(None, None, accesses),
                    Entry::Exchange { .. } => add(None, None, &[]),
                    Entry::Fresh { accesses } => add(None, None, accesses),
                    Entry::Registered { .. }
                    | Entry::Sealed { .. }
                    | Entry::Released {}
                    | Entry::Step { .. }
                    | Entry::Discovering { .. }
                    | Entry::Ready { .. } => {}
                    Entry::Launch { graph, .. } => {
                        for (node, what) in rank.graphs[*graph as usize].nodes.iter().enumerate() {
                            add(Some(node), Some(what.work.clone()), &what.accesses);
                        }
                    }
                }
            }
        }
        self.after = vec![BTreeSet::new(); 2 * self.things.len()];
        for thing in 0..self.things.len() {
            self.after[start(thing)].insert(end(thing));
        }
    }

    fn entry(&self, thing: usize) -> &Entry {
        let Thing { log, place, .. } = &self.things[thing];
        &self.log.ranks[*log].entries[place.1]
    }

    fn within_ranks(&mut self) {
        let mut edges = Vec::new();
        for one in 0..self.things.len() {
            for two in 0..self.things.len() {
                if self.things[one].log == self.things[two].log && self.ends_before(one, two) {
                    edges.push((end(one), start(two)));
                }
            }
        }
        for (from, to) in edges {
            self.after[from].insert(to);
        }
    }

    /// Whether a rule says by itself that `one` ends before `two` starts; both of one rank.
    fn ends_before(&self, one: usize, two: usize) -> bool {
        let (at, other) = (self.things[one].place, self.things[two].place);
        let rank = &self.log.ranks[self.things[one].log];
        if at.1 == other.1 {
            let Entry::Launch { graph, .. } = self.entry(one) else { return false };
            let (Some(from), Some(to)) = (at.2, other.2) else { return false };
            let nodes = &rank.graphs[*graph as usize].nodes;
            let depends = nodes[to].dependencies.iter().any(|&on| on as usize == from);
            let comm = from < to && same_comm(&self.things[one], &self.things[two]);
            return depends || comm || self.seen(rank, one, two);
        }
        if at.1 > other.1 {
            return false;
        }
        let stream = |entry: &Entry| match entry {
            Entry::Enqueue { stream, .. } | Entry::Launch { stream, .. } | Entry::HostWait { stream, .. } => {
                Some(*stream)
            }
            _ => None,
        };
        let host = |entry: &Entry| {
            matches!(entry, Entry::HostWait { .. } | Entry::Exchange { .. } | Entry::Fresh { .. })
        };
        let (first, second) = (self.entry(one), self.entry(two));
        // The host's own steps precede all that it does later.
        if host(first) {
            return true;
        }
        // Stream order; a host wait is at the end of its stream.
        if stream(first) == stream(second) {
            return true;
        }
        if let (Entry::Launch { graph: a, .. }, Entry::Launch { graph: b, .. }) = (first, second)
            && a == b
        {
            return true;
        }
        same_comm(&self.things[one], &self.things[two]) || self.seen(rank, one, two)
    }

    /// Whether `two` waits for the event whose latest record before it is `one`.
    fn seen(&self, rank: &RankLog, one: usize, two: usize) -> bool {
        let Some(Work::Wait(event)) = &self.things[two].work else { return false };
        let records = (0..self.things.len()).filter(|&thing| {
            self.log.ranks[self.things[thing].log].rank == rank.rank
                && self.things[thing].work == Some(Work::Record(*event))
                && self.things[thing].place < self.things[two].place
        });
        records.max_by_key(|&thing| self.things[thing].place) == Some(one)
    }

    fn between_ranks(&mut self) {
        let mut meetings: BTreeMap<(bool, usize, usize), Vec<usize>> = BTreeMap::new();
        let mut counts: BTreeMap<(bool, usize, usize), usize> = BTreeMap::new();
        for thing in 0..self.things.len() {
            let exchange = matches!(self.entry(thing), Entry::Exchange { .. });
            let comm = match (self.entry(thing), &self.things[thing].work) {
                (Entry::Exchange { comm }, _) | (_, Some(Work::Collective { comm, .. })) => *comm as usize,
                _ => continue,
            };
            let count = counts.entry((exchange, comm, self.things[thing].log)).or_default();
            meetings.entry((exchange, comm, *count)).or_default().push(thing);
            *count += 1;
        }
        for parts in meetings.values() {
            for &one in parts {
                for &two in parts {
                    self.after[start(one)].insert(end(two));
                }
            }
        }
    }

    fn judge(&self) -> Truth {
        let count = self.after.len();
        let mut reach = vec![vec![false; count]; count];
        for (after, reached) in self.after.iter().zip(&mut reach) {
            let mut todo: Vec<usize> = after.iter().copied().collect();
            while let Some(at) = todo.pop() {
                if !std::mem::replace(&mut reached[at], true) {
                    todo.extend(self.after[at].iter().copied());
                }
            }
        }
        let mut truth = Truth { races: BTreeSet::new(), bytes: BTreeSet::new(), deadlock: false };
        truth.deadlock = (0..count).any(|at| reach[at][at]);
        for one in 0..self.things.len() {
            for two in one + 1..self.things.len() {
                if reach[end(one)][start(two)] || reach[end(two)][start(one)] {
                    continue;
                }
                for a in &self.things[one].accesses {
                    for b in &self.things[two].accesses {
                        let same = (a.rank, a.memory) == (b.rank, b.memory);
                        let range = a.start.max(b.start)..a.end.min(b.end);
                        if same && !range.is_empty() && (a.mode != Mode::Read || b.mode != Mode::Read) {
                            let (a_place, b_place) = (self.things[one].place, self.things[two].place);
                            truth.races.insert((a_place.min(b_place), a_place.max(b_place)));
                            truth.bytes.extend(range.map(|byte| (a.rank, a.memory, byte)));
                        }
                    }
                }
            }
        }
        truth
    }
}

fn same_comm(one: &Thing, two: &Thing) -> bool {
    match (&one.work, &two.work) {
        (Some(Work::Collective { comm: a, .. }), Some(Work::Collective { comm: b, .. })) => a == b,
        _ => false,
    }
}
