//! `check` on traces and event logs; saved runs are in `train`.

use crate::sandbox::Sandbox;

/// A log of one rank: two writes of the same bytes on two streams. `ordered`: an event lies between them.
fn log(ordered: bool) -> String {
    let access = r#"{"rank":0,"memory":1,"start":0,"end":64,"mode":"write"}"#;
    let write = |ticket: u32, stream: u32| {
        format!(
            r#"{{"enqueue":{{"ticket":{ticket},"stream":{stream},"work":{{"op":"fill"}},"label":"fill {stream}","accesses":[{access}]}}}}"#
        )
    };
    let event = |ticket: u32, stream: u32, work: &str| {
        format!(
            r#"{{"enqueue":{{"ticket":{ticket},"stream":{stream},"work":{{"{work}":0}},"label":"{work}","accesses":[]}}}}"#
        )
    };
    let mut entries = vec![write(1, 0)];
    if ordered {
        entries.extend([event(2, 0, "record"), event(3, 1, "wait")]);
    }
    entries.push(write(4, 1));
    format!(
        r#"{{"schema":"sessile.log","version":1,"ranks":[{{"rank":0,"streams":["main","side"],"comms":[],"memories":[{{"serial":1,"label":"arena","bytes":64,"arena":true}}],"graphs":[],"entries":[{}]}}]}}"#,
        entries.join(",")
    )
}

#[test]
fn a_trace_whose_plan_is_valid_is_good() {
    let sandbox = Sandbox::new();
    for strategy in ["sessile", "generations:2", "ring:2", "per-request"] {
        for depth in 1..=3 {
            let line = format!("check trace.json --strategy {strategy} --depth {depth} --step-cut wrap");
            sandbox.run(&line).good();
        }
    }
    insta::assert_snapshot!("check_trace", sandbox.run("check trace.json").good());
}

#[test]
fn an_ordered_log_is_good_and_an_unordered_one_is_bad() {
    let sandbox = Sandbox::new();
    sandbox.write("good.json", log(true));
    sandbox.write("bad.json", log(false));
    sandbox.run("check good.json").good();
    for (line, option) in
        [("check good.json --step-cut wrap", "--step-cut"), ("check --self-test --depth 3", "--depth")]
    {
        let ran = sandbox.run(line);
        assert!(ran.code == 2 && ran.stderr.contains(&format!("{option}: ")), "{line}: {ran:?}");
    }
    let ran = sandbox.run("check bad.json --json found.json");
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    insta::assert_snapshot!("check_bad_log", ran.stdout);
    assert!(sandbox.read("found.json").contains("\"good\": false"));
}
