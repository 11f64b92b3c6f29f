//! Registered memory: eager work, discovery and graphs use windows of exactly their group, at equal offsets, and
//! nothing is registered after the seal.

use std::time::Duration;

use sessile_hal::{Collective, Device, DeviceError, Memory, View};
use sessile_host::{HostDevice, HostMemory, World};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec};
use sessile_runtime::{HasRuntime, RuntimeError, capture, discover};

use crate::support::{
    Lab, Outcome, all_failed, all_well, bytes_of, fill, floats, impatient, persistent, spec, spy::Spy,
    threads, within,
};

fn symmetric(weight: &str, elements: u64) -> RequestSpec {
    RequestSpec { domain: Domain::Symmetric("gtp".into()), ..spec(weight, DType::F32, elements) }
}

const ONE_SHOT: Collective = Collective::ReduceScatterAccumulate { scale: 1.0 };

/// Two gradients, one after another, each filled, reduced into `sum`, and overwritten.
fn step<D: Device>(lab: &mut Lab<D>, sum: &View<D::Memory>, value: f32) -> Outcome<()> {
    let ranks = u64::from(lab.runtime.device().world_size());
    let compute = lab.runtime.compute().clone();
    for (weight, n) in [("a", 64), ("b", 32)] {
        let input = lab.runtime.request(&compute, symmetric(weight, n * ranks))?;
        lab.runtime.enqueue(&compute, fill(input.view(), value)?)?;
        lab.runtime.collective(&compute, "gtp", ONE_SHOT, input.view(), &sum.slice(0, n)?)?;
        lab.runtime.enqueue(&compute, fill(input.view(), f32::NAN)?)?;
        lab.runtime.release(&compute, input)?;
    }
    Ok(())
}

fn zeroed<D: Device>(lab: &Lab<D>) -> Outcome<View<D::Memory>> {
    let sum = persistent(lab.runtime.device(), "sum", 64)?;
    lab.runtime.device().write(lab.runtime.main(), &sum, &bytes_of(&[0.0; 64]))?;
    Ok(sum)
}

/// Where a rank's symmetric views lie: address of the arena's first byte excluded, so that ranks can compare.
fn offsets(lab: &Lab) -> Vec<(u32, u64, u64)> {
    let plan = lab.runtime.plan().expect("sealed");
    plan.views.iter().map(|view| (view.arena, view.offset, view.bytes)).collect()
}

#[test]
fn windows_are_equal_on_all_ranks_after_different_eager_histories() {
    let world = threads(4);
    let ended = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let rank = lab.runtime.device().rank();
        let main = lab.runtime.main().clone();
        // Warm-up differs from rank to rank: 2 MiB once, or 512 KiB three times.
        let (times, elements) = if rank == 0 { (1, 1 << 19) } else { (3, 1 << 17) };
        for _ in 0..times {
            let slot = lab.runtime.request(&main, spec("warm-up", DType::F32, elements))?;
            lab.runtime.release(&main, slot)?;
        }
        let sum = zeroed(&lab)?;
        step(&mut lab, &sum, 1.0)?;
        discover(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        capture(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
        for _ in 0..20 {
            lab.runtime.replay("layer")?;
        }
        lab.runtime.join()?;
        let values = floats(&lab.runtime.device().read(lab.runtime.main(), &sum)?);
        Ok::<_, RuntimeError>((offsets(&lab), values))
    }));
    for (offsets, values) in &ended {
        assert_eq!(offsets, &ended[0].0);
        // 22 passes of 4 ranks; `b` reaches the first half only.
        assert!(
            values[..32].iter().all(|&x| x == 176.0) && values[32..].iter().all(|&x| x == 88.0),
            "{values:?}"
        );
    }
}

#[test]
fn registered_eager_buffers_are_recycled_and_survive_reuse_by_slow_peers() {
    let world = threads(3);
    let ended = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let sum = zeroed(&lab)?;
        let mut bytes = Vec::new();
        for _ in 0..50 {
            step(&mut lab, &sum, 1.0)?;
            bytes.push(lab.runtime.eager_bytes());
        }
        Ok::<_, RuntimeError>((bytes, floats(&lab.runtime.device().read(lab.runtime.main(), &sum)?)))
    }));
    for (bytes, values) in ended {
        assert_eq!(bytes.first(), bytes.last());
        assert!(values[..32].iter().all(|&x| x == 300.0), "{values:?}");
    }
}

#[test]
fn a_rank_that_alone_asks_for_registered_memory_after_the_seal_fails_alone_and_at_once() {
    let world = threads(4);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let sum = zeroed(&lab)?;
        discover(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let main = lab.runtime.main().clone();
        if lab.runtime.device().rank() == 2 {
            let refused = within(Duration::from_secs(5), || {
                lab.runtime.request(&main, symmetric("late", 1 << 19)).map(drop)
            });
            let sealed = RuntimeError::PoolSealed { domain: "symmetric(gtp)".into(), bytes: 2 << 20 };
            assert_eq!(refused, Err(sealed));
        }
        // Buffers from before the seal still serve.
        step(&mut lab, &sum, 1.0)?;
        capture(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        lab.runtime.device().wait_stream(&main)?;
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn windows_of_different_sizes_are_the_same_error_on_all_ranks() {
    let errors = all_failed(threads(3).run(|device| {
        let mut lab = Lab::logged(device)?;
        let main = lab.runtime.main().clone();
        let elements = if lab.runtime.device().rank() == 1 { 128 } else { 64 };
        lab.runtime.request(&main, symmetric("w", elements)).map(drop)
    }));
    let expected = RuntimeError::WindowSizes { group: "gtp".into(), rank: 1, found: 512, expected: 256 };
    assert!(errors.iter().all(|error| *error == expected), "{errors:?}");
}

#[test]
fn when_one_rank_has_no_memory_for_an_eager_window_none_registers_and_a_retry_succeeds() {
    let world = threads(4);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let main = lab.runtime.main().clone();
        let rank = lab.runtime.device().rank();
        let before = world.live_bytes(rank);
        if rank == 3 {
            world.fail_allocation(3, 1);
        }
        let refused = within(Duration::from_secs(5), || lab.runtime.request(&main, symmetric("w", 1 << 24)));
        assert!(matches!(refused, Err(RuntimeError::PeerAllocFailed { rank: 3, .. })), "{refused:?}");
        assert_eq!(world.live_bytes(rank), before);
        let slot = lab.runtime.request(&main, symmetric("w", 1 << 24))?;
        lab.runtime.release(&main, slot)
    }));
}

/// A laboratory with a second communicator of the same ranks.
fn with_twin(device: HostDevice) -> Outcome<Lab<Spy>> {
    let device = Spy::new(device);
    let mut lab = Lab::new(device.clone())?;
    let all: Vec<u32> = (0..device.world_size()).collect();
    let twin = device.communicator("twin", &all)?;
    lab.runtime.add_group("twin", twin);
    Ok(lab)
}

#[test]
fn a_view_of_one_groups_window_is_refused_by_its_twin_before_any_device_call() {
    all_well(threads(2).run(|device| {
        let mut lab = with_twin(device)?;
        let main = lab.runtime.main().clone();
        let sum = zeroed(&lab)?;
        let slot = lab.runtime.request(&main, symmetric("w", 128))?;
        lab.runtime.device().take_calls();
        for kind in [ONE_SHOT, Collective::ReduceScatter] {
            let refused = lab.runtime.collective(&main, "twin", kind, slot.view(), &sum);
            let Err(RuntimeError::Device(DeviceError::WrongDomain { group, domain, .. })) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!((group.as_str(), domain.as_str()), ("twin", "symmetric(gtp)"));
        }
        assert_eq!(lab.runtime.device().take_calls(), Vec::<String>::new());
        lab.runtime.collective(&main, "gtp", ONE_SHOT, slot.view(), &sum)?;
        lab.runtime.release(&main, slot)
    }));
}

/// Discovered, sealed and captured; the sum it adds to.
fn captured(device: HostDevice) -> Outcome<(Lab, View<HostMemory>)> {
    let mut lab = Lab::logged(device)?;
    let sum = zeroed(&lab)?;
    discover(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
    lab.runtime.seal("test", &PlanOptions::default())?;
    capture(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
    Ok((lab, sum))
}

#[test]
fn graphs_refuse_to_replay_over_bytes_that_were_mapped_again_until_they_are_captured_anew() {
    all_well(threads(2).run(|device| {
        let (mut lab, sum) = captured(device)?;
        lab.runtime.replay("layer")?;
        let addresses = lab.runtime.arena_addresses();
        lab.runtime.remap_arenas()?;
        assert_eq!(lab.runtime.arena_addresses(), addresses);
        let replays = lab.runtime.counters().replays;
        let stale = lab.runtime.replay("layer");
        assert!(matches!(stale, Err(RuntimeError::StaleArena { .. })), "{stale:?}");
        assert_eq!(lab.runtime.counters().replays, replays, "nothing was launched");
        capture(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
        let twice = capture(&mut lab, "layer", |lab| step(lab, &sum, 1.0));
        assert!(matches!(twice, Err(RuntimeError::CapturedTwice { .. })), "{twice:?}");
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        let values = floats(&lab.runtime.device().read(lab.runtime.main(), &sum)?);
        assert_eq!(values[0], 12.0); // three passes of two gradients from two ranks
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn a_remap_that_one_rank_can_not_do_is_the_same_error_on_all() {
    for call in ["record", "wait_stream", "remap"] {
        let errors = all_failed(threads(2).run(|device| {
            let spy = Spy::new(device);
            let mut lab = Lab::new(spy.clone())?;
            let sum = zeroed(&lab)?;
            // It runs on after its completion, until something joins it.
            let layer = |lab: &mut Lab<Spy>| {
                lab.runtime.complete()?;
                step(lab, &sum, 1.0)
            };
            discover(&mut lab, "layer", layer)?;
            lab.runtime.seal("test", &PlanOptions::default())?;
            capture(&mut lab, "layer", layer)?;
            lab.runtime.replay("layer")?;
            if spy.rank() == 1 {
                spy.fail(call, 0);
            }
            lab.runtime().remap_arenas()
        }));
        assert!(matches!(errors[0], RuntimeError::PeerFailed { rank: 1, .. }), "{call}: {errors:?}");
        let stalled = matches!(errors[1], RuntimeError::Device(DeviceError::Stalled { .. }));
        assert!(stalled, "{call}: {errors:?}");
    }
}

/// Runs captured ranks; rank 1 ends, by `how`, after some replays that the others make more of.
fn fewer_replays(world: &World) -> Vec<RuntimeError> {
    all_failed::<()>(world.run(|device| {
        let (mut lab, _) = captured(device)?;
        let rank = lab.runtime.device().rank();
        for _ in 0..if rank == 1 { 9 } else { 10 } {
            lab.runtime.replay("layer")?;
        }
        lab.runtime.join()?;
        let main = lab.runtime.main().clone();
        lab.runtime.device().wait_stream(&main)?;
        // Rank 1 is fine by itself; it stays away from the next step.
        Err(RuntimeError::UnknownRunner { runner: "done".into() })
    }))
}

#[test]
fn a_rank_that_replays_less_often_is_named_with_runner_and_launch_on_its_peers() {
    for _ in 0..4 {
        let world = impatient(3);
        let errors = within(Duration::from_secs(10), || fewer_replays(&world));
        for peer in [0, 2] {
            let text = errors[peer].to_string();
            assert!(text.contains("rank 1") && text.contains("launch 10 of graph `layer`"), "{text}");
        }
        assert_eq!(errors[1], RuntimeError::UnknownRunner { runner: "done".into() });
        assert_eq!([0, 1, 2].map(|rank| world.live_bytes(rank)), [0; 3]);
    }
}

#[test]
fn a_rank_that_dies_in_capture_in_registration_or_in_replay_is_named_and_the_world_works_again() {
    for place in ["capture", "register", "replay"] {
        let world = impatient(3);
        let results = within(Duration::from_secs(10), || {
            world.run(|device| {
                let spy = Spy::new(device);
                let dies = spy.rank() == 1;
                let mut lab = Lab::new(spy.clone())?;
                let sum = zeroed(&lab)?;
                discover(&mut lab, "layer", |lab| step(lab, &sum, 1.0))?;
                if dies && place == "register" {
                    // Its peers are in the registration when it has gone.
                    spy.panic_in("register_window");
                }
                lab.runtime.seal("test", &PlanOptions::default())?;
                capture(&mut lab, "layer", |lab| {
                    step(lab, &sum, 1.0)?;
                    assert!(!(dies && place == "capture"), "dies in capture");
                    Ok::<_, RuntimeError>(())
                })?;
                for at in 0..4 {
                    assert!(!(dies && place == "replay" && at == 2), "dies in replay");
                    lab.runtime.replay("layer")?;
                }
                lab.runtime.join()?;
                let main = lab.runtime.main().clone();
                Ok::<_, RuntimeError>(spy.wait_stream(&main)?)
            })
        });
        for (rank, result) in results.into_iter().enumerate() {
            let text = result.expect_err("every rank fails").to_string();
            if rank == 1 {
                assert!(text.contains("panicked"), "{place}: {text}");
            } else {
                assert!(text.contains("rank 1"), "{place}: rank {rank}: {text}");
                assert!(place == "register" || text.contains("of graph `layer`"), "{place}: {text}");
            }
        }
        assert_eq!([0, 1, 2].map(|rank| world.live_bytes(rank)), [0; 3], "{place}");
        all_well(world.run(|device| {
            let (mut lab, _) = captured(device)?;
            lab.runtime.replay("layer")?;
            lab.runtime.join()?;
            let main = lab.runtime.main().clone();
            Ok::<_, RuntimeError>(lab.runtime.device().wait_stream(&main)?)
        }));
    }
}

#[test]
fn the_base_of_a_window_follows_the_device_and_views_lie_at_256_byte_borders() {
    all_well(threads(2).run(|device| {
        let mut lab = Lab::logged(device)?;
        let sizes = [1_u64, 257, 4095, 4097];
        let body = |lab: &mut Lab| {
            let compute = lab.runtime.compute().clone();
            let slots = sizes.map(|n| lab.runtime.request(&compute, symmetric("w", n)));
            for slot in slots {
                let slot = slot?;
                lab.runtime.enqueue(&compute, fill(slot.view(), 1.0)?)?;
                lab.runtime.release(&compute, slot)?;
            }
            Ok::<_, RuntimeError>(())
        };
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let align = lab.runtime.device().limits().window_align;
        assert!(align >= 4096);
        assert!(lab.runtime.arenas().iter().all(|arena| arena.address() % align == 0));
        let plan = lab.runtime.plan().expect("sealed");
        assert!(plan.views.iter().all(|view| view.offset % 256 == 0));
        let total: u64 = sizes.iter().map(|n| (n * 4).next_multiple_of(256)).sum();
        assert_eq!(plan.bytes(), total, "all four are live at once");
        Ok::<_, RuntimeError>(())
    }));
}
