//! Digests: they change with every field that matters, and with nothing else.

use std::collections::BTreeSet;

use sessile_plan::{
    DType, Domain, PlanOptions, PointKind, RequestId, Role, StepCut, Trace, plan, request_hashes,
    runner_hash, trace_digest,
};

use crate::support::{four, point};

#[test]
fn the_digest_of_a_trace_is_stable_and_its_name_and_durations_do_not_count() {
    let mut trace = four();
    let digest = trace_digest(&trace);
    // Pinned: a change here means that ranks of two builds no longer agree.
    insta::assert_snapshot!(digest, @"e32889e5eef30c420c9918af6d596fa9e78fcece5dc5c4d41f9c672575a6c85d");
    trace.name = "another".into();
    trace.durations_ns = trace.runners.iter().map(|runner| vec![1; runner.points.len()]).collect();
    assert_eq!(trace_digest(&trace), digest);
}

#[test]
fn every_field_of_a_trace_changes_its_digest() {
    let changes: Vec<fn(&mut Trace)> = vec![
        |trace| trace.steps[0].swap(0, 1),
        |trace| trace.steps[0].push(0),
        |trace| trace.runners[0].name.push('x'),
        |trace| trace.runners[0].points.push(point(0, PointKind::Record(9))),
        |trace| trace.runners[0].points.push(point(0, PointKind::Record(8))),
        |trace| trace.runners[0].points.push(point(1, PointKind::Record(9))),
        |trace| trace.runners[0].points.push(point(0, PointKind::Collective("x".into()))),
        |trace| trace.runners[0].requests[0].id = RequestId(99),
        |trace| trace.runners[0].requests[0].spec.weight.push('x'),
        |trace| trace.runners[0].requests[0].spec.role = Role::RsOutput,
        |trace| trace.runners[0].requests[0].spec.role = Role::User("rs_output".into()),
        |trace| trace.runners[0].requests[0].spec.dtype = DType::F32,
        |trace| trace.runners[0].requests[0].spec.shape = vec![128, 4],
        |trace| trace.runners[0].requests[0].spec.unsharded_shape = vec![4, 128, 1],
        |trace| trace.runners[0].requests[0].spec.domain = Domain::Symmetric("g".into()),
        |trace| trace.runners[0].requests[0].spec.group = Some("g".into()),
        |trace| trace.runners[0].requests[0].spec.group = Some(String::new()),
        |trace| trace.runners[0].requests[0].spec.expert = Some(0),
        |trace| trace.runners[0].requests[0].spec.expert = Some(1),
        |trace| trace.runners[0].requests[0].spec.accumulates_into = Some("g".into()),
    ];
    let mut digests = BTreeSet::from([trace_digest(&four())]);
    let count = changes.len();
    for change in changes {
        let mut trace = four();
        change(&mut trace);
        digests.insert(trace_digest(&trace));
    }
    assert_eq!(digests.len(), count + 1);
}

#[test]
fn hashes_name_the_first_runner_and_request_that_differ() {
    let (mine, mut theirs) = (four(), four());
    theirs.runners[2].requests[0].spec.shape = vec![5, 128];
    let (a, b) = (request_hashes(&mine), request_hashes(&theirs));
    let differ: Vec<usize> = (0..4).filter(|&runner| a[runner] != b[runner]).collect();
    assert_eq!(differ, [2]);
    assert_eq!(runner_hash(&mine.runners[2]), runner_hash(&theirs.runners[2]));
    theirs.runners[2].points.pop();
    assert_ne!(runner_hash(&mine.runners[2]), runner_hash(&theirs.runners[2]));
}

#[test]
fn the_digest_of_a_plan_follows_its_options_and_contents() {
    let made = plan(&four(), &PlanOptions::default()).unwrap();
    let wrapped = PlanOptions { step_cut: StepCut::Wrap, ..PlanOptions::default() };
    assert_ne!(made.digest(), plan(&four(), &wrapped).unwrap().digest());
    let mut fewer = made.clone();
    fewer.fences.pop();
    assert_ne!(made.digest(), fewer.digest());
    assert_eq!(made.digest(), made.clone().digest());
}
