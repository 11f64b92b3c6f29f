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

pub(crate) use problem::Problem;

/// Offsets of all blocks, and the height.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) offsets: Vec<u64>,
    pub(crate) total: u64,
}

/// The lowest placement found. Stops at `bound`; `known` is the height of one that the caller has.
pub(crate) fn solve(problem: &Problem, bound: u64, known: u64) -> Placed {
    let mut best = Placed { offsets: Vec::new(), total: known };
    greedy::improve(problem, bound, &mut best);
    best
}
