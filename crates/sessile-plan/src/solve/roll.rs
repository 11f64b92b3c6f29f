//! Long problems, piece by piece: the exact search places some blocks, the first of them keep their offsets, and so on.
//!
//! ```text
//!  blocks ->   kept kept kept [ piece piece piece ] ...           searched around what is kept
//!              kept kept kept  kept [ piece piece piece ] ...
//! ```
//!
//! Where the same kinds of blocks follow the same front, the same offsets follow: layers that repeat are searched once, and
//! patterns that alternate over layers, which no greedy order finds, are found here. Where a piece has no place, blocks
//! before it are given up and searched again together with it.

use std::collections::BTreeMap;

use super::{
    Placed, Problem,
    canon::{First, Found, Rules, Window},
    fronts::{AHEAD, Front, Fronts},
};

/// How a problem is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Blocks of each piece that keep their offsets.
    keep: usize,
    /// Blocks of each piece beyond those.
    look: usize,
}

/// Cuts that are tried one after the other: none finds all.
pub(super) const SHAPES: [Shape; 6] = [
    Shape { keep: 8, look: 6 },
    Shape { keep: 4, look: 16 },
    Shape { keep: 4, look: 12 },
    Shape { keep: 4, look: 24 },
    Shape { keep: 3, look: 10 },
    Shape { keep: 10, look: 8 },
];

/// Times that blocks before a piece are given up, as many as are kept of each piece.
const BACK: usize = 6;
/// What the search of one piece, in one order, may look at.
const PIECE: u64 = 1 << 13;

/// Offsets of at most `height`, if every piece has a place that is found within `budget`.
pub(super) fn roll(
    problem: &Problem,
    height: u64,
    shape: Shape,
    fronts: &Fronts,
    budget: &mut u64,
) -> Option<Placed> {
    const { assert!(SHAPES[3].keep + SHAPES[3].look <= AHEAD) };
    let count = problem.len();
    let mut offsets = vec![u64::MAX; count];
    let mut known: BTreeMap<(u32, Front), Vec<u64>> = BTreeMap::new();
    let mut at = 0;
    while at < count {
        let kept = (at + shape.keep).min(count);
        let end = (kept + shape.look).min(count);
        let key = (fronts.ahead(at), fronts.key(at, &offsets));
        if let Some(found) = known.get(&key) {
            offsets[at..kept].copy_from_slice(&found[..kept - at]);
            at = kept;
            continue;
        }
        let backs = (0..=BACK).map(|back| at.checked_sub(back * shape.keep));
        let from = backs.map_while(|from| from).find(|&from| {
            let before = offsets[from..at].to_vec();
            offsets[from..at].fill(u64::MAX);
            match piece(problem, height, from..end, &offsets, budget) {
                Some(placed) => offsets[from..kept].copy_from_slice(&placed[..kept - from]),
                None => {
                    offsets[from..at].copy_from_slice(&before);
                    return false;
                }
            }
            true
        })?;
        if from == at {
            known.insert(key, offsets[at..kept].to_vec());
        }
        at = kept;
    }
    let total = offsets.iter().zip(&problem.bytes).map(|(from, bytes)| from + bytes).max().unwrap_or(0);
    Some(Placed { offsets, total })
}

/// Offsets of a piece around what has some.
fn piece(
    problem: &Problem,
    height: u64,
    blocks: std::ops::Range<usize>,
    offsets: &[u64],
    budget: &mut u64,
) -> Option<Vec<u64>> {
    let blocks: Vec<u32> = blocks.map(|block| block as u32).collect();
    let window = Window::new(problem, &blocks, offsets);
    for first in [First::Degree, First::Total, First::Size] {
        let given = PIECE.min(*budget);
        let mut left = given;
        let found = window.search(height, first, Rules::ALL, &mut left);
        *budget -= given - left;
        match found {
            Found::Placed(placed) => return Some(placed),
            // No order finds what is not there.
            Found::Nothing => return None,
            Found::Spent => {}
        }
    }
    None
}
