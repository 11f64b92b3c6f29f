//! The heaviest antichain of a small order, exactly: weighted Dilworth by maximum flow.
//!
//! The weight of the heaviest antichain is the sum of all weights less the maximum flow from the items, as what comes
//! before, to the items, as what comes after. The minimum cut names its members.
//!
//! ```text
//!            before      after
//!  source ── w(a) ─ a ──── a ─ w(a) ── sink
//!                     ╲
//!  source ── w(b) ─ b  ╲── b ─ w(b) ── sink          a < b
//! ```

/// The heaviest antichain, as indices. `precedes(a, b)` for `a < b` says whether the first precedes the second; no item
/// precedes one of a lower index.
pub(crate) fn heaviest_antichain(weights: &[u64], precedes: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let count = weights.len();
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (a, after) in after.iter_mut().enumerate() {
        after.extend((a + 1..count).filter(|&b| precedes(a, b)));
    }
    let mut flow = Flow::new(weights, &after);
    while flow.augment() {}
    let reached = flow.levels();
    (0..count).filter(|&item| reached[item] != UNREACHED && reached[count + item] == UNREACHED).collect()
}

const UNREACHED: u32 = u32::MAX;

/// A flow network of one side, the other side, and edges of endless capacity between. Node `i` is item `i` as what
/// comes before, node `count + i` as what comes after.
struct Flow<'a> {
    after: &'a [Vec<usize>],
    /// What may still leave the source, and enter the sink.
    out: Vec<u64>,
    into: Vec<u64>,
    /// Of each item as what comes after: from which items flow comes, and how much.
    carried: Vec<Vec<(usize, u64)>>,
}

impl<'a> Flow<'a> {
    fn new(weights: &[u64], after: &'a [Vec<usize>]) -> Flow<'a> {
        Flow {
            after,
            out: weights.to_vec(),
            into: weights.to_vec(),
            carried: vec![Vec::new(); weights.len()],
        }
    }

    /// Distances from the source in what is left.
    fn levels(&self) -> Vec<u32> {
        let count = self.out.len();
        let mut levels = vec![UNREACHED; 2 * count];
        let mut open: Vec<usize> = (0..count).filter(|&item| self.out[item] > 0).collect();
        open.iter().for_each(|&item| levels[item] = 0);
        let mut level = 0;
        while !open.is_empty() {
            level += 1;
            let mut next = Vec::new();
            let mut reach = |node: usize| {
                if levels[node] == UNREACHED {
                    levels[node] = level;
                    next.push(node);
                }
            };
            for &node in &open {
                match node.checked_sub(count) {
                    None => self.after[node].iter().for_each(|&to| reach(count + to)),
                    Some(item) => {
                        let back = self.carried[item].iter().filter(|&&(_, amount)| amount > 0);
                        back.for_each(|&(from, _)| reach(from));
                    }
                }
            }
            open = next;
        }
        levels
    }

    /// A blocking flow along shortest paths. False if there was no path.
    fn augment(&mut self) -> bool {
        let levels = self.levels();
        let count = self.out.len();
        if !(0..count).any(|item| levels[count + item] != UNREACHED && self.into[item] > 0) {
            return false;
        }
        let mut tried = vec![0usize; 2 * count];
        for source in 0..count {
            while self.out[source] > 0 {
                let sent = self.send(source, self.out[source], &levels, &mut tried);
                if sent == 0 {
                    break;
                }
                self.out[source] -= sent;
            }
        }
        true
    }

    /// Sends up to `amount` from a node on; each call goes one level deeper.
    fn send(&mut self, node: usize, amount: u64, levels: &[u32], tried: &mut [usize]) -> u64 {
        let count = self.out.len();
        match node.checked_sub(count) {
            None => {
                while let Some(&to) = self.after[node].get(tried[node]) {
                    if levels[count + to] == levels[node] + 1 {
                        let sent = self.send(count + to, amount, levels, tried);
                        if sent > 0 {
                            match self.carried[to].iter_mut().find(|(from, _)| *from == node) {
                                Some((_, carried)) => *carried += sent,
                                None => self.carried[to].push((node, sent)),
                            }
                            return sent;
                        }
                    }
                    tried[node] += 1;
                }
                0
            }
            Some(item) => {
                if self.into[item] > 0 {
                    let sent = amount.min(self.into[item]);
                    self.into[item] -= sent;
                    return sent;
                }
                while let Some(&(from, carried)) = self.carried[item].get(tried[node]) {
                    if carried > 0 && levels[from] == levels[node] + 1 {
                        let sent = self.send(from, amount.min(carried), levels, tried);
                        if sent > 0 {
                            self.carried[item][tried[node]].1 -= sent;
                            return sent;
                        }
                    }
                    tried[node] += 1;
                }
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    ///  a(3) ── b(2)          a < b, a < d, c < d: the heaviest antichains are {a, c} and {b, d}
    ///      ╲
    ///  c(2) ── d(4)
    /// ```
    #[test]
    fn the_drawn_order() {
        let precedes = |a, b| [(0, 1), (0, 3), (2, 3)].contains(&(a, b));
        assert_eq!(heaviest_antichain(&[3, 2, 2, 4], precedes), [1, 3]);
        assert_eq!(heaviest_antichain(&[5, 2, 2, 4], precedes), [0, 2]);
        assert_eq!(heaviest_antichain(&[], precedes), [] as [usize; 0]);
    }

    #[test]
    fn it_is_the_heaviest_of_all_subsets() {
        let mut state = 5u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..3000 {
            let count = 1 + random(9) as usize;
            let weights: Vec<u64> = (0..count).map(|_| 1 + random(9)).collect();
            let mut order = vec![vec![false; count]; count];
            for b in 0..count {
                for a in (0..b).rev() {
                    order[a][b] = random(3) == 0 || (a..b).any(|c| order[a][c] && order[c][b]);
                }
            }
            let is_antichain = |set: &[usize]| set.iter().all(|&a| set.iter().all(|&b| !order[a][b]));
            let weight = |set: &[usize]| set.iter().map(|&item| weights[item]).sum::<u64>();
            let subsets = (0..1usize << count)
                .map(|bits| (0..count).filter(|item| bits >> item & 1 == 1).collect::<Vec<usize>>());
            let best = subsets.filter(|set| is_antichain(set)).map(|set| weight(&set)).max();
            let found = heaviest_antichain(&weights, |a, b| order[a][b]);
            assert!(is_antichain(&found));
            assert_eq!(Some(weight(&found)), best);
        }
    }
}
