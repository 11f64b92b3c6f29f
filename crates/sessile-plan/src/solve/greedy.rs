//! Greedy passes: blocks one by one, in some order, each into a gap that no conflicting block uses.

use super::{Placed, Problem};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// The lowest gap that is large enough.
    First,
    /// The smallest gap that is large enough, the lowest of equals.
    Best,
}

/// Tries every order with every fit; stops at `bound`.
pub(super) fn improve(problem: &Problem, bound: u64, best: &mut Placed) {
    for which in 0..ORDERS {
        let order = order(problem, which);
        for fit in [Fit::First, Fit::Best] {
            if best.total <= bound {
                return;
            }
            if let Some(placed) = pass(problem, &order, fit, best.total) {
                *best = placed;
            }
        }
    }
}

/// Number of orders to try.
const ORDERS: usize = 6;

/// One of the orders, the ones that win most often first.
pub(super) fn order(problem: &Problem, which: usize) -> Vec<u32> {
    let pressure: Vec<u64> = (0..problem.len())
        .map(|block| {
            let around = problem.neighbors(block).iter().map(|&other| problem.bytes[other as usize]);
            around.sum::<u64>() + problem.bytes[block]
        })
        .collect();
    let size = |block: usize| u128::from(u64::MAX - problem.bytes[block]);
    let squeeze = |block: usize| u128::from(u64::MAX - pressure[block]);
    let degree = |block: usize| problem.neighbors(block).len() as u128;
    let key = |block: usize| match which {
        0 => (size(block), squeeze(block)),
        1 => (squeeze(block), size(block)),
        2 => (u128::MAX - u128::from(problem.bytes[block]) * degree(block), size(block)),
        3 => (u128::MAX - degree(block), size(block)),
        4 => (block as u128, 0),
        _ => (u128::MAX - block as u128, 0),
    };
    let mut order: Vec<u32> = (0..problem.len() as u32).collect();
    order.sort_by_cached_key(|&block| (key(block as usize), block));
    order
}

/// One pass of first fit, however high.
pub(super) fn whole_pass(problem: &Problem, order: &[u32]) -> Placed {
    pass(problem, order, Fit::First, u64::MAX)
        .unwrap_or_else(|| Placed { offsets: Vec::new(), total: u64::MAX })
}

/// One pass; none if it does not stay below `limit`.
fn pass(problem: &Problem, order: &[u32], fit: Fit, limit: u64) -> Option<Placed> {
    let mut offsets = vec![u64::MAX; problem.len()];
    let mut total = 0;
    let mut near: Vec<(u64, u64)> = Vec::new();
    for &block in order {
        let block = block as usize;
        near.clear();
        for &other in problem.neighbors(block) {
            let from = offsets[other as usize];
            if from != u64::MAX {
                near.push((from, from + problem.bytes[other as usize]));
            }
        }
        near.sort_unstable();
        let from = gap(&near, problem.bytes[block], problem.align[block], fit);
        offsets[block] = from;
        total = total.max(from + problem.bytes[block]);
        if total >= limit {
            return None;
        }
    }
    Some(Placed { offsets, total })
}

/// Where `bytes` fit beside what is placed, which is sorted.
fn gap(placed: &[(u64, u64)], bytes: u64, align: u64, fit: Fit) -> u64 {
    let mut top = 0;
    let mut best: Option<(u64, u64)> = None;
    for &(from, to) in placed {
        if from > top && from - top >= bytes {
            let room = from - top;
            match fit {
                Fit::First => return top,
                Fit::Best if best.is_none_or(|(smallest, _)| room < smallest) => best = Some((room, top)),
                Fit::Best => {}
            }
        }
        top = top.max(to.next_multiple_of(align));
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
        let placed = [(0, 4), (10, 12), (16, 20)];
        assert_eq!(gap(&placed, 4, 1, Fit::First), 4);
        assert_eq!(gap(&placed, 4, 1, Fit::Best), 12);
        assert_eq!(gap(&placed, 7, 1, Fit::Best), 20);
        assert_eq!(gap(&placed, 4, 8, Fit::First), 24);
        assert_eq!(gap(&placed, 4, 6, Fit::First), 6);
        assert_eq!(gap(&[], 7, 1, Fit::First), 0);
    }
}
