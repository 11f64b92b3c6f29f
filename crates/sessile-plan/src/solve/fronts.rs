//! Fronts: what of the blocks placed so far still matters to those that follow.
//!
//! ```text
//!  blocks   0 1 2 3 4 | 5 6 7 ...     the front before block 5: earlier blocks that conflict with it or with a later one,
//!               ^   ^                 here 2 and 4
//! ```
//!
//! Where the same kinds of blocks follow the same front at the same offsets, whatever can follow one can follow the other.

use std::collections::BTreeMap;

use super::Problem;

/// Blocks ahead that must be alike for what is learned at one block to hold at another.
pub(super) const AHEAD: usize = 96;

/// The front before a block: how far back each of its blocks is, and its offset.
pub(super) type Front = Vec<(u32, u64)>;

/// For each block, the earlier blocks that conflict with it or with a later one, and what kind of blocks lie ahead.
pub(super) struct Fronts {
    starts: Vec<usize>,
    blocks: Vec<u32>,
    /// Blocks of one size, with conflicts in the same places around them, are of one kind.
    kind: Vec<u32>,
    /// Blocks that are followed by the same kinds, themselves first.
    ahead: Vec<u32>,
}

impl Fronts {
    /// None if they are more than `limit` in all.
    pub(super) fn new(problem: &Problem, limit: usize) -> Option<Fronts> {
        let mut made = Fronts { starts: vec![0], blocks: Vec::new(), kind: Vec::new(), ahead: Vec::new() };
        let mut front: Vec<u32> = Vec::new();
        for block in 0..problem.len() {
            let last = |of: u32| problem.neighbors(of as usize).last().copied().unwrap_or(0);
            front.retain(|&other| last(other) as usize >= block);
            made.blocks.extend_from_slice(&front);
            made.starts.push(made.blocks.len());
            if made.blocks.len() > limit {
                return None;
            }
            front.push(block as u32);
        }
        let mut kinds: BTreeMap<(u64, u64, Vec<i64>), u32> = BTreeMap::new();
        for block in 0..problem.len() {
            let around =
                problem.neighbors(block).iter().map(|&other| i64::from(other) - block as i64).collect();
            let next = kinds.len() as u32;
            let key = (problem.bytes[block], problem.align[block], around);
            made.kind.push(*kinds.entry(key).or_insert(next));
        }
        let mut aheads: BTreeMap<&[u32], u32> = BTreeMap::new();
        for block in 0..problem.len() {
            let next = aheads.len() as u32;
            let ahead = &made.kind[block..(block + AHEAD).min(problem.len())];
            made.ahead.push(*aheads.entry(ahead).or_insert(next));
        }
        Some(made)
    }

    /// The kinds of the block and those that follow it.
    pub(super) fn ahead(&self, block: usize) -> u32 {
        self.ahead[block]
    }

    pub(super) fn key(&self, block: usize, offsets: &[u64]) -> Front {
        let front = &self.blocks[self.starts[block]..self.starts[block + 1]];
        front.iter().map(|&other| (block as u32 - other, offsets[other as usize])).collect()
    }
}
