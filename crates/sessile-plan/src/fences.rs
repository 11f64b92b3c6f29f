//! The fences of a layout: few enough that none can be left out, enough that every reuse is ordered.
//!
//! ```text
//!  launch       p (owns x)             p+1                     p+2 (owns y, same bytes as x)
//!  stream 0     acquire x   complete   start .. complete       start ........ acquire y
//!  stream 1            release x ------------------------ fence ------------->|
//! ```
//!
//! **What must be ordered.** Wherever two requests share bytes (or one accumulator), at each launch that acquires
//! `y` the latest earlier launch that releases `x` must have released it. Earlier releases follow, since launches
//! of one runner never overlap. For each byte range only the *former occupants* are looked at: once `y` was
//! acquired after `x` was released, and every acquire of `y` precedes its release, what reuses `y` is after `x`.
//! Requests for which that is not sure (they span runners, or nothing orders their acquire and release) do not
//! hide former occupants.
//!
//! **How.** A fence is static: it waits at *every* launch of the acquiring runner, for the latest record before it.
//! Launches are walked in order, nodes in enqueue order. At each acquiring node those releases are collected that
//! must precede it, those dropped that do already (by base order and fences so far), and of the rest only the
//! latest kept: candidates are tried from the topologically last, and each new fence makes its ancestors known.
//!
//! **Sufficient.** Every required pair is ordered when its acquire is walked, and edges are only added. Under the
//! wrap-around cut two steps are walked. A path that orders a pair of the second step lies within one step's
//! length, so it is found again, shifted, in every later step: no later step needs another fence.
//!
//! **None can be left out.** Let `f = (x, y)` be added at node `v`, because release `u` was not known there. Take the
//! final set without `f` and suppose a path from `u` to `v`. Its edges are base order or fence edges into nodes up to
//! `v`. A fence edge is itself a required pair, so when its head was walked it was either added or already ordered
//! by what existed then. Edges of fences added after `f` into nodes walked before `v` were therefore ordered without
//! `f`, and edges into `v` itself were either known, or come from releases that `u` does not precede, because only the
//! latest were kept. So the path would have existed when `v` was walked, and `f` would not have been added.
//!
//! **Alternative steps** are walked one after the other, each with the fences so far. A fence found in a later one adds
//! nothing to an earlier one: if that launches both its runners in this order, the pair was required, and ordered, there
//! too. So the argument holds in each.
//!
//! The nodes are those that write first and read last (see `roster.rs`). A wait node stands before the first write, at
//! the acquire, so it orders a little more than it is credited with: an event recorded between acquire and first write
//! carries the fence on. A trace with such events may get a fence that this would have made unnecessary.

use std::collections::BTreeMap;

use crate::{
    baseline::Layout,
    error::PlanError,
    limits::FENCE_WORK_MAX,
    options::{LaunchOrder, StepCut},
    order::{RunnerOrder, runner_orders},
    plan::Fence,
    roster::{LocalNode, Roster},
};

/// The fences that make `layout` safe, sorted.
pub(crate) fn fences(
    roster: &Roster<'_>,
    layout: &Layout,
    cut: StepCut,
    order: LaunchOrder,
) -> Result<Vec<Fence>, PlanError> {
    let steps = match cut {
        StepCut::Barrier => 1,
        StepCut::Wrap => 2,
    };
    let orders = runner_orders(roster.trace, order);
    let mut into_acquire = vec![Vec::new(); roster.entries.len()];
    let mut work = FENCE_WORK_MAX;
    for launches in &roster.trace.steps {
        let mut walk = Walk::new(roster, layout, &orders, launches, steps, into_acquire, work);
        for launch in 0..walk.launch_runner.len() {
            walk.launch(launch).ok_or(PlanError::FencesTooCostly {
                limit: FENCE_WORK_MAX,
                launches: roster.trace.launch_count(),
                requests: roster.entries.len(),
            })?;
        }
        (into_acquire, work) = (walk.into_acquire, walk.work);
    }
    let mut fences: Vec<Fence> = into_acquire
        .iter()
        .enumerate()
        .flat_map(|(acquire, releases)| releases.iter().map(move |&release| (release, acquire)))
        .map(|(release, acquire)| Fence {
            release: roster.entries[release].id,
            acquire: roster.entries[acquire].id,
        })
        .collect();
    fences.sort_unstable();
    Ok(fences)
}

/// A node of the unrolled launches.
type Node = u32;

/// A request that used a range, and the launch that acquired it (or read it last, for spanning requests).
#[derive(Clone, Copy)]
struct Occupant {
    request: usize,
    launch: u32,
}

/// A byte range with its former occupants; the key in the map is its start.
struct Segment {
    end: u64,
    occupants: Vec<Occupant>,
}

struct Walk<'a> {
    roster: &'a Roster<'a>,
    layout: &'a Layout,
    orders: &'a [RunnerOrder],
    /// Runner of each unrolled launch, its first node, and the launch of each node.
    launch_runner: Vec<usize>,
    base: Vec<Node>,
    launch_of: Vec<u32>,
    /// Requests by acquiring node, for each runner; and requests that span into each runner.
    acquires: Vec<BTreeMap<LocalNode, Vec<usize>>>,
    spans_into: Vec<Vec<usize>>,
    /// Whether a request's acquire surely precedes its release within one launch.
    orderly: Vec<bool>,
    /// Latest launch of each runner before the current one.
    last_launch: Vec<Option<u32>>,
    last_collective: Vec<Option<Node>>,
    /// Predecessors in other launches: the start of each node's list, for the nodes walked so far.
    cross_starts: Vec<u32>,
    cross: Vec<Node>,
    /// Releases that fences of each acquiring request wait for.
    into_acquire: Vec<Vec<usize>>,
    /// Nodes known to the start of the current launch.
    main: Vec<bool>,
    /// Nodes known to streams of one launch: the launch, and a bit for each stream.
    streams: Vec<(u32, u64)>,
    /// Former occupants, by domain, and of accumulators.
    ranges: Vec<BTreeMap<u64, Segment>>,
    accumulators: BTreeMap<&'a str, Vec<Occupant>>,
    work: u64,
}

/// Who knows: the start of the current launch, or a stream inside it.
#[derive(Clone, Copy)]
enum Knower {
    Start,
    Stream { launch: u32, bit: u64 },
}

impl<'a> Walk<'a> {
    /// Walks `launches` as often as `steps` says.
    fn new(
        roster: &'a Roster<'a>,
        layout: &'a Layout,
        (orders, groups): &'a (Vec<RunnerOrder>, usize),
        launches: &[u32],
        steps: usize,
        into_acquire: Vec<Vec<usize>>,
        work: u64,
    ) -> Walk<'a> {
        let launch_runner: Vec<usize> =
            (0..steps).flat_map(|_| launches).map(|&runner| runner as usize).collect();
        let mut base = Vec::with_capacity(launch_runner.len());
        let mut launch_of = Vec::new();
        for (launch, &runner) in launch_runner.iter().enumerate() {
            base.push(launch_of.len() as Node);
            launch_of.resize(launch_of.len() + orders[runner].end() as usize + 1, launch as u32);
        }
        let mut acquires = vec![BTreeMap::<LocalNode, Vec<usize>>::new(); orders.len()];
        let mut spans_into = vec![Vec::new(); orders.len()];
        let mut orderly = Vec::with_capacity(roster.entries.len());
        for (index, entry) in roster.entries.iter().enumerate() {
            acquires[entry.runner].entry(entry.acquire).or_default().push(index);
            if entry.spans() {
                spans_into[entry.release_runner].push(index);
            }
            let within = &orders[entry.runner];
            orderly.push(!entry.spans() && within.precedes(entry.acquire, entry.release));
        }
        let nodes = launch_of.len();
        Walk {
            roster,
            layout,
            launch_runner,
            base,
            acquires,
            spans_into,
            orderly,
            last_launch: vec![None; orders.len()],
            orders,
            last_collective: vec![None; *groups],
            cross_starts: vec![0],
            cross: Vec::new(),
            into_acquire,
            main: vec![false; nodes],
            streams: vec![(u32::MAX, 0); nodes],
            launch_of,
            ranges: roster.domains.iter().map(|_| BTreeMap::new()).collect(),
            accumulators: BTreeMap::new(),
            work,
        }
    }

    /// Walks one launch. `None` once the budget is spent.
    fn launch(&mut self, launch: usize) -> Option<()> {
        let runner = self.launch_runner[launch];
        let mut collectives = 0;
        for node in 0..=self.orders[runner].end() {
            if node == 0 {
                if launch > 0 {
                    let before = self.launch_runner[launch - 1];
                    self.cross.push(self.base[launch - 1] + self.orders[before].handoff);
                }
                if let Some(last) = self.last_launch[runner] {
                    self.cross.push(self.base[last as usize] + self.orders[runner].end());
                }
            }
            if let Some(&(at, group)) = self.orders[runner].collectives.get(collectives)
                && at == node
            {
                collectives += 1;
                let here = self.base[launch] + node;
                self.cross.extend(self.last_collective[group as usize].replace(here));
            }
            let acquiring = self.acquires[runner].get(&node).cloned().unwrap_or_default();
            for &acquire in &acquiring {
                for release in &self.into_acquire[acquire] {
                    self.cross.extend(self.latest_release(*release));
                }
            }
            if node == 0 || !acquiring.is_empty() {
                self.order_acquires(launch, node, &acquiring)?;
            }
            self.cross_starts.push(self.cross.len() as u32);
        }
        self.occupy(launch, runner)?;
        self.last_launch[runner] = Some(launch as u32);
        Some(())
    }

    /// The node of the latest release of a request before the current launch.
    fn latest_release(&self, request: usize) -> Option<Node> {
        let entry = &self.roster.entries[request];
        let launch = self.last_launch[entry.release_runner]?;
        Some(self.base[launch as usize] + entry.release)
    }

    /// Adds the fences that the requests acquired at one node need.
    fn order_acquires(&mut self, launch: usize, node: LocalNode, acquiring: &[usize]) -> Option<()> {
        let here = self.base[launch] + node;
        let knower = if node == 0 {
            Knower::Start
        } else {
            let runner = &self.roster.trace.runners[self.launch_runner[launch]];
            let stream = runner.points[node as usize - 1].stream;
            Knower::Stream { launch: launch as u32, bit: 1 << stream }
        };
        // The node itself is not walked to its end yet: its predecessors are the roots.
        let mut roots: Vec<Node> = self.cross[self.cross_starts[here as usize] as usize..].to_vec();
        if node > 0 {
            let within = &self.orders[self.launch_runner[launch]];
            roots.extend(within.preds(node).iter().map(|&local| self.base[launch] + local));
        }
        self.learn(roots, knower)?;
        self.learn_one(here, knower);

        let mut wanted: Vec<(Node, usize, usize)> = Vec::new();
        for &acquire in acquiring {
            self.former_occupants(acquire, |walk, occupant| {
                if let Some(release) = walk.latest_release(occupant.request)
                    && !walk.known(release, knower)
                {
                    wanted.push((release, occupant.request, acquire));
                }
            })?;
        }
        // The topologically last release first; of releases at one node, the pair with the smallest ids.
        let id = |request: usize| self.roster.entries[request].id;
        wanted.sort_unstable_by_key(|&(release, x, y)| (u32::MAX - release, id(x), id(y)));
        for (release, x, y) in wanted {
            if !self.known(release, knower) {
                self.into_acquire[y].push(x);
                self.cross.push(release);
                self.learn(vec![release], knower)?;
            }
        }
        Some(())
    }

    fn known(&self, node: Node, knower: Knower) -> bool {
        self.main[node as usize]
            || match knower {
                Knower::Start => false,
                Knower::Stream { launch, bit } => {
                    let (at, bits) = self.streams[node as usize];
                    at == launch && bits & bit != 0
                }
            }
    }

    fn learn_one(&mut self, node: Node, knower: Knower) {
        match knower {
            Knower::Start => self.main[node as usize] = true,
            Knower::Stream { launch, bit } => {
                let slot = &mut self.streams[node as usize];
                let bits = if slot.0 == launch { slot.1 } else { 0 };
                *slot = (launch, bits | bit);
            }
        }
    }

    /// Makes nodes and all that precedes them known.
    fn learn(&mut self, mut open: Vec<Node>, knower: Knower) -> Option<()> {
        while let Some(node) = open.pop() {
            self.work = self.work.checked_sub(1)?;
            if self.known(node, knower) {
                continue;
            }
            self.learn_one(node, knower);
            let at = node as usize;
            open.extend_from_slice(
                &self.cross[self.cross_starts[at] as usize..self.cross_starts[at + 1] as usize],
            );
            let launch = self.launch_of[at] as usize;
            let base = self.base[launch];
            if node > base {
                let within = &self.orders[self.launch_runner[launch]];
                open.extend(within.preds(node - base).iter().map(|&local| base + local));
            }
        }
        Some(())
    }

    fn former_occupants(&mut self, acquire: usize, mut each: impl FnMut(&Self, Occupant)) -> Option<()> {
        let entry = &self.roster.entries[acquire];
        let from = self.layout.offsets[acquire];
        let to = from + entry.bytes;
        let ranges = &self.ranges[entry.domain];
        let first = ranges.range(..=from).next_back().map_or(from, |(&start, _)| start);
        let segments = ranges.range(first..to).filter(|(_, segment)| segment.end > from);
        let accumulator = entry.spec.accumulates_into.as_deref().and_then(|name| self.accumulators.get(name));
        let mut looked_at = 1;
        for occupants in segments.map(|(_, segment)| &segment.occupants).chain(accumulator) {
            looked_at += 1 + occupants.len() as u64;
            occupants.iter().for_each(|&occupant| each(self, occupant));
        }
        self.work = self.work.checked_sub(looked_at)?;
        Some(())
    }

    /// Makes the launch's requests the occupants of their bytes. At the end of the launch, since within one
    /// launch nothing hides anything.
    fn occupy(&mut self, launch: usize, runner: usize) -> Option<()> {
        let acquired: Vec<usize> = self.acquires[runner].values().flatten().copied().collect();
        let read = self.spans_into[runner].clone();
        for (request, acquired) in
            acquired.into_iter().map(|request| (request, true)).chain(read.into_iter().map(|x| (x, false)))
        {
            let entry = &self.roster.entries[request];
            let (from, to) = (self.layout.offsets[request], self.layout.offsets[request] + entry.bytes);
            let mine = Occupant { request, launch: launch as u32 };
            let hides = acquired && self.orderly[request];
            let (last_launch, entries) = (&self.last_launch, &self.roster.entries);
            let update = |occupants: &mut Vec<Occupant>| {
                if hides {
                    // What is still to be released in this launch or later stays.
                    occupants.retain(|other| {
                        last_launch[entries[other.request].release_runner]
                            .is_none_or(|last| last < other.launch)
                    });
                }
                match occupants.iter_mut().find(|other| other.request == request) {
                    Some(same) if acquired => same.launch = mine.launch,
                    Some(_) => {}
                    None => occupants.push(mine),
                }
                occupants.len() as u64
            };
            let mut looked_at = update_range(&mut self.ranges[entry.domain], from, to, update);
            if let Some(name) = entry.spec.accumulates_into.as_deref() {
                looked_at += update(self.accumulators.entry(name).or_default());
            }
            self.work = self.work.checked_sub(looked_at)?;
        }
        Some(())
    }
}

/// Applies `update` to every part of `from..to`, making parts that are not there, and joins parts that end
/// with one and the same occupant.
fn update_range(
    ranges: &mut BTreeMap<u64, Segment>,
    from: u64,
    to: u64,
    update: impl Fn(&mut Vec<Occupant>) -> u64,
) -> u64 {
    for at in [from, to] {
        if let Some((_, segment)) = ranges.range_mut(..at).next_back()
            && segment.end > at
        {
            let upper = Segment { end: segment.end, occupants: segment.occupants.clone() };
            segment.end = at;
            ranges.insert(at, upper);
        }
    }
    let mut looked_at = 1;
    let mut at = from;
    let mut parts: Vec<(u64, Segment)> = Vec::new();
    let inside: Vec<u64> = ranges.range(from..to).map(|(&start, _)| start).collect();
    for start in inside {
        if let Some(segment) = ranges.remove(&start) {
            if at < start {
                parts.push((at, Segment { end: start, occupants: Vec::new() }));
            }
            at = segment.end;
            parts.push((start, segment));
        }
    }
    if at < to {
        parts.push((at, Segment { end: to, occupants: Vec::new() }));
    }
    let mut joined: Vec<(u64, Segment)> = Vec::with_capacity(parts.len());
    for (start, mut segment) in parts {
        looked_at += 1 + update(&mut segment.occupants);
        match joined.last_mut() {
            Some((_, last)) if same_single(&last.occupants, &segment.occupants) => last.end = segment.end,
            _ => joined.push((start, segment)),
        }
    }
    ranges.extend(joined);
    looked_at
}

fn same_single(a: &[Occupant], b: &[Occupant]) -> bool {
    matches!((a, b), ([a], [b]) if a.request == b.request && a.launch == b.launch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(ranges: &mut BTreeMap<u64, Segment>, request: usize, (from, to): (u64, u64), hides: bool) {
        update_range(ranges, from, to, |occupants| {
            if hides {
                occupants.clear();
            }
            occupants.push(Occupant { request, launch: 0 });
            occupants.len() as u64
        });
    }

    fn shown(ranges: &BTreeMap<u64, Segment>) -> Vec<(u64, u64, Vec<usize>)> {
        let who = |segment: &Segment| segment.occupants.iter().map(|occupant| occupant.request).collect();
        ranges.iter().map(|(&from, segment)| (from, segment.end, who(segment))).collect()
    }

    /// ```text
    ///  0 |======| 4
    ///        2 |======| 6          does not hide
    ///  0 |=========================| 8          hides
    /// ```
    #[test]
    fn occupants_split_ranges_and_one_that_hides_joins_them() {
        let mut ranges = BTreeMap::new();
        put(&mut ranges, 0, (0, 4), true);
        put(&mut ranges, 1, (2, 6), false);
        assert_eq!(shown(&ranges), [(0, 2, vec![0]), (2, 4, vec![0, 1]), (4, 6, vec![1])]);
        put(&mut ranges, 2, (0, 8), true);
        assert_eq!(shown(&ranges), [(0, 8, vec![2])]);
        put(&mut ranges, 3, (2, 3), true);
        assert_eq!(shown(&ranges), [(0, 2, vec![2]), (2, 3, vec![3]), (3, 8, vec![2])]);
    }
}
