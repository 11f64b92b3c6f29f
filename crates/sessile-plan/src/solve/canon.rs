//! An exact search for one height, in the manner of MiniMalloc (Moffitt, ASPLOS 2023), over any conflicts.
//!
//! Every placement can be pushed down until each block lies on the bottom or on a block it conflicts with, and such a
//! placement can be built in order of offset. So blocks are placed in that order, each at its floor: the highest end of what
//! it conflicts with and is placed. When nothing is left to try, there is no placement.
//!
//! ```text
//!  height |-----------------------|    last: the offset placed last; nothing goes below it any more
//!         |     +-----+           |    floor(c) = end of b
//!         |     |  b  |    c ?    |    dead: a clique whose lowest floor and sizes exceed the height;
//!  last  >| +---+--+--+           |          a block that would fit below `last`, but is still to come
//!         | |  a   |              |    split: what conflicts with nothing else that is left is searched by itself
//!       0 |-----------------------|
//! ```

use std::collections::BTreeSet;

use super::Problem;

/// What a search ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Offsets of the blocks.
    Placed(Vec<u64>),
    /// There is no placement.
    Nothing,
    /// The budget is spent.
    Spent,
}

/// Rules that shorten the search. Each keeps at least one placement, if there is one; all are on outside tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// A block never goes above where another one, still to come, would end.
    pub(super) dominance: bool,
    /// Cliques must fit above their lowest floor.
    pub(super) cliques: bool,
    /// What falls apart is searched part by part.
    pub(super) split: bool,
    /// Of blocks that are alike in all, the first comes first.
    pub(super) twins: bool,
    /// States that led nowhere are remembered.
    pub(super) memory: bool,
}

impl Rules {
    pub(super) const ALL: Rules =
        Rules { dominance: true, cliques: true, split: true, twins: true, memory: true };
}

/// Which blocks are tried first, of those with one floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// Many conflicts, then large area, then heavy cliques.
    Degree,
    /// Heavy cliques, then large area.
    Total,
    /// Large ones.
    Size,
}

/// States that are remembered.
const MEMORY: usize = 1 << 14;

/// Some blocks of a problem, with what the search asks about them.
pub(super) struct Window {
    bytes: Vec<u64>,
    align: Vec<u64>,
    /// Words of a set of blocks.
    words: usize,
    /// A set for each block.
    near: Vec<u64>,
    cliques: Vec<Vec<u32>>,
    cliques_of: Vec<Vec<u32>>,
    /// What is taken already, ascending, for each block.
    taken: Vec<Vec<(u64, u64)>>,
    /// The block before it that it is alike in all.
    twin: Vec<Option<u32>>,
}

impl Window {
    /// The blocks of these numbers, ascending. Others keep their `offsets`, if they have any (`u64::MAX`: none); what has
    /// none is left out.
    pub(super) fn new(problem: &Problem, blocks: &[u32], offsets: &[u64]) -> Window {
        let count = blocks.len();
        let words = count.div_ceil(64);
        let mut near = vec![0u64; count * words];
        let mut lists: Vec<Vec<u32>> = Vec::with_capacity(count);
        let mut taken = Vec::with_capacity(count);
        for (at, &block) in blocks.iter().enumerate() {
            let (mut list, mut around) = (Vec::new(), Vec::new());
            for &other in problem.neighbors(block as usize) {
                if let Ok(other) = blocks.binary_search(&other) {
                    near[at * words + other / 64] |= 1 << (other % 64);
                    list.push(other as u32);
                } else if let Some(&from) = offsets.get(other as usize).filter(|&&from| from != u64::MAX) {
                    around.push((from, from + problem.bytes[other as usize]));
                }
            }
            around.sort_unstable();
            lists.push(list);
            taken.push(around);
        }
        let of = |values: &[u64]| blocks.iter().map(|&block| values[block as usize]).collect::<Vec<u64>>();
        let (bytes, align) = (of(&problem.bytes), of(&problem.align));
        let mut made = Window {
            bytes,
            align,
            words,
            near,
            cliques: Vec::new(),
            cliques_of: vec![Vec::new(); count],
            taken,
            twin: Vec::new(),
        };
        made.find_cliques(&lists);
        made.twin = (0..count).map(|block| made.twin_before(block)).collect();
        made
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn row(&self, block: usize) -> &[u64] {
        &self.near[block * self.words..(block + 1) * self.words]
    }

    /// The lowest offset from `floor` on at which nothing is taken.
    fn lowest(&self, block: usize, floor: u64) -> u64 {
        let (bytes, align) = (self.bytes[block], self.align[block]);
        let mut at = floor.next_multiple_of(align);
        for &(from, to) in &self.taken[block] {
            if from >= at + bytes {
                break;
            }
            at = at.max(to.next_multiple_of(align));
        }
        at
    }

    fn conflict(&self, a: usize, b: usize) -> bool {
        self.near[a * self.words + b / 64] >> (b % 64) & 1 == 1
    }

    /// For each block a heavy clique of it and earlier ones; in one total order, all that live when it begins.
    fn find_cliques(&mut self, lists: &[Vec<u32>]) {
        let mut seen = BTreeSet::new();
        for (block, list) in lists.iter().enumerate() {
            let earlier: Vec<u32> = list.iter().copied().filter(|&other| (other as usize) < block).collect();
            let mut heavy = earlier.clone();
            heavy.sort_by_key(|&other| (u64::MAX - self.bytes[other as usize], other));
            let late: Vec<u32> = earlier.into_iter().rev().collect();
            for order in [heavy, late] {
                let mut clique = vec![block as u32];
                for other in order {
                    if clique.iter().all(|&member| self.conflict(other as usize, member as usize)) {
                        clique.push(other);
                    }
                }
                clique.sort_unstable();
                if clique.len() > 1 && seen.insert(clique.clone()) {
                    self.cliques.push(clique);
                }
            }
        }
        // Those inside another say nothing new.
        let within =
            |small: &[u32], large: &[u32]| small.iter().all(|block| large.binary_search(block).is_ok());
        let all = std::mem::take(&mut self.cliques);
        for (at, clique) in all.iter().enumerate() {
            let ahead = &all[at + 1..(at + 1 + self.words * 64).min(all.len())];
            if !ahead.iter().any(|other| other.len() > clique.len() && within(clique, other)) {
                let number = self.cliques.len() as u32;
                clique.iter().for_each(|&block| self.cliques_of[block as usize].push(number));
                self.cliques.push(clique.clone());
            }
        }
    }

    fn twin_before(&self, block: usize) -> Option<u32> {
        let alike = |other: usize| {
            let mask = |word: usize, bits: u64| {
                let mut bits = bits;
                for at in [block, other] {
                    if at / 64 == word {
                        bits &= !(1 << (at % 64));
                    }
                }
                bits
            };
            let same = |word: usize| mask(word, self.row(block)[word]) == mask(word, self.row(other)[word]);
            self.bytes[other] == self.bytes[block]
                && self.align[other] == self.align[block]
                && self.taken[other] == self.taken[block]
                && (0..self.words).all(same)
        };
        (0..block).rev().find(|&other| alike(other)).map(|other| other as u32)
    }

    /// Rank of each block among those with one floor.
    fn ranks(&self, which: First) -> Vec<u32> {
        let degree =
            |block: usize| self.row(block).iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let total = |block: usize| {
            let of = |&clique: &u32| {
                self.cliques[clique as usize].iter().map(|&b| self.bytes[b as usize]).sum::<u64>()
            };
            self.cliques_of[block].iter().map(of).max().unwrap_or(self.bytes[block])
        };
        let key = |block: usize| {
            // Blocks that are alike keep their order.
            let mut first = block;
            while let Some(twin) = self.twin[first] {
                first = twin as usize;
            }
            let (size, degree, total) = (self.bytes[block], degree(block), total(first));
            let area = u128::from(size) * u128::from(degree);
            let (a, b, c): (u128, u128, u128) = match which {
                First::Degree => (degree.into(), area, total.into()),
                First::Total => (total.into(), area, degree.into()),
                First::Size => (size.into(), degree.into(), total.into()),
            };
            (u128::MAX - a, u128::MAX - b, u128::MAX - c, block)
        };
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_cached_key(|&block| key(block));
        let mut ranks = vec![0; self.len()];
        for (rank, block) in order.into_iter().enumerate() {
            ranks[block] = rank as u32;
        }
        ranks
    }

    /// Searches for a placement of at most `height`, looking at no more than `budget` blocks and words.
    pub(super) fn search(&self, height: u64, first: First, rules: Rules, budget: &mut u64) -> Found {
        let count = self.len();
        let mut search = Search {
            window: self,
            height,
            rules,
            rank: self.ranks(first),
            floor: (0..count).map(|block| self.lowest(block, 0)).collect(),
            offsets: vec![u64::MAX; count],
            trail: Vec::new(),
            dead: BTreeSet::new(),
            budget: *budget,
        };
        let all: Vec<u32> = (0..count as u32).collect();
        let cliques_fit = !rules.cliques || (0..self.cliques.len()).all(|clique| search.fits(clique, 0));
        let found = if cliques_fit { search.parts(&all, (0, 0)) } else { Some(false) };
        *budget = search.budget;
        match found {
            Some(true) => Found::Placed(search.offsets),
            Some(false) => Found::Nothing,
            None => Found::Spent,
        }
    }
}

/// Offset placed last, and the rank after that of its block.
type Last = (u64, u32);

struct Search<'a> {
    window: &'a Window,
    height: u64,
    rules: Rules,
    rank: Vec<u32>,
    floor: Vec<u64>,
    /// `u64::MAX`: still to come.
    offsets: Vec<u64>,
    /// Floors before they rose.
    trail: Vec<(u32, u64)>,
    dead: BTreeSet<Vec<u64>>,
    budget: u64,
}

impl Search<'_> {
    fn spend(&mut self, cost: usize) -> Option<()> {
        self.budget = self.budget.checked_sub(cost as u64)?;
        Some(())
    }

    /// The least offset that a block can get: below `last` nothing is placed, so a lower floor will rise.
    fn least(&self, block: usize, last: u64) -> u64 {
        self.floor[block].max(last)
    }

    /// Whether the blocks of a clique that are still to come fit above each of their floors.
    fn fits(&self, clique: usize, last: u64) -> bool {
        let (mut low, mut sum) = (u64::MAX, 0);
        for &block in &self.window.cliques[clique] {
            if self.offsets[block as usize] == u64::MAX {
                low = low.min(self.least(block as usize, last));
                sum += self.window.bytes[block as usize];
            }
        }
        sum == 0 || low + sum <= self.height
    }

    /// Places blocks that are still to come, all of them; `None` once the budget is spent.
    fn parts(&mut self, blocks: &[u32], last: Last) -> Option<bool> {
        if !self.rules.split || blocks.len() < 2 {
            return self.place(blocks, last);
        }
        let parts = self.split(blocks)?;
        if parts.len() == 1 {
            return self.place(blocks, last);
        }
        for part in parts {
            if !self.place(&part, last)? {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Blocks by what hangs together, the smallest part first.
    fn split(&mut self, blocks: &[u32]) -> Option<Vec<Vec<u32>>> {
        let words = self.window.words;
        self.spend(blocks.len() * words)?;
        let mut left = vec![0u64; words];
        for &block in blocks {
            left[block as usize / 64] |= 1 << (block % 64);
        }
        let mut parts = Vec::new();
        for &block in blocks {
            if left[block as usize / 64] >> (block % 64) & 1 == 0 {
                continue;
            }
            left[block as usize / 64] &= !(1 << (block % 64));
            let mut part = vec![block];
            let mut at = 0;
            while let Some(&member) = part.get(at) {
                at += 1;
                let row = self.window.row(member as usize);
                for (word, (left, row)) in left.iter_mut().zip(row).enumerate() {
                    let mut reached = *left & row;
                    *left &= !row;
                    while reached != 0 {
                        part.push((word * 64) as u32 + reached.trailing_zeros());
                        reached &= reached - 1;
                    }
                }
            }
            part.sort_unstable();
            parts.push(part);
        }
        parts.sort_by_key(Vec::len);
        Some(parts)
    }

    fn place(&mut self, blocks: &[u32], last: Last) -> Option<bool> {
        if blocks.is_empty() {
            return Some(true);
        }
        self.spend(blocks.len())?;
        // Where the first of those still to come would end.
        let mut ceiling = u64::MAX;
        for &block in blocks {
            let block = block as usize;
            let bytes = self.window.bytes[block];
            if self.least(block, last.0) + bytes > self.height {
                return Some(false);
            }
            ceiling = ceiling.min(self.floor[block] + bytes);
        }
        let ceiling = if self.rules.dominance { ceiling } else { u64::MAX };
        let mut candidates: Vec<(u64, u32, u32)> = Vec::new();
        for &block in blocks {
            let (floor, rank) = (self.floor[block as usize], self.rank[block as usize]);
            let twin = self.window.twin[block as usize].filter(|_| self.rules.twins);
            let waits = twin.is_some_and(|twin| self.offsets[twin as usize] == u64::MAX);
            if floor < ceiling && (floor, rank) >= last && !waits {
                candidates.push((floor, rank, block));
            }
        }
        if candidates.is_empty() {
            return Some(false);
        }
        let key = self.rules.memory.then(|| self.key(blocks, last));
        if key.as_ref().is_some_and(|key| self.dead.contains(key)) {
            return Some(false);
        }
        candidates.sort_unstable();
        let mut rest: Vec<u32> = Vec::with_capacity(blocks.len());
        for (floor, rank, block) in candidates {
            let mark = self.trail.len();
            self.offsets[block as usize] = floor;
            let mut fits = self.raise(block as usize, floor)?;
            if fits {
                rest.clear();
                rest.extend(blocks.iter().filter(|&&other| other != block));
                let after = (floor, rank + 1);
                fits = self.parts(&rest, after)?;
            }
            if fits {
                return Some(true);
            }
            // Also what parts placed that did fit.
            for &other in blocks {
                self.offsets[other as usize] = u64::MAX;
            }
            while self.trail.len() > mark {
                if let Some((other, floor)) = self.trail.pop() {
                    self.floor[other as usize] = floor;
                }
            }
        }
        if let Some(key) = key.filter(|_| self.dead.len() < MEMORY) {
            self.dead.insert(key);
        }
        Some(false)
    }

    /// Everything that what is to come depends on.
    fn key(&self, blocks: &[u32], last: Last) -> Vec<u64> {
        let mut key = Vec::with_capacity(blocks.len() + self.window.words + 2);
        key.extend([last.0, last.1.into()]);
        let from = key.len();
        key.resize(from + self.window.words, 0);
        for &block in blocks {
            key[from + block as usize / 64] |= 1 << (block % 64);
            key.push(self.floor[block as usize]);
        }
        key
    }

    /// Raises the floors of what conflicts with a block that was placed; whether all may still fit.
    fn raise(&mut self, block: usize, floor: u64) -> Option<bool> {
        let window = self.window;
        let end = floor + window.bytes[block];
        let mut fits = true;
        let mut looked_at = window.words;
        let mut risen: Vec<usize> = Vec::new();
        for (word, &bits) in window.row(block).iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                let other = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if self.offsets[other] != u64::MAX {
                    continue;
                }
                if end > self.floor[other] {
                    let floor = window.lowest(other, end);
                    self.trail.push((other as u32, self.floor[other]));
                    self.floor[other] = floor;
                    fits &= floor + window.bytes[other] <= self.height;
                    risen.push(other);
                }
            }
        }
        if fits && self.rules.cliques {
            for &clique in &window.cliques_of[block] {
                looked_at += window.cliques[clique as usize].len();
                if !self.fits(clique as usize, floor) {
                    fits = false;
                    break;
                }
            }
        }
        self.spend(looked_at + risen.len())?;
        Some(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::brute, *};

    fn problem(sizes: &[u64], pairs: &[(u32, u32)]) -> Problem {
        Problem::of_pairs(sizes.iter().map(|&size| (size, 1)).collect(), pairs)
    }

    fn all_rules() -> Vec<Rules> {
        let bit = |bits: u32, at: u32| bits >> at & 1 == 1;
        let rules = |bits| Rules {
            dominance: bit(bits, 0),
            cliques: bit(bits, 1),
            split: bit(bits, 2),
            twins: bit(bits, 3),
            memory: bit(bits, 4),
        };
        (0..32).map(rules).collect()
    }

    #[test]
    fn with_every_set_of_rules_the_least_height_is_that_of_trying_all_offsets() {
        let mut state = 7u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut above_load, mut cases) = (0, 0);
        for _ in 0..1000 {
            let count = 1 + random(6) as usize;
            let sizes: Vec<u64> = (0..count).map(|_| 1 + random(4)).collect();
            let mut pairs = Vec::new();
            for b in 0..count as u32 {
                pairs.extend((0..b).filter(|_| random(2) > 0).map(|a| (a, b)));
            }
            let conflict = |a: usize, b: usize| pairs.contains(&(a.min(b) as u32, a.max(b) as u32));
            let least = brute::least(&sizes, &conflict);
            let given = problem(&sizes, &pairs);
            let window = Window::new(&given, &(0..count as u32).collect::<Vec<_>>(), &[]);
            for rules in all_rules() {
                for first in [First::Degree, First::Total, First::Size] {
                    let mut budget = 1 << 30;
                    let below = window.search(least - 1, first, rules, &mut budget);
                    assert_eq!(below, Found::Nothing, "{sizes:?} {pairs:?} {rules:?}");
                    let Found::Placed(offsets) = window.search(least, first, rules, &mut budget) else {
                        panic!("{sizes:?} {pairs:?} fit {least}: {rules:?}");
                    };
                    let height = brute::height(&sizes, &conflict, &offsets);
                    assert!(
                        height.is_some_and(|height| height <= least),
                        "{sizes:?} {pairs:?} {rules:?} {offsets:?}"
                    );
                    cases += 1;
                }
            }
            above_load += u32::from(brute::heaviest(&sizes, &conflict) < least);
        }
        assert!(cases > 30_000 && above_load > 0, "{cases} cases, {above_load} above their heaviest clique");
    }

    #[test]
    fn a_spent_budget_says_nothing() {
        let window = Window::new(&problem(&[1, 2, 3], &[(0, 1), (1, 2)]), &[0, 1, 2], &[]);
        assert_eq!(window.search(5, First::Size, Rules::ALL, &mut 2), Found::Spent);
    }
}
