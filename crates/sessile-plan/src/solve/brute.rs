//! What tests compare the solver to: every offset is tried.

/// Whether two blocks conflict.
type Conflict<'a> = &'a dyn Fn(usize, usize) -> bool;

/// The least height of all placements.
pub(super) fn least(sizes: &[u64], conflict: Conflict<'_>) -> u64 {
    let mut best = sizes.iter().sum::<u64>() + 1;
    place(sizes, conflict, &mut Vec::new(), &mut best);
    best
}

fn place(sizes: &[u64], conflict: Conflict<'_>, offsets: &mut Vec<u64>, best: &mut u64) {
    let at = offsets.len();
    let top = (0..at).map(|other| offsets[other] + sizes[other]).max().unwrap_or(0);
    if top >= *best {
        return;
    }
    if at == sizes.len() {
        *best = top;
        return;
    }
    let mut offset = 0;
    while offset + sizes[at] < *best {
        let apart = |other: usize| {
            let (from, to) = (offsets[other], offsets[other] + sizes[other]);
            !conflict(other, at) || offset >= to || offset + sizes[at] <= from
        };
        if (0..at).all(apart) {
            offsets.push(offset);
            place(sizes, conflict, offsets, best);
            offsets.pop();
        }
        offset += 1;
    }
}

/// The most that any blocks which conflict pairwise need.
pub(super) fn heaviest(sizes: &[u64], conflict: Conflict<'_>) -> u64 {
    let weight = |set: usize| {
        let members: Vec<usize> = (0..sizes.len()).filter(|at| set >> at & 1 == 1).collect();
        let clique = members.iter().all(|&a| members.iter().all(|&b| a == b || conflict(a, b)));
        if clique { members.iter().map(|&at| sizes[at]).sum() } else { 0 }
    };
    (0..1 << sizes.len()).map(weight).max().unwrap_or(0)
}

/// The height of a placement; `None` if blocks that conflict overlap.
pub(super) fn height(sizes: &[u64], conflict: Conflict<'_>, offsets: &[u64]) -> Option<u64> {
    let overlap =
        |a: usize, b: usize| offsets[a] < offsets[b] + sizes[b] && offsets[b] < offsets[a] + sizes[a];
    let wrong = (0..sizes.len()).any(|b| (0..b).any(|a| conflict(a, b) && overlap(a, b)));
    let top = offsets.iter().zip(sizes).map(|(from, size)| from + size).max();
    if wrong || offsets.len() != sizes.len() { None } else { top }
}
