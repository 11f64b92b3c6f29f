//! Who is live when, found by walking the launches; and that what is live at once shares no bytes.

use super::{Buffer, Reason, Violation};
use crate::{
    options::{StepCut, Strategy},
    plan::Plan,
    request::Domain,
    trace::Trace,
};

/// First and last launch of one use of a buffer, counted through steps under wrap.
type Use = (usize, usize);

/// Every use that begins in the first step.
fn uses(trace: &Trace, cut: StepCut, buffer: &Buffer<'_>) -> Vec<Use> {
    let launches = trace.launches.len();
    let horizon = match cut {
        StepCut::Barrier => launches,
        StepCut::Wrap => 3 * launches,
    };
    let runner_at = |launch: usize| trace.launches[launch % launches] as usize;
    let begins = (0..launches).filter(|&launch| runner_at(launch) == buffer.runner);
    begins
        .map(|from| {
            if buffer.releaser == buffer.runner {
                return (from, from);
            }
            let mut last_read = None;
            let mut begun_again = false;
            for launch in from + 1..horizon {
                if runner_at(launch) == buffer.releaser {
                    last_read = Some(launch);
                }
                begun_again |= runner_at(launch) == buffer.runner;
                if begun_again && last_read.is_some() {
                    break;
                }
            }
            (from, last_read.unwrap_or(launches - 1))
        })
        .collect()
}

/// Whether two uses are nearer than `distance` launches.
fn near(a: Use, b: Use, distance: usize, launches: usize, cut: StepCut) -> bool {
    let near = |a: Use, b: Use| a.0 < b.1 + distance && b.0 < a.1 + distance;
    match cut {
        StepCut::Barrier => near(a, b),
        StepCut::Wrap => {
            let around = |used: Use| used.1 - used.0 + distance >= launches;
            let later = |used: Use, steps: usize| (used.0 + steps * launches, used.1 + steps * launches);
            around(a) || around(b) || (0..5).any(|steps| near(later(a, 2), later(b, steps)))
        }
    }
}

/// The distance that sessile promises; the other strategies promise only that nothing live is shared.
fn promised(plan: &Plan) -> usize {
    match plan.options.strategy {
        Strategy::Sessile => plan.options.depth as usize,
        _ => 1,
    }
}

pub(super) fn check(trace: &Trace, plan: &Plan, buffers: &[Buffer<'_>], found: &mut Vec<Violation>) {
    let cut = plan.options.step_cut;
    let launches = trace.launches.len();
    let all: Vec<Vec<Use>> = buffers.iter().map(|buffer| uses(trace, cut, buffer)).collect();
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
            let pair = |distance| {
                let mut pairs = all[a].iter().flat_map(|&x| all[b].iter().map(move |&y| (x, y)));
                pairs.find(|&(x, y)| near(x, y, distance, launches, cut))
            };
            // Where a step launches runners again, depth counts between first launches (see `bound`).
            let too_soon = || match cut {
                StepCut::Wrap => pair(promised(plan)),
                StepCut::Barrier => {
                    let firsts = (all[a][0], all[b][0]);
                    near(firsts.0, firsts.1, promised(plan), launches, cut).then_some(firsts)
                }
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
}

/// The largest sum of bytes of one domain that must be live at once: launch by launch, who cannot be elsewhere.
pub(super) fn bound(trace: &Trace, plan: &Plan, buffers: &[Buffer<'_>], domain: &Domain) -> u64 {
    let cut = plan.options.step_cut;
    let launches = trace.launches.len();
    let mut live_now = vec![0u64; launches];
    let mut held_for_depth = vec![0u64; launches];
    for buffer in buffers.iter().filter(|buffer| buffer.spec.domain == *domain) {
        let bytes = buffer.spec.aligned_bytes().unwrap_or(0);
        let uses = uses(trace, cut, buffer);
        let mut covered = vec![[false; 2]; launches];
        for (number, &(from, to)) in uses.iter().enumerate() {
            let distance = if number > 0 && cut == StepCut::Barrier { 1 } else { promised(plan) };
            for launch in from..(to + distance).min(from + launches) {
                if launch < launches || cut == StepCut::Wrap {
                    let covered = &mut covered[launch % launches];
                    covered[0] |= launch <= to;
                    covered[1] |= number == 0 || cut == StepCut::Wrap;
                }
            }
        }
        for (launch, covered) in covered.into_iter().enumerate() {
            live_now[launch] += if covered[0] { bytes } else { 0 };
            held_for_depth[launch] += if covered[1] { bytes } else { 0 };
        }
    }
    live_now.into_iter().chain(held_for_depth).max().unwrap_or(0)
}
