//! Streams.

use std::fmt;
use std::sync::Arc;

use sessile_hal::Stream;

use crate::context::{RawEvent, RawStream};
use crate::core::Handle;

/// A stream of the CUDA device.
#[derive(Clone)]
pub struct CudaStream(pub(crate) Arc<StreamCell>);

pub(crate) struct StreamCell {
    pub(crate) handle: Arc<Handle>,
    pub(crate) id: u32,
    pub(crate) label: String,
    pub(crate) raw: Arc<RawStream>,
    /// Recorded at the end of the stream by the host when it waits for it.
    pub(crate) end: RawEvent,
}

impl Drop for StreamCell {
    fn drop(&mut self) {
        self.handle.core.graveyard.bury(Box::new(self.raw.clone()));
    }
}

impl Stream for CudaStream {
    fn label(&self) -> &str {
        &self.0.label
    }

    fn id(&self) -> u32 {
        self.0.id
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} `{}` of rank {}", self.0.id, self.0.label, self.0.handle.core.rank)
    }
}
