//! Timelines are valid traces, and show what the log and the spans say.

use serde_json::{Value, json};
use sessile_hal::{Span, Ticket};
use sessile_runtime::log::Work;
use sessile_runtime::timeline::{Ticks, write_timeline};

use crate::build::{Rank, job, kernel, node, read, write};

fn span(ticket: u64, node: Option<u32>, begin: u64, end: u64) -> Span {
    Span { ticket: Ticket(ticket), node, begin, end }
}

/// An eager op, then runner A (gemm, reduce, record) on stream 0 and runner C (wait, gemm) on stream 1.
fn sample() -> (Rank, Vec<Span>) {
    let mut rank = Rank::new(0, 2);
    let reduce = Work::Collective { comm: 0, kind: "reduce_scatter".into() };
    let a = rank.graph(
        "A",
        vec![
            kernel("wgrad", &[write((0, 0), (0, 16))], &[]),
            node(reduce, "", &[read((0, 0), (0, 16)), write((0, 1), (0, 8))], &[0]),
            kernel("dgrad", &[], &[0]),
            node(Work::Record(3), "", &[], &[1]),
        ],
    );
    let c = rank.graph("C", vec![node(Work::Wait(3), "", &[], &[]), kernel("wgrad", &[], &[0])]);
    rank.op(0, "embed", &[write((0, 2), (0, 4))]);
    rank.launch(a, 0);
    rank.launch(c, 1);
    let spans = vec![
        span(1, None, 0, 1000),
        span(2, Some(0), 1000, 2500),
        span(2, Some(1), 2500, 6000),
        span(2, Some(2), 2500, 3000),
        span(2, Some(3), 6000, 6000),
        span(3, Some(0), 2000, 6000),
        span(3, Some(1), 6000, 7000),
        span(99, None, 0, 9),
        span(2, Some(99), 0, 9),
    ];
    (rank, spans)
}

fn events(ticks: Ticks) -> Vec<Value> {
    let (rank, spans) = sample();
    let mut out = Vec::new();
    write_timeline(&job(vec![rank]), &[&spans], ticks, &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

fn slices(events: &[Value]) -> Vec<(String, u64, f64, f64)> {
    let slices = events.iter().filter(|event| event["ph"] == "X");
    let text = |event: &Value| event["name"].as_str().unwrap().to_owned();
    slices
        .map(|e| (text(e), e["tid"].as_u64().unwrap(), e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
        .collect()
}

#[test]
fn slices_stand_on_their_lanes_and_a_graph_encloses_its_nodes() {
    let found = slices(&events(Ticks::Nanoseconds));
    // Threads: streams 0 and 1, A's lanes 2 and 3, C's lane 4.
    for expected in [
        ("embed", 0, 0.0, 1.0),
        ("A", 0, 1.0, 5.0),
        ("C", 1, 2.0, 5.0),
        ("wgrad", 2, 1.0, 1.5),
        ("reduce_scatter", 2, 2.5, 3.5),
        ("record", 2, 6.0, 0.0),
        ("dgrad", 3, 2.5, 0.5),
        ("wait", 4, 2.0, 4.0),
        ("wgrad", 4, 6.0, 1.0),
    ] {
        let (name, thread, begin, length) = expected;
        assert!(found.contains(&(name.to_owned(), thread, begin, length)), "{expected:?} in {found:?}");
    }
}

/// In ticks of a nanosecond, as viewers count: no two slices of a lane overlap in part.
fn assert_nested(events: &[Value]) {
    let ticks = |value: &Value| (value.as_f64().unwrap() * 1000.0).round() as u64;
    let slices = events.iter().filter(|event| event["ph"] == "X");
    let slices: Vec<_> = slices
        .map(|e| ((&e["pid"], &e["tid"]), ticks(&e["ts"]), ticks(&e["ts"]) + ticks(&e["dur"]), &e["name"]))
        .collect();
    for (at, one) in slices.iter().enumerate() {
        for two in slices[at + 1..].iter().filter(|two| two.0 == one.0) {
            let apart = one.2 <= two.1 || two.2 <= one.1;
            let nested = (one.1 <= two.1 && two.2 <= one.2) || (two.1 <= one.1 && one.2 <= two.2);
            assert!(apart || nested, "{one:?} {two:?}");
        }
    }
}

fn written(rank: Rank, spans: &[Span]) -> Vec<Value> {
    let mut out = Vec::new();
    write_timeline(&job(vec![rank]), &[spans], Ticks::Nanoseconds, &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn slices_of_one_lane_do_not_overlap_unless_one_encloses_the_other() {
    assert_nested(&events(Ticks::Nanoseconds));
    // Times of every kind: in no order, overlapping, far from zero.
    let mut random = fastrand::Rng::with_seed(5);
    let mut cut = 0;
    for round in 0..500 {
        let (rank, mut spans) = sample();
        for span in &mut spans {
            let base = [0, 1_000_000_000_000][round % 2];
            span.begin = base + random.u64(0..5000);
            span.end = span.begin + random.u64(0..3000);
        }
        let events = written(rank, &spans);
        assert_nested(&events);
        cut += events.iter().filter(|event| event["args"]["cut"].is_u64()).count();
    }
    assert!(cut > 100, "{cut}");
}

#[test]
fn a_slice_that_reaches_into_its_successor_is_cut_there() {
    let (rank, mut spans) = sample();
    // wgrad of A ends 7 ns after the reduce-scatter that follows it began.
    spans[1].end = 2507;
    let events = written(rank, &spans);
    assert!(slices(&events).contains(&("wgrad".to_owned(), 2, 1.0, 1.5)), "{events:?}");
    let cut: Vec<_> = events.iter().filter_map(|event| event["args"]["cut"].as_u64()).collect();
    assert_eq!(cut, [7]);
}

#[test]
fn steps_are_shown_as_microseconds() {
    assert!(slices(&events(Ticks::Steps)).contains(&("embed".to_owned(), 0, 0.0, 1000.0)));
}

#[test]
fn a_fence_is_an_arrow_from_the_record_to_the_wait() {
    let events = events(Ticks::Nanoseconds);
    let flows: Vec<_> = events.iter().filter(|event| event["cat"] == "fence").collect();
    assert_eq!(flows.len(), 2);
    assert_eq!((&flows[0]["ph"], &flows[1]["ph"], &flows[1]["bp"]), (&"s".into(), &"f".into(), &"e".into()));
    assert_eq!(flows[0]["id"], flows[1]["id"]);
    assert_eq!((flows[0]["tid"].as_u64(), flows[1]["tid"].as_u64()), (Some(2), Some(4)));
    assert_eq!((flows[0]["ts"].as_f64(), flows[1]["ts"].as_f64()), (Some(6.0), Some(6.0)));
}

#[test]
fn records_and_waits_without_spans_are_placed_by_what_they_follow() {
    let (rank, mut spans) = sample();
    // The record of A, and the wait of C.
    spans.retain(|span| !matches!((span.ticket.0, span.node), (2, Some(3)) | (3, Some(0))));
    let mut out = Vec::new();
    write_timeline(&job(vec![rank]), &[&spans], Ticks::Nanoseconds, &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let found = slices(events);
    // The record at the end of the reduce-scatter; the wait while that runs.
    for expected in [("record", 2, 6.0, 0.0), ("wait", 4, 2.5, 3.5), ("C", 1, 2.5, 4.5)] {
        let (name, thread, begin, length) = expected;
        assert!(found.contains(&(name.to_owned(), thread, begin, length)), "{expected:?} in {found:?}");
    }
    assert_eq!(events.iter().filter(|event| event["cat"] == "fence").count(), 2);
}

#[test]
fn arguments_tell_bytes_operands_and_group() {
    let events = events(Ticks::Nanoseconds);
    let reduce = events.iter().find(|event| event["name"] == "reduce_scatter").unwrap();
    let operands = ["read r0 m0 0..16", "write r0 m1 0..8"];
    assert_eq!(reduce["args"], json!({ "ticket": 2, "bytes": 24, "group": "world", "operands": operands }));
    let names: Vec<_> = events.iter().filter(|event| event["name"] == "thread_name").collect();
    let names: Vec<_> = names.iter().map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["s0", "s1", "A lane 0", "A lane 1", "C lane 0"]);
}

#[test]
fn a_run_without_spans_is_an_empty_trace() {
    let (rank, _) = sample();
    let mut out = Vec::new();
    write_timeline(&job(vec![rank]), &[&[]], Ticks::Nanoseconds, &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(trace["traceEvents"].as_array().map(Vec::len), Some(0));
}

#[test]
fn spans_that_make_no_sense_are_drawn_somehow() {
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..500 {
        let (rank, _) = sample();
        let mut number = || if random.bool() { random.u64(..) } else { random.u64(0..20) };
        let spans: Vec<Span> = (0..9)
            .map(|at| span(1 + at % 3, [None, Some(0), Some(3)][at as usize / 3], number(), number()))
            .collect();
        let mut out = Vec::new();
        write_timeline(&job(vec![rank]), &[&spans], Ticks::Nanoseconds, &mut out).unwrap();
        serde_json::from_slice::<Value>(&out).unwrap();
    }
}
