//! Who is live when, found from the launches; and that what is live at once shares no bytes.

use std::collections::BTreeMap;

use super::{Buffer, Launch, Reason, Violation, Work};
use crate::{
    options::{StepCut, Strategy},
    plan::Plan,
    request::Domain,
    trace::Trace,
};

/// One use of a buffer in one step, in launches, counted through rounds under wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    /// The launch that acquires it.
    from: usize,
    /// The launch after the one that reads it last.
    live: usize,
    /// The first launch that may reuse its bytes.
    held: usize,
}

/// Every use of every buffer that begins in the first round of a step. All ends of a buffer's uses ascend: a later use
/// is read no earlier than the one before it.
pub(super) fn uses(trace: &Trace, plan: &Plan, buffers: &[Buffer<'_>], step: &[u32]) -> Vec<Vec<Use>> {
    let launches = step.len();
    let horizon = match plan.options.step_cut {
        StepCut::Barrier => launches,
        StepCut::Wrap => 3 * launches,
    };
    let mut launched = vec![Vec::new(); trace.runners.len()];
    for launch in 0..horizon {
        launched[step[launch % launches] as usize].push(launch);
    }
    // Of each group with a depth of its own, the launches that use it, through as many rounds as could count.
    let depths = match plan.options.strategy {
        Strategy::Sessile => Some(&plan.options.depth_by_group),
        _ => None,
    };
    let counted = |group: &String| -> Vec<usize> {
        let uses: Vec<bool> = trace.runners.iter().map(|runner| runner.uses(group)).collect();
        (0..horizon).filter(|launch| uses[step[launch % launches] as usize]).collect()
    };
    let depths: BTreeMap<&String, (usize, Vec<usize>)> = depths
        .into_iter()
        .flatten()
        .map(|(group, &depth)| (group, (depth as usize, counted(group))))
        .collect();
    let held = |buffer: &Buffer<'_>, last: usize| match buffer.spec.group.as_ref().and_then(|g| depths.get(g))
    {
        None => last + promised(plan),
        Some(&(depth, ref counted)) => {
            let later = &counted[counted.partition_point(|&launch| launch <= last)..];
            // The launch that reads it last is the first of `depth`.
            match depth - 1 {
                0 => last + 1,
                more => later.get(more - 1).map_or(usize::MAX / 2, |&launch| launch + 1),
            }
        }
    };
    let of = |buffer: &Buffer<'_>| {
        let (own, reads) = (&launched[buffer.runner], &launched[buffer.releaser]);
        let begins = own.iter().copied().enumerate().take_while(|&(_, from)| from < launches);
        let used = begins.map(|(at, from)| {
            if buffer.releaser == buffer.runner {
                return Use { from, live: from + 1, held: held(buffer, from) };
            }
            let again = own.get(at + 1).copied().unwrap_or(horizon);
            let first = reads.partition_point(|&read| read < from);
            let before_again = reads.partition_point(|&read| read < again);
            // The last read before it begins again; without one, the first read after that.
            let last = if before_again > first { before_again - 1 } else { first };
            let last = reads.get(last).copied().unwrap_or(launches - 1);
            Use { from, live: last + 1, held: held(buffer, last) }
        });
        used.collect()
    };
    buffers.iter().map(of).collect()
}

/// The first of `a` that meets one of `b`, and the first such. A use lasts until `end` says.
fn nearest(
    a: &[Use],
    b: &[Use],
    end: impl Fn(&Use) -> usize,
    launches: usize,
    cut: StepCut,
) -> Option<(Use, Use)> {
    let around = |used: &Use| cut == StepCut::Wrap && end(used) - used.from >= launches;
    let around_b = b.iter().position(around);
    // How many steps `a` and `b` are ahead: under wrap, two steps lie on either side.
    let (ahead, steps) = match cut {
        StepCut::Barrier => (0, 0..1),
        StepCut::Wrap => (2 * launches, 0..5),
    };
    a.iter().find_map(|x| {
        let near = |step: usize| {
            let shift = step * launches;
            // Ends ascend: of those that end late enough, the first is the one that begins earliest.
            let at = b.partition_point(|y| end(y) + shift <= x.from + ahead);
            b.get(at).is_some_and(|y| y.from + shift < end(x) + ahead).then_some(at)
        };
        let first = if around(x) { Some(0) } else { steps.clone().filter_map(near).chain(around_b).min() };
        first.and_then(|at| b.get(at)).map(|&y| (*x, y))
    })
}

/// The distance that sessile promises; the other strategies promise only that nothing live is shared.
fn promised(plan: &Plan) -> usize {
    match plan.options.strategy {
        Strategy::Sessile => plan.options.depth as usize,
        _ => 1,
    }
}

/// `None` once the work is spent. `all` holds the uses of each step.
pub(super) fn check(
    trace: &Trace,
    plan: &Plan,
    buffers: &[Buffer<'_>],
    all: &[Vec<Vec<Use>>],
    work: &mut Work,
    found: &mut Vec<Violation>,
) -> Option<()> {
    let cut = plan.options.step_cut;
    // The step that launches a buffer's runner first.
    let home = |at: usize| all.iter().position(|uses| !uses[at].is_empty());
    let mut by_offset: Vec<(u32, u64, u64, usize)> = buffers
        .iter()
        .enumerate()
        .filter_map(|(at, buffer)| buffer.view.map(|view| (view, at)))
        .map(|(view, at)| (view.arena, view.offset, view.offset.saturating_add(view.bytes), at))
        .collect();
    by_offset.sort_unstable();
    for (place, &(arena, _, end, a)) in by_offset.iter().enumerate() {
        let above = by_offset[place + 1..].iter().take_while(|other| other.0 == arena && other.1 < end);
        for &(.., b) in above {
            let mut fault = None;
            for (step, uses) in all.iter().enumerate() {
                let (uses_of_a, uses_of_b) = (&uses[a], &uses[b]);
                work.spend(1 + uses_of_a.len() + uses_of_b.len())?;
                if uses_of_a.is_empty() || uses_of_b.is_empty() {
                    continue;
                }
                let launches = trace.steps[step].len();
                let live = nearest(uses_of_a, uses_of_b, |used| used.live, launches, cut);
                if let Some(pair) = live {
                    fault = Some((Reason::LiveOverlap, step, pair));
                    break;
                }
                let held = |used: &Use| used.held;
                // Where runners are launched again, depth counts between first launches (see `bound`).
                let soon = match cut {
                    StepCut::Wrap => nearest(uses_of_a, uses_of_b, held, launches, cut),
                    StepCut::Barrier if home(a) == Some(step) && home(b) == Some(step) => {
                        nearest(&uses_of_a[..1], &uses_of_b[..1], held, launches, cut)
                    }
                    StepCut::Barrier => None,
                };
                fault = fault.or(soon.map(|pair| (Reason::ReusedTooSoon, step, pair)));
            }
            if let Some((reason, step, (x, y))) = fault {
                let (x, y) = ((x.from, a), (y.from, b));
                let (first, second) = if x <= y { (x, y) } else { (y, x) };
                let party = |(position, at): (usize, usize)| {
                    buffers[at].party(trace, Some(Launch { step, position }))
                };
                found.push(Violation::between(reason, party(first), party(second)));
            }
        }
    }
    Some(())
}

/// Sums of bytes, by where they change.
#[derive(Default)]
struct Load(Vec<(usize, i64)>);

impl Load {
    /// Adds bytes wherever one of the ranges is, once.
    fn add(&mut self, mut ranges: Vec<(usize, usize)>, bytes: u64) {
        ranges.sort_unstable();
        let mut covered = 0;
        for (from, to) in ranges {
            if to > covered.max(from) {
                self.0.extend([(covered.max(from), bytes as i64), (to, -(bytes as i64))]);
                covered = to;
            }
        }
    }

    fn max(mut self) -> u64 {
        // Where some end and others begin, the ends come first.
        self.0.sort_unstable();
        let sums = self.0.iter().scan(0, |sum, &(_, change)| {
            *sum += change;
            Some(*sum)
        });
        sums.max().unwrap_or(0) as u64
    }
}

/// Of each domain, the largest sum of bytes that must be live at once: launch by launch, who cannot be elsewhere.
pub(super) fn bounds<'a>(
    trace: &Trace,
    plan: &Plan,
    buffers: &[Buffer<'a>],
    all: &[Vec<Vec<Use>>],
) -> BTreeMap<&'a Domain, u64> {
    let cut = plan.options.step_cut;
    let mut bounds: BTreeMap<&Domain, u64> = BTreeMap::new();
    let mut seen = vec![false; buffers.len()];
    for (step, uses_in_step) in trace.steps.iter().zip(all) {
        let launches = step.len();
        let cover = |ranges: &mut Vec<(usize, usize)>, from: usize, end: usize| {
            let end = end.min(from + launches);
            ranges.push((from, end.min(launches)));
            if cut == StepCut::Wrap && end > launches {
                ranges.push((0, end - launches));
            }
        };
        let mut loads: BTreeMap<&Domain, [Load; 2]> = BTreeMap::new();
        for (at, (buffer, uses)) in buffers.iter().zip(uses_in_step).enumerate() {
            let bytes = buffer.spec.aligned_bytes().unwrap_or(0);
            let (mut live_now, mut held_for_depth) = (Vec::new(), Vec::new());
            for used in uses {
                cover(&mut live_now, used.from, used.live);
                if !std::mem::replace(&mut seen[at], true) || cut == StepCut::Wrap {
                    cover(&mut held_for_depth, used.from, used.held);
                }
            }
            let [now, held] = loads.entry(&buffer.spec.domain).or_default();
            now.add(live_now, bytes);
            held.add(held_for_depth, bytes);
        }
        for (domain, [now, held]) in loads {
            let bound = bounds.entry(domain).or_default();
            *bound = (*bound).max(now.max()).max(held.max());
        }
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs, compared one by one.
    fn nearest_of_all(a: &[Use], b: &[Use], launches: usize, cut: StepCut) -> Option<(Use, Use)> {
        let near = |a: Use, b: Use| a.from < b.held && b.from < a.held;
        let later = |used: Use, steps: usize| Use {
            from: used.from + steps * launches,
            held: used.held + steps * launches,
            ..used
        };
        let around = |used: Use| used.held - used.from >= launches;
        let mut pairs = a.iter().flat_map(|&x| b.iter().map(move |&y| (x, y)));
        pairs.find(|&(x, y)| match cut {
            StepCut::Barrier => near(x, y),
            StepCut::Wrap => around(x) || around(y) || (0..5).any(|steps| near(later(x, 2), later(y, steps))),
        })
    }

    #[test]
    fn the_nearest_pair_is_the_one_that_comparing_all_finds() {
        let mut state = 7u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut near = 0;
        for _ in 0..200_000 {
            let (launches, distance) = (3 + random(30), 1 + random(3));
            let cut = if random(2) == 0 { StepCut::Barrier } else { StepCut::Wrap };
            let mut some = || {
                let (count, length) = (1 + random(3), 1 + random(2 * launches));
                let mut begins: Vec<usize> = (0..count).map(|_| random(launches)).collect();
                let mut ends: Vec<usize> = begins.iter().map(|&from| from + random(length)).collect();
                begins.sort_unstable();
                ends.sort_unstable();
                let used = |(from, to): (usize, usize)| Use { from, live: to + 1, held: to + distance };
                begins.into_iter().zip(ends).map(used).collect::<Vec<Use>>()
            };
            let (a, b) = (some(), some());
            let pair = nearest(&a, &b, |used| used.held, launches, cut);
            assert_eq!(pair, nearest_of_all(&a, &b, launches, cut), "{a:?} {b:?} {launches}");
            near += usize::from(pair.is_some());
        }
        assert!((50_000..190_000).contains(&near), "{near}");
    }
}
