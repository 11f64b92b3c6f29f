//! The life of a plan: what may be called when, and that a call at the wrong time changes nothing.

use std::time::Duration;

use sessile_hal::{Device, DeviceError, Kernel, Op};
use sessile_host::HostDevice;
use sessile_plan::{DType, PlanOptions, TraceError};
use sessile_runtime::{Order, RuntimeError, capture, discover};

use crate::support::spy::Spy;
use crate::support::{Lab, Outcome, all_failed, all_well, impatient, spec, threads, within};

fn ask<D: Device>(lab: &mut Lab<D>) -> Outcome<()> {
    lab.touch(&spec("w0", DType::F32, 256), 1.0)?;
    lab.touch(&spec("w1", DType::F32, 64), 2.0)
}

/// A laboratory of one rank with runner `layer` sealed and captured.
fn captured(device: HostDevice) -> Outcome<Lab> {
    let mut lab = Lab::logged(device)?;
    discover(&mut lab, "layer", ask)?;
    lab.runtime.seal("test", &PlanOptions::default())?;
    capture(&mut lab, "layer", ask)?;
    Ok(lab)
}

/// All that a wrong call could change.
fn state(lab: &Lab) -> String {
    let runtime = &lab.runtime;
    format!(
        "{:?} {:?} {:?} {:?} {:?} {:?}",
        runtime.plan().map(sessile_plan::Plan::digest),
        runtime.arena_addresses(),
        runtime.counters(),
        runtime.eager_bytes(),
        runtime.runner(),
        runtime.graph("layer").is_some(),
    )
}

/// What the call says, having changed nothing.
#[track_caller]
fn refused<T>(lab: &mut Lab, call: impl FnOnce(&mut Lab) -> Outcome<T>) -> String {
    let before = state(lab);
    let Err(error) = call(lab) else { panic!("the call was not refused") };
    assert_eq!(state(lab), before, "{error}");
    error.to_string()
}

fn alone<T: Send>(program: impl Fn(HostDevice) -> Outcome<T> + Sync) -> T {
    let world = threads(1);
    let value = all_well(world.run(program)).pop().expect("one rank");
    assert_eq!(world.live_bytes(0), 0);
    value
}

fn discover_again(lab: &mut Lab) -> Outcome<()> {
    discover(lab, "other", |_: &mut Lab| panic!("the body of a refused discovery must not run"))
}

fn capture_again(lab: &mut Lab, runner: &str) -> Outcome<()> {
    capture(lab, runner, |_: &mut Lab| panic!("the body of a refused capture must not run"))
}

fn seal(lab: &mut Lab) -> Outcome<()> {
    lab.runtime.seal("test", &PlanOptions::default()).map(drop)
}

#[test]
fn before_the_seal_nothing_can_be_captured_replayed_or_released() {
    let texts = alone(|device| {
        let mut lab = Lab::logged(device)?;
        let empty = refused(&mut lab, seal);
        discover(&mut lab, "layer", ask)?;
        Ok([
            empty,
            refused(&mut lab, |lab| capture_again(lab, "layer")),
            refused(&mut lab, |lab| lab.runtime.replay("layer")),
            refused(&mut lab, |lab| lab.runtime.in_order("layer")),
            refused(&mut lab, |lab| lab.runtime.release_plan()),
        ])
    });
    insta::assert_snapshot!(texts.join("\n"), @r"
    steps[0] is empty: a step needs at least one launch, as an index into `runners`
    capture is not possible while nothing is sealed: discover every runner once, then seal
    replay is not possible while nothing is sealed: discover every runner once, then seal
    replay is not possible while nothing is sealed: discover every runner once, then seal
    release_plan is not possible while nothing is sealed: discover every runner once, then seal
    ");
}

#[test]
fn after_the_seal_nothing_can_be_discovered_or_sealed_again() {
    let texts = alone(|device| {
        let mut lab = captured(device)?;
        Ok([
            refused(&mut lab, discover_again),
            refused(&mut lab, seal),
            refused(&mut lab, |lab| capture_again(lab, "layer")),
            refused(&mut lab, |lab| capture_again(lab, "unknown")),
            refused(&mut lab, |lab| lab.runtime.replay("unknown")),
            refused(&mut lab, |lab| lab.runtime.in_order("unknown")),
        ])
    });
    insta::assert_snapshot!(texts.join("\n"), @r"
    discover is not possible while a plan is sealed: release it before discovering again
    seal is not possible while a plan is sealed: release it first; after the seal nothing grows
    runner `layer` has a graph already: release the plan before capturing again
    runner `unknown` was not discovered: run it once in discovery before the seal
    runner `unknown` was not discovered: run it once in discovery before the seal
    runner `unknown` was not discovered: run it once in discovery before the seal
    ");
}

#[test]
fn a_runner_that_was_not_captured_can_not_be_replayed_and_keeps_the_order() {
    alone(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "a", ask)?;
        discover(&mut lab, "b", ask)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        capture(&mut lab, "b", ask)?;
        let text = refused(&mut lab, |lab| lab.runtime.replay("a"));
        assert_eq!(text, "runner `a` has no graph: capture it after the seal");
        assert!(lab.runtime.in_order("a")? && !lab.runtime.in_order("b")?);
        assert_eq!(lab.runtime.replay("b")?, Order::Deviated);
        assert!(lab.runtime.in_order("a")?);
        capture(&mut lab, "a", ask)?;
        assert_eq!(lab.runtime.replay("a")?, Order::AsSealed);
        Ok(())
    });
}

#[test]
fn inside_a_discovery_no_phase_can_change() {
    let texts = alone(|device| {
        let mut lab = Lab::logged(device)?;
        let mut texts = Vec::new();
        discover(&mut lab, "layer", |lab: &mut Lab| {
            texts = vec![
                refused(lab, discover_again),
                refused(lab, seal),
                refused(lab, |lab| capture_again(lab, "layer")),
                refused(lab, |lab| lab.runtime.replay("layer")),
                refused(lab, |lab| lab.runtime.release_plan()),
            ];
            ask(lab)
        })?;
        seal(&mut lab)?;
        assert_eq!(lab.runtime.trace().map(|trace| trace.runners[0].requests.len()), Some(2));
        Ok(texts)
    });
    insta::assert_snapshot!(texts.join("\n"), @r"
    discover is not possible while a runner is being discovered: end the discovery of that runner first
    seal is not possible while a runner is being discovered: end the discovery of that runner first
    capture is not possible while a runner is being discovered: end the discovery of that runner first
    replay is not possible while a runner is being discovered: end the discovery of that runner first
    release_plan is not possible while a runner is being discovered: end the discovery of that runner first
    ");
}

#[test]
fn inside_a_capture_no_phase_can_change_and_the_capture_goes_on() {
    let texts = alone(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", ask)?;
        seal(&mut lab)?;
        let mut texts = Vec::new();
        capture(&mut lab, "layer", |lab: &mut Lab| {
            texts = vec![
                refused(lab, discover_again),
                refused(lab, seal),
                refused(lab, |lab| capture_again(lab, "layer")),
                refused(lab, |lab| lab.runtime.replay("layer")),
                refused(lab, |lab| lab.runtime.release_plan()),
            ];
            ask(lab)
        })?;
        lab.runtime.replay("layer")?;
        Ok(texts)
    });
    insta::assert_snapshot!(texts.join("\n"), @r"
    discover is not possible while a runner is being captured: end or abort the capture first
    seal is not possible while a runner is being captured: end or abort the capture first
    capture is not possible while a runner is being captured: end or abort the capture first
    replay is not possible while a runner is being captured: end or abort the capture first
    release_plan is not possible while a runner is being captured: end or abort the capture first
    ");
}

#[test]
fn sealing_twice_is_an_error_on_all_ranks_and_keeps_the_plan() {
    let world = threads(3);
    let results = world.run(|device| {
        let rank = device.rank();
        let mut lab = captured(device)?;
        let before = state(&lab);
        let error = seal(&mut lab).expect_err("sealed already");
        assert_eq!(state(&lab), before);
        lab.runtime.replay("layer")?;
        match (rank, &error) {
            (0, RuntimeError::WrongPhase { call: "seal", .. })
            | (_, RuntimeError::PeerFailed { rank: 0, .. }) => {}
            _ => panic!("{error}"),
        }
        Ok::<_, RuntimeError>(())
    });
    all_well(results);
}

#[test]
fn one_rank_that_seals_twice_hears_so_after_the_deadline_and_its_plan_still_replays() {
    let world = impatient(2);
    let results = within(Duration::from_secs(8), || {
        world.run(|device| {
            let rank = device.rank();
            let mut lab = captured(device)?;
            if rank == 0 {
                let error = seal(&mut lab).expect_err("nobody else seals");
                assert!(matches!(error, RuntimeError::WrongPhase { call: "seal", .. }), "{error}");
                lab.runtime.replay("layer")?;
            } else {
                std::thread::sleep(crate::support::SHORT_DEADLINE * 5 / 2);
            }
            Ok::<_, RuntimeError>(())
        })
    });
    all_well(results);
}

#[test]
fn a_seal_without_any_discovery_is_an_error_on_all_ranks() {
    let world = threads(2);
    let errors = all_failed(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        seal(&mut lab)
    }));
    assert_eq!(errors[0], RuntimeError::Trace(TraceError::NoLaunches { step: 0 }));
    assert!(matches!(&errors[1], RuntimeError::PeerFailed { rank: 0, .. }), "{}", errors[1]);
}

#[test]
fn after_the_release_another_step_can_be_discovered_sealed_captured_and_replayed() {
    let world = threads(2);
    all_well(world.run(|device| {
        let rank = device.rank();
        let mut lab = Lab::logged(device)?;
        let mut sizes = Vec::new();
        let mut idle = None;
        for round in 0..4_u64 {
            let body = |lab: &mut Lab| lab.touch(&spec("w", DType::F32, 64 << round), 1.0);
            let runner = format!("layer {round}");
            discover(&mut lab, &runner, body)?;
            lab.runtime.seal("test", &PlanOptions::default())?;
            capture(&mut lab, &runner, body)?;
            for _ in 0..3 {
                assert_eq!(lab.runtime.replay(&runner)?, Order::AsSealed);
            }
            sizes.push(lab.runtime.plan().map(sessile_plan::Plan::bytes));
            lab.runtime.release_plan()?;
            assert!(lab.runtime.plan().is_none() && lab.runtime.arenas().is_empty());
            assert!(lab.runtime.graph(&runner).is_none());
            // What is left are the eager pool's buffers, one more size a round.
            let left = world.live_bytes(rank) - lab.runtime.eager_bytes();
            assert_eq!(*idle.get_or_insert(left), left, "round {round} left bytes behind");
        }
        assert_eq!(sizes, [Some(256), Some(512), Some(1024), Some(2048)]);
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn a_release_waits_for_all_launches_and_has_given_everything_back_when_it_returns() {
    for depth in [1, 2] {
        let world = threads(1);
        all_well(world.run(|device| {
            let mut lab = Lab::logged(device)?;
            let body = |lab: &mut Lab| {
                let compute = lab.runtime.compute().clone();
                lab.runtime.complete()?;
                lab.runtime.enqueue(&compute, Op::new(Kernel::Spin { micros: 30_000 }, "slow", vec![])?)?;
                lab.touch(&spec("w", DType::F32, 4096), 1.0)
            };
            discover(&mut lab, "layer", body)?;
            lab.runtime.device().wait_stream(lab.runtime.main())?;
            let before = world.live_bytes(0);
            lab.runtime.seal("test", &PlanOptions { depth, ..PlanOptions::default() })?;
            capture(&mut lab, "layer", body)?;
            for joined in [false, true] {
                lab.runtime.replay("layer")?;
                if joined {
                    lab.runtime.join()?;
                }
            }
            lab.runtime.release_plan()?;
            assert_eq!(world.live_bytes(0), before, "depth {depth}");
            Ok::<_, RuntimeError>(())
        }));
    }
}

#[test]
fn a_discovered_buffer_released_outside_any_runner_is_an_error_and_goes_back_all_the_same() {
    let text = alone(|device| {
        let mut lab = Lab::logged(device)?;
        let mut kept = None;
        discover(&mut lab, "layer", |lab: &mut Lab| {
            let main = lab.runtime.main().clone();
            kept = Some(lab.runtime.request(&main, spec("w", DType::F32, 64))?);
            Ok::<_, RuntimeError>(())
        })?;
        let main = lab.runtime.main().clone();
        let slot = kept.take().expect("requested");
        let error = lab.runtime.release(&main, slot).expect_err("no runner is active");
        let bytes = lab.runtime.eager_bytes();
        let again = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
        assert_eq!(lab.runtime.eager_bytes(), bytes, "the buffer was recycled");
        lab.runtime.release(&main, again)?;
        Ok(error.to_string())
    });
    insta::assert_snapshot!(text, @"request 0 was released outside any runner: release it inside the runner that reads it last");
}

#[test]
fn a_body_that_fails_leaves_discovery_and_capture_as_if_they_had_not_been_tried() {
    alone(|device| {
        let mut lab = Lab::logged(device)?;
        let failure = || RuntimeError::UnknownGroup { group: "none".into() };
        for _ in 0..2 {
            let error = discover(&mut lab, "layer", |lab: &mut Lab| {
                ask(lab)?;
                Err::<(), _>(failure())
            });
            assert_eq!(error, Err(failure()));
        }
        discover(&mut lab, "layer", ask)?;
        seal(&mut lab)?;
        for _ in 0..2 {
            let error = capture(&mut lab, "layer", |lab: &mut Lab| {
                lab.touch(&spec("w0", DType::F32, 256), 1.0)?;
                Err::<(), _>(failure())
            });
            assert_eq!(error, Err(failure()));
        }
        assert_eq!(lab.runtime.trace().map(|trace| trace.steps[0].len()), Some(1));
        capture(&mut lab, "layer", ask)?;
        lab.runtime.replay("layer").map(drop)
    });
}

/// Makes the device fail at each call of a capture in turn.
#[test]
fn a_device_error_at_any_step_of_a_capture_leaves_the_plan_reusable() {
    let world = threads(1);
    all_well(world.run(|device| {
        let spy = Spy::new(device);
        let mut lab = Lab::new(spy.clone())?;
        let body = |lab: &mut Lab<Spy>| {
            let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
            let slot = lab.runtime.request(&compute, spec("w", DType::F32, 64))?;
            let written = lab.runtime.mark(&compute)?;
            lab.runtime.wait(&side, &written)?;
            let output = lab.runtime.request(&side, spec("o", DType::F32, 64))?;
            let kind = sessile_hal::Collective::AllReduce;
            lab.runtime.collective(&side, "gtp", kind, slot.view(), output.view())?;
            lab.runtime.release(&side, slot)?;
            let done = lab.runtime.mark(&side)?;
            lab.runtime.wait(&compute, &done)?;
            lab.runtime.release(&compute, output)
        };
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let (bytes, addresses) = (world.live_bytes(0), lab.runtime.arena_addresses());
        let calls = [
            ("begin_capture", 0),
            ("event", 0),
            ("event", 1),
            ("record", 0),
            ("wait", 0),
            ("collective", 0),
            ("wait", 1),
            ("end_capture", 0),
        ];
        for (call, skip) in calls {
            spy.fail(call, skip);
            let error = capture(&mut lab, "layer", body).expect_err("injected");
            assert!(matches!(error, RuntimeError::Device(DeviceError::Stalled { .. })), "{call}: {error}");
            for stream in [lab.runtime.main().clone(), lab.side.clone()] {
                assert!(!spy.is_capturing(&stream), "{call} left a stream in capture");
                spy.wait_stream(&stream)?;
            }
            assert_eq!(
                (world.live_bytes(0), lab.runtime.arena_addresses()),
                (bytes, addresses.clone()),
                "{call}"
            );
            assert!(lab.runtime.graph("layer").is_none() && lab.runtime.runner().is_none());
        }
        capture(&mut lab, "layer", body)?;
        lab.runtime.replay("layer").map(drop)
    }));
    assert_eq!(world.live_bytes(0), 0);
}

/// Allocation by hand inside a capture would become part of the graph: it is refused, and the capture fails or goes on
/// as its body decides.
#[test]
fn a_stray_allocation_in_a_capture_is_refused() {
    alone(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", ask)?;
        seal(&mut lab)?;
        let error = capture(&mut lab, "layer", |lab: &mut Lab| {
            ask(lab)?;
            let stray = lab.runtime.device().alloc(20_480, &sessile_plan::Domain::Default, "stray");
            stray.map(drop).map_err(RuntimeError::from)
        });
        let forbidden = matches!(error, Err(RuntimeError::Device(DeviceError::ForbiddenInCapture { .. })));
        assert!(forbidden, "{error:?}");
        capture(&mut lab, "layer", ask)
    });
}

/// A view of a plan that was given up names a request that the next plan may use for something else.
#[test]
fn a_view_kept_past_its_plan_is_refused_by_the_next_one() {
    alone(|device| {
        let mut lab = captured(device)?;
        lab.runtime.release_plan()?;
        let mut kept = None;
        discover(&mut lab, "layer", ask)?;
        seal(&mut lab)?;
        let failed = capture(&mut lab, "layer", |lab: &mut Lab| {
            let stream = lab.runtime.compute().clone();
            kept = Some(lab.runtime.request(&stream, spec("w0", DType::F32, 256))?);
            Ok::<(), RuntimeError>(())
        });
        assert!(matches!(failed, Err(RuntimeError::Unconsumed { .. })), "{failed:?}");
        lab.runtime.release_plan()?;
        discover(&mut lab, "layer", ask)?;
        seal(&mut lab)?;
        let main = lab.runtime.main().clone();
        let refused = lab.runtime.release(&main, kept.expect("requested above"));
        assert!(matches!(refused, Err(RuntimeError::StaleSlot { .. })), "{refused:?}");
        capture(&mut lab, "layer", ask)
    });
}
