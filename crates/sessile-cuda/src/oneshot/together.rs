//! The kernels with all ranks of a group in one launch, on one GPU: for as many ranks as a group may have, and for
//! compute-sanitizer, under which a launch that waits for another one may wait for ever. The controls are for it alone:
//! each has a fault that one of its tools must find.

#![expect(clippy::print_stderr, reason = "tests say why they were skipped")]

use std::sync::Arc;

use super::*;
use crate::gpu::gpus;
use crate::kernel::compile::Unit;
use crate::physical::{Block, copy_out};

/// A GPU, or says why there is none.
fn gpu(test: &str) -> Option<Arc<Context>> {
    let why = match gpus() {
        Ok(gpus) if !gpus.is_empty() => return Some(Context::open(0).unwrap_or_else(|why| panic!("{why}"))),
        Ok(_) => "no GPU is visible".to_owned(),
        Err(error) => error.to_string(),
    };
    assert_ne!(std::env::var("SESSILE_GPU").as_deref(), Ok("required"), "{test}: {why}");
    eprintln!("skipped: {test}: {why}");
    None
}

/// The ranks of a group.
struct Ranks<'a> {
    modules: &'a Modules,
    pool: Arc<Pool>,
    stream: RawStream,
    signals: Vec<Signals>,
    size: u32,
    patience: Duration,
    /// Whether accumulators are written before they are added to.
    initialized: bool,
}

/// A reduce-scatter: how many bytes sources and accumulators lie off 16, elements of a block.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    way: Way,
    off: (u64, u64),
    n: usize,
    scaled: (f32, Beta),
}

impl<'a> Ranks<'a> {
    fn new(context: &Arc<Context>, modules: &'a Modules, size: u32) -> Self {
        let pool = Pool::new(context).expect("pool");
        let stream = RawStream::new(context, crate::context::Priority::Normal).expect("stream");
        let pads: Vec<Arc<Block>> = (0..size).map(|_| Arc::new(pool.alloc(PAD).expect("pad"))).collect();
        let addresses: Vec<u64> = pads.iter().map(|pad| pad.address).collect();
        let make = |pad: &Arc<Block>| {
            let words = HostWords::new(context, 4).expect("words");
            Signals::new(&pool, pad.address, Box::new(pad.clone()), &addresses, words, size).expect("signals")
        };
        let signals = pads.iter().map(make).collect();
        Ranks { modules, pool, stream, signals, size, patience: Duration::from_secs(60), initialized: true }
    }

    /// Memory whose bytes from `off` are these, and 0 around them: loads of whole packs read those too.
    fn upload(&self, off: u64, bytes: &[u8]) -> (Block, u64) {
        let mut all = vec![0; off as usize];
        all.extend(bytes);
        all.resize(all.len().next_multiple_of(256), 0);
        let block = self.pool.alloc(all.len() as u64).expect("alloc");
        copy_in(&self.pool, block.address, &all).expect("copies");
        let at = block.address + off;
        (block, at)
    }

    /// Launches a kernel with a row of blocks for each rank.
    fn launch(&self, name: &'static str, extent: Extent, words: &[Vec<u64>]) {
        let bytes: Vec<u8> = words.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        let (batches, at) = self.upload(0, &bytes);
        let (blocks, _, _) = extent.grid;
        let extent = Extent { grid: (blocks, self.size, 1), ..extent };
        let _entered = self.pool.context().enter().expect("enters");
        // SAFETY: the batches hold the addresses of this round's sources, accumulators, pads and words, which all live
        // until the stream was synchronized below.
        unsafe { self.modules.launch(&self.stream, name, extent, &[Argument::U64(at)]) }.expect("launches");
        self.stream.synchronize().unwrap_or_else(|why| panic!("{name}: {why}"));
        drop(batches);
    }

    /// Runs it on all ranks; the accumulators, in order of rank.
    fn run(&self, case: &Case, inputs: &[Vec<u8>], before: &[f32]) -> Vec<Vec<f32>> {
        let bytes = case.n as u64 * case.dtype.size();
        let inputs: Vec<_> = inputs.iter().map(|input| self.upload(case.off.0, input)).collect();
        let initial: Vec<u8> = before.iter().flat_map(|x| x.to_le_bytes()).collect();
        let accumulator = |_| match self.initialized {
            true => self.upload(case.off.1, &initial),
            false => {
                let block = self.pool.alloc(initial.len() as u64).expect("alloc");
                let at = block.address;
                (block, at)
            }
        };
        let sums: Vec<_> = inputs.iter().map(accumulator).collect();
        let rows: Vec<Row> = (0u64..)
            .zip(&sums)
            .map(|(rank, (_, to))| {
                let from = inputs.iter().map(|(_, at)| at + rank * bytes).collect();
                Row { from, to: *to, elements: case.n as u64 }
            })
            .collect();
        match case.way {
            Way::Copy => self.copied(case, &rows),
            _ => self.fused(case, &rows),
        }
        for signals in &self.signals {
            assert_eq!(signals.gave_up(), None, "{case:?}");
        }
        let read = |(_, at): &(Block, u64)| {
            let mut bytes = vec![0; initial.len()];
            copy_out(&self.pool, &mut bytes, *at).expect("copies");
            bytes.chunks(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
        };
        sums.iter().map(read).collect()
    }

    fn members(&self) -> Vec<Member<'_>> {
        let member = |(at, signals)| Member { signals, at, size: self.size, patience: self.patience };
        (0..).zip(&self.signals).map(member).collect()
    }

    fn fused(&self, case: &Case, rows: &[Row]) {
        let options = OneShotOptions { way: Some(case.way), ..OneShotOptions::default() };
        let limits =
            Limits { bulk: true, copies: false, mailbox: BOX, share: self.size, multiprocessors: 64 };
        let launches: Vec<_> = rows
            .iter()
            .zip(&self.members())
            .map(|(row, member)| {
                let choice = choose(&Round::new(case.dtype, self.size, &[row]), &limits, &options);
                // Ranks whose block is aligned by chance go the others' way: it is one launch.
                let choice = choice::Choice { way: case.way, ..choice };
                let (dtype, scaled) = (case.dtype, case.scaled);
                Launch { modules: self.modules, member, dtype, scaled }.whole(&[row], &choice)
            })
            .collect();
        let (name, extent, _) = launches[0];
        let words: Vec<_> = launches.into_iter().map(|(_, _, words)| words).collect();
        self.launch(name, extent, &words);
    }

    fn copied(&self, case: &Case, rows: &[Row]) {
        let members = self.members();
        let (dtype, scaled, modules) = (case.dtype, case.scaled, self.modules);
        let launch = |member| Launch { modules, member, dtype, scaled };
        let signal = |name| {
            let words: Vec<_> =
                members.iter().map(|member| launch(member).batch(MOST_RANKS, &[], 0)).collect();
            self.launch(name, Extent { grid: (1, 1, 1), block: (32, 1), shared: 0 }, &words);
        };
        signal("one_shot_enter");
        let blocks = 4;
        let words: Vec<_> = members
            .iter()
            .zip(rows)
            .map(|(member, row)| {
                let part =
                    Part { from: row.from.clone(), to: row.to, elements: row.elements, blocks: (0, blocks) };
                launch(member).batch(choice::specialized(self.size), &[part], 0)
            })
            .collect();
        let extent = Extent { grid: (blocks, 1, 1), block: (choice::SUM_THREADS, 1), shared: 0 };
        self.launch(choice::sum(dtype, self.size), extent, &words);
        signal("one_shot_leave");
    }
}

/// Values whose sum depends on the order; representable in bf16.
fn sent(rank: u32, at: usize) -> f32 {
    [1.0, 256.0, -0.0078125, 1.5, 16_777_216.0, -16_777_216.0, 3.0, -1.0][(rank as usize + at / 5) % 8]
}

fn encode(dtype: DType, x: f32) -> Vec<u8> {
    match dtype {
        DType::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn inputs(dtype: DType, size: u32, n: usize) -> Vec<Vec<u8>> {
    let input = |rank| (0..n * size as usize).flat_map(|at| encode(dtype, sent(rank, at))).collect();
    (0..size).map(input).collect()
}

/// Runs a way for groups of every kernel, with sizes of less than a packet, of ends, and of several tiles; three times each,
/// so that mailboxes and words are used again.
fn check(test: &str, way: Way, offs: &[(u64, u64)]) {
    let Some(context) = gpu(test) else { return };
    let modules = Modules::together(&context, &Unit::Together.source()).unwrap_or_else(|why| panic!("{why}"));
    let sizes = [1usize, 61, 4099, 17_000];
    for size in [2, 3, 4, 8, 16] {
        let ranks = Ranks::new(&context, &modules, size);
        for dtype in [DType::Bf16, DType::F32] {
            for (n, (from, to)) in sizes.iter().flat_map(|n| offs.iter().map(|off| (*n, *off))) {
                // All blocks must be aligned as the first one.
                let n = if matches!(way, Way::Pull | Way::Bulk) { n.next_multiple_of(8) } else { n };
                let inputs = inputs(dtype, size, n);
                let before: Vec<f32> = (0..n).map(|at| at as f32 * 0.125).collect();
                for beta in [Beta::Accumulate, Beta::Overwrite, Beta::Accumulate] {
                    let scale = 1.0 / size as f32;
                    let case = Case { dtype, way, off: (from * dtype.size(), to), n, scaled: (scale, beta) };
                    let in_order = beta == Beta::Overwrite;
                    let options = OneShotOptions { in_order, ..OneShotOptions::default() };
                    ranks.signals.iter().for_each(|signals| signals.set(options.clone()));
                    let got = ranks.run(&case, &inputs, &before);
                    for (rank, got) in got.iter().enumerate() {
                        let want = (0..n).map(|at| {
                            let own = |p| sent(p, rank * n + at);
                            let x = scale * (1..size).fold(own(0), |sum, p| sum + own(p));
                            if beta == Beta::Overwrite { x } else { before[at] + x }
                        });
                        let want: Vec<u32> = want.map(f32::to_bits).collect();
                        let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
                        assert!(got == want, "rank {rank} of {size}: {case:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn packets_of_all_ranks_in_one_launch_have_the_defined_bits() {
    let test = "packets_of_all_ranks_in_one_launch_have_the_defined_bits";
    check(test, Way::Push, &[(0, 0), (1, 4)]);
}

#[test]
fn reads_of_all_ranks_in_one_launch_have_the_defined_bits() {
    check("reads_of_all_ranks_in_one_launch_have_the_defined_bits", Way::Pull, &[(0, 0)]);
}

#[test]
fn shifted_reads_of_all_ranks_in_one_launch_have_the_defined_bits() {
    check("shifted_reads_of_all_ranks_in_one_launch_have_the_defined_bits", Way::Shift, &[(1, 0), (3, 4)]);
}

#[test]
fn bulk_copies_of_all_ranks_in_one_launch_have_the_defined_bits() {
    check("bulk_copies_of_all_ranks_in_one_launch_have_the_defined_bits", Way::Bulk, &[(0, 0)]);
}

#[test]
fn sums_of_copies_of_all_ranks_in_one_launch_have_the_defined_bits() {
    check("sums_of_copies_of_all_ranks_in_one_launch_have_the_defined_bits", Way::Copy, &[(0, 0), (1, 4)]);
}

/// One round of two ranks with a changed text, or an accumulator of `room` elements.
fn control(test: &str, way: Way, change: (&str, &str), room: usize, initialized: bool) {
    let Some(context) = gpu(test) else { return };
    let text = Unit::Together.source();
    assert!(change.0.is_empty() || text.contains(change.0), "{}", change.0);
    let text = if change.0.is_empty() { text } else { text.replace(change.0, change.1) };
    let modules = Modules::together(&context, &text).unwrap_or_else(|why| panic!("{why}"));
    let mut ranks = Ranks::new(&context, &modules, 2);
    (ranks.patience, ranks.initialized) = (Duration::from_secs(5), initialized);
    let case = Case { dtype: DType::Bf16, way, off: (0, 0), n: 4096, scaled: (1.0, Beta::Accumulate) };
    ranks.run(&case, &inputs(DType::Bf16, 2, case.n), &vec![0.0; room]);
}

const NO_CHANGE: (&str, &str) = ("", "");

#[test]
#[ignore = "has a fault that memcheck must find"]
fn control_of_memcheck_whose_accumulator_is_too_small() {
    control("control_of_memcheck", Way::Pull, NO_CHANGE, 2048, true);
}

#[test]
#[ignore = "has a fault that initcheck must find"]
fn control_of_initcheck_whose_accumulator_was_never_written() {
    control("control_of_initcheck", Way::Pull, NO_CHANGE, 4096, false);
}

#[test]
#[ignore = "has a fault that racecheck must find"]
fn control_of_racecheck_without_barriers() {
    control("control_of_racecheck", Way::Push, ("meet<32 + 2 * P>();", ""), 4096, true);
}

#[test]
#[ignore = "has a fault that synccheck must find"]
fn control_of_synccheck_with_a_barrier_for_one_place_at_two() {
    control("control_of_synccheck", Way::Pull, ("barrier.cta.sync 1", "bar.sync 1"), 4096, true);
}
