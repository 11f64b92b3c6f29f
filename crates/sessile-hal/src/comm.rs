//! Communicators.

use std::fmt;

use crate::{Access, Beta, DeviceError};

/// A collective operation. `G` is the size of the group; sums are in the buffers' dtype unless said otherwise.
///
/// `send` and `recv` may not overlap, except in the in-place forms that NCCL has: the same view for an all-reduce, the
/// rank's own block for an all-gather or a ring reduce-scatter.
///
/// Kinds that read peers' memory ([`Collective::registers_send`]) need `send` inside a window registered with exactly
/// this communicator, at the same offset on every rank. Their part ends on a rank only when all peers have read its
/// `send`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collective {
    /// `send` n elements, `recv` G·n: block r of `recv` is rank r's `send`.
    AllGather,
    /// `send` G·n elements, `recv` n: the sum of all ranks' block `rank`, in ring order, rounded to the dtype at
    /// each hop.
    ReduceScatter,
    /// As [`Collective::ReduceScatter`], with both views in the group's window: the sum over ranks in FP32, rounded once
    /// to the dtype.
    SymmetricReduceScatter,
    /// `send` G·n elements (bf16 or f32), `recv` n f32, added to: `recv = recv + (scale * sum)`, each operation rounded to
    /// nearest. `sum` is over all ranks' block `rank`, in FP32, in rank order from 0. `recv` need not be registered.
    ReduceScatterAccumulate {
        /// The factor.
        scale: f32,
    },
    /// As [`Collective::ReduceScatterAccumulate`], and the old value of `recv` does not matter: `recv = scale * sum`.
    ReduceScatterStore {
        /// The factor.
        scale: f32,
    },
    /// `send` n elements, `recv` n: the sum over ranks, in rank order from 0, in FP32, rounded once.
    AllReduce,
    /// `send` G·n elements, `recv` G·n: block r of `recv` is rank r's block `rank`.
    AllToAll,
}

impl Collective {
    /// Short name, as timelines show it.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::SymmetricReduceScatter => "symmetric_reduce_scatter",
            Collective::ReduceScatterAccumulate { .. } => "reduce_scatter_accumulate",
            Collective::ReduceScatterStore { .. } => "reduce_scatter_store",
            Collective::AllReduce => "all_reduce",
            Collective::AllToAll => "all_to_all",
        }
    }

    /// Whether `send` must lie in a window of the communicator.
    pub fn registers_send(self) -> bool {
        self == Collective::SymmetricReduceScatter || self.scaled().is_some()
    }

    /// Of a kind that scales an FP32 sum of peers' memory: the factor, and what happens to the old value of `recv`.
    pub fn scaled(self) -> Option<(f32, Beta)> {
        match self {
            Collective::ReduceScatterAccumulate { scale } => Some((scale, Beta::Accumulate)),
            Collective::ReduceScatterStore { scale } => Some((scale, Beta::Overwrite)),
            _ => None,
        }
    }

    /// Whether `recv` must lie in a window of the communicator.
    pub fn registers_recv(self) -> bool {
        self == Collective::SymmetricReduceScatter
    }

    /// How `recv` is used.
    pub fn recv_access(self) -> Access {
        match self {
            Collective::ReduceScatterAccumulate { .. } => Access::ReadWrite,
            _ => Access::Write,
        }
    }
}

/// A communicator: the ranks of one process group, in order. A handle: clones share it.
pub trait Comm: Clone + Send + Sync + fmt::Debug + 'static {
    /// The group's name; unique among the communicators of a job.
    fn name(&self) -> &str;
    /// World ranks of the members, in group order.
    fn ranks(&self) -> &[u32];
    /// This rank's position in `ranks`.
    fn rank(&self) -> u32;
    /// Number of members.
    fn size(&self) -> u32 {
        u32::try_from(self.ranks().len()).expect("a group has fewer than 2^32 ranks")
    }

    /// All-gathers bytes between hosts: entry i of the result is what member i gave. Blocks the host; collective.
    ///
    /// # Errors
    /// [`DeviceError::PeerTimeout`] if a member does not come within the device's deadline,
    /// [`DeviceError::PeerLost`] if it has gone.
    fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError>;

    /// Whether all that was enqueued on it and has ended did what it should: the first error of the communicator if not,
    /// at every call, also after a wait has reported it. What a failed collective was to write is not valid.
    ///
    /// # Errors
    /// [`DeviceError::PeerTimeout`], [`DeviceError::PeerLost`], [`DeviceError::Aborted`], and what else ended it.
    fn usable(&self) -> Result<(), DeviceError>;

    /// Gives the communicator up, from any state. This rank's later calls on it fail at once; its collectives that have
    /// not ended, here and on all peers, end without effect, and the next named wait of each rank says
    /// [`DeviceError::Aborted`]. Hosts that wait in an exchange of it are told as well. Other communicators go on.
    fn abort(&self);
}
