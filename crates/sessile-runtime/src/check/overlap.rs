//! Whether runners really overlapped: pairs of operations that were in flight at once.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use sessile_hal::Span;

use crate::log::{Entry, Log, LogNode, RankLog, Work};

/// Pairs of operations of different runners of one rank that ran at once, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// All of them.
    pub cross_runner_pairs: u64,
    /// Those of which both touch the same arena.
    pub sharing_arena: u64,
}

/// Counts pairs of graph operations (kernels and collectives) of different runners of one rank whose spans, as open
/// intervals, intersect. `spans` holds, in the order of [`Log::ranks`], what each rank's device took; spans whose
/// launch the log does not hold are passed over. One sweep over the sorted ends: n·log n, times the number of
/// distinct sets of arenas that an operation touches (a handful).
pub fn overlap(log: &Log, spans: &[&[Span]]) -> Overlap {
    let arenas: BTreeSet<(u32, u64)> = log
        .ranks
        .iter()
        .flat_map(|rank| rank.memories.iter().filter(|m| m.arena).map(|m| (rank.rank, m.serial)))
        .collect();
    log.ranks.iter().zip(spans).fold(Overlap::default(), |sum, (rank, spans)| {
        let found = Sweep::of(rank, spans, &arenas).run();
        Overlap {
            cross_runner_pairs: sum.cross_runner_pairs + found.cross_runner_pairs,
            sharing_arena: sum.sharing_arena + found.sharing_arena,
        }
    })
}

/// A begin or an end. Ends sort first at the same time: intervals that only touch do not intersect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    time: u64,
    begins: bool,
    runner: usize,
    class: usize,
}

struct Sweep {
    edges: Vec<Edge>,
    runners: usize,
    /// The arenas that operations of a class touch.
    classes: Vec<Vec<(u32, u64)>>,
}

impl Sweep {
    fn of(rank: &RankLog, spans: &[Span], arenas: &BTreeSet<(u32, u64)>) -> Sweep {
        let launches: HashMap<u64, u32> = rank
            .entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Launch { ticket, graph, .. } => Some((*ticket, *graph)),
                _ => None,
            })
            .collect();
        let mut runner_of: HashMap<&str, usize> = HashMap::new();
        let mut class_of: HashMap<Vec<(u32, u64)>, usize> = HashMap::new();
        let mut edges = Vec::new();
        for span in spans.iter().filter(|span| span.begin < span.end) {
            let graph = launches.get(&span.ticket.0).and_then(|&graph| rank.graphs.get(graph as usize));
            let node = graph.zip(span.node).and_then(|(graph, at)| graph.nodes.get(at as usize));
            let Some((graph, node)) = graph.zip(node) else { continue };
            if !matches!(node.work, Work::Op(_) | Work::Collective { .. }) {
                continue;
            }
            let next = runner_of.len();
            let runner = *runner_of.entry(&graph.runner).or_insert(next);
            let next = class_of.len();
            let class = *class_of.entry(touched(node, arenas)).or_insert(next);
            edges.push(Edge { time: span.begin, begins: true, runner, class });
            edges.push(Edge { time: span.end, begins: false, runner, class });
        }
        edges.sort_unstable();
        let mut classes = vec![Vec::new(); class_of.len()];
        for (arenas, class) in class_of {
            classes[class] = arenas;
        }
        Sweep { edges, runners: runner_of.len(), classes }
    }

    fn run(self) -> Overlap {
        let classes = self.classes.len();
        let shares: Vec<Vec<usize>> = self
            .classes
            .iter()
            .map(|mine| {
                let meets = |other: &usize| self.classes[*other].iter().any(|arena| mine.contains(arena));
                (0..classes).filter(meets).collect()
            })
            .collect();
        // In flight: all, by runner, by class, by both.
        let mut all = 0_u64;
        let mut of_runner = vec![0_u64; self.runners];
        let mut of_class = vec![0_u64; classes];
        let mut of_both: HashMap<(usize, usize), u64> = HashMap::new();
        let mut found = Overlap::default();
        for Edge { begins, runner, class, .. } in self.edges {
            let both = of_both.entry((runner, class)).or_default();
            if !begins {
                all -= 1;
                of_runner[runner] -= 1;
                of_class[class] -= 1;
                *both -= 1;
                continue;
            }
            all += 1;
            of_runner[runner] += 1;
            of_class[class] += 1;
            *both += 1;
            found.cross_runner_pairs += all - of_runner[runner];
            for &other in &shares[class] {
                let own = of_both.get(&(runner, other)).copied().unwrap_or(0);
                found.sharing_arena += of_class[other] - own;
            }
        }
        found
    }
}

fn touched(node: &LogNode, arenas: &BTreeSet<(u32, u64)>) -> Vec<(u32, u64)> {
    let all: BTreeSet<(u32, u64)> = node
        .accesses
        .iter()
        .map(|access| (access.rank, access.memory))
        .filter(|memory| arenas.contains(memory))
        .collect();
    all.into_iter().collect()
}
