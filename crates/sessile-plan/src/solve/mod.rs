//! The solver: blocks, their sizes, and which of them conflict; offsets, as low as can be found.
//!
//! Every part is deterministic: budgets count nodes, keys are integers, ties end with the block's number.
//!
//! ```text
//!  offset     launches ->                   sizes a 768, b 512, c 256, d 256
//!   768 | +---+---+ +---+                  by size: a at 0, b at 0 (they do not conflict),
//!       | |   | c | | d |                  c at 512 (on b), d at 512 (on b);
//!   512 | |   +---+ +---+                  768 bytes in all, which is the bound
//!       | | a +---------+
//!       | |   |    b    |
//!     0 | +---+---------+
//! ```

#[cfg(test)]
mod brute;
mod canon;
mod fronts;
mod greedy;
mod problem;
mod roll;
mod squeak;

use canon::{First, Found, Rules, Window};
use fronts::Fronts;
pub(crate) use problem::Problem;
use roll::{SHAPES, roll};

/// Offsets of all blocks, and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) offsets: Vec<u64>,
    pub(crate) total: u64,
}

/// What one cut may look at for one height, in blocks and words.
const ROLL_BUDGET: u64 = 1 << 19;
/// What all cuts may look at to get nearer to the bound.
const LOWER_BUDGET: u64 = 1 << 21;
/// Pairs that repeated passes may look at.
const SQUEAK_BUDGET: u64 = 1 << 22;
/// Blocks of a problem that is searched as a whole, and what that may look at.
const WHOLE: usize = 64;
const WHOLE_BUDGET: u64 = 1 << 19;
/// Members of all fronts, for each block.
const FRONT: usize = 64;
const FRONTS: usize = 1 << 20;

/// The lowest placement found. Stops at `bound`; `known` is the height of one that the caller has.
pub(crate) fn solve(problem: &Problem, bound: u64, known: u64) -> Placed {
    let mut best = Placed { offsets: Vec::new(), total: known };
    greedy::improve(problem, bound, &mut best);
    let fronts =
        if best.total > bound { Fronts::new(problem, FRONTS.max(problem.len() * FRONT)) } else { None };
    if let Some(fronts) = &fronts {
        let at_bound = |&shape| roll(problem, bound, shape, fronts, &mut { ROLL_BUDGET });
        if let Some(placed) = SHAPES.iter().find_map(at_bound) {
            return placed;
        }
    }
    squeak::improve(problem, bound, &mut { SQUEAK_BUDGET }, &mut best);
    if best.total > bound && problem.len() <= WHOLE && whole(problem, bound, &mut best) {
        return best;
    }
    if let Some(fronts) = &fronts {
        lower(problem, bound, fronts, &mut best);
    }
    best
}

/// Searches all blocks at once for less and less; whether nothing less is left.
fn whole(problem: &Problem, bound: u64, best: &mut Placed) -> bool {
    let blocks: Vec<u32> = (0..problem.len() as u32).collect();
    let window = Window::new(problem, &blocks, &[]);
    for first in [First::Degree, First::Total, First::Size] {
        let mut budget = WHOLE_BUDGET;
        while best.total > bound {
            match window.search(best.total - 1, first, Rules::ALL, &mut budget) {
                Found::Placed(offsets) => {
                    let ends = offsets.iter().zip(&problem.bytes).map(|(from, bytes)| from + bytes);
                    *best = Placed { total: ends.max().unwrap_or(0), offsets };
                }
                Found::Nothing => return true,
                Found::Spent => break,
            }
        }
    }
    best.total <= bound
}

/// Tries heights ever nearer below the best.
fn lower(problem: &Problem, bound: u64, fronts: &Fronts, best: &mut Placed) {
    let mut budget = LOWER_BUDGET;
    // The part of the way to the bound that is tried next.
    let mut part = 16;
    while best.total > bound && part <= 256 && budget > 0 {
        let height = best.total - (best.total - bound).div_ceil(part);
        let found = SHAPES.iter().find_map(|&shape| {
            let given = ROLL_BUDGET.min(budget);
            let mut left = given;
            let found = roll(problem, height, shape, fronts, &mut left);
            budget -= given - left;
            found
        });
        match found {
            Some(placed) => *best = placed,
            None => part *= 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Conflicts of six blocks or fewer, one of each kind up to renaming, as bits of pairs.
    fn graphs(count: usize) -> Vec<Vec<(u32, u32)>> {
        let pairs: Vec<(usize, usize)> = (0..count).flat_map(|b| (0..b).map(move |a| (a, b))).collect();
        let mut orders: Vec<Vec<usize>> = vec![vec![]];
        for block in 0..count {
            let longer = |order: &Vec<usize>| {
                let order = order.clone();
                (0..=order.len()).map(move |at| {
                    let mut order = order.clone();
                    order.insert(at, block);
                    order
                })
            };
            orders = orders.iter().flat_map(longer).collect();
        }
        let at = |a: usize, b: usize| pairs.iter().position(|&pair| pair == (a.min(b), a.max(b)));
        let moved: Vec<Vec<usize>> = orders
            .iter()
            .map(|order| pairs.iter().filter_map(|&(a, b)| at(order[a], order[b])).collect())
            .collect();
        let mut kinds = Vec::new();
        let mut seen = vec![false; 1 << pairs.len()];
        for bits in 0..1usize << pairs.len() {
            if seen[bits] {
                continue;
            }
            for to in &moved {
                let image = to.iter().enumerate().map(|(from, to)| (bits >> from & 1) << to).sum::<usize>();
                seen[image] = true;
            }
            let set = pairs.iter().enumerate().filter(|(pair, _)| bits >> pair & 1 == 1);
            kinds.push(set.map(|(_, &(a, b))| (a as u32, b as u32)).collect());
        }
        kinds
    }

    #[test]
    fn all_conflicts_of_up_to_six_blocks_are_packed_as_low_as_trying_all_offsets_does() {
        let (mut cases, mut above) = (0, 0);
        for count in 1..=6usize {
            for pairs in graphs(count) {
                let conflict = |a: usize, b: usize| pairs.contains(&(a.min(b) as u32, a.max(b) as u32));
                for number in 0..3usize.pow(count as u32) {
                    let sizes: Vec<u64> =
                        (0..count).map(|at| 1 + (number / 3usize.pow(at as u32) % 3) as u64).collect();
                    let problem = Problem::of_pairs(sizes.iter().map(|&size| (size, 1)).collect(), &pairs);
                    let bound = brute::heaviest(&sizes, &conflict);
                    let placed = solve(&problem, bound, u64::MAX);
                    let least = brute::least(&sizes, &conflict);
                    assert_eq!(placed.total, least, "{sizes:?} {pairs:?}");
                    assert_eq!(brute::height(&sizes, &conflict, &placed.offsets), Some(least), "{sizes:?}");
                    cases += 1;
                    above += u32::from(least > bound);
                }
            }
        }
        assert!(cases > 110_000 && above > 1000, "{cases} cases, {above} above their heaviest clique");
    }
}
