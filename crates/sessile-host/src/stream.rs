//! Streams.

use std::fmt;

use sessile_hal::Stream;

use crate::engine::TaskId;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The last task of a queue. Only touched under the engine's lock; atomic so that handles can be shared.
#[derive(Default)]
pub(crate) struct Tail(AtomicU64);

impl Tail {
    pub(crate) fn get(&self) -> TaskId {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn set(&self, task: TaskId) {
        self.0.store(task, Ordering::SeqCst);
    }
}

/// A stream of the host device.
#[derive(Clone)]
pub struct HostStream(pub(crate) Arc<StreamCell>);

pub(crate) struct StreamCell {
    pub(crate) rank: u32,
    pub(crate) world: u64,
    pub(crate) id: u32,
    pub(crate) label: String,
    pub(crate) tail: Tail,
}

impl HostStream {
    pub(crate) fn new(world: u64, rank: u32, id: u32, label: &str) -> Self {
        HostStream(Arc::new(StreamCell { rank, world, id, label: label.to_owned(), tail: Tail::default() }))
    }
}

impl Stream for HostStream {
    fn label(&self) -> &str {
        &self.0.label
    }

    fn id(&self) -> u32 {
        self.0.id
    }
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} `{}` of rank {}", self.0.id, self.0.label, self.0.rank)
    }
}
