//! After the seal nothing grows; before it, ranks allocate together or not at all.

use std::time::Duration;

use sessile_hal::{Device, Memory};
use sessile_host::Mode;
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec};
use sessile_runtime::log::Entry;
use sessile_runtime::{Runtime, RuntimeError, capture, discover};

use crate::support::spy::Spy;
use crate::support::{Lab, Outcome, all_failed, all_well, impatient, job_log, spec, threads, within, world};

fn planned() -> RequestSpec {
    RequestSpec { domain: Domain::Symmetric("gtp".into()), ..spec("w0", DType::F32, 1024) }
}

fn ask<D: Device>(lab: &mut Lab<D>) -> Outcome<()> {
    lab.touch(&planned(), 1.0)
}

#[test]
fn an_unplanned_request_fails_before_any_device_call_and_the_capture_goes_on() {
    let world = threads(1);
    all_well(world.run(|device| {
        let spy = Spy::new(device);
        let mut lab = Lab::new(spy.clone())?;
        discover(&mut lab, "layer", ask)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        capture(&mut lab, "layer", |lab: &mut Lab<Spy>| {
            ask(lab)?;
            let compute = lab.runtime.compute().clone();
            spy.take_calls();
            for grown in [spec("w1", DType::F32, 1 << 19), planned()] {
                let error = lab.runtime.request(&compute, grown).expect_err("nothing like it was discovered");
                assert!(matches!(error, RuntimeError::UnplannedRequest { index: 1, .. }), "{error}");
            }
            assert_eq!(spy.take_calls(), Vec::<String>::new());
            Ok::<_, RuntimeError>(())
        })?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        spy.wait_stream(&lab.runtime.main().clone())?;
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!(world.live_bytes(0), 0);
}

#[test]
fn a_request_that_differs_fails_before_any_device_call_and_the_right_one_may_follow() {
    let world = threads(1);
    all_well(world.run(|device| {
        let spy = Spy::new(device);
        let mut lab = Lab::new(spy.clone())?;
        discover(&mut lab, "layer", ask)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        capture(&mut lab, "layer", |lab: &mut Lab<Spy>| {
            let compute = lab.runtime.compute().clone();
            spy.take_calls();
            let error =
                lab.runtime.request(&compute, spec("w0", DType::F32, 1024)).expect_err("another domain");
            assert!(matches!(error, RuntimeError::RequestMismatch { index: 0, .. }), "{error}");
            assert_eq!(spy.take_calls(), Vec::<String>::new());
            ask(lab)
        })?;
        lab.runtime.replay("layer").map(drop)
    }));
    assert_eq!(world.live_bytes(0), 0);
}

#[test]
fn one_rank_that_asks_for_more_after_the_seal_fails_alone_and_blocks_nobody() {
    let world = threads(4);
    let results = within(Duration::from_secs(10), || {
        world.run(|device| {
            let rank = device.rank();
            let mut lab = Lab::logged(device)?;
            discover(&mut lab, "layer", ask)?;
            lab.runtime.seal("test", &PlanOptions::default())?;
            let body = |lab: &mut Lab| {
                ask(lab)?;
                if rank == 2 { lab.touch(&spec("extra", DType::Bf16, 1 << 20), 0.0) } else { Ok(()) }
            };
            capture(&mut lab, "layer", body)?;
            lab.runtime.replay("layer")?;
            lab.runtime.join()?;
            lab.runtime.device().wait_stream(lab.runtime.main())?;
            Ok::<_, RuntimeError>(())
        })
    });
    for (rank, result) in results.into_iter().enumerate() {
        match (rank, result) {
            (2, Err(sessile_host::RankFailure::Failed { error, .. })) => {
                assert!(
                    matches!(error, RuntimeError::UnplannedRequest { index: 1, bytes: 2097152, .. }),
                    "{error}"
                );
            }
            (2, other) => panic!("{other:?}"),
            (_, result) => assert!(result.is_ok(), "rank {rank}: {result:?}"),
        }
    }
    assert_eq!((0..4).map(|rank| world.live_bytes(rank)).sum::<u64>(), 0);
}

#[test]
fn after_the_seal_capture_and_replay_allocate_and_register_nothing() {
    let world = threads(2);
    let calls = all_well(world.run(|device| {
        let spy = Spy::new(device);
        let mut lab = Lab::new(spy.clone())?;
        discover(&mut lab, "layer", ask)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        spy.take_calls();
        capture(&mut lab, "layer", ask)?;
        for _ in 0..3 {
            lab.runtime.replay("layer")?;
        }
        lab.runtime.join()?;
        spy.wait_stream(&lab.runtime.main().clone())?;
        Ok::<_, RuntimeError>(spy.take_calls())
    }));
    for calls in calls {
        let grows =
            |call: &&String| ["alloc", "register", "communicator"].iter().any(|word| call.starts_with(word));
        assert_eq!(calls.iter().find(grows), None);
        assert_eq!(calls.iter().filter(|call| call.starts_with("launch")).count(), 3);
    }
}

/// Two communicators over all ranks, added in an order that depends on the rank; storage in the windows of both.
fn with_two_domains<D: Device>(device: D) -> Outcome<Lab<D>> {
    let (rank, all) = (device.rank(), (0..device.world_size()).collect::<Vec<_>>());
    let world = device.communicator("world", &all)?;
    let mut groups = Vec::new();
    for name in ["y", "x", "dense"] {
        groups.push((name, device.communicator(name, &all)?));
    }
    groups.rotate_left(rank as usize % 3);
    let side = device.stream("side")?;
    let mut runtime = Runtime::new(device, world)?;
    for (name, comm) in groups {
        runtime.add_group(name, comm);
    }
    let mut lab = Lab { runtime, side };
    discover(&mut lab, "layer", |lab: &mut Lab<D>| {
        for name in ["x", "y", "x"] {
            let domain = Domain::Symmetric(name.into());
            lab.touch(&RequestSpec { domain, group: Some(name.into()), ..spec("w", DType::F32, 256) }, 1.0)?;
        }
        Ok::<_, RuntimeError>(())
    })?;
    lab.runtime.seal("test", &PlanOptions::default())?;
    Ok(lab)
}

#[test]
fn groups_meet_and_register_in_one_order_on_all_ranks_whatever_order_they_were_added_in() {
    let world = threads(4);
    let registered = all_well(world.run(|device| {
        let spy = Spy::new(device);
        with_two_domains(spy.clone())?;
        let calls = spy.take_calls().into_iter();
        Ok::<_, RuntimeError>(calls.filter(|call| call.starts_with("register")).collect::<Vec<_>>())
    }));
    for calls in registered {
        // Eager buffers of the discovery, in its order; arenas at the seal, in order of name.
        assert_eq!(calls, ["x", "y", "x", "y"].map(|group| format!("register_window {group}")));
    }
    let logs = all_well(world.run(|device| {
        let lab = with_two_domains(sessile_runtime::log::Recorded::new(
            device,
            sessile_runtime::log::LogLevel::On,
        ))?;
        Ok::<_, RuntimeError>(lab.runtime.device().take_log())
    }));
    let met: Vec<Vec<String>> = logs
        .iter()
        .map(|log| {
            let exchange = |entry: &Entry| match entry {
                Entry::Exchange { comm } => Some(log.comms[*comm as usize].name.clone()),
                _ => None,
            };
            log.entries.iter().filter_map(exchange).collect()
        })
        .collect();
    assert!(met.iter().all(|order| *order == met[0] && order.contains(&"x".to_owned())), "{met:?}");
    assert!(sessile_runtime::check::check(&job_log(logs)).is_clean());
}

#[test]
fn two_communicators_over_the_same_ranks_are_two_domains() {
    let world = threads(3);
    let arenas = all_well(world.run(|device| {
        let lab = with_two_domains(Spy::new(device))?;
        let plan = lab.runtime.plan().expect("sealed").clone();
        Ok::<_, RuntimeError>((plan, lab.runtime.arena_addresses()))
    }));
    for (plan, addresses) in arenas {
        let domains: Vec<String> = plan.arenas.iter().map(|arena| arena.domain.to_string()).collect();
        assert_eq!(domains, ["symmetric(x)", "symmetric(y)"]);
        assert_ne!(addresses[0], addresses[1]);
        assert_eq!(plan.views.iter().map(|view| view.arena).collect::<Vec<_>>(), [0, 1, 0]);
    }
}

#[test]
fn ranks_of_different_groups_may_use_one_name_also_for_registered_memory() {
    let world = threads(4);
    let domains = all_well(world.run(|device| {
        let rank = device.rank();
        let spy = Spy::new(device);
        let all = spy.communicator("world", &[0, 1, 2, 3])?;
        let half =
            if rank < 2 { spy.communicator("low", &[0, 1])? } else { spy.communicator("high", &[2, 3])? };
        let side = spy.stream("side")?;
        let mut runtime = Runtime::new(spy.clone(), all)?;
        runtime.add_group("gtp", half);
        let mut lab = Lab { runtime, side };
        // The halves differ, as pipeline stages do: each agrees on its own.
        let body = |lab: &mut Lab<Spy>| {
            ask(lab)?;
            if rank < 2 { lab.touch(&planned(), 2.0) } else { Ok(()) }
        };
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        capture(&mut lab, "layer", body)?;
        lab.runtime.replay("layer")?;
        let arenas = lab.runtime.arenas().iter();
        Ok::<_, RuntimeError>(arenas.map(|arena| arena.domain().to_string()).collect::<Vec<_>>())
    }));
    assert_eq!(domains, [["symmetric(low)"], ["symmetric(low)"], ["symmetric(high)"], ["symmetric(high)"]]);
}

#[test]
fn when_one_rank_can_not_allocate_all_give_back_and_a_retry_succeeds() {
    let world = threads(4);
    let bytes = 1 << 20;
    let results = within(Duration::from_secs(15), || {
        world.run(|device| {
            let rank = device.rank();
            let mut lab = Lab::logged(device)?;
            let body = |lab: &mut Lab| {
                lab.touch(&planned(), 1.0)?;
                lab.touch(&spec("w1", DType::F32, bytes / 4), 2.0)
            };
            discover(&mut lab, "layer", body)?;
            lab.runtime.device().wait_stream(lab.runtime.main())?;
            let before = world.live_bytes(rank);
            // The second of two arenas: the first must be given back too.
            if rank == 3 {
                world.fail_allocation(3, 2);
            }
            let error = lab.runtime.seal("test", &PlanOptions::default()).expect_err("rank 3 fails");
            assert_eq!(world.live_bytes(rank), before);
            assert!(lab.runtime.plan().is_none() && lab.runtime.arenas().is_empty());
            lab.runtime.seal("test", &PlanOptions::default())?;
            assert!(world.live_bytes(rank) >= before + bytes);
            capture(&mut lab, "layer", body)?;
            lab.runtime.replay("layer")?;
            Ok::<_, RuntimeError>(error)
        })
    });
    let errors = all_well(results);
    for error in &errors {
        assert!(matches!(error, RuntimeError::PeerAllocFailed { rank: 3, .. }), "{error}");
    }
    insta::assert_snapshot!(errors[0], @"rank 3 could not allocate its arenas (rank 3: no memory for `arena symmetric(gtp)`: 4096 bytes asked for, 4095 free: free memory of its device, or ask for less); all ranks gave theirs back and can seal again");
    assert_eq!((0..4).map(|rank| world.live_bytes(rank)).sum::<u64>(), 0);
}

#[test]
fn a_memory_limit_that_one_rank_meets_is_the_same_error_on_all() {
    let limited = sessile_host::World::new(sessile_host::WorldOptions {
        ranks: 2,
        mode: Mode::Threads { workers: 1 },
        deadline: Duration::from_secs(10),
        memory_limit: Some(100_000),
        record_spans: false,
        ..sessile_host::WorldOptions::default()
    });
    let errors = all_failed(limited.run(|device| {
        // Rank 1 has less left than the arena needs.
        let ballast =
            (device.rank() == 1).then(|| device.alloc(70_000, &Domain::Default, "ballast")).transpose()?;
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", |lab: &mut Lab| lab.touch(&spec("w", DType::F32, 5_000), 1.0))?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        drop(ballast);
        Ok::<_, RuntimeError>(())
    }));
    for error in errors {
        assert!(matches!(error, RuntimeError::PeerAllocFailed { rank: 1, .. }), "{error}");
        // Known before anything was allocated.
        let text = error.to_string();
        assert!(text.contains("the arenas need 20224 bytes") && text.contains("depth"), "{text}");
    }
    assert_eq!([limited.live_bytes(0), limited.live_bytes(1)], [0, 0]);
}

#[test]
fn a_request_larger_than_any_memory_is_an_error_and_not_a_panic() {
    let world = impatient(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        for elements in [u64::MAX, u64::MAX / 4, 1 << 62] {
            let main = lab.runtime.main().clone();
            let eager = lab.runtime.request(&main, spec("w", DType::F32, elements));
            assert!(matches!(eager, Err(RuntimeError::Device(_))), "{elements}");
        }
        Ok::<_, RuntimeError>(())
    }));
    assert_eq!(world.live_bytes(0), 0);
}

#[test]
fn scheduled_ranks_seal_as_threads_do() {
    let world = world(3, Mode::Scheduled { seed: 3, order: sessile_host::Order::WritersEarly });
    let digests = all_well(world.run(|device| {
        let lab = with_two_domains(Spy::new(device))?;
        Ok::<_, RuntimeError>(lab.runtime.plan().expect("sealed").digest())
    }));
    assert!(digests.iter().all(|digest| *digest == digests[0]));
}
