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

mod greedy;
mod problem;
mod squeak;
mod walk;

pub(crate) use problem::Problem;

/// Offsets of all blocks, and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) offsets: Vec<u64>,
    pub(crate) total: u64,
}

/// Blocks that one walk may try.
const WALK_BUDGET: u64 = 1 << 17;
/// Blocks of a problem for which several heights are tried.
const SMALL: usize = 4096;
/// Blocks of all fronts of a walk.
const FRONTS_MAX: usize = 1 << 20;
/// Pairs that repeated passes may look at.
const SQUEAK_BUDGET: u64 = 1 << 22;

/// The lowest placement found. Stops at `bound`; `known` is the height of one that the caller has.
pub(crate) fn solve(problem: &Problem, bound: u64, known: u64) -> Placed {
    let mut best = Placed { offsets: Vec::new(), total: known };
    greedy::improve(problem, bound, &mut best);
    if best.total <= bound {
        return best;
    }
    let fronts = walk::Fronts::new(problem, FRONTS_MAX);
    if let Some(fronts) = &fronts {
        let mut budget = WALK_BUDGET;
        if let Some(placed) = walk::walk(problem, bound, &mut budget, fronts) {
            return placed;
        }
    }
    let mut budget = SQUEAK_BUDGET;
    squeak::improve(problem, bound, &mut budget, &mut best);
    if let Some(fronts) = fronts.as_ref().filter(|_| problem.len() <= SMALL) {
        // A little higher each time, below the best so far.
        for eighths in 1..8 {
            let height = bound + (best.total - bound) / 8 * eighths;
            let mut budget = WALK_BUDGET / 4;
            if best.total > bound
                && let Some(placed) = walk::walk(problem, height, &mut budget, fronts)
            {
                return placed;
            }
        }
    }
    best
}
