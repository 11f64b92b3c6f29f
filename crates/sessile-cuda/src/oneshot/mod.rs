//! The one-shot reduce-scatter: its signal words, its launches, and its protocols.
//!
//! Each rank has a *pad*: words and two mailboxes that every rank of the group maps. A round is one reduce-scatter on
//! every rank. Which way a round goes is `choice`'s; the kernels are in `kernels/oneshot`. By packets, a rank in order:
//!
//! | step | what |
//! |---|---|
//! | S | sends every rank its block of my input, in packets, into the empty mailbox of e: even and odd take turns |
//! | s | waits for every rank's packets, takes them, and leaves the mailbox empty; adds or stores the sum |
//! | E | round e is over; what follows on the stream may write the input |
//!
//! By reading (pull, bulk, copy):
//!
//! | step | what |
//! |---|---|
//! | W | tells every rank "my input of round e is written" |
//! | w | every block waits until every rank has said so |
//! | B | reads every rank's input, adds or stores the sum |
//! | C | counts the block; the one that counts last moves the round's number on, and goes on with R |
//! | R | tells every rank "I have read in round e" |
//! | r | waits until every rank has said so |
//! | E | as above |
//!
//! `protocol` runs them in every interleaving for two and three ranks, mixed, over the wrap of the round number, with a
//! dead peer, and without step r, without turns or with mailboxes left full, where they must fail.

mod choice;
#[cfg(test)]
mod protocol;
#[cfg(test)]
mod together;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sessile_hal::{Beta, Collective, DeviceError, Memory, Transfer, View};
use sessile_plan::DType;

pub use choice::Way;
use choice::{Limits, Round, choose};

use crate::comm::CommCell;
use crate::context::{As, Context, RawEvent, RawStream};
use crate::error::cuda;
use crate::kernel::{Argument, Extent, Modules};
use crate::memory::CudaMemory;
use crate::physical::{HostWords, Pool, copy_in};

/// Ranks that a group may have, and transfers of one launch; as in the kernels' source.
pub(crate) const MOST_RANKS: usize = 16;
const MOST_TRANSFERS: usize = 8;
/// Bytes of a pad's words, as in the kernels' source: the round and what is beside it, written, read.
const WORDS: u64 = 4 * (32 + 32 + 32);
/// Bytes of a pad: the words, and two mailboxes of what is sent by packets at most.
pub(crate) const PAD: u64 = 10 << 20;
/// Bytes of each of a pad's two mailboxes.
const BOX: u64 = (PAD - WORDS) / 2 / 128 * 128;
/// Bytes of a rank's block that the copy engines bring at once.
const CHUNK: u64 = 32 << 20;

/// How the one-shot reduce-scatter uses the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OneShotOptions {
    /// Multiprocessors whose worth of blocks a launch may take. None: as many as are useful. By packets these are up to four
    /// small blocks for each, which the GPU may spread over more. 0: the copy engines bring what is too large for packets,
    /// and 16 multiprocessors sum it afterwards. All members of a group must have the same here, or it is not made.
    pub budget: Option<u32>,
    /// This way for all that is too large for packets, if it can go it, and packets if it is `Push` and they fit: to
    /// measure. All ranks must have the same here.
    pub way: Option<Way>,
    /// Blocks of a launch, within what the GPU can hold: to measure.
    pub blocks: Option<u32>,
    /// Packets and bulk copies begin with rank 0 on every rank, where each would begin with the one after it: to measure.
    pub in_order: bool,
    /// Number of the round before the first: to test the wrap. All ranks must have the same here.
    pub first_round: u32,
    /// Whether a launch ends before peers have read: to show that tests notice.
    pub omit_exit: bool,
}

/// A rank's signal words in a group.
pub(crate) struct Signals {
    /// Address of the pad.
    pad: u64,
    /// Addresses of all ranks' pads, in group order.
    addresses: Vec<u64>,
    /// Kept: the pad, and what those of the other ranks are mapped by.
    _pads: Box<dyn Send + Sync>,
    /// 0: what failed, 1: for which rank, 2: in which round, 3: set by the host to end all waits.
    pub(crate) words: HostWords,
    /// Ranks of the group on the GPU that has most of them: their launches must fit side by side.
    share: u32,
    options: Mutex<OneShotOptions>,
    /// Made when they are needed first: streams of a GPU share its queues, and each more makes it likelier that a launch
    /// which waits stands before a peer's.
    copies: Mutex<Option<Arc<Copies>>>,
    context: Arc<Context>,
}

/// What copies are enqueued with: beside the stream, so that a sum runs while the next copy does.
struct Copies {
    stream: RawStream,
    begun: RawEvent,
    brought: RawEvent,
    /// By half of the staging memory.
    summed: [RawEvent; 2],
}

impl Copies {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let event = || RawEvent::new(context);
        Ok(Copies {
            stream: RawStream::new(context, crate::context::Priority::High)?,
            begun: event()?,
            brought: event()?,
            summed: [event()?, event()?],
        })
    }
}

impl Signals {
    /// Makes the pad ready; `pads` owns it and the mappings of the others, whose addresses are given in group order. No
    /// rank may launch before all have done this.
    pub(crate) fn new(
        pool: &Pool,
        pad: u64,
        pads: Box<dyn Send + Sync>,
        addresses: &[u64],
        words: HostWords,
        share: u32,
    ) -> Result<Self, DeviceError> {
        let signals = Signals {
            pad,
            addresses: addresses.to_vec(),
            _pads: pads,
            words,
            share: share.max(1),
            options: Mutex::default(),
            copies: Mutex::default(),
            context: pool.context().clone(),
        };
        signals.reset(pool)?;
        Ok(signals)
    }

    /// The same with other options; as early.
    pub(crate) fn with(self, pool: &Pool, options: &OneShotOptions) -> Result<Self, DeviceError> {
        self.set(options.clone());
        if options.first_round != 0 {
            self.reset(pool)?;
        }
        Ok(self)
    }

    /// Other options from now on; the round's number goes on.
    pub(crate) fn set(&self, options: OneShotOptions) {
        *self.options.lock().unwrap_or_else(PoisonError::into_inner) = options;
    }

    fn copies(&self) -> Result<Arc<Copies>, DeviceError> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let made = match &*copies {
            Some(made) => made.clone(),
            None => Arc::new(Copies::new(&self.context)?),
        };
        *copies = Some(made.clone());
        Ok(made)
    }

    fn options(&self) -> OneShotOptions {
        self.options.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Words as after round `first_round`, and empty mailboxes.
    fn reset(&self, pool: &Pool) -> Result<(), DeviceError> {
        let first = self.options().first_round;
        let mut bytes = vec![0; 128];
        bytes[..4].copy_from_slice(&first.to_le_bytes());
        (0..64).for_each(|_| bytes.extend(first.to_le_bytes()));
        bytes.resize((WORDS + 2 * BOX) as usize, 0xff);
        copy_in(pool, self.pad, &bytes)
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
    kind: Collective,
    transfers: &[Transfer<CudaMemory>],
    scratch: &mut dyn FnMut(u64) -> Result<u64, DeviceError>,
) -> Result<(), DeviceError> {
    let scaled = kind.scaled().ok_or_else(|| comm.unreachable(kind))?;
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
                let from = sources(comm, kind, &transfer.send, elements * dtype.size())?;
                Ok(Row { from, to: transfer.recv.address(), elements })
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        // SAFETY: the rows' sources are this rank's blocks in the members' windows, mapped in this process as long as
        // the window lives, and of the size given (`check`); the accumulators are checked views; the pads and the words
        // belong to the communicator. A graph owns all of it, work in flight is waited for before any of it goes. That
        // members pass equal offsets and launch in the same order is the contract's.
        unsafe { enqueue(modules, stream, &member, dtype, scaled, &rows, Some(scratch)) }?;
    }
    Ok(())
}

/// Enqueues launches for rows of one dtype. The context is current. With `scratch` for memory that lives as long as the
/// work, the copy engines can be used.
///
/// # Safety
/// - Each row's sources hold `elements` of the dtype, mapped in this process, and its accumulator as many FP32; this
///   rank's own input holds such a block for every rank, in group order without gaps; all of it and the member's signals
///   live until the work has ended.
/// - Every member of the group enqueues the same rows in the same order, with sources at equal offsets.
/// - No work that is not ordered with this one conflicts with it.
pub(crate) unsafe fn enqueue(
    modules: &Modules,
    stream: &RawStream,
    member: &Member<'_>,
    dtype: DType,
    scaled: (f32, Beta),
    rows: &[Row],
    mut scratch: Option<&mut dyn FnMut(u64) -> Result<u64, DeviceError>>,
) -> Result<(), DeviceError> {
    let signals = member.signals;
    let limits = Limits {
        bulk: modules.has("one_shot_bulk_bf16_2"),
        copies: scratch.is_some(),
        mailbox: BOX,
        share: signals.share,
        multiprocessors: signals.context.gpu.multiprocessors,
    };
    let rows: Vec<&Row> = rows.iter().filter(|row| row.elements > 0).collect();
    for part in rows.chunks(choice::rows_at_once(signals.share)) {
        let round = Round::new(dtype, member.size, part);
        let choice = choose(&round, &limits, &signals.options());
        let launch = Launch { modules, member, dtype, scaled };
        match (choice.way, &mut scratch) {
            (Way::Copy, Some(scratch)) => {
                // SAFETY: as this function's callers promise.
                unsafe { launch.copied(stream, part, choice.blocks, &mut **scratch) }?;
            }
            _ => {
                // SAFETY: as this function's callers promise.
                unsafe { launch.fused(stream, part, &choice) }?;
            }
        }
    }
    Ok(())
}

/// A transfer as a kernel is given it.
struct Part {
    from: Vec<u64>,
    to: u64,
    elements: u64,
    /// The first of the launch's blocks that do it, and how many do.
    blocks: (u32, u32),
}

/// What the launches of a round have in common.
struct Launch<'a> {
    modules: &'a Modules,
    member: &'a Member<'a>,
    dtype: DType,
    /// The factor, and what happens to the old value.
    scaled: (f32, Beta),
}

impl Launch<'_> {
    /// One launch for all rows.
    ///
    /// # Safety
    /// As for [`enqueue`].
    unsafe fn fused(
        &self,
        stream: &RawStream,
        rows: &[&Row],
        choice: &choice::Choice,
    ) -> Result<(), DeviceError> {
        let (name, extent, words) = self.whole(rows, choice);
        // SAFETY: as this function's callers promise; the pads and the words are those of the signals.
        unsafe { self.modules.launch(stream, name, extent, &[Argument::Words(words)]) }
    }

    /// The kernel, extent and argument of one launch for all rows.
    fn whole(&self, rows: &[&Row], choice: &choice::Choice) -> (&'static str, Extent, Vec<u64>) {
        let way = choice.way;
        let sources = |row: &Row| -> Vec<u64> {
            if way != Way::Push {
                return row.from.clone();
            }
            // My own input: the blocks of all ranks lie side by side.
            let (bytes, at) = (row.elements * self.dtype.size(), u64::from(self.member.at));
            let first = row.from[self.member.at as usize] - at * bytes;
            (0..u64::from(self.member.size)).map(|rank| first + rank * bytes).collect()
        };
        let weights: Vec<u64> = rows.iter().map(|row| row.elements).collect();
        let transfers: Vec<_> = rows
            .iter()
            .zip(choice::spread(choice.blocks, &weights))
            .map(|(row, blocks)| Part { from: sources(row), to: row.to, elements: row.elements, blocks })
            .collect();
        let grid = transfers.last().map_or(1, |part| part.blocks.0 + part.blocks.1);
        let name = choice::kernel(way, self.dtype, self.member.size);
        let ranks = choice::specialized(self.member.size);
        let words = self.batch(ranks, &transfers, choice.stages);
        let extent = Extent { grid: (grid, 1, 1), block: (choice.threads, 1), shared: choice.shared };
        (name, extent, words)
    }

    /// Entry, copies, sums and exit. The copies run beside the stream, and so does the exit.
    ///
    /// # Safety
    /// As for [`enqueue`]; the scratch lives as long as the work.
    unsafe fn copied(
        &self,
        stream: &RawStream,
        rows: &[&Row],
        blocks: u32,
        scratch: &mut dyn FnMut(u64) -> Result<u64, DeviceError>,
    ) -> Result<(), DeviceError> {
        let Launch { modules, member, dtype, .. } = self;
        let (copies, size) = (member.signals.copies()?, dtype.size());
        let longest = rows.iter().map(|row| row.elements * size).max().unwrap_or(0).min(CHUNK);
        let room = longest.next_multiple_of(256);
        let staging = scratch(2 * room * u64::from(member.size - 1))?;
        let signal = |stream: &RawStream, name| {
            let words = self.batch(MOST_RANKS, &[], 0);
            let extent = Extent { grid: (1, 1, 1), block: (32, 1), shared: 0 };
            // SAFETY: the pads and the words are those of the signals, which the caller keeps.
            unsafe { modules.launch(stream, name, extent, &[Argument::Words(words)]) }
        };
        signal(stream, "one_shot_enter")?;
        stream.record(&copies.begun, As::Plain)?;
        copies.stream.wait(&copies.begun, As::Plain)?;
        let chunks = rows.iter().flat_map(|row| {
            let step = CHUNK / size;
            (0..row.elements).step_by(step as usize).map(move |at| (row, at, step.min(row.elements - at)))
        });
        for (number, (row, at, n)) in chunks.enumerate() {
            let half = number % 2;
            if number >= 2 {
                copies.stream.wait(&copies.summed[half], As::Plain)?;
            }
            let mut to = staging + half as u64 * room * u64::from(member.size - 1);
            let mut from = Vec::new();
            for (rank, source) in (0u32..).zip(&row.from) {
                let source = source + at * size;
                if rank == member.at {
                    from.push(source);
                    continue;
                }
                let bytes = (n * size) as usize;
                // SAFETY: `bytes` of the rank's block, mapped in this process (the caller), and of the staging memory,
                // which has room for that many of every other rank and is not read any more (the wait above).
                unsafe { cuda!(cuMemcpyDtoDAsync_v2(to, source, bytes, copies.stream.raw())) }?;
                from.push(to);
                to += room;
            }
            copies.stream.record(&copies.brought, As::Plain)?;
            stream.wait(&copies.brought, As::Plain)?;
            let transfer = Part { from, to: row.to + 4 * at, elements: n, blocks: (0, blocks) };
            let words = self.batch(choice::specialized(member.size), &[transfer], 0);
            let name = choice::sum(*dtype, member.size);
            let extent = Extent { grid: (blocks, 1, 1), block: (choice::SUM_THREADS, 1), shared: 0 };
            // SAFETY: as above; the sources are the staging memory, whose copies were waited for, and this rank's block.
            unsafe { modules.launch(stream, name, extent, &[Argument::Words(words)]) }?;
            stream.record(&copies.summed[half], As::Plain)?;
        }
        signal(&copies.stream, "one_shot_leave")?;
        copies.stream.record(&copies.brought, As::Plain)?;
        stream.wait(&copies.brought, As::Plain)
    }

    /// The kernels' argument, a structure for `ranks` ranks, in words of 8 bytes.
    fn batch(&self, ranks: usize, transfers: &[Part], stages: u32) -> Vec<u64> {
        let Member { signals, at, size, patience } = self.member;
        let two = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = Vec::with_capacity(9 * ranks + 31);
        for Part { from, to, elements, blocks: (first, blocks) } in transfers {
            words.extend((0..ranks).map(|rank| from.get(rank).copied().unwrap_or(0)));
            words.extend([*to, *elements, two(*first, *blocks)]);
        }
        words.resize(MOST_TRANSFERS * (ranks + 3), 0);
        words.extend((0..ranks).map(|rank| signals.addresses.get(rank).copied().unwrap_or(0)));
        let count = u32::try_from(transfers.len()).unwrap_or(u32::MAX);
        let (scale, beta) = self.scaled;
        words.extend([two(count, *at), two(*size, scale.to_bits())]);
        words.push(u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX));
        words.extend([signals.words.address, BOX]);
        words.push(two(u32::from(signals.options().omit_exit), stages));
        words.push(two(u32::from(beta == Beta::Overwrite), u32::from(signals.options().in_order)));
        words
    }
}

/// Addresses of this rank's block in every member's input.
fn sources(
    comm: &CommCell,
    kind: Collective,
    send: &View<CudaMemory>,
    block: u64,
) -> Result<Vec<u64>, DeviceError> {
    let members = send.memory().0.window(comm.id).unwrap_or_default();
    if members.len() != comm.ranks.len() {
        return Err(DeviceError::NotRegistered {
            kernel: kind.name(),
            label: send.memory().label().to_owned(),
            group: comm.name.clone(),
        });
    }
    let offset = send.range().start + u64::from(comm.member) * block;
    Ok(members.into_iter().map(|base| base + offset).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pad_is_laid_out_as_in_the_kernels_source() {
        let source = include_str!("../../kernels/oneshot/rounds.cuh");
        for line in [
            "const int MOST_RANKS = 16;",
            "const int MOST_TRANSFERS = 8;",
            "u32 unused[29];",
            "u32 written[32];",
            "u32 read[32];",
        ] {
            assert!(source.contains(line), "{line}");
        }
        assert_eq!((MOST_RANKS, MOST_TRANSFERS, WORDS), (16, 8, 384));
        assert!(WORDS + 2 * BOX <= PAD && BOX.is_multiple_of(128) && BOX >= choice::PUSH_MOST);
    }
}
