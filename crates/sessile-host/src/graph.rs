//! Captured graphs.

use std::fmt;
use std::sync::atomic::AtomicU64;

use sessile_hal::{Graph, GraphNode, NodeKind, Op, Ticket};

use crate::collective::Call;
use crate::comm::Group;
use crate::event::HostEvent;
use crate::memory::HostMemory;
use crate::stream::Tail;
use crate::sync::Arc;

/// What a captured node does. Owns what it touches.
#[derive(Clone)]
pub(crate) enum NodeWork {
    Op(Arc<Op<HostMemory>>),
    Collective { group: Arc<Group>, call: Arc<Call> },
    Record(HostEvent),
    Wait(HostEvent),
}

#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) ticket: Ticket,
    pub(crate) work: NodeWork,
    /// Earlier nodes that must end first.
    pub(crate) dependencies: Vec<u32>,
}

/// A graph of the host device.
#[derive(Clone)]
pub struct HostGraph(pub(crate) Arc<GraphCell>);

pub(crate) struct GraphCell {
    pub(crate) rank: u32,
    pub(crate) world: u64,
    /// Label of the stream it was captured on.
    pub(crate) label: Arc<str>,
    pub(crate) nodes: Vec<Node>,
    /// Nodes that no other node depends on.
    pub(crate) sinks: Vec<u32>,
    /// The end of the latest launch.
    pub(crate) launched: Tail,
    /// Launches so far.
    pub(crate) launches: AtomicU64,
}

impl HostGraph {
    pub(crate) fn new(world: u64, rank: u32, label: &str, nodes: Vec<Node>) -> Self {
        let mut is_sink = vec![true; nodes.len()];
        for node in &nodes {
            for &dependency in &node.dependencies {
                is_sink[dependency as usize] = false;
            }
        }
        let sinks = (0u32..).zip(is_sink).filter_map(|(at, sink)| sink.then_some(at)).collect();
        HostGraph(Arc::new(GraphCell {
            rank,
            world,
            label: label.into(),
            nodes,
            sinks,
            launched: Tail::default(),
            launches: AtomicU64::new(0),
        }))
    }
}

impl Graph for HostGraph {
    fn nodes(&self) -> Vec<GraphNode> {
        let describe = |node: &Node| GraphNode {
            ticket: Some(node.ticket),
            kind: match node.work {
                NodeWork::Op(_) => NodeKind::Op,
                NodeWork::Collective { .. } => NodeKind::Collective,
                NodeWork::Record(_) => NodeKind::Record,
                NodeWork::Wait(_) => NodeKind::Wait,
            },
            dependencies: node.dependencies.clone(),
        };
        self.0.nodes.iter().map(describe).collect()
    }
}

impl fmt::Debug for HostGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph `{}` of {} nodes of rank {}", self.0.label, self.0.nodes.len(), self.0.rank)
    }
}
