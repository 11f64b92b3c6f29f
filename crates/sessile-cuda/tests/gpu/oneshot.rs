//! The one-shot reduce-scatter, for groups of any size on the GPUs that there are, several ranks on one.

use std::time::Duration;

use half::bf16;
use sessile_conformance::{buffer, bytes, enqueue, fill, read, spin};
use sessile_cuda::{CudaComm, CudaDevice, CudaMemory};
use sessile_hal::{Collective, Comm, Device, DeviceError, Graph, Kernel, Transfer, View};
use sessile_plan::{DType, Domain};

use crate::worlds::{Threads, can_run};

type Vista = View<CudaMemory>;

fn everyone(device: &CudaDevice) -> CudaComm {
    let ranks: Vec<u32> = (0..device.world_size()).collect();
    device.communicator("all", &ranks).expect("comm")
}

/// Registered memory with `values`, from byte `offset`.
fn window(device: &CudaDevice, comm: &CudaComm, dtype: DType, offset: u64, values: &[f32]) -> Vista {
    let domain = Domain::Symmetric(comm.name().to_owned());
    let elements = values.len() as u64;
    let memory = device.alloc(offset + elements * dtype.size(), &domain, "window").expect("alloc");
    device.register_window(comm, &memory).expect("register");
    let view = View::new(&memory, offset, elements, dtype).expect("aligned");
    let stream = device.stream("upload").expect("stream");
    device.write(&stream, &view, &encode(dtype, values)).expect("write");
    view
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => bytes(values),
    }
}

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
fn defined(ranks: u32, dtype: DType, at: usize, scale: f32, before: f32) -> f32 {
    let sum = (1..ranks).fold(widened(dtype, sent(0, at)), |sum, rank| sum + widened(dtype, sent(rank, at)));
    before + scale * sum
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

#[test]
fn sums_have_the_defined_bits_for_all_groups_sizes_and_alignments() {
    if !can_run("sums_have_the_defined_bits_for_all_groups_sizes_and_alignments", 1) {
        return;
    }
    for ranks in [2u32, 3, 4, 5, 8] {
        Threads::new().results(ranks, |device| {
            let comm = everyone(&device);
            let s = device.stream("reduce").expect("stream");
            let scale = 1.0 / ranks as f32;
            for (dtype, offset) in [(DType::Bf16, 0), (DType::Bf16, 2), (DType::F32, 0), (DType::F32, 4)] {
                let most = 4097usize;
                let all: Vec<f32> = (0..most * ranks as usize).map(|at| sent(device.rank(), at)).collect();
                let send = window(&device, &comm, dtype, offset, &all);
                let before: Vec<f32> = (0..most).map(|at| at as f32 * 1e-3).collect();
                let grad = buffer(&device, &before);
                for n in (1..40).chain([255, 256, 257, 1000, 4095, 4096, 4097]) {
                    let part = send.slice(0, (n * ranks as usize) as u64).expect("slice");
                    let to = grad.slice(0, n as u64).expect("slice");
                    device.write(&s, &grad, &bytes(&before)).expect("write");
                    let kind = Collective::ReduceScatterAccumulate { scale };
                    device.collective(&s, &comm, kind, &part, &to).expect("collective");
                    let block = device.rank() as usize * n;
                    let want: Vec<f32> =
                        (0..n).map(|at| defined(ranks, dtype, block + at, scale, before[at])).collect();
                    let got = read(&device, &s, &to);
                    assert_eq!(bits(&got), bits(&want), "{ranks} ranks, {dtype}[{n}] at {offset}");
                }
            }
        });
    }
}

#[test]
fn eight_ranks_sum_the_bf16_trap_to_263_and_a_batch_is_one_launch() {
    if !can_run("eight_ranks_sum_the_bf16_trap_to_263_and_a_batch_is_one_launch", 1) {
        return;
    }
    Threads::new().results(8, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let value = if device.rank() == 0 { 256.0 } else { 1.0 };
        let send = window(&device, &comm, DType::Bf16, 0, &[value; 8 * 1000]);
        let grads: Vec<Vista> = (0..5).map(|_| buffer(&device, &[0.0; 200])).collect();
        let transfers: Vec<_> = grads
            .iter()
            .enumerate()
            .map(|(at, grad)| Transfer {
                send: send.slice(1600 * at as u64, 1600).expect("slice"),
                recv: grad.clone(),
            })
            .collect();
        let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
        device.begin_capture(&s).expect("begin");
        device.collective_batch(&s, &comm, kind, &transfers).expect("batch");
        let graph = device.end_capture(&s).expect("end");
        let kernels: Vec<_> = graph.kernels().iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(kernels, ["one_shot_bf16_8"], "{:?}", graph.nodes());
        for _ in 0..2 {
            device.launch(&graph, &s).expect("launch");
        }
        for grad in &grads {
            assert_eq!(read(&device, &s, grad), [526.0; 200]);
        }
    });
}

/// [fill x; reduce; fill x with NaN] in one graph, one rank slow: a launch ends only when all peers have read.
#[test]
fn an_input_may_be_overwritten_as_soon_as_the_launch_has_ended() {
    if !can_run("an_input_may_be_overwritten_as_soon_as_the_launch_has_ended", 1) {
        return;
    }
    for ranks in [2u32, 3] {
        Threads::new().results(ranks, |device| {
            let comm = everyone(&device);
            let s = device.stream("reduce").expect("stream");
            let n = 1u64 << 18;
            let send = window(&device, &comm, DType::Bf16, 0, &vec![0.0; (n * u64::from(ranks)) as usize]);
            let grad = buffer(&device, &vec![0.0; n as usize]);
            let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
            device.begin_capture(&s).expect("begin");
            fill(&device, &s, &send, 1.0);
            if device.rank() == 1 {
                spin(&device, &s, 30);
            }
            device.collective(&s, &comm, kind, &send, &grad).expect("collective");
            fill(&device, &s, &send, f32::NAN);
            let graph = device.end_capture(&s).expect("end");
            for launch in 0..1000 {
                device.launch(&graph, &s).expect("launch");
                // Ranks of one process on one GPU share the driver's lock: a launch that blocks because too many are
                // outstanding would keep its peer from launching.
                if launch % 50 == 0 {
                    device.wait_stream(&s).expect("wait");
                }
            }
            let got = read(&device, &s, &grad);
            let want = 1000.0 * ranks as f32;
            assert!(got.iter().all(|x| *x == want), "{} instead of {want}", got[0]);
        });
    }
}

#[test]
fn rounds_go_on_over_graphs_and_eager_work_of_unequal_sizes() {
    if !can_run("rounds_go_on_over_graphs_and_eager_work_of_unequal_sizes", 1) {
        return;
    }
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let (s, t) = (device.stream("reduce").expect("stream"), device.stream("other").expect("stream"));
        let kind = Collective::ReduceScatterAccumulate { scale: 0.5 };
        let large = window(&device, &comm, DType::F32, 0, &vec![device.rank() as f32 + 1.0; 1 << 21]);
        let total = buffer(&device, &vec![0.0; 1 << 20]);
        let sizes = [16u64, 1 << 20, 300, 4096];
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
                let (send, recv) = (large.slice(0, 32).expect("slice"), total.slice(0, 16).expect("slice"));
                device.collective(&t, &comm, kind, &send, &recv).expect("collective");
            }
        }
        device.wait_stream(&t).expect("wait");
        let got = read(&device, &s, &total);
        assert_eq!((got[0], got[16], got[301], got[1 << 19]), (360.0, 225.0, 150.0, 75.0));
    });
}

#[test]
fn a_peer_that_does_not_launch_is_named_and_later_launches_do_nothing() {
    let test = "a_peer_that_does_not_launch_is_named_and_later_launches_do_nothing";
    if !can_run(test, 1) {
        return;
    }
    let mut worlds = Threads::new();
    worlds.options.deadline = Duration::from_secs(3);
    worlds.results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let send = window(&device, &comm, DType::F32, 0, &[1.0; 64]);
        let grad = buffer(&device, &[0.0; 32]);
        let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
        device.begin_capture(&s).expect("begin");
        device.collective(&s, &comm, kind, &send, &grad).expect("collective");
        let graph = device.end_capture(&s).expect("end");
        for _ in 0..if device.rank() == 0 { 10 } else { 9 } {
            device.launch(&graph, &s).expect("launch");
        }
        if device.rank() == 1 {
            assert_eq!(read(&device, &s, &grad), [18.0; 32]);
            // Still there, and late.
            std::thread::sleep(Duration::from_secs(5));
            return;
        }
        let error = device.wait_stream(&s).expect_err("late");
        let named =
            matches!(&error, DeviceError::PeerTimeout { missing: 1, what, .. } if what.contains("round 10"));
        assert!(named, "{error}");
        assert!(device.launch(&graph, &s).is_err(), "refused from now on");
        device.wait_stream(&s).expect("told once, and nothing hangs");
    });
}

/// Figures, not a test: `--ignored --nocapture`. Graphs of 20, buffers rotated over more than L2.
#[test]
#[ignore = "measures"]
fn microseconds_a_call_beside_nccl() {
    if !can_run("microseconds_a_call_beside_nccl", 2) {
        return;
    }
    let rows = Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let mut rows = Vec::new();
        for shift in [16u32, 18, 20, 22, 24, 26, 28] {
            let bytes = 1u64 << shift;
            let copies = (1u64 << 30 >> shift).clamp(1, 8);
            let n = bytes / 2;
            let domain = Domain::Symmetric("all".to_owned());
            let memory = device.alloc(copies * bytes + copies * bytes / 2, &domain, "window").expect("alloc");
            device.register_window(&comm, &memory).expect("register");
            let send: Vec<Vista> =
                (0..copies).map(|at| View::new(&memory, at * bytes, n, DType::Bf16).expect("view")).collect();
            let recv: Vec<Vista> = (0..copies)
                .map(|at| {
                    View::new(&memory, copies * bytes + at * bytes / 2, n / 2, DType::Bf16).expect("view")
                })
                .collect();
            let plain = device.alloc(copies * (bytes + bytes / 2), &Domain::Default, "plain").expect("alloc");
            let psend: Vec<Vista> =
                (0..copies).map(|at| View::new(&plain, at * bytes, n, DType::Bf16).expect("view")).collect();
            let precv: Vec<Vista> = (0..copies)
                .map(|at| {
                    View::new(&plain, copies * bytes + at * bytes / 2, n / 2, DType::Bf16).expect("view")
                })
                .collect();
            let grads = device.alloc(copies * bytes, &Domain::Default, "grads").expect("alloc");
            let grad: Vec<Vista> = (0..copies)
                .map(|at| View::new(&grads, at * bytes, n / 2, DType::F32).expect("view"))
                .collect();
            let all = View::whole(&memory, DType::Bf16).expect("view");
            fill(&device, &s, &all, 1.0);
            fill(&device, &s, &View::whole(&plain, DType::Bf16).expect("view"), 1.0);
            fill(&device, &s, &View::whole(&grads, DType::F32).expect("view"), 0.0);
            let mut row = vec![format!("{:>9}", bytes >> 10)];
            for variant in ["one_shot", "symmetric+add", "ring+add"] {
                device.begin_capture(&s).expect("begin");
                for at in 0..20 {
                    let at = at % copies as usize;
                    let add = |from: &Vista| {
                        enqueue(&device, &s, Kernel::AddScaled { scale: 0.5 }, &[from, &grad[at]]);
                    };
                    match variant {
                        "one_shot" => {
                            let kind = Collective::ReduceScatterAccumulate { scale: 0.5 };
                            device.collective(&s, &comm, kind, &send[at], &grad[at]).expect("collective");
                        }
                        "symmetric+add" => {
                            let kind = Collective::SymmetricReduceScatter;
                            device.collective(&s, &comm, kind, &send[at], &recv[at]).expect("collective");
                            add(&recv[at]);
                        }
                        _ => {
                            let kind = Collective::ReduceScatter;
                            device.collective(&s, &comm, kind, &psend[at], &precv[at]).expect("collective");
                            add(&precv[at]);
                        }
                    }
                }
                let graph = device.end_capture(&s).expect("end");
                let mut times = Vec::new();
                for _ in 0..9 {
                    device.wait_stream(&s).expect("wait");
                    comm.exchange(&[]).expect("together");
                    let begin = std::time::Instant::now();
                    device.launch(&graph, &s).expect("launch");
                    device.launch(&graph, &s).expect("launch");
                    device.wait_stream(&s).expect("wait");
                    times.push(begin.elapsed().as_secs_f64() * 1e6 / 40.0);
                }
                times.sort_by(f64::total_cmp);
                row.push(format!("{:>8.1} ({:.1} to {:.1})", times[4], times[1], times[7]));
                if variant != "ring+add" && shift == 20 {
                    row.push(format!("[{} on {}]", graph.kernels()[0].name, graph.kernels()[0].grid));
                }
            }
            rows.push(row.join("  "));
        }
        rows
    });
    eprintln!(
        "KiB of the full gradient; us a call, median (2nd to 8th of 9): one_shot, symmetric + add, ring + add"
    );
    rows[0].iter().for_each(|row| eprintln!("{row}"));
}
