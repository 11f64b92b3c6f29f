//! Collectives between two GPUs, in eager work and in graphs.

use half::bf16;
use sessile_conformance::{buffer, bytes, enqueue, fill, floats, raw, read, spin};
use sessile_cuda::{CudaComm, CudaDevice, CudaMemory};
use sessile_hal::{
    Collective, Comm, Device, DeviceError, EventScope, Graph, Kernel, Memory, NodeKind, Transfer, View,
};
use sessile_plan::{DType, Domain};

use crate::worlds::{Threads, can_run, gpus};

type Vista = View<CudaMemory>;

fn everyone(device: &CudaDevice) -> CudaComm {
    let ranks: Vec<u32> = (0..device.world_size()).collect();
    device.communicator("all", &ranks).expect("comm")
}

/// Registered memory of `comm` with room for `elements` of `dtype`.
fn window(device: &CudaDevice, comm: &CudaComm, dtype: DType, elements: u64) -> Vista {
    let domain = Domain::Symmetric(comm.name().to_owned());
    let memory = device.alloc(elements * dtype.size(), &domain, "window").expect("alloc");
    device.register_window(comm, &memory).expect("register");
    View::whole(&memory, dtype).expect("aligned")
}

fn narrow(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
}

fn widen(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect()
}

/// What rank `rank` sends at `at`: small numbers, whose sums are exact in every order.
fn sent(rank: u32, at: usize) -> f32 {
    (rank as usize * 3 + at % 7) as f32
}

#[test]
fn every_kind_gives_its_definition_also_in_batches_and_graphs() {
    if !can_run("every_kind_gives_its_definition_also_in_batches_and_graphs", 2) {
        return;
    }
    Threads::new().results(2, |device| {
        let (me, comm) = (device.rank(), everyone(&device));
        let s = device.stream("s").expect("stream");
        for n in [1usize, 5, 1000, 65_537] {
            let mine: Vec<f32> = (0..2 * n).map(|at| sent(me, at)).collect();
            let all = |at: usize| sent(0, at) + sent(1, at);
            let block = me as usize * n;
            let send = buffer(&device, &mine);
            let (small, large) = (raw(&device, n as u64, "small"), raw(&device, 4 * n as u64, "large"));
            let check = |how: &str| {
                let want: Vec<f32> = (0..n).map(|at| all(block + at)).collect();
                assert_eq!(read(&device, &s, &small), want, "reduce-scatter {how} {n}");
                let gathered = large.slice(0, 2 * n as u64).expect("slice");
                let want: Vec<f32> = (0..2 * n).map(|at| sent((at / n) as u32, block + at % n)).collect();
                assert_eq!(read(&device, &s, &gathered), want, "all-to-all {how} {n}");
                let summed = large.slice(2 * n as u64, 2 * n as u64).expect("slice");
                let want: Vec<f32> = (0..2 * n).map(all).collect();
                assert_eq!(read(&device, &s, &summed), want, "all-reduce {how} {n}");
            };
            let enqueue_all = || {
                let half = |first| large.slice(first, 2 * n as u64).expect("slice");
                device.collective(&s, &comm, Collective::ReduceScatter, &send, &small).expect("rs");
                device.collective(&s, &comm, Collective::AllToAll, &send, &half(0)).expect("a2a");
                device.collective(&s, &comm, Collective::AllReduce, &send, &half(2 * n as u64)).expect("ar");
            };
            enqueue_all();
            check("eager");
            fill(&device, &s, &small, f32::NAN);
            fill(&device, &s, &large, f32::NAN);
            device.begin_capture(&s).expect("begin");
            enqueue_all();
            let graph = device.end_capture(&s).expect("end");
            let tickets = graph.nodes().iter().filter(|node| node.ticket.is_some()).count();
            assert_eq!(tickets, 3, "{:?}", graph.nodes());
            for _ in 0..3 {
                device.launch(&graph, &s).expect("launch");
            }
            check("graph");
            // A batch of gathers is one piece of work.
            let outs = [raw(&device, 4 * n as u64, "a"), raw(&device, 2 * n as u64, "b")];
            let half = send.slice(0, n as u64).expect("slice");
            let transfers = [
                Transfer { send: send.clone(), recv: outs[0].clone() },
                Transfer { send: half, recv: outs[1].clone() },
            ];
            device.collective_batch(&s, &comm, Collective::AllGather, &transfers).expect("batch");
            let want: Vec<f32> = (0..4 * n).map(|at| sent((at / (2 * n)) as u32, at % (2 * n))).collect();
            assert_eq!(read(&device, &s, &outs[0]), want);
            let want: Vec<f32> = (0..2 * n).map(|at| sent((at / n) as u32, at % n)).collect();
            assert_eq!(read(&device, &s, &outs[1]), want);
        }
    });
}

#[test]
fn a_symmetric_reduce_scatter_runs_the_symmetric_kernel_in_a_graph() {
    if !can_run("a_symmetric_reduce_scatter_runs_the_symmetric_kernel_in_a_graph", 2) {
        return;
    }
    let names = Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let n = 1 << 20;
        let (send, recv) =
            (window(&device, &comm, DType::Bf16, 2 * n), window(&device, &comm, DType::Bf16, n));
        let values: Vec<f32> = (0..2 * n as usize).map(|at| sent(device.rank(), at)).collect();
        device.write(&s, &send, &narrow(&values)).expect("write");
        let mut names = Vec::new();
        for kind in [Collective::SymmetricReduceScatter, Collective::ReduceScatter] {
            device.begin_capture(&s).expect("begin");
            device.collective(&s, &comm, kind, &send, &recv).expect("collective");
            let graph = device.end_capture(&s).expect("end");
            device.launch(&graph, &s).expect("launch");
            let block = device.rank() as usize * n as usize;
            let got = widen(&device.read(&s, &recv).expect("read"));
            let want: Vec<f32> =
                (0..n as usize).map(|at| sent(0, block + at) + sent(1, block + at)).collect();
            assert_eq!(got, want);
            let kernel = &graph.kernels()[0];
            names.push(format!("{} on {} blocks of {}", kernel.name, kernel.grid, kernel.block));
            let kinds: Vec<NodeKind> = graph.nodes().into_iter().map(|node| node.kind).collect();
            assert_eq!(kinds.iter().filter(|kind| **kind == NodeKind::Collective).count(), 1, "{kinds:?}");
        }
        names
    });
    eprintln!("kernels: {:?}", names[0]);
    assert!(names.iter().all(|names| names[0].contains("Symk") || names[0].contains("SymDev")), "{names:?}");
}

/// A tiny producer right before the collective, one buffer, every result checked: NCCL 2.28 to 2.30.6 may start the
/// symmetric kernel before the producer has written, unless something else than a kernel stands between.
#[test]
fn a_symmetric_kernel_waits_for_its_producer_in_ten_thousand_replays() {
    if !can_run("a_symmetric_kernel_waits_for_its_producer_in_ten_thousand_replays", 2) {
        return;
    }
    let wrong = Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let n = 4096u64;
        let (send, recv) =
            (window(&device, &comm, DType::Bf16, 2 * n), window(&device, &comm, DType::Bf16, n));
        let (wide, sum) = (raw(&device, 2 * n, "wide"), buffer(&device, &vec![0.0; n as usize]));
        // 0 to 63: exact in bf16, also the sum of two.
        let graphs: Vec<_> = (0..64u32)
            .map(|value| {
                device.begin_capture(&s).expect("begin");
                fill(&device, &s, &wide, value as f32);
                enqueue(&device, &s, Kernel::Cast, &[&wide, &send]);
                device.collective(&s, &comm, Collective::SymmetricReduceScatter, &send, &recv).expect("rs");
                // What is off by anything makes the sum of (result - 2 value) differ from 0.
                fill(&device, &s, &wide, -2.0 * value as f32);
                enqueue(&device, &s, Kernel::Add, &[&recv, &wide.slice(0, n).expect("slice")]);
                enqueue(&device, &s, Kernel::Add, &[&wide.slice(0, n).expect("slice"), &sum]);
                device.end_capture(&s).expect("end")
            })
            .collect();
        let mut wrong = 0;
        for round in 0..157u32 {
            for graph in &graphs {
                device.launch(graph, &s).expect("launch");
            }
            if round % 13 == 0 || round == 156 {
                let off = read(&device, &s, &sum);
                wrong += off.iter().filter(|x| **x != 0.0).count();
                fill(&device, &s, &sum, 0.0);
            }
        }
        wrong
    });
    assert_eq!(wrong, [0, 0]);
}

#[test]
fn fences_between_graphs_hold_over_a_reduce_scatter() {
    if !can_run("fences_between_graphs_hold_over_a_reduce_scatter", 2) {
        return;
    }
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let (a, b) = (device.stream("a").expect("stream"), device.stream("b").expect("stream"));
        let (fork, join) = (
            device.event(EventScope::Internal).expect("event"),
            device.event(EventScope::Internal).expect("event"),
        );
        let read_done = device.event(EventScope::External).expect("event");
        let written = device.event(EventScope::External).expect("event");
        let n = 1 << 18;
        let (send, recv) = (raw(&device, 2 * n, "send"), raw(&device, n, "recv"));
        let (count, ones) = (buffer(&device, &[0.0]), buffer(&device, &[1.0]));
        let log = raw(&device, n, "log");
        // Writer: waits until the last reader has read, writes the next value, records. Reader: waits for it, reduces.
        device.begin_capture(&a).expect("begin");
        device.wait(&a, &read_done).expect("wait");
        enqueue(&device, &a, Kernel::Add, &[&ones, &count]);
        spin(&device, &a, 50);
        enqueue(&device, &a, Kernel::Scale { factor: 2.0 }, &[&send]);
        device.record(&a, &written).expect("record");
        let writer = device.end_capture(&a).expect("end");
        device.begin_capture(&b).expect("begin");
        device.record(&b, &fork).expect("record");
        let side = device.stream("side").expect("stream");
        device.wait(&side, &fork).expect("fork");
        device.wait(&side, &written).expect("wait");
        spin(&device, &side, 100);
        device.collective(&side, &comm, Collective::ReduceScatter, &send, &recv).expect("rs");
        device.record(&side, &read_done).expect("record");
        enqueue(&device, &side, Kernel::Copy, &[&recv, &log]);
        device.record(&side, &join).expect("record");
        device.wait(&b, &join).expect("join");
        let reader = device.end_capture(&b).expect("end");
        fill(&device, &a, &send, 1.0);
        device.wait_stream(&a).expect("wait");
        for step in 1..=20 {
            device.launch(&writer, &a).expect("launch");
            device.launch(&reader, &b).expect("launch");
            if step % 5 == 0 {
                let got = read(&device, &b, &log);
                let want = 2.0f32 * 2.0f32.powi(step);
                assert!(got.iter().all(|x| *x == want), "step {step}: {} instead of {want}", got[0]);
            }
        }
    });
}

#[test]
fn an_abort_ends_the_groups_collectives_on_every_rank_and_no_other_group() {
    if !can_run("an_abort_ends_the_groups_collectives_on_every_rank_and_no_other_group", 2) {
        return;
    }
    Threads::new().results(2, |device| {
        let (comm, other) = (everyone(&device), device.communicator("other", &[0, 1]).expect("comm"));
        let s = device.stream("s").expect("stream");
        let x = buffer(&device, &[1.0]);
        if device.rank() == 0 {
            // Rank 1 never comes.
            device.collective(&s, &comm, Collective::AllReduce, &x, &x).expect("enqueues");
            let error = device.wait_stream(&s).expect_err("aborted");
            assert!(matches!(error, DeviceError::Aborted { by: 1, .. }), "{error}");
        } else {
            std::thread::sleep(std::time::Duration::from_millis(300));
            comm.abort();
            let error = device.wait_stream(&s).expect_err("told at the next wait");
            assert!(matches!(error, DeviceError::Aborted { by: 1, .. }), "{error}");
        }
        let again = device.collective(&s, &comm, Collective::AllReduce, &x, &x);
        assert!(matches!(again, Err(DeviceError::Aborted { .. })), "{again:?}");
        device.wait_stream(&s).expect("told once");
        let y = buffer(&device, &[1.0]);
        device.collective(&s, &other, Collective::AllReduce, &y, &y).expect("goes on");
        assert_eq!(read(&device, &s, &y), [2.0]);
    });
}

#[test]
fn a_rank_that_goes_without_a_word_is_named_to_those_who_wait_for_it() {
    if !can_run("a_rank_that_goes_without_a_word_is_named_to_those_who_wait_for_it", 2) {
        return;
    }
    let begin = std::time::Instant::now();
    let panics = std::panic::catch_unwind(|| {
        Threads::new().results(2, |device| {
            let comm = everyone(&device);
            let s = device.stream("s").expect("stream");
            let x = buffer(&device, &[1.0]);
            if device.rank() == 1 {
                panic!("on purpose");
            }
            device.collective(&s, &comm, Collective::AllReduce, &x, &x).expect("enqueues");
            let error = device.wait_stream(&s).expect_err("lost");
            assert!(matches!(error, DeviceError::PeerLost { peer: 1, .. }), "{error}");
        })
    });
    let why = panics.expect_err("rank 1's");
    assert_eq!(why.downcast_ref::<&str>(), Some(&"on purpose"), "and no other");
    assert!(begin.elapsed() < std::time::Duration::from_secs(30));
}

#[test]
fn a_rank_that_fails_ends_at_once_and_the_others_say_why() {
    if !can_run("a_rank_that_fails_ends_at_once_and_the_others_say_why", 2) {
        return;
    }
    let begin = std::time::Instant::now();
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let s = device.stream("s").expect("stream");
        let x = buffer(&device, &[1.0]);
        if device.rank() == 1 {
            return device.fail("no memory for its arenas");
        }
        device.collective(&s, &comm, Collective::AllReduce, &x, &x).expect("enqueues");
        let error = device.wait_stream(&s).expect_err("rank 1 has failed");
        let DeviceError::PeerFailed { peer: 1, why, .. } = &error else { panic!("{error}") };
        assert_eq!(why, "no memory for its arenas");
        device.fail(&error.to_string());
    });
    assert!(begin.elapsed() < std::time::Duration::from_secs(20));
}

/// Takes what there is of a GPU's memory, in pieces that get smaller.
fn eat(device: &CudaDevice) -> Vec<CudaMemory> {
    let mut eaten = Vec::new();
    let mut piece = 1u64 << 34;
    while piece >= 2 << 20 {
        match device.alloc(piece, &Domain::Default, "eaten") {
            Ok(memory) => eaten.push(memory),
            Err(DeviceError::OutOfMemory { .. }) => piece /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    eaten
}

#[test]
fn a_group_that_a_member_has_no_memory_for_is_not_made_and_all_say_so_at_once() {
    if !can_run("a_group_that_a_member_has_no_memory_for_is_not_made_and_all_say_so_at_once", 1) {
        return;
    }
    let (begin, shared) = (std::time::Instant::now(), gpus().expect("checked") == 1);
    Threads::new().results(2, |device| {
        let comm = everyone(&device);
        let eaten = if device.rank() == 0 { eat(&device) } else { Vec::new() };
        comm.exchange(&[]).expect("meets");
        let error = device.communicator("hungry", &[0, 1]).expect_err("no memory");
        let own = matches!(error, DeviceError::OutOfMemory { .. } | DeviceError::Communicator { .. });
        let told = matches!(&error, DeviceError::PeerFailed { why, .. } if why.contains("memory"));
        assert!(own || told, "{error}");
        // Which of two ranks on one GPU is told by the other is open.
        assert!(own || device.rank() == 1 || shared, "{error}");
        assert!(begin.elapsed() < std::time::Duration::from_secs(30), "{:?}", begin.elapsed());
        comm.exchange(&[]).expect("meets");
        drop(eaten);
        let s = device.stream("s").expect("stream");
        // What was dropped goes at the next allocation.
        let x = buffer(&device, &[1.0]);
        comm.exchange(&[]).expect("meets");
        let again = device.communicator("fed", &[0, 1]).expect("there is memory again");
        if !shared {
            device.collective(&s, &again, Collective::AllReduce, &x, &x).expect("enqueues");
            assert_eq!(read(&device, &s, &x), [2.0]);
        }
    });
}

#[test]
fn windows_hold_what_peers_write_into_no_one_else_and_go_in_any_order() {
    let test = "windows_hold_what_peers_write_into_no_one_else_and_go_in_any_order";
    if !can_run(test, 1) {
        return;
    }
    Threads::new().results(3, |device| {
        let comm = everyone(&device);
        let s = device.stream("s").expect("stream");
        let view = window(&device, &comm, DType::F32, 1000);
        device.register_window(&comm, view.memory()).expect("a second time it does nothing");
        device.write(&s, &view, &bytes(&[device.rank() as f32; 1000])).expect("write");
        comm.exchange(&[]).expect("all have written");
        assert_eq!(floats(&device.read(&s, &view).expect("read")), [device.rank() as f32; 1000]);
        let (address, mapping) = (view.memory().address(), view.memory().mapping());
        device.remap(view.memory()).expect("remaps");
        assert_eq!((view.memory().address(), view.memory().mapping()), (address, mapping + 1));
        let kind = Collective::SymmetricReduceScatter;
        let recv = view.slice(0, 300).expect("slice");
        let send = view.slice(100, 900).expect("slice");
        let error = device.collective(&s, &comm, kind, &send, &recv).expect_err("not registered any more");
        assert!(matches!(error, DeviceError::Operands { .. } | DeviceError::NotRegistered { .. }), "{error}");
        device.register_window(&comm, view.memory()).expect("again");
        match device.rank() {
            0 => drop((comm, view)),
            1 => drop((view, comm)),
            _ => {}
        }
    });
}

#[test]
fn what_is_dropped_in_a_capture_is_freed_after_it_and_memory_comes_back() {
    if !can_run("what_is_dropped_in_a_capture_is_freed_after_it_and_memory_comes_back", 1) {
        return;
    }
    Threads::new().results(1, |device| {
        let s = device.stream("s").expect("stream");
        let size = 256u64 << 20;
        let alloc = |label: &str| device.alloc(size, &Domain::Default, label).expect("alloc");
        drop(alloc("warm"));
        device.wait_stream(&s).expect("reaps");
        let (before, _) = device.free_memory().expect("free");
        for _ in 0..3 {
            let (kept, dropped) = (alloc("kept"), alloc("dropped"));
            let view = View::new(&kept, 0, 1000, DType::F32).expect("view");
            device.begin_capture(&s).expect("begin");
            fill(&device, &s, &view, 1.0);
            drop(dropped);
            fill(&device, &s, &view, 2.0);
            let graph = device.end_capture(&s).expect("not broken by the drop");
            drop((kept, view));
            for _ in 0..5 {
                device.launch(&graph, &s).expect("the graph owns its memory");
            }
            drop(graph);
            device.wait_stream(&s).expect("wait");
            device.wait_stream(&s).expect("reaps");
        }
        let (after, _) = device.free_memory().expect("free");
        assert!(after + (64 << 20) >= before, "{before} bytes free before, {after} after");
    });
}
