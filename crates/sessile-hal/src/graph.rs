//! Captured graphs.

use std::fmt;

use crate::Ticket;

/// What a node does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A kernel or a copy.
    Op,
    /// A collective of a communicator.
    Collective,
    /// Records an external event.
    Record,
    /// Waits for an external event.
    Wait,
    /// Joins its dependencies.
    Empty,
}

/// One node as the device holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphNode {
    /// The enqueue that made the node; `None` for nodes that the device added by itself.
    pub ticket: Option<Ticket>,
    /// What it does.
    pub kind: NodeKind,
    /// Indices of the nodes that must end first.
    pub dependencies: Vec<u32>,
}

/// A kernel that a graph runs, as the device reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphKernel {
    /// Index among the graph's nodes.
    pub node: u32,
    /// The enqueue that added it.
    pub ticket: Option<Ticket>,
    /// The kernel's symbol.
    pub name: String,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
}

/// An instantiated graph. A handle: clones share it. It owns all it touches (memory, events, communicators)
/// until the last clone is gone and its last launch has ended.
pub trait Graph: Clone + Send + Sync + fmt::Debug + 'static {
    /// The nodes in capture order. Dependencies come first.
    fn nodes(&self) -> Vec<GraphNode>;

    /// The kernels that will run, where the device has such: which one a collective became, for example.
    fn kernels(&self) -> &[GraphKernel] {
        &[]
    }
}
