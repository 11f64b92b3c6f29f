//! Captured graphs.
//!
//! A graph owns all it touches: memory, events, communicators, scratch. The executable is destroyed first, after its
//! last launch has ended, then what it owned.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use sessile_hal::{DeviceError, Graph, GraphNode, NodeKind, Ticket};

use crate::comm::CudaComm;
use crate::core::Handle;
use crate::exec::{NodeId, RawExec, RawGraph, RawNode, RawWork};

/// A graph of the CUDA device.
#[derive(Clone)]
pub struct CudaGraph(pub(crate) Arc<GraphCell>);

pub(crate) struct GraphCell {
    pub(crate) handle: Arc<Handle>,
    pub(crate) exec: Option<RawExec>,
    pub(crate) nodes: Vec<GraphNode>,
    pub(crate) kernels: Vec<KernelNode>,
    /// Communicators whose collectives it holds.
    pub(crate) comms: Vec<CudaComm>,
    /// Identity among the graphs of the rank, for spans.
    pub(crate) id: u32,
    /// Everything else that its nodes touch.
    pub(crate) _owned: Vec<Box<dyn Owned>>,
}

/// Something that a graph keeps alive.
pub(crate) trait Owned: Send + Sync {}
impl<T: Send + Sync> Owned for T {}

/// A kernel node as the driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelNode {
    /// Index among the graph's nodes.
    pub node: u32,
    /// The kernel's symbol.
    pub name: String,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
}

impl CudaGraph {
    /// The kernels that will run, with their names and sizes: which collective kernel NCCL chose, for example.
    pub fn kernels(&self) -> &[KernelNode] {
        &self.0.kernels
    }
}

impl Drop for GraphCell {
    fn drop(&mut self) {
        self.handle.core.graveyard.bury(Box::new(self.exec.take()));
    }
}

impl Graph for CudaGraph {
    fn nodes(&self) -> Vec<GraphNode> {
        self.0.nodes.clone()
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph of {} nodes of rank {}", self.0.nodes.len(), self.0.handle.core.rank)
    }
}

/// What one enqueue added to a capture: the nodes that came before it and after it on its stream.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) ticket: Ticket,
    pub(crate) kind: NodeKind,
    pub(crate) before: Vec<NodeId>,
    pub(crate) after: Vec<NodeId>,
}

/// The driver's graph in the words of the contract: nodes in an order in which dependencies come first and which
/// follows the enqueues, the last node of an enqueue with its ticket.
///
/// A node belongs to the enqueue during which it was added: it is found going back from the stream's frontier after the
/// enqueue to the frontier before it.
pub(crate) fn describe(
    graph: &RawGraph,
    steps: &[Step],
) -> Result<(Vec<GraphNode>, Vec<KernelNode>), DeviceError> {
    let raw: HashMap<NodeId, RawNode> = graph.nodes()?.into_iter().map(|node| (node.id, node)).collect();
    if raw.values().any(|node| node.what == RawWork::Memory) {
        return Err(DeviceError::AllocationInGraph);
    }
    let owners = owners(&raw, steps);
    let order = order(&raw, &owners);
    let index: HashMap<NodeId, u32> = (0u32..).zip(&order).map(|(at, node)| (*node, at)).collect();
    // The last node of each enqueue carries its ticket.
    let mut last = BTreeMap::new();
    for node in &order {
        if let Some(step) = owners.get(node) {
            last.insert(*step, *node);
        }
    }
    let (mut nodes, mut kernels) = (Vec::new(), Vec::new());
    for (at, id) in (0u32..).zip(&order) {
        let Some(node) = raw.get(id) else { continue };
        let step = owners.get(id).map(|step| (*step, &steps[*step]));
        let ticket = step.filter(|(number, _)| last.get(number) == Some(id)).map(|(_, step)| step.ticket);
        let kind = match (&node.what, step) {
            (_, Some((_, step))) if ticket.is_some() => step.kind.clone(),
            (RawWork::Kernel { .. }, Some((_, step))) => step.kind.clone(),
            (RawWork::Wait, _) => NodeKind::Wait,
            (RawWork::Record, _) => NodeKind::Record,
            (RawWork::Empty, _) => NodeKind::Empty,
            _ => NodeKind::Op,
        };
        let mut dependencies: Vec<u32> = node.after.iter().filter_map(|id| index.get(id).copied()).collect();
        dependencies.sort_unstable();
        dependencies.dedup();
        nodes.push(GraphNode { ticket, kind, dependencies });
        if let RawWork::Kernel { name, grid, block } = &node.what {
            kernels.push(KernelNode { node: at, name: name.clone(), grid: *grid, block: *block });
        }
    }
    Ok((nodes, kernels))
}

/// Which step added a node; nodes that no step reaches (added at the end of the capture) have none.
fn owners(raw: &HashMap<NodeId, RawNode>, steps: &[Step]) -> HashMap<NodeId, usize> {
    let mut owners = HashMap::new();
    for (number, step) in steps.iter().enumerate() {
        let mut open: Vec<NodeId> = step.after.clone();
        while let Some(id) = open.pop() {
            if step.before.contains(&id) || owners.contains_key(&id) {
                continue;
            }
            owners.insert(id, number);
            open.extend(raw.get(&id).into_iter().flat_map(|node| node.after.iter().copied()));
        }
    }
    owners
}

/// Dependencies first; among those that are free, by enqueue.
fn order(raw: &HashMap<NodeId, RawNode>, owners: &HashMap<NodeId, usize>) -> Vec<NodeId> {
    let rank = |id: &NodeId| (owners.get(id).copied().unwrap_or(usize::MAX), *id);
    let mut left: HashMap<NodeId, usize> = raw.values().map(|node| (node.id, node.after.len())).collect();
    let mut users: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    for node in raw.values() {
        for before in &node.after {
            users.entry(*before).or_default().push(node.id);
        }
    }
    let free = left.iter().filter(|(_, count)| **count == 0).map(|(id, _)| rank(id));
    let mut free: std::collections::BTreeSet<_> = free.collect();
    let mut order = Vec::with_capacity(raw.len());
    while let Some((_, id)) = free.pop_first() {
        order.push(id);
        for user in users.get(&id).into_iter().flatten() {
            if let Some(count) = left.get_mut(user) {
                *count -= 1;
                if *count == 0 {
                    free.insert(rank(user));
                }
            }
        }
    }
    order
}
