//! The one-shot reduce-scatter on the framework's streams, from arenas that the group's ranks have mapped.

use std::sync::Arc;
use std::time::Duration;

use sessile_hal::{Beta, DeviceError};
use sessile_plan::DType;

use super::{Guest, GuestMemory};
use crate::oneshot::{MOST_RANKS, Member, PAD, Row, Signals, enqueue};
use crate::physical::HostWords;

/// Bytes of the memory that a rank's signal words take.
pub const PAD_BYTES: u64 = PAD;

/// A block to be added up: where it lies in every rank's memory, the FP32 accumulator, its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// This rank's block in every rank's input, in group order.
    pub from: Vec<u64>,
    /// The accumulator.
    pub to: u64,
    /// Elements of the block.
    pub elements: u64,
}

/// A launch that ended without its work, since a rank did not come in time; all later ones of its group do as well. Ranks
/// are those of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GaveUp {
    /// The group.
    pub group: String,
    /// Who waited.
    pub rank: u32,
    /// For whom.
    pub missing: u32,
    /// In which reduce-scatter of the group, from 1.
    pub round: u32,
    /// How long.
    pub after: Duration,
}

impl From<GaveUp> for DeviceError {
    fn from(gave_up: GaveUp) -> DeviceError {
        let GaveUp { group, rank, missing, round, after } = gave_up;
        let what = format!("round {round} of the one-shot reduce-scatter of group `{group}`");
        DeviceError::PeerTimeout { rank, missing, what, after }
    }
}

/// A group that reduces. A handle: clones share it.
#[derive(Clone)]
pub struct GuestGroup(Arc<Cell>);

struct Cell {
    guest: Arc<Guest>,
    signals: Option<Signals>,
    name: String,
    /// World ranks of the members, in group order.
    ranks: Vec<u32>,
    member: u32,
    size: u32,
    patience: Duration,
}

impl GuestGroup {
    /// A group whose ranks have exchanged pads of [`PAD_BYTES`], zeroed, in group order (`pads`). Every rank makes it
    /// before any rank launches. `ranks`: those of the job, `share`: ranks on the GPU that has most of them.
    ///
    /// # Errors
    /// [`DeviceError::BadGroup`], [`DeviceError::LibraryMissing`], [`DeviceError::Driver`].
    pub fn new(
        guest: &Arc<Guest>,
        name: &str,
        ranks: &[u32],
        pads: Vec<GuestMemory>,
        member: u32,
        share: u32,
        patience: Duration,
    ) -> Result<GuestGroup, DeviceError> {
        let bad = |why| DeviceError::BadGroup { name: name.to_owned(), ranks: ranks.to_vec(), why };
        if pads.len() != ranks.len() || pads.len() > MOST_RANKS || pads.len() <= member as usize {
            return Err(bad("the one-shot reduce-scatter takes 1 to 16 ranks of one machine"));
        }
        guest.modules()?;
        let addresses: Vec<u64> = pads.iter().map(GuestMemory::address).collect();
        let words = HostWords::new(&guest.context, 4)?;
        let size = u32::try_from(pads.len()).map_err(|_| bad("too many ranks"))?;
        let own = addresses[member as usize];
        let signals = Some(Signals::new(&guest.pool, own, Box::new(pads), &addresses, words, share)?);
        let (name, ranks) = (name.to_owned(), ranks.to_vec());
        Ok(GuestGroup(Arc::new(Cell { guest: guest.clone(), signals, name, ranks, member, size, patience })))
    }

    /// Adds `scale` times the sum of every rank's block to this rank's accumulator, for each block, on a stream.
    ///
    /// # Safety
    /// - `stream` is a live stream of the GPU.
    /// - Each block's sources hold `elements` of the dtype in memory that this process has mapped, its accumulator as many
    ///   FP32; all of it lives until the work has ended, and a graph that is captured owns it.
    /// - Every rank of the group makes the same calls in the same order, with sources at equal offsets.
    ///
    /// # Errors
    /// [`DeviceError::PeerTimeout`] if an earlier launch gave up waiting; [`DeviceError::Driver`].
    pub unsafe fn reduce_scatter_accumulate(
        &self,
        stream: u64,
        dtype: DType,
        scale: f32,
        blocks: Vec<Block>,
    ) -> Result<(), DeviceError> {
        self.check()?;
        let cell = &*self.0;
        let _entered = cell.guest.context.enter()?;
        let stream = cell.guest.borrow(stream);
        let Some(signals) = &cell.signals else { return Ok(()) };
        let member = Member { signals, at: cell.member, size: cell.size, patience: cell.patience };
        let rows: Vec<Row> = blocks
            .into_iter()
            .map(|block| Row { from: block.from, to: block.to, elements: block.elements })
            .collect();
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe {
            enqueue(cell.guest.modules()?, &stream, &member, dtype, (scale, Beta::Accumulate), &rows, None)
        }
    }

    /// Whether a launch gave up waiting for a rank.
    ///
    /// # Errors
    /// [`DeviceError::PeerTimeout`].
    pub fn check(&self) -> Result<(), DeviceError> {
        self.gave_up().map_or(Ok(()), |gave_up| Err(gave_up.into()))
    }

    /// The first launch that gave up, if one that has ended did: at every call from then on.
    pub fn gave_up(&self) -> Option<GaveUp> {
        let cell = &*self.0;
        let (missing, round, _) = cell.signals.as_ref()?.gave_up()?;
        let rank_of = |member: u32| cell.ranks.get(member as usize).copied().unwrap_or(member);
        Some(GaveUp {
            group: cell.name.clone(),
            rank: rank_of(cell.member),
            missing: rank_of(missing),
            round,
            after: cell.patience,
        })
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if let Some(signals) = self.signals.take() {
            self.guest.yard.bury(Box::new(signals));
        }
    }
}
