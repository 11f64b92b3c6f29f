//! Events.

use std::fmt;

use sessile_hal::EventScope;

use crate::engine::TaskId;
use crate::stream::Tail;
use crate::sync::Arc;

/// An event of the host device: names the task that its latest record stands for.
#[derive(Clone)]
pub struct HostEvent(pub(crate) Arc<EventCell>);

pub(crate) struct EventCell {
    pub(crate) rank: u32,
    pub(crate) world: u64,
    pub(crate) id: u64,
    pub(crate) scope: EventScope,
    latest: Tail,
}

impl HostEvent {
    pub(crate) fn new(world: u64, rank: u32, id: u64, scope: EventScope) -> Self {
        HostEvent(Arc::new(EventCell { rank, world, id, scope, latest: Tail::default() }))
    }

    /// The task of the latest record; [`crate::engine::DONE`] if there was none.
    pub(crate) fn latest(&self) -> TaskId {
        self.0.latest.get()
    }

    pub(crate) fn set_latest(&self, task: TaskId) {
        self.0.latest.set(task);
    }
}

impl fmt::Debug for HostEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} event {} of rank {}", self.0.scope, self.0.id, self.0.rank)
    }
}
