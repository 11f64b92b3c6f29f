//! Many rounds: over graphs, sizes, ways, delays, and the wrap of their number.

use sessile_conformance::{add, buffer, enqueue, fill, read, spin};
use sessile_cuda::Way;
use sessile_hal::{Collective, Device, Kernel, Transfer, View};
use sessile_plan::{DType, Domain};

use super::{SUM, everyone, going, graph_of, registered, window};
use crate::worlds::{Threads, can_run, gpus};

#[test]
fn rounds_go_on_over_graphs_and_eager_work_of_unequal_sizes() {
    if !can_run("rounds_go_on_over_graphs_and_eager_work_of_unequal_sizes", 1) {
        return;
    }
    // Over the wrap, and over where words are brought up to date.
    for first_round in [0, u32::MAX - 100, (1 << 24) - 100, (1 << 31) - 100] {
        let mut worlds = Threads::new();
        worlds.options.one_shot.first_round = first_round;
        worlds.results(2, |device| {
            let comm = everyone(&device);
            let (s, t) = (device.stream("reduce").expect("stream"), device.stream("other").expect("stream"));
            let kind = Collective::ReduceScatterAccumulate { scale: 0.5 };
            let large = window(&device, &comm, DType::F32, 0, &vec![device.rank() as f32 + 1.0; 1 << 22]);
            let total = buffer(&device, &vec![0.0; 1 << 21]);
            let sizes = [16u64, 1 << 21, 300, 4096];
            let graphs: Vec<_> = sizes
                .iter()
                .map(|n| {
                    device.begin_capture(&s).expect("begin");
                    let (send, recv) =
                        (large.slice(0, 2 * n).expect("slice"), total.slice(0, *n).expect("slice"));
                    device.collective(&s, &comm, kind, &send, &recv).expect("collective");
                    device.end_capture(&s).expect("end")
                })
                .collect();
            // Different streams, nothing between them but the communicator's order.
            for turn in 0..200 {
                device.launch(&graphs[turn % 4], if turn % 3 == 0 { &t } else { &s }).expect("launch");
                if turn % 5 == 0 {
                    let (send, recv) =
                        (large.slice(0, 32).expect("slice"), total.slice(0, 16).expect("slice"));
                    device.collective(&t, &comm, kind, &send, &recv).expect("collective");
                }
            }
            device.wait_stream(&t).expect("wait");
            let got = read(&device, &s, &total);
            assert_eq!((got[0], got[16], got[301], got[1 << 20]), (360.0, 225.0, 150.0, 75.0));
        });
    }
}

/// *Bug*: one-shot kernels hung or gave sums of another size when graphs of many sizes took turns. *Cause*: flags in the
/// data, or counts for the size before. *Fix* here: who takes a packet leaves its place empty, whatever comes next, and no counts.
#[test]
fn graphs_of_many_sizes_take_turns() {
    if !can_run("graphs_of_many_sizes_take_turns", 1) {
        return;
    }
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let rows = 32u64;
        let send = window(&device, &comm, DType::Bf16, 0, &vec![1.0; (2 * rows * 4096) as usize]);
        let grads: Vec<_> = (1..=rows).map(|n| buffer(&device, &vec![0.0; (n * 4096) as usize])).collect();
        let graphs: Vec<_> = (1..=rows)
            .zip(&grads)
            .map(|(n, grad)| {
                let send = send.slice(0, 2 * n * 4096).expect("slice");
                graph_of(&device, &comm, &s, &[Transfer { send, recv: grad.clone() }])
            })
            .collect();
        let mut random = fastrand::Rng::with_seed(7);
        let mut launched = vec![0.0; rows as usize];
        for turn in 0..5000 {
            let which = random.usize(..rows as usize);
            launched[which] += 2.0;
            device.launch(&graphs[which], &s).expect("launch");
            if turn % 50 == 0 {
                device.wait_stream(&s).expect("wait");
            }
        }
        for (grad, want) in grads.iter().zip(launched) {
            assert!(read(&device, &s, grad).iter().all(|x| *x == want), "{want}");
        }
    });
}

#[test]
fn tiny_and_large_take_turns_and_an_odd_count_works() {
    if !can_run("tiny_and_large_take_turns_and_an_odd_count_works", 1) {
        return;
    }
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let n = 9_961_472u64;
        let send = registered(&device, &comm, DType::Bf16, 0, 2 * n);
        fill(&device, &s, &send, 1.0);
        let grad = buffer(&device, &vec![0.0; n as usize]);
        let part = |n: u64| Transfer {
            send: send.slice(0, 2 * n).expect("slice"),
            recv: grad.slice(0, n).expect("slice"),
        };
        let turns = graph_of(&device, &comm, &s, &[part(16), part(16 << 20 >> 1)]);
        let odd = graph_of(&device, &comm, &s, &[part(n)]);
        for launch in 0..2000 {
            device.launch(&turns, &s).expect("launch");
            if launch % 20 == 0 {
                device.launch(&odd, &s).expect("launch");
                device.wait_stream(&s).expect("wait");
            }
        }
        let got = read(&device, &s, &grad);
        assert_eq!((got[0], got[16], got[n as usize - 1]), (8200.0, 4200.0, 200.0));
    });
}

/// In each replay the input is another one, every sum is compared on the device, and ranks are late by turns.
fn replays(worlds: &Threads, ranks: u32, n: u64, times: u32) -> (usize, bool) {
    let size = u64::from(ranks);
    let results = worlds.results(ranks, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let send = window(&device, &comm, DType::F32, 0, &vec![0.0; (size * n) as usize]);
        let [grad, want, wrong] = [0; 3].map(|_| buffer(&device, &vec![0.0; n as usize]));
        let [difference, squared] = [0; 2].map(|_| {
            let memory = device.alloc(2 * n, &Domain::Default, "bf16").expect("alloc");
            let view = View::whole(&memory, DType::Bf16).expect("view");
            fill(&device, &s, &view, 0.0);
            view
        });
        let (one, step) = (
            buffer(&device, &vec![1.0; (size * n) as usize]),
            buffer(&device, &vec![ranks as f32; n as usize]),
        );
        let mut random = fastrand::Rng::with_seed(u64::from(device.rank()));
        let graphs: Vec<_> = (0..16)
            .map(|_| {
                device.begin_capture(&s).expect("begin");
                fill(&device, &s, &grad, 0.0);
                add(&device, &s, &one, &send);
                add(&device, &s, &step, &want);
                if random.bool() {
                    spin(&device, &s, random.u64(..12));
                }
                device.collective(&s, &comm, SUM, &send, &grad).expect("collective");
                // |sum - wanted|, squared, is added up: stays 0 while all are right.
                enqueue(&device, &s, Kernel::AddScaled { scale: -1.0 }, &[&want, &grad]);
                for _ in 0..2 {
                    enqueue(&device, &s, Kernel::Cast, &[&grad, &difference]);
                    enqueue(&device, &s, Kernel::SquaredReluForward, &[&difference, &squared]);
                    add(&device, &s, &squared, &wrong);
                    enqueue(&device, &s, Kernel::Scale { factor: -1.0 }, &[&grad]);
                }
                device.end_capture(&s).expect("end")
            })
            .collect();
        let free = device.free_memory().expect("free").0;
        for launch in 0..times {
            device.launch(&graphs[random.usize(..16)], &s).expect("launch");
            if launch % 50 == 0 {
                device.wait_stream(&s).expect("wait");
            }
        }
        device.wait_stream(&s).expect("wait");
        let flat = device.free_memory().expect("free").0 >= free;
        let all = read(&device, &s, &want);
        assert_eq!(all[0], (ranks * times) as f32);
        assert!(
            read(&device, &s, &grad).iter().all(|x| *x == 0.0),
            "no NaN either, which squares would hide"
        );
        (read(&device, &s, &wrong).iter().filter(|x| **x != 0.0).count(), flat)
    });
    results.into_iter().fold((0, true), |(sum, flat), (x, f)| (sum + x, flat && f))
}

#[test]
fn every_sum_of_100_000_replays_is_right_with_ranks_late_by_turns() {
    if !can_run("every_sum_of_100_000_replays_is_right_with_ranks_late_by_turns", 2) {
        return;
    }
    for way in [Way::Push, Way::Pull, Way::Bulk] {
        assert_eq!(replays(&going(Some(way)), 2, 5000, 100_000), (0, true), "{way:?}");
    }
}

#[test]
fn every_sum_of_10_000_replays_is_right_on_all_gpus_with_ranks_late_by_turns() {
    if !can_run("every_sum_of_10_000_replays_is_right_on_all_gpus_with_ranks_late_by_turns", 3) {
        return;
    }
    let ranks = gpus().expect("checked").min(16);
    for way in [Way::Push, Way::Pull, Way::Bulk] {
        assert_eq!(replays(&going(Some(way)), ranks, 5000, 10_000), (0, true), "{way:?}, {ranks} ranks");
    }
}
