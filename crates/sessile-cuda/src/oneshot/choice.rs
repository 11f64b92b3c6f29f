//! Which way a reduce-scatter goes, and on how many blocks.
//!
//! A function of dtype, group size, sizes, alignment, budget and what the machine can do, total and the same at every call:
//!
//! | the first that holds | way |
//! |---|---|
//! | the packets fit the mailbox, and a rank sends at most [`PUSH_MOST`] bytes and [`PUSH_EACH`] for each multiprocessor of the budget | push |
//! | the budget is 0 multiprocessors, and no two ranks share a GPU (streams of one GPU may share a queue, in which a launch that waits holds back a peer's copies) | copy |
//! | the GPU has bulk copies, and all is aligned to 16 bytes | bulk, on [`BULK_BLOCKS`] multiprocessors at most |
//! | anything else | pull; with shifted loads where sources and accumulator are not aligned alike |
//!
//! Only the first line decides who waits for what, and it sees nothing but sizes and the budget, which are the same on all
//! ranks: a group is not made of members with different budgets. The other ways have one protocol, so that alignment may
//! differ.

use sessile_plan::DType;

use super::{OneShotOptions, Row};

/// Bytes that a rank may send to the others by packets, and for each multiprocessor that may send: above, reading is faster
/// (docs/PERFORMANCE.md).
pub(super) const PUSH_MOST: u64 = 4 << 20;
pub(super) const PUSH_EACH: u64 = 40 << 10;
/// Blocks with which bulk copies keep the links busy, a multiprocessor each (docs/DESIGN.md).
pub(super) const BULK_BLOCKS: u32 = 32;
/// Multiprocessors that are used at most.
const MULTIPROCESSORS: u32 = 128;
/// Multiprocessors that are counted on where ranks, whose GPUs may differ, must decide alike.
const FEWEST: u32 = 64;
/// Threads of a block that send, and as many receive, as in the kernels' source; threads of a block that sums after copies.
const SENDERS: u64 = 128;
pub(super) const SUM_THREADS: u32 = 512;
/// Bytes of a packet, all of them elements.
pub(super) const PACKET: u64 = 16;
/// Shared memory of a block.
const SHARED: u64 = 224 << 10;

/// A way to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Packets into the others' mailboxes.
    Push,
    /// Loads from the others' memory.
    Pull,
    /// The same where sources lie off 16 bytes.
    Shift,
    /// Bulk copies into shared memory.
    Bulk,
    /// Copy engines, then a sum.
    Copy,
}

impl Way {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Way::Push => "push",
            Way::Pull => "pull",
            Way::Shift => "shift",
            Way::Bulk => "bulk",
            Way::Copy => "copy",
        }
    }
}

/// What is to be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) dtype: DType,
    pub(super) size: u32,
    /// Elements of a rank's blocks.
    pub(super) elements: u64,
    /// Packets of them.
    pub(super) packets: u64,
    /// Whether sources are aligned to 16 bytes where the accumulator is.
    pub(super) even: bool,
    /// Whether all are.
    pub(super) aligned: bool,
}

impl Round {
    pub(super) fn new(dtype: DType, size: u32, rows: &[&Row]) -> Self {
        let mut round = Round { dtype, size, elements: 0, packets: 0, even: true, aligned: true };
        for row in rows {
            round.elements += row.elements;
            round.packets += row.elements.div_ceil(PACKET / dtype.size());
            let head = row.to.next_multiple_of(16) - row.to;
            let shift = head / 4 * dtype.size();
            round.even &= row.from.iter().all(|from| (from + shift).is_multiple_of(16));
            round.aligned &= head == 0;
        }
        round.aligned &= round.even;
        round
    }

    fn bytes(&self) -> u64 {
        self.elements * self.dtype.size()
    }
}

/// What can be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) bulk: bool,
    pub(super) copies: bool,
    /// Bytes of a mailbox.
    pub(super) mailbox: u64,
    /// Ranks on one GPU.
    pub(super) share: u32,
    /// What this rank's GPU has.
    pub(super) multiprocessors: u32,
}

/// How a round runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) way: Way,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Bytes of shared memory, and stages that it holds.
    pub(super) shared: u32,
    pub(super) stages: u32,
}

/// Packs of 16 bytes of each rank in a tile of bulk copies, as in the kernels' source.
fn packs(size: u32) -> u64 {
    match specialized(size) {
        2 | 4 => 512,
        8 => 256,
        _ => 128,
    }
}

pub(super) fn choose(round: &Round, limits: &Limits, options: &OneShotOptions) -> Choice {
    let (size, bytes) = (round.size, round.bytes());
    let others = u64::from(size.saturating_sub(1));
    let fits = round.packets * PACKET * others <= limits.mailbox;
    let can_bulk = limits.bulk && round.aligned;
    let read = if round.even { Way::Pull } else { Way::Shift };
    let budget = options.budget.unwrap_or(MULTIPROCESSORS);
    // With none, as many sum as with this.
    let active = if budget == 0 { 16 } else { budget };
    let small = fits && bytes * others <= PUSH_MOST.min(PUSH_EACH * u64::from(active));
    let way = match options.way {
        Some(Way::Push) if fits => Way::Push,
        Some(Way::Bulk) if can_bulk => Way::Bulk,
        Some(Way::Copy) if limits.copies => Way::Copy,
        Some(_) => read,
        None if small => Way::Push,
        None if budget == 0 && limits.copies && limits.share <= 1 => Way::Copy,
        None if can_bulk => Way::Bulk,
        None => read,
    };
    // A block that waits for peers must not keep theirs from running: all of a GPU's fit on it at once.
    let there = MULTIPROCESSORS.min(limits.multiprocessors);
    let most = (active.min(there) / limits.share.max(1)).max(1);
    let each = match (way, specialized(size)) {
        (Way::Push, 2) => 4,
        (Way::Push, 4) => 3,
        (Way::Push, _) => 2,
        // One is enough; two fit.
        (Way::Pull | Way::Shift, 2) if options.blocks.is_some() => 2,
        _ => 1,
    };
    let each = if limits.share > 1 { 1 } else { each };
    // Of each rank, and of the accumulator.
    let stage = 16 * packs(size) * (u64::from(size) + 4 / round.dtype.size());
    let (work, threads, stages) = match way {
        Way::Push => (round.packets.div_ceil(SENDERS), 288, 0),
        Way::Pull | Way::Shift => ((bytes / 16).div_ceil(256), 288, 0),
        Way::Bulk => ((bytes / 16).div_ceil(packs(size)), packs(size) + 32, (SHARED / stage).min(16)),
        Way::Copy => ((bytes / 16).div_ceil(u64::from(SUM_THREADS)), u64::from(SUM_THREADS), 0),
    };
    let enough = if way == Way::Bulk { BULK_BLOCKS } else { u32::MAX };
    let most = options.blocks.unwrap_or(enough).clamp(1, most * each);
    let narrow = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
    Choice {
        way,
        blocks: narrow(work.clamp(1, u64::from(most))),
        threads: narrow(threads),
        shared: narrow(stages * stage),
        stages: narrow(stages),
    }
}

/// Rows of a launch, the same on all ranks: each takes a block at least, and the launches of ranks that share a GPU must
/// fit on it side by side.
pub(super) fn rows_at_once(share: u32) -> usize {
    super::MOST_TRANSFERS.min((FEWEST / share.max(1)) as usize).max(1)
}

/// Gives each row blocks by its weight, at least one each: the first one and how many. There may be more than `blocks` in
/// all only if there are more rows.
pub(super) fn spread(blocks: u32, weights: &[u64]) -> Vec<(u32, u32)> {
    let spare = u64::from(blocks.saturating_sub(u32::try_from(weights.len()).unwrap_or(u32::MAX)));
    let total = weights.iter().sum::<u64>().max(1);
    let mut first = 0;
    weights
        .iter()
        .map(|weight| {
            let own =
                1 + u32::try_from(u128::from(*weight) * u128::from(spare) / u128::from(total)).unwrap_or(0);
            let at = first;
            first += own;
            (at, own)
        })
        .collect()
}

/// Ranks of the structure that the kernels for a group size take.
pub(super) fn specialized(size: u32) -> usize {
    match size {
        2 | 4 | 8 => size as usize,
        _ => super::MOST_RANKS,
    }
}

macro_rules! kernels {
    ($way:literal, $dtype:expr, $size:expr) => {
        match ($dtype, $size) {
            (DType::Bf16, 2) => concat!("one_shot_", $way, "_bf16_2"),
            (DType::Bf16, 4) => concat!("one_shot_", $way, "_bf16_4"),
            (DType::Bf16, 8) => concat!("one_shot_", $way, "_bf16_8"),
            (DType::Bf16, _) => concat!("one_shot_", $way, "_bf16_any"),
            (_, 2) => concat!("one_shot_", $way, "_f32_2"),
            (_, 4) => concat!("one_shot_", $way, "_f32_4"),
            (_, 8) => concat!("one_shot_", $way, "_f32_8"),
            (_, _) => concat!("one_shot_", $way, "_f32_any"),
        }
    };
}

/// The kernel that goes a way.
pub(super) fn kernel(way: Way, dtype: DType, size: u32) -> &'static str {
    match way {
        Way::Push => kernels!("push", dtype, size),
        Way::Pull => kernels!("pull", dtype, size),
        Way::Shift => kernels!("shift", dtype, size),
        Way::Bulk => kernels!("bulk", dtype, size),
        Way::Copy => sum(dtype, size),
    }
}

/// The kernel that sums what the copy engines brought.
pub(super) fn sum(dtype: DType, size: u32) -> &'static str {
    kernels!("sum", dtype, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { bulk: true, copies: true, mailbox: super::super::BOX, share: 1, multiprocessors: 132 };

    fn round(size: u32, elements: u64, off: u64) -> Round {
        let from = (0..u64::from(size)).map(|rank| ((rank + 1) << 40) + off).collect();
        Round::new(DType::Bf16, size, &[&Row { from, to: 1 << 50, elements }])
    }

    fn chosen(size: u32, elements: u64, off: u64, options: &OneShotOptions) -> Choice {
        choose(&round(size, elements, off), &LIMITS, options)
    }

    #[test]
    fn small_goes_by_packets_and_the_rest_as_budget_alignment_and_gpu_say() {
        let with = |budget| OneShotOptions { budget, ..OneShotOptions::default() };
        let ways = |limits: &Limits, off, budget| {
            [1, 1 << 23, 1 << 25].map(|n| choose(&round(2, n / 2, off), limits, &with(budget)).way)
        };
        let then = |way| [Way::Push, way, way];
        for (budget, most) in
            [(None, 4 << 20), (Some(200), 4 << 20), (Some(16), 640 << 10), (Some(0), 640 << 10)]
        {
            let way = |bytes: u64| choose(&round(2, bytes / 2, 0), &LIMITS, &with(budget)).way;
            assert_eq!([2, most, most + 2].map(|n| way(n) == Way::Push), [true, true, false], "{budget:?}");
        }
        for budget in [None, Some(1), Some(16), Some(64)] {
            assert_eq!(ways(&LIMITS, 0, budget), then(Way::Bulk), "{budget:?}");
            assert_eq!(ways(&LIMITS, 2, budget), then(Way::Shift), "{budget:?}");
            let before_hopper = Limits { bulk: false, ..LIMITS };
            assert_eq!(ways(&before_hopper, 0, budget), then(Way::Pull), "{budget:?}");
        }
        assert_eq!(ways(&LIMITS, 0, Some(0)), then(Way::Copy));
        assert_eq!(ways(&LIMITS, 2, Some(0)), then(Way::Copy));
        assert_eq!(ways(&Limits { share: 2, ..LIMITS }, 0, Some(0)), then(Way::Bulk), "ranks share a GPU");
        assert_eq!(ways(&Limits { copies: false, ..LIMITS }, 0, Some(0)), then(Way::Bulk), "no scratch");
    }

    #[test]
    fn an_accumulator_off_16_bytes_with_sources_off_alike_is_read_by_plain_loads() {
        let row = Row { from: vec![(1 << 40) + 10, (2 << 40) + 10], to: (1 << 50) + 4, elements: 1 << 24 };
        let choice = choose(&Round::new(DType::Bf16, 2, &[&row]), &LIMITS, &OneShotOptions::default());
        assert_eq!(choice.way, Way::Pull);
    }

    #[test]
    fn readers_have_a_multiprocessor_each_and_no_more_than_are_useful() {
        let blocks = |elements, options: &OneShotOptions| chosen(2, elements, 0, options).blocks;
        let default = OneShotOptions::default();
        assert_eq!([1 << 22, 1 << 23, 1 << 25].map(|n| blocks(n, &default)), [32; 3]);
        let budgets = [0, 8, 16, 32, 64].map(|budget| OneShotOptions {
            budget: Some(budget),
            way: Some(Way::Bulk),
            ..OneShotOptions::default()
        });
        assert_eq!(budgets.map(|budget| blocks(1 << 25, &budget)), [16, 8, 16, 32, 32]);
        let pull = OneShotOptions { way: Some(Way::Pull), ..OneShotOptions::default() };
        assert_eq!([1 << 14, 1 << 20, 1 << 25].map(|n| blocks(n, &pull)), [8, 128, 128]);
    }

    #[test]
    fn blocks_that_were_asked_for_are_launched_where_they_fit() {
        let blocks = |way, blocks| {
            let options =
                OneShotOptions { way: Some(way), blocks: Some(blocks), ..OneShotOptions::default() };
            chosen(2, 1 << 25, 0, &options).blocks
        };
        assert_eq!([16, 256, 1000].map(|n| blocks(Way::Pull, n)), [16, 256, 256]);
        assert_eq!([8, 128, 1000].map(|n| blocks(Way::Bulk, n)), [8, 128, 128]);
    }

    #[test]
    fn ranks_that_share_a_gpu_take_no_more_blocks_than_it_has_multiprocessors() {
        for multiprocessors in [66, 78, 114, 132] {
            for share in [2, 3, 4, 8, 16] {
                let limits = Limits { share, multiprocessors, ..LIMITS };
                for way in [None, Some(Way::Push), Some(Way::Pull), Some(Way::Bulk), Some(Way::Copy)] {
                    let options = OneShotOptions { way, ..OneShotOptions::default() };
                    let choice = choose(&round(16, 1 << 25, 0), &limits, &options);
                    let rows = spread(choice.blocks, &vec![1; rows_at_once(share)]);
                    let blocks = rows.last().map_or(0, |(first, own)| first + own);
                    assert!(blocks * share <= multiprocessors, "{share} of {multiprocessors}: {choice:?}");
                }
            }
        }
    }

    #[test]
    fn what_decides_who_waits_for_what_sees_sizes_alone() {
        for size in 2..=16 {
            for elements in [1, 1000, 49_152, 131_072, 393_216, 393_217, 1 << 20] {
                for budget in [None, Some(0), Some(7), Some(128)] {
                    let push = |off, multiprocessors| {
                        let options = OneShotOptions { budget, ..OneShotOptions::default() };
                        let limits = Limits { multiprocessors, bulk: off == 0, ..LIMITS };
                        choose(&round(size, elements, off), &limits, &options).way == Way::Push
                    };
                    let all = [push(0, 132), push(2, 132), push(0, 66), push(14, 78)];
                    assert!(all.iter().all(|push| *push == all[0]), "{size} ranks, {elements}: {all:?}");
                }
            }
        }
    }

    #[test]
    fn packets_fit_the_mailbox_and_blocks_fit_the_gpu() {
        for size in 2..=16u32 {
            for share in [1, 2, 4, 8, 16] {
                let limits = Limits { share, ..LIMITS };
                for shift in 0..31 {
                    for budget in [None, Some(0), Some(1), Some(16), Some(1000)] {
                        let options = OneShotOptions { budget, ..OneShotOptions::default() };
                        let round = round(size, 1 << shift, 0);
                        let choice = choose(&round, &limits, &options);
                        let most = budget.unwrap_or(MULTIPROCESSORS).clamp(16, MULTIPROCESSORS);
                        assert!(
                            choice.blocks >= 1 && choice.blocks * share <= (4 * most).max(share),
                            "{choice:?}"
                        );
                        if choice.way == Way::Push {
                            assert!(round.packets * PACKET * u64::from(size - 1) <= limits.mailbox);
                        }
                        if choice.way == Way::Bulk {
                            assert!(choice.stages >= 2 && choice.shared <= 224 << 10, "{choice:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_a_batch_get_blocks_by_their_weight() {
        assert_eq!(spread(8, &[10, 10]), [(0, 4), (4, 4)]);
        assert_eq!(spread(128, &[1, 99, 0]), [(0, 2), (2, 124), (126, 1)]);
        assert_eq!(spread(1, &[5, 5]), [(0, 1), (1, 1)]);
    }

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        let mut names = Vec::new();
        for way in [Way::Push, Way::Pull, Way::Shift, Way::Bulk, Way::Copy] {
            for dtype in [DType::Bf16, DType::F32] {
                names.extend([2, 4, 8, 3].map(|size| kernel(way, dtype, size)));
            }
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 40);
    }
}
