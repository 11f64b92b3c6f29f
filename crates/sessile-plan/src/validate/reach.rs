//! What precedes what, by search over the unrolled launches; and that fences are enough and none too many.

use std::collections::{BTreeMap, BTreeSet};

use super::{Buffer, Launch, Reason, Violation, Work, unknown};
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
pub(super) struct Unrolled<'a> {
    trace: &'a Trace,
    buffers: &'a [Buffer<'a>],
    launches: Vec<usize>,
    /// Launches of each runner, ascending.
    launched: Vec<Vec<usize>>,
    first_node: Vec<usize>,
    into: Vec<Vec<Edge>>,
}

impl<'a> Unrolled<'a> {
    /// With fences, through as many rounds as show every way.
    fn new(
        trace: &'a Trace,
        step: &[u32],
        plan: &Plan,
        buffers: &'a [Buffer<'a>],
        fences: &[Option<(usize, usize)>],
        work: &mut Work,
    ) -> Option<Self> {
        let rounds = match plan.options.step_cut {
            StepCut::Barrier => 1,
            StepCut::Wrap => 3,
        };
        let mut graph = Unrolled::bare(trace, step, rounds, plan, buffers, work)?;
        graph.fences(fences, work)?;
        Some(graph)
    }

    /// Without fences.
    pub(super) fn bare(
        trace: &'a Trace,
        step: &[u32],
        rounds: usize,
        plan: &Plan,
        buffers: &'a [Buffer<'a>],
        work: &mut Work,
    ) -> Option<Self> {
        let launches: Vec<usize> =
            (0..rounds).flat_map(|_| step.iter().map(|&runner| runner as usize)).collect();
        let mut launched = vec![Vec::new(); trace.runners.len()];
        let mut first_node = Vec::new();
        let mut nodes = 0;
        for (launch, &runner) in launches.iter().enumerate() {
            launched[runner].push(launch);
            first_node.push(nodes);
            nodes += trace.runners[runner].points.len() + 2;
        }
        work.spend(nodes)?;
        let into = vec![Vec::new(); nodes];
        let mut graph = Unrolled { trace, buffers, launches, launched, first_node, into };
        graph.recorded_order();
        graph.launch_order(plan.launch_order);
        graph.collectives();
        Some(graph)
    }

    pub(super) fn start(&self, launch: usize) -> usize {
        self.first_node[launch]
    }

    pub(super) fn point(&self, launch: usize, point: usize) -> usize {
        self.first_node[launch] + 1 + point
    }

    pub(super) fn end(&self, launch: usize) -> usize {
        self.point(launch, self.trace.runners[self.launches[launch]].points.len())
    }

    pub(super) fn edge(&mut self, from: usize, to: usize) {
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

    fn fences(&mut self, fences: &[Option<(usize, usize)>], work: &mut Work) -> Option<()> {
        for (number, fence) in fences.iter().enumerate() {
            let Some((x, y)) = *fence else { continue };
            work.spend(self.launched[self.buffers[y].runner].len())?;
            for launch in self.launched[self.buffers[y].runner].clone() {
                if let Some(from) = self.release_before(x, launch) {
                    let to = self.acquire(y, launch);
                    self.into[to].push(Edge { from, fence: Some(number) });
                }
            }
        }
        Some(())
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
        Some(self.release(buffer, self.latest(self.buffers[buffer].releaser, before)?))
    }

    fn release(&self, buffer: usize, launch: usize) -> usize {
        self.buffers[buffer].release.map_or(self.end(launch), |at| self.point(launch, at))
    }
}

/// A set of nodes that is emptied in no time.
struct Marks {
    round: u32,
    marks: Vec<u32>,
}

impl Marks {
    fn new(nodes: usize) -> Marks {
        Marks { round: 1, marks: vec![0; nodes] }
    }

    fn clear(&mut self) {
        self.round += 1;
    }

    fn insert(&mut self, node: usize) -> bool {
        std::mem::replace(&mut self.marks[node], self.round) != self.round
    }

    fn contains(&self, node: usize) -> bool {
        self.marks[node] == self.round
    }
}

/// What precedes a node, asked for one launch after the other. Each launch starts after the one before it started, so
/// what preceded that start is not searched again.
///
/// ```text
///  launch 6    start ---- complete ----------- tail       before the start of 8: all of launch 6 but its tail,
///  launch 7                  start --- complete ---       and what is before that
///  launch 8                              start -- acquire
/// ```
pub(super) struct Search<'g> {
    graph: &'g Unrolled<'g>,
    /// Preceding the start of the launch at hand.
    main: Marks,
    /// Preceding the node at hand, and not in `main`.
    near: Marks,
    open: Vec<usize>,
}

impl<'g> Search<'g> {
    pub(super) fn new(graph: &'g Unrolled<'g>) -> Self {
        let nodes = graph.into.len();
        Search { graph, main: Marks::new(nodes), near: Marks::new(nodes), open: Vec::new() }
    }

    /// Begins again with the first launch.
    pub(super) fn restart(&mut self) {
        self.main.clear();
    }

    /// Goes on to a later launch. Nodes below `lowest` are not asked for from here on.
    pub(super) fn begin(
        &mut self,
        launch: usize,
        lowest: usize,
        without: Option<usize>,
        work: &mut Work,
    ) -> Option<()> {
        let start = self.graph.start(launch);
        if start >= lowest && self.main.insert(start) {
            self.open.push(start);
        }
        while let Some(node) = self.open.pop() {
            work.spend(1 + self.graph.into[node].len())?;
            for edge in &self.graph.into[node] {
                let removed = edge.fence.is_some() && edge.fence == without;
                if edge.from >= lowest && !removed && self.main.insert(edge.from) {
                    self.open.push(edge.from);
                }
            }
        }
        Some(())
    }

    /// Finds all nodes from `lowest` on that precede `to`, as if `without` were no fence.
    pub(super) fn find(
        &mut self,
        to: usize,
        lowest: usize,
        without: Option<usize>,
        work: &mut Work,
    ) -> Option<()> {
        self.near.clear();
        self.open.push(to);
        while let Some(node) = self.open.pop() {
            work.spend(1 + self.graph.into[node].len())?;
            for edge in &self.graph.into[node] {
                let removed = edge.fence.is_some() && edge.fence == without;
                let known = edge.from < lowest || self.main.contains(edge.from);
                if !known && !removed && self.near.insert(edge.from) {
                    self.open.push(edge.from);
                }
            }
        }
        Some(())
    }

    /// Whether a node precedes what was last searched from.
    pub(super) fn found(&self, node: usize) -> bool {
        self.main.contains(node) || self.near.contains(node)
    }
}

/// Why one request must wait for another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Bytes,
    Accumulator,
}

/// For each buffer, the buffers whose release must precede its acquire.
fn earlier_users(buffers: &[Buffer<'_>], work: &mut Work) -> Option<Vec<BTreeMap<usize, Why>>> {
    let mut users = vec![BTreeMap::new(); buffers.len()];
    let mut accumulators: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, buffer) in buffers.iter().enumerate() {
        if let Some(name) = &buffer.spec.accumulates_into {
            accumulators.entry(name).or_default().push(at);
        }
    }
    for of_one in accumulators.values() {
        work.spend(of_one.len().saturating_mul(of_one.len()))?;
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
            work.spend(1)?;
            users[x].insert(y, Why::Bytes);
            users[y].insert(x, Why::Bytes);
        }
    }
    Some(users)
}

/// An ordering that must hold and does not: launch, first request, second request.
type Missing = BTreeSet<(usize, usize, usize)>;

fn unordered(
    search: &mut Search<'_>,
    acquirers: &[BTreeMap<Option<usize>, Vec<usize>>],
    users: &[BTreeMap<usize, Why>],
    without: Option<usize>,
    work: &mut Work,
) -> Option<Missing> {
    let graph = search.graph;
    let mut missing = Missing::new();
    let mut last_launch: Vec<Option<usize>> = vec![None; acquirers.len()];
    search.restart();
    for (launch, &runner) in graph.launches.iter().enumerate() {
        search.begin(launch, 0, without, work)?;
        // Requests acquired at one node share one search.
        for acquired in acquirers[runner].values() {
            let mut needed = Vec::new();
            for &y in acquired {
                work.spend(users[y].len())?;
                for &x in users[y].keys() {
                    if let Some(last) = last_launch[graph.buffers[x].releaser] {
                        needed.push((graph.release(x, last), x, y));
                    }
                }
            }
            needed.retain(|&(release, ..)| !search.main.contains(release));
            let Some(lowest) = needed.iter().map(|&(release, ..)| release).min() else { continue };
            search.find(graph.acquire(acquired[0], launch), lowest, without, work)?;
            let late = needed.into_iter().filter(|&(release, ..)| !search.found(release));
            missing.extend(late.map(|(_, x, y)| (launch, x, y)));
        }
        last_launch[runner] = Some(launch);
    }
    Some(missing)
}

/// `None` once the work is spent.
pub(super) fn check(
    trace: &Trace,
    plan: &Plan,
    buffers: &[Buffer<'_>],
    work: &mut Work,
    found: &mut Vec<Violation>,
) -> Option<()> {
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
    let users = earlier_users(buffers, work)?;
    let mut acquirers = vec![BTreeMap::<_, Vec<usize>>::new(); trace.runners.len()];
    for (at, buffer) in buffers.iter().enumerate() {
        acquirers[buffer.runner].entry(buffer.acquire).or_default().push(at);
    }
    let mut reported = BTreeSet::new();
    let mut necessary = vec![false; fences.len()];
    for (number, step) in trace.steps.iter().enumerate() {
        let graph = Unrolled::new(trace, step, plan, buffers, &fences, work)?;
        let mut search = Search::new(&graph);
        let missing = unordered(&mut search, &acquirers, &users, None, work)?;
        for &(launch, x, y) in &missing {
            if reported.insert((x, y)) {
                let reason = match users[y][&x] {
                    Why::Bytes => Reason::ReuseNotOrdered,
                    Why::Accumulator => Reason::AccumulatorUnordered,
                };
                let at = |launch: usize| Launch { step: number, position: launch % step.len() };
                let first = graph.latest(buffers[x].runner, launch).map(at);
                let (first, second) =
                    (buffers[x].party(trace, first), buffers[y].party(trace, Some(at(launch))));
                found.push(Violation::between(reason, first, second));
            }
        }
        for (number, fence) in fences.iter().enumerate() {
            let Some((x, y)) = *fence else { continue };
            // A fence that one step needs need not be asked for in another.
            if necessary[number] || graph.launched[buffers[y].runner].is_empty() {
                continue;
            }
            necessary[number] = if users[y].contains_key(&x) {
                orders_its_own(&mut search, number, x, y, work)?
            } else {
                unordered(&mut search, &acquirers, &users, Some(number), work)?.len() > missing.len()
            };
        }
    }
    for (fence, _) in fences.iter().zip(&necessary).filter(|&(_, &necessary)| !necessary) {
        let Some((x, y)) = *fence else { continue };
        let (first, second) = (buffers[x].party(trace, None), buffers[y].party(trace, None));
        found.push(Violation::between(Reason::FenceUnnecessary, first, second));
    }
    Some(())
}

/// Whether some launch of `y` is not ordered after `x` without the fence between them. If every one is, then no
/// path needs the fence, and it orders nothing else either.
fn orders_its_own(
    search: &mut Search<'_>,
    fence: usize,
    x: usize,
    y: usize,
    work: &mut Work,
) -> Option<bool> {
    let graph = search.graph;
    search.restart();
    for &launch in &graph.launched[graph.buffers[y].runner] {
        // Releases ascend, as `begin` needs.
        let Some(release) = graph.release_before(x, launch) else { continue };
        search.begin(launch, release, Some(fence), work)?;
        search.find(graph.acquire(y, launch), release, Some(fence), work)?;
        if !search.found(release) {
            return Some(true);
        }
    }
    Some(false)
}
