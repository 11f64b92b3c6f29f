//! Handles may be dropped in any order and state, also while a panic unwinds: everything is freed, nothing hangs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sessile_hal::{Collective, Device, DeviceError, Kernel, Op};
use sessile_host::{HostDevice, Mode, Order, RankFailure, World};
use sessile_plan::{DType, PlanOptions, RequestSpec, Role};
use sessile_runtime::{RuntimeError, capture, discover};

use crate::support::{Dev, Lab, Outcome, all_well, impatient, spec, threads, within, world};

/// A slow reduce-scatter beside the compute stream.
fn body(lab: &mut Lab) -> Outcome<()> {
    let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
    let ranks = u64::from(lab.runtime.device().world_size());
    let input = lab.runtime.request(&compute, spec("w", DType::F32, 64 * ranks))?;
    lab.runtime.enqueue(&compute, crate::support::fill(input.view(), 1.0)?)?;
    let written = lab.runtime.mark(&compute)?;
    lab.runtime.wait(&side, &written)?;
    lab.runtime.complete()?;
    let output = RequestSpec { role: Role::RsOutput, ..spec("w", DType::F32, 64) };
    let output = lab.runtime.request(&side, output)?;
    lab.runtime.enqueue(&side, Op::new(Kernel::Spin { micros: 2_000 }, "slow", vec![])?)?;
    lab.runtime.collective(&side, "gtp", Collective::ReduceScatter, input.view(), output.view())?;
    lab.runtime.release(&side, input)?;
    lab.runtime.release(&side, output)?;
    let done = lab.runtime.mark(&side)?;
    lab.runtime.wait(&compute, &done)
}

fn captured(device: HostDevice) -> Outcome<Lab> {
    let mut lab = Lab::logged(device)?;
    discover(&mut lab, "layer", body)?;
    lab.runtime.seal("test", &PlanOptions::default())?;
    capture(&mut lab, "layer", body)?;
    Ok(lab)
}

fn permutations(items: usize) -> Vec<Vec<usize>> {
    if items == 0 {
        return vec![vec![]];
    }
    let smaller = permutations(items - 1);
    let at_all = |order: &Vec<usize>| {
        (0..items)
            .map(|at| {
                let mut order = order.clone();
                order.insert(at, items - 1);
                order
            })
            .collect::<Vec<_>>()
    };
    smaller.iter().flat_map(at_all).collect()
}

/// Handles of every kind with launches in flight, to be dropped one by one.
fn handles(device: HostDevice, world: &World) -> Outcome<Vec<Option<Box<dyn std::any::Any + Send>>>> {
    let mut lab = captured(device)?;
    lab.runtime.replay("layer")?;
    lab.runtime.replay("layer")?;
    let device: Dev = lab.runtime.device().clone();
    let graph = lab.runtime.graph("layer").expect("captured").clone();
    let stream = device.stream("own")?;
    device.launch(&graph, &stream)?;
    let comm = lab.runtime.group("gtp")?.clone();
    let view = lab.runtime.arenas()[0].clone();
    let world = world.clone();
    let handles: [Box<dyn std::any::Any + Send>; 5] =
        [Box::new(lab), Box::new(graph), Box::new(comm), Box::new((device, view, stream)), Box::new(world)];
    Ok(handles.into_iter().map(Some).collect())
}

#[test]
fn plan_graph_communicator_device_and_world_may_be_dropped_in_any_order() {
    let orders = permutations(5);
    assert_eq!(orders.len(), 120);
    for (at, order) in orders.iter().enumerate() {
        let mode = match at % 4 {
            0 => Mode::Scheduled { seed: at as u64, order: Order::Random },
            _ => Mode::Threads { workers: 2 },
        };
        let world = world(2, mode);
        within(Duration::from_secs(10), || {
            all_well(world.run(|device| {
                let mut handles = handles(device, &world)?;
                order.iter().for_each(|&which| drop(handles[which].take()));
                Ok::<_, RuntimeError>(())
            }))
        });
        assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0], "{order:?}");
    }
}

#[test]
fn the_last_handle_of_a_world_may_be_any_of_them_with_launches_in_flight() {
    for order in permutations(5).into_iter().step_by(7) {
        within(Duration::from_secs(10), || {
            // One rank: its handles outlive the world's own, so one of them is the last and stops the workers.
            let world = threads(1);
            let mut handles = handles(world.device(0), &world).expect("one rank meets itself");
            drop(world);
            order.iter().for_each(|&which| drop(handles[which].take()));
            assert!(handles.iter().all(Option::is_none));
        });
    }
}

#[test]
fn a_runtime_dropped_in_any_state_frees_everything() {
    for stop in 0..6 {
        let world = threads(2);
        within(Duration::from_secs(10), || {
            all_well(world.run(|device| {
                let mut lab = Lab::logged(device)?;
                if stop == 0 {
                    return Ok(());
                }
                discover(&mut lab, "layer", body)?;
                if stop > 1 {
                    lab.runtime.seal("test", &PlanOptions::default())?;
                }
                if stop > 2 {
                    capture(&mut lab, "layer", body)?;
                }
                if stop > 3 {
                    lab.runtime.replay("layer")?;
                }
                if stop > 4 {
                    lab.runtime.join()?;
                }
                Ok::<_, RuntimeError>(())
            }))
        });
        assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0], "stopped at {stop}");
    }
}

/// The panic of `body`, silenced.
fn panics(body: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("it panics");
    panic.downcast_ref::<&str>().map_or_else(String::new, |text| (*text).to_owned())
}

#[test]
fn a_panic_in_a_capture_gives_the_capture_up_and_the_next_one_works() {
    let world = threads(2);
    all_well(world.run(|device| {
        let rank = device.rank();
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let device = lab.runtime.device().clone();
        device.wait_stream(lab.runtime.main())?;
        let (bytes, addresses) = (world.live_bytes(rank), lab.runtime.arena_addresses());
        for requests in 0..3 {
            let text = panics(|| {
                let outcome: Outcome<()> = capture(&mut lab, "layer", |lab: &mut Lab| {
                    if requests == 2 {
                        body(lab)?;
                    } else if requests == 1 {
                        let compute = lab.runtime.compute().clone();
                        lab.runtime.request(&compute, spec("w", DType::F32, 128))?;
                    }
                    std::panic::panic_any("in the body")
                });
                assert!(outcome.is_err());
            });
            assert_eq!(text, "in the body");
            assert!(lab.runtime.runner().is_none() && !lab.runtime.is_capturing());
            for stream in [lab.runtime.main().clone(), lab.side.clone()] {
                assert!(!device.is_capturing(&stream));
                device.wait_stream(&stream)?;
            }
            assert_eq!((world.live_bytes(rank), lab.runtime.arena_addresses()), (bytes, addresses.clone()));
        }
        capture(&mut lab, "layer", body)?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        device.wait_stream(lab.runtime.main())?;
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
}

#[test]
fn a_panic_in_a_discovery_forgets_the_pass() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let text = panics(|| {
            let outcome: Outcome<()> = discover(&mut lab, "layer", |lab: &mut Lab| {
                body(lab)?;
                std::panic::panic_any("in the body")
            });
            assert!(outcome.is_err());
        });
        assert_eq!(text, "in the body");
        assert!(lab.runtime.runner().is_none());
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        assert_eq!(lab.runtime.trace().map(|trace| trace.steps[0].len()), Some(1));
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!(world.live_bytes(0), 0);
}

/// Rank 1 dies after some replays; the others go on until they notice.
fn dies_in_replay(world: &World) {
    let results = within(Duration::from_secs(15), || {
        world.run(|device| {
            let rank = device.rank();
            let mut lab = captured(device)?;
            for launch in 0..6 {
                if rank == 1 && launch == 3 {
                    std::panic::panic_any("rank 1 dies");
                }
                lab.runtime.replay("layer")?;
            }
            lab.runtime.join()?;
            lab.runtime.device().wait_stream(lab.runtime.main())?;
            Ok::<_, RuntimeError>(())
        })
    });
    for (rank, result) in results.into_iter().enumerate() {
        match (rank, result) {
            (1, Err(RankFailure::Panicked { rank: 1, message })) => assert_eq!(message, "rank 1 dies"),
            (0 | 2, Err(RankFailure::Failed { error, .. })) => {
                let lost = matches!(&error, RuntimeError::Device(DeviceError::PeerLost { peer: 1, .. }));
                assert!(lost, "rank {rank}: {error}");
            }
            (_, other) => panic!("rank {rank}: {other:?}"),
        }
    }
    for rank in 0..3 {
        assert_eq!(world.live_bytes(rank), 0, "rank {rank}");
    }
}

#[test]
fn a_rank_that_panics_in_replay_is_an_error_to_its_peers_and_everything_is_freed() {
    dies_in_replay(&threads(3));
    for order in [Order::Random, Order::WritersEarly, Order::ReadersEarly] {
        dies_in_replay(&world(3, Mode::Scheduled { seed: 11, order }));
    }
}

#[test]
fn a_world_that_lost_a_rank_in_replay_can_run_again() {
    let world = impatient(3);
    dies_in_replay(&world);
    all_well(world.run(|device| {
        let mut lab = captured(device)?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        lab.runtime.device().wait_stream(lab.runtime.main())?;
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!((0..3).map(|rank| world.live_bytes(rank)).sum::<u64>(), 0);
}
