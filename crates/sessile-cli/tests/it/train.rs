//! Small runs from end to end.

use serde_json::Value;

use crate::{sandbox::Sandbox, schema::validate};

/// Seconds, not minutes.
const SMALL: &str = "train --layers 2 --hidden 16 --heads 2 --seq 8 --batch 1";

fn json(sandbox: &Sandbox, name: &str) -> Value {
    serde_json::from_str(&sandbox.read(name)).unwrap()
}

#[test]
fn the_tables_of_a_run() {
    let sandbox = Sandbox::new();
    // A text of its own, as the built-in one changes with the documentation; one thread, so that counts are fixed.
    sandbox.write("text", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    let table = sandbox.run(&format!("{SMALL} --data text --ranks 2 --steps 3 --schedule-seed 1")).good();
    // Losses depend on the instructions that a processor has.
    insta::with_settings!({ filters => vec![(r"\d\.\d{6}", "[loss]")] }, {
        insta::assert_snapshot!("train", table);
    });
}

#[test]
fn a_small_run_is_good_and_its_files_can_be_checked() {
    let sandbox = Sandbox::new();
    let line = format!(
        "{SMALL} --steps 4 --json run.json --trace-out t.json --timeline time.json --log-out log.json"
    );
    let table = sandbox.run(&line).good();
    for word in
        ["eager loss", "graphs loss", "lower bound", "per-request", "generations:2", "violations", "good:"]
    {
        assert!(table.contains(word), "`{word}` is not in\n{table}");
    }
    assert_eq!(sandbox.names(), ["log.json", "run.json", "t.json", "time.json", "trace.json"]);

    let text = sandbox.read("run.json");
    validate(&text, "run.schema.json");
    let run: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(run["equal_bits"], true);
    assert_eq!(run["steps"].as_array().unwrap().len(), 4);
    assert_eq!(run["checker"]["violations"], 0);
    assert_eq!(run["order_deviations"], 0);
    assert_eq!(run["config"]["hidden"], 16);
    assert_eq!(run["config"]["ffn"], 64);
    assert_eq!(run["config"]["depth"], 2);
    assert!(run["memory"]["arena_bytes"].as_u64().unwrap() > 0);
    assert_eq!(run["memory"]["arena_bytes"], run["memory"]["lower_bound_bytes"]);
    let timeline = json(&sandbox, "time.json");
    assert!(!timeline["traceEvents"].as_array().unwrap().is_empty());

    for file in ["run.json", "t.json", "log.json"] {
        sandbox.run(&format!("check {file}")).good();
    }
    sandbox.run("plan t.json").good();
    sandbox.run("compare t.json").good();
}

#[test]
fn a_saved_run_that_was_changed_is_found() {
    let sandbox = Sandbox::new();
    sandbox.run(&format!("{SMALL} --steps 2 --json run.json --quiet")).good();
    let good = json(&sandbox, "run.json");
    /// What must be found, and the change that brings it about.
    type Change = (&'static str, fn(&mut Value));
    let changes: [Change; 51] = [
        ("eager and graphs differ", |run| run["steps"][1]["graphs"]["main_grad_digest"] = "0".into()),
        ("`equal_bits`", |run| run["equal_bits"] = false.into()),
        ("`memory.arena_bytes`", |run| run["memory"]["arena_bytes"] = 1.into()),
        ("planning the trace again gives", |run| {
            let bytes = run["plan"]["arenas"][0]["bytes"].as_u64().unwrap();
            run["plan"]["arenas"][0]["bytes"] = (bytes + 256).into();
        }),
        ("4 steps, but `config.steps` is 2", |run| {
            let steps = run["steps"].as_array_mut().unwrap();
            steps.extend(steps.clone());
        }),
        ("0 steps, but `config.steps` is 2", |run| run["steps"] = Value::Array(Vec::new())),
        ("step 2 is numbered 7", |run| run["steps"][1]["step"] = 7.into()),
        ("step 2: `eager` is null", |run| run["steps"][1]["eager"] = Value::Null),
        ("step 1: `graphs` is null", |run| run["steps"][0]["graphs"] = Value::Null),
        ("step 1: `eager` is not null", |run| run["config"]["mode"] = "graphs".into()),
        ("`trace` is not null", |run| run["config"]["mode"] = "eager".into()),
        ("but no 64 hexadecimal digits", |run| {
            for name in ["eager", "graphs"] {
                run["steps"][1][name]["main_grad_digest"] = "z".repeat(64).into();
            }
        }),
        ("the loss of `eager` is not finite", |run| run["steps"][0]["eager"]["loss"] = Value::Null),
        ("`equal_bits` is null, but the steps say true", |run| run["equal_bits"] = Value::Null),
        ("`trace` is null", |run| run["trace"] = Value::Null),
        ("`plan` is null", |run| run["plan"] = Value::Null),
        ("`memory` is null", |run| run["memory"] = Value::Null),
        ("`fences` is null", |run| run["fences"] = Value::Null),
        ("`checker` is null", |run| run["checker"] = Value::Null),
        ("`replays` is null", |run| run["replays"] = Value::Null),
        ("`order_deviations` is null", |run| run["order_deviations"] = Value::Null),
        ("`overlap` is null", |run| run["overlap"] = Value::Null),
        ("`plan.options`", |run| run["config"]["depth"] = 3.into()),
        ("`plan.options`", |run| run["config"]["strategy"] = "per-request".into()),
        ("`plan.options`", |run| run["config"]["step_cut"] = "wrap".into()),
        ("`plan.options`", |run| run["config"]["overlap"] = "off".into()),
        ("`config`: --ranks = 0", |run| run["config"]["ranks"] = 0.into()),
        ("`memory.runners`", |run| run["memory"]["runners"] = 1.into()),
        ("`memory.requests`", |run| run["memory"]["requests"] = 1.into()),
        ("`memory.arenas`", |run| run["memory"]["arenas"] = Value::Array(Vec::new())),
        ("`memory.per_request_bytes`", |run| run["memory"]["per_request_bytes"] = 1.into()),
        ("`memory.ring2_bytes`", |run| run["memory"]["ring2_bytes"] = 1.into()),
        ("`memory.generations_bytes.1`", |run| run["memory"]["generations_bytes"]["1"] = 1.into()),
        ("`memory.generations_bytes.2`", |run| run["memory"]["generations_bytes"]["2"] = 1.into()),
        ("`memory.generations_bytes.3`", |run| run["memory"]["generations_bytes"]["3"] = 1.into()),
        ("`memory.lower_bound_bytes`", |run| run["memory"]["lower_bound_bytes"] = 1.into()),
        ("`fences` is 99", |run| run["fences"] = 99.into()),
        ("`replays` is 99", |run| run["replays"] = 99.into()),
        ("`checker.operations` is 0", |run| run["checker"]["operations"] = 0.into()),
        ("`overlap.sharing_arena`", |run| run["overlap"]["sharing_arena"] = 999_999.into()),
        ("`domains` is null", |run| run["domains"] = Value::Null),
        ("`domains` are not", |run| run["domains"][0]["bytes"] = 1.into()),
        ("`domains` are not", |run| run["domains"][0]["window"] = true.into()),
        ("`roles` is null", |run| run["roles"] = Value::Null),
        ("`roles` are not", |run| run["roles"]["wgrad_input"]["requests"] = 1.into()),
        ("`reduce_scatter` is not", |run| run["reduce_scatter"]["dense"] = "one_shot".into()),
        ("`reduce_scatter` is not", |run| run["reduce_scatter"]["expert"] = "ring".into()),
        ("`grad_ready`: 7 times eagerly", |run| run["grad_ready"]["eager"] = 7.into()),
        ("`grad_ready.eager` must be null", |run| run["grad_ready"]["eager"] = Value::Null),
        ("`grad_ready` is 0", |run| {
            run["grad_ready"] = serde_json::json!({ "eager": 0, "graphs": 0 });
        }),
        ("the run's own checker", |run| run["checker"]["violations"] = 3.into()),
    ];
    for (finding, change) in changes {
        let mut run = good.clone();
        change(&mut run);
        sandbox.write("changed.json", run.to_string());
        let ran = sandbox.run("check changed.json");
        assert_eq!(ran.code, 1, "{finding}: {ran:?}");
        assert!(ran.stdout.contains("BAD") && ran.stdout.contains(finding), "{finding}: {ran:?}");
        assert!(!ran.stdout.contains("Some("), "{finding}: {ran:?}");
    }
    let shapes: [Change; 6] = [
        ("`checker`", |run| drop(run.as_object_mut().unwrap().remove("checker"))),
        ("`lunches`", |run| run["lunches"] = 1.into()),
        ("`lunches`", |run| run["config"]["lunches"] = 1.into()),
        ("`lunches`", |run| run["steps"][0]["lunches"] = 1.into()),
        ("`lunches`", |run| run["memory"]["lunches"] = 1.into()),
        ("invalid type", |run| run["steps"][0]["eager"]["loss"] = "x".into()),
    ];
    for (words, change) in shapes {
        let mut run = good.clone();
        change(&mut run);
        sandbox.write("changed.json", run.to_string());
        let ran = sandbox.run("check changed.json");
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{words}: {ran:?}");
        assert!(ran.stderr.contains(words), "{words}: {ran:?}");
    }
}

#[test]
fn depths_that_were_chosen_are_told_checked_and_reported() {
    let sandbox = Sandbox::new();
    let line = "train --layers 4 --hidden 16 --heads 2 --seq 8 --batch 1 --experts 2 --steps 2 --mode graphs --depth auto";
    let text = sandbox.run(&format!("{line} --json run.json")).good();
    assert!(text.contains(", chosen from the durations of the discovery"), "{text}");
    assert!(text.contains("dense 1, expert 1") && text.contains("3 for all launches"), "{text}");
    sandbox.run("check run.json").good();
    let rows = json(&sandbox, "run.json")["auto"]["candidates"].clone();
    assert_eq!(rows.as_array().unwrap().len(), 12);

    // Only depth 1 of dense weights fits the fewest bytes: the choice cannot be the default, whatever was measured.
    let rows = rows.as_array().unwrap();
    let bytes = |row: &Value| row["bytes"].as_u64().unwrap();
    let least = rows.iter().map(bytes).min().unwrap();
    assert!(rows.iter().all(|row| row["depth"]["dense"] == 1 || bytes(row) > least));
    sandbox.run(&format!("{line} --memory-limit {least} --json least.json -q")).good();
    validate(&sandbox.read("least.json"), "run.schema.json");
    let least = json(&sandbox, "least.json");
    let rows = least["auto"]["candidates"].as_array().unwrap();
    let chosen: Vec<_> = rows.iter().filter(|row| row["chosen"] == true).collect();
    assert_eq!((chosen.len(), &chosen[0]["bytes"]), (1, &least["memory"]["arena_bytes"]));
    assert_eq!(chosen[0]["depth"]["dense"], 1);
    sandbox.run("check least.json").good();
    sandbox.run("report least.json -o r.html -q").good();
    let page = sandbox.read("r.html");
    let shown = format!("\"name\":{},\"bytes\":{}", chosen[0]["text"], chosen[0]["bytes"]);
    let (_, row) = page.split_once(&shown).expect("the row is on the page");
    assert!(row.split('}').next().unwrap().contains("\"shown\":true"), "{shown}");

    type Change = (&'static str, fn(&mut Value));
    let changes: [Change; 6] = [
        ("`plan.options` are not those of `config`", |run| run["config"]["strategy"] = "per-request".into()),
        ("`plan.options` are not those of `config`", |run| run["config"]["step_cut"] = "wrap".into()),
        ("`plan.options`: the trace chooses other depths", |run| {
            run["config"].as_object_mut().unwrap().remove("memory_limit");
            run["config"]["depth_by_group"] = serde_json::json!({ "dense": 3, "expert": 3 });
        }),
        ("`auto` is null", |run| run["auto"] = Value::Null),
        ("`auto` is not null", |run| drop(run["config"].as_object_mut().unwrap().remove("depth_auto"))),
        ("`auto` is not what the trace gives", |run| run["auto"]["candidates"][0]["exposed_ns"] = 1.into()),
    ];
    for (finding, change) in changes {
        let mut run = least.clone();
        change(&mut run);
        sandbox.write("changed.json", run.to_string());
        let ran = sandbox.run("check changed.json");
        assert!(ran.code == 1 && ran.stdout.contains(finding), "{finding}: {ran:?}");
    }

    for (line, words) in [
        ("check run.json --depth 3", "--depth: a saved run"),
        ("check run.json --strategy sessile", "--strategy: a saved run"),
        ("report run.json -o x.html --depth 2", "--depth: run.json holds its plan"),
        ("report run.json -o x.html --trace trace.json", "--trace is for a plan"),
    ] {
        let ran = sandbox.run(line);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{line}: {ran:?}");
        assert!(ran.stderr.contains(words), "{line}: {ran:?}");
    }
}

#[test]
fn the_last_line_says_how_many_steps_were_replayed() {
    let sandbox = Sandbox::new();
    let two = sandbox.run(&format!("{SMALL} --steps 2")).good();
    assert!(two.contains("equal to the bit in 2 steps, 1 replayed step, 0 violations"), "{two}");
    let one = sandbox.run(&format!("{SMALL} --steps 1 --mode eager")).good();
    assert!(one.contains("good: 1 step, nothing to compare"), "{one}");
}

#[test]
fn a_pipe_behind_stdout_is_written_into() {
    let sandbox = Sandbox::new();
    // Not /dev/stdout: nothing can be renamed within /proc, whatever happens.
    let ran = sandbox.run("compare trace.json --quiet --json /proc/self/fd/1");
    assert!(ran.stdout.starts_with('{') && ran.code == 0, "{ran:?}");
    assert_eq!(sandbox.names(), ["trace.json"]);
}

#[test]
fn what_an_eager_run_lacks_is_null() {
    let sandbox = Sandbox::new();
    sandbox.run(&format!("{SMALL} --steps 2 --mode eager --json run.json")).good();
    validate(&sandbox.read("run.json"), "run.schema.json");
    let run = json(&sandbox, "run.json");
    for field in ["equal_bits", "memory", "fences", "replays", "overlap", "checker", "auto", "trace", "plan"]
    {
        assert_eq!(run[field], Value::Null, "{field}");
    }
    assert_eq!(run["steps"][0]["graphs"], Value::Null);
    sandbox.run("check run.json").good();
}

#[test]
fn both_modes_alone_give_what_they_give_together() {
    let sandbox = Sandbox::new();
    for mode in ["eager", "graphs", "both"] {
        sandbox.run(&format!("{SMALL} --steps 4 --mode {mode} --json {mode}.json --quiet")).good();
    }
    let both = json(&sandbox, "both.json");
    for mode in ["eager", "graphs"] {
        let alone = json(&sandbox, &format!("{mode}.json"));
        for step in 0..4 {
            assert_eq!(alone["steps"][step][mode], both["steps"][step][mode], "{mode}, step {step}");
        }
    }
}

#[test]
fn a_schedule_runs_to_the_same_bits_as_threads() {
    let sandbox = Sandbox::new();
    let options = [
        "",
        "--schedule-seed 1",
        "--schedule-seed 2 --schedule-order writers-early",
        "--schedule-seed 3 --schedule-order readers-early",
    ];
    let mut first = None;
    for option in options {
        sandbox.run(&format!("{SMALL} --steps 4 {option} --json run.json --timeline t.json --quiet")).good();
        let steps = json(&sandbox, "run.json")["steps"].clone();
        assert_eq!(*first.get_or_insert_with(|| steps.clone()), steps, "{option}");
    }
}

#[test]
fn sizes_that_do_not_divide_run_with_padding() {
    let sandbox = Sandbox::new();
    let sizes = "--ranks 3 --gtp 3 --layers 1 --hidden 10 --heads 2 --ffn 25 --seq 5 --batch 1 --steps 2";
    sandbox.run(&format!("train {sizes}")).good();
}

#[test]
fn a_text_of_the_least_length_is_enough() {
    let sandbox = Sandbox::new();
    sandbox.write("text", "abcdefghij");
    sandbox.run(&format!("{SMALL} --steps 2 --data text")).good();
}

#[test]
fn quiet_leaves_stdout_and_stderr_empty() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&format!("{SMALL} --steps 2 --quiet"));
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (0, "", ""));
}

#[test]
fn a_strategy_that_cannot_hold_the_requests_is_bad_input() {
    let sandbox = Sandbox::new();
    let ran = sandbox
        .run(&format!("{SMALL} --steps 2 --ffn 48 --strategy ring:1 --graph-scope layer --json run.json"));
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
    assert!(ran.stderr.contains("--strategy") && ran.stderr.contains("ring:1"), "{ran:?}");
    assert_eq!(sandbox.names(), ["trace.json"]);
}
