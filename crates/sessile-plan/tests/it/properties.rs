//! What holds for every trace: plans are right, small, and the same each time.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::{prelude::*, strategy::Strategy as _, test_runner::TestRunner};
use sessile_plan::{
    DType, Domain, LaunchOrder, PlanError, PlanOptions, Role, StepCut, Strategy, Trace, baseline_bytes,
    check_trace, lower_bound, plan, read_plan, read_trace, trace_digest, validate, write_plan, write_trace,
};

use crate::{
    generate::traces,
    support::{CUTS, options, strategies},
};

fn any_options() -> impl proptest::strategy::Strategy<Value = PlanOptions> {
    let strategies = strategies();
    let groups = prop_oneof![
        1 => Just(Vec::new()),
        1 => proptest::collection::vec((0u8..2, 1u32..=3), 1..=2),
    ];
    (0..strategies.len(), 1u32..=4, groups, 0usize..2, prop::bool::ANY).prop_map(
        move |(strategy, depth, groups, cut, serial)| PlanOptions {
            strategy: strategies[strategy],
            depth,
            depth_by_group: groups.into_iter().map(|(group, depth)| (format!("g{group}"), depth)).collect(),
            step_cut: CUTS[cut],
            launch_order: if serial { LaunchOrder::Serial } else { LaunchOrder::Overlapped },
        },
    )
}

/// Strategy sessile half of the time.
fn mostly_sessile() -> impl proptest::strategy::Strategy<Value = PlanOptions> {
    (any_options(), prop::bool::ANY).prop_map(|(mut options, own)| {
        if own {
            options.strategy = Strategy::Sessile;
        }
        options
    })
}

fn run(cases: u32, test: impl Fn((Trace, PlanOptions)) -> Result<(), TestCaseError>) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    runner.run(&(traces(6), mostly_sessile()), test).unwrap();
}

#[test]
fn generated_traces_are_valid() {
    run(1000, |(trace, _)| {
        prop_assert_eq!(check_trace(&trace), Ok(()));
        Ok(())
    });
}

#[test]
fn every_plan_passes_the_validator() {
    let (fences, shared) = (AtomicUsize::new(0), AtomicUsize::new(0));
    run(4000, |(trace, options)| {
        let plan = match plan(&trace, &options) {
            Ok(plan) => plan,
            Err(PlanError::RingTooSmall { .. }) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let violations: Vec<String> = validate(&trace, &plan).iter().map(ToString::to_string).collect();
        prop_assert!(violations.is_empty(), "{violations:#?}\n{plan:#?}");
        fences.fetch_add(plan.fences.len(), Ordering::Relaxed);
        let separate = baseline_bytes(&trace, options.step_cut).per_request;
        shared.fetch_add(usize::from(plan.bytes() < separate), Ordering::Relaxed);
        Ok(())
    });
    let (fences, shared) = (fences.into_inner(), shared.into_inner());
    eprintln!("4000 plans: {shared} share bytes, {fences} fences in all");
    assert!(
        fences > 1000 && shared > 1000,
        "the generator exercises too little: {fences} fences, {shared} share"
    );
}

#[test]
fn sessile_is_never_larger_than_the_baselines_at_its_depth_nor_smaller_than_the_bound() {
    run(3000, |(trace, options)| {
        let own = PlanOptions { strategy: Strategy::Sessile, ..options };
        let made = plan(&trace, &own).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(made.bytes() <= baseline_bytes(&trace, own.step_cut).per_request);
        prop_assert!(made.bytes() >= made.lower_bound_bytes());
        prop_assert_eq!(Ok(made.lower_bound_bytes()), lower_bound(&trace, &own));
        // Equal depth: groups that count less keep their bytes longer.
        if own.step_cut == StepCut::Barrier && own.depth_by_group.is_empty() {
            let alternating = PlanOptions { strategy: Strategy::Generations(own.depth), ..own.clone() };
            let alternating =
                plan(&trace, &alternating).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert!(made.bytes() <= alternating.bytes(), "{} > {}", made.bytes(), alternating.bytes());
            // Arena by arena, not only in sum.
            for (own, alternating) in made.arenas.iter().zip(&alternating.arenas) {
                prop_assert!(own.bytes <= alternating.bytes);
            }
        }
        Ok(())
    });
}

/// A ring reuses after so many requests, whatever the launch: where that is nearer than the depth, it may be smaller.
#[test]
fn sessile_is_never_larger_than_a_ring_that_keeps_the_depth() {
    let (kept, nearer) = (AtomicUsize::new(0), AtomicUsize::new(0));
    run(1500, |(mut trace, options)| {
        // Few kinds of requests, so that rings share.
        for spec in trace.runners.iter_mut().flat_map(|r| &mut r.requests).map(|request| &mut request.spec) {
            spec.role = Role::WgradInput;
            spec.dtype = DType::Bf16;
            spec.domain = Domain::Default;
            spec.shape = vec![1 + spec.shape[0] % 2, 128];
            spec.unsharded_shape.clone_from(&spec.shape);
        }
        prop_assert_eq!(check_trace(&trace), Ok(()));
        let separate = baseline_bytes(&trace, options.step_cut).per_request;
        let own = PlanOptions { strategy: Strategy::Sessile, ..options };
        let made = plan(&trace, &own).map_err(|error| TestCaseError::fail(error.to_string()))?;
        for slots in 1..=4 {
            let ring = PlanOptions { strategy: Strategy::Ring(slots), ..own.clone() };
            let Ok(ring) = plan(&trace, &ring) else { continue };
            // The ring's bytes, judged as sessile's own: whatever shares bytes is as far apart as the depth asks.
            let mut judged = sessile_plan::Plan { options: own.clone(), ..ring.clone() };
            for (arena, bound) in judged.arenas.iter_mut().zip(&made.arenas) {
                arena.lower_bound_bytes = bound.lower_bound_bytes;
                arena.peak.clone_from(&bound.peak);
            }
            if validate(&trace, &judged).is_empty() {
                kept.fetch_add(usize::from(ring.bytes() < separate), Ordering::Relaxed);
                prop_assert!(
                    made.bytes() <= ring.bytes(),
                    "ring:{slots}: {} > {}",
                    made.bytes(),
                    ring.bytes()
                );
            } else {
                nearer.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    });
    let (kept, nearer) = (kept.into_inner(), nearer.into_inner());
    assert!(kept > 500 && nearer > 200, "{kept} rings share and keep the depth, {nearer} do not");
}

#[test]
fn every_strategy_is_at_least_its_lower_bound() {
    run(1000, |(trace, options)| {
        if let Ok(plan) = plan(&trace, &options) {
            prop_assert!(lower_bound(&trace, &options).is_ok_and(|bound| plan.bytes() >= bound));
        }
        Ok(())
    });
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    run(300, |(trace, options)| {
        if let Ok(first) = plan(&trace, &options) {
            let second =
                plan(&trace.clone(), &options.clone()).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(first.digest(), second.digest());
            prop_assert_eq!(write_plan(&first), write_plan(&second));
        }
        Ok(())
    });
}

#[test]
fn documents_read_back_as_they_were_written() {
    run(500, |(trace, options)| {
        let read = read_trace(write_trace(&trace).as_bytes());
        prop_assert_eq!(read.as_ref(), Ok(&trace));
        prop_assert_eq!(read.map(|read| trace_digest(&read)), Ok(trace_digest(&trace)));
        if let Ok(plan) = plan(&trace, &options) {
            prop_assert_eq!(read_plan(write_plan(&plan).as_bytes()), Ok(plan));
        }
        Ok(())
    });
}

#[test]
fn depth_one_needs_no_fences() {
    // At depth 1 launches are serial, and graph-launch order already orders everything.
    run(500, |(trace, given)| {
        for strategy in strategies() {
            if let Ok(plan) = plan(&trace, &options(strategy, 1, given.step_cut)) {
                prop_assert_eq!(plan.launch_order, LaunchOrder::Serial);
                prop_assert_eq!(&plan.fences, &vec![]);
            }
        }
        Ok(())
    });
}
