//! Bad input: exit status 2, one clear message that names option or field, value and remedy, nothing left behind.

use serde_json::Value;

use crate::sandbox::{Ran, Sandbox, TRACE};

/// Checks what holds for all bad input, and that the message has these words.
#[track_caller]
fn refused(ran: &Ran, words: &[&str]) {
    assert_eq!(ran.code, 2, "{ran:?}");
    assert_eq!(ran.stdout, "", "{ran:?}");
    assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    assert_eq!(ran.stderr.matches("error:").count(), 1, "{ran:?}");
    assert!(ran.stderr.len() < 1500, "{ran:?}");
    for word in words {
        assert!(ran.stderr.contains(word), "`{word}` is not in {ran:?}");
    }
}

#[test]
fn options_of_train() {
    let sandbox = Sandbox::new();
    let cases: &[(&str, &[&str])] = &[
        ("--gtp 3 --ranks 4", &["--gtp", "3", "--ranks 4", "multiple"]),
        ("--ranks 0", &["--ranks", "0", "use 1 to"]),
        ("--gtp 0", &["--gtp", "0", "use 1 to"]),
        ("--layers 0", &["--layers", "0", "use 1 to"]),
        ("--hidden 0", &["--hidden", "0", "use 8 to"]),
        ("--ffn 0", &["--ffn", "0", "use 8 to"]),
        ("--heads 0", &["--heads", "0", "use 1 to"]),
        ("--heads 5", &["--heads", "5", "--hidden 96", "multiple"]),
        ("--seq 0", &["--seq", "0", "use 2 to"]),
        ("--batch 0", &["--batch", "0", "use 1 to"]),
        ("--steps 0", &["--steps", "0", "use 1 to"]),
        ("--microbatches 0", &["--microbatches", "0", "use 1 to"]),
        ("--microbatches-in-flight 2", &["--microbatches-in-flight", "2", "--microbatches"]),
        ("--depth 0", &["--depth", "0", "use 1 to"]),
        ("--learning-rate-micro 0", &["--learning-rate-micro", "0", "use 1 to"]),
        ("--ranks 1000000", &["--ranks", "1000000", "use 1 to 64"]),
        ("--hidden 18446744073709551615", &["--hidden", "18446744073709551615", "use 8 to"]),
        ("--hidden 18446744073709551616", &["--hidden", "18446744073709551616", "too large"]),
        ("--seq 8192 --batch 1024", &["--batch", "1024", "lower"]),
        ("--layers 256 --hidden 8192 --ffn 65536", &["--layers 256", "GiB", "lower"]),
        ("--layers 256 --hidden 64 --steps 1000000", &["--steps 1000000", "GiB", "checker"]),
        ("--steps 1", &["--steps", "discovery", "--steps 2 or more", "--mode eager"]),
        ("--seq 8192 --batch 200 --hidden 8 --ffn 8", &["--batch", "200", "256 elements", "lower"]),
        ("--ranks -4", &["--ranks", "-4", "use a whole number"]),
        ("--steps 1.5", &["--steps", "1.5", "use a whole number"]),
        ("--steps NaN", &["--steps", "NaN", "use a whole number"]),
        ("--seed x", &["--seed", "x", "use a whole number"]),
        ("--schedule-seed -1", &["--schedule-seed", "-1", "use a whole number"]),
        ("--schedule-order random", &["--schedule-seed"]),
        ("--schedule-seed 1 --schedule-order late", &["--schedule-order", "late", "writers-early"]),
        ("--device tpu", &["--device", "tpu", "host, cuda"]),
        ("--launch 2", &["--launch", "--device cuda", "--ranks"]),
        ("--share-gpus", &["--share-gpus", "--launch"]),
        ("--device cuda --schedule-seed 1", &["--schedule-seed", "--device host"]),
        ("--one-shot-sms 8 --reduce-scatter one_shot", &["--one-shot-sms", "--device cuda"]),
        ("--one-shot-sms few", &["few", "16, or all"]),
        ("--device cuda --one-shot-sms 8 --reduce-scatter ring", &["--one-shot-sms", "no one_shot"]),
        ("--mode fast", &["--mode", "fast", "eager, graphs, both"]),
        ("--graph-scope all", &["--graph-scope", "all", "module, layer"]),
        ("--graph-modules head", &["--graph-modules", "head", "attention, mlp"]),
        ("--strategy generations:0", &["--strategy", "generations:0", "N from 1 to 1024"]),
        ("--strategy ring", &["--strategy", "ring", "ring:N"]),
        ("--step-cut none", &["--step-cut", "none", "barrier, wrap"]),
        ("--overlap yes", &["--overlap", "yes", "on, off"]),
        ("--wgrad-dtype u32", &["--wgrad-dtype", "u32", "bf16, f32"]),
        ("--mode eager --timeline t.json", &["--timeline", "t.json", "--mode eager", "--mode both"]),
        ("--mode eager --trace-out t.json", &["--trace-out", "t.json", "--mode eager"]),
        ("--mode eager --log-out t.json", &["--log-out", "t.json", "--mode eager"]),
        ("--colour", &["--colour"]),
    ];
    for (options, words) in cases {
        refused(&sandbox.run(&format!("train {options}")), words);
    }
    assert_eq!(sandbox.names(), ["trace.json"]);
}

#[test]
fn options_of_bench_graphs() {
    let sandbox = Sandbox::new();
    let cases: &[(&str, &[&str])] = &[
        ("--gtp 3", &["--gtp", "3", "2 ranks", "multiple"]),
        ("--gtp 0", &["--gtp", "0"]),
        ("--ranks 4 --egtp 3", &["--egtp", "3", "4 ranks", "multiple"]),
        ("--ranks 0", &["--ranks", "0", "use 1 to 64"]),
        ("--layers 1", &["--layers", "1", "use 2 to"]),
        ("--hidden 4", &["--hidden", "4", "use 8 to"]),
        ("--tokens 0", &["--tokens", "0", "use 1 to"]),
        ("--hidden 8,16,24 --tokens 1,2", &["--tokens has 2", "--hidden 3"]),
        ("--rounds 0", &["--rounds", "0", "use 1 to"]),
        ("--reduce-scatter tree", &["--reduce-scatter", "tree", "ring, symmetric"]),
        ("--launch 2", &["--launch", "--device cuda"]),
        ("--launch 2 --share-gpus", &["--share-gpus", "take turns"]),
        ("--device cuda --one-shot-sms 8 --reduce-scatter ring", &["--one-shot-sms", "no one_shot"]),
        ("--contention NaN", &["--contention", "NaN", "from 0 to 1"]),
        ("--contention -0.1", &["--contention", "-0.1", "from 0 to 1"]),
        ("--contention 1.1", &["--contention", "1.1", "from 0 to 1"]),
        ("--contention inf", &["--contention", "inf", "from 0 to 1"]),
        ("--contention half", &["--contention", "half", "from 0 to 1"]),
        ("--json no/such/place.json", &["--json", "no/such/place.json"]),
    ];
    for (options, words) in cases {
        refused(&sandbox.run(&format!("bench graphs {options}")), words);
    }
    assert_eq!(sandbox.names(), ["trace.json"]);
}

#[test]
fn text_to_train_on() {
    let sandbox = Sandbox::new();
    sandbox.write("empty", "");
    sandbox.write("short", "x".repeat(65));
    sandbox.write("binary", b"\x7fELF\0\0");
    let before = sandbox.names();
    let cases: &[(&str, &[&str])] = &[
        ("--data missing", &["--data", "missing", "does not exist", "name a text file"]),
        ("--data .", &["--data", ".", "is a folder", "name a text file"]),
        ("--data empty", &["--data", "empty", "is empty"]),
        ("--data short", &["--data", "short", "65 bytes", "--seq 64", "at least 66"]),
        ("--data binary", &["--data", "binary", "NUL", "offset 4"]),
        ("--data /dev/zero", &["--data", "/dev/zero", "256 MiB"]),
    ];
    for (options, words) in cases {
        refused(&sandbox.run(&format!("train {options} --json run.json")), words);
    }
    assert_eq!(sandbox.names(), before);
}

#[test]
fn files_that_cannot_be_written_are_found_before_the_run() {
    let sandbox = Sandbox::new();
    sandbox.write("data", "x".repeat(200));
    let before = sandbox.names();
    for option in ["--json", "--trace-out", "--timeline", "--log-out"] {
        // A run of so many steps would take minutes.
        let run = |path: &str| sandbox.run(&format!("train --steps 3000 --data data {option} {path}"));
        refused(&run("missing/x.json"), &[option, "missing/x.json", "make the folder first"]);
        refused(&run("."), &[option, "is a folder"]);
        refused(&run("/proc/x.json"), &[option, "/proc/x.json", "cannot be written"]);
        refused(&run("data"), &[option, "data", "is the file that is read"]);
    }
    let twice = sandbox.run("train --json x.json --timeline ./x.json");
    refused(&twice, &["--timeline", "x.json", "is also the file of --json"]);
    assert_eq!(sandbox.names(), before);
}

#[test]
fn a_device_that_is_full_is_an_error_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run("plan trace.json --json /dev/full --out plan.json");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("--json /dev/full could not be written"), "{ran:?}");
    assert_eq!(sandbox.names(), ["trace.json"]);
}

#[test]
fn files_that_are_no_traces() {
    let sandbox = Sandbox::new();
    let cut = &TRACE[..TRACE.len() / 2];
    let with = |from: &str, to: &str| {
        assert!(TRACE.contains(from), "{from}");
        TRACE.replacen(from, to, 1)
    };
    let files: &[(&str, String, &[&str])] = &[
        ("empty", String::new(), &["line 1"]),
        ("text", "a, b, c".into(), &["line 1"]),
        ("cut", cut.into(), &["line"]),
        ("list", "[]".into(), &["sessile.trace"]),
        ("deep", "[".repeat(100_000), &["line 1"]),
        ("kind", with("sessile.trace", "sessile.plan"), &["schema", "sessile.plan", "sessile.trace"]),
        ("version", with("\"version\": 1", "\"version\": 99"), &["version", "99"]),
        ("negative", with(" 66,", " -66,"), &["-66"]),
        ("nan", with(" 66,", " NaN,"), &["line"]),
        ("float", with(" 66,", " 6.5,"), &["6.5"]),
        ("overflow", with(" 66,", " 18446744073709551615,"), &["18446744073709551615"]),
        ("twice", with("\"id\": 1,", "\"id\": 0,"), &["id", "0", "unique"]),
        ("launch", with("\"steps\": [\n  [\n   0", "\"steps\": [\n  [\n   9"), &["steps[0][0]", "9"]),
        ("unknown", with("\"steps\"", "\"stops\""), &["stops"]),
    ];
    for (name, text, words) in files {
        sandbox.write(name, text);
        for command in ["plan", "compare"] {
            let ran = sandbox.run(&format!("{command} {name} --json out.json"));
            refused(&ran, &[*words, &[*name]].concat());
        }
        refused(&sandbox.run(&format!("check {name} --json out.json")), &[name]);
    }
    assert!(!sandbox.names().contains(&"out.json".to_owned()));
}

#[test]
fn a_billion_requests_cost_neither_memory_nor_time() {
    let sandbox = Sandbox::new();
    let text =
        TRACE.replacen("\"steps\": [\n  [\n", &format!("\"steps\": [\n  [\n{}", "0,".repeat(3_000_000)), 1);
    sandbox.write("many", text);
    refused(&sandbox.run("plan many"), &["many", "1048576"]);
}

#[test]
fn files_that_check_does_not_know() {
    let sandbox = Sandbox::new();
    let files: &[(&str, &str, &[&str])] = &[
        ("plan", r#"{"schema": "sessile.plan", "version": 1}"#, &["schema", "sessile.plan", "sessile.run"]),
        ("other", r#"{"schema": "x"}"#, &["schema", "`x`", "sessile.trace", "sessile.run", "sessile.log"]),
        ("none", "{}", &["schema", "sessile.trace"]),
        ("number", r#"{"schema": 7}"#, &["schema", "sessile.trace"]),
        ("run", r#"{"schema": "sessile.run", "version": 1}"#, &["config", "train --json"]),
        ("later", r#"{"schema": "sessile.run", "version": 2}"#, &["version", "2", "reads version 1"]),
        ("log", r#"{"schema": "sessile.log", "version": 1}"#, &["ranks"]),
        ("newlog", r#"{"schema": "sessile.log", "version": 7}"#, &["version", "7"]),
    ];
    for (name, text, words) in files {
        sandbox.write(name, text);
        refused(&sandbox.run(&format!("check {name}")), words);
    }
    sandbox.write("escape", r#"{"schema": "x\u001b[2J\ny"}"#);
    refused(&sandbox.run("check escape"), &[r"x\u{1b}[2J\ny"]);
    let fifo = std::process::Command::new("mkfifo").arg(sandbox.path("fifo")).status().unwrap();
    assert!(fifo.success());
    for line in ["check fifo", "plan fifo", "compare fifo", "train --data fifo", "plan trace.json --out fifo"]
    {
        refused(&sandbox.run(line), &["fifo is a FIFO", "regular file"]);
    }
    refused(&sandbox.run("check missing"), &["missing", "does not exist", "sessile.trace"]);
    refused(&sandbox.run("check ."), &["is a folder"]);
}

#[test]
fn options_of_plan() {
    let sandbox = Sandbox::new();
    // Both weights of a runner have one shape: a ring of one cannot hold their gradients.
    let mut same: Value = serde_json::from_str(TRACE).unwrap();
    let requests = &mut same["runners"][0]["requests"];
    for field in ["shape", "unsharded_shape"] {
        requests[2][field] = requests[0][field].clone();
    }
    sandbox.write("same.json", same.to_string());
    let cases: &[(&str, &[&str])] = &[
        ("plan", &["<TRACE-OR-CSV>"]),
        ("compare", &["<TRACE>"]),
        ("check", &["<TRACE-OR-RUN>"]),
        ("plan trace.json --depth 0", &["depth", "0"]),
        ("plan trace.json --depth 4294967295", &["depth", "4294967295"]),
        ("plan trace.json --depth -1", &["--depth", "-1", "use a whole number"]),
        ("plan trace.json --depth-group nope=2", &["--depth-group nope=2", "name gtp0"]),
        ("check trace.json --depth-expert 1", &["--depth-group expert=1", "name gtp0"]),
        ("plan trace.json --strategy best", &["--strategy", "best", "sessile"]),
        ("plan same.json --strategy ring:1", &["same.json", "ring:1", "use ring:2"]),
        ("plan trace.json --out trace.json", &["--out", "trace.json", "is the file that is read"]),
        ("plan trace.json --json a --out a", &["--out", "is also the file of --json"]),
        ("plan missing", &["missing", "does not exist", "train --trace-out"]),
        ("compare trace.json missing --json c.json", &["missing", "does not exist"]),
    ];
    for (line, words) in cases {
        refused(&sandbox.run(line), words);
    }
    assert_eq!(sandbox.names(), ["same.json", "trace.json"]);
    assert_eq!(sandbox.read("trace.json"), TRACE);
}

#[test]
fn a_bench_without_gpus_says_what_it_needs() {
    let sandbox = Sandbox::new();
    refused(&sandbox.run("bench reduce-scatter --sizes 1000"), &["--sizes", "1000", "65536"]);
    refused(&sandbox.run("bench reduce-scatter --rounds 0"), &["--rounds", "1"]);
    refused(&sandbox.run("bench reduce-scatter --ranks 1"), &["--ranks 1", "2 to 16"]);
    refused(&sandbox.run("bench reduce-scatter --ranks 17"), &["--ranks 17", "2 to 16"]);
    refused(&sandbox.run("bench reduce-scatter --ranks 8 --gtp 3"), &["--gtp 3", "divides the 8 ranks"]);
    refused(&sandbox.run("bench reduce-scatter --gtp 1"), &["--gtp 1", "at least 2"]);
    let three = "bench reduce-scatter --ranks 6 --gtp 3 --sizes 196608,65536";
    refused(&sandbox.run(three), &["--sizes 65536", "3 ranks", "196608"]);
    for option in ["--json b.json", "--svg b.svg", "--rounds 3", "--python python3", "--no-torch"] {
        let name = option.split(' ').next().unwrap_or(option);
        refused(&sandbox.run(&format!("bench reduce-scatter --expected {option}")), &["--expected", name]);
    }
    for (line, gpus) in [("", "2 GPUs"), (" --ranks 8 --gtp 4", "8 GPUs")] {
        refused(&sandbox.run(&format!("bench reduce-scatter --json b.json{line}")), &[gpus, "--ranks"]);
    }
    assert!(!sandbox.path("b.json").exists());
}

#[test]
fn what_a_larger_group_should_take_is_told_without_gpus() {
    let told = Sandbox::new().run("bench reduce-scatter --expected --ranks 8 --sizes 67108864").good();
    assert!(told.contains("not measured") && told.contains("group of 8"), "{told}");
    // 108.9 us for two ranks of 64 MiB, 417.9 for 256 MiB, and 8 ranks receive what two do of 112 MiB.
    assert!(told.lines().any(|line| line.contains("one_shot") && line.contains("186.2")), "{told}");
}
