//! A graph waits for another one only where it shares bytes with it behind the wait.

use std::collections::{BTreeMap, BTreeSet};

use super::report::Reason;
use crate::log::{Entry, Log, LogAccess, LogGraph, Mode, RankLog, Work};

/// Reports every wait node that orders nothing.
pub(super) fn faults(log: &Log, report: &mut dyn FnMut(Reason)) {
    for rank in &log.ranks {
        faults_of(rank, report);
    }
}

fn faults_of(rank: &RankLog, report: &mut dyn FnMut(Reason)) {
    let mut recorders: BTreeMap<u32, Vec<(&LogGraph, usize)>> = BTreeMap::new();
    for graph in &rank.graphs {
        for (at, node) in graph.nodes.iter().enumerate() {
            if let Work::Record(event) = node.work {
                recorders.entry(event).or_default().push((graph, at));
            }
        }
    }
    // What eager code records may order anything.
    let eager: BTreeSet<u32> = rank
        .entries
        .iter()
        .filter_map(|entry| match entry {
            Entry::Enqueue { work: Work::Record(event), .. } => Some(*event),
            _ => None,
        })
        .collect();
    // Graphs that were captured for no plan wait for what they like.
    for graph in rank.graphs.iter().filter(|graph| graph.views.is_some()) {
        for (at, node) in graph.nodes.iter().enumerate() {
            let Work::Wait(event) = node.work else { continue };
            let Some(recorders) = recorders.get(&event).filter(|_| !eager.contains(&event)) else { continue };
            let behind = after(graph, at);
            let shares = |(other, record): &(&LogGraph, usize)| {
                let before = before(other, *record);
                before.iter().any(|&a| {
                    behind.iter().any(|&b| conflict(&other.nodes[a].accesses, &graph.nodes[b].accesses))
                })
            };
            if !recorders.iter().any(shares) {
                let names: BTreeSet<&str> =
                    recorders.iter().map(|(graph, _)| graph.runner.as_str()).collect();
                report(Reason::NeedlessWait {
                    rank: rank.rank,
                    runner: graph.runner.clone(),
                    node: u32::try_from(at).unwrap_or(u32::MAX),
                    recorders: names.into_iter().map(str::to_owned).collect(),
                });
            }
        }
    }
}

/// Nodes that end before node `at` starts. Dependencies come first.
fn before(graph: &LogGraph, at: usize) -> Vec<usize> {
    let mut reached = vec![false; graph.nodes.len()];
    reached[at] = true;
    for node in (0..=at).rev() {
        if reached[node] {
            for &on in &graph.nodes[node].dependencies {
                reached[on as usize] = true;
            }
        }
    }
    (0..at).filter(|&node| reached[node]).collect()
}

/// Nodes that start after node `at` has ended.
fn after(graph: &LogGraph, at: usize) -> Vec<usize> {
    let mut reached = vec![false; graph.nodes.len()];
    reached[at] = true;
    for node in at + 1..graph.nodes.len() {
        reached[node] = graph.nodes[node].dependencies.iter().any(|&on| reached[on as usize]);
    }
    (at + 1..graph.nodes.len()).filter(|&node| reached[node]).collect()
}

fn conflict(one: &[LogAccess], other: &[LogAccess]) -> bool {
    one.iter().any(|a| {
        other.iter().any(|b| {
            (a.rank, a.memory) == (b.rank, b.memory)
                && a.start < b.end
                && b.start < a.end
                && (a.mode != Mode::Read || b.mode != Mode::Read)
        })
    })
}
