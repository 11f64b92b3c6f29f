//! The JSON Schemas and the reader agree: what is written is valid, what the schema rejects the reader rejects.

use serde_json::{Value, json};
use sessile_plan::{
    Domain, PLAN_SCHEMA, PlanOptions, PointKind, Role, TRACE_SCHEMA, Trace, plan, read_plan, read_trace,
    write_plan, write_trace,
};

use crate::support::{accumulating, backward, four, point, request, symmetric};

fn schema(text: &str) -> jsonschema::Validator {
    let schema: Value = serde_json::from_str(text).unwrap();
    jsonschema::meta::validate(&schema).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

/// A trace that uses every field and every kind of point.
fn rich() -> Trace {
    let mut trace = four();
    let mut full = accumulating(symmetric(request(10, 3), "dense"), "main_grad w");
    full.spec.role = Role::User("logits".into());
    full.spec.group = Some("dense".into());
    full.spec.expert = Some(3);
    let mut runner = backward("rich", vec![full]);
    runner.points.push(point(2, PointKind::Record(7)));
    runner.points.push(point(0, PointKind::Wait(7)));
    trace.steps[0].push(trace.runners.len() as u32);
    trace.runners.push(runner);
    trace.durations_ns = trace.runners.iter().map(|runner| vec![7; runner.points.len()]).collect();
    trace
}

#[test]
fn written_documents_validate_against_their_schemas() {
    let trace = rich();
    let json: Value = serde_json::from_str(&write_trace(&trace)).unwrap();
    let faults: Vec<String> =
        schema(TRACE_SCHEMA).iter_errors(&json).map(|error| error.to_string()).collect();
    assert_eq!(faults, Vec::<String>::new());
    for strategy in crate::support::strategies() {
        let Ok(plan) = plan(&trace, &PlanOptions { strategy, ..PlanOptions::default() }) else { continue };
        assert!(plan.arenas.iter().any(|arena| arena.domain == Domain::Symmetric("dense".into())));
        let json: Value = serde_json::from_str(&write_plan(&plan)).unwrap();
        let faults: Vec<String> =
            schema(PLAN_SCHEMA).iter_errors(&json).map(|error| error.to_string()).collect();
        assert_eq!(faults, Vec::<String>::new());
    }
}

/// Values that take the place of every value in a document, one at a time.
fn intruders() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(4_294_967_296_u64),
        json!(u64::MAX),
        json!(""),
        json!("x".repeat(300)),
        json!([]),
        json!([1, 2]),
        json!({}),
        json!({ "x": 1 }),
        json!({ "complete": null }),
        json!({ "bf16": null }),
        json!({ "acquire": 1, "release": 1 }),
        json!({ "symmetric": "" }),
        json!([0, "complete"]),
    ]
}

/// Calls `each` with every variant of a document in which one value is replaced, removed, or given a stranger.
fn mutate(document: &Value, each: &mut impl FnMut(&Value)) {
    let mut pointers = vec![String::new()];
    collect(document, "", &mut pointers);
    for pointer in pointers {
        for intruder in intruders() {
            let mut changed = document.clone();
            *changed.pointer_mut(&pointer).unwrap() = intruder;
            each(&changed);
        }
        let mut changed = document.clone();
        if let Some(Value::Object(fields)) = changed.pointer_mut(&pointer) {
            let names: Vec<String> = fields.keys().cloned().collect();
            fields.insert("stranger".into(), json!(1));
            each(&changed);
            for name in names {
                let mut changed = document.clone();
                let fields = changed.pointer_mut(&pointer).and_then(Value::as_object_mut).unwrap();
                fields.remove(&name);
                each(&changed);
            }
        }
    }
}

fn collect(value: &Value, at: &str, pointers: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, child)| (format!("{at}/{name}"), child)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(i, child)| (format!("{at}/{i}"), child)).collect()
        }
        _ => vec![],
    };
    for (pointer, child) in children {
        pointers.push(pointer.clone());
        collect(child, &pointer, pointers);
    }
}

#[test]
fn the_reader_rejects_every_trace_that_the_schema_rejects() {
    let schema = schema(TRACE_SCHEMA);
    let document: Value = serde_json::from_str(&write_trace(&rich())).unwrap();
    let (mut rejected, mut all) = (0, 0);
    mutate(&document, &mut |changed| {
        all += 1;
        if !schema.is_valid(changed) {
            rejected += 1;
            let read = read_trace(changed.to_string().as_bytes());
            assert!(read.is_err(), "the schema rejects and the reader takes {changed}");
        }
    });
    eprintln!("{all} changed traces, {rejected} rejected by the schema and the reader");
    assert!(rejected > 1000 && rejected < all);
}

#[test]
fn the_reader_rejects_every_plan_that_the_schema_rejects() {
    let schema = schema(PLAN_SCHEMA);
    let made = plan(&rich(), &PlanOptions::default()).unwrap();
    let document: Value = serde_json::from_str(&write_plan(&made)).unwrap();
    let (mut rejected, mut all) = (0, 0);
    mutate(&document, &mut |changed| {
        all += 1;
        if !schema.is_valid(changed) {
            rejected += 1;
            let read = read_plan(changed.to_string().as_bytes());
            assert!(read.is_err(), "the schema rejects and the reader takes {changed}");
        }
    });
    eprintln!("{all} changed plans, {rejected} rejected by the schema and the reader");
    assert!(rejected > 500 && rejected < all);
}

/// Fields that may be left out, and null for them.
#[test]
fn optional_fields_may_be_absent_or_null() {
    let mut document: Value = serde_json::from_str(&write_trace(&four())).unwrap();
    let request = document.pointer_mut("/runners/0/requests/0").unwrap();
    request["group"] = json!(null);
    request["expert"] = json!(null);
    document["runners"][0].as_object_mut().unwrap().remove("points");
    assert!(schema(TRACE_SCHEMA).is_valid(&document));
    let read = read_trace(document.to_string().as_bytes()).unwrap();
    assert_eq!(read.runners[0].points, []);
    assert_eq!(read.runners[0].requests, four().runners[0].requests);
}

#[test]
fn documents_with_white_space_and_any_field_order_are_read() {
    let document: Value = serde_json::from_str(&write_trace(&rich())).unwrap();
    assert_eq!(read_trace(serde_json::to_string_pretty(&document).unwrap().as_bytes()), Ok(rich()));
}

/// Whatever a plan lets share bytes lives one after the other in the file, too.
#[test]
fn a_plan_as_a_packing_file_has_no_overlap() {
    let mut rows_seen = 0;
    for depth in 1..=3 {
        for by_layer in [false, true] {
            let mut given = crate::models::quarter(by_layer);
            // Some runners once more, so that requests have several rows.
            let again: Vec<u32> = given.steps[0][4..9].to_vec();
            given.steps[0].extend(again);
            let made = sessile_plan::plan(&given, &sessile_plan::PlanOptions { depth, ..Default::default() })
                .unwrap();
            let text = sessile_plan::write_plan_csv(&given, &made);
            let read = sessile_plan::read_packing(&text).map(|blocks| blocks.len());
            assert_eq!(read, Ok(text.lines().count() - 1), "what was written is read");
            let mut lines = text.lines();
            assert_eq!(lines.next(), Some("id,lower,upper,size,alignment,offset,domain"));
            let rows: Vec<Vec<u64>> = lines
                .map(|line| {
                    let fields: Vec<&str> = line.split(',').collect();
                    assert_eq!((fields.len(), fields[6]), (7, "default"));
                    fields[1..6].iter().map(|field| field.parse().unwrap()).collect()
                })
                .collect();
            assert!(rows.len() > made.views.len());
            for (at, a) in rows.iter().enumerate() {
                assert!(a[0] < a[1] && a[4] % a[3] == 0);
                for b in &rows[at + 1..] {
                    let both_live = a[0] < b[1] && b[0] < a[1];
                    let share = a[4] < b[4] + b[2] && b[4] < a[4] + a[2];
                    assert!(!(both_live && share), "depth {depth}: {a:?} and {b:?}");
                }
            }
            rows_seen += rows.len();
        }
    }
    assert!(rows_seen > 4000);
}
