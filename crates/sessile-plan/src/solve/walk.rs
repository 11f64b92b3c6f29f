//! A walk along the blocks in order of acquire, for one height: each block goes to the bottom or the top of a gap between
//! the earlier blocks that it conflicts with, and back when a later one finds no gap.
//!
//! ```text
//!  height |-----------------|     the front of a block: the offsets of earlier blocks that conflict with it or with a
//!         | a |         | d |     later one. A front that led nowhere leads nowhere again, in every layer that is
//!         |---|  b  |---|---|     followed by the same ones.
//!         | c |-----| e | ?
//!       0 |-----------------|     Patterns that alternate over the layers, which no greedy order finds, are found here.
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::{Placed, Problem};

/// Blocks ahead that must be alike for what is learned at one block to hold at another.
const AHEAD: usize = 96;

/// Offsets below `height`, if the walk finds them within `budget` blocks tried.
pub(super) fn walk(problem: &Problem, height: u64, budget: &mut u64, fronts: &Fronts) -> Option<Placed> {
    let count = problem.len();
    let mut search = Search {
        problem,
        fronts,
        height,
        offsets: vec![u64::MAX; count],
        dead: BTreeSet::new(),
        dead_here: BTreeSet::new(),
    };
    let mut open: Vec<Tried> = Vec::with_capacity(count);
    while open.len() < count {
        let block = open.len();
        let key = fronts.key(block, &search.offsets);
        let dead = search.is_dead(block, &key);
        let candidates = if dead { Vec::new() } else { search.candidates(block) };
        // What is known dead died of what the walk that found it looked at.
        let furthest = if dead { (block + AHEAD).min(count - 1) } else { block };
        open.push(Tried { candidates, furthest, key });
        // Place the next block, or the one before it anew, and so on.
        loop {
            *budget = budget.checked_sub(1)?;
            let block = open.len() - 1;
            search.offsets[block] = u64::MAX;
            if let Some(offset) = open[block].candidates.pop() {
                search.offsets[block] = offset;
                break;
            }
            let Tried { furthest, key, .. } = open.pop()?;
            search.bury(block, furthest, key);
            let before = open.last_mut()?;
            before.furthest = before.furthest.max(furthest);
        }
    }
    let total =
        search.offsets.iter().zip(&problem.bytes).map(|(from, bytes)| from + bytes).max().unwrap_or(0);
    Some(Placed { offsets: search.offsets, total })
}

/// The front before a block: how far back each of its blocks is, and its offset.
type Front = Vec<(u32, u64)>;

/// A block on the way.
struct Tried {
    /// Offsets not tried yet, the most promising last.
    candidates: Vec<u64>,
    /// The furthest block looked at since it was placed.
    furthest: usize,
    key: Front,
}

struct Search<'a> {
    problem: &'a Problem,
    fronts: &'a Fronts,
    height: u64,
    offsets: Vec<u64>,
    /// Fronts that led nowhere, by what lies ahead; and by block, where that took looking further.
    dead: BTreeSet<(u32, Front)>,
    dead_here: BTreeSet<(usize, Front)>,
}

impl Search<'_> {
    fn is_dead(&self, block: usize, front: &Front) -> bool {
        // A set of pairs is asked by value.
        self.dead.contains(&(self.fronts.ahead[block], front.clone()))
            || self.dead_here.contains(&(block, front.clone()))
    }

    fn bury(&mut self, block: usize, furthest: usize, front: Front) {
        if furthest < block + AHEAD {
            self.dead.insert((self.fronts.ahead[block], front));
        } else {
            self.dead_here.insert((block, front));
        }
    }

    /// Bottoms and tops of gaps, the most promising last.
    fn candidates(&self, block: usize) -> Vec<u64> {
        let (bytes, align) = (self.problem.bytes[block], self.problem.align[block]);
        let mut near: Vec<(u64, u64)> = Vec::new();
        for &other in self.problem.neighbors(block) {
            let from = self.offsets[other as usize];
            if from != u64::MAX {
                near.push((from, from + self.problem.bytes[other as usize]));
            }
        }
        near.sort_unstable();
        // Room, and offset.
        let mut found: Vec<(u64, u64)> = Vec::new();
        let mut top = 0;
        for (from, to) in near.into_iter().chain([(self.height, self.height)]) {
            if from >= top && from - top >= bytes {
                let room = from - top;
                found.push((room, top));
                let upper = (from - bytes) / align * align;
                if upper > top {
                    found.push((room, upper));
                }
            }
            top = top.max(to.next_multiple_of(align));
        }
        // The tightest gap first; in a gap its outer side.
        found.sort_unstable_by_key(|&(room, from)| (room, from.min(self.height - from - bytes), from));
        found.reverse();
        found.into_iter().map(|(_, from)| from).collect()
    }
}

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

    fn key(&self, block: usize, offsets: &[u64]) -> Front {
        let front = &self.blocks[self.starts[block]..self.starts[block + 1]];
        front.iter().map(|&other| (block as u32 - other, offsets[other as usize])).collect()
    }
}
