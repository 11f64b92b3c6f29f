//! Programs on the CPU device, recorded and checked end to end.

use sessile_hal::{
    Collective, Comm, Device, DeviceError, EventScope, Graph, Kernel, Note, NotedView, Op, Span, View,
};
use sessile_host::{HostDevice, Order, World, WorldOptions};
use sessile_plan::{DType, Domain};
use sessile_runtime::check::{Hazard, Reason, check, overlap};
use sessile_runtime::log::{Entry, Log, LogLevel, RankLog, Recorded, Work, read_log, write_log};
use sessile_runtime::timeline::{Ticks, write_timeline};

use crate::build::codes;

const REPLAYS: usize = 3;

/// Two runners that share bytes of an arena, on streams of their own:
///
/// ```text
///   A   wait c ── fill [0,16) ──┬── (compute) ───────────────── join
///                               └── (comm) reduce-scatter ── record a
///   C   wait a ── fill [0,16) ── copy ── record c
/// ```
///
/// `fenced` says whether C waits.
fn program(device: HostDevice, fenced: bool) -> Result<(RankLog, Vec<Span>), DeviceError> {
    let device = Recorded::new(device, LogLevel::On);
    let (compute, comm) = (device.stream("compute")?, device.stream("comm")?);
    let other = device.stream("other")?;
    let group = device.communicator("gtp", &[0, 1])?;
    let arena = device.alloc(256, &Domain::Default, "arena")?;
    device.note(Note::Sealed(std::slice::from_ref(&arena)));
    let out = device.alloc(64, &Domain::Default, "out")?;
    let (a, c) = (device.event(EventScope::External)?, device.event(EventScope::External)?);
    let input = View::new(&arena, 0, 4, DType::F32)?;
    let views = vec![NotedView { label: "input".into(), view: input.clone(), logical_bytes: 16 }];
    let (shard, copied) = (View::new(&out, 0, 2, DType::F32)?, View::new(&out, 16, 4, DType::F32)?);
    let fill = |stream: &_, value: f32, label: &str| {
        device.enqueue(stream, Op::new(Kernel::Fill { value }, label, vec![input.clone()])?)
    };

    // Eager first: the order comes from an event between streams.
    fill(&compute, 0.0, "eager fill")?;
    let done = device.event(EventScope::Internal)?;
    device.record(&compute, &done)?;
    device.wait(&comm, &done)?;
    device.collective(&comm, &group, Collective::ReduceScatter, &input, &shard)?;
    device.read(&comm, &shard)?;

    device.begin_capture(&compute)?;
    device.wait(&compute, &c)?;
    fill(&compute, 1.0, "wgrad A")?;
    device.record(&compute, &done)?;
    device.wait(&comm, &done)?;
    device.collective(&comm, &group, Collective::ReduceScatter, &input, &shard)?;
    device.record(&comm, &a)?;
    let joined = device.event(EventScope::Internal)?;
    device.record(&comm, &joined)?;
    device.wait(&compute, &joined)?;
    let first = device.end_capture(&compute)?;
    device.note(Note::Captured { runner: "A", graph: &first, views: views.clone() });

    device.begin_capture(&other)?;
    if fenced {
        device.wait(&other, &a)?;
    }
    fill(&other, 2.0, "wgrad C")?;
    device.enqueue(&other, Op::new(Kernel::Copy, "copy", vec![input.clone(), copied.clone()])?)?;
    device.record(&other, &c)?;
    let second = device.end_capture(&other)?;
    device.note(Note::Captured { runner: "C", graph: &second, views });

    for _ in 0..REPLAYS {
        device.launch(&first, &compute)?;
        device.launch(&second, &other)?;
    }
    device.wait_stream(&compute)?;
    device.read(&other, &copied)?;
    group.exchange(b"done")?;
    Ok((device.take_log(), device.take_spans()))
}

fn recorded(options: WorldOptions, fenced: bool) -> (Log, Vec<Vec<Span>>) {
    let results = World::new(options).run(|device| program(device, fenced));
    let (logs, spans) = results.into_iter().map(|result| result.expect("the program runs")).unzip();
    (Log::from_ranks(logs), spans)
}

#[test]
fn a_recorded_program_is_clean() {
    let worlds = [WorldOptions::threads(2, 2), WorldOptions::scheduled(2, 7, Order::Random)];
    for options in worlds {
        let (log, spans) = recorded(options, true);
        let report = check(&log);
        assert!(report.is_clean(), "{report}");
        assert_eq!(report.launches, 2 * 2 * REPLAYS as u64);
        let mut bytes = Vec::new();
        write_log(&log, &mut bytes).unwrap();
        assert_eq!(read_log(&bytes).unwrap(), log);

        let spans: Vec<&[Span]> = spans.iter().map(Vec::as_slice).collect();
        assert_eq!(overlap(&log, &spans).sharing_arena, 0);
        let mut out = Vec::new();
        write_timeline(&log, &spans, Ticks::Nanoseconds, &mut out).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
        assert_eq!((named("wgrad A"), named("wgrad C")), (2 * REPLAYS, 2 * REPLAYS));
        assert!(named("A") >= 2 * REPLAYS && named("fence 0") > 0);
    }
}

#[test]
fn the_same_program_without_one_wait_is_reported_on_both_ranks() {
    let (log, _) = recorded(WorldOptions::scheduled(2, 7, Order::Random), false);
    let report = check(&log);
    for rank in 0..2 {
        let reuse = report.violations.iter().find(|violation| match &violation.reason {
            Reason::Unordered { hazard, first, second, memory, start, end, .. } => {
                *hazard == Hazard::WriteAfterRead
                    && (first.label.as_str(), second.label.as_str()) == ("reduce_scatter", "wgrad C")
                    && (first.runner.as_deref(), second.runner.as_deref()) == (Some("A"), Some("C"))
                    && (first.rank, second.rank, memory.rank) == (rank, rank, rank)
                    && (memory.label.as_str(), *start, *end) == ("arena", 0, 16)
            }
            _ => false,
        });
        // At least each replay with itself; also with those before it.
        assert!(reuse.is_some_and(|violation| violation.count >= REPLAYS as u64), "{report}");
    }
    assert!(codes(&report).iter().all(|code| *code == "unordered"), "{report}");
}

fn one_rank<T: Send>(program: impl Fn(Recorded<HostDevice>) -> T + Sync, level: LogLevel) -> T {
    let world = World::new(WorldOptions::scheduled(1, 1, Order::Random));
    let result = world.run(|device| Ok::<_, DeviceError>(program(Recorded::new(device, level))));
    result.into_iter().next().unwrap().unwrap()
}

#[test]
fn a_logged_graph_has_the_devices_edges_and_the_enqueued_bytes() {
    one_rank(
        |device| {
            let (main, side) = (device.stream("main").unwrap(), device.stream("side").unwrap());
            let memory = device.alloc(64, &Domain::Default, "m").unwrap();
            let view = |at| View::new(&memory, at, 4, DType::F32).unwrap();
            let fill = |stream: &_, at| {
                let op = Op::new(Kernel::Fill { value: 0.0 }, format!("fill {at}"), vec![view(at)]).unwrap();
                device.enqueue(stream, op).unwrap()
            };
            let (fork, join) =
                (device.event(EventScope::Internal).unwrap(), device.event(EventScope::Internal).unwrap());
            let fence = device.event(EventScope::External).unwrap();
            device.begin_capture(&main).unwrap();
            device.wait(&main, &fence).unwrap();
            fill(&main, 0);
            device.record(&main, &fork).unwrap();
            device.wait(&side, &fork).unwrap();
            fill(&side, 16);
            fill(&main, 32);
            device.record(&side, &join).unwrap();
            device.wait(&main, &join).unwrap();
            device.record(&main, &fence).unwrap();
            let graph = device.end_capture(&main).unwrap();
            let log = device.take_log();
            assert!(
                matches!(log.entries[..], [Entry::Fresh { .. }]),
                "captured work is no entry: {:?}",
                log.entries
            );
            let logged = &log.graphs[0];
            assert_eq!(logged.runner, "graph0");
            for (node, reported) in logged.nodes.iter().zip(graph.nodes()) {
                assert_eq!(node.dependencies, reported.dependencies);
            }
            let labels: Vec<_> = logged.nodes.iter().map(|node| node.label.as_str()).collect();
            assert_eq!(labels, ["", "fill 0", "fill 16", "fill 32", ""]);
            assert_eq!(logged.nodes[0].work, Work::Wait(2));
            assert_eq!(logged.nodes[4].work, Work::Record(2));
            assert_eq!((logged.nodes[2].accesses[0].start, logged.nodes[2].accesses[0].end), (16, 32));
        },
        LogLevel::On,
    );
}

#[test]
fn failed_calls_and_given_up_captures_leave_nothing() {
    one_rank(
        |device| {
            let (main, side) = (device.stream("main").unwrap(), device.stream("side").unwrap());
            let memory = device.alloc(16, &Domain::Default, "m").unwrap();
            let view = View::whole(&memory, DType::F32).unwrap();
            let fill = || Op::new(Kernel::Fill { value: 0.0 }, "fill", vec![view.clone()]).unwrap();
            device.begin_capture(&main).unwrap();
            device.enqueue(&main, fill()).unwrap();
            assert!(device.alloc(16, &Domain::Default, "n").is_err());
            assert!(device.read(&main, &view).is_err());
            device.abort_capture(&main);
            let fork = device.event(EventScope::Internal).unwrap();
            device.begin_capture(&main).unwrap();
            device.record(&main, &fork).unwrap();
            device.enqueue(&main, fill()).unwrap();
            device.record(&main, &fork).unwrap();
            device.wait(&side, &fork).unwrap();
            device.enqueue(&side, fill()).unwrap();
            device.end_capture(&main).expect_err("side was not joined back");
            let log = device.take_log();
            assert_eq!((log.entries.len(), log.graphs.len(), log.memories.len()), (1, 0, 1));
            // Both streams are eager again, and so is what they enqueue.
            device.enqueue(&side, fill()).unwrap();
            device.begin_capture(&main).unwrap();
            device.enqueue(&main, fill()).unwrap();
            device.end_capture(&main).unwrap();
            let log = device.take_log();
            assert_eq!((log.entries.len(), log.graphs.len(), log.graphs[0].nodes.len()), (2, 1, 1));
        },
        LogLevel::On,
    );
}

#[test]
fn a_pause_ends_the_log_and_off_keeps_none() {
    let run = |device: Recorded<HostDevice>| {
        let main = device.stream("main").unwrap();
        let memory = device.alloc(16, &Domain::Default, "m").unwrap();
        let view = View::whole(&memory, DType::F32).unwrap();
        let event = device.event(EventScope::Internal).unwrap();
        let step = || {
            device.record(&main, &event).unwrap();
            device.wait(&main, &event).unwrap();
            device.read(&main, &view).unwrap();
        };
        step();
        let before = device.take_log();
        device.set_recording(false);
        step();
        assert_eq!(device.take_log(), before, "a pause adds nothing");
        device.set_recording(true);
        assert!(device.take_log().entries.is_empty(), "and recording begins anew");
        step();
        (before, device.take_log())
    };
    let (before, after) = one_rank(run, LogLevel::On);
    assert_eq!((before.entries.len(), after.entries.len()), (4, 3));
    assert!(matches!(after.entries[2], Entry::HostWait { .. }));
    let (before, after) = one_rank(run, LogLevel::Off);
    assert_eq!((&before, &before), (&after, &RankLog::default()));
}
