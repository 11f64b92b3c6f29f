//! sessile's own layout: the best of the solver's and the baselines', domain by domain.

use std::cell::OnceCell;

use crate::{
    baseline::{self, Layout},
    bound::Bound,
    conflicts::{Adjacency, Conflicts},
    error::PlanError,
    limits::{DEPTH_MAX, PAIRS_MAX},
    options::{PlanOptions, StepCut},
    roster::Roster,
    solve::{Problem, solve},
};

/// Rings that are looked at, from the shortest that holds the inputs of every runner.
const RINGS: usize = 8;

/// Packs every domain; never larger than one buffer for each request, nor, under the barrier and with one depth
/// for all groups, than `generations:depth`, nor than the first [`RINGS`] rings where they keep the depth.
pub(crate) fn pack(
    roster: &Roster<'_>,
    options: &PlanOptions,
    conflicts: &Conflicts,
    bounds: &[Bound],
) -> Layout {
    let strict = conflicts.strict();
    let lenient = OnceCell::new();
    let alternating = baseline::generations(roster, options.depth);
    let separate = baseline::per_request(roster);
    let rings = OnceCell::new();
    let rings = || rings.get_or_init(|| all_rings(roster, &separate)).as_slice();
    let mut layout = Layout::empty(roster);
    for (domain, bound) in bounds.iter().enumerate() {
        let mut packer = Packer::new(roster, conflicts, &strict, domain);
        packer.offer(&separate.offsets);
        packer.offer_checked(&alternating.offsets, bound.bytes);
        packer.solve(bound.bytes);
        if options.step_cut == StepCut::Barrier && packer.total > alternating.bytes[domain] {
            // Only when runners are launched again, or groups have depths of their own: then count depth as the
            // alternating arenas do.
            let lenient = lenient.get_or_init(|| conflicts.lenient());
            packer = Packer::new(roster, conflicts, lenient, domain);
            packer.offer(&separate.offsets);
            packer.offer_checked(&alternating.offsets, bound.bytes);
            packer.solve(bound.bytes);
        }
        if packer.total > bound.bytes {
            rings().iter().for_each(|ring| packer.offer_checked(&ring.offsets, bound.bytes));
        }
        if options.step_cut == StepCut::Barrier && !conflicts.plain && packer.total > bound.bytes {
            let lenient = lenient.get_or_init(|| conflicts.lenient());
            let mut counted = Packer::new(roster, conflicts, lenient, domain);
            counted.total = packer.total;
            rings().iter().for_each(|ring| counted.offer_checked(&ring.offsets, bound.bytes));
            if counted.total < packer.total {
                packer = counted;
            }
        }
        for (&index, &offset) in packer.requests.iter().zip(&packer.offsets) {
            layout.offsets[index] = offset;
        }
        layout.bytes[domain] = packer.total;
    }
    layout
}

/// Rings of several lengths, none as long as one buffer for each request.
fn all_rings(roster: &Roster<'_>, separate: &Layout) -> Vec<Layout> {
    let mut all = Vec::new();
    let mut slots = 1;
    while all.len() < RINGS && slots <= DEPTH_MAX {
        match baseline::ring(roster, slots) {
            Ok(ring) if ring.bytes == separate.bytes => break,
            Ok(ring) => {
                all.push(ring);
                slots += 1;
            }
            Err(PlanError::RingTooSmall { writers, .. }) => slots = writers,
            Err(_) => break,
        }
    }
    all
}

/// The best offsets of one domain so far.
struct Packer<'a> {
    roster: &'a Roster<'a>,
    conflicts: &'a Conflicts,
    adjacency: &'a Adjacency,
    /// Roster indices, and their offsets.
    requests: Vec<usize>,
    offsets: Vec<u64>,
    total: u64,
}

impl<'a> Packer<'a> {
    fn new(
        roster: &'a Roster<'a>,
        conflicts: &'a Conflicts,
        adjacency: &'a Adjacency,
        domain: usize,
    ) -> Packer<'a> {
        let requests = roster.of_domain(domain);
        Packer { roster, conflicts, adjacency, requests, offsets: Vec::new(), total: u64::MAX }
    }

    /// Takes offsets, by roster index, that are known to be feasible, if they are the smallest so far.
    fn offer(&mut self, offsets: &[u64]) {
        let total = self.height(offsets);
        if total < self.total {
            self.total = total;
            self.offsets = self.requests.iter().map(|&index| offsets[index]).collect();
        }
    }

    fn height(&self, offsets: &[u64]) -> u64 {
        let end = |&index: &usize| offsets[index] + self.roster.entries[index].bytes;
        self.requests.iter().map(end).max().unwrap_or(0)
    }

    /// The same for offsets that may not be feasible.
    fn offer_checked(&mut self, offsets: &[u64], bound: u64) {
        if self.total > bound && self.height(offsets) < self.total && self.feasible(offsets) {
            self.offer(offsets);
        }
    }

    /// Whether no two requests that conflict overlap. Says no where there are too many pairs to look at.
    fn feasible(&self, offsets: &[u64]) -> bool {
        let entries = &self.roster.entries;
        let mut by_class: Vec<Vec<(u64, u64)>> = vec![Vec::new(); self.conflicts.classes.len()];
        for &index in &self.requests {
            let range = (offsets[index], offsets[index] + entries[index].bytes);
            by_class[self.conflicts.class_of[index]].push(range);
        }
        let mut looked_at = 0;
        for class in 0..by_class.len() {
            let own = by_class[class].len();
            if own == 0 {
                continue;
            }
            let mut near: Vec<((u64, u64), bool)> =
                by_class[class].iter().map(|&range| (range, true)).collect();
            for &other in self.adjacency.of(class) {
                near.extend(by_class[other as usize].iter().map(|&range| (range, false)));
            }
            looked_at += near.len();
            if looked_at > PAIRS_MAX {
                return false;
            }
            near.sort_unstable();
            // The furthest end of this class's ranges, and of all ranges, below each range.
            let (mut end_of_own, mut end_of_all) = (0, 0);
            for &((from, to), mine) in &near {
                if from < if mine { end_of_all } else { end_of_own } {
                    return false;
                }
                end_of_all = to.max(end_of_all);
                if mine {
                    end_of_own = to.max(end_of_own);
                }
            }
        }
        true
    }

    fn solve(&mut self, bound: u64) {
        if self.total <= bound {
            return;
        }
        let problem = Problem::new(self.roster, self.conflicts, self.adjacency, &self.requests);
        let found = solve(&problem, bound, self.total);
        if found.total < self.total {
            let mut offsets = vec![0; self.roster.entries.len()];
            problem.spread(self.roster, &found.offsets, &mut offsets);
            self.offer(&offsets);
        }
    }
}
