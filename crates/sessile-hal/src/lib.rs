//! The device contract. Traits only; `sessile-host` and `sessile-cuda` implement it with the same file names.
//!
//! # Design choices
//!
//! - **Enqueue returns.** Completion is an event; nothing blocks the host except the named waits
//!   ([`Device::wait_stream`], [`Device::read`], [`Device::write`], [`Comm::exchange`], and creating a
//!   communicator), and each of these has the device's deadline.
//! - **Every operation names its byte ranges.** An [`Op`] is data: a [`Kernel`] and the [`View`]s it reads and
//!   writes. The checker, a virtual clock and a graph's ownership all need them, and a host kernel can touch
//!   nothing else.
//! - **One rank, one device handle.** All calls are made by the rank's own host thread, in program order. Ranks
//!   meet in collectives, in [`Comm::exchange`], and nowhere else.
//! - **Validation lives above.** The runtime owns plans and their rules. A device checks only what it alone can
//!   know: capture state, sizes of operands, memory.
//!
//! # Launch semantics, on every device
//!
//! - A launch occupies its stream until every node of the graph has ended. Launches of one graph never overlap,
//!   on any streams. Graphs that shall run at once therefore need streams of their own.
//! - A wait, eager or as a node, observes the latest record *enqueued* before it, when the host makes the call. A
//!   launch enqueues the nodes of its graph in capture order, so inside one graph a wait node observes a record node
//!   that was captured before it. An event that was never recorded lets every wait pass.
//! - Nodes are ordered by the graph's edges alone. Streams exist during capture only.
//! - Collectives of one communicator run in the order in which they were enqueued or launched, also from
//!   different streams and graphs. All ranks must enqueue them in the same order.
//! - A launch may block the host while too many launches are outstanding (on CUDA about 1,000 on a stream, and about
//!   28 of graphs that hold NCCL collectives). Hold no lock that a peer needs.
//! - A collective of a rank ends after every rank of the group has reached it, and when nobody reads its `send` any
//!   more. It does not promise that peers have ended theirs.
#![forbid(unsafe_code)]

mod comm;
mod device;
mod error;
mod graph;
mod kernel;
mod memory;
mod note;
mod op;
mod span;
mod transfer;

pub use comm::{Collective, Comm};
pub use device::{Device, EventScope, Limits, Stream};
pub use error::DeviceError;
pub use graph::{Graph, GraphKernel, GraphNode, NodeKind};
pub use kernel::{AdamW, Attention, Beta, Combine, Gemm, Kernel, Transpose};
pub use memory::{ByteRange, Memory, MemoryId, View};
pub use note::{Note, NotedView};
pub use op::{Access, Op, Operand};
pub use span::{Span, Ticket};
pub use transfer::Transfer;
