//! `simulate`: its documents, its agreement with `train`, what it refuses.

use serde_json::Value;

use crate::{sandbox::Sandbox, schema::validate};

const MODEL: &str = r#"
name = "small"
tokens = 512

[[groups]]
name = "dense"
size = 16

[[groups]]
name = "expert"
size = 4
stride = 16

[[layers]]
count = 3

[[layers.modules]]
name = "experts"
weights = [
  { name = "fc2", rows = 512, cols = 2048, group = "expert", experts = 2, tokens = 256 },
  { name = "fc1", rows = 2048, cols = 512, group = "expert", experts = 2, tokens = 256 },
]

[[layers.modules]]
name = "attention"
weights = [{ name = "proj", rows = 512, cols = 512 }, { name = "qkv", rows = 1536, cols = 512 }]
"#;

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("model.toml", MODEL);
    sandbox
}

fn document(sandbox: &Sandbox, name: &str) -> Value {
    serde_json::from_str(&sandbox.read(name)).unwrap()
}

#[test]
fn the_tables_of_a_simulation() {
    let sandbox = sandbox();
    let text = sandbox.run("simulate --model model.toml --ranks 64,128,4096 --depth-expert 1").good();
    insta::assert_snapshot!("simulate", text);
    let text = sandbox.run("simulate --model model.toml --depth auto --scope layer").good();
    insta::assert_snapshot!("simulate_auto", text);
}

#[test]
fn documents_are_what_the_schema_says_and_the_trace_is_planned_alike() {
    let sandbox = sandbox();
    let line = "simulate --model model.toml --depth auto --memory-limit 100000000 --json s.json --quiet \
                --trace-out t.json --timeline time.json";
    assert_eq!(sandbox.run(line).good(), "");
    validate(&sandbox.read("s.json"), "simulate.schema.json");
    sandbox.run("simulate --model proxy --json p.json -q").good();
    validate(&sandbox.read("p.json"), "simulate.schema.json");
    let simulated = document(&sandbox, "s.json");
    let mut line = format!("plan t.json --depth {} --json plan.json -q", simulated["options"]["depth"]);
    for (group, depth) in simulated["options"]["depth_by_group"].as_object().into_iter().flatten() {
        line += &format!(" --depth-group {group}={depth}");
    }
    sandbox.run(&line).good();
    let plan = document(&sandbox, "plan.json");
    assert_eq!(plan["digest"], simulated["runs"][0]["plan_digest"]);
    assert_eq!(plan["bytes"], simulated["runs"][0]["bytes"]);
    sandbox.run("check t.json -q").good();
    for (options, depth) in [
        ("--depth-group dense=1 --depth-expert 2", "depth dense 1, expert 2"),
        ("--depth 3 --depth-expert 1", "depth 3, expert 1"),
        ("--depth 1", "depth 1"),
    ] {
        let text = sandbox.run(&format!("plan t.json {options}")).good();
        let first = text.lines().next().unwrap_or_default();
        assert!(first.ends_with(&format!("strategy sessile, {depth}")), "{options}: {first}");
    }
    assert!(sandbox.read("time.json").contains("\"ph\""));
}

#[test]
fn train_and_simulate_write_the_same_trace_and_plan() {
    let sandbox = sandbox();
    sandbox
        .run("train --steps 2 --mode graphs --reduce-scatter auto --trace-out a.json --json run.json -q")
        .good();
    sandbox.run("simulate --model proxy --reduce-scatter auto --trace-out b.json --json s.json -q").good();
    let bare = |name: &str| {
        let mut trace = document(&sandbox, name);
        let durations = trace.as_object_mut().and_then(|trace| trace.remove("durations_ns"));
        assert!(durations.is_some_and(|durations| !durations.as_array().unwrap().is_empty()), "{name}");
        trace
    };
    assert_eq!(bare("a.json"), bare("b.json"), "all but the durations, which one measured and one modelled");
    sandbox.run("plan a.json --json plan.json -q").good();
    let (plan, simulated) = (document(&sandbox, "plan.json"), document(&sandbox, "s.json"));
    assert_eq!(plan["digest"], simulated["runs"][0]["plan_digest"]);
    assert_eq!(simulated["runs"][0]["ran"], 1, "one rank stood for all");
}

#[test]
fn simulations_are_equal_over_runs_and_folding() {
    let sandbox = sandbox();
    sandbox.run("simulate --model model.toml --json a.json -q").good();
    sandbox.run("simulate --model model.toml --json b.json -q").good();
    sandbox.run("simulate --model model.toml --fold off --json c.json -q").good();
    assert_eq!(sandbox.read("a.json"), sandbox.read("b.json"));
    let (folded, all) = (document(&sandbox, "a.json"), document(&sandbox, "c.json"));
    assert_eq!((&folded["runs"][0]["ran"], &all["runs"][0]["ran"]), (&1.into(), &64.into()));
    for field in ["plan_digest", "trace_digest", "bytes", "backward", "sync", "optimizer", "step_ns"] {
        assert_eq!(folded["runs"][0][field], all["runs"][0][field], "{field}");
    }
}

#[test]
fn bad_models_and_options_are_bad_input() {
    let sandbox = sandbox();
    sandbox.write("typo.toml", MODEL.replace("stride", "strid"));
    sandbox.write("twice.toml", MODEL.replace("\"fc1\"", "\"fc2\""));
    let cases = [
        ("simulate --model gpt", "nemotron4-340b"),
        ("simulate --model typo.toml", "line 11"),
        ("simulate --model twice.toml", "appears twice"),
        ("simulate --model model.toml --ranks 65", "multiple of 64"),
        ("simulate --model model.toml --depth 0", "--depth"),
        ("simulate --model model.toml --depth many", "auto"),
        ("simulate --model model.toml --memory-limit 5", "--depth auto"),
        ("simulate --model model.toml --depth auto --memory-limit 5", "in the way"),
        ("simulate --model model.toml --kind-set upstream --reduce-scatter one_shot", "one_shot"),
        ("simulate --model nemotron4-340b --mtp 1", "dsv3"),
        ("simulate --model model.toml --node-gbs 0", "above 0"),
        ("simulate --model model.toml --json model.toml", "is read"),
    ];
    for (line, expected) in cases {
        let ran = sandbox.run(line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{line}");
    }
}
