//! An oracle that knows nothing of clocks or search: plans are replayed with random durations, and every pair of
//! requests that share bytes is compared in time.

use std::collections::BTreeMap;

use proptest::{
    prelude::*,
    strategy::{Strategy as _, ValueTree},
    test_runner::TestRunner,
};
use sessile_plan::{
    LaunchOrder, Plan, PlanOptions, PointKind, RequestId, StepCut, Strategy, Trace, View, plan,
};

use crate::{generate::traces, support::CUTS};

/// When each point of each launch begins and ends; and the start and end of each launch.
struct Times {
    runner: Vec<usize>,
    /// What no order crosses: the round under the barrier.
    era: Vec<usize>,
    start: Vec<u64>,
    points: Vec<Vec<(u64, u64)>>,
    end: Vec<u64>,
}

/// Runs the steps in `chosen` one after the other. What waits, waits for all that is recorded, launched, fenced; nothing
/// else is ordered.
fn replay(trace: &Trace, plan: &Plan, chosen: &[usize], random: &mut impl FnMut(u64) -> u64) -> Times {
    let mut times = Times { runner: vec![], era: vec![], start: vec![], points: vec![], end: vec![] };
    let owner: BTreeMap<RequestId, usize> =
        trace.requests().map(|(runner, request)| (request.id, runner)).collect();
    // Where each request is released: runner and point; and the first work after its acquire.
    let mut released: BTreeMap<RequestId, (usize, Option<usize>)> =
        owner.iter().map(|(&id, &runner)| (id, (runner, None))).collect();
    let mut acquired: BTreeMap<RequestId, usize> = BTreeMap::new();
    for (r, runner) in trace.runners.iter().enumerate() {
        for (at, point) in runner.points.iter().enumerate() {
            match point.kind {
                PointKind::Acquire(id) => _ = acquired.insert(id, at),
                PointKind::Release(id) => _ = released.insert(id, (r, Some(at))),
                _ => {}
            }
        }
    }
    let mut host = 0;
    let mut group_end: BTreeMap<&str, u64> = BTreeMap::new();
    let mut latest: BTreeMap<usize, usize> = BTreeMap::new();
    let serial = plan.launch_order == LaunchOrder::Serial;
    let mut ready = 0;
    for (round, &step) in chosen.iter().enumerate() {
        if round > 0 && (plan.options.step_cut == StepCut::Barrier || chosen[round - 1] != step) {
            host = times.end.iter().copied().max().unwrap_or(0);
        }
        for &launched in &trace.steps[step] {
            let r = launched as usize;
            let runner = &trace.runners[r];
            // Fences without a point of their own hold the start.
            let fenced = |id: RequestId| {
                let of = plan.fences.iter().filter(move |fence| fence.acquire == id);
                of.filter_map(|fence| {
                    let (releaser, at) = released[&fence.release];
                    let launch = *latest.get(&releaser)?;
                    Some(at.map_or(times.end[launch], |at| times.points[launch][at].1))
                })
                .max()
                .unwrap_or(0)
            };
            let without: u64 = runner
                .requests
                .iter()
                .filter(|request| !acquired.contains_key(&request.id))
                .map(|request| fenced(request.id))
                .max()
                .unwrap_or(0);
            let own = latest.get(&r).map_or(0, |&launch| times.end[launch]);
            let start = host.max(ready).max(own).max(without) + random(20);
            let mut streams: BTreeMap<u32, u64> = BTreeMap::new();
            let mut events: BTreeMap<u32, u64> = BTreeMap::new();
            let mut points = Vec::new();
            let mut complete = None;
            for point in &runner.points {
                let mut begins = streams.get(&point.stream).copied().unwrap_or(start);
                let mut takes = 0;
                match &point.kind {
                    PointKind::Acquire(id) => begins = begins.max(fenced(*id)),
                    PointKind::Wait(event) => begins = begins.max(events[event]),
                    PointKind::Collective(group) => {
                        begins = begins.max(group_end.get(group.as_str()).copied().unwrap_or(0));
                        takes = 1 + random(200);
                    }
                    PointKind::Work => takes = 1 + random(30),
                    _ => {}
                }
                let ends = begins + takes;
                match &point.kind {
                    PointKind::Record(event) => _ = events.insert(*event, ends),
                    PointKind::Collective(group) => _ = group_end.insert(group, ends),
                    PointKind::Complete => complete = Some(ends),
                    _ => {}
                }
                streams.insert(point.stream, ends);
                points.push((begins, ends));
            }
            let end = streams.values().copied().max().unwrap_or(start) + random(3);
            ready = if serial { end } else { complete.unwrap_or(end) };
            latest.insert(r, times.end.len());
            times.runner.push(r);
            times.era.push(if plan.options.step_cut == StepCut::Barrier { round } else { 0 });
            times.start.push(start);
            times.points.push(points);
            times.end.push(end);
        }
    }
    times
}

/// Uses of a request in time: from its first write to its last read.
fn spans(trace: &Trace, times: &Times, owner: usize, id: RequestId) -> Vec<(u64, u64)> {
    let mut write = None;
    let mut read = None;
    for (r, runner) in trace.runners.iter().enumerate() {
        for (at, point) in runner.points.iter().enumerate() {
            let same = |other: &usize| runner.points[*other].stream == point.stream;
            match point.kind {
                PointKind::Acquire(of) if of == id => {
                    let work = |at: &usize| {
                        matches!(runner.points[*at].kind, PointKind::Work | PointKind::Collective(_))
                    };
                    write = Some((at..runner.points.len()).filter(same).find(work).unwrap_or(at));
                }
                PointKind::Release(of) if of == id => {
                    let work = |at: &usize| {
                        let kind = &runner.points[*at].kind;
                        matches!(kind, PointKind::Work | PointKind::Collective(_) | PointKind::Wait(_))
                    };
                    read = Some((r, (0..at).rev().filter(same).find(work).unwrap_or(at)));
                }
                _ => {}
            }
        }
    }
    let launches = 0..times.runner.len();
    let own = launches.clone().filter(|&launch| times.runner[launch] == owner);
    own.filter_map(|launch| {
        let from = write.map_or(times.start[launch], |at| times.points[launch][at].0);
        let to = match read {
            None => times.end[launch],
            Some((r, at)) if r == owner => times.points[launch][at].1,
            Some((r, at)) => {
                // The last read before it is acquired again.
                let again = launches.clone().find(|&other| other > launch && times.runner[other] == owner);
                let reads = (launch + 1..again.unwrap_or(times.runner.len()))
                    .filter(|&at| times.runner[at] == r && times.era[at] == times.era[launch]);
                times.points[reads.max()?][at].1
            }
        };
        (from < to).then_some((from, to))
    })
    .collect()
}

/// Pairs of uses of byte-sharing requests: how many there are, and how many overlap in time.
fn overlaps(trace: &Trace, plan: &Plan, times: &Times) -> (u64, u64) {
    let view = |id| plan.view(id).cloned();
    let all: Vec<(View, Vec<(u64, u64)>)> = trace
        .requests()
        .filter_map(|(owner, request)| Some((view(request.id)?, spans(trace, times, owner, request.id))))
        .collect();
    let (mut pairs, mut overlapping) = (0, 0);
    for (at, (a, of_a)) in all.iter().enumerate() {
        for (b, of_b) in &all[at + 1..] {
            let share = a.arena == b.arena && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
            if !share {
                continue;
            }
            for x in of_a {
                for y in of_b {
                    pairs += 1;
                    overlapping += u64::from(x.0 < y.1 && y.0 < x.1);
                }
            }
        }
    }
    (pairs, overlapping)
}

/// Three steps; under the wrap-around cut the same one, since another is a deviation.
fn steps(trace: &Trace, options: &PlanOptions, random: &mut impl FnMut(u64) -> u64) -> Vec<usize> {
    let mut one = || random(trace.steps.len() as u64) as usize;
    match options.step_cut {
        StepCut::Barrier => vec![one(), one(), one()],
        StepCut::Wrap => vec![one(); 3],
    }
}

#[test]
fn random_durations_never_make_sharers_overlap_and_do_when_a_fence_is_loosened() {
    let mut runner = TestRunner::new_with_rng(
        ProptestConfig { cases: 1, failure_persistence: None, ..ProptestConfig::default() },
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut pairs, mut faults, mut loosened) = (0, 0, 0);
    for case in 0..1500u32 {
        let trace = traces(6).new_tree(&mut runner).unwrap().current();
        let options = PlanOptions {
            strategy: Strategy::Sessile,
            depth: 1 + case % 3,
            depth_by_group: if case % 5 == 0 { [("g0".to_owned(), 2)].into() } else { BTreeMap::new() },
            step_cut: CUTS[(case / 3 % 2) as usize],
            ..PlanOptions::default()
        };
        let made = plan(&trace, &options).unwrap();
        for _ in 0..4 {
            let chosen = steps(&trace, &options, &mut random);
            let times = replay(&trace, &made, &chosen, &mut random);
            let (all, wrong) = overlaps(&trace, &made, &times);
            assert_eq!(wrong, 0, "case {case}: {trace:#?}\n{made:#?}\n{chosen:?}");
            (pairs, faults) = (pairs + all, faults + wrong);
        }
        for fence in 0..made.fences.len() {
            let mut fewer = made.clone();
            fewer.fences.remove(fence);
            for _ in 0..8 {
                let chosen = steps(&trace, &options, &mut random);
                let times = replay(&trace, &fewer, &chosen, &mut random);
                loosened += overlaps(&trace, &fewer, &times).1;
            }
        }
    }
    eprintln!("{pairs} pairs of uses that share bytes, {faults} overlap; {loosened} with one fence loosened");
    assert!(pairs > 10_000 && loosened > 1000, "{pairs} pairs, {loosened} with one fence loosened");
}
