//! Communicators: the members of a group, and where their collectives stand.

use std::collections::HashMap;
use std::fmt;

use sessile_hal::{Comm, DeviceError};

use crate::collective::Signature;
use crate::engine::TaskId;
use crate::exchange::Rounds;
use crate::sync::{Arc, Mutex, lock};
use crate::world::Handle;

/// A process group, shared by its members.
pub(crate) struct Group {
    /// Unique over all worlds.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) ranks: Vec<u32>,
    /// Those of them that run; all, unless the world is folded.
    pub(crate) seats: Vec<u32>,
    /// Taken only while the engine's lock is held.
    pub(crate) state: Mutex<GroupState>,
}

/// Where a group stands. Vectors are by seat.
pub(crate) struct GroupState {
    /// Members that have come to make the communicator.
    pub(crate) present: Vec<bool>,
    /// Whether a member asked for other ranks under this name.
    pub(crate) refused: bool,
    /// Number of each member's next collective.
    pub(crate) next: Vec<u64>,
    /// Each member's last part; the next one runs after it.
    pub(crate) last: Vec<TaskId>,
    /// Collectives that some member has reached and that have not ended.
    pub(crate) meetings: HashMap<u64, Meeting>,
    /// From this number on every collective does nothing and fails.
    pub(crate) failed: Option<(u64, Failure)>,
    pub(crate) rounds: Rounds,
}

/// One collective: the parts that have been enqueued, and how many of them are ready.
pub(crate) struct Meeting {
    pub(crate) parts: Vec<Option<TaskId>>,
    pub(crate) ready: usize,
    /// When the last of them became so, on the virtual clock.
    pub(crate) ready_at: u64,
    /// The first arrival and what it enqueued.
    pub(crate) first: (u32, Signature),
}

/// The graph launch that a part comes from.
#[derive(Clone)]
pub(crate) struct Origin {
    /// The label of the stream it was captured on.
    pub(crate) graph: Arc<str>,
    /// From 1.
    pub(crate) launch: u64,
}

/// Why the collectives of a group fail.
#[derive(Clone)]
pub(crate) enum Failure {
    /// A member will not come any more.
    Lost(u32),
    /// Members met in different collectives.
    Mismatch(DeviceError),
    /// A member gave the communicator up.
    Aborted(u32),
}

impl Group {
    /// Of the group's ranks, those below `running` run.
    pub(crate) fn new(name: &str, ranks: &[u32], running: u32) -> Self {
        static GROUPS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let seats: Vec<u32> = ranks.iter().copied().filter(|rank| *rank < running).collect();
        let size = seats.len();
        Group {
            id: GROUPS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            name: name.to_owned(),
            ranks: ranks.to_vec(),
            seats,
            state: Mutex::new(GroupState {
                present: vec![false; size],
                refused: false,
                next: vec![0; size],
                last: vec![crate::engine::DONE; size],
                meetings: HashMap::new(),
                failed: None,
                rounds: Rounds::new(size),
            }),
        }
    }

    /// What collective `number` is called in errors.
    pub(crate) fn describe(&self, number: u64, origin: Option<&Origin>) -> String {
        let within = origin.map_or(String::new(), |Origin { graph, launch }| {
            format!(" in launch {launch} of graph `{graph}`")
        });
        format!("collective {number} of group `{}`{within}", self.name)
    }

    /// What `rank` gets to see for its part in collective `number`.
    pub(crate) fn error(
        &self,
        failure: &Failure,
        rank: u32,
        number: u64,
        origin: Option<&Origin>,
    ) -> DeviceError {
        match failure {
            Failure::Lost(peer) => {
                DeviceError::PeerLost { rank, peer: *peer, what: self.describe(number, origin) }
            }
            Failure::Mismatch(error) => error.clone(),
            Failure::Aborted(by) => DeviceError::Aborted { rank, group: self.name.clone(), by: *by },
        }
    }

    /// An error for `rank` if the communicator failed. A member that has gone matters only to who still waited for it.
    fn usable(&self, rank: u32) -> Result<(), DeviceError> {
        let state = lock(&self.state);
        let called = self.seat(rank).map_or(0, |seat| state.next[seat]);
        match &state.failed {
            Some((from, failure)) if !matches!(failure, Failure::Lost(_)) || *from < called => {
                Err(self.error(failure, rank, *from, None))
            }
            _ => Ok(()),
        }
    }

    /// An error for `rank` if the communicator was given up.
    pub(crate) fn aborted(&self, rank: u32) -> Result<(), DeviceError> {
        match &lock(&self.state).failed {
            Some((from, failure @ Failure::Aborted(_))) => Err(self.error(failure, rank, *from, None)),
            _ => Ok(()),
        }
    }

    /// The position of a rank in group order.
    pub(crate) fn member(&self, rank: u32) -> Option<usize> {
        self.ranks.iter().position(|&r| r == rank)
    }

    /// The position of a rank among those that run.
    pub(crate) fn seat(&self, rank: u32) -> Option<usize> {
        self.seats.iter().position(|&r| r == rank)
    }
}

/// A communicator of the host device.
#[derive(Clone)]
pub struct HostComm {
    pub(crate) handle: Arc<Handle>,
    pub(crate) group: Arc<Group>,
    /// This rank's position in the group.
    pub(crate) member: u32,
}

impl Comm for HostComm {
    fn name(&self) -> &str {
        &self.group.name
    }

    fn ranks(&self) -> &[u32] {
        &self.group.ranks
    }

    fn rank(&self) -> u32 {
        self.member
    }

    fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let rank = self.group.ranks[self.member as usize];
        self.group.aborted(rank)?;
        self.handle.core.exchange(&self.group, rank, payload)
    }

    fn usable(&self) -> Result<(), DeviceError> {
        self.group.usable(self.group.ranks[self.member as usize])
    }

    fn abort(&self) {
        self.handle.core.abort(&self.group, self.group.ranks[self.member as usize]);
    }
}

impl fmt::Debug for HostComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group `{}` of ranks {:?}, member {}", self.group.name, self.group.ranks, self.member)
    }
}
