//! Blocks: what is given bytes as one, and what conflicts.

use crate::{
    conflicts::{Adjacency, Conflicts},
    limits::PAIRS_MAX,
    roster::{Entry, Roster},
};

/// Blocks of one domain, in order of acquire.
pub(crate) struct Problem {
    pub(crate) bytes: Vec<u64>,
    /// What each offset is a multiple of. One where sizes are all multiples of the same.
    pub(crate) align: Vec<u64>,
    starts: Vec<usize>,
    neighbors: Vec<u32>,
    /// Requests of each block, one after the other.
    members: Vec<Vec<usize>>,
}

impl Problem {
    pub(crate) fn new(
        roster: &Roster<'_>,
        conflicts: &Conflicts,
        adjacency: &Adjacency,
        requests: &[usize],
    ) -> Problem {
        let mut by_class: Vec<Vec<usize>> = vec![Vec::new(); conflicts.classes.len()];
        for &index in requests {
            by_class[conflicts.class_of[index]].push(index);
        }
        let twins: Vec<Vec<Vec<usize>>> = by_class.iter().map(|members| twins(roster, members)).collect();
        let pairs = |class: usize| {
            let around: usize = adjacency.of(class).iter().map(|&other| twins[other as usize].len()).sum();
            twins[class].len() * (around + twins[class].len())
        };
        let all_pairs = (0..twins.len()).map(pairs).fold(0usize, usize::saturating_add);
        let of_class: Vec<Vec<Vec<usize>>> = if all_pairs <= PAIRS_MAX {
            twins
        } else {
            by_class
                .into_iter()
                .map(|members| if members.is_empty() { vec![] } else { vec![members] })
                .collect()
        };
        Problem::of_classes(roster, conflicts, adjacency, of_class)
    }

    fn of_classes(
        roster: &Roster<'_>,
        conflicts: &Conflicts,
        adjacency: &Adjacency,
        of_class: Vec<Vec<Vec<usize>>>,
    ) -> Problem {
        // In order of first launch and acquiring node, so that blocks near each other have near numbers.
        let mut order: Vec<usize> = (0..of_class.len()).collect();
        order.sort_by_key(|&class| {
            let of = &conflicts.classes[class];
            (roster.positions[of.runner][0], of.acquire, class)
        });
        let mut first = vec![0usize; of_class.len()];
        let mut count = 0;
        for &class in &order {
            first[class] = count;
            count += of_class[class].len();
        }
        let numbers = |class: usize| first[class] as u32..(first[class] + of_class[class].len()) as u32;
        let mut made = Problem {
            bytes: Vec::with_capacity(count),
            align: vec![1; count],
            starts: vec![0],
            neighbors: Vec::new(),
            members: Vec::with_capacity(count),
        };
        for &class in &order {
            for block in numbers(class) {
                let from = made.neighbors.len();
                made.neighbors.extend(numbers(class).filter(|&other| other != block));
                for &other in adjacency.of(class) {
                    made.neighbors.extend(numbers(other as usize));
                }
                made.neighbors[from..].sort_unstable();
                made.starts.push(made.neighbors.len());
            }
        }
        for class in order {
            for members in &of_class[class] {
                made.bytes.push(members.iter().map(|&member| roster.entries[member].bytes).sum());
                made.members.push(members.clone());
            }
        }
        made
    }

    /// Blocks of these sizes and alignments; of each pair that conflicts the lower number first.
    pub(crate) fn of_pairs(sizes: Vec<(u64, u64)>, pairs: &[(u32, u32)]) -> Problem {
        let mut lists: Vec<Vec<u32>> = vec![Vec::new(); sizes.len()];
        for &(a, b) in pairs {
            lists[a as usize].push(b);
            lists[b as usize].push(a);
        }
        let (bytes, align): (Vec<u64>, Vec<u64>) = sizes.into_iter().unzip();
        let mut made = Problem { bytes, align, starts: vec![0], neighbors: Vec::new(), members: Vec::new() };
        for mut list in lists {
            list.sort_unstable();
            made.neighbors.extend(list);
            made.starts.push(made.neighbors.len());
        }
        made
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// What conflicts with a block, ascending.
    pub(crate) fn neighbors(&self, block: usize) -> &[u32] {
        &self.neighbors[self.starts[block]..self.starts[block + 1]]
    }

    /// Offsets of requests, by roster index, from those of blocks.
    pub(crate) fn spread(&self, roster: &Roster<'_>, blocks: &[u64], offsets: &mut [u64]) {
        for (members, &from) in self.members.iter().zip(blocks) {
            let mut at = from;
            for &member in members {
                offsets[member] = at;
                at += roster.entries[member].bytes;
            }
        }
    }
}

/// Requests of one class, with those that differ by their expert alone as one.
fn twins(roster: &Roster<'_>, members: &[usize]) -> Vec<Vec<usize>> {
    let twin = |a: &Entry<'_>, b: &Entry<'_>| {
        let (a, b) = (a.spec, b.spec);
        let expert = a.expert.is_some() && b.expert.is_some();
        expert && (&a.role, a.dtype, &a.shape, &a.group) == (&b.role, b.dtype, &b.shape, &b.group)
    };
    let chunks = members.chunk_by(|&a, &b| twin(&roster.entries[a], &roster.entries[b]));
    chunks.map(<[usize]>::to_vec).collect()
}
