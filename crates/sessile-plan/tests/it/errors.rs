//! The words of every error: field, values, remedy.

use sessile_plan::{
    PlanOptions, PointKind, RequestId, Runner, StepCut, Strategy, Trace, TraceError, check_trace, plan,
    read_plan, read_trace, write_plan, write_trace,
};

use crate::support::{backward, four, options, point, request, symmetric, trace};

/// Spoils a valid trace and returns what is said of it.
fn refused(spoil: impl FnOnce(&mut Trace)) -> TraceError {
    let mut trace = four();
    spoil(&mut trace);
    check_trace(&trace).expect_err("a spoiled trace must be refused")
}

fn refused_point(stream: u32, kind: PointKind) -> TraceError {
    refused(|trace| trace.runners[1].points.push(point(stream, kind)))
}

#[test]
fn every_fault_of_a_trace_is_named_with_its_remedy() {
    let long = "n".repeat(257);
    let faults: Vec<TraceError> = vec![
        refused(|trace| trace.schema = "sessile.plan".into()),
        refused(|trace| trace.version = 7),
        refused(|trace| trace.name = long.clone()),
        refused(|trace| trace.durations_ns = vec![vec![]]),
        refused(|trace| trace.durations_ns = vec![vec![0]; 4]),
        refused(|trace| {
            trace.durations_ns =
                trace.runners.iter().map(|runner| vec![u64::MAX; runner.points.len()]).collect();
        }),
        refused(|trace| trace.steps.clear()),
        refused(|trace| trace.steps.push(vec![])),
        refused(|trace| trace.steps[0].push(4)),
        refused(|trace| trace.steps[0].truncate(3)),
        refused(|trace| trace.runners[2].name = "r0".into()),
        refused(|trace| trace.runners[2].name.clear()),
        refused(|trace| trace.runners[2].requests[0].id = RequestId(0)),
        refused(|trace| trace.runners[2].requests[0].spec.weight = long.clone()),
        refused(|trace| trace.runners[2].requests[0].spec.group = Some(String::new())),
        refused(|trace| trace.runners[2].requests[0].spec.accumulates_into = Some(long.clone())),
        refused(|trace| trace.runners[2].requests[0].spec.shape = vec![3, 0]),
        refused(|trace| trace.runners[2].requests[0].spec.shape = vec![1; 9]),
        refused(|trace| trace.runners[2].requests[0].spec.shape = vec![1 << 40, 1 << 40]),
        refused(|trace| trace.runners[2].requests[0].spec.shape = vec![u64::MAX / 2]),
        refused(|trace| trace.runners[2].requests[0].spec.shape = vec![1 << 55]),
        refused_point(64, PointKind::Complete),
        refused_point(0, PointKind::Acquire(RequestId(9))),
        refused_point(0, PointKind::Acquire(RequestId(0))),
        refused_point(0, PointKind::Acquire(RequestId(1))),
        refused_point(0, PointKind::Release(RequestId(9))),
        refused_point(0, PointKind::Release(RequestId(1))),
        refused(|trace| {
            trace.runners[3].points.retain(|point| point.kind != PointKind::Release(RequestId(3)));
            trace.runners[1].points.push(point(0, PointKind::Release(RequestId(3))));
        }),
        refused(|trace| {
            let release = trace.runners[1].points.pop().unwrap();
            trace.runners[1].points.insert(0, release);
        }),
        refused_point(0, PointKind::Record(0)),
        refused_point(0, PointKind::Wait(5)),
        refused_point(0, PointKind::Collective(String::new())),
        refused_point(0, PointKind::Complete),
    ];
    let words: Vec<String> = faults.iter().map(|fault| fault.to_string().replace(&long, "n…n")).collect();
    insta::assert_snapshot!(words.join("\n"));
}

#[test]
fn counts_beyond_the_limits_are_refused() {
    let many =
        trace(vec![Runner { name: "r".into(), requests: vec![], points: vec![] }], vec![0; (1 << 20) + 1]);
    insta::assert_snapshot!(check_trace(&many).unwrap_err());
    // Few runners and many launches, but together too much to walk.
    let points = vec![point(0, PointKind::Collective("g".into())); 5000];
    let long = trace(vec![Runner { name: "r".into(), requests: vec![], points }], vec![0; 1000]);
    insta::assert_snapshot!(check_trace(&long).unwrap_err());
    let domains = (0..1025).map(|id| symmetric(request(id, 1), &format!("g{id}"))).collect();
    let wide = trace(vec![Runner { name: "r".into(), requests: domains, points: vec![] }], vec![0]);
    insta::assert_snapshot!(check_trace(&wide).unwrap_err());
}

#[test]
fn options_and_strategies_outside_their_range_are_refused() {
    let words: Vec<String> = [
        plan(&four(), &options(Strategy::Sessile, 0, StepCut::Barrier)),
        plan(&four(), &options(Strategy::Sessile, 1025, StepCut::Barrier)),
        plan(&four(), &options(Strategy::Generations(0), 2, StepCut::Barrier)),
        plan(&four(), &options(Strategy::Ring(2000), 2, StepCut::Barrier)),
        plan(
            &trace(vec![backward("big", vec![request(0, 1), request(1, 1)])], vec![0]),
            &PlanOptions { strategy: Strategy::Ring(1), ..PlanOptions::default() },
        ),
    ]
    .into_iter()
    .map(|refused| refused.unwrap_err().to_string())
    .chain(
        [
            "",
            "sesile",
            "generations",
            "generations:",
            "generations:0",
            "ring:1025",
            "ring:+2",
            "ring:02",
            "ring:-1",
        ]
        .map(|text| text.parse::<Strategy>().unwrap_err().to_string()),
    )
    .collect();
    insta::assert_snapshot!(words.join("\n"));
}

#[test]
fn strategies_read_back_as_they_are_written() {
    for strategy in crate::support::strategies() {
        assert_eq!(strategy.to_string().parse(), Ok(strategy));
    }
}

/// What is said of a trace document after one piece of text was replaced.
fn misread(from: &str, to: &str) -> String {
    let json = write_trace(&four());
    assert!(json.contains(from), "{from} is not in {json}");
    read_trace(json.replacen(from, to, 1).as_bytes()).expect_err("must be refused").to_string()
}

#[test]
fn every_fault_of_a_document_is_named_with_its_field() {
    let json = write_trace(&four());
    let mut words = vec![
        misread("sessile.trace", "sessile.plan"),
        misread("\"version\":1", "\"version\":2"),
        misread("\"version\":1", "\"version\":-1"),
        misread("\"version\":1", "\"version\":1e999"),
        misread("\"version\":1,", ""),
        misread("\"id\":0", "\"id\":-1"),
        misread("\"id\":0", "\"id\":NaN"),
        misread("\"id\":0", "\"id\":1.5"),
        misread("\"id\":0", "\"id\":5000000000"),
        misread("\"id\":1", "\"id\":0"),
        misread("\"id\":0", "\"id\":0,\"id\":1"),
        misread("\"id\":0", "\"id\":0,\"extra\":1"),
        misread("\"stream\":0", "\"stream\":0,\"extra\":1"),
        misread("[4,128]", "[4,-128]"),
        misread("[4,128]", "1000000000"),
        misread("[4,128]", "[1,1,1,1,1,1,1,1,1]"),
        misread("[4,128]", "[1000000000,1000000000]"),
        misread("\"bf16\"", "\"f64\""),
        misread("\"complete\"", "{\"complete\":null}"),
        misread("{\"stream\":0,\"kind\":\"complete\"}", "[0,\"complete\"]"),
        misread("\"steps\":[[0", "\"steps\":[[1000000000"),
        misread("\"requests\":[", "\"requests\":1000000000,\"points\":["),
    ];
    for (json, cut) in [(&json, 0), (&json, 1), (&json, 300), (&json, json.len() - 2)] {
        words.push(read_trace(&json.as_bytes()[..cut]).unwrap_err().to_string());
    }
    words.push(read_trace(format!("{json}x").as_bytes()).unwrap_err().to_string());
    words.push(read_trace(b"\xff\xfe{}").unwrap_err().to_string());
    words.push(read_trace(&vec![b' '; (64 << 20) + 1]).unwrap_err().to_string());
    insta::assert_snapshot!(words.join("\n"));
}

#[test]
fn a_plan_that_contradicts_itself_is_refused() {
    let json = write_plan(&plan(&four(), &PlanOptions::default()).unwrap());
    let words: Vec<String> = [
        ("sessile.plan", "sessile.trace"),
        ("\"version\":1", "\"version\":9"),
        ("\"depth\":2", "\"depth\":0"),
        ("\"depth\":2", "\"depth\":1"),
        ("\"strategy\":\"sessile\"", "\"strategy\":\"ring:0\""),
        ("\"trace_digest\":\"", "\"trace_digest\":\"xyz"),
        ("\"lower_bound_bytes\":1536", "\"lower_bound_bytes\":1792"),
        ("\"bytes\":1536", "\"bytes\":1536000000000000000"),
        ("\"request\":1", "\"request\":0"),
        ("\"arena\":0", "\"arena\":1"),
        ("\"offset\":1024", "\"offset\":1280"),
        ("\"offset\":1024", "\"offset\":1000"),
        ("\"offset\":1024", "\"offset\":18446744073709551360"),
        ("{\"release\":0,\"acquire\":2}", "{\"release\":1,\"acquire\":3}"),
        ("{\"release\":0,\"acquire\":2}", "{\"release\":0,\"acquire\":9}"),
    ]
    .map(|(from, to)| {
        assert!(json.contains(from), "{from} is not in {json}");
        read_plan(json.replacen(from, to, 1).as_bytes()).expect_err("must be refused").to_string()
    })
    .into();
    insta::assert_snapshot!(words.join("\n"));
}
