//! What precedes what, by search over the unrolled launches; and that fences are enough and none too many.

use std::collections::{BTreeMap, BTreeSet};

use super::{Buffer, Reason, Violation, unknown};
use crate::{
    options::{LaunchOrder, StepCut},
    plan::Plan,
    trace::{PointKind, Trace},
};

/// An edge into a node: where from, and by which fence if by one.
#[derive(Clone, Copy)]
struct Edge {
    from: usize,
    fence: Option<usize>,
}

/// All launches of some steps, every point a node.
struct Unrolled<'a> {
    trace: &'a Trace,
    buffers: &'a [Buffer<'a>],
    launches: Vec<usize>,
    /// Launches of each runner, ascending.
    launched: Vec<Vec<usize>>,
    first_node: Vec<usize>,
    into: Vec<Vec<Edge>>,
}

impl<'a> Unrolled<'a> {
    fn new(
        trace: &'a Trace,
        plan: &Plan,
        buffers: &'a [Buffer<'a>],
        fences: &[Option<(usize, usize)>],
    ) -> Self {
        let steps = match plan.options.step_cut {
            StepCut::Barrier => 1,
            StepCut::Wrap => 3,
        };
        let launches: Vec<usize> =
            (0..steps).flat_map(|_| trace.launches.iter().map(|&runner| runner as usize)).collect();
        let mut launched = vec![Vec::new(); trace.runners.len()];
        let mut first_node = Vec::new();
        let mut nodes = 0;
        for (launch, &runner) in launches.iter().enumerate() {
            launched[runner].push(launch);
            first_node.push(nodes);
            nodes += trace.runners[runner].points.len() + 2;
        }
        let into = vec![Vec::new(); nodes];
        let mut graph = Unrolled { trace, buffers, launches, launched, first_node, into };
        graph.recorded_order();
        graph.launch_order(plan.launch_order);
        graph.collectives();
        graph.fences(fences);
        graph
    }

    fn start(&self, launch: usize) -> usize {
        self.first_node[launch]
    }

    fn point(&self, launch: usize, point: usize) -> usize {
        self.first_node[launch] + 1 + point
    }

    fn end(&self, launch: usize) -> usize {
        self.point(launch, self.trace.runners[self.launches[launch]].points.len())
    }

    fn edge(&mut self, from: usize, to: usize) {
        self.into[to].push(Edge { from, fence: None });
    }

    fn recorded_order(&mut self) {
        for launch in 0..self.launches.len() {
            let points = &self.trace.runners[self.launches[launch]].points;
            self.edge(self.start(launch), self.end(launch));
            let mut tail_of_stream = BTreeMap::new();
            let mut event_at = BTreeMap::new();
            for (at, point) in points.iter().enumerate() {
                let here = self.point(launch, at);
                let before = tail_of_stream.insert(point.stream, here).unwrap_or(self.start(launch));
                self.edge(before, here);
                match point.kind {
                    PointKind::Record(event) => _ = event_at.insert(event, here),
                    PointKind::Wait(event) => self.edge(event_at[&event], here),
                    _ => {}
                }
            }
            for tail in tail_of_stream.into_values() {
                self.edge(tail, self.end(launch));
            }
        }
    }

    fn launch_order(&mut self, order: LaunchOrder) {
        for launch in 1..self.launches.len() {
            let before = self.launches[launch - 1];
            let points = &self.trace.runners[before].points;
            let complete = points.iter().position(|point| point.kind == PointKind::Complete);
            let from = match (order, complete) {
                (LaunchOrder::Overlapped, Some(complete)) => self.point(launch - 1, complete),
                _ => self.end(launch - 1),
            };
            self.edge(from, self.start(launch));
            if let Some(same) = self.latest(self.launches[launch], launch) {
                self.edge(self.end(same), self.start(launch));
            }
        }
    }

    fn collectives(&mut self) {
        let mut before: BTreeMap<&str, usize> = BTreeMap::new();
        for launch in 0..self.launches.len() {
            for (at, point) in self.trace.runners[self.launches[launch]].points.iter().enumerate() {
                if let PointKind::Collective(group) = &point.kind {
                    let here = self.point(launch, at);
                    if let Some(earlier) = before.insert(group, here) {
                        self.edge(earlier, here);
                    }
                }
            }
        }
    }

    fn fences(&mut self, fences: &[Option<(usize, usize)>]) {
        for (number, fence) in fences.iter().enumerate() {
            let Some((x, y)) = *fence else { continue };
            for launch in self.launched[self.buffers[y].runner].clone() {
                if let Some(from) = self.release_before(x, launch) {
                    let to = self.acquire(y, launch);
                    self.into[to].push(Edge { from, fence: Some(number) });
                }
            }
        }
    }

    /// The latest launch of a runner before another launch.
    fn latest(&self, runner: usize, before: usize) -> Option<usize> {
        let launched = &self.launched[runner];
        let earlier = launched.partition_point(|&launch| launch < before);
        launched[..earlier].last().copied()
    }

    fn acquire(&self, buffer: usize, launch: usize) -> usize {
        self.buffers[buffer].acquire.map_or(self.start(launch), |at| self.point(launch, at))
    }

    /// The node of the latest release of a buffer before a launch, if there was one.
    fn release_before(&self, buffer: usize, before: usize) -> Option<usize> {
        let launch = self.latest(self.buffers[buffer].releaser, before)?;
        Some(self.buffers[buffer].release.map_or(self.end(launch), |at| self.point(launch, at)))
    }

    /// Marks in `seen` all nodes from `lowest` on that precede `to`, as if `without` were no fence.
    fn search(&self, to: usize, lowest: usize, without: Option<usize>, seen: &mut Seen) {
        seen.begin();
        let mut open = vec![to];
        while let Some(node) = open.pop() {
            for edge in &self.into[node] {
                let removed = edge.fence.is_some() && edge.fence == without;
                if edge.from >= lowest && !removed && seen.insert(edge.from) {
                    open.push(edge.from);
                }
            }
        }
    }
}

/// A set of nodes that is emptied in no time.
struct Seen {
    round: u32,
    marks: Vec<u32>,
}

impl Seen {
    fn begin(&mut self) {
        self.round += 1;
    }

    fn insert(&mut self, node: usize) -> bool {
        std::mem::replace(&mut self.marks[node], self.round) != self.round
    }

    fn contains(&self, node: usize) -> bool {
        self.marks[node] == self.round
    }
}

/// Why one request must wait for another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Bytes,
    Accumulator,
}

/// For each buffer, the buffers whose release must precede its acquire.
fn earlier_users(buffers: &[Buffer<'_>]) -> Vec<BTreeMap<usize, Why>> {
    let mut users = vec![BTreeMap::new(); buffers.len()];
    let mut accumulators: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, buffer) in buffers.iter().enumerate() {
        if let Some(name) = &buffer.spec.accumulates_into {
            accumulators.entry(name).or_default().push(at);
        }
    }
    for of_one in accumulators.values() {
        for &x in of_one {
            for &y in of_one {
                users[y].insert(x, Why::Accumulator);
            }
        }
    }
    let mut by_offset: Vec<usize> = (0..buffers.len()).filter(|&at| buffers[at].view.is_some()).collect();
    by_offset.sort_by_key(|&at| buffers[at].view.map(|view| (view.arena, view.offset)));
    for (place, &x) in by_offset.iter().enumerate() {
        users[x].insert(x, Why::Bytes);
        for &y in by_offset[place + 1..].iter().take_while(|&&y| buffers[x].shares_bytes(&buffers[y])) {
            users[x].insert(y, Why::Bytes);
            users[y].insert(x, Why::Bytes);
        }
    }
    users
}

/// An ordering that must hold and does not: launch, first request, second request.
type Missing = BTreeSet<(usize, usize, usize)>;

fn unordered(
    graph: &Unrolled<'_>,
    users: &[BTreeMap<usize, Why>],
    without: Option<usize>,
    seen: &mut Seen,
) -> Missing {
    let mut missing = Missing::new();
    for launch in 0..graph.launches.len() {
        // Requests acquired at one node share one search.
        let mut at_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (y, buffer) in graph.buffers.iter().enumerate() {
            if buffer.runner == graph.launches[launch] {
                at_node.entry(graph.acquire(y, launch)).or_default().push(y);
            }
        }
        let mut latest: BTreeMap<usize, Option<usize>> = BTreeMap::new();
        for (node, acquired) in at_node {
            let mut needed = Vec::new();
            for y in acquired {
                for &x in users[y].keys() {
                    if let Some(release) = *latest.entry(x).or_insert_with(|| graph.release_before(x, launch))
                    {
                        needed.push((release, x, y));
                    }
                }
            }
            let Some(lowest) = needed.iter().map(|&(release, ..)| release).min() else { continue };
            graph.search(node, lowest, without, seen);
            let late = needed.into_iter().filter(|&(release, ..)| !seen.contains(release));
            missing.extend(late.map(|(_, x, y)| (launch, x, y)));
        }
    }
    missing
}

pub(super) fn check(trace: &Trace, plan: &Plan, buffers: &[Buffer<'_>], found: &mut Vec<Violation>) {
    if let Some(pair) = plan.fences.windows(2).find(|pair| pair[0] >= pair[1]) {
        let at = |id| buffers.iter().find(|buffer| buffer.id == id);
        let party = |id| at(id).map_or(unknown(id, None), |buffer| buffer.party(trace, None));
        let (first, second) = (party(pair[1].release), party(pair[1].acquire));
        found.push(Violation::between(Reason::FencesUnsorted, first, second));
    }
    let index: BTreeMap<_, _> = buffers.iter().enumerate().map(|(at, buffer)| (buffer.id, at)).collect();
    let mut fences = Vec::new();
    for fence in &plan.fences {
        for id in [fence.release, fence.acquire] {
            if !index.contains_key(&id) {
                found.push(Violation::new(Reason::UnknownRequest).about(unknown(id, None)));
            }
        }
        fences.push(index.get(&fence.release).copied().zip(index.get(&fence.acquire).copied()));
    }
    let graph = Unrolled::new(trace, plan, buffers, &fences);
    let users = earlier_users(buffers);
    let mut seen = Seen { round: 0, marks: vec![0; graph.into.len()] };
    let missing = unordered(&graph, &users, None, &mut seen);

    let mut reported = BTreeSet::new();
    for &(launch, x, y) in &missing {
        if reported.insert((x, y)) {
            let reason = match users[y][&x] {
                Why::Bytes => Reason::ReuseNotOrdered,
                Why::Accumulator => Reason::AccumulatorUnordered,
            };
            let step = trace.launches.len();
            let first = graph.latest(buffers[x].runner, launch).map(|launch| launch % step);
            let (first, second) =
                (buffers[x].party(trace, first), buffers[y].party(trace, Some(launch % step)));
            found.push(Violation::between(reason, first, second));
        }
    }
    for (number, fence) in fences.iter().enumerate() {
        let Some((x, y)) = *fence else { continue };
        let necessary = if users[y].contains_key(&x) {
            orders_its_own(&graph, number, x, y, &mut seen)
        } else {
            unordered(&graph, &users, Some(number), &mut seen).len() > missing.len()
        };
        if !necessary {
            let (first, second) = (buffers[x].party(trace, None), buffers[y].party(trace, None));
            found.push(Violation::between(Reason::FenceUnnecessary, first, second));
        }
    }
}

/// Whether some launch of `y` is not ordered after `x` without the fence between them. If every one is, then no
/// path needs the fence, and it orders nothing else either.
fn orders_its_own(graph: &Unrolled<'_>, fence: usize, x: usize, y: usize, seen: &mut Seen) -> bool {
    graph.launched[graph.buffers[y].runner].iter().any(|&launch| {
        let Some(release) = graph.release_before(x, launch) else { return false };
        graph.search(graph.acquire(y, launch), release, Some(fence), seen);
        !seen.contains(release)
    })
}
