//! What `--json` writes is what the schemas say.

use std::{fs, path::Path};

use serde_json::Value;

use crate::sandbox::Sandbox;

/// Validates a document against a schema of this crate.
pub(crate) fn validate(document: &str, schema: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema").join(schema);
    let schema: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let document: Value = serde_json::from_str(document).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(&document).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

#[test]
fn documents_of_plan_compare_and_check() {
    let sandbox = Sandbox::new();
    sandbox.run("plan trace.json --json plan.json").good();
    validate(&sandbox.read("plan.json"), "plan-report.schema.json");
    sandbox.run("compare trace.json trace.json --json compare.json").good();
    validate(&sandbox.read("compare.json"), "compare.schema.json");
    let stack =
        "bench graphs --ranks 4 --gtp 4 --egtp 2 --layers 3 --hidden 24 --tokens 8 --steps 2 --rounds 2";
    sandbox
        .run(&format!("{stack} --reduce-scatter ring,symmetric,fp32_a2a,one_shot --json bench.json"))
        .good();
    validate(&sandbox.read("bench.json"), "bench-graphs.schema.json");
    sandbox.run("doctor --json doctor.json").good();
    validate(&sandbox.read("doctor.json"), "doctor.schema.json");
    sandbox.run("check trace.json --json check.json").good();
    validate(&sandbox.read("check.json"), "check.schema.json");
}
