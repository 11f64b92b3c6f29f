//! What always happens before what: the recorded order inside a launch, and graph-launch order between them.
//!
//! ```text
//!  launch p      start ─┬─ acquire a ─ record 0 ─ complete ─────────────┬─ end        stream 0
//!                       └─ wait 0 ─ collective g ─ release a ───────────┘            stream 1
//!                              (record 0 precedes wait 0)
//!  launch p+1                                          start ─ ...
//! ```
//!
//! Between launches: the completion point of one precedes the start of the next (its end, if launches are
//! serial or it has no completion point); launches of one runner never overlap; collectives of one group run in
//! the order they were enqueued. Nothing else is assumed. Every edge leads from an earlier launch to a later one
//! or forward in enqueue order, so numbering the nodes in that order is a topological order.

use std::collections::BTreeMap;

use crate::{
    options::LaunchOrder,
    roster::LocalNode,
    trace::{PointKind, Runner, Trace},
};

/// The order inside one runner.
pub(crate) struct RunnerOrder {
    /// Predecessors of each local node: the start of each list in `preds`.
    starts: Vec<u32>,
    preds: Vec<LocalNode>,
    /// Group of each collective, by local node, ascending.
    pub(crate) collectives: Vec<(LocalNode, u32)>,
    /// After this node the next launch may start.
    pub(crate) handoff: LocalNode,
    /// Streams, densely numbered.
    pub(crate) lanes: usize,
    /// The stream of each point, by local node. The start and the end are on none.
    lane: Vec<u32>,
    /// For each point and stream, the latest node of the stream that precedes the point or is it.
    clocks: Vec<LocalNode>,
}

impl RunnerOrder {
    fn new<'a>(runner: &'a Runner, order: LaunchOrder, groups: &mut BTreeMap<&'a str, u32>) -> RunnerOrder {
        let end = runner.points.len() as LocalNode + 1;
        let mut streams: Vec<u32> = runner.points.iter().map(|point| point.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        let lane_of = |stream: u32| streams.partition_point(|&other| other < stream) as u32;
        let lane =
            std::iter::once(0).chain(runner.points.iter().map(|point| lane_of(point.stream))).collect();
        let mut made = RunnerOrder {
            starts: vec![0, 0],
            preds: Vec::new(),
            collectives: Vec::new(),
            handoff: end,
            lanes: streams.len(),
            lane,
            clocks: Vec::new(),
        };
        let mut last_on: BTreeMap<u32, LocalNode> = BTreeMap::new();
        let mut recorded: BTreeMap<u32, LocalNode> = BTreeMap::new();
        let mut last_of_group: BTreeMap<u32, LocalNode> = BTreeMap::new();
        for (at, point) in runner.points.iter().enumerate() {
            let node = at as LocalNode + 1;
            made.preds.push(last_on.insert(point.stream, node).unwrap_or(0));
            match &point.kind {
                PointKind::Record(event) => {
                    recorded.insert(*event, node);
                }
                PointKind::Wait(event) => made.preds.extend(recorded.get(event)),
                PointKind::Collective(group) => {
                    let next = groups.len() as u32;
                    let group = *groups.entry(group).or_insert(next);
                    made.preds.extend(last_of_group.insert(group, node));
                    made.collectives.push((node, group));
                }
                PointKind::Complete if order == LaunchOrder::Overlapped => made.handoff = node,
                _ => {}
            }
            made.starts.push(made.preds.len() as u32);
        }
        if last_on.is_empty() {
            made.preds.push(0);
        }
        made.preds.extend(last_on.into_values());
        made.starts.push(made.preds.len() as u32);
        made.clocks = made.clocks();
        made
    }

    fn clocks(&self) -> Vec<LocalNode> {
        let lanes = self.lanes;
        let mut clocks = vec![0; (self.end() as usize + 1) * lanes];
        for node in 1..=self.end() {
            let (before, here) = clocks.split_at_mut(node as usize * lanes);
            for &pred in self.preds(node) {
                let known = &before[pred as usize * lanes..(pred as usize + 1) * lanes];
                here.iter_mut().zip(known).for_each(|(here, &known)| *here = known.max(*here));
            }
            if let Some(lane) = self.lane(node) {
                here[lane] = node;
            }
        }
        clocks
    }

    /// The stream of a point; the start and the end have none.
    pub(crate) fn lane(&self, node: LocalNode) -> Option<usize> {
        (node > 0 && node < self.end()).then(|| self.lane[node as usize] as usize)
    }

    /// By stream, the latest node that precedes `node` or is it.
    pub(crate) fn clock(&self, node: LocalNode) -> &[LocalNode] {
        &self.clocks[node as usize * self.lanes..(node as usize + 1) * self.lanes]
    }

    pub(crate) fn preds(&self, node: LocalNode) -> &[LocalNode] {
        &self.preds[self.starts[node as usize] as usize..self.starts[node as usize + 1] as usize]
    }

    pub(crate) fn end(&self) -> LocalNode {
        self.starts.len() as LocalNode - 2
    }

    /// Whether `from` precedes `to` or is `to`.
    pub(crate) fn precedes(&self, from: LocalNode, to: LocalNode) -> bool {
        match self.lane(from) {
            Some(lane) => self.clock(to)[lane] >= from,
            None => from == 0 || to == from,
        }
    }
}

/// The order inside all runners, and the number of groups with collectives.
pub(crate) fn runner_orders(trace: &Trace, order: LaunchOrder) -> (Vec<RunnerOrder>, usize) {
    let mut groups = BTreeMap::new();
    let orders = trace.runners.iter().map(|runner| RunnerOrder::new(runner, order, &mut groups)).collect();
    (orders, groups.len())
}
