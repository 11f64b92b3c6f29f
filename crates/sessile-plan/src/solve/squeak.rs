//! Greedy passes over and over, each time with the blocks that ended too high moved forward in the order.
//!
//! Conflicts are local, so what squeaks in one place is mended there while the rest stays as it is.

use super::{Placed, Problem, greedy};

/// Improves the best placement towards `target`, with up to `budget` pairs looked at.
pub(super) fn improve(problem: &Problem, target: u64, budget: &mut u64, best: &mut Placed) {
    let pairs: u64 = (0..problem.len()).map(|block| problem.neighbors(block).len() as u64 + 4).sum();
    for which in 0..4 {
        let mut order: Vec<u32> = greedy::order(problem, which);
        // Rank in the order, in steps of two so that a block can go before another.
        let mut rank: Vec<u64> = vec![0; problem.len()];
        let mut stale = 0;
        let mut lowest = u64::MAX;
        while best.total > target && stale < 24 {
            let Some(left) = budget.checked_sub(pairs) else { return };
            *budget = left;
            let placed = greedy::whole_pass(problem, &order);
            let high: u64 = (0..problem.len())
                .map(|block| (placed.offsets[block] + problem.bytes[block]).saturating_sub(target))
                .sum();
            if placed.total < best.total {
                *best = placed.clone();
            }
            stale = if high < lowest { 0 } else { stale + 1 };
            lowest = high.min(lowest);
            for (at, &block) in order.iter().enumerate() {
                rank[block as usize] = 2 * at as u64 + 2;
            }
            let mut moved = false;
            for block in 0..problem.len() {
                if placed.offsets[block] + problem.bytes[block] > target {
                    // Before the first of what it conflicts with and that lies below it.
                    let below = problem
                        .neighbors(block)
                        .iter()
                        .filter(|&&other| placed.offsets[other as usize] < placed.offsets[block]);
                    let first = below.map(|&other| rank[other as usize]).min();
                    if let Some(first) = first.filter(|&first| first < rank[block]) {
                        rank[block] = first.saturating_sub(1);
                        moved = true;
                    }
                }
            }
            if !moved {
                break;
            }
            order.sort_by_key(|&block| (rank[block as usize], block));
        }
    }
}
