//! Ranks compare what they discovered; a difference is the same error on all of them, in bounded time.

use std::time::Duration;

use sessile_hal::{Device, DeviceError};
use sessile_host::{HostDevice, RankFailure, World};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec, Role, Strategy};
use sessile_runtime::{Disagreement, RuntimeError, agree, discover};

use crate::support::{
    Lab, Outcome, SHORT_DEADLINE, all_failed, all_well, impatient, own_rank, spec, threads, within,
};

/// A runner and what it asks for.
type Runner = (&'static str, Vec<RequestSpec>);

fn usual() -> Vec<Runner> {
    let request = |name: &str| spec(name, DType::F32, 64);
    vec![
        ("first", vec![request("a"), request("b"), request("c")]),
        ("second", vec![request("d"), request("e")]),
    ]
}

fn discover_all(device: HostDevice, runners: &[Runner]) -> Outcome<Lab> {
    let mut lab = Lab::logged(device)?;
    for (name, specs) in runners {
        discover(&mut lab, name, |lab: &mut Lab| specs.iter().try_for_each(|spec| lab.touch(spec, 1.0)))?;
    }
    Ok(lab)
}

/// Rank `odd` discovers something else than the others: what all four ranks get to hear.
fn odd_one(odd: u32, other: &(dyn Fn(&mut Vec<Runner>) + Sync)) -> Disagreement {
    let world = threads(4);
    let errors = within(Duration::from_secs(10), || {
        all_failed(world.run(|device| {
            let mut runners = usual();
            let rank = device.rank();
            if rank == odd {
                other(&mut runners);
            }
            let mut lab = discover_all(device, &runners)?;
            let device = lab.runtime.device().clone();
            device.wait_stream(lab.runtime.main())?;
            let before = world.live_bytes(rank);
            let error = lab.runtime.seal("test", &PlanOptions::default()).map(drop);
            assert_eq!(world.live_bytes(rank), before, "nothing is allocated before all agree");
            error
        }))
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    match &errors[0] {
        RuntimeError::PlanMismatch(disagreement) => disagreement.clone(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_skips_a_request_is_named_with_the_first_difference_on_all_ranks() {
    let found = odd_one(1, &|runners| drop(runners[0].1.remove(1)));
    assert_eq!((found.rank, found.runner.as_str(), found.index), (1, "first", 1));
    insta::assert_snapshot!(RuntimeError::PlanMismatch(found), @"ranks of group `gtp` discovered different storage: rank 1 differs at runner `first`, request 1: c wgrad_input f32[64] in default where the others have b wgrad_input f32[64] in default; make every rank request the same buffers in the same order, also for an expert without tokens");
}

#[test]
fn a_rank_that_skips_the_last_request_has_nothing_there() {
    let found = odd_one(2, &|runners| drop(runners[1].1.pop()));
    assert_eq!((found.rank, found.runner.as_str(), found.index, found.found), (2, "second", 1, None));
}

#[test]
fn the_majority_decides_who_differs() {
    for odd in 0..4 {
        assert_eq!(odd_one(odd, &|runners| drop(runners[0].1.remove(0))).rank, odd);
    }
}

#[test]
fn another_dtype_is_a_difference() {
    let found = odd_one(3, &|runners| runners[1].1[0].dtype = DType::Bf16);
    assert_eq!((found.rank, found.runner.as_str(), found.index), (3, "second", 0));
    insta::assert_snapshot!(RuntimeError::PlanMismatch(found), @"ranks of group `gtp` discovered different storage: rank 3 differs at runner `second`, request 0: d wgrad_input bf16[64] in default where the others have d wgrad_input f32[64] in default; make every rank request the same buffers in the same order, also for an expert without tokens");
}

#[test]
fn another_order_of_requests_is_a_difference() {
    let found = odd_one(1, &|runners| runners[0].1.swap(1, 2));
    assert_eq!((found.rank, found.runner.as_str(), found.index), (1, "first", 1));
}

#[test]
fn another_order_of_runners_is_a_difference() {
    let found = odd_one(1, &|runners| runners.reverse());
    assert_eq!((found.rank, found.expected.as_deref()), (1, Some("runner `first`")));
    insta::assert_snapshot!(RuntimeError::PlanMismatch(found), @"ranks of group `gtp` discovered different storage: rank 1 differs at runner `first`, request 0: runner `second` where the others have runner `first`; make every rank request the same buffers in the same order, also for an expert without tokens");
}

#[test]
fn another_name_of_a_runner_is_a_difference() {
    let found = odd_one(2, &|runners| runners[1].0 = "other");
    assert_eq!(
        (found.rank, found.runner.as_str(), found.found.as_deref()),
        (2, "second", Some("runner `other`"))
    );
}

#[test]
fn a_runner_more_is_a_difference() {
    let found = odd_one(0, &|runners| runners.push(("third", vec![])));
    assert_eq!((found.rank, found.expected, found.found.as_deref()), (0, None, Some("runner `third`")));
}

#[test]
fn a_difference_that_texts_do_not_show_still_names_its_request() {
    let found = odd_one(1, &|runners| runners[1].1[1].unsharded_shape = vec![63]);
    assert_eq!((found.rank, found.runner.as_str(), found.index), (1, "second", 1));
}

#[test]
fn storage_outside_the_group_may_differ_from_rank_to_rank() {
    let world = threads(3);
    let views = all_well(world.run(|device| {
        let rank = device.rank();
        let mut runners = usual();
        // Each rank has another number of requests of its own, before and between those of the group.
        for at in 0..rank as usize {
            let own =
                RequestSpec { group: None, role: Role::User("own".into()), ..spec("own", DType::F32, 32) };
            runners[0].1.insert(at * 2, own);
        }
        let mut lab = discover_all(device, &runners)?;
        Ok::<_, RuntimeError>(lab.runtime.seal("test", &PlanOptions::default())?.views.len())
    }));
    assert_eq!(views, [5, 6, 7]);
}

#[test]
fn after_a_disagreement_ranks_that_agree_can_seal() {
    let world = threads(3);
    all_well(world.run(|device| {
        let rank = device.rank();
        let mut lab = discover_all(device, &usual())?;
        if rank == 1 {
            discover(&mut lab, "only here", |_: &mut Lab| Ok::<_, RuntimeError>(()))?;
        }
        let error = lab.runtime.seal("test", &PlanOptions::default()).expect_err("rank 1 has one more");
        assert!(matches!(&error, RuntimeError::PlanMismatch(found) if found.rank == 1), "{error}");
        if rank != 1 {
            discover(&mut lab, "only here", |_: &mut Lab| Ok::<_, RuntimeError>(()))?;
        }
        lab.runtime.seal("test", &PlanOptions::default()).map(drop)
    }));
}

/// A rank that can not even make its plan says so, rather than that it discovered something else.
#[test]
fn a_rank_that_can_not_plan_tells_its_own_reason_to_all() {
    let world = threads(3);
    let errors = all_failed(world.run(|device| {
        let rank = device.rank();
        let mut lab = discover_all(device, &usual())?;
        let strategy = if rank == 2 { Strategy::Ring(1) } else { Strategy::Sessile };
        lab.runtime.seal("test", &PlanOptions { strategy, ..PlanOptions::default() }).map(drop)
    }));
    for (rank, error) in errors.iter().enumerate() {
        match (rank, error) {
            (2, RuntimeError::Plan(_)) => {}
            (0 | 1, RuntimeError::PeerFailed { rank: 2, detail }) => {
                assert!(detail.contains("ring:1"), "{detail}")
            }
            (_, error) => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn different_offsets_in_a_window_are_an_error_on_all_ranks() {
    let world = threads(3);
    let errors = all_failed(world.run(|device| {
        let rank = device.rank();
        let request = |name: &str| RequestSpec {
            domain: Domain::Symmetric("gtp".into()),
            ..spec(name, DType::F32, 64)
        };
        let mut lab = discover_all(
            device,
            &[("first", vec![request("a"), request("b")]), ("second", vec![request("c")])],
        )?;
        let strategy = if rank == 2 { Strategy::Generations(1) } else { Strategy::PerRequest };
        lab.runtime.seal("test", &PlanOptions { strategy, ..PlanOptions::default() }).map(drop)
    }));
    for error in errors {
        assert_eq!(error, RuntimeError::OffsetMismatch { group: "gtp".into(), rank: 2 });
    }
    assert_eq!((0..3).map(|rank| world.live_bytes(rank)).sum::<u64>(), 0);
}

fn heard_of(
    world: &World,
    gone: u32,
    program: impl Fn(HostDevice) -> Outcome<()> + Sync,
) -> Vec<RuntimeError> {
    let results = within(SHORT_DEADLINE * 6, || world.run(program));
    let mut errors = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(()) => assert_eq!(rank as u32, gone),
            Err(RankFailure::Failed { error, .. }) => errors.push(error),
            Err(failure) => panic!("{failure}"),
        }
    }
    errors
}

#[test]
fn a_rank_whose_program_ends_before_the_seal_is_lost_to_the_others_at_once() {
    let world = impatient(4);
    let errors = heard_of(&world, 2, |device| {
        let gone = device.rank() == 2;
        let mut lab = discover_all(device, &usual())?;
        if gone { Ok(()) } else { lab.runtime.seal("test", &PlanOptions::default()).map(drop) }
    });
    assert_eq!(errors.len(), 3);
    for error in errors {
        assert!(matches!(error, RuntimeError::Device(DeviceError::PeerLost { peer: 2, .. })), "{error}");
    }
    assert_eq!((0..4).map(|rank| world.live_bytes(rank)).sum::<u64>(), 0);
}

#[test]
fn a_rank_that_is_busy_elsewhere_is_a_timeout_that_names_it() {
    let world = impatient(3);
    let errors = heard_of(&world, 1, |device| {
        let busy = device.rank() == 1;
        let mut lab = discover_all(device, &usual())?;
        if busy {
            std::thread::sleep(SHORT_DEADLINE * 3);
            return Ok(());
        }
        assert_ne!(own_rank(lab.runtime.world()), 1);
        lab.runtime.seal("test", &PlanOptions::default()).map(drop)
    });
    assert_eq!(errors.len(), 2);
    for error in errors {
        assert!(
            matches!(error, RuntimeError::Device(DeviceError::PeerTimeout { missing: 1, .. })),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_has_failed_says_why_also_if_the_others_are_not_there_to_hear_it() {
    let world = impatient(2);
    let errors = heard_of(&world, 1, |device| {
        let gone = device.rank() == 1;
        let lab = discover_all(device, &usual())?;
        if gone {
            return Ok(());
        }
        agree::share(lab.runtime.world(), Err(RuntimeError::UnknownRunner { runner: "the cause".into() }))
    });
    assert_eq!(errors, [RuntimeError::UnknownRunner { runner: "the cause".into() }]);
}

#[test]
fn a_rank_without_the_groups_communicator_fails_all_within_the_deadline() {
    let world = impatient(2);
    let errors = within(SHORT_DEADLINE * 6, || {
        all_failed(world.run(|device| {
            let rank = device.rank();
            let mut lab = discover_all(device, &usual())?;
            discover(&mut lab, "more", |lab: &mut Lab| {
                let group = Some(if rank == 0 { "gtp" } else { "nobody knows" }.to_owned());
                lab.touch(&RequestSpec { group, ..spec("w", DType::F32, 8) }, 0.0)
            })?;
            lab.runtime.seal("test", &PlanOptions::default()).map(drop)
        }))
    });
    assert_eq!(errors[1], RuntimeError::UnknownGroup { group: "nobody knows".into() });
    assert!(matches!(&errors[0], RuntimeError::PeerFailed { rank: 1, .. }), "{}", errors[0]);
}

#[test]
fn a_rank_that_seals_with_other_options_is_named_on_all_ranks() {
    let world = threads(4);
    let errors = within(Duration::from_secs(10), || {
        all_failed(world.run(|device| {
            let rank = device.rank();
            let mut lab = discover_all(device, &usual())?;
            let options = PlanOptions { depth: if rank == 2 { 3 } else { 2 }, ..PlanOptions::default() };
            let error = lab.runtime.seal("test", &options).map(drop);
            assert!(lab.runtime.plan().is_none() && lab.runtime.arenas().is_empty());
            error
        }))
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("rank 2") && text.contains("depth: 3"), "{text}");
    }
}

#[test]
fn a_discovery_that_failed_half_way_can_be_restarted() {
    let world = threads(2);
    all_well(world.run(|device| {
        let mut lab = discover_all(device, &usual()[..1])?;
        lab.runtime.restart_discovery()?;
        for (name, specs) in usual() {
            discover(&mut lab, name, |lab: &mut Lab| specs.iter().try_for_each(|spec| lab.touch(spec, 1.0)))?;
        }
        let plan = lab.runtime.seal("test", &PlanOptions::default())?;
        assert_eq!(plan.views.len(), 5);
        assert_eq!(lab.runtime.trace().map(|trace| trace.steps.clone()), Some(vec![vec![0, 1]]));
        Ok::<(), RuntimeError>(())
    }));
}
