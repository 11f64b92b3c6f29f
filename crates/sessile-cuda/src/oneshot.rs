//! The one-shot reduce-scatter: its signal words, its launch, and its protocol.
//!
//! Each rank has a *pad*: words that every rank of the group maps. A round is one launch on every rank. What the
//! kernel (`kernels/oneshot.cu`) does on a rank, in order:
//!
//! | step | what |
//! |---|---|
//! | W | tells every rank "my input of round e is written" |
//! | w | waits until every rank has said so |
//! | B | reads every rank's input, adds |
//! | R | tells every rank "I have read in round e" |
//! | r | waits until every rank has said so |
//! | E | round e is over; what follows on the stream may write the input |
//!
//! The tests run it in every interleaving for two and three ranks, over the wrap of the round number, with a dead peer,
//! and without step r, where it must fail.

use std::time::Duration;

use sessile_hal::{DeviceError, Memory, Transfer, View};
use sessile_plan::DType;

use crate::comm::CommCell;
use crate::context::RawStream;
use crate::kernel::{Argument, Extent, Modules};
use crate::memory::CudaMemory;
use crate::physical::{HostWords, Pool, copy_in};

/// Ranks that a group may have, and transfers of one launch; as in the kernel's source.
pub(crate) const MOST_RANKS: usize = 16;
const MOST_TRANSFERS: usize = 8;
/// Where the addresses of all pads begin in a pad, in bytes; as in the kernel's source.
const PADS: u64 = 4 * (32 + 32 + 32);
/// Bytes of a pad.
pub(crate) const PAD: u64 = PADS + 8 * MOST_RANKS as u64;
/// Blocks of a launch at most, and threads of a block.
const MOST_BLOCKS: u32 = 64;
const THREADS: u32 = 512;

/// A rank's signal words in a group.
pub(crate) struct Signals {
    /// Address of the pad.
    pad: u64,
    /// Kept: the pad, and what those of the other ranks are mapped by.
    _pads: Box<dyn Send + Sync>,
    /// 0: what failed, 1: for which rank, 2: in which round, 3: set by the host to end all waits.
    pub(crate) words: HostWords,
    /// Ranks of the group on the GPU that has most of them: their launches must fit side by side.
    share: u32,
}

impl Signals {
    /// Zeroes the pad and writes the pads' addresses, in group order; `pads` owns them. No rank may launch before all
    /// have done this.
    pub(crate) fn new(
        pool: &Pool,
        pad: u64,
        pads: Box<dyn Send + Sync>,
        addresses: &[u64],
        words: HostWords,
        share: u32,
    ) -> Result<Self, DeviceError> {
        let mut bytes = vec![0; PADS as usize];
        addresses.iter().for_each(|address| bytes.extend(address.to_le_bytes()));
        copy_in(pool, pad, &bytes)?;
        Ok(Signals { pad, _pads: pads, words, share: share.max(1) })
    }

    /// What a launch could not wait for, if one gave up: the member's position, the round, and whether it was its reading.
    pub(crate) fn gave_up(&self) -> Option<(u32, u32, bool)> {
        let code = self.words.get(0);
        (code != 0).then(|| (self.words.get(1), self.words.get(2), code == 2))
    }
}

/// Who launches: a member of a group.
pub(crate) struct Member<'a> {
    pub(crate) signals: &'a Signals,
    /// Position in the group, and its size.
    pub(crate) at: u32,
    pub(crate) size: u32,
    /// How long a launch waits for a member.
    pub(crate) patience: Duration,
}

/// A block to be added up.
pub(crate) struct Row {
    /// Where this rank's block lies in every member's input, in group order.
    pub(crate) from: Vec<u64>,
    /// The accumulator.
    pub(crate) to: u64,
    pub(crate) elements: u64,
}

/// Enqueues a checked batch. The context is current.
pub(crate) fn run(
    modules: &Modules,
    stream: &RawStream,
    comm: &CommCell,
    signals: &Signals,
    scale: f32,
    transfers: &[Transfer<CudaMemory>],
) -> Result<(), DeviceError> {
    // Shorter than the host's: the launch knows whom it waited for.
    let patience = comm.handle.core.options.deadline * 3 / 4;
    let size = u32::try_from(comm.ranks.len()).unwrap_or(u32::MAX);
    let member = Member { signals, at: comm.member, size, patience };
    for dtype in [DType::Bf16, DType::F32] {
        let rows = transfers
            .iter()
            .filter(|transfer| transfer.send.dtype() == dtype)
            .map(|transfer| {
                let elements = transfer.recv.elements();
                let from = sources(comm, &transfer.send, elements * dtype.size())?;
                Ok(Row { from, to: transfer.recv.address(), elements })
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        // SAFETY: the rows' sources are this rank's blocks in the members' windows, mapped in this process as long as
        // the window lives, and of the size given (`check`); the accumulators are checked views; the pad and the words
        // belong to the communicator. A graph owns all of it, work in flight is waited for before any of it goes. That
        // members pass equal offsets and launch in the same order is the contract's.
        unsafe { enqueue(modules, stream, &member, dtype, scale, &rows) }?;
    }
    Ok(())
}

/// Enqueues launches for rows of one dtype. The context is current.
///
/// # Safety
/// - Each row's sources hold `elements` of the dtype, mapped in this process, and its accumulator as many FP32; they and
///   the member's signals live until the work has ended.
/// - Every member of the group enqueues the same rows in the same order, with sources at equal offsets.
/// - No work that is not ordered with this one conflicts with it.
pub(crate) unsafe fn enqueue(
    modules: &Modules,
    stream: &RawStream,
    member: &Member<'_>,
    dtype: DType,
    scale: f32,
    rows: &[Row],
) -> Result<(), DeviceError> {
    let patience = u64::try_from(member.patience.as_nanos()).unwrap_or(u64::MAX);
    let signals = member.signals;
    for part in rows.chunks(MOST_TRANSFERS) {
        let mut words = vec![0; MOST_TRANSFERS * (MOST_RANKS + 2)];
        let mut bytes = 0;
        for (row, words) in part.iter().zip(words.chunks_exact_mut(MOST_RANKS + 2)) {
            bytes += row.elements * dtype.size();
            for (word, from) in words.iter_mut().zip(&row.from) {
                *word = *from;
            }
            words[MOST_RANKS] = row.to;
            words[MOST_RANKS + 1] = row.elements;
        }
        let (name, unroll) = choose(dtype, member.size);
        let arguments = [
            Argument::Words(words),
            Argument::U32(u32::try_from(part.len()).unwrap_or(u32::MAX)),
            Argument::U64(signals.pad),
            Argument::U32(member.at),
            Argument::U32(member.size),
            Argument::F32(scale),
            Argument::U64(patience),
            Argument::U64(signals.words.address),
        ];
        let grid = blocks(bytes, unroll, signals.share);
        let extent = Extent { grid: (grid, 1, 1), block: (THREADS, 1), shared: 0 };
        // SAFETY: as this function's callers promise; the pad and the words are those of the signals.
        unsafe { modules.launch(stream, name, extent, &arguments) }?;
    }
    Ok(())
}

/// Addresses of this rank's block in every member's input.
fn sources(comm: &CommCell, send: &View<CudaMemory>, block: u64) -> Result<Vec<u64>, DeviceError> {
    let members = send.memory().0.window(comm.id).unwrap_or_default();
    if members.len() != comm.ranks.len() {
        return Err(DeviceError::NotRegistered {
            kernel: "reduce_scatter_accumulate",
            label: send.memory().label().to_owned(),
            group: comm.name.clone(),
        });
    }
    let offset = send.range().start + u64::from(comm.member) * block;
    Ok(members.into_iter().map(|base| base + offset).collect())
}

/// The kernel for a group, and the packs of 16 bytes that its threads have in flight for each rank.
fn choose(dtype: DType, size: u32) -> (&'static str, u64) {
    match (dtype, size) {
        (DType::Bf16, 2) => ("one_shot_bf16_2", 4),
        (DType::Bf16, 4) => ("one_shot_bf16_4", 2),
        (DType::Bf16, 8) => ("one_shot_bf16_8", 1),
        (DType::Bf16, _) => ("one_shot_bf16_any", 1),
        (_, 2) => ("one_shot_f32_2", 4),
        (_, 4) => ("one_shot_f32_4", 2),
        (_, 8) => ("one_shot_f32_8", 1),
        (_, _) => ("one_shot_f32_any", 1),
    }
}

/// Blocks for `bytes` of this rank's blocks: enough that each thread has one turn, at most so many that the launches of
/// all ranks of a GPU fit on it side by side.
fn blocks(bytes: u64, unroll: u64, share: u32) -> u32 {
    let most = if share > 1 { (120 / share).clamp(1, MOST_BLOCKS) } else { MOST_BLOCKS };
    u32::try_from(bytes.div_ceil(u64::from(THREADS) * 16 * unroll).clamp(1, u64::from(most))).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_pad_is_laid_out_as_in_the_kernels_source() {
        let source = include_str!("../kernels/oneshot.cu");
        for line in [
            "const int MOST_RANKS = 16;",
            "const int MOST_TRANSFERS = 8;",
            "u32 unused[29];",
            "u32 written[32];",
            "u32 read[32];",
        ] {
            assert!(source.contains(line), "{line}");
        }
        assert_eq!((MOST_RANKS, MOST_TRANSFERS, PADS), (16, 8, 384));
    }

    #[test]
    fn launches_of_all_ranks_of_a_gpu_fit_side_by_side() {
        for share in 1..=16 {
            for bytes in [0, 1, 8 << 10, 1 << 20, 1 << 30] {
                let blocks = blocks(bytes, 4, share);
                assert!((1..=MOST_BLOCKS).contains(&blocks) && blocks * share <= 120.max(MOST_BLOCKS));
            }
        }
    }

    /// Where a rank is in its launch.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum At {
        /// Before W: the producer writes the input of the next round.
        Write,
        /// W towards rank n.
        TellWritten(u8),
        /// w for rank n.
        AwaitWritten(u8),
        /// B of rank n's input.
        Read(u8),
        TellRead(u8),
        AwaitRead(u8),
        End,
        /// All rounds done.
        Done,
    }

    /// The state of a small world. Words hold round numbers as the kernel's do: 32 bits that wrap.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        at: Vec<At>,
        round: Vec<u32>,
        /// Round of what is in each rank's input.
        input: Vec<u32>,
        written: Vec<Vec<u32>>,
        read: Vec<Vec<u32>>,
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Verdict {
        Fine {
            states: usize,
        },
        /// A rank read another round's input.
        WrongInput,
        /// Nobody can go on, and somebody is not done.
        Stuck,
    }

    struct Protocol {
        ranks: u8,
        rounds: u32,
        first: u32,
        exit: bool,
        /// A rank that never starts.
        dead: Option<u8>,
    }

    impl Protocol {
        /// Explores every interleaving of the ranks' steps.
        fn explore(&self) -> Verdict {
            let n = self.ranks as usize;
            let start = World {
                at: vec![At::Write; n],
                round: vec![self.first; n],
                input: vec![self.first; n],
                written: vec![vec![self.first; n]; n],
                read: vec![vec![self.first; n]; n],
            };
            let (mut seen, mut open) = (HashSet::from([start.clone()]), vec![start]);
            while let Some(world) = open.pop() {
                let mut moved = false;
                for rank in 0..self.ranks {
                    match self.step(&world, rank) {
                        Err(verdict) => return verdict,
                        Ok(None) => {}
                        Ok(Some(next)) => {
                            moved = true;
                            if seen.insert(next.clone()) {
                                open.push(next);
                            }
                        }
                    }
                }
                if !moved && world.at.iter().any(|at| *at != At::Done) {
                    return Verdict::Stuck;
                }
            }
            Verdict::Fine { states: seen.len() }
        }

        /// One step of a rank; `None` if it waits.
        fn step(&self, world: &World, rank: u8) -> Result<Option<World>, Verdict> {
            if self.dead == Some(rank) {
                return Ok(None);
            }
            let (me, mut next) = (rank as usize, world.clone());
            let round = world.round[me].wrapping_add(1);
            let after =
                |n: u8, again: fn(u8) -> At, then: At| if n + 1 < self.ranks { again(n + 1) } else { then };
            let reached = |word: u32| word.wrapping_sub(round).cast_signed() >= 0;
            next.at[me] = match world.at[me] {
                At::Write => {
                    next.input[me] = round;
                    At::TellWritten(0)
                }
                At::TellWritten(n) => {
                    next.written[n as usize][me] = round;
                    after(n, At::TellWritten, At::AwaitWritten(0))
                }
                At::AwaitWritten(n) if reached(world.written[me][n as usize]) => {
                    after(n, At::AwaitWritten, At::Read(0))
                }
                At::Read(n) => {
                    if world.input[n as usize] != round {
                        return Err(Verdict::WrongInput);
                    }
                    after(n, At::Read, At::TellRead(0))
                }
                At::TellRead(n) => {
                    next.read[n as usize][me] = round;
                    after(n, At::TellRead, if self.exit { At::AwaitRead(0) } else { At::End })
                }
                At::AwaitRead(n) if reached(world.read[me][n as usize]) => after(n, At::AwaitRead, At::End),
                At::End => {
                    next.round[me] = round;
                    let last = self.first.wrapping_add(self.rounds);
                    if round == last { At::Done } else { At::Write }
                }
                At::AwaitWritten(_) | At::AwaitRead(_) | At::Done => return Ok(None),
            };
            Ok(Some(next))
        }
    }

    #[test]
    fn every_interleaving_reads_the_right_round_also_over_the_wrap() {
        for (ranks, rounds) in [(2, 4), (3, 2)] {
            for first in [0, u32::MAX - 1, i32::MAX.cast_unsigned() - 1] {
                let protocol = Protocol { ranks, rounds, first, exit: true, dead: None };
                let verdict = protocol.explore();
                assert!(
                    matches!(verdict, Verdict::Fine { states } if states > 100),
                    "{ranks} {first}: {verdict:?}"
                );
            }
        }
    }

    #[test]
    fn without_the_exit_wait_a_slow_peer_reads_what_was_written_for_the_next_round() {
        for ranks in [2, 3] {
            let protocol = Protocol { ranks, rounds: 2, first: 0, exit: false, dead: None };
            assert_eq!(protocol.explore(), Verdict::WrongInput);
        }
    }

    #[test]
    fn a_dead_peer_leaves_the_others_waiting_so_the_kernel_needs_its_patience() {
        for ranks in [2, 3] {
            let protocol = Protocol { ranks, rounds: 1, first: 0, exit: true, dead: Some(ranks - 1) };
            assert_eq!(protocol.explore(), Verdict::Stuck);
        }
    }
}
