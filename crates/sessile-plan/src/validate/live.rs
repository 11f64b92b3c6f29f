//! Who is live when, found from the launches; and that what is live at once shares no bytes.

use std::collections::BTreeMap;

use super::{Buffer, Reason, Violation, Work};
use crate::{
    options::{StepCut, Strategy},
    plan::Plan,
    request::Domain,
    trace::Trace,
};

/// First and last launch of one use of a buffer, counted through steps under wrap.
type Use = (usize, usize);

/// Every use of every buffer that begins in the first step. Both ends of a buffer's uses ascend: a later use is read
/// no earlier than the one before it.
pub(super) fn uses(trace: &Trace, plan: &Plan, buffers: &[Buffer<'_>]) -> Vec<Vec<Use>> {
    let launches = trace.launches.len();
    let horizon = match plan.options.step_cut {
        StepCut::Barrier => launches,
        StepCut::Wrap => 3 * launches,
    };
    let mut launched = vec![Vec::new(); trace.runners.len()];
    for launch in 0..horizon {
        launched[trace.launches[launch % launches] as usize].push(launch);
    }
    let of = |buffer: &Buffer<'_>| {
        let (own, reads) = (&launched[buffer.runner], &launched[buffer.releaser]);
        let begins = own.iter().copied().enumerate().take_while(|&(_, from)| from < launches);
        let used = begins.map(|(at, from)| {
            if buffer.releaser == buffer.runner {
                return (from, from);
            }
            let again = own.get(at + 1).copied().unwrap_or(horizon);
            let first = reads.partition_point(|&read| read < from);
            let before_again = reads.partition_point(|&read| read < again);
            // The last read before it begins again; without one, the first read after that.
            let last = if before_again > first { before_again - 1 } else { first };
            (from, reads.get(last).copied().unwrap_or(launches - 1))
        });
        used.collect()
    };
    buffers.iter().map(of).collect()
}

/// The first of `a` that is nearer than `distance` launches to one of `b`, and the first such.
fn nearest(a: &[Use], b: &[Use], distance: usize, launches: usize, cut: StepCut) -> Option<(Use, Use)> {
    let around = |used: &Use| cut == StepCut::Wrap && used.1 - used.0 + distance >= launches;
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
            let at = b.partition_point(|y| y.1 + shift + distance <= x.0 + ahead);
            b.get(at).is_some_and(|y| y.0 + shift < x.1 + ahead + distance).then_some(at)
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

/// `None` once the work is spent.
pub(super) fn check(
    trace: &Trace,
    plan: &Plan,
    buffers: &[Buffer<'_>],
    all: &[Vec<Use>],
    work: &mut Work,
    found: &mut Vec<Violation>,
) -> Option<()> {
    let cut = plan.options.step_cut;
    let launches = trace.launches.len();
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
            work.spend(1 + all[a].len() + all[b].len())?;
            let pair = |distance| nearest(&all[a], &all[b], distance, launches, cut);
            // Where a step launches runners again, depth counts between first launches (see `bound`).
            let too_soon = || match cut {
                StepCut::Wrap => pair(promised(plan)),
                StepCut::Barrier => nearest(&all[a][..1], &all[b][..1], promised(plan), launches, cut),
            };
            let fault = pair(1).map(|uses| (Reason::LiveOverlap, uses));
            if let Some((reason, (x, y))) =
                fault.or_else(|| too_soon().map(|uses| (Reason::ReusedTooSoon, uses)))
            {
                let (x, y) = ((x.0, a), (y.0, b));
                let (first, second) = if x <= y { (x, y) } else { (y, x) };
                let party = |(launch, at): (usize, usize)| buffers[at].party(trace, Some(launch));
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
    all: &[Vec<Use>],
) -> BTreeMap<&'a Domain, u64> {
    let cut = plan.options.step_cut;
    let launches = trace.launches.len();
    let cover = |ranges: &mut Vec<(usize, usize)>, from: usize, end: usize| {
        let end = end.min(from + launches);
        ranges.push((from, end.min(launches)));
        if cut == StepCut::Wrap && end > launches {
            ranges.push((0, end - launches));
        }
    };
    let mut loads: BTreeMap<&Domain, [Load; 2]> = BTreeMap::new();
    for (buffer, uses) in buffers.iter().zip(all) {
        let bytes = buffer.spec.aligned_bytes().unwrap_or(0);
        let (mut live_now, mut held_for_depth) = (Vec::new(), Vec::new());
        for (number, &(from, to)) in uses.iter().enumerate() {
            cover(&mut live_now, from, to + 1);
            if number == 0 || cut == StepCut::Wrap {
                cover(&mut held_for_depth, from, to + promised(plan));
            }
        }
        let [now, held] = loads.entry(&buffer.spec.domain).or_default();
        now.add(live_now, bytes);
        held.add(held_for_depth, bytes);
    }
    loads.into_iter().map(|(domain, [now, held])| (domain, now.max().max(held.max()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs, compared one by one.
    fn nearest_of_all(
        a: &[Use],
        b: &[Use],
        distance: usize,
        launches: usize,
        cut: StepCut,
    ) -> Option<(Use, Use)> {
        let near = |a: Use, b: Use| a.0 < b.1 + distance && b.0 < a.1 + distance;
        let later = |used: Use, steps: usize| (used.0 + steps * launches, used.1 + steps * launches);
        let around = |used: Use| used.1 - used.0 + distance >= launches;
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
                begins.into_iter().zip(ends).collect::<Vec<Use>>()
            };
            let (a, b) = (some(), some());
            let pair = nearest(&a, &b, distance, launches, cut);
            assert_eq!(
                pair,
                nearest_of_all(&a, &b, distance, launches, cut),
                "{a:?} {b:?} {distance} {launches}"
            );
            near += usize::from(pair.is_some());
        }
        assert!((50_000..190_000).contains(&near), "{near}");
    }
}
