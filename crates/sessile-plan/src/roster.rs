//! The requests of a checked trace, numbered densely, with what the planner asks about each.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    request::{Domain, RequestId, RequestSpec},
    trace::{PointKind, Runner, Trace},
};

/// A node inside one launch: 0 is its start, `i + 1` its point `i`, and `points + 1` its end.
pub(crate) type LocalNode = u32;

/// One request.
pub(crate) struct Entry<'a> {
    pub(crate) id: RequestId,
    pub(crate) spec: &'a RequestSpec,
    /// Aligned.
    pub(crate) bytes: u64,
    /// Index into `Roster::domains`.
    pub(crate) domain: usize,
    pub(crate) runner: usize,
    /// Where `runner` first writes it.
    pub(crate) acquire: LocalNode,
    /// The runner that releases it, the owner itself unless the request spans runners.
    pub(crate) release_runner: usize,
    /// Where `release_runner` last reads it.
    pub(crate) release: LocalNode,
}

impl Entry<'_> {
    /// Whether the request outlives the launch that makes it.
    pub(crate) fn spans(&self) -> bool {
        self.runner != self.release_runner
    }
}

/// All requests, in the order of the trace; all other planner code names them by index.
pub(crate) struct Roster<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) entries: Vec<Entry<'a>>,
    /// Sorted.
    pub(crate) domains: Vec<&'a Domain>,
    /// Launch positions of each step, one step after the other.
    pub(crate) steps: Vec<Range<u32>>,
    /// The runner of each launch position.
    pub(crate) launched: Vec<usize>,
    /// Launch positions of each runner, ascending.
    pub(crate) positions: Vec<Vec<u32>>,
}

impl<'a> Roster<'a> {
    /// `trace` must have passed `check_trace`.
    pub(crate) fn new(trace: &'a Trace) -> Roster<'a> {
        let mut domains: Vec<&Domain> = trace.requests().map(|(_, request)| &request.spec.domain).collect();
        domains.sort_unstable();
        domains.dedup();
        let mut entries: Vec<Entry> = Vec::new();
        let mut by_id = BTreeMap::new();
        for (runner, request) in trace.requests() {
            by_id.insert(request.id, entries.len());
            entries.push(Entry {
                id: request.id,
                spec: &request.spec,
                bytes: request.spec.aligned_bytes().unwrap_or(u64::MAX),
                domain: domains.binary_search(&&request.spec.domain).unwrap_or(0),
                runner,
                acquire: 0,
                release_runner: runner,
                release: trace.runners[runner].points.len() as LocalNode + 1,
            });
        }
        for (r, runner) in trace.runners.iter().enumerate() {
            let (first_write, last_read) = (first_writes(runner), last_reads(runner));
            for (at, point) in runner.points.iter().enumerate() {
                match point.kind {
                    PointKind::Acquire(id) => {
                        entries[by_id[&id]].acquire = first_write[at] as LocalNode + 1;
                    }
                    PointKind::Release(id) => {
                        let entry = &mut entries[by_id[&id]];
                        (entry.release_runner, entry.release) = (r, last_read[at] as LocalNode + 1);
                    }
                    _ => {}
                }
            }
        }
        let mut positions = vec![Vec::new(); trace.runners.len()];
        let mut steps = Vec::with_capacity(trace.steps.len());
        let mut launched = Vec::with_capacity(trace.launch_count());
        for launches in &trace.steps {
            let position = launched.len() as u32;
            steps.push(position..position + launches.len() as u32);
            launched.extend(launches.iter().map(|&runner| runner as usize));
        }
        for (position, &runner) in launched.iter().enumerate() {
            positions[runner].push(position as u32);
        }
        Roster { trace, entries, domains, steps, launched, positions }
    }

    /// Positions at which a runner is launched in one step.
    pub(crate) fn positions_in(&self, step: &Range<u32>, runner: usize) -> &[u32] {
        let all = &self.positions[runner];
        let from = all.partition_point(|&position| position < step.start);
        let to = all.partition_point(|&position| position < step.end);
        &all[from..to]
    }

    /// Runners in order of first launch, step after step, which is the order of capture.
    pub(crate) fn capture_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.positions.len()).collect();
        order.sort_unstable_by_key(|&runner| self.positions[runner][0]);
        order
    }

    /// Indices of the requests of one domain.
    pub(crate) fn of_domain(&self, domain: usize) -> Vec<usize> {
        (0..self.entries.len()).filter(|&index| self.entries[index].domain == domain).collect()
    }
}

/// For each point, the one at which a request acquired there is first written: the next work of its stream. It may be
/// ordered after more than the acquire is, as a collective after those before it. Without later work, the point itself.
fn first_writes(runner: &Runner) -> Vec<usize> {
    let mut next: BTreeMap<u32, usize> = BTreeMap::new();
    let mut found: Vec<usize> = (0..runner.points.len()).collect();
    for (at, point) in runner.points.iter().enumerate().rev() {
        if matches!(point.kind, PointKind::Work | PointKind::Collective(_)) {
            next.insert(point.stream, at);
        }
        found[at] = next.get(&point.stream).copied().unwrap_or(at);
    }
    found
}

/// For each point, the one at which a request released there was last read: the last work of its stream before, or the
/// wait that stands for work of another stream. Without either, the point itself.
fn last_reads(runner: &Runner) -> Vec<usize> {
    let mut last: BTreeMap<u32, usize> = BTreeMap::new();
    let mut found: Vec<usize> = (0..runner.points.len()).collect();
    for (at, point) in runner.points.iter().enumerate() {
        if matches!(point.kind, PointKind::Work | PointKind::Collective(_) | PointKind::Wait(_)) {
            last.insert(point.stream, at);
        }
        found[at] = last.get(&point.stream).copied().unwrap_or(at);
    }
    found
}
