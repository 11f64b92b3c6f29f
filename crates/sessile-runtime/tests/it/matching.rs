//! A capture must ask for what its discovery asked for, one by one. The first difference is an error that shows both,
//! and leaves the plan as it was.

use sessile_hal::Device;
use sessile_plan::{DType, Domain, PlanOptions, PointKind, RequestSpec};
use sessile_runtime::{RuntimeError, capture, discover};

use crate::support::{Lab, Outcome, all_well, spec, threads};

/// A MiB of bf16 in elements.
const MIB: u64 = (1 << 20) / 2;

fn recorded() -> Vec<RequestSpec> {
    vec![spec("w0", DType::Bf16, MIB), spec("w1", DType::Bf16, 2 * MIB)]
}

fn ask(lab: &mut Lab, specs: &[RequestSpec]) -> Outcome<()> {
    specs.iter().try_for_each(|spec| lab.touch(spec, 1.0))
}

/// Discovers `recorded`, captures `asked`: the text of the error. Checks that nothing else has changed, and that the
/// same plan can be captured and replayed afterwards.
fn refused(recorded: &[RequestSpec], asked: &[RequestSpec]) -> String {
    let world = threads(1);
    let texts = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", |lab: &mut Lab| ask(lab, recorded))?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let before = (lab.runtime.arena_addresses(), world.live_bytes(0), lab.runtime.eager_bytes());
        let plan = lab.runtime.plan().cloned();
        let mut streams = vec![lab.runtime.main().clone(), lab.side.clone()];
        let error = capture(&mut lab, "layer", |lab: &mut Lab| {
            let compute = lab.runtime.compute().clone();
            let begun = lab.runtime.mark(&compute)?;
            lab.runtime.wait(&lab.side.clone(), &begun)?;
            streams.push(compute);
            ask(lab, asked)
        })
        .expect_err("the capture asks for something else");
        assert!(!lab.runtime.is_capturing() && lab.runtime.runner().is_none());
        let device = lab.runtime.device().clone();
        for stream in &streams {
            assert!(!device.is_capturing(stream), "{stream:?} still captures");
            device.wait_stream(stream)?;
        }
        assert_eq!(before, (lab.runtime.arena_addresses(), world.live_bytes(0), lab.runtime.eager_bytes()));
        assert_eq!(plan.as_ref(), lab.runtime.plan());
        assert!(matches!(lab.runtime.replay("layer"), Err(RuntimeError::NotCaptured { .. })));
        capture(&mut lab, "layer", |lab: &mut Lab| ask(lab, recorded))?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        device.wait_stream(&lab.runtime.main().clone())?;
        assert_eq!(before.0, lab.runtime.arena_addresses());
        Ok::<_, RuntimeError>(error.to_string())
    }));
    assert_eq!(world.live_bytes(0), 0);
    texts.into_iter().next().expect("one rank")
}

#[test]
fn a_capture_that_takes_only_the_first_request_names_the_bytes_left() {
    insta::assert_snapshot!(refused(&recorded(), &recorded()[..1]), @"runner `layer`: capture ended after 1 of 2 requests; 2097152 bytes of default bf16 are left, first w1 wgrad_input bf16[1048576] in default; capture must run the same code as discovery");
}

#[test]
fn a_third_request_is_an_error_at_once() {
    let mut asked = recorded();
    asked.push(spec("w2", DType::Bf16, MIB));
    insta::assert_snapshot!(refused(&recorded(), &asked), @"runner `layer`, request 2: capture asks for w2 wgrad_input bf16[524288] in default (1048576 bytes) beyond the 2 requests of its discovery; the arenas are sealed: discover the runner again with everything it needs");
}

#[test]
fn a_swapped_order_is_an_error_at_the_first_request_although_totals_match() {
    let mut asked = recorded();
    asked.reverse();
    insta::assert_snapshot!(refused(&recorded(), &asked), @"runner `layer`, request 0: capture asks for w1 wgrad_input bf16[1048576] in default, discovery recorded w0 wgrad_input bf16[524288] in default; capture must run the same code on the same shapes as discovery");
}

#[test]
fn another_dtype_of_the_same_bytes_is_an_error() {
    let mut asked = recorded();
    asked[0] = spec("w0", DType::F32, MIB / 2);
    insta::assert_snapshot!(refused(&recorded(), &asked), @"runner `layer`, request 0: capture asks for w0 wgrad_input f32[262144] in default, discovery recorded w0 wgrad_input bf16[524288] in default; capture must run the same code on the same shapes as discovery");
}

#[test]
fn the_domain_of_another_group_is_an_error() {
    let mut asked = recorded();
    asked[1].domain = Domain::Symmetric("experts".into());
    insta::assert_snapshot!(refused(&recorded(), &asked), @"runner `layer`, request 1: capture asks for w1 wgrad_input bf16[1048576] in symmetric(experts), discovery recorded w1 wgrad_input bf16[1048576] in default; capture must run the same code on the same shapes as discovery");
}

#[test]
fn another_size_of_the_same_aligned_bytes_is_an_error() {
    let recorded = [spec("w0", DType::Bf16, 500)];
    insta::assert_snapshot!(refused(&recorded, &[spec("w0", DType::Bf16, 512)]), @"runner `layer`, request 0: capture asks for w0 wgrad_input bf16[512] in default, discovery recorded w0 wgrad_input bf16[500] in default; capture must run the same code on the same shapes as discovery");
}

#[test]
fn another_expert_of_the_same_shape_is_an_error() {
    let expert = |expert| RequestSpec { expert: Some(expert), ..spec("w0", DType::Bf16, 512) };
    insta::assert_snapshot!(refused(&[expert(0)], &[expert(1)]), @"runner `layer`, request 0: capture asks for w0 wgrad_input bf16[512] in default (expert 1), discovery recorded w0 wgrad_input bf16[512] in default (expert 0); capture must run the same code on the same shapes as discovery");
}

/// Discovers a runner twice with different storage: the text of the error.
fn discovered_twice(first: &[RequestSpec], second: &[RequestSpec]) -> String {
    let world = threads(1);
    let texts = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", |lab: &mut Lab| ask(lab, first))?;
        let error = discover(&mut lab, "layer", |lab: &mut Lab| ask(lab, second))
            .expect_err("the second micro-batch asks for something else");
        assert!(lab.runtime.runner().is_none());
        // The pass is forgotten: the first one is sealed, captured and replayed.
        lab.runtime.seal("test", &PlanOptions::default())?;
        assert_eq!(lab.runtime.trace().map(|trace| trace.steps[0].len()), Some(1));
        capture(&mut lab, "layer", |lab: &mut Lab| ask(lab, first))?;
        lab.runtime.replay("layer")?;
        lab.runtime.release_plan()?;
        Ok::<_, RuntimeError>(error.to_string())
    }));
    assert_eq!(world.live_bytes(0), 0);
    texts.into_iter().next().expect("one rank")
}

#[test]
fn a_runner_discovered_twice_with_different_lists_is_an_error() {
    let two = recorded();
    insta::assert_snapshot!(discovered_twice(&two, &[two[0].clone(), spec("w1", DType::Bf16, MIB)]), @"runner `layer` was discovered twice with different storage: request 1 was w1 wgrad_input bf16[1048576] in default, now w1 wgrad_input bf16[524288] in default; give each micro-batch or shape a runner of its own");
    insta::assert_snapshot!(discovered_twice(&two, &two[..1]), @"runner `layer` was discovered twice with different storage: request 1 was w1 wgrad_input bf16[1048576] in default, now nothing; give each micro-batch or shape a runner of its own");
    insta::assert_snapshot!(discovered_twice(&two[..1], &two), @"runner `layer` was discovered twice with different storage: request 1 was nothing, now w1 wgrad_input bf16[1048576] in default; give each micro-batch or shape a runner of its own");
}

#[test]
fn a_runner_discovered_twice_with_different_order_points_is_an_error() {
    let world = threads(1);
    let texts = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let ask = |lab: &mut Lab, on_side: bool| {
            let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
            let slot = lab.runtime.request(&compute, spec("w0", DType::F32, 64))?;
            let done = lab.runtime.mark(&compute)?;
            lab.runtime.wait(&side, &done)?;
            lab.runtime.release(if on_side { &side } else { &compute }, slot)
        };
        discover(&mut lab, "layer", |lab: &mut Lab| ask(lab, true))?;
        let error = discover(&mut lab, "layer", |lab: &mut Lab| ask(lab, false)).expect_err("another order");
        Ok::<_, RuntimeError>(error.to_string())
    }));
    insta::assert_snapshot!(texts[0], @"runner `layer` was discovered twice with different storage: request 1 was Release(RequestId(0)) on stream 1 (order point 3), now Release(RequestId(0)) on stream 0 (order point 3); give each micro-batch or shape a runner of its own");
}

/// What a runner does with one buffer: where it is given back, and whether the side stream is joined by an event.
#[derive(Clone, Copy)]
enum Path {
    OnSide,
    OnCompute,
    NeverReleased,
    WithoutCompletion,
}

fn travel(lab: &mut Lab, path: Path) -> Outcome<()> {
    let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
    let slot = lab.runtime.request(&compute, spec("w0", DType::F32, 64))?;
    let written = lab.runtime.mark(&compute)?;
    lab.runtime.wait(&side, &written)?;
    lab.runtime.enqueue(&side, crate::support::fill(slot.view(), 1.0)?)?;
    match path {
        Path::OnSide | Path::WithoutCompletion => lab.runtime.release(&side, slot)?,
        Path::OnCompute => lab.runtime.release(&compute, slot)?,
        Path::NeverReleased => drop(slot),
    }
    if !matches!(path, Path::WithoutCompletion) {
        lab.runtime.complete()?;
    }
    let done = lab.runtime.mark(&side)?;
    lab.runtime.wait(&compute, &done)
}

/// The plan leaves out fences that the discovered order implies: a capture in another order would race.
#[test]
fn a_capture_with_other_releases_streams_or_events_is_an_error_and_can_be_made_again() {
    let world = threads(1);
    let texts = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", |lab: &mut Lab| travel(lab, Path::OnSide))?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let mut texts = Vec::new();
        for path in [Path::OnCompute, Path::NeverReleased, Path::WithoutCompletion] {
            let error =
                capture(&mut lab, "layer", |lab: &mut Lab| travel(lab, path)).expect_err("another order");
            assert!(matches!(error, RuntimeError::OrderDiffers { .. }), "{error}");
            assert!(lab.runtime.graph("layer").is_none() && !lab.runtime.is_capturing());
            texts.push(error.to_string());
        }
        capture(&mut lab, "layer", |lab: &mut Lab| travel(lab, Path::OnSide))?;
        lab.runtime.replay("layer")?;
        Ok::<_, RuntimeError>(texts.join("\n"))
    }));
    assert_eq!(world.live_bytes(0), 0);
    insta::assert_snapshot!(texts[0], @r"
    runner `layer`, order point 4: capture has Release(RequestId(0)) on stream 0 (order point 4) where discovery had Release(RequestId(0)) on stream 1 (order point 4); capture must run the same code as discovery
    runner `layer`, order point 4: capture has Complete on stream 0 (order point 4) where discovery had Release(RequestId(0)) on stream 1 (order point 4); capture must run the same code as discovery
    runner `layer`, order point 5: capture has Record(1) on stream 1 (order point 5) where discovery had Complete on stream 0 (order point 5); capture must run the same code as discovery
    ");
}

/// A marker of a pass that failed says nothing about the order of the next pass.
#[test]
fn a_marker_of_an_earlier_pass_is_no_event_of_this_one() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let mut old = None;
        let failed = discover(&mut lab, "layer", |lab: &mut Lab| {
            let main = lab.runtime.main().clone();
            old = Some(lab.runtime.mark(&main)?);
            Err::<(), _>(RuntimeError::UnknownGroup { group: "none".into() })
        });
        assert!(failed.is_err());
        discover(&mut lab, "layer", |lab: &mut Lab| {
            let side = lab.side.clone();
            lab.runtime.wait(&side, old.as_ref().expect("marked"))?;
            lab.touch(&spec("w0", DType::F32, 64), 1.0)
        })?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let points = &lab.runtime.trace().expect("sealed").runners[0].points;
        assert!(points.len() >= 2, "an acquire and a release");
        assert!(!points.iter().any(|point| matches!(point.kind, PointKind::Wait(_))), "{points:?}");
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn a_runner_without_requests_needs_no_bytes_and_replays() {
    let world = threads(2);
    let counters = all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "empty", |_: &mut Lab| Ok::<_, RuntimeError>(()))?;
        let plan = lab.runtime.seal("test", &PlanOptions::default())?;
        assert_eq!((plan.bytes(), plan.fences.len(), plan.views.len()), (0, 0, 0));
        capture(&mut lab, "empty", |_: &mut Lab| Ok::<_, RuntimeError>(()))?;
        for _ in 0..3 {
            lab.runtime.replay("empty")?;
        }
        lab.runtime.join()?;
        Ok::<_, RuntimeError>(lab.runtime.counters())
    }));
    assert!(counters.iter().all(|counters| counters.replays == 3 && counters.order_deviations == 0));
    assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
}

/// Specs that read alike are told apart by all their fields.
#[test]
fn a_difference_that_the_short_text_does_not_show_is_shown_in_full() {
    let asked = spec("w", DType::F32, 64);
    let other = RequestSpec { unsharded_shape: vec![63], ..asked.clone() };
    let text = refused(&[asked], &[other]);
    for shape in ["unsharded_shape: [64]", "unsharded_shape: [63]"] {
        assert!(text.contains(shape), "{text}");
    }
}
