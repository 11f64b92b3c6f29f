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

/// Registered inputs can't share with those of another group.
#[test]
fn what_one_shot_would_need_is_what_a_simulation_with_it_needs() {
    let sandbox = sandbox();
    for gathered in ["", "--with-gathered"] {
        let common = format!("simulate --model model.toml {gathered} -q");
        sandbox.run(&format!("{common} --trace-out t.json")).good();
        sandbox.run(&format!("{common} --reduce-scatter one_shot --json s.json")).good();
        let bytes = document(&sandbox, "s.json")["runs"][0]["bytes"].as_u64().unwrap();
        let text = sandbox.run("plan t.json --explain").good();
        let row = text.lines().find(|line| line.contains("every group reduced with one_shot")).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[words.len() - 2].replace(',', ""), bytes.to_string(), "{row}");
    }
}

/// Two weights a module, one ring of two: the next module waits for the last one's reduce-scatters.
#[test]
fn a_comparison_says_where_a_ring_reuses_nearer_than_the_depth() {
    let sandbox = Sandbox::new();
    let model = r#"
name = "pairs"
tokens = 512
groups = [{ name = "dense", size = 4 }]
[[layers]]
count = 12
[[layers.modules]]
name = "mlp"
weights = [{ name = "a", rows = 4096, cols = 1024 }, { name = "b", rows = 4096, cols = 1024 }]
"#;
    sandbox.write("pairs.toml", model);
    sandbox.run("simulate --model pairs.toml --reduce-scatter one_shot --trace-out t.json -q").good();
    let text = sandbox.run("compare t.json").good();
    assert!(text.contains("16,777,216") && text.contains("25,165,824"), "{text}");
    assert!(text.contains("ring:2 counts requests, not launches"), "{text}");
    assert!(!sandbox.run("compare trace.json").good().contains("counts requests"));
}

/// The same clock and the same graphs as the simulation has.
#[test]
fn a_plan_has_a_timeline_of_its_replay() {
    let sandbox = sandbox();
    sandbox.run("simulate --model model.toml --trace-out t.json -q").good();
    sandbox.run("plan t.json --timeline time.json --json plan.json -q").good();
    let (timeline, trace) = (document(&sandbox, "time.json"), document(&sandbox, "t.json"));
    let events = timeline["traceEvents"].as_array().unwrap();
    let names = |category: &str| -> Vec<&str> {
        let found = events.iter().filter(|event| event["cat"] == category);
        found.map(|event| event["name"].as_str().unwrap()).collect()
    };
    let runners = trace["runners"].as_array().unwrap();
    let launched: Vec<&str> = trace["steps"][0]
        .as_array()
        .unwrap()
        .iter()
        .map(|at| runners[at.as_u64().unwrap() as usize]["name"].as_str().unwrap())
        .collect();
    let mut graphs = names("graph");
    assert_eq!(graphs.len(), launched.len());
    graphs.sort_unstable();
    let mut expected = launched;
    expected.sort_unstable();
    assert_eq!(graphs, expected);
    assert!(names("op").iter().any(|name| name.ends_with("wgrad_input")), "kernels say what they write");
    let points = runners.iter().flat_map(|runner| runner["points"].as_array().unwrap());
    let collectives = points.filter(|point| point["kind"].get("collective").is_some()).count();
    assert_eq!(names("collective").len(), collectives);
    // A flow arrow begins at the record of a fence and ends at its wait.
    let fences = document(&sandbox, "plan.json")["fences"].as_u64().unwrap();
    let begun = events.iter().filter(|event| event["ph"] == "s").count() as u64;
    assert!(fences > 0 && begun >= fences, "{begun} arrows, {fences} fences");
    sandbox.run("plan t.json --timeline again.json -q").good();
    assert_eq!(sandbox.read("time.json"), sandbox.read("again.json"));
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
fn contention_is_told_and_exposes_more() {
    let sandbox = Sandbox::new();
    let told = |options: &str| {
        let text = sandbox.run(&format!("simulate --model nemotron4-quarter --json s.json {options}")).good();
        let left_out = text.contains("what collectives take from kernels beside them");
        (left_out, document(&sandbox, "s.json"))
    };
    let ((left_out, free), (is_in, contended)) = (told(""), told("--contention 0.25"));
    assert!(left_out && !is_in);
    assert_eq!(
        (&free["device"]["contention"], &contended["device"]["contention"]),
        (&0.0.into(), &0.25.into())
    );
    let backward = |document: &Value, field: &str| document["runs"][0]["backward"][field].as_u64().unwrap();
    assert_eq!(backward(&free, "compute_ns"), backward(&contended, "compute_ns"));
    assert!(backward(&free, "exposed_ns") < backward(&contended, "exposed_ns"));
    assert!(backward(&free, "total_ns") < backward(&contended, "total_ns"));
}

#[test]
fn bad_models_and_options_are_bad_input() {
    let sandbox = sandbox();
    sandbox.write("typo.toml", MODEL.replace("stride", "strid"));
    sandbox.write("twice.toml", MODEL.replace("\"fc1\"", "\"fc2\""));
    sandbox.write("empty.toml", "name = \"x\"\ntokens = 8\ngroups = []\nlayers = []\n");
    let one = &MODEL[MODEL.find("[[layers.modules]]\nname = \"attention\"").unwrap()..];
    let one = one.replace(", { name = \"qkv\", rows = 1536, cols = 512 }", "");
    let head = &MODEL[..MODEL.find("[[layers]]").unwrap()];
    sandbox.write("deep.toml", format!("{head}[[layers]]\ncount = 66000\n{one}"));
    let cases = [
        ("simulate --model gpt", "nemotron4-340b"),
        ("simulate --model typo.toml", "line 11"),
        ("simulate --model twice.toml", "twice.toml: weight `"),
        ("simulate --model empty.toml", "empty.toml: x: a model has one group or more"),
        ("simulate --model deep.toml", "--scope = module: small has 66000 of them"),
        ("simulate --model model.toml --ranks 65", "multiple of 64"),
        ("simulate --model model.toml --depth 0", "--depth"),
        ("simulate --model model.toml --depth many", "auto"),
        ("simulate --model model.toml --memory-limit 5", "--depth auto"),
        ("simulate --model model.toml --depth auto --memory-limit 5", "in the way"),
        ("simulate --model model.toml --kind-set upstream --reduce-scatter one_shot", "one_shot"),
        ("simulate --model nemotron4-340b --mtp 1", "dsv3"),
        ("simulate --model proxy --mtp 1", "proxy has neither"),
        ("simulate --model proxy --heads", "proxy has neither"),
        ("simulate --model model.toml --mtp 1", "model.toml has neither"),
        ("simulate --model dsv3 --mtp 17", "--mtp 17: use 0 to 16"),
        ("simulate --model dsv3 --mtp 4294967295", "--mtp 4294967295: use 0 to 16"),
        ("simulate --model model.toml --gemm-tflops 0", "--gemm-tflops = 0: use 1 to"),
        ("simulate --model model.toml --node-gbs 0", "--node-gbs = 0: use 1 to"),
        ("simulate --model model.toml --network-gbs 0", "--network-gbs = 0: use 1 to"),
        ("simulate --model model.toml --contention NaN", "from 0 to 1"),
        ("simulate --model model.toml --contention -1", "from 0 to 1"),
        ("simulate --model model.toml --contention 1.5", "from 0 to 1"),
        ("simulate --model model.toml --json model.toml", "is read"),
    ];
    for (line, expected) in cases {
        let ran = sandbox.run(line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{line}");
    }
}
