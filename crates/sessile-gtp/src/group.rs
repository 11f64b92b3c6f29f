//! A group that weights are sharded over: its communicator's name, streams, kind and scale.

use sessile_hal::Device;

use crate::ReduceScatter;

/// Index of a group in its [`Gtp`](crate::Gtp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub(crate) usize);

impl GroupId {
    /// Its place in [`Gtp::groups`](crate::Gtp::groups).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A group. Nothing of it is shared with another one, even over the same ranks: communicator, streams, domain, scale.
#[derive(Debug)]
pub struct Group<D: Device> {
    /// Its name, which its domain carries.
    pub name: String,
    /// Number of its ranks.
    pub size: u32,
    /// How its gradients are reduced.
    pub kind: ReduceScatter,
    /// All-gathers run here.
    pub(crate) gather: D::Stream,
    /// Reduce-scatters do.
    pub(crate) reduce: D::Stream,
    /// Whether the streams were used since the current runner began.
    pub(crate) gather_used: bool,
    pub(crate) reduce_used: bool,
}

impl<D: Device> Group<D> {
    /// The factor on its sums: the mean over exactly its ranks.
    pub fn scale(&self) -> f32 {
        1.0 / self.size as f32
    }
}
