//! Graphs as the driver holds them: as captured, and as launched.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys;
use sessile_hal::DeviceError;

use crate::context::{Context, RawEvent, RawStream};
use crate::error::cuda;

/// A node of a driver's graph, by identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(usize);

impl NodeId {
    pub(crate) fn of(node: sys::CUgraphNode) -> Self {
        NodeId(node as usize)
    }

    pub(crate) fn raw(self) -> sys::CUgraphNode {
        self.0 as sys::CUgraphNode
    }
}

/// A graph as captured.
pub(crate) struct RawGraph {
    raw: sys::CUgraph,
    context: Arc<Context>,
}

/// An instantiated graph.
pub(crate) struct RawExec {
    raw: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: a driver handle. "Graph objects are not threadsafe" (Driver API, Graph Management): all calls on one are made
// under the device's lock, by `end_capture`, or through `&mut`.
unsafe impl Send for RawExec {}
// SAFETY: as for `Send`; launches are made under the device's lock.
unsafe impl Sync for RawExec {}

/// A node of a captured graph, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RawNode {
    pub(crate) id: NodeId,
    pub(crate) what: RawWork,
    /// Nodes that must end first.
    pub(crate) after: Vec<NodeId>,
}

/// What a driver's node does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RawWork {
    Kernel {
        name: String,
        grid: u32,
        block: u32,
    },
    Copy,
    Set,
    Host,
    Empty,
    Wait,
    Record,
    /// Allocates or frees.
    Memory,
    Other(u32),
}

impl RawGraph {
    /// Takes a graph of the driver; a null one is none.
    pub(crate) fn new(raw: sys::CUgraph, context: &Arc<Context>) -> Self {
        RawGraph { raw, context: context.clone() }
    }

    /// All nodes, in no particular order.
    pub(crate) fn nodes(&self) -> Result<Vec<RawNode>, DeviceError> {
        let mut count = 0;
        // SAFETY: the graph is alive (borrowed); a null array asks for the number alone (Driver API).
        unsafe { cuda!(cuGraphGetNodes(self.raw, std::ptr::null_mut(), &raw mut count)) }?;
        if count == 0 {
            // The driver takes no array without room.
            return Ok(Vec::new());
        }
        let mut raw = vec![std::ptr::null_mut(); count];
        // SAFETY: `raw` has room for the `count` nodes that the call is told of.
        unsafe { cuda!(cuGraphGetNodes(self.raw, raw.as_mut_ptr(), &raw mut count)) }?;
        raw.truncate(count);
        raw.into_iter().map(describe).collect()
    }

    /// Adds a node that records `event` after `after`.
    pub(crate) fn add_record(&self, event: &RawEvent, after: &[NodeId]) -> Result<NodeId, DeviceError> {
        let after: Vec<sys::CUgraphNode> = after.iter().map(|node| node.raw()).collect();
        let mut node = std::ptr::null_mut();
        // SAFETY: graph and event are alive (borrowed); `after` holds nodes of this graph, from `frontier` of a stream
        // of its capture, and lives over the call with the length given.
        unsafe {
            cuda!(cuGraphAddEventRecordNode(
                &raw mut node,
                self.raw,
                after.as_ptr(),
                after.len(),
                event.raw()
            ))
        }?;
        Ok(NodeId(node as usize))
    }

    /// Makes it launchable; nodes keep the priority of the stream they were captured on.
    pub(crate) fn instantiate(&self) -> Result<RawExec, DeviceError> {
        let mut raw = std::ptr::null_mut();
        let flags =
            sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0 as u64;
        // SAFETY: the graph is alive (borrowed); `raw` lives over the call. Destroyed when `RawExec` is dropped.
        unsafe { cuda!(cuGraphInstantiateWithFlags(&raw mut raw, self.raw, flags)) }?;
        Ok(RawExec { raw, context: self.context.clone() })
    }
}

fn describe(node: sys::CUgraphNode) -> Result<RawNode, DeviceError> {
    // A plain number: a driver newer than the bindings may know more kinds.
    let mut kind = 0u32;
    // SAFETY: `node` is of a live graph (the caller borrows it); `kind` has the size of the enum (`repr(u32)`).
    unsafe { cuda!(cuGraphNodeGetType(node, (&raw mut kind).cast())) }?;
    let mut count = 0;
    let (none, no_data) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: as above; a null array asks for the number alone (Driver API).
    unsafe { cuda!(cuGraphNodeGetDependencies_v2(node, none, no_data, &raw mut count)) }?;
    let mut after = vec![std::ptr::null_mut(); count];
    // SAFETY: zeroed edge data is what the driver calls default edges; the type is plain data.
    let mut data = vec![unsafe { std::mem::zeroed::<sys::CUgraphEdgeData>() }; count];
    if count > 0 {
        // SAFETY: both arrays have room for the `count` entries that the call is told of.
        unsafe {
            cuda!(cuGraphNodeGetDependencies_v2(node, after.as_mut_ptr(), data.as_mut_ptr(), &raw mut count))
        }?;
    }
    use sys::CUgraphNodeType_enum as T;
    let what = match kind {
        kind if kind == T::CU_GRAPH_NODE_TYPE_KERNEL as u32 => kernel(node)?,
        kind if kind == T::CU_GRAPH_NODE_TYPE_MEMCPY as u32 => RawWork::Copy,
        kind if kind == T::CU_GRAPH_NODE_TYPE_MEMSET as u32 => RawWork::Set,
        kind if kind == T::CU_GRAPH_NODE_TYPE_HOST as u32 => RawWork::Host,
        kind if kind == T::CU_GRAPH_NODE_TYPE_EMPTY as u32 => RawWork::Empty,
        kind if kind == T::CU_GRAPH_NODE_TYPE_WAIT_EVENT as u32 => RawWork::Wait,
        kind if kind == T::CU_GRAPH_NODE_TYPE_EVENT_RECORD as u32 => RawWork::Record,
        kind if kind == T::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32 => RawWork::Memory,
        kind if kind == T::CU_GRAPH_NODE_TYPE_MEM_FREE as u32 => RawWork::Memory,
        kind => RawWork::Other(kind),
    };
    let after = after.into_iter().map(|node| NodeId(node as usize)).collect();
    Ok(RawNode { id: NodeId(node as usize), what, after })
}

fn kernel(node: sys::CUgraphNode) -> Result<RawWork, DeviceError> {
    let mut parameters = MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: `node` is a kernel node of a live graph; the local has the version's layout (v2) and lives over the call.
    unsafe { cuda!(cuGraphKernelNodeGetParams_v2(node, parameters.as_mut_ptr().cast())) }?;
    // SAFETY: the call succeeded and wrote all fields; the type is plain data.
    let parameters = unsafe { parameters.assume_init() };
    let mut name = std::ptr::null();
    if parameters.func.is_null() {
        // SAFETY: a node has a function or a kernel; `name` lives over the call.
        unsafe { cuda!(cuKernelGetName(&raw mut name, parameters.kern)) }?;
    } else {
        // SAFETY: the function is one of a loaded module, since the graph was captured with it.
        unsafe { cuda!(cuFuncGetName(&raw mut name, parameters.func)) }?;
    }
    let grid = parameters.gridDimX * parameters.gridDimY * parameters.gridDimZ;
    let block = parameters.blockDimX * parameters.blockDimY * parameters.blockDimZ;
    Ok(RawWork::Kernel { name: crate::error::owned(name), grid, block })
}

impl Drop for RawGraph {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: given by `end_capture`, destroyed here alone; executables made of it are independent of it.
            let _ = unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

impl RawExec {
    pub(crate) fn launch(&self, stream: &RawStream) -> Result<(), DeviceError> {
        // SAFETY: both are alive (borrowed) and of one context, which the device has made current; what the nodes
        // touch is owned by the same graph cell and alive. The device's lock is held ("not threadsafe").
        unsafe { cuda!(cuGraphLaunch(self.raw, stream.raw())) }
    }
}

impl Drop for RawExec {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made in `instantiate`, destroyed here alone, after its last launch ended (`crate::graveyard`).
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
