//! Capture as a state machine: wrong order is an error and changes nothing.

use sessile_hal::{Device, DeviceError, EventScope, Graph, Kernel, Op};
use sessile_host::{HostDevice, Order, World, WorldOptions};
use sessile_plan::Domain;

use crate::support::{buffer, enqueue, fill, read};

fn device() -> HostDevice {
    World::new(WorldOptions::threads(1, 2)).device(0)
}

#[test]
fn forbidden_calls_change_nothing() {
    let device = device();
    let (s, eager) = (device.stream("s").expect("stream"), device.stream("eager").expect("stream"));
    let view = buffer(&device, &[1.0]);
    let comm = device.communicator("self", &[0]).expect("comm");
    device.begin_capture(&s).expect("begin");
    let empty = device.end_capture(&s).expect("an empty graph");
    device.launch(&empty, &s).expect("launch");

    device.begin_capture(&s).expect("begin");
    let forbidden = |result: Result<(), DeviceError>| match result {
        Err(DeviceError::ForbiddenInCapture { stream, .. }) => assert_eq!(stream, "s"),
        other => panic!("{other:?}"),
    };
    forbidden(device.alloc(4, &Domain::Default, "no").map(drop));
    forbidden(device.launch(&empty, &s).map(drop));
    forbidden(device.wait_stream(&s));
    forbidden(device.read(&s, &view).map(drop));
    forbidden(device.write(&s, &view, &[0; 4]));
    forbidden(device.communicator("other", &[0]).map(drop));
    forbidden(device.register_window(&comm, view.memory()));
    for stream in [&s, &eager] {
        let again = device.begin_capture(stream);
        assert_eq!(again, Err(DeviceError::AlreadyCapturing { stream: "s".to_owned() }));
    }
    let not_origin = device.end_capture(&eager).map(drop);
    assert_eq!(not_origin, Err(DeviceError::NotCapturing { stream: "eager".to_owned() }));
    device.abort_capture(&eager);
    assert!(device.is_capturing(&s) && !device.is_capturing(&eager));

    // Other streams work on, and the capture is whole.
    device.launch(&empty, &eager).expect("launch elsewhere");
    device.write(&eager, &view, &2.0f32.to_le_bytes()).expect("write elsewhere");
    enqueue(&device, &s, Kernel::Scale { factor: 3.0 }, &[&view]);
    let graph = device.end_capture(&s).expect("end");
    assert_eq!(graph.nodes().len(), 1);
    device.launch(&graph, &s).expect("launch");
    assert_eq!(read(&device, &s, &view), [6.0]);
}

#[test]
fn ending_or_aborting_nothing_is_told_or_harmless() {
    let device = device();
    let s = device.stream("s").expect("stream");
    let told = device.end_capture(&s).map(drop);
    assert_eq!(told, Err(DeviceError::NotCapturing { stream: "s".to_owned() }));
    device.abort_capture(&s);
    device.begin_capture(&s).expect("begin");
    device.abort_capture(&s);
    device.abort_capture(&s);
    assert!(!device.is_capturing(&s));
    assert!(device.end_capture(&s).is_err());
}

#[test]
fn a_joined_stream_must_be_joined_back() {
    let device = device();
    let (s, side) = (device.stream("s").expect("stream"), device.stream("side").expect("stream"));
    let event = device.event(EventScope::Internal).expect("event");
    let view = buffer(&device, &[0.0]);
    let fork = || {
        device.begin_capture(&s).expect("begin");
        device.record(&s, &event).expect("record");
        device.wait(&side, &event).expect("joins");
        fill(&device, &side, &view, 1.0);
    };
    fork();
    let told = device.end_capture(&s).map(drop);
    let unjoined = DeviceError::CaptureUnjoined { origin: "s".to_owned(), joined: "side".to_owned() };
    assert_eq!(told, Err(unjoined.clone()));
    assert!(!device.is_capturing(&s) && !device.is_capturing(&side), "eager again, also on failure");

    fork();
    device.record(&side, &event).expect("record");
    device.wait(&s, &event).expect("joined back");
    fill(&device, &side, &view, 2.0); // after the last event
    assert_eq!(device.end_capture(&s).map(drop), Err(unjoined));

    fork();
    assert_eq!(
        device.end_capture(&side).map(drop),
        Err(DeviceError::NotCapturing { stream: "side".to_owned() }),
        "only the origin ends it"
    );
    device.abort_capture(&side); // from any state, by any stream that is part of it
    assert!(!device.is_capturing(&s));
    assert_eq!(read(&device, &side, &view), [0.0], "nothing of it ran");
}

#[test]
fn an_internal_event_from_outside_breaks_the_capture() {
    let device = device();
    let (s, other) = (device.stream("s").expect("stream"), device.stream("other").expect("stream"));
    let event = device.event(EventScope::Internal).expect("event");
    let view = buffer(&device, &[0.0]);
    device.record(&other, &event).expect("eager record");
    device.begin_capture(&s).expect("begin");
    let told = device.wait(&s, &event);
    assert_eq!(told, Err(DeviceError::CaptureIsolation { stream: "s".to_owned() }));
    let invalid = DeviceError::CaptureInvalid { stream: "s".to_owned() };
    let op = Op::new(Kernel::Fill { value: 1.0 }, "fill", vec![view.clone()]).expect("operands");
    assert_eq!(device.enqueue(&s, op), Err(invalid.clone()));
    assert_eq!(device.record(&s, &event), Err(invalid.clone()));
    device.wait(&other, &event).expect("other streams are not part of it");
    assert_eq!(device.end_capture(&s).map(drop), Err(invalid));
    assert!(!device.is_capturing(&s));
    fill(&device, &s, &view, 4.0);
    assert_eq!(read(&device, &s, &view), [4.0], "usable again");
}

#[test]
fn an_event_recorded_eagerly_again_leaves_the_capture() {
    let device = device();
    let (s, other) = (device.stream("s").expect("stream"), device.stream("other").expect("stream"));
    let event = device.event(EventScope::Internal).expect("event");
    device.begin_capture(&s).expect("begin");
    device.record(&s, &event).expect("captured record");
    device.record(&other, &event).expect("eager record");
    device.wait(&other, &event).expect("eager wait");
    assert!(!device.is_capturing(&other));
    device.end_capture(&s).expect("end");
}

#[test]
fn handles_of_another_world_are_told_apart() {
    let (here, there) = (device(), device());
    let stream = there.stream("theirs").expect("stream");
    let event = there.event(EventScope::External).expect("event");
    let view = buffer(&there, &[0.0]);
    let mine = here.stream("mine").expect("stream");
    let foreign = |result: Result<(), DeviceError>| {
        assert!(matches!(result, Err(DeviceError::ForeignHandle { .. })), "{result:?}");
    };
    foreign(here.wait_stream(&stream));
    foreign(here.record(&mine, &event).map(drop));
    foreign(here.begin_capture(&stream));
    foreign(here.read(&mine, &view).map(drop));
    let op = Op::new(Kernel::Fill { value: 1.0 }, "fill", vec![view.clone()]).expect("operands");
    foreign(here.enqueue(&mine, op).map(drop));
    there.begin_capture(&stream).expect("begin");
    let graph = there.end_capture(&stream).expect("end");
    foreign(here.launch(&graph, &mine).map(drop));
}

/// A graph of two branches: `x` is filled late on one and its event recorded; the other copies `x` into `y` after
/// waiting for that event. `record_first` says which of record and wait is captured first.
fn copied(record_first: bool, seed: u64, order: Order) -> (Vec<f32>, Vec<f32>) {
    let world = World::new(WorldOptions::scheduled(1, seed, order));
    let device = world.device(0);
    let (s, side) = (device.stream("s").expect("stream"), device.stream("side").expect("stream"));
    let (fork, join) = (
        device.event(EventScope::Internal).expect("event"),
        device.event(EventScope::Internal).expect("event"),
    );
    let external = device.event(EventScope::External).expect("event");
    let (x, y) = (buffer(&device, &[0.0]), buffer(&device, &[-1.0]));
    let copy = || {
        device.wait(&side, &external).expect("wait node");
        let op = Op::new(Kernel::Copy, "copy", vec![x.clone(), y.clone()]).expect("operands");
        device.enqueue(&side, op).expect("copy");
    };
    device.begin_capture(&s).expect("begin");
    device.record(&s, &fork).expect("record");
    device.wait(&side, &fork).expect("wait");
    if !record_first {
        copy();
    }
    fill(&device, &s, &x, 1.0);
    device.record(&s, &external).expect("record node");
    if record_first {
        copy();
    }
    device.record(&side, &join).expect("record");
    device.wait(&s, &join).expect("wait");
    let graph = device.end_capture(&s).expect("end");
    device.launch(&graph, &s).expect("launch");
    (read(&device, &s, &x), read(&device, &s, &y))
}

#[test]
fn inside_one_graph_capture_order_decides_what_a_wait_node_observes() {
    for order in [Order::Random, Order::WritersEarly, Order::ReadersEarly] {
        for seed in 0..20 {
            assert_eq!(copied(true, seed, order), (vec![1.0], vec![1.0]), "{order:?}, seed {seed}");
        }
    }
    // Captured before any record, the wait passes, and nothing orders the copy after the fill.
    let early = (0..20).filter(|&seed| copied(false, seed, Order::Random).1 == [0.0]).count();
    assert!((1..20).contains(&early), "{early} of 20 seeds ran the copy first");
}
