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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        request::{DType, Domain, Request, RequestId, RequestSpec, Role},
        trace::{Point, PointKind, Runner, TRACE_VERSION, Trace},
    };

    /// Three runners of one request each; `releaser` releases a second request of the first.
    fn trace(launches: &[u32], releaser: Option<usize>) -> Trace {
        let request = |id| {
            let spec = RequestSpec {
                weight: String::new(),
                role: Role::WgradInput,
                dtype: DType::F32,
                shape: vec![64],
                unsharded_shape: vec![64],
                domain: Domain::Default,
                group: None,
                expert: None,
                accumulates_into: None,
            };
            Request { id: RequestId(id), spec }
        };
        let mut runners: Vec<Runner> = (0..3)
            .map(|r| Runner { name: format!("r{r}"), requests: vec![request(r)], points: vec![] })
            .collect();
        if let Some(releaser) = releaser {
            runners[0].requests.push(request(3));
            runners[releaser].points.push(Point { stream: 0, kind: PointKind::Release(RequestId(3)) });
        }
        let (schema, name, launches) = (Trace::SCHEMA.into(), String::new(), launches.to_vec());
        Trace { schema, version: TRACE_VERSION, name, runners, launches }
    }

    /// Columns of the requests: of r0, the spanning one if there is one, of r1, of r2.
    fn covers(trace: &Trace, cut: StepCut, depth: Depth) -> Vec<Vec<Range<u32>>> {
        Lifetimes::new(&Roster::new(trace), cut, depth).covers
    }

    fn ranges<const N: usize>(ranges: [(u32, u32); N]) -> Vec<Range<u32>> {
        ranges.into_iter().map(|(from, to)| from..to).collect()
    }

    /// The picture at the top of this file.
    #[test]
    fn lifetimes_are_lengthened_by_the_depth() {
        let drawn = trace(&[0, 1, 2, 1, 1], Some(2));
        let covers = covers(&drawn, StepCut::Barrier, Depth::EveryLaunch(2));
        assert_eq!(covers[0], ranges([(0, 2)]));
        assert_eq!(covers[1], ranges([(0, 4)]));
        assert_eq!(covers[2], ranges([(1, 5)]));
        assert_eq!(covers[3], ranges([(2, 4)]));
    }

    #[test]
    fn the_wrap_bends_lifetimes_into_a_circle() {
        let drawn = trace(&[0, 1, 2], Some(2));
        let around = covers(&drawn, StepCut::Wrap, Depth::EveryLaunch(2));
        assert_eq!(around[1], ranges([(0, 3)]));
        assert_eq!(around[3], ranges([(0, 1), (2, 3)]));
        assert_eq!(covers(&drawn, StepCut::Wrap, Depth::EveryLaunch(3))[3], ranges([(0, 3)]));
    }

    #[test]
    fn a_spanning_request_is_held_for_every_launch_of_its_releaser() {
        // Read twice: the later one counts.
        let twice = trace(&[0, 1, 2, 2], Some(2));
        assert_eq!(covers(&twice, StepCut::Barrier, Depth::EveryLaunch(1))[1], ranges([(0, 4)]));
        // Acquired again before any release: held from the first acquire on.
        let again = trace(&[0, 0, 2, 1], Some(2));
        assert_eq!(covers(&again, StepCut::Barrier, Depth::EveryLaunch(1))[1], ranges([(0, 3)]));
        // Acquired again with no release left in the step: to its end, or into the next step.
        let again = trace(&[0, 2, 1, 0, 1], Some(2));
        assert_eq!(covers(&again, StepCut::Barrier, Depth::EveryLaunch(1))[1], ranges([(0, 2), (3, 5)]));
        assert_eq!(covers(&again, StepCut::Wrap, Depth::EveryLaunch(1))[1], ranges([(0, 2), (3, 5)]));
        let beyond = trace(&[1, 2, 0, 2, 0], Some(2));
        assert_eq!(covers(&beyond, StepCut::Wrap, Depth::EveryLaunch(1))[1], ranges([(0, 5)]));
    }

    #[test]
    fn depth_between_first_launches_doubles_the_columns() {
        let repeated = trace(&[0, 1, 2, 0, 1, 2], None);
        let first = covers(&repeated, StepCut::Barrier, Depth::FirstLaunch(2));
        assert_eq!(first[0], ranges([(0, 2), (6, 7), (9, 10)]));
        assert_eq!(first[2], ranges([(2, 4), (8, 9), (11, 12)]));
    }
}
