//! Which way a reduce-scatter goes, and on how many blocks.
//!
//! A function of dtype, group size, sizes, alignment, budget and what the machine can do, total and the same at every call:
//!
//! | the first that holds | way |
//! |---|---|
//! | the packets fit the mailbox and a rank sends at most [`PUSH_MOST`] bytes | push |
//! | the budget is 0 multiprocessors, and no two ranks share a GPU (streams of one GPU may share a queue, in which a launch that waits holds back a peer's copies) | copy |
//! | the budget is at most [`BULK_BUDGET`] multiprocessors, the GPU has bulk copies, all is aligned to 16 bytes, and a rank reads at least [`BULK_LEAST`] bytes of each peer | bulk |
//! | anything else | pull; with shifted loads where sources and accumulator are not aligned alike |
//!
//! Only the first line decides who waits for what, and it sees nothing but sizes, which are the same on all ranks. The
//! other ways have one protocol, so that alignment and budget may differ.

use sessile_plan::DType;

use super::{OneShotOptions, Row};

/// Bytes that a rank may send to the others by packets: above, reading is faster (docs/PERFORMANCE.md).
pub(super) const PUSH_MOST: u64 = 768 << 10;
/// Largest budget at which bulk copies are used, and the least that they are used for.
pub(super) const BULK_BUDGET: u32 = 32;
pub(super) const BULK_LEAST: u64 = 4 << 20;
/// Bytes of each peer from which two blocks of a pull share a multiprocessor, in groups of two: below, half as many blocks
/// enter and leave sooner (docs/PERFORMANCE.md).
pub(super) const PAIR_LEAST: u64 = 4 << 20;
/// Multiprocessors that are counted on.
pub(super) const MULTIPROCESSORS: u32 = 128;
/// Packets of a tile, as in the kernels' source; threads of a block that sums after copies.
const TILE: u64 = 128;
pub(super) const SUM_THREADS: u32 = 512;
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
    /// Tiles of packets of them.
    pub(super) tiles: u64,
    /// Whether sources are aligned to 16 bytes where the accumulator is.
    pub(super) even: bool,
    /// Whether all are.
    pub(super) aligned: bool,
}

impl Round {
    pub(super) fn new(dtype: DType, size: u32, rows: &[&Row]) -> Self {
        let mut round = Round { dtype, size, elements: 0, tiles: 0, even: true, aligned: true };
        for row in rows {
            round.elements += row.elements;
            round.tiles += row.elements.div_ceil(TILE * per_packet(dtype));
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
}

/// How a round runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) way: Way,
    /// Of [`OneShotOptions::form`], the one that there is of the way.
    pub(super) form: u32,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Bytes of shared memory, and stages that it holds.
    pub(super) shared: u32,
    pub(super) stages: u32,
}

/// Elements of a packet.
fn per_packet(dtype: DType) -> u64 {
    if dtype == DType::Bf16 { 7 } else { 3 }
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
    let fits = round.tiles * TILE * 16 * others <= limits.mailbox;
    let can_bulk = limits.bulk && round.aligned;
    let read = if round.even { Way::Pull } else { Way::Shift };
    let budget = options.budget.unwrap_or(MULTIPROCESSORS);
    let small = fits && bytes * others <= PUSH_MOST;
    let way = match options.way {
        Some(Way::Push) if fits => Way::Push,
        Some(Way::Bulk) if can_bulk => Way::Bulk,
        Some(Way::Copy) if limits.copies => Way::Copy,
        Some(_) => read,
        None if small => Way::Push,
        None if budget == 0 && limits.copies && limits.share <= 1 => Way::Copy,
        None if budget <= BULK_BUDGET && can_bulk && bytes >= BULK_LEAST => Way::Bulk,
        None => read,
    };
    let form = match way {
        Way::Pull | Way::Bulk if options.form <= 4 => options.form,
        Way::Shift => options.form.min(1),
        _ => 0,
    };
    let wide = form >= 2 && specialized(size) <= 8;
    let readers: u64 = if way == Way::Pull && wide { 512 } else { 256 };
    // A block that waits for peers must not keep theirs from running: all of a GPU's fit on it at once.
    let budget = if budget == 0 { 16 } else { budget };
    let most = (budget.min(MULTIPROCESSORS) / limits.share.max(1)).max(1);
    let each = match (way, specialized(size)) {
        (Way::Push, 2 | 4) => 3,
        (Way::Push, 8) => 2,
        (Way::Pull | Way::Shift, 2)
            if readers == 256 && (bytes >= PAIR_LEAST || options.blocks.is_some()) =>
        {
            2
        }
        _ => 1,
    };
    let each = if limits.share > 1 { 1 } else { each };
    let sums = 4 * 16 / round.dtype.size() * packs(size);
    let stage = match form {
        0 | 4 => 16 * packs(size) * u64::from(size) + sums,
        3 => 16 * packs(size) * u64::from(size),
        _ => 16 * packs(size) * others,
    };
    let (work, threads, stages) = match way {
        Way::Push => (round.tiles, 288, 0),
        Way::Pull | Way::Shift => ((bytes / 16).div_ceil(readers), readers + 32, 0),
        Way::Bulk => ((bytes / 16).div_ceil(packs(size)), packs(size) + 32, (SHARED / stage.max(1)).min(16)),
        Way::Copy => ((bytes / 16).div_ceil(u64::from(SUM_THREADS)), u64::from(SUM_THREADS), 0),
    };
    let most = options.blocks.unwrap_or(u32::MAX).clamp(1, most * each);
    let narrow = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
    Choice {
        way,
        form,
        blocks: narrow(work.clamp(1, u64::from(most))),
        threads: narrow(threads),
        shared: narrow(stages * stage),
        stages: narrow(stages),
    }
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

/// The kernel that goes a way, in a form.
pub(super) fn kernel(way: Way, form: u32, dtype: DType, size: u32) -> &'static str {
    match (way, form) {
        (Way::Push, _) => kernels!("push", dtype, size),
        (Way::Pull, 0) => kernels!("pull", dtype, size),
        (Way::Pull, 1) => kernels!("pull1", dtype, size),
        (Way::Pull, 2) => kernels!("pull2", dtype, size),
        (Way::Pull, 3) => kernels!("pull3", dtype, size),
        (Way::Pull, _) => kernels!("pull4", dtype, size),
        (Way::Shift, 0) => kernels!("shift", dtype, size),
        (Way::Shift, _) => kernels!("shift1", dtype, size),
        (Way::Bulk, 0) => kernels!("bulk", dtype, size),
        (Way::Bulk, 1) => kernels!("bulk1", dtype, size),
        (Way::Bulk, 2) => kernels!("bulk2", dtype, size),
        (Way::Bulk, 3) => kernels!("bulk3", dtype, size),
        (Way::Bulk, _) => kernels!("bulk4", dtype, size),
        (Way::Copy, _) => sum(dtype, size),
    }
}

/// The kernel that sums what the copy engines brought.
pub(super) fn sum(dtype: DType, size: u32) -> &'static str {
    kernels!("sum", dtype, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { bulk: true, copies: true, mailbox: super::super::BOX, share: 1 };

    fn round(size: u32, elements: u64, off: u64) -> Round {
        let from = (0..u64::from(size)).map(|rank| ((rank + 1) << 40) + off).collect();
        Round::new(DType::Bf16, size, &[&Row { from, to: 1 << 50, elements }])
    }

    fn chosen(size: u32, elements: u64, off: u64, options: &OneShotOptions) -> Choice {
        choose(&round(size, elements, off), &LIMITS, options)
    }

    #[test]
    fn small_goes_by_packets_and_the_rest_as_the_budget_says() {
        let with = |budget| OneShotOptions { budget, ..OneShotOptions::default() };
        let ways = |budget| [1, 1 << 18, 1 << 21, 1 << 25].map(|n| chosen(2, n, 0, &with(budget)).way);
        assert_eq!(ways(None), [Way::Push, Way::Push, Way::Pull, Way::Pull]);
        assert_eq!(ways(Some(64)), [Way::Push, Way::Push, Way::Pull, Way::Pull]);
        assert_eq!(ways(Some(16)), [Way::Push, Way::Push, Way::Bulk, Way::Bulk]);
        assert_eq!(ways(Some(0)), [Way::Push, Way::Push, Way::Copy, Way::Copy]);
        assert_eq!(chosen(2, 1 << 25, 2, &with(None)).way, Way::Shift);
        assert_eq!(chosen(2, 1 << 25, 2, &with(Some(8))).way, Way::Shift, "bulk copies need alignment");
    }

    #[test]
    fn two_blocks_share_a_multiprocessor_where_there_is_enough_to_read() {
        let blocks = |elements| chosen(2, elements, 0, &OneShotOptions::default()).blocks;
        assert_eq!([1 << 20, 1 << 21, 1 << 22, 1 << 25].map(blocks), [128, 256, 256, 256]);
        let asked = OneShotOptions { blocks: Some(256), way: Some(Way::Pull), ..OneShotOptions::default() };
        assert_eq!(chosen(2, 1 << 20, 0, &asked).blocks, 256);
    }

    #[test]
    fn what_decides_who_waits_for_what_sees_sizes_alone() {
        for size in 2..=16 {
            for elements in [1, 1000, 49_152, 131_072, 393_216, 393_217, 1 << 20] {
                let push = |off, budget| {
                    let options = OneShotOptions { budget, ..OneShotOptions::default() };
                    chosen(size, elements, off, &options).way == Way::Push
                };
                let all = [push(0, None), push(2, None), push(0, Some(0)), push(14, Some(7))];
                assert!(all.iter().all(|push| *push == all[0]), "{size} ranks, {elements}: {all:?}");
            }
        }
    }

    #[test]
    fn packets_fit_the_mailbox_and_blocks_fit_the_gpu() {
        for size in 2..=16u32 {
            for share in [1, 2, 4, 8, 16] {
                let limits = Limits { share, ..LIMITS };
                for shift in 0..31 {
                    for (form, budget) in
                        [None, Some(0), Some(1), Some(16), Some(1000)].into_iter().enumerate()
                    {
                        let options =
                            OneShotOptions { budget, form: form as u32, ..OneShotOptions::default() };
                        let round = round(size, 1 << shift, 0);
                        let choice = choose(&round, &limits, &options);
                        let most = budget.unwrap_or(MULTIPROCESSORS).clamp(16, MULTIPROCESSORS);
                        assert!(
                            choice.blocks >= 1 && choice.blocks * share <= (3 * most).max(share),
                            "{choice:?}"
                        );
                        if choice.way == Way::Push {
                            assert!(round.tiles * TILE * 16 * u64::from(size - 1) <= limits.mailbox);
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
        let forms = [(Way::Push, 1), (Way::Pull, 5), (Way::Shift, 2), (Way::Bulk, 5), (Way::Copy, 1)];
        for (way, forms) in forms {
            for (form, dtype) in (0..forms).flat_map(|form| [(form, DType::Bf16), (form, DType::F32)]) {
                names.extend([2, 4, 8, 3].map(|size| kernel(way, form, dtype, size)));
            }
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 112);
    }
}
