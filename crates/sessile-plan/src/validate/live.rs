//! Who may share bytes: found by search over the unrolled launches, with an edge for each release that depth makes known
//! to the start of a later launch.
//!
//! ```text
//!  launch 0        acquire a ── release a ────────────┐ depth 2: the bytes of a are free from launch 2 on
//!  launch 1   start ── acquire b                      │
//!  launch 2                          start <──────────┘ ── acquire c
//! ```
//!
//! Two requests may share bytes if, for each pair of their uses, one's release precedes the other's acquire, strictly. A
//! bound is right if its requests can't: each pair of them has uses that are not ordered.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Buffer, Launch, Reason, Violation, Work,
    reach::{Search, Unrolled},
    unknown,
};
use crate::{
    options::{StepCut, Strategy},
    plan::Plan,
    request::RequestId,
    trace::{PointKind, Runner, Trace},
};

/// From which point to which a buffer lives; none means the start or the end of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Life {
    runner: usize,
    acquire: Option<usize>,
    releaser: usize,
    release: Option<usize>,
}

/// Lives of all buffers. One whose acquire is not proven to precede its release lives as long as its runner.
fn lives(trace: &Trace, buffers: &[Buffer<'_>], work: &mut Work) -> Option<Vec<Life>> {
    let before: Vec<Vec<Vec<usize>>> = trace.runners.iter().map(points_before).collect();
    let mut known: BTreeMap<Life, bool> = BTreeMap::new();
    let mut lives = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        let Buffer { runner, acquire, releaser, release, .. } = *buffer;
        let life = Life { runner, acquire, releaser, release };
        let (Some(first), Some(last), true) = (acquire, release, runner == releaser) else {
            // Without a point for one end, that end is the launch's own.
            lives.push(life);
            continue;
        };
        let proven = match known.get(&life) {
            Some(&proven) => proven,
            None => {
                let proven = precedes(&before[runner], first, last, work)?;
                known.insert(life, proven);
                proven
            }
        };
        lives.push(if proven { life } else { Life { acquire: None, release: None, ..life } });
    }
    Some(lives)
}

/// For each point of a runner, the points just before it: of its stream, of its event, of its group.
fn points_before(runner: &Runner) -> Vec<Vec<usize>> {
    let (mut streams, mut events, mut groups) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let each = runner.points.iter().enumerate().map(|(at, point)| {
        let mut before: Vec<usize> = streams.insert(point.stream, at).into_iter().collect();
        match &point.kind {
            PointKind::Record(event) => _ = events.insert(*event, at),
            PointKind::Wait(event) => before.extend(events.get(event)),
            PointKind::Collective(group) => before.extend(groups.insert(group.as_str(), at)),
            _ => {}
        }
        before
    });
    each.collect()
}

fn precedes(before: &[Vec<usize>], first: usize, last: usize, work: &mut Work) -> Option<bool> {
    let mut seen = BTreeSet::new();
    let mut open = vec![last];
    while let Some(at) = open.pop() {
        work.spend(1)?;
        if at == first {
            return Some(true);
        }
        if at > first && seen.insert(at) {
            open.extend_from_slice(&before[at]);
        }
    }
    Some(false)
}

/// One use of a buffer, in launches, counted through rounds under wrap.
#[derive(Clone, Copy, Debug)]
struct Use {
    from: usize,
    /// The launch that reads it last.
    to: usize,
    /// The first launch that may reuse its bytes.
    held: usize,
    /// Whether it is the first of all uses of its buffer.
    first: bool,
}

/// The launch that reads what nothing reads in a step.
const NEVER: usize = usize::MAX;

/// How uses are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Only what is live counts.
    Live,
    /// Depth counts; under the barrier between the first uses alone.
    Depth,
}

/// What one step launches.
struct Step<'a> {
    trace: &'a Trace,
    plan: &'a Plan,
    buffers: &'a [Buffer<'a>],
    lives: &'a [Life],
    /// Whether this step is the first to launch a buffer's runner.
    home: Vec<bool>,
    launches: &'a [u32],
    rounds: usize,
    launched: Vec<Vec<usize>>,
    /// Of each group with a depth of its own, the launches that use it.
    counted: BTreeMap<&'a str, (usize, Vec<usize>)>,
}

impl<'a> Step<'a> {
    fn new(
        trace: &'a Trace,
        plan: &'a Plan,
        buffers: &'a [Buffer<'a>],
        lives: &'a [Life],
        home: Vec<bool>,
        launches: &'a [u32],
    ) -> Step<'a> {
        let rounds = match plan.options.step_cut {
            StepCut::Barrier => 1,
            StepCut::Wrap => 3,
        };
        // One round more than is compared, since that may read what this one acquires.
        let horizon = if rounds > 1 { rounds + 1 } else { 1 } * launches.len();
        let runner = |launch: usize| launches[launch % launches.len()] as usize;
        let mut launched = vec![Vec::new(); trace.runners.len()];
        (0..horizon).for_each(|launch| launched[runner(launch)].push(launch));
        let counted = plan.options.depth_by_group.iter().map(|(group, &depth)| {
            let uses: Vec<bool> = trace.runners.iter().map(|runner| runner.uses(group)).collect();
            let counted = (0..horizon).filter(|&launch| uses[runner(launch)]).collect();
            (group.as_str(), (depth as usize, counted))
        });
        Step { trace, plan, buffers, lives, home, launches, rounds, launched, counted: counted.collect() }
    }

    fn held(&self, buffer: &Buffer<'_>, to: usize, rule: Rule) -> usize {
        if to == NEVER {
            return NEVER;
        }
        if rule == Rule::Live {
            return to + 1;
        }
        match buffer.spec.group.as_deref().and_then(|group| self.counted.get(group)) {
            None => to + self.plan.options.depth as usize,
            Some(&(1, _)) => to + 1,
            // The launch that reads it last is the first of `depth`.
            Some((depth, counted)) => {
                let later = &counted[counted.partition_point(|&launch| launch <= to)..];
                later.get(depth - 2).map_or(NEVER, |&launch| launch + 1)
            }
        }
    }

    /// All uses of a buffer, ascending. One that nothing releases in time lasts for ever.
    fn uses(&self, buffer: &Buffer<'_>, home: bool, rule: Rule) -> Vec<Use> {
        let (own, reads) = (&self.launched[buffer.runner], &self.launched[buffer.releaser]);
        let horizon = self.rounds * self.launches.len();
        let begins = own.iter().enumerate().take_while(|&(_, &from)| from < horizon);
        let used = begins.map(|(at, &from)| {
            let to = if buffer.releaser == buffer.runner {
                from
            } else {
                let again = own.get(at + 1).copied().unwrap_or(usize::MAX);
                let first = reads.partition_point(|&read| read < from);
                let before_again = reads.partition_point(|&read| read < again);
                // The last read before it begins again; without one, the first read after that.
                let last = if before_again > first { before_again - 1 } else { first };
                reads.get(last).copied().unwrap_or(NEVER)
            };
            Use { from, to, held: self.held(buffer, to, rule), first: home && at == 0 }
        });
        used.collect()
    }
}

/// Pairs of requests to be looked at: for each, the others.
type Pairs = Vec<Vec<usize>>;

/// Tells of each pair of uses of each pair of requests whether it is ordered.
fn compare(
    step: &Step<'_>,
    rule: Rule,
    pairs: &Pairs,
    work: &mut Work,
    mut tell: impl FnMut((usize, usize), (usize, usize), bool),
) -> Option<()> {
    let Step { buffers, lives, ref home, .. } = *step;
    let mut graph = Unrolled::bare(step.trace, step.launches, step.rounds, step.plan, buffers, work)?;
    let uses: Vec<Vec<Use>> =
        buffers.iter().zip(home).map(|(buffer, &home)| step.uses(buffer, home, rule)).collect();
    let horizon = step.rounds * step.launches.len();
    let node = |graph: &Unrolled<'_>, at: usize, launch: usize| match lives[at].release {
        Some(point) => graph.point(launch, point),
        None => graph.end(launch),
    };
    for (at, uses) in uses.iter().enumerate() {
        for used in uses.iter().filter(|used| used.to < horizon && used.held < horizon) {
            work.spend(1)?;
            let (from, to) = (node(&graph, at, used.to), graph.start(used.held));
            graph.edge(from, to);
        }
    }
    let mut acquirers: Vec<BTreeMap<Option<usize>, Vec<usize>>> =
        vec![BTreeMap::new(); step.trace.runners.len()];
    for (at, life) in lives.iter().enumerate() {
        if !pairs[at].is_empty() {
            acquirers[life.runner].entry(life.acquire).or_default().push(at);
        }
    }
    // Under the barrier depth counts between first uses.
    let counts = |used: &Use| rule == Rule::Live || used.first || step.plan.options.step_cut == StepCut::Wrap;
    let mut search = Search::new(&graph);
    search.restart();
    for launch in 0..horizon {
        let runner = step.launches[launch % step.launches.len()] as usize;
        search.begin(launch, 0, None, work)?;
        let use_at = |at: usize| {
            let of = &uses[at];
            of[of.partition_point(|used| used.from < launch)..].first().filter(|used| used.from == launch)
        };
        let mut beside: BTreeMap<(usize, usize), bool> = BTreeMap::new();
        for (&point, acquired) in &acquirers[runner] {
            let mut asked: Vec<(usize, usize, usize, usize)> = Vec::new();
            for &y in acquired.iter().filter(|&&y| use_at(y).is_some_and(counts)) {
                for &x in &pairs[y] {
                    let earlier = &uses[x][..uses[x].partition_point(|used| used.from < launch)];
                    for used in earlier.iter().rev().take_while(|used| used.held > launch) {
                        work.spend(1)?;
                        if !counts(used) {
                            continue;
                        }
                        if used.to > launch {
                            tell((x, used.from), (y, launch), false);
                        } else {
                            asked.push((node(&graph, x, used.to), x, used.from, y));
                        }
                    }
                    if let Some(used) = use_at(x).filter(|used| counts(used)) {
                        work.spend(1)?;
                        let ordered = beside.entry((x.min(y), x.max(y))).or_default();
                        if used.to == launch && !*ordered {
                            asked.push((node(&graph, x, launch), x, launch, y));
                        }
                    }
                }
            }
            let lowest = asked.iter().map(|&(release, ..)| release).min();
            let Some(lowest) = lowest else { continue };
            let to = point.map_or(graph.start(launch), |point| graph.point(launch, point));
            search.find(to, lowest, None, work)?;
            for (release, x, from, y) in asked {
                let ordered = search.found(release);
                if from == launch {
                    *beside.entry((x.min(y), x.max(y))).or_default() |= ordered;
                } else {
                    tell((x, from), (y, launch), ordered);
                }
            }
        }
        for ((x, y), ordered) in beside {
            tell((x, launch), (y, launch), ordered);
        }
    }
    Some(())
}

/// For each request, those that share bytes with it.
fn sharing(buffers: &[Buffer<'_>], work: &mut Work) -> Option<Pairs> {
    let mut by_offset: Vec<(u32, u64, u64, usize)> = buffers
        .iter()
        .enumerate()
        .filter_map(|(at, buffer)| buffer.view.map(|view| (view, at)))
        .map(|(view, at)| (view.arena, view.offset, view.offset.saturating_add(view.bytes), at))
        .collect();
    by_offset.sort_unstable();
    let mut pairs = vec![Vec::new(); buffers.len()];
    for (place, &(arena, _, end, a)) in by_offset.iter().enumerate() {
        for &(.., b) in by_offset[place + 1..].iter().take_while(|other| other.0 == arena && other.1 < end) {
            work.spend(1)?;
            pairs[a].push(b);
            pairs[b].push(a);
        }
    }
    Some(pairs)
}

/// The requests of each arena's bound, one of each life, in pairs; and how many lives there are.
struct Peaks {
    pairs: Pairs,
    /// Arena and, inside it, number of each representative.
    number: BTreeMap<usize, (usize, usize)>,
    lives: Vec<usize>,
}

fn peaks(plan: &Plan, buffers: &[Buffer<'_>], lives: &[Life], found: &mut Vec<Violation>) -> Peaks {
    let index: BTreeMap<RequestId, usize> =
        buffers.iter().enumerate().map(|(at, buffer)| (buffer.id, at)).collect();
    let mut made =
        Peaks { pairs: vec![Vec::new(); buffers.len()], number: BTreeMap::new(), lives: Vec::new() };
    for (number, arena) in plan.arenas.iter().enumerate() {
        let wrong = || Violation::new(Reason::LowerBoundWrong);
        let mut sum = 0u64;
        let mut of_life: BTreeMap<(Life, Option<&str>), usize> = BTreeMap::new();
        for (place, &id) in arena.peak.iter().enumerate() {
            let Some(&at) = index.get(&id) else {
                found.push(Violation::new(Reason::UnknownRequest).about(unknown(id, None)));
                continue;
            };
            if place > 0 && arena.peak[place - 1] >= id {
                found.push(wrong().values("`peak` in order, each request once", id));
            }
            if buffers[at].spec.domain != arena.domain {
                found.push(wrong().values(&arena.domain, &buffers[at].spec.domain));
            }
            sum = sum.saturating_add(buffers[at].spec.aligned_bytes().unwrap_or(0));
            of_life.entry((lives[at], buffers[at].spec.group.as_deref())).or_insert(at);
        }
        if sum != arena.lower_bound_bytes {
            found.push(wrong().values(sum, arena.lower_bound_bytes));
        }
        let chosen: Vec<usize> = of_life.into_values().collect();
        for (place, &at) in chosen.iter().enumerate() {
            made.number.insert(at, (number, place));
            made.pairs[at] = chosen.iter().copied().filter(|&other| other != at).collect();
        }
        made.lives.push(chosen.len());
    }
    made
}

/// What is wrong with a pair of requests, and at which launches.
type Fault = (Reason, (usize, Launch), (usize, Launch));

/// Checks that no two requests that are live at once share bytes, that sessile keeps its depth, and that the bounds are
/// right. `None` once the work is spent.
pub(super) fn check(
    trace: &Trace,
    plan: &Plan,
    buffers: &[Buffer<'_>],
    work: &mut Work,
    found: &mut Vec<Violation>,
) -> Option<()> {
    let lives = lives(trace, buffers, work)?;
    let sharing = sharing(buffers, work)?;
    let peaks = peaks(plan, buffers, &lives, found);
    let mut unordered: Vec<Vec<bool>> = peaks.lives.iter().map(|&count| vec![false; count * count]).collect();
    let mut faults: BTreeMap<(usize, usize), Fault> = BTreeMap::new();
    let mut pairs = sharing;
    for (pairs, more) in pairs.iter_mut().zip(&peaks.pairs) {
        pairs.extend_from_slice(more);
        pairs.sort_unstable();
        pairs.dedup();
    }
    // Where no runner is launched again, what depth forbids holds all that is live at once.
    let launched = trace.launch_count() == trace.runners.len();
    let once = launched && plan.options.step_cut == StepCut::Barrier;
    let rules: &[Rule] = match plan.options.strategy {
        Strategy::Sessile if once => &[Rule::Depth, Rule::Live],
        Strategy::Sessile => &[Rule::Live, Rule::Depth],
        _ => &[Rule::Live],
    };
    for &rule in rules {
        if once && rule == Rule::Live && plan.options.strategy == Strategy::Sessile && faults.is_empty() {
            break;
        }
        let reason = match rule {
            Rule::Live => Reason::LiveOverlap,
            Rule::Depth => Reason::ReusedTooSoon,
        };
        let mut seen = vec![false; trace.runners.len()];
        for (number, launches) in trace.steps.iter().enumerate() {
            let home: Vec<bool> = buffers.iter().map(|buffer| !seen[buffer.runner]).collect();
            launches.iter().for_each(|&runner| seen[runner as usize] = true);
            let step = Step::new(trace, plan, buffers, &lives, home, launches);
            let at = |launch: usize| Launch { step: number, position: launch % launches.len() };
            compare(&step, rule, &pairs, work, |x, y, ordered| {
                if ordered {
                    return;
                }
                if buffers[x.0].shares_bytes(&buffers[y.0]) {
                    let fault = (reason, (x.0, at(x.1)), (y.0, at(y.1)));
                    let of_pair = faults.entry((x.0.min(y.0), x.0.max(y.0))).or_insert(fault);
                    if rule == Rule::Live && of_pair.0 == Reason::ReusedTooSoon {
                        *of_pair = fault;
                    }
                }
                if let (Some(&(arena, a)), Some(&(other, b))) =
                    (peaks.number.get(&x.0), peaks.number.get(&y.0))
                    && arena == other
                {
                    let count = peaks.lives[arena];
                    unordered[arena][a * count + b] = true;
                    unordered[arena][b * count + a] = true;
                }
            })?;
        }
    }
    for (reason, x, y) in faults.into_values() {
        let party = |(at, launch): (usize, Launch)| buffers[at].party(trace, Some(launch));
        found.push(Violation::between(reason, party(x), party(y)));
    }
    for (&x, &(arena, a)) in &peaks.number {
        for &y in peaks.pairs[x].iter().filter(|&&y| x < y) {
            let b = peaks.number[&y].1;
            if !unordered[arena][a * peaks.lives[arena] + b] {
                let (first, second) = (buffers[x].party(trace, None), buffers[y].party(trace, None));
                found.push(Violation::between(Reason::LowerBoundWrong, first, second));
            }
        }
    }
    Some(())
}
