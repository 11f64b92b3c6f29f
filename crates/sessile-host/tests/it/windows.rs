//! Collectives on registered memory: FP32 sums, peers' memory, batches, and what is refused.

use half::bf16;
use sessile_hal::{Collective, Comm, Device, DeviceError, Memory, Transfer, View};
use sessile_host::{HostComm, HostDevice, HostMemory, Order, World, WorldOptions};
use sessile_plan::{DType, Domain};

use crate::support::{all_modes, buffer, bytes, fill, raw, read, run};

/// Registered memory of `comm` that holds `values` in `dtype`, from byte `offset`.
fn window(
    device: &HostDevice,
    comm: &HostComm,
    values: &[f32],
    dtype: DType,
    offset: u64,
) -> View<HostMemory> {
    let domain = Domain::Symmetric(comm.name().to_owned());
    let elements = values.len() as u64;
    let memory = device.alloc(offset + elements * dtype.size(), &domain, "window").expect("alloc");
    device.register_window(comm, &memory).expect("register");
    let view = View::new(&memory, offset, elements, dtype).expect("aligned");
    let data: Vec<u8> = match dtype {
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => bytes(values),
    };
    device.write(&device.stream("upload").expect("stream"), &view, &data).expect("write");
    view
}

fn everyone(device: &HostDevice) -> HostComm {
    let ranks: Vec<u32> = (0..device.world_size()).collect();
    device.communicator("all", &ranks).expect("comm")
}

/// Values whose FP32 sum depends on the order.
fn sent(rank: u32, at: usize) -> f32 {
    let scale = [1.0, 1e8, -1e8, 3.5, 0.1][rank as usize % 5];
    scale + at as f32 * 0.25
}

#[test]
fn accumulate_sums_in_rank_order_scales_once_and_adds_with_a_rounding_each() {
    for ranks in 1..=5u32 {
        for dtype in [DType::Bf16, DType::F32] {
            let n = 3;
            let widen = |x: f32| if dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x };
            let scale = 1.0 / ranks as f32;
            for options in all_modes(ranks) {
                let got = run(&options, |device| {
                    let comm = everyone(&device);
                    let values: Vec<f32> =
                        (0..n * ranks as usize).map(|at| sent(device.rank(), at)).collect();
                    let send = window(&device, &comm, &values, dtype, 256);
                    let grad = buffer(&device, &[1e-3; 3]);
                    let s = device.stream("s").expect("stream");
                    let kind = Collective::ReduceScatterAccumulate { scale };
                    for _ in 0..2 {
                        device.collective(&s, &comm, kind, &send, &grad).expect("collective");
                    }
                    read(&device, &s, &grad)
                });
                for (rank, got) in (0..ranks).zip(got) {
                    for (at, got) in got.into_iter().enumerate() {
                        let of = |peer: u32| widen(sent(peer, rank as usize * n + at));
                        let sum = (1..ranks).fold(of(0), |sum, peer| sum + of(peer));
                        let once = 1e-3f32 + scale * sum;
                        let want = once + scale * sum;
                        assert_eq!(got.to_bits(), want.to_bits(), "{ranks} ranks, rank {rank}, {options:?}");
                    }
                }
            }
        }
    }
}

/// Rank 0 holds 256, the others 1: bf16 adds from rank 0 stay at 256.
fn trap(kind: Collective, ranks: u32) -> Vec<f32> {
    run(&WorldOptions::threads(ranks, 2), |device| {
        let comm = everyone(&device);
        let value = if device.rank() == 0 { 256.0 } else { 1.0 };
        let send = window(&device, &comm, &vec![value; ranks as usize], DType::Bf16, 0);
        let s = device.stream("s").expect("stream");
        match kind {
            Collective::ReduceScatterAccumulate { .. } => {
                let grad = buffer(&device, &[0.0]);
                device.collective(&s, &comm, kind, &send, &grad).expect("collective");
                read(&device, &s, &grad)[0]
            }
            _ => {
                let out = window(&device, &comm, &[0.0], DType::Bf16, 0);
                device.collective(&s, &comm, kind, &send, &out).expect("collective");
                let bytes = device.read(&s, &out).expect("read");
                bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
            }
        }
    })
}

#[test]
fn the_bf16_trap_gives_263_in_fp32_and_one_rounding_in_a_symmetric_window() {
    assert_eq!(trap(Collective::ReduceScatterAccumulate { scale: 1.0 }, 8), [263.0; 8]);
    // 263 rounded once to 8 bits: a tie between 262 and 264, to even.
    assert_eq!(trap(Collective::SymmetricReduceScatter, 8), [264.0; 8]);
}

#[test]
fn a_batch_moves_every_transfer_and_is_one_piece_of_work() {
    for options in all_modes(2) {
        let got = run(&options, |device| {
            let comm = everyone(&device);
            let rank = device.rank() as f32;
            let sends: Vec<_> =
                (0..3).map(|at| window(&device, &comm, &[at as f32, rank], DType::F32, 0)).collect();
            let grads: Vec<_> = (0..3).map(|_| buffer(&device, &[0.0])).collect();
            let transfers: Vec<_> = sends
                .iter()
                .zip(&grads)
                .map(|(send, recv)| Transfer { send: send.clone(), recv: recv.clone() })
                .collect();
            let s = device.stream("s").expect("stream");
            let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
            let ticket = device.collective_batch(&s, &comm, kind, &transfers).expect("batch");
            device.wait_stream(&s).expect("wait");
            let spans = device.take_spans();
            assert_eq!(spans.iter().filter(|span| span.ticket == ticket).count(), 1);
            grads.iter().map(|grad| read(&device, &s, grad)[0]).collect::<Vec<_>>()
        });
        assert_eq!(got, [vec![0.0, 2.0, 4.0], vec![1.0, 1.0, 1.0]], "{options:?}");
    }
}

#[test]
fn a_batch_may_not_write_bytes_that_another_transfer_uses() {
    run(&WorldOptions::threads(1, 1), |device| {
        let comm = everyone(&device);
        let (a, b) = (buffer(&device, &[1.0, 2.0]), buffer(&device, &[0.0, 0.0]));
        let s = device.stream("s").expect("stream");
        let part = |view: &View<HostMemory>, at| view.slice(at, 1).expect("slice");
        let transfer = |send, recv| Transfer { send, recv };
        let twice = [transfer(part(&a, 0), part(&b, 0)), transfer(part(&a, 1), part(&b, 0))];
        let error = device.collective_batch(&s, &comm, Collective::AllGather, &twice).expect_err("twice");
        assert!(matches!(error, DeviceError::Operands { .. }), "{error}");
        let chained = [transfer(part(&a, 0), part(&b, 0)), transfer(part(&b, 0), part(&b, 1))];
        assert!(device.collective_batch(&s, &comm, Collective::AllGather, &chained).is_err());
        assert!(device.collective_batch(&s, &comm, Collective::AllGather, &[]).is_err());
        assert!(matches!(device.wait_stream(&s), Ok(())));
    });
}

#[test]
fn memory_that_is_not_registered_with_exactly_the_communicator_is_refused_before_the_call() {
    run(&WorldOptions::threads(2, 2), |device| {
        let (one, other) = (everyone(&device), device.communicator("twin", &[0, 1]).expect("comm"));
        let s = device.stream("s").expect("stream");
        let grad = buffer(&device, &[0.0]);
        let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
        let plain = buffer(&device, &[1.0, 2.0]);
        let registered = window(&device, &one, &[1.0, 2.0], DType::F32, 0);
        // The twin has the same ranks and is another domain all the same.
        for (comm, send) in [(&one, &plain), (&other, &plain), (&other, &registered)] {
            let error = device.collective(&s, comm, kind, send, &grad).expect_err("not registered");
            assert!(matches!(error, DeviceError::NotRegistered { .. }), "{error}");
        }
        let output = raw(&device, 1, "output");
        let symmetric = Collective::SymmetricReduceScatter;
        let error = device.collective(&s, &one, symmetric, &registered, &output).expect_err("output");
        assert!(matches!(error, DeviceError::NotRegistered { .. }), "{error}");
        device.collective(&s, &one, kind, &registered, &grad).expect("its own");
        assert_eq!(read(&device, &s, &grad), [[2.0], [4.0]][device.rank() as usize]);
    });
}

#[test]
fn views_at_unequal_offsets_of_the_window_are_a_mismatch_on_every_rank() {
    let world = World::new(WorldOptions::threads(2, 2));
    let results = world.run(|device| {
        let comm = everyone(&device);
        // Equal windows, other offsets.
        let values = [0.0; 128];
        let all = window(&device, &comm, &values, DType::F32, 0);
        let send = all.slice(u64::from(device.rank()) * 64, 2).expect("slice");
        let grad = buffer(&device, &[0.0]);
        let s = device.stream("s").expect("stream");
        let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
        device.collective(&s, &comm, kind, &send, &grad)?;
        device.wait_stream(&s)
    });
    for result in results {
        let error = result.expect_err("a mismatch").to_string();
        assert!(error.contains("offset 0 of the window") && error.contains("offset 256"), "{error}");
    }
}

/// Reduces, then overwrites the input at once, round after round.
fn reused_input(device: &HostDevice) -> f32 {
    let comm = everyone(device);
    let send = window(device, &comm, &[0.0, 0.0], DType::F32, 0);
    let grad = buffer(device, &[0.0]);
    let s = device.stream("s").expect("stream");
    let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
    for _ in 0..8 {
        fill(device, &s, &send, 1.0);
        device.collective(&s, &comm, kind, &send, &grad).expect("collective");
        fill(device, &s, &send, f32::NAN);
    }
    read(device, &s, &grad)[0]
}

#[test]
fn an_input_is_reusable_when_all_peers_have_read_it() {
    for options in all_modes(2) {
        assert_eq!(run(&options, |device| reused_input(&device)), [16.0; 2], "{options:?}");
    }
}

#[test]
fn without_the_exit_meeting_a_slow_peer_reads_overwritten_bytes() {
    let mut wrong = 0;
    for seed in 0..8 {
        let options =
            WorldOptions { omit_exit_meeting: true, ..WorldOptions::scheduled(2, seed, Order::WritersEarly) };
        wrong += run(&options, |device| reused_input(&device)).iter().filter(|x| x.is_nan()).count();
    }
    assert!(wrong > 0, "the meeting after the reading is not needed?");
}

#[test]
fn registration_in_a_capture_is_refused_and_the_capture_goes_on() {
    run(&WorldOptions::threads(2, 2), |device| {
        let comm = everyone(&device);
        let domain = Domain::Symmetric(comm.name().to_owned());
        let memory = device.alloc(64, &domain, "window").expect("alloc");
        let x = buffer(&device, &[0.0]);
        let s = device.stream("s").expect("stream");
        device.begin_capture(&s).expect("begin");
        let error = device.register_window(&comm, &memory).expect_err("in capture");
        assert!(matches!(error, DeviceError::ForbiddenInCapture { .. }), "{error}");
        assert!(matches!(device.remap(&memory), Err(DeviceError::ForbiddenInCapture { .. })));
        fill(&device, &s, &x, 3.0);
        let graph = device.end_capture(&s).expect("intact");
        device.launch(&graph, &s).expect("launch");
        assert_eq!(read(&device, &s, &x), [3.0]);
        device.register_window(&comm, &memory).expect("after the capture");
        device.register_window(&comm, &memory).expect("twice does nothing");
    });
}

#[test]
fn remapped_memory_keeps_its_address_and_loses_bytes_and_registration() {
    run(&WorldOptions::threads(1, 1), |device| {
        let comm = everyone(&device);
        let view = window(&device, &comm, &[1.0], DType::F32, 0);
        let (address, mapping) = (view.memory().address(), view.memory().mapping());
        device.remap(view.memory()).expect("remap");
        assert_eq!(view.memory().address(), address);
        assert_ne!(view.memory().mapping(), mapping);
        let s = device.stream("s").expect("stream");
        assert!(read(&device, &s, &view)[0].is_nan());
        let grad = buffer(&device, &[0.0]);
        let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
        assert!(device.collective(&s, &comm, kind, &view, &grad).is_err());
    });
}

#[test]
fn an_abort_ends_the_groups_collectives_on_every_rank_and_no_other_group() {
    for options in all_modes(3) {
        let world = World::new(options.clone());
        let results = world.run(|device| {
            let comm = everyone(&device);
            let others = device.communicator("others", &[0, 1, 2]).expect("comm");
            let x = buffer(&device, &[1.0]);
            let s = device.stream("s").expect("stream");
            let outcome = if device.rank() == 1 {
                comm.abort();
                device.collective(&s, &comm, Collective::AllReduce, &x, &x).map(drop)
            } else {
                // May be enqueued before or after the abort is known here.
                device
                    .collective(&s, &comm, Collective::AllReduce, &x, &x)
                    .and_then(|_| device.wait_stream(&s))
            };
            assert!(matches!(outcome, Err(DeviceError::Aborted { by: 1, .. })), "{outcome:?}");
            assert!(matches!(comm.exchange(&[1]), Err(DeviceError::Aborted { by: 1, .. })));
            device.collective(&s, &others, Collective::AllReduce, &x, &x).expect("another group");
            assert_eq!(read(&device, &s, &x), [3.0]);
            let again = everyone(&device);
            device.collective(&s, &again, Collective::AllReduce, &x, &x).expect("a new communicator");
            Ok::<_, DeviceError>(read(&device, &s, &x)[0])
        });
        for result in results {
            assert_eq!(result.expect("goes on"), 9.0, "{options:?}");
        }
    }
}

#[test]
fn unequal_sizes_and_odd_counts_of_one_communicator_replay_right_in_every_order() {
    for options in all_modes(3) {
        let got = run(&options, |device| {
            let comm = everyone(&device);
            let s = device.stream("s").expect("stream");
            let kind = Collective::ReduceScatterAccumulate { scale: 1.0 };
            // Three collectives a graph, small and large in turn, and one more of them eagerly after each launch.
            let sizes = [1usize, 4096, 3];
            let inputs: Vec<_> =
                sizes.iter().map(|n| window(&device, &comm, &vec![0.0; 3 * n], DType::F32, 0)).collect();
            let grads: Vec<_> = sizes.iter().map(|n| buffer(&device, &vec![0.0; *n])).collect();
            device.begin_capture(&s).expect("begin");
            for (input, grad) in inputs.iter().zip(&grads) {
                fill(&device, &s, input, 1.0);
                device.collective(&s, &comm, kind, input, grad).expect("collective");
                fill(&device, &s, input, f32::NAN);
            }
            let graph = device.end_capture(&s).expect("end");
            for _ in 0..20 {
                device.launch(&graph, &s).expect("launch");
                fill(&device, &s, &inputs[1], 1.0);
                device.collective(&s, &comm, kind, &inputs[1], &grads[1]).expect("eager");
            }
            grads.iter().flat_map(|grad| read(&device, &s, grad)).collect::<Vec<_>>()
        });
        for values in got {
            let (small, large) = (3.0 * 20.0, 3.0 * 40.0);
            assert_eq!((values[0], values[4097..].to_vec()), (small, vec![small; 3]), "{options:?}");
            assert!(values[1..4097].iter().all(|&x| x == large), "{options:?}");
        }
    }
}

#[test]
fn a_graph_dropped_while_another_stream_captures_leaves_the_capture_whole() {
    for options in all_modes(1) {
        let world = World::new(options.clone());
        let results = world.run(|device| {
            let (s, other) = (device.stream("s")?, device.stream("other")?);
            let x = buffer(&device, &[0.0; 4]);
            let scratch = raw(&device, 4, "scratch");
            device.begin_capture(&s)?;
            fill(&device, &s, &scratch, 1.0);
            let first = device.end_capture(&s)?;
            device.launch(&first, &s)?;
            let live = world.live_bytes(0);
            device.begin_capture(&other)?;
            fill(&device, &other, &x, 5.0);
            drop((first, scratch));
            fill(&device, &other, &x, 6.0);
            let second = device.end_capture(&other)?;
            device.launch(&second, &other)?;
            let value = read(&device, &other, &x)[0];
            device.wait_stream(&s)?;
            assert!(world.live_bytes(0) < live, "the dropped graph gave its memory back");
            Ok::<_, DeviceError>(value)
        });
        for result in results {
            assert_eq!(result.expect("goes on"), 6.0, "{options:?}");
        }
    }
}
