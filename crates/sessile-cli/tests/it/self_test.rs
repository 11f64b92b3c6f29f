//! `check --self-test`: the museum of faults.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::sandbox::Sandbox;

#[test]
fn every_known_fault_shows_without_its_rule_and_not_with_it() {
    let sandbox = Sandbox::new();
    let table = sandbox.run("check --self-test --json museum.json").good();
    let document: Value = serde_json::from_str(&sandbox.read("museum.json")).unwrap();
    let schema: Value = serde_json::from_str(include_str!("../../schema/self-test.schema.json")).unwrap();
    jsonschema::validate(&schema, &document).unwrap();
    let rows = document["rows"].as_array().unwrap();
    assert!(rows.len() >= 30, "{}", rows.len());
    let mut ids = BTreeSet::new();
    for row in rows {
        assert_eq!(row["ok"], true, "{row}");
        assert!(row["without"].as_str().unwrap().starts_with("wrong: "), "{row}");
        let id = row["id"].as_str().unwrap();
        assert!(ids.insert(id) && table.contains(id), "{id}");
    }
    assert_eq!(document["good"], true);
    let widest = table.lines().map(|line| line.chars().count()).max();
    assert!(widest.is_some_and(|columns| columns <= 100), "{widest:?}:\n{table}");
}

#[test]
fn a_self_test_takes_no_file_and_a_check_needs_one() {
    let sandbox = Sandbox::new();
    for (line, names) in [("check --self-test trace.json", "--self-test"), ("check", "<TRACE-OR-RUN>")] {
        let ran = sandbox.run(line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stdout.is_empty() && ran.stderr.contains(names), "{line}: {}", ran.stderr);
    }
}
