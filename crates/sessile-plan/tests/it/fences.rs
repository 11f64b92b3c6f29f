//! Fences: exactly these in small pictures, and none of any plan can be left out.

use proptest::{prelude::*, test_runner::TestRunner};
use sessile_plan::{
    Fence, LaunchOrder, PlanOptions, PointKind, Reason, RequestId, Runner, StepCut, Strategy, plan, validate,
};

use crate::{
    generate::traces,
    support::{CUTS, accumulating, backward, four, options, point, request, strategies, trace},
};

fn pairs(fences: &[Fence]) -> Vec<(u32, u32)> {
    fences.iter().map(|fence| (fence.release.0, fence.acquire.0)).collect()
}

/// ```text
///  launch     0    1    2    3
///  bytes 0    a ------> c             a and c, b and d share at depth 2; one fence each
///  bytes 4         b ------> d
/// ```
#[test]
fn depth_two_fences_every_second_launch() {
    let made = plan(&four(), &options(Strategy::Sessile, 2, StepCut::Barrier)).unwrap();
    assert_eq!(made.bytes(), 6 * 256);
    assert_eq!(pairs(&made.fences), [(0, 2), (1, 3)]);
}

/// The circle adds the fences from the last launches of a step to the first of the next.
#[test]
fn the_wrap_adds_the_fences_across_the_cut() {
    let made = plan(&four(), &options(Strategy::Sessile, 2, StepCut::Wrap)).unwrap();
    assert_eq!(pairs(&made.fences), [(0, 2), (1, 3), (2, 0), (3, 1)]);
}

#[test]
fn one_generation_fences_neighbours_when_launches_overlap() {
    let made = plan(&four(), &options(Strategy::Generations(1), 2, StepCut::Barrier)).unwrap();
    assert_eq!(pairs(&made.fences), [(0, 1), (1, 2), (2, 3)]);
}

#[test]
fn serial_launches_and_separate_bytes_need_none() {
    let mut serial = options(Strategy::Generations(1), 2, StepCut::Wrap);
    serial.launch_order = LaunchOrder::Serial;
    assert_eq!(plan(&four(), &serial).unwrap().fences, []);
    let separate = options(Strategy::PerRequest, 2, StepCut::Wrap);
    assert_eq!(plan(&four(), &separate).unwrap().fences, []);
}

/// Collectives of one group run in order, so what one read last is free for what the next one writes first.
///
/// ```text
///  launch 0  stream 1   collective g   release a
///  launch 1  stream 1   acquire b      collective g                 no fence from a to b
///  launch 1  stream 1   acquire b      work   collective g          a fence: the work writes first
/// ```
#[test]
fn a_collective_carries_the_order_to_the_next() {
    let collective = || point(1, PointKind::Collective("g".into()));
    let (a, b) = (RequestId(0), RequestId(1));
    let complete = point(0, PointKind::Complete);
    let first = Runner {
        name: "first".into(),
        requests: vec![request(0, 1)],
        points: vec![complete.clone(), collective(), point(1, PointKind::Release(a))],
    };
    let mut second = Runner {
        name: "second".into(),
        requests: vec![request(1, 1)],
        points: vec![complete, point(1, PointKind::Acquire(b)), collective()],
    };
    let shared = options(Strategy::Generations(1), 2, StepCut::Barrier);
    let ordered = trace(vec![first.clone(), second.clone()], vec![0, 1]);
    assert_eq!(plan(&ordered, &shared).unwrap().fences, []);
    second.points.insert(2, point(1, PointKind::Work));
    let unordered = trace(vec![first, second], vec![0, 1]);
    assert_eq!(pairs(&plan(&unordered, &shared).unwrap().fences), [(0, 1)]);
}

/// ```text
///  launch     0 gather    1 other     2 use            0 prefetches a for 2, which releases it
///  bytes 0    a#####################
///  bytes 1                b
/// ```
#[test]
fn a_request_that_spans_runners_is_held_until_the_later_one_and_fenced_against_itself() {
    let a = RequestId(0);
    let gather = Runner {
        name: "gather".into(),
        requests: vec![request(0, 1)],
        points: vec![point(0, PointKind::Acquire(a)), point(0, PointKind::Complete)],
    };
    let other = backward("other", vec![request(1, 1)]);
    let user = Runner {
        name: "use".into(),
        requests: vec![],
        points: vec![point(0, PointKind::Complete), point(1, PointKind::Release(a))],
    };
    let spanning = trace(vec![gather, other, user], vec![0, 1, 2]);
    let made = plan(&spanning, &options(Strategy::Sessile, 2, StepCut::Wrap)).unwrap();
    assert_eq!(made.bytes(), 2 * 256);
    // The next step gathers again, and `use` may still be reading.
    assert_eq!(pairs(&made.fences), [(0, 0)]);
    assert_eq!(validate(&spanning, &made), []);
}

#[test]
fn one_accumulator_is_used_in_launch_order_though_no_bytes_are_shared() {
    let one = backward("one", vec![accumulating(request(0, 1), "main_grad w")]);
    let two = backward("two", vec![accumulating(request(1, 1), "main_grad w")]);
    let both = trace(vec![one, two], vec![0, 1]);
    let mut made = plan(&both, &options(Strategy::PerRequest, 2, StepCut::Barrier)).unwrap();
    assert_eq!(pairs(&made.fences), [(0, 1)]);
    made.fences.clear();
    let reasons: Vec<Reason> = validate(&both, &made).iter().map(|violation| violation.reason).collect();
    assert_eq!(reasons, [Reason::AccumulatorUnordered]);
}

/// Two requests acquired at one node share their fences.
#[test]
fn an_opaque_runner_waits_once_at_its_head() {
    let first = backward("first", vec![request(0, 1), request(1, 1)]);
    let second =
        Runner { name: "second".into(), requests: vec![request(2, 1), request(3, 1)], points: vec![] };
    let both = trace(vec![first, second], vec![0, 1]);
    let made = plan(&both, &options(Strategy::Generations(1), 2, StepCut::Barrier)).unwrap();
    // One collective reads both last: one fence is enough.
    assert_eq!(pairs(&made.fences), [(0, 2)]);
    assert_eq!(validate(&both, &made), []);
}

#[test]
fn removing_any_fence_of_any_plan_is_reported() {
    let config = ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() };
    let removed = std::cell::Cell::new(0);
    let strategies = strategies();
    TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    )
    .run(&(traces(5), 0..strategies.len(), 2u32..4, 0usize..2), |(trace, strategy, depth, cut)| {
        let options = PlanOptions {
            strategy: strategies[strategy],
            depth,
            step_cut: CUTS[cut],
            ..PlanOptions::default()
        };
        let Ok(whole) = plan(&trace, &options) else { return Ok(()) };
        for at in 0..whole.fences.len() {
            let mut fewer = whole.clone();
            fewer.fences.remove(at);
            let reported = validate(&trace, &fewer);
            let race = |reason| matches!(reason, Reason::ReuseNotOrdered | Reason::AccumulatorUnordered);
            prop_assert!(reported.iter().any(|violation| race(violation.reason)), "{:?}", whole.fences[at]);
            removed.set(removed.get() + 1);
        }
        Ok(())
    })
    .unwrap();
    eprintln!("{} fences removed, all reported", removed.get());
    assert!(removed.get() > 1000, "the generator makes too few fences: {}", removed.get());
}
