//! Which uses conflict: clocks over all streams, carried from launch to launch.
//!
//! What must have happened before what, if bytes are to be shared: the recorded order and the order of launches (see
//! `order`), and depth: a request's release precedes the start of the launch from which its bytes may be reused. Two
//! uses conflict if neither's release precedes the other's acquire, strictly: what one operation reads and the same one
//! writes conflicts.
//!
//! ```text
//!  launch 3   stream 0   ── acquire a ── work ── wait ── complete              a is released before launch 4 starts;
//!             stream 1          └── collective (a) ──┘   collective (b) ──     b is pending
//!  launch 4   stream 0                              ── acquire c ──            c conflicts with b, not with a
//!             stream 1                                   collective (c) ─┐     collectives of one group are in order:
//!             stream 0                                    acquire d ─────┘     d, after that, conflicts with c only
//! ```
//!
//! A chain is a stream of one launch. Walking the launches in order, only chains with releases that the start of the
//! current launch does not know are kept, each with how far it is known; few are.

use std::ops::Range;

use crate::{
    classes::{Class, Use},
    limits::ORDER_WORK_MAX,
    order::RunnerOrder,
    roster::{LocalNode, Roster},
};

/// How far chains are known: pairs of chain and node, ascending.
type Known = Vec<(u32, LocalNode)>;

/// Uses in order, and for each the earlier ones that it conflicts with.
pub(crate) struct Conflicting {
    pub(crate) uses: Vec<Use>,
    starts: Vec<usize>,
    earlier: Vec<u32>,
}

impl Conflicting {
    /// Indices of the earlier uses that conflict with a use, ascending.
    pub(crate) fn earlier(&self, used: usize) -> &[u32] {
        &self.earlier[self.starts[used]..self.starts[used + 1]]
    }

    /// Whether two uses conflict.
    pub(crate) fn conflict(&self, a: usize, b: usize) -> bool {
        let (first, second) = (a.min(b), a.max(b));
        self.earlier(second).binary_search(&(first as u32)).is_ok()
    }
}

/// Releases in one chain that are not known yet.
struct Chain {
    id: u32,
    known: LocalNode,
    /// Node and use, ascending.
    releases: Vec<(LocalNode, u32)>,
}

impl Chain {
    /// The releases after a node.
    fn after(&self, node: LocalNode) -> &[(LocalNode, u32)] {
        &self.releases[self.releases.partition_point(|&(at, _)| at <= node)..]
    }

    fn insert(&mut self, release: (LocalNode, u32)) {
        let at = self.releases.partition_point(|other| *other < release);
        self.releases.insert(at, release);
    }
}

/// Finds all conflicts of one step, whose launches are walked as often as its uses say. `None` once the work is spent.
pub(crate) fn conflicting(
    roster: &Roster<'_>,
    classes: &[Class],
    (orders, groups): &(Vec<RunnerOrder>, usize),
    step: &Range<u32>,
    rounds: u32,
    uses: Vec<Use>,
) -> Option<Conflicting> {
    let launches = step.len() * rounds as usize;
    let mut walk = Walk {
        classes,
        orders,
        runners: (0..launches).map(|at| roster.launched[step.start as usize + at % step.len()]).collect(),
        due: vec![Vec::new(); launches],
        pending: Vec::new(),
        open: Vec::new(),
        next_chain: 0,
        last_collective: vec![Known::new(); *groups],
        last_end: vec![Known::new(); orders.len()],
        again: vec![0; orders.len()],
        handoff: Known::new(),
        work: ORDER_WORK_MAX,
        starts: vec![0],
        earlier: Vec::new(),
    };
    for &runner in &walk.runners {
        walk.again[runner] += 1;
    }
    let mut from = 0;
    for launch in 0..launches {
        let to = from + uses[from..].partition_point(|used| used.from as usize <= launch);
        walk.launch(launch, &uses, from..to)?;
        from = to;
    }
    Some(Conflicting { uses, starts: walk.starts, earlier: walk.earlier })
}

struct Walk<'a> {
    classes: &'a [Class],
    orders: &'a [RunnerOrder],
    /// Runner of each launch.
    runners: Vec<usize>,
    /// What depth makes known to the start of each launch: the use, and what its release knows.
    due: Vec<Vec<(u32, LocalNode, Known)>>,
    /// Chains with releases that are not known to the current launch's start, by id.
    pending: Vec<Chain>,
    /// Uses acquired and to be released by a later launch.
    open: Vec<u32>,
    next_chain: u32,
    last_collective: Vec<Known>,
    last_end: Vec<Known>,
    /// Launches of each runner still to come.
    again: Vec<u32>,
    handoff: Known,
    work: u64,
    starts: Vec<usize>,
    earlier: Vec<u32>,
}

impl Walk<'_> {
    fn launch(&mut self, launch: usize, uses: &[Use], acquired: Range<usize>) -> Option<()> {
        let runner = self.runners[launch];
        let orders = self.orders;
        let order = &orders[runner];
        self.start(launch, runner);
        let base = self.next_chain;
        self.next_chain += order.lanes as u32 + 1;
        let width = self.pending.len();
        // What each node knows of pending chains. Only collectives tell more than the start.
        let start: Vec<LocalNode> = self.pending.iter().map(|chain| chain.known).collect();
        let cost = (order.end() as usize + 1) * (1 + width);
        self.work = self.work.checked_sub(cost as u64)?;
        let rows = if width == 0 { Vec::new() } else { self.rows(order, &start) };
        let row =
            |node: LocalNode| -> &[LocalNode] { &rows[node as usize * width..(node as usize + 1) * width] };
        let known = |pending: &[Chain], node: LocalNode| -> Known {
            let of_pending = pending.iter().zip(row(node)).map(|(chain, &known)| (chain.id, known));
            let own = order.clock(node).iter().enumerate();
            let own = own.filter(|&(_, &known)| known > 0).map(|(lane, &known)| (base + lane as u32, known));
            let end = (node == order.end()).then_some((base + order.lanes as u32, node));
            of_pending.chain(own).chain(end).collect()
        };

        // Releases of this launch: of earlier uses first, then of those it acquires.
        let mut own: Vec<Chain> = (0..=order.lanes as u32)
            .map(|lane| Chain { id: base + lane, known: 0, releases: Vec::new() })
            .collect();
        let lane_of = |node: LocalNode| order.lane(node).unwrap_or(order.lanes);
        self.open.retain(|&used| {
            let here = uses[used as usize].to as usize == launch;
            if here {
                let node = self.classes[uses[used as usize].class].release;
                own[lane_of(node)].insert((node, used));
            }
            !here
        });
        for at in acquired {
            let class = &self.classes[uses[at].class];
            let first = self.earlier.len();
            let clock = order.clock(class.acquire);
            for (chain, &known) in self.pending.iter().zip(row(class.acquire)) {
                self.earlier.extend(chain.after(known).iter().map(|&(_, used)| used));
            }
            for (lane, chain) in own.iter().enumerate() {
                // Strictly before: the node itself does not count.
                let known = clock.get(lane).copied().unwrap_or(0);
                let known = if known == class.acquire { known.saturating_sub(1) } else { known };
                self.earlier.extend(chain.after(known).iter().map(|&(_, used)| used));
            }
            self.earlier.extend_from_slice(&self.open);
            self.earlier[first..].sort_unstable();
            self.work = self.work.checked_sub((self.earlier.len() - first) as u64 + 1)?;
            self.starts.push(self.earlier.len());
            if uses[at].to as usize == launch {
                own[lane_of(class.release)].insert((class.release, at as u32));
            } else {
                self.open.push(at as u32);
            }
        }

        for &(node, group) in &order.collectives {
            self.last_collective[group as usize] = known(&self.pending, node);
        }
        self.handoff = known(&self.pending, order.handoff);
        self.again[runner] -= 1;
        if self.again[runner] > 0 {
            self.last_end[runner] = known(&self.pending, order.end());
        }
        for (lane, chain) in own.iter().enumerate() {
            let handed = if lane < order.lanes { order.clock(order.handoff)[lane] } else { 0 };
            let handed = if order.handoff == order.end() { LocalNode::MAX } else { handed };
            for &(node, used) in chain.after(handed) {
                let held = uses[used as usize].held as usize;
                let Some(due) = self.due.get_mut(held) else { continue };
                // One node says the same for all that are released there.
                if due.last().is_none_or(|&(chain_id, at, _)| (chain_id, at) != (chain.id, node)) {
                    due.push((chain.id, node, known(&self.pending, node)));
                }
            }
        }
        self.pending.extend(own.into_iter().filter(|chain| !chain.releases.is_empty()));
        Some(())
    }

    /// What the start of a launch knows.
    fn start(&mut self, launch: usize, runner: usize) {
        learn(&mut self.pending, &std::mem::take(&mut self.handoff));
        learn(&mut self.pending, &self.last_end[runner]);
        for (chain, node, known) in std::mem::take(&mut self.due[launch]) {
            // What is known already was known with all that precedes it.
            let told = self.pending.binary_search_by_key(&chain, |chain| chain.id);
            if told.is_ok_and(|at| self.pending[at].known < node) {
                learn(&mut self.pending, &known);
            }
        }
        self.pending.retain_mut(|chain| {
            let known = chain.releases.partition_point(|&(node, _)| node <= chain.known);
            chain.releases.drain(..known);
            !chain.releases.is_empty()
        });
    }

    fn rows(&self, order: &RunnerOrder, start: &[LocalNode]) -> Vec<LocalNode> {
        let width = start.len();
        let mut rows = Vec::with_capacity((order.end() as usize + 1) * width);
        rows.extend_from_slice(start);
        let mut collectives = order.collectives.iter().copied().peekable();
        // Groups of this launch: the first collective of each follows the last one of earlier launches.
        let mut here: Vec<u32> = Vec::new();
        for node in 1..=order.end() {
            let preds = order.preds(node);
            let first = preds[0] as usize * width;
            rows.extend_from_within(first..first + width);
            for &pred in &preds[1..] {
                merge_row(&mut rows, node, pred, width);
            }
            if let Some((_, group)) = collectives.next_if(|&(at, _)| at == node)
                && !here.contains(&group)
            {
                let row = &mut rows[node as usize * width..];
                for (chain, told) in zip_known(&self.pending, &self.last_collective[group as usize]) {
                    row[chain] = row[chain].max(told);
                }
                here.push(group);
            }
        }
        rows
    }
}

/// Makes one row know what an earlier one knows.
fn merge_row(rows: &mut [LocalNode], node: LocalNode, pred: LocalNode, width: usize) {
    let (before, row) = rows.split_at_mut(node as usize * width);
    let pred = &before[pred as usize * width..(pred as usize + 1) * width];
    row.iter_mut().zip(pred).for_each(|(known, &told)| *known = told.max(*known));
}

/// Pending chains by index, with what is told of them.
fn zip_known<'a>(pending: &'a [Chain], known: &'a Known) -> impl Iterator<Item = (usize, LocalNode)> + 'a {
    let mut told = known.iter().copied().peekable();
    pending.iter().enumerate().filter_map(move |(at, chain)| {
        while told.next_if(|&(id, _)| id < chain.id).is_some() {}
        told.next_if(|&(id, _)| id == chain.id).map(|(_, node)| (at, node))
    })
}

fn learn(pending: &mut [Chain], known: &Known) {
    let told: Vec<(usize, LocalNode)> = zip_known(pending, known).collect();
    for (at, node) in told {
        pending[at].known = pending[at].known.max(node);
    }
}
