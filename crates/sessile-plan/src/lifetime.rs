//! When each request is live, as ranges of launch positions, and how that becomes conflicts.
//!
//! A request of a runner is live at every launch of that runner; one that another runner releases is live up
//! to the last launch of the releasing runner before its own runner is launched again. A lifetime that ends at
//! launch `b` is lengthened to `b + depth`, half-open: then two requests conflict exactly when their lengthened
//! lifetimes share a launch position, and the load of a position is a lower bound.
//!
//! ```text
//!  launch      0   1   2   3   4          depth 2
//!  a of r0     ####++++
//!  b of r1         ####++++
//!  c of r2             ####++++           c may have a's bytes: they share no column
//!  d, r0..r2   ############++++           released by r2: live from 0 to 2
//! ```
//!
//! Under the wrap-around cut the columns form a circle. Under the barrier there are two ways to count depth
//! when a step launches a runner more than once: [`Depth::EveryLaunch`] and [`Depth::FirstLaunch`].

use std::ops::Range;

use crate::{options::StepCut, roster::Roster};

/// Between which launches the depth counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Between all launches of two runners. Says yes to less than the alternating arenas do when a step
    /// launches runners again, because those count in the order of first launch.
    EveryLaunch(u32),
    /// Between the first launches; later ones must only not be live at once. Only under the barrier, where
    /// alternating arenas are always feasible under it. The columns are doubled: first launches, all launches.
    FirstLaunch(u32),
}

/// Lengthened lifetimes of all requests.
pub(crate) struct Lifetimes {
    /// Number of columns.
    pub(crate) columns: usize,
    /// Columns of each request: ascending, disjoint, half-open.
    pub(crate) covers: Vec<Vec<Range<u32>>>,
}

impl Lifetimes {
    pub(crate) fn new(roster: &Roster<'_>, cut: StepCut, depth: Depth) -> Lifetimes {
        let launches = roster.trace.launches.len() as u32;
        let covers = (0..roster.entries.len())
            .map(|index| {
                let live = occurrences(roster, index, cut);
                let mut cover = Vec::with_capacity(live.len() + 1);
                match depth {
                    Depth::EveryLaunch(depth) => {
                        for (from, to) in live {
                            lengthen(&mut cover, from, to.saturating_add(depth), launches, cut);
                        }
                    }
                    Depth::FirstLaunch(depth) => {
                        let (from, to) = live[0];
                        lengthen(&mut cover, from, to.saturating_add(depth), launches, StepCut::Barrier);
                        cover.extend(live.iter().map(|&(from, to)| launches + from..launches + to + 1));
                    }
                }
                merge(cover)
            })
            .collect();
        let columns = match depth {
            Depth::EveryLaunch(_) => launches as usize,
            Depth::FirstLaunch(_) => 2 * launches as usize,
        };
        Lifetimes { columns, covers }
    }

    /// Bytes live in each column, of the requests given.
    pub(crate) fn load(&self, roster: &Roster<'_>, requests: &[usize]) -> Vec<u64> {
        let mut change = vec![0i64; self.columns + 1];
        for &index in requests {
            for range in &self.covers[index] {
                change[range.start as usize] += roster.entries[index].bytes as i64;
                change[range.end as usize] -= roster.entries[index].bytes as i64;
            }
        }
        let mut load = 0i64;
        change.truncate(self.columns);
        change
            .into_iter()
            .map(|change| {
                load += change;
                load as u64
            })
            .collect()
    }
}

/// First and last launch of each lifetime of a request. The last may lie in the next step under `Wrap`.
fn occurrences(roster: &Roster<'_>, index: usize, cut: StepCut) -> Vec<(u32, u32)> {
    let entry = &roster.entries[index];
    let own = &roster.positions[entry.runner];
    if !entry.spans() {
        return own.iter().map(|&at| (at, at)).collect();
    }
    let launches = roster.trace.launches.len() as u32;
    let releases = &roster.positions[entry.release_runner];
    // Launches of the releasing runner in this step and, under wrap, the next.
    let release = |k: usize| match releases.get(k) {
        Some(&at) => Some(at),
        None if cut == StepCut::Wrap => Some(releases[k - releases.len()] + launches),
        None => None,
    };
    let mut live = Vec::with_capacity(own.len());
    for (k, &from) in own.iter().enumerate() {
        let again = match own.get(k + 1) {
            Some(&next) => next,
            None if cut == StepCut::Wrap => own[0] + launches,
            None => launches,
        };
        let after = releases.partition_point(|&at| at < from);
        let mut before_again = releases.partition_point(|&at| at < again);
        if again > launches {
            before_again += releases.partition_point(|&at| at + launches < again);
        }
        let to = if before_again > after { release(before_again - 1) } else { release(after) };
        live.push((from, to.unwrap_or(launches - 1)));
    }
    live
}

fn lengthen(cover: &mut Vec<Range<u32>>, from: u32, end: u32, launches: u32, cut: StepCut) {
    match cut {
        StepCut::Barrier => cover.push(from..end.min(launches)),
        StepCut::Wrap if end - from >= launches => cover.push(0..launches),
        StepCut::Wrap if end > launches => cover.extend([0..end - launches, from..launches]),
        StepCut::Wrap => cover.push(from..end),
    }
}

fn merge(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let mut merged: Vec<Range<u32>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}
