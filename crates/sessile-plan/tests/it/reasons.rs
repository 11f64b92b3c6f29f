//! The validator can fail: one spoiled plan for each reason, and the words it is reported with.

use std::collections::BTreeSet;

use sessile_plan::{
    Fence, LaunchOrder, Plan, Reason, RequestId, StepCut, Strategy, Trace, View, plan, validate,
};

use crate::support::{accumulating, backward, four, opaque, options, request, symmetric, trace};

/// Four backwards at depth 2: a and c share bytes, and b and d.
///
/// ```text
///  launch     0    1    2    3         fences a -> c, b -> d
///  bytes 0    a         c
///  bytes 4         b         d
/// ```
fn good() -> (Trace, Plan) {
    let trace = four();
    let plan = plan(&trace, &options(Strategy::Sessile, 2, StepCut::Barrier)).unwrap();
    assert_eq!(validate(&trace, &plan), []);
    (trace, plan)
}

/// Spoils the plan; the reasons found, and the first violation's words.
fn spoiled(spoil: impl FnOnce(&mut Trace, &mut Plan)) -> (BTreeSet<Reason>, String) {
    let (mut trace, mut plan) = good();
    spoil(&mut trace, &mut plan);
    let found = validate(&trace, &plan);
    let words = found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    (found.into_iter().map(|violation| violation.reason).collect(), words)
}

fn only(reason: Reason, spoil: impl FnOnce(&mut Trace, &mut Plan)) -> String {
    let (reasons, words) = spoiled(spoil);
    assert_eq!(reasons, BTreeSet::from([reason]), "{words}");
    words
}

#[test]
fn invalid_trace() {
    let words = only(Reason::InvalidTrace, |trace, _| trace.steps[0].clear());
    insta::assert_snapshot!(words);
}

#[test]
fn invalid_header() {
    let mut words = only(Reason::InvalidHeader, |_, plan| plan.version = 2);
    words += &only(Reason::InvalidHeader, |_, plan| plan.schema = "other".into());
    words += &only(Reason::InvalidHeader, |_, plan| plan.options.depth = 0);
    words += &only(Reason::InvalidHeader, |_, plan| plan.options.strategy = Strategy::Ring(0));
    assert_eq!(words.matches("invalid_header").count(), 4);
}

#[test]
fn digest_mismatch() {
    let words = only(Reason::DigestMismatch, |trace, _| trace.runners[0].name = "other".into());
    assert!(words.contains("plan again"), "{words}");
}

#[test]
fn launch_order_wrong() {
    let (reasons, words) = spoiled(|_, plan| plan.launch_order = LaunchOrder::Serial);
    // And with serial launches nothing conflicts across launches, and nothing needs fences.
    let expected = [Reason::LaunchOrderWrong, Reason::LowerBoundWrong, Reason::FenceUnnecessary];
    assert_eq!(reasons, BTreeSet::from(expected), "{words}");
}

#[test]
fn arenas_unsorted() {
    let given = trace(
        vec![backward("r0", vec![symmetric(request(0, 1), "a"), symmetric(request(1, 1), "b")])],
        vec![0],
    );
    let mut made = plan(&given, &options(Strategy::Sessile, 2, StepCut::Barrier)).unwrap();
    made.arenas.swap(0, 1);
    made.views[0].arena = 1;
    made.views[1].arena = 0;
    let reasons: Vec<Reason> = validate(&given, &made).iter().map(|violation| violation.reason).collect();
    assert_eq!(reasons, [Reason::ArenasUnsorted]);
}

#[test]
fn arena_size_wrong() {
    let words = only(Reason::ArenaSizeWrong, |_, plan| plan.arenas[0].bytes += 256);
    assert!(words.contains("expected 1536, found 1792"), "{words}");
}

#[test]
fn lower_bound_wrong() {
    let words = only(Reason::LowerBoundWrong, |_, plan| plan.arenas[0].lower_bound_bytes -= 256);
    assert!(words.contains("expected 1536, found 1280"), "{words}");
}

#[test]
fn unknown_request() {
    let view = View { request: RequestId(77), arena: 0, offset: 0, bytes: 256 };
    let words = only(Reason::UnknownRequest, |_, plan| plan.views.push(view));
    assert!(words.contains("request 77"), "{words}");
    let fence = Fence { release: RequestId(3), acquire: RequestId(88) };
    let words = only(Reason::UnknownRequest, |_, plan| plan.fences.push(fence));
    assert!(words.contains("request 88"), "{words}");
}

#[test]
fn missing_view() {
    let (reasons, words) = spoiled(|_, plan| {
        plan.views.remove(3);
    });
    // The fence from b to d then orders nothing.
    assert_eq!(reasons, BTreeSet::from([Reason::MissingView, Reason::FenceUnnecessary]), "{words}");
}

#[test]
fn duplicate_view() {
    let words = only(Reason::DuplicateView, |_, plan| plan.views.insert(1, plan.views[0].clone()));
    assert!(words.contains("bytes 0..1024 of arena 0"), "{words}");
}

#[test]
fn views_unsorted() {
    only(Reason::ViewsUnsorted, |_, plan| plan.views.swap(0, 1));
}

#[test]
fn unknown_arena() {
    let (reasons, words) = spoiled(|_, plan| plan.views[3].arena = 5);
    assert!(reasons.contains(&Reason::UnknownArena), "{words}");
}

#[test]
fn wrong_domain() {
    let (trace, mut plan) = good();
    let mut other = trace;
    other.runners[0].requests[0].spec.domain = sessile_plan::Domain::Symmetric("g".into());
    plan.trace_digest = sessile_plan::trace_digest(&other);
    let reasons: BTreeSet<Reason> =
        validate(&other, &plan).iter().map(|violation| violation.reason).collect();
    assert!(reasons.contains(&Reason::WrongDomain), "{reasons:?}");
}

#[test]
fn wrong_size() {
    let words = only(Reason::WrongSize, |_, plan| plan.views[0].bytes -= 256);
    assert!(words.contains("expected 1024, found 768"), "{words}");
}

#[test]
fn misaligned() {
    let (reasons, words) = spoiled(|_, plan| plan.views[3].offset -= 128);
    assert!(reasons.contains(&Reason::Misaligned), "{words}");
}

#[test]
fn outside_arena() {
    let (reasons, words) = spoiled(|_, plan| plan.views[3].offset = u64::MAX - 255);
    assert!(reasons.contains(&Reason::OutsideArena), "{words}");
}

#[test]
fn live_overlap() {
    let given = trace(vec![backward("r0", vec![request(0, 1), request(1, 1)])], vec![0]);
    let mut made = plan(&given, &options(Strategy::PerRequest, 2, StepCut::Barrier)).unwrap();
    made.views[1].offset = 0;
    made.arenas[0].bytes = 256;
    let found = validate(&given, &made);
    assert_eq!(found.iter().map(|violation| violation.reason).collect::<Vec<_>>(), [Reason::LiveOverlap]);
    insta::assert_snapshot!(found[0]);
}

#[test]
fn reused_too_soon() {
    let (reasons, words) = spoiled(|_, plan| {
        plan.views[1].offset = 0;
        plan.fences.insert(0, Fence { release: RequestId(0), acquire: RequestId(1) });
    });
    assert!(reasons.contains(&Reason::ReusedTooSoon), "{words}");
    assert!(!reasons.contains(&Reason::LiveOverlap), "{words}");
    // The baselines promise no distance, so the same layout is theirs to make.
    let (reasons, words) = spoiled(|_, plan| {
        plan.options.strategy = Strategy::Generations(1);
        plan.views[1].offset = 0;
    });
    assert!(!reasons.contains(&Reason::ReusedTooSoon), "{words}");
}

#[test]
fn reuse_not_ordered() {
    let words = only(Reason::ReuseNotOrdered, |_, plan| {
        plan.fences.remove(0);
    });
    insta::assert_snapshot!(words);
}

#[test]
fn accumulator_unordered() {
    let given = trace(
        vec![
            backward("r0", vec![accumulating(request(0, 1), "w")]),
            backward("r1", vec![accumulating(request(1, 1), "w")]),
        ],
        vec![0, 1],
    );
    let mut made = plan(&given, &options(Strategy::PerRequest, 2, StepCut::Barrier)).unwrap();
    made.fences.clear();
    let found = validate(&given, &made);
    assert_eq!(found.len(), 1);
    insta::assert_snapshot!(found[0]);
}

#[test]
fn fences_unsorted() {
    only(Reason::FencesUnsorted, |_, plan| plan.fences.swap(0, 1));
    let (reasons, words) = spoiled(|_, plan| plan.fences.push(plan.fences[1]));
    // The second of the two orders nothing more.
    assert_eq!(reasons, BTreeSet::from([Reason::FencesUnsorted, Reason::FenceUnnecessary]), "{words}");
}

#[test]
fn fence_unnecessary() {
    // Between requests that share nothing.
    let fence = Fence { release: RequestId(0), acquire: RequestId(1) };
    let words = only(Reason::FenceUnnecessary, |_, plan| plan.fences.insert(0, fence));
    insta::assert_snapshot!(words);
    // Between requests that share bytes and are ordered already.
    let given = four();
    let mut made = plan(&given, &options(Strategy::Generations(1), 2, StepCut::Barrier)).unwrap();
    made.fences.insert(1, Fence { release: RequestId(0), acquire: RequestId(2) });
    let reasons: Vec<Reason> = validate(&given, &made).iter().map(|violation| violation.reason).collect();
    assert_eq!(reasons, [Reason::FenceUnnecessary]);
}

/// One accumulator for all: every request must wait for every other, too many pairs to look at.
#[test]
fn too_costly() {
    let count = 40_000;
    let requests = (0..count).map(|id| accumulating(request(id, 1), "w")).collect();
    let given = trace(vec![opaque("all", requests)], vec![0]);
    let mut made = plan(&four(), &options(Strategy::PerRequest, 2, StepCut::Barrier)).unwrap();
    made.fences.clear();
    let found = validate(&given, &made);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].reason, Reason::TooCostly);
    let words = found[0].to_string();
    assert!(
        words.contains("expected 1073741824 steps, found more, for 1 launches, 40000 requests"),
        "{words}"
    );
}

/// A fence may sit between requests that share nothing and still be what orders others.
#[test]
fn a_fence_of_other_requests_counts_for_what_it_orders() {
    let given = trace(
        vec![
            backward("r0", vec![request(0, 1), request(1, 1)]),
            backward("r1", vec![request(2, 1), request(3, 1)]),
        ],
        vec![0, 1],
    );
    let mut made = plan(&given, &options(Strategy::Generations(1), 2, StepCut::Barrier)).unwrap();
    // Request 1 is released last; waiting for it before request 2 orders both pairs.
    made.fences = vec![Fence { release: RequestId(1), acquire: RequestId(2) }];
    assert_eq!(validate(&given, &made), []);
}

#[test]
fn every_reason_has_its_own_code_and_test() {
    let codes: BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.code()).collect();
    assert_eq!(codes.len(), Reason::ALL.len());
    let tests = include_str!("reasons.rs");
    for code in codes {
        assert!(tests.contains(&format!("fn {code}()")), "no test for {code}");
    }
}
