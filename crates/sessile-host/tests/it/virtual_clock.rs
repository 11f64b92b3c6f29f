//! The virtual clock, memory without bytes, and one rank that stands for many.

use sessile_hal::{Collective, Comm, Device, DeviceError, Kernel, Memory, Span, View};
use sessile_host::{Contention, CostModel, Data, HostDevice, Link, World, WorldOptions};
use sessile_plan::{DType, Domain};

use super::support::{add, buffer, copy, fill, raw, read, spin};

/// 1 GB/s everywhere, so that a byte is a nanosecond; an enqueue takes 10 ns, a graph 100.
fn costs() -> CostModel {
    let link = |name: &str| Link {
        name: name.to_owned(),
        bytes_per_second: 1_000_000_000,
        latency_ns: 1_000,
        hop_ns: 0,
    };
    CostModel {
        gemm_flops: 1_000_000_000,
        memory_bytes: 1_000_000_000,
        kernel_ns: 0,
        launch_ns: 10,
        graph_launch_ns: 100,
        contention: Contention::NONE,
        links: vec![("a".into(), link("one")), ("b".into(), link("one")), ("c".into(), link("other"))],
        other_link: link("rest"),
    }
}

fn simulate<T: Send>(ranks: u32, data: Data, program: impl Fn(&HostDevice) -> T + Sync) -> Vec<T> {
    run(&contended(ranks, 0.0, data), program)
}

fn run<T: Send>(world: &World, program: impl Fn(&HostDevice) -> T + Sync) -> Vec<T> {
    let results = world.run(|device| Ok::<T, DeviceError>(program(&device)));
    results.into_iter().map(|result| result.unwrap_or_else(|why| panic!("{why}"))).collect()
}

/// A world where collectives take this from kernels.
fn contended(ranks: u32, fraction: f64, data: Data) -> World {
    let contention = Contention::from_fraction(fraction).expect("a fraction");
    World::new(WorldOptions::simulated(ranks, CostModel { contention, ..costs() }, data))
}

fn times(spans: &[Span]) -> Vec<(u64, u64)> {
    spans.iter().map(|span| (span.begin, span.end)).collect()
}

fn done(device: &HostDevice, streams: &[&<HostDevice as Device>::Stream]) -> Vec<(u64, u64)> {
    for stream in streams {
        device.wait_stream(stream).expect("ends");
    }
    times(&device.take_spans())
}

#[test]
fn kernels_of_a_rank_take_turns_and_a_collective_runs_beside_them() {
    let spans = simulate(2, Data::ShapeOnly, |device| {
        let group = device.communicator("a", &[0, 1]).expect("group");
        let (one, two) = (device.stream("one").expect("stream"), device.stream("two").expect("stream"));
        let views: Vec<_> = (0..4).map(|at| raw(device, 1000, &format!("v{at}"))).collect();
        let half = views[3].slice(0, 500).expect("inside");
        // Enqueued at 10, 20 and 30. A copy moves 8,000 bytes; the collective sends 2,000 of 4,000.
        copy(device, &one, &views[0], &views[1]);
        fill(device, &two, &views[2], 1.0);
        device.collective(&one, &group, Collective::ReduceScatter, &views[1], &half).expect("enqueue");
        copy(device, &two, &views[2], &views[0]);
        done(device, &[&one, &two])
    });
    for spans in spans {
        let (first, second) = ((10, 8_010), (8_010, 12_010));
        let reduce = (8_010, 8_010 + 1_000 + 2_000);
        assert_eq!(spans, [first, second, reduce, (12_010, 20_010)]);
    }
}

/// Two spins of 8 us on each rank, and beside them, from about 20 ns on, a reduce-scatter of 1,000 ns and 2,000 bytes in each
/// of these groups. When the spins begin and end, and by how much they were delayed.
fn spins_beside(fraction: f64, kind: Collective, groups: &[&str]) -> ([(u64, u64); 2], u64) {
    let world = contended(2, fraction, Data::ShapeOnly);
    let spans = run(&world, |device| {
        let compute = device.stream("compute").expect("stream");
        let mut reductions = Vec::new();
        for name in groups {
            let group = device.communicator(name, &[0, 1]).expect("group");
            let memory = device.alloc(4_000, &Domain::Symmetric((*name).to_owned()), "sent").expect("alloc");
            device.register_window(&group, &memory).expect("register");
            let sent = View::whole(&memory, DType::F32).expect("aligned");
            reductions.push((device.stream(name).expect("stream"), group, sent, raw(device, 500, "part")));
        }
        spin(device, &compute, 8);
        for (stream, group, sent, part) in &reductions {
            device.collective(stream, group, kind, sent, part).expect("enqueue");
        }
        spin(device, &compute, 8);
        let streams: Vec<_> = reductions.iter().map(|(stream, ..)| stream).chain([&compute]).collect();
        let spans = done(device, &streams);
        [spans[0], spans[spans.len() - 1]]
    });
    let delays = [0, 1].map(|rank| world.take_delay_ns(rank));
    assert_eq!((spans[0], delays[0]), (spans[1], delays[1]), "both ranks are delayed alike");
    (spans[0], delays[0])
}

#[test]
fn a_collective_delays_kernels_beside_it_by_a_part_of_its_own_time() {
    let kinds = [Collective::ReduceScatter, Collective::ReduceScatterAccumulate { scale: 1.0 }];
    for kind in kinds {
        for (fraction, delay) in [(0.0, 0), (0.25, 750), (0.5, 1_500), (1.0, 3_000)] {
            let first = 8_010 + delay;
            let expected = ([(10, first), (first, first + 8_000)], delay);
            assert_eq!(spins_beside(fraction, kind, &["a"]), expected, "{kind:?}, contention {fraction}");
        }
    }
}

#[test]
fn collectives_in_turns_and_at_once_delay_kernels_each_by_its_part() {
    // a and b share a link, a and c do not.
    for groups in [["a", "b"], ["a", "c"]] {
        let (_, delay) = spins_beside(0.25, Collective::ReduceScatter, &groups);
        assert_eq!(delay, 1_500, "{groups:?}");
    }
    // Beside two at once a kernel stands still, and no more than that.
    let (_, delay) = spins_beside(1.0, Collective::ReduceScatter, &["a", "c"]);
    assert_eq!(delay, 3_010, "from 20 to 3,030");
}

#[test]
fn a_collective_begins_when_its_last_member_is_ready() {
    let spans = simulate(2, Data::ShapeOnly, |device| {
        let group = device.communicator("a", &[0, 1]).expect("group");
        let stream = device.stream("s").expect("stream");
        let (from, to) = (raw(device, 100, "from"), raw(device, 100, "to"));
        spin(device, &stream, if device.rank() == 0 { 1 } else { 5 });
        device.collective(&stream, &group, Collective::AllReduce, &from, &to).expect("enqueue");
        done(device, &[&stream])
    });
    // Rank 1 spins to 5,010; an all-reduce of 400 bytes over 2 sends 400.
    assert_eq!(spans[0], [(10, 1_010), (1_010, 6_410)]);
    assert_eq!(spans[1], [(10, 5_010), (5_010, 6_410)]);
}

#[test]
fn groups_on_one_link_take_turns_and_others_do_not() {
    let spans = simulate(2, Data::ShapeOnly, |device| {
        let streams: Vec<_> = ["a", "b", "c"].map(|name| device.stream(name).expect("stream")).into();
        for (name, stream) in ["a", "b", "c"].iter().zip(&streams) {
            let group = device.communicator(name, &[0, 1]).expect("group");
            let (from, to) = (raw(device, 1000, "from"), raw(device, 500, "to"));
            device.collective(stream, &group, Collective::ReduceScatter, &from, &to).expect("enqueue");
        }
        done(device, &streams.iter().collect::<Vec<_>>())
    });
    // 1,000 ns and 2,000 bytes each.
    let (a, b, c) = ((10, 3_010), (20, 6_010), (30, 3_030));
    assert!(spans.iter().all(|spans| *spans == [a, b, c]), "{spans:?}");
}

#[test]
fn a_graph_is_one_launch_however_many_nodes_it_has() {
    let ends = |captured: bool| {
        let spans = simulate(1, Data::ShapeOnly, |device| {
            let stream = device.stream("s").expect("stream");
            let view = raw(device, 1, "v");
            if captured {
                device.begin_capture(&stream).expect("begin");
            }
            for _ in 0..50 {
                fill(device, &stream, &view, 0.0);
            }
            if captured {
                let graph = device.end_capture(&stream).expect("end");
                device.launch(&graph, &stream).expect("launch");
            }
            done(device, &[&stream])
        });
        spans[0].last().expect("50 fills").1
    };
    // Eagerly the host is the limit: 50 times 10 ns. A graph starts at 100 and its fills take 4 ns each.
    assert_eq!((ends(false), ends(true)), (504, 300));
}

#[test]
fn a_host_that_waited_goes_on_at_the_end_of_what_it_waited_for() {
    let spans = simulate(2, Data::ShapeOnly, |device| {
        let world = device.communicator("a", &[0, 1]).expect("group");
        let stream = device.stream("s").expect("stream");
        if device.rank() == 0 {
            spin(device, &stream, 7);
            device.wait_stream(&stream).expect("ends");
        }
        world.exchange(&[]).expect("meets");
        spin(device, &stream, 1);
        done(device, &[&stream])
    });
    assert_eq!(spans[0], [(10, 7_010), (7_020, 8_020)]);
    assert_eq!(spans[1], [(7_020, 8_020)], "the exchange took rank 1 along");
}

#[test]
fn times_do_not_depend_on_host_threads() {
    let times = |fraction| {
        let world = contended(6, fraction, Data::ShapeOnly);
        run(&world, |device| {
            let rank = device.rank();
            let pair = [rank / 2 * 2, rank / 2 * 2 + 1];
            let near = device.communicator(&format!("a.{}", rank / 2), &pair).expect("group");
            let all = device.communicator("b", &[0, 1, 2, 3, 4, 5]).expect("group");
            let (one, two) = (device.stream("one").expect("stream"), device.stream("two").expect("stream"));
            let (from, to) = (raw(device, 600, "from"), raw(device, 600, "to"));
            for round in 0..8 {
                spin(device, &one, u64::from((rank * 7 + round) % 5));
                let part = to.slice(0, 300).expect("inside");
                device.collective(&one, &near, Collective::ReduceScatter, &from, &part).expect("enqueue");
                spin(device, &two, u64::from((rank + round) % 3));
                device.collective(&two, &all, Collective::AllReduce, &from, &to).expect("enqueue");
            }
            done(device, &[&one, &two])
        })
    };
    for fraction in [0.0, 0.3] {
        let first = times(fraction);
        assert!(first.iter().all(|spans| spans.len() == 32));
        for _ in 0..10 {
            assert_eq!(times(fraction), first);
        }
    }
    assert_ne!(times(0.0), times(0.3));
}

#[test]
fn memory_without_data_has_an_address_and_a_size_and_takes_no_space() {
    simulate(1, Data::ShapeOnly, |device| {
        let (one, two) = (huge(device, "one"), huge(device, "two"));
        assert!(one.address() + (1 << 44) <= two.address(), "{one:?} {two:?}");
        let stream = device.stream("s").expect("stream");
        let few = one.slice(1 << 40, 4).expect("inside");
        device.write(&stream, &few, &[7; 16]).expect("write");
        assert_eq!(device.read(&stream, &few).expect("read"), [0; 16]);
        copy(device, &stream, &one, &two);
        device.remap(one.memory()).expect("remap");
        assert_eq!(one.memory().mapping(), 1);
        // 2^45 bytes at one a nanosecond.
        assert_eq!(done(device, &[&stream]), [(10, 10 + (1 << 45))]);
    });
}

fn huge(device: &HostDevice, label: &str) -> View<<HostDevice as Device>::Memory> {
    let memory = device.alloc(1 << 44, &Domain::Default, label).expect("takes no space");
    View::whole(&memory, DType::F32).expect("aligned")
}

#[test]
fn a_limit_holds_without_data() {
    let limited =
        WorldOptions { memory_limit: Some(1 << 20), ..WorldOptions::simulated(1, costs(), Data::ShapeOnly) };
    let results = World::new(limited).run(|device| device.alloc(1 << 21, &Domain::Default, "big").map(drop));
    assert!(format!("{results:?}").contains("OutOfMemory"), "{results:?}");
}

#[test]
fn with_data_the_virtual_clock_computes() {
    let sums = simulate(2, Data::Real, |device| {
        let group = device.communicator("a", &[0, 1]).expect("group");
        let stream = device.stream("s").expect("stream");
        let (from, to) = (buffer(device, &[1.0, 2.0]), buffer(device, &[0.0, 0.0]));
        add(device, &stream, &from, &to);
        device.collective(&stream, &group, Collective::AllReduce, &to, &from).expect("enqueue");
        read(device, &stream, &from)
    });
    assert_eq!(sums, [[2.0, 4.0], [2.0, 4.0]]);
}

/// Work of every kind, alike on all ranks.
fn uniform(device: &HostDevice, ranks: u32) -> (Vec<(u64, u64)>, usize) {
    let everyone: Vec<u32> = (0..ranks).collect();
    let world = device.communicator("world", &everyone).expect("group");
    let first = device.rank() / 8 * 8;
    let eight: Vec<u32> = (first..first + 8).collect();
    let near = device.communicator(&format!("a.{}", first / 8), &eight).expect("group");
    let stride: Vec<u32> = (0..ranks / 8).map(|at| at * 8 + device.rank() % 8).collect();
    let far = device.communicator(&format!("c.{}", device.rank() % 8), &stride).expect("group");
    let streams = ["one", "two"].map(|name| device.stream(name).expect("stream"));
    let domain = Domain::Symmetric(near.name().to_owned());
    let registered = device.alloc(64_000, &domain, "registered").expect("alloc");
    device.register_window(&near, &registered).expect("register");
    let send = View::whole(&registered, DType::F32).expect("aligned");
    let (part, all) = (raw(device, 2_000, "part"), raw(device, 16_000, "all"));
    device.begin_capture(&streams[0]).expect("begin");
    fill(device, &streams[0], &send, 1.0);
    let accumulate = Collective::ReduceScatterAccumulate { scale: 1.0 };
    device.collective(&streams[0], &near, accumulate, &send, &part).expect("enqueue");
    device.collective(&streams[0], &near, Collective::AllGather, &part, &all).expect("enqueue");
    let graph = device.end_capture(&streams[0]).expect("end");
    for _ in 0..3 {
        device.launch(&graph, &streams[0]).expect("launch");
        device.collective(&streams[1], &far, Collective::AllReduce, &all, &send).expect("enqueue");
        super::support::enqueue(device, &streams[1], Kernel::Scale { factor: 2.0 }, &[&all]);
        device.wait_stream(&streams[1]).expect("ends");
    }
    let met = world.exchange(&[1, 2, 3]).expect("meets");
    assert!(met.iter().all(|payload| payload == &[1, 2, 3]));
    (done(device, &[&streams[0]]), met.len())
}

#[test]
fn one_rank_stands_for_64_to_the_nanosecond() {
    for fraction in [0.0, 0.4] {
        let (all, folded) = (contended(64, fraction, Data::ShapeOnly), contended(64, fraction, Data::Folded));
        let of = |world| run(world, |device| uniform(device, 64));
        let (spans, one) = (of(&all), of(&folded));
        assert_eq!((spans.len(), one.len()), (64, 1));
        assert_eq!(one[0].1, 64, "an exchange has an answer for each member");
        assert!(one[0].0.len() >= 15, "{one:?}");
        let delay = folded.take_delay_ns(0);
        assert_eq!(delay > 0, fraction > 0.0, "{delay}");
        for (rank, other) in (0..).zip(&spans) {
            assert_eq!((other, all.take_delay_ns(rank)), (&one[0], delay), "rank {rank}");
        }
    }
}
