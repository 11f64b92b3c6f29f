//! Collectives against their definitions.

use half::bf16;
use sessile_hal::{Collective, Comm, Device, Memory, View};
use sessile_host::{HostDevice, HostMemory, WorldOptions};
use sessile_plan::{DType, Domain};

use crate::support::{all_modes, buffer, fill, raw, read, run};

/// Element `at` of rank `rank`'s send buffer.
fn sent(rank: u32, at: usize) -> f32 {
    (rank as f32 + 1.0) * 10.0 + at as f32 * 0.5
}

/// Runs one collective of f32 on `size` ranks with `n` elements a block; each rank's result.
fn collective(options: &WorldOptions, kind: Collective, n: usize) -> Vec<Vec<f32>> {
    let size = options.ranks as usize;
    let (sends, receives) = match kind {
        Collective::AllGather => (n, n * size),
        Collective::ReduceScatter => (n * size, n),
        Collective::AllReduce => (n, n),
        Collective::AllToAll => (n * size, n * size),
        Collective::SymmetricReduceScatter
        | Collective::ReduceScatterAccumulate { .. }
        | Collective::ReduceScatterStore { .. } => {
            panic!("tested with windows")
        }
    };
    run(options, |device| {
        let ranks: Vec<u32> = (0..device.world_size()).collect();
        let comm = device.communicator("all", &ranks).expect("comm");
        let send = buffer(&device, &(0..sends).map(|at| sent(device.rank(), at)).collect::<Vec<_>>());
        let recv = raw(&device, receives as u64, "recv");
        let s = device.stream("s").expect("stream");
        device.collective(&s, &comm, kind, &send, &recv).expect("collective");
        read(&device, &s, &recv)
    })
}

#[test]
fn every_kind_matches_its_definition_for_groups_of_one_to_four() {
    for ranks in 1..=4u32 {
        for options in all_modes(ranks) {
            let (size, n) = (ranks as usize, 3);
            let from = |rank: usize, at: usize| sent(rank as u32, at);
            for (rank, got) in collective(&options, Collective::AllGather, n).into_iter().enumerate() {
                let want: Vec<f32> = (0..size * n).map(|at| from(at / n, at % n)).collect();
                assert_eq!(got, want, "rank {rank}");
            }
            for (rank, got) in collective(&options, Collective::AllToAll, n).into_iter().enumerate() {
                let want: Vec<f32> = (0..size * n).map(|at| from(at / n, rank * n + at % n)).collect();
                assert_eq!(got, want, "rank {rank}");
            }
            // Small halves: sums are exact in any order.
            for (rank, got) in collective(&options, Collective::ReduceScatter, n).into_iter().enumerate() {
                let want: Vec<f32> =
                    (0..n).map(|at| (0..size).map(|peer| from(peer, rank * n + at)).sum()).collect();
                assert_eq!(got, want, "rank {rank}");
            }
            for got in collective(&options, Collective::AllReduce, n) {
                let want: Vec<f32> = (0..n).map(|at| (0..size).map(|peer| from(peer, at)).sum()).collect();
                assert_eq!(got, want);
            }
        }
    }
}

fn bf16_view(device: &HostDevice, values: &[f32]) -> View<HostMemory> {
    let memory = device.alloc(2 * values.len() as u64, &Domain::Default, "bf16").expect("alloc");
    let view = View::whole(&memory, DType::Bf16).expect("aligned");
    let bytes: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    device.write(&device.stream("upload").expect("stream"), &view, &bytes).expect("write");
    view
}

fn bf16_read(
    device: &HostDevice,
    stream: &<HostDevice as Device>::Stream,
    view: &View<HostMemory>,
) -> Vec<f32> {
    let bytes = device.read(stream, view).expect("read");
    bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect()
}

#[test]
fn reduce_scatter_rounds_to_bf16_at_each_hop_of_the_ring() {
    // bf16 has 8 bits: 256 + 1 rounds back to 256 (a tie, to even), 1 + 1 + 256 is 258. Rank 0 holds 256, the
    // others 1. Block b begins at rank b + 1 and ends at rank b:
    //   block 0: 1, 2, 3, then 3 + 256 = 259, a tie between 258 and 260, to even: 260
    //   block 1: 1 (rank 2), 2 (rank 3), 258 (rank 0), 259 → 260 (rank 1)
    //   block 2: 1 (rank 3), 257 → 256 (rank 0), 256 (rank 1), 256 (rank 2)
    //   block 3: 256 (rank 0), and it stays there
    let got = run(&WorldOptions::threads(4, 2), |device| {
        let comm = device.communicator("all", &[0, 1, 2, 3]).expect("comm");
        let send = bf16_view(&device, &[if device.rank() == 0 { 256.0 } else { 1.0 }; 4]);
        let (recv, sum) = (bf16_view(&device, &[0.0]), bf16_view(&device, &[0.0; 4]));
        let s = device.stream("s").expect("stream");
        device.collective(&s, &comm, Collective::ReduceScatter, &send, &recv).expect("collective");
        device.collective(&s, &comm, Collective::AllReduce, &send, &sum).expect("collective");
        (bf16_read(&device, &s, &recv)[0], bf16_read(&device, &s, &sum)[0])
    });
    assert_eq!(got.iter().map(|g| g.0).collect::<Vec<_>>(), [260.0, 260.0, 256.0, 256.0]);
    // All-reduce sums in FP32 and rounds once: 259, a tie, to even.
    assert!(got.iter().all(|g| g.1 == 260.0));
}

#[test]
fn reduce_scatter_of_f32_sums_in_ring_order() {
    // 1e8 swallows 1; only the order tells what is left.
    let got = run(&WorldOptions::threads(3, 2), |device| {
        let comm = device.communicator("all", &[0, 1, 2]).expect("comm");
        let value = [1e8f32, 1.0, -1e8][device.rank() as usize];
        let send = buffer(&device, &[value; 3]);
        let (recv, sum) = (raw(&device, 1, "recv"), raw(&device, 1, "sum"));
        let s = device.stream("s").expect("stream");
        device.collective(&s, &comm, Collective::ReduceScatter, &send, &recv).expect("collective");
        device
            .collective(&s, &comm, Collective::AllReduce, &send.slice(0, 1).expect("slice"), &sum)
            .expect("sum");
        (read(&device, &s, &recv)[0], read(&device, &s, &sum)[0])
    });
    // Block 0: 1 - 1e8 + 1e8 = 0; block 1: -1e8 + 1e8 + 1 = 1; block 2: 1e8 + 1 - 1e8 = 0.
    assert_eq!(got.iter().map(|g| g.0).collect::<Vec<_>>(), [0.0, 1.0, 0.0]);
    assert!(got.iter().all(|g| g.1 == 0.0), "in rank order: 1e8 + 1 - 1e8");
}

#[test]
fn in_place_forms_give_the_same_result() {
    run(&WorldOptions::threads(2, 2), |device| {
        let comm = device.communicator("all", &[0, 1]).expect("comm");
        let (s, rank) = (device.stream("s").expect("stream"), u64::from(device.rank()));
        let value = device.rank() as f32 + 1.0;
        let x = buffer(&device, &[value; 2]);
        let own = x.slice(rank, 1).expect("slice");
        device.collective(&s, &comm, Collective::AllGather, &own, &x).expect("gather");
        assert_eq!(read(&device, &s, &x), [1.0, 2.0]);
        device.collective(&s, &comm, Collective::ReduceScatter, &x, &own).expect("scatter");
        assert_eq!(read(&device, &s, &own), [2.0 * value]);
        let other = x.slice(1 - rank, 1).expect("slice");
        assert!(device.collective(&s, &comm, Collective::ReduceScatter, &x, &other).is_err());
    });
}

#[test]
fn groups_do_not_disturb_each_other() {
    for options in all_modes(4) {
        let got = run(&options, |device| {
            let rank = device.rank();
            let (pair, name) = if rank < 2 { ([0, 1], "low") } else { ([2, 3], "high") };
            let (near, far) = (
                device.communicator(name, &pair).expect("comm"),
                device.communicator(if rank % 2 == 0 { "even" } else { "odd" }, &[rank % 2, rank % 2 + 2]),
            );
            let far = far.expect("comm");
            assert_eq!((near.size(), far.size()), (2, 2));
            let (a, b) = (device.stream("a").expect("stream"), device.stream("b").expect("stream"));
            let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[0.0]));
            fill(&device, &a, &x, rank as f32);
            fill(&device, &b, &y, rank as f32);
            device.collective(&a, &near, Collective::AllReduce, &x, &x).expect("near");
            device.collective(&b, &far, Collective::AllReduce, &y, &y).expect("far");
            assert_eq!(x.memory().id().rank, rank);
            (read(&device, &a, &x)[0], read(&device, &b, &y)[0])
        });
        assert_eq!(got, [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]);
    }
}
