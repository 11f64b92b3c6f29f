//! Events.

use std::fmt;
use std::sync::Arc;

use sessile_hal::EventScope;

use crate::context::RawEvent;
use crate::core::Handle;

/// An event of the CUDA device. A handle: clones share it, and graphs hold clones.
#[derive(Clone)]
pub struct CudaEvent(pub(crate) Arc<EventCell>);

pub(crate) struct EventCell {
    pub(crate) handle: Arc<Handle>,
    pub(crate) id: u64,
    pub(crate) scope: EventScope,
    /// For eager records and waits, and the nodes of external events.
    pub(crate) raw: Option<RawEvent>,
    /// For the edges of a capture, so that a record in a capture does not touch what eager waits observe. Internal events
    /// only.
    pub(crate) edge: Option<RawEvent>,
}

impl Drop for EventCell {
    fn drop(&mut self) {
        self.handle.core.graveyard.bury(Box::new((self.raw.take(), self.edge.take())));
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} event {} of rank {}", self.0.scope, self.0.id, self.0.handle.core.rank)
    }
}
