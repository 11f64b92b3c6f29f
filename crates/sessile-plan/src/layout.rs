//! sessile's own layout: greedy passes over lengthened lifetimes, and the smallest result.
//!
//! A pass places requests one by one, in some order, each into a gap that no conflicting request uses: the
//! lowest that fits or the tightest that fits. Requests of all dtypes share an arena.
//!
//! ```text
//!  offset     launches ->                   depth 1
//!   768 | +---+---+ +---+                  sizes a 768, b 512, c 256, d 256
//!       | |   | c | | d |                  by size: a at 0, b at 0 (they share no column),
//!   512 | |   +---+ +---+                  c at 512 (on b), d at 512 (on b);
//!       | | a +---------+                  768 bytes in all, which is the bound: every column is full
//!       | |   |    b    |
//!     0 | +---+---------+
//!           0   1     2
//! ```

use std::{cell::OnceCell, ops::Range};

use crate::{
    baseline::{self, Layout},
    lifetime::{Depth, Lifetimes},
    limits::{COVER_MAX, LAYOUT_WORK_MAX},
    options::{PlanOptions, StepCut},
    roster::Roster,
};

/// Packs every domain; never larger than one buffer for each request, nor, under the barrier and with one depth
/// for all groups, than `generations:depth`.
pub(crate) fn pack(roster: &Roster<'_>, options: &PlanOptions) -> Layout {
    let every = Lifetimes::new(roster, options, Depth::EveryLaunch);
    let alternating = baseline::generations(roster, options.depth);
    let separate = baseline::per_request(roster);
    let mut layout = Layout::empty(roster);
    let first = OnceCell::new();
    let mut work = LAYOUT_WORK_MAX;
    for domain in 0..roster.domains.len() {
        let requests = roster.of_domain(domain);
        let mut packer = Packer::new(roster, &every, &requests, work);
        packer.offer(&separate.offsets);
        packer.greedy();
        packer.offer_checked(&alternating.offsets);
        work = packer.work;
        let mut best = packer.best;
        if options.step_cut == StepCut::Barrier && best.1 > alternating.bytes[domain] {
            // Only when runners are launched again, or groups have depths of their own: then count depth as the
            // alternating arenas do.
            let first = first.get_or_init(|| Lifetimes::new(roster, options, Depth::FirstLaunch));
            let mut packer = Packer::new(roster, first, &requests, work);
            packer.offer(&separate.offsets);
            packer.offer_checked(&alternating.offsets);
            packer.greedy();
            work = packer.work;
            best = packer.best;
        }
        for (&index, &offset) in requests.iter().zip(&best.0) {
            layout.offsets[index] = offset;
        }
        layout.bytes[domain] = best.1;
    }
    layout
}

#[derive(Clone, Copy)]
enum Fit {
    /// The lowest gap that is large enough.
    First,
    /// The smallest gap that is large enough, the lowest of equals.
    Best,
}

/// Bytes of a placed request, as listed in each column it covers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Placed {
    from: u64,
    to: u64,
}

struct Packer<'a> {
    bytes: Vec<u64>,
    covers: Vec<&'a [Range<u32>]>,
    columns: usize,
    load: Vec<u64>,
    bound: u64,
    /// Offsets in order of `requests`, and the arena's size.
    best: (Vec<u64>, u64),
    /// Columns and placed requests that may still be looked at.
    work: u64,
    requests: &'a [usize],
}

impl<'a> Packer<'a> {
    fn new(roster: &Roster<'_>, lifetimes: &'a Lifetimes, requests: &'a [usize], work: u64) -> Packer<'a> {
        let load = lifetimes.load(roster, requests);
        Packer {
            bytes: requests.iter().map(|&index| roster.entries[index].bytes).collect(),
            covers: requests.iter().map(|&index| &lifetimes.covers[index][..]).collect(),
            columns: lifetimes.columns,
            bound: load.iter().copied().max().unwrap_or(0),
            load,
            best: (Vec::new(), u64::MAX),
            work,
            requests,
        }
    }

    /// Takes offsets (by roster index) that are known to be feasible, if they are the smallest so far.
    fn offer(&mut self, offsets: &[u64]) {
        let offsets: Vec<u64> = self.requests.iter().map(|&index| offsets[index]).collect();
        let ends = offsets.iter().zip(&self.bytes).map(|(offset, bytes)| offset + bytes);
        let total = ends.max().unwrap_or(0);
        if total < self.best.1 {
            self.best = (offsets, total);
        }
    }

    /// The same for offsets that may not be feasible.
    fn offer_checked(&mut self, offsets: &[u64]) {
        if self.best.1 > self.bound && self.feasible(offsets) {
            self.offer(offsets);
        }
    }

    fn feasible(&self, offsets: &[u64]) -> bool {
        if self.cover_bytes() > COVER_MAX {
            return false;
        }
        let mut columns: Vec<Vec<Placed>> = vec![Vec::new(); self.columns];
        for (item, &index) in self.requests.iter().enumerate() {
            let placed = Placed { from: offsets[index], to: offsets[index] + self.bytes[item] };
            self.list(&mut columns, item, placed);
        }
        columns.iter_mut().all(|column| {
            column.sort_unstable();
            column.windows(2).all(|pair| pair[0].to <= pair[1].from)
        })
    }

    fn cover_bytes(&self) -> u64 {
        self.covers
            .iter()
            .flat_map(|cover| cover.iter())
            .map(|range| u64::from(range.end - range.start))
            .sum()
    }

    fn greedy(&mut self) {
        if self.best.1 <= self.bound || self.cover_bytes() > COVER_MAX {
            return;
        }
        for order in self.orders() {
            for fit in [Fit::First, Fit::Best] {
                let Some((offsets, total)) = self.pass(&order, fit) else { return };
                if total < self.best.1 {
                    self.best = (offsets, total);
                }
                if self.best.1 <= self.bound {
                    return;
                }
            }
        }
    }

    /// Orders to try, the ones that win most often first. Ties end with the item's number, so that every
    /// order is total.
    fn orders(&self) -> Vec<Vec<usize>> {
        let width: Vec<u64> = self
            .covers
            .iter()
            .map(|cover| cover.iter().map(|range| u64::from(range.end - range.start)).sum())
            .collect();
        let pressure: Vec<u64> = self
            .covers
            .iter()
            .map(|cover| {
                let columns =
                    cover.iter().flat_map(|range| &self.load[range.start as usize..range.end as usize]);
                columns.copied().max().unwrap_or(0)
            })
            .collect();
        let start = |item: usize| self.covers[item].first().map_or(0, |range| range.start);
        let size = |item: usize| u64::MAX - self.bytes[item];
        let area = |item: usize| u128::from(self.bytes[item]) * u128::from(width[item]);
        let by = |key: &dyn Fn(usize) -> (u128, u64, u32)| {
            let mut order: Vec<usize> = (0..self.bytes.len()).collect();
            order.sort_by_cached_key(|&item| (key(item), item));
            order
        };
        vec![
            by(&|item| (size(item).into(), u64::MAX - pressure[item], start(item))),
            by(&|item| ((u64::MAX - pressure[item]).into(), size(item), start(item))),
            by(&|item| (u128::MAX - area(item), size(item), start(item))),
            by(&|item| ((u64::MAX - width[item]).into(), size(item), start(item))),
            by(&|item| (start(item).into(), size(item), 0)),
            by(&|item| ((u32::MAX - start(item)).into(), size(item), 0)),
            by(&|item| (0, 0, item as u32)),
        ]
    }

    /// One pass; `None` once the budget is spent.
    fn pass(&mut self, order: &[usize], fit: Fit) -> Option<(Vec<u64>, u64)> {
        self.work = self.work.checked_sub(self.columns as u64)?;
        let mut columns: Vec<Vec<Placed>> = vec![Vec::new(); self.columns];
        let mut offsets = vec![0; self.bytes.len()];
        let mut total = 0;
        let mut near: Vec<Placed> = Vec::new();
        for &item in order {
            near.clear();
            for column in self.covers[item].iter().flat_map(|range| range.clone()) {
                near.extend_from_slice(&columns[column as usize]);
            }
            self.work = self.work.checked_sub(near.len() as u64)?;
            // Stable on purpose: every column is sorted already, and this sort merges sorted runs.
            near.sort();
            let from = gap(&near, self.bytes[item], fit);
            let placed = Placed { from, to: from + self.bytes[item] };
            offsets[item] = from;
            total = total.max(placed.to);
            self.list(&mut columns, item, placed);
        }
        Some((offsets, total))
    }

    fn list(&self, columns: &mut [Vec<Placed>], item: usize, placed: Placed) {
        for column in self.covers[item].iter().flat_map(|range| range.clone()) {
            let column = &mut columns[column as usize];
            let at = column.partition_point(|other| *other < placed);
            column.insert(at, placed);
        }
    }
}

/// Where `bytes` fit beside what is placed, which is sorted.
fn gap(placed: &[Placed], bytes: u64, fit: Fit) -> u64 {
    let mut top = 0;
    let mut best: Option<(u64, u64)> = None;
    for other in placed {
        if other.from > top && other.from - top >= bytes {
            let room = other.from - top;
            match fit {
                Fit::First => return top,
                Fit::Best if best.is_none_or(|(smallest, _)| room < smallest) => best = Some((room, top)),
                Fit::Best => {}
            }
        }
        top = top.max(other.to);
    }
    best.map_or(top, |(_, offset)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    ///  |####|    |##|      |####|      gaps of 4 and 6 above 4
    ///  0    4    8  10     16   20
    /// ```
    #[test]
    fn first_fit_takes_the_lowest_gap_and_best_fit_the_tightest() {
        let placed = [Placed { from: 0, to: 4 }, Placed { from: 10, to: 12 }, Placed { from: 16, to: 20 }];
        assert_eq!(gap(&placed, 4, Fit::First), 4);
        assert_eq!(gap(&placed, 4, Fit::Best), 12);
        assert_eq!(gap(&placed, 7, Fit::Best), 20);
        assert_eq!(gap(&[], 7, Fit::First), 0);
    }
}
