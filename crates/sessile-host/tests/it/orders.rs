//! The adversarial orders find planted races: a missing write-after-read edge gives a wrong value when writers are
//! early, a missing read-after-write edge when readers are. With both edges every order gives the right value.

use sessile_hal::{Beta, Collective, Device, EventScope, Gemm, Kernel, Transpose, View};
use sessile_host::{HostDevice, HostMemory, Order, WorldOptions};

use crate::support::{add, all_modes, buffer, enqueue, fill, read, run, spin};

/// Which edges the program has.
#[derive(Clone, Copy, Debug)]
struct Edges {
    read_after_write: bool,
    write_after_read: bool,
}

type Scenario = fn(&HostDevice, Edges) -> f32;

type Streams = (<HostDevice as Device>::Stream, <HostDevice as Device>::Stream);

fn streams(device: &HostDevice) -> Streams {
    (device.stream("compute").expect("stream"), device.stream("comm").expect("stream"))
}

/// Lets `later` wait for all that `earlier` has, if the edge exists.
fn edge(
    device: &HostDevice,
    exists: bool,
    earlier: &<HostDevice as Device>::Stream,
    later: &<HostDevice as Device>::Stream,
) {
    if exists {
        let event = device.event(EventScope::Internal).expect("event");
        device.record(earlier, &event).expect("record");
        device.wait(later, &event).expect("wait");
    }
}

/// Compute writes, a reduce-scatter reads, compute writes again. Right: 2.
fn wgrad(device: &HostDevice, edges: Edges) -> f32 {
    let comm = device.communicator("g", &[0, 1]).expect("comm");
    let (compute, side) = streams(device);
    let (wgrad, out) = (buffer(device, &[0.0; 2]), buffer(device, &[0.0]));
    spin(device, &compute, 2000);
    fill(device, &compute, &wgrad, 1.0);
    edge(device, edges.read_after_write, &compute, &side);
    spin(device, &side, 1000);
    device.collective(&side, &comm, Collective::ReduceScatter, &wgrad, &out).expect("collective");
    edge(device, edges.write_after_read, &side, &compute);
    spin(device, &compute, 1000);
    fill(device, &compute, &wgrad, 100.0);
    device.wait_stream(&compute).expect("wait");
    read(device, &side, &out)[0]
}

/// A reduce-scatter writes its output, compute adds it up, a second one writes it again. Right: 2.
fn rs_output(device: &HostDevice, edges: Edges) -> f32 {
    let comm = device.communicator("g", &[0, 1]).expect("comm");
    let (compute, side) = streams(device);
    let (first, second) = (buffer(device, &[1.0; 2]), buffer(device, &[100.0; 2]));
    let (out, grad) = (buffer(device, &[0.0]), buffer(device, &[0.0]));
    device.collective(&side, &comm, Collective::ReduceScatter, &first, &out).expect("collective");
    edge(device, edges.read_after_write, &side, &compute);
    add(device, &compute, &out, &grad);
    edge(device, edges.write_after_read, &compute, &side);
    device.collective(&side, &comm, Collective::ReduceScatter, &second, &out).expect("collective");
    device.wait_stream(&side).expect("wait");
    read(device, &compute, &grad)[0]
}

/// An all-gather writes a weight, a GEMM reads it, the next weight is gathered into the same bytes. Right: 2.
fn gathered(device: &HostDevice, edges: Edges) -> f32 {
    let comm = device.communicator("g", &[0, 1]).expect("comm");
    let (compute, side) = streams(device);
    let (first, second) = (buffer(device, &[1.0]), buffer(device, &[100.0]));
    let (weight, x, y) = (buffer(device, &[0.0; 2]), buffer(device, &[1.0; 2]), buffer(device, &[0.0]));
    let gemm = Gemm { m: 1, n: 1, k: 2, a: Transpose::No, b: Transpose::No, beta: Beta::Overwrite };
    device.collective(&side, &comm, Collective::AllGather, &first, &weight).expect("collective");
    edge(device, edges.read_after_write, &side, &compute);
    enqueue(device, &compute, Kernel::Gemm(gemm), &[&x, &weight, &y]);
    edge(device, edges.write_after_read, &compute, &side);
    device.collective(&side, &comm, Collective::AllGather, &second, &weight).expect("collective");
    device.wait_stream(&side).expect("wait");
    read(device, &compute, &y)[0]
}

/// The first scenario inside one graph: two lanes, with only the edges the capture had.
fn in_a_graph(device: &HostDevice, edges: Edges) -> f32 {
    let comm = device.communicator("g", &[0, 1]).expect("comm");
    let (compute, side) = streams(device);
    let (wgrad, out) = (buffer(device, &[0.0; 2]), buffer(device, &[0.0]));
    device.begin_capture(&compute).expect("begin");
    edge(device, true, &compute, &side);
    fill(device, &compute, &wgrad, 1.0);
    edge(device, edges.read_after_write, &compute, &side);
    device.collective(&side, &comm, Collective::ReduceScatter, &wgrad, &out).expect("collective");
    edge(device, edges.write_after_read, &side, &compute);
    fill(device, &compute, &wgrad, 100.0);
    edge(device, true, &side, &compute);
    let graph = device.end_capture(&compute).expect("end");
    device.launch(&graph, &compute).expect("launch");
    read(device, &compute, &out)[0]
}

const SCENARIOS: [(&str, Scenario); 4] =
    [("wgrad", wgrad), ("rs_output", rs_output), ("gathered", gathered), ("in_a_graph", in_a_graph)];

const WHOLE: Edges = Edges { read_after_write: true, write_after_read: true };

#[test]
fn with_all_edges_every_order_is_right() {
    for (name, scenario) in SCENARIOS {
        for options in all_modes(2) {
            let got = run(&options, |device| scenario(&device, WHOLE));
            assert_eq!(got, [2.0, 2.0], "{name}, {options:?}");
        }
    }
}

#[test]
fn writers_early_shows_a_missing_write_after_read_edge() {
    for (name, scenario) in SCENARIOS {
        for seed in 0..4 {
            let options = WorldOptions::scheduled(2, seed, Order::WritersEarly);
            let got = run(&options, |device| scenario(&device, Edges { write_after_read: false, ..WHOLE }));
            assert!(got.iter().all(|value| *value != 2.0), "{name}, seed {seed}: {got:?}");
        }
    }
}

#[test]
fn readers_early_shows_a_missing_read_after_write_edge() {
    for (name, scenario) in SCENARIOS {
        for seed in 0..4 {
            let options = WorldOptions::scheduled(2, seed, Order::ReadersEarly);
            let got = run(&options, |device| scenario(&device, Edges { read_after_write: false, ..WHOLE }));
            assert!(got.iter().all(|value| *value != 2.0), "{name}, seed {seed}: {got:?}");
        }
    }
}

#[test]
fn a_race_behind_other_work_is_found_too() {
    // The racing writer comes only after work that itself reads what a collective gave: the reader must be held
    // back across all of it.
    let program = |device: &HostDevice, fence: bool| {
        let comm = device.communicator("g", &[0, 1]).expect("comm");
        let (compute, side) = streams(device);
        let (wgrad, out) = (buffer(device, &[1.0; 2]), buffer(device, &[0.0]));
        let (shard, weight, x) =
            (buffer(device, &[1.0]), buffer(device, &[0.0; 2]), buffer(device, &[0.0; 2]));
        edge(device, true, &compute, &side);
        device.collective(&side, &comm, Collective::ReduceScatter, &wgrad, &out).expect("scatter");
        edge(device, fence, &side, &compute);
        let gather_stream = device.stream("gather").expect("stream");
        let other = device.communicator("h", &[0, 1]).expect("comm");
        device.collective(&gather_stream, &other, Collective::AllGather, &shard, &weight).expect("gather");
        edge(device, true, &gather_stream, &compute);
        add(device, &compute, &weight, &x);
        add(device, &compute, &x, &wgrad);
        device.wait_stream(&compute).expect("wait");
        read(device, &side, &out)[0]
    };
    let options = WorldOptions::scheduled(2, 0, Order::WritersEarly);
    assert_eq!(run(&options, |device| program(&device, true)), [2.0, 2.0]);
    assert_eq!(run(&options, |device| program(&device, false)), [4.0, 4.0]);
}

#[test]
fn the_same_seed_gives_the_same_order() {
    let trace = |order, seed| {
        run(&WorldOptions::scheduled(2, seed, order), |device| {
            let comm = device.communicator("g", &[0, 1]).expect("comm");
            let views: Vec<View<HostMemory>> = (0..4).map(|_| buffer(&device, &[1.0])).collect();
            let streams: Vec<_> = (0..4).map(|_| device.stream("s").expect("stream")).collect();
            for turn in 0..40 {
                let (stream, view) = (&streams[turn % 4], &views[turn % 4]);
                if turn % 7 == 0 {
                    device.collective(stream, &comm, Collective::AllReduce, view, view).expect("collective");
                } else {
                    fill(&device, stream, view, turn as f32);
                }
            }
            streams.iter().for_each(|stream| device.wait_stream(stream).expect("wait"));
            device.take_spans()
        })
    };
    let mut traces = Vec::new();
    for order in [Order::Random, Order::WritersEarly, Order::ReadersEarly] {
        for seed in 0..3 {
            let first = trace(order, seed);
            for _ in 0..3 {
                assert_eq!(trace(order, seed), first, "{order:?}, seed {seed}");
            }
            traces.push(first);
        }
    }
    assert_ne!(traces[0], traces[1], "seeds differ");
}
