//! What the sums are.

use half::bf16;
use sessile_conformance::{buffer, bytes, read};
use sessile_cuda::Way;
use sessile_hal::{Beta, Collective, Device, Graph, Transfer};
use sessile_plan::DType;

use super::{SUM, Vista, WAYS, encode, everyone, going, window};
use crate::worlds::{Threads, can_run};

/// What rank `rank` sends: sums depend on the order, with zeros of both signs, subnormals, infinities and NaN among them.
fn sent(rank: u32, at: usize) -> f32 {
    let special = [0.0, -0.0, 1e-40, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];
    if at % 41 == 17 {
        return special[(at / 41 + rank as usize) % special.len()];
    }
    [1.0, 1e8, -1e8, 3.5, 0.1, -7.25e-3, 256.0, 1.0][rank as usize % 8] * (1.0 + at as f32 * 0.37)
}

fn widened(dtype: DType, x: f32) -> f32 {
    if dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x }
}

/// The definition: in rank order from 0, each operation rounded.
fn defined(ranks: u32, dtype: DType, at: usize, kind: Collective, before: f32) -> f32 {
    let sum = (1..ranks).fold(widened(dtype, sent(0, at)), |sum, rank| sum + widened(dtype, sent(rank, at)));
    match kind.scaled().expect("scales") {
        (scale, Beta::Accumulate) => before + scale * sum,
        (scale, Beta::Overwrite) => scale * sum,
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

/// Compares sums of `sizes`, for sources and accumulators that lie off a multiple of 16 bytes by so many elements.
fn compare(worlds: &Threads, ranks: u32, off: &[(DType, u64, u64)], sizes: &[usize]) {
    let most = *sizes.iter().max().expect("sizes");
    worlds.results(ranks, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let scale = 1.0 / ranks as f32;
        let all: Vec<f32> = (0..most * ranks as usize).map(|at| sent(device.rank(), at)).collect();
        let before: Vec<f32> = (0..most + 4).map(|at| at as f32 * 1e-3).collect();
        let grad = buffer(&device, &before);
        for (dtype, from, to) in off {
            let send = window(&device, &comm, *dtype, from * dtype.size(), &all);
            let kinds =
                [Collective::ReduceScatterAccumulate { scale }, Collective::ReduceScatterStore { scale }];
            for (n, kind) in sizes.iter().flat_map(|n| kinds.map(|kind| (*n, kind))) {
                let part = send.slice(0, (n * ranks as usize) as u64).expect("slice");
                let to_view = grad.slice(*to, n as u64).expect("slice");
                device.write(&s, &grad, &bytes(&before)).expect("write");
                device.collective(&s, &comm, kind, &part, &to_view).expect("collective");
                let (block, to) = (device.rank() as usize * n, *to as usize);
                let got = read(&device, &s, &grad);
                let want: Vec<f32> =
                    (0..n).map(|at| defined(ranks, *dtype, block + at, kind, before[to + at])).collect();
                let way = worlds.options.one_shot.way;
                assert_eq!(
                    bits(&got[to..to + n]),
                    bits(&want),
                    "{kind:?}, {way:?}, {ranks} ranks, {dtype}[{n}] at {from}, {to}"
                );
                assert_eq!(bits(&got[..to]), bits(&before[..to]), "nothing before it");
                assert_eq!(bits(&got[to + n..]), bits(&before[to + n..]), "nothing after it");
            }
        }
    });
}

const OFF: [(DType, u64, u64); 6] = [
    (DType::Bf16, 0, 0),
    (DType::Bf16, 1, 0),
    (DType::Bf16, 3, 1),
    (DType::F32, 0, 0),
    (DType::F32, 1, 0),
    (DType::F32, 2, 3),
];

#[test]
fn sums_have_the_defined_bits_for_all_groups_ways_and_alignments() {
    if !can_run("sums_have_the_defined_bits_for_all_groups_ways_and_alignments", 1) {
        return;
    }
    let sizes: Vec<usize> = (1..20).chain([255, 256, 257, 895, 896, 1000, 2049, 4095, 4096, 4097]).collect();
    for ranks in [2, 3, 4, 5, 8] {
        // Copies of so many ranks of one process would wait behind each other's launches.
        for way in WAYS.into_iter().filter(|way| *way != Some(Way::Copy) || ranks <= 4) {
            compare(&going(way), ranks, &OFF, &sizes);
        }
    }
}

#[test]
fn sums_of_every_size_up_to_4097_have_the_defined_bits() {
    if !can_run("sums_of_every_size_up_to_4097_have_the_defined_bits", 1) {
        return;
    }
    let sizes: Vec<usize> = (1..=4097).collect();
    for way in [Way::Push, Way::Pull] {
        compare(&going(Some(way)), 3, &OFF[..1], &sizes);
    }
}

#[test]
fn large_sums_have_the_defined_bits() {
    if !can_run("large_sums_have_the_defined_bits", 1) {
        return;
    }
    let sizes = [100_003, 1 << 20, (1 << 20) + 7];
    for ranks in [2, 3] {
        for way in WAYS {
            compare(&going(way), ranks, &[OFF[0], OFF[2], OFF[3]], &sizes);
        }
        for way in [Way::Pull, Way::Bulk] {
            // Many tiles a block, more than it has stages.
            let mut few = going(Some(way));
            few.options.one_shot.blocks = Some(2);
            compare(&few, ranks, &[OFF[0], OFF[3]], &sizes);
        }
    }
}

/// All bits set, over a whole packet and over less, say "no packet here" in a mailbox: such elements are NaN, and arrive as
/// that; what comes after them is not disturbed.
#[test]
fn elements_with_all_bits_set_arrive_as_nan() {
    if !can_run("elements_with_all_bits_set_arrive_as_nan", 1) {
        return;
    }
    going(Some(Way::Push)).results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        for dtype in [DType::Bf16, DType::F32] {
            let n = 4096usize;
            let send = window(&device, &comm, dtype, 0, &vec![1.0; 2 * n]);
            let grad = buffer(&device, &vec![0.0; n]);
            let width = dtype.size() as usize;
            // On both sides of the first block's start, over three packets, and a single element.
            let unset = [0..8, 40..64, 1003..1004, n - 4..n];
            for (round, all_set) in [true, false, true, false].into_iter().enumerate() {
                let mut values = encode(dtype, &vec![1.0; 2 * n]);
                for at in unset.iter().cloned().flatten().flat_map(|at| [at, n + at]).filter(|_| all_set) {
                    values[at * width..(at + 1) * width].fill(0xff);
                }
                device.write(&s, &send, &values).expect("write");
                let kind = Collective::ReduceScatterStore { scale: 1.0 };
                device.collective(&s, &comm, kind, &send, &grad).expect("collective");
                let got = read(&device, &s, &grad);
                for (at, x) in got.iter().enumerate() {
                    let nan = all_set && unset.iter().any(|range| range.contains(&at));
                    assert!(if nan { x.is_nan() } else { *x == 2.0 }, "{dtype}, round {round}, {at}: {x}");
                }
            }
        }
    });
}

#[test]
fn eight_ranks_sum_the_bf16_trap_to_263_and_a_batch_is_one_launch() {
    if !can_run("eight_ranks_sum_the_bf16_trap_to_263_and_a_batch_is_one_launch", 1) {
        return;
    }
    for (way, kernel) in [
        (None, "one_shot_push_bf16_8"),
        (Some(Way::Pull), "one_shot_pull_bf16_8"),
        (Some(Way::Bulk), "one_shot_bulk_bf16_8"),
    ] {
        going(way).results(8, |device| {
            let comm = everyone(&device);
            let s = device.stream("reduce").expect("stream");
            let value = if device.rank() == 0 { 256.0 } else { 1.0 };
            let send = window(&device, &comm, DType::Bf16, 0, &[value; 8 * 1600]);
            // Blocks of 0, 8 and so on, at multiples of 16 bytes.
            let sizes = [200u64, 8, 0, 400, 992];
            let grads: Vec<Vista> =
                sizes.iter().map(|n| buffer(&device, &vec![0.0; *n as usize + 1])).collect();
            let mut first = 0;
            let transfers: Vec<_> = grads
                .iter()
                .zip(sizes)
                .map(|(grad, n)| {
                    let send = send.slice(first, 8 * n).expect("slice");
                    first += 8 * n;
                    Transfer { send, recv: grad.slice(0, n).expect("slice") }
                })
                .collect();
            device.begin_capture(&s).expect("begin");
            device.collective_batch(&s, &comm, SUM, &transfers).expect("batch");
            let graph = device.end_capture(&s).expect("end");
            let kernels: Vec<_> = graph.kernels().iter().map(|kernel| kernel.name.as_str()).collect();
            assert_eq!(kernels, [kernel]);
            for _ in 0..2 {
                device.launch(&graph, &s).expect("launch");
            }
            for (grad, n) in grads.iter().zip(sizes) {
                let mut want = vec![526.0; n as usize];
                want.push(0.0);
                assert_eq!(read(&device, &s, grad), want);
            }
        });
    }
}
