//! Logs of programs whose kernels are a framework's: fences that are missing, lives that overlap, use after release.

use std::collections::{BTreeMap, BTreeSet};

use sessile_plan::{
    DType, Domain, LaunchOrder, Plan, PlanOptions, Request, RequestId, RequestSpec, Role, Runner, StepCut,
    TRACE_VERSION, Trace, check_trace, plan,
};
use sessile_runtime::check::{Reason, check};
use sessile_runtime::events::{Events, Proven};
use sessile_runtime::log::{Lives, Log, Work, read_log, write_log};
use sessile_runtime::order::{Mark, Node, Order};

const MAIN: usize = 0;
const SIDE: usize = 1;

/// A capture: nodes, where each stream stands, and marks.
struct Tape {
    nodes: Vec<Node>,
    stands: [Vec<u64>; 2],
    marks: Vec<(Mark, Vec<u64>)>,
}

impl Tape {
    fn new() -> Tape {
        Tape { nodes: Vec::new(), stands: [Vec::new(), Vec::new()], marks: Vec::new() }
    }

    fn work(&mut self, stream: usize) {
        let id = self.nodes.len() as u64;
        let after = std::mem::replace(&mut self.stands[stream], vec![id]);
        self.nodes.push(Node { id, after });
    }

    /// `to` waits for what `from` has.
    fn join(&mut self, from: usize, to: usize) {
        let more = self.stands[from].clone();
        self.stands[to].extend(more);
    }

    fn mark(&mut self, mark: Mark, stream: usize) {
        self.marks.push((mark, self.stands[stream].clone()));
    }

    fn order(self) -> Order {
        Order::captured(&self.nodes, &self.marks).unwrap().without_end().unwrap()
    }
}

/// How a runner is captured: with which events, and which of them left out.
#[derive(Default)]
struct Capture<'a> {
    events: Option<&'a Events>,
    without_waits: BTreeSet<usize>,
    without_records: BTreeSet<usize>,
    used_late: bool,
}

impl Capture<'_> {
    fn acquire(&self, tape: &mut Tape, id: RequestId, stream: usize) {
        for &event in self.events.map_or(&[][..], |events| events.waits(id)) {
            if !self.without_waits.contains(&event) {
                tape.work(stream);
                tape.mark(Mark::Wait(event), stream);
            }
        }
        tape.mark(Mark::Acquire(id), stream);
    }

    fn release(&self, tape: &mut Tape, id: RequestId, stream: usize) {
        tape.mark(Mark::Release(id), stream);
        let event = self.events.and_then(|events| events.record(id));
        if let Some(event) = event.filter(|event| !self.without_records.contains(event)) {
            tape.work(stream);
            tape.mark(Mark::Record(event), stream);
        }
    }

    /// Two buffers that are written on the main stream and read on the side stream, beside the next runner.
    fn backward(&self, ids: &[RequestId]) -> Order {
        let mut tape = Tape::new();
        for &id in ids {
            self.acquire(&mut tape, id, MAIN);
            tape.work(MAIN);
        }
        tape.join(MAIN, SIDE);
        tape.mark(Mark::Complete, MAIN);
        if self.events.is_some() {
            tape.work(MAIN);
        }
        for &id in ids {
            tape.work(SIDE);
            if self.events.is_some() {
                tape.mark(Mark::Use(id), SIDE);
            }
            self.release(&mut tape, id, SIDE);
            if self.used_late {
                tape.work(SIDE);
                tape.mark(Mark::Use(id), SIDE);
            }
        }
        tape.join(SIDE, MAIN);
        tape.mark(Mark::End, MAIN);
        tape.order()
    }
}

fn spec(weight: String, accumulates: bool) -> RequestSpec {
    RequestSpec {
        role: Role::WgradInput,
        dtype: DType::F32,
        shape: vec![100],
        unsharded_shape: vec![100],
        domain: Domain::Default,
        group: None,
        expert: None,
        accumulates_into: accumulates.then(|| weight.clone()),
        weight,
    }
}

/// Runners of two requests each.
fn trace(runners: u32) -> Trace {
    trace_of(runners, 2, false)
}

/// Those that add all add into the same gradients, one for each request of a runner.
fn trace_of(runners: u32, each: u32, adds: bool) -> Trace {
    let runner = |at: u32| {
        let ids: Vec<RequestId> = (0..each).map(|of| RequestId(each * at + of)).collect();
        let weight = |id: RequestId| format!("w{}", id.0 % each);
        let requests = ids.iter().map(|&id| Request { id, spec: spec(weight(id), adds) }).collect();
        Runner { name: format!("r{at}"), requests, points: Capture::default().backward(&ids).points() }
    };
    let trace = Trace {
        schema: Trace::SCHEMA.to_owned(),
        version: TRACE_VERSION,
        name: "lives".to_owned(),
        runners: (0..runners).map(runner).collect(),
        steps: vec![(0..runners).collect()],
        durations_ns: Vec::new(),
    };
    check_trace(&trace).unwrap();
    trace
}

fn ids(trace: &Trace, runner: usize) -> Vec<RequestId> {
    trace.runners[runner].requests.iter().map(|request| request.id).collect()
}

fn planned(trace: &Trace, step_cut: StepCut) -> (Plan, Events) {
    let options = PlanOptions {
        strategy: "sessile".parse().unwrap(),
        depth: 2,
        depth_by_group: BTreeMap::new(),
        step_cut,
        launch_order: LaunchOrder::Overlapped,
    };
    let plan = plan(trace, &options).unwrap();
    let all: Vec<Vec<RequestId>> = (0..trace.runners.len()).map(|at| ids(trace, at)).collect();
    let orders: Vec<Order> = all.iter().map(|ids| Capture::default().backward(ids)).collect();
    let proven: Vec<Proven<'_>> =
        all.iter().zip(&orders).map(|(requests, order)| Proven { requests, order: Some(order) }).collect();
    let events = Events::of(&plan.fences, &proven);
    (plan, events)
}

/// The log of three steps.
fn run(trace: &Trace, plan: &Plan, events: &Events, capture: &Capture<'_>, joins: bool) -> Log {
    let mut lives = Lives::new(0);
    lives.sealed(trace, plan, events.count);
    for at in 0..trace.runners.len() {
        lives.captured(trace, plan, at, &capture.backward(&ids(trace, at)), events);
    }
    let lane = |at: usize| 100 + at as u64;
    for _ in 0..3 {
        for at in 0..trace.runners.len() {
            lives.launched(at, 0, Some(lane(at)));
        }
        if joins {
            (0..trace.runners.len()).for_each(|at| lives.joined(at, lane(at), 0));
        }
    }
    if joins {
        lives.freed();
    }
    let log = lives.log();
    let mut text = Vec::new();
    write_log(&log, &mut text).unwrap();
    assert_eq!(read_log(&text).unwrap(), log);
    log
}

fn unordered(log: &Log) -> Vec<String> {
    let report = check(log);
    report
        .violations
        .iter()
        .map(|violation| match &violation.reason {
            Reason::Unordered { first, second, .. } => format!("{} / {}", first.label, second.label),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_program_with_all_its_fences_is_in_order() {
    let cuts = [(StepCut::Barrier, true), (StepCut::Wrap, false), (StepCut::Wrap, true)];
    let traces = [trace(5), trace_of(5, 2, true), trace_of(5, 1, true)];
    for ((cut, joins), trace) in traces.iter().flat_map(|trace| cuts.map(|cut| (cut, trace))) {
        let (plan, events) = planned(trace, cut);
        assert!(plan.bytes() < plan.views.iter().map(|view| view.bytes).sum::<u64>() && events.count > 0);
        let log = run(trace, &plan, &events, &Capture { events: Some(&events), ..Capture::default() }, joins);
        assert_eq!(check(&log).violations, []);
    }
}

#[test]
fn every_wait_and_every_record_is_missed_when_it_is_left_out() {
    let both = [StepCut::Barrier, StepCut::Wrap];
    // Of two additions, those of the second requests would order those of the first too.
    let traces = [trace(5), trace_of(5, 1, true)];
    for (cut, trace) in traces.iter().flat_map(|trace| both.map(|cut| (cut, trace))) {
        let (plan, events) = planned(trace, cut);
        for event in 0..events.count {
            let left_out = BTreeSet::from([event]);
            let all = Capture { events: Some(&events), ..Capture::default() };
            let waits = Capture { without_waits: left_out.clone(), ..all };
            let all = Capture { events: Some(&events), ..Capture::default() };
            let records = Capture { without_records: left_out, ..all };
            for capture in [waits, records] {
                let log = run(trace, &plan, &events, &capture, cut == StepCut::Barrier);
                assert!(!unordered(&log).is_empty(), "{cut:?}, event {event}");
            }
        }
    }
}

#[test]
fn without_the_join_between_steps_the_barriers_reuse_is_found() {
    let trace = trace(5);
    let (plan, events) = planned(&trace, StepCut::Barrier);
    let log = run(&trace, &plan, &events, &Capture { events: Some(&events), ..Capture::default() }, false);
    assert!(!unordered(&log).is_empty());
}

#[test]
fn two_requests_that_are_alive_at_once_on_the_same_bytes_are_found() {
    let trace = trace(2);
    let (mut plan, events) = planned(&trace, StepCut::Barrier);
    let (one, other) = (plan.views[0].offset, plan.views[1].offset);
    assert_ne!(one, other);
    plan.views[1].offset = one;
    let log = run(&trace, &plan, &events, &Capture { events: Some(&events), ..Capture::default() }, true);
    assert!(!unordered(&log).is_empty());
}

#[test]
fn a_use_after_the_release_is_found_once_the_bytes_are_somebody_elses() {
    let trace = trace(5);
    let (plan, events) = planned(&trace, StepCut::Barrier);
    let late = Capture { events: Some(&events), used_late: true, ..Capture::default() };
    let found = unordered(&run(&trace, &plan, &events, &late, true));
    assert!(found.iter().any(|pair| pair.contains("use of")), "{found:?}");
}

#[test]
fn a_plan_that_was_given_up_is_not_used_again() {
    let trace = trace(3);
    let (plan, events) = planned(&trace, StepCut::Barrier);
    let mut lives = Lives::new(3);
    for _ in 0..2 {
        lives.sealed(&trace, &plan, events.count);
        let capture = Capture { events: Some(&events), ..Capture::default() };
        for at in 0..trace.runners.len() {
            lives.captured(&trace, &plan, at, &capture.backward(&ids(&trace, at)), &events);
            lives.launched(at, 0, Some(7 + at as u64));
        }
        lives.freed();
        // Of no plan: nothing is logged.
        lives.launched(0, 0, None);
    }
    let log = lives.log();
    assert_eq!(check(&log).violations, []);
    assert_eq!(log.ranks[0].graphs.len(), 6);
}

#[test]
fn waits_and_records_keep_the_order_of_their_capture() {
    // The record is captured before the wait, and more marks come before it in the graph.
    let mut tape = Tape::new();
    let id = RequestId;
    tape.mark(Mark::Acquire(id(0)), MAIN);
    tape.work(MAIN);
    tape.mark(Mark::Acquire(id(1)), MAIN);
    tape.work(MAIN);
    tape.mark(Mark::Release(id(0)), MAIN);
    tape.work(MAIN);
    tape.mark(Mark::Record(0), MAIN);
    tape.work(SIDE);
    tape.mark(Mark::Wait(0), SIDE);
    tape.mark(Mark::Acquire(id(2)), SIDE);
    tape.join(SIDE, MAIN);
    tape.mark(Mark::End, MAIN);
    let nodes = tape.order().nodes();
    let at = |mark: Mark| nodes.iter().position(|(known, _)| *known == mark).unwrap();
    assert!(at(Mark::Record(0)) < at(Mark::Wait(0)));
    for (place, (_, before)) in nodes.iter().enumerate() {
        assert!(before.iter().all(|&earlier| earlier < place));
    }
}

#[test]
fn a_request_of_a_runner_before_lives_from_the_head_of_the_one_that_releases_it() {
    let mut first = Tape::new();
    first.mark(Mark::Acquire(RequestId(0)), MAIN);
    first.work(MAIN);
    first.mark(Mark::End, MAIN);
    let mut second = Tape::new();
    second.work(MAIN);
    second.mark(Mark::Release(RequestId(0)), MAIN);
    second.work(MAIN);
    second.mark(Mark::Acquire(RequestId(1)), MAIN);
    second.mark(Mark::End, MAIN);
    let orders = [first.order(), second.order()];
    let runner = |at: u32| Runner {
        name: format!("r{at}"),
        requests: vec![Request { id: RequestId(at), spec: spec(format!("w{at}"), false) }],
        points: orders[at as usize].points(),
    };
    let trace = Trace {
        schema: Trace::SCHEMA.to_owned(),
        version: TRACE_VERSION,
        name: "carried".to_owned(),
        runners: vec![runner(0), runner(1)],
        steps: vec![vec![0, 1]],
        durations_ns: Vec::new(),
    };
    let (plan, events) = {
        let options = PlanOptions {
            strategy: "sessile".parse().unwrap(),
            depth: 1,
            depth_by_group: BTreeMap::new(),
            step_cut: StepCut::Barrier,
            launch_order: LaunchOrder::Overlapped,
        };
        (plan(&trace, &options).unwrap(), Events::default())
    };
    let mut lives = Lives::new(0);
    lives.sealed(&trace, &plan, 0);
    for (at, order) in orders.iter().enumerate() {
        lives.captured(&trace, &plan, at, order, &events);
    }
    for _ in 0..2 {
        lives.launched(0, 0, None);
        lives.launched(1, 0, None);
    }
    let log = lives.log();
    assert_eq!(check(&log).violations, []);
    let lives_of = |graph: usize| {
        let nodes = &log.ranks[0].graphs[graph].nodes;
        nodes.iter().filter(|node| node.work == Work::Op("life".to_owned())).count()
    };
    assert_eq!((lives_of(0), lives_of(1)), (1, 2));
}
