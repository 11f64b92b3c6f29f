//! Captured graphs.
//!
//! A graph owns all it touches: memory, events, communicators, scratch. The executable is destroyed first, after its
//! last launch has ended, then what it owned.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use sessile_hal::{DeviceError, Graph, GraphKernel, GraphNode, NodeKind, Ticket};

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
    pub(crate) kernels: Vec<GraphKernel>,
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

impl Drop for GraphCell {
    fn drop(&mut self) {
        self.handle.core.graveyard.bury(Box::new(self.exec.take()));
    }
}

impl Graph for CudaGraph {
    fn nodes(&self) -> Vec<GraphNode> {
        self.0.nodes.clone()
    }

    fn kernels(&self) -> &[GraphKernel] {
        &self.0.kernels
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
) -> Result<(Vec<GraphNode>, Vec<GraphKernel>), DeviceError> {
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
            let name = plain(name);
            kernels.push(GraphKernel {
                node: at,
                ticket: step.map(|(_, step)| step.ticket),
                name: name.to_owned(),
                grid: *grid,
                block: *block,
            });
        }
    }
    Ok((nodes, kernels))
}

/// The function's own name out of a mangled one (`_Z`, its length, itself, its parameters); others as they are.
fn plain(symbol: &str) -> &str {
    let own = || {
        let rest = symbol.strip_prefix("_Z")?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        rest.get(digits..digits + rest[..digits].parse::<usize>().ok()?)
    };
    own().unwrap_or(symbol)
}

/// Checks that every symmetric collective became kernels that use the registration.
pub(crate) fn check_symmetric(
    kernels: &[GraphKernel],
    symmetric: &[(Ticket, String)],
) -> Result<(), DeviceError> {
    for (ticket, group) in symmetric {
        let of_nccl = |kernel: &&GraphKernel| kernel.ticket == Some(*ticket) && kernel.name.contains("nccl");
        let uses = |kernel: &GraphKernel| kernel.name.contains("Symk") || kernel.name.contains("SymDev");
        let mut kernels = kernels.iter().filter(of_nccl).peekable();
        let none = kernels.peek().is_none();
        if let Some(name) = kernels.find(|kernel| !uses(kernel)).map(|kernel| kernel.name.clone()) {
            return Err(DeviceError::PlainKernel { group: group.clone(), kernel: name });
        }
        if none {
            return Err(DeviceError::PlainKernel { group: group.clone(), kernel: "no kernel".to_owned() });
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mangled_name_is_told_without_its_parameters() {
        for (symbol, name) in [
            ("_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE", "ncclDevKernel_SendRecv"),
            ("one_shot_bf16_2", "one_shot_bf16_2"),
            ("_Zx", "_Zx"),
            ("_Z99short", "_Z99short"),
            ("_Z99999999999999999999999short", "_Z99999999999999999999999short"),
        ] {
            assert_eq!(plain(symbol), name);
        }
    }

    #[test]
    fn a_plain_kernel_in_place_of_a_symmetric_one_is_refused() {
        let kernel = |ticket, name: &str| GraphKernel {
            node: 0,
            ticket: Some(Ticket(ticket)),
            name: name.to_owned(),
            grid: 1,
            block: 1,
        };
        let kernels = [
            kernel(1, "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16"),
            kernel(1, "sessile_copy"),
            kernel(2, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
        ];
        let ask = |ticket| check_symmetric(&kernels, &[(Ticket(ticket), "dense".to_owned())]);
        assert_eq!(ask(1), Ok(()));
        let refused = |ticket| ask(ticket).expect_err("plain").to_string();
        assert!(refused(2).contains("RING_LL") && refused(2).contains("`dense`"), "{}", refused(2));
        assert!(refused(3).contains("no kernel"));
    }
}
