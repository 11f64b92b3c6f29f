//! What a graph touches is its own until it is gone.

use sessile_hal::{Collective, Device, Kernel, Memory, Op, View};
use sessile_host::{HostGraph, HostMemory};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec, Role};
use sessile_runtime::log::RecordedGraph;
use sessile_runtime::{RuntimeError, capture, discover};

use crate::support::{Dev, Lab, Outcome, all_well, bytes_of, fill, floats, persistent, spec, threads};

/// Elements of the reduce-scatter's input.
const INPUT: u64 = 4096;

struct Reduced {
    graph: RecordedGraph<HostGraph>,
    device: Dev,
    sum: View<HostMemory>,
    /// Addresses of what the plan gave: first byte and one past the last.
    planned: Vec<(u64, u64)>,
}

/// Captures `sum = scatter(reduce(source))` with input and output in planned views, and drops everything but the
/// graph and `sum`.
fn only_the_graph(device: sessile_host::HostDevice) -> Outcome<Reduced> {
    let mut lab = Lab::logged(device)?;
    let device = lab.runtime.device().clone();
    let ranks = u64::from(device.world_size());
    let source = persistent(&device, "source", INPUT)?;
    let sum = persistent(&device, "sum", INPUT / ranks)?;
    let values: Vec<f32> = (0..INPUT).map(|at| (at % 97) as f32 + device.rank() as f32).collect();
    device.write(lab.runtime.main(), &source, &bytes_of(&values))?;
    let symmetric = Domain::Symmetric("gtp".into());
    let input = RequestSpec { domain: symmetric, ..spec("w", DType::F32, INPUT) };
    let output = RequestSpec { role: Role::RsOutput, ..spec("w", DType::F32, INPUT / ranks) };
    let body = |lab: &mut Lab| {
        let compute = lab.runtime.compute().clone();
        let input = lab.runtime.request(&compute, input.clone())?;
        let write = Op::new(Kernel::Copy, "write", vec![source.clone(), input.view().clone()])?;
        lab.runtime.enqueue(&compute, write)?;
        let output = lab.runtime.request(&compute, output.clone())?;
        lab.runtime.collective(&compute, "gtp", Collective::ReduceScatter, input.view(), output.view())?;
        let copy = Op::new(Kernel::Copy, "result", vec![output.view().clone(), sum.clone()])?;
        lab.runtime.enqueue(&compute, copy)?;
        lab.runtime.release(&compute, input)?;
        lab.runtime.release(&compute, output)
    };
    discover(&mut lab, "layer", body)?;
    lab.runtime.seal("test", &PlanOptions::default())?;
    capture(&mut lab, "layer", body)?;
    let graph = lab.runtime.graph("layer").expect("captured").clone();
    let planned =
        lab.runtime.arenas().iter().map(|arena| (arena.address(), arena.address() + arena.bytes())).collect();
    device.write(lab.runtime.main(), &sum, &vec![0; (INPUT / ranks * 4) as usize])?;
    Ok(Reduced { graph, device, sum, planned })
}

/// This rank's block of the sum over ranks.
fn expected(rank: u32, ranks: u32) -> Vec<f32> {
    let block = INPUT / u64::from(ranks);
    let value = |at: u64| (0..ranks).map(|peer| (at % 97) as f32 + peer as f32).sum();
    (u64::from(rank) * block..(u64::from(rank) + 1) * block).map(value).collect()
}

#[test]
fn a_graph_keeps_its_views_after_every_other_handle_is_gone_and_frees_them_with_itself() {
    let world = threads(2);
    all_well(world.run(|device| {
        let rank = device.rank();
        let Reduced { graph, device, sum, planned } = only_the_graph(device)?;
        let alone = world.live_bytes(rank);
        assert!(
            alone >= planned.iter().map(|(from, to)| to - from).sum::<u64>(),
            "the graph owns its arenas"
        );
        let stream = device.stream("after")?;
        let mut others = Vec::new();
        for at in 0..64 {
            let domain = if at % 2 == 0 { Domain::Default } else { Domain::Symmetric("gtp".into()) };
            let memory = device.alloc(INPUT * 4, &domain, "other")?;
            let (from, to) = (memory.address(), memory.address() + memory.bytes());
            assert!(
                planned.iter().all(|&(start, end)| to <= start || end <= from),
                "bytes of the graph given away"
            );
            let view = View::whole(&memory, DType::F32)?;
            device.enqueue(&stream, fill(&view, 7.0)?)?;
            others.push(view);
        }
        for _ in 0..3 {
            device.launch(&graph, &stream)?;
        }
        assert_eq!(floats(&device.read(&stream, &sum)?), expected(rank, 2));
        for view in &others {
            assert!(floats(&device.read(&stream, view)?).iter().all(|&value| value == 7.0));
        }
        drop(others);
        assert_eq!(world.live_bytes(rank), alone);
        drop(graph);
        device.wait_stream(&stream)?;
        assert_eq!(world.live_bytes(rank), sum.memory().bytes(), "all but the result is free");
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
}

#[test]
fn a_launch_in_flight_owns_what_it_touches_after_its_graph_is_dropped() {
    let world = threads(2);
    let sums = all_well(world.run(|device| {
        let Reduced { graph, device, sum, .. } = only_the_graph(device)?;
        let stream = device.stream("after")?;
        device.enqueue(&stream, Op::new(Kernel::Spin { micros: 20_000 }, "late", vec![])?)?;
        device.launch(&graph, &stream)?;
        drop(graph);
        Ok::<_, RuntimeError>(floats(&device.read(&stream, &sum)?))
    }));
    assert_eq!(sums, [expected(0, 2), expected(1, 2)]);
    assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
}

#[test]
fn the_first_and_the_fiftieth_replay_give_the_eager_bits() {
    for ranks in [1, 2, 4] {
        let world = threads(ranks);
        let sums = all_well(world.run(|device| {
            let rank = device.rank();
            let Reduced { graph, device, sum, .. } = only_the_graph(device)?;
            let stream = device.stream("after")?;
            let mut seen = Vec::new();
            for _ in 0..50 {
                device.launch(&graph, &stream)?;
                seen.push(floats(&device.read(&stream, &sum)?));
                device.write(&stream, &sum, &vec![0xAB; sum.range().bytes() as usize])?;
            }
            Ok::<_, RuntimeError>((rank, seen))
        }));
        for (rank, seen) in sums {
            assert_eq!(seen.len(), 50);
            assert!(seen.iter().all(|sum| *sum == expected(rank, ranks)), "{ranks} ranks");
        }
    }
}

#[test]
fn what_is_allocated_after_a_capture_never_shares_bytes_with_any_graph() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let device = lab.runtime.device().clone();
        let temporaries: Vec<RequestSpec> =
            (0..16).map(|at| spec(&format!("t{at}"), DType::F32, 1024)).collect();
        for cycle in 0..5 {
            let body = |lab: &mut Lab| temporaries.iter().try_for_each(|spec| lab.touch(spec, -1.0));
            discover(&mut lab, "layer", body)?;
            lab.runtime.seal("test", &PlanOptions::default())?;
            capture(&mut lab, "layer", body)?;
            let main = lab.runtime.main().clone();
            let mut later = Vec::new();
            for at in 0..32 {
                let view = persistent(&device, "later", 1024)?;
                device.enqueue(&main, fill(&view, at as f32)?)?;
                later.push(view);
            }
            for _ in 0..5 {
                lab.runtime.replay("layer")?;
            }
            lab.runtime.join()?;
            for (at, view) in later.iter().enumerate() {
                let values = floats(&device.read(&main, view)?);
                assert!(
                    values.iter().all(|&value| value == at as f32),
                    "buffer {at} of cycle {cycle} was overwritten"
                );
            }
            lab.runtime.release_plan()?;
        }
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!(world.live_bytes(0), 0);
}
