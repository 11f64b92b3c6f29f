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
//! Alternative steps have columns of their own. A group with a depth of its own counts the launches that use it alone.
//! Under the wrap-around cut the columns of a step form a circle. Under the barrier there are two ways to count depth
//! when runners are launched more than once: [`Depth::EveryLaunch`] and [`Depth::FirstLaunch`].

use std::{collections::BTreeMap, ops::Range};

use crate::{
    options::{PlanOptions, StepCut},
    roster::Roster,
};

/// Between which launches the depth counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Between all launches of two runners. Says yes to less than the alternating arenas do when runners are
    /// launched again, because those count in the order of first launch.
    EveryLaunch,
    /// Between the first launches; later ones must only not be live at once. Only under the barrier, where
    /// alternating arenas are always feasible under it. The columns are doubled: first launches, all launches.
    FirstLaunch,
    /// No depth: only what is live in one launch conflicts.
    None,
}

/// Lengthened lifetimes of all requests.
pub(crate) struct Lifetimes {
    /// Number of columns.
    pub(crate) columns: usize,
    /// Columns of each request: ascending, disjoint, half-open.
    pub(crate) covers: Vec<Vec<Range<u32>>>,
}

impl Lifetimes {
    pub(crate) fn new(roster: &Roster<'_>, options: &PlanOptions, depth: Depth) -> Lifetimes {
        let cut = options.step_cut;
        let launches = roster.trace.launch_count() as u32;
        let mut covers = vec![Vec::new(); roster.entries.len()];
        for step in &roster.steps {
            let reach = Reach::new(roster, options, step);
            for (index, cover) in covers.iter_mut().enumerate() {
                let live = occurrences(roster, index, step, cut);
                match depth {
                    Depth::EveryLaunch => {
                        for (from, to) in live {
                            lengthen(cover, from, reach.end(roster, index, to), step, cut);
                        }
                    }
                    Depth::None => {
                        for (from, to) in live {
                            lengthen(cover, from, to + 1, step, cut);
                        }
                    }
                    Depth::FirstLaunch => {
                        if let Some(&(from, to)) = live.first().filter(|_| cover.is_empty()) {
                            lengthen(cover, from, reach.end(roster, index, to), step, StepCut::Barrier);
                        }
                        cover.extend(live.iter().map(|&(from, to)| launches + from..launches + to + 1));
                    }
                }
            }
        }
        let covers = covers.into_iter().map(merge).collect();
        let columns = match depth {
            Depth::EveryLaunch | Depth::None => launches as usize,
            Depth::FirstLaunch => 2 * launches as usize,
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

/// How far depth lengthens lifetimes in one step.
struct Reach {
    start: u32,
    launches: u32,
    depth: u32,
    /// By group with a depth of its own: the depth, and the positions of the launches that use the group.
    groups: BTreeMap<String, (u32, Vec<u32>)>,
}

impl Reach {
    fn new(roster: &Roster<'_>, options: &PlanOptions, step: &Range<u32>) -> Reach {
        let users = |group: &str| {
            let using: Vec<bool> = roster.trace.runners.iter().map(|runner| runner.uses(group)).collect();
            step.clone().filter(|&at| using[roster.launched[at as usize]]).collect()
        };
        let groups = options.depth_by_group.iter();
        let groups = groups.map(|(group, &depth)| (group.clone(), (depth, users(group)))).collect();
        Reach { start: step.start, launches: step.end - step.start, depth: options.depth, groups }
    }

    /// The launch at which a request that is released in launch `to` may be reused. Runs on around the circle.
    fn end(&self, roster: &Roster<'_>, index: usize, to: u32) -> u32 {
        let group = roster.entries[index].spec.group.as_ref().and_then(|group| self.groups.get(group));
        let Some((depth, users)) = group else { return to.saturating_add(self.depth) };
        // `to` counts as the first launch; the one after the last that counts may reuse.
        let Some(more) = depth.checked_sub(2) else { return to + 1 };
        if users.is_empty() {
            return u32::MAX;
        }
        let around = (to - self.start) / self.launches * self.launches;
        let next = users.partition_point(|&user| user <= to - around) + more as usize;
        let rounds = (next / users.len()) as u32;
        users[next % users.len()]
            .saturating_add(around)
            .saturating_add(rounds.saturating_mul(self.launches))
            .saturating_add(1)
    }
}

/// First and last launch of each lifetime of a request in one step. The last may lie in the next round under `Wrap`.
fn occurrences(roster: &Roster<'_>, index: usize, step: &Range<u32>, cut: StepCut) -> Vec<(u32, u32)> {
    let entry = &roster.entries[index];
    let own = roster.positions_in(step, entry.runner);
    if !entry.spans() {
        return own.iter().map(|&at| (at, at)).collect();
    }
    let launches = step.end - step.start;
    let releases = roster.positions_in(step, entry.release_runner);
    // Launches of the releasing runner in this round and, under wrap, the next.
    let release = |k: usize| match releases.get(k) {
        Some(&at) => Some(at),
        None if cut == StepCut::Wrap => releases.get(k - releases.len()).map(|&at| at + launches),
        None => None,
    };
    let mut live = Vec::with_capacity(own.len());
    for (k, &from) in own.iter().enumerate() {
        let again = match own.get(k + 1) {
            Some(&next) => next,
            None if cut == StepCut::Wrap => own[0] + launches,
            None => step.end,
        };
        let after = releases.partition_point(|&at| at < from);
        let mut before_again = releases.partition_point(|&at| at < again);
        if again > step.end {
            before_again += releases.partition_point(|&at| at + launches < again);
        }
        let to = if before_again > after { release(before_again - 1) } else { release(after) };
        live.push((from, to.unwrap_or(step.end - 1)));
    }
    live
}

fn lengthen(cover: &mut Vec<Range<u32>>, from: u32, end: u32, step: &Range<u32>, cut: StepCut) {
    let launches = step.end - step.start;
    match cut {
        StepCut::Barrier => cover.push(from..end.min(step.end)),
        StepCut::Wrap if end - from >= launches => cover.push(step.clone()),
        StepCut::Wrap if end > step.end => cover.extend([step.start..end - launches, from..step.end]),
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
    fn trace(step: &[u32], releaser: Option<usize>) -> Trace {
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
        let (schema, name, steps) = (Trace::SCHEMA.into(), String::new(), vec![step.to_vec()]);
        Trace { schema, version: TRACE_VERSION, name, runners, steps }
    }

    /// Columns of the requests: of r0, the spanning one if there is one, of r1, of r2.
    fn covers(trace: &Trace, step_cut: StepCut, depth: u32) -> Vec<Vec<Range<u32>>> {
        let options = PlanOptions { depth, step_cut, ..PlanOptions::default() };
        Lifetimes::new(&Roster::new(trace), &options, Depth::EveryLaunch).covers
    }

    fn ranges<const N: usize>(ranges: [(u32, u32); N]) -> Vec<Range<u32>> {
        ranges.into_iter().map(|(from, to)| from..to).collect()
    }

    /// The picture at the top of this file.
    #[test]
    fn lifetimes_are_lengthened_by_the_depth() {
        let drawn = trace(&[0, 1, 2, 1, 1], Some(2));
        let covers = covers(&drawn, StepCut::Barrier, 2);
        assert_eq!(covers[0], ranges([(0, 2)]));
        assert_eq!(covers[1], ranges([(0, 4)]));
        assert_eq!(covers[2], ranges([(1, 5)]));
        assert_eq!(covers[3], ranges([(2, 4)]));
    }

    #[test]
    fn the_wrap_bends_lifetimes_into_a_circle() {
        let drawn = trace(&[0, 1, 2], Some(2));
        let around = covers(&drawn, StepCut::Wrap, 2);
        assert_eq!(around[1], ranges([(0, 3)]));
        assert_eq!(around[3], ranges([(0, 1), (2, 3)]));
        assert_eq!(covers(&drawn, StepCut::Wrap, 3)[3], ranges([(0, 3)]));
    }

    #[test]
    fn a_spanning_request_is_held_for_every_launch_of_its_releaser() {
        // Read twice: the later one counts.
        let twice = trace(&[0, 1, 2, 2], Some(2));
        assert_eq!(covers(&twice, StepCut::Barrier, 1)[1], ranges([(0, 4)]));
        // Acquired again before any release: held from the first acquire on.
        let again = trace(&[0, 0, 2, 1], Some(2));
        assert_eq!(covers(&again, StepCut::Barrier, 1)[1], ranges([(0, 3)]));
        // Acquired again with no release left in the step: to its end, or into the next step.
        let again = trace(&[0, 2, 1, 0, 1], Some(2));
        assert_eq!(covers(&again, StepCut::Barrier, 1)[1], ranges([(0, 2), (3, 5)]));
        assert_eq!(covers(&again, StepCut::Wrap, 1)[1], ranges([(0, 2), (3, 5)]));
        let beyond = trace(&[1, 2, 0, 2, 0], Some(2));
        assert_eq!(covers(&beyond, StepCut::Wrap, 1)[1], ranges([(0, 5)]));
    }

    /// ```text
    ///  step          0           1
    ///  launch        0   1   2   3   4   5   6      depth 1; of group g 2
    ///  a of r0 in g  ##++++++    ##++++++++++       r1 uses g, r2 does not
    ///  b of r1           ##++                ##
    ///  c of r2               ##      ##++##
    /// ```
    #[test]
    fn steps_have_columns_of_their_own_and_groups_count_their_own_launches() {
        let mut drawn = trace(&[0, 1, 2], None);
        drawn.steps.push(vec![0, 2, 2, 1]);
        for runner in &mut drawn.runners[..2] {
            runner.requests[0].spec.group = Some("g".into());
        }
        let of = |step_cut, of_g| {
            let depth_by_group = [("g".to_owned(), of_g)].into();
            let options = PlanOptions { depth: 1, depth_by_group, step_cut, ..PlanOptions::default() };
            Lifetimes::new(&Roster::new(&drawn), &options, Depth::EveryLaunch).covers
        };
        let two = of(StepCut::Barrier, 2);
        assert_eq!(two, [vec![0..2, 3..7], vec![1..3, 6..7], vec![2..3, 4..6]]);
        let around = of(StepCut::Wrap, 2);
        assert_eq!(around, [vec![0..2, 3..7], vec![0..3, 3..4, 6..7], vec![2..3, 4..6]].map(merge));
        assert_eq!(of(StepCut::Barrier, 1), [vec![0..1, 3..4], vec![1..2, 6..7], vec![2..3, 4..6]]);
    }

    #[test]
    fn depth_between_first_launches_doubles_the_columns() {
        let repeated = trace(&[0, 1, 2, 0, 1, 2], None);
        let first =
            Lifetimes::new(&Roster::new(&repeated), &PlanOptions::default(), Depth::FirstLaunch).covers;
        assert_eq!(first[0], ranges([(0, 2), (6, 7), (9, 10)]));
        assert_eq!(first[2], ranges([(2, 4), (8, 9), (11, 12)]));
    }
}
