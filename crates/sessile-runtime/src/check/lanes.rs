//! Lanes: a cover of a graph's nodes by paths.

use crate::log::LogNode;

/// How many lane ends a node remembers. More would find a smaller cover in wide graphs, at more cost.
const REMEMBERED: usize = 16;

/// Wanted nodes that precede a node.
#[derive(Clone, Default)]
struct Ends {
    /// The last ones on each way into the node.
    near: Vec<usize>,
    /// Ends of lanes further back that nothing has continued.
    far: Vec<usize>,
}

impl Ends {
    fn add(list: &mut Vec<usize>, at: usize) {
        if list.len() < REMEMBERED && !list.contains(&at) {
            list.push(at);
        }
    }
}

/// A lane for each wanted node, such that the nodes of one lane are ordered by the graph's edges, in node order; and
/// the number of lanes.
///
/// Greedy, in node order: a node continues a lane that ends at a node it follows, and opens one if there is none. It
/// prefers a direct predecessor, the oldest first: the newest is probably continued by work of its own stream. Then
/// it takes up a lane that ended further back.
pub(crate) fn cover(nodes: &[LogNode], wanted: impl Fn(&LogNode) -> bool) -> (Vec<Option<u32>>, u32) {
    let mut lanes: Vec<Option<u32>> = Vec::with_capacity(nodes.len());
    let mut ends: Vec<Ends> = Vec::with_capacity(nodes.len());
    let mut tails: Vec<usize> = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        let mut before = Ends::default();
        for &on in &node.dependencies {
            let Some(known) = ends.get(on as usize) else { continue };
            known.near.iter().for_each(|&end| Ends::add(&mut before.near, end));
            known.far.iter().for_each(|&end| Ends::add(&mut before.far, end));
        }
        if !wanted(node) {
            lanes.push(None);
            ends.push(before);
            continue;
        }
        let lane_ending_at =
            |end: usize| lanes[end].filter(|&lane| tails[lane as usize] == end).map(|lane| (end, lane));
        let near = before.near.iter().filter_map(|&end| lane_ending_at(end)).min();
        let found = near.or_else(|| before.far.iter().filter_map(|&end| lane_ending_at(end)).min());
        let lane = found.map_or_else(|| u32::try_from(tails.len()).unwrap_or(u32::MAX), |(_, lane)| lane);
        let mut after = Ends { near: vec![at], far: Vec::new() };
        for &end in before.near.iter().chain(&before.far) {
            if lane_ending_at(end).is_some_and(|(_, other)| other != lane) {
                Ends::add(&mut after.far, end);
            }
        }
        match tails.get_mut(lane as usize) {
            Some(tail) => *tail = at,
            None => tails.push(at),
        }
        lanes.push(Some(lane));
        ends.push(after);
    }
    (lanes, u32::try_from(tails.len()).unwrap_or(u32::MAX))
}
