//! Communicators.

use std::fmt;

use crate::DeviceError;

/// A collective operation. `G` is the size of the group; sums are in the buffers' dtype.
///
/// `send` and `recv` may not overlap, except in the in-place forms that NCCL has: the same view for an all-reduce, the
/// rank's own block for an all-gather or a reduce-scatter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// `send` n elements, `recv` G·n: block r of `recv` is rank r's `send`.
    AllGather,
    /// `send` G·n elements, `recv` n: the sum of all ranks' block `rank`, in ring order, rounded to the dtype at
    /// each hop.
    ReduceScatter,
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
            Collective::AllReduce => "all_reduce",
            Collective::AllToAll => "all_to_all",
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
}
