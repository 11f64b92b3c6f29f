//! The promises. Each panics if the device breaks it.
#![allow(missing_docs, clippy::missing_panics_doc, reason = "the names are the promises")]

use sessile_hal::{
    Access, Collective, Comm, Device, DeviceError, EventScope, Graph, Kernel, Memory, NodeKind, Op, Stream,
    Ticket, View,
};
use sessile_plan::{DType, Domain};

use crate::Worlds;
use crate::support::{add, buffer, copy, enqueue, fill, raw, read, spin};

pub fn ranks_know_their_place<W: Worlds>(worlds: &W) {
    worlds.run(3, |device| {
        assert_eq!(device.world_size(), 3);
        assert!(device.rank() < 3);
        let comm = device.communicator("all", &[2, 0, 1]).expect("comm");
        assert_eq!((comm.name(), comm.ranks(), comm.size()), ("all", &[2, 0, 1][..], 3));
        assert_eq!(comm.ranks()[comm.rank() as usize], device.rank());
        let mine = [device.rank() as u8];
        assert_eq!(comm.exchange(&mine).expect("exchange"), [[2], [0], [1]]);
    });
}

pub fn allocations_have_identity_and_alignment<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let limits = device.limits();
        let domain = Domain::Symmetric("g".to_owned());
        let a = device.alloc(100, &domain, "a").expect("alloc");
        let b = device.alloc(100, &Domain::Default, "b").expect("alloc");
        assert_eq!((a.bytes(), a.label(), a.domain()), (100, "a", &domain));
        assert_eq!(a.id().rank, device.rank());
        assert_ne!(a.id(), b.id());
        assert!(a.address().is_multiple_of(limits.base_align));
        assert!(a.address() + 100 <= b.address() || b.address() + 100 <= a.address());
        let id = b.id();
        drop(b);
        assert_ne!(device.alloc(100, &Domain::Default, "c").expect("alloc").id(), id, "never used again");
        assert!(View::new(&a, 96, 2, DType::F32).is_err());
        assert!(View::new(&a, 2, 1, DType::F32).is_err());
    });
}

pub fn tickets_count_every_enqueue_from_one<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let s = device.stream("s").expect("stream");
        let event = device.event(EventScope::External).expect("event");
        let view = buffer(&device, &[0.0]);
        let op = || Op::new(Kernel::Scale { factor: 1.0 }, "op", vec![view.clone()]).expect("operands");
        let mut tickets =
            vec![device.enqueue(&s, op()).expect("op"), device.record(&s, &event).expect("record")];
        tickets.push(device.wait(&s, &event).expect("wait"));
        device.begin_capture(&s).expect("begin");
        assert!(device.launch_is_forbidden(&s), "and takes no ticket");
        tickets.push(device.enqueue(&s, op()).expect("op"));
        let graph = device.end_capture(&s).expect("end");
        tickets.push(device.launch(&graph, &s).expect("launch"));
        assert_eq!(tickets, [1, 2, 3, 4, 5].map(Ticket));
        assert_eq!(graph.nodes()[0].ticket, Some(Ticket(4)));
    });
}

trait Forbidden: Device {
    fn launch_is_forbidden(&self, stream: &Self::Stream) -> bool {
        let eager = self.stream("elsewhere").expect("stream");
        let told = self.wait_stream(stream);
        assert!(self.wait_stream(&eager).is_ok());
        matches!(told, Err(DeviceError::ForbiddenInCapture { .. }))
    }
}

impl<D: Device> Forbidden for D {}

pub fn a_stream_runs_in_order<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let s = device.stream("s").expect("stream");
        let view = buffer(&device, &[1.0, 2.0]);
        for _ in 0..10 {
            enqueue(&device, &s, Kernel::Scale { factor: 2.0 }, &[&view]);
            fill(&device, &s, &view.slice(0, 1).expect("slice"), 3.0);
        }
        assert_eq!(read(&device, &s, &view), [3.0, 2048.0]);
    });
}

pub fn a_wait_observes_the_latest_record_before_it<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for scope in [EventScope::Internal, EventScope::External] {
            let (a, b) = (device.stream("a").expect("stream"), device.stream("b").expect("stream"));
            let event = device.event(scope).expect("event");
            let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[0.0]));
            device.wait(&b, &event).expect("never recorded: passes");
            spin(&device, &a, 2000);
            fill(&device, &a, &x, 1.0);
            device.record(&a, &event).expect("record");
            spin(&device, &a, 2000);
            fill(&device, &a, &x, 2.0);
            device.record(&a, &event).expect("record again");
            device.wait(&b, &event).expect("wait");
            copy(&device, &b, &x, &y);
            assert_eq!(read(&device, &b, &y), [2.0]);
        }
    });
}

pub fn write_and_read_wait_for_their_stream<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let s = device.stream("s").expect("stream");
        let view = buffer(&device, &[1.0]);
        spin(&device, &s, 2000);
        fill(&device, &s, &view, 2.0);
        device.write(&s, &view, &3.0f32.to_le_bytes()).expect("write");
        assert_eq!(read(&device, &s, &view), [3.0]);
        let error = device.write(&s, &view, &[0; 3]).expect_err("wrong size");
        assert!(matches!(error, DeviceError::Operands { .. }), "{error}");
    });
}

pub fn a_captured_graph_runs_only_when_launched<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let s = device.stream("s").expect("stream");
        let view = buffer(&device, &[1.0]);
        device.begin_capture(&s).expect("begin");
        assert!(device.is_capturing(&s));
        enqueue(&device, &s, Kernel::Scale { factor: 2.0 }, &[&view]);
        let graph = device.end_capture(&s).expect("end");
        assert!(!device.is_capturing(&s));
        assert_eq!(read(&device, &s, &view), [1.0]);
        for _ in 0..3 {
            device.launch(&graph, &s).expect("launch");
        }
        assert_eq!(read(&device, &s, &view), [8.0]);
    });
}

pub fn capture_keeps_order_and_edges<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let (s, side) = (device.stream("s").expect("stream"), device.stream("side").expect("stream"));
        let (fork, join) = (
            device.event(EventScope::Internal).expect("event"),
            device.event(EventScope::Internal).expect("event"),
        );
        let external = device.event(EventScope::External).expect("event");
        let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[0.0]));
        device.begin_capture(&s).expect("begin");
        fill(&device, &s, &x, 1.0); // 0
        device.record(&s, &fork).expect("record");
        device.wait(&side, &fork).expect("joins");
        assert!(device.is_capturing(&side));
        copy(&device, &side, &x, &y); // 1, after 0
        device.wait(&s, &external).expect("node"); // 2, after 0
        device.record(&side, &external).expect("node"); // 3, after 1
        device.record(&side, &join).expect("record");
        device.wait(&s, &join).expect("joins back");
        add(&device, &s, &y, &x); // 4, after 2 and 3
        let graph = device.end_capture(&s).expect("end");
        assert!(!device.is_capturing(&side));
        let nodes = graph.nodes();
        let kinds: Vec<_> = nodes.iter().map(|node| node.kind.clone()).collect();
        let (op, record, wait) = (NodeKind::Op, NodeKind::Record, NodeKind::Wait);
        assert_eq!(kinds, [op.clone(), op.clone(), wait, record, op]);
        let edges: Vec<_> = nodes.iter().map(|node| node.dependencies.clone()).collect();
        assert_eq!(edges, [vec![], vec![0], vec![0], vec![1], vec![2, 3]]);
        assert!(nodes.windows(2).all(|pair| pair[0].ticket < pair[1].ticket));
        device.launch(&graph, &side).expect("on any stream");
        assert_eq!(read(&device, &side, &x), [2.0]);
    });
}

pub fn a_launch_occupies_its_stream<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let (s, side) = (device.stream("s").expect("stream"), device.stream("side").expect("stream"));
        let (fork, join) = (
            device.event(EventScope::Internal).expect("event"),
            device.event(EventScope::Internal).expect("event"),
        );
        let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[0.0]));
        device.begin_capture(&s).expect("begin");
        device.record(&s, &fork).expect("record");
        device.wait(&side, &fork).expect("wait");
        spin(&device, &side, 3000);
        fill(&device, &side, &x, 5.0);
        device.record(&side, &join).expect("record");
        device.wait(&s, &join).expect("wait");
        let graph = device.end_capture(&s).expect("end");
        device.launch(&graph, &s).expect("launch");
        copy(&device, &s, &x, &y);
        assert_eq!(read(&device, &s, &y), [5.0], "the side lane is part of the launch");
    });
}

pub fn launches_of_one_graph_never_overlap<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let streams = ["a", "b", "c"].map(|label| device.stream(label).expect("stream"));
        let view = buffer(&device, &[1.0]);
        let tmp = buffer(&device, &[0.0]);
        device.begin_capture(&streams[0]).expect("begin");
        copy(&device, &streams[0], &view, &tmp);
        spin(&device, &streams[0], 300);
        add(&device, &streams[0], &tmp, &view);
        let graph = device.end_capture(&streams[0]).expect("end");
        device.take_spans();
        let mut tickets = Vec::new();
        for turn in 0..9 {
            tickets.push(device.launch(&graph, &streams[turn % 3]).expect("launch"));
        }
        for stream in &streams {
            device.wait_stream(stream).expect("wait");
        }
        assert_eq!(read(&device, &streams[0], &view), [512.0]);
        let spans = device.take_spans();
        assert_eq!(spans.len(), 27);
        let of = |ticket| spans.iter().filter(move |span| span.ticket == ticket);
        for pair in tickets.windows(2) {
            let end = of(pair[0]).map(|span| span.end).max().expect("spans");
            assert!(of(pair[1]).all(|span| span.begin >= end && span.node.is_some()));
        }
    });
}

pub fn external_waits_observe_the_record_before_their_launch<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let (a, b) = (device.stream("a").expect("stream"), device.stream("b").expect("stream"));
        let event = device.event(EventScope::External).expect("event");
        let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[0.0]));
        device.begin_capture(&b).expect("begin");
        device.wait(&b, &event).expect("wait node");
        copy(&device, &b, &x, &y);
        let reader = device.end_capture(&b).expect("end");
        device.launch(&reader, &b).expect("never recorded: passes");
        assert_eq!(read(&device, &b, &y), [0.0]);
        for value in [1.0, 2.0] {
            spin(&device, &a, 2000);
            fill(&device, &a, &x, value);
            device.record(&a, &event).expect("eager record");
            device.launch(&reader, &b).expect("launch");
            assert_eq!(read(&device, &b, &y), [value]);
        }
        // A record node stands for its launch.
        device.begin_capture(&a).expect("begin");
        spin(&device, &a, 2000);
        fill(&device, &a, &x, 7.0);
        device.record(&a, &event).expect("record node");
        let writer = device.end_capture(&a).expect("end");
        device.launch(&writer, &a).expect("launch");
        device.wait(&b, &event).expect("eager wait");
        copy(&device, &b, &x, &y);
        assert_eq!(read(&device, &b, &y), [7.0]);
        fill(&device, &a, &x, 0.0);
        device.launch(&writer, &a).expect("launch");
        device.launch(&reader, &b).expect("node waits for node");
        assert_eq!(read(&device, &b, &y), [7.0]);
    });
}

pub fn work_in_flight_and_graphs_keep_what_they_touch<W: Worlds>(worlds: &W) {
    worlds.run(2, |device| {
        let comm = device.communicator("all", &[0, 1]).expect("comm");
        let s = device.stream("s").expect("stream");
        let (x, sum) = (buffer(&device, &[1.0]), buffer(&device, &[0.0]));
        let gathered = raw(&device, 2, "gathered");
        let event = device.event(EventScope::External).expect("event");
        device.begin_capture(&s).expect("begin");
        device.wait(&s, &event).expect("wait");
        device.collective(&s, &comm, Collective::AllGather, &x, &gathered).expect("gather");
        add(&device, &s, &gathered.slice(1, 1).expect("slice"), &sum);
        device.record(&s, &event).expect("record");
        let graph = device.end_capture(&s).expect("end");
        drop((x, gathered, event, comm));
        for _ in 0..3 {
            device.launch(&graph, &s).expect("launch");
        }
        drop(graph);
        assert_eq!(read(&device, &s, &sum), [3.0]);
    });
}

pub fn collectives_run_in_order_across_streams_and_graphs<W: Worlds>(worlds: &W) {
    worlds.run(2, |device| {
        let comm = device.communicator("all", &[0, 1]).expect("comm");
        let (a, b) = (device.stream("a").expect("stream"), device.stream("b").expect("stream"));
        let x = buffer(&device, &[1.0]);
        device.begin_capture(&b).expect("begin");
        device.collective(&b, &comm, Collective::AllReduce, &x, &x).expect("in place");
        let graph = device.end_capture(&b).expect("end");
        // Nothing but the communicator orders these. Each doubles x.
        for _ in 0..3 {
            spin(&device, &a, 500);
            device.collective(&a, &comm, Collective::AllReduce, &x, &x).expect("in place");
            device.launch(&graph, &b).expect("launch");
        }
        device.wait_stream(&a).expect("wait");
        assert_eq!(read(&device, &b, &x), [64.0]);
    });
}

pub fn sums_in_windows_are_added_or_stored<W: Worlds>(worlds: &W) {
    let access = |kind: Collective| (kind.registers_send(), kind.recv_access());
    assert_eq!(access(Collective::ReduceScatterStore { scale: 1.0 }), (true, Access::Write));
    assert_eq!(access(Collective::ReduceScatterAccumulate { scale: 1.0 }), (true, Access::ReadWrite));
    for ranks in [1, 2] {
        worlds.run(ranks, |device| {
            let all: Vec<u32> = (0..ranks).collect();
            let comm = device.communicator("g", &all).expect("comm");
            // Sizes that go by packets and that do not, and each rank's own values.
            for n in [7, (1 << 20) + 8] {
                let domain = Domain::Symmetric("g".to_owned());
                let memory = device.alloc(4 * n * u64::from(ranks), &domain, "window").expect("alloc");
                device.register_window(&comm, &memory).expect("registers");
                let send = View::whole(&memory, DType::F32).expect("aligned");
                let s = device.stream("s").expect("stream");
                fill(&device, &s, &send, -0.1 * (1.0 + device.rank() as f32));
                let sum = if ranks == 1 { -0.1 } else { -0.1f32 + -0.2 };
                for before in [1.0, f32::NAN] {
                    let recv = buffer(&device, &vec![before; n as usize]);
                    let store = Collective::ReduceScatterStore { scale: 1.0 / 3.0 };
                    let add = Collective::ReduceScatterAccumulate { scale: 1.0 / 3.0 };
                    let (stored, added) = (1.0f32 / 3.0 * sum, 1.0f32 / 3.0 * sum + 1.0f32 / 3.0 * sum);
                    for (kind, want) in [(store, stored), (add, added)] {
                        device.collective(&s, &comm, kind, &send, &recv).expect("collective");
                        let got = read(&device, &s, &recv);
                        let right = got.iter().all(|x| x.to_bits() == want.to_bits());
                        assert!(right, "{kind:?}, {ranks} ranks, {n} after {before}: not {want}");
                    }
                }
                fill(&device, &s, &send, -0.0);
                let recv = buffer(&device, &vec![1.0; n as usize]);
                let store = Collective::ReduceScatterStore { scale: 1.0 };
                device.collective(&s, &comm, store, &send, &recv).expect("collective");
                assert!(read(&device, &s, &recv).iter().all(|x| x.to_bits() == (-0.0f32).to_bits()));
            }
        });
    }
}

pub fn windows_need_their_domain_and_equal_sizes<W: Worlds>(worlds: &W) {
    worlds.run(2, |device| {
        let comm = device.communicator("g", &[0, 1]).expect("comm");
        let domain = Domain::Symmetric("g".to_owned());
        let good = device.alloc(4096, &domain, "good").expect("alloc");
        device.register_window(&comm, &good).expect("registers");
        let odd = device.alloc(4096 * (1 + u64::from(device.rank())), &domain, "odd").expect("alloc");
        assert!(matches!(device.register_window(&comm, &odd), Err(DeviceError::BadGroup { .. })));
        let plain = device.alloc(4096, &Domain::Default, "plain").expect("alloc");
        let mine = if device.rank() == 0 { &plain } else { &good };
        match device.register_window(&comm, mine) {
            Err(DeviceError::WrongDomain { .. }) if device.rank() == 0 => {}
            Err(DeviceError::BadGroup { .. }) if device.rank() == 1 => {}
            other => panic!("{other:?}"),
        }
    });
}

pub fn operands_that_do_not_fit_are_refused<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let s = device.stream("s").expect("stream");
        assert_eq!(s.label(), "s");
        let comm = device.communicator("self", &[0]).expect("a group of one");
        let (two, three) = (buffer(&device, &[1.0; 2]), buffer(&device, &[1.0; 3]));
        let error = device.collective(&s, &comm, Collective::AllReduce, &two, &three).expect_err("sizes");
        assert!(matches!(error, DeviceError::Operands { .. }), "{error}");
        let (low, high) = (three.slice(0, 2).expect("slice"), three.slice(1, 2).expect("slice"));
        let error = device.collective(&s, &comm, Collective::AllToAll, &low, &high).expect_err("overlap");
        assert!(matches!(error, DeviceError::Operands { .. }), "{error}");
        assert!(Op::new(Kernel::Add, "overlap", vec![low, high]).is_err());
        let op = Op::new(Kernel::Add, "fine", vec![two.clone(), buffer(&device, &[0.0; 2])]).expect("fits");
        assert_eq!(op.operands()[1].access, Access::ReadWrite);
    });
}

pub fn bad_groups_are_refused<W: Worlds>(worlds: &W) {
    worlds.run(3, |device| {
        let why = |ranks: &[u32]| device.communicator("bad", ranks).map(drop);
        for ranks in [&[0u32, 0, 1, 2][..], &[0, 1, 2, 3], &[]] {
            assert!(matches!(why(ranks), Err(DeviceError::BadGroup { .. })), "{ranks:?}");
        }
        let next = (device.rank() + 1) % 3;
        assert!(matches!(why(&[next]), Err(DeviceError::BadGroup { .. })), "not a member");
        // The same name and ranks again is another communicator; other ranks are an error on every side.
        let first = device.communicator("twice", &[0, 1, 2]).expect("comm");
        let second = device.communicator("twice", &[0, 1, 2]).expect("comm");
        let s = device.stream("s").expect("stream");
        let x = buffer(&device, &[1.0]);
        device.collective(&s, &second, Collective::AllReduce, &x, &x).expect("collective");
        device.collective(&s, &first, Collective::AllReduce, &x, &x).expect("collective");
        assert_eq!(read(&device, &s, &x), [9.0]);
        let order: &[u32] = if device.rank() == 0 { &[0, 1, 2] } else { &[2, 1, 0] };
        assert!(
            matches!(device.communicator("order", order), Err(DeviceError::BadGroup { .. }))
                || device.rank() > 0
        );
    });
}
